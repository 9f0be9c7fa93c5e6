"""Runs a plan: opens a runtime over simulated stages, plays callers and operators, and writes down what happens."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from omni_trio.bridges import BridgeContext, Companion, ExpandContext
from omni_trio.errors import EngineDied, OmniTrioError, RequestError
from omni_trio.messages import Output, Progress, StageInput, StageMetrics, StageRequest, TraceEvent
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import Holdings, Request, RequestStream, Runtime, holdings, load_of, open_runtime
from omni_trio.stages import ClientFactory, ReplicaContext, StageClient

from ._buggify import buggified
from ._determinism import seeded_scheduler
from .plan import OperatorAct, Plan, RequestPlan
from .script import Chunk, Die, Finish, Script
from .simulated import SimStage
from .trace import Audit, Entry, Trace

__all__ = ["Hung", "build_pipeline", "run_simulation"]

_IDLE = 600.0
"""Virtual seconds for which the runtime is watched after the last request has ended."""

_SETTLING = 60.0
"""Virtual seconds before that, in which replicas that have died may still be closed."""

_VERDICTS = ("finished", "failed", "aborted", "expired")

ClientWrapper = Callable[[ClientFactory], ClientFactory]


class Hung(AssertionError):
    """Something waits for ever: liveness is broken (I2, I12, I16). `trace` is what had happened by then."""

    def __init__(self, message: str, trace: Trace) -> None:
        self.trace = trace
        super().__init__(message)


def run_simulation(
    plan: Plan,
    *,
    wrap: ClientWrapper | None = None,
    clients: Mapping[int, ClientFactory] | None = None,
    points: Counter[str] | None = None,
) -> Trace:
    """Run a plan on a virtual clock and return what happened. Equal plans give equal traces.

    Args:
        plan: what to do.
        wrap: put around every simulated stage's factory; to plant a fault in all clients.
        clients: by stage index, factories of your own in place of the simulated stages.
        points: counts how often each point was passed at which `Plan.buggify` may hold a task up.

    Raises:
        Hung: something waited for longer than any plan needs.
    """
    run = _Run(plan, wrap, clients or {})
    with seeded_scheduler(plan.seed), buggified(plan.buggify, plan.seed, points):
        trio.run(run.main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[run.steps])
    return run.trace()


class _Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


class _Run:
    def __init__(self, plan: Plan, wrap: ClientWrapper | None, clients: Mapping[int, ClientFactory]) -> None:
        self.plan = plan
        self.steps = _Steps()
        self._entries: list[Entry] = []
        self._audit = Audit()
        self._idle_steps = 0
        self._idle_holdings: Holdings | None = None
        self._closed_at = 0.0
        self._failure = ""
        self._done = 0
        self._all_done = trio.Event()
        if not plan.requests:
            self._all_done.set()
        self._pipeline = build_pipeline(plan)
        self._opened: list[Runtime] = []
        self._replicas: dict[tuple[int, int], Any] = {}
        self._clients: dict[str, ClientFactory] = {}
        for index, stage in enumerate(self._pipeline.stages):
            factory: ClientFactory = clients.get(index) or self._sim(index)
            self._clients[stage.name] = factory if wrap is None else wrap(factory)

    def trace(self) -> Trace:
        return Trace(
            plan=self.plan,
            entries=tuple(self._entries),
            audit=self._audit,
            steps_while_idle=self._idle_steps,
            closed_at=self._closed_at,
            failure=self._failure,
        )

    # ---- stages

    def _sim(self, index: int) -> ClientFactory:
        stage = self.plan.stages[index]
        sim = SimStage(
            script=lambda request: _script(self.plan, index, request),
            capacity=stage.capacity,
            submit_time=stage.submit_time,
            abort_time=stage.abort_time,
            abort_error=stage.abort_error,
            start_time=stage.start_time,
            close_time=stage.close_time,
            log=None,
            watch=self._watch,
        )

        @asynccontextmanager
        async def factory(context: ReplicaContext) -> AsyncIterator[StageClient]:
            async with sim(context) as client:
                self._replicas[context.stage_id, context.replica_id] = client
                yield client

        return factory

    def _watch(self, what: str, context: ReplicaContext, request_id: str, **facts: Any) -> None:
        request, turn, role = _parse(request_id)
        if "count" in facts and self._opened:
            facts["load"] = load_of(self._opened[0], context.stage_id, context.replica_id)
        self._note(
            "stage",
            what,
            request=request,
            turn=turn,
            role=role,
            stage=context.stage_id,
            replica=context.replica_id,
            **facts,
        )

    def _heard(self, event: TraceEvent) -> None:
        """What the runtime tells its instruments."""
        kind, _, what = event.name.partition(".")
        if kind == "request" and what in _VERDICTS and event.request_id is not None:
            self._note("runtime", "verdict", request=_number(event.request_id), detail=what, text=event.detail)
        elif event.name == "replica.died":
            self._note("runtime", "died", stage=event.stage_id, replica=event.replica_id, text=event.detail)

    def _note(self, who: Any, what: str, **facts: Any) -> None:
        self._entries.append(Entry(time=trio.current_time(), who=who, what=what, **facts))

    # ---- the run

    async def main(self) -> None:
        with trio.move_on_after(self.plan.horizon) as scope:
            await self._live()
        if scope.cancelled_caught:
            raise Hung(f"something still waits after {self.plan.horizon:g} virtual seconds", self.trace())

    async def _live(self) -> None:
        plan = self.plan
        before = _tasks()
        opened = self._opened
        async with trio.open_nursery() as callers:
            try:
                async with open_runtime(
                    self._pipeline,
                    clients=self._clients,
                    on_engine_death=plan.on_engine_death,
                    max_in_flight=plan.max_in_flight,
                    abort_timeout=plan.abort_timeout,
                    instruments=[self._heard],
                ) as runtime:
                    opened.append(runtime)
                    self._note("runtime", "open")
                    async with trio.open_nursery() as others:
                        for index, request in enumerate(plan.requests):
                            # Callers outlive the runtime on purpose: they are to hear how it ended.
                            callers.start_soon(self._caller, runtime, index)  # noqa: ASYNC111 - see above
                            if request.act == "abort":
                                others.start_soon(self._aborter, runtime, index)
                        for number, act in enumerate(plan.operator):
                            others.start_soon(self._operator, runtime, number, act)
                        if plan.end is not None:
                            await trio.sleep_until(plan.end)
                            others.cancel_scope.cancel("the simulation closes the runtime")
                        else:
                            await self._all_done.wait()
                    if plan.end is None:
                        await self._watch_idleness(runtime)
                        self._idle_holdings = holdings(runtime)
                    self._note("runtime", "closing")
            except OmniTrioError as error:
                self._failure = f"{type(error).__name__}: {error}"
            self._closed_at = trio.current_time()
            self._note("runtime", "closed", text=self._failure)
        if opened:
            self._audit = self._count(opened[0], tasks=_tasks() - before)

    async def _watch_idleness(self, runtime: Runtime) -> None:
        await trio.sleep(_SETTLING)
        before = self.steps.count
        await trio.sleep(_IDLE)
        self._idle_steps = self.steps.count - before - 1  # the step of this very task

    def _count(self, runtime: Runtime, *, tasks: int) -> Audit:
        held, stats = holdings(runtime), runtime.stats()
        before = self._idle_holdings or held
        return Audit(
            requests=max(held.requests, before.requests),
            legs=max(held.legs, before.legs),
            load=max(held.load, before.load),
            work=sum(client.statistics().running for client in self._replicas.values()),
            tasks=tasks,
            finished=stats.finished,
            failed=stats.failed,
            aborted=stats.aborted,
            expired=stats.expired,
            rejected=stats.rejected,
        )

    # ---- callers

    async def _caller(self, runtime: Runtime, index: int) -> None:
        try:
            await self._call(runtime, index)
        finally:
            self._done += 1
            if self._done == len(self.plan.requests):
                self._all_done.set()

    async def _call(self, runtime: Runtime, index: int) -> None:
        plan = self.plan.requests[index]
        await trio.sleep_until(plan.arrival)
        self._note("caller", "ask", request=index)
        deadline = max(plan.when, 0.25) if plan.act == "deadline" else None
        leaves = plan.act in ("leave", "stop reading")
        try:
            if plan.segments is None:
                handle: Any = runtime.request(list(plan.prompt), request_id=f"r{index}", deadline=deadline)
            else:
                handle = runtime.open_stream(request_id=f"r{index}", deadline=deadline)
            async with handle as request:
                self._note("caller", "admitted", request=index)
                with trio.move_on_after(plan.when if leaves else math.inf) as scope:
                    await self._use(index, request)
                    self._note("caller", "end", request=index, detail="finished")
            if scope.cancelled_caught:
                self._note("caller", "left", request=index)
        except RequestError as error:
            self._note(
                "caller", "end", request=index, detail=type(error).__name__, stage=error.stage_id, text=str(error)
            )

    async def _use(self, index: int, request: Request | RequestStream) -> None:
        plan = self.plan.requests[index]
        if plan.act == "stop reading":
            await trio.sleep_forever()
        if isinstance(request, Request):
            await self._read(index, request)
            return
        failure: RequestError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, index, plan, request)
            try:
                await self._read(index, request)
            except RequestError as error:
                failure = error  # raised outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel("the session is over")
        if failure is not None:
            raise failure

    async def _read(self, index: int, events: Any) -> None:
        plan = self.plan.requests[index]
        async for event in events:
            place = {"request": index, "stage": event.stage_id, "replica": event.replica_id}
            if isinstance(event, Output):
                self._note(
                    "caller",
                    "output",
                    **place,
                    turn=event.turn,
                    segment=event.segment,
                    tokens=tuple(event.token_ids),
                    last=event.finished,
                    detail=event.finish_reason or "",
                )
            elif isinstance(event, Progress):
                self._note("caller", "progress", **place, count=event.step)
            elif isinstance(event, StageMetrics):
                self._note("caller", "metrics", **place, count=event.num_tokens_out)
            if pace := plan.when if plan.act == "slow" else plan.pace:
                await trio.sleep(pace)

    async def _send(self, index: int, plan: RequestPlan, stream: RequestStream) -> None:
        for segment in plan.segments or ():
            await trio.sleep(segment.after)
            with contextlib.suppress(RequestError):  # its reader is told
                if segment.barge_in:
                    await stream.barge_in(segment.tokens)
                else:
                    await stream.send(segment.tokens)
                self._note("caller", "sent", request=index, tokens=segment.tokens, turn=stream.turn)
        if plan.close:
            with contextlib.suppress(RequestError):
                await stream.aclose()

    async def _aborter(self, runtime: Runtime, index: int) -> None:
        plan = self.plan.requests[index]
        await trio.sleep_until(plan.arrival + plan.when)
        self._note("operator", "abort", request=index)
        detail = ""
        try:
            ended = await runtime.abort(f"r{index}")
        except EngineDied as error:
            detail, ended = type(error).__name__, ()
        self._note("operator", "abort done", request=index, detail=detail, count=len(ended))

    async def _operator(self, runtime: Runtime, number: int, act: OperatorAct) -> None:
        await trio.sleep_until(act.at)
        place = {"stage": act.stage, "replica": act.replica, "count": number}
        self._note("operator", act.act, **place, detail=act.mode)
        detail = ""
        try:
            if act.act == "pause":
                await runtime.pause(act.mode)
            elif act.act == "resume":
                await runtime.resume()
            elif act.act == "sleep":
                await runtime.sleep(mode="abort" if act.mode == "abort" else "wait")
            elif act.act == "wake":
                await runtime.wake()
            elif (client := self._replicas.get((act.stage, act.replica))) is not None:
                client.die(Die("killed by the operator"))
        except OmniTrioError as error:
            detail = type(error).__name__
        self._note("operator", f"{act.act} done", **place, detail=detail)


def build_pipeline(plan: Plan) -> Pipeline:
    """Return the pipeline that a plan describes; its stages are called ``s0``, ``s1`` and so on."""

    def bridge_to(stage: int) -> Callable[[BridgeContext], StageInput | None]:
        def bridge(context: BridgeContext) -> StageInput | None:
            request = plan.requests[_number(context.request_id)]
            act = request.bridges[stage] if stage < len(request.bridges) else "pass"
            if act == "raise":
                raise ValueError("the plan says so")
            if act == "nothing":
                return None
            if request.segments is not None:
                tokens, _ = context.new()
                return StageInput(token_ids=tokens) if tokens else None
            return StageInput(token_ids=(stage,))

        return bridge

    def expand(context: ExpandContext) -> Iterable[Companion]:
        return [Companion(role=f"c{index}", input=context.prompt) for index in range(plan.companions)]

    roles = ("prefill", "decode") if plan.pair else ()
    specs = []
    for index, stage in enumerate(plan.stages):
        role: Any = roles[index] if index < len(roles) else None
        more: dict[str, Any] = {}
        if index and role is None and stage.feed != "connector":
            more["bridge"] = bridge_to(index)
        if stage.feed == "connector":
            more["chunk_timeout"] = plan.chunk_timeout
        specs.append(
            StageSpec(
                name=f"s{index}",
                kind="simulated",
                source=None if stage.source is None else f"s{stage.source}",
                feed=stage.feed,
                role=role,
                final_output=stage.final,
                replicas=stage.replicas,
                **more,
            )
        )
    if plan.companions:
        return Pipeline(specs, expand=expand, bundle_timeout=plan.bundle_timeout)
    return Pipeline(specs)


def _script(plan: Plan, stage: int, request: StageRequest) -> Script:
    index, _, role = _parse(request.request_id)
    assert index is not None  # all requests of a simulation have such ids
    asked = plan.requests[index]
    if asked.segments is not None:
        return (*(Chunk((token,)) for token in request.input.token_ids or ()), Finish())
    if role is not None:
        number = int(role.removeprefix("c"))
        return asked.companions[number] if number < len(asked.companions) else (Finish(),)
    return asked.scripts[stage] if stage < len(asked.scripts) else (Finish(),)


def _number(request_id: str) -> int:
    return int(request_id.removeprefix("r").partition("-")[0])


def _parse(request_id: str) -> tuple[int | None, int, str | None]:
    """Take a stage's request id apart: which request, which turn, which companion."""
    if not request_id:
        return None, 0, None
    head, _, rest = request_id.partition(".")
    parts = rest.split(".") if rest else []
    turn = int(parts.pop(0)) if parts and parts[0].isdecimal() else 0
    return _number(head), turn, parts[0] if parts else None


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living
