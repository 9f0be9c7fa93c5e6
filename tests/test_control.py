"""Operating a running pipeline on a virtual clock: pausing and resuming."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from control_support import Engine, activities, ask_for, begin, hangs, takes
from omni_trio.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OperationFailed,
    Paused,
    RequestAborted,
    ShutDown,
    StageFailed,
)
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, Finish, SimStage, Wait
from support import P1, P3, assert_empty, run, simulated, stage

TWO = Pipeline([stage("a"), stage("b")])
TRIPLE = Pipeline([stage("only", replicas=3)])

settled = trio.testing.wait_all_tasks_blocked


def asked(sim: SimStage, *kinds: str) -> list:
    return [entry for entry in sim.log if entry[0] in kinds]


def test_pause_waits_for_what_is_in_flight_and_holds_what_comes():
    async def main():
        sim = SimStage(tokens=4, token_time=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a", "b")
            await trio.sleep(1)
            pause = begin(nursery, runtime.pause)
            await settled()
            late = ask_for(nursery, runtime, "c")
            await settled()
            assert runtime.stats().phase == runtime.health().phase == "pausing"
            assert (runtime.stats().in_flight, runtime.stats().waiting) == (3, 1)
            await trio.sleep(50)
            assert pause.at == 4
            assert sorted(ends) == ["a", "b"]
            assert not late
            assert runtime.stats().phase == "paused"
            assert activities(runtime) == ["paused"]
            assert runtime.health().status == "ok"
            assert len(asked(sim, "submit")) == 2
            await runtime.resume()
            assert runtime.stats().phase == "running"
            assert activities(runtime) == ["running"]
            await trio.sleep(5)
            assert late["c"].finish_reason == "length"
            assert_empty(runtime)

    run(main)


def test_u67_pause_returns_when_every_stage_has_proved_that_it_is_idle_and_not_with_the_last_output():
    """A front end that has seen all outputs knows nothing of what still runs behind them."""

    async def main():
        slow = Engine(SimStage(tokens=2, token_time=1), {"pause_scheduler": takes(10)})
        plain = Engine(SimStage(), {"check_health": takes(20)}, methods=())
        async with simulated(P3, SimStage(), slow, plain) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a", "b", "c")
            await settled()
            pause = begin(nursery, runtime.pause)
            await trio.sleep(2)
            await settled()
            assert len(ends) == 3
            assert runtime.stats().phase == "pausing"
            await trio.sleep(1000)
            assert pause.at == 22
            assert slow.calls("pause_scheduler") == [{"mode": "wait", "clear_cache": False}]
            assert plain.calls("pause_scheduler") == []

    run(main)


def test_u67_a_stage_that_says_that_it_is_busy_is_named():
    async def main():
        engine = Engine(answers={"check_health": None}, methods=(), running=2, waiting=1)
        async with simulated(P1, engine) as runtime:
            with pytest.raises(OperationFailed, match="it says that it has 2 running and 1 waiting") as caught:
                await runtime.pause()
            assert caught.value.failures[0].stage == "only"
            assert runtime.stats().phase == "pausing"
            engine.running = engine.waiting = -1  # it does not tell: its answer has to do
            await runtime.pause()
            assert runtime.stats().phase == "paused"

    run(main)


def test_an_error_for_an_answer_proves_a_round_trip_and_silence_does_not():
    async def main():
        engine = Engine(answers={"check_health": StageFailed("there is no such method")}, methods=())
        async with simulated(P1, engine) as runtime:
            await runtime.pause()
            assert engine.asked == [(0, "check_health", {})]
            engine.answers["check_health"] = hangs
            with pytest.raises(OperationFailed, match="not every stage has proved within 5 s") as caught:
                await runtime.pause(deadline=5)
            assert trio.current_time() == 5
            assert "was not answered within 5 s" in str(caught.value.failures[0])
            assert not caught.value.results[0].answered

    run(main)


def test_a_pause_that_takes_too_long_names_who_is_busy_and_stays():
    async def main():
        sim = SimStage(script=lambda request: (Chunk((1,)), Wait(100), Finish()))
        async with (
            simulated(Pipeline([stage("only", replicas=2)]), sim) as runtime,
            trio.open_nursery() as nursery,
        ):
            ends = ask_for(nursery, runtime, *"abcdefg")
            await settled()
            with pytest.raises(OperationFailed) as caught:
                await runtime.pause(deadline=7)
            assert trio.current_time() == 7
            error = caught.value
            assert error.operation == "pause"
            assert sorted(error.requests) == list("abcdefg")
            assert [(one.replica_id, one.message) for one in error.failures] == [
                (0, "it has 4 in hand"),
                (1, "it has 3 in hand"),
            ]
            assert "in flight after 7 s" in str(error)
            assert "and 2 more" in str(error)
            assert runtime.stats().phase == "pausing"
            await runtime.pause(deadline=200)
            assert trio.current_time() == 100
            assert len(ends) == 7
            assert runtime.stats().phase == "paused"

    run(main)


def test_a_pause_that_is_cancelled_leaves_the_runtime_paused():
    async def main():
        sim = SimStage(tokens=10, token_time=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a")
            await settled()
            with trio.move_on_after(1):
                await runtime.pause()
            late = ask_for(nursery, runtime, "b")
            await trio.sleep(100)
            assert sorted(ends) == ["a"]
            assert not late
            await runtime.resume()
        assert late["b"].finish_reason == "length"

    run(main)


def test_abort_ends_what_is_in_flight_and_not_who_waits_at_the_door():
    async def main():
        sims = [SimStage(), SimStage(abort_time=2, token_time=1), SimStage()]
        async with simulated(P3, *sims) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a", "b")
            await trio.sleep(1.5)
            first = begin(nursery, runtime.pause)
            await settled()
            waits = ask_for(nursery, runtime, "c")
            await settled()
            await runtime.pause("abort", keep_partial=True)
            assert trio.current_time() == 3.5  # the stages have acknowledged
            assert isinstance(first.error, OperationFailed)
            assert "overtaken by pause(mode='abort')" in str(first.error)
            assert [type(end) for end in ends.values()] == [RequestAborted, RequestAborted]
            assert "paused" in str(ends["a"])
            assert len(ends["a"].partial["thinker"].token_ids) == 8
            assert len(asked(sims[1], "abort")) == 2
            assert not waits
            assert runtime.stats().aborted == 2
            await runtime.resume()
            await trio.sleep(20)
            assert waits["c"].finish_reason == "length"
            assert_empty(runtime)

    run(main)


def test_keep_freezes_schedulers_and_resume_goes_on_where_they_were():
    async def main():
        heard: list = []
        sims = [SimStage(tokens=10, token_time=1), SimStage(), SimStage()]
        async with simulated(P3, *sims, instruments=[heard.append]) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a", "b")
            await trio.sleep(4.5)
            await runtime.pause("keep")
            assert trio.current_time() == 4.5
            assert runtime.stats().phase == "paused"
            assert activities(runtime) == ["paused"] * 3
            heard.clear()
            await trio.sleep(1000)
            assert not [event for event in heard if event.name.startswith("leg.")]
            assert runtime.stats().in_flight == 2
            await runtime.resume()
            assert activities(runtime) == ["running"] * 3
            await trio.sleep(10)
            assert {len(end["thinker"].token_ids) for end in ends.values()} == {10}
            assert_empty(runtime)

    run(main)


def test_keep_waits_for_hand_overs_under_way_and_holds_the_next():
    async def main():
        first = Engine(
            SimStage(script=lambda request: (Wait(float(request.params["seed"])), Finish("stop", (1,)))), methods=()
        )
        second = SimStage(submit_time=2)
        async with simulated(TWO, first, second) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "early", sampling_params={"seed": 1})
            ends_later = ask_for(nursery, runtime, "late", sampling_params={"seed": 2})
            await trio.sleep(1.5)
            await runtime.pause("keep")
            assert trio.current_time() == 3
            # The first stage has no scheduler to stop: it has finished what it had in hand, and says so.
            assert activities(runtime) == ["running", "paused"]
            await trio.sleep(100)
            assert runtime.stats().stages[0].replicas[0].finished == 2
            assert len(asked(second, "submit")) == 1
            assert not ends
            await runtime.resume()
            await trio.sleep(3)
            assert ends["early"].finish_reason
            assert ends_later["late"].finish_reason
            assert_empty(runtime)

    run(main)


def test_keep_names_the_stage_that_does_not_take_in_what_it_is_handed():
    async def main():
        async with simulated(P1, SimStage(submit_time=1000)) as runtime, trio.open_nursery() as nursery:
            ask_for(nursery, runtime, "a")
            await settled()
            with pytest.raises(OperationFailed, match="has not taken in") as caught:
                await runtime.pause("keep", deadline=3)
            assert caught.value.requests == ("a",)
            nursery.cancel_scope.cancel()

    run(main)


def test_only_the_named_stages_are_frozen():
    async def main():
        first, second = SimStage(tokens=3, token_time=1), SimStage()
        async with simulated(TWO, first, second) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "x")
            await trio.sleep(0.5)
            await runtime.pause("keep", stages="b")
            assert activities(runtime) == ["running", "paused"]
            await trio.sleep(100)
            assert runtime.stats().stages[0].replicas[0].finished == 1
            assert not asked(second, "submit")
            await runtime.resume()
            await trio.sleep(1)
            assert ends["x"].finish_reason

    run(main)


def test_what_was_kept_can_still_be_aborted_and_expires():
    async def main():
        sim = SimStage(tokens=10, token_time=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a", "b")
            short = ask_for(nursery, runtime, "c", deadline=5)
            await trio.sleep(1.5)
            await runtime.pause("keep")
            assert await runtime.abort("a") == ("a",)
            await trio.sleep(10)
            assert isinstance(ends["a"], RequestAborted)
            assert isinstance(short["c"], DeadlineExceeded)
            await runtime.pause("abort")
            assert isinstance(ends["b"], RequestAborted)
            assert_empty(runtime)

    run(main)


def test_waiting_for_what_was_kept_lets_it_go_on_first():
    async def main():
        sims = [SimStage(tokens=10, token_time=1), SimStage(), SimStage()]
        async with simulated(P3, *sims) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a")
            await trio.sleep(4.5)
            await runtime.pause("keep")
            await trio.sleep(10)
            late = ask_for(nursery, runtime, "b")
            await runtime.pause("wait")
            assert ends["a"].finish_reason
            assert not late
            assert runtime.stats().phase == "paused"
            await runtime.resume()
        assert late["b"].finish_reason

    run(main)


def test_those_who_wait_keep_their_deadlines():
    async def main():
        async with simulated(P1) as runtime, trio.open_nursery() as nursery:
            await runtime.pause()
            ends = ask_for(nursery, runtime, "a", deadline=3)
            await trio.sleep(2)
            assert runtime.stats().waiting == 1
            with trio.move_on_after(0.5):
                await runtime.generate("one")
            await trio.sleep(5)
            assert isinstance(ends["a"], DeadlineExceeded)
            assert runtime.stats().waiting == 0
            assert_empty(runtime)

    run(main)


def test_requests_are_refused_where_the_operator_wants_it_and_told_when_to_ask_again():
    async def main():
        sim = SimStage()
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            await runtime.pause()
            waits = ask_for(nursery, runtime, "a")
            await settled()
            assert not waits
            await runtime.pause(when_asked="reject", retry_after=30)
            with pytest.raises(Paused, match="ask again later") as caught:
                await runtime.generate("one", request_id="b")
            assert caught.value.retry_after == 30
            assert caught.value.request_id == "b"
            assert isinstance(waits["a"], Paused)  # who waits already is not kept any longer, either
            assert runtime.stats().rejected == 2
            assert not asked(sim, "submit")
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_pausing_and_resuming_twice_is_harmless():
    async def main():
        engine = Engine(SimStage(tokens=4, token_time=1))
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            await runtime.resume()
            assert engine.asked == []
            ask_for(nursery, runtime, "a")
            await settled()
            pauses = [begin(nursery, runtime.pause), begin(nursery, runtime.pause)]
            await trio.sleep(10)
            assert [(pause.at, pause.error) for pause in pauses] == [(4, None), (4, None)]
            await runtime.pause()
            async with trio.open_nursery() as both:
                both.start_soon(runtime.resume)
                both.start_soon(runtime.resume)
            await runtime.resume()
            assert runtime.stats().phase == "running"
            assert len(engine.calls("resume_scheduler")) == 1

    run(main)


def test_resume_overtakes_a_pause_wherever_it_is():
    async def main():
        engine = Engine(SimStage(tokens=4, token_time=1))
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a")
            await trio.sleep(1)
            pause = begin(nursery, runtime.pause)
            await settled()
            await runtime.resume()
            await settled()
            assert "overtaken by resume" in str(pause.error)
            await trio.sleep(10)
            assert ends["a"].finish_reason
            # ... and while the engine is proving that it is idle: it may have heard, so it is told to go on.
            engine.answers["pause_scheduler"] = hangs
            pause = begin(nursery, runtime.pause)
            await settled()
            assert activities(runtime) == ["paused"]
            await runtime.resume()
            await settled()
            assert pause.error is not None
            assert len(engine.calls("resume_scheduler")) == 1
            assert activities(runtime) == ["running"]
            await runtime.generate("one")

    run(main)


def test_a_pause_overtakes_a_resume():
    async def main():
        engine = Engine(answers={"resume_scheduler": takes(5)})
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            await runtime.pause()
            resume = begin(nursery, runtime.resume)
            await settled()
            await runtime.pause()
            assert "overtaken by pause(mode='wait')" in str(resume.error)
            assert runtime.stats().phase == "paused"
            ends = ask_for(nursery, runtime, "a")
            await trio.sleep(20)
            assert not ends
            await runtime.resume()

    run(main)


def test_a_resume_overtaken_in_its_last_moment_does_not_open_the_door():
    """The engines' answers and the new pause come at the same time, before the resume has run on."""

    async def main():
        engine = Engine(answers={"resume_scheduler": takes(5)})
        for _ in range(20):  # in whichever order trio runs the two
            async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
                await runtime.pause()
                now = trio.current_time()
                resume = begin(nursery, runtime.resume)
                await trio.sleep_until(now + 5)
                pause = begin(nursery, runtime.pause)
                await trio.sleep(20)
                assert pause.error is None
                assert runtime.stats().phase == "paused"
                ends = ask_for(nursery, runtime, "a")
                await trio.sleep(1)
                assert not ends
                assert resume.at is not None
                await runtime.resume()

    run(main)


