"""Makes trio run the same way twice: the one place that touches its scheduler's randomness."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["seeded_scheduler"]

_SOURCE = "_r"
_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
"""Private names of trio's, seen in 0.22 to 0.35; `Trace` bytes that differ from run to run would tell."""


@contextmanager
def seeded_scheduler(seed: int) -> Iterator[None]:
    """Decide by `seed` which of the tasks that could run runs first, in every `trio.run` inside the block.

    Raises:
        RuntimeError: this version of trio keeps its randomness elsewhere.
    """
    core = importlib.import_module("trio._core._run")
    try:
        source, allowed = getattr(core, _SOURCE), getattr(core, _SWITCH)
    except AttributeError as error:
        raise RuntimeError(f"simulations can not be made deterministic with trio {trio.__version__}") from error
    state = source.getstate()
    setattr(core, _SWITCH, True)
    source.seed(seed)
    try:
        yield
    finally:
        source.setstate(state)
        setattr(core, _SWITCH, allowed)
