"""Looking into exception groups at the borders of the API."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["leaves", "lone"]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep; an exception that is no group is its own only leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def lone(error: BaseException, *, levels: int) -> BaseException:
    """Take off the groups of one that our own nurseries put around a lone cause.

    Args:
        error: what came out of the nurseries.
        levels: how many nurseries of ours there are around the user's block. A group further in is the user's own
            nursery's, and stays, even around a single error: the user's ``except*`` counts on it.
    """
    for _ in range(levels):
        if not isinstance(error, BaseExceptionGroup) or len(error.exceptions) != 1:
            break
        error = error.exceptions[0]
    return error
