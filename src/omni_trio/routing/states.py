"""The life of a leg (one request at one stage) as a table.

Rules, of which the table is the full account:

1. A stage sees a request as new once; later inputs are updates (I10).
2. Nothing is fed to a leg whose input is complete, and nothing comes out of one that has ended (I4).
3. A leg may end before its input is complete: the stage has decided that it has enough.
4. Whatever state a leg is in, it can be released; a released leg stays so.

A pair that is not in the table is a breach of protocol by a stage or a bug of ours; `RequestFlow` raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["LEG_TRANSITIONS", "Fact", "LegState"]


class LegState(enum.Enum):
    """Where one request stands at one stage."""

    IDLE = "idle"
    """The stage has not heard of the request."""
    OPEN = "open"
    """The stage has been given input, and more will follow."""
    FED = "fed"
    """The stage has all of its input."""
    ENDED = "ended"
    """The stage has given its last output."""
    RELEASED = "released"
    """The request is over, or does not need the stage any more; nothing of it is left there."""


class Fact(enum.Enum):
    """What can happen to a leg."""

    FEED = "feed"
    """Input is sent to the stage, more will follow."""
    FEED_LAST = "feed last"
    """The last input is sent to the stage."""
    OUTPUT = "output"
    """The stage gave an output that is not its last one."""
    FINISH = "finish"
    """The stage gave its last output."""
    RELEASE = "release"
    """The request is over."""


LEG_TRANSITIONS: Mapping[tuple[LegState, Fact], LegState] = MappingProxyType(
    {
        (LegState.IDLE, Fact.FEED): LegState.OPEN,
        (LegState.IDLE, Fact.FEED_LAST): LegState.FED,
        (LegState.IDLE, Fact.RELEASE): LegState.RELEASED,
        (LegState.OPEN, Fact.FEED): LegState.OPEN,
        (LegState.OPEN, Fact.FEED_LAST): LegState.FED,
        (LegState.OPEN, Fact.OUTPUT): LegState.OPEN,
        (LegState.OPEN, Fact.FINISH): LegState.ENDED,
        (LegState.OPEN, Fact.RELEASE): LegState.RELEASED,
        (LegState.FED, Fact.OUTPUT): LegState.FED,
        (LegState.FED, Fact.FINISH): LegState.ENDED,
        (LegState.FED, Fact.RELEASE): LegState.RELEASED,
        (LegState.ENDED, Fact.RELEASE): LegState.RELEASED,
        (LegState.RELEASED, Fact.RELEASE): LegState.RELEASED,
    }
)
