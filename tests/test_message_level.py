"""The message level: what each command comes to in events, over simulated stages on virtual time."""

from __future__ import annotations

import math
import re
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

import omni_trio
from omni_trio import errors
from omni_trio.bridges import BridgeContext, Companion
from omni_trio.errors import EngineDied, StartupFailed
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
    StageMetricsEvent,
    StreamingUpdate,
    UnregisterRemoteReplica,
    companions_by_message,
    open_orchestrator,
)
from omni_trio.message_level._events import STATUS_CODES
from omni_trio.message_level._orchestrator import _Orchestrator
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.stages import ClientStatistics
from omni_trio.testing import Chunk, Die, Error, Finish, LateChunk, Reject, SimStage, Stall, Step, Wait, tokens
from support import P1, P3, run, stage


@asynccontextmanager
async def messages(pipeline, *stages, **options):
    """Open an orchestrator with one `SimStage` per stage; those not given are plain."""
    given = [*stages, *(SimStage() for _ in pipeline.stages[len(stages) :])]
    clients = {spec.name: sim for spec, sim in zip(pipeline.stages, given, strict=True)}
    async with open_orchestrator(pipeline, clients=clients, **options) as channels:
        yield channels


async def send(commands, *several):
    for command in several:
        await commands.send(command)


async def ask(pipeline, stages, *several, **options):
    """Send some commands and no more; return all events."""
    async with messages(pipeline, *stages, **options) as (commands, events):
        await send(commands, *several)
        await commands.aclose()
        return [event async for event in events]


def of(events, request_id):
    return [event for event in events if getattr(event, "request_id", None) == request_id]


def is_last(event):
    return event.finished if isinstance(event, OutputEvent) else isinstance(event, ErrorEvent)


def end_of(events, request_id):
    """The last event of a request, which must be its only terminal one."""
    mine = of(events, request_id)
    assert [is_last(event) for event in mine] == [False] * (len(mine) - 1) + [True]
    return mine[-1]


def tokens_of(events, stage_id):
    return [
        t for e in events if isinstance(e, OutputEvent) and e.stage_id == stage_id for t in e.engine_outputs.token_ids
    ]


def by_text(**scripts):
    """A script per prompt; a prompt without one gets two tokens."""
    return lambda request: scripts.get(request.input.text, tokens(2))


# ---- requests


def test_a_request_is_answered_by_its_outputs_and_the_last_one_says_that_it_is_over():
    async def main():
        events = await ask(P3, [SimStage(tokens=1)] * 3, AddRequest(request_id="r", prompt="a b"))
        assert [(type(event), event.stage_id) for event in events] == [
            (OutputEvent, 0),
            (StageMetricsEvent, 1),
            (OutputEvent, 2),
        ]
        text, talker, audio = events
        assert [text.finished, text.engine_outputs.finished] == [False, True]  # the stage is done, the request is not
        assert [audio.finished, audio.engine_outputs.finished] == [True, True]
        assert {event.replica_id for event in events} == {0}
        assert text.metrics is text.engine_outputs.metrics
        assert talker.metrics.num_tokens_out == 1
        assert [event.type for event in events] == ["output", "stage_metrics", "output"]

    run(main)


def test_outputs_are_told_as_they_come():
    async def main():
        async with messages(P1, SimStage(tokens=3, token_time=1)) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a"))
            for at in (1, 2, 3):
                event = await events.receive()
                assert trio.current_time() == at
                assert len(event.engine_outputs.token_ids) == 1
                assert event.finished is (at == 3)

    run(main)


def test_the_end_of_one_of_several_outputs_is_not_held_back():
    async def main():
        async with messages(P3, SimStage(tokens=1), SimStage(tokens=1, token_time=50)) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a"))
            assert (await events.receive()).engine_outputs.finished
            assert trio.current_time() == 0

    run(main)


def test_neither_is_that_of_the_only_one_that_is_wanted():
    async def main():
        async with messages(P3, SimStage(tokens=1), SimStage(tokens=1, token_time=50)) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a", final_output_stage_ids=[0], final_stage_id=2))
            event = await events.receive()
            assert (event.engine_outputs.finished, event.finished) == (True, False)
            assert trio.current_time() == 0

    run(main)


def test_a_stage_that_ends_without_a_word_still_ends_the_request():
    async def main():
        events = await ask(P1, [SimStage(script=lambda _: (Finish("stop"),))], AddRequest(request_id="r", prompt="a"))
        assert end_of(events, "r").engine_outputs.finish_reason == "stop"

    run(main)


