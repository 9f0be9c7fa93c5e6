"""A run as a trace file for https://ui.perfetto.dev (or ``chrome://tracing``)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from omni_trio.messages import TraceEvent
from omni_trio.pipeline import Pipeline

from ._story import LegSpan, ReplicaSpan, RequestSpan, Story, stack_rows, tell

__all__ = ["chrome_trace", "write_chrome_trace"]

_Json: TypeAlias = dict[str, Any]

_PIPELINE = 1
"""The process for what belongs to no stage; stage n is process n + 2, since 0 has a meaning of its own."""
_ROWS = 1000
"""Thread ids per replica: slices of one thread must nest, so requests that overlap take further rows."""


def write_chrome_trace(
    events: Iterable[TraceEvent], path: str | os.PathLike[str], *, pipeline: Pipeline | None = None
) -> None:
    """Write events as a trace in Chrome's JSON format. It blocks while it writes.

    Args:
        events: what a `Recorder` has kept.
        path: the file; an existing one is replaced.
        pipeline: tells which stage feeds which; without it each is taken to be fed by the one before.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump(chrome_trace(events, pipeline=pipeline), file, separators=(",", ":"))


def chrome_trace(events: Iterable[TraceEvent], *, pipeline: Pipeline | None = None) -> _Json:
    """Return what `write_chrome_trace` writes.

    One process per stage with one thread per replica, and further ones for requests that overlap there: start-up
    phases and requests are slices, outputs and deaths are instants, arrows lead from stage to stage. The process
    "pipeline" has asynchronous tracks, one per request with its bridges nested in it and one per request and stage,
    and a counter of the requests in flight.
    """
    story = tell(events, pipeline)
    writer = _Writer(story)
    return {
        "traceEvents": [*writer.metadata(), *sorted(writer.events(), key=lambda event: float(event["ts"]))],
        "displayTimeUnit": "ms",
        "otherData": {"producer": "omni_trio"},
    }


class _Writer:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._threads: dict[tuple[int, int], str] = {}
        self._place: dict[int, tuple[int, int]] = {}
        for (stage_id, replica_id), replica in sorted(story.replicas.items()):
            self._lay_out(stage_id, replica_id, replica)

    def _lay_out(self, stage_id: int, replica_id: int, replica: ReplicaSpan) -> None:
        legs = [leg for leg in self._story.legs if (leg.stage_id, leg.replica_id) == (stage_id, replica_id)]
        rows = stack_rows([(leg.start, leg.end) for leg in legs])
        pid = stage_id + 2
        first = replica_id * _ROWS + 1
        for row in range(max(rows, default=0) + 1):
            name = f"replica {replica_id}" if row == 0 else f"replica {replica_id}, row {row + 1}"
            self._threads[pid, first + row] = name
        for leg, row in zip(legs, rows, strict=True):
            self._place[id(leg)] = (pid, first + row)

    def _us(self, time: float) -> float:
        return round((time - self._story.start) * 1e6, 3)

    def metadata(self) -> Iterator[_Json]:
        """Names and order of processes and threads."""
        names = {_PIPELINE: "pipeline"}
        names |= {replica.stage_id + 2: f"stage {replica.stage}" for replica in self._story.replicas.values()}
        for pid, name in sorted(names.items()):
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        for (pid, tid), name in sorted(self._threads.items()):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}

    def events(self) -> Iterator[_Json]:
        """All that has a time, in no order."""
        for replica in self._story.replicas.values():
            yield from self._replica(replica)
        flow_ids = itertools.count(1)
        for number, request in enumerate(self._story.requests, start=1):
            yield from self._request(request, number)
            for leg in request.legs:
                yield from self._leg(leg)
                if leg.source is not None:
                    yield from self._arrow(leg.source, leg, next(flow_ids))
        yield from self._counter()

    def _replica(self, replica: ReplicaSpan) -> Iterator[_Json]:
        place = {"pid": replica.stage_id + 2, "tid": replica.replica_id * _ROWS + 1, "cat": "replica"}
        for phase in replica.phases:
            start, end = self._us(phase.start), self._us(phase.end)
            yield {"ph": "X", **place, "name": phase.name, "ts": start, "dur": round(end - start, 3)}
        for time, why in replica.deaths:
            yield {"ph": "i", "s": "p", **place, "name": "died", "ts": self._us(time), "args": {"reason": why}}

    def _leg(self, leg: LegSpan) -> Iterator[_Json]:
        pid, tid = self._place[id(leg)]
        place = {"pid": pid, "tid": tid, "cat": "leg"}
        start, end = self._us(leg.start), self._us(leg.end)
        details = {"reason": leg.reason, "outputs": len(leg.outputs), "size": leg.size, "updates": len(leg.updates)}
        yield {"ph": "X", **place, "name": leg.request_id, "ts": start, "dur": round(end - start, 3), "args": details}
        for time, size in leg.outputs:
            yield {"ph": "i", "s": "t", **place, "name": "output", "ts": self._us(time), "args": {"size": size}}
        for time in leg.updates:
            yield {"ph": "i", "s": "t", **place, "name": "more input", "ts": self._us(time)}

    def _arrow(self, source: LegSpan, leg: LegSpan, number: int) -> Iterator[_Json]:
        # An arrow is tied to the slice around its time stamp, and a slice no longer counts at its very end.
        inside = min(leg.start, source.end - min(1e-6, (source.end - source.start) / 2))
        for phase, span, time in (("s", source, max(source.start, inside)), ("f", leg, leg.start)):
            pid, tid = self._place[id(span)]
            arrow = {"ph": phase, "id": number, "pid": pid, "tid": tid, "cat": "flow", "name": "bridge"}
            yield {**arrow, "ts": self._us(time), **({"bp": "e"} if phase == "f" else {})}

    def _request(self, request: RequestSpan, number: int) -> Iterator[_Json]:
        # Bridges follow each other and so nest in their request; stages that stream overlap, and get own tracks.
        end = max([request.end, *(leg.end for leg in request.legs)])
        details = {"verdict": request.verdict, "detail": request.detail}
        yield self._edge("b", str(number), request.request_id, request.start, details)
        for bridge in request.bridges:
            yield self._edge("b", str(number), f"bridge to {bridge.stage}", bridge.start)
            yield self._edge("e", str(number), f"bridge to {bridge.stage}", bridge.end)
        yield self._edge("e", str(number), request.request_id, end)
        for index, leg in enumerate(request.legs):
            name = f"{request.request_id} at {leg.stage}"
            yield self._edge("b", f"{number}.{index}", name, leg.start, {"replica": leg.replica_id})
            yield self._edge("e", f"{number}.{index}", name, leg.end)

    def _edge(self, phase: str, track: str, name: str, time: float, details: _Json | None = None) -> _Json:
        place = {"pid": _PIPELINE, "tid": 0, "cat": "request", "id": track}
        return {"ph": phase, **place, "name": name, "ts": self._us(time), **({"args": details} if details else {})}

    def _counter(self) -> Iterator[_Json]:
        steps = [(request.start, 1) for request in self._story.requests]
        steps += [(request.end, -1) for request in self._story.requests]
        total = 0
        for time, group in itertools.groupby(sorted(steps), key=lambda step: step[0]):
            total += sum(step for _, step in group)
            counts = {"requests": total}
            yield {"ph": "C", "pid": _PIPELINE, "tid": 0, "name": "in flight", "ts": self._us(time), "args": counts}
