"""The message level: sessions, and companions of a request. Over simulated stages, on virtual time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
import trio.testing

from message_support import (
    ROLES,
    ask,
    companion,
    echo,
    end_of,
    guided,
    is_last,
    messages,
    of,
    tokens_of,
)
from omni_trio.bridges import Companion
from omni_trio.message_level import (
    Abort,
    AbortResult,
    AddCompanionRequest,
    AddRequest,
    ErrorEvent,
    StreamingUpdate,
    companions_by_message,
)
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Error, SimStage, Stall, Wait
from support import P1, run, stage

# ---- sessions


def test_a_session():
    async def main():
        sim = SimStage(script=echo)
        events = await ask(
            P1,
            [sim],
            AddRequest(request_id="s", prompt=[1, 2], resumable=True),
            StreamingUpdate(request_id="s", prompt=[3]),
            StreamingUpdate(request_id="s", prompt=[0], resumable=False),
        )
        assert tokens_of(events, 0) == [1, 2, 3]  # the closing update's prompt is a dummy
        assert end_of(events, "s").engine_outputs.finished
        segments = [e.engine_outputs.segment for e in events for _ in e.engine_outputs.token_ids]
        assert segments == [0, 0, 1]
        assert [what for what, *_ in sim.log] == ["submit", "update", "update"]

    run(main)


def test_a_prompt_may_say_itself_whether_more_will_follow():
    async def main():
        events = await ask(
            P1,
            [SimStage(script=echo)],
            AddRequest(request_id="s", prompt={"prompt_token_ids": [1], "resumable": True}),
            StreamingUpdate(request_id="s", prompt=SimpleNamespace(prompt_token_ids=[2], resumable=True)),
            StreamingUpdate(request_id="s", prompt=SimpleNamespace(prompt_token_ids=[0], resumable=False)),
        )
        assert tokens_of(events, 0) == [1, 2]
        assert end_of(events, "s").finished

    run(main)


def test_an_update_may_bring_other_parameters():
    async def main():
        events = await ask(
            P1,
            [SimStage(tokens=1)],
            AddRequest(request_id="s", prompt=[1], resumable=True, sampling_params_list=[{"max_tokens": 2}]),
            StreamingUpdate(request_id="s", prompt=[1], sampling_params_list=[{"max_tokens": 3}]),
            StreamingUpdate(request_id="s", prompt=[1], sampling_params_list=[]),
            StreamingUpdate(request_id="s", resumable=False),
        )
        assert len(tokens_of(events, 0)) == 2 + 3 + 3

    run(main)


def test_an_update_for_nobody_is_refused_and_makes_nothing():
    """U70, W-24: no session is revived."""

    async def main():
        async with messages(P1, sim := SimStage(script=echo)) as (commands, events):
            await commands.send(StreamingUpdate(request_id="never", prompt=[1]))
            refusals = [await events.receive()]
            await commands.send(AddRequest(request_id="over", prompt=[1]))
            while not is_last(await events.receive()):
                pass
            submitted = len(sim.log)
            await commands.send(StreamingUpdate(request_id="over", prompt=[1]))
            refusals.append(await events.receive())
            for event, name in zip(refusals, ("never", "over"), strict=True):
                assert (event.request_id, event.refused, event.refused_id) == (None, "streaming_update", name)
                assert (event.error_type, event.status_code) == ("SessionClosed", 409)
            assert len(sim.log) == submitted

    run(main)


def test_an_update_of_a_request_that_is_no_session_is_refused():
    async def main():
        events = await ask(
            P1,
            [SimStage(tokens=2, token_time=1)],
            AddRequest(request_id="r", prompt=[1]),
            StreamingUpdate(request_id="r", prompt=[2]),
        )
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert refusal.request_id is None
        assert "no session" in refusal.error
        assert end_of(events, "r").finished

    run(main)


def test_updates_after_the_closing_one_are_refused():
    async def main():
        events = await ask(
            P1,
            [SimStage(script=echo)],
            AddRequest(request_id="s", prompt=[1], resumable=True),
            StreamingUpdate(request_id="s", resumable=False),
            StreamingUpdate(request_id="s", prompt=[2]),
        )
        assert end_of(events, "s").finished
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert (refusal.refused, refusal.error_type) == ("streaming_update", "SessionClosed")

    run(main)


def test_a_segment_that_can_not_be_served_is_refused_and_the_session_goes_on():
    async def main():
        events = await ask(
            P1,
            [SimStage(script=echo)],
            AddRequest(request_id="s", prompt=[1], resumable=True),
            StreamingUpdate(request_id="s", prompt=""),
            StreamingUpdate(request_id="s", prompt=[3]),
            StreamingUpdate(request_id="s", resumable=False),
        )
        assert tokens_of(events, 0) == [1, 3]
        assert end_of(events, "s").finished
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert (refusal.request_id, refusal.error_type) == (None, "InvalidRequest")

    run(main)


def test_a_first_segment_that_can_not_be_served_ends_the_session():
    async def main():
        events = await ask(P1, [], AddRequest(request_id="s", prompt="", resumable=True))
        assert end_of(events, "s").error_type == "InvalidRequest"
        assert len(events) == 1

    run(main)


def test_a_session_where_the_pipeline_takes_none():
    async def main():
        pipeline = Pipeline([stage("ar"), stage("dit")], expand=companions_by_message)
        events = await ask(pipeline, [], AddRequest(request_id="s", prompt="a", resumable=True))
        assert "no streaming input" in end_of(events, "s").error

    run(main)


def test_segments_wait_in_bounded_room_and_one_too_many_is_refused():
    """I7, U56: the first stage takes none for a long time."""

    async def main():
        async with messages(P1, SimStage(submit_time=100, script=echo)) as (commands, events):
            await commands.send(AddRequest(request_id="s", prompt=[1], resumable=True))
            for _ in range(66):
                await commands.send(StreamingUpdate(request_id="s", prompt=[2]))
            refusals = [await events.receive() for _ in range(2)]
            assert trio.current_time() == 0
            assert {(event.refused, event.error_type) for event in refusals} == {("streaming_update", "Overloaded")}
            await commands.aclose()
            await commands.aclose()

    run(main)


def test_aborting_a_session_refuses_the_segments_that_wait():
    """U68."""

    async def main():
        events = await ask(
            P1,
            [sim := SimStage(submit_time=100, script=echo)],
            AddRequest(request_id="s", prompt=[1], resumable=True),
            StreamingUpdate(request_id="s", prompt=[2]),
            Abort(request_ids=["s"]),
        )
        assert end_of(events, "s").engine_outputs.finish_reason == "abort"
        assert [event.refused for event in events if isinstance(event, ErrorEvent)] == ["streaming_update"]
        assert "update" not in [what for what, *_ in sim.log]

    run(main)


# ---- companions


def test_companions_that_come_with_their_request():
    """U31, W-17: membership is part of admission."""

    async def main():
        both = [companion("cfg_text", 2), companion("cfg_img", 3)]
        ar, dit = SimStage(script=echo), SimStage(script=echo)
        events = await ask(guided(), [ar, dit], AddRequest(request_id="r", prompt=[1], companions=both))
        assert tokens_of(events, 1) == [1, 2, 3]
        assert {event.request_id for event in events} == {"r"}  # S-3: none of a companion
        assert end_of(events, "r").finished
        assert len(ar.log) == 3

    run(main)


def test_companions_that_are_announced_and_come_later():
    """U31: no stage sees the request before all have come, so that it can not overtake them."""

    async def main():
        async with messages(guided(), ar := SimStage(script=echo), SimStage(script=echo)) as (commands, events):
            ids = [f"r.{role}" for role in ROLES]
            await commands.send(AddRequest(request_id="r", prompt=[1], companion_ids=ids))
            await commands.send(companion("cfg_img", 3))
            await trio.sleep(30)
            assert not ar.log
            await commands.send(companion("cfg_text", 2))
            await commands.aclose()
            assert tokens_of([event async for event in events], 1) == [1, 2, 3]  # in the order of the announcement
            assert [note[0] for note in ar.log] == ["submit"] * 3

    run(main)


def test_an_announced_companion_that_does_not_come():
    """U35: the request expires, and says whom it missed."""

    async def main():
        events = await ask(
            guided(bundle_timeout=20), [], AddRequest(request_id="r", prompt=[1], companion_ids=["r.cfg_text", "other"],
                                                      companions=[companion("cfg_img", 3)])
        )  # fmt: skip
        error = end_of(events, "r")
        assert (error.error_type, error.status_code) == ("DeadlineExceeded", 504)
        assert error.error.endswith("did not come: r.cfg_text, other")
        assert trio.current_time() == 20

    run(main)


def test_a_companion_that_comes_after_that_is_refused():
    async def main():
        async with messages(guided(bundle_timeout=20), event_buffer=0) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt=[1], companion_ids=["r.x"]))
            await trio.sleep(30)  # the end waits to be read
            await commands.send(companion("x", 2))
            await commands.aclose()
            assert {(event.request_id, event.refused) async for event in events} == {
                ("r", None),
                (None, "add_companion_request"),
            }

    run(main)


def test_the_ids_of_companions_can_be_used_again():
    async def main():
        async with messages(guided(), SimStage(script=echo), SimStage(script=echo)) as (commands, events):
            for _ in range(2):
                await commands.send(AddRequest(request_id="r", prompt=[1], companions=[companion("x", 2)]))
                while not is_last(event := await events.receive()):
                    pass
                assert event.finished

    run(main)


def test_waiting_for_companions_counts_into_the_deadline():
    async def main():
        events = await ask(guided(), [], AddRequest(request_id="r", prompt=[1], companion_ids=["c"], deadline=7.0))
        assert end_of(events, "r").error_type == "DeadlineExceeded"
        assert trio.current_time() == 7

    run(main)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ([], "no request 'r' is in flight"),
        ([AddRequest(request_id="r", prompt=[1])], "does not wait for this companion"),
        (
            [AddRequest(request_id="r", prompt=[1], companions=[companion("cfg_text", 2)])],
            "does not wait for this companion",
        ),
    ],
)
def test_a_late_companion_that_nobody_announced_is_refused(first, message):
    async def main():
        ar = SimStage(script=lambda request: (Wait(5), *echo(request)))
        events = await ask(guided(), [ar, SimStage(script=echo)], *first, companion("cfg_text", 2))
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert message in refusal.error
        assert (refusal.request_id, refusal.refused, refusal.refused_id) == (
            None, "add_companion_request", "r.cfg_text",
        )  # fmt: skip
        if first:
            assert end_of(events, "r").finished

    run(main)


@pytest.mark.parametrize(
    ("companions", "message"),
    [
        ([companion("cfg_text", 2), AddCompanionRequest(companion_id="c", parent_id="r", role="cfg_text", prompt=[1])],
         "role 'cfg_text'"),
        ([companion("", 2)], "role ''"),
        ([companion("cfg_text", 2), companion("cfg_text", 2)], "id 'r.cfg_text' is taken"),
        ([AddCompanionRequest(companion_id="r", parent_id="r", role="x", prompt=[1])], "id 'r' is taken"),
        ([companion("cfg_text", 2, parent="other")], "is of 'other'"),
        ([companion("cfg_text", 2, sampling_params_list=[7])], "must be a mapping"),
        ([companion("cfg_text", 2, sampling_params_list=[{"nonsense": 1}])], "nonsense"),
        ([AddCompanionRequest(companion_id="c", parent_id="r", role="x", prompt=7)], "not int"),
        ([AddCompanionRequest(companion_id=7, parent_id="r", role="x", prompt="a")], "companion_id"),
    ],
)  # fmt: skip
def test_companions_that_can_not_be_served(companions, message):
    async def main():
        ar = SimStage()
        events = await ask(
            guided(),
            [ar],
            AddRequest(request_id="r", prompt=[1], companions=companions),
            AddRequest(request_id="good", prompt=[1]),
        )
        error = end_of(events, "r")
        assert message in error.error
        assert error.error_type == "InvalidRequest"
        assert end_of(events, "good").finished
        assert len(ar.log) == 1

    run(main)


def test_a_companions_own_parameters():
    async def main():
        one = companion("cfg_text", 5, sampling_params_list=[{"max_tokens": 3}, None])
        events = await ask(
            guided(),
            [SimStage(tokens=1), SimStage(script=echo)],
            AddRequest(request_id="r", prompt=[1], companions=[one]),
        )
        assert len(tokens_of(events, 1)) == 1 + 3

    run(main)


def test_companions_that_the_pipeline_makes_itself_and_those_that_go_before():
    def expand(context):
        return [Companion(role="own", input=StageInput(token_ids=(7,)))]

    async def main():
        events = await ask(
            guided(expand),
            [SimStage(script=echo), SimStage(script=echo)],
            AddRequest(request_id="a", prompt=[1]),
            AddRequest(request_id="b", prompt=[1], companions=[companion("cfg_text", 2, parent="b")]),
        )
        assert tokens_of(of(events, "a"), 1) == [1, 7]
        assert tokens_of(of(events, "b"), 1) == [1, 2]

    run(main)


def test_a_failed_companion_fails_its_request_by_name():
    """U33, W-19."""

    async def main():
        ar = SimStage(script=lambda request: (Error("oh"),) if request.request_id.endswith("text") else (Stall(),))
        both = [companion("cfg_text", 2), companion("cfg_img", 3)]
        events = await ask(guided(), [ar], AddRequest(request_id="r", prompt=[1], companions=both))
        assert "companion 'cfg_text' failed: oh" in end_of(events, "r").error
        assert {event.request_id for event in events} == {"r"}

    run(main)


@pytest.mark.parametrize("announced", [True, False])
def test_aborting_a_companion_aborts_its_request(announced):
    async def main():
        given = {"companion_ids": ["r.x"]} if announced else {"companions": [companion("x", 2)]}
        events = await ask(
            guided(),
            [ar := SimStage(script=lambda _: (Stall(),))],
            AddRequest(request_id="r", prompt=[1], **given),
            Abort(request_ids=["r.x"], rpc_id="1"),
        )
        assert end_of(events, "r").engine_outputs.finish_reason == "abort"
        assert isinstance(events[-1], AbortResult)
        if announced:
            assert not ar.log

    run(main)
