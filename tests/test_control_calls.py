"""Calls to the engines of a running pipeline: collective RPC, and the typed methods over it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from control_support import Engine, ask_for, begin, hangs
from omni_trio.errors import EngineDied, InvalidRequest, OperationFailed, StageFailed
from omni_trio.messages import StageInput, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.stages import ReplicaContext
from omni_trio.testing import Die, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage

TRIPLE = Pipeline([stage("only", replicas=3)])
PAIR = Pipeline([stage("thinker", replicas=2), stage("talker")])


def dies_at(seconds: float) -> SimStage:
    """The replica with the request of seed 13 dies."""
    return SimStage(script=lambda request: (Wait(seconds), Die(message="gone") if request.params else Stall()))


# ---- collective RPC


def test_u23_a_replica_that_dies_in_a_call_answers_with_its_death_and_the_others_as_ever():
    async def main():
        sim = dies_at(3)
        async with simulated(TRIPLE, sim, on_engine_death="isolate") as runtime, trio.open_nursery() as nursery:
            ask_for(nursery, runtime, "bad", sampling_params={"seed": 13})
            await trio.testing.wait_all_tasks_blocked()
            answers = await runtime.collective_rpc("wait", (10,))
            assert trio.current_time() == 10
            assert [answer.replica_id for answer in answers] == [0, 1, 2]
            assert [type(answer.error) for answer in answers] == [EngineDied, type(None), type(None)]
            assert [answer.answered for answer in answers] == [False, True, True]
            # Later calls tell of it at once.
            again = await runtime.collective_rpc("echo", (1,))
            assert [answer.result for answer in again] == [None, [1], [1]]
            assert isinstance(again[0].error, EngineDied)
            assert not [scope for replica in runtime._orchestrator.replicas() for scope in replica.client._calls]

    run(main)


def test_u23_a_waiter_of_a_dead_replica_is_told_at_once():
    async def main():
        async with simulated(P1, dies_at(3), on_engine_death="isolate") as runtime, trio.open_nursery() as nursery:
            ask_for(nursery, runtime, "bad", sampling_params={"seed": 13})
            await trio.testing.wait_all_tasks_blocked()
            (answer,) = await runtime.collective_rpc("wait", (1000,), timeout=500)
            assert trio.current_time() == 3
            assert "gone" in str(answer.error)

    run(main)


def test_u23_a_caller_may_leave_and_nobody_waits_any_more():
    async def main():
        async with simulated(TRIPLE) as runtime:
            with trio.move_on_after(2):
                await runtime.collective_rpc("wait", (100,))
            assert trio.current_time() == 2
            assert not [scope for replica in runtime._orchestrator.replicas() for scope in replica.client._calls]
            assert [answer.result for answer in await runtime.collective_rpc("echo", (1,))] == [[1]] * 3

    run(main)


def test_a_slow_replica_holds_up_neither_the_others_nor_requests():
    """W-5, W-58: calls are made at the same time, each has its own time, and a late answer is nobody else's."""

    async def main():
        async with simulated(TRIPLE) as runtime, trio.open_nursery() as nursery:
            slow = begin(nursery, runtime.collective_rpc, "wait", (10,), timeout=5)
            await trio.testing.wait_all_tasks_blocked()
            await runtime.generate("one")
            answers = await runtime.collective_rpc("echo", (1,))
            assert trio.current_time() == 0
            assert [answer.result for answer in answers] == [[1]] * 3
            await trio.sleep(20)
            assert slow.at == 5
            assert ["within 5 s" in str(answer.error) for answer in slow.value] == [True] * 3

    run(main)


def test_an_answer_of_none_is_an_answer():
    """W-50."""

    async def main():
        async with simulated(P1) as runtime:
            (answer,) = await runtime.collective_rpc("wait", (0,))
            assert (answer.result, answer.error, answer.answered) == (None, None, True)

    run(main)


