"""Every check of traces finds what it is for: sound traces, spoilt in one place each, and clients that break rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import asynccontextmanager

import attrs
import pytest
from msgspec.structs import replace

from omni_trio.testing import (
    Chunk,
    Die,
    Error,
    Finish,
    KvReady,
    LateChunk,
    OperatorAct,
    Plan,
    RequestPlan,
    SegmentPlan,
    StagePlan,
    Stall,
    Trace,
    Wait,
    check_healed,
    check_model,
    heal,
    tokens,
)
from omni_trio.testing.checks import CHECKS, NOT_VISIBLE, BrokenInvariants, Violation, check_all
from omni_trio.testing.checks import isolation as _isolation
from omni_trio.testing.model import permitted, times_alone
from omni_trio.testing.simulation import Hung, run_simulation
from omni_trio.testing.trace import Entry

OURS = [
    name
    for name, check in CHECKS.items()
    if check.find.__module__.rpartition(".")[2] in ("isolation", "life", "requests", "stages")
]
"""The checks that are tried here; those of other modules have tests of their own."""

KV = {"remote_request_id": "there"}

# ---- plans

TWO = (StagePlan(final=True, replicas=2), StagePlan(source=0, final=True, replicas=2))
WORK = (tokens(3, each=1.0), tokens(2, first=10, each=1.0))

PLAIN = Plan(stages=TWO, requests=(RequestPlan(scripts=WORK), RequestPlan(act="abort", when=1.5, scripts=WORK)))
LEFT = replace(PLAIN, requests=(RequestPlan(act="leave", when=1.5, scripts=WORK),))
SESSION = Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True)),
    requests=(RequestPlan(segments=(SegmentPlan((1, 2)), SegmentPlan((3,), after=1.0))),),
)
DEATH = Plan(
    stages=(StagePlan(final=True, replicas=2),),
    requests=(RequestPlan(scripts=(tokens(3, each=1.0),)), RequestPlan(scripts=((Wait(1.5), Die()),))),
)
KILLED = Plan(
    stages=TWO, requests=(RequestPlan(scripts=WORK),), operator=(OperatorAct(at=0.5, act="kill", stage=1, replica=1),)
)
COMPANIONS = Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True)),
    requests=(RequestPlan(companions=((Wait(1.0), Finish()), (Finish(),))),),
    companions=2,
)
BAD_COMPANION = replace(
    COMPANIONS, requests=(RequestPlan(scripts=((Stall(),),), companions=((Finish(),), (Wait(1.0), Error()))),)
)
PAIR = Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True, submit_time=1.0)),
    requests=(RequestPlan(act="abort", when=1.5, scripts=((Wait(1.0), Finish("length", (0,), KV)), (Finish(),))),),
    pair=True,
)
EARLY = Plan(
    stages=(StagePlan(), StagePlan(source=0, feed="kv", final=True)),
    requests=(RequestPlan(scripts=((KvReady(), Wait(5.0), Finish()), (Wait(1.0), Finish()))),),
)
PAUSED = Plan(
    stages=(StagePlan(final=True),),
    requests=(RequestPlan(), RequestPlan(arrival=2.0)),
    operator=(OperatorAct(at=1.0, act="pause"), OperatorAct(at=3.0, act="resume")),
)
ALL = (PLAIN, SESSION, DEATH, KILLED, COMPANIONS, BAD_COMPANION, PAIR, EARLY, PAUSED)


# ---- spoiling traces


def is_(who: str, what: str, **fields) -> Callable[[Entry], bool]:
    wanted = {"who": who, "what": what, **fields}
    return lambda entry: all(getattr(entry, field) == value for field, value in wanted.items())


def find(trace: Trace, which: Callable[[Entry], bool]) -> int:
    return next(at for at, entry in enumerate(trace.entries) if which(entry))


def changed(trace: Trace, which: Callable[[Entry], bool], **fields) -> Trace:
    """All such entries with other fields."""
    assert any(map(which, trace.entries)), trace.timeline()
    return replace(trace, entries=tuple(replace(one, **fields) if which(one) else one for one in trace.entries))


def dropped(trace: Trace, *which: Callable[[Entry], bool]) -> Trace:
    for one in which:
        assert any(map(one, trace.entries)), trace.timeline()
    return replace(trace, entries=tuple(entry for entry in trace.entries if not any(one(entry) for one in which)))


def moved(trace: Trace, which: Callable[[Entry], bool], behind: Callable[[Entry], bool]) -> Trace:
    """The first such entry moved behind another one, to its time."""
    entries = list(trace.entries)
    entry = entries.pop(find(trace, which))
    at = next(at for at, one in enumerate(entries) if behind(one))
    entries.insert(at + 1, replace(entry, time=entries[at].time))
    return replace(trace, entries=tuple(entries))


def doubled(trace: Trace, which: Callable[[Entry], bool], **fields) -> Trace:
    """The first such entry once more, with other fields."""
    entries = list(trace.entries)
    at = find(trace, which)
    entries.insert(at + 1, replace(entries[at], **fields))
    return replace(trace, entries=tuple(entries))


def lost(trace: Trace) -> Trace:
    """Request 0 lost a replica that it never had to do with."""
    trace = changed(trace, is_("caller", "end", request=0), detail="ReplicaLost", stage=0)
    trace = changed(trace, is_("runtime", "verdict", request=0), detail="failed")
    audit = replace(trace.audit, failed=trace.audit.failed + 1, finished=trace.audit.finished - 1)
    return replace(trace, audit=audit)


def late_output(trace: Trace) -> Trace:
    """Request 1 hears something after its abort, and then of its end."""
    after = is_("operator", "abort done")
    return moved(moved(trace, is_("caller", "end", request=1), after), is_("caller", "output", request=1), after)


@attrs.frozen
class Planted:
    plan: Plan
    spoil: Callable[[Trace], Trace]


PLANTED: dict[str, list[Planted]] = {
    "one_end": [
        Planted(PLAIN, lambda trace: doubled(trace, is_("caller", "end", request=0))),
        Planted(PLAIN, lambda trace: moved(trace, is_("caller", "output", request=0, last=True, stage=1),
                                           is_("caller", "end", request=0))),
        Planted(PLAIN, lambda trace: doubled(trace, is_("runtime", "verdict", request=0))),
        Planted(LEFT, lambda trace: dropped(trace, is_("runtime", "verdict"))),
    ],
    "liveness": [
        Planted(PLAIN, lambda trace: dropped(trace, is_("caller", "end", request=0))),
        Planted(SESSION, lambda trace: changed(trace, is_("runtime", "verdict"), time=400.0)),
        Planted(
            replace(PLAIN, requests=(RequestPlan(act="leave", when=1.0, scripts=WORK),)),
            lambda trace: changed(trace, is_("caller", "left"), time=3.0),
        ),
        Planted(
            replace(PLAIN, requests=(RequestPlan(act="deadline", when=1.0, scripts=WORK),)),
            lambda trace: changed(trace, is_("runtime", "verdict"), time=1.5),
        ),
    ],
    "conservation": [
        Planted(PLAIN, lambda trace: changed(trace, is_("caller", "output", request=1), tokens=(9,))),
        Planted(
            replace(PLAIN, requests=(RequestPlan(scripts=(tokens(2), (Finish(),))),)),
            lambda trace: changed(trace, is_("caller", "output", stage=1), last=False),
        ),
    ],
    "last_word": [Planted(PLAIN, lambda trace: doubled(trace, is_("caller", "output", request=0, last=True, stage=1),
                                                       tokens=(), last=False))],
    "segments": [
        Planted(SESSION, lambda trace: changed(trace, is_("caller", "output", segment=0), segment=1)),
        Planted(SESSION, lambda trace: changed(trace, is_("stage", "submit", stage=1), tokens=(9,))),
    ],
    "fresh": [Planted(PLAIN, lambda trace: moved(trace, is_("caller", "output", request=0, stage=0),
                                                 is_("stage", "says", request=0, tokens=(1,))))],
    "model": [
        Planted(PLAIN, lambda trace: changed(changed(trace, is_("stage", "says", request=0, tokens=(0,)), tokens=(9,)),
                                             is_("caller", "output", request=0, tokens=(0,)), tokens=(9,))),
    ],
    "isolation": [Planted(DEATH, lost)],
    "undelayed": [
        Planted(PLAIN, lambda trace: changed(trace, is_("stage", "submit", request=0, stage=1), time=3.5)),
        Planted(PLAIN, lambda trace: changed(trace, is_("runtime", "verdict", request=0), time=5.5)),
    ],
    "binding": [
        Planted(PLAIN, lambda trace: doubled(trace, is_("stage", "submit", request=0, stage=1))),
        Planted(PLAIN, lambda trace: doubled(trace, is_("stage", "submit", request=0, stage=1), what="update")),
        Planted(PLAIN, lambda trace: doubled(trace, is_("stage", "abort", request=1))),
        Planted(PLAIN, lambda trace: doubled(trace, is_("stage", "abort", request=1), what="update")),
        Planted(PLAIN, lambda trace: doubled(trace, is_("stage", "says", request=1), replica=7, tokens=())),
        Planted(PLAIN, lambda trace: doubled(trace, is_("runtime", "verdict", request=0), who="stage", what="abort",
                                             stage=0, replica=find_replica(trace, 0), detail="")),
        Planted(SESSION, lambda trace: changed(trace, is_("stage", "submit", stage=1), what="update")),
    ],
    "incarnation": [
        Planted(KILLED, lambda trace: changed(trace, lambda entry: entry.stage == 1 and entry.request == 0, replica=1)),
    ],
    "source_replica": [Planted(PLAIN, lambda trace: changed(trace, is_("caller", "output", request=0, stage=1),
                                                            replica=7))],
    "capacity": [Planted(PLAIN, lambda trace: changed(trace, is_("stage", "submit", request=0, stage=1), load=0))],
    "fan_in": [
        Planted(COMPANIONS, lambda trace: moved(trace, is_("stage", "says", role="c0", last=True),
                                                is_("stage", "submit", stage=1))),
        Planted(COMPANIONS, lambda trace: changed(trace, lambda entry: entry.role == "c0", replica=7)),
    ],
    "named_companion": [
        Planted(BAD_COMPANION, lambda trace: changed(trace, is_("runtime", "verdict"), text="companion 'c0' failed")),
        Planted(BAD_COMPANION, lambda trace: changed(trace, is_("runtime", "verdict"), time=2.0)),
    ],
    "kv_hold": [
        Planted(PAIR, lambda trace: dropped(trace, is_("stage", "release_kv"))),
        Planted(PAIR, lambda trace: doubled(trace, is_("stage", "release_kv"))),
        Planted(replace(PAIR, requests=(replace(PAIR.requests[0], act="wait"),)),
                lambda trace: doubled(trace, is_("stage", "submit", stage=1), what="release_kv")),
        Planted(PAIR, lambda trace: moved(trace, is_("stage", "release_kv"), is_("caller", "ask"))),
    ],
    "no_leak": [
        Planted(PLAIN, lambda trace, field=field: replace(trace, audit=replace(trace.audit, **{field: 1})))
        for field in ("requests", "legs", "load", "work", "tasks")
    ],
    "still_held": [Planted(EARLY, lambda trace: dropped(trace, is_("stage", "abort"), is_("stage", "aborted")))],
    "acknowledged": [
        Planted(PLAIN, lambda trace: moved(trace, is_("stage", "aborted"), is_("operator", "abort done"))),
        Planted(PLAIN, late_output),
        Planted(LEFT, lambda trace: moved(trace, is_("stage", "aborted"), is_("caller", "left"))),
    ],
    "truthful": [
        Planted(PLAIN, lambda trace: replace(trace, audit=replace(trace.audit, finished=2))),
        Planted(PLAIN, lambda trace: replace(trace, audit=replace(trace.audit, finished=0, expired=1))),
        Planted(PLAIN, lambda trace: changed(trace, is_("runtime", "verdict", request=0), detail="expired")),
    ],
    "paused": [
        Planted(PAUSED, lambda trace: moved(trace, is_("stage", "submit", request=1), is_("caller", "ask", request=1))),
        Planted(PAUSED, lambda trace: moved(trace, is_("stage", "says", request=0), is_("operator", "pause done"))),
        Planted(
            replace(PAUSED, requests=(RequestPlan(arrival=0.5, scripts=((Wait(0.75), Finish()),)),)),
            lambda trace: moved(trace, is_("stage", "submit"), is_("operator", "pause done")),
        ),
    ],
    "death": [
        Planted(DEATH, lambda trace: dropped(trace, is_("runtime", "died"))),
        Planted(DEATH, lambda trace: doubled(trace, is_("runtime", "died"))),
        Planted(KILLED, lambda trace: changed(trace, is_("runtime", "died"), time=2.0)),
        Planted(DEATH, lambda trace: changed(trace, is_("runtime", "verdict", request=1), time=2.0)),
        Planted(
            replace(DEATH, stages=(*DEATH.stages, StagePlan(source=0, final=True))),
            lambda trace: changed(trace, is_("caller", "end", request=1), stage=1),
        ),
    ],
    "shutdown": [
        Planted(PLAIN, lambda trace: changed(trace, is_("runtime", "closed"), time=10_000.0)),
        Planted(PLAIN, lambda trace: moved(trace, is_("stage", "down", stage=1), is_("runtime", "closed"))),
        Planted(PLAIN, lambda trace: replace(trace, failure="EngineDied: for no reason")),
        Planted(replace(DEATH, on_engine_death="fail_stop"), lambda trace: replace(trace, failure="")),
    ],
    "quiescence": [Planted(PLAIN, lambda trace: replace(trace, steps_while_idle=1))],
    "bounded_waits": [
        Planted(PAUSED, lambda trace: changed(trace, is_("operator", "pause done"), time=100.0)),
        Planted(PLAIN, lambda trace: changed(trace, is_("operator", "abort done"), time=100.0)),
    ],
}  # fmt: skip


def find_replica(trace: Trace, request: int) -> int:
    return next(
        one.replica for one in trace.entries if one.request == request and one.what == "submit" and not one.stage
    )


@pytest.mark.parametrize("plan", ALL)
def test_sound_traces_pass_all_checks(plan):
    check_all(run_simulation(plan))


@pytest.mark.parametrize(
    ("name", "planted"), [pytest.param(name, one, id=name) for name, many in PLANTED.items() for one in many]
)
def test_what_is_spoilt_in_a_trace_is_found_by_the_check_that_is_for_it(name, planted):
    trace = run_simulation(planted.plan)
    check_all(trace)
    with pytest.raises(BrokenInvariants) as caught:
        check_all(planted.spoil(trace), only=OURS)
    assert [violation.check.name for violation in caught.value.violations] == [name], caught.value


def test_every_check_of_these_modules_is_tried():
    assert PLANTED.keys() == set(OURS)


def test_every_invariant_has_a_check_or_a_reason_for_having_none():
    seen = {check.invariant for check in CHECKS.values()} | NOT_VISIBLE.keys()
    assert seen == {f"I{number}" for number in range(1, 17)}
    for check in CHECKS.values():
        assert check.doc, check.name
        assert check.guards, check.name


# ---- how violations are told


def test_a_violation_comes_with_the_plan_as_a_call_and_with_what_happened_around_it():
    trace = doubled(run_simulation(PLAIN), is_("caller", "end", request=0))
    with pytest.raises(BrokenInvariants) as caught:
        check_all(trace)
    text = str(caught.value)
    assert "I1 one_end: the caller of request 0 saw two ends" in text
    call = next(line.strip() for line in text.splitlines() if line.startswith("  Plan("))
    assert eval(call) == PLAIN
    assert "5.000  caller    end                 request 0  finished" in text
    assert caught.value.violations == (CHECKS["one_end"](trace),)


def test_checks_can_be_left_out_with_a_reason_only():
    trace = doubled(run_simulation(PLAIN), is_("caller", "end", request=0))
    check_all(trace, skip={"one_end": "this runtime repeats itself"})
    check_all(trace, only=["liveness"])
    with pytest.raises(ValueError, match="say why 'one_end' does not apply"):
        check_all(trace, skip={"one_end": " "})
    with pytest.raises(ValueError, match="no check 'one_and'; did you mean 'one_end'"):
        check_all(trace, skip={"one_and": "?"})


# ---- clients that break the rules


class Wrapped:
    """Does what the client inside does, unless a test says otherwise."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def wrapping(kind):
    def wrap(factory):
        @asynccontextmanager
        async def opened(context):
            async with factory(context) as client:
                yield kind(client)

        return opened

    return wrap


