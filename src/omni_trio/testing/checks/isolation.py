"""What concerns one request changes no other's outcome and delays no other (I3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omni_trio.testing.history import NEVER
from omni_trio.testing.model import Permitted, may_die, needed_stages, permitted, times_alone
from omni_trio.testing.plan import Plan
from omni_trio.testing.trace import Trace

from ._check import Finding, check

__all__ = ["isolation", "touched", "undelayed"]

_LOST = frozenset(("ReplicaLost", "EngineDied", "NoReplicaAvailable"))


@check("I3", "U2", "U12", "U17", "U18", "U19", "U29", "U57", "W-9", "W-10", "W-11", "W-12", "W-28", "W-30")
def isolation(trace: Trace) -> Iterator[Finding]:
    """A request with no fault of its own ends well, unless a replica that it needs has died or the runtime ends."""
    plan, history = trace.plan, trace.history
    deadly = may_die(plan)
    for request, asked in enumerate(plan.requests):
        story = history.story(request)
        if not asked.is_clean or not story.ends:
            continue
        ends = _by_itself(plan, permitted(plan, request, deadly=deadly))
        if touched(trace, request):
            ends |= _LOST
        if (how := trace.entries[story.ends[0]].detail) not in ends:
            text = trace.entries[story.ends[0]].text
            yield f"request {request}, which does nothing wrong, ended with {how} ({text})", story.ends[0]


def _by_itself(plan: Plan, may: Permitted) -> frozenset[str]:
    """What the model permits a request, the deaths of replicas left out."""
    ends = may.ends - _LOST
    return ends if plan.end is not None or plan.on_engine_death == "fail_stop" else ends - {"ShutDown"}


def touched(trace: Trace, request: int) -> bool:
    """Whether a request had to do with a replica that has died, or needed a stage none of whose replicas lived."""
    history, plan = trace.history, trace.plan
    dead = {where: min(at, history.deaths.get(where, NEVER)) for where, (at, *_) in history.noticed.items()}
    dead |= {where: at for where, at in history.deaths.items() if where not in dead}
    if not dead:
        return False
    if plan.on_engine_death == "fail_stop":
        return True
    if any(leg.replicas and leg.replica in dead for leg in history.of_request.get(request, ())):
        return True
    # Handing over may meet a death before it is known of; then the stage does not tell of the request at all.
    over = history.story(request).judged
    crossed = any(stage.submit_time for stage in plan.stages) or plan.buggify
    for stage, replicas in enumerate(stage.replicas for stage in plan.stages):
        gone = [dead.get((stage, replica), NEVER) for replica in range(replicas)]
        if max(gone) <= over or any(at <= over and (crossed or history.time(at) == history.time(over)) for at in gone):
            return True
    return False


@check("I3", "U13", "U29", "U53", "U56", "U57", "W-2", "W-3", "W-4", "W-5", "W-6")
def undelayed(trace: Trace) -> Iterator[Finding]:
    """A request with no fault of its own takes, where slots are not the limit, the time that it would take alone."""
    plan, history = trace.plan, trace.history
    needed = needed_stages(plan)
    for request in range(len(plan.requests)):
        story = history.story(request)
        if not story.ends or trace.entries[story.ends[0]].detail != "finished":
            continue
        if (times := times_alone(plan, request)) is None:
            continue
        begun = history.time(story.asked)
        for leg in history.of_request.get(request, ()):
            if leg.role is None and leg.submits:
                expected, found = begun + times[leg.stage][0], history.time(leg.submits[0])
                if not math.isclose(expected, found, abs_tol=1e-6):
                    yield f"{leg.name} was submitted at {found:g}; alone it would be at {expected:g}", leg.submits[0]
        expected, found = begun + max(times[stage][1] for stage in needed), history.time(story.judged)
        if not math.isclose(expected, found, abs_tol=1e-6):
            yield f"request {request} finished at {found:g}; alone it would at {expected:g}", story.ends[0]
