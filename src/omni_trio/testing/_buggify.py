"""Holds tasks of the runtime up at its named points, as chance wants it: what a seed decides, it decides again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from omni_trio.runtime import _buggify
from omni_trio.runtime._buggify import POINTS, Point

__all__ = ["POINTS", "buggified"]

_SECONDS = (0.0, 0.0, 0.0, 0.001, 0.01)
"""How long a task may be held up: mostly for a step or a few, and short even at worst, so that limits of plans hold."""

_STEPS = 3


@contextmanager
def buggified(probability: float, seed: int, points: Counter[str] | None = None) -> Iterator[None]:
    """Hold tasks up at the named points of every runtime inside the block.

    Args:
        probability: of being held up, each time that a point is passed; 0 leaves everything as it is.
        seed: decides when, and for how long.
        points: counts how often each point was passed.
    """
    if not probability:
        yield
        return
    chance = random.Random(seed)  # noqa: S311 - it has to be the same each time

    async def hook(point: Point, *, shield: bool = False) -> None:
        if points is not None:
            points[point] += 1
        if chance.random() >= probability:
            return
        seconds, steps = chance.choice(_SECONDS), chance.randint(1, _STEPS)
        with trio.CancelScope(shield=shield):
            if seconds:
                await trio.sleep(seconds)
            else:
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()

    before, _buggify.hook = _buggify.hook, hook
    try:
        yield
    finally:
        _buggify.hook = before
