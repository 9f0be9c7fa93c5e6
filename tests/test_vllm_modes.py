"""What the vLLM client does beyond one input and one answer, against real engines: sessions, completions, calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from omni_trio.engines.process import Zygote
from omni_trio.errors import InvalidRequest, StageFailed
from omni_trio.messages import KvTransfer, StageInput, StageOutput, StageRequest
from omni_trio.stages import StageClient
from vllm_support import (
    PROMPTS,
    SEEDED,
    Completions,
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

EMPTY = StageInput()
SEGMENT = 8
"""Tokens of each segment's answer."""


@pytest.fixture
def engines(vllm_zygote: Zygote, tiny_model: Path) -> Engines:
    return Engines(vllm_zygote, tiny_model)


def piece(
    request_id: str, prompt: Any = None, params: Any = None, *, want_text: bool = True, **fields: Any
) -> StageRequest:
    given = EMPTY if prompt is None else StageInput(token_ids=tuple(prompt))
    fields = {"last": False, "segment_end": True, **fields}
    return StageRequest(request_id=request_id, input=given, params=params, want_text=want_text, **fields)


class Inbox:
    """Receives for all requests of a client, and lets tests wait for those of one."""

    def __init__(self, client: StageClient) -> None:
        self._client = client
        self.outputs: dict[str, list[StageOutput]] = {}
        self._changed = trio.Event()

    async def serve(self) -> None:
        while True:
            for output in await self._client.receive():
                self.outputs.setdefault(output.request_id, []).append(output)
            changed, self._changed = self._changed, trio.Event()
            changed.set()

    def of(self, request_id: str) -> list[StageOutput]:
        return self.outputs.get(request_id, [])

    async def ended(self, request_id: str) -> list[StageOutput]:
        while not (self.of(request_id) and self.of(request_id)[-1].finished):
            await self._changed.wait()
        return self.of(request_id)

    async def segments(self, request_id: str, count: int) -> None:
        while sum(output.segment_end for output in self.of(request_id)) < count:
            await self._changed.wait()

    async def anything(self, request_id: str) -> None:
        while not self.of(request_id):
            await self._changed.wait()


def split(outputs: Sequence[StageOutput]) -> list[list[StageOutput]]:
    """Cut a session's outputs at the ends of its segments."""
    parts: list[list[StageOutput]] = [[]]
    for output in outputs:
        parts[-1].append(output)
        if output.segment_end:
            parts.append([])
    return parts


async def expected(client: StageClient, name: str, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], str]]:
    """What plain requests answer that are given the whole context each time; without the last token of each answer."""
    answers = []
    sofar: list[int] = []
    for index, prompt in enumerate(prompts):
        sofar += prompt
        await submit(client, f"{name}.{index}", tuple(sofar), greedy(client, SEGMENT))
        outputs = (await collect(client, f"{name}.{index}"))[f"{name}.{index}"]
        answers.append((tokens_of(outputs), text_of(outputs)))
        sofar += answers[-1][0][:-1]
    return answers


def assert_one_end(outputs: Sequence[StageOutput], reason: str | None = None) -> None:
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].error is None
    assert not outputs[-1].segment_end
    if reason is not None:
        assert outputs[-1].finish_reason == reason


async def assert_nothing_left(client: Any) -> None:
    """Neither this side nor the engine has anything of any request any more."""
    await submit(client, "a last one", PROMPTS[0], greedy(client, 2), want_text=False)
    await collect(client, "a last one")
    work = client._work
    assert not work.legs
    assert not work._by_engine_id
    assert not work._idle
    assert not work._processor.request_states
    assert not work._processor.external_req_ids
    assert not work._sink.items
    figures = client.statistics()
    assert (figures.running, figures.waiting) == (0, 0)
    assert (figures.extra["engine_running"], figures.extra["engine_waiting"]) == (0, 0)
    assert figures.extra["kv_cache_usage"] == 0


# -- sessions


