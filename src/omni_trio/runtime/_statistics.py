"""Snapshots: what the runtime, its stages and replicas are doing, taken from what is (I11), never counted apart."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs

from omni_trio.stages import ClientStatistics

__all__ = ["Health", "ReplicaHealth", "ReplicaStatistics", "RpcResult", "RuntimeStatistics", "StageStatistics"]

Status: TypeAlias = Literal["ok", "degraded", "dead"]


@attrs.frozen(kw_only=True)
class ReplicaStatistics:
    """One replica."""

    replica_id: int
    state: str
    """``starting``, ``ready``, ``dead`` or ``closed``."""
    requests: int
    """Requests that the replica has in hand, those included whose abort it has not acknowledged yet."""
    finished: int
    """Requests that it has finished since it started."""
    tokens: int
    """Tokens that it has produced for them."""
    stray_outputs: int
    """Outputs that came for nobody, such as the last few of aborted requests."""
    client: ClientStatistics
    """What the replica says of itself."""


@attrs.frozen(kw_only=True)
class StageStatistics:
    """One stage."""

    stage: str
    stage_id: int
    replicas: tuple[ReplicaStatistics, ...]

    @property
    def requests(self) -> int:
        """Requests that the stage has in hand."""
        return sum(replica.requests for replica in self.replicas)


@attrs.frozen(kw_only=True)
class RuntimeStatistics:
    """The whole runtime. Every admitted request is in exactly one of `in_flight` and the four ways to end."""

    in_flight: int
    admitted: int
    finished: int
    failed: int
    aborted: int
    """By `Runtime.abort`, by a caller who left the request's block, or by the runtime's end."""
    expired: int
    rejected: int
    """Refused at the door: invalid, over the limit, or too late. Not part of `admitted`."""
    stages: tuple[StageStatistics, ...]


@attrs.frozen(kw_only=True)
class ReplicaHealth:
    """Whether one replica can work, and if not, why."""

    stage: str
    stage_id: int
    replica_id: int
    state: str
    reason: str | None = None


@attrs.frozen(kw_only=True)
class Health:
    """``ok``: every replica works; ``degraded``: every stage has one that does; ``dead``: some stage has none."""

    status: Status
    replicas: tuple[ReplicaHealth, ...]


@attrs.frozen(kw_only=True)
class RpcResult:
    """The answer of one replica to `Runtime.collective_rpc`: `result`, or what went wrong instead of it."""

    stage: str
    stage_id: int
    replica_id: int
    result: Any = None
    error: Exception | None = None
