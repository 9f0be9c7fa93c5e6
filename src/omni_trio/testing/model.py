"""A reference runtime that does nothing but think: what may become of each request of a plan.

It knows no tasks, no queues and no schedule. Where the order of things is left open by the plan (which of two faults
comes first, which replica a request gets), it permits every outcome; where it is not, it permits one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from .plan import BridgeAct, Plan, RequestPlan, StagePlan
from .script import Chunk, Die, DieOnSubmit, Error, Finish, KvReady, Reject, Script, Wait, ends, played, says, takes

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["Permitted", "check_model", "may_die", "needed_stages", "permitted", "times_alone"]


@attrs.frozen
class Permitted:
    """What may become of a request."""

    ends: frozenset[str]
    """``finished``, ``left``, or names of errors."""
    tokens: dict[int, tuple[int, ...]]
    """Where it finishes: per final stage the tokens that its caller gets, in a session those of its last turn."""
    repeats: frozenset[int]
    """The stages that play their script once per piece that they are given, and so may say all this more than once."""
    must_end: bool
    """Whether it ends by itself, without its caller or anybody else doing anything about it."""


@attrs.frozen
class _AtStage:
    """What may become of a request at one stage, where nobody from outside does anything."""

    starts: bool = False
    """Whether the stage may be given it."""
    ends: bool = False
    """Whether the stage may come to its last output."""
    fails: frozenset[str] = frozenset()
    """With what the request may fail here."""
    stalls: bool = False
    """Whether it may stay here for ever."""


def permitted(plan: Plan, request: int, *, deadly: bool | None = None) -> Permitted:
    """Say what may become of a request.

    Args:
        plan: the whole simulation.
        request: index of the request.
        deadly: what `may_die` says of the plan, for those who ask about many requests of it; None: it is asked.
    """
    asked = plan.requests[request]
    stages = _session(plan, asked) if asked.segments is not None else _stages(plan, asked)
    found = {end for stage in stages for end in stage.fails} | _from_outside(
        plan, asked, deadly=may_die(plan) if deadly is None else deadly
    )
    if all(stages[index].ends for index in needed_stages(plan)) and asked.act != "stop reading":
        found.add("finished")
    return Permitted(
        frozenset(found),
        _tokens(plan, asked),
        frozenset(index for index, stage in enumerate(plan.stages) if _in_pieces(plan, index) and stage.final)
        if asked.segments is None
        else frozenset(),
        not any(stage.stalls for stage in stages),
    )


def check_model(trace: Trace) -> None:
    """Check that every request of a trace has ended in a permitted way, finished ones with the permitted tokens.

    Raises:
        BrokenInvariants: one has not.
    """
    from .checks import check_all  # noqa: PLC0415 - checks need the model

    check_all(trace, only=["model"])


def needed_stages(plan: Plan) -> list[int]:
    """The stages that have to end before a request has finished: final ones, and those that send by connector."""
    senders = {stage.source for stage in plan.stages if stage.feed == "connector"}
    return [index for index, stage in enumerate(plan.stages) if stage.final or index in senders]


# ---- one request by itself


def _stages(plan: Plan, asked: RequestPlan) -> list[_AtStage]:
    made: list[_AtStage] = []
    companions = [asked.companions[n] if n < len(asked.companions) else (Finish(),) for n in range(plan.companions)]
    for index, stage in enumerate(plan.stages):
        fails = set(_refusals(plan, asked, index, made))
        own = script_of(asked, index)
        if not fails and _fed(plan, asked, index, made):
            fails |= _failures(plan, own)
            if index == 0:
                fails |= _failures_of_companions(plan, companions)
            if stage.feed == "connector" and _silent(plan, asked, index) >= plan.chunk_timeout:
                fails.add("DeadlineExceeded")
            waits = index == 0 and not all(map(ends, companions)) and bool(companions)
            one = _AtStage(True, ends(own), frozenset(fails), not ends(own) and not _failures(plan, own))
            # With companions nothing leaves the first stage before all of them have ended.
            made.append(attrs.evolve(one, ends=one.ends and not waits))
        else:
            made.append(_AtStage(fails=frozenset(fails)))
    return made


def _fed(plan: Plan, asked: RequestPlan, index: int, before: list[_AtStage]) -> bool:
    """Whether a stage may be given the request."""
    stage = plan.stages[index]
    if stage.source is None:
        return True
    source = before[stage.source]
    if stage.feed == "connector":
        return source.starts
    said = played(script_of(asked, stage.source))
    early = (stage.feed == "kv" and any(isinstance(verb, KvReady) for verb in said)) or (
        _in_pieces(plan, index) and any(isinstance(verb, Chunk) for verb in said)
    )
    return source.ends or (source.starts and early and not (plan.companions and stage.source == 0))


def _refusals(plan: Plan, asked: RequestPlan, index: int, before: list[_AtStage]) -> set[str]:
    """With what a request fails on its way to a stage."""
    stage = plan.stages[index]
    if stage.source is None or stage.feed == "connector" or not _fed(plan, asked, index, before):
        return set()
    if plan.pair and index == 1:
        end = played(script_of(asked, 0))[-1]
        return set() if isinstance(end, Finish) and end.kv else {"StageFailed"}
    return {"BridgeFailed"} if bridge_of(asked, index) != "pass" else set()


def _session(plan: Plan, asked: RequestPlan) -> list[_AtStage]:
    """Every stage repeats what it is given, to the end."""
    bridged = [index for index, stage in enumerate(plan.stages) if stage.source is not None
               and stage.feed != "connector"]  # fmt: skip
    broken = any(bridge_of(asked, index) != "pass" for index in bridged)
    fails = {"BridgeFailed"} if broken else set()
    if any(stage.feed == "connector" for stage in plan.stages) and (_crowded(plan) or plan.operator or not asked.close):
        fails.add("DeadlineExceeded")
    return [_AtStage(True, asked.close and not broken, frozenset(fails), not asked.close) for _ in plan.stages]


def script_of(asked: RequestPlan, stage: int) -> Script:
    """What a stage does with a request."""
    return asked.scripts[stage] if stage < len(asked.scripts) else (Finish(),)


def bridge_of(asked: RequestPlan, stage: int) -> BridgeAct:
    """What the bridge in front of a stage does."""
    return asked.bridges[stage] if stage < len(asked.bridges) else "pass"


def _in_pieces(plan: Plan, index: int) -> bool:
    return plan.stages[index].feed == "output" and not (plan.pair and index == 1) and index > 0


def _failures(plan: Plan, script: Script) -> set[str]:
    end = played(script)[-1:]
    if isinstance(end and end[0], Error):
        return {"StageFailed"}
    if isinstance(end and end[0], Reject):
        return {"InvalidRequest"}
    if isinstance(end and end[0], Die | DieOnSubmit):
        return {"EngineDied", "ReplicaLost"} if plan.on_engine_death == "isolate" else {"EngineDied"}
    return set()


def _failures_of_companions(plan: Plan, scripts: list[Script]) -> set[str]:
    found = {end for script in scripts for end in _failures(plan, script)}
    if any(takes(script) >= plan.bundle_timeout or not (ends(script) or _failures(plan, script)) for script in scripts):
        found.add("DeadlineExceeded")
    return found


def _silent(plan: Plan, asked: RequestPlan, index: int) -> float:
    """For how long a stage and the one that sends to it by connector may give no sign of life."""
    if _crowded(plan) or plan.operator:
        return math.inf
    scripts = [script_of(asked, index), script_of(asked, plan.stages[index].source or 0)]
    return max(takes(script) if ends(script) or _failures(plan, script) else math.inf for script in scripts)


def _tokens(plan: Plan, asked: RequestPlan) -> dict[int, tuple[int, ...]]:
    finals = [index for index, stage in enumerate(plan.stages) if stage.final]
    if asked.segments is None:
        return {index: says(script_of(asked, index)) for index in finals}
    turn: list[int] = []
    for segment in asked.segments:
        if segment.barge_in:
            turn.clear()
        turn.extend(segment.tokens)
    # A stage whose data comes by connector repeats a placeholder, which is no matter of this model.
    ways = {index: [plan.stages[one].feed for one in plan.path(index)] for index in finals}
    return {index: tuple(turn) for index, feeds in ways.items() if "connector" not in feeds}


# ---- the others


def _from_outside(plan: Plan, asked: RequestPlan, *, deadly: bool) -> set[str]:
    found: set[str] = set()
    if asked.act in ("leave", "stop reading"):
        found.add("left")
    elif asked.act == "abort":
        found.add("RequestAborted")
    elif asked.act == "deadline":
        found.add("DeadlineExceeded")
    if plan.end is not None:
        found.add("ShutDown")
    if len(plan.requests) > plan.max_in_flight:
        found.add("Overloaded")
    if any(act.act in ("pause", "sleep") and act.mode == "abort" for act in plan.operator):
        found.add("RequestAborted")
    if plan.companions and (_crowded(plan) or plan.operator):
        found.add("DeadlineExceeded")
    if deadly:
        isolated = plan.on_engine_death == "isolate"
        found |= {"EngineDied", "ReplicaLost", "NoReplicaAvailable"} if isolated else {"EngineDied", "ShutDown"}
    return found


def may_die(plan: Plan) -> bool:
    """Whether any replica may die, or count as dead since it does not let go of a request in time."""
    scripts = (script for asked in plan.requests for script in (*asked.scripts, *asked.companions))
    return (
        any(act.act == "kill" for act in plan.operator)
        or any(stage.abort_error is not None or stage.abort_time >= plan.abort_timeout for stage in plan.stages)
        or any(isinstance(verb, Die | DieOnSubmit) for script in scripts for verb in script)
    )


def _crowded(plan: Plan) -> bool:
    """Whether a request may have to wait at a stage, for others or while it is handed over."""
    turns = sum(segment.barge_in for asked in plan.requests for segment in asked.segments or ())
    works = len(plan.requests) * (1 + plan.companions) + turns
    return any(stage.capacity < works or stage.submit_time for stage in plan.stages)


def times_alone(plan: Plan, request: int) -> dict[int, tuple[float, float]] | None:
    """Say when each stage is given a request and when it has done with it, in seconds from its arrival.

    Returns:
        None where this depends on more than the scripts: on other requests, operators, how many pieces there are, or
        how long handing over takes.
    """
    asked = plan.requests[request]
    if asked.segments is not None or not asked.is_clean or _crowded(plan) or plan.buggify:
        return None
    if any(act.act != "kill" for act in plan.operator) or any(_in_pieces(plan, one) for one in range(len(plan.stages))):
        return None
    bundle = max((takes(script) for script in asked.companions[: plan.companions]), default=0.0)
    times: dict[int, tuple[float, float]] = {}
    for index, stage in enumerate(plan.stages):
        begins = 0.0 if stage.source is None else _trigger(plan, asked, stage, index, times[stage.source])
        if plan.companions and stage.source == 0:
            begins = max(begins, bundle)
        times[index] = begins, begins + takes(script_of(asked, index))
    return times


def _trigger(plan: Plan, asked: RequestPlan, stage: StagePlan, index: int, source: tuple[float, float]) -> float:
    begun, ended = source
    if plan.pair and index == 1:
        return ended
    if stage.feed == "connector":
        return begun
    if stage.feed == "kv":
        waited = 0.0
        for verb in played(script_of(asked, stage.source or 0)):
            if isinstance(verb, KvReady):
                return begun + waited
            waited += verb.seconds if isinstance(verb, Wait) else 0.0
    return ended
