"""Faults that users of such systems met, by their number: death of replicas, fairness and load, start-up and the end.

Over simulated stages on the virtual clock; what needs real processes is in `test_engines.py` and `test_vllm_client.py`.
Numbers that are missing need what is not there yet: replicas that join, leave, drain or are restarted.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import trio
import trio.testing

from omni_trio.errors import (
    EngineDied,
    NoReplicaAvailable,
    Overloaded,
    ReplicaLost,
    RequestError,
    ShutDown,
    StartupFailed,
)
from omni_trio.messages import Output, StageOutput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, DieOnSubmit, Finish, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage


async def ask(runtime, outcomes, name, prompt=(1,), **options):
    try:
        outcomes[name] = await runtime.generate(list(prompt), request_id=name, **options)
    except RequestError as error:
        outcomes[name] = error


def test_u17_the_death_of_one_replica_is_the_affair_of_those_bound_to_it():
    """U17: a is on the replica that dies, b on another, c on none yet."""

    async def main():
        pipe = Pipeline([stage("a"), stage("b", replicas=2)])

        def first(request):
            return (Wait(20 if request.request_id.startswith("c") else 0), Chunk((1,)), Finish())

        def second(request):
            return (Wait(5), Die()) if request.request_id.startswith("a") else (Wait(10), Chunk((2,)), Finish())

        outcomes = {}
        async with simulated(
            pipe, SimStage(script=first), SimStage(script=second), on_engine_death="isolate"
        ) as runtime:
            async with trio.open_nursery() as nursery:
                for name in "abc":
                    nursery.start_soon(ask, runtime, outcomes, name)
                    await trio.testing.wait_all_tasks_blocked()
            assert isinstance(outcomes["a"], ReplicaLost)
            assert outcomes["b"]["b"].token_ids == outcomes["c"]["b"].token_ids == (2,)
            assert runtime.health().status == "degraded"
            assert_empty(runtime)

    run(main)


def test_u18_when_the_last_replica_of_a_stage_dies_those_past_it_finish_and_new_ones_fail_at_once():
    """U18, without the healing: a replica that comes back is for a later version."""

    async def main():
        def times(stage_id):
            def script(request):
                if stage_id == 1 and request.request_id.startswith("at1"):
                    return (Wait(5), Die())
                arrives_late = stage_id == 0 and request.request_id.startswith("at0")
                slow_end = stage_id == 2 and request.request_id.startswith("at2")
                return (Wait(20 if arrives_late or slow_end else 0), Chunk((stage_id,)), Finish())

            return script

        outcomes = {}
        async with simulated(
            P3, *(SimStage(script=times(index)) for index in range(3)), on_engine_death="isolate"
        ) as runtime:
            async with trio.open_nursery() as nursery:
                for name in ("at2", "at1", "at0"):
                    nursery.start_soon(ask, runtime, outcomes, name)
                    await trio.sleep(1)
            assert outcomes["at2"]["vocoder"].token_ids == (2,)
            assert isinstance(outcomes["at1"], ReplicaLost)
            assert isinstance(outcomes["at0"], NoReplicaAvailable)
            before = trio.current_time()
            await ask(runtime, outcomes, "new")
            assert isinstance(outcomes["new"], NoReplicaAvailable)
            assert outcomes["new"].stage == "talker"
            assert trio.current_time() == before
            assert (await runtime.generate([1], final_stage="thinker"))["thinker"].token_ids == (0,)
            assert runtime.health().status == "dead"
            assert_empty(runtime)

    run(main)


def test_u19_a_death_seen_at_submission_fails_that_request_only():
    """U19: of two requests one meets the death while it is handed over; the other completes."""

    async def main():
        def second(request):
            return (DieOnSubmit(),) if request.request_id.startswith("a") else (Wait(3), Chunk((2,)), Finish())

        pipe = Pipeline([stage("a"), stage("b", replicas=2)])
        outcomes = {}
        async with simulated(pipe, SimStage(tokens=1), SimStage(script=second), on_engine_death="isolate") as runtime:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, runtime, outcomes, "a")
                nursery.start_soon(ask, runtime, outcomes, "b")
            assert isinstance(outcomes["a"], ReplicaLost)
            assert outcomes["a"].request_id == "a"
            assert outcomes["b"]["b"].token_ids == (2,)
            assert [replica.state for replica in runtime.health().replicas if replica.stage == "b"].count("dead") == 1
            assert_empty(runtime)

    run(main)


class Bug(BaseException):
    """Something that nothing in the runtime expects."""


def test_u30_a_bug_of_our_own_reaches_every_waiter():
    """U30: something in the runtime itself raises; nobody waits for ever, and the block tells."""

    async def main():
        heard = []

        async def wait(runtime, name):
            try:
                await runtime.generate([1], request_id=name)
            except (RequestError, trio.Cancelled) as error:
                heard.append(type(error))
                raise

        with pytest.raises(Bug):
            async with simulated(P1, SimStage(script=lambda _: (Stall(),))) as runtime:
                with pytest.raises(BaseExceptionGroup):
                    async with trio.open_nursery() as nursery:
                        for index in range(3):
                            nursery.start_soon(wait, runtime, f"r{index}")
                        await trio.sleep(1)

                        def broken():
                            raise Bug

                        runtime._orchestrator.tasks["r1"].turn.held = broken
                        runtime._orchestrator.tasks["r1"].scope.cancel()
                        await trio.sleep(1)
                await trio.sleep_forever()
        assert len(heard) == 3

    run(main)


def test_u53_a_backlog_of_one_stage_does_not_hold_up_another():
    """U53: ten thousand outputs that nobody reads come in one batch; the chunk of another stage is next."""

    async def main():
        delivered = []
        pipe = Pipeline([stage("noisy"), stage("audio", source="noisy")])
        noisy = SimStage(script=lambda _: (Stall(),))
        async with simulated(pipe, noisy, SimStage(), instruments=[delivered.append]) as runtime:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, runtime, {}, "r")
                await trio.sleep(1)
                first, second = (pool.replicas[0].client for pool in runtime._orchestrator.pools)
                for _ in range(10_000):
                    first._put(StageOutput(request_id=noisy.log[0][3], token_ids=(1,)))
                second._put(StageOutput(request_id="nobody", token_ids=(2,)))
                steps = 0
                while not runtime.stats().stages[1].replicas[0].stray_outputs:
                    await trio.lowlevel.checkpoint()
                    steps += 1
                assert steps <= 3  # its reader has its turn after one batch of the other, however long
                nursery.cancel_scope.cancel()

    run(main)


def test_u55_nothing_happens_while_nothing_is_asked():
    """U55, I13: an hour without a single step, though requests have been served before."""

    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task):
            self.count += 1

    steps = Steps()

    async def main():
        pipe = Pipeline([stage("a", replicas=4), stage("b", replicas=4), stage("c", replicas=4)])
        async with simulated(pipe) as runtime:
            await runtime.generate([1])
            await trio.testing.wait_all_tasks_blocked()
            before = steps.count
            await trio.sleep(3600)
            assert steps.count == before + 1  # this task's own

    run(main, instruments=[steps])


def test_u57_saturation_is_no_fault():
    """U57: one slot, a hundred requests; nobody fails, and the throughput is that of the slowest stage."""

    async def main():
        outcomes = {}
        slow = SimStage(script=lambda _: (Wait(2), Chunk((1,)), Finish()), capacity=1)
        async with simulated(P3, SimStage(tokens=1), slow, SimStage(tokens=1)) as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(100):
                    nursery.start_soon(ask, runtime, outcomes, f"r{index}")
            assert trio.current_time() == 200
            assert not any(isinstance(outcome, RequestError) for outcome in outcomes.values())
            assert_empty(runtime)

    run(main)


def test_u58_overload_is_told_at_once_and_touches_no_stage():
    """U58: limit 10, 50 asked; 40 are refused before any stage has seen them."""

    async def main():
        outcomes = {}
        sim = SimStage(script=lambda _: (Wait(1), Chunk((1,)), Finish()))
        async with simulated(P1, sim, max_in_flight=10) as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(50):
                    nursery.start_soon(ask, runtime, outcomes, f"r{index}")
            kinds = Counter(type(outcome).__name__ for outcome in outcomes.values())
            assert kinds == {"Result": 10, "Overloaded": 40}
            assert all(o.request_id == name for name, o in outcomes.items() if isinstance(o, Overloaded))
            assert len(sim.log) == 10
            assert runtime.stats().rejected == 40
            assert_empty(runtime)

    run(main)


@pytest.mark.parametrize("how", ["fails", "stalls"])
def test_u61_a_start_that_fails_names_the_stage_and_takes_the_others_down(how):
    """U61: in the time that the stage has to start and to stop."""

    async def main():
        pipe = Pipeline([stage("a"), stage("b"), stage("c", start_timeout=30.0)])
        bad = SimStage(start_time=5.0, start_error="no weights") if how == "fails" else SimStage(start_time=math.inf)
        others = [SimStage(close_time=2.0), SimStage(close_time=2.0)]
        with pytest.raises(StartupFailed) as caught:
            async with simulated(pipe, *others, bad, shutdown_deadline=10.0):
                pytest.fail("it opened")
        assert caught.value.stage == "c"
        assert caught.value.phase
        assert trio.current_time() <= (5 if how == "fails" else 40) + 10

    run(main)


def test_u62_the_death_of_a_stage_ends_the_head():
    """U62: nobody waits for somebody who waits for him."""

    async def main():
        with pytest.raises(EngineDied):
            async with simulated(P3, SimStage(), SimStage(script=lambda _: (Die(),))) as runtime:
                with pytest.raises(EngineDied):
                    await runtime.generate([1])
                await trio.sleep_forever()
        assert trio.current_time() < 1

    run(main)


def test_u63_the_end_under_load_tells_everybody_once():
    """U63: twenty in flight, half of whose consumers are gone; more is asked and aborted while it closes."""

    async def main():
        outcomes: dict[str, object] = {}
        late: list[object] = []
        sim = SimStage(script=lambda _: (Chunk((1,)), Stall()), abort_time=3.0)

        async def leave_after(runtime, index):
            with trio.move_on_after(0.5):
                await ask(runtime, outcomes, f"gone{index}")

        async def come_late(runtime):
            await trio.sleep(2)  # the runtime is closing
            try:
                await runtime.generate([1])
            except RequestError as error:
                late.append(error)
            await runtime.abort(["r0", "never was"])

        async with trio.open_nursery() as nursery:
            async with simulated(P1, sim, shutdown_deadline=5.0) as runtime:
                for index in range(10):
                    nursery.start_soon(ask, runtime, outcomes, f"r{index}")
                    nursery.start_soon(leave_after, runtime, index)
                nursery.start_soon(come_late, runtime)
                await trio.sleep(1)
            assert trio.current_time() <= 1 + 3 + 5
            assert_empty(runtime)
        assert {name for name in outcomes if isinstance(outcomes[name], ShutDown)} == {
            f"r{index}" for index in range(10)
        }
        assert [type(error) for error in late] == [ShutDown]

    run(main)


def test_u56_a_consumer_that_stops_reading_disturbs_nobody_and_its_box_stays_small():
    """U56: what it does not take is merged; a bound in bytes is for a later version."""

    async def main():
        sim = SimStage(script=lambda _: (*(verb for i in range(500) for verb in (Wait(0.1), Chunk((i,)))), Finish()))
        async with simulated(P1, sim) as runtime:
            async with runtime.request([1]) as silent, runtime.request([1]) as reader:
                events = [e async for e in reader if isinstance(e, Output)]
                assert len(events) >= 500
                assert len(silent.task.mailbox._entries) == 1
                assert list((await silent.result())["only"].token_ids) == list(range(500))
            assert_empty(runtime)

    run(main)
