"""Stages as the runtime sees them: the client of one replica, the pool of all, legs and their metrics."""

from __future__ import annotations

from .client import ClientFactory, ClientStatistics, Operable, ReleasesKv, ReplicaContext, SendsKv, StageClient
from .leg import Leg, LegOwner, Mark
from .pool import Replica, ReplicaState, StagePool

__all__ = [
    "ClientFactory",
    "ClientStatistics",
    "Leg",
    "LegOwner",
    "Mark",
    "Operable",
    "ReleasesKv",
    "Replica",
    "ReplicaContext",
    "ReplicaState",
    "SendsKv",
    "StageClient",
    "StagePool",
]
