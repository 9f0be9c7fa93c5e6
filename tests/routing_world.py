"""A world for the pure core: plays the stages, the bridges and the task behind one `RequestFlow`, and checks it.

Invariants checked: I1 (one terminal, nothing after it), I2 (`World.finish`), I4 and I10 (a stage sees the request as
new once, nothing after its last input or its end; the whole is carried over an edge once), I9 (nothing behind the first
stage moves before all companions have ended), and that a KV cache is taken over or released, once.

Who chooses what happens next is the caller's affair: Hypothesis, a seeded `random.Random`, or a script.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs

from omni_trio.routing import (
    TABLES,
    Decision,
    Defer,
    EdgeState,
    Fail,
    Finish,
    Forward,
    Handoff,
    HoldState,
    LegState,
    RequestFlow,
    RoutePlan,
    Submit,
    SubmitCompanion,
    Tables,
    Update,
)
from routing_cases import Case, Choose
from routing_facts import KV

__all__ = ["World", "play"]


@attrs.define
class Play:
    """What one stage has seen and said."""

    submitted: bool = False
    """Decided; the stage itself may not know yet."""
    complete: bool = False
    """Its last input is decided."""
    at_work: bool = False
    """The stage has it."""
    ended: bool = False
    kv_ready: bool = False
    inputs: list[Decision] = attrs.field(factory=list)
    """What was decided for it, in order."""
    segments: int = 0
    """Ends of segments that it was given and has not answered."""
    begun: int = 0
    """Segments that were begun with some input."""
    rounds: int = 0
    """Segments that were begun, except for a last one."""
    within: bool = False
    """Whether it is in the middle of a segment, or of its input."""
    carrying: bool = False
    """Whether the bridge in front of it is asked for the whole."""
    deferred: bool = False


class World:
    """Plays what is behind one flow. The methods that play a fact check what the flow makes of it."""

    def __init__(self, case: Case, *, tables: Tables = TABLES, skip_prefill: bool = False) -> None:
        self.case = case
        self.plan = RoutePlan(case.pipeline, case.final_stage)
        self.flow = RequestFlow(self.plan, roles=case.roles, session=case.session, tables=tables)
        self.stages = [Play() for _ in case.pipeline.stages]
        self.companions = dict.fromkeys(case.roles, "idle")
        self.terminal: Finish | Fail | str | None = None
        self.closed = not case.session
        """Whether the caller has given everything."""
        self.batch: deque[Decision] = deque()
        """What the request's task is carrying out."""
        self.waiting: deque[Forward | Handoff | Update] = deque()
        """What it has not come to."""
        self.running: tuple[Forward, bool, bool] | None = None
        """The bridge that runs in a thread, whether it has seen the end, and whether it makes something."""
        self.handing_over = False
        self.kv: Any = None
        """What the prefill engine holds."""
        self.prefilled = False
        """Whether it has held anything."""
        self._skip_prefill = skip_prefill and self.plan.handoff is not None
        self._made = True
        self._rounds = Counter[str]()

    # ---- the caller

    def start(self, *, last: bool = True) -> list[Decision]:
        """Admit the request."""
        self._made = True
        self.closed = self.closed or last
        decisions = self._take(self.flow.start(last=last))
        assert decisions[:1] == [Submit(0, last, self.case.session)]
        assert [d.role for d in decisions[1:] if isinstance(d, SubmitCompanion)] == list(self.case.roles)
        self.batch.extend(decisions)
        self._check_connectors()
        return decisions

    def more(self, *, last: bool = False, made_input: bool = True) -> list[Decision]:
        """Give a session another segment, or close it."""
        self._made = made_input
        self.closed = last
        decisions = self._take(self.flow.more_input(last=last, made_input=made_input))
        if self.stages[0].ended:
            assert not decisions, "input for a stage that has ended"
        else:
            assert decisions[:1] == [Update(0, last, segment_end=True)]
        self.batch.extend(decisions)
        self._check_connectors()
        return decisions

    def abort(self) -> None:
        """End it from outside: an abort, a death, a deadline, all the same to the flow."""
        self.terminal = "aborted"

    @property
    def bundled(self) -> bool:
        """Whether all companions have ended."""
        return all(state == "ended" for state in self.companions.values())

    # ---- the stages

    def output(self, stage_id: int, *, segment_end: bool = False, kv_ready: bool = False) -> list[Decision]:
        """A stage says something that is not its last word."""
        play = self.stages[stage_id]
        play.kv_ready = play.kv_ready or kv_ready
        if segment_end:
            play.segments -= 1
        decisions = self._take(
            self.flow.output(stage_id, finished=False, segment_end=segment_end, kv_ready=kv_ready), stage_id
        )
        wanted = self.plan.feeds[stage_id] if segment_end else self.plan.pieces_to[stage_id]
        pieces = [d for d in decisions if isinstance(d, Forward) and not d.last]
        assert pieces == [Forward(c, False, segment_end) for c in wanted if not self.stages[c].ended], (
            "a piece that was wanted is not carried"
        )
        if kv_ready:
            self._check_whole(self.plan.early_to[stage_id], stage_id)
        return decisions

    def end(self, stage_id: int, *, kv: Any = None) -> list[Decision]:
        """A stage says its last word."""
        play = self.stages[stage_id]
        play.at_work, play.ended = False, True
        if stage_id == self.plan.handoff:
            self.kv = None  # before its submission has come back, maybe
        prefilled = stage_id == 0 and self.plan.handoff is not None
        if prefilled and kv:
            self.kv, self.prefilled = kv, True
        decisions = self._take(self.flow.output(stage_id, finished=True, kv_params=kv), stage_id)
        over = all(self.stages[needed].ended for needed in self.plan.needed)
        assert isinstance(self.terminal, Finish) == over, "a request ends well when all that is needed has ended"
        if self.terminal is not None:
            return decisions
        self._check_whole(self.plan.feeds[stage_id], stage_id)
        if prefilled:
            assert decisions == [Handoff(self.plan.handoff, kv or None)]
        if self.case.session:
            for child in self.plan.connects[stage_id]:
                assert self.stages[child].complete or self.stages[child].ended, "its source ended, it was not told"
        return decisions

    def companion(self, role: str, *, finished: bool) -> list[Decision]:
        """A companion says something."""
        if finished:
            self.companions[role] = "ended"
        deferred = [c for c in self.plan.feeds[0] if self.stages[c].deferred]
        decisions = self._take(self.flow.companion_output(role, finished=finished), 0)
        if self.bundled:
            assert decisions == [Forward(child, True) for child in deferred], "the bundle is complete"
        else:
            assert not decisions
        return decisions

    def expire(self) -> list[Decision]:
        """The companions take too long."""
        decisions = self._take(self.flow.bundle_expired())
        missing = [role for role, state in self.companions.items() if state != "ended"]
        if missing:
            (fail,) = decisions
            assert isinstance(fail, Fail)
            assert fail.kind == "bundle"
            assert all((repr(role) in fail.reason) == (role in missing) for role in self.companions)
        else:
            assert not decisions
        return decisions

    # ---- the request's task

    @property
    def busy(self) -> bool:
        """Whether the task has something to do."""
        return bool(self.batch or self.waiting or self.running or self.handing_over)

    def step(self, *, made_input: bool = True) -> list[Decision]:
        """Let the task do the next thing."""
        if self.handing_over:
            self.handing_over = False
            self.kv = None
            decisions = self._take(self.flow.taken_over())
            self._check_connectors()
            self.batch.extendleft(reversed(decisions))
            return decisions
        if self.batch:
            return self._carry_out(self.batch.popleft())
        if self.running is not None:
            running, self.running = self.running, None
            return self._report(*running)
        decision = self.waiting.popleft()
        if not isinstance(decision, Forward):
            return self._carry_out(decision)
        source = self.case.pipeline.sources[decision.stage_id]
        assert source is not None
        running = (decision, decision.last and self.stages[source].ended, made_input)
        if decision.stage_id in self.case.threads:
            self.running = running
            return []
        return self._report(*running)

    def settle(self, *, made_input: bool = True) -> list[Decision]:
        """Let the task do all that it can; return what was decided by that."""
        decisions = []
        while self.busy and self.terminal is None:
            self._count("settle")
            decisions += self.step(made_input=made_input)
        return decisions

    def _carry_out(self, decision: Decision) -> list[Decision]:
        if isinstance(decision, SubmitCompanion):
            self.companions[decision.role] = "at work"
            return []
        assert isinstance(decision, Submit | Update | Handoff)
        play = self.stages[decision.stage_id]
        if self._skip_prefill and decision.stage_id == 0:
            play.ended = True
            decisions = self._take(self.flow.skip_prefill())
            assert decisions == [Handoff(self.plan.handoff, None, skipped=True)]
            self.batch.extendleft(reversed(decisions))
            return decisions
        if isinstance(decision, Handoff):
            self.handing_over = True
        elif decision.segment_end and self.case.session:
            play.segments += 1
        play.at_work = not play.ended
        return []

    def _report(self, forward: Forward, saw_end: bool, made_input: bool) -> list[Decision]:
        stage_id, last = forward.stage_id, forward.last
        play = self.stages[stage_id]
        started = play.submitted
        source = self.case.pipeline.sources[stage_id]
        assert source is not None
        asked_again = last and not made_input and not saw_end
        if last:
            play.carrying = False
        self._made = made_input
        decisions = self._take(
            self.flow.bridged(
                stage_id, made_input=made_input, last=last, saw_end=saw_end, segment_end=forward.segment_end
            )
        )
        closes_piece = forward.segment_end and self.case.pipeline.stages[stage_id].feed == "output"
        if play.ended:
            assert not decisions, "input for a stage that has ended"
        elif asked_again:
            assert decisions == ([Forward(stage_id, True)] if self.stages[source].ended else [])
        elif not started and not made_input:
            assert [type(d) for d in decisions] == ([Fail] if last else [])
        elif made_input or last or closes_piece:
            kind = Update if started else Submit
            assert decisions[:1] == [kind(stage_id, last, forward.segment_end)]
        else:
            assert not decisions
        for decision in decisions:
            if isinstance(decision, Forward):
                self._put(decision)
            elif not isinstance(decision, Fail):
                self.batch.append(decision)
        self._check_connectors()
        return decisions

    def _put(self, decision: Forward | Handoff | Update) -> None:
        """Pieces over one edge are carried together, unless a segment ends in between."""
        if isinstance(decision, Forward):
            for index, earlier in enumerate(self.waiting):
                if not isinstance(earlier, Forward) or earlier.stage_id != decision.stage_id:
                    continue
                if earlier.last or not earlier.segment_end:
                    self.waiting[index] = decision
                    return
        self.waiting.append(decision)

    # ---- checks

    def _take(self, decisions: Iterable[Decision], told_by: int | None = None) -> list[Decision]:
        taken = list(decisions)
        for decision in taken:
            assert self.terminal is None, "a decision after the end"
            self._check(decision)
            if isinstance(decision, Finish | Fail):
                self.terminal = decision
            elif isinstance(decision, Defer):
                self.stages[decision.stage_id].deferred = True
            elif told_by is not None:
                assert isinstance(decision, Forward | Handoff | Update), "a reader hands nothing over itself"
                self._put(decision)
        assert self.flow.over == (self.terminal is not None)
        self._check_states()
        return taken

    def _check_states(self) -> None:
        """What the flow believes of its parts is how they are."""
        for stage_id, one in enumerate(self.stages):
            if one.ended:
                leg = LegState.ENDED
            else:
                leg = LegState.FED if one.complete else LegState.OPEN if one.submitted else LegState.IDLE
            assert self.flow.state(stage_id) is leg
            if self.terminal is None and any(stage_id in children for children in self.plan.feeds):
                edge = EdgeState.CLOSED if one.ended or one.complete else EdgeState.OPEN
                if not one.ended:
                    edge = EdgeState.DEFERRED if one.deferred else EdgeState.CLOSING if one.carrying else edge
                assert self.flow._edges[stage_id] is edge
        if self.kv is not None:
            assert self.flow._hold is HoldState.HELD
        else:
            assert self.flow._hold is (HoldState.TAKEN if self.prefilled else HoldState.NONE)

    def _check(self, decision: Decision) -> None:
        plan = self.plan
        if isinstance(decision, SubmitCompanion):
            assert self.companions[decision.role] == "idle", "a companion is submitted twice"
            self.companions[decision.role] = "submitted"
        elif isinstance(decision, Finish):
            assert all(self.stages[needed].ended for needed in plan.needed), "it ended before its outputs were complete"
        elif not isinstance(decision, Fail):
            stage_id = decision.stage_id
            assert stage_id in plan.stages, "a stage that the request does not pass"
            play = self.stages[stage_id]
            assert not play.ended, "something for a stage that has ended"
            assert not play.complete, "something for a stage that has all of its input"
            source = self.case.pipeline.sources[stage_id]
            if source == 0 and not isinstance(decision, Defer):
                assert self.bundled, "an incomplete bundle"
            if isinstance(decision, Submit | Update | Handoff):
                self._check_input(decision, play)
            else:
                assert source is not None
                assert stage_id in plan.feeds[source], "nothing is bridged to it"
                self._check_edge(decision, play, self.stages[source])

    def _check_input(self, decision: Submit | Update | Handoff, play: Play) -> None:
        stage_id = decision.stage_id
        assert play.submitted == isinstance(decision, Update), "a stage sees a request as new once, and first"
        assert isinstance(decision, Handoff) == (stage_id == self.plan.handoff)
        play.submitted = True
        play.inputs.append(decision)
        if isinstance(decision, Handoff):
            assert self.stages[0].ended
            assert decision.params == self.kv
            play.complete = True
            return
        play.complete = decision.last
        connected = self.case.pipeline.stages[stage_id].feed == "connector"
        assert decision.placeholder <= connected
        assert decision.segment_end <= self.case.session
        if connected:
            assert decision.segment_end == self.case.session
            assert decision.last or self.case.session
            play.begun += decision.placeholder
            play.rounds += not decision.last
        else:
            play.rounds += not (play.within or decision.last)
            play.begun += self._made and not play.within
            play.within = not (decision.segment_end or decision.last)

    def _check_edge(self, decision: Defer | Forward, play: Play, source: Play) -> None:
        feed = self.case.pipeline.stages[decision.stage_id].feed
        ready = source.ended or (feed == "kv" and source.kv_ready)
        if isinstance(decision, Defer):
            assert ready
            assert not self.bundled
            assert not play.deferred, "it waits already"
        elif decision.last:
            assert decision.segment_end == self.case.session
            assert ready, "the whole, before there is one"
            assert not play.carrying, "the whole is carried twice"
            play.carrying, play.deferred = True, False
        else:
            assert feed == "output" or decision.segment_end
            assert not source.ended

    def _check_whole(self, children: Iterable[int], stage_id: int) -> None:
        for child in children:
            play = self.stages[child]
            if stage_id == 0 and not self.bundled:
                assert play.deferred
                assert not play.submitted
            else:
                assert play.carrying or play.complete or play.ended, "the whole is not carried"

    def _check_connectors(self) -> None:
        """A stage whose data comes by connector is submitted with its source, and told of each of its segments."""
        if self.terminal is not None:
            return
        for source, children in enumerate(self.plan.connects):
            one = self.stages[source]
            for child in children:
                other = self.stages[child]
                if source != self.plan.handoff:
                    assert one.submitted == other.submitted
                    if not (one.ended or other.ended):
                        assert one.begun == other.begun or not self.case.session, "a placeholder per segment"
                        assert one.rounds == other.rounds or not self.case.session, "an input per segment"
                        assert one.complete <= other.complete
                elif not self.handing_over and Handoff not in map(type, (*self.batch, *self.waiting)):
                    assert one.submitted == other.submitted
                assert other.submitted <= one.submitted

    # ---- the end

    def finish(self) -> None:
        """I2: let everything end that can; then the request must have ended, too."""
        while self.terminal is None:
            self._count("finish")
            at_work = [index for index, play in enumerate(self.stages) if play.at_work]
            companions = [role for role, state in self.companions.items() if state == "at work"]
            if self.busy:
                self.step()
            elif companions:
                self.companion(companions[0], finished=True)
            elif not self.closed:
                self.more(last=True, made_input=False)
            else:
                assert at_work, "nothing is under way, and yet the request has not ended"
                self.end(at_work[0], kv=KV)

    def check_release(self) -> None:
        """What is still at work is told to let go, what is held is released, and nothing happens any more."""
        assert self.terminal is not None
        held = self.kv
        at_work = tuple(index for index, play in enumerate(self.stages) if play.submitted and not play.ended)
        roles = tuple(role for role, state in self.companions.items() if state in ("submitted", "at work"))
        released = self.flow.release()
        assert released.stages == at_work
        assert released.roles == roles
        assert released.kv == held, "a KV cache is taken over or released, once"
        for _ in range(2):
            for stage_id in range(len(self.stages)):
                assert self.flow.state(stage_id) is LegState.RELEASED
                assert self.flow._edges[stage_id] is EdgeState.CLOSED
                assert not self.flow.output(stage_id, finished=True, kv_params=KV)
                assert not self.flow.output(stage_id, finished=False, segment_end=True, kv_ready=True)
                assert not self.flow.bridged(stage_id, made_input=True, last=True)
                assert not self.flow.bridged(stage_id, made_input=False, last=True, saw_end=False)
            for role in self.companions:
                assert not self.flow.companion_output(role, finished=True)
            assert not self.flow.more_input(last=True)
            assert not self.flow.taken_over()
            assert not self.flow.bundle_expired()
            assert not self.flow.takes_input
            again = self.flow.release()
            assert (again.stages, again.roles, again.kv) == ((), (), None)
            taken = HoldState.TAKEN if self.prefilled else HoldState.NONE
            assert self.flow._hold is (taken if held is None else HoldState.RELEASED)

    def _count(self, what: str) -> None:
        self._rounds[what] += 1
        assert self._rounds[what] < 1000, "there is no end to it"