def test_a_sessions_segments_answer_what_whole_prompts_would_on_both_paths_and_however_they_interleave(engines):
    dice = random.Random(5)
    prompts = {
        f"s{number}": [[dice.randrange(128) for _ in range(dice.randint(4, 60))] for _ in range(dice.randint(1, 5))]
        for number in range(24)
    }

    async def body(client):
        params = greedy(client, SEGMENT)
        wanted = {name: await expected(client, name, mine) for name, mine in prompts.items()}
        inbox = Inbox(client)
        closing = dict.fromkeys(prompts)

        async def talk(name: str) -> None:
            mine = prompts[name]
            closing[name] = dice.choice(("with input", "early", "late"))
            opened = dice.random() < 0.2
            if opened:
                await client.submit(piece(name, None, params, segment_end=False, want_text=want_text(name)))
            for index, prompt in enumerate(mine):
                last = index == len(mine) - 1 and closing[name] == "with input"
                send = client.update if index or opened else client.submit
                if last and send == client.submit:
                    # A submission with its last input is no session; so this one is opened first.
                    await client.submit(piece(name, None, params, segment_end=False, want_text=want_text(name)))
                    send = client.update
                await send(piece(name, prompt, params, last=last, want_text=want_text(name)))
                wait = dice.choice(("not", "begin", "end"))
                if wait == "begin":
                    await inbox.anything(name)
                elif wait == "end" and not last:
                    await inbox.segments(name, index + 1)
            if closing[name] == "late":
                await inbox.segments(name, len(mine))
            if closing[name] != "with input":
                await client.update(piece(name, last=True, segment_end=dice.random() < 0.5))
            await inbox.ended(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.serve)
            async with trio.open_nursery() as talks:
                for name in prompts:
                    talks.start_soon(talk, name)
            nursery.cancel_scope.cancel()
        assert len(set(closing.values())) == 3
        for name, answers in wanted.items():
            outputs = inbox.of(name)
            assert_one_end(outputs)
            parts = split(outputs)
            if len(parts) > len(answers):
                # It was closed when everything had been worked off.
                assert closing[name] != "with input"
                (end,) = parts.pop()
                assert end == StageOutput(request_id=name, finish_reason="stop")
            else:
                assert closing[name] != "late"
            assert [tokens_of(part) for part in parts] == [tokens for tokens, _ in answers]
            if want_text(name):
                assert [text_of(part) for part in parts] == [text for _, text in answers]
            else:
                assert text_of(outputs) == ""
            # The last that is said of the prompt is the length of all input.
            assert [output.prompt_tokens for output in outputs if output.prompt_tokens][-1] == sum(
                map(len, prompts[name])
            )
        await assert_nothing_left(client)

    def want_text(name: str) -> bool:
        return int(name[1:]) % 2 == 0

    engines.run(body)


def test_input_that_completes_no_segment_is_prefilled_and_answered_with_what_does(engines):
    pieces = [PROMPTS[20], PROMPTS[21], PROMPTS[22]]

    async def body(client):
        params = greedy(client, SEGMENT)
        (wanted,) = await expected(client, "whole", [[token for part in pieces for token in part]])
        for want_text in (True, False):
            for how in ("with it", "without input", "by closing"):
                name = f"{how} {want_text}"
                send = client.submit
                for index, part in enumerate(pieces):
                    completes = how == "with it" and index == 2
                    await send(piece(name, part, params, segment_end=completes, want_text=want_text))
                    send = client.update
                if how == "without input":
                    await client.update(piece(name))
                if how == "by closing":
                    await client.update(piece(name, last=True, segment_end=False))
                    outputs = (await collect(client, name))[name]
                    assert_one_end(outputs, "length")
                else:
                    outputs = []
                    while not (outputs and outputs[-1].segment_end):
                        outputs += await client.receive()
                    # There is nothing to answer, which is an answer too.
                    await client.update(piece(name))
                    assert await client.receive() == [StageOutput(request_id=name, segment_end=True)]
                    await client.update(piece(name, last=True))
                    assert await client.receive() == [StageOutput(request_id=name, finish_reason="stop")]
                assert tokens_of(outputs) == wanted[0]
                assert text_of(outputs) == (wanted[1] if want_text else "")
                assert outputs[0].prompt_tokens == sum(map(len, pieces))
        await assert_nothing_left(client)

    engines.run(body)


