"""A known bug that can be put into the runtime for a while, with a plan that brings it to light."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs

from omni_trio.testing.plan import Plan

__all__ = ["MUTANTS", "Mutant", "Patch", "mutant"]

Patch: TypeAlias = Callable[[Any, str, Any], None]
"""Replaces an attribute of a class or a module, as ``setattr`` does, until the mutant is taken out again."""

_MISSING = object()

MUTANTS: dict[str, Mutant] = {}
"""All mutants, by name."""


@attrs.frozen(kw_only=True)
class Mutant:
    """One bug. Only one can be active at a time."""

    name: str
    why: str
    """What is wrong, in a sentence."""
    again: Sequence[str]
    """Where it has been met: numbers of known scenarios (U) and weaknesses of other orchestrators (W)."""
    witness: Plan
    """The smallest plan known that tells the broken runtime from the whole one."""
    breaks: Callable[[Patch], None] = attrs.field(repr=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the bug in the runtime inside the block."""
        undo: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, value: Any) -> None:
            undo.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)

        try:
            self.breaks(patch)
            yield
        finally:
            for owner, name, value in reversed(undo):
                if value is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def mutant(*again: str, witness: Plan) -> Callable[[Callable[[Patch], None]], Mutant]:
    """Make a mutant of the function that breaks the runtime: its name is the mutant's, its docstring says why."""

    def make(breaks: Callable[[Patch], None]) -> Mutant:
        name = breaks.__name__.strip("_").replace("_", " ")
        made = Mutant(name=name, why=(breaks.__doc__ or "").strip(), again=again, witness=witness, breaks=breaks)
        assert name not in MUTANTS, f"two mutants are called {name!r}"
        MUTANTS[name] = made
        return made

    return make
