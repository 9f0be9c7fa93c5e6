"""Invariants tested: I4 and I14 at the bridges of model families, however a source's output is cut."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_trio.bridges import CompanionOutput, ExpandContext
from omni_trio.bridges.families import ArToImage, CfgExpand, CodecToWave, TalkerPromptLength, TextToSpeech
from omni_trio.bridges.families.image import ar_to_image, denoise_to_decode, encode_to_denoise
from omni_trio.bridges.families.qwen_omni import talker_to_code2wav_chunks, thinker_to_talker, v2_5_thinker_to_talker
from omni_trio.bridges.families.tts import talker_to_code2wav, text_to_speech
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput
from support_bridges import check_bridge, check_expand, context, snapshot

THINKERS = (thinker_to_talker, v2_5_thinker_to_talker, attrs.evolve(thinker_to_talker, last_row=True))


# --------------------------------------------------------------------------------------------------------------
# Thinker to talker


@attrs.frozen
class Moment:
    """What a thinker has put out at some moment of a session."""

    segment: int
    prompt: int
    tokens: int
    rows: int
    segment_end: bool = False


@attrs.frozen
class Thinker:
    """All that a thinker does in a session, step by step."""

    moments: tuple[Moment, ...]
    kind: str

    def data(self, at: Moment) -> dict[str, Any]:
        table = np.arange(at.rows * 2, dtype="float32").reshape(-1, 2)
        given = {"hidden_states.layer_0": table, "hidden_states.layer_24": table + 0.5, "latent": table}
        if self.kind == "tensor":
            given = {key: torch.from_numpy(value) for key, value in given.items()}
        return {"ids.prompt": list(range(at.prompt)), **given}


@st.composite
def thinkers(draw: st.DrawFn, *, segments: int, last_row: bool) -> Thinker:
    """A step gives the prompt's rows, some at a time, then a token each, with the row of the one before."""
    moments: list[Moment] = []
    prompt = tokens = rows = 0
    for segment in range(draw(st.integers(1, segments))):
        length = draw(st.integers(1, 5))
        prompt += length
        for part in draw(st.sampled_from([(length,), (1, length - 1)])):
            rows += part
            moments.append(Moment(segment, prompt, tokens, rows))
        replied = draw(st.integers(0, 5))
        for step in range(replied):
            tokens += 1
            rows += 1 if step or last_row else 0
            moments.append(Moment(segment, prompt, tokens, rows))
        moments[-1] = attrs.evolve(moments[-1], segment_end=True)
    return Thinker(tuple(moments), draw(st.sampled_from(["array", "tensor"])))


def joined(made: list[StageInput | None]) -> tuple[list[int], list[int], list[Any], bytes]:
    """The prompt, the reply and the rows that the talker was given, one input after the other."""
    prompt: list[int] = []
    reply: list[int] = []
    table = []
    for one in made:
        if one is None:
            continue
        info = one.data["additional_information"]
        if "thinker_result" in info:
            ids, new = info.get("prompt_token_ids", []), info["thinker_output_token_ids"]
            table += [np.asarray(info[key]) for key in ("prompt_embeds", "thinker_result") if key in info]
        else:
            ids = info["ids"].get("prompt", [])
            new = info["ids"]["all"][len(ids) :] if ids else info["ids"]["output"]
            embeds = np.asarray(info["embed"].get("prefill", info["embed"].get("decode")))
            np.testing.assert_array_equal(embeds + 0.5, np.asarray(info["hidden_states"]["output"]))
            table.append(embeds)
        assert bool(one.token_ids) == bool(ids)
        prompt += ids
        reply += new
    rows = np.concatenate(table) if table else np.zeros((0, 2))
    return prompt, reply, rows.shape, rows.tobytes()


def everything(thinker: Thinker) -> tuple[list[int], list[int], Any, bytes]:
    last = thinker.moments[-1]
    table = np.asarray(thinker.data(last)["latent"])
    return list(range(last.prompt)), list(range(last.tokens)), table.shape, table.tobytes()


def cases(segments: int) -> st.SearchStrategy[tuple[Any, Thinker]]:
    return st.sampled_from(THINKERS).flatmap(
        lambda bridge: st.tuples(st.just(bridge), thinkers(segments=segments, last_row=bridge.last_row))
    )


@settings(deadline=None)
@given(cases(1), st.data())
def test_pieces_of_a_reply_add_up_to_the_whole(case, data):
    bridge, thinker = case
    seen = data.draw(st.lists(st.sampled_from(thinker.moments[:-1] or thinker.moments), unique=True))
    moments = [*sorted(seen, key=thinker.moments.index), thinker.moments[-1]]
    contexts = [
        context(token_ids=range(at.tokens), data=thinker.data(at), finished=index == len(moments) - 1)
        for index, at in enumerate(moments)
    ]
    whole = check_bridge(bridge, contexts[-1:])
    assert joined(check_bridge(bridge, contexts)) == joined(whole) == everything(thinker)


