"""The client of one worker process: a `StageClient`."""

from __future__ import annotations

import functools
import itertools
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, final

import attrs
import msgspec
import trio
import zmq

from omni_trio.engines.codec import CodecError, decode, encode
from omni_trio.engines.process import ChildProcess, Launcher, LaunchFailed, describe_exit, open_service_nursery
from omni_trio.engines.zmq_trio import ZmqFrames, ZmqSocket, open_zmq_context
from omni_trio.errors import EngineDied, InvalidRequest, StageFailed, StartupFailed
from omni_trio.messages import StageOutput, StageRequest
from omni_trio.stages import ClientFactory, ClientStatistics, ReplicaContext

from ._wire import (
    Abort,
    Add,
    AddValue,
    Answer,
    Call,
    CallValue,
    FromWorker,
    Out,
    Ping,
    Ready,
    Shutdown,
    Started,
    StartFailed,
    ToWorker,
    envelope,
)

__all__ = ["WorkerClient", "open_worker_client", "worker_client_factory"]

_ENTRY: Final = "omni_trio.engines.worker._child:main"

_LAST_WORDS: Final = 1.0
"""Seconds that a killed process gets to be gone, for the sake of its exit code."""

_POLITE: Final = 0.3
"""Parts of `ReplicaContext.close_timeout` that the worker gets for an own end, and again after SIGTERM."""

_numbers = itertools.count()


@attrs.define(eq=False)
class _Call:
    """A call whose answer has not come yet."""

    answered: trio.Event = attrs.field(factory=trio.Event)
    answer: Answer | None = None
    value: Sequence[Any] = ()


@attrs.define(eq=False)
class _Live:
    """A request that the worker has, as far as we know."""

    open: bool
    """Whether it still takes input."""


