"""A stage's input becomes a prompt of vLLM's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from omni_trio.messages import StageInput
from omni_trio.pipeline import StageSpec

if TYPE_CHECKING:
    from ._compat import Frontend

__all__ = ["LONG_PROMPT", "Rendering", "is_empty", "plan_rendering"]

LONG_PROMPT = 8000
"""Characters from which a prompt is tokenized in a worker thread (a few milliseconds)."""
_LONG_EMBEDS = 250_000


@attrs.frozen
class Rendering:
    """How to make the prompt: `render` raises ValueError and whatever vLLM does."""

    render: Callable[[Frontend], Any]
    in_thread: bool = False
    """Whether it takes long enough to be in everybody's way on the trio thread."""
    in_order: bool = False
    """Whether requests must reach the engine in the order in which their prompts were rendered: the caches of
    multimodal items on both sides have to see them in one order."""


_FORMS = ("text", "token_ids", "messages", "embeds")


def is_empty(stage_input: StageInput) -> bool:
    """Whether an input has nothing in it that could be a prompt."""
    return all(getattr(stage_input, name) is None for name in _FORMS) and not stage_input.data


def plan_rendering(stage: StageSpec, stage_input: StageInput) -> Rendering:
    """Say how to turn an input into a prompt.

    Raises:
        ValueError: the input has no prompt, or several.
    """
    given = [name for name in _FORMS if getattr(stage_input, name) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has none of them"
        raise ValueError(f"an input needs exactly one of text, token_ids, messages and embeds; this one {what}")
    messages = stage_input.messages
    if stage.prompt_format == "chat" and stage_input.text is not None:
        messages = _conversation(stage.system, stage_input.text)
    extras = {
        name: stage_input.data[name]
        for name in ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
        if stage_input.data.get(name) is not None
    }
    if "multi_modal_data" in extras:
        if stage_input.embeds is not None:
            raise ValueError("multi_modal_data can not be combined with prompt embeddings")
        return Rendering(lambda frontend: _render_multimodal(frontend, stage_input, messages, extras), True, True)
    if messages is not None:
        conversation = messages
        # Parts that are not text are images, audio and the like: fetched and decoded while rendering.
        multimodal = not all(isinstance(message.get("content"), str | None) for message in conversation)
        long = sum(len(message.get("content") or "") for message in conversation) > LONG_PROMPT
        return Rendering(lambda frontend: frontend.render_chat(conversation), multimodal or long, multimodal)
    if stage_input.text is not None:
        text = stage_input.text
        return Rendering(lambda frontend: frontend.render_prompt({"prompt": text}), len(text) > LONG_PROMPT)
    if stage_input.token_ids is not None:
        ids = stage_input.token_ids
        return Rendering(lambda frontend: frontend.render_tokens(_checked_ids(ids)))
    embeds = stage_input.embeds
    return Rendering(lambda frontend: _render_embeds(frontend, embeds), _size(embeds) > _LONG_EMBEDS)


def _conversation(system: str | None, text: str) -> tuple[Mapping[str, Any], ...]:
    user = {"role": "user", "content": text}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def _checked_ids(ids: Any) -> list[int]:
    """Return ids as plain ints: the engine's input thread dies of anything else."""
    try:
        return array("q", ids).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token_ids must be whole numbers of 64 bits: {error}") from error


def _render_multimodal(
    frontend: Frontend,
    stage_input: StageInput,
    messages: tuple[Mapping[str, Any], ...] | None,
    extras: Mapping[str, Any],
) -> Any:
    if messages is not None:
        prompt = {"prompt_token_ids": frontend.render_chat(messages)["prompt_token_ids"]}
    elif stage_input.token_ids is not None:
        prompt = {"prompt_token_ids": _checked_ids(stage_input.token_ids)}
    else:
        prompt = {"prompt": stage_input.text}
    return frontend.render_prompt({**prompt, **extras})


def _render_embeds(frontend: Frontend, embeds: Any) -> Any:
    if not frontend.takes_embeds:
        raise ValueError(
            "prompt embeddings were given, which this engine does not take: set enable_prompt_embeds = true in the "
            "stage's engine_args"
        )
    shape = tuple(getattr(embeds, "shape", ()))
    width = frontend.embeds_size
    # Checked here because the engine would not refuse such a prompt, but die of it.
    if len(shape) != 2 or shape[1] != width or shape[0] == 0:
        raise ValueError(f"prompt embeddings must have the shape [tokens, {width}], with 1 or more tokens, not {shape}")
    return frontend.render_embeds(embeds)


def _size(embeds: Any) -> int:
    size = 1
    for extent in getattr(embeds, "shape", ()):
        size *= int(extent)
    return size
