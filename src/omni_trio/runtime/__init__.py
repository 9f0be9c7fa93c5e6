"""ACT: the tasks that carry requests through the stages, and the life of it all."""

from __future__ import annotations

from ._audit import Holdings, holdings, load_of
from ._control import Answers, Control
from ._handle import Request
from ._operate import PauseMode, WhenAsked
from ._orchestrator import DeathPolicy
from ._result import Completion, Result, StageResult
from ._runtime import Runtime, open_runtime
from ._statistics import (
    Activity,
    Health,
    Phase,
    ReplicaHealth,
    ReplicaStatistics,
    RpcResult,
    RuntimeStatistics,
    StageStatistics,
)
from ._stream import RequestStream
from ._trace import Instrument

__all__ = [
    "Activity",
    "Answers",
    "Completion",
    "Control",
    "DeathPolicy",
    "Health",
    "Holdings",
    "Instrument",
    "PauseMode",
    "Phase",
    "ReplicaHealth",
    "ReplicaStatistics",
    "Request",
    "RequestStream",
    "Result",
    "RpcResult",
    "Runtime",
    "RuntimeStatistics",
    "StageResult",
    "StageStatistics",
    "WhenAsked",
    "holdings",
    "load_of",
    "open_runtime",
]
