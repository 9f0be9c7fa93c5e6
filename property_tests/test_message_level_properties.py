"""Invariants tested at the message level: I1, I2, I4, I5, I6, I12 over random commands, faults, readers and ends."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import attrs
import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from omni_trio.errors import EngineDied
from omni_trio.message_level import (
    Abort,
    AbortResult,
    AddCompanionRequest,
    AddRequest,
    CollectiveRpc,
    CollectiveRpcResult,
    Command,
    ErrorEvent,
    Event,
    OutputEvent,
    RegisterRemoteReplica,
    Shutdown,
    StreamingUpdate,
    companions_by_message,
    open_orchestrator,
)
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, Error, Finish, FinishSilently, LateChunk, Reject, SimStage, Stall, Wait
from support import run, stage

IDS = ("a", "b", "c", "d", "e")
TIMES = st.sampled_from((0.0, 0.0, 0.0, 0.5, 1.0, 5.0))
LONG = 1000.0
"""Virtual seconds after which whatever has not ended by itself has to be ended."""

ids = st.sampled_from(IDS)
names = st.sampled_from(("r1", "r2"))
prompts = st.sampled_from(("w", "w w", [1, 2], {"prompt_token_ids": [1], "k": 1}, {"prompt": "w"}))
WRONG = (
    {"prompt": ""},
    {"prompt": None},
    {"prompt": 7},
    {"deadline": 0.0},
    {"final_stage_id": 2},
    {"final_output_stage_ids": ()},
    {"sampling_params_list": ()},
    {"request_id": 7},
)


def companion(parent: str, role: str) -> AddCompanionRequest:
    return AddCompanionRequest(companion_id=f"{parent}.{role}", parent_id=parent, role=role, prompt=[2])


@st.composite
def requests(draw, *, expand: bool) -> AddRequest:
    name = draw(ids)
    given = {
        "prompt": draw(prompts),
        "deadline": draw(st.sampled_from((LONG, 3.0))),
        "final_stage_id": draw(st.sampled_from((None, 0, 1))),
    }
    if expand:
        roles = draw(st.sampled_from((("x",), (), ("x", "y"))))
        if draw(st.booleans()):
            given["companions"] = [companion(name, role) for role in roles]
        else:
            given["companion_ids"] = [f"{name}.{role}" for role in roles]
    else:
        given["resumable"] = draw(st.booleans())
        if given["final_stage_id"] is None:
            given["final_output_stage_ids"] = draw(st.sampled_from((None, (0,), (1,), (0, 1))))
    if draw(st.integers(0, 9)) == 9:
        given |= draw(st.sampled_from((*WRONG, {"resumable": expand, "companion_ids": () if expand else ("z",)})))
    return AddRequest(**{"request_id": name, **given})


updates = st.builds(StreamingUpdate, request_id=ids, prompt=st.just([3]), resumable=st.booleans())
companions = st.builds(companion, ids, st.sampled_from(("x", "y")))
aborts = st.builds(
    Abort, request_ids=st.lists(ids | ids.map(lambda one: f"{one}.x"), max_size=3), rpc_id=st.none() | names
)
calls = st.builds(
    CollectiveRpc,
    rpc_id=names,
    method=st.sampled_from(("echo", "wait", "nonsense")),
    args=st.just((1.0,)),
    timeout=st.sampled_from((None, 0.5, math.nan)),
    stage_ids=st.none() | st.lists(st.integers(-1, 1), max_size=2),
)
refused = st.sampled_from(
    (RegisterRemoteReplica(stage_id=0, replica_id=0), Abort(request_ids="no list", rpc_id="r1"))  # type: ignore[arg-type]
)
verbs = st.one_of(TIMES.map(Wait), st.integers(1, 99).map(lambda token: Chunk((token,))), st.just(LateChunk()))
endings = st.sampled_from(
    (Finish("length", (7, 8)), Finish("stop", (9,)), Finish(), FinishSilently(), Error(), Stall(), Die(), Reject())
)


@st.composite
def scripts(draw):
    body, end = tuple(draw(st.lists(verbs, max_size=4))), draw(endings)
    return (end, *body) if isinstance(end, Reject) else (*body, end)


@attrs.frozen
class Plan:
    """One run, printed as what makes it again."""

    expand: bool
    policy: str
    replicas: int
    scripts: tuple
    steps: tuple[tuple[float, Command], ...]
    end: str
    read_time: float
    command_buffer: int
    event_buffer: int
    abort_time: float


@st.composite
def plans(draw) -> Plan:
    expand = draw(st.booleans())
    adding = requests(expand=expand)
    kinds = (adding, adding, adding, companions if expand else updates, aborts, calls, refused)
    steps = [(draw(TIMES), draw(kinds[draw(st.integers(0, len(kinds) - 1))])) for _ in range(draw(st.integers(4, 16)))]
    return Plan(
        expand=expand,
        policy=draw(st.sampled_from(("isolate", "fail_stop"))),
        replicas=draw(st.integers(1, 2)),
        scripts=tuple(draw(st.lists(scripts(), min_size=1, max_size=6))),
        steps=tuple(steps),
        end=draw(st.sampled_from(("close", "shutdown"))),
        read_time=draw(st.sampled_from((0.0, 0.0, 0.25, 2.0))),
        command_buffer=draw(st.sampled_from((0, 1, 256))),
        event_buffer=draw(st.sampled_from((0, 1, 256))),
        abort_time=draw(TIMES),
    )


class Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sent: list[Command] = []
        self.got: list[Event] = []
        self.death: EngineDied | None = None
        self.trace: list = []

    def script(self, request):
        scripts = self.plan.scripts
        return scripts[len(self.trace) % len(scripts)]

    async def read(self, events) -> None:
        async for one in events:
            self.got.append(one)
            await trio.sleep(self.plan.read_time)

    async def send(self, commands) -> None:
        try:
            for pause, command in self.plan.steps:
                await trio.sleep(pause)
                await commands.send(command)
                self.sent.append(command)
            if self.plan.end == "shutdown":
                await commands.send(Shutdown())
            else:
                await trio.sleep(2 * LONG)  # a request or a stall of a call has ended by then
                await commands.aclose()
        except trio.BrokenResourceError:
            pass  # an engine has died

    async def main(self) -> None:
        plan = self.plan
        pipeline = Pipeline(
            [stage("s0", final_output=True, replicas=plan.replicas), stage("s1")],
            expand=companions_by_message if plan.expand else None,
        )
        self.sims = [SimStage(script=self.script, abort_time=plan.abort_time) for _ in pipeline.stages]
        try:
            async with (
                open_orchestrator(
                    pipeline,
                    clients={"s0": self.sims[0], "s1": self.sims[1]},
                    on_engine_death=plan.policy,
                    command_buffer=plan.command_buffer,
                    event_buffer=plan.event_buffer,
                    news_timeout=LONG,
                    instruments=[self.trace.append],
                ) as (commands, events),
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self.send, commands)
                await self.read(events)
        except EngineDied as error:
            self.death = error


def id_of(one: AddRequest) -> str:
    return one.request_id if isinstance(one.request_id, str) else repr(one.request_id)


def is_last(one: Event) -> bool:
    return one.finished if isinstance(one, OutputEvent) else isinstance(one, ErrorEvent)


@settings(max_examples=600, deadline=None)
@given(plan=plans(), schedule=st.random_module())
def test_invariants(plan, schedule):
    del schedule  # drawing it is what makes the order of tasks vary from example to example
    outcome = Run(plan)
    run(outcome.main)
    got = outcome.got
    event(f"submissions: {min(9, len([1 for sim in outcome.sims for note in sim.log if note[0] == 'submit']))}")
    event(f"ended by {'death' if outcome.death else plan.end}")

    # I1, I2: each add_request is answered by one last event, or refused because its id was taken.
    added = [one for one in outcome.sent if isinstance(one, AddRequest)]
    sent = Counter(map(id_of, added))
    taken = Counter(
        one.refused_id
        for one in got
        if isinstance(one, ErrorEvent) and one.refused == "add_request" and one.request_id is None
    )
    ends = Counter(one.request_id for one in got if is_last(one) and one.request_id is not None)
    assert ends + taken == sent

    # And nothing of a request comes after its last event: what follows belongs to a later one of the same id.
    for name in IDS:
        mine = [one for one in got if getattr(one, "request_id", None) == name]
        assert not mine or is_last(mine[-1])

    # Every call is answered once, or refused; an abort without an rpc_id is not.
    calls = Counter(one.rpc_id for one in outcome.sent if isinstance(one, Abort | CollectiveRpc) and one.rpc_id)
    answers = Counter(one.rpc_id for one in got if isinstance(one, AbortResult | CollectiveRpcResult))
    refused = Counter(
        one.refused_id
        for one in got
        if isinstance(one, ErrorEvent) and one.refused in ("abort", "collective_rpc") and one.refused_id is not None
    )
    assert answers + refused == calls

    # Fatal errors come where an engine died, the last of them for all; no event carries a companion's id.
    fatal = [one for one in got if isinstance(one, ErrorEvent) and one.fatal]
    assert bool(fatal) == (outcome.death is not None)
    if fatal:
        assert got[-1].fatal
        assert got[-1].request_id is None
    assert {getattr(one, "request_id", None) for one in got} <= {*map(id_of, added), None}

    # I6: an abort is answered after the last events of its requests.
    for one in got:
        if isinstance(one, AbortResult):
            for last in one.abort_outputs:
                assert got.index(last) < got.index(one)

    # The runtime saw as many ends as it admitted requests (I1), and holds nothing (I5).
    admitted = Counter(one.request_id for one in outcome.trace if one.name == "request.submitted")
    verdicts = Counter(
        one.request_id
        for one in outcome.trace
        if one.name in ("request.finished", "request.failed", "request.aborted", "request.expired")
    )
    assert admitted == verdicts

    # I10: after an abort a stage hears nothing more of a request.
    for sim in outcome.sims:
        aborted: dict[int, set[str]] = defaultdict(set)
        for what, _, replica, *details in sim.log:
            if what == "abort":
                aborted[replica].update(details)
            elif what in ("submit", "update"):
                assert details[0] not in aborted[replica]


@settings(max_examples=100, deadline=None)
@given(plan=plans(), after=TIMES, by=st.sampled_from(("leaving", "closing", "cancelling")), schedule=st.random_module())
def test_an_early_end(plan, after, by, schedule):
    """I12: whoever does not want to hear any more is not held up, and nothing is left at the stages."""
    del schedule
    outcome = Run(plan)

    async def main() -> None:
        outcome.sims = [SimStage(script=outcome.script, abort_time=plan.abort_time) for _ in range(2)]
        try:
            with trio.move_on_after(after) if by == "cancelling" else trio.CancelScope():
                async with open_orchestrator(
                    Pipeline([stage("s0", final_output=True), stage("s1")]),
                    clients={"s0": outcome.sims[0], "s1": outcome.sims[1]},
                    on_engine_death=plan.policy,
                    command_buffer=plan.command_buffer,
                    event_buffer=plan.event_buffer,
                    instruments=[outcome.trace.append],
                ) as (commands, events):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(outcome.send, commands)
                        await trio.sleep(after)
                        if by == "closing":
                            await events.aclose()
                        nursery.cancel_scope.cancel()
        except EngineDied:
            pass
        assert trio.current_time() <= after + plan.abort_time + 0.5  # the runtime's own wait for news of a death

    run(main)
    assert not Counter(one.name for one in outcome.trace)["request.submitted"] or outcome.trace[-1].name == (
        "runtime.closed"
    )
    submitted = {one.request_id for one in outcome.trace if one.name == "request.submitted"}
    ended = {
        one.request_id
        for one in outcome.trace
        if one.name in ("request.finished", "request.failed", "request.aborted", "request.expired")
    }
    assert submitted == ended