def test_steps_of_the_way_have_no_message():
    async def main():
        script = (Step(1, 2), Step(2, 2), Chunk((1,)), Finish())
        events = await ask(P1, [SimStage(script=lambda _: script)], AddRequest(request_id="r", prompt="a"))
        assert tokens_of(events, 0) == [1]
        assert {type(event) for event in events} == {OutputEvent}

    run(main)


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, [(OutputEvent, 0), (StageMetricsEvent, 1), (OutputEvent, 2)]),
        ({"final_stage_id": 2}, [(OutputEvent, 0), (StageMetricsEvent, 1), (OutputEvent, 2)]),
        ({"final_stage_id": 1}, [(OutputEvent, 0), (OutputEvent, 1)]),
        ({"final_stage_id": 0}, [(OutputEvent, 0)]),
        ({"final_output_stage_ids": [0]}, [(OutputEvent, 0)]),
        ({"final_output_stage_ids": [2]}, [(StageMetricsEvent, 0), (StageMetricsEvent, 1), (OutputEvent, 2)]),
        ({"final_output_stage_ids": [0, 2]}, [(OutputEvent, 0), (StageMetricsEvent, 1), (OutputEvent, 2)]),
        (
            {"final_stage_id": 2, "final_output_stage_ids": [0]},
            [(OutputEvent, 0), (StageMetricsEvent, 1), (StageMetricsEvent, 2), (OutputEvent, 2)],
        ),
    ],
)
def test_which_stages_it_passes_and_whose_outputs_are_told(given, ends):
    async def main():
        events = await ask(P3, [SimStage(tokens=1)] * 3, AddRequest(request_id="r", prompt="a", **given))
        assert [(type(event), event.stage_id) for event in events] == ends
        assert end_of(events, "r").finished

    run(main)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"final_stage_id": 3}, "no stage 3"),
        ({"final_stage_id": -1}, "no stage -1"),
        ({"final_output_stage_ids": [7]}, "no stage 7"),
        ({"final_output_stage_ids": []}, "nothing is wanted"),
        ({"final_output_stage_ids": [1, 2]}, "'talker' is not a final one"),
        ({"sampling_params_list": []}, "one entry per stage"),
        ({"sampling_params_list": [None]}, "one entry per stage"),
        ({"sampling_params_list": [{"max_tokens": 0}, None, None]}, "max_tokens"),
        ({"deadline": 0.0}, "above 0"),
        ({"deadline": math.nan}, "above 0"),
        ({"prompt": None}, "there is no prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 7}, "not int"),
        ({"prompt": {"prompt": 7}}, "not int"),
        ({"prompt": {"prompt_token_ids": 7}}, "not int"),
        ({"prompt": {"prompt_token_ids": [1, "x"]}}, "whole numbers"),
        ({"prompt": {}}, "empty"),
        ({"prompt": SimpleNamespace(prompt_token_ids=[1], mm_features=["x"])}, "preprocessed"),
        ({"priority": "high"}, "priority"),
        ({"final_stage_id": "last"}, "final_stage_id"),
        ({"request_id": ""}, "must not be empty"),
        ({"companions": [AddCompanionRequest(companion_id="c", parent_id="r", role="x", prompt="a")]}, "no companions"),
        ({"companion_ids": ["c"]}, "no companions"),
    ],
)
def test_what_can_not_be_served_fails_alone(given, message):
    """U29, W-9, W-10: a request's error is its own."""

    async def main():
        bad = AddRequest(**({"request_id": "r", "prompt": "a"} | given))
        stages = [SimStage(), SimStage(), SimStage()]
        events = await ask(P3, stages, bad, AddRequest(request_id="good", prompt="a"))
        assert end_of(events, "good").finished
        error = end_of(events, bad.request_id)
        assert message in error.error
        assert (error.status_code, error.error_type, error.fatal) == (400, "InvalidRequest", False)
        assert {note[3].split("-")[0] for sim in stages for note in sim.log} == {"good"}  # no stage has seen the other

    run(main)


def test_parameters_are_given_per_stage_and_none_means_its_defaults():
    async def main():
        many = [{"max_tokens": 1}, None, {"max_tokens": 3}]
        events = await ask(
            P3, [SimStage(tokens=2)] * 3, AddRequest(request_id="r", prompt="a", sampling_params_list=many)
        )
        assert len(tokens_of(events, 0)) == 1
        assert next(event for event in events if event.stage_id == 1).metrics.num_tokens_out == 2
        assert len(tokens_of(events, 2)) == 3

    run(main)


def test_a_deadline():
    async def main():
        events = await ask(
            P1, [SimStage(script=lambda _: (Stall(),))], AddRequest(request_id="r", prompt="a", deadline=5.0)
        )
        error = end_of(events, "r")
        assert (error.status_code, error.error_type) == (504, "DeadlineExceeded")
        assert trio.current_time() == 5

    run(main)


@pytest.mark.parametrize(
    ("prompt", "original", "expected"),
    [
        ("a b", None, StageInput(text="a b")),
        ([1, 2], None, StageInput(token_ids=(1, 2))),
        (StageInput(text="a"), None, StageInput(text="a")),
        (None, "a b", StageInput(text="a b")),
        ({"prompt": "a", "modalities": ["audio"]}, None, StageInput(text="a", data={"modalities": ["audio"]})),
        ({"prompt_token_ids": [1], "prompt": "a"}, None, StageInput(token_ids=(1,))),
        ({"prompt_embeds": "E", "prompt_token_ids": [0]}, None, StageInput(embeds="E")),
        ({"messages": [{"role": "user"}]}, None, StageInput(messages=({"role": "user"},))),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}, "additional_information": {"x": 2}, "cache_salt": None},
            None,
            StageInput(text="a", data={"multi_modal_data": {"image": 1}, "additional_information": {"x": 2}}),
        ),
        (
            {"prompt_token_ids": [1], "k": 1},
            {"prompt": "a", "k": 2, "multi_modal_data": 3},
            StageInput(token_ids=(1,), data={"k": 1, "multi_modal_data": 3}),
        ),
        ([1, 2], {"prompt": "a", "k": 2}, StageInput(token_ids=(1, 2), data={"k": 2})),
        ([1, 2], "a", StageInput(token_ids=(1, 2))),
        (
            SimpleNamespace(prompt_token_ids=[4], prompt_embeds=None, additional_information={"x": 1}),
            None,
            StageInput(token_ids=(4,), data={"additional_information": {"x": 1}}),
        ),
        (
            ["a", {"prompt": "b", "k": 1}],
            None,
            StageInput(batch=(StageInput(text="a"), StageInput(text="b", data={"k": 1}))),
        ),
    ],
)
def test_forms_of_a_prompt(prompt, original, expected):
    seen = []

    def script(request):
        seen.append(request.input)
        return tokens(1)

    async def main():
        await ask(P1, [SimStage(script=script)], AddRequest(request_id="r", prompt=prompt, original_prompt=original))

    run(main)
    assert seen == [expected]


