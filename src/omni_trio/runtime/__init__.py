"""ACT: the tasks that carry requests through the stages, and the life of it all."""

from __future__ import annotations

from ._handle import Request, Result, StageResult
from ._orchestrator import DeathPolicy
from ._runtime import Runtime, open_runtime
from ._statistics import (
    Health,
    ReplicaHealth,
    ReplicaStatistics,
    RpcResult,
    RuntimeStatistics,
    StageStatistics,
)
from ._trace import Instrument

__all__ = [
    "DeathPolicy",
    "Health",
    "Instrument",
    "ReplicaHealth",
    "ReplicaStatistics",
    "Request",
    "Result",
    "RpcResult",
    "Runtime",
    "RuntimeStatistics",
    "StageResult",
    "StageStatistics",
    "open_runtime",
]
