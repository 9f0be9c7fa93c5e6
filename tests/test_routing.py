"""The pure core, decision by decision: each mode by itself."""

from __future__ import annotations

import pytest

from omni_trio.pipeline import Pipeline
from omni_trio.routing import (
    Defer,
    Fail,
    Finish,
    Forward,
    Handoff,
    LegState,
    ProtocolError,
    Release,
    RequestFlow,
    RoutePlan,
    Submit,
    SubmitCompanion,
    Update,
)
from routing_cases import no_companions
from routing_facts import KV, NOTHING, bridged, ended, flow, guided, pair, said
from support import P1, P3, stage

# ---- plain


def test_one_stage():
    f = flow(P1)
    assert list(f.start()) == [Submit(0, last=True)]
    assert said(f, 0) == NOTHING
    assert not f.over
    assert ended(f, 0) == [Finish()]
    assert f.over


def test_a_chain_forwards_at_the_end_of_each_stage_only():
    f = flow(P3)
    f.start()
    assert said(f, 0) == NOTHING
    assert ended(f, 0) == [Forward(1, last=True)]
    assert bridged(f, 1) == [Submit(1, last=True)]
    assert said(f, 1) == NOTHING
    assert ended(f, 1) == [Forward(2, last=True)]
    assert bridged(f, 2) == [Submit(2, last=True)]
    assert ended(f, 2) == [Finish()]


def test_the_request_ends_when_all_final_outputs_have_ended_not_at_the_first():
    """U48."""
    f = flow(Pipeline([stage("a"), stage("b", source="a"), stage("c", source="a")]))
    f.start()
    assert ended(f, 0) == [Forward(1, last=True), Forward(2, last=True)]
    bridged(f, 1)
    bridged(f, 2)
    assert ended(f, 2) == NOTHING
    assert ended(f, 1) == [Finish()]


def test_a_final_stage_cuts_what_lies_behind_it_and_beside_it():
    pipeline = Pipeline([stage("a"), stage("b"), stage("c"), stage("d", source="a"), stage("e", source="b")])
    plan = RoutePlan(pipeline, 1)
    assert plan.stages == {0, 1}
    assert plan.emits == (False, True, False, False, False)  # its output is emitted, though it is not final
    assert plan.needed == {1}
    f = RequestFlow(plan)
    f.start()
    assert ended(f, 0) == [Forward(1, last=True)]
    assert bridged(f, 1) == [Submit(1, last=True)]
    assert ended(f, 1) == [Finish()]


def test_a_final_stage_leaves_final_outputs_on_its_way():
    plan = RoutePlan(P3, 1)
    assert plan.emits == (True, True, False)
    assert plan.needed == {0, 1}


@pytest.mark.parametrize("feed", ["finish", "output", "kv"])
def test_a_bridge_that_returns_nothing_at_the_end_fails_the_request(feed):
    """W-13: the stage behind it would wait for ever."""
    f = flow(Pipeline([stage("a"), stage("b", feed=feed)]))
    f.start()
    ended(f, 0)
    (fail,) = bridged(f, 1, made=False)
    assert isinstance(fail, Fail)
    assert (fail.stage_id, fail.kind) == (1, "bridge")
    assert "returned nothing" in fail.reason
    assert f.over


# ---- pieces


def test_pieces_submit_with_the_first_input_then_update_then_close():
    f = flow(Pipeline([stage("a"), stage("b", feed="output")]))
    f.start()
    assert said(f, 0) == [Forward(1, last=False)]
    assert bridged(f, 1, made=False, last=False) == NOTHING
    assert said(f, 0) == [Forward(1, last=False)]
    assert bridged(f, 1, last=False) == [Submit(1, last=False)]
    assert bridged(f, 1, last=False) == [Update(1, last=False)]
    assert bridged(f, 1, made=False, last=False) == NOTHING
    assert ended(f, 0) == [Forward(1, last=True)]
    assert bridged(f, 1, made=False) == [Update(1, last=True)]


