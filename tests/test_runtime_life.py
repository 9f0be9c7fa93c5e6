"""Start-up, death and teardown of a runtime over simulated stages, and what it costs while idle."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from omni_trio.errors import (
    EngineDied,
    NoReplicaAvailable,
    ReplicaLost,
    RequestError,
    ShutDown,
    StartupFailed,
)
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import open_runtime
from omni_trio.stages import ClientStatistics
from omni_trio.testing import Chunk, Die, Finish, SimStage, Stall, Wait, tokens
from support import P1, P3, assert_empty, run, simulated, stage


class Outcomes:
    """Runs requests and keeps how each ended: exactly once, or the test fails."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.ends: dict[str, list] = {}

    async def one(self, request_id: str, prompt="x", **options) -> None:
        ends = self.ends.setdefault(request_id, [])
        try:
            ends.append(await self.runtime.generate(prompt, request_id=request_id, **options))
        except RequestError as error:
            ends.append(error)

    def __getitem__(self, request_id: str):
        (end,) = self.ends[request_id]
        return end


# ---- start-up


def test_all_replicas_start_at_the_same_time():
    async def main():
        async with simulated(P3, *(SimStage(start_time=10) for _ in P3.stages)):
            assert trio.current_time() == 10

    run(main)


def test_a_replica_that_fails_to_start_takes_the_others_down_and_is_named():
    async def main():
        sims = [SimStage(), SimStage(start_time=5, start_error="no such weights"), SimStage(start_time=100)]
        events = []
        with pytest.raises(StartupFailed, match="no such weights") as caught:
            async with simulated(P3, *sims, instruments=[events.append]):
                pytest.fail("it must not open")
        assert trio.current_time() == 5
        assert (caught.value.stage, caught.value.stage_id, caught.value.replica_id) == ("talker", 1, 0)
        assert caught.value.phase == "spawn"
        closed = [event.stage for event in events if event.name == "replica.closed"]
        assert sorted(closed) == ["talker", "thinker", "vocoder"]

    run(main)


def test_a_replica_that_never_comes_up_is_given_up():
    async def main():
        pipeline = Pipeline([stage("only", start_timeout=20)])
        with pytest.raises(StartupFailed, match="within 20 s"):
            async with simulated(pipeline, SimStage(start_time=10_000), shutdown_deadline=5):
                pytest.fail("it must not open")
        assert trio.current_time() == 25  # the factory's own bound, and room for it to close

    run(main)


def test_start_up_can_be_cancelled_at_once():
    async def main():
        with trio.move_on_after(3):
            async with simulated(P3, *(SimStage(start_time=100) for _ in P3.stages)):
                pytest.fail("it must not open")
        assert trio.current_time() == 3

    run(main)


def test_start_up_is_told_to_instruments():
    async def main():
        events = []
        async with simulated(P1, SimStage(start_time=2), instruments=[events.append]):
            pass
        assert [(event.time, event.name, event.detail) for event in events] == [
            (0, "runtime.opening", ""),
            (0, "replica.phase", "spawn"),
            (2, "replica.phase", "ready"),
            (2, "replica.ready", ""),
            (2, "runtime.open", ""),
            (2, "runtime.closing", ""),
            (2, "replica.closed", ""),
            (2, "runtime.closed", ""),
        ]

    run(main)


def test_an_instrument_that_raises_is_taken_off_and_hurts_nobody(caplog):
    def broken(event):
        raise RuntimeError("not my day")

    async def main():
        seen = []
        async with simulated(P1, instruments=[broken, seen.append]) as runtime:
            assert (await runtime.generate("x")).text
        assert seen

    run(main)
    (record,) = caplog.records
    assert "is taken off" in record.message


@pytest.mark.parametrize(
    ("options", "message"),
    [({"on_engine_death": "pray"}, "fail_stop, isolate"), ({"max_in_flight": 0}, "max_in_flight")],
)
def test_options_that_make_no_sense(options, message):
    async def main():
        with pytest.raises(ValueError, match=message):
            async with simulated(P1, **options):
                pytest.fail("it must not open")

    run(main)