def test_an_error_of_a_stage_is_counted_and_names_it():
    """U2: of a batch each is told how it ended, once."""

    async def main():
        pipeline = Pipeline([stage("ar"), stage("dit")])
        events = await ask(
            pipeline,
            [SimStage(script=by_text(bad=(Chunk((1,)), Error("boom"))))],
            *(AddRequest(request_id=name, prompt=prompt) for name, prompt in (("a", "x"), ("b", "bad"), ("c", "x"))),
        )
        assert end_of(events, "a").finished
        assert end_of(events, "c").finished
        error = end_of(events, "b")
        assert (error.stage_id, error.replica_id, error.error_type, error.status_code) == (0, 0, "StageFailed", 500)
        assert "boom" in error.error
        assert not error.fatal

    run(main)


def test_what_came_before_an_error_is_told_before_it():
    async def main():
        script = (Chunk((1,)), Wait(1), Chunk((2,)), Error("boom"))
        events = await ask(P1, [SimStage(script=lambda _: script)], AddRequest(request_id="r", prompt="a"))
        assert tokens_of(events, 0) == [1, 2]
        assert isinstance(end_of(events, "r"), ErrorEvent)

    run(main)


def test_a_refusal_by_a_stage():
    async def main():
        events = await ask(P1, [SimStage(script=lambda _: (Reject("no"),))], AddRequest(request_id="r", prompt="a"))
        assert [(event.error_type, event.status_code, event.request_id) for event in events] == [
            ("InvalidRequest", 400, "r")
        ]

    run(main)


def test_an_object_that_breaks_when_it_is_looked_at_hurts_its_own_request_only(caplog):
    class Broken(dict):
        def get(self, *_):
            raise ZeroDivisionError("bad object")

    async def main():
        events = await ask(
            P1,
            [],
            AddRequest(request_id="r", prompt=Broken(a=1), resumable=False),
            AddRequest(request_id="good", prompt="a"),
        )
        assert end_of(events, "r").error_type == "ZeroDivisionError"
        assert end_of(events, "good").finished

    run(main)
    assert "request 'r' failed" in caplog.text


def test_an_id_that_is_in_flight_is_refused_and_the_one_in_flight_goes_on():
    """U6: the refusal does not look like the end of the other."""

    async def main():
        events = await ask(
            P1,
            [SimStage(tokens=3, token_time=1)],
            AddRequest(request_id="x", prompt="a"),
            AddRequest(request_id="x", prompt="b"),
        )
        assert end_of(events, "x").finished
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert (refusal.request_id, refusal.refused, refusal.refused_id) == (None, "add_request", "x")
        assert refusal.status_code == 400

    run(main)


@pytest.mark.parametrize("event_buffer", [0, 1, 256])
def test_who_has_read_the_end_can_use_the_id_again(event_buffer):
    """U6."""

    async def main():
        async with messages(P1, SimStage(tokens=1), event_buffer=event_buffer) as (commands, events):
            for _ in range(20):
                commands.send_nowait(AddRequest(request_id="x", prompt="a"))
                assert (await events.receive()).finished

    run(main)


def test_too_many_in_flight_are_refused_those_included_whose_end_is_unread():
    async def main():
        async with messages(P1, SimStage(tokens=1), event_buffer=0, max_in_flight=2) as (commands, events):
            await send(commands, *(AddRequest(request_id=f"r{index}", prompt="a") for index in range(3)))
            await trio.testing.wait_all_tasks_blocked()  # both have ended at the stage
            got = [await events.receive() for _ in range(3)]
            assert end_of(got, "r0").finished
            assert end_of(got, "r1").finished
            refusal = end_of(got, "r2")
            assert (refusal.error_type, refusal.status_code) == ("Overloaded", 429)
            await commands.send(AddRequest(request_id="r2", prompt="a"))
            assert (await events.receive()).finished

    run(main)


# ---- sessions


def echo(request):
    return (*(Chunk((token,)) for token in request.input.token_ids or ()), Finish())


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

ROLES = ("cfg_text", "cfg_img")


def gather(context: BridgeContext) -> StageInput:
    bundle = [tuple(context.token_ids), *(tuple(one.token_ids) for one in context.companions.values())]
    return StageInput(token_ids=tuple(t for ids in bundle for t in ids), data={"roles": list(context.companions)})


def guided(expand=companions_by_message, **options):
    return Pipeline([stage("ar"), stage("dit", bridge=gather)], expand=expand, **options)


def companion(role, token, parent="r", **fields):
    return AddCompanionRequest(companion_id=f"{parent}.{role}", parent_id=parent, role=role, prompt=[token], **fields)


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


# ---- abort


def test_an_abort_ends_the_request_in_the_name_of_its_final_stage():
    """U8, W-34."""

    async def main():
        async with messages(P3, sim := SimStage(script=lambda _: (Chunk((1,)), Stall()))) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a"))
            assert (await events.receive()).engine_outputs.token_ids == (1,)
            await commands.send(Abort(request_ids=["r"]))
            last = await events.receive()
            assert (last.finished, last.stage_id, last.replica_id) == (True, 2, None)
            output = last.engine_outputs
            assert (output.finish_reason, output.finished, output.stage) == ("abort", True, "vocoder")
            assert sim.log[-1][0] == "abort"
            await commands.aclose()
            assert [event async for event in events] == []  # nobody asked for an answer

    run(main)


