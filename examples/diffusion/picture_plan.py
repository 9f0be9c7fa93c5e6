"""What planner and denoiser have agreed on, and how what one makes becomes the other's input.

A prompt says what to draw and on what, such as "a red circle on blue". A plan is three tokens of the planner's own
vocabulary: the shape, its colour, the colour of the ground. ``<any>`` stands for what the prompt does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from omni_trio import BridgeContext, StageInput, bridge
from omni_trio.bridges import Companion, ExpandContext

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
ANY = "<any>"
NOTHING = "nothing"
"""The prompt of one who asks for nothing in particular: a language model needs at least one token."""

WORDS = ("<unk>", "<end>", NOTHING, "on", *SHAPES, *COLOURS)
PLANS = (ANY, *(f"<{word}>" for word in (*SHAPES, *COLOURS)))
VOCABULARY = {word: number for number, word in enumerate((*WORDS, *PLANS))}
"""Ids of the planner's tokens. What it does not know is ``<unk>``, and does no harm."""

PLAN_LENGTH = 3

__all__ = [
    "ANY",
    "COLOURS",
    "NOTHING",
    "PLANS",
    "PLAN_LENGTH",
    "SHAPES",
    "VOCABULARY",
    "WORDS",
    "companions",
    "picture",
    "plan_of",
    "read_plan",
]


def plan_of(shape: str | None, colour: str | None, ground: str | None) -> tuple[int, ...]:
    """Return the tokens of a plan; None is for what is not said."""
    return tuple(VOCABULARY[ANY if word is None else f"<{word}>"] for word in (shape, colour, ground))


def read_plan(tokens: Sequence[int]) -> tuple[int | None, int | None, int | None]:
    """Return which of `SHAPES` and of `COLOURS` (figure and ground) a plan asks for; None where it does not matter.

    Raises:
        ValueError: these tokens are no plan.
    """
    if len(tokens) != PLAN_LENGTH:
        raise ValueError(f"a plan has {PLAN_LENGTH} tokens, not {len(tokens)}")
    shape, colour, ground = tokens
    return _read(shape, SHAPES), _read(colour, COLOURS), _read(ground, COLOURS)


def _read(token: int, words: tuple[str, ...]) -> int | None:
    if token == VOCABULARY[ANY]:
        return None
    for number, word in enumerate(words):
        if token == VOCABULARY[f"<{word}>"]:
            return number
    raise ValueError(f"token {token} is not one of {', '.join(words)}, nor {ANY}")


def companions(context: ExpandContext) -> Iterator[Companion]:
    """Make what the prompt is compared with: itself without its figure, and itself without its ground.

    The planner makes a plan of each, and the denoiser goes from those towards the plan of the whole prompt. A prompt
    that is not in words has none, and its picture no guidance.
    """
    if context.prompt.text is None:
        return
    figure, on, ground = f" {context.prompt.text.lower()} ".partition(" on ")
    yield Companion(role="cfg_text", input=StageInput(text=f"on {ground.strip()}" if on else NOTHING))
    yield Companion(role="cfg_img", input=StageInput(text=figure.strip() or NOTHING))


@bridge(reads=["tokens"])
def picture(context: BridgeContext) -> StageInput:
    """Hand the denoiser the plan, and by role those of the companions."""
    plans = {role: np.asarray(companion.token_ids) for role, companion in context.companions.items()}
    return StageInput(text=context.prompt.text, token_ids=tuple(context.token_ids), data=plans)
