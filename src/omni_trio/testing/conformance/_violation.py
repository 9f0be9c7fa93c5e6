"""What a kit says: which rule is broken, where the rule is written, what was seen, and how to see it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

__all__ = ["Conformance", "ConformanceError", "Rule", "Rules", "checked_skip", "make_rules"]


@attrs.frozen
class Rule:
    """One sentence of a contract that can be checked."""

    number: int
    """Unique among the rules of one kit; it does not change."""
    text: str
    where: str
    """The docstring in which it is written."""

    def __str__(self) -> str:
        return f"rule {self.number}: {self.text}"


Rules = Mapping[int, Rule]


class ConformanceError(AssertionError):
    """A rule is broken.

    Attributes:
        rule: which.
        problem: what was seen, in words.
        example: code that shows it again; empty where there is none.
        again: False where the example was run once more and did not fail then.
    """

    def __init__(self, rule: Rule, problem: str, example: str = "", *, again: bool = True) -> None:
        self.rule = rule
        self.problem = problem
        self.example = example
        self.again = again
        super().__init__(rule, problem, example)

    def __str__(self) -> str:
        lines = [f"{self.rule}", f"  is not kept: {self.problem}", f"  It is written in {self.rule.where}."]
        if self.example:
            lines.append(
                "  To see it again:" if self.again else "  It happened in this, and not when it was run again:"
            )
            lines += [f"    {line}" for line in self.example.splitlines()]
        return "\n".join(lines)


@attrs.frozen(kw_only=True)
class Conformance:
    """What was checked, where nothing was found."""

    kept: tuple[Rule, ...]
    """The rules that were checked."""
    not_checked: Mapping[Rule, str]
    """Those that were not, and why: what the kit would have needed, or the reason that it was given."""

    def __str__(self) -> str:
        numbers = ", ".join(str(rule.number) for rule in self.kept)
        lines = [f"kept: rules {numbers}"]
        lines += [f"not checked: rule {rule.number} ({why})" for rule, why in self.not_checked.items()]
        return "\n".join(lines)


def make_rules(texts: Iterable[tuple[int, str, str]]) -> Rules:
    """Number rules."""
    return {number: Rule(number, text, where) for number, text, where in texts}


def checked_skip(rules: Rules, skip: Mapping[int, str] | None) -> Mapping[int, str]:
    """Return which rules are not to be checked.

    Raises:
        ValueError: there is no such rule, or no reason is given.
    """
    skip = dict(skip or {})
    for number, reason in skip.items():
        if number not in rules:
            raise ValueError(f"skip: there is no rule {number!r} (rules: {_span(tuple(rules))})")
        if not reason.strip():
            raise ValueError(
                f"skip: say why rule {number} is not to be checked, as in skip={{{number}: 'because ...'}}"
            )
    return skip


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}"
