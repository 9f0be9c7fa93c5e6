from __future__ import annotations

import itertools

import pytest

from omni_trio.pipeline import Pipeline
from omni_trio.routing import (
    LEG_TRANSITIONS,
    Fact,
    Fail,
    Finish,
    Forward,
    LegState,
    ProtocolError,
    RequestFlow,
    RoutePlan,
    Submit,
    Update,
)
from support import P1, P3, stage


def flow(pipeline: Pipeline, final_stage: int | None = None) -> RequestFlow:
    return RequestFlow(RoutePlan(pipeline, final_stage))


def test_one_stage():
    f = flow(P1)
    assert f.start() == (Submit(0, last=True),)
    assert list(f.output(0, finished=False)) == []
    assert f.output(0, finished=True) == (Finish(),)
    assert f.over


def test_chain_forwards_at_the_end_of_each_stage_only():
    f = flow(P3)
    f.start()
    assert list(f.output(0, finished=False)) == []
    assert f.output(0, finished=True) == [Forward(1, last=True)]
    assert f.bridged(1, made_input=True, last=True) == (Submit(1, last=True),)
    assert f.output(1, finished=True) == [Forward(2, last=True)]
    assert f.bridged(2, made_input=True, last=True) == (Submit(2, last=True),)
    assert f.output(2, finished=True) == (Finish(),)


def test_the_request_ends_when_all_final_outputs_have_ended_not_at_the_first():
    pipeline = Pipeline([stage("a"), stage("b", source="a"), stage("c", source="a")])
    f = flow(pipeline)
    f.start()
    assert f.output(0, finished=True) == [Forward(1, last=True), Forward(2, last=True)]
    f.bridged(1, made_input=True, last=True)
    f.bridged(2, made_input=True, last=True)
    assert list(f.output(2, finished=True)) == []
    assert f.output(1, finished=True) == (Finish(),)


def test_a_final_stage_ends_the_request_there_and_its_output_is_emitted_though_it_is_not_final():
    f = flow(P3, final_stage=1)
    assert RoutePlan(P3, 1).emits == (True, True, False)
    f.start()
    f.output(0, finished=True)
    f.bridged(1, made_input=True, last=True)
    assert f.output(1, finished=True) == (Finish(),)


def test_streaming_edge_submits_with_the_first_input_then_updates_then_closes():
    pipeline = Pipeline([stage("a"), stage("b", stream=True)])
    f = flow(pipeline)
    f.start()
    assert f.output(0, finished=False) == (Forward(1, last=False),)
    assert list(f.bridged(1, made_input=False, last=False)) == []
    f.output(0, finished=False)
    assert f.bridged(1, made_input=True, last=False) == (Submit(1, last=False),)
    f.output(0, finished=False)
    assert f.bridged(1, made_input=True, last=False) == (Update(1, last=False),)
    assert f.output(0, finished=True) == [Forward(1, last=True)]
    assert f.bridged(1, made_input=False, last=True) == (Update(1, last=True),)


def test_a_stage_that_ends_early_is_not_updated_any_more():
    pipeline = Pipeline([stage("a", final_output=True), stage("b", stream=True)])
    f = flow(pipeline)
    f.start()
    f.output(0, finished=False)
    f.bridged(1, made_input=True, last=False)
    assert list(f.output(1, finished=True)) == []
    f.output(0, finished=False)
    assert list(f.bridged(1, made_input=True, last=False)) == []
    assert not f.over
    assert f.output(0, finished=True) == (Finish(),)


def test_a_bridge_that_returns_nothing_at_the_end_fails_the_request():
    f = flow(P3)
    f.start()
    f.output(0, finished=True)
    (decision,) = f.bridged(1, made_input=False, last=True)
    assert isinstance(decision, Fail)
    assert decision.stage_id == 1
    assert f.over


def test_after_the_end_every_fact_is_met_with_nothing():
    f = flow(P3)
    f.start()
    assert f.release() == (0,)
    assert list(f.output(0, finished=True)) == []
    assert list(f.bridged(1, made_input=True, last=True)) == []
    assert f.release() == ()


def test_breaches_of_protocol_are_refused():
    f = flow(P3)
    with pytest.raises(ProtocolError, match="idle"):
        f.output(0, finished=False)
    f.start()
    with pytest.raises(ProtocolError, match="fed"):
        f.start()
    f.output(0, finished=True)
    with pytest.raises(ProtocolError, match="ended"):
        f.output(0, finished=True)
    with pytest.raises(ProtocolError, match="ended"):
        f.output(0, finished=False)


def test_the_table_is_total_about_release_and_knows_no_way_back():
    for state in LegState:
        assert LEG_TRANSITIONS[state, Fact.RELEASE] is LegState.RELEASED
    order = list(LegState)
    for (state, fact), target in LEG_TRANSITIONS.items():
        assert order.index(target) >= order.index(state), (state, fact)


def test_every_fact_and_state_is_used():
    used = set(itertools.chain.from_iterable(LEG_TRANSITIONS)) | set(LEG_TRANSITIONS.values())
    assert used == {*LegState, *Fact}