def test_parameters_can_change_with_each_segment_and_any_reason_ends_one(engines):
    async def body(client):
        async def plain(prompt: tuple[int, ...], tokens: int) -> list[int]:
            await submit(client, "plain", prompt, greedy(client, tokens))
            return tokens_of((await collect(client, "plain"))["plain"])

        three = await plain(PROMPTS[7], 3)
        answer = await plain((*PROMPTS[7], *three[:-1], *PROMPTS[5]), 20)
        stop = next(token for index, token in enumerate(answer) if index > 2 and token not in answer[:index])
        params = greedy(client, 20, stop_token_ids=[stop], logprobs=1)
        await client.submit(piece("s", PROMPTS[7], greedy(client, 3), want_text=False))
        await client.update(piece("s", PROMPTS[5], params, want_text=False))
        # What brings none of its own has those that it began with.
        await client.update(piece("s", PROMPTS[6], want_text=False))
        await client.update(piece("s", last=True))
        zeroth, first, second = split((await collect(client, "s"))["s"])
        assert (tokens_of(zeroth), text_of(zeroth + second)) == (three, "")
        assert tokens_of(first) == answer[: answer.index(stop) + 1]
        assert (first[-1].segment_end, first[-1].finish_reason, first[-1].stop_reason) == (True, None, stop)
        assert all(len(output.logprobs) == len(output.token_ids) for output in first)
        assert (len(tokens_of(second)), second[-1].finish_reason) == (3, "length")
        await assert_nothing_left(client)

    engines.run(body)


def test_a_session_is_aborted_in_every_phase_and_leaves_nothing(engines):
    async def body(client):
        long, short = greedy(client, 900), greedy(client, SEGMENT)
        for want_text in (True, False):
            # Opened, nothing given; input kept back; at work; at work with more behind it; waiting for input; closing.
            await client.submit(piece("opened", None, short, segment_end=False, want_text=want_text))
            await client.submit(piece("kept", PROMPTS[0], short, segment_end=False, want_text=want_text))
            for name in ("works", "queued", "closing"):
                await client.submit(piece(name, PROMPTS[1], long, want_text=want_text))
            await client.update(piece("queued", PROMPTS[2], short))
            await client.update(piece("closing", last=True))
            await client.submit(piece("prefills", PROMPTS[3] * 10, short, segment_end=False, want_text=want_text))
            await client.update(piece("prefills", PROMPTS[4], short))
            await client.submit(piece("waits", PROMPTS[5], short, want_text=want_text))
            while not any(output.request_id == "waits" and output.segment_end for output in await client.receive()):
                pass
            names = ["opened", "kept", "works", "queued", "closing", "prefills", "waits"]
            await client.abort(names)
            for name in names:
                # It crosses with what ended the request, which the sender can not know.
                await client.update(piece(name, PROMPTS[6]))
                await client.update(piece(name, last=True))
            await submit(client, "next", PROMPTS[0], short)
            assert set(await collect(client, "next")) == {"next"}
            await assert_nothing_left(client)

    engines.run(body)


def test_a_session_that_waits_for_input_is_neither_work_nor_a_reason_to_ask_for_signs_of_life(engines):
    async def body(client):
        await client.submit(piece("s", PROMPTS[0], greedy(client, SEGMENT)))
        assert client._probe._busy
        assert client.statistics().running + client.statistics().waiting != 0
        while not any(output.segment_end for output in await client.receive()):
            pass
        assert not client._probe._busy
        figures = client.statistics()
        assert (figures.running, figures.waiting) == (0, 0)
        await client.update(piece("s", PROMPTS[1], greedy(client, SEGMENT)))
        assert client._probe._busy
        await client.update(piece("s", last=True))
        await collect(client, "s")
        assert not client._probe._busy
        await assert_nothing_left(client)

    engines.run(body)


