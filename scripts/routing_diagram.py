"""Write the life of a leg, as `omni_trio.routing.LEG_TRANSITIONS` has it, into the page about routing.

python scripts/routing_diagram.py            rewrite the page
python scripts/routing_diagram.py --check    exit with 1 where the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import put_between_marks

from omni_trio.routing import LEG_TRANSITIONS, Fact, LegState

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "routing.md"


def table() -> str:
    """Return the table: a row per state, a column per fact, a dash where the fact is a breach of protocol."""
    lines = [
        "| state | " + " | ".join(fact.value for fact in Fact) + " |",
        "|---" * (len(Fact) + 1) + "|",
    ]
    for state in LegState:
        cells = [LEG_TRANSITIONS[state, fact].value if (state, fact) in LEG_TRANSITIONS else "–" for fact in Fact]
        lines.append(f"| **{state.value}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def diagram() -> str:
    """Return a Mermaid state diagram; facts that lead from one state to the same other one share an arrow."""
    arrows: dict[tuple[LegState, LegState], list[str]] = {}
    for (state, fact), after in LEG_TRANSITIONS.items():
        arrows.setdefault((state, after), []).append(fact.value)
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {LegState.IDLE.value}"]
    lines += [f"    {a.value} --> {b.value}: {', '.join(facts)}" for (a, b), facts in arrows.items()]
    lines.append(f"    {LegState.RELEASED.value} --> [*]")
    return "\n".join(["```mermaid", *lines, "```"])


def page(text: str) -> str:
    """Return the page with its generated parts as they are to be."""
    return put_between_marks(put_between_marks(text, "table", table()), "diagram", diagram())


def main() -> int:
    """Do what the command line says; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    if (current := page(text)) == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is out of date: run python scripts/routing_diagram.py", file=sys.stderr)
        return 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
