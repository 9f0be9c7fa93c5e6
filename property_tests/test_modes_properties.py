"""Invariants tested: I1-I6, I8-I12, I14 over generated pipelines of all modes, scripts, faults and callers' acts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import attrs
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_trio.bridges import BridgeContext, Companion
from omni_trio.errors import EngineDied, RequestError, SessionClosed
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import (
    Chunk,
    Die,
    Error,
    Finish,
    FinishSilently,
    KvReady,
    LateChunk,
    Reject,
    Script,
    SimStage,
    Stall,
    Step,
    Wait,
)
from support import assert_empty, run, simulated

TIMES = st.sampled_from((0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 5.0))
DEADLINE = 1000.0
KV = {"remote_request_id": "p"}


@attrs.frozen
class Stage:
    source: int | None
    feed: str = "finish"
    final: bool = False
    replicas: int = 1


@attrs.frozen
class Caller:
    arrival: float
    act: str  # wait, leave, abort, deadline, slow
    when: float
    segments: tuple[tuple[str, tuple[int, ...]], ...] | None = None  # a session: what is sent, and how
    close: bool = True


@attrs.frozen
class Plan:
    """One simulated run, printed as what makes it again."""

    stages: tuple[Stage, ...]
    pair: bool
    companions: int
    bundle_timeout: float
    scripts: dict[tuple[int, int, str], Script]  # by (request, stage, role or "")
    bridges: dict[tuple[int, int], str]  # by (request, receiving stage)
    callers: tuple[Caller, ...]
    policy: str
    abort_time: float
    capacity: int
    end: float


verbs = st.one_of(
    TIMES.map(Wait),
    st.lists(st.integers(0, 99), max_size=3).map(lambda ids: Chunk(tuple(ids))),
    st.sampled_from((LateChunk(), KvReady(), Step(1, 2))),
)
endings = st.sampled_from((Finish(), Finish("length", (7, 8)), FinishSilently()))
faults = st.sampled_from((Error(), Stall(), Die(), Reject()))


@st.composite
def scripts(draw, *, faulty: bool, prefills: bool) -> Script:
    body = tuple(draw(st.lists(verbs, max_size=4)))
    if faulty and draw(st.integers(0, 3)) == 0:
        fault = draw(faults)
        return (fault, *body) if isinstance(fault, Reject) else (*body, fault)
    if prefills:
        return (*body, Finish("length", (0,), kv=None if faulty and draw(st.integers(0, 5)) == 0 else KV))
    return (*body, draw(endings))


@st.composite
def shapes(draw) -> tuple[tuple[Stage, ...], bool, int]:
    count = draw(st.integers(1, 5))
    pair = count > 1 and draw(st.integers(0, 3)) == 0
    companions = 0 if pair or count == 1 else draw(st.sampled_from((0, 0, 1, 2, 3)))
    stages: list[Stage] = []
    for index in range(count):
        replicas = draw(st.integers(1, 2))
        final = draw(st.booleans())
        if index == 0:
            stages.append(Stage(None, final=final and not pair, replicas=replicas))
        elif pair and index == 1:
            stages.append(Stage(0, final=final, replicas=replicas))
        else:
            source = draw(st.integers(1 if pair else 0, index - 1))
            feeds = ("finish", "kv") if companions and source == 0 else ("finish", "output", "kv", "connector")
            stages.append(Stage(source, draw(st.sampled_from(feeds)), final, replicas))
    if companions and not any(stage.source == 0 for stage in stages):
        companions = 0
    sources = {stage.source for stage in stages}
    return (
        tuple(attrs.evolve(stage, final=stage.final or index not in sources) for index, stage in enumerate(stages)),
        pair,
        companions,
    )


@st.composite
def callers(draw, *, faulty: bool, sessions: bool) -> Caller:
    act = draw(st.sampled_from(("wait", "leave", "abort", "deadline", "slow"))) if faulty else "wait"
    segments = None
    if sessions and draw(st.booleans()):
        ids = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)
        way = st.sampled_from(("send", "send", "send", "barge in"))
        segments = tuple(draw(st.lists(st.tuples(way, ids), min_size=1, max_size=4)))
    return Caller(draw(TIMES), act, draw(TIMES), segments, close=not faulty or draw(st.integers(0, 3)) > 0)


@st.composite
def plans(draw) -> Plan:
    stages, pair, companions = draw(shapes())
    requests = draw(st.integers(1, 4))
    faulty = [draw(st.booleans()) for _ in range(requests)]
    sessions = not (pair or companions or any(stage.feed == "kv" for stage in stages))
    cells = [
        (request, stage, role)
        for request in range(requests)
        for stage in range(len(stages))
        for role in ("", *(f"c{index}" for index in range(companions if stage == 0 else 0)))
    ]
    return Plan(
        stages=stages,
        pair=pair,
        companions=companions,
        bundle_timeout=draw(st.sampled_from((3.0, 100.0))),
        scripts={cell: draw(scripts(faulty=faulty[cell[0]], prefills=pair and cell[1] == 0)) for cell in cells},
        bridges={
            (request, stage): draw(st.sampled_from(("pass", "pass", "pass", "raise", "nothing")))
            if faulty[request]
            else "pass"
            for request in range(requests)
            for stage in range(1, len(stages))
        },
        callers=tuple(draw(callers(faulty=faulty[index], sessions=sessions)) for index in range(requests)),
        policy=draw(st.sampled_from(("isolate", "fail_stop"))),
        abort_time=draw(TIMES),
        capacity=draw(st.sampled_from((1, 2, 100))),
        end=draw(st.sampled_from((3.0, math.inf, math.inf))),
    )


def number(request_id: str) -> int:
    return int(request_id.removeprefix("r").split("-")[0])


def role_of(request_id: str) -> str:
    tail = request_id.rpartition(".")[2]
    return tail if tail.startswith("c") else ""


def build(plan: Plan) -> tuple[Pipeline, list[SimStage]]:
    def is_session(request_id: str) -> bool:
        return plan.callers[number(request_id)].segments is not None

    def bridge_to(stage: int):
        def function(context: BridgeContext) -> StageInput | None:
            what = plan.bridges[number(context.request_id), stage]
            if stage in children_of_first and plan.companions:
                assert len(context.companions) == plan.companions, "an incomplete bundle"
                assert all(one.finish_reason is not None for one in context.companions.values())
            if what == "raise":
                raise ValueError("bad bridge")
            if is_session(context.request_id):
                tokens, _ = context.new()
                return StageInput(token_ids=tokens) if tokens and what == "pass" else None
            return None if what == "nothing" else StageInput(token_ids=(1,))

        return function

    def script_of(stage: int):
        def script(request) -> Script:
            if is_session(request.request_id):
                return (*(Chunk((token,)) for token in request.input.token_ids or ()), Finish())
            return plan.scripts[number(request.request_id), stage, role_of(request.request_id)]

        return script

    def expand(context) -> list[Companion]:
        return [Companion(role=f"c{index}", input=context.prompt) for index in range(plan.companions)]

    children_of_first = {index for index, stage in enumerate(plan.stages) if stage.source == 0}
    roles = ("prefill", "decode") if plan.pair else ()
    specs = []
    for index, stage in enumerate(plan.stages):
        role = roles[index] if index < len(roles) else None
        bridged = index > 0 and role is None and stage.feed != "connector"
        specs.append(
            StageSpec(
                name=f"s{index}",
                kind="simulated",
                replicas=stage.replicas,
                source=None if stage.source is None else f"s{stage.source}",
                bridge=bridge_to(index) if bridged else None,
                feed=stage.feed,
                role=role,
                final_output=stage.final,
                **({"chunk_timeout": 50.0} if stage.feed == "connector" else {}),
            )
        )
    bundle = {"expand": expand, "bundle_timeout": plan.bundle_timeout} if plan.companions else {}
    pipeline = Pipeline(specs, **bundle)
    sims = [
        SimStage(script=script_of(index), abort_time=plan.abort_time, capacity=plan.capacity)
        for index in range(len(plan.stages))
    ]
    return pipeline, sims


class Run:
    """Executes a plan and keeps what callers saw."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seen: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
        self.closed: dict[int, set[int]] = defaultdict(set)
        self.ends: dict[int, list] = defaultdict(list)
        self.taken: dict[int, list[list[int]]] = defaultdict(lambda: [[]])
        self.trace: list = []
        self.death: BaseException | None = None

    def instrument(self, event) -> None:
        self.trace.append(event)
        for replica in self.runtime._orchestrator.replicas() if hasattr(self, "runtime") else ():
            if replica.state.value == "ready":  # I8: a slot counts as free only when the work has ended
                assert len(replica.client._work) <= replica.load

    async def read(self, index: int, request) -> None:
        async for event in request:
            if isinstance(event, Output):
                assert event.stage_id not in self.closed[index], "an output after the stage's last one"
                self.seen[index][event.stage_id, event.turn].extend(event.token_ids)
                if event.finished:
                    self.closed[index].add(event.stage_id)
            if self.plan.callers[index].act == "slow":
                await trio.sleep(self.plan.callers[index].when)

    async def send_all(self, index: int, stream) -> None:
        caller = self.plan.callers[index]
        try:
            for way, ids in caller.segments or ():
                if way == "send":
                    await stream.send(ids)
                    self.taken[index][-1].extend(ids)
                else:
                    await stream.barge_in(ids)
                    self.closed[index].clear()
                    self.taken[index].append(list(ids))
            if caller.close:
                await stream.aclose()
        except (SessionClosed, RequestError):
            pass  # the reader is told the reason

    async def caller(self, runtime, index: int) -> None:
        caller = self.plan.callers[index]
        await trio.sleep(caller.arrival)
        deadline = max(caller.when, 0.25) if caller.act == "deadline" else DEADLINE
        name = f"r{index}"
        try:
            if caller.segments is None:
                handle = runtime.request([1, 2], request_id=name, deadline=deadline)
            else:
                handle = runtime.open_stream(request_id=name, deadline=deadline)
            async with handle as request:
                with trio.move_on_after(caller.when) if caller.act == "leave" else trio.CancelScope() as scope:
                    if caller.segments is None:
                        await self.read(index, request)
                    else:
                        await self.talk(index, request)
                    self.ends[index].append("finished")
            if scope.cancelled_caught:
                self.ends[index].append("left")
        except RequestError as error:
            self.ends[index].append(error)

    async def talk(self, index: int, stream) -> None:
        failure: RequestError | None = None

        async def read() -> None:
            nonlocal failure
            try:
                await self.read(index, stream)
            except RequestError as error:
                failure = error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await self.send_all(index, stream)
        if failure is not None:
            raise failure

    async def aborter(self, runtime, index: int, when: float) -> None:
        await trio.sleep(self.plan.callers[index].arrival + when)
        try:
            aborted = await runtime.abort(f"r{index}")
        except EngineDied:
            return
        if aborted:
            before = {key: len(ids) for key, ids in self.seen[index].items()}
            await trio.sleep(10)
            assert before == {key: len(ids) for key, ids in self.seen[index].items()}, "an event after the abort"

    async def main(self) -> None:
        pipeline, self.sims = build(self.plan)
        async with trio.open_nursery() as callers:
            try:
                async with simulated(
                    pipeline, *self.sims, on_engine_death=self.plan.policy, instruments=[self.instrument]
                ) as runtime:
                    self.runtime = runtime
                    async with trio.open_nursery() as aborters:
                        for index, caller in enumerate(self.plan.callers):
                            callers.start_soon(self.caller, runtime, index)
                            if caller.act == "abort":
                                aborters.start_soon(self.aborter, runtime, index, caller.when)
                        if self.plan.end < math.inf:
                            await trio.sleep(self.plan.end)
                            aborters.cancel_scope.cancel()
                        else:
                            await trio.sleep(3 * DEADLINE)
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


