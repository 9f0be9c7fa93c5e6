"""The client of one running vLLM engine core: its protocol spoken natively from trio.

Nothing in here polls, and no engine has a thread on this side. What an engine sends is taken by one task, in one
synchronous pass per engine step; requests, aborts and calls are sent without waiting.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import trio

from omni_trio.engines.probe import Probe
from omni_trio.engines.process import ChildProcess, describe_exit
from omni_trio.errors import EngineDied, InvalidRequest, StageFailed
from omni_trio.messages import StageOutput, StageRequest
from omni_trio.pipeline import StageSpec
from omni_trio.stages import ClientStatistics, ReplicaContext

from . import _compat
from ._inputs import Rendering, plan_rendering
from ._outputs import Leg, failed, from_core_output, from_pooling_output, from_request_output
from ._params import ParameterResolver, needs_detokenizer
from ._text import describe
from ._wire import ABORT, ADD, DEAD, UTILITY, Wire

__all__ = ["VllmClient", "connect"]

_GRACE: Final = 2.0
"""Seconds that an engine gets, after SIGTERM, to end by itself; it needs 0.9."""

_LAST_WORDS: Final = 0.5
"""Seconds that an engine that is lost gets to end, for the sake of its exit code and log."""

_THREADS: Final = 2
"""Worker threads that one client renders prompts in; vLLM keeps as many copies of the tokenizer."""

_MUTING: Final = frozenset(("get_model", "get_kv_cache_spec"))
"""Worker methods whose results vLLM's encoder can not encode: its output thread dies, and the engine is mute."""

_NO_ID: Final = 0
"""The id of the one call that is made before there is a client."""


async def connect(
    context: ReplicaContext, frontend: _compat.Frontend, wire: Wire, child: ChildProcess, ready: Mapping[str, Any]
) -> VllmClient:
    """Make the client of an engine that has just become ready; asks it what it can do."""
    frontend.adopt(ready)
    tasks: list[str] = []

    def take(frames: Sequence[Any]) -> bool:
        answer = _compat.decode_outputs(frames).utility_output
        if answer is None or answer.call_id != _NO_ID:
            return True
        tasks.extend(answer.result.result)
        return False

    wire.send(UTILITY, _compat.encode((0, _NO_ID, "get_supported_tasks", ())))
    await wire.receive(take)
    return VllmClient(context, frontend, wire, child, tuple(tasks))


@attrs.define(eq=False)
class _Call:
    """A call whose answer is awaited."""

    answered: trio.Event = attrs.field(factory=trio.Event)
    result: Any = None
    failure: str | None = None


@attrs.frozen
class _Death:
    message: str
    exit_code: int | None
    log_tail: str


