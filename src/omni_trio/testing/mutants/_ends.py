"""Mutants of verdicts, of what reaches the caller, and of aborts."""

# ruff: noqa: SLF001 - to break something one has to reach it

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from omni_trio.messages import Output
from omni_trio.runtime import _mailbox
from omni_trio.runtime._admission import RequestOptions
from omni_trio.runtime._mailbox import Mailbox, _Merged
from omni_trio.runtime._orchestrator import Orchestrator
from omni_trio.runtime._request import RequestTask
from omni_trio.runtime._runtime import Runtime
from omni_trio.runtime._turn import Turn
from omni_trio.stages import Leg, Replica
from omni_trio.testing.plan import Plan, RequestPlan, StagePlan
from omni_trio.testing.script import Chunk, Error, Finish, FinishSilently, LateChunk, Reject, Stall, Step, Wait, tokens

from ._mutant import Patch, mutant

_ONE = (StagePlan(final=True),)
_TWO = (StagePlan(), StagePlan(source=0, final=True))


def _asked(*scripts: Any, **more: Any) -> RequestPlan:
    return RequestPlan(scripts=scripts, **more)


_PLAIN = Plan(stages=_ONE, requests=(_asked(tokens(1)),))
_SLOW = Plan(stages=_ONE, requests=(_asked(tokens(4, each=1.0), act="slow", when=10.0),))
_FAILS = Plan(stages=_ONE, requests=(_asked((Error(),)),))
_EXPIRES = Plan(stages=_ONE, requests=(_asked((Stall(),), act="deadline", when=1.0),))


# ---- verdicts


@mutant("U10", "W-66", witness=_PLAIN)
def the_last_verdict_counts(patch: Patch) -> None:
    """A request that has ended can end once more, differently."""
    real = RequestTask.end

    def end(self: RequestTask, error: Any, verdict: Any = None) -> None:
        self.verdict = None
        real(self, error, verdict)

    patch(RequestTask, "end", end)


@mutant("U1", "U2", witness=_FAILS)
def a_failure_looks_like_an_end(patch: Patch) -> None:
    """The caller of a request that failed is told that it has ended, and nothing else."""
    real = Mailbox.close

    def close(self: Mailbox, error: Any = None, *, discard: bool = False) -> None:
        real(self, None, discard=discard)

    patch(Mailbox, "close", close)


@mutant("U1", "U2", witness=_FAILS)
def an_error_is_only_noted(patch: Patch) -> None:
    """A stage fails a request, and the request goes on waiting."""
    real = RequestTask.leg_ended

    def leg_ended(self: RequestTask, leg: Leg, output: Any, now: float) -> None:
        if output.error is None or leg.role is not None:
            real(self, leg, output, now)

    patch(RequestTask, "leg_ended", leg_ended)


@mutant("U49", "W-34", witness=Plan(stages=_ONE, requests=(_asked((FinishSilently(),)),)))
def an_end_without_an_output_is_lost(patch: Patch) -> None:
    """A stage ends a request with nothing but the word that it has."""
    real = RequestTask.leg_ended

    def leg_ended(self: RequestTask, leg: Leg, output: Any, now: float) -> None:
        if output.token_ids or output.error is not None:
            real(self, leg, output, now)

    patch(RequestTask, "leg_ended", leg_ended)


@mutant("U57", witness=_EXPIRES)
def a_deadline_never_passes(patch: Patch) -> None:
    """A request waits for its stage longer than its caller wants."""
    patch(RequestOptions, "absolute_deadline", lambda _: float("inf"))


@mutant("U58", witness=Plan(stages=_ONE, requests=(_asked(tokens(1, each=1.0)), _asked(tokens(1))), max_in_flight=1))
def overload_is_accepted(patch: Patch) -> None:
    """There are more requests in flight than there may be."""
    patch(Orchestrator, "_max_in_flight", property(lambda _: 1_000_000, lambda *_: None))


