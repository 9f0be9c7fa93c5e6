"""From single events to what has a beginning and an end: the model that the trace file and the picture share.

Events may be missing where a recorder has dropped the oldest: an end without its beginning is left out, a beginning
without its end lasts until the last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from omni_trio.messages import TraceEvent
from omni_trio.pipeline import Pipeline

__all__ = ["BridgeSpan", "LegSpan", "Phase", "ReplicaSpan", "RequestSpan", "Story", "stack_rows", "tell"]

_VERDICTS = ("finished", "failed", "aborted", "expired")


@attrs.define
class Phase:
    """A step in the life of a replica: of its start-up, or its closing. Times in seconds of trio's clock."""

    name: str
    start: float
    end: float


@attrs.define
class ReplicaSpan:
    """One replica."""

    stage: str
    stage_id: int
    replica_id: int
    phases: list[Phase] = attrs.field(factory=list)
    deaths: list[tuple[float, str]] = attrs.field(factory=list)
    """When it died, and of what."""


@attrs.define
class LegSpan:
    """One request at one stage."""

    request_id: str
    stage: str
    stage_id: int
    replica_id: int
    start: float
    end: float
    reason: str = ""
    """The finish reason; ``released`` where the stage was told to let go; empty while it is at work."""
    outputs: list[tuple[float, float]] = attrs.field(factory=list)
    """When an output came, and how many tokens or items it had."""
    updates: list[float] = attrs.field(factory=list)
    """When more input was handed over."""
    source: LegSpan | None = None
    """The leg whose output feeds this one."""
    verdict: str = ""
    """How the request as a whole ended."""

    @property
    def size(self) -> float:
        """Sum over the outputs: tokens or items."""
        return sum(value for _, value in self.outputs)


@attrs.define
class BridgeSpan:
    """One call of the bridge in front of a stage."""

    request_id: str
    stage: str
    stage_id: int
    start: float
    end: float


@attrs.define
class RequestSpan:
    """One request from admission to its terminal."""

    request_id: str
    start: float
    end: float
    verdict: str = ""
    detail: str = ""
    legs: list[LegSpan] = attrs.field(factory=list)
    bridges: list[BridgeSpan] = attrs.field(factory=list)


@attrs.define
class Story:
    """All that events tell, with `start` and `end` around it."""

    start: float = 0.0
    end: float = 0.0
    opened: float | None = None
    """When all replicas were up."""
    closing: float | None = None
    replicas: dict[tuple[int, int], ReplicaSpan] = attrs.field(factory=dict)
    requests: list[RequestSpan] = attrs.field(factory=list)

    @property
    def legs(self) -> list[LegSpan]:
        """Those of all requests, by their start."""
        return sorted((leg for request in self.requests for leg in request.legs), key=lambda leg: leg.start)


def tell(events: Iterable[TraceEvent], pipeline: Pipeline | None = None) -> Story:
    """Put events together. With the pipeline, legs know their true source; without, the stage before is taken."""
    ordered = sorted(events, key=lambda event: event.time)
    if not ordered:
        return Story()
    story = Story(start=ordered[0].time, end=ordered[-1].time)
    teller = _Teller(story, pipeline)
    for event in ordered:
        teller.take(event)
    return story