TERMINALS = ("request.finished", "request.failed", "request.aborted", "request.expired")


@given(plan=plans(), schedule=st.random_module())
def test_all_modes(plan, schedule):
    del schedule  # drawing it is what makes the order of tasks vary from example to example
    outcome = Run(plan)
    run(outcome.main)
    check_ends(plan, outcome)
    check_outputs(plan, outcome)
    check_stages(plan, outcome)
    check_companions(plan, outcome)
    check_holds(plan, outcome)


def check_ends(plan: Plan, outcome: Run) -> None:
    """I1, I2: one end per caller, one terminal per request. I5, I11, I12: nothing is left, and in time."""
    count = len(plan.callers)
    assert {index: len(ends) for index, ends in outcome.ends.items()} == dict.fromkeys(range(count), 1)
    terminals = Counter(event.request_id for event in outcome.trace if event.name in TERMINALS)
    submitted = {event.request_id for event in outcome.trace if event.name == "request.submitted"}
    assert terminals == dict.fromkeys(submitted, 1)
    orchestrator = outcome.runtime._orchestrator
    assert not orchestrator.tasks
    assert all(not replica.legs and not replica.load for replica in orchestrator.replicas())
    stats = outcome.runtime.stats()
    assert stats.finished + stats.failed + stats.aborted + stats.expired + stats.rejected == count
    assert stats.finished == sum(1 for ends in outcome.ends.values() if ends == ["finished"]) + sum(
        1
        for index, ends in outcome.ends.items()
        if ends == ["left"] and any(e.name == "request.finished" and e.request_id == f"r{index}" for e in outcome.trace)
    )
    if plan.end < math.inf and outcome.death is None:
        assert outcome.over <= plan.end + plan.abort_time + 10