def test_a_stage_with_enough_is_not_given_more():
    f = flow(Pipeline([stage("a", final_output=True), stage("b", feed="output")]))
    f.start()
    said(f, 0)
    bridged(f, 1, last=False)
    said(f, 0)  # its bridge still runs when the stage ends
    assert ended(f, 1) == NOTHING
    assert bridged(f, 1, last=False) == NOTHING
    assert said(f, 0) == NOTHING
    assert ended(f, 0) == [Finish()]


def test_the_last_piece_may_find_that_the_stage_has_enough():
    f = flow(Pipeline([stage("a"), stage("b", feed="output"), stage("c")]))
    f.start()
    said(f, 0)
    bridged(f, 1, last=False)
    assert ended(f, 0) == [Forward(1, last=True)]
    assert ended(f, 1) == [Forward(2, last=True)]
    assert bridged(f, 1) == NOTHING
    assert bridged(f, 2) == [Submit(2, last=True)]


# ---- KV ready


AR_DIT = Pipeline([stage("ar", final_output=True), stage("dit", feed="kv")])


def test_the_kv_cache_starts_the_next_stage_and_the_end_changes_nothing():
    """S-5."""
    f = flow(AR_DIT)
    f.start()
    assert said(f, 0) == NOTHING
    assert said(f, 0, kv_ready=True) == [Forward(1, last=True)]
    assert bridged(f, 1, saw_end=False) == [Submit(1, last=True)]
    assert said(f, 0, kv_ready=True) == NOTHING
    assert ended(f, 0) == NOTHING
    assert ended(f, 1) == [Finish()]


def test_a_second_trigger_while_the_bridge_runs_changes_nothing():
    for trigger in (lambda f: said(f, 0, kv_ready=True), lambda f: ended(f, 0)):
        f = flow(AR_DIT)
        f.start()
        said(f, 0, kv_ready=True)
        assert trigger(f) == NOTHING
        assert bridged(f, 1, saw_end=False) == [Submit(1, last=True)]


def test_without_a_word_about_the_cache_the_end_starts_the_next_stage():
    f = flow(AR_DIT)
    f.start()
    assert ended(f, 0) == [Forward(1, last=True)]


def test_a_bridge_that_makes_nothing_of_the_cache_is_asked_again():
    f = flow(AR_DIT)
    f.start()
    said(f, 0, kv_ready=True)
    assert bridged(f, 1, made=False, saw_end=False) == NOTHING
    assert said(f, 0, kv_ready=True) == [Forward(1, last=True)]
    assert bridged(f, 1, made=False, saw_end=False) == NOTHING
    assert ended(f, 0) == [Forward(1, last=True)]
    assert bridged(f, 1) == [Submit(1, last=True)]


def test_a_bridge_that_made_nothing_while_its_source_ended_is_asked_again_at_once():
    f = flow(AR_DIT)
    f.start()
    said(f, 0, kv_ready=True)
    assert ended(f, 0) == NOTHING
    assert bridged(f, 1, made=False, saw_end=False) == [Forward(1, last=True)]
    (fail,) = bridged(f, 1, made=False, saw_end=True)
    assert isinstance(fail, Fail)


def test_an_output_that_brings_the_cache_is_a_piece_as_well():
    pipeline = Pipeline([stage("a"), stage("dit", feed="kv"), stage("live", source="a", feed="output")])
    f = flow(pipeline)
    f.start()
    assert said(f, 0, kv_ready=True) == [Forward(1, last=True), Forward(2, last=False)]
    assert said(f, 0, kv_ready=True) == [Forward(2, last=False)]


def test_two_stages_can_start_from_one_cache():
    f = flow(Pipeline([stage("a"), stage("b", feed="kv"), stage("c", source="a", feed="kv"), stage("d", source="a")]))
    f.start()
    assert said(f, 0, kv_ready=True) == [Forward(1, last=True), Forward(2, last=True)]
    assert ended(f, 0) == [Forward(3, last=True)]


# ---- companions


