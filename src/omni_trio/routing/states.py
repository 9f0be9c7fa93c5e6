"""The life of a request's parts as tables: its legs, the edges between them, and a KV cache that is handed over.

A *leg* is one request at one stage (or one companion of it at the first stage). An *edge* carries what one stage made
to the next. A *hold* is the KV cache that a prefill engine keeps for the decode engine. Rules, of which the tables are
the full account:

1. A stage sees a request as new once; later inputs are updates (I10).
2. Nothing is fed to a leg whose input is complete, and nothing comes out of one that has ended (I4).
3. A leg may end before its input is complete: the stage has decided that it has enough. Nothing more is carried to it.
4. The last input of an edge is carried once, whatever triggered it: the source's end, its KV cache being ready, or the
   last companion. A later trigger changes nothing.
5. An edge that is triggered before all companions have ended waits for them; a companion has ended when its last
   output is there, not when its KV cache is ready (I9).
6. A KV cache is taken over once, and let go of by the decode engine alone; if the request ends in between, it is
   released once.
7. Whatever state a part is in, it can be released; a released part stays so.

A pair that is not in a table is a breach of protocol by a stage or a bug of ours; `RequestFlow` raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import attrs

__all__ = [
    "TABLES",
    "EdgeAction",
    "EdgeFact",
    "EdgeState",
    "EdgeTable",
    "HoldFact",
    "HoldState",
    "HoldTable",
    "LegFact",
    "LegState",
    "LegTable",
    "Tables",
]


class _Word(enum.Enum):
    """An enumeration that is quick to look up in a table: Enum's own hash is a Python function."""

    __hash__ = object.__hash__


class LegState(_Word):
    """Where one request stands at one stage."""

    IDLE = "idle"
    """The stage has not heard of the request."""
    OPEN = "open"
    """The stage has been given input, and more will follow."""
    FED = "fed"
    """The stage has all of its input."""
    ENDED = "ended"
    """The stage has given its last output, or was skipped."""
    RELEASED = "released"
    """The request is over, or does not need the stage any more; nothing of it is left there."""


class LegFact(_Word):
    """What can happen to a leg."""

    FEED = "feed"
    """Input is sent to the stage, more will follow."""
    FEED_LAST = "feed last"
    """The last input is sent to the stage."""
    OUTPUT = "output"
    """The stage gave an output that is not its last one."""
    FINISH = "finish"
    """The stage gave its last output."""
    SKIP = "skip"
    """No replica of the stage can take the request, which can go on without it."""
    RELEASE = "release"
    """The request is over."""


class EdgeState(_Word):
    """Where one edge of a request stands."""

    OPEN = "open"
    """It may still have to carry something."""
    DEFERRED = "deferred"
    """Its source is ready, companions of the request are not."""
    CLOSING = "closing"
    """Its last input is being carried."""
    CLOSED = "closed"
    """It has nothing more to carry."""


class EdgeFact(_Word):
    """What can happen to an edge."""

    PART = "part"
    """The source has made a piece that is to be carried: an output, or a segment of a session."""
    WHOLE = "whole"
    """The source is ready to be carried as a whole: it has ended, or its KV cache can be had."""
    WHOLE_EARLY = "whole early"
    """The same, while companions are missing."""
    BUNDLED = "bundled"
    """The last missing companion has ended."""
    CARRIED = "carried"
    """The bridge was run for a piece."""
    CARRIED_WHOLE = "carried whole"
    """The bridge was run for the whole."""
    EMPTY = "empty"
    """The bridge was run for the whole, but before the source had ended, and made nothing."""
    SATED = "sated"
    """The stage behind the edge has ended."""
    RELEASE = "release"
    """The request is over."""


class EdgeAction(_Word):
    """What follows."""

    NOTHING = "-"
    CARRY = "carry a piece"
    CARRY_WHOLE = "carry the whole"
    DEFER = "wait for companions"


class HoldState(_Word):
    """Where the KV cache of a prefill is."""

    NONE = "none"
    """Nothing is held for the decode engine."""
    HELD = "held"
    """The prefill engine holds it until somebody takes it over."""
    TAKEN = "taken"
    """The decode engine has the request, and with it the duty to let go."""
    RELEASED = "released"
    """The request ended in between, and the prefill engine was told."""


class HoldFact(_Word):
    """What can happen to a hold."""

    PREFILLED = "prefilled"
    """The prefill has ended with parameters for the decode."""
    TAKEN = "taken over"
    """The decode engine has the request."""
    RELEASE = "release"
    """The request is over."""


LegTable: TypeAlias = Mapping[tuple[LegState, LegFact], LegState]
EdgeTable: TypeAlias = Mapping[tuple[EdgeState, EdgeFact], tuple[EdgeState, EdgeAction]]
HoldTable: TypeAlias = Mapping[tuple[HoldState, HoldFact], HoldState]

