"""Stages as the runtime sees them: the client of one replica, the pool of all, legs and their metrics."""

from __future__ import annotations

from .client import ClientFactory, ClientStatistics, ReplicaContext, StageClient
from .leg import Leg, LegOwner
from .pool import Replica, ReplicaState, StagePool

__all__ = [
    "ClientFactory",
    "ClientStatistics",
    "Leg",
    "LegOwner",
    "Replica",
    "ReplicaContext",
    "ReplicaState",
    "StageClient",
    "StagePool",
]