# ---- what reaches the caller


@mutant("U56", witness=_SLOW)
def merging_drops(patch: Patch) -> None:
    """What comes while the caller is busy replaces what waits for it."""

    def add(self: _Merged, output: Any) -> None:
        self.token_ids = list(output.token_ids)
        self.last = output

    patch(_Merged, "add", add)


@mutant("U56", witness=Plan(
    stages=_ONE, requests=(_asked((*tokens(4, each=1.0)[:-1], Error()), act="slow", when=10.0),)
))  # fmt: skip
def merging_reorders(patch: Patch) -> None:
    """What comes later is read first."""

    def add(self: _Merged, output: Any) -> None:
        self.token_ids[:0] = output.token_ids
        self.last = output

    patch(_Merged, "add", add)


@mutant("W-7", "U56", witness=_SLOW)
def what_waits_is_not_merged(patch: Patch) -> None:
    """A caller that is slow gets one old output after another, and what waits for it grows and grows."""
    numbers = itertools.count()

    def put(self: Mailbox, leg: Leg, output: Any) -> None:
        self._entries[leg, output.index, next(numbers)] = output
        self._signal.set()

    patch(Mailbox, "put", put)


@mutant("U47", witness=Plan(stages=_ONE, requests=(_asked(tokens(2, each=1.0)),)))
def every_output_is_the_last(patch: Patch) -> None:
    """Each output of a stage says that it is the stage's last one."""
    real = _mailbox._event

    def event(leg: Leg, *entry: Any) -> Any:
        made = real(leg, *entry)
        return msgspec.structs.replace(made, finished=True) if isinstance(made, Output) else made

    patch(_mailbox, "_event", event)


@mutant("U48", witness=_PLAIN)
def the_end_overtakes_the_last_output(patch: Patch) -> None:
    """The caller is told of the end while an output waits for it, and stops reading."""
    real = Mailbox.close

    def close(self: Mailbox, error: Any = None, *, discard: bool = False) -> None:
        real(self, error, discard=True)

    patch(Mailbox, "close", close)


@mutant("U6", witness=Plan(stages=_ONE, requests=(_asked((Chunk((1,)), Wait(1.0), Chunk((2,)), Finish())),)))
def an_output_comes_twice(patch: Patch) -> None:
    """The caller gets every output of a stage once more."""
    real = Mailbox.put

    def put(self: Mailbox, leg: Leg, output: Any) -> None:
        real(self, leg, output)
        real(self, leg, output)

    patch(Mailbox, "put", put)


@mutant("W-61", witness=Plan(stages=_TWO, requests=(_asked(tokens(1), tokens(1)),)))
def metrics_are_swallowed(patch: Patch) -> None:
    """Nobody hears what a stage has cost whose outputs are not final."""
    patch(Mailbox, "put_metrics", lambda *_: None)


@mutant("W-61", witness=Plan(stages=_ONE, requests=(_asked((Step(1, 2), Wait(1.0), *tokens(1))),)))
def progress_is_swallowed(patch: Patch) -> None:
    """Nobody hears how far a stage has come."""
    patch(Mailbox, "put_progress", lambda *_: None)


# ---- aborts

_STALLED = (Chunk((1,)), Stall())


@mutant(
    "U9",
    "W-53",
    witness=Plan(stages=(StagePlan(final=True, abort_time=3.0),), requests=(_asked(_STALLED, act="abort", when=1.0),)),
)
def an_abort_does_not_wait(patch: Patch) -> None:
    """It returns while the stage is still at work, and weights are loaded under a running request."""

    async def abort(self: Runtime, request_ids: Any, *, keep_partial: bool = False) -> tuple[str, ...]:  # noqa: ASYNC124 - stands in for one that awaits
        task = self._orchestrator.tasks.get(request_ids)
        if task is None or task.verdict is not None:
            return ()
        task.abort("it was aborted", keep_partial=keep_partial)
        return (task.external_id,)

    patch(Runtime, "abort", abort)


