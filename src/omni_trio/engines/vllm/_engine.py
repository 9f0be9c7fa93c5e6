"""The client of one running vLLM engine core: its protocol spoken natively from trio.

Nothing in here polls, and no engine has a thread on this side. What an engine sends is taken by one task, in one
synchronous pass per engine step; requests, aborts and calls are sent without waiting.
"""

from __future__ import annotations

import contextlib
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
from ._calls import METHODS, clears_multimodal_cache, nearest_method, plan_call, read_result
from ._inputs import Rendering, is_empty, plan_rendering
from ._kv import decode_params, describe_source, prefill_params, remote_cached_tokens, unpaired
from ._legs import Leg
from ._params import ParameterResolver, needs_detokenizer
from ._sessions import Piece, Session, unsegmented
from ._text import describe
from ._wire import ADD, DEAD, UTILITY, Wire
from ._work import Work

__all__ = ["VllmClient", "connect"]

_GRACE: Final = 2.0
"""Seconds that an engine gets, after SIGTERM, to end by itself; it needs 0.9."""

_LAST_WORDS: Final = 0.5
"""Seconds that an engine that is lost gets to end, for the sake of its exit code and log."""

_THREADS: Final = 2
"""Worker threads that one client renders prompts in; vLLM keeps as many copies of the tokenizer."""

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
            paired=self._stage.role is not None,
        )
        self._probe = Probe(self._stage.probe_interval, self._stage.probe_timeout)
        self._work = Work(_compat.new_output_processor(frontend), wire.send, lambda busy: self._probe.work(busy=busy))
        self._aborting: set[str] = set()
        self._wake: trio.Event | None = None
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count(_NO_ID + 1)
        self._in_order = trio.Lock()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._stats: Any = None
        self._prefix_queries = self._prefix_hits = self._external_hits = 0
        self._death: _Death | None = None
        self._serving = trio.CancelScope()

    # -- StageClient

    def resolve_params(self, params: Any) -> Any:
        """See `StageClient.resolve_params`; takes mappings, SamplingParams (llm) and PoolingParams (pooling)."""
        return self._resolver.resolve(params)

    async def submit(self, request: StageRequest) -> None:
        """See `StageClient.submit`."""
        self._check_alive()
        if request.request_id in self._work.legs:
            raise self._invalid(f"a request with the id {request.request_id!r} is at work already")
        params = self._params_of(request, None)
        leg: Leg | None = None
        if not request.last:
            leg = Leg(
                request.request_id,
                raw=True,
                session=Session(self._frontend.max_model_len),
                params=params,
            )
        await self._hand_over(request, params, leg)

    async def update(self, request: StageRequest) -> None:
        """See `StageClient.update`. Input that comes before the engine has answered what it has waits its turn here.

        The tokens of all segments make up the answer, but the last one of each segment is not part of what the engine
        goes on from: that is vLLM's way with such requests.
        """
        self._check_alive()
        if self._pooling:
            raise self._invalid("the stage takes its input as a whole and no updates")
        leg = self._work.legs.get(request.request_id)
        if leg is None:
            await trio.lowlevel.checkpoint()
            return
        if leg.session is None or leg.session.closed:
            raise self._invalid("the request has had its last input already")
        await self._hand_over(request, self._params_of(request, leg.params), leg)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `StageClient.abort`. Takes effect even where the wait for the acknowledgement is cancelled."""
        self._check_alive()
        ids = set(request_ids)
        self._work.ready = [output for output in self._work.ready if output.request_id not in ids]
        known = [request_id for request_id in ids if request_id in self._work.legs]
        if known:
            self._work.let_go(known)
            self._aborting.update(known)
        elif ids.isdisjoint(self._aborting):
            await trio.lowlevel.checkpoint()
            return
        try:
            # The engine takes what it is sent in order: an answer to this, of any kind, proves the abort taken.
            await self._ask("is_sleeping")
        finally:
            self._aborting.difference_update(known)

    async def release_kv(self, request: StageRequest) -> None:
        """See `ReleasesKv.release_kv`. Where vLLM is older than 0.22, what is held expires by itself."""
        self._check_alive()
        transfer = request.kv_transfer
        if transfer is not None and transfer.role == "decode" and transfer.params is not None:
            params = self._resolver.resolve(None) if request.params is None else request.params
            # Where the prefill has told too little to fetch its KV cache, nobody can be told to drop it either.
            with contextlib.suppress(ValueError):
                params = decode_params(params, transfer, self._frontend.connector)
                if (core := _compat.releasing_request(request.request_id, params)) is not None:
                    self._wire.send(ADD, _compat.encode(core))
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Sequence[StageOutput]:
        """See `StageClient.receive`."""
        work = self._work
        if work.ready:
            await trio.lowlevel.checkpoint()
        while not work.ready:
            self._check_alive()
            self._wake = trio.Event()
            await self._wake.wait()
        outputs, work.ready = work.ready, []
        return outputs

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the engine core, or of every worker of the engine.

        A call that takes longer than the stage's `probe_interval` and `probe_timeout` together, while requests
        are at work, looks like an engine that no longer answers.

        Args:
            method: one of ``add_lora``, ``remove_lora``, ``pin_lora``, ``list_loras``, ``profile``, ``sleep``,
                ``wake_up``, ``is_sleeping``, ``pause_scheduler``, ``resume_scheduler``, ``is_scheduler_paused``,
                ``reset_prefix_cache``, ``reset_mm_cache``, ``reset_encoder_cache``, ``set_weight_version``,
                ``get_weight_version``; another method of the engine core after ``engine.``; or a worker's
                (``check_health``).
            args: positional arguments: plain data, arrays, tensors.
            kwargs: keyword arguments; not with ``engine.`` methods other than those listed.

        Returns:
            The result itself; for workers' methods a list with one result per worker.

        Raises:
            StageFailed: the method raised, there is none, or its result can not be sent.
            EngineDied: the engine is dead, or died before it answered.
        """
        self._check_alive()
        try:
            name, arguments = plan_call(method, args, kwargs or {})
        except ValueError as error:
            raise self._call_failed(method, str(error)) from error
        answer = await self._ask(name, *arguments)
        if answer.failure is not None:
            raise self._call_failed(method, f"{answer.failure}{nearest_method(method)}")
        if clears_multimodal_cache(name, arguments):
            async with self._in_order:  # no prompt is rendered meanwhile
                self._frontend.clear_multimodal_cache()
        return read_result(method, answer.result)

    @property
    def methods(self) -> frozenset[str]:
        """See `Operable.methods`."""
        return METHODS

    def statistics(self) -> ClientStatistics:
        """See `StageClient.statistics`; `extra` has the scheduler's own counts and the caches' state."""
        # Requests, not completions of them; a session that waits for input is neither running nor waiting.
        in_flight = self._work.active
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
                "external_cache_hits": self._external_hits,
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
            self._work.let_go(list(self._work.legs))
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
            f"probe_timeout) while {self._work.active} requests were at work; it was killed"
        )

    def _fall(self, message: str) -> None:
        """Tell everybody who waits that there is no engine any more."""
        if self._death is None:
            self._death = _Death(message, self._child.returncode, self._child.log_tail())
        self._work.clear()
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

    def _params_of(self, request: StageRequest, default: Any) -> Any:
        """Return a request's parameters, fit for how it is sent: in pieces, or as one half of a pair."""
        params = request.params
        if params is None:
            params = self._resolver.resolve(None) if default is None else default
        transfer = request.kv_transfer
        complaint = None
        if self._pooling:
            if transfer is not None:
                complaint = "a pooling stage has no KV cache to hand over or take over"
            elif not request.last:
                complaint = "the stage takes its input as a whole: send it with last=True"
        elif transfer is not None:
            complaint = unpaired(params) if request.last else "a prefill/decode pair takes its input with last=True"
        elif not request.last or default is not None:
            complaint = unsegmented(params)
        if complaint is not None:
            raise self._invalid(complaint)
        return params

    async def _hand_over(self, request: StageRequest, params: Any, leg: Leg | None) -> None:
        """Make the engine's request of an input and send it; `leg` is the session that it belongs to."""
        new = request.request_id not in self._work.legs
        if leg is not None and is_empty(request.input):
            await trio.lowlevel.checkpoint()
            self._give(request, leg, None, new=new)
            return
        try:
            rendering = plan_rendering(self._stage, request.input)
        except ValueError as error:
            raise self._invalid(str(error)) from error
        if rendering.in_order:
            async with self._in_order:
                await self._render_and_send(request, params, rendering, leg, new=new)
        else:
            await self._render_and_send(request, params, rendering, leg, new=new)

    async def _render_and_send(
        self, request: StageRequest, params: Any, rendering: Rendering, leg: Leg | None, *, new: bool
    ) -> None:
        priority = request.priority if self._frontend.has_priorities else 0
        transfer = request.kv_transfer

        def render() -> Any:
            mine = params
            if transfer is not None and transfer.role == "prefill":
                mine = prefill_params(params, transfer)
            elif transfer is not None:
                mine = decode_params(params, transfer, self._frontend.connector)
            return self._frontend.request(
                request.request_id,
                rendering.render(self._frontend),
                mine,
                self._tasks,
                priority=priority,
                resumable=leg is not None,
            )

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
        except Exception as error:
            raise self._invalid(describe(error)) from error
        # No more waiting from here on: a cancelled submission has left nothing behind.
        self._check_alive()
        if leg is not None:
            self._give(request, leg, core, new=new)
        else:
            self._begin(request, params, core)

    def _begin(self, request: StageRequest, params: Any, core: Any) -> None:
        cores = [core] if self._pooling or params.n == 1 else _compat.fan_out(core)
        transfer = request.kv_transfer
        source = transfer if transfer is not None and transfer.role == "decode" else None
        leg = Leg(
            request.request_id,
            [each.request_id for each in cores],
            raw=not (request.want_text or self._pooling or needs_detokenizer(core.sampling_params)),
            task=params.task if self._pooling else None,
            prompt_tokens=_compat.prompt_length(core),
            source=None if source is None else describe_source(source),
            remote_cached_tokens=None if source is None else remote_cached_tokens(source),
        )
        self._check_free(leg)
        try:
            self._work.begin(leg, cores)
        except Exception as error:
            raise self._invalid(describe(error)) from error

    def _check_free(self, leg: Leg) -> None:
        if self._work.has(leg.engine_ids):
            raise self._invalid(f"the id {leg.request_id!r} is taken by another request, or by a part of one")

    def _give(self, request: StageRequest, leg: Leg, core: Any, *, new: bool) -> None:
        """Give a session an input, or none, and what it completes."""
        session = leg.session
        assert session is not None  # that is what makes it one
        piece: Piece | None = None
        if core is not None:
            if core.prompt_embeds is not None:
                raise self._invalid("a session takes no prompt embeddings")
            piece = Piece(
                core,
                _compat.prompt_length(core),
                request.segment_end or request.last,
                raw=not (request.want_text or needs_detokenizer(core.sampling_params)),
            )
            if (complaint := session.complaint(piece.tokens)) is not None:
                raise self._invalid(complaint)
        if new:
            self._check_free(leg)
            self._work.begin(leg, ())
        elif self._work.legs.get(leg.request_id) is not leg:
            # It has ended while its input was being rendered.
            return
        self._work.more(leg, piece, segment_end=request.segment_end, last=request.last)
        if self._work.ready:
            self._wake_receiver()

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
        try:
            message = _compat.decode_outputs(frames)
        except Exception as error:  # one bad message must not end all others' requests
            self._take_damaged(frames, error)
        else:
            if (answer := message.utility_output) is not None:
                self._answer(answer.call_id, answer.failure_message, answer.result)
            if (stats := message.scheduler_stats) is not None:
                self._stats = stats
                self._prefix_queries += stats.prefix_cache_stats.queries
                self._prefix_hits += stats.prefix_cache_stats.hits
                if (connector := stats.connector_prefix_cache_stats) is not None:
                    self._external_hits += connector.hits
            self._work.take(message.outputs)
        if self._work.ready:
            self._wake_receiver()
        return True

    def _take_damaged(self, frames: Sequence[Any], error: Exception) -> None:
        """Save what can be saved of a message that can not be decoded as a whole."""
        try:
            outputs, call_id = _compat.decode_outputs_one_by_one(frames)
        except Exception:  # the first error says what is wrong with the message
            # Nobody knows whose tokens are lost; a request that went on without them would be wrong.
            self._work.fail_all(f"a message of the engine could not be decoded: {describe(error)}")
            return
        for engine_id, output in outputs:
            if isinstance(output, Exception):
                self._work.fail(engine_id, f"its output could not be decoded: {describe(output)}")
            else:
                self._work.take([output])
        if call_id is not None:
            self._answer(call_id, f"its result can not be decoded: {describe(error)}", None)

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

    def _invalid(self, message: str) -> InvalidRequest:
        return InvalidRequest(
            message,
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
