"""What stages see: one submission, to one replica, nothing after an abort, complete bundles (I5, I8, I9, I10)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omni_trio.testing.history import NEVER
from omni_trio.testing.model import script_of
from omni_trio.testing.script import Finish, FinishSilently
from omni_trio.testing.trace import Trace

from ._check import HELD_UP, Finding, check

__all__ = ["binding", "capacity", "fan_in", "incarnation", "kv_hold", "named_companion", "source_replica"]


@check("I10", "U10", "U51", "U68", "U70", "W-13", "W-24", "W-28", "W-33", "W-54")
def binding(trace: Trace) -> Iterator[Finding]:
    """A stage sees a request as new once, on one replica; then updates; nothing after its last input or an abort."""
    history = trace.history
    slack = HELD_UP if trace.plan.buggify else 0.0
    for leg in history.legs.values():
        if len(leg.submits) > 1:
            yield f"{leg.name} was submitted twice", leg.submits[1]
        if len(leg.replicas) > 1:
            yield f"{leg.name} has to do with replicas {sorted(leg.replicas)}", (*leg.submits, *leg.aborts)[-1]
        inputs = sorted((*leg.submits, *leg.updates))
        if leg.updates and (not leg.submits or leg.updates[0] < leg.submits[0]):
            yield f"{leg.name} was updated before it was submitted", leg.updates[0]
        lasts = [at for at in inputs if trace.entries[at].last]
        if lasts and inputs[-1] > lasts[0]:
            yield f"{leg.name} was given more after its last input", inputs[-1]
        if leg.aborts and inputs and inputs[-1] > leg.aborts[0]:
            yield f"{leg.name} was given more after it was aborted", inputs[-1]
        if len(leg.aborts) > 1:
            yield f"{leg.name} was aborted twice", leg.aborts[1]
        # At the same instant they may have crossed: a reader takes several outputs, one of which ends the request.
        if leg.aborts and history.time(leg.aborts[0]) > history.time(leg.ended) + slack:
            yield f"{leg.name} was aborted after its end", leg.aborts[0]


@check("I10", "U17", "U22", "W-36", "W-37")
def incarnation(trace: Trace) -> Iterator[Finding]:
    """A replica that is known to be dead is given nothing, and nothing of it is taken."""
    history = trace.history
    gone = {where: min(many) for where, many in history.noticed.items()}
    if not gone:
        return
    for leg in history.legs.values():
        if not leg.replicas or leg.replica not in gone:
            continue
        at = gone[leg.replica]
        # What was said at the same instant may be on its way already.
        said = [late for late in leg.says if history.time(late) > history.time(at)]
        for late in (*leg.submits, *leg.updates, *said):
            if late > at:
                yield f"{leg.name}: {trace.entries[late].what!r} after the death of its replica", late


@check("I10", "U51")
def source_replica(trace: Trace) -> Iterator[Finding]:
    """What a caller gets of a stage comes from the replica that its request was given to."""
    history = trace.history
    for request, story in history.stories.items():
        for (stage, turn), outputs in story.outputs.items():
            leg = history.legs.get((request, None, turn, stage))
            for at in outputs:
                if leg is None or trace.entries[at].replica not in leg.replicas:
                    yield f"request {request}: an output of stage {stage} from a replica that does not have it", at


@check("I8", "U11", "U13", "U16", "W-10", "W-33")
def capacity(trace: Trace) -> Iterator[Finding]:
    """The runtime counts at least the requests that a replica really has: a slot is free when the work has ended."""
    history = trace.history
    gone = {where: min(many) for where, many in history.noticed.items()}
    for at, entry in enumerate(trace.entries):
        if entry.who != "stage" or entry.what not in ("submit", "aborted") or entry.count <= entry.load:
            continue
        assert entry.stage is not None  # every stage's entry has both
        assert entry.replica is not None
        if at < gone.get((entry.stage, entry.replica), NEVER):
            yield (
                (
                    f"replica {entry.replica} of stage {entry.stage} has {entry.count} requests, "
                    f"and the runtime counts {entry.load}"
                ),
                at,
            )


@check("I9", "U31", "U32", "U36", "W-16", "W-17")
def fan_in(trace: Trace) -> Iterator[Finding]:
    """What the first stage feeds starts when all companions have ended, once; they share their request's replica."""
    plan, history = trace.plan, trace.history
    if not plan.companions:
        return
    for (request, role, turn, stage), leg in history.legs.items():
        if role is not None:
            parent = history.legs.get((request, None, turn, stage))
            if parent is None or (leg.submits and parent.replicas.keys() != leg.replicas.keys()):
                yield f"{leg.name} is not where its request is", (*leg.submits, *leg.aborts, *leg.says)[0]
            continue
        if plan.stages[stage].source != 0 or not leg.submits:
            continue
        for number in range(plan.companions):
            companion = history.legs.get((request, f"c{number}", turn, 0))
            if companion is None or companion.ended > leg.submits[0]:
                yield f"{leg.name} was submitted before companion 'c{number}' had ended", leg.submits[0]


