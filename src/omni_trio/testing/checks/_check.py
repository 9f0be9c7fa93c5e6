"""What a check is, the list of all, and how they are run together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, get_args

import attrs

from omni_trio.pipeline import nearest
from omni_trio.testing.trace import Trace, timeline

__all__ = ["CHECKS", "HELD_UP", "BrokenInvariants", "Check", "Finding", "Invariant", "Violation", "check", "check_all"]

Invariant: TypeAlias = Literal[
    "I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I10", "I11", "I12", "I13", "I14", "I15", "I16"
]

Finding: TypeAlias = tuple[str, float]
"""What is wrong, and the position in `Trace.entries` where it shows; infinite where it shows at the end."""

HELD_UP = 1.0
"""Virtual seconds by which being held up at named points (`Plan.buggify`) may delay something, at most."""

_AROUND = 12
"""Entries of the trace that are shown before and after a violation."""


@attrs.frozen
class Violation:
    """An invariant that does not hold in a trace."""

    check: Check
    message: str
    at: float = math.inf
    """Where it shows: a position in `Trace.entries`; infinite: at the end."""

    def __str__(self) -> str:
        return f"{self.check.invariant} {self.check.name}: {self.message}"


@attrs.frozen
class Check:
    """A pure function from a trace to what is wrong with it."""

    name: str
    invariant: Invariant
    doc: str
    """What it looks at."""
    guards: tuple[str, ...]
    """Faults that users have met (U..) and weak points of older designs (W-..) that it would show."""
    find: Callable[[Trace], Iterator[Finding]] = attrs.field(repr=False)

    def __call__(self, trace: Trace) -> Violation | None:
        """Return the first violation, or None."""
        for message, at in self.find(trace):
            return Violation(self, message, at)
        return None


class BrokenInvariants(AssertionError):
    """Some invariants do not hold in a trace.

    Attributes:
        violations: the first one that each check has found.
        trace: the trace.
    """

    def __init__(self, violations: Iterable[Violation], trace: Trace) -> None:
        self.violations = tuple(violations)
        self.trace = trace
        super().__init__(self._tell())

    def _tell(self) -> str:
        parts = [
            f"{len(self.violations)} of {len(CHECKS)} checks failed",
            *(f"  {violation}" for violation in self.violations),
            "the simulation, for omni_trio.testing.run_simulation:",
            f"  {self.trace.plan!r}",
        ]
        shown: set[tuple[int, int]] = set()
        entries = self.trace.entries
        for violation in self.violations:
            at = len(entries) if violation.at == math.inf else int(violation.at)
            begin, end = max(0, min(at, len(entries)) - _AROUND), min(len(entries), at + _AROUND)
            if (begin, end) not in shown:
                shown.add((begin, end))
                parts += [f"what happened around it ({violation.check.name}):", timeline(entries[begin:end])]
        return "\n".join(parts)


CHECKS: dict[str, Check] = {}
"""All checks, by name."""


def check(invariant: Invariant, *guards: str) -> Callable[[Callable[[Trace], Iterator[Finding]]], Check]:
    """Make a check of a function that yields what is wrong. Its name and docstring become those of the check."""
    assert invariant in get_args(Invariant)  # a slip of the pen

    def made(find: Callable[[Trace], Iterator[Finding]]) -> Check:
        one = Check(find.__name__, invariant, (find.__doc__ or "").strip(), guards, find)
        assert one.name not in CHECKS  # likewise
        CHECKS[one.name] = one
        return one

    return made


def check_all(trace: Trace, *, skip: Mapping[str, str] | None = None, only: Iterable[str] | None = None) -> None:
    """Run all checks on a trace.

    Args:
        trace: what happened.
        skip: names of checks that are not run, each with the reason.
        only: names of the checks to run; None: all.

    Raises:
        BrokenInvariants: some invariants do not hold; it has all violations.
        ValueError: a name is unknown, or a reason is missing.
    """
    skip = skip or {}
    names = list(CHECKS if only is None else only)
    for name in (*names, *skip):
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}{nearest(name, CHECKS)} (checks: {', '.join(CHECKS)})")
    for name, reason in skip.items():
        if not reason.strip():
            raise ValueError(f"skip: say why {name!r} does not apply here")
    found = [CHECKS[name](trace) for name in names if name not in skip]
    if violations := [violation for violation in found if violation is not None]:
        raise BrokenInvariants(violations, trace)