def test_a_stage_without_a_client():
    async def main():
        with pytest.raises(ValueError, match="none for stage 'talker'"):
            async with open_runtime(P3, clients={"thinker": SimStage()}):
                pytest.fail("it must not open")

    run(main)


# ---- death: fail-stop


def dies_at(when: float, count: int = 3):
    """Only the request that says so kills the replica."""

    def script(request):
        if request.input.text == "die":
            return (Wait(when), Die("the lights went out"))
        return tokens(count, each=100)

    return script


def test_fail_stop_every_request_gets_one_error_and_the_runtime_ends_with_the_death():
    async def main():
        outcomes = None
        with pytest.raises(EngineDied, match="the lights went out") as caught:
            async with simulated(P3, SimStage(script=dies_at(5))) as runtime, trio.open_nursery() as nursery:
                outcomes = Outcomes(runtime)
                for index in range(10):
                    nursery.start_soon(outcomes.one, f"r{index}")
                nursery.start_soon(outcomes.one, "killer", "die")
                await trio.sleep_forever()
        assert trio.current_time() == 5
        assert caught.value.request_id is None
        assert (caught.value.stage, caught.value.stage_id, caught.value.replica_id) == ("thinker", 0, 0)
        assert caught.value.exit_code == -9
        assert len(outcomes.ends) == 11
        for request_id in outcomes.ends:
            error = outcomes[request_id]
            assert isinstance(error, EngineDied)
            assert error.request_id == request_id
            assert (error.stage, error.replica_id) == ("thinker", 0)
            assert error.__cause__ is caught.value
        assert_empty_tables(runtime)
        with pytest.raises(ShutDown) as refused:
            await runtime.generate("x")
        assert refused.value.__cause__ is caught.value

    run(main)


def assert_empty_tables(runtime):
    assert not runtime._orchestrator.tasks
    assert all(not replica.legs and replica.load == 0 for replica in runtime._orchestrator.replicas())


def test_a_consumer_that_is_behind_still_hears_of_the_death_before_its_block_is_cancelled():
    def script(request):
        if request.input.text == "die":
            return (Wait(5), Die("the lights went out"))
        return (*tokens(3, each=1)[:-1], Stall())

    async def main():
        heard = []
        with pytest.raises(EngineDied):
            async with simulated(P1, SimStage(script=script)) as runtime:
                async with trio.open_nursery() as nursery:

                    async def behind(pause):
                        try:
                            async with runtime.request("x") as request:
                                async for _ in request:
                                    await trio.sleep(pause)
                        except EngineDied:
                            heard.append(pause)

                    for pause in (0, 2.2, 30):
                        nursery.start_soon(behind, pause)
                    with pytest.raises(EngineDied):
                        await runtime.generate("die")
                    await trio.sleep_forever()
        assert heard == [0, 2.2]
        assert trio.current_time() == 5.5

    run(main)


def test_death_is_noticed_without_any_request():
    @asynccontextmanager
    async def dies_idle(context):
        class Client:
            async def receive(self):
                await trio.sleep(3)
                raise EngineDied("idle death", exit_code=1)

            def statistics(self):
                return ClientStatistics()

        yield Client()

    async def main():
        with pytest.raises(EngineDied, match="idle death") as caught:
            async with open_runtime(P1, clients={"only": dies_idle}):
                await trio.sleep_forever()
        assert trio.current_time() == 3
        assert caught.value.stage == "only"

    run(main)


def test_a_client_that_breaks_counts_as_dead_and_its_error_is_the_cause():
    @asynccontextmanager
    async def breaks(context):
        class Client:
            async def receive(self):
                await trio.sleep(3)
                raise ZeroDivisionError("bug")

            def statistics(self):
                return ClientStatistics()

        yield Client()

    async def main():
        with pytest.raises(EngineDied, match="ZeroDivisionError: bug") as caught:
            async with open_runtime(P1, clients={"only": breaks}):
                await trio.sleep_forever()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(main)


