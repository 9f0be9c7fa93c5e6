"""The bridges to models that denoise, and the companions of guidance: what they make of what (I14)."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from bridge_samples import FAMILIES, info, one, rows
from omni_trio.bridges import (
    CompanionOutput,
    ExpandContext,
    resolve_expand,
)
from omni_trio.bridges.families import HandOver
from omni_trio.bridges.families.image import ar_to_image, bagel_expand, cfg_expand, denoise_to_decode, encode_to_denoise
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput
from support_bridges import check_expand

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
    prompt = StageInput(text="x", data={"seed": 3, "multi_modal_data": {"image": PICTURE}})
    made = one(EMBEDS, data=data, companions={"cfg_text": branch}, prompt=prompt, requires_multimodal_data=True)
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
