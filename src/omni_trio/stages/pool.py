"""The replicas of one stage: which exist, what each has in hand, and which takes the next request."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from omni_trio.errors import EngineDied, NoReplicaAvailable, StageFailed
from omni_trio.messages import StageInput, StageOutput
from omni_trio.pipeline import StageSpec

from .balancing import Balancer, ReplicaLoad, RequestInfo
from .client import ReleasesKv, SendsKv, StageClient
from .leg import Leg
from .metrics import ReplicaTotals

__all__ = ["Replica", "ReplicaState", "StagePool"]


class ReplicaState(enum.Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class Replica:
    """One slot of a pool: the client of the engine in it, and the requests bound to it.

    Outputs are matched against this replica's own legs only, so an output of a request that is bound elsewhere
    (or to nobody any more) reaches no one: it is counted in `stray` (I10).
    """

    def __init__(self, spec: StageSpec, stage_id: int, replica_id: int) -> None:
        self.spec = spec
        self.stage_id = stage_id
        self.replica_id = replica_id
        self.state = ReplicaState.STARTING
        self.phase = "waiting"
        """What start-up is at, as reported by the client's factory."""
        self.client: StageClient | None = None
        self.sends_kv: SendsKv | None = None
        """The client, where its engine offers KV caches to later stages."""
        self.releases_kv: ReleasesKv | None = None
        """The client, where its engine can have a prefill engine let go of a KV cache."""
        self.death: EngineDied | None = None
        self.legs: dict[str, Leg] = {}
        """By internal request id: what outputs are still taken for."""
        self.load = 0
        """Legs that the replica has not let go of; includes those whose abort is not acknowledged yet (I8)."""
        self.stray = 0
        """Outputs for nobody: late ones of aborted requests, mostly."""
        self.totals = ReplicaTotals()
        self.scope = trio.CancelScope()
        """Around the replica's task; cancelling it closes the client."""

    def open(self, client: StageClient) -> None:
        """The replica is up."""
        self.client = client
        self.state = ReplicaState.READY
        # Looked at once: asking whether an object has the methods of a protocol takes microseconds.
        able: object = client
        self.sends_kv = able if isinstance(able, SendsKv) else None
        self.releases_kv = able if isinstance(able, ReleasesKv) else None

    def bind(self, leg: Leg) -> None:
        """Take outputs for a leg from now on."""
        self.legs[leg.request_id] = leg
        leg.held = True
        self.load += 1

    def unbind(self, leg: Leg) -> None:
        """Take no more outputs for a leg. Its load stays until `let_go`."""
        if self.legs.get(leg.request_id) is leg:
            del self.legs[leg.request_id]

    def let_go(self, leg: Leg) -> None:
        """The replica does not hold the leg any more. Doing it again does nothing."""
        self.unbind(leg)
        if leg.held:
            leg.held = False
            self.load -= 1

    def deliver(self, outputs: Sequence[StageOutput], now: float) -> None:
        """Hand one step's outputs to their requests: one synchronous pass, the hot path of the runtime."""
        legs = self.legs
        for output in outputs:
            leg = legs.get(output.request_id)
            if leg is None:
                self.stray += 1
                continue
            try:
                leg.meter.count(output, now)
                if output.finish_reason is None and output.error is None:
                    leg.owner.leg_output(leg, output)
                else:
                    self.let_go(leg)
                    leg.owner.leg_ended(leg, output, now)
            except Exception as error:
                leg.owner.leg_broken(leg, error)  # what is wrong with one output is its request's misfortune only


class StagePool:
    """All replicas of one stage.

    Args:
        spec: the stage.
        stage_id: its index.
        balancer: chooses among the replicas that are ready; None: `pick` does.
    """

    def __init__(self, spec: StageSpec, stage_id: int, balancer: Balancer | None = None) -> None:
        self.spec = spec
        self.stage_id = stage_id
        self._balancer = balancer
        self.replicas = tuple(Replica(spec, stage_id, index) for index in range(spec.replicas))
        self._next = 0
        self._changed = trio.Event()

    def note_change(self) -> None:
        """The state of a replica has changed: those who wait for one look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def acquire(self, request_id: str, prompt: StageInput) -> Replica:
        """Return the replica for a request, after waiting for one for `StageSpec.dispatch_timeout` at most.

        Args:
            request_id: the id under which the caller knows the request.
            prompt: what the user asked for.

        Raises:
            NoReplicaAvailable: no replica of the stage was ready in time.
            StageFailed: the stage's balancer raised, or chose none that there is.
        """
        timeout = self.spec.dispatch_timeout
        if timeout and not any(self.ready()):
            with trio.move_on_after(timeout):
                while not any(self.ready()):
                    await self._changed.wait()
        if self._balancer is None or not (ready := list(self.ready())):
            return self.pick()  # without a replica it says so
        return self._chosen(self._balancer, ready, request_id, prompt)

    def _chosen(self, balancer: Balancer, ready: Sequence[Replica], request_id: str, prompt: StageInput) -> Replica:
        loads = tuple(ReplicaLoad(replica.replica_id, replica.load) for replica in ready)
        place: dict[str, Any] = {"stage": self.spec.name, "stage_id": self.stage_id}
        try:
            index: Any = balancer.pick(loads, RequestInfo(request_id, prompt))
        except Exception as error:
            raise StageFailed(f"its balancer raised {type(error).__name__}: {error}", **place) from error
        if not isinstance(index, int) or not 0 <= index < len(ready):
            raise StageFailed(f"its balancer chose {index!r} of {len(ready)} replicas", **place)
        return ready[index]

    def ready(self) -> Iterator[Replica]:
        """The replicas that take requests."""
        return (replica for replica in self.replicas if replica.state is ReplicaState.READY)

    def pick(self) -> Replica:
        """Return the ready replica with the least in hand; those with equally little take turns.

        `LeastLoaded` does the same, slower: it has to be shown what is here.

        Raises:
            NoReplicaAvailable: no replica of the stage is ready.
        """
        count = len(self.replicas)
        best: Replica | None = None
        for offset in range(count):
            replica = self.replicas[(self._next + offset) % count]
            if replica.state is ReplicaState.READY and (best is None or replica.load < best.load):
                best = replica
        if best is None:
            raise NoReplicaAvailable(
                "no replica of the stage is alive; look at Runtime.health() for what they died of",
                stage=self.spec.name,
                stage_id=self.stage_id,
            )
        self._next = (best.replica_id + 1) % count
        return best
