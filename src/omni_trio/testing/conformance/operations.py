"""What a stage client is made to do, as data: printed as the call that makes it again, drawn and made simpler.

Requests have numbers. Every sequence means something: what can not be done (more input for a request that was never
submitted complete) is what the contract says of it, or nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "Abort",
    "CancelReceive",
    "CancelSubmit",
    "Close",
    "Drain",
    "More",
    "Open",
    "Operation",
    "Pause",
    "Program",
    "Receive",
    "Refused",
    "Single",
    "Submit",
    "Together",
    "draw_program",
    "join_programs",
    "simpler",
    "write_program",
]


class _Operation(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    pass


class Submit(_Operation, frozen=True):
    """Submit a request whose input is complete."""

    request: int
    long: bool = False
    """Whether it takes long, so that it is still at work later."""


class CancelSubmit(_Operation, frozen=True):
    """Submit one, and cancel that after some scheduler steps."""

    request: int
    steps: int = 0
    long: bool = False


class Refused(_Operation, frozen=True):
    """Submit one of the inputs that the stage can not use."""

    request: int
    index: int = 0


class Open(_Operation, frozen=True):
    """Submit a request with its first segment."""

    request: int


class More(_Operation, frozen=True):
    """Update a request with one more segment."""

    request: int


class Close(_Operation, frozen=True):
    """Update a request with the closing update."""

    request: int


class Abort(_Operation, frozen=True):
    """Abort requests, and wait for the acknowledgement."""

    requests: tuple[int, ...]


class Receive(_Operation, frozen=True):
    """Receive once; does nothing where nothing is owed."""


class Drain(_Operation, frozen=True):
    """Receive until nothing is owed any more."""


class CancelReceive(_Operation, frozen=True):
    """Receive, and cancel that after some scheduler steps."""

    steps: int = 0


class Pause(_Operation, frozen=True):
    """Let time pass."""

    seconds: float


class Together(_Operation, frozen=True):
    """Do several at the same time, while one task receives."""

    operations: tuple[Submit | CancelSubmit | Refused | Open | More | Close | Abort | Pause, ...]


Single: TypeAlias = Submit | CancelSubmit | Refused | Open | More | Close | Abort | Pause
"""What can be done beside others: all but receiving, which is one task's business."""
Operation: TypeAlias = Single | Receive | Drain | CancelReceive | Together
Program: TypeAlias = tuple[Operation, ...]


def write_program(program: Program) -> str:
    """Return a program as code."""
    return "[\n" + "".join(f"    {operation!r},\n" for operation in program) + "]"


def draw_program(rng: random.Random, length: int, *, sessions: bool, refusals: int) -> Program:
    """Draw a program.

    Args:
        rng: where chance comes from.
        length: at most so many operations.
        sessions: whether the client takes input in pieces.
        refusals: how many inputs there are that the stage can not use.
    """
    drawer = _Drawer(rng, sessions=sessions, refusals=refusals)
    return tuple(drawer.one() for _ in range(rng.randint(1, length)))


class _Drawer:
    def __init__(self, rng: random.Random, *, sessions: bool, refusals: int) -> None:
        self._rng = rng
        self._next = 0
        self._refusals = refusals
        # Programs of few kinds find what mixtures of all hide, so it is drawn first which kinds there are.
        beside = ["abort", "cancel submit", "pause", *["session"] * sessions, *["refused"] * bool(refusals)]
        alone = ["cancel receive", "drain", "together"]
        self._beside = ["submit", *(kind for kind in beside if rng.random() < 0.5)]
        self._kinds = [*self._beside, "receive", *(kind for kind in alone if rng.random() < 0.5)]

    def one(self) -> Operation:
        rng = self._rng
        match rng.choice(self._kinds):
            case "receive":
                return Receive()
            case "drain":
                return Drain()
            case "cancel receive":
                return CancelReceive(rng.randint(0, 4))
            case "together":
                return Together(tuple(self._single(rng.choice(self._beside)) for _ in range(rng.randint(2, 3))))
            case kind:
                return self._single(kind)

    def _single(self, kind: str) -> Single:
        rng = self._rng
        match kind:
            case "abort":
                return Abort(tuple(self._known() for _ in range(rng.randint(0, 3))))
            case "cancel submit":
                return CancelSubmit(self._new(), rng.randint(0, 4), rng.random() < 0.3)
            case "pause":
                return Pause(rng.choice((0.001, 0.01)))
            case "refused":
                return Refused(self._new(), rng.randrange(self._refusals))
            case "session":
                what = rng.choice((Open, More, More, Close))
                return what(self._new() if what is Open else self._known())
            case _:
                return Submit(self._new(), rng.random() < 0.3)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _known(self) -> int:
        """One that there is, mostly."""
        return self._rng.randrange(self._next + 1)


def join_programs(programs: Sequence[Program]) -> Program:
    """Make one program that does what several do one after the other, each with requests of its own."""
    joined: list[Operation] = []
    offset = 0
    for program in programs:
        numbers = [number for operation in program for number in _numbers(operation)]
        joined += (_shifted(operation, offset) for operation in program)
        joined.append(Drain())
        offset += max(numbers, default=0) + 1
    return tuple(joined)


def _numbers(operation: Operation) -> Iterator[int]:
    match operation:
        case Together(operations=inner):
            for one in inner:
                yield from _numbers(one)
        case Abort(requests=numbers):
            yield from numbers
        case Submit(request=number) | CancelSubmit(request=number) | Refused(request=number):
            yield number
        case Open(request=number) | More(request=number) | Close(request=number):
            yield number


def _shifted(operation: Any, offset: int) -> Any:
    match operation:
        case Together(operations=inner):
            return Together(tuple(_shifted(one, offset) for one in inner))
        case Abort(requests=numbers):
            return Abort(tuple(number + offset for number in numbers))
        case Receive() | Drain() | CancelReceive() | Pause():
            return operation
        case _:
            return msgspec.structs.replace(operation, request=operation.request + offset)


def simpler(program: Program) -> Iterator[Program]:
    """Give programs that do a little less, those that do much less first."""
    size = len(program)
    if size:
        yield ()
    step = size // 2
    while step:
        for start in range(0, size, step):
            yield program[:start] + program[start + step :]
        step //= 2
    for index, operation in enumerate(program):
        before, after = program[:index], program[index + 1 :]
        for instead in _simpler(operation):
            yield (*before, *instead, *after)


def _simpler(operation: Operation) -> Iterator[Program]:
    match operation:
        case Together(operations=inner):
            yield inner
            for index in range(len(inner)):
                fewer = inner[:index] + inner[index + 1 :]
                yield (Together(fewer),) if len(fewer) > 1 else fewer
            for index, one in enumerate(inner):
                for instead in _simpler(one):
                    yield (Together((*inner[:index], *instead, *inner[index + 1 :])),)  # type: ignore[arg-type]
        case Submit(long=True):
            yield (Submit(operation.request),)
        case CancelSubmit():
            yield (Submit(operation.request, operation.long),)
            if operation.long:
                yield (CancelSubmit(operation.request, operation.steps),)
            for steps in range(operation.steps):
                yield (CancelSubmit(operation.request, steps, operation.long),)
        case CancelReceive():
            yield (Receive(),)
            for steps in range(operation.steps):
                yield (CancelReceive(steps),)
        case Drain():
            yield (Receive(),)
        case Abort(requests=numbers):
            for index in range(len(numbers)):
                yield (Abort(numbers[:index] + numbers[index + 1 :]),)
