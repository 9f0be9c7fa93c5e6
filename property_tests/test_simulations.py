"""Invariants tested: all that traces show (I1-I13, I15, I16), and I14, in drawn simulations of all modes.

Safety: whatever goes wrong, nothing forbidden happens. Liveness: when faults stop, everything comes right again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import omni_trio.testing
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import Chunk, Finish, Plan, RequestPlan, SimStage, Trace, Wait, check_all, check_healed, heal
from omni_trio.testing import strategies as omni
from omni_trio.testing.checks import BrokenInvariants
from omni_trio.testing.plan import SegmentPlan, StagePlan, load_plan
from omni_trio.testing.simulation import Hung, build_pipeline, run_simulation
from support import assert_empty, run, simulated


def examples(usual: int) -> settings:
    """So many examples, or as many as the profile asks for."""
    return settings(max_examples=max(usual, settings.default.max_examples), deadline=None)


def played(plan: Plan) -> Trace:
    try:
        return run_simulation(plan)
    except Hung as hung:
        check_all(hung.trace)  # says what has not ended
        raise


# ---- safety


@examples(100)
@given(omni.simulations(faults="none"))
def test_without_faults_everything_finishes(plan):
    trace = played(plan)
    check_all(trace)
    assert {trace.end_of(index).detail for index in range(len(plan.requests))} == {"finished"}


@examples(100)
@given(omni.simulations(faults="light"))
def test_what_goes_wrong_with_single_requests(plan):
    check_all(played(plan))


@examples(300)
@given(omni.simulations(faults="heavy"))
def test_whatever_goes_wrong(plan):
    check_all(played(plan))


class Snapshots:
    """What crossed the border between the runtime and the stages, with what it looked like then (I14)."""

    def __init__(self) -> None:
        self.taken: list[tuple[object, str]] = []

    def take(self, thing: object) -> None:
        self.taken.append((thing, repr(thing)))

    def wrap(self, factory):
        @asynccontextmanager
        async def opened(context):
            async with factory(context) as client:
                for name in ("submit", "update"):
                    setattr(client, name, self._noting_input(getattr(client, name)))
                client.receive = self._noting_outputs(client.receive)
                yield client

        return opened

    def _noting_input(self, method):
        async def noted(request):
            self.take(request)
            await method(request)

        return noted

    def _noting_outputs(self, receive):
        async def noted():
            outputs = await receive()
            for output in outputs:
                self.take(output)
            return outputs

        return noted


@examples(200)
@given(omni.simulations(faults="heavy"))
def test_what_was_handed_over_stays_as_it_was(plan):
    """I14: no request or stage changes what another was handed, or what a stage has said."""
    snapshots = Snapshots()
    check_all(run_simulation(plan, wrap=snapshots.wrap))
    changed = [then for thing, then in snapshots.taken if repr(thing) != then]
    assert not changed


# ---- liveness

_LAST_FAULT = 10.0


@st.composite
def healed_plans(draw) -> Plan:
    """Any faults first; then requests that come when there are none any more."""
    plan = draw(omni.simulations(faults="heavy", max_requests=3))
    late = draw(st.lists(omni.requests(plan), min_size=1, max_size=3))
    later = tuple(replace(asked, arrival=asked.arrival + _LAST_FAULT) for asked in late)
    return heal(replace(plan, requests=(*plan.requests, *later)), after=_LAST_FAULT)


@examples(100)
@given(healed_plans())
def test_when_faults_stop_everything_ends_and_what_comes_later_finishes(plan):
    trace = played(plan)
    check_all(trace)
    check_healed(trace, after=_LAST_FAULT)


# ---- determinism


@examples(50)
@given(omni.simulations(faults="heavy"))
def test_the_same_plan_gives_the_same_bytes(plan):
    again = eval(repr(plan), vars(omni_trio.testing))
    assert again == plan == load_plan(plan.to_json())
    assert played(plan).to_json() == played(again).to_json()


def test_the_schedule_is_the_seeds_choice():
    asked = tuple(RequestPlan(scripts=((Wait(1.0), Chunk((1,)), Finish()),)) for _ in range(4))
    plan = Plan(stages=(StagePlan(final=True, replicas=3),), requests=asked)
    traces = {run_simulation(replace(plan, seed=number)).to_json().partition(b'"entries"')[2] for number in range(20)}
    assert len(traces) > 10


def test_what_happens_does_not_depend_on_the_hashes_of_a_process():
    script = Path(__file__).parents[1] / "scripts" / "determinism.py"
    digests = {
        subprocess.run(
            [sys.executable, script, "--count", "20"],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    }
    assert len(digests) == 1


# ---- the strategies themselves


def features(plan: Plan) -> set[str]:
    """What there is in a plan."""
    found = {stage.feed for stage in plan.stages} | {request.act for request in plan.requests}
    found |= {act.act + ("" if act.act == "kill" else f" {act.mode}") for act in plan.operator}
    found |= {type(verb).__name__ for request in plan.requests for script in request.scripts for verb in script}
    found |= {act for request in plan.requests for act in request.bridges}
    found.add(plan.on_engine_death)
    for feature, there in {
        "pair": plan.pair,
        "companions": plan.companions,
        "session": any(request.segments for request in plan.requests),
        "barge in": any(one.barge_in for request in plan.requests for one in request.segments or ()),
        "end": plan.end is not None,
        "five stages": len(plan.stages) == 5,
        "several replicas": any(stage.replicas > 1 for stage in plan.stages),
        "one slot": any(stage.capacity == 1 for stage in plan.stages),
        "abort error": any(stage.abort_error for stage in plan.stages),
    }.items():
        if there:
            found.add(feature)
    return found


def drawn(strategy: st.SearchStrategy[Plan], count: int) -> list[Plan]:
    plans: list[Plan] = []

    @seed(1)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None)
    @given(strategy)
    def keep(plan: Plan) -> None:
        plans.append(plan)

    keep()
    return plans


EVERYTHING = {
    "finish", "output", "kv", "connector", "pair", "companions", "session", "barge in", "five stages",
    "wait", "leave", "abort", "deadline", "slow", "stop reading", "raise", "nothing",
    "pause wait", "pause abort", "pause keep", "sleep wait", "sleep abort", "wake wait", "resume wait", "kill",
    "Wait", "Chunk", "KvReady", "Step", "LateChunk", "Finish", "FinishSilently",
    "Error", "Reject", "Stall", "Die", "DieOnSubmit",
    "isolate", "fail_stop", "end", "several replicas", "one slot", "abort error",
}  # fmt: skip


def test_everything_there_is_turns_up():
    counts = Counter(feature for plan in drawn(omni.simulations(faults="heavy"), 300) for feature in features(plan))
    rare = {feature for feature in EVERYTHING if counts[feature] < 5}
    assert not rare, counts


def test_faults_stay_below_their_level():
    harmless = {"raise", "nothing", "Error", "Reject", "Stall", "Die", "DieOnSubmit", "end", "kill", "fail_stop"}
    for plan in drawn(omni.simulations(faults="none"), 100):
        assert not features(plan) & (harmless | {"leave", "abort", "deadline", "stop reading"})
    for plan in drawn(omni.simulations(faults="light"), 100):
        assert not features(plan) & {"Stall", "Die", "DieOnSubmit", "end", "kill", "fail_stop", "pause wait"}


@given(omni.pipelines())
def test_every_pipeline_can_be_made(plan):
    build_pipeline(plan)
    assert not plan.requests


def test_a_pipeline_of_ones_own_is_kept():
    mine = Plan(stages=(StagePlan(), StagePlan(source=0, feed="output", final=True)), requests=())
    for plan in drawn(omni.simulations(mine, faults=omni.Faults(level="light", acts=("leave",)), max_requests=2), 50):
        assert [(stage.source, stage.feed) for stage in plan.stages] == [(None, "finish"), (0, "output")]
        assert len(plan.requests) <= 2
        assert features(plan) <= {
            *("finish", "output", "wait", "leave", "isolate", "pass", "session", "barge in", "one slot"),
            *("Wait", "Chunk", "KvReady", "Step", "LateChunk", "Finish", "FinishSilently"),
        }


class _Twice:
    """A client that gives an output twice that is not a stage's last one."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def receive(self):
        outputs = await self.inner.receive()
        return [one for output in outputs for one in ([output] if output.finished else [output, output])]


