"""Operating a running pipeline on a virtual clock: putting engines to sleep, and waking them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from control_support import Engine, activities, ask_for, begin, hangs, takes
from omni_trio.errors import (
    EngineDied,
    InvalidRequest,
    OperationFailed,
    StageFailed,
)
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Die, SimStage
from support import P1, run, simulated, stage

TWO = Pipeline([stage("a"), stage("b")])
TRIPLE = Pipeline([stage("only", replicas=3)])

settled = trio.testing.wait_all_tasks_blocked


def asked(sim: SimStage, *kinds: str) -> list:
    return [entry for entry in sim.log if entry[0] in kinds]


def test_u66_sleep_closes_the_door_first_and_waking_does_not_open_it():
    async def main():
        sim = SimStage(tokens=3, token_time=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            ends = ask_for(nursery, runtime, "a")
            await settled()
            sleep = begin(nursery, runtime.sleep)
            await settled()
            late = ask_for(nursery, runtime, "b")
            await trio.sleep(10)
            (slept,) = sleep.value
            assert (slept.stage, slept.replica_id, slept.result) == ("only", 0, True)
            assert sleep.at == 3
            assert ends["a"].finish_reason
            assert runtime.stats().phase == "asleep"
            assert runtime.health().replicas[0].activity == "asleep"
            with pytest.raises(OperationFailed, match="wake"):
                await runtime.resume()
            (woken,) = await runtime.wake()
            assert woken.result is True
            assert runtime.stats().phase == "paused"
            await trio.sleep(10)
            assert len(asked(sim, "submit")) == 1
            assert not late
            await runtime.resume()
            await trio.sleep(5)
            assert late["b"].finish_reason

    run(main)


def test_u66_sleeping_and_waking_again_is_harmless():
    async def main():
        engine = Engine()
        async with simulated(P1, engine) as runtime:
            assert await runtime.wake() == ()
            await runtime.sleep(2)
            assert [answer.result for answer in await runtime.sleep()] == [True]
            await runtime.pause()
            await runtime.pause("keep")
            assert engine.calls("sleep") == [{"level": 2}]
            assert runtime.stats().phase == "asleep"
            await runtime.wake()
            assert await runtime.wake() == ()
            assert len(engine.calls("wake_up")) == 1
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_part_of_the_memory_can_be_woken_first():
    async def main():
        engine = Engine()
        async with simulated(P1, engine) as runtime:
            await runtime.sleep()
            (woken,) = await runtime.wake(["weights"])
            assert woken.result is False
            assert activities(runtime) == ["asleep"]
            with pytest.raises(OperationFailed, match="it is asleep"):
                await runtime.resume()
            (woken,) = await runtime.wake("kv_cache")
            assert woken.result is True
            assert engine.calls("wake_up") == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]
            await runtime.resume()

    run(main)


def test_stages_that_can_not_sleep_are_left_out_unless_they_are_named():
    async def main():
        deaf = Engine(methods=())
        async with simulated(TWO, deaf, SimStage()) as runtime:
            (slept,) = await runtime.sleep()
            assert slept.stage == "b"
            assert activities(runtime) == ["running", "asleep"]
            await runtime.wake()
            deaf.answers["sleep"] = StageFailed("the worker has no method 'sleep' to call")
            with pytest.raises(OperationFailed, match="no method 'sleep'") as caught:
                await runtime.sleep(stages=["b", "a", "b"])
            assert [(answer.stage, answer.error is None) for answer in caught.value.results] == [
                ("a", False),
                ("b", True),
            ]
            # It said that it did nothing, so there is nothing to wake.
            assert activities(runtime) == ["running", "asleep"]
            deaf.answers.update(sleep=None, wake_up=None)
            await runtime.sleep(stages=["a"])
            assert activities(runtime) == ["asleep", "asleep"]
            assert [answer.result for answer in await runtime.wake()] == [True, True]
            await runtime.resume()
        async with simulated(P1, Engine(methods=())) as runtime:
            with pytest.raises(InvalidRequest, match="no stage is known to be able to sleep"):
                await runtime.sleep()

    run(main)


def test_a_replica_that_does_not_fall_asleep_is_named_and_the_others_state_is_told():
    async def main():
        async def fail_one(client, **kwargs):
            if client.replica_id == 1:
                raise StageFailed("the allocator is in use")
            await client.client.call("sleep", (), kwargs)

        async def forget_one(client):
            return False if client.replica_id == 1 else await client.client.call("is_sleeping")

        engine = Engine(answers={"sleep": fail_one, "is_sleeping": forget_one})
        async with simulated(TRIPLE, engine) as runtime:
            with pytest.raises(OperationFailed, match="the allocator is in use") as caught:
                await runtime.sleep()
            (failure,) = caught.value.failures
            assert (failure.stage, failure.replica_id) == ("only", 1)
            assert [answer.result for answer in caught.value.results] == [True, None, True]
            assert activities(runtime) == ["asleep", "running", "asleep"]
            assert runtime.stats().phase == "asleep"
            # One that says that it obeyed, and that it is awake, does not sleep.
            engine.answers["sleep"] = None
            with pytest.raises(OperationFailed, match="replica 1: it says that it is not asleep"):
                await runtime.sleep()
            assert [answer.replica_id for answer in await runtime.wake()] == [0, 2]
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_a_replica_that_does_not_say_whether_it_sleeps_has_to_be_woken():
    async def main():
        async def one_hangs(client, **kwargs):
            if client.replica_id == 1:
                await trio.sleep_forever()
            await client.client.call("sleep", (), kwargs)

        engine = Engine(answers={"sleep": one_hangs})
        async with simulated(TRIPLE, engine) as runtime:
            with pytest.raises(OperationFailed, match="not answered"):
                await runtime.sleep(deadline=5)
            # When the time is up nobody can be asked any more; what has been answered can be relied on.
            assert activities(runtime)[1] == "unknown"
            with pytest.raises(OperationFailed, match="nobody knows whether it is awake"):
                await runtime.resume()
            assert [answer.result for answer in await runtime.wake()] == [True] * 3
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_a_replica_that_does_not_wake_is_named_and_can_be_woken_again():
    async def main():
        engine = Engine(answers={"wake_up": StageFailed("out of memory")})
        async with simulated(P1, engine) as runtime:
            await runtime.sleep()
            with pytest.raises(OperationFailed, match="out of memory"):
                await runtime.wake()
            assert activities(runtime) == ["asleep"]
            engine.answers["wake_up"] = hangs
            with pytest.raises(OperationFailed, match="not answered within 2 s"):
                await runtime.wake(deadline=2)
            assert activities(runtime) == ["unknown"]
            del engine.answers["wake_up"]
            await runtime.wake()
            await runtime.resume()

    run(main)


def test_resume_overtakes_a_sleep_that_waits_and_not_one_that_has_begun():
    async def main():
        engine = Engine(SimStage(tokens=4, token_time=1), {"sleep": takes(10)})
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            ask_for(nursery, runtime, "a")
            await settled()
            sleep = begin(nursery, runtime.sleep)
            await settled()
            await runtime.resume()
            await settled()
            assert "overtaken" in str(sleep.error)
            assert engine.calls("sleep") == []
            await trio.sleep(10)
            sleep = begin(nursery, runtime.sleep)
            await settled()
            assert activities(runtime) == ["unknown"]
            began = trio.current_time()
            with pytest.raises(OperationFailed, match="wake"):
                await runtime.resume()
            assert trio.current_time() == began
            abort = begin(nursery, runtime.pause, "abort")  # comes too late for that, too
            wake = begin(nursery, runtime.wake)  # waits until it is asleep
            await trio.sleep(20)
            assert (sleep.error, abort.error, wake.error) == (None, None, None)
            assert sleep.at == wake.at == began + 10
            await runtime.resume()

    run(main)


@pytest.mark.parametrize("first", ["pause", "sleep"])
def test_in_whichever_moment_resume_comes_the_door_never_opens_before_a_sleeping_stage(first):
    async def main():
        outcomes = set()
        for moment in [*range(2, 40)] * 5:  # it has begun, and trio runs the two in whichever order
            async with simulated(TWO) as runtime, trio.open_nursery() as nursery:
                begun = begin(nursery, getattr(runtime, first))
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                try:
                    await runtime.resume()
                    refused = False
                except OperationFailed:
                    refused = True
                await settled()
                outcomes.add(begun.error is None)
                asleep = "asleep" in activities(runtime)
                assert asleep is (first == "sleep" and begun.error is None)
                assert refused is asleep
                assert set(activities(runtime)) == {"asleep" if asleep else "running"}
                assert runtime.stats().phase == ("asleep" if asleep else "running")
        assert len(outcomes) == 2  # it came in time, and too late

    run(main)


def test_a_replica_that_dies_while_it_falls_asleep_is_named_and_forgotten():
    async def main():
        async def die(client, **kwargs):
            if client.replica_id == 2:
                client.client.die(Die(message="it fell from the bed"))
            return await client.client.call("sleep", (), kwargs)

        async with simulated(TRIPLE, Engine(answers={"sleep": die}), on_engine_death="isolate") as runtime:
            with pytest.raises(OperationFailed, match="it fell from the bed") as caught:
                await runtime.sleep()
            assert isinstance(caught.value.failures[0], EngineDied)
            assert [replica.state for replica in runtime.health().replicas] == ["ready", "ready", "dead"]
            assert len(await runtime.sleep()) == 2
            assert len(await runtime.wake()) == 2
            await runtime.resume()
            await runtime.generate("one")

    run(main)


def test_one_order_to_the_engines_at_a_time_and_none_waits_for_ever():
    async def main():
        engine = Engine(answers={"sleep": takes(50)})
        async with simulated(P1, engine) as runtime, trio.open_nursery() as nursery:
            begin(nursery, runtime.sleep)
            await settled()
            with pytest.raises(OperationFailed, match="another operation had not ended after 3 s"):
                await runtime.wake(deadline=3)
            assert trio.current_time() == 3
            assert engine.calls("wake_up") == []

    run(main)