def test_companions_are_part_of_the_admission():
    """U31, W-17: nothing can overtake them, since the flow is never without them."""
    f = guided()
    assert list(f.start()) == [Submit(0, last=True), SubmitCompanion("cond"), SubmitCompanion("uncond")]


def test_companions_that_end_before_their_parent_change_nothing():
    f = guided()
    f.start()
    assert list(f.companion_output("uncond", finished=False)) == NOTHING
    assert list(f.companion_output("uncond", finished=True)) == NOTHING
    assert list(f.companion_output("cond", finished=True)) == NOTHING
    assert ended(f, 0) == [Forward(1, last=True)]


def test_companions_that_end_after_their_parent_release_it():
    f = guided()
    f.start()
    assert ended(f, 0) == [Defer(1)]
    assert list(f.companion_output("cond", finished=True)) == NOTHING
    assert list(f.companion_output("uncond", finished=True)) == [Forward(1, last=True)]
    assert bridged(f, 1) == [Submit(1, last=True)]
    assert ended(f, 1) == [Finish()]


def test_companions_that_end_after_the_cache_is_ready_release_it_once():
    """U32: the end of the parent in between does not."""
    f = guided(feed="kv", final_output=True)
    f.start()
    assert said(f, 0, kv_ready=True) == [Defer(1)]
    assert said(f, 0, kv_ready=True) == NOTHING
    f.companion_output("cond", finished=True)
    assert ended(f, 0) == NOTHING
    assert list(f.companion_output("uncond", finished=True)) == [Forward(1, last=True)]
    assert bridged(f, 1) == [Submit(1, last=True)]


def test_a_released_bridge_that_made_nothing_is_asked_again_at_the_end():
    f = guided(feed="kv")
    f.start()
    said(f, 0, kv_ready=True)
    f.companion_output("cond", finished=True)
    assert list(f.companion_output("uncond", finished=True)) == [Forward(1, last=True)]
    assert bridged(f, 1, made=False, saw_end=False) == NOTHING
    assert ended(f, 0) == [Forward(1, last=True)]


def test_all_that_waits_for_companions_goes_on_together():
    f = guided(stage("judge", source="ar"), feed="kv")
    f.start()
    assert said(f, 0, kv_ready=True) == [Defer(1)]
    assert ended(f, 0) == [Defer(2)]
    f.companion_output("uncond", finished=True)
    assert list(f.companion_output("cond", finished=True)) == [Forward(1, last=True), Forward(2, last=True)]


def test_the_stages_behind_know_nothing_of_companions():
    f = guided(stage("last"))
    f.start()
    f.companion_output("cond", finished=True)
    f.companion_output("uncond", finished=True)
    ended(f, 0)
    bridged(f, 1)
    assert ended(f, 1) == [Forward(2, last=True)]


def test_a_wait_that_is_too_long_names_who_is_missing():
    """U35."""
    f = guided(roles=("cond", "uncond", "image"))
    f.start()
    ended(f, 0)
    f.companion_output("uncond", finished=True)
    (fail,) = f.bundle_expired()
    assert fail == Fail(0, "it waited too long for its companions; missing: 'cond', 'image'", kind="bundle")
    assert f.over
    assert f.release() == Release((), ("cond", "image"), None)


def test_a_wait_that_is_over_can_not_be_too_long():
    f = guided(roles=("cond",))
    f.start()
    ended(f, 0)
    f.companion_output("cond", finished=True)
    assert list(f.bundle_expired()) == NOTHING
    assert not f.over


def test_a_request_that_ends_at_the_first_stage_does_not_wait_for_companions():
    pipeline = Pipeline([stage("ar"), stage("dit")], expand=no_companions)
    f = flow(pipeline, 0, roles=("cond",))
    f.start()
    assert ended(f, 0) == [Finish()]
    assert f.release() == Release((), ("cond",), None)


# ---- connectors


