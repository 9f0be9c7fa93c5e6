"""Show which check catches which mutant, and that no check could be left out.

python scripts/mutant_matrix.py            print it all, and rewrite the page about it
python scripts/mutant_matrix.py --check    exit with 1 where the page is out of date, a mutant survives, or a check is
                                           not needed
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from generated import put_between_marks

from omni_trio.testing import Hung, Trace, run_simulation
from omni_trio.testing.checks import CHECKS
from omni_trio.testing.mutants import MUTANTS, Mutant

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "proving-the-harness.md"

HUNG = "Hung"
"""Stands among the names of checks for the error that a simulation ends with which something waits in for ever."""

Matrix = Mapping[str, tuple[str, ...]]
"""By mutant, what catches it."""


def catchers(trace: Trace) -> tuple[str, ...]:
    """Return the names of the checks that fail for a trace."""
    return tuple(check.name for check in CHECKS.values() if check(trace) is not None)


def caught_by(mutant: Mutant) -> tuple[str, ...]:
    """Return what catches a mutant when its witness is run."""
    with mutant.active():
        try:
            return catchers(run_simulation(mutant.witness))
        except Hung:
            return (HUNG,)


def matrix() -> Matrix:
    """Run all witnesses."""
    return {name: caught_by(mutant) for name, mutant in MUTANTS.items()}


def needed(found: Matrix) -> dict[str, list[str]]:
    """Return, by check, the mutants that it alone catches."""
    return {check: [name for name, caught in found.items() if caught == (check,)] for check in (*CHECKS, HUNG)}


def rows(cells: Iterable[Iterable[str]], *titles: str) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def of_mutants(found: Matrix) -> str:
    """Return the table of mutants."""
    return rows(
        ((name, MUTANTS[name].why, ", ".join(MUTANTS[name].again), _code(caught)) for name, caught in found.items()),
        "Mutant",
        "What is wrong",
        "Met as",
        "Caught by",
    )


def of_checks(found: Matrix) -> str:
    """Return the table of checks."""
    cells = []
    for check, only in needed(found).items():
        invariant = CHECKS[check].invariant if check in CHECKS else "I2"
        count = sum(check in caught for caught in found.values())
        cells.append((f"`{check}`", invariant, str(count), "; ".join(only) or "– (others catch all that it does)"))
    return rows(cells, "Check", "Invariant", "Catches", "Alone")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "**nothing**"


def page(text: str, found: Matrix) -> str:
    """Return the page with its generated parts as they are to be."""
    text = put_between_marks(text, "mutants", of_mutants(found))
    return put_between_marks(text, "checks", of_checks(found))


def main() -> int:
    """Do what the command line says; return the exit status."""
    found = matrix()
    wrong = [f"nothing catches the mutant {name!r}" for name, caught in found.items() if not caught]
    wrong += [f"others catch all that {check} does" for check, only in needed(found).items() if not only]
    text = PAGE.read_text(encoding="utf-8")
    current = page(text, found)
    if "--check" in sys.argv[1:]:
        if current != text:
            wrong.append(f"{PAGE} is out of date: run python scripts/mutant_matrix.py")
    else:
        PAGE.write_text(current, encoding="utf-8")
        for name, caught in found.items():
            print(f"{name:48}{', '.join(caught)}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
