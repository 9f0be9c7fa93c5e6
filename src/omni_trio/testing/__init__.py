"""PUBLIC harness for people who write stages and pipelines: simulated stages, plans, traces, checks, tiny models.

`run_simulation` plays a `Plan` on a virtual clock and returns a `Trace`; `check_all` says what is wrong with it.
`omni_trio.testing.strategies` (with Hypothesis installed) draws plans.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .plan import BridgeAct, CallerAct, OperatorAct, Plan, RequestPlan, SegmentPlan, StagePlan, load_plan
from .script import (
    Chunk,
    Die,
    DieOnSubmit,
    Duplicate,
    Error,
    Finish,
    FinishSilently,
    KvReady,
    LateChunk,
    Reject,
    Script,
    Stall,
    Step,
    Verb,
    Wait,
    tokens,
)
from .simulated import SimStage
from .trace import Audit, Entry, Trace

if TYPE_CHECKING:
    from .checks import BrokenInvariants, Violation, check_all
    from .healing import check_healed, heal
    from .model import check_model
    from .simulation import Hung, build_pipeline, run_simulation

__all__ = [
    "Audit",
    "BridgeAct",
    "BrokenInvariants",
    "CallerAct",
    "Chunk",
    "Die",
    "DieOnSubmit",
    "Duplicate",
    "Entry",
    "Error",
    "Finish",
    "FinishSilently",
    "Hung",
    "KvReady",
    "LateChunk",
    "OperatorAct",
    "Plan",
    "Reject",
    "RequestPlan",
    "Script",
    "SegmentPlan",
    "SimStage",
    "StagePlan",
    "Stall",
    "Step",
    "Trace",
    "Verb",
    "Violation",
    "Wait",
    "build_pipeline",
    "check_all",
    "check_healed",
    "check_model",
    "heal",
    "load_plan",
    "run_simulation",
    "tokens",
]

# Programs that only serve have simulated stages within reach as well, and need none of these.
_LATER = {
    "BrokenInvariants": "checks",
    "Hung": "simulation",
    "Violation": "checks",
    "build_pipeline": "simulation",
    "check_all": "checks",
    "check_healed": "healing",
    "check_model": "model",
    "heal": "healing",
    "run_simulation": "simulation",
}
"""By name, the module that is imported when it is asked for first."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
