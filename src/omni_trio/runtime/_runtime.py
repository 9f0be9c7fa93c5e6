"""`open_runtime` and the `Runtime` that it gives: the life of everything, and the face of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, final, get_args

import trio

from omni_trio.errors import EngineDied, InvalidRequest
from omni_trio.messages import Prompt
from omni_trio.pipeline import Pipeline, nearest
from omni_trio.stages import BalancerFactory, ClientFactory, ClientStatistics, Replica

from . import _buggify
from ._admission import RequestOptions
from ._control import Control
from ._groups import leaves, lone
from ._handle import Request
from ._operate import Operator, PauseMode, WhenAsked
from ._orchestrator import DeathPolicy, Orchestrator
from ._result import Result
from ._rpc import Call, ask_all, choose_pools, place_of
from ._statistics import (
    Activity,
    Health,
    ReplicaHealth,
    ReplicaStatistics,
    RpcResult,
    RuntimeStatistics,
    StageStatistics,
)
from ._stream import RequestStream
from ._trace import Instrument, Trace

__all__ = ["Runtime", "open_runtime"]


@final
class Runtime:
    """An open pipeline. Made by `open_runtime`; of no use outside of its block."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._operator = Operator(orchestrator)
        self._control = Control(orchestrator, self._operator)

    @property
    def pipeline(self) -> Pipeline:
        """What is being run."""
        return self._orchestrator.pipeline

    def request(
        self,
        prompt: Prompt,
        *,
        sampling_params: Any = None,
        request_id: str | None = None,
        final_stage: str | int | None = None,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Request:
        """Make a request, to be opened with ``async with``.

        Args:
            prompt: words, token ids, or a `StageInput` for all else.
            sampling_params: parameters of the first stage; or a mapping from stage names to each one's; or a
                list with one entry per stage (None: its defaults). They are merged over the stage's defaults.
            request_id: how events and errors shall call it; unique among the requests in flight. Made up where
                left out.
            final_stage: name or index of the stage at which the request ends; its output goes to the caller
                whether or not the pipeline calls it final. None: the request passes the whole pipeline.
            deadline: seconds from entering the block until the request is given up, everywhere; None: never.
            priority: lower is sooner, as in vLLM.

        Entering the block raises:
            InvalidRequest: something in it can not be served; it says what. Nobody else is affected.
            Overloaded: as many requests as allowed are in flight.
            ShutDown: the runtime is closing.
        """
        if prompt is None:
            raise InvalidRequest("the prompt is None; for input that comes bit by bit see open_stream()")
        return Request(
            self._orchestrator,
            prompt,
            RequestOptions(
                sampling_params=sampling_params,
                request_id=request_id,
                final_stage=final_stage,
                deadline=deadline,
                priority=priority,
            ),
        )

    def open_stream(
        self,
        *,
        sampling_params: Any = None,
        request_id: str | None = None,
        final_stage: str | int | None = None,
        deadline: float | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Make a session, a request whose input comes in segments, to be opened with ``async with``.

        Arguments as for `request`, with the prompt left out: it is sent.

        Entering the block raises:
            InvalidRequest: the pipeline takes no streaming input, or something in the arguments can not be served.
            Overloaded: as many requests as allowed are in flight.
            ShutDown: the runtime is closing.
        """
        return RequestStream(
            self._orchestrator,
            RequestOptions(
                sampling_params=sampling_params,
                request_id=request_id,
                final_stage=final_stage,
                deadline=deadline,
                priority=priority,
            ),
        )

    async def generate(
        self,
        prompt: Prompt,
        *,
        sampling_params: Any = None,
        request_id: str | None = None,
        final_stage: str | int | None = None,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Result:
        """Serve one request to its end and return its final outputs. Arguments as for `request`.

        Raises:
            RequestError: it did not end well, or could not be admitted.
        """
        async with self.request(
            prompt,
            sampling_params=sampling_params,
            request_id=request_id,
            final_stage=final_stage,
            deadline=deadline,
            priority=priority,
        ) as request:
            return await request.result()

    async def abort(self, request_ids: str | Iterable[str], *, keep_partial: bool = False) -> tuple[str, ...]:
        """End requests: their consumers get `RequestAborted`.

        When it returns, no stage holds any of them, and no event of theirs will be delivered (I6). Ids of
        requests that have ended, or never were, are ignored.

        Args:
            request_ids: of the requests.
            keep_partial: whether `RequestAborted.partial` shall carry what had been made of each and not been read.

        Returns:
            The ids of those that it ended.

        Raises:
            EngineDied: a stage did not acknowledge; the replica counts as dead.
        """
        wanted = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        tasks = [task for one in wanted if (task := self._orchestrator.tasks.get(one)) is not None]
        ended = [task for task in tasks if task.verdict is None]
        for task in ended:
            task.abort("it was aborted", keep_partial=keep_partial)
        for task in tasks:
            await task.done.wait()
        for task in ended:
            if task.abort_error is not None:
                raise task.abort_error
        await trio.lowlevel.checkpoint()
        return tuple(task.external_id for task in ended)

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        stages: str | Iterable[str] | None = None,
    ) -> list[RpcResult]:
        """Call a method of every engine or worker of some stages, all at the same time.

        Args:
            method: what the stages' clients know by that name (see each kind of stage).
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: seconds that each replica has to answer.
            stages: names of the stages to ask, in any order, each once; None: all.

        Returns:
            One entry per replica, ordered by stage and replica; a replica that failed, is dead or did not answer in
            time has an `error` instead of a result. What it answers later is ignored.

        Raises:
            InvalidRequest: a stage is not there.
        """
        pools = choose_pools(self._orchestrator.pools, stages)
        replicas = [replica for pool in pools for replica in pool.replicas]
        return await ask_all([Call(replica, method, args, kwargs) for replica in replicas], timeout)

    @property
    def control(self) -> Control:
        """What can be asked of the engines by name: LoRA adapters, profiles, caches, the weights' version."""
        return self._control

    async def pause(
        self,
        mode: PauseMode = "wait",
        *,
        stages: str | Iterable[str] | None = None,
        deadline: float = 60.0,
        when_asked: WhenAsked = "wait",
        retry_after: float | None = None,
        keep_partial: bool = False,
    ) -> None:
        """Let no new request through, from the call on, and wait until the stages are still.

        Before it returns every stage has proved it: an engine with a scheduler says that this has nothing left and
        its device is done; any other answers a call and says that it has nothing at work. Doing it again is harmless.
        A call of `resume`, or of this with another mode, overtakes one that is under way, which then raises.

        Args:
            mode: what becomes of requests in flight. ``wait``: they go on to their end. ``abort``: they end with
                `RequestAborted`, at every stage. ``keep``: nothing more is handed over to a stage, and schedulers
                that can be paused stop where they are; workers finish what they have in hand. Deadlines and time-outs
                of requests run on.
            stages: which have to prove that they are idle, or are kept from going on; None: all. No stage gets new
                requests in any case.
            deadline: seconds that all of it may take.
            when_asked: whether requests that come meanwhile ``wait`` until the runtime is resumed, within their own
                deadlines, or are refused with `Paused` (``reject``), those included that wait already.
            retry_after: what `Paused` tells them.
            keep_partial: as for `abort`, in the mode of that name.

        Raises:
            OperationFailed: it took too long, or a replica failed, or it was overtaken; it says who is still busy.
                Unless it was overtaken, the runtime stays paused; so it does where this is cancelled.
            InvalidRequest: a stage is not there, or an argument makes no sense.
            ShutDown: the runtime is closed.
        """
        await self._operator.pause(
            mode,
            stages=stages,
            deadline=deadline,
            when_asked=when_asked,
            retry_after=retry_after,
            keep_partial=keep_partial,
        )

    async def resume(self, *, deadline: float = 60.0) -> None:
        """Let requests through again, and what was kept go on. Harmless where the runtime is not paused.

        Args:
            deadline: seconds that it may take.

        Raises:
            OperationFailed: a replica is asleep, or its scheduler did not go on, or a new pause overtook this; the
                runtime stays paused.
            ShutDown: the runtime is closed.
        """
        await self._operator.resume(deadline=deadline)

    async def sleep(
        self,
        level: int = 1,
        *,
        mode: Literal["wait", "abort"] = "wait",
        stages: str | Iterable[str] | None = None,
        deadline: float = 60.0,
        when_asked: WhenAsked = "wait",
        retry_after: float | None = None,
    ) -> tuple[RpcResult, ...]:
        """Pause, as `pause` does, and then have engines give up their devices' memory.

        No new request reaches a stage from the call on, and none gets anywhere until `resume`. Replicas that are
        asleep already stay so, at the level that they are at.

        Args:
            level: 1: weights are kept in the host's memory; 2: they are gone, and have to be loaded again after
                waking. vLLM engines need ``enable_sleep_mode`` in their arguments.
            mode: what becomes of requests in flight.
            stages: which shall sleep; None: all whose engines are known to be able to. A worker stage has to be named,
                and its class to have ``sleep(level)`` and ``wake_up()``.
            deadline: seconds that all of it may take.
            when_asked: see `pause`.
            retry_after: see `pause`.

        Returns:
            One entry per living replica of the stages, with True for a result.

        Raises:
            OperationFailed: as for `pause`; or some replicas did not fall asleep, which it names. The others do
                sleep; `health` says which. The runtime stays paused.
            InvalidRequest: a stage is not there, none can sleep, or an argument makes no sense.
            ShutDown: the runtime is closed.
        """
        return await self._operator.sleep(
            level, mode=mode, stages=stages, deadline=deadline, when_asked=when_asked, retry_after=retry_after
        )

    async def wake(
        self,
        tags: Sequence[str] | None = None,
        *,
        stages: str | Iterable[str] | None = None,
        deadline: float = 60.0,
    ) -> tuple[RpcResult, ...]:
        """Give engines that sleep their memory back. The runtime stays paused: `resume` is another call.

        Args:
            tags: what to bring back (for vLLM ``weights``, ``kv_cache``); None: all.
            stages: which to wake; None: all that sleep.
            deadline: seconds that it may take.

        Returns:
            One entry per replica that was asleep, whose result is whether it is wholly awake; none where none was.

        Raises:
            OperationFailed: a replica did not wake up. It can be tried again.
            InvalidRequest: a stage is not there.
            ShutDown: the runtime is closed.
        """
        return await self._operator.wake(tags, stages=stages, deadline=deadline)

    def stats(self) -> RuntimeStatistics:
        """Return what is going on right now."""
        orchestrator = self._orchestrator
        verdicts = orchestrator.verdicts
        in_flight = len(orchestrator.tasks)
        return RuntimeStatistics(
            in_flight=in_flight,
            admitted=in_flight + verdicts.total(),
            finished=verdicts["finished"],
            failed=verdicts["failed"],
            aborted=verdicts["aborted"],
            expired=verdicts["expired"],
            rejected=orchestrator.rejected,
            stages=tuple(
                StageStatistics(
                    stage=pool.spec.name,
                    stage_id=pool.stage_id,
                    replicas=tuple(
                        _replica_statistics(replica, self._operator.activity(replica)) for replica in pool.replicas
                    ),
                )
                for pool in orchestrator.pools
            ),
            phase=self._operator.phase,
            waiting=orchestrator.gate.waiting,
        )

    def health(self) -> Health:
        """Return which replicas can work, and what the others died of."""
        pools = self._orchestrator.pools
        alive = [sum(1 for _ in pool.ready()) for pool in pools]
        whole = all(count == len(pool.replicas) for count, pool in zip(alive, pools, strict=True))
        return Health(
            status="ok" if whole else "degraded" if all(alive) else "dead",
            replicas=tuple(
                ReplicaHealth(
                    **place_of(replica),
                    state=replica.state.value,
                    reason=None if replica.death is None else replica.death.message,
                    activity=self._operator.activity(replica),
                )
                for replica in self._orchestrator.replicas()
            ),
            phase=self._operator.phase,
        )


def _replica_statistics(replica: Replica, activity: Activity) -> ReplicaStatistics:
    return ReplicaStatistics(
        replica_id=replica.replica_id,
        state=replica.state.value,
        requests=replica.load,
        finished=replica.totals.requests,
        tokens=replica.totals.tokens,
        stray_outputs=replica.stray,
        client=ClientStatistics() if replica.client is None else replica.client.statistics(),
        activity=activity,
    )


@asynccontextmanager
async def open_runtime(
    pipeline: Pipeline,
    *,
    clients: Mapping[str, ClientFactory],
    balancers: Mapping[str, BalancerFactory] | None = None,
    on_engine_death: DeathPolicy = "fail_stop",
    max_in_flight: int = 10_000,
    abort_timeout: float = 10.0,
    shutdown_deadline: float = 10.0,
    instruments: Iterable[Instrument] = (),
) -> AsyncIterator[Runtime]:
    """Bring a pipeline up, give it to the block, and take it down again.

    Entering starts all replicas at the same time and returns when all are up. Leaving, for whatever reason, takes
    no more requests, ends those in flight (each gets its one terminal), aborts them at the stages, and then closes
    the engines: politely, then with SIGTERM, then with SIGKILL.

    Args:
        pipeline: what to run.
        clients: by stage name, what opens a replica of it.
        balancers: by stage name, what makes the `Balancer` that chooses among its replicas. Without one it is the
            replica with the least in hand.
        on_engine_death: ``fail_stop``: when a replica dies every request in flight fails with `EngineDied`, the
            block is cancelled and this raises `EngineDied`. ``isolate``: only requests that the replica had in
            hand fail, with `ReplicaLost`; the runtime goes on with the other replicas.
        max_in_flight: requests that may be in flight; one more is refused with `Overloaded`.
        abort_timeout: seconds that a stage has to acknowledge an abort; one that does not counts as dead.
        shutdown_deadline: seconds that closing all engines may take, SIGKILL included.
        instruments: callables that are told what happens (`TraceEvent`).

    Raises:
        StartupFailed: a replica did not come up; those that had are down again.
        EngineDied: an engine died (under ``fail_stop``).
    """
    _check_options(pipeline, clients, balancers or {}, on_engine_death, max_in_flight, abort_timeout, shutdown_deadline)
    instruments = tuple(instruments)
    for instrument in instruments:
        if not callable(instrument):
            raise TypeError(f"instruments: expected callables, not {instrument!r}")
    trace = Trace(instruments)
    orchestrator = Orchestrator(
        pipeline,
        [clients[stage.name] for stage in pipeline.stages],
        trace=trace,
        on_engine_death=on_engine_death,
        max_in_flight=max_in_flight,
        abort_timeout=abort_timeout,
        close_timeout=shutdown_deadline,
        balancers=balancers,
    )
    trace.emit("runtime.opening")
    failure: BaseException | None = None
    try:
        # The outer nursery holds the engines, the inner one the requests: engines outlive those who use them.
        async with trio.open_nursery() as services:
            try:
                await orchestrator.start(services)
                trace.emit("runtime.open")
                with orchestrator.body_scope:
                    async with trio.open_nursery() as requests:
                        orchestrator.open(requests)
                        try:
                            yield Runtime(orchestrator)
                        finally:
                            trace.emit("runtime.closing")
                            orchestrator.close()
                            if _buggify.hook is not None:
                                await _buggify.hook("the runtime closes", shield=True)
            finally:
                orchestrator.stop("the runtime closes")
    except BaseException as error:
        failure = error
    trace.emit("runtime.closed")
    # Raised out here, so that what a user sees first does not drag the nurseries' groups along as its context.
    if (outcome := _outcome(failure, orchestrator.fatal)) is not None:
        raise outcome


def _check_options(
    pipeline: Any,
    clients: Mapping[str, ClientFactory],
    balancers: Mapping[str, BalancerFactory],
    on_engine_death: str,
    max_in_flight: Any,
    abort_timeout: float,
    shutdown_deadline: float,
) -> None:
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline: expected a Pipeline (see load_pipeline), not {type(pipeline).__name__}")
    if on_engine_death not in (policies := get_args(DeathPolicy)):
        raise ValueError(f"on_engine_death: expected one of {', '.join(policies)}, not {on_engine_death!r}")
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight: expected a whole number from 1 up, not {max_in_flight!r}")
    for name, seconds in (("abort_timeout", abort_timeout), ("shutdown_deadline", shutdown_deadline)):
        if not 0 < seconds < math.inf:  # every wait is bounded (I16)
            raise ValueError(f"{name}: expected a number of seconds above 0, not {seconds!r}")
    names = [stage.name for stage in pipeline.stages]
    for name in names:
        if name not in clients:
            raise ValueError(f"clients: there is none for stage {name!r}")
    for option, given in (("clients", clients), ("balancers", balancers)):
        for name in given:
            if name not in names:
                raise ValueError(f"{option}: no stage is called {name!r}{nearest(name, names)}")


def _outcome(failure: BaseException | None, fatal: EngineDied | None) -> BaseException | None:
    """What leaving the block raises: a lone cause where there is one, else a group; never less than there was."""
    if fatal is None:
        return None if failure is None else lone(failure, levels=2)  # services and requests
    others = [] if failure is None else [error for error in leaves(failure) if not _tells_of(error, fatal)]
    if not others:
        return fatal
    return BaseExceptionGroup("an engine died, and the block raised as well", [fatal, *others])


def _tells_of(error: BaseException, death: EngineDied) -> bool:
    """Whether an error only passes on the news of a death to one request."""
    return (
        isinstance(error, trio.Cancelled)
        or error is death
        or (isinstance(error, EngineDied) and error.__cause__ is death)
    )
