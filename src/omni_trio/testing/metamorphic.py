"""Relations between two simulations: what must stay the same when something that should not matter is changed.

They need no prediction of what a plan does, so that they also find what a model of the runtime has wrong. Each takes a
plan, makes it `calm`, runs it as it is and changed, and raises `Differs` where some request ends otherwise or its
caller hears something else. When it hears it, and in how many pieces, may change.

There is none for retries yet, since the runtime does not retry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from .plan import Plan, RequestPlan, SegmentPlan, StagePlan
from .script import Die, DieOnSubmit, Duplicate, Error, Finish, FinishSilently, Reject, Script, Stall
from .simulation import run_simulation
from .trace import Trace

__all__ = [
    "RELATIONS",
    "Differs",
    "Outcome",
    "aborted_neighbours_change_nothing",
    "calm",
    "connectors_change_nothing",
    "outcomes",
    "replicas_change_nothing",
    "schedules_change_nothing",
    "streaming_changes_nothing",
    "submission_order_changes_nothing",
]

Run: TypeAlias = Callable[[Plan], Trace]
"""Runs a plan; `functools.partial` of `run_simulation` brings in clients of your own."""

Feed: TypeAlias = Literal["finish", "output", "connector"]

_PATIENCE = 1e5
"""Virtual seconds: above all waiting in line, below a simulation's horizon."""

_change = msgspec.structs.replace


class Differs(AssertionError):
    """Something that should not matter does.

    Attributes:
        trace: of the plan as it was.
        changed: of the changed one.
    """

    def __init__(self, message: str, trace: Trace, changed: Trace) -> None:
        self.trace = trace
        self.changed = changed
        super().__init__(message)


@attrs.frozen
class Outcome:
    """What a request came to, without times and pieces."""

    finished: bool
    tokens: tuple[tuple[int, tuple[int, ...], str], ...] = ()
    """Of a finished one, for each stage that its caller heard: index, tokens, finish reason. How much of a failing one
    comes before its end is a matter of time."""


def outcomes(trace: Trace) -> tuple[Outcome, ...]:
    """Return what each request of a trace came to, in the order of the plan."""
    return tuple(_outcome(trace, index) for index in range(len(trace.plan.requests)))


def _outcome(trace: Trace, request: int) -> Outcome:
    end = trace.end_of(request)
    if end is None or end.detail != "finished":
        return Outcome(False)
    tokens: dict[int, tuple[int, ...]] = {}
    reasons: dict[int, str] = {}
    for entry in trace.of(request, who="caller"):
        if entry.what == "output" and entry.stage is not None:
            tokens[entry.stage] = tokens.get(entry.stage, ()) + entry.tokens
            reasons[entry.stage] = entry.detail or reasons.get(entry.stage, "")
    return Outcome(True, tuple((stage, tokens[stage], reasons[stage]) for stage in sorted(tokens)))


def calm(plan: Plan, *, faults: bool = True) -> Plan:
    """Return a plan without all that makes outcomes a matter of time.

    Callers wait for the end (they may be slow), sessions are closed and nobody barges in, nothing stalls, no replica
    dies, no operator acts, no time-out of the pipeline is short, and the runtime is closed when all have ended. Where a
    stage is fed by ``output``, all requests are sessions: of a plain request it plays its script once per piece, and
    into how many pieces something falls is a matter of time. In a pipeline that takes no sessions it is fed by
    ``finish``.

    Args:
        plan: what to make calm.
        faults: whether stages may still fail and refuse requests, and bridges fail.
    """
    feeds = {stage.feed for stage in plan.stages}
    streams = "output" in feeds
    takes_sessions = not plan.pair and not plan.companions and "kv" not in feeds
    requests = tuple(_calm_request(request, faults=faults) for request in plan.requests)
    if streams and takes_sessions:
        requests = tuple(map(_session, requests))
    return _change(
        plan,
        stages=tuple(_calm_stage(stage, streams=takes_sessions) for stage in plan.stages),
        requests=requests,
        operator=(),
        end=None,
        max_in_flight=10_000,
        abort_timeout=_PATIENCE,
        bundle_timeout=_PATIENCE,
        chunk_timeout=_PATIENCE,
    )


