"""The message level: aborts and collective RPCs. Over simulated stages, on virtual time."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from message_support import (
    Calls,
    ask,
    by_text,
    end_of,
    is_last,
    messages,
    of,
    send,
    tokens_of,
)
from omni_trio.errors import EngineDied
from omni_trio.message_level import (
    Abort,
    AbortResult,
    AddRequest,
    CollectiveRpc,
    CollectiveRpcResult,
    OutputEvent,
    open_orchestrator,
)
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, LateChunk, SimStage, Stall
from support import P1, P3, run, stage

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