def names_of(caught) -> set[str]:
    return {violation.check.name for violation in caught.value.violations}


def test_a_client_that_loses_last_outputs_makes_the_simulation_hang_and_the_checks_say_where():
    class Forgets(Wrapped):
        async def receive(self):
            while True:
                if kept := [output for output in await self.inner.receive() if not output.finished]:
                    return kept

    with pytest.raises(Hung) as hung:
        run_simulation(replace(PLAIN, requests=PLAIN.requests[:1]), wrap=wrapping(Forgets))
    with pytest.raises(BrokenInvariants, match="request 0 has not ended") as caught:
        check_all(hung.value.trace)
    assert "liveness" in names_of(caught)


def test_a_client_that_says_things_twice_is_found_out():
    class Repeats(Wrapped):
        async def receive(self):
            outputs = await self.inner.receive()
            return [one for output in outputs for one in ([output] if output.finished else [output, output])]

    script = (Chunk((1,)), Wait(1.0), Finish())
    with pytest.raises(BrokenInvariants) as caught:
        check_all(run_simulation(Plan(stages=(StagePlan(final=True),), requests=(RequestPlan(scripts=(script,)),)),
                                 wrap=wrapping(Repeats)))  # fmt: skip
    assert {"conservation", "model"} <= names_of(caught)