def test_an_abort_with_an_rpc_id_is_answered_once_every_stage_has_let_go():
    """U9, W-6: and after the last events of the requests; all stages are told at the same time."""

    async def main():
        sims = [SimStage(script=lambda _: (Chunk((1,)), LateChunk((9,)), Stall()), abort_time=3)]
        async with messages(P1, *sims) as (commands, events):
            await send(commands, *(AddRequest(request_id=name, prompt="a") for name in "ab"))
            got = [await events.receive() for _ in range(2)]
            await commands.send(Abort(request_ids=["a", "b", "b", "unknown"], rpc_id="7"))
            got += [await events.receive() for _ in range(3)]
            assert trio.current_time() == 3
            answer = got[-1]
            assert (answer.type, answer.rpc_id, answer.success, answer.error) == ("abort_result", "7", True, None)
            assert list(answer.abort_outputs) == [end_of(got, "a"), end_of(got, "b")]
            assert tokens_of(got, 0) == [1, 1]  # the late ones are dropped

    run(main)


def test_aborting_who_is_not_there():
    """U10: unknown, ended, twice."""

    async def main():
        async with messages(P1, sim := SimStage(tokens=1)) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a"))
            assert (await events.receive()).finished
            await send(commands, Abort(request_ids=["r", "never"], rpc_id="1"), Abort(request_ids=[], rpc_id="2"))
            answers = [await events.receive() for _ in range(2)]
            assert {(answer.rpc_id, answer.success, len(answer.abort_outputs)) for answer in answers} == {
                ("1", True, 0),
                ("2", True, 0),
            }
            assert [note[0] for note in sim.log] == ["submit"]

    run(main)


def test_an_abort_behind_its_request_always_finds_it():
    """S-16."""

    async def main():
        for _ in range(20):
            events = await ask(
                P1,
                [SimStage(script=lambda _: (Stall(),))],
                AddRequest(request_id="r", prompt="a"),
                Abort(request_ids=["r"], rpc_id="1"),
                AddRequest(request_id="r2", prompt="a"),
                Abort(request_ids=["r2"]),
            )
            assert end_of(events, "r").engine_outputs.finish_reason == "abort"
            assert end_of(events, "r2").engine_outputs.finish_reason == "abort"
            (answer,) = [event for event in events if isinstance(event, AbortResult)]
            assert list(answer.abort_outputs) == of(events, "r")

    run(main)


def test_a_stage_that_does_not_acknowledge_makes_the_abort_fail():
    """U9: it is never silently done."""

    async def main():
        events = await ask(
            P1,
            [SimStage(script=lambda _: (Stall(),), abort_time=math.inf)],
            AddRequest(request_id="r", prompt="a"),
            Abort(request_ids=["r"], rpc_id="1"),
            on_engine_death="isolate",
            abort_timeout=4,
        )
        answer = events[-1]
        assert answer.success is False
        assert "did not acknowledge" in answer.error
        assert end_of(events, "r").engine_outputs.finish_reason == "abort"
        assert trio.current_time() == 4

    run(main)


def test_a_slow_abort_delays_no_other_command():
    """W-6, W-3."""

    async def main():
        script = by_text(stuck=(Stall(),))
        async with messages(P1, SimStage(script=script, abort_time=5)) as (commands, events):
            await send(
                commands,
                AddRequest(request_id="stuck", prompt="stuck"),
                Abort(request_ids=["stuck"], rpc_id="1"),
                AddRequest(request_id="quick", prompt="a"),
            )
            got = []
            while not any(is_last(event) for event in of(got, "quick")):
                got.append(await events.receive())
            assert trio.current_time() == 0

    run(main)


# ---- collective RPC


def test_every_replica_answers_and_says_who_it_is():
    """W-57."""

    async def main():
        pipeline = Pipeline([stage("a", replicas=2), stage("b")])
        events = await ask(
            pipeline,
            [],
            CollectiveRpc(rpc_id="1", method="echo", args=(4, 5)),
            CollectiveRpc(rpc_id="2", method="echo", stage_ids=[1, 0, 1]),
            CollectiveRpc(rpc_id="3", method="echo", stage_ids=[]),
        )
        by_id = {event.rpc_id: event for event in events}
        assert [by_id["1"].stage_ids, by_id["1"].replica_ids] == [[0, 0, 1], [0, 1, 0]]
        assert by_id["1"].results == [[4, 5]] * 3
        assert [by_id["2"].stage_ids, by_id["2"].replica_ids] == [[1, 0, 0], [0, 0, 1]]
        assert by_id["3"].results == []
        assert {event.error for event in events} == {None}

    run(main)


def test_a_slow_rpc_delays_nobody_and_replicas_are_asked_at_the_same_time():
    """W-5."""

    async def main():
        async with messages(P3, *[SimStage(tokens=1)] * 3) as (commands, events):
            await send(
                commands,
                CollectiveRpc(rpc_id="slow", method="wait", args=(5,)),
                CollectiveRpc(rpc_id="quick", method="echo"),
                AddRequest(request_id="r", prompt="a", final_stage_id=0),
            )
            first = [await events.receive() for _ in range(2)]
            assert {type(event) for event in first} == {CollectiveRpcResult, OutputEvent}
            assert trio.current_time() == 0
            assert (await events.receive()).rpc_id == "slow"
            assert trio.current_time() == 5

    run(main)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"method": "nonsense"}, "StageFailed"), ({"method": "wait", "args": (50,), "timeout": 2.0}, "StageFailed")],
)
def test_a_replica_that_fails_or_is_late_has_an_error_for_a_result(given, kind):
    async def main():
        (answer,) = await ask(P1, [], CollectiveRpc(rpc_id="1", **given))
        (result,) = answer.results
        assert (result["supported"], result["error_type"]) == (False, kind)
        assert answer.error is None

    run(main)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage_ids": [0, 4]}, "no stage 4"),
        ({"stage_ids": [-1]}, "no stage -1"),
        ({"timeout": math.nan}, ""),
        ({"method": "wait", "args": ("x",)}, ""),
    ],
)
def test_a_call_that_makes_no_sense_is_answered_too(given, message):
    """S-22."""

    async def main():
        (answer,) = await ask(P1, [], CollectiveRpc(**({"rpc_id": "1", "method": "echo"} | given)))
        assert (answer.type, answer.rpc_id) == ("collective_rpc_result", "1")
        wrong = answer.error if answer.error is not None else answer.results[0]["error"]
        assert message in wrong

    run(main)