def test_a_chain_of_connectors_is_submitted_at_admission():
    f = flow(Pipeline([stage("a"), stage("b", feed="connector"), stage("c", feed="connector")]))
    assert list(f.start()) == [
        Submit(0, last=True),
        Submit(1, last=True, placeholder=True),
        Submit(2, last=True, placeholder=True),
    ]
    assert said(f, 0) == NOTHING
    assert ended(f, 2) == NOTHING  # those who sent have not said yet that this was all
    assert ended(f, 0) == NOTHING
    assert ended(f, 1) == [Finish()]


def test_senders_are_needed_as_well():
    pipeline = Pipeline([stage("a"), stage("b", feed="connector"), stage("c"), stage("d", feed="connector")])
    assert RoutePlan(pipeline, None).needed == {0, 2, 3}
    assert RoutePlan(pipeline, 2).needed == {0, 2}
    assert RoutePlan(pipeline, 0).needed == {0}
    assert RoutePlan(pipeline, None).watches == (True, True, True, True)
    assert RoutePlan(pipeline, 2).watches == (True, True, False, False)


def test_a_connector_behind_a_bridge_starts_with_its_source():
    f = flow(Pipeline([stage("a"), stage("b", feed="output"), stage("c", feed="connector")]))
    assert list(f.start()) == [Submit(0, last=True)]
    said(f, 0)
    assert bridged(f, 1, last=False) == [Submit(1, last=False), Submit(2, last=True, placeholder=True)]
    said(f, 0)
    assert bridged(f, 1, last=False) == [Update(1, last=False)]
    ended(f, 0)
    assert bridged(f, 1) == [Update(1, last=True)]


def test_a_connector_beside_a_bridge():
    f = flow(Pipeline([stage("a"), stage("b", feed="connector"), stage("c", source="a")]))
    assert list(f.start()) == [Submit(0, last=True), Submit(1, last=True, placeholder=True)]
    assert ended(f, 0) == [Forward(2, last=True)]


# ---- sessions


def test_segments_submit_update_and_close():
    f = flow(P3, session=True)
    assert list(f.start(last=False)) == [Submit(0, last=False, segment_end=True)]
    assert said(f, 0) == NOTHING
    assert said(f, 0, segment_end=True) == [Forward(1, last=False, segment_end=True)]
    assert bridged(f, 1, last=False, segment_end=True) == [Submit(1, last=False, segment_end=True)]
    assert said(f, 1, segment_end=True) == [Forward(2, last=False, segment_end=True)]
    assert bridged(f, 2, last=False, segment_end=True) == [Submit(2, last=False, segment_end=True)]
    assert list(f.more_input(last=False)) == [Update(0, last=False, segment_end=True)]
    assert said(f, 0, segment_end=True) == [Forward(1, last=False, segment_end=True)]
    assert bridged(f, 1, last=False, segment_end=True) == [Update(1, last=False, segment_end=True)]
    assert f.takes_input
    assert list(f.more_input(last=True, made_input=False)) == [Update(0, last=True, segment_end=True)]
    assert not f.takes_input
    assert ended(f, 0) == [Forward(1, last=True, segment_end=True)]  # once: W-23
    assert bridged(f, 1, made=False, segment_end=True) == [Update(1, last=True, segment_end=True)]
    assert ended(f, 1) == [Forward(2, last=True, segment_end=True)]
    assert bridged(f, 2, made=False, segment_end=True) == [Update(2, last=True, segment_end=True)]
    assert ended(f, 2) == [Finish()]


def test_a_bridge_with_nothing_for_a_segment_says_so_to_those_who_wait_for_its_end():
    """A stage that was given pieces of a segment is told that it is over; one that was given none is not."""
    for feed, expected in (("finish", NOTHING), ("output", [Update(1, last=False, segment_end=True)])):
        f = flow(Pipeline([stage("a"), stage("b", feed=feed)]), session=True)
        f.start(last=False)
        said(f, 0, segment_end=True)
        assert bridged(f, 1, made=False, last=False, segment_end=True) == NOTHING  # it does not have the request yet
        f.more_input(last=False)
        assert said(f, 0, segment_end=True) == [Forward(1, last=False, segment_end=True)]
        assert bridged(f, 1, last=False, segment_end=True) == [Submit(1, last=False, segment_end=True)]
        f.more_input(last=False)
        said(f, 0, segment_end=True)
        assert bridged(f, 1, made=False, last=False, segment_end=True) == expected