def test_an_error_of_the_block_beside_a_death_is_kept():
    async def main():
        with pytest.raises(BaseExceptionGroup) as caught:
            async with simulated(P1, SimStage(script=dies_at(1))) as runtime:
                try:
                    await runtime.generate("die")
                except EngineDied:
                    raise KeyError("mine") from None
        assert caught.group_contains(EngineDied, match="the lights went out")
        assert caught.group_contains(KeyError)

    run(main)


def test_the_news_of_a_death_is_not_doubled():
    async def main():
        with pytest.raises(EngineDied) as caught:
            async with simulated(P1, SimStage(script=dies_at(1))) as runtime:
                await runtime.generate("die")
        assert caught.value.request_id is None

    run(main)


def test_death_at_submit():
    async def main():
        def script(request):
            return (Die(),) if request.input.text == "die" else tokens(2, each=10)

        with pytest.raises(EngineDied):
            async with simulated(P1, SimStage(script=script)) as runtime, trio.open_nursery() as nursery:
                outcomes = Outcomes(runtime)
                nursery.start_soon(outcomes.one, "a", "die")
                nursery.start_soon(outcomes.one, "b")
                await trio.sleep_forever()
        assert isinstance(outcomes["a"], EngineDied)
        assert isinstance(outcomes["b"], EngineDied)

    run(main)


# ---- death: isolate


def test_isolate_only_what_the_replica_had_in_hand_fails():
    async def main():
        pipeline = Pipeline([stage("a", replicas=2)])
        async with simulated(pipeline, SimStage(script=dies_at(5)), on_engine_death="isolate") as runtime:
            outcomes = Outcomes(runtime)
            async with trio.open_nursery() as nursery:
                for request_id, prompt in (("r0", "x"), ("r1", "x"), ("r2", "die"), ("r3", "x")):
                    nursery.start_soon(outcomes.one, request_id, prompt)
                    await trio.sleep(0.1)
            dead = outcomes["r2"].replica_id
            assert dead == 0
            for request_id, lost in (("r0", True), ("r1", False), ("r2", True), ("r3", False)):
                assert isinstance(outcomes[request_id], ReplicaLost) is lost, request_id
            assert isinstance(outcomes["r0"].__cause__, EngineDied)
            health = runtime.health()
            assert health.status == "degraded"
            assert health.replicas[0].reason == "the lights went out"
            assert (await runtime.generate("x")).metrics[0].replica_id == 1
            assert_empty(runtime)

    run(main)


def test_isolate_requests_that_have_left_the_stage_finish_and_new_ones_fail_fast():
    async def main():
        def second(request):
            return tokens(2, each=10)

        def first(request):
            return (Wait(5), Die()) if request.input.text == "die" else tokens(2)

        async with simulated(
            Pipeline([stage("a"), stage("b")]),
            SimStage(script=first),
            SimStage(script=second),
            on_engine_death="isolate",
        ) as runtime:
            outcomes = Outcomes(runtime)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outcomes.one, "past")
                await trio.sleep(1)
                nursery.start_soon(outcomes.one, "killer", "die")
                await trio.sleep(10)
                nursery.start_soon(outcomes.one, "late")
            assert not isinstance(outcomes["past"], Exception)
            assert isinstance(outcomes["killer"], ReplicaLost)
            assert isinstance(outcomes["late"], NoReplicaAvailable)
            assert outcomes["late"].request_id == "late"
            assert runtime.health().status == "dead"

    run(main)


# ---- teardown