def test_an_rpc_id_that_is_pending_is_refused_and_can_be_used_again():
    async def main():
        async with messages(P1) as (commands, events):
            slow = CollectiveRpc(rpc_id="1", method="wait", args=(5,))
            await send(commands, slow, Abort(request_ids=[], rpc_id="1"))
            refusal = await events.receive()
            assert (refusal.refused, refusal.refused_id, refusal.request_id) == ("abort", "1", None)
            assert (await events.receive()).rpc_id == "1"
            await commands.send(slow)
            assert (await events.receive()).error is None

    run(main)


class Calls:
    """A replica whose calls wait until it dies."""

    def __init__(self, *, dies_at: float) -> None:
        self.dies_at = dies_at
        self.dead = trio.Event()

    @asynccontextmanager
    async def __call__(self, context):
        yield self

    def statistics(self):
        return ClientStatistics()

    async def receive(self):
        await trio.sleep(self.dies_at)
        self.dead.set()
        raise EngineDied("gone")

    async def call(self, method, args=(), kwargs=None):
        await self.dead.wait()
        raise EngineDied("gone")


def test_whoever_waits_for_a_call_hears_of_a_death():
    """U23: per replica under ``isolate``; a caller that does not wait any more is nobody's trouble."""

    async def main():
        pipeline = Pipeline([stage("a"), stage("b")])
        clients = {"a": SimStage(), "b": Calls(dies_at=3)}
        async with open_orchestrator(pipeline, clients=clients, on_engine_death="isolate") as (commands, events):
            await commands.send(CollectiveRpc(rpc_id="1", method="echo", timeout=100.0))
            answer = await events.receive()
            assert trio.current_time() == 3
            assert answer.results[0] == []
            assert answer.results[1]["error_type"] == "EngineDied"

    run(main)


def test_whoever_waits_for_a_call_hears_of_the_death_of_all():
    """U23 under ``fail_stop``, W-26: at once, though other replicas have not answered."""

    async def main():
        pipeline = Pipeline([stage("a"), stage("b")])
        clients = {"a": SimStage(close_time=2), "b": Calls(dies_at=3)}
        got = []
        with pytest.raises(EngineDied, match="gone"):
            async with open_orchestrator(pipeline, clients=clients) as (commands, events):
                await commands.send(CollectiveRpc(rpc_id="1", method="wait", args=(1000,), timeout=2000.0))
                got.append(await events.receive())
                assert trio.current_time() == 3
                got += [event async for event in events]
        answer, death = got
        assert (answer.rpc_id, answer.error_type, answer.results) == ("1", "EngineDied", ())
        assert (death.fatal, death.request_id, death.error_type) == (True, None, "EngineDied")

    run(main)


# ---- what is refused


@pytest.mark.parametrize(
    ("command", "about"),
    [
        (RegisterRemoteReplica(stage_id=0, replica_id=3), "0/3"),
        (UnregisterRemoteReplica(stage_id=0, input_addr="tcp://x"), "tcp://x"),
    ],
)
def test_membership_is_not_supported_and_says_so(command, about):
    async def main():
        (event,) = await ask(P1, [], command)
        assert (event.status_code, event.error_type) == (501, "NotSupported")
        assert (event.refused, event.refused_id, event.request_id) == (command.type, about, None)

    run(main)


@pytest.mark.parametrize(
    ("command", "refused", "about"),
    [
        ("nonsense", "str", None),
        (None, "NoneType", None),
        (Abort(request_ids="r", rpc_id="1"), "abort", "1"),
        (Abort(request_ids=[7]), "abort", None),
        (CollectiveRpc(rpc_id=[], method="echo"), "collective_rpc", "[]"),
        (CollectiveRpc(rpc_id="1", method="echo", timeout="soon"), "collective_rpc", "1"),
        (AddRequest(request_id=[1], prompt="a"), "add_request", "[1]"),
        (RegisterRemoteReplica(stage_id="x", replica_id=1), "register_remote_replica", "x/1"),
    ],
)
def test_what_is_no_command_is_refused_and_hurts_nobody(command, refused, about):
    """U29."""

    async def main():
        events = await ask(P1, [], command, AddRequest(request_id="good", prompt="a"))
        assert end_of(events, "good").finished
        (refusal,) = [event for event in events if isinstance(event, ErrorEvent)]
        assert (refusal.refused, refusal.refused_id) == (refused, about)
        assert (refusal.status_code, refusal.error_type) == (400, "InvalidRequest")

    run(main)


# ---- the end


