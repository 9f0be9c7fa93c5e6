"""What a runtime still holds: for tests, which want to see that it is nothing (I5)."""

from __future__ import annotations

import attrs

from ._runtime import Runtime

__all__ = ["Holdings", "holdings", "load_of"]


@attrs.frozen(kw_only=True)
class Holdings:
    """How many entries there are in a runtime's tables."""

    requests: int
    """Requests that have not ended, or that a stage has not let go of."""
    legs: int
    """Requests bound to replicas, per stage."""
    load: int
    """Slots of replicas that count as taken."""


def holdings(runtime: Runtime) -> Holdings:
    """Count what a runtime holds. Works after it was closed, too."""
    orchestrator = runtime._orchestrator  # noqa: SLF001 - a part of the same package
    replicas = orchestrator.replicas()
    return Holdings(
        requests=len(orchestrator.tasks),
        legs=sum(len(replica.legs) for replica in replicas),
        load=sum(replica.load for replica in replicas),
    )


def load_of(runtime: Runtime, stage_id: int, replica_id: int) -> int:
    """Count the slots of one replica that count as taken (I8)."""
    return runtime._orchestrator.pools[stage_id].replicas[replica_id].load  # noqa: SLF001 - a part of the same package
