"""The modes of the runtime over real engines: a pair of engines, sessions, embeddings from stage to stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
import trio.lowlevel

import omni_trio
from omni_trio import BridgeContext, Output, Pipeline, SessionClosed, StageInput, StageSpec, bridge
from omni_trio.engines.process import Zygote
from test_vllm_kv import LONG, NIXL, free_ports
from vllm_support import ENGINE_ARGS

pytestmark = [
    pytest.mark.engine,
    # vLLM and what it imports have warnings of their own.
    pytest.mark.filterwarnings("default"),
]

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


def llm(name: str, model: Path, **fields) -> StageSpec:
    args = ENGINE_ARGS | fields.pop("engine_args", {})
    return StageSpec(name=name, model=str(model), engine_args=args, sampling=GREEDY, **fields)


def run(main, seconds: float = 120):
    async def bounded():
        with trio.fail_after(seconds):
            return await main()

    return trio.run(bounded)


async def answers(pipeline: Pipeline, zygote: Zygote, prompts, stage: str) -> list[tuple[int, ...]]:
    async with omni_trio.open_runtime(pipeline, zygote=zygote) as runtime:
        results: dict[int, tuple[int, ...]] = {}

        async def ask(index: int) -> None:
            results[index] = (await runtime.generate(prompts[index]))[stage].token_ids

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
        return [results[index] for index in range(len(prompts))]


@pytest.mark.parametrize("connector", ["ExampleConnector", "NixlConnector"])
def test_a_pair_of_engines_says_what_one_engine_says(connector, tiny_model: Path, vllm_zygote: Zygote, tmp_path: Path):
    def pair() -> Pipeline:
        if connector == "NixlConnector":
            halves = [
                {
                    "engine_args": {"kv_transfer_config": NIXL, "block_size": 32},
                    "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp,shm,self,cma"},
                }
                for port in free_ports(2)
            ]
            return Pipeline(
                [
                    llm("prefill", tiny_model, role="prefill", **halves[0]),
                    llm("decode", tiny_model, role="decode", **halves[1]),
                ]
            )
        configs = [
            {
                "kv_transfer_config": {
                    "kv_connector": connector,
                    "kv_role": role,
                    "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
                }
            }
            for role in ("kv_producer", "kv_consumer")
        ]
        return Pipeline(
            [
                llm("prefill", tiny_model, role="prefill", engine_args=configs[0]),
                llm("decode", tiny_model, role="decode", engine_args=configs[1], handoff="content"),
            ]
        )

    async def main():
        alone = await answers(Pipeline([llm("decode", tiny_model)]), vllm_zygote, LONG, "decode")
        assert all(len(tokens) == GREEDY["max_tokens"] for tokens in alone)
        assert await answers(pair(), vllm_zygote, LONG, "decode") == alone

    run(main)


def test_a_caller_that_leaves_a_pair_in_any_phase_leaves_it_working(tiny_model: Path, vllm_zygote: Zygote):
    """U13, U14, U39 on real engines."""
    ports = free_ports(2)
    halves = [
        {
            "engine_args": {"kv_transfer_config": NIXL, "block_size": 32},
            "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp,shm,self,cma"},
        }
        for port in ports
    ]
    pipeline = Pipeline(
        [
            llm("prefill", tiny_model, role="prefill", **halves[0]),
            llm("decode", tiny_model, role="decode", **halves[1]),
        ]
    )

    async def main():
        trace = []
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote, instruments=[trace.append]) as runtime:
            expected = (await runtime.generate(LONG[0]))["decode"].token_ids

            async def leave_at(name: str, stage: str) -> None:
                """Leave as soon as an event of that name comes from that stage."""
                seen = len(trace)
                async with runtime.request(LONG[1]):
                    while not any(e.name == name and e.stage == stage for e in trace[seen:]):
                        await trio.lowlevel.checkpoint()

            for name, stage in (
                ("leg.submitted", "prefill"),
                ("leg.finished", "prefill"),
                ("leg.submitted", "decode"),
                ("leg.output", "decode"),
            ):
                await leave_at(name, stage)
                stats = runtime.stats()
                assert all(replica.requests == 0 for one in stats.stages for replica in one.replicas)
            assert (await runtime.generate(LONG[0]))["decode"].token_ids == expected
            assert runtime.health().status == "ok"

    run(main)


def test_a_session_over_two_engines_and_a_barge_in(tiny_model: Path, vllm_zygote: Zygote):
    pipeline = Pipeline([llm("thinker", tiny_model, final_output=True), llm("talker", tiny_model, modality="tokens")])
    segments = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]

    async def main():
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:
            async with runtime.open_stream() as stream:
                events: list[Output] = []

                async def read() -> None:
                    events.extend([event async for event in stream if isinstance(event, Output)])

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    for segment in segments:
                        await stream.send(segment)
                    await stream.aclose()
                with pytest.raises(SessionClosed):
                    await stream.send((1,))
            for stage in ("thinker", "talker"):
                answers = [event for event in events if event.stage == stage]
                by_segment = {
                    index: sum(len(event.token_ids) for event in answers if event.segment == index)
                    for index in range(len(segments))
                }
                assert by_segment == dict.fromkeys(range(len(segments)), GREEDY["max_tokens"])
                assert [event.finished for event in answers].count(True) == 1
                assert answers[-1].finished
            async with runtime.open_stream() as stream:
                await stream.send(segments[0])
                await stream.__anext__()
                await stream.barge_in(segments[1])
                await stream.aclose()
                turns = {event.turn async for event in stream if isinstance(event, Output)}
                assert turns == {1}
            stats = runtime.stats()
            assert all(replica.requests == 0 for one in stats.stages for replica in one.replicas)
            assert all(replica.client.running <= 0 for one in stats.stages for replica in one.replicas)

    run(main)


@bridge(reads=["data"])
def hidden_states(context: BridgeContext) -> StageInput:
    return StageInput(embeds=context.data["token_embed"])


def test_embeddings_from_a_pooling_engine_are_the_prompt_of_the_next(tiny_model: Path, vllm_zygote: Zygote):
    pipeline = Pipeline(
        [
            StageSpec(
                name="reader",
                kind="pooling",
                model=str(tiny_model),
                engine_args=ENGINE_ARGS,
                sampling={"task": "token_embed"},
                final_output=True,
            ),
            llm("writer", tiny_model, bridge=hidden_states, engine_args={"enable_prompt_embeds": True}),
        ]
    )

    async def main():
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:
            one, again, other = [await runtime.generate(prompt) for prompt in (LONG[0], LONG[0], LONG[1])]
        states = one["reader"].data["token_embed"]
        assert states.shape[0] == len(LONG[0])
        assert len(one["writer"].token_ids) == GREEDY["max_tokens"]
        assert one["writer"].token_ids == again["writer"].token_ids
        np.testing.assert_array_equal(states, again["reader"].data["token_embed"])
        assert one["writer"].token_ids != other["writer"].token_ids

    run(main)


def test_several_completions_of_one_request(tiny_model: Path, vllm_zygote: Zygote):
    params = GREEDY | {"n": 3, "temperature": 1.0, "seed": 7}

    async def main():
        async with omni_trio.open_runtime(Pipeline([llm("writer", tiny_model)]), zygote=vllm_zygote) as runtime:
            result = (await runtime.generate((1, 2, 3), sampling_params=params))["writer"]
            assert [one.index for one in result.completions] == [0, 1, 2]
            assert [len(one.token_ids) for one in result.completions] == [GREEDY["max_tokens"]] * 3
            assert [one.finish_reason for one in result.completions] == ["length"] * 3
            assert len({one.token_ids for one in result.completions}) == 3
            assert result.token_ids == result.completions[0].token_ids
            async with runtime.request((1, 2, 3), sampling_params=params) as request:
                await request.__anext__()
            stats = runtime.stats()
            assert stats.stages[0].replicas[0].requests == 0
            assert (await runtime.generate((1, 2, 3), sampling_params=params))["writer"].text == result.text

    run(main)