def test_pieces_within_segments():
    f = flow(Pipeline([stage("a"), stage("b", feed="output")]), session=True)
    f.start(last=False)
    assert said(f, 0) == [Forward(1, last=False)]
    assert bridged(f, 1, last=False) == [Submit(1, last=False)]
    assert said(f, 0, segment_end=True) == [Forward(1, last=False, segment_end=True)]
    assert bridged(f, 1, made=False, last=False, segment_end=True) == [Update(1, last=False, segment_end=True)]


def test_a_session_can_be_closed_with_its_first_segment():
    f = flow(P1, session=True)
    assert list(f.start(last=True)) == [Submit(0, last=True, segment_end=True)]
    assert not f.takes_input
    with pytest.raises(ProtocolError, match="'feed' can not happen to a leg that is fed"):
        f.more_input(last=False)


def test_a_segment_end_means_nothing_outside_of_sessions():
    f = flow(Pipeline([stage("a"), stage("b"), stage("c", source="a", feed="output")]))
    f.start()
    assert said(f, 0, segment_end=True) == [Forward(2, last=False)]


def test_a_first_stage_with_enough_is_not_given_more():
    f = flow(P3, session=True)
    f.start(last=False)
    assert ended(f, 0) == [Forward(1, last=True, segment_end=True)]
    assert not f.takes_input
    assert list(f.more_input(last=False)) == NOTHING
    assert list(f.more_input(last=True)) == NOTHING


def test_connectors_in_a_session_get_a_placeholder_per_segment():
    f = flow(Pipeline([stage("a"), stage("b", feed="connector"), stage("c", feed="connector")]), session=True)

    def all_three(kind, last, *, placeholder=True):
        return [kind(0, last, True), kind(1, last, True, placeholder), kind(2, last, True, placeholder)]

    assert list(f.start(last=False)) == all_three(Submit, last=False)
    assert list(f.more_input(last=False)) == all_three(Update, last=False)
    # The closing without a segment brings none, or they would answer one segment more than their source.
    assert list(f.more_input(last=True, made_input=False)) == all_three(Update, last=True, placeholder=False)


def test_a_last_segment_has_a_placeholder_as_well():
    f = flow(Pipeline([stage("a"), stage("b", feed="connector")]), session=True)
    f.start(last=False)
    assert list(f.more_input(last=True)) == [Update(0, True, True), Update(1, True, True, placeholder=True)]


def test_a_connector_behind_pieces_starts_with_the_first_piece_of_each_segment():
    f = flow(Pipeline([stage("a"), stage("b", feed="output"), stage("c", feed="connector")]), session=True)
    f.start(last=False)
    said(f, 0)
    assert bridged(f, 1, last=False) == [Submit(1, last=False), Submit(2, False, True, placeholder=True)]
    assert bridged(f, 1, last=False) == [Update(1, last=False)]
    said(f, 0, segment_end=True)
    assert bridged(f, 1, last=False, segment_end=True) == [Update(1, last=False, segment_end=True)]
    assert bridged(f, 1, last=False) == [Update(1, last=False), Update(2, False, True, placeholder=True)]
    ended(f, 0)
    assert bridged(f, 1, segment_end=True) == [Update(1, True, True), Update(2, True, True)]


def test_a_connector_is_closed_when_its_source_has_enough():
    f = flow(Pipeline([stage("a"), stage("b", feed="connector"), stage("c", feed="connector")]), session=True)
    f.start(last=False)
    assert ended(f, 1) == [Update(2, last=True, segment_end=True)]
    assert list(f.more_input(last=True)) == [Update(0, last=True, segment_end=True)]


# ---- prefill and decode


