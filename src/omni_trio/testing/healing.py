"""Faults that stop: the same simulation, but from some time on nothing goes wrong any more.

A run with faults shows that nothing forbidden happens (safety). One whose faults stop shows that everything comes right
again (liveness): all that was under way ends, and what comes later finishes.
"""

from __future__ import annotations

from msgspec.structs import replace

from .checks import CHECKS, BrokenInvariants, Violation, touched
from .plan import OperatorAct, Plan, RequestPlan
from .script import FAULTS, Duplicate, Finish, Script, ends
from .trace import Trace

__all__ = ["check_healed", "heal"]


_AMPLE = 1000.0
"""Seconds that waiting for companions or chunks takes at most, where nothing is wrong."""


def heal(plan: Plan, *, after: float) -> Plan:
    """Return the plan without any fault from a time on.

    Requests that arrive later are clean; the callers of earlier ones, where these are not, leave at that time at the
    latest; what operators have closed is open again one second later; aborts are acknowledged, and there is time
    enough for everything. A death can not be undone: what comes later may still find no replica, where all of a stage
    have died.
    """
    operator = tuple(act for act in plan.operator if act.at < after)
    if any(act.act in ("pause", "sleep") for act in operator):
        operator = (*operator, OperatorAct(at=after, act="wake"), OperatorAct(at=after + 1, act="resume"))
    return replace(
        plan,
        stages=tuple(
            replace(stage, abort_error=None, abort_time=min(stage.abort_time, plan.abort_timeout / 2))
            for stage in plan.stages
        ),
        requests=tuple(_healed(plan, asked, after) for asked in plan.requests),
        operator=operator,
        bundle_timeout=max(plan.bundle_timeout, _AMPLE),
        chunk_timeout=max(plan.chunk_timeout, _AMPLE),
        on_engine_death="isolate",
        max_in_flight=max(plan.max_in_flight, len(plan.requests)),
        end=None,
    )


def check_healed(trace: Trace, *, after: float) -> None:
    """Check that everything has ended, and that what came after a time has finished.

    Raises:
        BrokenInvariants: it has not.
    """
    found = [CHECKS["liveness"](trace)]
    history = trace.history
    for request, asked in enumerate(trace.plan.requests):
        end = trace.end_of(request)
        if asked.arrival < after or end is None or end.detail == "finished" or touched(trace, request):
            continue
        message = f"request {request} came after the last fault and ended with {end.detail} ({end.text})"
        found.append(Violation(CHECKS["liveness"], message, history.story(request).ends[0]))
    if violations := [violation for violation in found if violation is not None]:
        raise BrokenInvariants(violations, trace)


def _healed(plan: Plan, asked: RequestPlan, after: float) -> RequestPlan:
    if asked.arrival >= after:
        scripts = (_cured(script, prefills=plan.pair and stage == 0) for stage, script in enumerate(asked.scripts))
        companions = tuple(_cured(script) for script in asked.companions)
        return replace(asked, act="wait", close=True, scripts=tuple(scripts), companions=companions, bridges=())
    if asked.is_clean:
        return asked
    left = after - asked.arrival
    if asked.act in ("leave", "abort", "stop reading"):
        return replace(asked, when=min(asked.when, left))
    return replace(asked, act="leave", when=left)


def _cured(script: Script, *, prefills: bool = False) -> Script:
    """The same work, with a good end."""
    kept = tuple(verb for verb in script if not isinstance(verb, FAULTS | Duplicate))
    if prefills and not any(isinstance(verb, Finish) and verb.kv for verb in kept):
        return (*(verb for verb in kept if not isinstance(verb, Finish)), Finish("length", (0,), {"remote": "here"}))
    return kept if ends(kept) else (*kept, Finish())
