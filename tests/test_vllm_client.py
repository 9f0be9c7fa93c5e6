"""The native vLLM client against real engines, which fork from one warm zygote in about half a second each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from omni_trio.engines.process import Zygote
from omni_trio.errors import EngineDied, InvalidRequest, StageFailed
from omni_trio.messages import KvTransfer, StageInput, StageOutput, StageRequest
from vllm_support import (
    PROMPTS,
    TOKENS,
    Engines,
    collect,
    greedy,
    offline,
    submit,
    text_of,
    tokens_of,
)

pytestmark = [
    pytest.mark.engine,
    # vLLM and what it imports have warnings of their own.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def engines(vllm_zygote: Zygote, tiny_model: Path) -> Engines:
    return Engines(vllm_zygote, tiny_model)


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> list[tuple[list[int], str]]:
    """What vLLM's own offline LLM answers to PROMPTS: tokens and text."""
    return [completions[0] for completions in offline(tiny_model)[0]]


# -- generating


def test_a_hundred_greedy_answers_equal_those_of_the_offline_llm_on_both_paths(engines, reference):
    async def body(client):
        params = greedy(client)
        for kind in ("text", "raw"):
            for index, prompt in enumerate(PROMPTS):
                await submit(client, f"{kind}{index}", prompt, params, want_text=kind == "text")
        outputs = await collect(client, *(f"{kind}{index}" for kind in ("text", "raw") for index in range(100)))
        assert len(outputs) == 200
        for index, (answer, words) in enumerate(reference):
            raw, text = outputs[f"raw{index}"], outputs[f"text{index}"]
            assert tokens_of(raw) == answer
            assert tokens_of(text) == answer
            assert text_of(raw) == ""
            assert text_of(text) == words
            for mine in (raw, text):
                assert [output.finish_reason for output in mine[:-1]] == [None] * (len(mine) - 1)
                assert mine[-1].finish_reason == "length"
                assert [output.prompt_tokens for output in mine] == [len(PROMPTS[index])] + [0] * (len(mine) - 1)
        assert (client.statistics().running, client.statistics().waiting) == (0, 0)
        assert not client._work._processor.request_states
        assert not client._work._processor.external_req_ids

    engines.run(body)


def test_stop_strings_end_a_request_here_and_in_the_engine(engines):
    async def body(client):
        await submit(client, "whole", PROMPTS[0], greedy(client, 64))
        whole = text_of((await collect(client, "whole"))["whole"])
        stop = next(whole[i : i + 2] for i in range(8, 60) if whole[i : i + 2].isascii())
        await submit(client, "stopped", PROMPTS[0], greedy(client, 1000, stop=[stop]), want_text=False)
        outputs = (await collect(client, "stopped"))["stopped"]
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].stop_reason == stop
        assert text_of(outputs) == whole[: whole.index(stop)]
        # The next step's figures are the engine's own.
        await submit(client, "next", PROMPTS[1], greedy(client, 4))
        await collect(client, "next")
        assert client.statistics().extra["engine_running"] == 0

    engines.run(body)


def test_logprobs_come_with_their_tokens_even_where_nobody_reads_text(engines):
    async def body(client):
        params = greedy(client, 8, logprobs=2, prompt_logprobs=1)
        await submit(client, "a", PROMPTS[3], params, want_text=False)
        outputs = (await collect(client, "a"))["a"]
        for output in outputs:
            assert len(output.logprobs) == len(output.token_ids)
            for token, choices in zip(output.token_ids, output.logprobs, strict=True):
                assert choices[token].rank == 1
        assert len(outputs[0].data["prompt_logprobs"]) == len(PROMPTS[3])

    engines.run(body)


def test_the_prefix_cache_is_counted(engines):
    async def body(client):
        prompt = tuple(range(200))
        for request_id in ("cold", "warm"):
            await submit(client, request_id, prompt, greedy(client, 2), want_text=False)
            outputs = (await collect(client, request_id))[request_id]
        assert outputs[0].cached_tokens > 0
        assert client.statistics().extra["prefix_cache_hits"] == outputs[0].cached_tokens

    engines.run(body, engine_args={"block_size": 32})


