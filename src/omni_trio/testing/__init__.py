"""PUBLIC harness for people who write stages and pipelines: simulated stages, scripts, tiny models."""

from __future__ import annotations

from .script import (
    Chunk,
    Die,
    Error,
    Finish,
    FinishSilently,
    LateChunk,
    Reject,
    Script,
    Stall,
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
    "LateChunk",
    "Reject",
    "Script",
    "SimStage",
    "Stall",
    "Verb",
    "Wait",
    "tokens",
]
