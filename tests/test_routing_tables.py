"""The pure core: what the end of a request leaves, breaches of protocol, and the tables."""

from __future__ import annotations

import pytest

from omni_trio.routing import (
    TABLES,
    EdgeAction,
    EdgeFact,
    EdgeState,
    HoldFact,
    HoldState,
    LegFact,
    LegState,
    ProtocolError,
    Release,
)
from routing_facts import KV, NOTHING, bridged, ended, flow, guided, pair, said
from support import P1, P3

# ---- the end


def test_after_the_end_every_fact_is_met_with_nothing():
    f = guided(roles=("cond",))
    f.start()
    assert f.release() == Release((0,), ("cond",), None)
    assert said(f, 0, kv_ready=True) == ended(f, 0) == NOTHING
    assert bridged(f, 1) == bridged(f, 1, made=False, saw_end=False) == NOTHING
    assert list(f.companion_output("cond", finished=True)) == NOTHING
    assert list(f.bundle_expired()) == NOTHING
    assert f.release() == Release((), (), None)
    assert f.over

    f = flow(P3, session=True)
    f.start(last=False)
    f.release()
    assert list(f.more_input(last=True)) == NOTHING
    assert not f.takes_input

    f = flow(pair())
    f.start()
    f.release()
    assert list(f.skip_prefill()) == list(f.taken_over()) == NOTHING


def test_a_request_that_was_never_admitted_can_be_released():
    assert flow(P3).release() == Release((), (), None)


# ---- breaches of protocol


def test_a_stage_that_was_not_asked_and_one_that_has_ended_say_nothing():
    f = flow(P3)
    with pytest.raises(ProtocolError, match=r"^stage 0: 'output' can not happen to a leg that is idle$"):
        said(f, 0)
    with pytest.raises(ProtocolError, match="'finish' can not happen to a leg that is idle"):
        ended(f, 1)
    f.start()
    with pytest.raises(ProtocolError, match="'feed last' can not happen to a leg that is fed"):
        f.start()
    ended(f, 0)
    with pytest.raises(ProtocolError, match="'finish' can not happen to a leg that is ended"):
        ended(f, 0)
    for facts in ({}, {"kv_ready": True}, {"segment_end": True}):
        with pytest.raises(ProtocolError, match="'output' can not happen to a leg that is ended"):
            said(f, 0, **facts)


def test_a_bridge_that_was_not_asked_and_one_that_has_told_say_nothing():
    f = flow(P3)
    f.start()
    with pytest.raises(ProtocolError, match=r"^the edge to stage 1: 'carried whole' can not happen while it is open$"):
        bridged(f, 1)
    ended(f, 0)
    bridged(f, 1)
    for facts in ({}, {"last": False}, {"made": False, "saw_end": False}):
        with pytest.raises(ProtocolError, match="can not happen while it is closed"):
            bridged(f, 1, **facts)


def test_a_companion_ends_once():
    f = guided()
    with pytest.raises(ProtocolError, match="companion 'cond': 'output' can not happen to a leg that is idle"):
        f.companion_output("cond", finished=False)
    f.start()
    f.companion_output("cond", finished=True)
    with pytest.raises(ProtocolError, match="companion 'cond': 'finish' can not happen to a leg that is ended"):
        f.companion_output("cond", finished=True)


def test_only_a_prefill_is_skipped_and_only_before_it_has_said_anything():
    with pytest.raises(ProtocolError, match="no prefill"):
        flow(P1).skip_prefill()
    f = flow(pair())
    f.start()
    ended(f, 0, kv_params=KV)
    with pytest.raises(ProtocolError, match="'skip' can not happen to a leg that is ended"):
        f.skip_prefill()


# ---- the tables


def test_whatever_state_a_part_is_in_it_can_be_released():
    assert {TABLES.leg[state, LegFact.RELEASE] for state in LegState} == {LegState.RELEASED}
    assert {TABLES.edge[state, EdgeFact.RELEASE] for state in EdgeState} == {(EdgeState.CLOSED, EdgeAction.NOTHING)}
    for state in HoldState:
        held = state is HoldState.HELD
        assert TABLES.hold[state, HoldFact.RELEASE] is (HoldState.RELEASED if held else state)


def test_there_is_no_way_back():
    for rules in (TABLES.leg, TABLES.hold):
        for (state, fact), after in rules.items():
            order = list(type(state))
            assert order.index(after) >= order.index(state), (state, fact)
    edges = list(EdgeState)
    back = {key for key, (after, _) in TABLES.edge.items() if edges.index(after) < edges.index(key[0])}
    assert back == {(EdgeState.CLOSING, EdgeFact.EMPTY)}  # nothing was carried: the source's end is still to come


def test_every_state_fact_and_action_is_used():
    for rules, states, facts in (
        (TABLES.leg, LegState, LegFact),
        (TABLES.edge, EdgeState, EdgeFact),
        (TABLES.hold, HoldState, HoldFact),
    ):
        assert {state for state, _ in rules} == set(states)
        assert {fact for _, fact in rules} == set(facts)
    assert {after for after, _ in TABLES.edge.values()} == set(EdgeState)
    assert {action for _, action in TABLES.edge.values()} == set(EdgeAction)


def test_only_triggers_have_something_follow():
    triggers = {EdgeFact.PART, EdgeFact.WHOLE, EdgeFact.WHOLE_EARLY, EdgeFact.BUNDLED}
    assert {fact for (_, fact), (_, action) in TABLES.edge.items() if action is not EdgeAction.NOTHING} == triggers


def test_the_states_that_an_output_leaves_alone_are_those_of_the_table():
    assert TABLES.quiet == (LegState.OPEN, LegState.FED)


def test_tables_can_not_be_changed_in_place():
    for rules in (TABLES.leg, TABLES.edge, TABLES.hold):
        with pytest.raises(TypeError):
            rules[next(iter(rules))] = None
