"""Invariants tested: I1, I2, I4, I9 and I10 of the pure core, over any pipeline in any modes and any order of events.

What is checked at each step stands in `routing_world`. Stages speak and end early or late, bridges take time, make
nothing or come back when nobody needs them any more, companions and KV caches come in any order, sessions are closed
with or without a last word, and the request is ended from outside at any point.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_trio.pipeline import Pipeline
from omni_trio.routing import Finish, RoutePlan
from routing_cases import Case, any_case
from routing_world import play

EXAMPLES = max(200, settings().max_examples)


@st.composite
def cases(draw) -> Case:
    return any_case(lambda options: draw(st.sampled_from(options)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases(), data=st.data())
def test_any_order_of_events(case: Case, data):
    play(case, lambda options: data.draw(st.sampled_from(options)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases(), data=st.data())
def test_with_no_fault_every_request_ends_well(case: Case, data):
    """In whatever order, and however early a stage has enough."""
    world = play(case, lambda options: data.draw(st.sampled_from(options)), faults=False)
    assert isinstance(world.terminal, Finish)


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases())
def test_a_plan_is_a_part_of_its_pipeline_and_always_ends_somewhere(case: Case):
    pipeline = case.pipeline
    plan = RoutePlan(pipeline, case.final_stage)
    assert 0 in plan.stages
    assert plan.needed
    assert plan.needed <= plan.stages
    for index in range(len(pipeline.stages)):
        feeds, connects = set(plan.feeds[index]), set(plan.connects[index])
        decode = {plan.handoff} if index == 0 and plan.handoff is not None else set()
        # Each child is reached in one way: through a bridge, by connector, or by hand-off.
        assert len(feeds) + len(connects) + len(decode) == len(feeds | connects | decode)
        assert feeds | connects | decode == (
            set(pipeline.children[index]) & plan.stages if index in plan.stages else set()
        )
        pieces, early = set(plan.pieces_to[index]), set(plan.early_to[index])
        assert pieces | early <= feeds
        assert not pieces & early
        if connects:
            assert index in plan.needed, "a sender whose end nobody waits for"
        if index in plan.stages and not (feeds or connects or decode):
            assert index in plan.needed, "a stage that feeds nobody and whose output nobody gets"
        assert plan.watches[index] == bool(
            connects or (index in plan.stages and pipeline.stages[index].feed == "connector")
        )
    if case.final_stage is not None:
        assert plan.emits[case.final_stage]
        assert plan.stages == set(pipeline.path_to(case.final_stage))


@given(case=cases())
def test_cases_are_legal_by_construction(case: Case):
    """Otherwise the tests above would show less than they say."""
    assert isinstance(case.pipeline, Pipeline)
    assert not (case.session and case.pipeline.no_sessions)
    assert not (case.roles and not RoutePlan(case.pipeline, case.final_stage).feeds[0])
