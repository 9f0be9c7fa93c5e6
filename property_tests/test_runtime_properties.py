"""Invariants tested: I1, I2, I3, I4, I5, I6, I10, I12 over generated pipelines, scripts, faults and callers' acts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_trio.bridges import BridgeContext
from omni_trio.errors import DeadlineExceeded, EngineDied, RequestError
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import (
    Chunk,
    Die,
    Error,
    Finish,
    FinishSilently,
    LateChunk,
    Reject,
    Script,
    SimStage,
    Stall,
    Wait,
)
from support import assert_empty, run, simulated

TIMES = st.sampled_from((0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 5.0))
DEADLINE = 1000.0


@attrs.frozen
class Plan:
    """One simulated run, printed as what makes it again."""

    sources: tuple[int | None, ...]
    streams: tuple[bool, ...]
    replicas: tuple[int, ...]
    scripts: dict[tuple[int, int], Script]  # by (request, stage)
    bridges: dict[tuple[int, int], str]  # by (request, receiving stage): what its bridge does
    arrivals: tuple[float, ...]
    acts: tuple[tuple[str, float], ...]
    policy: str
    abort_time: float
    capacity: int
    end: float


verbs = st.one_of(
    TIMES.map(Wait),
    st.lists(st.integers(0, 99), max_size=3).map(lambda ids: Chunk(tuple(ids))),
    st.just(LateChunk()),
)
endings = st.sampled_from((Finish(), Finish("length", (7, 8)), FinishSilently()))
faults = st.sampled_from((Error(), Stall(), Die(), Reject()))


@st.composite
def scripts(draw, faulty: bool) -> Script:
    body = tuple(draw(st.lists(verbs, max_size=5)))
    if faulty and draw(st.integers(0, 3)) == 0:
        fault = draw(faults)
        return (fault, *body) if isinstance(fault, Reject) else (*body, fault)
    return (*body, draw(endings))


@st.composite
def plans(draw) -> Plan:
    count = draw(st.integers(1, 4))
    sources = (None, *(draw(st.integers(0, index - 1)) for index in range(1, count)))
    requests = draw(st.integers(1, 5))
    faulty = [draw(st.booleans()) for _ in range(requests)]
    cells = [(request, stage) for request in range(requests) for stage in range(count)]
    acts = st.tuples(st.sampled_from(("wait", "wait", "leave", "abort", "deadline", "slow")), TIMES)
    return Plan(
        sources=sources,
        streams=(False, *(draw(st.booleans()) for _ in range(count - 1))),
        replicas=tuple(draw(st.integers(1, 2)) for _ in range(count)),
        scripts={cell: draw(scripts(faulty[cell[0]])) for cell in cells},
        bridges={
            cell: draw(st.sampled_from(("pass", "pass", "pass", "raise", "nothing"))) if faulty[cell[0]] else "pass"
            for cell in cells
        },
        arrivals=tuple(draw(TIMES) for _ in range(requests)),
        acts=tuple(draw(acts) if faulty[request] else ("wait", 0.0) for request in range(requests)),
        policy=draw(st.sampled_from(("isolate", "fail_stop"))),
        abort_time=draw(TIMES),
        capacity=draw(st.sampled_from((1, 2, 100))),
        end=draw(st.sampled_from((3.0, math.inf))),
    )


def number(request_id: str) -> int:
    return int(request_id.removeprefix("r").split("-")[0])


def build(plan: Plan) -> tuple[Pipeline, list[SimStage]]:
    def bridge_to(stage: int):
        def function(context: BridgeContext) -> StageInput | None:
            what = plan.bridges[number(context.request_id), stage]
            if what == "raise":
                raise ValueError("bad bridge")
            return None if what == "nothing" else StageInput(token_ids=(1,))

        return function

    names = [f"s{index}" for index in range(len(plan.sources))]
    pipeline = Pipeline(
        [
            StageSpec(
                name=names[index],
                kind="simulated",
                replicas=plan.replicas[index],
                source=None if source is None else names[source],
                bridge=None if source is None else bridge_to(index),
                feed="output" if plan.streams[index] else "finish",
                final_output=True,
            )
            for index, source in enumerate(plan.sources)
        ]
    )

    def script_of(stage: int):
        return lambda request: plan.scripts[number(request.request_id), stage]

    sims = [
        SimStage(script=script_of(index), abort_time=plan.abort_time, capacity=plan.capacity)
        for index in range(len(names))
    ]
    return pipeline, sims


class Run:
    """Executes a plan and keeps what callers saw."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seen: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.ends: dict[int, list] = defaultdict(list)
        self.trace: list = []
        self.death: BaseException | None = None

    async def caller(self, runtime, index: int) -> None:
        act, when = self.plan.acts[index]
        await trio.sleep(self.plan.arrivals[index])
        deadline = max(when, 0.25) if act == "deadline" else DEADLINE
        try:
            async with runtime.request([1], request_id=f"r{index}", deadline=deadline) as request:
                with trio.move_on_after(when) if act == "leave" else trio.CancelScope() as scope:
                    async for event in request:
                        if isinstance(event, Output):
                            self.seen[index][event.stage_id].extend(event.token_ids)
                        if act == "slow":
                            await trio.sleep(when)
                    self.ends[index].append("finished")
            if scope.cancelled_caught:
                self.ends[index].append("left")
        except RequestError as error:
            self.ends[index].append(error)

    async def aborter(self, runtime, index: int, when: float) -> None:
        await trio.sleep(self.plan.arrivals[index] + when)
        try:
            aborted = await runtime.abort(f"r{index}")
        except EngineDied:
            return
        if aborted:
            before = {stage: len(ids) for stage, ids in self.seen[index].items()}
            await trio.sleep(10)
            assert before == {stage: len(ids) for stage, ids in self.seen[index].items()}, "an event after the abort"

    async def main(self) -> None:
        pipeline, self.sims = build(self.plan)
        try:
            async with trio.open_nursery() as callers:
                try:
                    async with simulated(
                        pipeline, *self.sims, on_engine_death=self.plan.policy, instruments=[self.trace.append]
                    ) as runtime:
                        self.runtime = runtime
                        async with trio.open_nursery() as aborters:
                            for index, (act, when) in enumerate(self.plan.acts):
                                callers.start_soon(self.caller, runtime, index)
                                if act == "abort":
                                    aborters.start_soon(self.aborter, runtime, index, when)
                            if self.plan.end < math.inf:
                                await trio.sleep(self.plan.end)
                                aborters.cancel_scope.cancel()
                            else:
                                await trio.sleep(2 * DEADLINE)
                                assert_empty(runtime)
                except EngineDied as error:
                    self.death = error
        finally:
            self.over = trio.current_time()


