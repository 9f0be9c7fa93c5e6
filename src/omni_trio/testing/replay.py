"""Plans as files, so that what has failed once can be run again, by somebody else and elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import msgspec

from .checks import BrokenInvariants, check_all
from .plan import Plan, load_plan
from .simulation import Hung, run_simulation
from .trace import Trace

__all__ = ["NoPlan", "Replay", "read_plan", "replay", "save_plan"]


class NoPlan(ValueError):
    """A file can not be read as a plan; it says why."""


@attrs.frozen
class Replay:
    """What came of running a plan."""

    trace: Trace
    """Up to where it hung, if it did."""
    violations: tuple[str, ...]
    """What was wrong, one sentence each."""


def save_plan(plan: Plan, folder: str | Path) -> Path:
    """Write a plan to a file in a folder, which is made where it is not there, and return its path.

    The name comes from the plan itself: equal plans are one file, whoever saves them.
    """
    text = plan.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = Path(folder) / f"plan-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read_plan(path: str | Path) -> Plan:
    """Read what `save_plan` has written.

    Raises:
        NoPlan: the file is not there or holds something else.
    """
    try:
        return load_plan(Path(path).read_bytes())
    except OSError as error:
        raise NoPlan(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise NoPlan(f"{path} is no plan: {error}") from error


def replay(plan: Plan, *, seed: int | None = None) -> Replay:
    """Run a plan and all checks, and tell what is wrong instead of raising it.

    Args:
        plan: what to run.
        seed: of trio's scheduler, in place of the plan's own.
    """
    if seed is not None:
        plan = msgspec.structs.replace(plan, seed=seed)
    try:
        trace = run_simulation(plan)
    except Hung as hung:
        return Replay(hung.trace, (str(hung),))
    try:
        check_all(trace)
    except BrokenInvariants as broken:
        return Replay(trace, tuple(map(str, broken.violations)))
    return Replay(trace, ())
