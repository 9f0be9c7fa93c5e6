"""What happened in a simulation, seen from outside the runtime: what callers, stages and operators said and heard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, TypeAlias

import msgspec

from .history import History
from .plan import Plan

__all__ = ["Audit", "Entry", "Trace", "Who", "timeline"]

Who: TypeAlias = Literal["caller", "stage", "operator", "runtime"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that crossed a border of the runtime.

    `what` is, of a caller: ``ask``, ``admitted``, ``sent``, ``output``, ``metrics``, ``progress``, ``end``, ``left``;
    of a stage: ``up``, ``submit``, ``update``, ``abort``, ``aborted``, ``release_kv``, ``says``, ``dies``, ``down``; of
    an operator: the act, and ``<act> done``; of the runtime, which tells its instruments: ``open``, ``verdict`` (how a
    request has ended, before its caller and its stages are told), ``died`` (a replica counts as dead from now on),
    ``closing``, ``closed``.
    """

    time: float
    who: Who
    what: str
    request: int | None = None
    """Index in `Plan.requests`."""
    role: str | None = None
    """Which companion of the request it is about."""
    turn: int = 0
    stage: int | None = None
    replica: int | None = None
    tokens: tuple[int, ...] = ()
    detail: str = ""
    """The reason of an end (``finished``, ``failed``, ...), the name of an error, a finish reason."""
    text: str = ""
    """The text of an error."""
    last: bool = False
    """Of an output: whether it is the stage's last one. Of an input: whether it is complete with it."""
    segment: int = 0
    count: int = 0
    """Of ``aborted``: requests that the replica still has. Of ``submit``: requests that it has now. Of an operator's
    act: its index in `Plan.operator`. Of ``abort done``: how many requests it has ended."""
    load: int = 0
    """Of ``submit`` and ``aborted``: slots of the replica that the runtime counts as taken."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What was left when every request had ended, and after the runtime was closed."""

    requests: int = 0
    """Requests in the runtime's table."""
    legs: int = 0
    """Bindings to replicas."""
    load: int = 0
    """Slots that count as taken."""
    work: int = 0
    """Requests that simulated replicas still have."""
    tasks: int = 0
    """Tasks more than before the runtime was opened."""
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    expired: int = 0
    rejected: int = 0


class Trace(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The history of one simulation, in order."""

    plan: Plan
    entries: tuple[Entry, ...]
    audit: Audit
    steps_while_idle: int = 0
    """Scheduler steps in the ten virtual minutes after the last request had ended."""
    closed_at: float = 0.0
    failure: str = ""
    """What leaving the runtime's block raised, if anything: name and text."""

    def to_json(self) -> bytes:
        """Return it as bytes: equal plans give equal bytes, on any machine."""
        return msgspec.json.encode(self)

    @cached_property
    def history(self) -> History:
        """The same, sorted by what it is about."""
        return History(self)

    def of(self, request: int, *, who: Who | None = None) -> Iterator[Entry]:
        """What concerns one request."""
        return (entry for entry in self.entries if entry.request == request and (who is None or entry.who == who))

    def end_of(self, request: int) -> Entry | None:
        """How a request ended for its caller; None: it did not."""
        return next((entry for entry in self.of(request, who="caller") if entry.what in ("end", "left")), None)

    def timeline(self) -> str:
        """Return it as text, one line per entry."""
        return timeline(self.entries)


def timeline(entries: Iterable[Entry]) -> str:
    """Return entries as text, one line each."""
    return "\n".join(_line(entry) for entry in entries)


def _line(entry: Entry) -> str:
    place = ""
    if entry.stage is not None:
        place = f"s{entry.stage}" + ("" if entry.replica is None else f".r{entry.replica}")
    name = "" if entry.request is None else f"request {entry.request}" + (f".{entry.role}" if entry.role else "")
    if entry.turn:
        name += f" turn {entry.turn}"
    facts: Sequence[str] = (
        f"{entry.time:10.3f}",
        f"{entry.who:8}",
        f"{entry.what:10}",
        f"{place:6}",
        name,
        " ".join(map(str, entry.tokens)),
        "last" if entry.last else "",
        entry.detail,
        entry.text,
    )
    return "  ".join(fact for fact in facts if fact).rstrip()