def test_a_client_that_acknowledges_aborts_at_once_is_found_out():
    class Hurries(Wrapped):
        async def abort(self, request_ids):
            """Say that it is done, and do nothing."""

    script = (LateChunk(), *tokens(4, each=1.0))
    plan = Plan(stages=(StagePlan(final=True),), requests=(RequestPlan(act="abort", when=1.5, scripts=(script,)),))
    with pytest.raises(BrokenInvariants) as caught:
        check_all(run_simulation(plan, wrap=wrapping(Hurries)))
    assert {"acknowledged"} <= names_of(caught)


# ---- the model


def test_the_model_permits_what_a_plan_leaves_open_and_nothing_else():
    assert permitted(PLAIN, 0).ends == {"finished"}
    assert permitted(PLAIN, 0).tokens == {0: (0, 1, 2), 1: (10, 11)}
    assert permitted(PLAIN, 1).ends == {"finished", "RequestAborted"}
    assert permitted(BAD_COMPANION, 0).ends == {"StageFailed"}
    assert permitted(EARLY, 0).must_end
    assert permitted(SESSION, 0).tokens == {1: (1, 2, 3)}
    assert "finished" not in permitted(replace(SESSION, requests=(replace(SESSION.requests[0], close=False),)), 0).ends
    assert {"ReplicaLost", "finished"} <= permitted(DEATH, 0).ends
    assert not permitted(replace(EARLY, requests=(RequestPlan(scripts=((Stall(),),)),)), 0).must_end