def test_words_chat_and_token_ids_meet_in_the_same_prompt(engines):
    async def body(client):
        params = greedy(client, 8)
        rendered = "system: Be brief.\nuser: hi\nassistant:"
        await submit(client, "words", StageInput(text="hi"), params)
        await submit(
            client,
            "messages",
            StageInput(messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})),
            params,
        )
        await submit(client, "ids", tuple(rendered.encode()), params)
        outputs = await collect(client, "words", "messages", "ids")
        assert {mine[0].prompt_tokens for mine in outputs.values()} == {len(rendered)}
        assert len({tuple(tokens_of(mine)) for mine in outputs.values()}) == 1

    engines.run(body, prompt_format="chat", system="Be brief.")


def test_a_long_prompt_is_tokenized_in_a_thread_and_means_the_same(engines):
    async def body(client):
        text = "The same thing again. " * 40 * 10
        assert len(text) > 8000
        await submit(client, "text", StageInput(text=text), greedy(client, 4))
        await submit(client, "ids", tuple(text.encode()), greedy(client, 4))
        outputs = await collect(client, "text", "ids")
        assert tokens_of(outputs["text"]) == tokens_of(outputs["ids"])

    engines.run(body, engine_args={"max_model_len": 4096 * 4, "hf_overrides": {"max_position_embeddings": 4096 * 4}})


def test_prompt_embeddings_of_the_models_own_tokens_give_the_same_answer(engines):
    from safetensors.torch import load_file

    table = load_file(engines.model / "model.safetensors")["model.embed_tokens.weight"]
    prompt = tuple(b"the very same prompt")

    async def body(client):
        params = greedy(client, 8)
        await submit(client, "ids", prompt, params)
        await submit(client, "tensor", StageInput(embeds=table[list(prompt)]), params)
        await submit(client, "array", StageInput(embeds=table[list(prompt)].float().numpy()), params, want_text=False)
        outputs = await collect(client, "ids", "tensor", "array")
        assert len({tuple(tokens_of(mine)) for mine in outputs.values()}) == 1
        assert outputs["array"][0].prompt_tokens == len(prompt)
        for shape in ((4, 64), (128,), (0, 128)):
            with pytest.raises(InvalidRequest, match=r"\[tokens, 128\]"):
                await submit(client, "bad", StageInput(embeds=np.zeros(shape, np.float32)), params)

    engines.run(body, engine_args={"enable_prompt_embeds": True})


# -- bad requests


