"""The bridges that need no code of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omni_trio.messages import StageInput

from ._contract import Bridge, BridgeContext, BridgeSpec, Reads

__all__ = ["BUILTIN"]


def _passed_on(context: BridgeContext) -> Mapping[str, Any]:
    return context.prompt.data if context.requires_multimodal_data else {}


def tokens(context: BridgeContext) -> StageInput | None:
    """The source's tokens become the prompt: both stages must share a vocabulary. In a session, segment by segment."""
    new_tokens, _ = context.new()
    return StageInput(token_ids=new_tokens, data=_passed_on(context)) if new_tokens else None


def text(context: BridgeContext) -> StageInput | None:
    """The source's text becomes the prompt. In a session, segment by segment."""
    _, new_text = context.new()
    return StageInput(text=new_text, data=_passed_on(context)) if new_text else None


def original_prompt(context: BridgeContext) -> StageInput:
    """The stage gets what the user asked for, once the source is done."""
    return context.prompt


def prompt_embeds(context: BridgeContext) -> StageInput | None:
    """The source's ``hidden_states`` (or ``embedding``, or ``latent``) become prompt embeddings."""
    for key in ("hidden_states", "embedding", "latent"):
        if (embeds := context.data.get(key)) is not None:
            return StageInput(embeds=embeds, data=_passed_on(context))
    return None


def output(context: BridgeContext) -> StageInput | None:
    """All that the source made, as it is: for worker stages, which take any mixture.

    On a streaming edge each call hands on what is new in tokens and text since the last one.
    """
    new_tokens, new_text = context.new()
    data: dict[str, Any] = dict(_passed_on(context))
    if context.finished:
        data.update(context.data)
    if not (new_tokens or new_text or data):
        return None
    return StageInput(token_ids=new_tokens or None, text=new_text or None, data=data)


def _builtin(function: Bridge, *reads: Reads) -> BridgeSpec:
    return BridgeSpec(getattr(function, "__name__", "?"), function, frozenset(reads))


BUILTIN: Mapping[str, BridgeSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _builtin(tokens, "tokens"),
            _builtin(text, "text"),
            _builtin(original_prompt),
            _builtin(prompt_embeds, "data"),
            _builtin(output, "tokens", "text", "data"),
        )
    }
)
