"""What tests of the vLLM client share: the tiny model's engines, and what is asked of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import trio

from omni_trio.engines.process import Zygote, open_launcher
from omni_trio.engines.vllm import vllm_client_factory
from omni_trio.errors import StartupFailed
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.pipeline import StageSpec
from omni_trio.stages import ReplicaContext, StageClient

ENGINE_ARGS = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 32 << 20,
}
TOKENS = 32
PROMPTS = [tuple((7 * i + 11 * j) % 128 for j in range(5 + i % 40)) for i in range(100)]


@attrs.frozen
class Engines:
    """Opens clients of engines with the tiny model."""

    zygote: Zygote
    model: Path

    def stage(self, **fields: Any) -> StageSpec:
        args = {**ENGINE_ARGS, **fields.pop("engine_args", {})}
        return StageSpec(**{"name": "thinker", "model": str(self.model), "engine_args": args, **fields})

    def run(self, body: Callable[..., Awaitable[None]], *, replicas: int = 1, **fields: Any) -> None:
        """Run ``body(client, ...)`` with as many open clients."""
        stage = self.stage(replicas=replicas, **fields)

        async def main() -> None:
            with trio.fail_after(120):
                async with open_launcher(zygote=self.zygote) as launcher:
                    factory = vllm_client_factory(launcher)
                    await nested(factory, [context(stage, replica_id) for replica_id in range(replicas)], body)
                    assert list(launcher.directory.iterdir()) == []

        trio.run(main)

    def fails_to_start(self, **fields: Any) -> StartupFailed:
        async def body(_client: StageClient) -> None:
            pytest.fail("it started")

        with pytest.raises(StartupFailed) as caught:
            self.run(body, **fields)
        return caught.value


async def nested(factory: Any, contexts: Sequence[ReplicaContext], body: Any, *clients: StageClient) -> None:
    if not contexts:
        await body(*clients)
        return
    async with factory(contexts[0]) as client:
        await nested(factory, contexts[1:], body, *clients, client)


def context(stage: StageSpec, replica_id: int = 0, report: Callable[[str], None] = lambda _: None) -> ReplicaContext:
    return ReplicaContext(
        stage=stage, stage_id=3, replica_id=replica_id, want_text=True, report=report, close_timeout=5.0
    )


def greedy(client: StageClient, max_tokens: int = TOKENS, **more: Any) -> Any:
    return client.resolve_params({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})


async def submit(client: StageClient, request_id: str, prompt: Any, params: Any, *, want_text: bool = True) -> None:
    given = StageInput(token_ids=prompt) if isinstance(prompt, tuple) else prompt
    await client.submit(StageRequest(request_id=request_id, input=given, params=params, want_text=want_text))


async def collect(client: StageClient, *request_ids: str) -> dict[str, list[StageOutput]]:
    """Receive until these requests have ended."""
    outputs: dict[str, list[StageOutput]] = {}
    rest = set(request_ids)
    while rest:
        batch = await client.receive()
        assert batch
        for output in batch:
            outputs.setdefault(output.request_id, []).append(output)
            if output.finished:
                rest.discard(output.request_id)
    return outputs


def tokens_of(outputs: list[StageOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: list[StageOutput]) -> str:
    return "".join(output.text for output in outputs)


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
task = json.load(sys.stdin)
llm = LLM(task["model"], **task["args"])
answers = []
for values, prompts in task["runs"]:
    params = SamplingParams(**values)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers.append([[[list(one.token_ids), one.text] for one in output.outputs] for output in outputs])
print()
print(json.dumps(answers))
"""

GREEDY = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
SEEDED = {"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}

Completions: TypeAlias = list[tuple[list[int], str]]
"""Tokens and text of each completion of one prompt."""


@functools.cache
def offline(model: Path) -> tuple[list[Completions], list[Completions]]:
    """What vLLM's own offline LLM answers to `PROMPTS` with `GREEDY`, and to the first four with `SEEDED`."""
    task = {"model": str(model), "args": ENGINE_ARGS, "runs": [(GREEDY, PROMPTS), (SEEDED, PROMPTS[:4])]}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        input=json.dumps(task),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    greedy_run, seeded_run = json.loads(done.stdout.splitlines()[-1])
    return greedy_run, seeded_run


def with_limit(main: Callable[[], Awaitable[None]], seconds: float) -> None:
    async def limited() -> None:
        with trio.fail_after(seconds):
            await main()

    trio.run(limited)