def test_bad_inputs_are_refused_with_numbers_and_leave_nothing_behind(engines):
    async def body(client):
        params = greedy(client, 4)
        for given, message in (
            (StageInput(), "has none of them"),
            (StageInput(text="a", token_ids=(1,)), "text and token_ids"),
            (StageInput(text=""), "empty"),
            (StageInput(token_ids=()), "empty"),
            (StageInput(token_ids=tuple([1] * 1025)), "1025.*1024"),
            (StageInput(text="x" * 1024), "1024"),
            (StageInput(token_ids=(1, 320)), "320 is out of vocabulary"),
            (StageInput(token_ids=(1, -1)), "-1 is out of vocabulary"),
            (StageInput(token_ids=(1, 1.5)), "whole numbers"),  # type: ignore[arg-type]
            (StageInput(token_ids=(1, 1 << 70)), "whole numbers"),
            (StageInput(messages=({"content": "x"},)), "role"),
            (StageInput(embeds=np.zeros((4, 128), np.float32)), "enable_prompt_embeds"),
            (StageInput(text="a", data={"multi_modal_data": {"image": object()}}), "."),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                await submit(client, "bad", given, params)
            assert (caught.value.stage, caught.value.stage_id, caught.value.replica_id) == ("thinker", 3, 0)
        assert not client._work.legs
        assert not client._work._processor.request_states
        await submit(client, "good", (1, np.int64(2)), params)
        with pytest.raises(InvalidRequest, match="at work already"):
            await submit(client, "good", (1, 2), params)
        assert list(await collect(client, "good")) == ["good"]

    engines.run(body)


def test_bad_parameters_are_refused_before_anything_is_sent(engines):
    from vllm import PoolingParams, SamplingParams

    async def body(client):
        for params, message in (
            ({"temprature": 0}, "did you mean 'temperature'"),
            ({"temperature": "hot"}, "float"),
            ({"temperature": -1}, "temperature"),
            ({"max_tokens": 2.5}, "int"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"n": 0}, "n must be at least 1"),
            ({"output_kind": 0}, "always deltas"),
            ({"dimensions": 3}, "pooling parameter"),
            ({"logprobs": 1000}, "1000"),
            ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
            ({"stop": "x", "detokenize": False}, "stop"),
            ({"structured_outputs": {"regex": "[", "json": "{}"}}, "only use one kind"),
            ({"n": 3, "temperature": 0}, "greedy"),
            (PoolingParams(), "SamplingParams"),
            (17, "mapping"),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                client.resolve_params(params)
            assert caught.value.stage == "thinker"
        given = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        mine = client.resolve_params(given)
        assert mine is not given
        assert given.output_kind.name == "CUMULATIVE"
        await submit(client, "a", PROMPTS[0], mine)
        await submit(client, "b", PROMPTS[0], None)
        outputs = await collect(client, "a", "b")
        assert len(tokens_of(outputs["a"])) == 3
        assert len(tokens_of(outputs["b"])) == 5
        assert client.resolve_params(None) is client.resolve_params({})

    engines.run(body, sampling={"max_tokens": 5, "ignore_eos": True})


# -- abort


def test_an_abort_is_acknowledged_and_nothing_of_the_request_comes_out_after_it(engines):
    async def body(client):
        long = greedy(client, 900)
        for request_id in ("other", "text", "raw"):
            await submit(client, request_id, PROMPTS[0], long, want_text=request_id == "text")
        seen: set[str] = set()
        while seen != {"other", "text", "raw"}:
            seen.update(output.request_id for output in await client.receive())
        # Outputs that are there already must not come out either.
        while not client._work.ready:
            await trio.lowlevel.checkpoint()
        await client.abort(["text", "raw", "never heard of"])
        assert client.statistics().running + client.statistics().waiting == 1
        await submit(client, "next", PROMPTS[1], greedy(client, 4))
        outputs = await collect(client, "next")
        assert set(outputs) <= {"other", "next"}
        assert client.statistics().extra["engine_running"] <= 2
        await client.abort(["other"])
        await client.abort(["other"])
        assert client.statistics().running == 0
        assert not client._work._processor.request_states

    engines.run(body)


def test_two_hundred_aborts_in_a_row_then_one_completes(engines):
    async def body(client):
        for index in range(200):
            await submit(client, f"r{index}", PROMPTS[index % 100], greedy(client, 900), want_text=index % 2 == 0)
            await client.abort([f"r{index}"])
        await submit(client, "last", PROMPTS[0], greedy(client))
        outputs = await collect(client, "last")
        assert list(outputs) == ["last"]
        assert len(tokens_of(outputs["last"])) == TOKENS
        assert client.statistics().extra["engine_running"] == 0

    engines.run(body)


def test_a_cancelled_abort_still_holds_and_a_cancelled_submission_leaves_nothing(engines):
    async def body(client):
        await submit(client, "a", PROMPTS[0], greedy(client, 900))
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.abort(["a"])
        assert scope.cancelled_caught
        for text in ("short", "long " * 2000):
            with trio.CancelScope() as scope:
                scope.cancel()
                await submit(client, "b", StageInput(text=text), greedy(client))
            assert scope.cancelled_caught
        assert not client._work.legs
        assert not client._work._processor.request_states
        await submit(client, "c", PROMPTS[0], greedy(client, 4))
        assert set(await collect(client, "c")) == {"c"}

    engines.run(body)


def test_a_cancelled_receive_loses_nothing(engines, reference):
    async def body(client):
        await submit(client, "a", PROMPTS[0], greedy(client))
        outputs: list[StageOutput] = []
        waits = 0
        while not (outputs and outputs[-1].finished):
            with trio.move_on_after(0.0002):
                outputs += await client.receive()
            waits += 1
        assert tokens_of(outputs) == reference[0][0]
        assert waits > len(outputs)

    engines.run(body)


# -- calls


def test_workers_and_the_engine_core_can_be_called(engines):
    async def body(client):
        assert await client.call("check_health") == [None]
        assert await client.call("engine.is_sleeping") is False
        assert await client.call("engine.reset_prefix_cache") is True
        for method, args, kwargs, message in (
            ("no_such_method", (), {}, "no_such_method"),
            ("engine.no_such_method", (), {}, "no attribute"),
            ("engine.reset_prefix_cache", (1, 2, 3, 4, 5), {}, "takes from 0 to 2 positional"),
            ("engine.is_sleeping", (), {"a": 1}, "unexpected keyword"),
            ("engine._send_engine_dead", (), {}, "begin with '_'"),
            ("get_model", (), {}, "never speaks again"),
            ("get_kv_cache_spec", (), {}, "never speaks again"),
            ("engine.collective_rpc", ("get_model",), {}, "never speaks again"),
            ("check_health", (object(),), {}, "can not be sent"),
        ):
            with pytest.raises(StageFailed, match=message) as caught:
                await client.call(method, args, kwargs)
            assert caught.value.stage == "thinker"
        # An answer that comes too late for its caller is nobody else's.
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.call("check_health")
        assert await client.call("engine.is_sleeping") is False
        assert not client._calls

    engines.run(body)


# -- damage


def test_an_error_in_one_requests_processing_or_message_ends_that_request_alone(engines):
    async def body(client):
        params = greedy(client, 64)
        for request_id in ("good", "bad text", "bad bytes", "bad raw"):
            await submit(client, request_id, PROMPTS[0], params, want_text=request_id != "bad raw")
        process = client._work._processor.process_outputs

        def process_outputs(outputs: Iterable[Any]) -> Any:
            def checked() -> Iterator[Any]:
                for output in outputs:
                    if output.request_id == "bad text":
                        raise RuntimeError("no such character")
                    yield output

            return process(checked())

        client._work._processor.process_outputs = process_outputs
        # A message as the engine would send it, in which one output has a string for tokens.
        client._take(messages([["bad bytes", "?"], ["good", []]]))
        # What can not happen, as far as anybody knows.
        client._work.take([SimpleNamespace(request_id="bad raw", finish_reason=None)])
        outputs = await collect(client, "good", "bad text", "bad bytes", "bad raw")
        assert "could not be read" in outputs["bad raw"][-1].error
        assert "no such character" in outputs["bad text"][-1].error
        assert "could not be decoded" in outputs["bad bytes"][-1].error
        assert outputs["good"][-1].finish_reason == "length"
        assert outputs["good"][-1].error is None
        assert not client._work._processor.request_states
        await submit(client, "next", PROMPTS[1], greedy(client, 4))
        await collect(client, "next")
        assert client.statistics().extra["engine_running"] == 0
        # Where nothing can be told apart, nobody may go on with a hole in its answer.
        await submit(client, "lost", PROMPTS[1], params)
        client._take(broken())
        assert "could not be decoded" in (await collect(client, "lost"))["lost"][-1].error

    engines.run(body)


def messages(outputs: list[Any]) -> list[Any]:
    import msgspec
    import zmq

    return [zmq.Frame(msgspec.msgpack.encode([0, outputs]))]


def broken() -> list[Any]:
    import zmq

    return [zmq.Frame(b"\xc1 not msgpack")]


# -- death


def test_a_killed_engine_is_noticed_and_everybody_is_told(engines):
    async def body(client):
        errors: list[EngineDied] = []

        async def told(wait: Callable[[], Awaitable[Any]]) -> None:
            with pytest.raises(EngineDied) as caught:
                while True:
                    await wait()
            errors.append(caught.value)

        for index in range(16):
            await submit(client, f"r{index}", PROMPTS[index], greedy(client, 900))
        await client.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told, client.receive)
            # A stopped process answers nothing, so the call is still waiting when it is killed.
            os.kill(client.statistics().pid, signal.SIGSTOP)
            nursery.start_soon(told, lambda: client.call("check_health"))
            nursery.start_soon(told, lambda: client.abort(["r0"]))
            await trio.testing.wait_all_tasks_blocked()
            os.kill(client.statistics().pid, signal.SIGKILL)
            killed = time.perf_counter()
        assert time.perf_counter() - killed < 1
        assert len(errors) == 3
        assert len(set(map(id, errors))) == 3
        for error in errors:
            assert error.exit_code == -signal.SIGKILL
            assert "SIGKILL" in str(error)
            assert (error.stage, error.stage_id, error.replica_id) == ("thinker", 3, 0)
        for wait in (client.receive, lambda: submit(client, "x", PROMPTS[0], None), lambda: client.abort(["r1"])):
            await told(wait)
        assert client.statistics().running == 0

    engines.run(body)