@final
class WorkerClient:
    """One open worker process, as `omni_trio.stages.StageClient` says. Opened by a `worker_client_factory`."""

    def __init__(self, context: ReplicaContext, sock: ZmqSocket, child: ChildProcess) -> None:
        self._context = context
        self._socket = sock
        self._child = child
        self.started = False
        self._ready = trio.Event()
        """Set when it is known whether the worker came up."""
        self._start_error = ""
        self._verdict = ""
        """What the probe found, for `watch` to tell with the exit code."""
        self._death = ""
        """What happened, in words, once the worker is dead."""
        self._live: dict[str, _Live] = {}
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count(1)
        self._inbox: deque[StageOutput] = deque()
        self._arrived = trio.Event()
        """Set while `receive` has something to return or to raise."""
        self._running = 0
        self._waiting = 0
        self._heard = trio.Event()
        """Set, and replaced, at each message of the worker's."""
        self._last_heard = 0.0
        self._work = trio.Event()
        """Set while the worker owes us something."""
        self._rest = trio.Event()
        """Set while it does not."""
        self._rest.set()

    # -- the protocol

    def resolve_params(self, params: Any) -> Mapping[str, Any]:
        """Merge a caller's mapping over the stage's `sampling`."""
        if params is None:
            params = {}
        if not isinstance(params, Mapping):
            raise self._invalid(
                f"a stage of kind 'worker' takes its parameters as a mapping, not as {type(params).__name__}"
            )
        if not all(isinstance(key, str) for key in params):
            raise self._invalid("the names of a worker stage's parameters must be strings")
        merged = {**self._context.stage.sampling, **params}
        try:
            encode(merged)
        except CodecError as error:
            raise self._invalid(f"the parameters can not be sent to the worker: {error}") from error
        return MappingProxyType(merged)

    async def submit(self, request: StageRequest) -> None:
        """Send a new request to the worker."""
        await trio.lowlevel.checkpoint()
        self._check_alive(request.request_id)
        if request.request_id in self._live:
            raise self._invalid("the stage has a request of this id already", request.request_id)
        self._add(request, first=True)
        self._live[request.request_id] = _Live(open=not request.last)
        self._note_work()

    async def update(self, request: StageRequest) -> None:
        """Send more input of a request to the worker."""
        await trio.lowlevel.checkpoint()
        self._check_alive(request.request_id)
        live = self._live.get(request.request_id)
        if live is None:
            # By contract no error: the worker may have ended the request early, its last output crossing with this.
            return
        if not live.open:
            raise self._invalid("the request's last input has been handed over already", request.request_id)
        self._add(request, first=False)
        live.open = not request.last

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have the worker let go of requests, and wait until it says that it has."""
        await trio.lowlevel.checkpoint()
        self._check_alive()
        known = [request_id for request_id in request_ids if request_id in self._live]
        gone = set(request_ids)
        for request_id in known:
            del self._live[request_id]
        self._inbox = deque(output for output in self._inbox if output.request_id not in gone)
        self._note_inbox()
        if known:
            call_id = next(self._call_ids)
            await self._ask(Abort(call_id=call_id, request_ids=known), call_id)

    async def receive(self) -> Sequence[StageOutput]:
        """Return what has come, or wait for it."""
        await self._arrived.wait()
        if not self._inbox:
            raise self._died()
        outputs = tuple(self._inbox)
        self._inbox.clear()
        for output in outputs:
            if output.finished:
                self._live.pop(output.request_id, None)
        self._note_inbox()
        self._note_work()
        return outputs

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the `omni_trio.worker.Worker`, between two batches. Names with ``_`` are its own."""
        await trio.lowlevel.checkpoint()
        self._check_alive()
        try:
            value = encode(CallValue(args=list(args), kwargs=dict(kwargs or {})))
        except CodecError as error:
            raise self._failed(f"the arguments of {method!r} can not be sent to the worker: {error}") from error
        call_id = next(self._call_ids)
        answer, result = await self._ask(Call(call_id=call_id, method=method), call_id, value)
        if answer.error is not None:
            raise self._failed(f"calling {method!r} failed: {answer.error}")
        try:
            return decode(result)
        except CodecError as error:
            raise self._failed(f"the result of {method!r} can not be used here: {error}") from error

    def statistics(self) -> ClientStatistics:
        """Return what the worker last said, and its process id."""
        return ClientStatistics(running=self._running, waiting=self._waiting, pid=self._child.pid)

    # -- errors

    def _place(self) -> dict[str, Any]:
        context = self._context
        return {"stage": context.stage.name, "stage_id": context.stage_id, "replica_id": context.replica_id}

    def _invalid(self, message: str, request_id: str | None = None) -> InvalidRequest:
        return InvalidRequest(message, request_id=request_id, **self._place())

    def _failed(self, message: str) -> StageFailed:
        return StageFailed(message, **self._place())

    def _died(self, request_id: str | None = None) -> EngineDied:
        # A new one each time: an exception belongs to the task that raises it.
        return EngineDied(
            self._death,
            request_id=request_id,
            exit_code=self._child.returncode,
            log_tail=self._child.log_tail(),
            **self._place(),
        )

    def _check_alive(self, request_id: str | None = None) -> None:
        if self._death:
            raise self._died(request_id)

    # -- talking

    def _add(self, request: StageRequest, *, first: bool) -> None:
        try:
            value = encode(AddValue(input=request.input, params=dict(request.params or {})))
        except CodecError as error:
            raise self._invalid(f"the input can not be sent to the worker: {error}", request.request_id) from error
        message = Add(request_id=request.request_id, first=first, last=request.last, priority=request.priority)
        self._send(message, value)

    def _send(self, message: ToWorker, value: Sequence[Any] = ()) -> None:
        try:
            self._socket.send([envelope(message), *value])
        except trio.BrokenResourceError:
            # The process has just gone; its pidfd tells in a moment, and says more.
            return

    async def _ask(self, message: ToWorker, call_id: int, value: Sequence[Any] = ()) -> tuple[Answer, Sequence[Any]]:
        call = self._calls[call_id] = _Call()
        self._note_work()
        try:
            self._send(message, value)
            await call.answered.wait()
        finally:
            del self._calls[call_id]
            self._note_work()
        if call.answer is None:
            raise self._died()
        return call.answer, call.value

    def _note_work(self) -> None:
        """Tell the probe whether the worker owes us anything."""
        owes = bool(self._live or self._calls)
        if owes and not self._work.is_set():
            self._last_heard = trio.current_time()
            self._work.set()
            self._rest = trio.Event()
        elif not owes and not self._rest.is_set():
            self._rest.set()
            self._work = trio.Event()

    def _note_inbox(self) -> None:
        filled = bool(self._inbox or self._death)
        if filled:
            self._arrived.set()
        elif self._arrived.is_set():
            self._arrived = trio.Event()

    # -- the services

    async def pump(self) -> None:
        """Take the worker's messages. Run by one task."""
        while True:
            for frames in await self._socket.receive_batch():
                self._take(frames)
            heard, self._heard = self._heard, trio.Event()
            heard.set()
            self._last_heard = trio.current_time()
            self._note_inbox()
            self._note_work()

    def _take(self, frames: ZmqFrames) -> None:
        message = msgspec.msgpack.decode(frames[0].buffer, type=FromWorker)
        match message:
            case Out(request_id=request_id):
                self._running, self._waiting = message.running, message.waiting
                if request_id in self._live:
                    self._inbox.append(self._output(request_id, frames))
            case Answer(call_id=call_id):
                self._running, self._waiting = message.running, message.waiting
                if (call := self._calls.get(call_id)) is not None:
                    call.answer, call.value = message, [frame.buffer for frame in frames[1:]]
                    call.answered.set()
            case Started():
                self.started = True
                self._context.report("load")
            case Ready():
                self._ready.set()
            case StartFailed(message=text):
                self._start_error = text
                self._ready.set()

    def _output(self, request_id: str, frames: ZmqFrames) -> StageOutput:
        try:
            return decode([frame.buffer for frame in frames[1:]], type=StageOutput)
        except CodecError as error:
            # The worker goes on with it, unless told.
            self._send(Abort(call_id=0, request_ids=[request_id]))
            return StageOutput(
                request_id=request_id, error=f"the worker's output can not be used: {error}", finish_reason="error"
            )

    async def watch(self) -> None:
        """Notice the process's death. Run by one task."""
        returncode = await self._child.wait()
        self._die(self._verdict or f"the worker process {describe_exit(returncode)}")

    async def probe(self) -> None:
        """Notice a process that lives and does not answer. Run by one task, which sleeps while there is no work."""
        interval, patience = self._context.stage.probe_interval, self._context.stage.probe_timeout
        while not self._death:
            await self._work.wait()
            due = self._last_heard + interval
            if trio.current_time() < due:
                with trio.move_on_at(due):
                    await self._rest.wait()
                continue
            heard = self._heard
            self._send(Ping(call_id=0))
            with trio.move_on_after(patience) as waited:
                await heard.wait()
            if waited.cancelled_caught:
                self._verdict = (
                    f"the worker process no longer answers: nothing has come from it for {interval + patience:g} s "
                    "while it has work; it was killed. A computation that takes longer must yield in between, or "
                    "needs a longer probe_timeout"
                )
                self._child.signal(signal.SIGKILL)
                # `watch` tells it, with the exit code; unless the kernel does not get rid of the process.
                with trio.move_on_after(_LAST_WORDS):
                    await self._child.wait()
                self._die(self._verdict)

    def _die(self, what: str) -> None:
        if self._death:
            return
        self._death = what
        self._ready.set()
        self._live.clear()
        for call in self._calls.values():
            call.answered.set()
        self._note_inbox()

    # -- start and end

    async def start(self) -> None:
        """Wait until the worker takes requests."""
        await self._ready.wait()
        if self._start_error:
            raise self._start_failed(self._start_error)
        if self._death:
            raise self._start_failed(self._death)

    def _start_failed(self, message: str) -> StartupFailed:
        return StartupFailed(message, phase=self.phase, log_tail=self._child.log_tail(), **self._place())

    @property
    def phase(self) -> str:
        """What start-up has got to."""
        return "load" if self.started else "spawn"

    def timed_out(self) -> StartupFailed:
        """Make the error of a start that took too long."""
        limit = self._context.stage.start_timeout
        return self._start_failed(f"the worker did not come up within start_timeout ({limit:g} s)")

    async def end(self) -> None:
        """Ask the worker to end, then make it."""
        part = self._context.close_timeout * _POLITE
        polite = 0.0 if self._death else part
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.5 * part):
            if polite:
                self._send(Shutdown())
            await self._child.stop(terminate_after=polite, kill_after=polite)


