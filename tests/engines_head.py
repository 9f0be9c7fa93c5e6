"""A program that runs the tiny pipeline and waits to be killed: ``engines_head.py THINKER``.

Prints the pids of its engine and worker once all are up and at work.
"""

from __future__ import annotations

import json
import sys

import trio

import omni_trio
from omni_trio import Pipeline, StageSpec


async def main() -> None:
    pipeline = Pipeline(
        [
            StageSpec(
                name="thinker",
                model=sys.argv[1],
                engine_args={"max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True},
                sampling={"max_tokens": 1000, "ignore_eos": True},
                final_output=True,
            ),
            StageSpec(name="writer", kind="worker", target="worker_targets:slow_echo", feed="output"),
        ]
    )
    async with omni_trio.open_runtime(pipeline) as runtime, runtime.request("Once upon a time") as request:
        async for _ in request:
            pids = [replica.client.pid for stage in runtime.stats().stages for replica in stage.replicas]
            print(json.dumps(pids), flush=True)
            break
        await trio.sleep_forever()


trio.run(main)
