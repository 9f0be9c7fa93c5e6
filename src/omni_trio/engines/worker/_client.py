"""The client of one worker process: a `StageClient`."""

from __future__ import annotations

import functools
import itertools
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, final

import attrs
import msgspec
import trio
import zmq

from omni_trio.engines.codec import CodecError, decode, encode
from omni_trio.engines.probe import Probe
from omni_trio.engines.process import ChildProcess, Launcher, LaunchFailed, describe_exit, open_service_nursery
from omni_trio.engines.zmq_trio import SharedZmqContext, ZmqFrames, ZmqSocket
from omni_trio.errors import ConfigError, EngineDied, InvalidRequest, StageFailed, StartupFailed
from omni_trio.messages import StageOutput, StageRequest
from omni_trio.stages import ClientFactory, ClientStatistics, ReplicaContext

from ._params import find_fault, merge_params
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

__all__ = ["WorkerClient", "worker_client_factory"]

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
        self._probe = Probe(context.stage.probe_interval, context.stage.probe_timeout)

    # -- the protocol

    def resolve_params(self, params: Any) -> Mapping[str, Any]:
        """Merge a caller's mapping over the stage's `sampling`, and check the words that have a meaning."""
        try:
            return merge_params(self._context.stage, params)
        except ValueError as error:
            raise self._invalid(str(error)) from error

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
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._live]
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
        while not self._inbox:
            # Dead, or an abort has taken what had come before this task had its turn.
            self._check_alive()
            await self._arrived.wait()
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
        if (fault := find_fault(self._context.stage, request.input)) is not None:
            raise self._invalid(fault, request.request_id)
        # An update's are not looked at: a request keeps those that it came with.
        params = self.resolve_params(request.params) if first and request.params is None else request.params or {}
        try:
            value = encode(AddValue(input=request.input, params=params, kv_senders=request.kv_senders))
        except CodecError as error:
            raise self._invalid(f"the input can not be sent to the worker: {error}", request.request_id) from error
        message = Add(
            request_id=request.request_id,
            first=first,
            last=request.last,
            segment_end=request.segment_end,
            priority=request.priority,
        )
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
        self._probe.work(busy=bool(self._live or self._calls))

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
            self._probe.hear()
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
        await self._probe.until_mute(self._ping)
        self._verdict = (
            f"the worker process no longer answers: nothing has come from it for {self._probe.patience:g} s "
            "while it has work; it was killed. A computation that takes longer must yield in between, or "
            "needs a longer probe_timeout"
        )
        self._child.signal(signal.SIGKILL)
        # `watch` tells it, with the exit code; unless the kernel does not get rid of the process.
        with trio.move_on_after(_LAST_WORDS):
            await self._child.wait()
        self._die(self._verdict)

    async def _ping(self) -> None:
        call_id = next(self._call_ids)
        with suppress(EngineDied):  # which others are told
            await self._ask(Ping(call_id=call_id), call_id)

    def _die(self, what: str) -> None:
        if self._death:
            return
        self._death = what
        self._ready.set()
        self._live.clear()
        for call in self._calls.values():
            call.answered.set()
        self._probe.work(busy=False)
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


def worker_client_factory(launcher: Launcher) -> ClientFactory:
    """Return what opens the replicas of worker and diffusion stages, each in a process of its own.

    Args:
        launcher: starts the processes, and owns the directory of their sockets. It must stay open longer than
            every client.

    Returns:
        A factory. Entering what it returns raises `StartupFailed`: the stage's own parameters can not be used, the
        process did not start, the target did not load, or it took too long.
    """
    return functools.partial(_open, launcher, SharedZmqContext())


@asynccontextmanager
async def _open(
    launcher: Launcher, zmq_shared: SharedZmqContext, context: ReplicaContext
) -> AsyncIterator[WorkerClient]:
    stage = context.stage
    place: dict[str, Any] = {"stage": stage.name, "stage_id": context.stage_id, "replica_id": context.replica_id}
    try:
        merge_params(stage, None)
    except ValueError as error:
        wrong = ConfigError(str(error), key=f"stages.{stage.name}.sampling")
        raise StartupFailed(str(wrong), phase="config", **place) from wrong
    address = f"ipc://{launcher.directory}/w{next(_numbers)}"
    env = dict(stage.env)
    if devices := stage.device_group(context.replica_id):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    kwargs = {"address": address, "target": stage.target, "options": stage.options, "path": list(stage.path)}
    deadline = trio.current_time() + stage.start_timeout
    async with zmq_shared.open() as zmq_context, AsyncExitStack() as stack:
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
