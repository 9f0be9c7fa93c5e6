"""Rules of `omni_trio.routing`, broken on purpose, one at a time: what each would bring about.

The numbers are those of known scenarios (U), of weaknesses of other orchestrators (W) and of our own invariants (I).
`tests/test_routing_mutants.py` shows that none of them goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from omni_trio.routing import TABLES, EdgeAction, EdgeFact, EdgeState, HoldFact, HoldState, LegFact, LegState, Tables

__all__ = ["MUTANTS", "Mutant", "all_changes"]


@attrs.frozen
class Mutant:
    """One broken rule."""

    name: str
    table: Literal["leg", "edge", "hold"]
    key: Any
    value: Any
    """None: there is no such rule."""
    why: str
    """What it would bring about."""

    def tables(self) -> Tables:
        """The tables with this rule broken."""
        rules: dict[Any, Any] = dict(getattr(TABLES, self.table))
        if self.value is None:
            del rules[self.key]
        else:
            rules[self.key] = self.value
        return attrs.evolve(TABLES, **{self.table: rules})


def _leg(name: str, state: LegState, fact: LegFact, value: LegState | None, why: str) -> Mutant:
    return Mutant(name, "leg", (state, fact), value, why)


def _edge(name: str, state: EdgeState, fact: EdgeFact, after: EdgeState | None, action: EdgeAction, why: str) -> Mutant:
    return Mutant(name, "edge", (state, fact), None if after is None else (after, action), why)


def _hold(name: str, state: HoldState, fact: HoldFact, value: HoldState | None, why: str) -> Mutant:
    return Mutant(name, "hold", (state, fact), value, why)


_IDLE, _LOPEN, _FED, _ENDED, _LRELEASED = LegState
_OPEN, _DEFERRED, _CLOSING, _CLOSED = EdgeState
_NOTHING, _CARRY, _WHOLE, _DEFER = EdgeAction
_NONE, _HELD, _TAKEN, _RELEASED = HoldState

MUTANTS: tuple[Mutant, ...] = (
    # ---- legs
    _leg("a first input leaves the stage new", _IDLE, LegFact.FEED, _IDLE,
         "each segment is submitted as another new request (W-28, I10)"),
    _leg("a last input leaves the stage new", _IDLE, LegFact.FEED_LAST, _IDLE,
         "the end of the source submits again what its KV cache has started (S-5)"),
    _leg("a first piece completes the input", _IDLE, LegFact.FEED, _FED,
         "the second segment of a session is taken for one after its last (W-20)"),
    _leg("a piece completes the input", _LOPEN, LegFact.FEED, _FED, "the third segment is refused"),
    _leg("the last input does not complete it", _LOPEN, LegFact.FEED_LAST, _LOPEN,
         "a closed session takes more (W-24, U68)"),
    _leg("a whole input does not complete it", _IDLE, LegFact.FEED_LAST, _LOPEN,
         "connector stages are sent updates though they have it all"),
    _leg("a stage can not end before its input", _LOPEN, LegFact.FINISH, None,
         "a stage that has enough brings its request down"),
    _leg("an early end is not noted", _LOPEN, LegFact.FINISH, _LOPEN, "pieces are sent to a stage that has ended (I4)"),
    _leg("an end is not noted", _FED, LegFact.FINISH, _FED, "a second end counts as another one (U48)"),
    _leg("an end lets go at once", _FED, LegFact.FINISH, _LRELEASED, "what it sent waits for an end that was"),
    _leg("an output ends a stage", _FED, LegFact.OUTPUT, _ENDED, "the first token of a companion is its last (U32)"),
    _leg("nothing comes out before the last input", _LOPEN, LegFact.OUTPUT, None,
         "the first answer to a segment is a breach"),
    _leg("a skipped prefill is still at work", _FED, LegFact.SKIP, _FED,
         "an abort goes to a stage that never had the request (U42)"),
    _leg("an idle stage can not be released", _IDLE, LegFact.RELEASE, None,
         "an abort before the pipeline's end is reached crashes (U8)"),
    _leg("a released stage is at work", _LOPEN, LegFact.RELEASE, _LOPEN, "it is aborted again and again (I5)"),
    _leg("a released stage is new", _FED, LegFact.RELEASE, _IDLE, "a late fact revives the request (W-24)"),
    _leg("releasing twice is a breach", _LRELEASED, LegFact.RELEASE, None, "two ends that cross bring it down (I1)"),
    # ---- edges
    _edge("a piece is not carried", _OPEN, EdgeFact.PART, _OPEN, _NOTHING,
          "a segment's end is lost on its way (W-20), a piece waits for the next (U45)"),
    _edge("a piece closes the edge", _OPEN, EdgeFact.PART, _CLOSED, _CARRY, "the second piece is lost"),
    _edge("a piece is carried as the whole", _OPEN, EdgeFact.PART, _CLOSING, _WHOLE,
          "the finish flag is on the wrong chunk (U47)"),
    _edge("an end is not carried", _OPEN, EdgeFact.WHOLE, _CLOSING, _NOTHING, "the next stage never starts (W-13, I2)"),
    _edge("an end is carried as a piece", _OPEN, EdgeFact.WHOLE, _OPEN, _CARRY, "the next stage is never told (U49)"),
    _edge("an end leaves the edge open", _OPEN, EdgeFact.WHOLE, _OPEN, _WHOLE,
          "KV ready twice, or KV ready and the end, carry the whole twice (S-5)"),
    _edge("companions are not waited for", _OPEN, EdgeFact.WHOLE_EARLY, _CLOSING, _WHOLE,
          "a parent goes on without its companions (W-16, W-17, U31, U32, I9)"),
    _edge("waiting for companions is not said", _OPEN, EdgeFact.WHOLE_EARLY, _DEFERRED, _NOTHING,
          "nobody bounds the wait (W-18, U35)"),
    _edge("waiting for companions is forgotten", _OPEN, EdgeFact.WHOLE_EARLY, _OPEN, _DEFER,
          "the last companion releases nothing (I2)"),
    _edge("the end overtakes the wait", _DEFERRED, EdgeFact.WHOLE_EARLY, _CLOSING, _WHOLE,
          "KV ready waits for the companions and the end does not (U32)"),
    _edge("the end is deferred again", _DEFERRED, EdgeFact.WHOLE_EARLY, _DEFERRED, _DEFER,
          "each trigger starts the wait anew (U38)"),
    _edge("a complete bundle releases nobody", _DEFERRED, EdgeFact.BUNDLED, _DEFERRED, _NOTHING,
          "the parent waits for ever (U35, I2)"),
    _edge("a complete bundle is carried again", _DEFERRED, EdgeFact.BUNDLED, _OPEN, _WHOLE,
          "a later end carries a second time (I9)"),
    _edge("a complete bundle starts what is not ready", _OPEN, EdgeFact.BUNDLED, _CLOSING, _WHOLE,
          "companions that are quicker than their parent start the next stage on nothing"),
    _edge("the end carries again what is under way", _CLOSING, EdgeFact.WHOLE, _CLOSING, _WHOLE,
          "the source's last output goes through the bridge twice (W-23)"),
    _edge("a whole that was carried can be carried again", _CLOSING, EdgeFact.CARRIED_WHOLE, _OPEN, _NOTHING,
          "the end submits anew what KV ready has started (S-5)"),
    _edge("nothing is the whole", _CLOSING, EdgeFact.EMPTY, _CLOSED, _NOTHING,
          "a bridge that made nothing of the KV cache is not asked at the end (W-13)"),
    _edge("nothing is still under way", _CLOSING, EdgeFact.EMPTY, _CLOSING, _NOTHING,
          "the source's end waits for a bridge that has long returned"),
    _edge("a stage with enough is fed on", _OPEN, EdgeFact.SATED, _OPEN, _NOTHING,
          "pieces for a stage that has ended (I4)"),
    _edge("a closed edge carries pieces", _CLOSED, EdgeFact.PART, _CLOSED, _CARRY,
          "bridges run for a stage that has ended"),
    _edge("a closed edge carries the whole", _CLOSED, EdgeFact.WHOLE, _CLOSING, _WHOLE,
          "the end submits anew what KV ready has started (S-5)"),
    # ---- holds
    _hold("a prefill holds nothing", _NONE, HoldFact.PREFILLED, _NONE, "the KV cache leaks on an abort (U39, I5)"),
    _hold("a prefill counts as taken over", _NONE, HoldFact.PREFILLED, _TAKEN, "the same, in the hand-off only (U39)"),
    _hold("taking over is not noted", _HELD, HoldFact.TAKEN, _HELD,
          "an abort while decoding releases a cache under its reader (U39)"),
    _hold("taking over twice is a breach", _TAKEN, HoldFact.TAKEN, None,
          "a decode that ends before its submission has come back brings its request down"),
    _hold("a held cache is not released", _HELD, HoldFact.RELEASE, _HELD, "the leak itself (U39)"),
    _hold("a cache is released by the end of its decode", _TAKEN, HoldFact.RELEASE, _RELEASED,
          "a block is freed twice, maybe under another request (U39)"),
    _hold("a cache is released twice", _RELEASED, HoldFact.RELEASE, _HELD, "the same, where two ends cross"),
)  # fmt: skip


def all_changes() -> Iterator[Mutant]:
    """Every rule once left out, and once with each other outcome."""
    triggers = (EdgeFact.PART, EdgeFact.WHOLE, EdgeFact.WHOLE_EARLY, EdgeFact.BUNDLED)
    for table in ("leg", "edge", "hold"):
        rules: Mapping[Any, Any] = getattr(TABLES, table)
        for (state, fact), value in rules.items():
            outcomes: list[Any] = list(type(state))
            if table == "edge":
                # What is no trigger has no action, by another test.
                actions = list(EdgeAction) if fact in triggers else [EdgeAction.NOTHING]
                outcomes = [(after, action) for after in EdgeState for action in actions]
            for outcome in (None, *(other for other in outcomes if other != value)):
                name = f"{state.value} + {fact.value} -> {outcome}"
                yield Mutant(name, table, (state, fact), outcome, "")  # type: ignore[arg-type]
