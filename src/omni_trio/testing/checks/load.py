"""Who is let in, and where requests go (I7, I8)."""

from __future__ import annotations

from collections.abc import Iterator

from omni_trio.testing.history import NEVER, Leg
from omni_trio.testing.script import DieOnSubmit, Reject
from omni_trio.testing.trace import Trace

from ._check import HELD_UP, Finding, check

__all__ = ["admission", "spread"]


@check("I7", "U58", "U63")
def admission(trace: Trace) -> Iterator[Finding]:
    """There are never more requests in flight than there may be, and none is let in once the runtime closes."""
    history = trace.history
    closed = history.time(history.closing) + (HELD_UP if trace.plan.buggify else 0.0)
    for request, story in history.stories.items():
        if story.admitted != NEVER and history.time(story.asked) > closed:
            yield f"request {request} was let in, which had come when the runtime was closing", story.admitted
    stories = history.stories.values()
    for story in stories:
        at = story.admitted
        if at == NEVER or at > story.judged:
            continue
        count = sum(1 for other in stories if other.admitted <= at < other.judged)
        if count > trace.plan.max_in_flight:
            yield f"{count} requests are in flight; there may be {trace.plan.max_in_flight}", at


@check("I8", "U53", "W-40")
def spread(trace: Trace) -> Iterator[Finding]:
    """A request goes to a replica that has no more in hand than any other of the stage."""
    plan, history = trace.plan, trace.history
    if plan.buggify or plan.operator or plan.companions:
        return  # what is picked may be handed over later, or goes where its request is
    verdicts = {history.time(story.judged) for story in history.stories.values()}
    for number, stage in enumerate(plan.stages):
        scripts = [asked.scripts[number] for asked in plan.requests if number < len(asked.scripts)]
        refuses = any(isinstance(verb, Reject | DieOnSubmit) for script in scripts for verb in script)
        if stage.replicas == 1 or stage.submit_time or refuses:
            continue
        legs = [leg for leg in history.legs.values() if leg.stage == number and leg.submits]
        for now in sorted({history.time(leg.submits[0]) for leg in legs} - verdicts):
            # In one instant much may happen in any order: whoever might have been there counts for the others, and
            # only who was there all the time, and came before the last, for the replica itself.
            most, least = [0] * stage.replicas, [-1] * stage.replicas
            chosen = set()
            for leg in legs:
                begun, over = history.time(leg.submits[0]), history.time(history.let_go(leg))
                replica = leg.replica[1]
                most[replica] += begun <= now <= over
                least[replica] += begun <= now < over
                if begun == now:
                    chosen.add(replica)
            alive = [one for one in range(stage.replicas) if history.time(history.died((number, one))) > now]
            for one in chosen:
                for other in alive:
                    if least[one] > most[other]:
                        words = f"it had {least[one]} in hand, replica {other} only {most[other]}"
                        yield (
                            f"stage {number}: replica {one} was given a request at {now:g}; {words}",
                            _first(legs, number, one, now, trace),
                        )


def _first(legs: list[Leg], stage: int, replica: int, now: float, trace: Trace) -> float:
    times = (leg.submits[0] for leg in legs if leg.replica == (stage, replica))
    return next(at for at in times if trace.history.time(at) == now)
