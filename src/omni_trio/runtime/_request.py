"""The task of one request: hears what the stages say, gives the one verdict, and lets go of every stage at the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import trio

from omni_trio.bridges import Companion, ExpandContext
from omni_trio.errors import (
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    ReplicaLost,
    RequestAborted,
    RequestError,
    SessionClosed,
    ShutDown,
    StageFailed,
)
from omni_trio.messages import StageInput, StageOutput
from omni_trio.routing import Decision, Defer, Fail, Finish, Forward, Handoff, LegState, RoutePlan, Update
from omni_trio.stages import Leg, Replica, StagePool

from . import _buggify
from ._admission import make_companions
from ._fail import failure
from ._mailbox import Mailbox
from ._result import collect_result
from ._signal import Signal
from ._turn import Turn

if TYPE_CHECKING:
    from ._orchestrator import Orchestrator

__all__ = ["RequestTask", "Segment", "Session", "Verdict"]

Verdict: TypeAlias = Literal["finished", "failed", "aborted", "expired"]

_logger = logging.getLogger("omni_trio")


@attrs.define(eq=False)
class Segment:
    """A piece of a session's input on its way to the first stage."""

    input: StageInput
    last: bool = False
    params: tuple[Any, ...] | None = None
    """From now on, in place of the earlier ones."""
    turn: bool = False
    """Whether it begins a new turn."""
    handed_over: trio.Event = attrs.field(factory=trio.Event)
    """Set once the first stage has it, or will not get it."""
    error: RequestError | None = None
    """Why the first stage did not get it."""


@attrs.define(eq=False)
class Session:
    """What a request has that is given its input bit by bit."""

    waiting: deque[Segment] = attrs.field(factory=deque)
    begun: bool = False
    """Whether the first stage has been given anything in this turn."""
    closed: bool = False
    """Whether the caller has said that there will be no more."""


