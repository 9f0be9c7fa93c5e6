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


def lone(group: BaseException, *, body: BaseException | None) -> BaseException:
    """Take off the groups of one that our own nurseries put around a lone cause.

    Args:
        group: what came out of the nurseries.
        body: what the user's block raised. It is returned as it is, even where it is a group of one itself: that
            group is the user's own nursery's, and the user's ``except*`` counts on it.
    """
    error = group
    while isinstance(error, BaseExceptionGroup) and error is not body and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
