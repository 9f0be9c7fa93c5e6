"""Which replica takes the next request: the part of a pool that a user can replace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from omni_trio.messages import StageInput

__all__ = [
    "Balancer",
    "BalancerFactory",
    "LeastLoaded",
    "RandomReplica",
    "ReplicaLoad",
    "RequestInfo",
    "RoundRobin",
]


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False):
    """One replica that takes requests, as a balancer sees it."""

    replica_id: int
    load: int
    """Requests that it has in hand, those included whose abort it has not acknowledged yet."""


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    """The request that is to be placed, as a balancer sees it."""

    request_id: str
    """The id under which the caller knows it. Companions go where their request is, and nobody is asked."""
    prompt: StageInput
    """What the user asked for. Not to be changed."""


@runtime_checkable
class Balancer(Protocol):
    """Chooses among the replicas of one stage. Each stage of a runtime has its own."""

    def pick(self, replicas: Sequence[ReplicaLoad], request: RequestInfo) -> int:
        """Choose a replica for a request.

        Synchronous and cheap: it is called on the trio thread, once per request and stage. It changes nothing but what
        it remembers, and depends on nothing but that and its arguments. While others are loaded, it passes over no
        replica for ever.

        Args:
            replicas: those that take requests, at least one, in the order of their ids.
            request: what is to be placed.

        Returns:
            An index into `replicas`.
        """
        ...


BalancerFactory: TypeAlias = Callable[[], Balancer]
"""Makes the balancer of one stage."""


class LeastLoaded:
    """The replica with the least in hand; those with equally little take turns. What a pool does by itself."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, replicas: Sequence[ReplicaLoad], request: RequestInfo) -> int:
        """See `Balancer.pick`."""
        del request
        turn = self._next
        best = min(
            range(len(replicas)),
            key=lambda index: (replicas[index].load, replicas[index].replica_id < turn, replicas[index].replica_id),
        )
        self._next = replicas[best].replica_id + 1
        return best


class RoundRobin:
    """One after the other, whatever they have in hand."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, replicas: Sequence[ReplicaLoad], request: RequestInfo) -> int:
        """See `Balancer.pick`."""
        del request
        index = next((index for index, one in enumerate(replicas) if one.replica_id >= self._next), 0)
        self._next = replicas[index].replica_id + 1
        return index


class RandomReplica:
    """Any of them, each as likely as the others.

    Args:
        seed: equal seeds choose equally.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - nobody must be kept from guessing it

    def pick(self, replicas: Sequence[ReplicaLoad], request: RequestInfo) -> int:
        """See `Balancer.pick`."""
        del request
        return self._random.randrange(len(replicas))
