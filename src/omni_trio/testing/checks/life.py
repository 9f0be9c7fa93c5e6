"""What is left, and when: aborts, leaks, pauses, deaths, the end of everything (I5, I6, I11, I12, I13, I15, I16)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from omni_trio.testing.history import NEVER, History
from omni_trio.testing.trace import Trace

from ._check import HELD_UP, Finding, check

__all__ = [
    "acknowledged", "bounded_waits", "death", "no_leak", "paused", "quiescence", "shutdown", "still_held", "truthful",
]  # fmt: skip

_OPERATION = 60.0
"""Virtual seconds that an operator's act may take (the default of `Runtime.pause` and the others)."""

_SHUTDOWN = 10.0
"""Virtual seconds that closing the engines may take (the default of `open_runtime`)."""

_NEWS = 0.5
"""Virtual seconds that callers have to hear of a death that ends the runtime."""


@check("I5", "U3", "U4", "U39", "W-12", "W-21", "W-27")
def no_leak(trace: Trace) -> Iterator[Finding]:
    """When all is over the runtime's tables are empty, no slot counts as taken and no task is left."""
    audit = trace.audit
    for field in ("requests", "legs", "load", "work", "tasks"):
        if left := getattr(audit, field):
            yield f"{left} left over: {field}", math.inf


@check("I5", "U3", "U11", "U14", "U39", "W-21", "W-33")
def still_held(trace: Trace) -> Iterator[Finding]:
    """When the engines are closed they hold no request: each was worked off, or aborted before."""
    history = trace.history
    if history.closed == NEVER:
        return
    for leg in history.legs.values():
        if leg.submits and history.let_go(leg) == history.downs.get(leg.replica):
            where = leg.replica
            if where not in history.deaths and where not in history.noticed:
                yield f"{leg.name} was still there when replica {where[1]} was closed", history.downs[where]


@check("I6", "U8", "U9", "U10", "U13", "U68", "W-34", "W-53")
def acknowledged(trace: Trace) -> Iterator[Finding]:
    """After an abort, or when a caller has left, no stage holds the request and nothing of it comes any more."""
    history = trace.history
    for at, done in history.done.items():
        act, entry = trace.entries[at], trace.entries[done]
        if act.what != "abort" or act.request is None or entry.detail or not entry.count:
            continue
        yield from _silent(history, act.request, done, "abort() returned")
        story = history.story(act.request)
        if late := [one for many in story.outputs.values() for one in many if one > done]:
            yield f"request {act.request}: an output after abort() had returned", late[0]
    for request, story in history.stories.items():
        if not story.ends:
            continue
        end = trace.entries[story.ends[0]]
        if end.detail != "finished":  # that is told inside of the block; all else when it was left
            yield from _silent(history, request, story.ends[0], "its caller left")


def _silent(history: History, request: int, at: int, when: str) -> Iterator[Finding]:
    for leg in history.held(request, at):
        yield f"{leg.name} was still held when {when}", at
    if (late := history.after(request, at)) is not None:
        entry = history.entries[late]
        yield f"request {request}: {entry.what!r} at stage {entry.stage} after {when}", late


@check("I11", "U16", "W-10", "W-61")
def truthful(trace: Trace) -> Iterator[Finding]:
    """Verdicts are what callers saw, and statistics count them: each request once, under its own reason."""
    history = trace.history
    seen: Counter[str] = Counter()
    left = 0
    asked = 0
    for request, story in history.stories.items():
        if story.asked == NEVER:
            continue
        asked += 1
        if not story.ends:
            return  # liveness tells of it
        entry = trace.entries[story.ends[0]]
        verdict = trace.entries[story.verdicts[0]].detail if story.verdicts else None
        if entry.what == "left":
            left += 1
            continue
        expected = _VERDICTS.get(entry.detail, "failed")
        if verdict is not None and verdict != expected:
            yield f"request {request} ended for its caller with {entry.detail}, its verdict is {verdict}", story.ends[0]
        refused = verdict is None or (verdict == "failed" and story.admitted == NEVER)
        seen["rejected" if refused else expected] += 1
    if history.closed == NEVER:
        return
    audit = trace.audit
    counted = {field: getattr(audit, field) for field in ("finished", "failed", "aborted", "expired", "rejected")}
    if sum(counted.values()) != asked:
        yield f"{asked} requests came; the statistics have {counted}", math.inf
    for field, count in counted.items():
        if not seen[field] <= count <= seen[field] + left:
            yield f"callers saw {seen[field]} {field} (and {left} left); the statistics have {count}", math.inf


_VERDICTS = {
    "finished": "finished",
    "RequestAborted": "aborted",
    "ShutDown": "aborted",
    "DeadlineExceeded": "expired",
}
"""By what a caller gets raised; all else: ``failed``."""


@check("I11", "U66", "U67", "W-26")
def paused(trace: Trace) -> Iterator[Finding]:
    """What comes after a pause waits for the end of it; when pausing is done the stages are still, and stay so."""
    history, entries = trace.history, trace.entries
    for at in history.acts:
        act = entries[at]
        if act.what not in ("pause", "sleep"):
            continue
        resumed = _resumed(history, at)
        for request, story in history.stories.items():
            if at < story.asked < resumed:
                for leg in history.of_request.get(request, ()):
                    if leg.submits and leg.submits[0] < resumed:
                        yield f"{leg.name} was submitted; it had come while the runtime was paused", leg.submits[0]
        if act.detail == "keep":  # a pause in another way lets what was kept come to its end first
            others = (later for later in history.acts if later > at and entries[later].what in ("pause", "sleep"))
            resumed = min(resumed, next((later for later in others if entries[later].detail != "keep"), NEVER))
        done = history.done.get(at)
        if done is None or entries[done].detail or done > resumed:
            continue
        for leg in history.legs.values():
            for late in (*leg.submits, *leg.updates):
                if done < late < resumed:
                    yield f"{leg.name}: {entries[late].what!r} while the runtime was paused", late
            if act.detail != "keep" and leg.submits and leg.submits[0] < done < history.let_go(leg):
                yield f"{leg.name} was still held when the runtime was paused", done