@mutant("U9", witness=Plan(stages=_ONE, requests=(_asked(tokens(9, each=1.0), act="abort", when=3.5, pace=2.0),)))
def what_waits_survives_an_abort(patch: Patch) -> None:
    """An output that was made before an abort is delivered after it."""
    real = Mailbox.close

    def close(self: Mailbox, error: Any = None, *, discard: bool = False) -> None:
        real(self, error)

    patch(Mailbox, "close", close)


@mutant(
    "U9",
    witness=Plan(
        stages=(StagePlan(final=True, abort_time=0.5),),
        requests=(_asked((Chunk((1,)), LateChunk(), Stall()), act="abort", when=1.0, pace=2.0),),
    ),
)
def a_late_output_is_delivered(patch: Patch) -> None:
    """What the stage says while it is being aborted still reaches the caller."""
    patch(Turn, "fence", lambda _: None)


@mutant("U9", witness=Plan(
    stages=(StagePlan(final=True, abort_time=99.0),), requests=(_asked(_STALLED, act="abort", when=1.0),)
))  # fmt: skip
def a_missing_acknowledgement_is_overlooked(patch: Patch) -> None:
    """An abort that a stage never confirmed counts as done, and the replica as free."""

    def unacknowledged(self: RequestTask, leg: Leg, why: str, cause: Any = None) -> None:
        leg.replica.let_go(leg)

    patch(RequestTask, "unacknowledged", unacknowledged)


@mutant("U9", "W-5", witness=Plan(
    stages=(StagePlan(final=True, abort_time=15.0),), requests=(_asked(_STALLED, act="abort", when=1.0),)
))  # fmt: skip
def an_abort_has_no_limit(patch: Patch) -> None:
    """An abort waits for a stage that takes its time."""
    real = Turn.let_go

    async def let_go(self: Turn, _budget: float) -> None:
        await real(self, 1e6)

    patch(Turn, "let_go", let_go)


@mutant("U13", "W-34", witness=_EXPIRES)
def stages_are_not_told_of_a_deadline(patch: Patch) -> None:
    """A request has expired, and its stage works on for nobody."""
    real = Turn.let_go

    async def let_go(self: Turn, budget: float) -> None:
        if self._task.verdict != "expired":
            await real(self, budget)
            return
        for leg in self.held():
            leg.replica.let_go(leg)

    patch(Turn, "let_go", let_go)


@mutant(
    "U4",
    "U13",
    witness=Plan(
        stages=(StagePlan(final=True), StagePlan(source=0, feed="output", final=True)),
        requests=(_asked((Chunk((1,)), Stall()), (Stall(),), act="leave", when=1.0),),
    ),
)
def only_one_stage_is_told_of_an_abort(patch: Patch) -> None:
    """The others work on, and their slots stay taken."""
    real = Turn.held
    patch(Turn, "held", lambda self: real(self)[:1])


@mutant("U10", "U12", "W-33", witness=Plan(stages=_ONE, requests=(_asked((Reject(),)),)))
def a_refused_request_keeps_its_slot(patch: Patch) -> None:
    """A stage has refused a request, and a slot of it counts as taken for ever."""
    real = Replica.let_go

    def let_go(self: Replica, leg: Leg) -> None:
        refused = leg.held and not leg.meter.outputs
        real(self, leg)
        self.load += refused

    patch(Replica, "let_go", let_go)


@mutant("U13", witness=Plan(stages=_ONE, requests=(_asked((Stall(),), act="leave", when=1.0),)))
def a_caller_that_leaves_is_forgotten(patch: Patch) -> None:
    """The request of a caller that left its block is not aborted anywhere."""

    async def let_go(self: Turn, _budget: float) -> None:  # noqa: ASYNC124 - stands in for one that awaits
        for leg in self.held():
            leg.replica.let_go(leg)

    patch(Turn, "let_go", let_go)
