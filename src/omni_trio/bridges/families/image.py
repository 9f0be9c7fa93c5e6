"""From a language model to a model that denoises, and the companions that guide it.

Roles, keys and the default negative prompt of `bagel_expand` are those of BAGEL; the keys of the hand-overs are those
of Qwen-Image where its encoder, transformer and decoder are stages of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec

from omni_trio.bridges._contract import BridgeContext, BridgeSpec, CompanionOutput, Reads
from omni_trio.bridges._declared import Companion, ExpandContext
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput

from ._common import copied, declared, find, mapping, multimodal, one_of

__all__ = ["ArToImage", "CfgExpand", "HandOver", "ar_to_image", "bagel_expand", "cfg_expand", "encode_to_denoise"]
__all__ += ["denoise_to_decode"]

Made: TypeAlias = Literal["prompt", "text", "tokens", "embeds"]

_DIFFUSION = ("height", "width", "seed", "num_inference_steps", "guidance_scale", "negative_prompt", "modalities")
_READS: Mapping[Made, tuple[Reads, ...]] = {"prompt": (), "text": ("text",), "tokens": ("tokens",), "embeds": ("data",)}


@attrs.frozen(kw_only=True)
class ArToImage:
    """A language model's work to a diffusion stage.

    With ``made = "prompt"`` the stage gets the user's own prompt, a batch too: the rest comes with the KV cache. Else
    it gets what the model made once that is complete, and for each companion what was made of it, under its own name.
    """

    made: Made = attrs.field(default="prompt", validator=one_of(*_READS))
    """What the prompt is: the user's, or the model's text, tokens or embeddings."""
    embeds: str = "hidden_states.output"
    """``made = "embeds"``: key of the embeddings, [tokens, hidden], or [batch, tokens, hidden] for a batch."""
    mask: str = "prompt_embeds_mask"
    """``made = "embeds"``: key of their mask, handed on where it is given."""
    drop: frozenset[int] = attrs.field(default=frozenset(), converter=frozenset)
    """``made = "tokens"``: special tokens to leave out."""
    names: Mapping[str, str] = mapping()
    """By role of a companion: the name of what it is to the stage. Other roles are their own name."""
    user_keys: tuple[str, ...] = _DIFFUSION
    """What is taken over from the user's `StageInput.data`."""

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        return declared(self, _READS[self.made], "thread")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the stage's input; None where the model is not done or made nothing.

        Raises:
            InvalidRequest: embeddings are missing or of another form, or something of the user's can not be copied.
        """
        if self.made == "prompt":
            return self._original(context.prompt, context.requires_multimodal_data)
        if not context.finished:
            return None
        data = self._data(context.prompt, context.requires_multimodal_data)
        if self.made == "text":
            data |= {self._name(role): one.text for role, one in context.companions.items()}
            return StageInput(text=context.text, data=data) if context.text else None
        if self.made == "tokens":
            data |= {f"{self._name(role)}_token_ids": self._kept(one) for role, one in context.companions.items()}
            tokens = self._kept(context)
            return StageInput(token_ids=tokens, data=data) if tokens else None
        return self._embedded(context, data)

    def _name(self, role: str) -> str:
        return self.names.get(role, role)

    def _kept(self, made: BridgeContext | CompanionOutput) -> tuple[int, ...]:
        return tuple(token for token in made.token_ids if token not in self.drop)

    def _data(self, prompt: StageInput, with_media: bool) -> dict[str, Any]:
        data = {key: copied(prompt.data[key]) for key in self.user_keys if prompt.data.get(key) is not None}
        return data | multimodal(prompt) if with_media else data

    def _original(self, prompt: StageInput, with_media: bool) -> StageInput:
        batch = prompt.batch and tuple(self._original(one, with_media) for one in prompt.batch)
        return msgspec.structs.replace(
            prompt,
            messages=copied(prompt.messages),
            embeds=copied(prompt.embeds),
            data=self._data(prompt, with_media),
            batch=batch,
        )

    def _embedded(self, context: BridgeContext, data: dict[str, Any]) -> StageInput:
        embeds, mask = self._arrays(context.data, repr(context.source))
        size = int(embeds.shape[0]) if len(embeds.shape) == 3 else None
        parts: dict[str, Any] = {} if mask is None else {"prompt_embeds_mask": mask}
        for role, one in context.companions.items():
            name = self._name(role)
            branch, branch_mask = self._arrays(one.data, f"the companion {role!r}")
            if len(branch.shape) != len(embeds.shape):
                raise InvalidRequest(
                    f"data[{self.embeds!r}] of the companion {role!r} and of {context.source!r}: one is a batch, "
                    "the other is none"
                )
            parts[f"{name}_embeds"] = branch
            if branch_mask is not None:
                parts[f"{name}_embeds_mask"] = branch_mask
        if size is None:
            return StageInput(embeds=copied(embeds), data=data | {key: copied(part) for key, part in parts.items()})
        for key, part in parts.items():
            if int(part.shape[0]) != size:
                raise InvalidRequest(f"{key} is for {int(part.shape[0])} prompts, and the embeddings are for {size}")
        if not size:
            raise InvalidRequest(f"data[{self.embeds!r}] of {context.source!r} has no prompt in it")
        items = tuple(
            StageInput(
                embeds=copied(embeds[index]),
                data=copied(data) | {key: copied(part[index]) for key, part in parts.items()},
            )
            for index in range(size)
        )
        return StageInput(batch=items)

    def _arrays(self, data: Mapping[str, Any], whose: str) -> tuple[Any, Any]:
        embeds, mask = find(data, self.embeds), find(data, self.mask)
        if len(getattr(embeds, "shape", ())) not in (2, 3):
            raise InvalidRequest(
                f"data[{self.embeds!r}] of {whose} must be an array of shape [tokens, hidden] or "
                "[batch, tokens, hidden]"
            )
        return embeds, mask if getattr(mask, "shape", ()) else None


@attrs.frozen(kw_only=True)
class HandOver:
    """Named values of one stage to the next, which gets them in ``additional_information``, once its source is done."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        return declared(self, ("data",), "thread")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the stage's input.

        Raises:
            InvalidRequest: the source has ended without something that is required; says what.
        """
        if not context.finished:
            return None
        found = {key: find(context.data, key) for key in (*self.required, *self.optional)}
        if missing := [key for key in self.required if found[key] is None]:
            raise InvalidRequest(f"{context.source!r} ended without {', '.join(missing)} in its data")
        information: dict[str, Any] = {}
        for key, value in found.items():
            section, dot, name = key.partition(".")
            if value is not None:
                place = information.setdefault(section, {}) if dot else information
                place[name or section] = copied(value)
        data = multimodal(context.prompt) if context.requires_multimodal_data else {}
        return StageInput(data={**data, "additional_information": information})


@attrs.frozen(kw_only=True)
class CfgExpand:
    """An `Expand`: the companions of classifier-free guidance.

    One without the user's words: a negative prompt instead, beside the same images. Where there are images, another
    without them. A prompt whose ``modalities`` name none of `modalities` has no companions, nor has a batch.
    """

    text_role: str = "cfg_text"
    image_role: str = "cfg_img"
    negative: str = ""
    """The negative prompt where the user gives none as ``negative_prompt``, in the prompt's data or in ``extra_args``
    of the parameters; an empty one counts as none."""
    image_placeholder: str = ""
    """What stands for an image in a prompt in words: goes before the negative prompt, and out of the one without."""
    image_tokens: frozenset[int] = attrs.field(default=frozenset(), converter=frozenset)
    """What stands for images in a prompt in token ids."""
    modalities: frozenset[str] = attrs.field(default=frozenset({"image", "img2img"}), converter=frozenset)
    """Outputs that are guided, where the prompt's data says which are wanted."""
    sampling: Mapping[str, Any] = mapping()
    """Parameters of the companions that differ from the request's own at the first stage."""

    def __call__(self, context: ExpandContext) -> list[Companion]:
        """Return the companions; the runtime makes their ids of the request's and their role.

        Raises:
            InvalidRequest: the negative prompt is no text, or images can not be told from the rest of the prompt.
        """
        prompt = context.prompt
        wanted = prompt.data.get("modalities")
        names = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(names, list | tuple | set | frozenset | None):
            raise InvalidRequest(f"modalities must be a list of names, not {type(names).__name__}")
        guided = names is None or any(isinstance(name, str) and name in self.modalities for name in names)
        if prompt.batch is not None or not guided:
            return []
        media = multimodal(prompt)
        given = media.get("multi_modal_data")
        none = given is None or (isinstance(given, Mapping) and not given)
        pictured = not none or any(map(_parts, prompt.messages or ()))
        kept = {} if wanted is None else {"modalities": copied(wanted)}
        companions = [(self.text_role, self._without_words(context, pictured, kept | media))]
        if pictured:
            companions.append((self.image_role, self._without_images(prompt, dict(kept))))
        return [Companion(role=role, input=made, sampling=copied(self.sampling)) for role, made in companions]

    def _without_words(self, context: ExpandContext, pictured: bool, data: dict[str, Any]) -> StageInput:
        negative = self._negative(context)
        if context.prompt.messages is None:
            return StageInput(text=f"{self.image_placeholder}{negative}" if pictured else negative, data=data)
        images = [copied(part) for message in context.prompt.messages for part in _parts(message)]
        content = [*images, {"type": "text", "text": negative}] if images else negative
        return StageInput(messages=({"role": "user", "content": content},), data=data)

    def _without_images(self, prompt: StageInput, data: dict[str, Any]) -> StageInput:
        if prompt.text is not None:
            text = prompt.text.replace(self.image_placeholder, "") if self.image_placeholder else prompt.text
            return StageInput(text=text, data=data)
        if prompt.messages is not None:
            return StageInput(messages=tuple(map(_words_only, prompt.messages)), data=data)
        if prompt.token_ids is not None and self.image_tokens:
            kept = tuple(token for token in prompt.token_ids if token not in self.image_tokens)
            return StageInput(token_ids=kept, data=data)
        raise InvalidRequest("guidance by image needs a prompt without its images: give it in words or as messages")

    def _negative(self, context: ExpandContext) -> str:
        params = context.params
        extra = params.get("extra_args") if isinstance(params, Mapping) else getattr(params, "extra_args", None)
        for place in (context.prompt.data, extra):
            negative = place.get("negative_prompt") if isinstance(place, Mapping) else None
            if not isinstance(negative, str | None):
                raise InvalidRequest(f"negative_prompt must be text, not {type(negative).__name__}")
            if negative:
                return negative
        return self.negative


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message that are no text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part for part in content if not _is_words(part)]