def test_the_decode_follows_the_prefill_without_a_bridge():
    f = flow(pair(stage("next")))
    assert list(f.start()) == [Submit(0, last=True)]
    assert said(f, 0) == NOTHING
    assert ended(f, 0, kv_params=KV) == [Handoff(1, KV)]
    assert list(f.taken_over()) == NOTHING
    assert ended(f, 1) == [Forward(2, last=True)]
    assert bridged(f, 2) == [Submit(2, last=True)]
    assert ended(f, 2) == [Finish()]
    assert f.release() == Release((), (), None)


@pytest.mark.parametrize("params", [None, {}])
def test_a_prefill_without_parameters(params):
    f = flow(pair())
    f.start()
    (fail,) = ended(f, 0, kv_params=params)
    assert isinstance(fail, Fail)
    assert (fail.stage_id, fail.kind) == (1, "handoff")
    assert "set handoff = 'content'" in fail.reason
    assert f.release() == Release((), (), None)

    f = flow(pair(handoff="content"))
    f.start()
    assert ended(f, 0, kv_params=params) == [Handoff(1, None)]
    assert list(f.taken_over()) == NOTHING
    assert f.release() == Release((1,), (), None)


def test_what_a_prefill_holds_is_released_or_taken_over_once_whenever_the_request_ends():
    """U39."""
    phases = [
        ("queued", lambda f: f.start(), (0,), None),
        ("prefilling", lambda f: said(f, 0), (0,), None),
        ("prefilled", lambda f: ended(f, 0, kv_params=KV), (1,), KV),
        ("handed over", lambda f: f.taken_over(), (1,), None),
        ("decoding", lambda f: said(f, 1), (1,), None),
        ("decoded", lambda f: ended(f, 1), (), None),
    ]
    for count in range(1, len(phases) + 1):
        f = flow(pair())
        for _, act, _, _ in phases[:count]:
            act(f)
        name, _, at_work, kv = phases[count - 1]
        assert f.release() == Release(at_work, (), kv), name
        assert f.release() == Release((), (), None), name


def test_a_decode_that_ends_before_its_submission_has_come_back_has_taken_over():
    f = flow(pair(stage("next", feed="connector"), stage("more", source="d")))
    f.start()
    ended(f, 0, kv_params=KV)
    assert ended(f, 1) == [Forward(3, last=True)]
    assert list(f.taken_over()) == [Submit(2, last=True, placeholder=True)]
    bridged(f, 3)
    ended(f, 2)
    assert ended(f, 3) == [Finish()]
    assert f.release().kv is None

    f = flow(pair())
    f.start()
    ended(f, 0, kv_params=KV)
    assert ended(f, 1) == [Finish()]
    assert f.release().kv is None


def test_what_is_connected_to_a_decode_starts_with_it():
    f = flow(pair(stage("b", feed="connector"), stage("c", feed="connector"), stage("live", source="d", feed="output")))
    f.start()
    ended(f, 0, kv_params=KV)
    assert list(f.taken_over()) == [Submit(2, last=True, placeholder=True), Submit(3, last=True, placeholder=True)]
    assert said(f, 1) == [Forward(4, last=False)]


def test_a_decode_can_offer_its_cache_and_a_prefill_can_not():
    f = flow(pair(stage("dit", feed="kv")))
    f.start()
    assert said(f, 0, kv_ready=True) == NOTHING
    ended(f, 0, kv_params=KV)
    f.taken_over()
    assert said(f, 1, kv_ready=True) == [Forward(2, last=True)]


def test_a_prefill_that_nobody_can_do_is_skipped():
    """U42."""
    f = flow(pair(stage("next")))
    f.start()
    assert list(f.skip_prefill()) == [Handoff(1, None, skipped=True)]
    assert f.state(0) is LegState.ENDED
    assert list(f.taken_over()) == NOTHING
    assert ended(f, 1) == [Forward(2, last=True)]
    assert f.release() == Release((), (), None)


def test_a_request_for_the_prefill_alone_is_like_any_other():
    f = flow(pair(), 0)
    f.start()
    assert ended(f, 0, kv_params=KV) == [Finish()]
    assert f.release() == Release((), (), None)
