"""One request's way through the stages: facts in, decisions out.

Theory of operation. The runtime tells the flow what happened (`start`, `more_input`, `output`, `companion_output`,
`bridged`, ...) and carries out, in order, the decisions that it gets back. A `Forward` asks the runtime to run the
bridge of one edge and to report with `bridged` whether it made any input; only then is the stage behind the edge
submitted to. Forwards of pieces over the same edge may be run together unless one of them ends a segment: a bridge
sees all that its source has made so far, so the newest covers the older.

The flow is over (`over` is True) after it has returned `Finish` or `Fail`, or after `release`; every later fact
is met with no decision at all, since late outputs and results of slow bridges are normal after an end.

Rules, beyond those of the tables (`states`):

1. The first stage gets the user's prompt, at once and whole; in a session, segment by segment.
2. Companions are known when the flow is made, so nothing can overtake them; each is submitted right after the
   request itself.
3. A stage's end is forwarded over every edge that leaves it; in a session the end of a segment as well; its other
   outputs only where the stage behind the edge wants them, and its KV cache likewise.
4. A stage whose data comes by connector is submitted together with its source, with a placeholder; in a session it
   gets one per segment, with the first input of the segment, and its input is complete when its source's is, or when
   its source has ended.
5. A prefill is followed by the decode, without a bridge; where the prefill is skipped, the decode does it all.
6. A bridge that has made no input by the end of its source fails the request: the stage behind it would wait
   for ever.
7. The request ends well when every stage that is needed (`RoutePlan.needed`) has ended, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from .plan import RoutePlan
from .states import TABLES, EdgeAction, EdgeFact, EdgeState, HoldFact, HoldState, LegFact, LegState, Tables

__all__ = [
    "Decision",
    "Defer",
    "Fail",
    "Finish",
    "Forward",
    "Handoff",
    "ProtocolError",
    "Release",
    "RequestFlow",
    "Submit",
    "SubmitCompanion",
    "Update",
]


class ProtocolError(Exception):
    """A fact that can not be true: something came out of a stage that had ended, or went into it twice."""


class Forward(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Run the bridge in front of `stage_id` and report with `RequestFlow.bridged`."""

    stage_id: int
    last: bool
    """Whether the input of the stage is complete with it."""
    segment_end: bool = False
    """Whether a segment of a session ends with it."""