def test_stages_are_asked_once_in_the_order_of_the_pipeline():
    """W-57: every answer says whose it is."""

    async def main():
        async with simulated(PAIR) as runtime:
            for stages in (["talker", "thinker", "talker", "thinker"], None):
                answers = await runtime.collective_rpc("echo", stages=stages)
                assert [(answer.stage, answer.stage_id, answer.replica_id) for answer in answers] == [
                    ("thinker", 0, 0),
                    ("thinker", 0, 1),
                    ("talker", 1, 0),
                ]
            (answer,) = await runtime.collective_rpc("echo", stages="talker")
            assert answer.stage == "talker"
            assert await runtime.collective_rpc("echo", stages=[]) == []
            with pytest.raises(InvalidRequest, match="no stage is called 'taker'; did you mean 'talker'"):
                await runtime.collective_rpc("echo", stages=["thinker", "taker"])

    run(main)


def test_a_client_that_breaks_its_contract_costs_only_its_own_answer():
    async def main():
        def broken(client, *args):
            return KeyError("oops") if client.replica_id == 1 else list(args)

        async with simulated(TRIPLE, Engine(answers={"echo": broken})) as runtime:
            answers = await runtime.collective_rpc("echo", (1,))
            assert [answer.result for answer in answers] == [[1], None, [1]]
            assert "raised KeyError: 'oops'" in str(answers[1].error)

    run(main)


def test_u23_a_simulated_replica_fails_its_waiters_when_it_dies():
    async def main():
        context = ReplicaContext(
            stage=stage("only"), stage_id=0, replica_id=0, want_text=False, report=lambda _: None, close_timeout=1
        )
        script = (Wait(2), Die(message="gone"))
        async with SimStage(script=lambda _: script)(context) as client, trio.open_nursery() as nursery:
            call = begin(nursery, client.call, "wait", (100,))
            await client.submit(StageRequest(request_id="r", input=StageInput(token_ids=(1,)), params={}))
            await trio.sleep(3)
            assert call.at == 2
            assert isinstance(call.error, EngineDied)

    run(main)


# ---- typed methods


def control_engine(**answers) -> Engine:
    return Engine(answers=answers, methods=tuple(answers))


def by_replica(*values):
    return lambda client, **_: values[client.replica_id]


def test_loras_are_loaded_everywhere_and_answers_are_made_one():
    async def main():
        thinker = control_engine(
            add_lora=by_replica(True, False),
            remove_lora=True,
            pin_lora=by_replica(True, True),
            list_loras=by_replica([3, 1], [2, 3]),
        )
        talker = control_engine(
            add_lora=True, remove_lora={"supported": False, "todo": True}, pin_lora=False, list_loras=[9]
        )
        async with simulated(PAIR, thinker, talker) as runtime:
            control = runtime.control
            added = await control.add_lora("calm", 3, "/adapters/calm")
            assert added.value is False  # one had it already
            assert [(one.stage, one.replica_id, one.result) for one in added.replicas] == [
                ("thinker", 0, True),
                ("thinker", 1, False),
                ("talker", 0, True),
            ]
            assert thinker.calls("add_lora")[0] == {
                "lora_name": "calm",
                "lora_int_id": 3,
                "lora_path": "/adapters/calm",
            }
            assert (await control.remove_lora(3)).value is True
            assert (await control.pin_lora(3)).value is False
            assert (await control.pin_lora(3, stages="thinker")).value is True
            assert (await control.list_loras()).value == (1, 2, 3, 9)
            assert (await control.list_loras(stages=["thinker"])).value == (1, 2, 3)

    run(main)


def test_stages_that_are_known_to_lack_a_method_are_left_out():
    async def main():
        pooling = StageSpec(name="talker", kind="pooling", model="m")
        pipeline = Pipeline([stage("thinker"), pooling])
        engines = [control_engine(add_lora=True, reset_encoder_cache=None) for _ in range(2)]
        async with simulated(pipeline, *engines) as runtime:
            added = await runtime.control.add_lora("calm", 1, "/x")
            assert [one.stage for one in added.replicas] == ["thinker"]
            reset = await runtime.control.reset_encoder_cache()
            assert [one.stage for one in reset.replicas] == ["thinker", "talker"]
            with pytest.raises(InvalidRequest, match="no stage is known to have 'pin_lora'"):
                await runtime.control.pin_lora(1)
            # Who is named is asked, whatever is known of it.
            with pytest.raises(OperationFailed, match="a simulated stage has no 'pin_lora'"):
                await runtime.control.pin_lora(1, stages="thinker")

    run(main)


