"""What callers see: one end, in time, and all that the stages have made, in order (I1, I2, I4, I7)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omni_trio.testing.history import NEVER, History, Story
from omni_trio.testing.model import may_die, permitted, script_of
from omni_trio.testing.script import Wait
from omni_trio.testing.trace import Trace

from ._check import HELD_UP, Finding, check

__all__ = ["conservation", "fresh", "last_word", "liveness", "model", "one_end", "segments"]

_OPERATION = 60.0
"""Virtual seconds that an operator's act may take."""


@check("I1", "U1", "U2", "U8", "U10", "U48", "W-25", "W-34")
def one_end(trace: Trace) -> Iterator[Finding]:
    """A caller sees one end and nothing after it; a request that was let in gets one verdict."""
    for request, story in trace.history.stories.items():
        if len(story.ends) > 1:
            yield f"the caller of request {request} saw two ends", story.ends[1]
        if story.ends:
            seen = [at for many in story.outputs.values() for at in many] + story.others
            if seen and max(seen) > story.ends[0]:
                yield f"the caller of request {request} saw something after the end", max(seen)
        if len(story.verdicts) > 1:
            yield f"request {request} got two verdicts", story.verdicts[1]
        if story.admitted != NEVER and not story.verdicts and trace.history.closed != NEVER:
            yield f"request {request} was let in and got no verdict", math.inf


@check("I2", "U1", "U13", "U14", "U30", "U35", "U38", "U43", "U45", "W-13", "W-14", "W-15", "W-18", "W-26")
def liveness(trace: Trace) -> Iterator[Finding]:
    """Every request ends: by its deadline, when its caller leaves, or as soon as its stages can be done with it."""
    history, plan = trace.history, trace.plan
    bound = _bound(trace)
    slack = HELD_UP if plan.buggify else 1e-6
    for request, asked in enumerate(plan.requests):
        story = history.story(request)
        if not story.ends:
            yield f"request {request} has not ended for its caller", math.inf
            continue
        judged = history.time(story.judged)
        begun = history.time(story.asked)
        if asked.act == "deadline" and judged < math.inf and judged > begun + max(asked.when, 0.25) + slack:
            yield f"request {request} got its verdict at {judged:g}, after its deadline", story.judged
        if asked.act in ("leave", "stop reading") and story.admitted != NEVER:
            latest = history.time(story.admitted) + asked.when + _letting_go(trace) + slack
            if history.time(story.ends[0]) > latest:
                yield f"the caller of request {request} wanted to leave by {latest:g} and could not", story.ends[0]
        if judged < math.inf and judged > bound:
            yield (
                f"request {request} got its verdict at {judged:g}; all together can not take until {bound:g}",
                (story.judged),
            )


def _letting_go(trace: Trace) -> float:
    """Seconds that letting go of a request may take."""
    times = [stage.abort_time if stage.abort_error is None else 0.0 for stage in trace.plan.stages]
    return min(max(times), trace.plan.abort_timeout)


def _bound(trace: Trace) -> float:
    """When everything is over if nothing is ever done at the same time as anything else."""
    plan, history = trace.plan, trace.history
    if plan.end is not None:
        return plan.end + HELD_UP
    bound = max((asked.arrival for asked in plan.requests), default=0.0)
    bound += sum(_OPERATION + act.at for act in plan.operator) + HELD_UP
    for asked in plan.requests:
        bound += asked.when + sum(segment.after for segment in asked.segments or ())
        bound += plan.bundle_timeout if plan.companions else 0.0
        bound += _letting_go(trace) * (1 + len(asked.segments or ()))
        bound += 0.25 if asked.act == "deadline" else 0.0
        bound += sum(verb.seconds for script in asked.companions for verb in script if isinstance(verb, Wait))
    for stage in plan.stages:
        if stage.feed == "connector":
            bound += plan.chunk_timeout * len(plan.requests)
    for leg in history.legs.values():
        inputs = len(leg.submits) + len(leg.updates)
        script = script_of(plan.requests[leg.request], leg.stage)
        bound += (1 + inputs) * plan.stages[leg.stage].submit_time
        bound += inputs * sum(verb.seconds for verb in script if isinstance(verb, Wait))
    return bound


@check("I4", "U28", "U41", "U47", "U49", "U51", "W-20", "W-23")
def conservation(trace: Trace) -> Iterator[Finding]:
    """What a caller gets of a stage is what the stage said, in order; all of it where the request has finished."""
    history = trace.history
    for request, story in history.stories.items():
        turns = max((turn for _, turn in story.outputs), default=0)
        for (stage, turn), outputs in story.outputs.items():
            said, _ = _said(history, request, turn, stage, math.inf)
            got = [token for at in outputs for token in trace.entries[at].tokens]
            if got != said[: len(got)]:
                yield f"request {request}: stage {stage} said {said}, its caller got {got}", outputs[-1]
        if not _finished(trace, story):
            continue
        for stage, plan in enumerate(trace.plan.stages):
            if not plan.final:
                continue
            said, _ = _said(history, request, turns, stage, math.inf)
            got = [token for one in story.outputs.get((stage, turns), ()) for token in trace.entries[one].tokens]
            if got != said:
                yield f"request {request} finished: stage {stage} said {said}, its caller got {got}", story.ends[0]
            if not any(trace.entries[one].last for one in story.outputs.get((stage, turns), ())):
                yield f"request {request} finished without the last output of stage {stage}", story.ends[0]


