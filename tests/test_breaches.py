"""What the runtime does when a client, an output or a caller breaks the rules: a typed error for those concerned."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, nullcontext

import pytest
import trio

from omni_trio.bridges import bridge
from omni_trio.errors import EngineDied, InvalidRequest, NoReplicaAvailable, ReplicaLost, StageFailed, StartupFailed
from omni_trio.messages import Output, StageInput, StageOutput
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import open_runtime
from omni_trio.testing import Chunk, Finish, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage


class Broken:
    """A factory of simulated replicas, one method of which misbehaves."""

    def __init__(self, sim: SimStage, **methods) -> None:
        self.sim = sim
        self.methods = methods

    @asynccontextmanager
    async def __call__(self, context):
        async with self.sim(context) as client:
            for name, method in self.methods.items():
                setattr(client, name, method)
            yield client


async def ask(runtime, outcomes, name):
    try:
        outcomes[name] = await runtime.generate([1], request_id=name)
    except Exception as error:
        outcomes[name] = error


@pytest.mark.parametrize("answer", [None, [5], [StageOutput(request_id="x"), 7]])
@pytest.mark.parametrize("policy", ["isolate", "fail_stop"])
def test_a_receive_that_returns_something_else_is_the_death_of_the_replica(answer, policy):
    async def main():
        async def receive():
            await trio.sleep(1)
            return answer

        outcomes: dict[str, object] = {}
        sim = Broken(SimStage(script=lambda _: (Stall(),)), receive=receive)
        ends = pytest.raises(EngineDied, match="its client failed with") if policy == "fail_stop" else nullcontext()
        async with trio.open_nursery() as nursery:
            with ends:
                async with open_runtime(P1, clients={"only": sim}, on_engine_death=policy) as runtime:
                    nursery.start_soon(ask, runtime, outcomes, "a")
                    nursery.start_soon(ask, runtime, outcomes, "b")
                    await trio.sleep(2)
                    (replica,) = runtime.health().replicas
                    assert replica.state == "dead"
                    assert "its client failed with" in replica.reason
                    with pytest.raises(NoReplicaAvailable):
                        await runtime.generate([1])
        expected = ReplicaLost if policy == "isolate" else EngineDied
        assert [type(outcomes[name]) for name in ("a", "b")] == [expected, expected]

    run(main)


@pytest.mark.parametrize(
    "bad",
    [
        StageOutput(request_id="", token_ids=None),
        StageOutput(request_id="", data=[1]),
        StageOutput(request_id="", data={"audio": 3, "sample_rate": math.inf}, finish_reason="stop"),
        StageOutput(request_id="", token_ids=(1,), finish_reason="stop", data={"x": object()}),
    ],
)
def test_an_output_that_makes_no_sense_fails_its_own_request_at_most(bad):
    async def main():
        async with simulated(P1, SimStage(script=lambda _: (Wait(5), Chunk((1,)), Finish()))) as runtime:
            outcomes: dict[str, object] = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, runtime, outcomes, "a")
                nursery.start_soon(ask, runtime, outcomes, "b")
                await trio.sleep(1)
                client = runtime._orchestrator.pools[0].replicas[0].client
                client._put(StageOutput(**{f: getattr(bad, f) for f in bad.__struct_fields__} | {"request_id": "a-1"}))
            assert outcomes["b"]["only"].token_ids == (1,)
            if isinstance(outcomes["a"], Exception):
                assert isinstance(outcomes["a"], StageFailed)
                assert "its output can not be used" in str(outcomes["a"])
            assert runtime.health().status == "ok"

    run(main)


def test_a_background_task_of_a_client_that_raises_is_the_death_of_the_replica():
    async def main():
        sim = SimStage(script=lambda _: (Stall(),))

        @asynccontextmanager
        async def factory(context):
            async def crash():
                await trio.sleep(3)
                raise ValueError("service")

            async with sim(context) as client, trio.open_nursery() as nursery:
                nursery.start_soon(crash)
                yield client
                nursery.cancel_scope.cancel()

        outcomes: dict[str, object] = {}
        async with open_runtime(P1, clients={"only": factory}, on_engine_death="isolate") as runtime:
            await ask(runtime, outcomes, "a")
            assert isinstance(outcomes["a"], ReplicaLost)
            assert "service" in runtime.health().replicas[0].reason
        with pytest.raises(EngineDied, match="service"):
            async with open_runtime(P1, clients={"only": factory}) as runtime:
                await trio.sleep(100)

    run(main)


def test_several_replicas_that_do_not_come_up_are_one_error():
    async def main():
        pipe = Pipeline([stage("a", replicas=4), stage("b", replicas=2)])
        bad = SimStage(start_error="no such module", start_time=1.0)
        with pytest.raises(StartupFailed, match="no such module") as caught:
            async with simulated(pipe, bad, bad):
                pass
        assert (caught.value.stage, caught.value.replica_id) == ("a", 0)
        assert len(caught.value.__notes__) == 5

    run(main)


def test_asked_again_a_request_says_the_same_again():
    async def main():
        async with simulated(P1, SimStage(tokens=2)) as runtime:
            async with runtime.request([1]) as request:
                first = await request.result()
                assert await request.result() is first
                assert [e async for e in request] == []
        from omni_trio.testing import Error

        async with simulated(P1, SimStage(script=lambda _: (Error("oh"),))) as runtime:
            async with runtime.request([1]) as request:
                for _ in range(2):
                    with pytest.raises(StageFailed, match="oh"):
                        await request.result()
                    with pytest.raises(StageFailed, match="oh"):
                        await request.__anext__()

    run(main)


def test_iterating_after_a_result_that_was_given_up_is_as_prompt_as_ever():
    async def main():
        async with simulated(P1, SimStage(tokens=5, token_time=1)) as runtime, runtime.request([1]) as request:
            with trio.move_on_after(1.5):
                await request.result()
            times = [(trio.current_time(), len(e.token_ids)) async for e in request if isinstance(e, Output)]
        assert times == [(1.5, 1), (2, 1), (3, 1), (4, 1), (5, 1)]

    run(main)


@pytest.mark.parametrize(
    "params", [{"structured_outputs": {"regex": "x"}}, {"logit_bias": {5: 1.0}}, {"voice": {"speed": 2}}]
)
def test_parameters_whose_values_are_mappings_are_for_the_first_stage(params):
    seen = []

    def resolve(given):
        seen.append(given)
        return {}

    async def main():
        clients = {name: SimStage() for name in ("talker", "vocoder")}
        clients["thinker"] = Broken(SimStage(), resolve_params=resolve)
        async with open_runtime(P3, clients=clients) as runtime:
            await runtime.generate([1], sampling_params=params)
            with pytest.raises(InvalidRequest, match="did you mean 'thinker'"):
                await runtime.generate([1], sampling_params={"thinkr": {"max_tokens": 1}})
            with pytest.raises(InvalidRequest, match="no stage is called 'max_tokens'"):
                await runtime.generate([1], sampling_params={"thinker": {}, "max_tokens": 1})

    run(main)
    assert seen == [params]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline": "5"}, "deadline"),
        ({"deadline": True}, "deadline"),
        ({"deadline": math.nan}, "deadline"),
        ({"final_stage": 1.0}, "final_stage"),
        ({"final_stage": True}, "final_stage"),
        ({"priority": 1 << 70}, "priority"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_on_entering(options, words):
    async def main():
        async with simulated(P3) as runtime:
            request = runtime.request([1], **options)
            with pytest.raises(InvalidRequest, match=words):
                async with request:
                    pass
            assert runtime.stats().rejected == 1
            assert_empty(runtime)

    run(main)


@pytest.mark.parametrize(
    "prompt",
    [
        StageInput(text=5),
        StageInput(token_ids=("a",)),
        StageInput(messages=({"rol": "user"},)),
        StageInput(messages=(3,)),
    ],
)
def test_prompts_with_parts_of_the_wrong_kind(prompt):
    async def main():
        async with simulated(P1) as runtime:
            with pytest.raises(InvalidRequest):
                await runtime.generate(prompt)

    run(main)


def test_no_deadline_is_none():
    async def main():
        async with simulated(P1, SimStage(tokens=1, token_time=10**6 / 100)) as runtime:
            await runtime.generate([1], deadline=None)

    run(main)


def test_a_runtime_is_used_where_it_was_opened():
    async def main():
        async with simulated(P1) as runtime:

            def elsewhere():
                async def other():
                    await runtime.generate([1])

                trio.run(other)

            with pytest.raises(RuntimeError, match=r"trio\.run"):
                await trio.to_thread.run_sync(elsewhere)
            assert_empty(runtime)

    trio.run(main)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"abort_timeout": math.nan}, ValueError, "abort_timeout"),
        ({"abort_timeout": -1}, ValueError, "abort_timeout"),
        ({"shutdown_deadline": 0}, ValueError, "shutdown_deadline"),
        ({"shutdown_deadline": math.inf}, ValueError, "shutdown_deadline"),
        ({"max_in_flight": "3"}, ValueError, "max_in_flight"),
        ({"instruments": [3]}, TypeError, "instruments"),
        ({"clients": {"onyl": SimStage()}}, ValueError, "there is none for stage 'only'"),
        ({"clients": {"only": SimStage(), "onyl": SimStage()}}, ValueError, "did you mean 'only'"),
    ],
)
def test_options_of_the_runtime_are_checked(options, error, words):
    async def main():
        with pytest.raises(error, match=words):
            async with open_runtime(P1, **({"clients": {"only": SimStage()}} | options)):
                pass

    run(main)


def test_something_else_than_a_pipeline():
    async def main():
        with pytest.raises(TypeError, match="load_pipeline"):
            async with open_runtime("pipeline.toml", clients={}):
                pass

    run(main)


def test_the_decorator_of_bridges_checks_what_it_is_told():
    with pytest.raises(TypeError, match="sequence"):
        bridge(reads="text")
    with pytest.raises(ValueError, match="'nope'"):
        bridge(reads=["nope"])
    with pytest.raises(ValueError, match="'tread'"):
        bridge(run_in="tread")

    @bridge
    def plain(context):
        return None

    assert plain.__omni_trio_bridge__.run_in == "inline"