_LEG: LegTable = {
    (LegState.IDLE, LegFact.FEED): LegState.OPEN,
    (LegState.IDLE, LegFact.FEED_LAST): LegState.FED,
    (LegState.IDLE, LegFact.RELEASE): LegState.RELEASED,
    (LegState.OPEN, LegFact.FEED): LegState.OPEN,
    (LegState.OPEN, LegFact.FEED_LAST): LegState.FED,
    (LegState.OPEN, LegFact.OUTPUT): LegState.OPEN,
    (LegState.OPEN, LegFact.FINISH): LegState.ENDED,
    (LegState.OPEN, LegFact.RELEASE): LegState.RELEASED,
    (LegState.FED, LegFact.OUTPUT): LegState.FED,
    (LegState.FED, LegFact.FINISH): LegState.ENDED,
    (LegState.FED, LegFact.SKIP): LegState.ENDED,
    (LegState.FED, LegFact.RELEASE): LegState.RELEASED,
    (LegState.ENDED, LegFact.RELEASE): LegState.RELEASED,
    (LegState.RELEASED, LegFact.RELEASE): LegState.RELEASED,
}

_EDGE: EdgeTable = {
    (EdgeState.OPEN, EdgeFact.PART): (EdgeState.OPEN, EdgeAction.CARRY),
    (EdgeState.OPEN, EdgeFact.WHOLE): (EdgeState.CLOSING, EdgeAction.CARRY_WHOLE),
    (EdgeState.OPEN, EdgeFact.WHOLE_EARLY): (EdgeState.DEFERRED, EdgeAction.DEFER),
    (EdgeState.OPEN, EdgeFact.BUNDLED): (EdgeState.OPEN, EdgeAction.NOTHING),
    (EdgeState.OPEN, EdgeFact.CARRIED): (EdgeState.OPEN, EdgeAction.NOTHING),
    (EdgeState.OPEN, EdgeFact.SATED): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.OPEN, EdgeFact.RELEASE): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.DEFERRED, EdgeFact.WHOLE_EARLY): (EdgeState.DEFERRED, EdgeAction.NOTHING),
    (EdgeState.DEFERRED, EdgeFact.BUNDLED): (EdgeState.CLOSING, EdgeAction.CARRY_WHOLE),
    (EdgeState.DEFERRED, EdgeFact.RELEASE): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.WHOLE): (EdgeState.CLOSING, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.CARRIED): (EdgeState.CLOSING, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.CARRIED_WHOLE): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.EMPTY): (EdgeState.OPEN, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.SATED): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSING, EdgeFact.RELEASE): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSED, EdgeFact.PART): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSED, EdgeFact.WHOLE): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSED, EdgeFact.SATED): (EdgeState.CLOSED, EdgeAction.NOTHING),
    (EdgeState.CLOSED, EdgeFact.RELEASE): (EdgeState.CLOSED, EdgeAction.NOTHING),
}

_HOLD: HoldTable = {
    (HoldState.NONE, HoldFact.PREFILLED): HoldState.HELD,
    (HoldState.NONE, HoldFact.TAKEN): HoldState.NONE,
    (HoldState.NONE, HoldFact.RELEASE): HoldState.NONE,
    (HoldState.HELD, HoldFact.TAKEN): HoldState.TAKEN,
    (HoldState.HELD, HoldFact.RELEASE): HoldState.RELEASED,
    (HoldState.TAKEN, HoldFact.TAKEN): HoldState.TAKEN,
    (HoldState.TAKEN, HoldFact.RELEASE): HoldState.TAKEN,
    (HoldState.RELEASED, HoldFact.RELEASE): HoldState.RELEASED,
}


_K = TypeVar("_K")
_V = TypeVar("_V")


def _frozen(table: Mapping[_K, _V]) -> Mapping[_K, _V]:
    return MappingProxyType(dict(table))


@attrs.frozen
class Tables:
    """The rules that a `RequestFlow` goes by. Tests break them on purpose; everything else uses `TABLES`."""

    leg: LegTable = attrs.field(default=_LEG, converter=_frozen)
    edge: EdgeTable = attrs.field(default=_EDGE, converter=_frozen)
    hold: HoldTable = attrs.field(default=_HOLD, converter=_frozen)
    quiet: tuple[LegState, ...] = attrs.field(init=False)
    """The states of a leg in which an output that is not its last one changes nothing; looked up once per token."""

    @quiet.default
    def _quiet(self) -> tuple[LegState, ...]:
        return tuple(state for state in LegState if self.leg.get((state, LegFact.OUTPUT)) is state)


TABLES = Tables()