def test_a_scheduler_that_does_not_go_on_keeps_the_door_closed():
    async def main():
        engine = Engine(answers={"resume_scheduler": StageFailed("it is stuck")})
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            await runtime.pause()
            ends = ask_for(nursery, runtime, "a")
            with pytest.raises(OperationFailed, match="it is stuck"):
                await runtime.resume()
            await settled()
            assert not ends
            assert runtime.stats().phase == "paused"
            del engine.answers["resume_scheduler"]
            await runtime.resume()
            await trio.sleep(1)
            assert ends["a"].finish_reason

    run(main)


def test_the_dead_hold_nothing_and_keep_nobody_from_pausing():
    async def main():
        def script(request):
            return (Die(),) if request.params.get("seed") == 13 else (Wait(5), Finish())

        sim = SimStage(script=script)
        async with (
            simulated(TRIPLE, sim, on_engine_death="isolate") as runtime,
            trio.open_nursery() as nursery,
        ):
            ends = ask_for(nursery, runtime, "bad", sampling_params={"seed": 13})
            good = ask_for(nursery, runtime, "good")
            await trio.sleep(1)
            assert isinstance(ends["bad"], Exception)
            await runtime.pause()
            assert good["good"].finish_reason
            assert runtime.health().status == "degraded"
            assert sorted(activities(runtime)) == ["paused", "paused", "running"]
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_a_paused_runtime_closes_as_any_other():
    async def main():
        sim = SimStage(tokens=10, token_time=1)
        async with trio.open_nursery() as nursery:
            async with simulated(P1, sim) as runtime:
                ends = ask_for(nursery, runtime, "a")
                await trio.sleep(1.5)
                await runtime.pause("keep")
                ends_waiting = ask_for(nursery, runtime, "b")
                await settled()
            assert isinstance(ends["a"], ShutDown)
            assert isinstance(ends_waiting["b"], ShutDown)
        for operation in (runtime.pause, runtime.resume, runtime.sleep, runtime.wake):
            with pytest.raises(ShutDown):
                await operation()

    run(main)


