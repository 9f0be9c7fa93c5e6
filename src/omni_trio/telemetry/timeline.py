"""A run as a picture: who worked on what, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

import attrs

from omni_trio.messages import TraceEvent
from omni_trio.pipeline import Pipeline

from ._story import LegSpan, ReplicaSpan, Story, stack_rows, tell

__all__ = ["timeline_svg"]

_WIDTH = 1200.0
_LEFT = 150.0
_RIGHT = 24.0
_HEADER = 84.0
_FOOTER = 46.0
_STAGE_GAP = 10.0
_PAD = 8.0
_PITCHES = ((10, 24.0), (30, 14.0), (100, 6.0), (math.inf, 3.0))
"""Pixels per row, by how many rows a replica has at most."""

_BAR_COLOURS = ("#3a6fc9", "#a4561c", "#2c7d4f", "#8a50b8", "#b03a5b", "#1e7888", "#6d6c1c", "#77564a")
"""One per request, in turn. White text is readable on each, and each stands out from both backgrounds."""

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 11px }
text { fill: #24292f } .page { fill: #ffffff } .lane { fill: #f3f5f8 } .grid { stroke: #d8dde4; stroke-width: 1 }
.title { font-size: 16px; font-weight: 600 } .stage { font-size: 12px; font-weight: 600 } .soft { fill: #5b6672 }
.edge { stroke: #8c96a3; stroke-width: 1; stroke-dasharray: 3 3 } .phase { fill: #e3c886 } .phase2 { fill: #d6b45f }
.closing { fill: #c3cad3 } .on-phase { fill: #4d3800; font-size: 10px } .on-closing { fill: #37404a; font-size: 10px }
.on-bar { fill: #ffffff; font-size: 10px } .tick { stroke: #ffffff; stroke-width: 1; stroke-opacity: 0.75 }
.pale { fill-opacity: 0.6 } .bridge { fill: none; stroke-width: 1.2; stroke-opacity: 0.8 } .piece { stroke-width: 1 }
.failed { fill: #d1242f } .stopped { fill: #d98200 } .death { stroke: #d1242f; stroke-width: 2 } .dead { fill: #d1242f }
@media (prefers-color-scheme: dark) {
text { fill: #e2e6eb } .page { fill: #14181d } .lane { fill: #1d232b } .grid { stroke: #313a45 }
.soft { fill: #9aa5b1 } .edge { stroke: #77828f } .phase { fill: #6b5520 } .phase2 { fill: #806727 }
.closing { fill: #46505c } .on-phase { fill: #f6e6bb } .on-closing { fill: #dde3ea } .on-bar { fill: #ffffff }
.failed, .dead { fill: #f4626a } .stopped { fill: #eda53a } .death { stroke: #f4626a }
}
"""


def timeline_svg(events: Iterable[TraceEvent], *, pipeline: Pipeline | None = None, title: str | None = None) -> str:
    """Return a picture of a run as an SVG document that needs nothing else.

    One lane per replica, grouped by stage; one bar per request and stage, pale until its first output; a tick per
    output; lines where a bridge handed on from stage to stage. Start-up and shutdown stand left and right of the
    time axis, which counts from when all replicas were up; they are squeezed where they would crowd it out.

    Args:
        events: what a `Recorder` has kept.
        pipeline: tells which stage feeds which (without it each is taken to be fed by the one before) and the name.
        title: what stands above; by default the pipeline's name.
    """
    story = tell(events, pipeline)
    heading = title if title is not None else pipeline.name if pipeline is not None else "omni_trio"
    return _Picture(story, heading).draw()


# --------------------------------------------------------------------------------------------------------------
# Words and numbers