def check_outputs(plan: Plan, outcome: Run) -> None:
    """I4: what came out is what the stages made, in order; all of it where the request ended well."""
    for index, caller in enumerate(plan.callers):
        ended_well = outcome.ends[index] == ["finished"]
        if caller.segments is not None:
            # Every stage repeats what it is given, so the tokens of a turn are those that were sent in it.
            turn = len(outcome.taken[index]) - 1
            for stage in range(len(plan.stages)):
                way = path(plan, stage)
                if ended_well and plan.stages[stage].final and all(plan.stages[s].feed != "connector" for s in way):
                    assert outcome.seen[index][stage, turn] == outcome.taken[index][-1], (index, stage)
            continue
        for (stage, _), seen in outcome.seen[index].items():
            if plan.stages[stage].feed == "output":
                continue  # its script is played once per piece; checked elsewhere
            whole = produced(plan.scripts[index, stage, ""])
            assert seen == whole[: len(seen)]
            if ended_well:
                assert seen == whole


def path(plan: Plan, stage: int) -> list[int]:
    way = [stage]
    while (source := plan.stages[way[-1]].source) is not None:
        way.append(source)
    return way


def check_stages(plan: Plan, outcome: Run) -> None:
    """I10: per request (and companion, and turn) one submission, to one replica; nothing after an abort."""
    for stage, sim in enumerate(outcome.sims):
        history: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for what, _, replica, *details in sim.log:
            if what != "release_kv":
                for request_id in details:
                    history[request_id].append((what, replica))
        for request_id, acts in history.items():
            names = [what for what, _ in acts]
            assert names[0] == "submit" or names == ["abort"], (stage, request_id, names)
            assert names.count("submit") <= 1
            assert "abort" not in names[:-1]
            assert len({replica for _, replica in acts}) == 1


