"""A trace sorted by what it is about: what became of each request, of each of its legs, and of each replica.

Positions are indexes into `Trace.entries`, in which everything is in the order in which it happened.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from .trace import Entry, Trace

__all__ = ["NEVER", "History", "Leg", "Story", "Where"]

Where: TypeAlias = tuple[int, int]
"""A replica: the indexes of its stage and of itself."""

NEVER = math.inf


@attrs.define(eq=False)
class Leg:
    """One request (or one companion of it, or one turn of it) at one stage."""

    request: int
    role: str | None
    turn: int
    stage: int
    submits: list[int] = attrs.field(factory=list)
    updates: list[int] = attrs.field(factory=list)
    says: list[int] = attrs.field(factory=list)
    aborts: list[int] = attrs.field(factory=list)
    acknowledged: list[int] = attrs.field(factory=list)
    releases: list[int] = attrs.field(factory=list)
    """Of a KV cache that a prefill has kept for it."""
    replicas: dict[int, None] = attrs.field(factory=dict)
    """All that have had to do with it."""
    ended: float = NEVER
    """When the stage has given its last output, or failed it."""

    @property
    def name(self) -> str:
        """What it is, in words."""
        role = "" if self.role is None else f", companion {self.role!r}"
        turn = f", turn {self.turn}" if self.turn else ""
        return f"request {self.request}{role}{turn} at stage {self.stage}"

    @property
    def replica(self) -> Where:
        """Where it is, once it has been submitted."""
        return self.stage, next(iter(self.replicas))


@attrs.define(eq=False)
class Story:
    """What one caller saw."""

    asked: float = NEVER
    admitted: float = NEVER
    outputs: dict[tuple[int, int], list[int]] = attrs.field(factory=lambda: defaultdict(list))
    """Per stage and turn."""
    others: list[int] = attrs.field(factory=list)
    """Metrics and progress."""
    sent: list[int] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)
    verdicts: list[int] = attrs.field(factory=list)
    """What the runtime says of it to its instruments."""

    @property
    def judged(self) -> float:
        """When the request was over for the runtime."""
        return self.verdicts[0] if self.verdicts else NEVER


class History:
    """See the module. Made once per trace, by `Trace.history`."""

    def __init__(self, trace: Trace) -> None:
        self.entries = trace.entries
        self.stories: dict[int, Story] = {}
        self.legs: dict[tuple[int, str | None, int, int], Leg] = {}
        self.of_request: dict[int, list[Leg]] = defaultdict(list)
        self.deaths: dict[Where, int] = {}
        """When a replica died, by its own account."""
        self.noticed: dict[Where, list[int]] = defaultdict(list)
        """When the runtime said so."""
        self.downs: dict[Where, int] = {}
        self.ups: dict[Where, int] = {}
        self.acts: list[int] = []
        """What operators did, the aborting of single requests left out."""
        self.done: dict[int, int] = {}
        """By the position of an operator's act, that of its end."""
        self.opened = self.closing = self.closed = NEVER
        under_way: dict[tuple[str, int, int | None], int] = {}
        for at, entry in enumerate(trace.entries):
            if entry.who == "stage":
                self._stage(at, entry)
            elif entry.who == "caller":
                self._caller(at, entry)
            elif entry.who == "runtime":
                self._runtime(at, entry)
            elif entry.what.endswith(" done"):
                act = entry.what.removesuffix(" done")
                begun = under_way.pop((act, 0 if act == "abort" else entry.count, entry.request), None)
                if begun is not None:
                    self.done[begun] = at
            else:
                under_way[entry.what, 0 if entry.what == "abort" else entry.count, entry.request] = at
                if entry.what != "abort":
                    self.acts.append(at)
        fatal = [many[0] for many in self.noticed.values()] if trace.plan.on_engine_death == "fail_stop" else []
        self.fatal = min((at for at in fatal if at < min(self.closing, self.closed)), default=NEVER)
        """When a death began to end the runtime."""
        self.ending = min(self.closing, self.closed, self.fatal)
        """When the runtime began to end."""

    def story(self, request: int) -> Story:
        """What the caller of a request saw."""
        story = self.stories.get(request)
        if story is None:
            story = self.stories[request] = Story()
        return story

    def time(self, at: float) -> float:
        """The virtual time at a position."""
        return math.inf if at == NEVER else self.entries[int(at)].time

    def died(self, where: Where) -> float:
        """When a replica was gone: dead by its own account, by the runtime's, or closed."""
        noticed = self.noticed.get(where)
        return min(self.deaths.get(where, NEVER), noticed[0] if noticed else NEVER, self.downs.get(where, NEVER))

    def let_go(self, leg: Leg) -> float:
        """When the stage did not hold a leg any more."""
        acknowledged = leg.acknowledged[0] if leg.acknowledged else NEVER
        return min(leg.ended, acknowledged, self.died(leg.replica) if leg.replicas else NEVER)

    def held(self, request: int, at: float) -> Iterator[Leg]:
        """The legs of a request that a stage had been given before a position, and held at it."""
        for leg in self.of_request.get(request, ()):
            if leg.submits and leg.submits[0] < at and self.let_go(leg) > at:
                yield leg

    def after(self, request: int, at: float) -> int | None:
        """The first thing after a position that a stage was asked for a request, or said of it.

        A replica that counts as dead because it did not let go may go on saying things, which nobody takes.
        """
        late = [
            when
            for leg in self.of_request.get(request, ())
            for when in (
                *leg.submits,
                *leg.updates,
                *(() if leg.replicas and self.died(leg.replica) < at else leg.says),
                *leg.aborts,
                *leg.acknowledged,
                *leg.releases,
            )
            if when > at
        ]
        return min(late, default=None)

    # ---- sorting

    def _stage(self, at: int, entry: Entry) -> None:
        assert entry.stage is not None  # every stage's entry has both
        assert entry.replica is not None
        where = entry.stage, entry.replica
        what = entry.what
        if entry.request is None:
            if what == "dies":
                self.deaths.setdefault(where, at)
            elif what == "down":
                self.downs.setdefault(where, at)
            elif what == "up":
                self.ups.setdefault(where, at)
            return
        key = entry.request, entry.role, entry.turn, entry.stage
        leg = self.legs.get(key)
        if leg is None:
            leg = self.legs[key] = Leg(*key)
            self.of_request[entry.request].append(leg)
        if what == "release_kv":
            leg.releases.append(at)
            return
        leg.replicas[entry.replica] = None
        if what == "says":
            leg.says.append(at)
            if (entry.last or entry.detail == "error") and leg.ended == NEVER:
                leg.ended = at
        elif what == "submit":
            leg.submits.append(at)
        elif what == "update":
            leg.updates.append(at)
        elif what == "abort":
            leg.aborts.append(at)
        elif what == "aborted":
            leg.acknowledged.append(at)

    def _caller(self, at: int, entry: Entry) -> None:
        assert entry.request is not None  # every caller's entry has one
        story = self.story(entry.request)
        what = entry.what
        if what == "output":
            assert entry.stage is not None  # as every output
            story.outputs[entry.stage, entry.turn].append(at)
        elif what in ("end", "left"):
            story.ends.append(at)
        elif what == "ask":
            story.asked = at
        elif what == "admitted":
            story.admitted = at
        elif what == "sent":
            story.sent.append(at)
        else:
            story.others.append(at)

    def _runtime(self, at: int, entry: Entry) -> None:
        what = entry.what
        if what == "verdict":
            assert entry.request is not None  # it is about one
            self.story(entry.request).verdicts.append(at)
        elif what == "died":
            assert entry.stage is not None  # it is about one replica
            assert entry.replica is not None
            self.noticed[entry.stage, entry.replica].append(at)
        elif what == "open":
            self.opened = at
        elif what == "closing":
            self.closing = at
        elif what == "closed":
            self.closed = at
