"""What a pipeline is: stages, how each feeds the next, defaults, and what makes it valid."""

from __future__ import annotations

from ._kinds import ENGINE_KINDS, MODALITIES, WORKER_KINDS, Feed, StageKind, nearest
from ._pipeline import Pipeline
from ._stage import StageSpec

__all__ = [
    "ENGINE_KINDS",
    "MODALITIES",
    "WORKER_KINDS",
    "Feed",
    "Pipeline",
    "StageKind",
    "StageSpec",
    "nearest",
]
