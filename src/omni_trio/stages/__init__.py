"""Stages as the runtime sees them: the client of one replica, the pool of all, metrics."""

from __future__ import annotations

from .client import ClientFactory, ClientStatistics, ReplicaContext, StageClient

__all__ = ["ClientFactory", "ClientStatistics", "ReplicaContext", "StageClient"]