@settings(deadline=None)
@given(cases(4), st.booleans(), st.booleans(), st.data())
def test_segments_add_up_to_the_session_whenever_the_bridge_gets_to_run(case, pieces, told, data):
    bridge, thinker = case
    contexts = []
    expected = []
    ahead = 0
    for index, at in enumerate(thinker.moments):
        last = index == len(thinker.moments) - 1
        if not (at.segment_end or last or pieces):
            continue
        # Tokens are those of the moment; data may have run ahead, and the prompt with it.
        ahead = data.draw(st.integers(max(index, ahead), len(thinker.moments) - 1), label="data as of")
        later = thinker.moments[ahead]
        contexts.append(
            context(
                token_ids=range(at.tokens),
                data=thinker.data(later) | ({"meta.new_prompt_len_snapshot": later.prompt - at.prompt} if told else {}),
                finished=last,
                segment=at.segment,
                segment_end=at.segment_end,
            )
        )
        expected.append(at)
    made = check_bridge(bridge, contexts)
    assert joined(made) == everything(thinker)
    # And no segment got anything of the next one, where the source told how much of that there was.
    for count, at in enumerate(expected, 1):
        if at.segment_end and told:
            prompt, reply, shape, _ = joined(made[:count])
            assert (len(prompt), len(reply), shape[0]) == (at.prompt, at.tokens, at.rows)


# --------------------------------------------------------------------------------------------------------------
# Talker to vocoder

CODES = st.sampled_from([-1, 0, 0, 1, 2, 3, 9, 10, 11])


@settings(deadline=None)
@given(
    st.lists(st.tuples(CODES, CODES), max_size=30),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
    st.builds(
        CodecToWave,
        codes=st.sampled_from(["codes.audio", None]),
        codebooks=st.just(2),
        codebook_size=st.just(10),
        drop_zeros=st.booleans(),
        chunk=st.integers(0, 4),
        first_chunk=st.integers(0, 2),
        left_context=st.integers(0, 4),
        reference=st.sampled_from([None, "codes.ref"]),
    ),
)
def test_frames_add_up_and_each_input_carries_on_from_the_last(rows, cuts, bridge):
    reference = [(7, 7), (8, 8)] if bridge.reference else []
    cuts = [(min(at, len(rows)), end) for at, end in sorted(cuts)] + [(len(rows), False)]
    segment = 0
    contexts = []
    for index, (at, end) in enumerate(cuts):
        contexts.append(
            context(
                token_ids=[code for row in rows[:at] for code in row],
                data={"codes.audio": np.array(rows[:at]).reshape(-1, 2), "codes.ref": reference},
                finished=index == len(cuts) - 1,
                segment=segment,
                segment_end=end and bridge.codes is not None,  # special tokens may cut a frame of tokens in two
            )
        )
        segment += end and bridge.codes is not None

    def sent(made: list[StageInput | None]) -> list[tuple[int, ...]]:
        so_far = list(reference)
        for one in filter(None, made):
            frames = list(zip(*np.array(one.token_ids).reshape(2, -1).tolist(), strict=True))
            before = one.data["additional_information"]["meta"]["left_context_size"]
            assert frames[:before] == so_far[len(so_far) - before :]
            first = len(so_far) == len(reference)
            assert before == (len(reference) if first else min(bridge.left_context, len(so_far)))
            assert len(frames) > before
            so_far += frames[before:]
        return so_far

    made = check_bridge(bridge, contexts)
    assert sent(made) == sent(check_bridge(bridge, contexts[-1:]))
    for given_context, one in zip(contexts, made, strict=True):
        if one is not None and not (given_context.finished or given_context.segment_end):
            assert bridge.chunk  # only chunks go before their time


# --------------------------------------------------------------------------------------------------------------
# Words to a talker


@settings(deadline=None)
@given(
    st.text(alphabet="ab.! \n。3", max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=6),
    st.builds(TextToSpeech, shortest=st.integers(1, 10)),
)
def test_words_add_up(text, cuts, bridge):
    contexts = [
        *(context(text=text[:at], finished=False, segment_end=end) for at, end in sorted(cuts)),
        context(text=text),
    ]
    spoken = [one.text for one in check_bridge(bridge, contexts) if one is not None]
    (whole,) = check_bridge(bridge, contexts[-1:])
    assert "".join(spoken) == ("" if whole is None else whole.text) == text.rstrip()
    assert all(part.strip() for part in spoken)