def test_an_idle_engine_that_is_killed_is_noticed_too(engines):
    async def body(client):
        os.kill(client.statistics().pid, signal.SIGKILL)
        with trio.fail_after(1), pytest.raises(EngineDied):
            await client.receive()

    engines.run(body)


def test_an_engine_that_dies_of_an_error_leaves_its_last_words(engines):
    async def body(client):
        await submit(client, "a", PROMPTS[0], greedy(client, 900))
        # The engine's own way of failing: its executor says that it is lost.
        client._wire.send(b"\x04", [b"\xc0"])
        with trio.fail_after(20), pytest.raises(EngineDied, match=r"fatal error|exited") as caught:
            while True:
                await client.receive()
        assert "Executor failed" in caught.value.log_tail

    engines.run(body)


def test_a_mute_engine_is_found_by_the_probe_and_killed(engines):
    async def body(client):
        pid = client.statistics().pid
        # What call() refuses: its result kills the engine's output thread.
        async with trio.open_nursery() as nursery:

            async def mute() -> None:
                with pytest.raises(EngineDied):
                    await client._ask("collective_rpc", "get_model", None, (), {})

            nursery.start_soon(mute)
            await submit(client, "a", PROMPTS[0], greedy(client, 900))
            with pytest.raises(EngineDied, match="no longer answers") as caught:
                while True:
                    await client.receive()
        assert caught.value.exit_code == -signal.SIGKILL
        assert not await trio.Path(f"/proc/{pid}").exists()

    engines.run(body, probe_interval=0.3, probe_timeout=0.3)


