"""What callers are told beside the outputs: metrics, progress, reasons; and what they are not told any more."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omni_trio.testing.history import NEVER
from omni_trio.testing.model import script_of
from omni_trio.testing.script import Error, Finish, FinishSilently, Script, Step
from omni_trio.testing.trace import Trace

from ._check import Finding, check

__all__ = ["fenced", "lost", "notices", "reason_of_the_end"]


@check("I4", "W-61")
def notices(trace: Trace) -> Iterator[Finding]:
    """The caller of a request that finished got each stage's last output or metrics, and heard how far it had come."""
    plan, history, entries = trace.plan, trace.history, trace.entries
    if plan.buggify:
        return  # a stage may have said its last, and be heard after the verdict
    for request, story in history.stories.items():
        if not story.ends or entries[story.ends[0]].detail != "finished":
            continue
        legs = [leg for leg in history.of_request.get(request, ()) if leg.role is None and leg.ended < story.judged]
        turn = max((leg.turn for leg in history.of_request.get(request, ())), default=0)
        for leg in legs:
            if leg.turn != turn:
                continue
            others = [entries[at] for at in story.others if entries[at].stage == leg.stage]
            told = any(entries[at].last for at in story.outputs.get((leg.stage, turn), ()))
            if not told and not any(entry.what == "metrics" for entry in others):
                yield f"{leg.name} has ended, and its caller got neither a last output nor its metrics", math.inf
            if plan.requests[request].segments is not None:
                continue
            if (step := _last_step(script_of(plan.requests[request], leg.stage))) is not None:
                steps = [entry.count for entry in others if entry.what == "progress"]
                if not steps or steps[-1] != step:
                    yield f"{leg.name} came to step {step}, its caller heard of {steps}", math.inf


def _last_step(script: Script) -> int | None:
    step = None
    for verb in script:
        if isinstance(verb, Step):
            step = verb.step
        elif isinstance(verb, Finish | FinishSilently | Error):
            break
    return step


@check("I6", "U68", "W-24")
def fenced(trace: Trace) -> Iterator[Finding]:
    """When a caller has barged in, nothing of the old turn is delivered."""
    history = trace.history
    for request, story in history.stories.items():
        legs = history.of_request.get(request, ())
        newest = max((leg.turn for leg in legs), default=0)
        for (stage, turn), outputs in story.outputs.items():
            if turn == newest:
                continue
            later = [at for leg in legs if leg.turn > turn for at in leg.submits]
            over = min(later + [at for leg in legs if leg.turn == turn for at in leg.aborts], default=NEVER)
            if outputs[-1] > over:
                yield f"request {request}: an output of stage {stage} of turn {turn}, which was over", outputs[-1]


@check("I15", "U17", "W-12", "W-66")
def lost(trace: Trace) -> Iterator[Finding]:
    """A request loses no replica but one that has died and had it in hand."""
    history = trace.history
    for request, story in history.stories.items():
        if not story.ends or trace.entries[story.ends[0]].detail != "ReplicaLost":
            continue
        stage = trace.entries[story.ends[0]].stage
        where = [leg.replica for leg in history.of_request.get(request, ()) if leg.stage == stage and leg.submits]
        if where and not any(one in history.noticed or one in history.deaths for one in where):
            yield (
                f"request {request} is told that replica {where[0][1]} of stage {stage} is gone; it lives",
                story.ends[0],
            )


@check("I15", "U18", "U30", "W-8", "W-26")
def reason_of_the_end(trace: Trace) -> Iterator[Finding]:
    """When a death ends the runtime, whoever is in flight fails with it, and is not just told that it closes."""
    history, entries = trace.history, trace.entries
    if trace.plan.on_engine_death != "fail_stop" or not history.noticed:
        return
    at = min(many[0] for many in history.noticed.values())
    if any(entry.what in ("closing", "closed") and entry.who == "runtime" for entry in entries[:at]):
        return
    for request, story in history.stories.items():
        if story.admitted < at < story.judged != NEVER and (how := entries[int(story.judged)].detail) != "failed":
            yield f"request {request} was in flight when an engine died, and {how}", story.judged