def test_shutdown_tells_everybody():
    """U63, W-25, W-26: requests, calls, and what was sent behind it."""

    async def main():
        async with messages(P1, SimStage(script=lambda _: (Chunk((1,)), Stall())), shutdown_deadline=3) as channels:
            commands, events = channels
            await send(
                commands,
                AddRequest(request_id="a", prompt="a"),
                AddRequest(request_id="s", prompt=[1], resumable=True),
                CollectiveRpc(rpc_id="1", method="wait", args=(1000,), timeout=2000.0),
            )
            await trio.sleep(1)
            behind = (
                AddRequest(request_id="late", prompt="a"),
                AddRequest(request_id="late", prompt="a"),
                AddRequest(request_id="a", prompt="a"),
                StreamingUpdate(request_id="s", prompt=[1]),
                CollectiveRpc(rpc_id="2", method="echo"),
                Abort(request_ids=["a"], rpc_id="3"),
                Abort(request_ids=["a"]),
                RegisterRemoteReplica(stage_id=0, replica_id=1),
                Shutdown(),
                "nonsense",
            )
            commands.send_nowait(Shutdown())
            for command in behind:
                commands.send_nowait(command)
            got = [event async for event in events]
            assert trio.current_time() == 1
            for name in ("a", "s", "late"):
                error = end_of(got, name)
                assert (error.error_type, error.status_code, error.fatal) == ("ShutDown", 503, False)
            calls = {event.rpc_id: event for event in got if hasattr(event, "rpc_id")}
            assert set(calls) == {"1", "2", "3"}
            assert calls["1"].error_type == calls["2"].error_type == "ShutDown"
            assert calls["3"].success is False
            refused = [event.refused for event in got if isinstance(event, ErrorEvent) and event.request_id is None]
            assert sorted(refused) == [
                "add_request", "add_request", "register_remote_replica", "str", "streaming_update",
            ]  # fmt: skip
            with pytest.raises(trio.BrokenResourceError):
                await commands.send(Shutdown())

    run(main)


def test_closing_the_commands_serves_what_is_in_flight():
    async def main():
        events = await ask(
            P3,
            [SimStage(tokens=3, token_time=5)] * 3,
            AddRequest(request_id="r", prompt="a"),
            CollectiveRpc(rpc_id="1", method="wait", args=(20,)),
        )
        assert end_of(events, "r").finished
        assert isinstance(events[-1], OutputEvent)
        assert trio.current_time() == 45

    run(main)


def test_leaving_the_block_ends_everything_and_tells_what_there_is_room_for():
    """I12: however slow the reader is."""

    async def main():
        async with messages(P1, sim := SimStage(script=lambda _: (Chunk((1,)), Stall())), event_buffer=4) as channels:
            commands, events = channels
            await send(commands, *(AddRequest(request_id=name, prompt="a") for name in "abcdef"))
            await commands.send(CollectiveRpc(rpc_id="1", method="wait", args=(1000,)))
            await trio.sleep(1)
            assert events.statistics().current_buffer_used == 4
            for _ in range(4):
                await events.receive()  # of the two that have waited both take its place
        assert trio.current_time() == 1
        left = [event async for event in events]
        assert [is_last(event) for event in left] == [False] * 2 + [True] * 2
        assert sorted(note[0] for note in sim.log) == ["abort"] * 6 + ["call"] + ["submit"] * 6

    run(main)


def test_closing_the_events_ends_everything():
    async def main():
        async with messages(P1, sim := SimStage(script=lambda _: (Wait(3), Chunk((1,)), Stall()))) as channels:
            commands, events = channels
            await send(commands, *(AddRequest(request_id=name, prompt="a") for name in "ab"))
            await events.aclose()
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await commands.send(StreamingUpdate(request_id="nobody", prompt="a"))
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(note[0] for note in sim.log) == ["abort", "abort", "submit", "submit"]

    run(main)


@pytest.mark.parametrize("error", [KeyError("mine"), ExceptionGroup("mine", [KeyError("one")])])
def test_an_error_of_the_block_comes_out_as_it_is(error):
    async def main():
        with pytest.raises(type(error)) as caught:
            async with messages(P1, SimStage(script=lambda _: (Stall(),))) as (commands, _):
                await commands.send(AddRequest(request_id="r", prompt="a"))
                await trio.sleep(1)
                raise error
        assert type(caught.value) is type(error)
        assert caught.value.args == error.args

    run(main)


def test_cancelling_from_outside():
    async def main():
        with trio.move_on_after(3):
            async with messages(P1, sim := SimStage(script=lambda _: (Stall(),))) as (commands, events):
                await commands.send(AddRequest(request_id="r", prompt="a"))
                await events.receive()
        assert trio.current_time() == 3
        assert sim.log[-1][0] == "abort"
        (last,) = [event async for event in events]
        assert (last.request_id, last.error_type) == ("r", "ShutDown")

    run(main)


def test_a_replica_that_does_not_come_up():
    async def main():
        with pytest.raises(StartupFailed, match="no such weights"):
            async with messages(P1, SimStage(start_time=2, start_error="no such weights")):
                pytest.fail("it must not open")
        assert trio.current_time() == 2

    run(main)


def test_options_that_make_no_sense():
    async def main():
        for options, message in (({"news_timeout": -1}, "news_timeout"), ({"max_in_flight": 0}, "max_in_flight")):
            with pytest.raises(ValueError, match=message):
                async with messages(P1, **options):
                    pytest.fail("it must not open")

    run(main)


# ---- death


def dies(request):
    return (Wait(5), Die("lights out")) if request.input.text == "die" else (Chunk((1,)), Stall())


def test_a_death_is_told_to_every_request_and_then_to_all():
    """I15, U30: one fatal error per id, a last one without; the block goes on meanwhile, and ends with the death."""

    async def main():
        got = []
        with pytest.raises(EngineDied, match="lights out") as caught:
            async with messages(P3, SimStage(script=dies)) as (commands, events):
                names = [f"r{index}" for index in range(5)]
                await send(commands, *(AddRequest(request_id=name, prompt="a") for name in names))
                await commands.send(AddRequest(request_id="killer", prompt="die"))
                got += [event async for event in events]
                assert trio.current_time() == 5
                with pytest.raises(trio.BrokenResourceError):
                    await commands.send(Shutdown())
        assert caught.value.request_id is None
        for name in (*names, "killer"):
            error = end_of(got, name)
            assert (error.fatal, error.error_type, error.status_code) == (True, "EngineDied", 500)
            assert (error.stage_id, error.replica_id) == (0, 0)
        last = got[-1]
        assert (last.fatal, last.request_id, last.stage_id) == (True, None, 0)
        assert sum(event.request_id is None for event in got if isinstance(event, ErrorEvent)) == 1

    run(main)