@check("I9", "U33", "U35", "W-18", "W-19", "W-22")
def named_companion(trace: Trace) -> Iterator[Finding]:
    """A companion that fails before anything else does fails its request, at once and by name."""
    plan, history = trace.plan, trace.history
    if not plan.companions:
        return
    slack = HELD_UP if plan.buggify else 0.0
    for (request, role, _, _), leg in history.legs.items():
        if role is None or leg.ended == NEVER or trace.entries[int(leg.ended)].detail != "error":
            continue
        story = history.story(request)
        if story.judged < leg.ended or (leg.aborts and leg.aborts[0] < leg.ended):
            continue
        earlier = [other for other in history.of_request[request] if other is not leg and other.ended != NEVER]
        if any(
            trace.entries[int(other.ended)].detail == "error"
            and history.time(other.ended) <= history.time(leg.ended) + slack
            for other in earlier
        ):
            continue  # which of the two comes first is for the schedule to say
        verdict = trace.entries[int(story.judged)] if story.judged != NEVER else None
        if verdict is None or verdict.detail == "finished":
            yield f"{leg.name} failed, and the request did not", leg.ended
        elif verdict.detail == "failed" and "companion" in verdict.text and repr(role) not in verdict.text:
            yield f"{leg.name} failed, and the verdict names another: {verdict.text}", story.judged
        elif history.time(story.judged) > history.time(leg.ended) + slack:
            yield f"{leg.name} failed, and its request only later", story.judged


@check("I5", "U39", "U13", "U14")
def kv_hold(trace: Trace) -> Iterator[Finding]:
    """A KV cache that a prefill has kept is taken over by the decode stage or released, one of them and once."""
    plan, history = trace.plan, trace.history
    if not plan.pair:
        return
    lived = any((1, replica) not in history.noticed and (1, replica) not in history.deaths
                for replica in range(plan.stages[1].replicas))  # fmt: skip
    for request, asked in enumerate(plan.requests):
        prefill = history.legs.get((request, None, 0, 0))
        decode = history.legs.get((request, None, 0, 1))
        taken = decode is not None and bool(decode.submits)
        releases = decode.releases if decode is not None else []
        if len(releases) > 1:
            yield f"the KV cache of request {request} was released twice", releases[1]
        # A decode engine that died with it can let go of nothing any more, so then another one may do so.
        if taken and releases and decode is not None and history.died(decode.replica) > releases[0]:
            yield f"the KV cache of request {request} was released, and the decode stage has it", releases[0]
        if prefill is None or prefill.ended == NEVER or trace.entries[int(prefill.ended)].detail == "error":
            if releases:
                yield f"the KV cache of request {request} was released before there was one", releases[0]
            continue
        end = next(verb for verb in script_of(asked, 0) if isinstance(verb, Finish | FinishSilently))
        # A prefill that was aborted had not been heard to end: the two have crossed, and its engine has a time-out.
        heard = history.story(request).judged > prefill.ended and not prefill.aborts
        kept = isinstance(end, Finish) and bool(end.kv) and heard
        if kept and lived and not taken and not releases and history.closed != NEVER:
            yield f"the KV cache of request {request} was neither taken over nor released", math.inf
        if releases and releases[0] < prefill.ended:
            yield f"the KV cache of request {request} was released before there was one", releases[0]
        if releases and not (isinstance(end, Finish) and end.kv):
            yield f"a KV cache of request {request} was released that nobody has kept", releases[0]