def _calm_stage(stage: StagePlan, *, streams: bool) -> StagePlan:
    feed = "finish" if stage.feed == "output" and not streams else stage.feed
    abort_time = stage.abort_time if stage.abort_time < _PATIENCE else 0.0
    return _change(stage, feed=feed, abort_error=None, abort_time=abort_time)


def _calm_request(request: RequestPlan, *, faults: bool) -> RequestPlan:
    segments = request.segments
    if segments is not None:
        segments = tuple(_change(segment, barge_in=False) for segment in segments) or (SegmentPlan(request.prompt),)
    return _change(
        request,
        act="slow" if request.act == "slow" else "wait",
        segments=segments,
        close=True,
        scripts=tuple(_calm_script(script, faults=faults) for script in request.scripts),
        companions=tuple(_calm_script(script, faults=faults) for script in request.companions),
        bridges=request.bridges if faults else (),
    )


def _calm_script(script: Script, *, faults: bool) -> Script:
    kept: list[Any] = []
    for index, verb in enumerate(script):
        if isinstance(verb, Stall | Die | DieOnSubmit):
            break
        if isinstance(verb, Finish | FinishSilently) or (faults and isinstance(verb, Error)):
            return (*kept, verb)
        if isinstance(verb, Reject) and faults and index == 0:
            return (verb,)
        if not isinstance(verb, Duplicate | Error | Reject):
            kept.append(verb)
    return (*kept, Finish())


# --------------------------------------------------------------------------------------------------------------
# The relations


def streaming_changes_nothing(plan: Plan, *, run: Run = run_simulation) -> None:
    """A stage that works off its input piece by piece makes the same of it as one that gets it at once.

    Every stage that is fed by ``output`` is fed by ``finish`` instead, and the other way round. Requests are made
    sessions, whose stages repeat what they are given: what else a stage makes of its pieces is its own affair.

    Raises:
        Differs: it is not so.
    """
    plan = calm(_only(plan, "finish", "output"), faults=False)
    plan = _change(plan, requests=tuple(_session(request) for request in plan.requests))
    _compare(plan, _exchanged(plan, "finish", "output"), run, "feeding in pieces or at once")


def connectors_change_nothing(plan: Plan, *, run: Run = run_simulation) -> None:
    """A stage that gets its data by connector, and starts early, makes the same as one that waits for its source.

    Every stage that is fed by ``connector`` is fed by ``finish`` instead, and the other way round. Sessions are made
    plain requests, and every stage plays its script whatever its input is.

    Raises:
        Differs: it is not so.
    """
    plan = calm(_only(plan, "finish", "connector"), faults=False)
    plan = _change(plan, requests=tuple(_change(request, segments=None) for request in plan.requests))
    _compare(plan, _exchanged(plan, "finish", "connector"), run, "feeding by connector or at the end")


def replicas_change_nothing(plan: Plan, *, replicas: int = 3, run: Run = run_simulation) -> None:
    """Many replicas serve as one does.

    Args:
        plan: what to run, with one replica per stage and with `replicas`.
        replicas: how many.
        run: runs a plan.

    Raises:
        Differs: it is not so.
    """
    plan = calm(plan)
    one, many = (tuple(_change(stage, replicas=count) for stage in plan.stages) for count in (1, replicas))
    _compare(_change(plan, stages=one), _change(plan, stages=many), run, f"1 or {replicas} replicas")


