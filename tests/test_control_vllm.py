"""Operating a real vLLM engine: its own scheduler, caches and memory."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import omni_trio
from control_support import activities, begin
from omni_trio import OperationFailed, Output, Pipeline, RequestAborted, StageSpec
from omni_trio.engines.vllm._version import installed_version
from vllm_support import ENGINE_ARGS

pytestmark = pytest.mark.engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 800
"""So many that a request is still at work when it has been paused."""


@pytest.fixture
def engine(vllm_zygote, tiny_model):
    """Runs a body with a runtime of one engine."""

    def run(body, **engine_args) -> None:
        stage = StageSpec(
            name="thinker",
            model=str(tiny_model),
            engine_args={**ENGINE_ARGS, **engine_args},
            sampling={"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS},
        )

        async def main() -> None:
            with trio.fail_after(120):
                async with omni_trio.open_runtime(Pipeline([stage]), zygote=vllm_zygote) as runtime:
                    await body(runtime)

        trio.run(main)

    return run


async def call(runtime, method, *args):
    (answer,) = await runtime.collective_rpc(method, args)
    assert answer.error is None
    return answer.result


async def tokens_of(runtime, **options) -> tuple[int, ...]:
    return (await runtime.generate(PROMPT, **options))["thinker"].token_ids


async def some(request, least: int) -> list[int]:
    """Read until there are some tokens."""
    tokens: list[int] = []
    async for event in request:
        if isinstance(event, Output):
            tokens += event.token_ids
        if len(tokens) >= least:
            break
    return tokens


def test_pausing_reaches_the_scheduler_and_what_was_kept_goes_on_as_if_nothing_had_been(engine):
    async def body(runtime):
        expected = await tokens_of(runtime)
        assert await call(runtime, "is_scheduler_paused") is False
        async with trio.open_nursery() as nursery:
            # wait: what is in flight comes to its end, what comes later does not begin.
            async with runtime.request(PROMPT) as request:
                tokens = await some(request, 3)
                pause = begin(nursery, runtime.pause)
                await trio.testing.wait_all_tasks_blocked()
                late = begin(nursery, tokens_of, runtime)
                tokens += (await request.result())["thinker"].token_ids
            assert tuple(tokens) == expected
            await runtime.pause()
            assert pause.error is None
            assert await call(runtime, "is_scheduler_paused") is True
            assert late.at is None
            await runtime.resume()
            assert await call(runtime, "is_scheduler_paused") is False
        assert late.value == expected
        # keep: nothing more comes until it is resumed, and then the rest does.
        async with runtime.request(PROMPT) as request:
            tokens = await some(request, 3)
            await runtime.pause("keep")
            assert activities(runtime) == ["paused"]
            assert runtime.stats().in_flight == 1
            assert await call(runtime, "is_scheduler_paused") is True
            await runtime.resume()
            tokens += (await request.result())["thinker"].token_ids
        assert tuple(tokens) == expected
        # abort: the engine has let go of it, and proves it.
        async with runtime.request(PROMPT) as request:
            await some(request, 3)
            await runtime.pause("abort")
            with pytest.raises(RequestAborted):
                await request.result()
            (replica,) = runtime.stats().stages[0].replicas
            assert (replica.requests, replica.client.running, replica.client.waiting) == (0, 0, 0)
            await runtime.resume()
        assert await tokens_of(runtime) == expected

    engine(body)


def test_u66_an_engine_sleeps_and_wakes_and_is_not_asked_in_between(engine):
    async def body(runtime):
        expected = await tokens_of(runtime)
        async with trio.open_nursery() as nursery:
            (slept,) = await runtime.sleep()
            assert slept.result is True
            assert await call(runtime, "is_sleeping") is True
            assert runtime.health().phase == "asleep"
            late = begin(nursery, tokens_of, runtime)
            await runtime.sleep()
            with pytest.raises(OperationFailed, match="wake"):
                await runtime.resume()
            (woken,) = await runtime.wake(["weights"])
            assert woken.result is False
            (woken,) = await runtime.wake()
            assert woken.result is True
            assert await runtime.wake() == ()
            assert await call(runtime, "is_sleeping") is False
            assert runtime.health().phase == "paused"
            assert late.at is None
            await runtime.resume()
        assert late.value == expected

    engine(body)


def test_the_typed_methods_reach_an_engine(engine):
    async def body(runtime):
        control = runtime.control
        await tokens_of(runtime)
        assert (await control.reset_prefix_cache()).value is True
        async with runtime.request(PROMPT) as request:
            await some(request, 3)
            await runtime.pause("keep")
            # Blocks that are in use can not be forgotten.
            (mine,) = (await control.reset_prefix_cache()).replicas
            assert mine.result is False
            await runtime.resume()
        await control.reset_multimodal_cache()
        await control.reset_encoder_cache()
        with pytest.raises(OperationFailed, match="LoRA is not enabled"):
            await control.list_loras()
        with pytest.raises(OperationFailed, match="add_lora") as caught:
            await control.add_lora("calm", 1, "/nowhere")
        assert caught.value.failures[0].stage == "thinker"
        if tuple(map(int, installed_version().split(".")[:2])) >= (0, 32):
            await control.set_weight_version("7")
            assert (await control.weight_version()).value == "7"
        await tokens_of(runtime)

    engine(body)
