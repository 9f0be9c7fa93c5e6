"""Write the rules of routing, as `omni_trio.routing.TABLES` and `omni_trio.Pipeline` have them, into the page about it.

python scripts/routing_diagram.py            rewrite the page
python scripts/routing_diagram.py --check    exit with 1 where the page is out of date
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from generated import put_between_marks

from omni_trio import ConfigError, Pipeline, StageSpec
from omni_trio.routing import TABLES, EdgeAction

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "routing.md"

Rules = Mapping[tuple[Any, Any], Any]

# The tables


def split(outcome: Any) -> tuple[enum.Enum, str]:
    """Return the state that follows, and the action in words."""
    after, action = outcome if isinstance(outcome, tuple) else (outcome, EdgeAction.NOTHING)
    return after, "" if action is EdgeAction.NOTHING else action.value


def table(rules: Rules) -> str:
    """Return the table: a row per fact, a column per state, a dash where the fact is a breach of protocol."""
    states, facts = (list(type(one)) for one in next(iter(rules)))
    lines = ["| | " + " | ".join(f"**{state.value}**" for state in states) + " |", "|---" * (len(states) + 1) + "|"]
    for fact in facts:
        cells = [cell(rules[state, fact]) if (state, fact) in rules else "–" for state in states]
        lines.append(f"| {fact.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(outcome: Any) -> str:
    """Return what follows, in words."""
    after, action = split(outcome)
    return f"{after.value}: *{action}*" if action else str(after.value)


def diagram(rules: Rules) -> str:
    """Return a Mermaid state diagram. Arrows between the same states are one; facts without effect have none."""
    arrows: dict[tuple[Any, Any, str], list[str]] = {}
    for (state, fact), outcome in rules.items():
        after, action = split(outcome)
        if after is not state or action:
            arrows.setdefault((state, after, action), []).append(fact.value)
    states = list(type(next(iter(rules))[0]))
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {states[0].value}"]
    lines += [
        f"    {state.value} --> {after.value}: {', '.join(facts)}{f' / {action}' if action else ''}"
        for (state, after, action), facts in arrows.items()
    ]
    ends = {state for (state, fact), outcome in rules.items() if fact.name == "RELEASE" and split(outcome)[0] is state}
    lines += [f"    {state.value} --> [*]" for state in states if state in ends]
    return "\n".join(["```mermaid", *lines, "```"])


# Which modes go together

FEEDS = {"pieces": "output", "early start": "kv", "connector": "connector"}
MODES = (*FEEDS, "pair", "companions", "session")


def no_companions(context: object) -> tuple[()]:
    """Stand for a pipeline's `expand`."""
    del context
    return ()


def objection(first: str, second: str, modes: Iterable[str]) -> str | None:
    """Return why a chain of three stages with these ways of feeding can not have these modes; None where it can."""
    pair = "pair" in modes
    try:
        pipeline = Pipeline(
            [
                StageSpec(name="first", kind="simulated", role="prefill" if pair else None),
                StageSpec(name="second", kind="simulated", role="decode" if pair else None, feed=first),  # type: ignore[arg-type]
                StageSpec(name="third", kind="simulated", feed=second),  # type: ignore[arg-type]
            ],
            expand=no_companions if "companions" in modes else None,
        )
    except ConfigError as error:
        return error.message
    return pipeline.no_sessions if "session" in modes else None


def verdict(one: str, other: str) -> tuple[str, str | None]:
    """Return whether two modes go together, and why not."""
    feeds = [FEEDS[mode] for mode in (one, other) if mode in FEEDS]
    if not feeds:
        reason = objection("finish", "finish", (one, other))
        return ("no" if reason else "yes"), reason
    both = [(feeds[0], feeds[-1])] if len(feeds) == 2 else [(feeds[0], "finish"), ("finish", feeds[0])]
    reasons = [objection(first, second, (one, other)) for first, second in both]
    if not any(reasons):
        return "yes", None
    return ("no" if all(reasons) else "not from the first stage"), reasons[0]


def together() -> str:
    """Return the matrix of modes, and what is said of those that do not go together."""
    verdicts = {(one, other): verdict(one, other) for one, other in combinations(MODES, 2)}
    lines = ["| | " + " | ".join(MODES[1:]) + " |", "|---" * len(MODES) + "|"]
    for row, one in enumerate(MODES[:-1]):
        cells = ["" if column <= row else verdicts[one, other][0] for column, other in enumerate(MODES) if column]
        lines.append(f"| **{one}** | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [
        f"- *{one}* and *{other}*, {how}: {reason.partition(';')[0]}."
        for (one, other), (how, reason) in verdicts.items()
        if reason is not None
    ]
    return "\n".join(lines)


# The page


def page(text: str) -> str:
    """Return the page with its generated parts as they are to be."""
    for name, rules in (("leg", TABLES.leg), ("edge", TABLES.edge), ("hold", TABLES.hold)):
        text = put_between_marks(text, f"{name} table", table(rules))
        text = put_between_marks(text, f"{name} diagram", diagram(rules))
    return put_between_marks(text, "modes", together())


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
