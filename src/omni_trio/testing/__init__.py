"""PUBLIC harness for people who write stages and pipelines: simulated stages, scripts, tiny models."""

from __future__ import annotations

from .script import (
    Chunk,
    Die,
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

__all__ = [
    "Chunk",
    "Die",
    "Error",
    "Finish",
    "FinishSilently",
    "KvReady",
    "LateChunk",
    "Reject",
    "Script",
    "SimStage",
    "Stall",
    "Step",
    "Verb",
    "Wait",
    "tokens",
]