# --------------------------------------------------------------------------------------------------------------
# The length of a talker's prompt


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 5]), max_size=30), st.integers(0, 5))
def test_the_length_is_that_of_the_turns(ids, reply):
    length = TalkerPromptLength(start_of_turn=1, user=2, assistant=3, assistant_tokens=9)
    bounds = [*(index for index, token in enumerate(ids) if token == 1), len(ids)]
    turns = [ids[start:end] for start, end in pairwise(bounds)]
    if turns:
        turns[-1] = turns[-1] + [0] * reply if len(turns[-1]) > 1 else turns[-1]
    expected = sum(len(turn) for turn in turns if turn[1:2] == [2])
    expected += 9 if turns and turns[-1][1:2] == [3] else 0
    assert length.of(ids, reply) == max(1, expected)
    if not reply:
        assert length(StageInput(token_ids=tuple(ids))) == max(1, expected)


# --------------------------------------------------------------------------------------------------------------
# Totality

GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3000)
    | st.text(max_size=3)
    | st.sampled_from(
        [
            *(np.zeros((2, 3)), np.zeros((2, 16), "int64"), np.int64(3), np.zeros(()), np.zeros((0, 16), "int64")),
            *(np.array([[1] * 16]), torch.zeros(2, 3), torch.zeros(()), torch.ones((1, 16), dtype=torch.int64)),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["audio", "prompt", "x"]), inner),
    max_leaves=6,
)
KEYS = (
    *("ids.prompt", "ids", "hidden_states", "hidden_states.layer_0", "hidden_states.layer_24", "latent", "codes"),
    *("codes.audio", "codes.ref", "meta.ref_code_len", "hidden_states.output", "prompt_embeds_mask", "latents"),
    *("meta.new_prompt_len_snapshot", "embed.tts_bos", "height", "width", "speaker", "modalities", "negative_prompt"),
    *("multi_modal_data", "additional_information"),
)
ANYTHING = st.dictionaries(st.sampled_from(KEYS), GARBAGE, max_size=5)
PROMPTS = st.builds(
    lambda form, data: StageInput(**form, data=data),
    st.sampled_from(
        [
            {"text": "x"},
            {"token_ids": (1, 2)},
            {"embeds": np.ones((2, 3))},
            {"messages": ({"role": "user", "content": [{"type": "image"}, "a"]}, {"role": "user"})},
            {"batch": (StageInput(text="a"),)},
        ]
    ),
    ANYTHING,
)
BRIDGES = (
    *THINKERS,
    *(talker_to_code2wav_chunks, talker_to_code2wav, text_to_speech, ar_to_image, encode_to_denoise, denoise_to_decode),
    *(ArToImage(made=made) for made in ("text", "tokens", "embeds")),
    CodecToWave(codes=None, chunk=2, first_chunk=1, left_context=3),
)


@pytest.mark.parametrize("bridge", BRIDGES, ids=lambda bridge: type(bridge).__name__)
@settings(deadline=None)
@given(st.lists(ANYTHING, min_size=1, max_size=3), PROMPTS, ANYTHING, st.booleans(), st.data())
def test_whatever_there_is_it_is_handed_on_waited_for_or_refused(bridge, parts, prompt, others, session, data):
    tokens = data.draw(st.lists(st.integers(-1, 9000), max_size=20))
    text = data.draw(st.text(max_size=12))
    other = CompanionOutput(request_id="r.x", token_ids=(1,), text="no", data=others, finish_reason="stop")
    contexts = [
        context(
            prompt=prompt,
            token_ids=tokens[: len(tokens) * index // len(parts)],
            text=text[: len(text) * index // len(parts)],
            data={key: value for part in parts[:index] for key, value in part.items()},
            finished=index == len(parts),
            segment=index if session else 0,
            segment_end=session,
            companions={"cfg_text": other} if others else {},
            requires_multimodal_data=True,
        )
        for index in range(1, len(parts) + 1)
    ]
    with contextlib.suppress(InvalidRequest):
        check_bridge(bridge, contexts, travels=False)


@settings(deadline=None)
@given(PROMPTS, st.none() | st.fixed_dictionaries({"extra_args": GARBAGE}), st.frozensets(st.integers(1, 2)))
def test_any_prompt_has_its_companions_or_is_refused(prompt, params, image_tokens):
    expand = CfgExpand(image_tokens=image_tokens, image_placeholder="<i>", sampling={"max_tokens": 1})
    with contextlib.suppress(InvalidRequest):
        companions = check_expand(expand, ExpandContext(request_id="r", prompt=prompt, params=params))
        assert [one.role for one in companions] in ([], ["cfg_text"], ["cfg_text", "cfg_img"])
        for one in companions:
            assert snapshot(one.sampling) == {"max_tokens": 1}
