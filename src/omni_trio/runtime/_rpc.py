"""Calls to the engines of several replicas, all at the same time: one answer per replica, each with its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import trio

from omni_trio.errors import EngineDied, InvalidRequest, OmniTrioError, StageFailed
from omni_trio.pipeline import nearest
from omni_trio.stages import Operable, Replica, ReplicaState, StagePool

from ._statistics import RpcResult

__all__ = ["Call", "ask_all", "check_seconds", "choose_pools", "failures_of", "knows", "place_of"]


@attrs.frozen
class Call:
    """One call to one replica."""

    replica: Replica
    method: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


def knows(replica: Replica, method: str) -> bool:
    """Whether a replica's client says that its engine has a method."""
    client: object = replica.client
    return isinstance(client, Operable) and method in client.methods


def place_of(replica: Replica) -> dict[str, Any]:
    """Where a replica is, as errors and results say it."""
    return {"stage": replica.spec.name, "stage_id": replica.stage_id, "replica_id": replica.replica_id}


def choose_pools(pools: Sequence[StagePool], stages: str | Iterable[str] | None) -> list[StagePool]:
    """Return the pools of the named stages, each once, in the order of the pipeline; of all where None are named.

    Raises:
        InvalidRequest: a stage is not there.
    """
    if stages is None:
        return list(pools)
    asked = [stages] if isinstance(stages, str) else list(stages)
    names = [pool.spec.name for pool in pools]
    for name in asked:
        if name not in names:
            raise InvalidRequest(f"stages: no stage is called {name!r}{nearest(str(name), names)}")
    return [pool for pool in pools if pool.spec.name in asked]


def check_seconds(name: str, seconds: Any) -> float:
    """Return a number of seconds that something may take.

    Raises:
        InvalidRequest: it is none, or no bound.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise InvalidRequest(f"{name}: expected a number of seconds above 0, not {seconds!r}")
    return float(seconds)


async def ask_all(calls: Sequence[Call], timeout: float) -> list[RpcResult]:
    """Make calls at the same time; returns one result per call, in their order.

    A call that fails, is not answered in time or meets a dead replica has an error for a result. What comes late is
    ignored.

    Args:
        calls: what to call.
        timeout: seconds that each of them has.
    """
    results: dict[int, RpcResult] = {}

    async def ask(index: int, call: Call) -> None:
        place = place_of(call.replica)
        try:
            results[index] = RpcResult(**place, result=await _ask(call, timeout))
        except trio.TooSlowError as error:
            late = StageFailed(f"{call.method!r} was not answered within {timeout:g} s", **place)
            late.__cause__ = error
            results[index] = RpcResult(**place, error=late, answered=False)
        except EngineDied as error:
            results[index] = RpcResult(**place, error=error, answered=False)
        except OmniTrioError as error:
            results[index] = RpcResult(**place, error=error)
        except Exception as error:
            # By contract clients raise nothing else; the other replicas' answers are not to be lost by it.
            failed = StageFailed(f"calling {call.method!r} raised {type(error).__name__}: {error}", **place)
            failed.__cause__ = error
            results[index] = RpcResult(**place, error=failed)

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(ask, index, call)
    return [results[index] for index in range(len(calls))]


async def _ask(call: Call, timeout: float) -> Any:
    replica = call.replica
    client = replica.client
    if client is None or replica.state is not ReplicaState.READY:
        raise replica.death or EngineDied("the replica is not alive", **place_of(replica))
    with trio.fail_after(timeout):
        return await client.call(call.method, call.args, call.kwargs)


def failures_of(results: Iterable[RpcResult]) -> list[Exception]:
    """The errors among some results, each of which says where it happened."""
    failures = []
    for result in results:
        error = result.error
        if error is None:
            continue
        for field in ("stage", "stage_id", "replica_id"):
            if getattr(error, field, result) is None:
                setattr(error, field, getattr(result, field))
        failures.append(error)
    return failures
