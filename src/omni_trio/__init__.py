"""Run multi-stage model pipelines on vLLM under structured concurrency."""

from __future__ import annotations

from ._api import open_orchestrator, open_runtime
from .bridges import BridgeContext, Companion, ExpandContext, bridge
from .config import load_pipeline
from .errors import (
    BridgeFailed,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    NoReplicaAvailable,
    OmniTrioError,
    OperationFailed,
    Overloaded,
    Paused,
    ReplicaLost,
    RequestAborted,
    RequestError,
    SessionClosed,
    ShutDown,
    StageFailed,
    StartupFailed,
)
from .messages import Output, Progress, StageInput, StageMetrics, TraceEvent
from .pipeline import Pipeline, StageSpec
from .runtime import Completion, Health, Request, RequestStream, Result, Runtime, RuntimeStatistics, StageResult

__all__ = [
    "BridgeContext",
    "BridgeFailed",
    "Companion",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDied",
    "ExpandContext",
    "Health",
    "InvalidRequest",
    "NoReplicaAvailable",
    "OmniTrioError",
    "OperationFailed",
    "Output",
    "Overloaded",
    "Paused",
    "Pipeline",
    "Progress",
    "ReplicaLost",
    "Request",
    "RequestAborted",
    "RequestError",
    "RequestStream",
    "Result",
    "Runtime",
    "RuntimeStatistics",
    "SessionClosed",
    "ShutDown",
    "StageFailed",
    "StageInput",
    "StageMetrics",
    "StageResult",
    "StageSpec",
    "StartupFailed",
    "TraceEvent",
    "bridge",
    "load_pipeline",
    "open_orchestrator",
    "open_runtime",
]


def __getattr__(name: str) -> str:
    # Looked up on demand: reading the installed metadata costs more than importing all the rest.
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - see above

        return version("omni-trio")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