def _said(history: History, request: int, turn: int, stage: int, before: float) -> tuple[list[int], int]:
    """The tokens that a stage said before a position, and where it said the last of them."""
    leg = history.legs.get((request, None, turn, stage))
    says = [at for at in leg.says if at < before] if leg is not None else []
    return [token for at in says for token in history.entries[at].tokens], says[-1] if says else -1


def _finished(trace: Trace, story: Story) -> bool:
    return bool(story.ends) and trace.entries[story.ends[0]].detail == "finished"


@check("I4", "U47", "U48")
def last_word(trace: Trace) -> Iterator[Finding]:
    """A stage's last output is marked, once, and nothing of that stage follows in the same turn."""
    for request, story in trace.history.stories.items():
        for (stage, _), outputs in story.outputs.items():
            lasts = [at for at in outputs if trace.entries[at].last]
            if lasts and lasts[0] != outputs[-1]:
                yield f"request {request}: an output of stage {stage} after its last one", outputs[-1]


@check("I4", "U68", "U70", "W-20", "W-24", "W-29")
def segments(trace: Trace) -> Iterator[Finding]:
    """In a session every stage is given what its source said in the turn, and each segment's answer has its number."""
    history, plan = trace.history, trace.plan
    for request, asked in enumerate(plan.requests):
        if asked.segments is None:
            continue
        story = history.story(request)
        turns: list[list[tuple[int, ...]]] = [[]]
        for segment in asked.segments:
            if segment.barge_in:
                turns.append([])
            turns[-1].append(segment.tokens)
        whole = _finished(trace, story)
        for leg in history.of_request.get(request, ()):
            stage = plan.stages[leg.stage]
            if stage.feed == "connector" or leg.turn >= len(turns):
                continue
            given = [token for at in (*leg.submits, *leg.updates) for token in trace.entries[at].tokens]
            if stage.source is None:
                source = [token for tokens in turns[leg.turn] for token in tokens]
            else:
                source, _ = _said(history, request, leg.turn, stage.source, math.inf)
            if given != source[: len(given)] or (whole and leg.turn == len(turns) - 1 and given != source):
                yield f"{leg.name} was given {given}; its source has {source}", leg.submits[0] if leg.submits else NEVER
        for (number, turn), outputs in story.outputs.items():
            if turn >= len(turns) or any(plan.stages[one].feed == "connector" for one in plan.path(number)):
                continue
            for at in outputs:
                entry = trace.entries[at]
                sent = turns[turn][entry.segment] if entry.segment < len(turns[turn]) else ()
                # The answers to the closing of a session have the number of the segment after the last.
                if not set(entry.tokens) <= set(sent):
                    yield (
                        f"request {request}: segment {entry.segment} of stage {number} is {entry.tokens}, not {sent}",
                        at,
                    )


@check("I7", "U53", "U56", "W-7")
def fresh(trace: Trace) -> Iterator[Finding]:
    """What waits for a caller is merged: each output that it takes holds all that the stage has said by then."""
    history = trace.history
    if trace.plan.buggify:
        return  # what holds a caller up between taking and telling would show as staleness
    for request, story in history.stories.items():
        if trace.plan.requests[request].segments is not None:
            continue  # of each segment one output waits
        for (stage, turn), outputs in story.outputs.items():
            got = 0
            for at in outputs:
                got += len(trace.entries[at].tokens)
                said, _ = _said(history, request, turn, stage, min(at, story.judged))
                if got < len(said):
                    yield (
                        f"request {request}: its caller took {got} tokens of stage {stage}, which had said {len(said)}",
                        at,
                    )


@check("I4", "U28", "U45", "U47")
def model(trace: Trace) -> Iterator[Finding]:
    """Every request ends in a way that the reference model permits, finished ones with exactly its tokens."""
    history = trace.history
    deadly = may_die(trace.plan)
    for request in range(len(trace.plan.requests)):
        story = history.story(request)
        if not story.ends:
            continue
        may = permitted(trace.plan, request, deadly=deadly)
        entry = trace.entries[story.ends[0]]
        how = "left" if entry.what == "left" else entry.detail
        if how not in may.ends:
            yield (
                f"request {request} ended with {how} ({entry.text}); permitted: {', '.join(sorted(may.ends))}",
                (story.ends[0]),
            )
        if how != "finished":
            continue
        turn = max((turn for _, turn in story.outputs), default=0)
        for stage, tokens in may.tokens.items():
            got = tuple(token for at in story.outputs.get((stage, turn), ()) for token in trace.entries[at].tokens)
            if stage in may.repeats and tokens:
                times, rest = divmod(len(got), len(tokens))
                given = history.legs.get((request, None, turn, stage))
                inputs = len(given.submits) + len(given.updates) if given is not None else 0
                wrong = rest or not 1 <= times <= inputs or got != tokens * times
            else:
                wrong = got != tokens
            if wrong:
                yield f"request {request} finished with {got} of stage {stage}; expected {tokens}", story.ends[0]