@asynccontextmanager
async def open_worker_client(launcher: Launcher, context: ReplicaContext) -> AsyncIterator[WorkerClient]:
    """Start one replica's worker process and open its client.

    Raises:
        StartupFailed: the process did not start, the target did not load, or it took too long.
    """
    stage = context.stage
    place: dict[str, Any] = {"stage": stage.name, "stage_id": context.stage_id, "replica_id": context.replica_id}
    address = f"ipc://{launcher.directory}/w{next(_numbers)}"
    env = dict(stage.env)
    if devices := stage.device_group(context.replica_id):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    kwargs = {"address": address, "target": stage.target, "options": stage.options}
    deadline = trio.current_time() + stage.start_timeout
    async with open_zmq_context() as zmq_context, AsyncExitStack() as stack:
        sock = stack.enter_context(ZmqSocket(zmq_context, zmq.DEALER, bind=address))
        context.report("spawn")
        try:
            with trio.CancelScope(deadline=deadline) as scope:
                name = f"{stage.name}-{context.replica_id}"
                child = await stack.enter_async_context(launcher.open_child(name, _ENTRY, kwargs, env=env))
        except LaunchFailed as error:
            raise StartupFailed(str(error), phase="spawn", log_tail=error.log_tail, **place) from error
        except TypeError as error:
            raise StartupFailed(f"the stage's options can not be used: {error}", phase="spawn", **place) from error
        if scope.cancelled_caught:
            limit = stage.start_timeout
            raise StartupFailed(
                f"no process could be started within start_timeout ({limit:g} s)", phase="spawn", **place
            )
        services = await stack.enter_async_context(open_service_nursery())
        client = WorkerClient(context, sock, child)
        services.start_soon(client.pump)
        services.start_soon(client.watch)
        with trio.CancelScope(deadline=deadline) as scope:
            await client.start()
        if scope.cancelled_caught:
            raise client.timed_out()
        services.start_soon(client.probe)
        context.report("ready")
        try:
            yield client
        finally:
            await client.end()


def worker_client_factory(launcher: Launcher) -> ClientFactory:
    """Return what opens the replicas of worker stages, each in a process of its own, by this launcher."""
    return functools.partial(open_worker_client, launcher)
