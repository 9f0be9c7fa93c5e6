"""The message level: requests, forms of messages, and what is refused. Over simulated stages, on virtual time."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

import omni_trio
from message_support import (
    ask,
    by_text,
    companion,
    end_of,
    messages,
    send,
    tokens_of,
)
from omni_trio import errors
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
)
from omni_trio.message_level._events import STATUS_CODES
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Error, Finish, Reject, SimStage, Stall, Step, Wait, tokens
from support import P1, P3, run, stage

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