def _words_only(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = copied(message)
    if isinstance(content := made.get("content"), list | tuple):
        made["content"] = [part for part in content if _is_words(part)]
    return made


def _is_words(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")


ar_to_image: Final = ArToImage(names={"cfg_text": "negative_prompt", "cfg_img": "image_negative_prompt"})
"""The user's prompt, for models that condition on the KV cache, such as BAGEL. `attrs.evolve` it for others."""

cfg_expand: Final = CfgExpand()
"""Guidance by an empty negative prompt, and by image where there is one."""

bagel_expand: Final = CfgExpand(negative="<|im_start|><|im_end|>", image_placeholder="<|fim_middle|>")
"""BAGEL."""

encode_to_denoise: Final = HandOver(
    required=("context", "context_mask", "latents", "timesteps", "height", "width", "img_shapes"),
    optional=(
        *("context_null", "context_null_mask", "sigmas", "num_inference_steps", "guidance", "guidance_scale"),
        *("true_cfg_scale", "do_true_cfg", "txt_seq_lens", "negative_txt_seq_lens", "image_latents"),
    ),
)
"""Qwen-Image: encoder to transformer."""

denoise_to_decode: Final = HandOver(required=("latents", "height", "width"), optional=("output_type",))
"""Qwen-Image: transformer to decoder."""