@final
class VllmClient:
    """A `StageClient`. Made by the factory that `vllm_client_factory` returns."""

    def __init__(
        self,
        context: ReplicaContext,
        frontend: _compat.Frontend,
        wire: Wire,
        child: ChildProcess,
        tasks: tuple[str, ...],
    ) -> None:
        self._context = context
        self._stage: StageSpec = context.stage
        self._frontend = frontend
        self._wire = wire
        self._child = child
        self._tasks = tasks
        self._pooling = self._stage.kind == "pooling"
        self._resolver = ParameterResolver(
            "pooling" if self._pooling else "llm",
            stage=self._stage.name,
            stage_id=context.stage_id,
            defaults=self._stage.sampling,
            tasks=tasks,
            validate=lambda params: _compat.validate_params(frontend, params, tasks),
        )
        self._processor = _compat.new_output_processor(frontend)
        self._requests: dict[str, Leg] = {}
        self._aborting: set[str] = set()
        self._ready: list[StageOutput] = []
        self._wake: trio.Event | None = None
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count(_NO_ID + 1)
        self._in_order = trio.Lock()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._stats: Any = None
        self._prefix_queries = self._prefix_hits = 0
        self._probe = Probe(self._stage.probe_interval, self._stage.probe_timeout)
        self._death: _Death | None = None
        self._serving = trio.CancelScope()

    # -- StageClient

    def resolve_params(self, params: Any) -> Any:
        """See `StageClient.resolve_params`; takes mappings, SamplingParams (llm) and PoolingParams (pooling)."""
        return self._resolver.resolve(params)

    async def submit(self, request: StageRequest) -> None:
        """See `StageClient.submit`."""
        self._check_alive()
        if not request.last:
            raise self._invalid("the stage takes its input as a whole: send it with last=True")
        if request.request_id in self._requests:
            raise self._invalid(f"a request with the id {request.request_id!r} is at work already")
        try:
            rendering = plan_rendering(self._stage, request.input)
        except ValueError as error:
            raise self._invalid(str(error)) from error
        if rendering.in_order:
            async with self._in_order:
                await self._render_and_send(request, rendering)
        else:
            await self._render_and_send(request, rendering)

    async def update(self, request: StageRequest) -> None:
        """See `StageClient.update`: these stages take no updates."""
        await trio.lowlevel.checkpoint()
        raise self._invalid("the stage takes its input as a whole and no updates", request_id=request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `StageClient.abort`. Takes effect even where the wait for the acknowledgement is cancelled."""
        self._check_alive()
        ids = set(request_ids)
        self._ready = [output for output in self._ready if output.request_id not in ids]
        known = [request_id for request_id in request_ids if request_id in self._requests]
        if known:
            self._let_go(known)
            self._aborting.update(known)
        elif ids.isdisjoint(self._aborting):
            await trio.lowlevel.checkpoint()
            return
        try:
            # The engine takes what it is sent in order: an answer to this, of any kind, proves the abort taken.
            await self._ask("is_sleeping")
        finally:
            self._aborting.difference_update(known)

    async def receive(self) -> Sequence[StageOutput]:
        """See `StageClient.receive`."""
        if self._ready:
            await trio.lowlevel.checkpoint()
        while not self._ready:
            self._check_alive()
            self._wake = trio.Event()
            await self._wake.wait()
        outputs, self._ready = self._ready, []
        return outputs

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of every worker of the engine, or of the engine core itself.

        A call that takes longer than the stage's `probe_interval` and `probe_timeout` together, while requests
        are at work, looks like an engine that no longer answers.

        Args:
            method: a worker's method (``check_health``), or an engine core's after ``engine.``
                (``engine.reset_prefix_cache``).
            args: positional arguments: plain data, arrays, tensors.
            kwargs: keyword arguments; workers' methods only.

        Returns:
            A list with one result per worker; for ``engine.`` the result itself.

        Raises:
            StageFailed: the method raised, there is none, or its result can not be sent.
            EngineDied: the engine is dead, or died before it answered.
        """
        self._check_alive()
        if method.startswith("engine."):
            name, arguments = method.removeprefix("engine."), tuple(args)
            if kwargs:
                raise self._call_failed(method, "methods of the engine core take positional arguments only")
            worker_method = arguments[0] if name == "collective_rpc" and arguments else None
        else:
            name, arguments = "collective_rpc", (method, None, tuple(args), dict(kwargs or {}))
            worker_method = method
        if name.startswith("_"):
            raise self._call_failed(method, "methods whose names begin with '_' are not to be called")
        if worker_method in _MUTING:
            raise self._call_failed(
                method, "its result can not be sent between processes, and an engine that tries never speaks again"
            )
        answer = await self._ask(name, *arguments)
        if answer.failure is not None:
            raise self._call_failed(method, answer.failure)
        return answer.result

    def statistics(self) -> ClientStatistics:
        """See `StageClient.statistics`; `extra` has the scheduler's own counts and the caches' state."""
        in_flight = len(self._requests)
        stats = self._stats
        if stats is None:
            running = 0 if not in_flight else -1
            return ClientStatistics(running=running, waiting=running, pid=self._child.pid)
        # The newest figures are those of the last step, which may have been before an abort or an arrival.
        running = min(stats.num_running_reqs, in_flight)
        return ClientStatistics(
            running=running,
            waiting=in_flight - running,
            pid=self._child.pid,
            extra={
                "engine_running": stats.num_running_reqs,
                "engine_waiting": stats.num_waiting_reqs,
                "kv_cache_usage": stats.kv_cache_usage,
                "prefix_cache_queries": self._prefix_queries,
                "prefix_cache_hits": self._prefix_hits,
            },
        )

    # -- life

    async def serve(self) -> None:
        """Take what the engine sends and watch over it, until it is dead or the client is closed."""
        reasons: list[str] = []
        with self._serving:
            async with trio.open_nursery() as nursery:

                async def until(task: Callable[[], Awaitable[str]]) -> None:
                    reasons.append(await task())
                    nursery.cancel_scope.cancel("the engine is dead")

                for task in (self._until_exit, self._until_dead_message, self._until_mute):
                    nursery.start_soon(until, task)
            if self._child.returncode is None:
                # It is lost, whether it has ended by itself or not.
                self._child.signal(signal.SIGKILL)
                with trio.move_on_after(_LAST_WORDS):
                    await self._child.wait()
            self._fall(reasons[0])

    async def close(self) -> None:
        """End the engine: politely at first, then by force. The caller bounds the time."""
        self._serving.cancel("the client is being closed")
        if self._death is None:
            if self._requests:
                self._let_go(list(self._requests))
            self._fall("the client is closed")
            await self._child.stop(kill_after=min(_GRACE, 0.6 * self._context.close_timeout))

    async def _until_exit(self) -> str:
        returncode = await self._child.wait()
        self._wire.drain(self._take)
        return f"the engine's process {describe_exit(returncode)}"

    async def _until_dead_message(self) -> str:
        await self._wire.receive(self._take)
        with trio.move_on_after(_LAST_WORDS):
            await self._child.wait()
        return f"the engine met a fatal error; its process {describe_exit(self._child.returncode)}"

    async def _until_mute(self) -> str:
        await self._probe.until_mute(lambda: self._ask("is_sleeping"))
        return (
            f"the engine no longer answers: nothing came for {self._probe.patience:g} s (probe_interval + "
            f"probe_timeout) while {len(self._requests)} requests were at work; it was killed"
        )

    def _fall(self, message: str) -> None:
        """Tell everybody who waits that there is no engine any more."""
        if self._death is None:
            self._death = _Death(message, self._child.returncode, self._child.log_tail())
        self._requests.clear()
        self._probe.work(busy=False)
        for call in self._calls.values():
            call.answered.set()
        self._wake_receiver()

    def _check_alive(self) -> None:
        if (death := self._death) is not None:
            raise EngineDied(
                death.message,
                stage=self._stage.name,
                stage_id=self._context.stage_id,
                replica_id=self._context.replica_id,
                exit_code=death.exit_code,
                log_tail=death.log_tail,
            )

    # -- towards the engine

    async def _render_and_send(self, request: StageRequest, rendering: Rendering) -> None:
        params = self._resolver.resolve(None) if request.params is None else request.params
        priority = request.priority if self._frontend.has_priorities else 0

        def render() -> Any:
            prompt = rendering.render(self._frontend)
            return self._frontend.request(request.request_id, prompt, params, self._tasks, priority)

        try:
            if rendering.in_thread:
                # The caches of multimodal items must not get ahead of what is sent, so such a rendering is not
                # abandoned; the others have no effects.
                core = await trio.to_thread.run_sync(
                    render, abandon_on_cancel=not rendering.in_order, limiter=self._threads
                )
            else:
                await trio.lowlevel.checkpoint()
                core = render()
            # No more waiting from here on: a cancelled submission has left nothing behind.
            frames = _compat.encode(core)
        except Exception as error:
            raise self._invalid(describe(error)) from error
        self._check_alive()
        leg = Leg(
            raw=not (request.want_text or self._pooling or needs_detokenizer(params)),
            task=params.task if self._pooling else None,
            prompt_tokens=_compat.prompt_length(core),
        )
        if not leg.raw:
            self._processor.add_request(core, None)
        self._requests[request.request_id] = leg
        self._wire.send(ADD, frames)
        self._probe.work(busy=True)

    def _let_go(self, request_ids: list[str]) -> None:
        """Forget requests here and have the engine forget them."""
        self._processor.abort_requests(request_ids, internal=True)
        for request_id in request_ids:
            self._forget(request_id)
        self._wire.send(ABORT, _compat.encode(request_ids))

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        if not self._requests:
            self._probe.work(busy=False)

    async def _ask(self, method: str, *args: Any) -> _Call:
        """Call a method of the engine core and wait for its answer."""
        call_id = next(self._call_ids)
        try:
            frames = _compat.encode((0, call_id, method, args))
        except Exception as error:
            raise self._call_failed(method, f"its arguments can not be sent: {describe(error)}") from error
        call = self._calls[call_id] = _Call()
        try:
            self._wire.send(UTILITY, frames)
            await call.answered.wait()
        finally:
            del self._calls[call_id]
        self._check_alive()
        return call

    # -- from the engine

    def _take(self, frames: Sequence[Any]) -> bool:
        """Take one message; return False if it is the engine's last."""
        self._probe.hear()
        if len(frames) == 1 and frames[0].buffer == DEAD:
            return False
        aborts: list[str] = []
        try:
            message = _compat.decode_outputs(frames)
        except Exception as error:  # one bad message must not end all others' requests
            self._take_damaged(frames, error, aborts)
        else:
            if (answer := message.utility_output) is not None:
                self._answer(answer.call_id, answer.failure_message, answer.result)
            if (stats := message.scheduler_stats) is not None:
                self._stats = stats
                self._prefix_queries += stats.prefix_cache_stats.queries
                self._prefix_hits += stats.prefix_cache_stats.hits
            for output in message.outputs:
                self._take_output(output, aborts)
        if aborts:
            self._wire.send(ABORT, _compat.encode(aborts))
        if self._ready:
            self._wake_receiver()
        return True

    def _take_output(self, output: Any, aborts: list[str]) -> None:
        request_id = output.request_id
        leg = self._requests.get(request_id)
        if leg is None:
            # Made before the engine knew of an abort.
            return
        try:
            if leg.raw:
                self._emit(from_core_output(output, leg))
                return
            # One at a time, so that an error in one request's processing is that request's.
            processed = self._processor.process_outputs([output])
            convert = from_request_output if leg.task is None else from_pooling_output
            for request_output in processed.request_outputs:
                self._emit(convert(request_output, leg, output))
            aborts += processed.reqs_to_abort
        except Exception as error:  # whatever it is, it becomes this request's end
            self._fail(request_id, f"its output could not be processed: {describe(error)}", aborts)

    def _take_damaged(self, frames: Sequence[Any], error: Exception, aborts: list[str]) -> None:
        """Save what can be saved of a message that can not be decoded as a whole."""
        try:
            outputs, call_id = _compat.decode_outputs_one_by_one(frames)
        except Exception:  # the first error says what is wrong with the message
            # Nobody knows whose tokens are lost; a request that went on without them would be wrong.
            for request_id in list(self._requests):
                self._fail(request_id, f"a message of the engine could not be decoded: {describe(error)}", aborts)
            return
        for request_id, output in outputs:
            if isinstance(output, Exception):
                self._fail(request_id, f"its output could not be decoded: {describe(output)}", aborts)
            else:
                self._take_output(output, aborts)
        if call_id is not None:
            self._answer(call_id, f"its result can not be decoded: {describe(error)}", None)

    def _emit(self, output: StageOutput) -> None:
        if output.finished:
            self._forget(output.request_id)
        self._ready.append(output)

    def _fail(self, request_id: str, text: str, aborts: list[str]) -> None:
        if request_id in self._requests:
            self._processor.abort_requests([request_id], internal=True)
            aborts.append(request_id)
            self._emit(failed(request_id, text))

    def _answer(self, call_id: int, failure: str | None, result: Any) -> None:
        # An answer that nobody waits for any more is late, not wrong.
        if (call := self._calls.get(call_id)) is not None:
            call.failure = failure
            call.result = None if result is None else result.result
            call.answered.set()

    def _wake_receiver(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    # -- errors

    def _invalid(self, message: str, *, request_id: str | None = None) -> InvalidRequest:
        return InvalidRequest(
            message,
            request_id=request_id,
            stage=self._stage.name,
            stage_id=self._context.stage_id,
            replica_id=self._context.replica_id,
        )

    def _call_failed(self, method: str, message: str) -> StageFailed:
        return StageFailed(
            f"{method}: {message}",
            stage=self._stage.name,
            stage_id=self._context.stage_id,
            replica_id=self._context.replica_id,
        )
