"""Parts of pages that are generated: between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

import re

__all__ = ["put_between_marks"]


def put_between_marks(text: str, name: str, part: str) -> str:
    """Return `text` with `part` between its marks.

    Raises:
        ValueError: the text has not exactly one such pair of marks.
    """
    marks = re.compile(rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    replaced, count = marks.subn(lambda match: f"{match[1]}\n{part}\n\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"expected one pair of marks named {name!r}, found {count}")
    return replaced