class _Teller:
    def __init__(self, story: Story, pipeline: Pipeline | None) -> None:
        self._story = story
        self._pipeline = pipeline
        self._requests: dict[str, RequestSpan] = {}
        self._legs: dict[tuple[str, int], LegSpan] = {}
        self._bridges: dict[tuple[str, int], BridgeSpan] = {}
        self._phases: dict[tuple[int, int], Phase] = {}

    def take(self, event: TraceEvent) -> None:
        family, _, what = event.name.partition(".")
        if family == "runtime":
            if what == "open":
                self._story.opened = event.time
            elif what == "closing" and self._story.closing is None:
                self._story.closing = event.time
        elif family == "replica" and event.stage_id is not None and event.replica_id is not None:
            self._replica(event, what, (event.stage_id, event.replica_id))
        elif family == "request" and event.request_id is not None:
            self._request(event, what, event.request_id)
        elif event.request_id is not None and event.stage_id is not None:
            key = (event.request_id, event.stage_id)
            if family == "leg":
                self._leg(event, what, key)
            elif family == "bridge":
                self._bridge(event, what, key)

    def _replica(self, event: TraceEvent, what: str, key: tuple[int, int]) -> None:
        replica = self._replica_span(event, key)
        if (running := self._phases.pop(key, None)) is not None:
            running.end = event.time
        if what == "died":
            replica.deaths.append((event.time, event.detail))
        name = event.detail if what == "phase" else "closing" if what == "closing" else ""
        if name and name != "ready":
            phase = self._phases[key] = Phase(name, event.time, self._story.end)
            replica.phases.append(phase)

    def _replica_span(self, event: TraceEvent, key: tuple[int, int]) -> ReplicaSpan:
        span = self._story.replicas.get(key)
        if span is None:
            span = self._story.replicas[key] = ReplicaSpan(event.stage or f"stage {key[0]}", *key)
        return span

    def _request(self, event: TraceEvent, what: str, request_id: str) -> None:
        if what == "submitted":
            span = self._requests[request_id] = RequestSpan(request_id, event.time, self._story.end)
            self._story.requests.append(span)
        elif what in _VERDICTS and (found := self._requests.get(request_id)) is not None and not found.verdict:
            found.end = event.time
            found.verdict = what
            found.detail = event.detail
            for leg in found.legs:
                leg.verdict = what

    def _leg(self, event: TraceEvent, what: str, key: tuple[str, int]) -> None:
        request_id, stage_id = key
        if what == "submitted":
            request = self._requests.get(request_id)
            if request is None or event.replica_id is None:
                return
            self._end_leg(key, event.time, "")
            leg = LegSpan(
                request_id,
                event.stage or f"stage {stage_id}",
                stage_id,
                event.replica_id,
                event.time,
                self._story.end,
                source=self._source(request, stage_id),
            )
            self._replica_span(event, (stage_id, event.replica_id))
            request.legs.append(leg)
            self._legs[key] = leg
        elif (running := self._legs.get(key)) is not None:
            if what == "output":
                running.outputs.append((event.time, event.value))
            elif what == "updated":
                running.updates.append(event.time)
            elif what in ("finished", "released"):
                self._end_leg(key, event.time, event.detail or what)

    def _end_leg(self, key: tuple[str, int], time: float, reason: str) -> None:
        if (leg := self._legs.pop(key, None)) is not None:
            leg.end = time
            leg.reason = reason

    def _source(self, request: RequestSpan, stage_id: int) -> LegSpan | None:
        if self._pipeline is not None:
            wanted = self._pipeline.sources[stage_id]
            candidates = [leg for leg in request.legs if leg.stage_id == wanted]
        else:
            candidates = [leg for leg in request.legs if leg.stage_id < stage_id]
        return max(candidates, key=lambda leg: (leg.stage_id, leg.start), default=None)

    def _bridge(self, event: TraceEvent, what: str, key: tuple[str, int]) -> None:
        request = self._requests.get(key[0])
        if what == "started" and request is not None:
            stage = event.stage or f"stage {key[1]}"
            span = self._bridges[key] = BridgeSpan(key[0], stage, key[1], event.time, event.time)
            request.bridges.append(span)
        elif what == "finished" and (running := self._bridges.pop(key, None)) is not None:
            running.end = event.time


def stack_rows(spans: Sequence[tuple[float, float]], gap: float = 0.0) -> list[int]:
    """Give each of `spans`, ordered by start, the lowest row that is free by then and has been for `gap`."""
    free_from: list[float] = []
    rows = []
    for start, end in spans:
        row = next((index for index, free in enumerate(free_from) if free + gap <= start), len(free_from))
        if row == len(free_from):
            free_from.append(end)
        else:
            free_from[row] = end
        rows.append(row)
    return rows
