"""Snapshots: what the runtime, its stages and replicas are doing, taken from what is (I11), never counted apart."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs

from omni_trio.stages import ClientStatistics

__all__ = [
    "Activity",
    "Health",
    "Phase",
    "ReplicaHealth",
    "ReplicaStatistics",
    "RpcResult",
    "RuntimeStatistics",
    "StageStatistics",
]

Status: TypeAlias = Literal["ok", "degraded", "dead"]

Phase: TypeAlias = Literal["running", "pausing", "paused", "asleep"]
"""``running``: requests get through. ``pausing``: new ones do not, and others may still be at work.

``paused``: what was asked of the pause has been proved. ``asleep``: a replica is asleep, or may be.
"""

Activity: TypeAlias = Literal["running", "paused", "asleep", "unknown"]
"""What the runtime has made of a replica. ``unknown``: it was told to sleep or wake, and has not confirmed it."""


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
    activity: Activity = "running"
    """Whether it was paused or put to sleep."""


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
    phase: Phase = "running"
    """Whether the runtime is paused."""
    waiting: int = 0
    """Requests that wait for the runtime to be resumed. Part of `in_flight`."""


@attrs.frozen(kw_only=True)
class ReplicaHealth:
    """Whether one replica can work, and if not, why."""

    stage: str
    stage_id: int
    replica_id: int
    state: str
    reason: str | None = None
    activity: Activity = "running"
    """Whether it was paused or put to sleep."""


@attrs.frozen(kw_only=True)
class Health:
    """``ok``: every replica works; ``degraded``: every stage has one that does; ``dead``: some stage has none."""

    status: Status
    replicas: tuple[ReplicaHealth, ...]
    phase: Phase = "running"
    """Whether the runtime is paused. A runtime that sleeps is as healthy as one that runs."""


@attrs.frozen(kw_only=True)
class RpcResult:
    """The answer of one replica to `Runtime.collective_rpc`: `result`, or what went wrong instead of it."""

    stage: str
    stage_id: int
    replica_id: int
    result: Any = None
    error: Exception | None = None
    answered: bool = True
    """Whether the replica has answered, be it with an error; False where it is dead or was too slow."""