def submission_order_changes_nothing(
    plan: Plan, *, order: Sequence[int] | None = None, run: Run = run_simulation
) -> None:
    """In which order requests are asked for changes none of them.

    Args:
        plan: what to run.
        order: which of its requests is asked first, second and so on among those that come at the same time; a
            permutation of their indices. None: the last one first.
        run: runs a plan.

    Raises:
        Differs: it is not so.
        ValueError: `order` is no such permutation.
    """
    plan = calm(plan)
    count = len(plan.requests)
    chosen = tuple(reversed(range(count))) if order is None else tuple(order)
    if sorted(chosen) != list(range(count)):
        raise ValueError(f"order: expected each of 0 to {count - 1} once, not {chosen}")
    permuted = _change(plan, requests=tuple(plan.requests[index] for index in chosen))
    places = [chosen.index(index) for index in range(count)]
    _compare(plan, permuted, run, f"the order of requests: {chosen}", places)


def aborted_neighbours_change_nothing(
    plan: Plan, *, neighbours: Iterable[RequestPlan] | None = None, run: Run = run_simulation
) -> None:
    """Requests that are aborted, and callers that leave, change nothing for the others.

    Args:
        plan: what to run.
        neighbours: requests that come in addition; each should be aborted or left, and kill no replica. None: of
            each request of the plan two more, one that is aborted and one whose caller leaves.
        run: runs a plan.

    Raises:
        Differs: it is not so.
    """
    alone = calm(plan)
    if neighbours is None:
        neighbours = [
            _change(request, act=act, when=when)
            for request in alone.requests
            for act, when in (("abort", 0.5), ("leave", 0.0))
        ]
    added = tuple(neighbours)
    places = range(len(added), len(added) + len(alone.requests))
    _compare(alone, _change(alone, requests=(*added, *alone.requests)), run, "aborted neighbours", places)


def schedules_change_nothing(plan: Plan, *, seed: int = 1, run: Run = run_simulation) -> None:
    """Which of the tasks that could run runs first changes nothing.

    Args:
        plan: what to run.
        seed: is added to the plan's own.
        run: runs a plan.

    Raises:
        Differs: it is not so.
    """
    plan = calm(plan)
    _compare(plan, _change(plan, seed=plan.seed + seed), run, "the schedule")


RELATIONS: tuple[Callable[[Plan], None], ...] = (
    streaming_changes_nothing,
    connectors_change_nothing,
    replicas_change_nothing,
    submission_order_changes_nothing,
    aborted_neighbours_change_nothing,
    schedules_change_nothing,
)
"""All of them, with nothing to be said but the plan."""


def _compare(plan: Plan, changed: Plan, run: Run, what: str, places: Sequence[int] | None = None) -> None:
    """Run both and compare; `places` says where the requests of the first are in the second."""
    before, after = run(plan), run(changed)
    first, second = outcomes(before), outcomes(after)
    for index, outcome in enumerate(first):
        place = index if places is None else places[index]
        if second[place] != outcome:
            now = f"request {index}" + ("" if place == index else f", which is request {place} then")
            raise Differs(f"{what} changes {now}: {outcome} becomes {second[place]}", before, after)


def _only(plan: Plan, kept: Feed, changing: Feed) -> Plan:
    """Return the plan with all stages fed in one of two ways, and without a pair or companions."""
    stages = tuple(
        stage if stage.source is None or stage.feed in (kept, changing) else _change(stage, feed=kept)
        for stage in plan.stages
    )
    return _change(plan, stages=stages, pair=False, companions=0)


def _exchanged(plan: Plan, one: Feed, other: Feed) -> Plan:
    """Return the plan with the stages that are fed in one of two ways fed in the other."""
    stages = tuple(
        stage if stage.source is None else _change(stage, feed=other if stage.feed == one else one)
        for stage in plan.stages
    )
    return _change(plan, stages=stages)


def _session(request: RequestPlan) -> RequestPlan:
    segments = request.segments or (SegmentPlan(request.prompt or (1,)),)
    # Without tokens a bridge has nothing to hand on, and which of its calls those are is a matter of time.
    filled = tuple(segment if segment.tokens else _change(segment, tokens=(0,)) for segment in segments)
    return _change(request, segments=filled)