def test_input_that_a_session_has_no_room_for_is_refused_before_the_engine_dies_of_it(engines):
    async def body(client):
        params = greedy(client, SEGMENT)
        for name in ("asked", "queued"):
            await client.submit(piece(name, range(200), params))
        await client.update(piece("queued", range(51), params))
        outputs: list[StageOutput] = []
        while not all(any(o.request_id == name and (o.segment_end or o.error) for o in outputs) for name in ("asked",)):
            outputs += await client.receive()
        # 200 and 7 of the answer are there; 49 more would fill all 256.
        with pytest.raises(InvalidRequest, match=r"207 tokens by now; with the 49 .* 256"):
            await client.update(piece("asked", range(49), params))
        await client.update(piece("asked", range(48), params))
        while not any(output.request_id == "queued" and output.finished for output in outputs):
            outputs += await client.receive()
        failed = [output for output in outputs if output.request_id == "queued"]
        assert "207 tokens by now" in failed[-1].error
        assert len(tokens_of(failed)) == SEGMENT
        while sum(output.request_id == "asked" and output.segment_end for output in outputs) < 2:
            outputs += await client.receive()
        # One token was left.
        assert len(tokens_of([output for output in outputs if output.request_id == "asked"])) == SEGMENT + 1
        await client.update(piece("asked", last=True))
        await collect(client, "asked")
        await assert_nothing_left(client)

    engines.run(body, engine_args={"max_model_len": 256})