class RequestTask:
    """One request, from admission until no stage holds it.

    There is one way out for all ends. `end` gives the verdict: the first call counts, tells the consumer, and
    cancels the task's scope where the task may be waiting for something. The task's own `finally` then aborts at
    every stage that still holds the request, waits for the acknowledgements, and only then counts as done.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        request_id: str,
        external_id: str,
        prompt: StageInput,
        params: tuple[Any, ...],
        given: Any,
        plan: RoutePlan,
        deadline: float,
        priority: int,
        session: bool = False,
    ) -> None:
        self.request_id = request_id
        self.external_id = external_id
        self.prompt = prompt
        self.params = params
        self.plan = plan
        self.deadline = deadline
        self.priority = priority
        self.session = Session() if session else None
        self.mailbox = Mailbox()
        self.verdict: Verdict | None = None
        self.error: RequestError | None = None
        self.abort_error: EngineDied | None = None
        """Set where a stage did not acknowledge the abort."""
        self.begun = False
        """Whether it has got through the door, which is closed while the runtime is paused."""
        self.admitted = False
        """Whether the first stage has the request."""
        self.at_door = Signal()
        """Set once the first stage has the request, or it has ended before."""
        self.done = trio.Event()
        """Set once no stage holds the request any more."""
        self.scope = trio.CancelScope(deadline=deadline)
        self.created = trio.current_time()
        self.turn = Turn(self, 0)
        self._given = given
        self._orchestrator = orchestrator
        self._pipeline = plan.pipeline
        self._trace = orchestrator.trace
        self._turn_scope: trio.CancelScope | None = None
        """In a session, around the work of one turn."""
        self._bundle_deadline = math.inf
        self._wake = Signal()
        self._idle = False

    # ---- facts from the readers of replicas; synchronous

    def leg_output(self, leg: Leg, output: StageOutput) -> None:
        """A stage gave an output that is not its last one."""
        role = leg.role
        if output.progress is not None and role is None:
            self.mailbox.put_progress(leg, output)
            if not (output.token_ids or output.text or output.data):
                return
        kv_ready = output.kv_transfer_params is not None and output.kv_ready
        if leg.emits and (not kv_ready or output.token_ids or output.text):
            self.mailbox.put(leg, output)
        if leg.collects:
            leg.collect(output)
        if leg.streams or output.segment_end or kv_ready:
            self._heard(leg, output, kv_ready=kv_ready)
        if self._trace:
            self.trace_leg("leg.output", leg, value=float(len(output.token_ids) or 1))

    def _heard(self, leg: Leg, output: StageOutput, *, kv_ready: bool) -> None:
        if leg.role is not None:
            return  # that a companion's KV cache can be had does not complete the bundle (I9)
        segment_end = output.segment_end and leg.segments is not None
        self._follow(
            self.turn.flow.output(leg.stage_id, finished=False, segment_end=segment_end, kv_ready=kv_ready), leg
        )
        if segment_end and leg.segments:
            leg.segments.popleft()

    def leg_ended(self, leg: Leg, output: StageOutput, now: float) -> None:
        """A stage gave its last output, or failed the request."""
        if output.error is not None:
            self.trace_leg("leg.finished", leg, detail="error")
            if leg.stage_id == self.plan.handoff:
                self.turn.flow.taken_over()  # maybe before its submission has come back, of which it is proof enough
            who = "" if leg.role is None else f"its companion {leg.role!r} failed: "
            self.end(StageFailed(f"{who}{output.error}", **self.place(leg.replica)))
            return
        if leg.collects:
            leg.collect(output)
        leg.finish_reason = output.finish_reason
        metrics = leg.finish(now)
        if leg.role is not None:
            self.trace_leg("leg.finished", leg, detail=output.finish_reason or "")
            self._follow(self.turn.flow.companion_output(leg.role, finished=True), leg)
            return
        if leg.emits:
            self.mailbox.put(leg, output)
        else:
            self.mailbox.put_metrics(leg, metrics)
        self.trace_leg("leg.finished", leg, detail=output.finish_reason or "")
        params = output.kv_transfer_params
        self._follow(self.turn.flow.output(leg.stage_id, finished=True, kv_params=params), leg)

    def leg_broken(self, leg: Leg, error: Exception) -> None:
        """An output of the stage could not be made sense of."""
        failed = StageFailed(f"its output can not be used: {type(error).__name__}: {error}", **self.place(leg.replica))
        failed.__cause__ = error
        self.end(failed)

    def leg_lost(self, leg: Leg, death: EngineDied) -> None:
        """The replica that worked on a leg is gone."""
        error = ReplicaLost(f"the replica that worked on it is gone: {death.message}", **self.place(leg.replica))
        error.__cause__ = death
        self.end(error)

    def _follow(self, decisions: Iterable[Decision], source: Leg) -> None:
        for decision in decisions:
            if isinstance(decision, Forward | Handoff | Update):
                self.turn.put(decision, source)
                self._wake.set()
            elif isinstance(decision, Finish):
                self.end(None)
            elif isinstance(decision, Fail):
                self.end(failure(decision, self.place(decision.stage_id)))
            elif isinstance(decision, Defer) and self._bundle_deadline == math.inf:
                self._bundle_deadline = trio.current_time() + self._pipeline.bundle_timeout
                self._trace.emit("request.deferred", request_id=self.external_id, stage_id=decision.stage_id)
                self._wake.set()

    # ---- the end

    def end(self, error: RequestError | None, verdict: Verdict | None = None) -> None:
        """Give the verdict. Only the first call counts."""
        if self.verdict is not None:
            return
        self.verdict = verdict or ("finished" if error is None else "failed")
        self.error = error
        discard = self.verdict == "aborted"  # when abort() returns, no output may be delivered any more (I6)
        self.mailbox.close(error, discard=discard)
        if not self._idle:
            # The task may be inside a bridge, a submit or an update, whose result nobody needs any more.
            self.scope.cancel(f"request {self.external_id}: {self.verdict}")
        self._wake.set()
        self.at_door.set()
        if self.session is not None:
            self._refuse_segments(self.session)
        self._trace.emit(
            f"request.{self.verdict}", request_id=self.external_id, detail="" if error is None else str(error)
        )
        if self._idle and not self.turn and not self.turn.holds():
            # The usual end: nothing is under way and no stage holds it, so it is done here and now, and its caller
            # need not wait until the task has run once more only to find that out.
            self._close()
        else:
            self.turn.fence()

    def abort(self, why: str, *, keep_partial: bool = False) -> None:
        """End with `RequestAborted`; with `keep_partial`, it carries what the consumer has not taken yet."""
        if self.verdict is None:
            partial = collect_result(self.external_id, self.mailbox.drain()) if keep_partial else None
            self.end(RequestAborted(why, request_id=self.external_id, partial=partial), "aborted")

    def shut_down(self) -> None:
        """End because the runtime closes."""
        self.end(ShutDown("the runtime is closing; ask the next one again", request_id=self.external_id), "aborted")

    # ---- the task

    async def run(self) -> None:
        """Live. Started by the orchestrator in its requests' nursery."""
        try:
            with self.scope:
                await self._drive()
            # A verdict is missing where the scope's own deadline ended it.
            self._expire()
        finally:
            self.shut_down()  # counts only where the whole runtime is being cancelled
            if not self.done.is_set():
                await self.turn.let_go(self._orchestrator.abort_timeout)
                self._close()

    async def _drive(self) -> None:
        try:
            if _buggify.hook is not None:
                await _buggify.hook("a request begins")
            await self._orchestrator.gate.passed()
            self.begun = True
            if self.session is None:
                await self._begin()
                self._enter()
                await self._work()
            else:
                self._enter()
                await self._take_turns(self.session)
        except RequestError as error:
            if error.request_id is None:
                error.request_id = self.external_id
            self.end(error)

    def _enter(self) -> None:
        # Whoever ends a request before it is in has told its caller so.
        self.admitted = self.verdict is None
        self.at_door.set()

    async def _begin(self) -> None:
        expander = self._pipeline.expander
        companions: tuple[Companion, ...] = ()
        if expander is not None and self.plan.feeds[0]:
            context = ExpandContext(request_id=self.external_id, prompt=self.prompt, params=self.params[0])
            companions = make_companions(expander, context, stage=self._pipeline.stages[0].name)
        if companions:
            for companion in companions:
                self.companion_params(companion.sampling)  # refuses what can not be before a stage has seen anything
            self.turn = Turn(self, 0, companions)
        await self.turn.begin(self.prompt, last=True)

    async def _work(self) -> None:
        session = self.session
        while self.verdict is None:
            if _buggify.hook is not None:
                await _buggify.hook("a request goes on")
            if self.turn:
                await self.turn.carry_out_next()
            elif session is not None and session.waiting:
                await self._take_segment(session)
            else:
                await self._rest()

    async def _rest(self) -> None:
        deadline = self._next_deadline()
        if deadline == math.inf:
            self._idle = True
            try:
                await self._wake.wait()
                if _buggify.hook is not None:
                    await _buggify.hook("a request wakes")
            finally:
                self._idle = False  # a barge-in cancels the wait, and what follows is no rest
            return
        with trio.move_on_at(deadline) as scope:
            self._idle = True
            try:
                await self._wake.wait()
            finally:
                self._idle = False
        if scope.cancelled_caught and self.verdict is None:
            self._check_deadlines()

    # ---- waits that are bounded by more than the request's own deadline

    def _next_deadline(self) -> float:
        deadline = self._bundle_deadline
        if True in self.plan.watches:
            deadline = min(deadline, *(due for _, due in self._chunks_due()), math.inf)
        return deadline

    def _chunks_due(self) -> list[tuple[int, float]]:
        """The stages that wait for data by connector, each with the time at which waiting is over."""
        due = []
        pipeline, turn = self._pipeline, self.turn
        for stage_id in self.plan.stages:
            stage = pipeline.stages[stage_id]
            source = pipeline.sources[stage_id]
            if stage.feed != "connector" or source is None or turn.flow.state(stage_id) is not LegState.FED:
                continue
            legs = [turn.legs[one] for one in (source, stage_id) if one in turn.legs]
            if legs:
                due.append((stage_id, max(leg.meter.last_sign() for leg in legs) + stage.chunk_timeout))
        return due

    def _check_deadlines(self) -> None:
        now = trio.current_time()
        if now >= self._bundle_deadline:
            self._bundle_deadline = math.inf
            for decision in self.turn.flow.bundle_expired():
                if isinstance(decision, Fail):
                    self.end(failure(decision, self.place(decision.stage_id)), "expired")
        for stage_id, due in self._chunks_due():
            if now >= due and self.verdict is None:
                timeout = self._pipeline.stages[stage_id].chunk_timeout
                self.end(
                    DeadlineExceeded(
                        f"neither it nor the stage that sends to it has given a sign of life for {timeout:g} s; "
                        "if they need more, raise the stage's chunk_timeout",
                        **self.place(self.turn.legs[stage_id].replica),
                    ),
                    "expired",
                )

    # ---- sessions

    def send(self, segment: Segment) -> None:
        """Put a segment in front of the task.

        Raises:
            SessionClosed: the session takes no more input.
        """
        session = self.session
        assert session is not None  # only sessions are sent to
        why = None
        if session.closed:
            why = "was closed by its caller"
        elif self.verdict is not None:
            why = f"has ended ({self.verdict})"
        elif session.begun and not segment.turn and not self.turn.flow.takes_input:
            why = "takes no more input: its first stage has decided that it has enough"
        if why is not None:
            error = SessionClosed(f"the session {why}; open a new one", request_id=self.external_id)
            error.__cause__ = self.error
            raise error
        session.closed = segment.last
        if segment.turn:
            self._refuse_segments(session)
            session.begun = False
            self.turn.fence()
            self.mailbox.drop()
            if self._turn_scope is not None:
                self._turn_scope.cancel("a new turn begins")
        session.waiting.append(segment)
        self._wake.set()

    def _refuse_segments(self, session: Session) -> None:
        for segment in session.waiting:
            segment.error = SessionClosed(
                "it was overtaken by the end of the session or by a new turn", request_id=self.external_id
            )
            segment.error.__cause__ = self.error
            segment.handed_over.set()
        session.waiting.clear()

    async def _take_turns(self, session: Session) -> None:
        while self.verdict is None:
            with trio.CancelScope() as self._turn_scope:
                await self._work()
            if self.verdict is None:
                old = self.turn
                self.turn = Turn(self, old.number + 1)
                self._trace.emit("request.turn", request_id=self.external_id, value=float(self.turn.number))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_deadline)
                    await old.let_go(self._orchestrator.abort_timeout)
                    nursery.cancel_scope.cancel("the old turn is over")

    async def _keep_deadline(self) -> None:
        """Give the verdict on time while the task waits where it can not be cancelled."""
        try:
            await trio.sleep_forever()
        finally:
            if trio.current_time() >= self.deadline:
                self._expire()

    def _expire(self) -> None:
        self.end(DeadlineExceeded("its deadline passed before it was done", request_id=self.external_id), "expired")

    async def _take_segment(self, session: Session) -> None:
        # A barge-in that finds the task awake leaves its segment for the turn that it begins.
        await trio.lowlevel.checkpoint_if_cancelled()
        segment = session.waiting.popleft()
        if segment.params is not None:
            self.params = segment.params
        try:
            if session.begun:
                await self.turn.feed(segment.input, last=segment.last)
            else:
                session.begun = True
                self.prompt = segment.input
                await self.turn.begin(segment.input, last=segment.last)
        except InvalidRequest as error:
            # The stage did not take it, and goes on with what it has; unless this was to be the first or the last.
            segment.error = error
            if segment.last or not self.turn.legs or not self.turn.legs[0].held:
                raise
        except RequestError as error:
            segment.error = error
            raise
        except trio.Cancelled:
            segment.error = SessionClosed("it was overtaken by the end of the session or by a new turn",
                                          request_id=self.external_id)  # fmt: skip
            raise
        finally:
            segment.handed_over.set()

    # ---- for the turn

    @property
    def pools(self) -> tuple[StagePool, ...]:
        """The pools of all stages."""
        return self._orchestrator.pools

    async def begin_hand_over(self, stage_id: int) -> None:
        """Wait until the stage may be handed something; `end_hand_over` has to follow."""
        gate = self._orchestrator.gate
        if gate.frozen:
            await gate.thawed(stage_id)
        if self.verdict is not None:
            # A cancellation that has not met a checkpoint yet: the stage is not to see the request at all.
            await trio.lowlevel.checkpoint_if_cancelled()
        gate.begin(stage_id)

    def end_hand_over(self, stage_id: int) -> None:
        """The hand-over is over, one way or another."""
        self._orchestrator.gate.end(stage_id)

    def companion_params(self, overrides: Mapping[str, Any]) -> Any:
        """The first stage's parameters with a companion's own over them."""
        if not overrides:
            return self.params[0]
        given = {} if self._given is None else self._given
        if not isinstance(given, Mapping):
            raise InvalidRequest(
                "companions change single parameters of the first stage; give its parameters as a mapping",
                **self.place(0),
            )
        return self._orchestrator.resolve(0, {**given, **overrides})

    def replica_died(self, replica: Replica, death: EngineDied) -> None:
        """A replica was found dead while this request dealt with it."""
        self._orchestrator.replica_died(replica, death)

    def unacknowledged(self, leg: Leg, why: str, cause: Exception | None = None) -> None:
        """An abort did not come back."""
        # Nobody can know whether the work goes on, so the replica is not to be trusted with its slots (I6, I8).
        death = EngineDied(f"{why}; it counts as dead", **(self.place(leg.replica) | {"request_id": None}))
        death.__cause__ = cause
        self.abort_error = death.for_request(self.external_id)
        self._orchestrator.replica_died(leg.replica, death)
        leg.replica.let_go(leg)

    def log_unreleased(self, stage_id: int, error: Exception) -> None:
        """Releasing a KV cache failed: it costs the prefill engine memory until its own time-out, and nobody else."""
        _logger.warning(
            "request %r: stage %r could not release the KV cache that was prefilled for it (%s: %s)",
            self.external_id,
            self._pipeline.stages[stage_id].name,
            type(error).__name__,
            error,
        )
        self.trace_bridge("kv.unreleased", stage_id)

    def _close(self) -> None:
        self.turn.flow.release()
        self._orchestrator.forget(self)
        self.done.set()

    # ---- words

    def place(self, where: Replica | int) -> dict[str, Any]:
        """Where something happened, as errors and events want it."""
        stage_id = where if isinstance(where, int) else where.stage_id
        return {
            "request_id": self.external_id,
            "stage": self._pipeline.stages[stage_id].name,
            "stage_id": stage_id,
            "replica_id": None if isinstance(where, int) else where.replica_id,
        }

    def trace_bridge(self, name: str, stage_id: int) -> None:
        """Tell instruments about the edge to a stage."""
        if self._trace:
            self._trace.emit(name, **self.place(stage_id))

    def trace_leg(self, name: str, leg: Leg, *, detail: str = "", value: float = 0.0) -> None:
        """Tell instruments about a leg; those of companions have events of their own."""
        if self._trace:
            if leg.role is not None:
                name, detail = f"companion.{name.removeprefix('leg.')}", f"{leg.role} {detail}".rstrip()
            self._trace.emit(name, **self.place(leg.replica), detail=detail, value=value)
