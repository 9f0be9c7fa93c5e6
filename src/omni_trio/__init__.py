"""Run multi-stage model pipelines on vLLM under structured concurrency."""

from __future__ import annotations

from ._api import open_runtime
from .bridges import BridgeContext, bridge
from .config import load_pipeline
from .errors import (
    BridgeFailed,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    NoReplicaAvailable,
    OmniTrioError,
    Overloaded,
    ReplicaLost,
    RequestAborted,
    RequestError,
    ShutDown,
    StageFailed,
    StartupFailed,
)
from .messages import Output, StageInput, StageMetrics, TraceEvent
from .pipeline import Pipeline, StageSpec
from .runtime import Health, Request, Result, Runtime, RuntimeStatistics, StageResult

__all__ = [
    "BridgeContext",
    "BridgeFailed",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDied",
    "Health",
    "InvalidRequest",
    "NoReplicaAvailable",
    "OmniTrioError",
    "Output",
    "Overloaded",
    "Pipeline",
    "ReplicaLost",
    "Request",
    "RequestAborted",
    "RequestError",
    "Result",
    "Runtime",
    "RuntimeStatistics",
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
    "open_runtime",
]


def __getattr__(name: str) -> str:
    # Looked up on demand: reading the installed metadata costs more than importing all the rest.
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - see above

        return version("omni-trio")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