def play(case: Case, choose: Choose[Any], *, tables: Tables = TABLES, faults: bool = True) -> World:
    """Let anything happen in any order for a while, then end it from outside or let everything end; check all of it.

    Without `faults` every bridge makes something, every prefill says where its KV cache is, and nobody ends it from
    outside.
    """
    world = World(case, tables=tables, skip_prefill=choose((False, False, True)))
    world.start(last=not case.session or choose((False, False, False, True)))
    moves = _Moves(world, choose, faults=faults)
    for _ in range(choose((1, 3, 8, 13, 21, 34, 55, 55))):
        possible = moves.possible()
        if not possible or world.terminal is not None:
            break
        choose(possible)()
    if faults and world.terminal is None and choose((False, True)):
        world.abort()
    world.finish()
    world.check_release()
    return world


class _Moves:
    """What can happen next."""

    def __init__(self, world: World, choose: Choose[Any], *, faults: bool) -> None:
        self._world = world
        self._choose = choose
        self._faults = faults

    def possible(self) -> list[Callable[[], object]]:
        """The moves, the likelier ones more than once."""
        world = self._world
        moves: list[Callable[[], object]] = []
        if world.busy:
            moves += [self._step, self._step]
        elif not world.closed:
            moves.append(self._send)
        moves += [partial(self._speak, stage_id) for stage_id, one in enumerate(world.stages) if one.at_work]
        moves += [partial(self._companion, role) for role, state in world.companions.items() if state == "at work"]
        if self._faults and any(one.deferred for one in world.stages):
            moves.append(self._expire)
        return moves

    def _step(self) -> None:
        self._world.step(made_input=not self._faults or self._choose((True, True, True, False)))

    def _send(self) -> None:
        last = self._choose((False, False, False, True))
        self._world.more(last=last, made_input=not last or self._choose((True, False)))

    def _companion(self, role: str) -> None:
        self._world.companion(role, finished=self._choose((True, False)))

    def _expire(self) -> None:
        if self._choose((False, False, False, False, True)):
            self._world.expire()

    def _speak(self, stage_id: int) -> None:
        world, choose = self._world, self._choose
        one = world.stages[stage_id]
        what = choose(("piece", "piece", "kv", "end"))
        if what == "end" and (one.complete or choose((False, False, False, False, True))):
            prefills = stage_id == 0 and world.plan.handoff is not None
            kv = (choose((KV, KV, KV, None)) if self._faults else KV) if prefills else None
            world.end(stage_id, kv=kv)
        elif world.case.session:
            world.output(stage_id, segment_end=one.segments > 0 and choose((True, True, False)))
        else:
            world.output(stage_id, kv_ready=what == "kv")
