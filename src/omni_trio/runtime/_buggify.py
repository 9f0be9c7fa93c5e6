"""Named points at which a simulation may hold a task up, where a slow machine or an unlucky schedule could as well.

Each stands where its task may be switched away from in any case, so nothing may be taken for granted across it. Outside
of simulations `hook` is None, and a point costs one look at it.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, get_args

__all__ = ["POINTS", "Hook", "Point"]

Point: TypeAlias = Literal[
    "a replica starts",
    "outputs are received",
    "a request begins",
    "a request wakes",
    "a request goes on",
    "before a hand-over",
    "after a hand-over",
    "after a bridge",
    "before a release",
    "before an abort",
    "a caller enters",
    "a caller wakes",
    "an operator waits",
    "the runtime closes",
]

POINTS: tuple[Point, ...] = get_args(Point)


class Hook(Protocol):
    """What is called at each point while a simulation asks for it."""

    async def __call__(self, point: Point, *, shield: bool = False) -> None:
        """Hold the task up, or do not; with `shield`, even if it is being cancelled."""
        ...


hook: Hook | None = None
