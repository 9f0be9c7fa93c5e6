"""Invariants tested: I3, I4, I10: what should not matter to a request does not, over generated simulations."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput
from omni_trio.testing.metamorphic import (
    RELATIONS,
    Differs,
    Outcome,
    aborted_neighbours_change_nothing,
    calm,
    connectors_change_nothing,
    outcomes,
    replicas_change_nothing,
    schedules_change_nothing,
    streaming_changes_nothing,
    submission_order_changes_nothing,
)
from omni_trio.testing.plan import OperatorAct, Plan, RequestPlan, SegmentPlan, StagePlan
from omni_trio.testing.script import (
    Chunk,
    Die,
    Error,
    Finish,
    Reject,
    Stall,
)
from omni_trio.testing.simulation import run_simulation
from omni_trio.testing.strategies import Faults, requests, simulations

EACH = settings(deadline=None)


@EACH
@given(simulations())
def test_streaming_changes_nothing(plan: Plan):
    streaming_changes_nothing(plan)


@EACH
@given(simulations())
def test_connectors_change_nothing(plan: Plan):
    connectors_change_nothing(plan)


@EACH
@given(simulations(), st.integers(2, 4))
def test_replicas_change_nothing(plan: Plan, replicas: int):
    replicas_change_nothing(plan, replicas=replicas)


@EACH
@given(simulations(), st.data())
def test_submission_order_changes_nothing(plan: Plan, data: st.DataObject):
    submission_order_changes_nothing(plan, order=data.draw(st.permutations(range(len(plan.requests)))))


@EACH
@given(simulations(), st.data())
def test_aborted_neighbours_change_nothing(plan: Plan, data: st.DataObject):
    asked = requests(plan, Faults(level="light", verbs=(Error(), Reject(), Stall()), bridges=("raise", "nothing")))
    acts = st.sampled_from((("abort", 0.5), ("abort", 1.0), ("leave", 0.0), ("leave", 2.0), ("stop reading", 1.0)))
    drawn = data.draw(st.none() | st.lists(st.tuples(asked, acts), max_size=3))
    aborted_neighbours_change_nothing(plan, neighbours=None if drawn is None else [left(*pair) for pair in drawn])


def left(request: RequestPlan, how: tuple[str, float]) -> RequestPlan:
    return msgspec.structs.replace(request, act=how[0], when=how[1])


@EACH
@given(simulations(), st.integers(1, 1000))
def test_schedules_change_nothing(plan: Plan, seed: int):
    schedules_change_nothing(plan, seed=seed)


# ---- they can fail


class Wrapped:
    """A client that hands everything on."""

    def __init__(self, client) -> None:
        self._client = client

    def __getattr__(self, name: str):
        return getattr(self._client, name)


class LosesAmongMany(Wrapped):
    """Loses a token of each output whenever two requests are in hand."""

    async def receive(self):
        outputs = await self._client.receive()
        if len({output.request_id for output in outputs}) == 1:
            return outputs
        return [msgspec.structs.replace(output, token_ids=tuple(output.token_ids)[1:]) for output in outputs]


class LosesUpdates(Wrapped):
    async def update(self, request):
        await self._client.update(msgspec.structs.replace(request, input=StageInput()))


class LosesUnderPlaceholders(Wrapped):
    """Takes a placeholder for an input that is worth nothing."""

    async def submit(self, request):
        if not any(request.input.token_ids):
            raise InvalidRequest("it is empty")
        await self._client.submit(request)


def running_with(wrapper: type[Wrapped], stage_id: int):
    def wrap(factory):
        @asynccontextmanager
        async def wrapped(context):
            async with factory(context) as client:
                yield wrapper(client) if context.stage_id == stage_id else client

        return wrapped

    return partial(run_simulation, wrap=wrap)


TWO = Plan(
    stages=(StagePlan(final=True),),
    requests=(RequestPlan(scripts=((Chunk((1, 2)), Finish("stop", (3,))),)),) * 2,
)


ONE = msgspec.structs.replace(TWO, requests=TWO.requests[:1])
CHAIN = msgspec.structs.replace(
    ONE,
    stages=(StagePlan(final=True), StagePlan(source=0, final=True)),
    requests=(RequestPlan(segments=(SegmentPlan((1, 2, 3)),)),),
)


@pytest.mark.parametrize(
    ("relation", "plan", "wrapper"),
    [
        (streaming_changes_nothing, CHAIN, LosesUpdates),
        (connectors_change_nothing, CHAIN, LosesUnderPlaceholders),
        (replicas_change_nothing, TWO, LosesAmongMany),
        (aborted_neighbours_change_nothing, ONE, LosesAmongMany),
    ],
)
def test_what_matters_and_should_not_is_found(relation, plan: Plan, wrapper: type[Wrapped]):
    relation(plan)
    with pytest.raises(Differs, match="changes request 0") as caught:
        relation(plan, run=running_with(wrapper, len(plan.stages) - 1))
    assert outcomes(caught.value.trace) != outcomes(caught.value.changed)


def test_an_order_that_matters_is_found():
    first, second = RequestPlan(scripts=((Finish("stop", (1,)),),)), RequestPlan(scripts=((Finish("stop", (2,)),),))
    plan = msgspec.structs.replace(TWO, requests=(first, second))

    def run(plan: Plan):
        """As if the first to come were served alone."""
        refused = msgspec.structs.replace(plan.requests[1], scripts=((Error(),),))
        return run_simulation(msgspec.structs.replace(plan, requests=(plan.requests[0], refused)))

    with pytest.raises(Differs, match="changes request 0, which is request 1 then"):
        submission_order_changes_nothing(plan, run=run)


def test_a_schedule_that_matters_is_found():
    def run(plan: Plan):
        odd = msgspec.structs.replace(TWO.requests[0], scripts=((Error(),) if plan.seed % 2 else (Finish(),),))
        return run_simulation(msgspec.structs.replace(plan, requests=(odd,)))

    with pytest.raises(Differs, match="the schedule changes request 0"):
        schedules_change_nothing(ONE, run=run)


def test_a_plan_is_made_calm():
    wild = Plan(
        stages=(StagePlan(final=True, abort_time=math.inf, abort_error="no"),),
        requests=(
            RequestPlan(act="abort", when=1.0, scripts=((Chunk((1,)), Die()),)),
            RequestPlan(act="leave", scripts=((Chunk((1,)), Stall()),)),
            RequestPlan(close=False, segments=(SegmentPlan((1,)), SegmentPlan((2,), barge_in=True))),
            RequestPlan(scripts=((Error(),),)),
        ),
        operator=(OperatorAct(at=0.0, act="kill"),),
        end=1.0,
    )
    done = outcomes(run_simulation(calm(wild)))
    assert done == (
        Outcome(True, ((0, (1,), "stop"),)),
        Outcome(True, ((0, (1,), "stop"),)),
        Outcome(True, ((0, (1, 2), "stop"),)),
        Outcome(False),
    )
    assert all(one.finished for one in outcomes(run_simulation(calm(wild, faults=False))))


def test_an_order_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected each of 0 to 1 once"):
        submission_order_changes_nothing(TWO, order=(0, 0))


def test_all_relations_take_nothing_but_a_plan():
    for relation in RELATIONS:
        relation(TWO)