def _resumed(history: History, at: int) -> float:
    """When somebody resumed the runtime after a position, with success."""
    for later in history.acts:
        if history.entries[later].what == "resume":
            done = history.done.get(later, math.inf)
            if done > at and (done == math.inf or not history.entries[int(done)].detail):
                return max(later, at)
    return NEVER


@check("I15", "U17", "U18", "U19", "U22", "U30", "W-8", "W-11", "W-12", "W-52")
def death(trace: Trace) -> Iterator[Finding]:
    """A death is noticed within a second, once; who was at that replica fails at once, nobody else does."""
    history, plan = trace.history, trace.plan
    for where, at in history.deaths.items():
        name = f"replica {where[1]} of stage {where[0]}"
        noticed = history.noticed.get(where, [])
        if not noticed:
            if at < history.ending and history.closed != NEVER:
                yield f"the death of {name} was not noticed", at
            continue
        if history.time(noticed[0]) > history.time(at) + (HELD_UP if plan.buggify else 1e-6):
            yield f"the death of {name} was noticed only at {history.time(noticed[0]):g}", noticed[0]
    for where, many in history.noticed.items():
        if len(many) > 1:
            yield f"the death of replica {where[1]} of stage {where[0]} was handled twice", many[1]
        for request, story in history.stories.items():
            bound = any(
                leg.replicas and leg.replica == where and leg.submits and leg.submits[0] < many[0]
                and min(leg.ended, leg.acknowledged[0] if leg.acknowledged else NEVER) > many[0]
                and not (leg.aborts and leg.aborts[0] < many[0])
                and leg.turn == max(other.turn for other in history.of_request[request])
                for leg in history.of_request.get(request, ())
            )  # fmt: skip
            if bound and story.judged > many[0] and history.time(story.judged) > history.time(many[0]):
                yield f"request {request} went on after the death of replica {where[1]} of stage {where[0]}", many[0]
    if plan.on_engine_death == "fail_stop":
        return
    for request, story in history.stories.items():
        if not story.ends or trace.entries[story.ends[0]].detail != "ReplicaLost":
            continue
        entry = trace.entries[story.ends[0]]
        if not any(where[0] == entry.stage for where in history.noticed):
            yield f"request {request} lost a replica of stage {entry.stage}, none of which has died", story.ends[0]


@check("I12", "U26", "U61", "U62", "U63", "W-25", "W-31", "W-32")
def shutdown(trace: Trace) -> Iterator[Finding]:
    """Leaving the runtime's block takes no longer than it may, closes every replica, and raises what it has to."""
    history, plan = trace.history, trace.plan
    if history.closed == NEVER:
        yield "the runtime was not closed", math.inf
        return
    budget = plan.abort_timeout + _SHUTDOWN + _NEWS + HELD_UP
    if history.time(history.closed) > history.time(history.ending) + budget:
        yield (
            f"closing took until {history.time(history.closed):g}, from {history.time(history.ending):g}",
            history.closed,
        )
    for where in history.ups:
        if history.downs.get(where, NEVER) > history.closed:
            yield f"replica {where[1]} of stage {where[0]} was not closed", math.inf
    for at in range(int(history.closed) + 1, len(trace.entries)):
        entry = trace.entries[at]
        if entry.who != "caller" or entry.what == "admitted":
            yield f"{entry.who} {entry.what!r} after the runtime was closed", at
            break
    fatal = history.fatal != NEVER
    if fatal and not trace.failure.startswith("EngineDied"):
        yield f"an engine died, and leaving the block raised {trace.failure or 'nothing'}", history.closed
    if trace.failure and not fatal:
        yield f"leaving the block raised {trace.failure}", history.closed


@check("I13", "U21", "U55", "W-1", "W-49")
def quiescence(trace: Trace) -> Iterator[Finding]:
    """With nothing to do the runtime does nothing: no step of the scheduler in ten virtual minutes."""
    if trace.steps_while_idle:
        yield f"{trace.steps_while_idle} steps while idle", math.inf


@check("I16", "U9", "U23", "U26", "U38", "W-5", "W-26", "W-32", "W-58")
def bounded_waits(trace: Trace) -> Iterator[Finding]:
    """What operators do comes back: an abort within its time-out, all else within a minute, or with the runtime."""
    history, plan = trace.history, trace.plan
    slack = HELD_UP if plan.buggify else 1e-6
    for at, act in enumerate(trace.entries):
        if act.who != "operator" or act.what.endswith(" done"):
            continue
        limit = (plan.abort_timeout if act.what == "abort" else _OPERATION) + slack
        done = history.done.get(at, NEVER)
        until = history.time(done) if done != NEVER else history.time(history.ending)
        if done == NEVER and until == math.inf:
            yield f"{act.what!r} has not come back", at
        elif until > act.time + limit:
            yield f"{act.what!r} of {act.time:g} took until {until:g}", at