class Submit(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Hand the request to `stage_id` as a new one."""

    stage_id: int
    last: bool
    segment_end: bool = False
    placeholder: bool = False
    """With a placeholder, since the data comes by connector, instead of what the last fact brought."""


class SubmitCompanion(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Hand a companion to the first stage, on the replica that has the request itself."""

    role: str


class Update(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Hand more input to `stage_id`."""

    stage_id: int
    last: bool
    segment_end: bool = False
    placeholder: bool = False


class Handoff(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Hand the original prompt to the decode stage `stage_id`, and report with `RequestFlow.taken_over`."""

    stage_id: int
    params: Mapping[str, Any] | None
    """What the prefill has ended with."""
    skipped: bool = False
    """There was no prefill; the decode stage does it all."""


class Defer(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The first stage is ready to feed `stage_id`, companions are missing; report with `bundle_expired`, in time."""

    stage_id: int


class Finish(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The request has ended well."""


class Fail(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The request can not go on at `stage_id`."""

    stage_id: int
    reason: str
    kind: Literal["bridge", "bundle", "handoff"] = "bridge"


class Release(msgspec.Struct, frozen=True, tag=True, gc=False):
    """What is left when a request is over."""

    stages: tuple[int, ...]
    """The stages that may still be at work on it."""
    roles: tuple[str, ...]
    """The companions that the first stage may still be at work on."""
    kv: Mapping[str, Any] | None
    """What a prefill engine holds for a decode engine that will not come."""


Decision: TypeAlias = Forward | Submit | SubmitCompanion | Update | Handoff | Defer | Finish | Fail

_NOTHING: tuple[Decision, ...] = ()
_AT_WORK = (LegState.OPEN, LegState.FED)

# Most requests have no companions, and there are many requests: these stay empty and are shared.
_NO_STATES: dict[str, LegState] = {}
_NO_ROLES: dict[str, None] = {}
_NO_STAGES: frozenset[int] = frozenset()


class RequestFlow:
    """The state of one request. Not thread-safe, needs no lock: it is only touched from the trio thread.

    Args:
        plan: the way of the request.
        roles: of its companions, in order.
        session: whether its input comes in segments.
        tables: the rules.
    """

    __slots__ = (
        "_awaiting",
        "_begun",
        "_companions",
        "_edges",
        "_hold",
        "_kv",
        "_legs",
        "_missing",
        "_plan",
        "_session",
        "_tables",
        "over",
    )

    def __init__(
        self, plan: RoutePlan, *, roles: Sequence[str] = (), session: bool = False, tables: Tables = TABLES
    ) -> None:
        self._plan = plan
        self._tables = tables
        self._session = session
        self._legs = [LegState.IDLE] * len(plan.pipeline.stages)
        self._edges = [EdgeState.OPEN] * len(plan.pipeline.stages)
        """By the id of the stage that the edge leads to."""
        self._companions = dict.fromkeys(roles, LegState.IDLE) if roles else _NO_STATES
        self._missing = dict.fromkeys(roles) if roles else _NO_ROLES
        self._hold = HoldState.NONE
        self._kv: Mapping[str, Any] | None = None
        self._awaiting = len(plan.needed)
        self._begun = _NO_STAGES
        """The stages that send by connector and are in the middle of their input, or of a segment of it."""
        self.over = False

    def state(self, stage_id: int) -> LegState:
        """Where the request stands at a stage."""
        return self._legs[stage_id]

    @property
    def takes_input(self) -> bool:
        """Whether a session can be given more."""
        return not self.over and self._legs[0] is LegState.OPEN

    @property
    def missing(self) -> tuple[str, ...]:
        """The roles of the companions that have not ended."""
        return tuple(self._missing)

    # ---- facts

    def start(self, *, last: bool = True) -> Sequence[Decision]:
        """The request is admitted. `last` is False where more input of a session will follow."""
        decisions = self._feed(0, last=last, segment_end=self._session, made_input=True)
        for role in self._companions:
            self._move_companion(role, LegFact.FEED_LAST)
            decisions.append(SubmitCompanion(role))
        return decisions

    def more_input(self, *, last: bool, made_input: bool = True) -> Sequence[Decision]:
        """A session's caller gave another segment, or, without `made_input`, said only that there will be none."""
        if self.over or self._legs[0] is LegState.ENDED:  # the first stage had enough
            return _NOTHING
        return self._feed(0, last=last, segment_end=True, made_input=made_input)

    def skip_prefill(self) -> Sequence[Decision]:
        """No replica can do the prefill that `start` asked for, and the decode stage may do it instead."""
        decode = self._plan.handoff
        if decode is None:
            raise ProtocolError("there is no prefill to be skipped")
        if self.over:
            return _NOTHING
        self._move(0, LegFact.SKIP)
        self._move(decode, LegFact.FEED_LAST)
        return (Handoff(decode, None, skipped=True),)

    def output(
        self,
        stage_id: int,
        *,
        finished: bool,
        segment_end: bool = False,
        kv_ready: bool = False,
        kv_params: Mapping[str, Any] | None = None,
    ) -> Sequence[Decision]:
        """A stage gave an output.

        Args:
            stage_id: the stage.
            finished: whether it was its last one.
            segment_end: whether the stage has worked off a segment of a session.
            kv_ready: whether its KV cache can be had.
            kv_params: what the last output of a prefill says about its KV cache.
        """
        if self.over:
            return _NOTHING
        if finished:
            return self._finished(stage_id, kv_params)
        # The hot path, once per token: in the states in which an output is legal it changes nothing.
        if self._legs[stage_id] not in self._tables.quiet:
            self._move(stage_id, LegFact.OUTPUT)
        plan = self._plan
        segment_end = segment_end and self._session
        edges = plan.feeds[stage_id] if segment_end else plan.pieces_to[stage_id]
        if kv_ready and plan.early_to[stage_id]:
            early = self._whole(plan.early_to[stage_id])
            return [*early, *self._pieces(edges, segment_end=segment_end)]
        return list(self._pieces(edges, segment_end=segment_end)) if edges else _NOTHING

    def companion_output(self, role: str, *, finished: bool) -> Sequence[Decision]:
        """The first stage gave an output for a companion. That its KV cache can be had is no reason to tell."""
        if self.over:
            return _NOTHING
        self._move_companion(role, LegFact.FINISH if finished else LegFact.OUTPUT)
        if not finished:
            return _NOTHING
        del self._missing[role]
        if self._missing:
            return _NOTHING
        return [decision for child in self._plan.feeds[0] for decision in self._edge(child, EdgeFact.BUNDLED)]

    def bundle_expired(self) -> Sequence[Decision]:
        """The companions took too long, counted from the first `Defer`."""
        if self.over or not self._missing:
            return _NOTHING
        self.over = True
        names = ", ".join(repr(role) for role in self._missing)
        return (Fail(0, f"it waited too long for its companions; missing: {names}", kind="bundle"),)

    def bridged(
        self, stage_id: int, *, made_input: bool, last: bool, saw_end: bool = True, segment_end: bool = False
    ) -> Sequence[Decision]:
        """The bridge in front of a stage was run.

        Args:
            stage_id: the stage behind the bridge.
            made_input: whether it returned anything.
            last: as in the `Forward`.
            saw_end: whether the source had ended when the bridge was run.
            segment_end: as in the `Forward`.
        """
        if self.over:
            return _NOTHING
        state = self._legs[stage_id]
        if state is LegState.ENDED:
            return _NOTHING  # the stage had enough before its source ended
        if last and not made_input and not saw_end:
            return self._came_to_nothing(stage_id)
        self._edge(stage_id, EdgeFact.CARRIED_WHOLE if last else EdgeFact.CARRIED)
        if state is LegState.IDLE and not made_input:
            if not last:
                return _NOTHING
            self.over = True
            return (Fail(stage_id, "the bridge in front of it returned nothing, so it has no input"),)
        ends_pieces = segment_end and self._plan.pipeline.stages[stage_id].feed == "output"
        if not (made_input or last or ends_pieces):
            return _NOTHING
        return self._feed(stage_id, last=last, segment_end=segment_end, made_input=made_input)

    def taken_over(self) -> Sequence[Decision]:
        """The decode stage has the request, and so the KV cache."""
        decode = self._plan.handoff
        if self.over or decode is None:
            return _NOTHING
        self._hold = self._next_hold(HoldFact.TAKEN)
        return list(self._with_it(decode, last=True, placeholder=True))

    def release(self) -> Release:
        """The request is over, however it ended."""
        self.over = True
        stages = tuple(stage_id for stage_id, state in enumerate(self._legs) if state in _AT_WORK)
        roles = tuple(role for role, state in self._companions.items() if state in _AT_WORK)
        for stage_id in range(len(self._legs)):
            self._move(stage_id, LegFact.RELEASE)
            self._edge(stage_id, EdgeFact.RELEASE)
        for role in roles:
            self._move_companion(role, LegFact.RELEASE)
        held = self._hold
        self._hold = self._next_hold(HoldFact.RELEASE)
        kv = self._kv if self._hold is HoldState.RELEASED and held is not HoldState.RELEASED else None
        return Release(stages, roles, kv)

    # ---- what follows

    def _finished(self, stage_id: int, kv_params: Mapping[str, Any] | None) -> Sequence[Decision]:
        plan = self._plan
        self._move(stage_id, LegFact.FINISH)
        self._edge(stage_id, EdgeFact.SATED)
        if stage_id == plan.handoff:  # maybe before its submission has come back, of which it is proof enough
            self._hold = self._next_hold(HoldFact.TAKEN)
        if stage_id in plan.needed:
            self._awaiting -= 1
            if not self._awaiting:
                self.over = True
                return (Finish(),)
        if stage_id == 0 and plan.handoff is not None:
            return self._hand_off(plan.handoff, kv_params)
        decisions = list(self._whole(plan.feeds[stage_id]))
        if self._session:
            decisions.extend(self._with_it(stage_id, last=True, placeholder=False))
        return decisions

    def _hand_off(self, decode: int, kv_params: Mapping[str, Any] | None) -> Sequence[Decision]:
        if kv_params:
            self._kv = kv_params
            self._hold = self._next_hold(HoldFact.PREFILLED)
        elif self._plan.pipeline.stages[decode].handoff == "params":
            self.over = True
            reason = (
                "the prefill ended without kv_transfer_params, so its KV cache can not be found; where the connector "
                "finds it by content, set handoff = 'content'"
            )
            return (Fail(decode, reason, kind="handoff"),)
        self._move(decode, LegFact.FEED_LAST)
        return (Handoff(decode, kv_params or None),)

    def _fed(self, stage_id: int, *, last: bool, segment_end: bool, placeholder: bool = False) -> Submit | Update:
        new = self._legs[stage_id] is LegState.IDLE
        self._move(stage_id, LegFact.FEED_LAST if last else LegFact.FEED)
        return (Submit if new else Update)(stage_id, last, segment_end, placeholder)

    def _feed(self, stage_id: int, *, last: bool, segment_end: bool, made_input: bool) -> list[Decision]:
        """Input for a stage, and what goes with it to the stages that have their data from it by connector."""
        decisions: list[Decision] = [self._fed(stage_id, last=last, segment_end=segment_end)]
        if self._plan.connects[stage_id]:
            begins = stage_id not in self._begun
            self._begun = self._begun - {stage_id} if segment_end or last else self._begun | {stage_id}
            if begins or last:
                complete = last or not self._session
                decisions.extend(self._with_it(stage_id, last=complete, placeholder=begins and made_input))
        return decisions

    def _with_it(self, stage_id: int, *, last: bool, placeholder: bool) -> Iterator[Decision]:
        for child in self._plan.connects[stage_id]:
            state = self._legs[child]
            if state is LegState.IDLE or state is LegState.OPEN:  # open is it in sessions only
                yield self._fed(child, last=last, segment_end=self._session, placeholder=placeholder)
                yield from self._with_it(child, last=last, placeholder=placeholder)

    def _pieces(self, edges: Sequence[int], *, segment_end: bool) -> Iterator[Decision]:
        for child in edges:
            yield from self._edge(child, EdgeFact.PART, segment_end=segment_end)

    def _whole(self, edges: Sequence[int]) -> Iterator[Decision]:
        # Companions are of the first stage alone, but until they have ended no other one has anything to forward.
        fact = EdgeFact.WHOLE_EARLY if self._missing else EdgeFact.WHOLE
        for child in edges:
            yield from self._edge(child, fact)

    def _came_to_nothing(self, stage_id: int) -> Sequence[Decision]:
        self._edge(stage_id, EdgeFact.EMPTY)
        source = self._plan.pipeline.sources[stage_id]
        if source is not None and self._legs[source] is LegState.ENDED:  # meanwhile: so there is more to be seen now
            return self._edge(stage_id, EdgeFact.WHOLE)
        return _NOTHING

    # ---- the tables

    def _move(self, stage_id: int, fact: LegFact) -> None:
        state = self._legs[stage_id]
        try:
            self._legs[stage_id] = self._tables.leg[state, fact]
        except KeyError:
            raise ProtocolError(
                f"stage {stage_id}: {fact.value!r} can not happen to a leg that is {state.value}"
            ) from None

    def _move_companion(self, role: str, fact: LegFact) -> None:
        state = self._companions[role]
        try:
            self._companions[role] = self._tables.leg[state, fact]
        except KeyError:
            raise ProtocolError(
                f"companion {role!r}: {fact.value!r} can not happen to a leg that is {state.value}"
            ) from None

    def _edge(self, child: int, fact: EdgeFact, *, segment_end: bool = False) -> Sequence[Decision]:
        state = self._edges[child]
        try:
            self._edges[child], action = self._tables.edge[state, fact]
        except KeyError:
            raise ProtocolError(
                f"the edge to stage {child}: {fact.value!r} can not happen while it is {state.value}"
            ) from None
        if action is EdgeAction.CARRY:
            return (Forward(child, False, segment_end),)
        if action is EdgeAction.CARRY_WHOLE:
            return (Forward(child, True, self._session),)
        if action is EdgeAction.DEFER:
            return (Defer(child),)
        return _NOTHING

    def _next_hold(self, fact: HoldFact) -> HoldState:
        try:
            return self._tables.hold[self._hold, fact]
        except KeyError:
            raise ProtocolError(f"the KV cache: {fact.value!r} can not happen while it is {self._hold.value}") from None
