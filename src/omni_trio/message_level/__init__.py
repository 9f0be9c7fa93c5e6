"""The message level: commands in, events out, over trio's memory channels.

For those who have driven vLLM-Omni's orchestrator by its queues. It is a layer over `omni_trio.Runtime`, which gives
all its guarantees here too; whoever starts afresh is better served by the runtime itself.
"""

from __future__ import annotations

from ._commands import (
    Abort,
    AddCompanionRequest,
    AddRequest,
    CollectiveRpc,
    Command,
    RegisterRemoteReplica,
    Shutdown,
    StreamingUpdate,
    UnregisterRemoteReplica,
)
from ._companions import companions_by_message
from ._events import (
    AbortResult,
    CollectiveRpcResult,
    ErrorEvent,
    Event,
    OutputEvent,
    StageMetricsEvent,
)
from ._orchestrator import Channels, open_orchestrator

__all__ = [
    "Abort",
    "AbortResult",
    "AddCompanionRequest",
    "AddRequest",
    "Channels",
    "CollectiveRpc",
    "CollectiveRpcResult",
    "Command",
    "ErrorEvent",
    "Event",
    "OutputEvent",
    "RegisterRemoteReplica",
    "Shutdown",
    "StageMetricsEvent",
    "StreamingUpdate",
    "UnregisterRemoteReplica",
    "companions_by_message",
    "open_orchestrator",
]