def test_a_busy_and_an_idle_engine_are_left_alone_by_the_probe(engines):
    async def body(client):
        asked: list[str] = []
        ask = client._ask

        async def counted(method: str, *args: Any) -> Any:
            asked.append(method)
            return await ask(method, *args)

        client._ask = counted
        os.kill(client.statistics().pid, signal.SIGSTOP)
        assert client._probe._rest.deadline == float("inf")
        await submit(client, "a", PROMPTS[0], greedy(client, 64))
        assert client._probe._rest.deadline < float("inf")
        with trio.move_on_after(0.5):
            await client.receive()
        os.kill(client.statistics().pid, signal.SIGCONT)
        await collect(client, "a")
        # It was asked once while it was stopped, and came back in time.
        assert asked == ["is_sleeping"]
        assert client._probe._rest.deadline == float("inf")

    engines.run(body, probe_interval=0.2, probe_timeout=60)


# -- pooling


def test_a_pooling_stage_embeds(engines):
    from vllm import SamplingParams

    async def body(client):
        for request_id in ("a", "b"):
            await submit(client, request_id, StageInput(text="a sentence"), None)
        outputs = await collect(client, "a", "b")
        for mine in outputs.values():
            (output,) = mine
            embedding = output.data["embedding"]
            assert embedding.dtype == np.float32
            assert embedding.shape == (128,)
            assert np.isclose(np.linalg.norm(embedding), 1, atol=1e-2)
            assert output.finish_reason == "stop"
            assert output.prompt_tokens == len("a sentence")
        assert np.array_equal(outputs["a"][0].data["embedding"], outputs["b"][0].data["embedding"])
        await submit(client, "each", StageInput(text="a sentence"), client.resolve_params({"task": "token_embed"}))
        (output,) = (await collect(client, "each"))["each"]
        assert output.data["token_embed"].shape == (len("a sentence"), 128)
        for params, message in (
            ({"temperature": 0}, "sampling parameter"),
            (SamplingParams(), "PoolingParams"),
            ({"task": "generate"}, "no task 'generate'; it has: .*embed"),
            ({"dimensions": "many"}, r"int.*\$\.dimensions"),
            ({"dimension": 3}, "did you mean 'dimensions'"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                client.resolve_params(params)
        await client.abort(["each"])
        transfer = KvTransfer(role="prefill", transfer_id="x")
        for fields, message in (({"last": False}, "last=True"), ({"kv_transfer": transfer}, "no KV cache")):
            with pytest.raises(InvalidRequest, match=message):
                await client.submit(StageRequest(request_id="s", input=StageInput(text="a"), **fields))
        with pytest.raises(InvalidRequest, match="no updates"):
            await client.update(StageRequest(request_id="s", input=StageInput(text="a")))

    engines.run(body, kind="pooling", engine_args={"convert": "embed"})
