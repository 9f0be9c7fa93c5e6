"""A trace as something to look at: text, a Mermaid sequence diagram, a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape

import attrs

from .trace import Entry, Trace, timeline

__all__ = ["Message", "mermaid_sequence", "messages", "sequence_svg", "timeline"]

Style: TypeAlias = Literal["call", "answer", "end", "note"]
"""``end``: somebody leaves, is killed, or is told that a request has not ended well."""

_RUNTIME = "runtime"
_OPERATOR = "operator"


@attrs.frozen
class Message:
    """One arrow from participant to participant, or a note over one of them.

    Participants are called ``caller 0`` and so on, one per request; ``operator``; ``runtime``; and ``s0.r0`` for a
    stage's replica.
    """

    time: float
    source: str
    target: str
    """The same as `source`: a note."""
    words: str
    style: Style


def messages(entries: Trace | Iterable[Entry]) -> Iterator[Message]:
    """Turn entries into who told whom what, in order."""
    for entry in entries.entries if isinstance(entries, Trace) else entries:
        source, target, style = _way(entry)
        yield Message(entry.time, source, target, _words(entry), style)


def mermaid_sequence(entries: Trace | Iterable[Entry]) -> str:
    """Return a trace as the text of a Mermaid sequence diagram, with the time in front of what happens at it."""
    told = list(messages(entries))
    people = _participants(told)
    ids = {name: f"p{index}" for index, name in enumerate(people)}
    lines = ["sequenceDiagram"]
    lines += [f"    {'actor' if _is_human(name) else 'participant'} {ids[name]} as {name}" for name in people]
    time: float | None = None
    for message in told:
        if message.time != time and people:
            time = message.time
            ends = ids[people[0]] if len(people) == 1 else f"{ids[people[0]]},{ids[people[-1]]}"
            lines.append(f"    Note over {ends}: {time:g} s")
        source, target, words = ids[message.source], ids[message.target], _mermaid(message.words)
        if message.style == "note":
            lines.append(f"    Note over {source}: {words}")
        else:
            lines.append(f"    {source}{_ARROWS[message.style]}{target}: {words}")
    return "\n".join(lines) + "\n"


def sequence_svg(entries: Trace | Iterable[Entry], *, title: str = "simulation") -> str:
    """Return a trace as an SVG document that needs nothing else: the same as `mermaid_sequence`, drawn.

    Time goes down, without scale: what happens at the same moment stands below one line that tells the time.
    """
    told = list(messages(entries))
    people = _participants(told)
    x = {name: _LEFT + (index + 0.5) * _LANE for index, name in enumerate(people)}
    rows: list[str] = []
    y = _TOP
    time: float | None = None
    for message in told:
        if message.time != time:
            time = message.time
            y += _ROW
            rows.append(_line("time", _LEFT, y, _LEFT + _LANE * len(people), y))
            rows.append(_label(f"{time:g} s", 8, y + 4, "soft"))
        y += _ROW
        rows += _draw(message, x, y)
    width, height = _LEFT + _LANE * max(len(people), 1) + 16, y + 2 * _ROW
    lifelines = [_line("life", x[name], _TOP, x[name], height - _ROW) for name in people]
    heads = [_label(name, x[name], _TOP - 10, "head", middle=True) for name in people]
    body = [_label(title, 8, 22, "title"), *lifelines, *heads, *rows]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">\n'
        f"<style>{_STYLE}</style>\n<title>{_xml(title)}</title>\n"
        f'<rect class="page" width="{width:g}" height="{height:g}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


# --------------------------------------------------------------------------------------------------------------
# Who tells whom


def _way(entry: Entry) -> tuple[str, str, Style]:
    if entry.who == "caller":
        caller = f"caller {entry.request}"
        if entry.what in ("ask", "sent"):
            return caller, _RUNTIME, "call"
        if entry.what == "left":
            return caller, _RUNTIME, "end"
        return _RUNTIME, caller, "end" if entry.what == "end" and entry.detail != "finished" else "answer"
    if entry.who == "stage":
        replica = f"s{entry.stage}.r{entry.replica}"
        if entry.what in ("submit", "update", "abort", "release_kv"):
            return _RUNTIME, replica, "call"
        if entry.what in ("says", "aborted"):
            return replica, _RUNTIME, "answer"
        return replica, replica, "note"
    if entry.who == "operator":
        if entry.what == "kill":
            return _OPERATOR, f"s{entry.stage}.r{entry.replica}", "end"
        return (_RUNTIME, _OPERATOR, "answer") if entry.what.endswith(" done") else (_OPERATOR, _RUNTIME, "call")
    return _RUNTIME, _RUNTIME, "note"


def _words(entry: Entry) -> str:
    name = "" if entry.request is None or entry.who == "caller" else f"request {entry.request}"
    if entry.role:
        name += f".{entry.role}"
    parts = (
        entry.what,
        name,
        f"turn {entry.turn}" if entry.turn else "",
        f"of s{entry.stage}" if entry.who == "caller" and entry.stage is not None else "",
        f"[{' '.join(map(str, entry.tokens))}]" if entry.tokens else "",
        entry.detail,
        entry.text,
        "(last)" if entry.last else "",
    )
    return " ".join(part for part in parts if part)


def _participants(told: Iterable[Message]) -> list[str]:
    """Callers left, stages right, each kind by number."""
    names = {name for message in told for name in (message.source, message.target)}
    return sorted(names, key=_rank)


def _rank(name: str) -> tuple[int, list[int]]:
    numbers = [int(part) for part in name.replace(".r", " ").replace("s", " ").split() if part.isdecimal()]
    kind = 0 if name.startswith("caller") else 1 if name == _OPERATOR else 2 if name == _RUNTIME else 3
    return kind, numbers


def _is_human(name: str) -> bool:
    return name == _OPERATOR or name.startswith("caller")


# --------------------------------------------------------------------------------------------------------------
# Mermaid

_ARROWS: dict[Style, str] = {"call": "->>", "answer": "-->>", "end": "-x"}
_CODES = {"#": "#35;", ";": "#59;", "<": "#lt;", ">": "#gt;", "&": "#amp;"}


def _mermaid(words: str) -> str:
    return "".join(_CODES.get(character, character) for character in " ".join(words.split()))


# --------------------------------------------------------------------------------------------------------------
# SVG

_LEFT, _TOP, _ROW, _LANE = 72.0, 64.0, 18.0, 190.0

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 11px }
text { fill: #24292f } .page { fill: #ffffff } .title { font-size: 16px; font-weight: 600 } .soft { fill: #5b6672 }
.head { font-size: 12px; font-weight: 600 } .life { stroke: #d8dde4 } .time { stroke: #d8dde4; stroke-dasharray: 2 3 }
.call { stroke: #3a6fc9 } .answer { stroke: #2c7d4f } .end { stroke: #d1242f; stroke-width: 2 }
.tip-call { fill: #3a6fc9 } .tip-answer { fill: #2c7d4f } .tip-end { fill: #d1242f } .note { fill: #f3e4c2 }
@media (prefers-color-scheme: dark) {
text { fill: #e2e6eb } .page { fill: #14181d } .soft { fill: #9aa5b1 } .life, .time { stroke: #313a45 }
.note { fill: #4d3f1d } }
"""