def twice(factory):
    @asynccontextmanager
    async def opened(context):
        async with factory(context) as client:
            yield _Twice(client)

    return opened


def breaks(plan: Plan) -> bool:
    try:
        check_all(run_simulation(plan, wrap=twice), only=["conservation"])
    except BrokenInvariants:
        return True
    return False


def test_a_bug_is_found_and_shrunk_to_next_to_nothing():
    phases = [Phase.generate, Phase.shrink]
    once = settings(max_examples=200, database=None, derandomize=True, deadline=None, phases=phases)
    smallest = find(omni.simulations(faults="light"), breaks, settings=once)
    assert len(smallest.stages) == len(smallest.requests) == 1
    assert smallest.operator == ()
    (asked,) = smallest.requests
    if asked.segments is None:
        assert [verb for verb in asked.scripts[0] if isinstance(verb, Chunk)] == [Chunk((0,))]
    else:
        assert asked.segments == (SegmentPlan((0,)),)
    assert asked.act == "wait"


def test_a_plan_without_requests_ends():
    check_all(run_simulation(Plan(stages=(StagePlan(final=True),), requests=())))


# ---- pieces, whose content simulations of plans do not look at

TIMES = st.sampled_from(omni.TIMES)


@given(
    pieces=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=6),
    pauses=st.lists(TIMES, min_size=6, max_size=6),
    take=TIMES,
    schedule=st.random_module(),
)
def test_pieces_arrive_in_order_and_none_is_lost(pieces, pauses, take, schedule):
    """I4 over a streaming edge: the receiving stage gets each token of its source exactly once, in order."""
    del schedule  # drawing it is what makes the order of tasks vary from example to example
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
