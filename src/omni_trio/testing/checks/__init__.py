"""Checks of traces: what has to hold in every simulation, one named pure function per rule.

Not every invariant can be seen at a runtime's borders; `NOT_VISIBLE` says which can not, and why.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._check import CHECKS, BrokenInvariants, Check, Finding, Invariant, Violation, check, check_all
from .isolation import isolation, touched, undelayed
from .life import (
    acknowledged,
    bounded_waits,
    death,
    no_leak,
    paused,
    quiescence,
    shutdown,
    still_held,
    truthful,
)
from .load import admission, spread
from .requests import conservation, fresh, last_word, liveness, model, one_end, segments
from .stages import binding, capacity, fan_in, incarnation, kv_hold, named_companion, source_replica
from .told import fenced, lost, notices, reason_of_the_end

__all__ = [
    "CHECKS",
    "NOT_VISIBLE",
    "BrokenInvariants",
    "Check",
    "Finding",
    "Invariant",
    "Violation",
    "acknowledged",
    "admission",
    "binding",
    "bounded_waits",
    "capacity",
    "check",
    "check_all",
    "conservation",
    "death",
    "fan_in",
    "fenced",
    "fresh",
    "incarnation",
    "isolation",
    "kv_hold",
    "last_word",
    "liveness",
    "lost",
    "model",
    "named_companion",
    "no_leak",
    "notices",
    "one_end",
    "paused",
    "quiescence",
    "reason_of_the_end",
    "segments",
    "shutdown",
    "source_replica",
    "spread",
    "still_held",
    "touched",
    "truthful",
    "undelayed",
]

NOT_VISIBLE: Mapping[str, str] = {
    "I14": "traces hold copies, in which it does not show that requests or stages share an object; the contract checks "
    "of bridges and stages look at the objects themselves, as does a property test of ours",
}
"""The invariants that no check looks at, and why. Of the others, what concerns real processes (I12, I15: sockets,
descriptors, shared memory, sentinels) is for tests with engines."""