def test_what_a_session_can_not_do_is_refused(engines):
    async def body(client):
        params = greedy(client, SEGMENT)
        for values, message in (
            ({"n": 2, "temperature": 1}, "n must be 1, not 2"),
            ({"stop": ["x"]}, "stop_token_ids"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await client.submit(piece("s", PROMPTS[0], greedy(client, SEGMENT, **values)))
        pair = KvTransfer(role="prefill", transfer_id="x")
        with pytest.raises(InvalidRequest, match="prefill/decode"):
            await client.submit(piece("s", PROMPTS[0], params, kv_transfer=pair))
        embeds = StageInput(embeds=np.zeros((3, 128), np.float32))
        with pytest.raises(InvalidRequest, match="no prompt embeddings"):
            await client.submit(StageRequest(request_id="s", input=embeds, params=params, last=False))
        assert not client._work.legs
        await client.submit(piece("s", PROMPTS[0], params))
        with pytest.raises(InvalidRequest, match="at work already"):
            await client.submit(piece("s", PROMPTS[0], params))
        with pytest.raises(InvalidRequest, match="n must be 1"):
            await client.update(piece("s", PROMPTS[0], greedy(client, SEGMENT, n=2, temperature=1)))
        await client.update(piece("s", last=True))
        for more in (PROMPTS[0], None):
            with pytest.raises(InvalidRequest, match="its last input already"):
                await client.update(piece("s", more, last=True))
        await submit(client, "plain", PROMPTS[0], params)
        with pytest.raises(InvalidRequest, match="its last input already"):
            await client.update(piece("plain", PROMPTS[0]))
        outputs = await collect(client, "s", "plain")
        assert_one_end(outputs["s"], "length")
        assert tokens_of(outputs["s"]) == tokens_of(outputs["plain"])
        await assert_nothing_left(client)

    engines.run(body, engine_args={"enable_prompt_embeds": True})


# -- several completions


@pytest.fixture(scope="session")
def offline_completions(tiny_model: Path) -> list[Completions]:
    """What vLLM's own offline LLM answers to the first prompts, three times each."""
    return offline(tiny_model)[1]


def seeded(client: StageClient, **more: Any) -> Any:
    return client.resolve_params({**SEEDED, **more})


def test_completions_are_those_of_the_offline_llm_with_the_same_seed(engines, offline_completions):
    async def body(client):
        for want_text in (True, False):
            for index, prompt in enumerate(PROMPTS[:4]):
                await submit(client, f"{want_text}{index}", prompt, seeded(client), want_text=want_text)
        outputs = await collect(client, *(f"{want_text}{index}" for want_text in (True, False) for index in range(4)))
        for want_text in (True, False):
            for index, completions in enumerate(offline_completions):
                mine = outputs[f"{want_text}{index}"]
                assert_one_end(mine, "length")
                assert [o.prompt_tokens for o in mine] == [len(PROMPTS[index])] + [0] * (len(mine) - 1)
                for number, (tokens, text) in enumerate(completions):
                    one = [output for output in mine if output.index == number]
                    assert tokens_of(one) == tokens
                    assert text_of(one) == (text if want_text else "")
                    assert all(output.completion_finish_reason is None for output in one[:-1])
                ends = [output.completion_finish_reason or output.finish_reason for output in mine]
                assert [end for end in ends if end] == ["length"] * 3
                assert sum(output.completion_finish_reason is not None for output in mine) == 2
        assert len({tuple(tokens) for tokens, _ in offline_completions[0]}) == 3
        await assert_nothing_left(client)

    engines.run(body)


def test_completions_end_one_by_one_and_stop_strings_end_theirs_alone(engines, offline_completions):
    texts = [text for _, text in offline_completions[0]]
    stop = next(
        texts[0][i] for i in range(2, 8) if texts[0][i].isascii() and texts[0][i] not in texts[0][:i] + texts[1]
    )

    async def body(client):
        params = seeded(client, stop=[stop], prompt_logprobs=1, max_tokens=60)
        await submit(client, "a", PROMPTS[0], params, want_text=False)
        mine: list[StageOutput] = []
        at_work: set[int] = set()
        while not (mine and mine[-1].finished):
            mine += await client.receive()
            at_work.add(client.statistics().extra["engine_running"])
        assert_one_end(mine)
        # The engine was told to end the one that goes on without it.
        assert 2 in at_work
        (end,) = [output for output in mine if output.index == 0 and output.completion_finish_reason]
        assert (end.completion_finish_reason, end.stop_reason) == ("stop", stop)
        assert text_of([o for o in mine if o.index == 0]) == texts[0][: texts[0].index(stop)]
        assert text_of([o for o in mine if o.index == 1]).startswith(texts[1])
        assert sum("prompt_logprobs" in (output.data or {}) for output in mine) == 1
        await assert_nothing_left(client)

    engines.run(body)


def test_an_abort_ends_all_completions_and_they_count_as_one_request(engines):
    async def body(client):
        for want_text in (True, False):
            await submit(client, "a", PROMPTS[0], seeded(client, n=4, max_tokens=900), want_text=want_text)
            seen: set[int] = set()
            while len(seen) < 4:
                seen.update(output.index for output in await client.receive())
            figures = client.statistics()
            assert (figures.running, figures.waiting, figures.extra["engine_running"]) == (1, 0, 4)
            await client.abort(["a"])
            await assert_nothing_left(client)

    engines.run(body)


def test_completions_stand_and_fall_together_and_apart_from_other_requests(engines):
    async def body(client):
        await submit(client, "a", PROMPTS[0], seeded(client, max_tokens=900))
        await client.receive()
        client._work.fail("1_a", "broken")
        client._wake_receiver()
        (end,) = [output for output in (await collect(client, "a"))["a"] if output.finished]
        assert end.error == "broken"
        await assert_nothing_left(client)
        # A part of it would have this request's name.
        await submit(client, "1_b", PROMPTS[0], greedy(client, 4))
        with pytest.raises(InvalidRequest, match="taken by another request, or by a part of one"):
            await submit(client, "b", PROMPTS[0], seeded(client))
        assert len(tokens_of((await collect(client, "1_b"))["1_b"])) == 4
        await assert_nothing_left(client)

    engines.run(body)


# -- calls


def test_the_engine_is_controlled_by_calls(engines):
    async def body(client):
        call = client.call
        assert await call("reset_prefix_cache") is True
        assert await call("reset_prefix_cache", kwargs={"reset_running_requests": True}) is True
        assert await call("reset_mm_cache") is None
        assert await call("reset_encoder_cache") is None
        await call("set_weight_version", ("v2",))
        assert await call("get_weight_version") == "v2"
        # Everything is ended ...
        await submit(client, "plain", PROMPTS[0], greedy(client, 900))
        await submit(client, "several", PROMPTS[1], seeded(client, max_tokens=900), want_text=False)
        for name, want_text in (("raw session", False), ("text session", True)):
            await client.submit(piece(name, PROMPTS[2], greedy(client, SEGMENT), want_text=want_text))
        outputs: list[StageOutput] = []
        while sum(output.segment_end for output in outputs) < 2:
            outputs += await client.receive()
        assert await call("pause_scheduler", kwargs={"mode": "abort", "clear_cache": False}) is None
        ends = await collect(client, "plain", "several", "raw session", "text session")
        for mine in ends.values():
            assert_one_end(mine, "abort")
        # ... and what comes now waits.
        assert await call("is_scheduler_paused") is True
        assert await call("is_sleeping") is True
        await submit(client, "later", PROMPTS[0], greedy(client, 4))
        assert await call("is_scheduler_paused") is True
        assert not client._work.ready
        await call("resume_scheduler")
        assert await call("engine.is_scheduler_paused") is False
        assert len(tokens_of((await collect(client, "later"))["later"])) == 4
        await assert_nothing_left(client)

    engines.run(body)


def test_calls_that_can_not_be_made_say_why(engines):
    async def body(client):
        for method, args, kwargs, message in (
            ("reset_prefx_cache", (), {}, "did you mean 'reset_prefix_cache'"),
            ("engine.resume_schedular", (), {}, "did you mean 'resume_scheduler'"),
            ("sleep", (), {"levl": 1}, r"sleep\(\) got an unexpected keyword argument 'levl'"),
            ("sleep", (1, "abrt"), {}, "no such mode 'abrt'; did you mean 'abort'"),
            ("pause_scheduler", ("never",), {}, "no such mode 'never' .abort, wait, keep"),
            ("add_lora", (), {"lora_name": "a"}, "lora_int_id"),
            ("add_lora", ("a", 0, "/x"), {}, "lora_int_id must be a whole number from 1, not 0"),
            ("add_lora", ("a", 1, ""), {}, "lora_path"),
            ("add_lora", ("a", 1, "/x"), {}, "add_lora"),
            ("engine.run_busy_loop", (), {}, "break the engine"),
            ("engine.shutdown", (), {}, "break the engine"),
        ):
            with pytest.raises(StageFailed, match=message):
                await client.call(method, args, kwargs)
        await assert_nothing_left(client)

    engines.run(body)


def test_adapters_are_loaded_and_unloaded(engines, adapter):
    async def body(client):
        call = client.call
        assert await call("list_loras") == []
        for number in (7, 3):
            kwargs = {"lora_name": f"a{number}", "lora_int_id": number, "lora_path": str(adapter)}
            assert await call("add_lora", kwargs=kwargs) is True
        assert await call("list_loras") == [3, 7]
        assert await call("pin_lora", (7,)) is True
        assert [await call("remove_lora", (3,)), await call("remove_lora", kwargs={"lora_int_id": 3})] == [True, False]
        assert await call("list_loras") == [7]

    engines.run(body, engine_args={"enable_lora": True, "max_lora_rank": 8, "max_loras": 2})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A small adapter for the tiny model."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": np.ones(shape, np.float32)
        for layer in range(2)
        for half, shape in (("A", (4, 128)), ("B", (128, 4)))
    }
    save_file(weights, tmp_path / "adapter_model.safetensors")
    return tmp_path
