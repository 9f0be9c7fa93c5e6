"""The bridges of model families: what they make of what, call by call, and over simulated stages (I14)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import attrs
import msgspec
import numpy as np
import pytest
import torch
import trio

from omni_trio.bridges import (
    BUILTIN,
    CompanionOutput,
    ExpandContext,
    resolve_bridge,
    resolve_expand,
    resolve_placeholder,
)
from omni_trio.bridges.families import ArToImage, CodecToWave, HandOver, TalkerPromptLength, TextToSpeech
from omni_trio.bridges.families.image import ar_to_image, bagel_expand, cfg_expand, denoise_to_decode, encode_to_denoise
from omni_trio.bridges.families.qwen_omni import (
    talker_prompt_length,
    talker_to_code2wav,
    talker_to_code2wav_chunks,
    thinker_to_talker,
    v2_5_talker_to_code2wav,
    v2_5_thinker_to_talker,
)
from omni_trio.bridges.families.tts import talker_to_code2wav as tts_to_code2wav
from omni_trio.bridges.families.tts import text_to_speech
from omni_trio.errors import BridgeFailed, InvalidRequest
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Finish, SimStage
from support import simulated, stage
from support_bridges import check_bridge, check_expand, context

START, SYSTEM, USER, ASSISTANT = 151644, 8948, 872, 77091
PROMPT = [START, USER, 5, 6, START, ASSISTANT]  # 4 of the user's, 9 for the assistant
FAMILIES = "omni_trio.bridges.families"


def rows(start, stop, *, width=3, dtype="float32"):
    """Rows that tell which they are."""
    return (np.arange(start, stop).reshape(-1, 1) + np.zeros((1, width))).astype(dtype)


def thought(prompt, first, last, **more):
    """The data of a thinker of Qwen3-Omni whose rows from `first` to `last` are there."""
    return {
        "ids.prompt": list(prompt),
        "hidden_states.layer_0": rows(first, last),
        "hidden_states.layer_24": rows(first + 100, last + 100),
        **more,
    }


def info(made):
    return made.data["additional_information"]


def one(bridge, **fields):
    (made,) = check_bridge(bridge, [context(**fields)])
    return made


# --------------------------------------------------------------------------------------------------------------
# All of them

NAMES = [
    *(f"{FAMILIES}.qwen_omni:{v}talker_to_code2wav{c}" for v in ("", "v2_5_") for c in ("", "_chunks")),
    *(f"{FAMILIES}.qwen_omni:{v}thinker_to_talker" for v in ("", "v2_5_")),
    *(f"{FAMILIES}.tts:{name}" for name in ("text_to_speech", "talker_to_code2wav", "talker_to_code2wav_chunks")),
    *(f"{FAMILIES}.image:{name}" for name in ("ar_to_image", "encode_to_denoise", "denoise_to_decode")),
]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_found_by_name_says_where_it_runs_and_can_be_compared(name):
    spec = resolve_bridge(name)
    assert spec == resolve_bridge(name)
    assert hash(spec) == hash(resolve_bridge(name))
    # Whatever copies arrays or goes through long lists is not for the trio thread.
    assert spec.run_in == ("inline" if spec.reads == {"text"} else "thread")
    assert spec.name.startswith(FAMILIES)


def test_importing_them_imports_no_array_library():
    names = sorted({name.partition(":")[0] for name in NAMES})
    program = f"import sys, {', '.join(names)}; print({{'numpy', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --------------------------------------------------------------------------------------------------------------
# Thinker to talker


def test_a_thinkers_work_goes_to_the_talker_in_one():
    made = one(thinker_to_talker, token_ids=(1, 2, 3), data=thought(PROMPT, 0, 8))
    assert made.token_ids == (0,) * 13
    told = info(made)
    assert told["ids"] == {"all": [*PROMPT, 1, 2, 3], "prompt": PROMPT}
    assert told["meta"] == {"finished": True}
    np.testing.assert_array_equal(told["embed"]["prefill"], rows(0, 8))
    np.testing.assert_array_equal(told["hidden_states"]["output"], rows(100, 108))
    assert set(told["embed"]) == {"prefill"}


def test_the_speaker_the_special_embeddings_and_the_media_go_along_once():
    image = np.ones((2, 2))
    prompt = StageInput(
        text="x",
        data={
            "additional_information": {"speaker": ["anna"]},
            "language": "de",
            "multi_modal_data": {"image": image},
        },
    )
    twice = np.concatenate([rows(7, 8), rows(7, 8)])
    first = thought(PROMPT, 0, 6, **{"embed.tts_bos": twice})
    made = check_bridge(
        thinker_to_talker,
        [
            context(prompt=prompt, token_ids=(1,), data=first, finished=False, requires_multimodal_data=True),
            context(prompt=prompt, token_ids=(1, 2), data={**first, **thought(PROMPT, 0, 7)},
                    requires_multimodal_data=True),
        ],
    )  # fmt: skip
    assert info(made[0])["speaker"] == ["anna"]
    assert info(made[0])["language"] == ["de"]
    np.testing.assert_array_equal(info(made[0])["embed"]["tts_bos"], rows(7, 8))
    np.testing.assert_array_equal(made[0].data["multi_modal_data"]["image"], image)
    assert set(info(made[1])) == {"ids", "meta", "embed", "hidden_states"}
    assert set(info(made[1])["embed"]) == {"decode"}
    assert set(made[1].data) == {"additional_information"}


def test_nested_data_and_layers_by_number_are_found():
    nested = {
        "ids": {"prompt": np.array(PROMPT)},
        "hidden_states": {"layers": {0: rows(0, 6), 24: rows(100, 106)}},
        "embed": {"tts_pad": rows(1, 2)},
    }
    told = info(one(thinker_to_talker, data=nested))
    np.testing.assert_array_equal(told["hidden_states"]["output"], rows(100, 106))
    np.testing.assert_array_equal(told["embed"]["tts_pad"], rows(1, 2))


def test_the_prompt_goes_first_when_it_is_complete_then_what_is_new():
    data = [thought(PROMPT, 0, count) for count in (4, 6, 6, 7, 9)]
    tokens = [(), (1,), (1,), (1, 2), (1, 2, 3, 4)]
    last = len(data) - 1
    made = check_bridge(
        thinker_to_talker,
        [context(token_ids=tokens[n], data=data[n], finished=n == last) for n in range(last + 1)],
    )
    assert made[0] is None  # two of the prompt's rows are missing
    assert info(made[1])["ids"] == {"all": [*PROMPT, 1], "prompt": PROMPT}
    assert made[2] is None
    assert info(made[3])["ids"] == {"output": [2]}
    np.testing.assert_array_equal(info(made[3])["embed"]["decode"], rows(6, 7))
    assert made[3].token_ids is None
    assert info(made[4])["ids"] == {"output": [3, 4]}
    np.testing.assert_array_equal(info(made[4])["hidden_states"]["output"], rows(107, 109))
    assert [info(one)["meta"]["finished"] for one in made if one] == [False, False, True]


def test_in_a_session_each_segment_goes_by_itself_and_the_next_ones_prompt_waits():
    second = [START, USER, 9, START, ASSISTANT]
    # Segment 0: 6 of prompt, 3 of reply, 8 rows; segment 1: 5 of prompt, 2 of reply, 6 rows.
    ahead = thought([*PROMPT, *second], 0, 8, **{"meta.new_prompt_len_snapshot": 5})
    made = check_bridge(
        thinker_to_talker,
        [
            context(token_ids=(1, 2, 3), data=ahead, finished=False, segment=0, segment_end=True),
            context(token_ids=(1, 2, 3, 4, 5), data=thought([*PROMPT, *second], 0, 14), segment=1),
        ],
    )
    assert info(made[0])["ids"] == {"all": [*PROMPT, 1, 2, 3], "prompt": PROMPT}
    np.testing.assert_array_equal(info(made[0])["embed"]["prefill"], rows(0, 8))
    assert info(made[1])["ids"] == {"all": [*second, 4, 5], "prompt": second}
    np.testing.assert_array_equal(info(made[1])["embed"]["prefill"], rows(8, 14))
    assert [len(one.token_ids) for one in made] == [13, 12]


def test_rows_of_the_next_segment_wait_for_it():
    second = [7, 8]
    late = thought([*PROMPT, *second], 0, 11, **{"meta.new_prompt_len_snapshot": 2})  # 8 + 2 of prompt + 1
    made = check_bridge(
        thinker_to_talker,
        [
            context(token_ids=(1, 2, 3), data=late, finished=False, segment=0, segment_end=True),
            context(token_ids=(1, 2, 3, 4, 5), data=thought([*PROMPT, *second], 0, 11), segment=1),
        ],
    )
    np.testing.assert_array_equal(info(made[0])["embed"]["prefill"], rows(0, 8))
    np.testing.assert_array_equal(info(made[1])["embed"]["prefill"], rows(8, 11))


def test_a_source_whose_last_tokens_have_rows_says_so():
    bridge = attrs.evolve(thinker_to_talker, last_row=True)
    late = thought([*PROMPT, 7], 0, 10, **{"meta.new_prompt_len_snapshot": 1})
    (made,) = check_bridge(bridge, [context(token_ids=(1, 2), data=late, finished=False, segment_end=True)])
    np.testing.assert_array_equal(info(made)["embed"]["prefill"], rows(0, 8))


@pytest.mark.parametrize("bridge", [thinker_to_talker, v2_5_thinker_to_talker])
def test_an_empty_reply_and_one_that_ran_into_its_length_are_replies(bridge):
    data = thought(PROMPT, 0, 6, latent=rows(0, 6))
    assert one(bridge, data=data).token_ids
    assert one(bridge, data=data, token_ids=(1,), finish_reason="length").token_ids


def test_a_prompt_in_token_ids_need_not_be_told():
    data = {"hidden_states.layer_0": rows(0, 3), "hidden_states.layer_24": rows(0, 3)}
    made = one(thinker_to_talker, prompt=StageInput(token_ids=(7, 8)), token_ids=(1, 2), data=data)
    assert info(made)["ids"] == {"all": [7, 8, 1, 2], "prompt": [7, 8]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "token ids of its prompt"),
        ({"ids.prompt": PROMPT}, "gave no hidden states"),
        ({"ids.prompt": PROMPT, "hidden_states.layer_0": rows(0, 6)}, "gave no hidden states"),
        (thought(PROMPT, 0, 4), "for 4 tokens of a prompt of 6"),
        ({"ids.prompt": "abc"}, "must be token ids"),
        ({"ids.prompt": [1.5]}, "must be token ids"),
        (thought(PROMPT, 0, 6) | {"hidden_states.layer_0": np.zeros(3)}, r"not shape \[3\]"),
        (thought(PROMPT, 0, 6) | {"hidden_states.layer_0": [[1.0]]}, "not list"),
    ],
)
def test_what_a_thinker_left_out_is_told_at_its_end(data, says):
    with pytest.raises(InvalidRequest, match=says):
        one(thinker_to_talker, token_ids=(1,), data=data)


@pytest.mark.parametrize("data", [{}, {"ids.prompt": PROMPT}, thought(PROMPT, 0, 4)])
def test_what_may_still_come_is_waited_for(data):
    assert one(thinker_to_talker, token_ids=(1,), data=data, finished=False) is None


def test_rows_and_frames_that_do_not_add_up_are_told():
    nested = {"ids": {"prompt": PROMPT}}
    contexts = [
        context(
            token_ids=(1,) * count,
            finished=count == 2,
            data=nested | {"hidden_states": {"layers": {0: array, 24: array}}},
        )
        for count, array in ((1, rows(0, 6)), (2, rows(6, 7)))
    ]
    with pytest.raises(InvalidRequest, match="had given 6 rows of hidden states, and now there are 1"):
        check_bridge(thinker_to_talker, contexts)
    contexts = [context(data={"codes": {"audio": frames(*range(count))}}, finished=count == 1) for count in (3, 1)]
    with pytest.raises(InvalidRequest, match="had 3 parts, and now there are 1"):
        check_bridge(talker_to_code2wav, contexts)


def test_nothing_at_all_is_nothing():
    assert one(thinker_to_talker, prompt=StageInput(token_ids=())) is None


def test_tensors_stay_tensors_bit_for_bit():
    made = one(
        thinker_to_talker,
        token_ids=(1,),
        data=thought(PROMPT, 0, 6)
        | {f"hidden_states.layer_{n}": torch.arange(18).reshape(6, 3).bfloat16() for n in (0, 24)},
    )
    hidden = info(made)["hidden_states"]["output"]
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(hidden, torch.arange(18).reshape(6, 3).bfloat16())


def test_data_that_travels_by_connector_is_left_to_it():
    made = one(attrs.evolve(thinker_to_talker, inline=False), token_ids=(1,), data=thought(PROMPT, 0, 6))
    assert set(info(made)) == {"ids", "meta"}
    assert made.token_ids == (0,) * 13


@pytest.mark.parametrize("array", [rows(0, 8, dtype="float16"), torch.from_numpy(rows(0, 8)).bfloat16()])
def test_qwen2_5_gets_prompt_and_reply_apart_in_32_bits(array):
    made = one(v2_5_thinker_to_talker, token_ids=(1, 2, 3), data={"ids.prompt": PROMPT, "latent": array})
    assert made.token_ids == (8293, *(8292,) * 6, 8294)
    told = info(made)
    assert told["prompt_token_ids"] == PROMPT
    assert told["thinker_output_token_ids"] == [1, 2, 3]
    assert (told["prompt_embeds_shape"], told["thinker_result_shape"]) == ([6, 3], [2, 3])
    np.testing.assert_array_equal(np.asarray(told["prompt_embeds"]), rows(0, 6))
    np.testing.assert_array_equal(np.asarray(told["thinker_result"]), rows(6, 8))
    assert str(told["thinker_result"].dtype).endswith("float32")


# --------------------------------------------------------------------------------------------------------------
# The length of the talker's prompt


@pytest.mark.parametrize(
    ("ids", "length"),
    [
        (PROMPT, 4 + 9),
        ([START, SYSTEM, 1, 2, *PROMPT], 4 + 9),
        ([1, 2, *PROMPT], 4 + 9),  # what stands before the first turn is nobody's
        ([START, ASSISTANT, 1, START, USER, 2], 3),  # only a last turn of the assistant counts
        ([START, USER, 1, START, 99, 1, 2], 3),
        ([START, USER, 1, START], 3),  # a start that nothing follows
        ([START, ASSISTANT, START], 1),
        ([START], 1),
        ([1, 2, 3], 1),
        ([], 1),
    ],
)
def test_the_length_of_the_talkers_prompt(ids, length):
    assert talker_prompt_length(StageInput(token_ids=tuple(ids))) == length


def test_other_templates_are_fields():
    mine = TalkerPromptLength(start_of_turn=1, user=2, assistant=3, assistant_tokens=5)
    assert mine(StageInput(token_ids=(1, 2, 0, 1, 3))) == 8
    assert resolve_placeholder(f"{FAMILIES}.qwen_omni:talker_prompt_length") is talker_prompt_length
    with pytest.raises(ValueError, match="assistant_tokens: expected a whole number"):
        TalkerPromptLength(assistant_tokens=-1)


def test_a_reply_belongs_to_the_last_turn():
    assert talker_prompt_length.of([START, USER, 1], reply=4) == 7
    assert talker_prompt_length.of(PROMPT, reply=4) == 13


def test_the_length_needs_token_ids():
    with pytest.raises(InvalidRequest, match="in token ids only"):
        talker_prompt_length(StageInput(text="hi"))


# --------------------------------------------------------------------------------------------------------------
# Talker to vocoder


def frames(*firsts, size=16):
    return np.array([[first, *range(1, size)] for first in firsts]).reshape(-1, size)


def spoken(made, size=16):
    """The new frames, and those before them."""
    table = np.array(made.token_ids).reshape(size, -1).T.tolist()
    before = info(made)["meta"]["left_context_size"]
    return [frame[0] for frame in table[before:]], [frame[0] for frame in table[:before]]


def test_frames_go_codebook_after_codebook():
    made = one(talker_to_code2wav, data={"codes.audio": frames(5, 6, 7)})
    assert made.token_ids[:6] == (5, 6, 7, 1, 1, 1)
    assert info(made)["meta"] == {"left_context_size": 0, "finished": True}
    assert spoken(made) == ([5, 6, 7], [])


@pytest.mark.parametrize("kind", ["array", "tensor", "list", "flat", "nested"])
def test_frames_may_come_in_any_of_these_forms(kind):
    array = frames(5, 6)
    given = {"tensor": torch.from_numpy(array), "list": array.tolist(), "flat": array.reshape(-1)}.get(kind, array)
    data = {"codes": {"audio": given}} if kind == "nested" else {"codes.audio": given}
    assert spoken(one(talker_to_code2wav, data=data)) == ([5, 6], [])


def test_special_tokens_padding_and_zeros_are_left_out():
    array = np.concatenate([np.zeros((2, 16), int), frames(2149, 5, -1, 6, 2150), np.zeros((1, 16), int)])
    assert spoken(one(talker_to_code2wav, data={"codes.audio": array})) == ([5, 6], [])


def test_nothing_makes_nothing():
    for data in ({}, {"codes.audio": frames()}, {"codes.audio": frames(2150)}):
        assert one(talker_to_code2wav, data=data) is None
        assert one(talker_to_code2wav_chunks, data=data) is None


def pieces(bridge, counts, **fields):
    """Run over what there is of frames 1, 2, ... at each of these counts; the last one ends it."""
    return check_bridge(
        bridge,
        [
            context(data={"codes.audio": frames(*range(1, count + 1))}, finished=n == len(counts) - 1, **fields)
            for n, count in enumerate(counts)
        ],
    )


def test_chunks_go_when_they_are_full_with_frames_before_them():
    bridge = CodecToWave(chunk=3, left_context=2)
    made = pieces(bridge, [1, 3, 4, 8, 8, 10])
    assert [one and spoken(one) for one in made] == [
        None,
        ([1, 2, 3], []),
        None,
        ([4, 5, 6], [2, 3]),
        None,
        ([7, 8, 9, 10], [5, 6]),  # what is left, with what it has become a chunk of
    ]
    assert [info(one)["meta"]["finished"] for one in made if one] == [False, False, True]


def test_several_chunks_go_together():
    assert spoken(pieces(CodecToWave(chunk=3, left_context=9), [7, 7])[0]) == ([1, 2, 3, 4, 5, 6], [])


def test_the_first_chunk_may_be_smaller():
    made = pieces(CodecToWave(chunk=4, first_chunk=1, left_context=4), [1, 4, 5, 9, 9])
    assert [one and spoken(one) for one in made] == [
        ([1], []),
        None,
        ([2, 3, 4, 5], [1]),
        ([6, 7, 8, 9], [2, 3, 4, 5]),
        None,
    ]


def test_the_familys_chunks_are_of_two_seconds():
    made = pieces(talker_to_code2wav_chunks, [24, 25, 50, 60])
    assert [one and len(spoken(one)[0]) for one in made] == [None, 25, 25, 10]
    assert [one and len(spoken(one)[1]) for one in made] == [None, 0, 25, 25]


def test_a_segments_end_leaves_nothing_behind_and_chunks_begin_anew():
    bridge = CodecToWave(chunk=3, left_context=1)
    contexts = [
        context(data={"codes.audio": frames(*range(1, count + 1))}, finished=last, segment=segment, segment_end=end)
        for count, segment, end, last in [(4, 0, False, False), (5, 0, True, False), (7, 1, False, False), (8, 1, 0, 1)]
    ]
    contexts = [msgspec.structs.replace(one, finished=bool(one.finished)) for one in contexts]
    made = check_bridge(bridge, contexts)
    assert [one and spoken(one) for one in made] == [([1, 2, 3], []), ([4, 5], [3]), None, ([6, 7, 8], [5])]


def test_qwen2_5s_tokens_are_its_frames():
    made = one(v2_5_talker_to_code2wav, token_ids=(8293, 5, 0, 6, 8294))
    assert made.token_ids == (5, 0, 6)
    assert one(v2_5_talker_to_code2wav, token_ids=(8294,)) is None


def test_tokens_may_be_frames_of_several_codebooks():
    bridge = CodecToWave(codes=None, codebooks=2, codebook_size=100, drop_zeros=False, chunk=1)
    all_ids = (1, 2, 3, 4, 100, 5)
    contexts = [context(token_ids=all_ids[:count], finished=count == 6) for count in (1, 3, 5, 6)]
    made = check_bridge(bridge, contexts)
    assert [one and one.token_ids for one in made] == [None, (1, 2), (3, 4), None]  # half a frame is none


def test_a_voice_to_be_imitated_goes_first_and_once():
    data = {"codes.audio": frames(1, 2), "codes.ref": frames(8, 9, 0), "meta.ref_code_len": np.array([2])}
    made = one(tts_to_code2wav, data=data, prompt=StageInput(text="x", data={"speaker": "anna"}))
    assert spoken(made) == ([1, 2], [8, 9])
    assert info(made)["speaker"] == ["anna"]
    chunked = attrs.evolve(tts_to_code2wav, chunk=2, left_context=3)
    first = {**data, "codes.ref": [torch.from_numpy(frames(8, 9))], "meta.ref_code_len": None}
    made = check_bridge(
        chunked, [context(data=first, finished=False), context(data={**first, "codes.audio": frames(1, 2, 3)})]
    )
    assert [spoken(one) for one in made] == [([1, 2], [8, 9]), ([3], [9, 1, 2])]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"codes.audio": 3}, "must be an array of codes, not int"),
        ({"codes.audio": np.zeros((), int)}, "must be an array of codes"),
        ({"codes.audio": np.ones((2, 4), int)}, "must have 16 codes in each frame"),
        ({"codes.audio": np.ones((2, 16))}, "of whole numbers"),
        ({"codes.audio": frames(1), "codes.ref": [1, 2, 3]}, "ends within a frame"),
    ],
)
def test_what_are_no_frames_is_refused(data, says):
    with pytest.raises(InvalidRequest, match=says):
        one(tts_to_code2wav, data=data)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: attrs.evolve(v2_5_thinker_to_talker, dtype="int8"),
            "dtype: expected one of None, 'float32', 'float16'",
        ),
        (lambda: ArToImage(made="words"), "made: expected one of 'prompt', 'text', 'tokens', 'embeds', not 'words'"),
    ],
)
def test_choices_are_checked_when_it_is_made(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("fields", [{"chunk": -1}, {"codebooks": 0}, {"left_context": 1.5}, {"codebook_size": True}])
def test_sizes_are_checked_when_it_is_made(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))}: expected a whole number"):
        CodecToWave(**fields)


# --------------------------------------------------------------------------------------------------------------
# Words to a talker


def test_words_are_spoken_sentence_by_sentence():
    texts = ["Hel", "Hello. How", "Hello. How are you? 3.5", "Hello. How are you? 3.5 or so "]
    last = len(texts) - 1
    made = check_bridge(text_to_speech, [context(text=text, finished=n == last) for n, text in enumerate(texts)])
    assert [one and one.text for one in made] == [None, "Hello.", " How are you?", " 3.5 or so"]
    assert info(made[1])["text"] == ["Hello."]


def test_short_sentences_wait_for_company_but_not_beyond_the_end():
    bridge = TextToSpeech(shortest=8)
    texts = ["Oh. ", "Oh. Well. And ", "Oh. Well. And "]
    made = check_bridge(bridge, [context(text=text, finished=n == 2) for n, text in enumerate(texts)])
    assert [one and one.text for one in made] == [None, "Oh. Well.", " And"]
    assert one(bridge, text="Oh.").text == "Oh."


def test_a_segments_end_is_a_sentences_end_and_white_space_is_not_spoken():
    contexts = [
        context(text="a b ", finished=False, segment_end=True),
        context(text="a b \n ", finished=False, segment=1, segment_end=True),
        context(text="a b \n c", segment=2),
    ]
    assert [one and one.text for one in check_bridge(text_to_speech, contexts)] == ["a b", None, " \n c"]


def test_how_to_speak_goes_along():
    prompt = StageInput(text="x", data={"instruct": "softly", "task_type": ["CustomVoice"], "other": 1})
    told = info(one(text_to_speech, text="Hi", prompt=prompt))
    assert told == {"text": ["Hi"], "instruct": ["softly"], "task_type": ["CustomVoice"]}


# --------------------------------------------------------------------------------------------------------------
# To an image

PICTURE = np.ones((4, 4, 3), "uint8")


def companion(**fields):
    usual = {"request_id": "r.cfg_text", "token_ids": (), "text": "", "data": {}, "finish_reason": "stop"}
    return CompanionOutput(**{**usual, **fields})


def test_the_users_own_prompt_goes_to_the_stage_with_its_settings_but_without_its_images():
    prompt = StageInput(text="a cat", data={"height": 64, "multi_modal_data": {"image": PICTURE}, "secret": 1})
    made = one(ar_to_image, prompt=prompt, finished=False)  # as soon as the KV cache can be had
    assert (made.text, made.data) == ("a cat", {"height": 64})


def test_images_go_along_where_the_stage_requires_them():
    prompt = StageInput(token_ids=(1, 2), data={"multi_modal_data": {"image": [PICTURE]}})
    made = one(ar_to_image, prompt=prompt, requires_multimodal_data=True)
    assert made.token_ids == (1, 2)
    np.testing.assert_array_equal(made.data["multi_modal_data"]["image"][0], PICTURE)


def test_a_batch_goes_as_a_batch():
    prompt = StageInput(batch=(StageInput(text="a", data={"seed": 1}), StageInput(embeds=np.ones((2, 3)))))
    made = one(ar_to_image, prompt=prompt)
    assert [(item.text, item.data) for item in made.batch] == [("a", {"seed": 1}), (None, {})]
    assert made.batch[1].embeds.shape == (2, 3)


def test_what_cannot_be_copied_is_refused():
    prompt = StageInput(text="x", data={"multi_modal_data": {"image": (part for part in "abc")}})
    with pytest.raises(InvalidRequest, match="type generator can not be copied"):
        one(ar_to_image, prompt=prompt, requires_multimodal_data=True)


def test_words_and_tokens_of_a_model_and_its_companions():
    bridge = attrs.evolve(ar_to_image, made="text")
    branches = {"cfg_text": companion(text="blurry", token_ids=(9, 1)), "other": companion(text="sky")}
    made = one(bridge, text="a red cat", companions=branches)
    assert (made.text, made.data) == ("a red cat", {"negative_prompt": "blurry", "other": "sky"})
    tokens = attrs.evolve(ar_to_image, made="tokens", drop={1})
    made = one(tokens, token_ids=(1, 2, 3, 1), companions={"cfg_text": branches["cfg_text"]})
    assert (made.token_ids, made.data) == ((2, 3), {"negative_prompt_token_ids": (9,)})


@pytest.mark.parametrize("made", ["text", "tokens", "embeds"])
def test_a_model_that_is_not_done_is_waited_for(made):
    data = {"hidden_states.output": rows(0, 2)}
    assert one(attrs.evolve(ar_to_image, made=made), text="a", token_ids=(1,), data=data, finished=False) is None


@pytest.mark.parametrize("made", ["text", "tokens"])
def test_a_model_that_made_nothing_makes_no_image(made):
    assert one(attrs.evolve(ar_to_image, made=made)) is None


EMBEDS = attrs.evolve(ar_to_image, made="embeds")


def test_embeddings_with_masks_and_negative_branches():
    data = {"hidden_states.output": rows(0, 2), "prompt_embeds_mask": np.ones(2)}
    branch = companion(data={"hidden_states": {"output": rows(5, 6)}, "prompt_embeds_mask": np.ones(1)})
    made = one(EMBEDS, data=data, companions={"cfg_text": branch})
    np.testing.assert_array_equal(made.embeds, rows(0, 2))
    assert {key: value.shape for key, value in made.data.items()} == {
        "prompt_embeds_mask": (2,),
        "negative_prompt_embeds": (1, 3),
        "negative_prompt_embeds_mask": (1,),
    }


def test_embeddings_of_a_batch_are_dealt_out():
    data = {"hidden_states.output": np.stack([rows(0, 2), rows(2, 4)])}
    branch = companion(data={"hidden_states.output": np.stack([rows(4, 5), rows(5, 6)])})
    made = one(EMBEDS, data=data, companions={"cfg_text": branch}, prompt=StageInput(text="x", data={"seed": 3}))
    for index, item in enumerate(made.batch):
        np.testing.assert_array_equal(item.embeds, rows(2 * index, 2 * index + 2))
        np.testing.assert_array_equal(item.data["negative_prompt_embeds"], rows(4 + index, 5 + index))
        assert item.data["seed"] == 3


@pytest.mark.parametrize(
    ("data", "branch", "says"),
    [
        ({}, None, "of 'thinker' must be an array of shape"),
        ({"hidden_states.output": rows(0, 2)}, {}, "of the companion 'cfg_text' must be an array"),
        ({"hidden_states.output": rows(0, 2)}, {"hidden_states.output": rows(0, 2)[None]}, "one is a batch"),
        ({"hidden_states.output": rows(0, 4).reshape(2, 2, 3)}, {"hidden_states.output": rows(0, 2)[None]},
         "is for 1 prompts, and the embeddings are for 2"),
        ({"hidden_states.output": np.zeros((0, 2, 3))}, None, "no prompt in it"),
    ],
)  # fmt: skip
def test_embeddings_that_do_not_fit_are_refused(data, branch, says):
    companions = {} if branch is None else {"cfg_text": companion(data=branch)}
    with pytest.raises(InvalidRequest, match=says):
        one(EMBEDS, data=data, companions=companions)


def test_named_values_are_handed_over_when_the_source_is_done():
    data = {"latents": rows(0, 2), "height": 64, "width": 32, "output_type": "pil", "more": 1}
    assert one(denoise_to_decode, data=data, finished=False) is None
    made = one(denoise_to_decode, data=data)
    assert set(info(made)) == {"latents", "height", "width", "output_type"}
    nested = one(HandOver(required=("hidden_states.output",)), data={"hidden_states.output": rows(0, 1)})
    assert set(info(nested)["hidden_states"]) == {"output"}
    with pytest.raises(InvalidRequest, match="ended without context, context_mask, timesteps, img_shapes in its data"):
        one(encode_to_denoise, data=data)


# --------------------------------------------------------------------------------------------------------------
# Companions


def expanded(expand, prompt, params=None):
    made = check_expand(expand, ExpandContext(request_id="r", prompt=prompt, params=params))
    return {one.role: one for one in made}


def test_words_alone_are_guided_by_a_negative_prompt():
    for prompt in (StageInput(text="a cat"), StageInput(token_ids=(1, 2)), StageInput(embeds=rows(0, 2))):
        made = expanded(cfg_expand, prompt)
        assert list(made) == ["cfg_text"]
        assert made["cfg_text"].input == StageInput(text="")


@pytest.mark.parametrize(
    ("said", "params", "negative"),
    [
        ({}, None, "<|im_start|><|im_end|>"),
        ({"negative_prompt": ""}, {"extra_args": {"negative_prompt": "dull"}}, "dull"),
        ({"negative_prompt": "blurry"}, {"extra_args": {"negative_prompt": "dull"}}, "blurry"),
        ({}, {"extra_args": None}, "<|im_start|><|im_end|>"),
    ],
)
def test_where_the_negative_prompt_comes_from(said, params, negative):
    made = expanded(bagel_expand, StageInput(text="a cat", data={"modalities": ["image"], **said}), params)
    assert made["cfg_text"].input == StageInput(text=negative, data={"modalities": ["image"]})


def test_images_are_kept_beside_the_negative_prompt_and_left_out_of_another_companion():
    prompt = StageInput(text="<|fim_middle|>make it red", data={"multi_modal_data": {"img2img": PICTURE}, "seed": 1})
    made = expanded(bagel_expand, prompt)
    assert list(made) == ["cfg_text", "cfg_img"]
    assert made["cfg_text"].input.text == "<|fim_middle|><|im_start|><|im_end|>"
    np.testing.assert_array_equal(made["cfg_text"].input.data["multi_modal_data"]["img2img"], PICTURE)
    assert made["cfg_img"].input == StageInput(text="make it red")


def test_images_are_left_out_of_token_ids():
    prompt = StageInput(token_ids=(1, 77, 77, 2), data={"multi_modal_data": {"image": PICTURE}})
    made = expanded(attrs.evolve(cfg_expand, image_tokens={77}), prompt)
    assert made["cfg_img"].input.token_ids == (1, 2)
    with pytest.raises(InvalidRequest, match="in words or as messages"):
        expanded(cfg_expand, prompt)


def test_images_in_messages():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    words = {"type": "text", "text": "make it red"}
    made = expanded(
        attrs.evolve(cfg_expand, negative="blurry"),
        StageInput(messages=({"role": "system", "content": "s"}, {"role": "user", "content": [image, words]})),
    )
    negative = {"type": "text", "text": "blurry"}
    assert made["cfg_text"].input.messages == ({"role": "user", "content": [image, negative]},)
    assert made["cfg_img"].input.messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": [words]},
    )
    (alone,) = expanded(cfg_expand, StageInput(messages=({"role": "user", "content": "hi"},))).values()
    assert alone.input.messages == ({"role": "user", "content": ""},)


def test_nobody_is_guided_where_no_image_is_wanted():
    assert not expanded(cfg_expand, StageInput(text="hi", data={"modalities": ["text"]}))
    assert not expanded(cfg_expand, StageInput(batch=(StageInput(text="a"),)))
    assert expanded(cfg_expand, StageInput(text="hi", data={"modalities": "image"}))


def test_companions_have_parameters_of_their_own():
    expand = attrs.evolve(cfg_expand, sampling={"max_tokens": 1, "stop": ["x"]})
    made = expanded(expand, StageInput(text="hi", data={"multi_modal_data": {"image": PICTURE}}))
    assert [one.sampling for one in made.values()] == [{"max_tokens": 1, "stop": ["x"]}] * 2
    assert resolve_expand(f"{FAMILIES}.image:bagel_expand").function is bagel_expand


@pytest.mark.parametrize(
    ("data", "says"),
    [({"negative_prompt": 3}, "must be text, not int"), ({"modalities": 3}, "must be a list of names, not int")],
)
def test_companions_that_cannot_be_made_are_refused(data, says):
    with pytest.raises(InvalidRequest, match=says):
        cfg_expand(ExpandContext(request_id="r", prompt=StageInput(text="x", data=data), params=None))


# --------------------------------------------------------------------------------------------------------------
# Over simulated stages


def run_with_threads(function):
    """Run on the real clock: a virtual one would jump while a bridge is at work in its thread."""

    async def bounded():
        with trio.fail_after(60):
            await function()

    trio.run(bounded)


async def answered(stream):
    async for event in stream:
        if isinstance(event, Output) and event.stage == "vocoder" and event.segment_end:
            return


def noting(log, script):
    def play(request):
        log.append(request)
        return script(request) if callable(script) else script

    return SimStage(script=play)


def test_a_session_of_thinker_talker_and_vocoder():
    asked = {0: PROMPT, 1: [START, USER, 9, START, ASSISTANT]}
    turns = []
    at_row = 0

    def think(request):
        nonlocal at_row
        if not request.input.token_ids:
            return (Finish(),)
        prompt = asked[len(turns)]
        turns.append(prompt)
        first, middle, at_row = at_row, at_row + len(prompt), at_row + len(prompt) + 1
        return (
            Chunk((len(turns),), data=thought(prompt, first, middle)),
            Chunk((10,), data=thought([], middle, at_row)),
            Finish(),
        )

    talked, heard = [], []
    pipeline = Pipeline(
        [
            stage("thinker", final_output=True),
            stage("talker", bridge=thinker_to_talker),
            stage("vocoder", bridge=talker_to_code2wav),
        ]
    )

    async def main():
        talker = noting(
            talked,
            lambda request: (
                (Chunk((5, 2150), data={"codes.audio": frames(len(talked), 2150)}), Finish())
                if request.input.token_ids
                else (Finish(),)
            ),
        )
        async with simulated(pipeline, SimStage(script=think), talker, noting(heard, (Finish(),))) as runtime:
            async with runtime.open_stream() as stream:
                for segment in asked.values():
                    await stream.send(segment)
                    # One after the other: while a bridge is in its thread, its source's data can run ahead.
                    await answered(stream)
                await stream.aclose()
                await stream.result()

    run_with_threads(main)
    told = [info(request.input) for request in talked if request.input.data]
    assert [one["ids"]["prompt"] for one in told] == list(asked.values())
    assert [one["ids"]["all"][len(one["ids"]["prompt"]) :] for one in told] == [[1, 10], [2, 10]]
    together = np.concatenate([one["embed"]["prefill"] for one in told])
    np.testing.assert_array_equal(together, rows(0, at_row))
    assert [spoken(request.input)[0] for request in heard if request.input.token_ids] == [[1], [2]]


def test_a_refusal_names_the_stage_and_fails_that_request_alone():
    pipeline = Pipeline([stage("thinker"), stage("talker", bridge=thinker_to_talker)])

    async def main():
        async with simulated(pipeline, SimStage(script=lambda request: (Chunk((1,)), Finish()))) as runtime:
            with pytest.raises(InvalidRequest, match="gave no hidden states") as caught:
                await runtime.generate([1, 2], request_id="r")
            assert (caught.value.request_id, caught.value.stage) == ("r", "talker")

    run_with_threads(main)


def test_nothing_spoken_fails_the_request_by_name():
    pipeline = Pipeline([stage("talker"), stage("vocoder", bridge=talker_to_code2wav)])

    async def main():
        async with simulated(pipeline, SimStage(script=lambda request: (Finish(),))) as runtime:
            with pytest.raises(BridgeFailed, match="returned nothing"):
                await runtime.generate([1, 2])

    run_with_threads(main)


def test_a_guided_image():
    drawn = []
    pipeline = Pipeline(
        [stage("ar"), stage("dit", bridge=attrs.evolve(ar_to_image, made="text"))],
        expand=attrs.evolve(cfg_expand, negative="blurry"),
    )

    def write(request):
        return (Chunk((1,), text=f"<{request.input.text}>"), Finish())

    async def main():
        async with simulated(pipeline, SimStage(script=write), noting(drawn, (Finish(),))) as runtime:
            await runtime.generate("a cat")

    run_with_threads(main)
    (request,) = drawn
    assert (request.input.text, dict(request.input.data)) == ("<a cat>", {"negative_prompt": "<blurry>"})


def test_a_talker_that_is_fed_by_connector_gets_a_placeholder_of_the_right_length():
    given_to_talker = []
    pipeline = Pipeline([stage("thinker"), stage("talker", feed="connector", placeholder=talker_prompt_length)])

    async def main():
        sims = (SimStage(script=lambda request: (Finish(),)), noting(given_to_talker, (Finish(),)))
        async with simulated(pipeline, *sims) as runtime:
            await runtime.generate(PROMPT)

    run_with_threads(main)
    assert [request.input.token_ids for request in given_to_talker] == [(0,) * 13]


# --------------------------------------------------------------------------------------------------------------
# The checker itself finds what is wrong

CALLS = itertools.count()
CASES = {
    "it raised KeyError": lambda context: context.data["nothing"],
    "it returned int": lambda context: 3,
    "it changed what it was given": lambda context: context.data["list"].append(1),
    "a list that is not its own": lambda context: StageInput(data={"mine": context.data["list"]}),
    "an array whose memory": lambda context: StageInput(data={"mine": context.data["array"][1:]}),
    "it made something else": lambda context: StageInput(text=str(next(CALLS))),
}


@pytest.mark.parametrize("says", CASES)
def test_the_checker_finds(says):
    with pytest.raises(AssertionError, match=says):
        check_bridge(CASES[says], [context(data={"list": [1], "array": rows(0, 3)})])


@pytest.mark.parametrize("name", ["tokens", "text", "output"])
def test_the_built_in_ones_keep_the_contract_too(name):
    assert name in BUILTIN
    made = check_bridge(name, [context(token_ids=(1,), text="a", finished=False), context(token_ids=(1, 2), text="ab")])
    assert [one.token_ids for one in made] == ([None, None] if name == "text" else [(1,), (2,)])