def test_the_model_knows_when_each_stage_begins_and_ends():
    assert times_alone(PLAIN, 0) == {0: (0.0, 3.0), 1: (3.0, 5.0)}
    assert times_alone(EARLY, 0) == {0: (0.0, 5.0), 1: (0.0, 1.0)}
    assert times_alone(COMPANIONS, 0) == {0: (0.0, 0.0), 1: (1.0, 1.0)}
    assert times_alone(PLAIN, 1) is None  # its caller does not wait
    assert times_alone(PAUSED, 0) is None


def test_a_trace_is_compared_with_the_model():
    trace = run_simulation(PLAIN)
    check_model(trace)
    with pytest.raises(BrokenInvariants, match="expected"):
        check_model(changed(trace, is_("caller", "output", request=0, stage=1), tokens=(9,)))


# ---- faults that stop


def test_a_healed_plan_has_no_fault_from_a_time_on():
    plan = Plan(
        stages=(StagePlan(final=True, abort_time=30.0, abort_error="no", replicas=2),),
        requests=(
            RequestPlan(scripts=((Stall(),),)),
            RequestPlan(arrival=1.0, act="abort", when=50.0, scripts=((Stall(),),)),
            RequestPlan(arrival=20.0, act="leave", when=1.0, scripts=((Chunk((1,)), Die()),), bridges=("raise",)),
        ),
        operator=(OperatorAct(at=1.0, act="pause"), OperatorAct(at=30.0, act="kill")),
        on_engine_death="fail_stop",
        end=25.0,
    )
    healed = heal(plan, after=10.0)
    assert [act.act for act in healed.operator] == ["pause", "wake", "resume"]
    assert healed.requests[2] == RequestPlan(arrival=20.0, when=1.0, scripts=((Chunk((1,)), Finish()),))
    trace = run_simulation(healed)
    check_all(trace)
    check_healed(trace, after=10.0)
    assert trace.end_of(2).detail == "finished"
    assert trace.closed_at < math.inf


def test_what_does_not_finish_after_the_last_fault_is_told():
    healed = heal(PLAIN, after=0.0)
    trace = run_simulation(healed)
    check_healed(trace, after=0.0)
    with pytest.raises(BrokenInvariants, match="request 1 came after the last fault and ended with StageFailed"):
        check_healed(changed(trace, is_("caller", "end", request=1), detail="StageFailed"), after=0.0)
    with pytest.raises(BrokenInvariants, match="has not ended"):
        check_healed(dropped(trace, is_("caller", "end", request=1)), after=0.0)


def test_a_check_is_a_function_of_a_trace():
    violation = _isolation(lost(run_simulation(DEATH)))
    assert isinstance(violation, Violation)
    assert _isolation(run_simulation(DEATH)) is None
