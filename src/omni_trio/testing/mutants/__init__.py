"""Bugs that other orchestrators have had, put back into this one on purpose: each has to be caught by a named check.

A harness that finds nothing proves nothing by itself. `MUTANTS` proves this one: every entry breaks one thing in the
runtime while its block lasts, and names a plan for which some check of `omni_trio.testing.checks` then fails, or
`Hung` is raised.
"""

from __future__ import annotations

# Each of these fills the table with the mutants of its theme.
from . import _ends, _life, _sessions, _slots, _ways
from ._mutant import MUTANTS, Mutant, Patch

__all__ = ["MUTANTS", "Mutant", "Patch"]

_THEMES = (_ends, _slots, _ways, _sessions, _life)
