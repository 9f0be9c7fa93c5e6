"""Prefill on one real engine, decode on another."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from omni_trio.engines.process import Zygote, open_launcher
from omni_trio.engines.vllm import vllm_client_factory
from omni_trio.errors import InvalidRequest
from omni_trio.messages import KvTransfer, StageInput, StageOutput, StageRequest
from omni_trio.stages import ReleasesKv, StageClient
from vllm_support import PROMPTS, Engines, collect, context, greedy, submit, text_of, tokens_of

pytestmark = [
    pytest.mark.engine,
    # vLLM and what it imports have warnings of their own.
    pytest.mark.filterwarnings("default"),
]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
LONG = [tuple((3 * i + 5 * j) % 128 for j in range(260 + 20 * i)) for i in range(4)]


@attrs.frozen
class Pair:
    """Opens a prefill engine and a decode engine."""

    engines: Engines

    def run(self, body: Callable[[Any, Any], Awaitable[None]], prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        async def main() -> None:
            with trio.fail_after(60):
                async with open_launcher(zygote=self.engines.zygote) as launcher:
                    factory = vllm_client_factory(launcher)
                    clients: dict[str, Any] = {}
                    both, done = trio.Event(), trio.Event()

                    async def open_one(role: str, fields: dict[str, Any]) -> None:
                        stage = self.engines.stage(name=role, role=role, **fields)
                        async with factory(context(stage)) as clients[role]:
                            if len(clients) == 2:
                                both.set()
                            await done.wait()

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(open_one, "prefill", prefill)
                        nursery.start_soon(open_one, "decode", decode)
                        await both.wait()
                        await body(clients["prefill"], clients["decode"])
                        done.set()

        trio.run(main)

    def over_nixl(self, body: Callable[[Any, Any], Awaitable[None]]) -> None:
        stages = [
            {
                "engine_args": {"kv_transfer_config": NIXL, "block_size": 32},
                "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp,shm,self,cma"},
            }
            for port in free_ports(2)
        ]
        self.run(body, *stages)


@pytest.fixture
def pair(vllm_zygote: Zygote, tiny_model: Path) -> Pair:
    return Pair(Engines(vllm_zygote, tiny_model))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def half(role: Any, name: str, prompt: tuple[int, ...], params: Any, **fields: Any) -> StageRequest:
    transfer = KvTransfer(role=role, transfer_id=f"of {name}", params=fields.pop("kv", None))
    given = StageInput(token_ids=prompt)
    return StageRequest(request_id=name, input=given, params=params, kv_transfer=transfer, **fields)


async def prefilled(client: StageClient, name: str, prompt: tuple[int, ...], params: Any) -> StageOutput:
    await client.submit(half("prefill", name, prompt, params, want_text=False))
    (output,) = (await collect(client, name))[name]
    assert (output.finish_reason, len(output.token_ids), output.error) == ("length", 1, None)
    return output


async def kv_cache_usage(client: StageClient) -> float:
    """What the engine says after a request of a few tokens, which leaves nothing behind itself."""
    await submit(client, "asks", (1, 2), greedy(client, 1), want_text=False)
    await collect(client, "asks")
    usage: float = client.statistics().extra["kv_cache_usage"]
    return usage


async def assert_released(client: StageClient) -> None:
    # It is told by the other engine, which this side does not hear of; left alone it would keep the blocks for 30 s.
    with trio.fail_after(10):
        while await kv_cache_usage(client) > 0:
            pass


def test_with_a_content_addressed_connector_a_pair_answers_as_one_engine_does(pair, tmp_path):
    def stage(role: str) -> dict[str, Any]:
        config = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        return {"engine_args": {"kv_transfer_config": config, "block_size": 32, "enable_prefix_caching": False}}

    async def body(prefill, decode):
        params = greedy(decode, 16, stop=["no such string"], logprobs=1)
        for index, prompt in enumerate(LONG):
            await submit(decode, f"alone {index}", prompt, params)
            alone = (await collect(decode, f"alone {index}"))[f"alone {index}"]
            hits = decode.statistics().extra["external_cache_hits"]
            handed = await prefilled(prefill, f"p {index}", prompt, params)
            assert handed.kv_transfer_params is None
            await decode.submit(half("decode", f"d {index}", prompt, params))
            mine = (await collect(decode, f"d {index}"))[f"d {index}"]
            assert (tokens_of(mine), text_of(mine)) == (tokens_of(alone), text_of(alone))
            # All whole blocks but for the last token, which has to be computed for the first one of the answer.
            fetched = decode.statistics().extra["external_cache_hits"] - hits
            assert fetched == (len(prompt) - 1) // 32 * 32
            assert all(len(output.logprobs) == len(output.token_ids) for output in mine)
        # There is nothing to be let go of.
        await decode.release_kv(half("decode", "r", LONG[0], params))
        assert isinstance(decode, ReleasesKv)
        assert await kv_cache_usage(decode) == 0

    pair.run(body, stage("kv_producer"), stage("kv_consumer"))


def test_over_nixl_a_pair_answers_as_one_engine_does_and_what_is_not_decoded_is_let_go_of(pair):
    async def body(prefill, decode):
        params = greedy(decode, 16)
        given = params.extra_args
        outputs: dict[str, StageOutput] = {}
        for index, prompt in enumerate(LONG):
            outputs[f"{index}"] = await prefilled(prefill, f"{index}", prompt, params)
        assert all(output.kv_transfer_params["remote_request_id"] == name for name, output in outputs.items())
        assert await kv_cache_usage(prefill) > 0
        for index, prompt in enumerate(LONG):
            kv = outputs[f"{index}"].kv_transfer_params
            await decode.submit(half("decode", f"{index}", prompt, params, kv=kv, want_text=index % 2 == 0))
            assert kv == outputs[f"{index}"].kv_transfer_params
        answers = await collect(decode, *outputs)
        assert decode.statistics().extra["external_cache_hits"] == sum(map(len, LONG))
        assert {mine[0].cached_tokens for mine in answers.values()} == {0}
        await assert_released(prefill)
        await decode.call("reset_prefix_cache")
        for index, prompt in enumerate(LONG):
            await submit(decode, f"alone {index}", prompt, params)
        alone = await collect(decode, *(f"alone {index}" for index in range(4)))
        for index in range(4):
            assert tokens_of(answers[f"{index}"]) == tokens_of(alone[f"alone {index}"])
        assert params.extra_args is given
        assert params.max_tokens == 16

        # Three ways of not decoding what has been prefilled.
        kept = await kv_cache_usage(prefill)
        for number, name in enumerate(("released", "aborted", "aborted before")):
            output = await prefilled(prefill, name, LONG[number], params)
            assert await kv_cache_usage(prefill) > kept
            request = half("decode", name, LONG[number], params, kv=output.kv_transfer_params)
            if name == "released":
                await decode.release_kv(request)
            else:
                await decode.submit(request)
                await decode.abort([name])
            await assert_released(prefill)
        await prefill.submit(half("prefill", "ended", LONG[0] * 3, params))
        await prefill.abort(["ended"])
        await assert_released(prefill)
        assert not decode._work.legs
        assert await kv_cache_usage(decode) == 0

        for kv, message in (
            ({}, "lack remote_engine_id"),
            ({**output.kv_transfer_params, "remote_port": None}, "port"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await decode.submit(half("decode", "bad", LONG[0], params, kv=kv))
            await decode.release_kv(half("decode", "bad", LONG[0], params, kv=kv))
        assert not decode._work.legs

    pair.over_nixl(body)


@pytest.mark.parametrize("connected", [True, False])
def test_a_prefill_engine_that_dies_takes_only_what_it_still_holds_with_it(pair, connected):
    async def body(prefill, decode):
        params = greedy(decode, 16)
        outputs = [await prefilled(prefill, f"{index}", prompt, params) for index, prompt in enumerate(LONG)]
        first, *requests = [
            half("decode", f"{index}", prompt, params, kv=output.kv_transfer_params)
            for index, (prompt, output) in enumerate(zip(LONG, outputs, strict=True))
        ]
        if connected:
            # It makes a difference to the connector whether the two have met.
            await decode.submit(first)
            assert (await collect(decode, "0"))["0"][-1].finish_reason == "length"
        os.kill(prefill.statistics().pid, signal.SIGKILL)
        for request in requests[:2]:
            await decode.submit(request)
        await decode.release_kv(requests[2])
        # The engine goes on meanwhile: it can do all of it by itself.
        await submit(decode, "alone", LONG[0], params)
        answers = await collect(decode, "1", "2", "alone")
        for name in ("1", "2"):
            (output,) = answers[name]
            assert output.finish_reason == "error"
            assert outputs[0].kv_transfer_params["remote_engine_id"] in output.error
            assert f"transfer of {name}" in output.error
        assert len(tokens_of(answers["alone"])) == 16
        assert not decode._work.legs
        assert await kv_cache_usage(decode) == 0

    pair.over_nixl(body)


def test_stages_of_a_pair_refuse_what_they_can_not_do_together(pair):
    async def body(prefill, decode):
        for client in (prefill, decode):
            for values, message in (
                ({"n": 2}, "n must be 1, not 2.*handed over once"),
                ({"prompt_logprobs": 1}, "prompt_logprobs.*has not computed the prompt"),
            ):
                with pytest.raises(InvalidRequest, match=message) as caught:
                    client.resolve_params(values)
                assert caught.value.stage in ("prefill", "decode")
            client.resolve_params({"logprobs": 2, "structured_outputs": {"regex": "a+"}, "min_tokens": 3, "stop": "x"})
        # Whoever made them, however they came: they are looked at again before anything is sent.
        with pytest.raises(InvalidRequest, match="n must be 1"):
            await decode.submit(half("decode", "a", PROMPTS[0], several(decode)))
        assert not decode._work.legs

    pair.run(body, {}, {})


def several(client: Any) -> Any:
    params = client.resolve_params({"max_tokens": 2}).clone()
    params.n = 2
    return params
