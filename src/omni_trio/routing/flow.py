"""One request's way through the stages: facts in, decisions out.

Theory of operation. The runtime tells the flow what happened (`start`, `output`, `bridged`) and carries out, in
order, the decisions that it gets back. A `Forward` asks the runtime to run the bridge of one edge and to report
with `bridged` whether it made any input; only then is the stage behind the edge submitted to. Forwards over the
same edge may be run together: a bridge sees all that its source has made so far, so the newest covers the older.

The flow is over (`over` is True) after it has returned `Finish` or `Fail`, or after `release`; every later fact
is met with no decision at all, since late outputs and results of slow bridges are normal after an end.

Rules:

1. The first stage gets the user's prompt, at once and whole.
2. A stage's end is forwarded over every edge that leaves it; its other outputs over streaming edges only.
3. A stage is submitted to once, with the first input that its bridge makes; what comes later are updates.
4. A bridge that has made no input by the end of its source fails the request: the stage behind it would wait
   for ever.
5. The request ends well when every stage whose output goes to the user has ended, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from .plan import RoutePlan
from .states import LEG_TRANSITIONS, Fact, LegState

__all__ = ["Decision", "Fail", "Finish", "Forward", "ProtocolError", "RequestFlow", "Submit", "Update"]


class ProtocolError(Exception):
    """A fact that can not be true: something came out of a stage that had ended, or went into it twice."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Run the bridge in front of `stage_id` and report with `RequestFlow.bridged`."""

    stage_id: int
    last: bool
    """Whether the source has ended."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Hand the request to `stage_id` as a new one."""

    stage_id: int
    last: bool


class Update(msgspec.Struct, frozen=True, tag=True):
    """Hand more input to `stage_id`."""

    stage_id: int
    last: bool


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The request has ended well."""


class Fail(msgspec.Struct, frozen=True, tag=True):
    """The request can not go on at `stage_id`."""

    stage_id: int
    reason: str


Decision: TypeAlias = Forward | Submit | Update | Finish | Fail

_NOTHING: tuple[Decision, ...] = ()


class RequestFlow:
    """The state of one request. Not thread-safe, needs no lock: it is only touched from the trio thread."""

    __slots__ = ("_awaiting", "_legs", "_plan", "over")

    def __init__(self, plan: RoutePlan) -> None:
        self._plan = plan
        self._legs = [LegState.IDLE] * len(plan.pipeline.stages)
        self._awaiting = len(plan.needed)
        self.over = False

    def state(self, stage_id: int) -> LegState:
        """Where the request stands at a stage."""
        return self._legs[stage_id]

    def start(self) -> Sequence[Decision]:
        """The request is admitted."""
        self._move(0, Fact.FEED_LAST)
        return (Submit(0, last=True),)

    def output(self, stage_id: int, *, finished: bool) -> Sequence[Decision]:
        """A stage gave an output."""
        if self.over:
            return _NOTHING
        if not finished:
            # The hot path, once per token: in the two states in which an output is legal it changes nothing.
            state = self._legs[stage_id]
            if state is not LegState.FED and state is not LegState.OPEN:
                self._move(stage_id, Fact.OUTPUT)
            edges = self._plan.streams_to[stage_id]
            return tuple(Forward(child, last=False) for child in edges) if edges else _NOTHING
        self._move(stage_id, Fact.FINISH)
        decisions: list[Decision] = [Forward(child, last=True) for child in self._plan.feeds[stage_id]]
        if self._plan.emits[stage_id]:
            self._awaiting -= 1
            if not self._awaiting:
                self.over = True
                return (Finish(),)
        return decisions

    def bridged(self, stage_id: int, *, made_input: bool, last: bool) -> Sequence[Decision]:
        """The bridge in front of a stage was run.

        Args:
            stage_id: the stage behind the bridge.
            made_input: whether it returned anything.
            last: whether the source had ended when it was run.
        """
        if self.over:
            return _NOTHING
        state = self._legs[stage_id]
        if state is LegState.ENDED:
            return _NOTHING  # the stage had enough before its source ended
        if not made_input and not last:
            return _NOTHING
        if state is LegState.IDLE:
            if not made_input:
                self.over = True
                return (Fail(stage_id, "the bridge in front of it returned nothing, so it has no input"),)
            self._move(stage_id, Fact.FEED_LAST if last else Fact.FEED)
            return (Submit(stage_id, last=last),)
        self._move(stage_id, Fact.FEED_LAST if last else Fact.FEED)
        return (Update(stage_id, last=last),)

    def release(self) -> tuple[int, ...]:
        """The request is over, however it ended. Returns the stages that may still be at work on it."""
        self.over = True
        held = tuple(stage_id for stage_id, state in enumerate(self._legs) if state in (LegState.OPEN, LegState.FED))
        for stage_id in range(len(self._legs)):
            self._move(stage_id, Fact.RELEASE)
        return held

    def _move(self, stage_id: int, fact: Fact) -> None:
        state = self._legs[stage_id]
        try:
            self._legs[stage_id] = LEG_TRANSITIONS[state, fact]
        except KeyError:
            raise ProtocolError(
                f"stage {stage_id}: {fact.value!r} can not happen to a leg that is {state.value}"
            ) from None