def test_what_makes_no_sense_is_refused_and_changes_nothing():
    async def main():
        async with simulated(P3) as runtime:
            for call, message in (
                (lambda: runtime.pause("later"), "mode: expected one of 'wait', 'abort', 'keep', not 'later'"),
                (lambda: runtime.pause(when_asked="no"), "when_asked: expected one of 'wait', 'reject'"),
                (lambda: runtime.pause(deadline=float("inf")), "deadline: expected a number of seconds above 0"),
                (lambda: runtime.pause(deadline=0), "deadline: expected a number of seconds above 0"),
                (lambda: runtime.pause(stages=["talkr"]), "no stage is called 'talkr'; did you mean 'talker'"),
                (lambda: runtime.sleep(0), "level: expected 1 or 2, not 0"),
                (lambda: runtime.sleep(mode="keep"), "keeps no requests"),
                (lambda: runtime.wake(stages="x"), "no stage is called 'x'"),
            ):
                with pytest.raises(InvalidRequest, match=message):
                    await call()
            assert runtime.stats().phase == "running"
            await runtime.generate("one")

    run(main)


def test_a_pause_overtaken_in_its_last_moment_does_not_count():
    async def main():
        engine = Engine(answers={"pause_scheduler": takes(5)})
        for _ in range(20):  # in whichever order trio runs the two
            async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
                now = trio.current_time()
                begin(nursery, runtime.pause)
                await trio.sleep_until(now + 5)
                begin(nursery, runtime.pause, "abort")
                await trio.sleep_until(now + 7)
                assert runtime.stats().phase == "pausing"
                await trio.sleep_until(now + 11)
                assert runtime.stats().phase == "paused"

    run(main)


def test_whoever_has_been_aborted_does_not_reach_a_stage_any_more():
    """It was let through a moment ago, and has not run yet."""

    async def main():
        sims = [SimStage(tokens=3, token_time=1), SimStage()]
        async with simulated(TWO, *sims) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a")
            await trio.sleep(1)
            await runtime.pause("keep", stages="b")
            await trio.sleep(10)
            await runtime.resume()
            await runtime.pause("abort")
            await settled()
            assert isinstance(ends["a"], RequestAborted)
            assert not asked(sims[1], "submit")
            assert_empty(runtime)

    run(main)


def test_a_replica_that_dies_when_it_is_asked_to_pause_is_idle():
    async def main():
        async def die(client, **kwargs):
            if client.replica_id == 1:
                client.client.die(Die(message="worn out"))
            return await client.client.call("pause_scheduler", (), kwargs)

        async with simulated(TRIPLE, Engine(answers={"pause_scheduler": die}), on_engine_death="isolate") as runtime:
            await runtime.pause()
            assert runtime.stats().phase == "paused"
            assert [replica.state for replica in runtime.health().replicas] == ["ready", "dead", "ready"]
            await runtime.resume()
            await runtime.generate("one")

    run(main)
