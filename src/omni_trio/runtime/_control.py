"""What operators ask of the engines of an open runtime, as typed methods over collective RPC."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import attrs

from omni_trio.errors import EngineDied, InvalidRequest, OperationFailed
from omni_trio.stages import Replica, StagePool

from ._operate import Operator
from ._orchestrator import Orchestrator
from ._rpc import Call, ask_all, check_seconds, choose_pools, failures_of, knows, place_of
from ._statistics import RpcResult

__all__ = ["Answers", "Control"]

_T = TypeVar("_T")


@attrs.frozen(kw_only=True)
class Answers(Generic[_T]):
    """What the replicas answered: each one, and all in one."""

    value: _T
    """The answers of all, made one as the method says."""
    replicas: tuple[RpcResult, ...]
    """One answer per replica, ordered by stage and replica."""


@final
class Control:
    """The engines' own methods, called on all replicas of some stages at the same time. See `Runtime.control`.

    With ``stages=None`` a method asks the stages whose engines are known to have it: vLLM engines have all of them.
    Name stages to ask others, such as a worker whose class has the method, or fewer: LoRA adapters, for one, fit only
    one stage's model. Replicas that are dead are left out.

    Every method has `timeout`, the seconds that each replica has to answer, and raises:

    - `OperationFailed` where a replica failed, was too slow or died; it names each one, and has the answers of the
      others, at which it stays done;
    - `InvalidRequest` where a stage is not there, or none is known to have the method.
    """

    def __init__(self, orchestrator: Orchestrator, operator: Operator) -> None:
        self._orchestrator = orchestrator
        self._operator = operator

    # ---- LoRA

    async def add_lora(
        self,
        name: str,
        lora_id: int,
        path: str,
        *,
        stages: str | Iterable[str] | None = None,
        timeout: float = 60.0,
    ) -> Answers[bool]:
        """Load a LoRA adapter into engines that were started with ``enable_lora``; pooling stages only if named.

        Args:
            name: what requests call it.
            lora_id: a number from 1 that no other adapter has.
            path: of the adapter's folder, where the engines run.
            stages: which to ask.
            timeout: seconds that each replica has.

        Returns:
            Whether every replica has loaded it now and had not before.
        """
        kwargs = {"lora_name": name, "lora_int_id": lora_id, "lora_path": path}
        return _all(await self._ask("add_lora", stages, timeout, kwargs, loads=True))

    async def remove_lora(
        self, lora_id: int, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[bool]:
        """Drop a LoRA adapter. Returns whether every replica had it."""
        return _all(await self._ask("remove_lora", stages, timeout, {"lora_int_id": lora_id}))

    async def pin_lora(
        self, lora_id: int, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[bool]:
        """Keep a LoRA adapter from being evicted. Returns whether every replica has it."""
        return _all(await self._ask("pin_lora", stages, timeout, {"lora_int_id": lora_id}, loads=True))

    async def list_loras(
        self, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[tuple[int, ...]]:
        """Return the ids of the LoRA adapters that any replica has, sorted."""
        results = await self._ask("list_loras", stages, timeout)
        ids = {lora_id for result in _done(results) for lora_id in result.result}
        return Answers(value=tuple(sorted(ids)), replicas=results)

    # ---- profiles

    async def start_profile(
        self, prefix: str | None = None, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[None]:
        """Have engines begin to record a profile.

        Args:
            prefix: of the files' names; the stage and replica are added to it, so that none overwrites another's.
            stages: which to ask.
            timeout: seconds that each replica has.
        """

        def kwargs_for(replica: Replica) -> Mapping[str, Any]:
            mine = None if prefix is None else f"{prefix}_{replica.spec.name}_{replica.replica_id}"
            return {"is_start": True, "prefix": mine}

        replicas = self._replicas("profile", stages)
        calls = [Call(replica, "profile", (), kwargs_for(replica)) for replica in replicas]
        return _nothing(await self._call("start_profile", calls, timeout))

    async def stop_profile(self, *, stages: str | Iterable[str] | None = None, timeout: float = 600.0) -> Answers[None]:
        """Have engines end their profile and write it, which may take minutes."""
        return _nothing(await self._ask("profile", stages, timeout, {"is_start": False}, operation="stop_profile"))

    # ---- caches

    async def reset_prefix_cache(
        self,
        *,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        stages: str | Iterable[str] | None = None,
        timeout: float = 60.0,
    ) -> Answers[bool]:
        """Forget cached prefixes.

        Args:
            reset_running_requests: whether requests that are at work give up their caches, and are computed again.
                Without it a replica that has any resets nothing, and says so.
            reset_connector: whether the KV connector's cache is forgotten as well.
            stages: which to ask.
            timeout: seconds that each replica has.

        Returns:
            Whether every replica has done it.
        """
        kwargs = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        return _all(await self._ask("reset_prefix_cache", stages, timeout, kwargs))

    async def reset_multimodal_cache(
        self, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[None]:
        """Forget processed images, sounds and videos. Only while the runtime is paused, with nothing in flight."""
        return _nothing(await self._ask("reset_mm_cache", stages, timeout, operation="reset_multimodal_cache"))

    async def reset_encoder_cache(
        self, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[None]:
        """Forget what encoders have made of images, sounds and videos. Needed where weights have changed."""
        return _nothing(await self._ask("reset_encoder_cache", stages, timeout))

    # ---- weights

    async def weight_version(
        self, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[str | None]:
        """Return the version of the weights; None where not all replicas have the same. From vLLM 0.32."""
        results = await self._ask("get_weight_version", stages, timeout, operation="weight_version")
        versions = {result.result for result in _done(results)}
        return Answers(value=versions.pop() if len(versions) == 1 else None, replicas=results)

    async def set_weight_version(
        self, version: str, *, stages: str | Iterable[str] | None = None, timeout: float = 60.0
    ) -> Answers[None]:
        """Say which version the weights have, after they were changed. From vLLM 0.32."""
        return _nothing(await self._ask("set_weight_version", stages, timeout, {"weight_version": version}))

    # ---- how

    async def _ask(
        self,
        method: str,
        stages: str | Iterable[str] | None,
        timeout: float,
        kwargs: Mapping[str, Any] | None = None,
        *,
        operation: str = "",
        loads: bool = False,
    ) -> tuple[RpcResult, ...]:
        operation = operation or method
        replicas = self._replicas(method, stages)
        asleep = [one for one in replicas if self._operator.activity(one) in ("asleep", "unknown")]
        if loads and asleep:
            failures = [InvalidRequest("it is asleep: wake it first", **place_of(replica)) for replica in asleep]
            raise OperationFailed("it needs the engines' memory", operation=operation, failures=failures)
        return await self._call(operation, [Call(replica, method, (), kwargs) for replica in replicas], timeout)

    async def _call(self, operation: str, calls: Sequence[Call], timeout: float) -> tuple[RpcResult, ...]:
        results = await ask_all(calls, check_seconds("timeout", timeout))
        if failures := failures_of(results):
            count = f"{len(failures)} of {len(results)} replicas"
            raise OperationFailed(f"{count} failed", operation=operation, failures=failures, results=results)
        return tuple(results)

    def _replicas(self, method: str, stages: str | Iterable[str] | None) -> list[Replica]:
        pools = choose_pools(self._orchestrator.pools, stages)
        if stages is None:
            pools = [pool for pool in pools if _has(pool, method)]
            if not pools:
                raise InvalidRequest(f"no stage is known to have {method!r}; name those whose workers have it")
        replicas = [replica for pool in pools for replica in pool.ready()]
        if dead := [pool for pool in pools if not any(pool.ready())]:
            failures = [
                EngineDied("no replica of the stage is alive", stage=pool.spec.name, stage_id=pool.stage_id)
                for pool in dead
            ]
            raise OperationFailed("nobody was asked", operation=method, failures=failures)
        return replicas


def _has(pool: StagePool, method: str) -> bool:
    if pool.spec.kind == "pooling" and method.endswith(("_lora", "_loras")):
        return False
    return any(knows(replica, method) for replica in pool.replicas)


def _done(results: Iterable[RpcResult]) -> list[RpcResult]:
    """Leave out those who say that they have yet to learn the method, as diffusion engines of others do."""
    return [one for one in results if not (isinstance(one.result, Mapping) and "todo" in one.result)]


def _all(results: tuple[RpcResult, ...]) -> Answers[bool]:
    return Answers(value=all(result.result for result in _done(results)), replicas=results)


def _nothing(results: tuple[RpcResult, ...]) -> Answers[None]:
    return Answers(value=None, replicas=results)
