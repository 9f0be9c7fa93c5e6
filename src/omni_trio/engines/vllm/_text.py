"""vLLM's errors in words."""

from __future__ import annotations

__all__ = ["describe"]


def describe(error: BaseException) -> str:
    """Return what an error says, without the ornaments of pydantic; its type where it says nothing."""
    details = getattr(error, "errors", None)
    if callable(details) and type(error).__module__.startswith("pydantic"):
        parts = []
        for detail in details():
            place = ".".join(str(part) for part in detail.get("loc", ()) if not isinstance(part, int))
            text = str(detail.get("msg", "")).removeprefix("Value error, ").removeprefix("Assertion failed, ")
            if "input" in detail and place:
                text = f"{text}, not {detail['input']!r:.80}"
            parts.append(f"{place}: {text}" if place else text)
        return "; ".join(parts)
    return str(error).strip() or type(error).__name__