def test_profiles_are_named_after_who_writes_them():
    async def main():
        engine = control_engine(profile=None)
        async with simulated(TRIPLE, engine) as runtime:
            await runtime.control.start_profile("night")
            await runtime.control.stop_profile()
            await runtime.control.start_profile(stages="only")
            for index in range(3):
                assert [kwargs for replica_id, _, kwargs in engine.asked if replica_id == index] == [
                    {"is_start": True, "prefix": f"night_only_{index}"},
                    {"is_start": False},
                    {"is_start": True, "prefix": None},
                ]

    run(main)


def test_caches_and_the_version_of_weights():
    async def main():
        engine = control_engine(
            reset_prefix_cache=by_replica(True, True, False),
            reset_mm_cache=None,
            reset_encoder_cache=None,
            set_weight_version=None,
            get_weight_version=by_replica("7", "7", "7"),
        )
        async with simulated(TRIPLE, engine) as runtime:
            control = runtime.control
            reset = await control.reset_prefix_cache(reset_connector=True)
            assert reset.value is False
            assert [one.result for one in reset.replicas] == [True, True, False]
            assert engine.calls("reset_prefix_cache")[0] == {"reset_running_requests": False, "reset_connector": True}
            assert (await control.reset_multimodal_cache()).value is None
            assert (await control.reset_encoder_cache()).value is None
            await control.set_weight_version("7")
            assert engine.calls("set_weight_version") == [{"weight_version": "7"}] * 3
            assert (await control.weight_version()).value == "7"
            engine.answers["get_weight_version"] = by_replica("7", "8", "7")
            assert (await control.weight_version()).value is None

    run(main)


def test_all_that_failed_are_named_with_what_the_others_answered():
    async def main():
        async def answer(client, **_):
            if client.replica_id == 0:
                raise StageFailed("no such file")
            if client.replica_id == 1:
                await trio.sleep_forever()
            return True

        async with simulated(TRIPLE, control_engine(add_lora=answer)) as runtime:
            with pytest.raises(OperationFailed) as caught:
                await runtime.control.add_lora("calm", 1, "/x", timeout=4)
            assert trio.current_time() == 4
            error = caught.value
            assert error.operation == "add_lora"
            assert str(error).splitlines() == [
                "add_lora: 2 of 3 replicas failed",
                "  - stage 'only', replica 0: no such file",
                "  - stage 'only', replica 1: 'add_lora' was not answered within 4 s",
            ]
            assert [one.result for one in error.results] == [None, None, True]
            with pytest.raises(InvalidRequest, match="timeout: expected a number of seconds above 0"):
                await runtime.control.list_loras(stages="only", timeout=0)

    run(main)


def test_the_dead_are_left_out_until_nobody_is_left():
    async def main():
        engine = Engine(dies_at(1), {"pin_lora": True}, methods=("pin_lora",))
        async with simulated(Pipeline([stage("only", replicas=2)]), engine, on_engine_death="isolate") as runtime:
            async with trio.open_nursery() as nursery:
                ask_for(nursery, runtime, "bad", sampling_params={"seed": 13})
            (pinned,) = (await runtime.control.pin_lora(1)).replicas
            assert pinned.replica_id == 1
            async with trio.open_nursery() as nursery:
                ask_for(nursery, runtime, "bad", sampling_params={"seed": 13})
            with pytest.raises(OperationFailed, match="no replica of the stage is alive"):
                await runtime.control.pin_lora(1)

    run(main)


def test_what_needs_the_engines_memory_is_refused_while_they_sleep():
    async def main():
        engine = Engine(answers={"add_lora": True, "reset_encoder_cache": None}, methods=None)
        async with simulated(P1, engine) as runtime:
            await runtime.sleep()
            with pytest.raises(OperationFailed, match="it is asleep: wake it first"):
                await runtime.control.add_lora("calm", 1, "/x", stages="only")
            assert engine.calls("add_lora") == []
            await runtime.control.reset_encoder_cache(stages="only")
            await runtime.wake()
            await runtime.control.add_lora("calm", 1, "/x", stages="only")
            await runtime.resume()
            assert_empty(runtime)

    run(main)


def test_calls_may_be_left():
    async def main():
        async with simulated(P3, control_engine(pin_lora=hangs)) as runtime:
            with trio.move_on_after(2):
                await runtime.control.pin_lora(1)
            assert trio.current_time() == 2

    run(main)