def check_companions(plan: Plan, outcome: Run) -> None:
    """I9: the next stage starts when all companions have ended, once; they share their request's replica."""
    if not plan.companions:
        return
    ended: Counter[str] = Counter()
    for event in outcome.trace:
        if event.name == "companion.finished" and "error" not in event.detail:
            ended[event.request_id] += 1
        if event.name == "leg.submitted" and plan.stages[event.stage_id].source == 0:
            assert ended[event.request_id] == plan.companions
    used: dict[str, set[int]] = defaultdict(set)
    for what, _, replica, *details in outcome.sims[0].log:
        if what == "submit":
            used[details[0].split(".")[0]].add(replica)
    assert all(len(replicas) == 1 for replicas in used.values())
    assert not any(".c" in (event.request_id or "") for event in outcome.trace)


def check_holds(plan: Plan, outcome: Run) -> None:
    """Every KV cache that a prefill has kept is taken over or released, once."""
    if not plan.pair:
        return
    released = Counter(ids[0] for what, _, _, *ids in outcome.sims[1].log if what == "release_kv")
    assert all(times == 1 for times in released.values())
    finished = {e.request_id for e in outcome.trace if e.name == "request.finished"}
    assert not {f"r{number(request_id)}" for request_id in released} & finished
    held = {
        e.request_id
        for e in outcome.trace
        if e.name == "leg.finished" and e.stage_id == 0 and e.detail == "length"
        and produced_kv(plan, number(e.request_id))
    }  # fmt: skip
    decoded = {e.request_id for e in outcome.trace if e.name == "leg.submitted" and e.stage_id == 1}
    unreleased = {e.request_id for e in outcome.trace if e.name == "kv.unreleased"}
    assert held <= decoded | {f"r{number(one)}" for one in released} | unreleased


def produced_kv(plan: Plan, index: int) -> bool:
    return any(isinstance(verb, Finish) and verb.kv for verb in plan.scripts[index, 0, ""])
