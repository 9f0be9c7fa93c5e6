"""The bridges to talkers and vocoders: what they make of what, call by call (I14)."""

from __future__ import annotations

import subprocess
import sys

import attrs
import msgspec
import numpy as np
import pytest
import torch

from bridge_samples import ASSISTANT, FAMILIES, PROMPT, START, SYSTEM, USER, frames, info, one, rows, spoken, thought
from omni_trio.bridges import (
    resolve_bridge,
    resolve_placeholder,
)
from omni_trio.bridges.families import ArToImage, CodecToWave, TalkerPromptLength, TextToSpeech
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
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput
from support_bridges import check_bridge, context

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


def test_at_the_end_there_is_no_next_segment_whatever_was_told_before():
    told = one(thinker_to_talker, token_ids=(1,), data=thought(PROMPT, 0, 6, **{"meta.new_prompt_len_snapshot": 5}))
    assert info(told)["ids"]["prompt"] == PROMPT


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
