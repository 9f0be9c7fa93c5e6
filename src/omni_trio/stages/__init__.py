"""Stages as the runtime sees them: the client of one replica, the pool of all, legs and their metrics."""

from __future__ import annotations

from .balancing import (
    Balancer,
    BalancerFactory,
    LeastLoaded,
    RandomReplica,
    ReplicaLoad,
    RequestInfo,
    RoundRobin,
)
from .client import ClientFactory, ClientStatistics, Operable, ReleasesKv, ReplicaContext, SendsKv, StageClient
from .leg import Leg, LegOwner, Mark
from .pool import Replica, ReplicaState, StagePool

__all__ = [
    "Balancer",
    "BalancerFactory",
    "ClientFactory",
    "ClientStatistics",
    "LeastLoaded",
    "Leg",
    "LegOwner",
    "Mark",
    "Operable",
    "RandomReplica",
    "ReleasesKv",
    "Replica",
    "ReplicaContext",
    "ReplicaLoad",
    "ReplicaState",
    "RequestInfo",
    "RoundRobin",
    "SendsKv",
    "StageClient",
    "StagePool",
]
