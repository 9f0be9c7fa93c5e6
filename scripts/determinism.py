"""Runs simulations and prints a digest of what happened: the same for the same seeds, on any Python and machine.

    python scripts/determinism.py --count 200

To compare two Pythons, run it with both and compare the last lines; `--each` prints a digest per seed, to find the
first one that differs.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from typing import Literal, TypeAlias

from omni_trio.testing import (
    Chunk,
    Die,
    Error,
    Finish,
    KvReady,
    OperatorAct,
    Plan,
    RequestPlan,
    SegmentPlan,
    StagePlan,
    Stall,
    Trace,
    Verb,
    Wait,
    run_simulation,
)

Feed: TypeAlias = Literal["finish", "output", "kv", "connector"]

_FEEDS: tuple[tuple[Feed, ...], ...] = (("finish", "output"), ("finish", "kv", "connector"))
_TIMES = (0.0, 0.5, 1.0, 2.0)
_ENDS: tuple[Verb, ...] = (Finish(), Finish(), Finish("length", (7,)), Error(), Die(), Stall())


def drawn(seed: int) -> Plan:
    """Make a plan of a seed, by nothing but the random numbers that every Python makes alike."""
    chance = random.Random(seed)
    feeds: tuple[Feed, ...] = chance.choice(_FEEDS)
    first = StagePlan(final=chance.random() < 0.5, replicas=chance.randint(1, 3), capacity=chance.choice((1, 1000)))
    others = [
        StagePlan(
            source=index,
            feed=chance.choice(feeds),
            final=chance.random() < 0.5,
            replicas=chance.randint(1, 3),
            abort_time=chance.choice(_TIMES),
        )
        for index in range(chance.randint(0, 3))
    ]
    stages = [first, *others]
    stages[-1] = StagePlan(source=stages[-1].source, feed=stages[-1].feed, final=True)
    sessions = "output" in feeds
    return Plan(
        stages=tuple(stages),
        requests=tuple(_request(chance, len(stages), sessions=sessions) for _ in range(chance.randint(1, 6))),
        operator=(OperatorAct(at=1.0, act="pause", mode="keep"), OperatorAct(at=2.0, act="resume")) * (seed % 2),
        end=30.0,
        buggify=chance.choice((0.0, 0.1)),
        seed=seed,
    )


def _request(chance: random.Random, stages: int, *, sessions: bool) -> RequestPlan:
    if sessions and chance.random() < 0.5:
        pieces = (SegmentPlan((1, 2)), SegmentPlan((3,), chance.random() < 0.5, chance.choice(_TIMES)))
        return RequestPlan(arrival=chance.choice(_TIMES), segments=pieces)
    work = (Wait(0.5), Chunk((1,)), KvReady())
    return RequestPlan(
        arrival=chance.choice(_TIMES),
        act=chance.choice(("wait", "leave", "abort", "deadline", "slow")),
        when=chance.choice(_TIMES),
        scripts=tuple((*work[: chance.randint(0, 3)], chance.choice(_ENDS)) for _ in range(stages)),
    )


def digest(trace: Trace) -> str:
    """Return a short text that is equal for equal traces, and practically for no others."""
    return hashlib.sha256(trace.to_json()).hexdigest()[:16]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="seeds to run (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--each", action="store_true", help="print a digest for each seed as well")
    options = parser.parse_args()
    whole = hashlib.sha256()
    for seed in range(options.first, options.first + options.count):
        one = digest(run_simulation(drawn(seed)))
        whole.update(one.encode())
        if options.each:
            sys.stdout.write(f"{seed} {one}\n")
    sys.stdout.write(f"{whole.hexdigest()[:16]}\n")


if __name__ == "__main__":
    main()