def test_leaving_ends_what_is_in_flight_with_one_terminal_each_and_aborts_it_before_engines_close():
    async def main():
        sims = [SimStage(tokens=100, token_time=1, abort_time=2), SimStage(), SimStage()]
        events = []
        async with trio.open_nursery() as nursery:
            async with simulated(P3, *sims, instruments=[events.append]) as runtime:
                outcomes = Outcomes(runtime)
                for index in range(20):
                    nursery.start_soon(outcomes.one, f"r{index}")
                await trio.sleep(3)
            assert trio.current_time() == 5
            assert_empty_tables(runtime)
        for index in range(20):
            assert isinstance(outcomes[f"r{index}"], ShutDown)
        names = [event.name for event in events]
        assert max(i for i, name in enumerate(names) if name == "leg.released") < names.index("replica.closed")
        assert runtime.stats().aborted == 20

    run(main)


def test_leaving_returns_within_its_budget_whatever_an_engine_does():
    async def main():
        sim = SimStage(close_time=1000)
        async with simulated(P1, sim, shutdown_deadline=4) as runtime:
            await runtime.generate("x")
        assert trio.current_time() == 4

    run(main)


def test_a_stage_that_ignores_aborts_does_not_hold_up_the_end():
    async def main():
        sim = SimStage(script=lambda _: (Stall(),), abort_time=float("inf"))
        async with trio.open_nursery() as nursery:
            async with simulated(P1, sim, abort_timeout=3, shutdown_deadline=4) as runtime:
                outcomes = Outcomes(runtime)
                nursery.start_soon(outcomes.one, "r")
                await trio.sleep(1)
            assert trio.current_time() == 4
        assert isinstance(outcomes["r"], ShutDown)

    run(main)


def test_the_runtime_being_cancelled_from_outside_is_the_same_orderly_end():
    async def main():
        sim = SimStage(tokens=100, token_time=1, abort_time=2)
        with trio.move_on_after(5):
            async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
                for index in range(3):
                    nursery.start_soon(runtime.generate, f"r{index}")
                await trio.sleep_forever()
        assert trio.current_time() == 7
        assert len([entry for entry in sim.log if entry[0] == "abort"]) == 3
        assert_empty_tables(runtime)

    run(main)


def test_an_error_of_the_block_comes_out_as_it_is():
    async def main():
        with pytest.raises(KeyError, match="mine") as caught:
            async with simulated(P1):
                raise KeyError("mine")
        assert caught.value.__context__ is None

    run(main)


def test_a_group_of_one_that_is_the_users_own_stays_a_group():
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            async with simulated(P1):
                raise ExceptionGroup("mine", [KeyError("one")])
        assert caught.value.message == "mine"

    run(main)


def test_a_close_that_raises_is_logged_and_hurts_nobody(caplog):
    @asynccontextmanager
    async def factory(context):
        async with SimStage()(context) as client:
            try:
                yield client
            finally:
                raise OSError("can not unlink")

    async def main():
        async with open_runtime(P1, clients={"only": factory}) as runtime:
            assert (await runtime.generate("x")).text

    run(main)
    assert "can not unlink" in caplog.text


# ---- idle


class CountSteps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task) -> None:
        self.steps += 1


def test_an_idle_runtime_makes_no_scheduler_steps():
    async def main():
        pipeline = Pipeline([stage("a", replicas=4), stage("b", replicas=4), stage("c", replicas=4)])
        async with simulated(pipeline) as runtime:
            await runtime.generate("x")
            await trio.testing.wait_all_tasks_blocked()
            counter = CountSteps()
            trio.lowlevel.add_instrument(counter)
            await trio.sleep(600)
            trio.lowlevel.remove_instrument(counter)
            assert counter.steps <= 1  # this task's own wake-up

    run(main)


def test_waiting_requests_cost_no_steps_either():
    async def main():
        async with simulated(P1, SimStage(script=lambda _: (Chunk((1,)), Wait(1000), Finish()))) as runtime:
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(runtime.generate, "x")
                await trio.sleep(1)
                counter = CountSteps()
                trio.lowlevel.add_instrument(counter)
                await trio.sleep(600)
                trio.lowlevel.remove_instrument(counter)
                assert counter.steps <= 1

    run(main)