def produced(script: Script) -> list[int]:
    ids: list[int] = []
    for verb in script:
        if isinstance(verb, Chunk | Finish):
            ids.extend(verb.token_ids)
        if isinstance(verb, Finish | FinishSilently | Error | Stall | Die | Reject):
            break
    return ids


@settings(max_examples=300, deadline=None)
@given(plan=plans(), schedule=st.random_module())
def test_invariants(plan, schedule):
    del schedule  # drawing it is what makes the order of tasks vary from example to example
    outcome = Run(plan)
    run(outcome.main)
    count = len(plan.arrivals)

    # I1, I2: every caller saw exactly one end, and the trace tells of exactly one per admitted request.
    assert {index: len(ends) for index, ends in outcome.ends.items()} == dict.fromkeys(range(count), 1)
    terminals = Counter(
        event.request_id
        for event in outcome.trace
        if event.name in ("request.finished", "request.failed", "request.aborted", "request.expired")
    )
    submitted = {event.request_id for event in outcome.trace if event.name == "request.submitted"}
    assert terminals == dict.fromkeys(submitted, 1)

    # I5, I12: nothing is left; leaving took no longer than an abort and a close.
    orchestrator = outcome.runtime._orchestrator
    assert not orchestrator.tasks
    assert all(not replica.legs and not replica.load for replica in orchestrator.replicas())
    if plan.end < math.inf and outcome.death is None:
        assert outcome.over <= plan.end + plan.abort_time + 10

    # I4: what came out is what the stages made, in order; all of it where the request ended well.
    for index in range(count):
        for stage, seen in outcome.seen[index].items():
            whole = produced(plan.scripts[index, stage])
            if plan.streams[stage]:
                continue  # its script is played once per piece; checked in test_pieces below
            assert seen == whole[: len(seen)]
            if outcome.ends[index] == ["finished"]:
                assert seen == whole

    # I10: per request and stage one submission; all that follows goes to the same replica; nothing after an abort.
    for stage, sim in enumerate(outcome.sims):
        history: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for what, _, replica, *details in sim.log:
            for request_id in details:
                history[request_id].append((what, replica))
        for request_id, acts in history.items():
            names = [what for what, _ in acts]
            assert names[0] == "submit" or names == ["abort"], (stage, request_id, names)
            assert names.count("submit") <= 1
            assert "abort" not in names[:-1]
            assert len({replica for _, replica in acts}) == 1

    # I3: a request that meets no fault of its own and shares no replica with a death ends as if it were alone.
    dead = {(event.stage_id, event.replica_id) for event in outcome.trace if event.name == "replica.died"}
    for index in range(count):
        clean = plan.acts[index][0] == "wait" and all(
            plan.bridges[index, stage] == "pass" and isinstance(plan.scripts[index, stage][-1], Finish | FinishSilently)
            for stage in range(len(plan.sources))
        )
        clean = clean and not any(isinstance(plan.scripts[index, s][0], Reject) for s in range(len(plan.sources)))
        used = {
            (event.stage_id, event.replica_id)
            for event in outcome.trace
            if event.name == "leg.submitted" and event.request_id == f"r{index}"
        }
        stages_alive = {stage for stage, n in enumerate(plan.replicas) if any((stage, r) not in dead for r in range(n))}
        if not clean or plan.end < math.inf or len(stages_alive) < len(plan.replicas) or used & dead:
            continue
        if plan.policy == "fail_stop" and dead:
            continue
        # With a bounded capacity a stalled neighbour may hold the slots until its deadline, or for ever.
        if plan.capacity < 100:
            assert outcome.ends[index] == ["finished"] or isinstance(outcome.ends[index][0], DeadlineExceeded)
        else:
            assert outcome.ends[index] == ["finished"], outcome.ends[index]


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=6),
    pauses=st.lists(TIMES, min_size=6, max_size=6),
    take=TIMES,
    schedule=st.random_module(),
)
def test_pieces_arrive_in_order_and_none_is_lost(pieces, pauses, take, schedule):
    """I4 over a streaming edge: the receiving stage gets each token of its source exactly once, in order."""
    del schedule
    got: list[int] = []

    def receive(request):
        got.extend(request.input.token_ids or ())
        return (Chunk(request.input.token_ids or ()), Finish())

    script: list = []
    for piece, pause in zip(pieces, pauses, strict=False):
        script += [Wait(pause), Chunk(tuple(piece))]

    async def main():
        pipeline = Pipeline(
            [StageSpec(name="a", kind="simulated"), StageSpec(name="b", kind="simulated", feed="output")]
        )
        source = SimStage(script=lambda _: (*script, Finish()))
        target = SimStage(script=receive, submit_time=take)
        async with simulated(pipeline, source, target) as runtime:
            result = await runtime.generate([1])
            assert_empty(runtime)
        expected = [token for piece in pieces for token in piece]
        assert got == expected
        assert list(result["b"].token_ids) == expected

    run(main)
