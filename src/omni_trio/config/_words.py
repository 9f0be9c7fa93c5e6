"""Values in the words of an error."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

__all__ = ["hint", "in_words"]


def in_words(value: Any) -> str:
    """Return what a value from a file is, briefly, as in "expected a table, got ..."."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int():
            return f"the whole number {value}" if abs(value) < 10**30 else "a very large whole number"
        case float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"a text of {len(value)} characters"
        case Mapping():
            return "a table" if value else "an empty table"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case dt.date() | dt.time():
            return f"the date or time {value.isoformat()}"
    return f"a value of type {type(value).__name__}"


def hint(value: Any) -> str:
    """Return what to do about a value that YAML or TOML reads as something other than the text that was meant."""
    return "; put it in quotes" if isinstance(value, bool | int | float | dt.date | dt.time) else ""
