"""Mutants of sessions: segments, turns, and the end of input."""

# ruff: noqa: SLF001 - to break something one has to reach it

from __future__ import annotations

from typing import Any

import trio

from omni_trio.errors import SessionClosed
from omni_trio.routing import RequestFlow
from omni_trio.runtime._mailbox import Mailbox
from omni_trio.runtime._request import RequestTask, Segment, Session
from omni_trio.runtime._turn import Turn
from omni_trio.testing.plan import Plan, RequestPlan, SegmentPlan, StagePlan

from ._mutant import Patch, mutant

_ONE = (StagePlan(final=True),)
_TWO = (StagePlan(), StagePlan(source=0, final=True))


def _session(stages: tuple[StagePlan, ...], *segments: SegmentPlan, seed: int = 0, **more: Any) -> Plan:
    return Plan(stages=stages, requests=(RequestPlan(segments=segments, **more),), seed=seed)


@mutant(
    "W-20",
    witness=_session(
        (StagePlan(), StagePlan(source=0, final=True, submit_time=2.0)),
        SegmentPlan((1,)),
        SegmentPlan((2,), after=0.5),
        SegmentPlan((3,), after=0.5),
    ),
)
def a_segment_is_lost_at_coalescing(patch: Patch) -> None:
    """The second of two segments that wait for a bridge is dropped rather than carried with the first."""
    real = Turn.put

    def put(self: Turn, decision: Any, source: Any) -> None:
        if any(waiting.decision.stage_id == decision.stage_id for waiting in self._waiting):
            return
        real(self, decision, source)

    patch(Turn, "put", put)


@mutant("W-20", "U47", witness=_session(_TWO, SegmentPlan((1,)), SegmentPlan((2,), after=1.0)))
def the_end_of_a_segment_is_not_forwarded(patch: Patch) -> None:
    """The next stage hears of a segment when the session ends, and not before."""
    real = RequestFlow.output

    def output(self: RequestFlow, stage_id: int, *, finished: bool, segment_end: bool = False, **more: Any) -> Any:
        del segment_end
        return real(self, stage_id, finished=finished, segment_end=False, **more)

    patch(RequestFlow, "output", output)


@mutant("U68", "W-20", witness=_session(_ONE, SegmentPlan((1,))))
def a_closed_session_waits_for_more(patch: Patch) -> None:
    """The caller has said that there will be no more, and the stage is not told."""
    real = RequestTask.send

    def send(self: RequestTask, segment: Segment) -> None:
        segment.last = False
        real(self, segment)

    patch(RequestTask, "send", send)


@mutant("U70", "W-28", witness=_session(_ONE, SegmentPlan((1,)), SegmentPlan((2,), after=1.0)))
def every_segment_begins_a_request(patch: Patch) -> None:
    """A segment is handed to the first stage as a new request rather than as more of the old one."""
    real = RequestTask.send

    def send(self: RequestTask, segment: Segment) -> None:
        segment.turn = segment.turn or (self.session is not None and self.session.begun and not segment.last)
        real(self, segment)

    patch(RequestTask, "send", send)


@mutant(
    "W-24",
    witness=_session(
        _ONE,
        SegmentPlan((1, 2, 3, 4, 5, 6)),
        SegmentPlan((7,)),
        SegmentPlan((8,), barge_in=True),
        seed=2,
    ),
)
def a_barge_in_does_not_fence(patch: Patch) -> None:
    """What the stages say in the old turn is still delivered after the caller has spoken again."""

    def fence(self: Turn) -> None:
        if self._task.verdict is not None:
            for leg in self.held():
                leg.replica.unbind(leg)

    patch(Turn, "fence", fence)


@mutant("W-24", witness=_session(_ONE, SegmentPlan((1, 2)), SegmentPlan((3,), barge_in=True, after=0.5), pace=1.0))
def a_barge_in_leaves_the_old_answer_in_the_box(patch: Patch) -> None:
    """What had been said in the old turn and not been read is delivered in the new one."""
    patch(Mailbox, "drop", lambda _: None)


@mutant("U68", witness=_session(_ONE, SegmentPlan((1, 2, 3)), SegmentPlan((4,), barge_in=True, after=1.0)))
def an_old_turn_is_not_aborted(patch: Patch) -> None:
    """The stages work on in a turn that the caller has ended."""
    real = Turn.let_go

    async def let_go(self: Turn, budget: float) -> None:
        if self is self._task.turn:
            await real(self, budget)
            return
        for leg in self.held():
            leg.replica.let_go(leg)

    patch(Turn, "let_go", let_go)


@mutant("U68", "U4", witness=_session(_ONE, SegmentPlan((1,)), act="leave", when=1.0, close=False))
def a_session_that_is_left_goes_on(patch: Patch) -> None:
    """The caller has left an open session, and the stages wait for its next word."""
    real = Turn.let_go

    async def let_go(self: Turn, budget: float) -> None:
        if self._task.session is None or self._task.session.closed:
            await real(self, budget)
            return
        for leg in self.held():
            leg.replica.let_go(leg)

    patch(Turn, "let_go", let_go)


_SLOWLY = (StagePlan(final=True, abort_time=5.0),)


@mutant("U9", "U68", witness=_session(
    _SLOWLY, SegmentPlan((1,)), SegmentPlan((2,), barge_in=True, after=1.0), act="leave", when=3.0, close=False
))  # fmt: skip
def a_barge_in_looks_like_rest(patch: Patch) -> None:
    """While an old turn is being let go of, the request counts as having nothing to do, and ends at once."""
    real = Turn.let_go

    async def let_go(self: Turn, budget: float) -> None:
        self._task._idle = self is not self._task.turn
        await real(self, budget)

    patch(Turn, "let_go", let_go)


@mutant("U38", "W-3", witness=_session(
    _SLOWLY, SegmentPlan((1,)), SegmentPlan((2,), barge_in=True, after=1.0), act="deadline", when=3.0, close=False
))  # fmt: skip
def a_deadline_waits_for_an_old_turn(patch: Patch) -> None:
    """A deadline that passes while an old turn is being let go of is noticed afterwards."""

    async def keep_deadline(_: RequestTask) -> None:
        await trio.sleep_forever()

    patch(RequestTask, "_keep_deadline", keep_deadline)


@mutant("W-20", "U70", witness=Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True), StagePlan(source=0, feed="connector", final=True)),
    requests=(
        RequestPlan(segments=(SegmentPlan((1,)), SegmentPlan((2,), after=1.0), SegmentPlan((3,), barge_in=True))),
    ),
    seed=1,
))  # fmt: skip
def a_barge_in_is_taken_by_the_old_turn(patch: Patch) -> None:
    """A barge-in that finds its request's task awake is lost with the turn that it ends."""
    real = RequestTask._take_segment

    async def take_segment(self: RequestTask, session: Session) -> None:
        if session.waiting[0].turn and self._turn_scope is not None and self._turn_scope.cancel_called:
            segment = session.waiting.popleft()
            segment.error = SessionClosed("it was overtaken")
            segment.handed_over.set()
            session.begun = True
        await real(self, session)

    patch(RequestTask, "_take_segment", take_segment)