def test_a_block_that_does_not_end_by_itself_is_cancelled_after_the_news():
    async def main():
        got = []

        async def read(events):
            async for event in events:
                got.append(event)

        with pytest.raises(EngineDied):
            async with messages(P1, SimStage(script=dies), news_timeout=2) as (commands, events):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, events)
                    await commands.send(AddRequest(request_id="killer", prompt="die"))
                    await trio.sleep_forever()
        assert trio.current_time() == 7
        assert end_of(got, "killer").fatal

    run(main)


def test_a_reader_that_does_not_read_does_not_hold_up_the_end():
    """I12, I16."""

    async def main():
        with pytest.raises(EngineDied):
            async with messages(P1, SimStage(script=dies), news_timeout=2, event_buffer=0) as (commands, _):
                await send(commands, *(AddRequest(request_id=name, prompt="a") for name in "ab"))
                await commands.send(AddRequest(request_id="killer", prompt="die"))
                await trio.sleep_forever()
        assert trio.current_time() == 5 + 0.5 + 2  # the runtime too waits a little for its requests to be told

    run(main)


def test_what_waits_to_be_taken_when_an_engine_dies_is_answered():
    """W-26, 12.5."""

    async def main():
        got = []
        with pytest.raises(EngineDied):
            async with messages(P1, SimStage(script=lambda _: (Die("lights out"),))) as (commands, events):
                commands.send_nowait(AddRequest(request_id="killer", prompt="a"))
                await trio.testing.wait_all_tasks_blocked()
                # The orchestrator has stopped taking; or else it takes them now, and the runtime refuses them.
                with pytest.raises(trio.BrokenResourceError):
                    for index in range(100):
                        commands.send_nowait(AddRequest(request_id=f"r{index}", prompt="a"))
                got += [event async for event in events]
        assert end_of(got, "killer").fatal

    run(main)


def test_under_isolate_only_those_on_the_replica_fail():
    async def main():
        pipeline = Pipeline([stage("a", replicas=2)])
        script = by_text(die=(Wait(1), Die("lights out")), slow=(Wait(3), Finish("stop", (1,))))
        events = await ask(
            pipeline,
            [SimStage(script=script)],
            AddRequest(request_id="killer", prompt="die"),
            AddRequest(request_id="other", prompt="slow"),
            on_engine_death="isolate",
        )
        error = end_of(events, "killer")
        assert (error.error_type, error.fatal, error.status_code, error.replica_id) == ("ReplicaLost", False, 503, 0)
        assert end_of(events, "other").finished
        assert len(events) == 2

    run(main)


def test_a_call_that_waits_to_be_taken_when_an_engine_dies_is_answered(monkeypatch):
    """W-26: though it is neither in the channel any more nor under way."""
    monkeypatch.setattr("omni_trio.message_level._orchestrator._CALLS", 1)

    async def main():
        got = []
        with pytest.raises(EngineDied):
            async with open_orchestrator(P1, clients={"only": Calls(dies_at=3)}) as (commands, events):
                await send(commands, *(CollectiveRpc(rpc_id=name, method="x", timeout=100.0) for name in "abc"))
                got += [event async for event in events]
        assert sorted(event.rpc_id for event in got[:-1]) == ["a", "b", "c"]

    run(main)


def test_what_was_about_to_be_told_is_told_when_all_ends_by_a_bug(monkeypatch):
    """U30: the end that a request has had, not another one."""
    serve = _Orchestrator._serve

    async def broken(self, conversation):
        if conversation.id == "bug":
            raise ZeroDivisionError("a bug")
        await serve(self, conversation)

    monkeypatch.setattr(_Orchestrator, "_serve", broken)

    async def main():
        got = []
        with pytest.raises(ZeroDivisionError):
            async with messages(P1, SimStage(tokens=1), event_buffer=0) as (commands, events):
                await send(
                    commands,
                    AddRequest(request_id="r", prompt="a"),
                    CollectiveRpc(rpc_id="1", method="echo", args=(7,)),
                )
                await trio.testing.wait_all_tasks_blocked()  # both wait to be told
                await commands.send(AddRequest(request_id="bug", prompt="a"))
                await trio.testing.wait_all_tasks_blocked()
                got += [event async for event in events]
        assert end_of(got, "r").finished
        assert [event.results for event in got if isinstance(event, CollectiveRpcResult)] == [[[7]]]

    run(main)