_BAD_ENDS = ("failed", "expired", "aborted")
_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What an XML document can not hold, not even escaped."""


def _text(words: str) -> str:
    return escape(_ILLEGAL.sub("\ufffd", words), {'"': "&quot;"})


def _fit(words: str, width: float, size: float = 10.0) -> str:
    """Shorten to a width in pixels, by a character's usual width; empty where not even three would fit."""
    room = int(width / (size * 0.64))
    if len(words) <= room:
        return words
    return words[: room - 1] + "…" if room >= 4 else ""


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_UNITS = (("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def _duration(seconds: float) -> str:
    unit, size = next((pair for pair in _UNITS if seconds >= pair[1] * (2 if pair[0] == "min" else 1)), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}" if seconds else "0 s"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _ticks(span: float, most: int) -> list[tuple[float, str]]:
    """Return round times within `span` seconds and their labels: 1, 2 or 5 of a unit apart, all in one unit."""
    unit, size = next((unit, size) for unit, size in _UNITS if span >= 2 * size or size == _UNITS[-1][1])
    rough = span / size / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    count = int(span / size / step + 1e-9) + 1
    return [(index * step * size, f"{index * step:.{digits}f} {unit}") for index in range(count)]


@attrs.frozen
class _Scale:
    """From seconds to pixels, straight within start-up, serving and shutdown, each with a width of its own."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, story: Story) -> _Scale:
        closing = story.end if story.closing is None else story.closing
        # Without an opening nothing was served before the end, unless the recorder dropped it.
        opened = story.opened if story.opened is not None else story.start if story.requests else closing
        closing = max(opened, closing)
        before, serving, after = opened - story.start, closing - opened, story.end - closing
        width = _WIDTH - _LEFT - _RIGHT
        whole = (before + serving + after) or 1.0
        most = (0.2, 0.1) if serving > 0 else (1.0, 1.0)
        left = max(min(before / whole, most[0]) * width, 64.0 if before > 0 else 0.0)
        right = max(min(after / whole, most[1]) * width, 64.0 if after > 0 else 0.0)
        if serving <= 0:
            left = min(left, width - right)
            right = width - left if after > 0 else right
        times = (story.start, opened, closing, story.end)
        places = (_LEFT, _LEFT + left, _LEFT + width - right, _LEFT + width)
        return cls(tuple(zip(times, places, strict=True)))

    def __call__(self, time: float) -> float:
        (_, (opened, _), (closing, _), _) = self.points
        first = 0 if time < opened else 1 if time <= closing else 2
        return self._between(first, time)

    def serving(self, time: float) -> float:
        """As a call, for a time between opening and closing."""
        return self._between(1, time)

    def _between(self, first: int, time: float) -> float:
        (t0, x0), (t1, x1) = self.points[first], self.points[first + 1]
        share = (time - t0) / (t1 - t0) if t1 > t0 else 0.0
        return x0 + (x1 - x0) * min(max(share, 0.0), 1.0)


@attrs.define
class _Lane:
    """Where one replica's rows are."""

    replica: ReplicaSpan
    legs: list[LegSpan]
    rows: list[int]
    top: float = 0.0
    pitch: float = 24.0
    count: int = 1

    @property
    def height(self) -> float:
        return self.count * self.pitch

    @property
    def bottom(self) -> float:
        return self.top + self.height


@attrs.frozen
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def sides(self) -> dict[str, float]:
        """As the attributes of a rectangle."""
        return {"x": self.left, "y": self.top, "width": max(self.right - self.left, 0.5), "height": self.height}


# --------------------------------------------------------------------------------------------------------------
# The picture


class _Picture:
    def __init__(self, story: Story, title: str) -> None:
        self._story = story
        self._title = title
        self._x = _Scale.of(story)
        self._lanes = [self._lane(replica) for _, replica in sorted(story.replicas.items())]
        self._colours = {
            id(leg): _BAR_COLOURS[index % len(_BAR_COLOURS)]
            for index, request in enumerate(story.requests)
            for leg in request.legs
        }
        self._boxes: dict[int, _Box] = {}
        self._bottom = self._stack()

    def _lane(self, replica: ReplicaSpan) -> _Lane:
        place = (replica.stage_id, replica.replica_id)
        legs = [leg for leg in self._story.legs if (leg.stage_id, leg.replica_id) == place]
        rows = stack_rows([(self._x(leg.start), self._right(leg)) for leg in legs], gap=1.0)
        lane = _Lane(replica, legs, rows, count=max(rows, default=0) + 1)
        lane.pitch = next(pitch for most, pitch in _PITCHES if lane.count <= most)
        return lane

    def _right(self, leg: LegSpan) -> float:
        return max(self._x(leg.end), self._x(leg.start) + 2.0)

    def _stack(self) -> float:
        """Place the lanes below each other; return where they end."""
        y = _HEADER
        stage = None
        for lane in self._lanes:
            if stage is not None:
                y += 6.0 if stage == lane.replica.stage_id else 2 * _PAD + _STAGE_GAP
            stage = lane.replica.stage_id
            lane.top = y
            for leg, row in zip(lane.legs, lane.rows, strict=True):
                top = y + row * lane.pitch + lane.pitch / 6
                self._boxes[id(leg)] = _Box(self._x(leg.start), top, self._right(leg), y + (row + 1) * lane.pitch)
            y += lane.height
        return y + _PAD

    def draw(self) -> str:
        """Return the document; what comes later lies on top."""
        height = _number(self._bottom + _FOOTER)
        bars = [(lane, leg) for lane in self._lanes for leg in lane.legs]
        body = [
            f"<style>{_STYLE}</style>",
            _tag("rect", class_="page", width="100%", height="100%", rx=8),
            *self._heading(),
            *self._backgrounds(),
            *self._axis(),
            *(part for lane in self._lanes for part in self._phases(lane)),
            *(self._connector(leg) for _, leg in bars if leg.source is not None),
            *(self._bar(leg) for _, leg in bars),
            *(part for lane in self._lanes for part in self._deaths(lane)),
        ]
        document = _tag(
            "svg",
            "\n".join(["", *body, ""]),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_number(_WIDTH)} {height}",
            width=_WIDTH,
            height=height,
            role="img",
            aria_label=_text(self._title),
        )
        return document + "\n"

    # Around the lanes

    def _heading(self) -> Iterator[str]:
        yield _words("title", 20, 30, _fit(self._title, 600, 16))
        yield _words("soft", _WIDTH - _RIGHT, 30, self._summary(), anchor="end")
        x = 20.0
        for mark, words in self._legend():
            yield _tag("g", mark + _words("soft", 26, 10, words), transform=f"translate({_number(x)} 46)")
            x += 26 + len(words) * 6.2 + 20

    def _summary(self) -> str:
        requests = self._story.requests
        numbers = [(sum(request.verdict == verdict for request in requests), verdict) for verdict in _BAD_ENDS]
        words = [_count(len(requests), "request"), *(f"{number} {verdict}" for number, verdict in numbers if number)]
        if requests:
            last = max(request.end for request in requests)
            words.append(f"{_duration(last - requests[0].start)} from the first to the last")
        return ", ".join(words)

    def _legend(self) -> Iterator[tuple[str, str]]:
        legs = self._story.legs
        replicas = self._story.replicas.values()
        colour = _BAR_COLOURS[0]
        phases = [phase for replica in replicas for phase in replica.phases]
        if any(phase.name != "closing" and phase.end > phase.start for phase in phases):
            halves = (("phase", 0), ("phase2", 10))
            yield "".join(_tag("rect", class_=name, x=x, width=10, height=12) for name, x in halves), "start-up phases"
        if legs:
            yield _tag("rect", width=20, height=12, rx=2, fill=colour, class_="pale"), "until the first output"
            bar = _tag("rect", width=20, height=12, rx=2, fill=colour)
            yield bar + _tag("path", class_="tick", d="M5 7V12M10 7V12M15 7V12"), "outputs"
        if any(leg.updates for leg in legs):
            bar = _tag("rect", y=4, width=20, height=8, rx=2, fill=colour)
            yield bar + _tag("path", class_="piece", stroke=colour, d="M4 0V3M8 0V3M12 0V3M16 0V3"), "streamed input"
        if any(leg.source is not None for leg in legs):
            yield _tag("path", class_="bridge", stroke=colour, d="M0 1C10 1 10 11 20 11"), "bridge"
        for ending, words in (("failed", "failed"), ("stopped", "aborted or expired")):
            if any(_ending(leg) == ending for leg in legs):
                yield _tag("rect", class_=ending, x=8, width=4, height=12), words
        if any(replica.deaths for replica in replicas):
            yield _tag("path", class_="death", d="M10 0V12"), "replica died"

    def _backgrounds(self) -> Iterator[str]:
        stages: dict[int, list[_Lane]] = {}
        for lane in self._lanes:
            stages.setdefault(lane.replica.stage_id, []).append(lane)
        for lanes in stages.values():
            top, bottom = lanes[0].top - _PAD, lanes[-1].bottom + _PAD
            width = _WIDTH - _RIGHT + 10 - 10
            yield _tag("rect", class_="lane", x=10, y=top, width=width, height=bottom - top, rx=6)
            name, several = lanes[0].replica.stage, len(lanes) > 1
            room = _LEFT - (64 if several else 30)
            yield _words("stage", 20, lanes[0].top + 17, _fit(name, room, 12), hint=name)
            for lane in lanes if several else ():
                yield _words("soft", _LEFT - 12, lane.top + 17, f"#{lane.replica.replica_id}", anchor="end")

    def _axis(self) -> Iterator[str]:
        (start, x0), (opened, x1), (closing, x2), (end, x3) = self._x.points
        top, label = _HEADER - _PAD, self._bottom + 18
        if closing > opened:
            for time, words in _ticks(closing - opened, max(2, int((x2 - x1) / 110))):
                x = self._x.serving(opened + time)
                yield _line("grid", x, top, self._bottom)
                if x + 22 <= max(x2, x3 - 60):
                    yield _words("soft", x, label, words, anchor="middle")
        for left, right, seconds, words in ((x0, x1, opened - start, "start-up"), (x2, x3, end - closing, "shutdown")):
            if right - left >= 1:
                yield _line("edge", right if words == "start-up" else left, top, self._bottom)
                yield _words("soft", (left + right) / 2, label, words, anchor="middle")
                yield _words("soft", (left + right) / 2, label + 14, _duration(seconds), anchor="middle")

    # Inside the lanes

    def _phases(self, lane: _Lane) -> Iterator[str]:
        for index, phase in enumerate(lane.replica.phases):
            left, right = self._x(phase.start), self._x(phase.end)
            if right - left < 0.2:
                continue
            style, on = (
                ("closing", "on-closing") if phase.name == "closing" else (("phase", "phase2")[index % 2], "on-phase")
            )
            box = _Box(left, lane.top + 4, right, lane.top + 24)
            hint = f"{phase.name}, {_duration(phase.end - phase.start)}"
            yield _group(hint, _tag("rect", class_=style, **box.sides()), _label(on, box, phase.name))

    def _bar(self, leg: LegSpan) -> str:
        box = self._boxes[id(leg)]
        radius = min(3.0, box.height / 4)
        paint: dict[str, float | str] = {"rx": radius, "fill": self._colours[id(leg)]}
        parts = [_tag("rect", class_="pale", **box.sides(), **paint)]
        if leg.outputs and (first := self._x(leg.outputs[0][0])) < box.right:
            parts.append(_tag("rect", **attrs.evolve(box, left=first).sides(), **paint))
        if box.height >= 10:
            parts.append(_comb("tick", (self._x(time) for time, _ in leg.outputs), box.bottom - 6, box.bottom - 1))
            updates = (self._x(time) for time in leg.updates)
            parts.append(_comb("piece", updates, box.top - 3, box.top, stroke=self._colours[id(leg)]))
        if (ending := _ending(leg)) is not None:
            cap = attrs.evolve(box, left=max(box.left, box.right - 4))
            parts.append(_tag("rect", class_=ending, **cap.sides()))
        parts.append(_label("on-bar", box, leg.request_id))
        return _group(_story_of(leg), *parts)

    def _connector(self, leg: LegSpan) -> str:
        source, box = self._boxes[id(leg.source)], self._boxes[id(leg)]
        x0, x1 = min(max(source.left, box.left), source.right), box.left
        y0, y1 = (source.bottom, box.top) if source.bottom <= box.top else (source.top, box.bottom)
        bend = (y1 - y0) / 2
        points = ((x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1))
        (begin, *curve) = (f"{_number(x)} {_number(y)}" for x, y in points)
        return _tag("path", class_="bridge", stroke=self._colours[id(leg)], d=f"M{begin}C{' '.join(curve)}")

    def _deaths(self, lane: _Lane) -> Iterator[str]:
        for time, why in lane.replica.deaths:
            x = self._x(time)
            line = _line("death", x, lane.top - 3, lane.bottom + 3)
            after, before = _WIDTH - _RIGHT - x - 8, x - _LEFT - 8
            # A death is often the last thing that happens, and then there is more room in front of it.
            place, room = ((x + 6, "start"), after) if after > 120 or after >= before else ((x - 6, "end"), before)
            words = _fit(f"died: {why}", min(room, 360.0), 11) if why and room > 120 else "died"
            yield _group(why, line, _words("dead", place[0], lane.top + 17, words, anchor=place[1]))


# --------------------------------------------------------------------------------------------------------------
# Pieces


def _tag(name: str, content: str = "", /, **attributes: float | str) -> str:
    """Make an element; ``class_`` stands for ``class``, other underscores for hyphens. Content is markup."""
    words = [name]
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else _number(value)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    opening = " ".join(words)
    return f"<{opening}>{content}</{name}>" if content else f"<{opening}/>"


def _words(style: str, x: float, y: float, words: str, *, anchor: str = "start", hint: str = "") -> str:
    title = _tag("title", _text(hint)) if hint else ""
    return _tag("text", _text(words) + title, class_=style, x=x, y=y, text_anchor=anchor)


def _line(style: str, x: float, top: float, bottom: float) -> str:
    return _tag("path", class_=style, d=f"M{_number(x)} {_number(top)}V{_number(bottom)}")


def _comb(style: str, places: Iterable[float], top: float, bottom: float, **attributes: str) -> str:
    """Draw many short lines as one path; where they would run together some are left out."""
    marks: list[str] = []
    last = -math.inf
    for x in places:
        if x - last >= 2.5:
            marks.append(f"M{_number(x)} {_number(top)}V{_number(bottom)}")
            last = x
    return _tag("path", class_=style, d="".join(marks), **attributes) if marks else ""


def _group(hint: str, *parts: str) -> str:
    return _tag("g", (_tag("title", _text(hint)) if hint else "") + "".join(parts))


def _label(style: str, box: _Box, words: str) -> str:
    shown = _fit(words, box.right - box.left - 10) if box.height >= 10 else ""
    return _words(style, box.left + 4, box.top + min(box.height / 2 + 1.5, 11.5), shown) if shown else ""


def _ending(leg: LegSpan) -> str | None:
    """How a bar is capped: the leg, or while it was at work the whole request, did not end well."""
    if leg.reason == "error" or (leg.verdict == "failed" and leg.reason in ("", "released")):
        return "failed"
    return "stopped" if leg.reason in ("released", "abort") else None


def _story_of(leg: LegSpan) -> str:
    words = [f"{leg.request_id} at {leg.stage}, replica {leg.replica_id}: {_duration(leg.end - leg.start)}"]
    if leg.outputs:
        words.append(f"first output after {_duration(leg.outputs[0][0] - leg.start)}")
        words.append(f"{_count(len(leg.outputs), 'output')} of size {leg.size:g} in all")
    if leg.updates:
        words.append(f"{_count(len(leg.updates), 'further piece')} of input")
    words.append(leg.reason or "unfinished")
    return ", ".join(words)
