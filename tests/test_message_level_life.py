"""The message level: ends, deaths, bugs and slow readers. Over simulated stages, on virtual time."""

from __future__ import annotations

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
from omni_trio.errors import EngineDied, StartupFailed
from omni_trio.message_level import (
    Abort,
    AddRequest,
    CollectiveRpc,
    CollectiveRpcResult,
    ErrorEvent,
    OutputEvent,
    RegisterRemoteReplica,
    Shutdown,
    StreamingUpdate,
    open_orchestrator,
)
from omni_trio.message_level._orchestrator import _Orchestrator
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, Finish, SimStage, Stall, Wait
from support import P1, P3, run, stage

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
