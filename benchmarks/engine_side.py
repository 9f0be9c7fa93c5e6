"""One side of the engine benchmark, in a process of its own: ``engine_side.py SIDE MODEL``, SIDE one of SIDES.

Prints one line of JSON per concurrency: tokens/s, this process's CPU per 1,000 tokens, and latencies.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SIDES = ("ours_text", "ours_tokens", "asyncllm")
LOADS = ((1, 256), (16, 128), (64, 128))
"""Concurrent requests, and tokens of each."""
REPEATS = 3
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
PARAMS = {"temperature": 0.0, "ignore_eos": True}


class Meter:
    """Times of outputs, per request."""

    def __init__(self) -> None:
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.tokens = 0

    def request(self) -> Callable[[int], None]:
        last = time.perf_counter()
        first = True

        def output(tokens: int) -> None:
            nonlocal last, first
            now = time.perf_counter()
            (self.firsts if first else self.gaps).append((now - last) * 1e3)
            first, last = False, now
            self.tokens += tokens

        return output


def prompts(count: int) -> list[list[int]]:
    return [[(7 * index + position) % 256 for position in range(8)] for index in range(count)]


def report(load: int, meter: Meter, wall: float, cpu: float) -> None:
    from benchmarks.measure import median, percentile

    row = {
        "requests": load,
        "tokens_per_s": meter.tokens / wall,
        "cpu_s_per_1000_tokens": cpu / meter.tokens * 1000,
        "first_ms": median(meter.firsts),
        "gap_median_ms": median(meter.gaps),
        "gap_p99_ms": percentile(meter.gaps, 99),
    }
    print("\n" + json.dumps(row), flush=True)


async def ours(model: str, *, text: bool) -> None:
    import trio

    import omni_trio
    from omni_trio import Pipeline, StageSpec

    stage = StageSpec(
        name="only",
        model=model,
        engine_args=ENGINE,
        sampling=PARAMS,
        modality="text" if text else "tokens",
        env=ENVIRONMENT,
    )
    async with omni_trio.open_runtime(Pipeline([stage])) as runtime:

        async def one(prompt: list[int], tokens: int, meter: Meter) -> None:
            output = meter.request()
            async with runtime.request(prompt, sampling_params={"max_tokens": tokens}) as request:
                async for event in request:
                    output(len(event.token_ids))

        async def load(count: int, tokens: int) -> tuple[Meter, float, float]:
            meter = Meter()
            wall, cpu = time.perf_counter(), time.process_time()
            async with trio.open_nursery() as nursery:
                for prompt in prompts(count):
                    nursery.start_soon(one, prompt, tokens, meter)
            return meter, time.perf_counter() - wall, time.process_time() - cpu

        await load(4, 16)
        for count, tokens in LOADS:
            for _ in range(REPEATS):
                report(count, *await load(count, tokens))


async def asyncllm(model: str) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = AsyncEngineArgs(model=model, **ENGINE).create_engine_config(UsageContext.ENGINE_CONTEXT)
    # Ours runs the model inside the engine core's process, too; vLLM on a CPU would add a worker process.
    llm = AsyncLLM(vllm_config=config, executor_class=UniProcExecutor, log_stats=False)

    async def one(name: str, prompt: list[int], tokens: int, meter: Meter) -> None:
        output = meter.request()
        params = SamplingParams(max_tokens=tokens, output_kind=RequestOutputKind.DELTA, **PARAMS)
        async for item in llm.generate({"prompt_token_ids": prompt}, params, name):
            output(len(item.outputs[0].token_ids))

    async def load(count: int, tokens: int, name: str) -> tuple[Meter, float, float]:
        meter = Meter()
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts(count)):
                group.create_task(one(f"{name}-{index}", prompt, tokens, meter))
        return meter, time.perf_counter() - wall, time.process_time() - cpu

    await load(4, 16, "warm")
    for count, tokens in LOADS:
        for repeat in range(REPEATS):
            report(count, *await load(count, tokens, f"{count}-{repeat}"))
    llm.shutdown()


def main(side: str, model: str) -> None:
    os.environ.update(ENVIRONMENT)
    if side == "asyncllm":
        asyncio.run(asyncllm(model))
        return
    import functools

    import trio

    trio.run(functools.partial(ours, model, text=side == "ours_text"))


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(*arguments)