_TEXT_WIDTH = 6.2
"""Pixels per character, about."""


def _draw(message: Message, x: dict[str, float], y: float) -> list[str]:
    left, right = x[message.source], x[message.target]
    if message.style == "note":
        words = _fit(message.words, _LANE)
        width = len(words) * _TEXT_WIDTH + 10
        box = f'<rect class="note" x="{left - width / 2:g}" y="{y - 12:g}" width="{width:g}" height="15" rx="3"/>'
        return [box, _label(words, left, y, "on", middle=True, hint=message.words)]
    side = 1 if right > left else -1
    tip = f'<path class="tip-{message.style}" d="M{right:g} {y:g}l{-7 * side} -3v6z"/>'
    words = _fit(message.words, abs(right - left))
    label = _label(words, (left + right) / 2, y - 3, "on", middle=True, hint=message.words)
    return [_line(message.style, left, y, right, y), tip, label]


def _fit(words: str, width: float) -> str:
    room = int((width - 12) / _TEXT_WIDTH)
    return words if len(words) <= room else words[: room - 1] + "…"


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{style}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


def _label(words: str, x: float, y: float, style: str, *, middle: bool = False, hint: str = "") -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    more = f"<title>{_xml(hint)}</title>" if hint and hint != words else ""
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{anchor}>{_xml(words)}{more}</text>'


def _xml(words: str) -> str:
    return escape("".join(character if character.isprintable() else "\ufffd" for character in words))