def test_the_time_for_the_news_counts_from_the_failure(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(_Orchestrator, "_update", broken)

    async def main():
        with pytest.raises(ZeroDivisionError):
            async with messages(P1, SimStage(close_time=1), news_timeout=2) as (commands, _):
                await commands.send(StreamingUpdate(request_id="r", prompt="a"))
                await trio.sleep_forever()
        assert trio.current_time() == 2

    run(main)


@pytest.mark.parametrize("method", ["_update", "_serve", "_ask"])
def test_a_bug_of_ours_reaches_everybody_who_waits(monkeypatch, method):
    """U30: in the taking of commands, in the task of a request, in the task of a call."""

    def broken(*_):
        raise ZeroDivisionError("a bug")

    async def broken_later(*_):
        await trio.sleep(1)
        raise ZeroDivisionError("a bug")

    async def main():
        got = []
        with pytest.raises(ZeroDivisionError, match="a bug"):
            async with messages(P1, SimStage(script=lambda _: (Stall(),))) as (commands, events):
                await send(
                    commands,
                    AddRequest(request_id="r", prompt="a"),
                    CollectiveRpc(rpc_id="1", method="wait", args=(1000,), timeout=2000.0),
                    Abort(request_ids=["r2"], rpc_id="2"),
                )
                await trio.testing.wait_all_tasks_blocked()
                monkeypatch.setattr(_Orchestrator, method, broken if method == "_update" else broken_later)
                await send(
                    commands,
                    AddRequest(request_id="r2", prompt="a"),
                    CollectiveRpc(rpc_id="3", method="echo"),
                    StreamingUpdate(request_id="r", prompt="a"),
                )
                got += [event async for event in events]
        assert trio.current_time() == (0 if method == "_update" else 1)
        for name in ("r", "r2"):
            assert end_of(got, name).fatal
        assert sorted(event.rpc_id for event in got if hasattr(event, "rpc_id")) == ["1", "2", "3"]
        assert (got[-1].fatal, got[-1].request_id, got[-1].error_type) == (True, None, "ZeroDivisionError")

    run(main)


# ---- back-pressure


def test_a_reader_that_does_not_read_holds_nobody_up_at_the_stages_and_loses_nothing():
    """U56, I4, I7: events merge per request; the channel holds what it may and no more."""

    async def main():
        done = []
        sim = SimStage(tokens=500, token_time=0.01)
        names = [f"r{index}" for index in range(4)]

        def note(event):
            if event.name == "request.finished":
                done.append(event.request_id)

        async with messages(P1, sim, event_buffer=2, instruments=[note]) as (commands, events):
            await send(commands, *(AddRequest(request_id=name, prompt="a") for name in names))
            await trio.sleep(6)
            assert sorted(done) == names  # all have long ended at the stage
            statistics = events.statistics()
            assert (statistics.current_buffer_used, statistics.tasks_waiting_send) == (2, 4)
            await commands.aclose()
            got = [event async for event in events]
        assert len(got) < 20
        for name in names:
            assert end_of(got, name).finished
            assert tokens_of(of(got, name), 0) == list(range(1, 501))

    run(main)


def test_commands_wait_where_refusals_are_not_read():
    """I7: not even refusals pile up."""

    async def main():
        async with messages(P1, command_buffer=3, event_buffer=2) as (commands, events):
            with trio.move_on_after(1):
                for index in range(100):
                    await commands.send(StreamingUpdate(request_id=f"r{index}", prompt="a"))
            assert index == 3 + 2 + 1
            assert [(await events.receive()).refused_id for _ in range(6)] == [f"r{n}" for n in range(6)]

    run(main)


def test_calls_wait_where_too_many_are_unanswered(monkeypatch):
    monkeypatch.setattr("omni_trio.message_level._orchestrator._CALLS", 4)

    async def main():
        async with messages(P1, sim := SimStage()) as (commands, events):
            calls = [CollectiveRpc(rpc_id=str(n), method="wait", args=(2,)) for n in range(8)]
            await send(commands, *calls)
            await trio.sleep(1)
            assert len(sim.log) == 4
            await commands.aclose()
            assert sorted([event.rpc_id async for event in events]) == [call.rpc_id for call in calls]
            assert trio.current_time() == 4

    run(main)


def test_an_idle_orchestrator_does_not_wake_up():
    """I13, W-1."""

    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task):
            self.count += 1

    steps = Steps()

    async def main():
        async with messages(P3) as (commands, events):
            await commands.send(AddRequest(request_id="r", prompt="a"))
            while not is_last(await events.receive()):
                pass
            await trio.testing.wait_all_tasks_blocked()
            before = steps.count
            await trio.sleep(3600)
            assert steps.count - before <= 2  # this task's own

    run(main, instruments=[steps])


# ---- forms


def test_commands_and_events_have_an_encoded_form():
    commands = [
        AddRequest(request_id="r", prompt="a", companions=[companion("x", 1)]),
        StreamingUpdate(request_id="r", prompt="a"),
        companion("x", 1),
        Abort(request_ids=["r"]),
        CollectiveRpc(rpc_id="1", method="echo", kwargs={"a": 1}),
        Shutdown(),
        RegisterRemoteReplica(stage_id=0, replica_id=0),
        UnregisterRemoteReplica(stage_id=0, input_addr="x"),
    ]
    output = Output(request_id="r", stage="s", stage_id=0, replica_id=0, modality="text", text="hi")
    events = [
        OutputEvent(request_id="r", stage_id=0, engine_outputs=output),
        ErrorEvent(error="x"),
        AbortResult(rpc_id="1", success=True),
        CollectiveRpcResult(rpc_id="1", method="echo"),
    ]
    for messages_, kind in ((commands, Command), (events, Event)):
        for message in messages_:
            data = msgspec.msgpack.encode(message)
            assert msgspec.msgpack.decode(data)["type"] == message.type
            again = msgspec.msgpack.decode(data, type=kind)
            assert type(again) is type(message)
            assert msgspec.msgpack.encode(again) == data


def test_every_error_of_a_request_has_a_status_code_and_the_page_tells_it():
    page = (Path(__file__).parents[1] / "docs/how-to/port-message-level.md").read_text(encoding="utf-8")
    rows = {
        int(code): set(re.findall(r"`(\w+)`", kinds))
        for code, kinds in re.findall(r"^\| (\d+) \|(.*)\|", page, re.MULTILINE)
    }
    told = {kind: code for code, kinds in rows.items() for kind in kinds}
    assert told == {kind: code for kind, code in STATUS_CODES.items() if kind != "RequestAborted"}  # told as an output
    known = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.RequestError)}
    assert known - {"RequestError", "StartupFailed"} <= set(STATUS_CODES)


def test_it_opens_with_the_engines_that_the_stages_name():
    async def main():
        async with omni_trio.open_orchestrator(P1) as channels:
            await channels.commands.send(AddRequest(request_id="r", prompt="a"))
            await channels.commands.aclose()
            assert end_of([event async for event in channels.events], "r").finished

    run(main)
