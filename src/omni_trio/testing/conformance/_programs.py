"""The programs that are always run: each is the shortest way to one rule."""

from __future__ import annotations

from collections.abc import Iterator

from ._subject import VARIANTS
from .operations import (
    Abort,
    CancelReceive,
    CancelSubmit,
    Close,
    Drain,
    More,
    Open,
    Operation,
    Pause,
    Program,
    Receive,
    Refused,
    Submit,
    Together,
)

__all__ = ["fixed_programs"]

_WAVE = 8
"""Requests that are aborted at once in a storm."""


def fixed_programs(*, sessions: bool, refusals: int, storm: int) -> Iterator[Program]:
    """Give them, the simplest first: what breaks an earlier one needs no later one to be found."""
    for number in range(VARIANTS):
        yield (Submit(number),)  # what each gets alone
    yield (Submit(0), Drain(), Submit(VARIANTS))  # the same again
    yield (Abort(()), Abort((0,)))
    yield (Submit(0), Drain(), Abort((0,)))
    yield (Submit(0, long=True), Abort((0,)), Abort((0,)))
    yield (Submit(0, long=True), Pause(0.01), Abort((0,)), Pause(0.01))
    yield (Submit(0, long=True), Submit(1, long=True), Abort((0, 7, 0, 1)))
    yield tuple(Submit(number) for number in range(VARIANTS))
    yield (Submit(0), Receive(), Submit(1), Receive(), Submit(2))
    for steps in range(5):
        cancelled = CancelReceive(steps)
        yield (Submit(0), cancelled, cancelled, Pause(0.01), cancelled, Submit(1), cancelled, Drain(), cancelled)
    yield (Submit(0), Submit(1, long=True), Abort((1,)), Submit(2))
    yield (Together((Submit(0, long=True), Abort((0,)))), Abort((0,)))
    yield (Submit(0), Together((Submit(1, long=True), Abort((0,)), Abort((0, 1)))), Submit(2))
    for steps in range(5):
        yield (Submit(0), CancelSubmit(1, steps), CancelSubmit(2, steps, long=True), Submit(3), Abort((1, 2)))
    for index in range(refusals):
        yield (Submit(0), Refused(1, index), Abort((1,)))
    yield tuple(operation for first in range(0, storm, _WAVE) for operation in _wave(first))
    yield (More(0), Submit(1), Drain(), More(1), Submit(2, long=True), Abort((2,)), More(2))
    if sessions:
        yield from _sessions()


def _wave(first: int) -> Iterator[Operation]:
    numbers = tuple(range(first, first + _WAVE))
    for number in numbers:
        yield Submit(number, long=True)
    yield Abort(numbers)


def _sessions() -> Iterator[Program]:
    yield (Open(0), Drain(), Close(0))
    yield (Open(0), Drain(), More(0), Drain(), More(0), Drain(), Close(0), Drain(), More(0))
    yield (Open(0), Close(0))
    yield (Open(0), More(0), More(0), Close(0), Submit(1))
    yield (Open(0), Open(1), More(1), More(0), Drain(), Close(1), More(0), Close(0))
    yield (Open(0), Abort((0,)), More(0), Open(1), Drain(), Abort((1,)), More(1))
