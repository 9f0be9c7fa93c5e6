"""Pausing a runtime and putting its engines to sleep, and back.

A pause is more than a closed door: it is over when nothing is in flight *and* every engine has said, after a round
trip, that it has nothing at work. Several callers may operate at the same time. An operation that contradicts an
earlier one that is still under way overtakes it: the last word counts, and the earlier one raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs
import trio

from omni_trio.errors import EngineDied, InvalidRequest, OperationFailed, ShutDown, StageFailed
from omni_trio.stages import Replica, ReplicaState, StagePool

from . import _buggify
from ._orchestrator import Orchestrator
from ._request import RequestTask
from ._rpc import Call, ask_all, check_seconds, choose_pools, failures_of, knows, place_of
from ._statistics import Activity, Phase, RpcResult

__all__ = ["Operator", "PauseMode", "WhenAsked"]

PauseMode: TypeAlias = Literal["wait", "abort", "keep"]
WhenAsked: TypeAlias = Literal["wait", "reject"]

_PAUSE: Final = "pause_scheduler"

_ROUND_TRIP: Final = "check_health"
"""What an engine is asked that has no scheduler to pause. That it answers is the point, be it that it has none."""

_NAMED: Final = 5
"""Requests that a message names; `OperationFailed.requests` has all."""


@attrs.define(eq=False)
class _Operation:
    """A call of an operator's that is under way."""

    name: str
    mode: PauseMode | None
    """How it pauses; None: it resumes."""
    seconds: float
    until: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled where it is overtaken."""
    overtaken_by: str = ""

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return max(0.0, self.until - trio.current_time())

    def failed(self, message: str, **more: Any) -> OperationFailed:
        return OperationFailed(message, operation=self.name, **more)


@attrs.frozen
class _Door:
    """What becomes of requests that come while the runtime is paused."""

    refusal: str | None
    retry_after: float | None


class Operator:
    """Pauses and resumes one runtime. Only touched from the trio thread."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._gate = orchestrator.gate
        self._activities: dict[Replica, Activity] = {}
        self._under_way: list[_Operation] = []
        self._settled = False
        """Whether the last pause came to its end."""
        self._engines = trio.Lock()
        """Held while engines are told to pause, resume, sleep or wake, so that they get one order at a time."""

    # ---- what is

    @property
    def phase(self) -> Phase:
        """What the runtime is doing."""
        if self._gate.is_open:
            return "running"
        if self._down(self._orchestrator.pools):
            return "asleep"
        return "paused" if self._settled else "pausing"

    def activity(self, replica: Replica) -> Activity:
        """What has been made of a replica."""
        return self._activities.get(replica, "running")

    def _down(self, pools: Iterable[StagePool]) -> list[Replica]:
        """The replicas that are not known to have their memory."""
        return [
            replica for pool in pools for replica in pool.ready() if self.activity(replica) in ("asleep", "unknown")
        ]

    def _in_flight(self) -> list[RequestTask]:
        return [task for task in self._orchestrator.tasks.values() if task.begun]

    # ---- operations

    async def pause(
        self,
        mode: PauseMode,
        *,
        stages: str | Iterable[str] | None,
        deadline: float,
        when_asked: WhenAsked,
        retry_after: float | None,
        keep_partial: bool,
    ) -> None:
        """See `Runtime.pause`."""
        _check_word("mode", mode, PauseMode)
        pools = choose_pools(self._orchestrator.pools, stages)
        door = _door(when_asked, retry_after)
        with self._operation("pause", mode, deadline) as operation:
            await self._quieten(operation, mode, pools, door, keep_partial=keep_partial)
            return
        raise self._overtaken(operation)

    async def resume(self, *, deadline: float) -> None:
        """See `Runtime.resume`."""
        with self._operation("resume", None, deadline) as operation:
            async with self._ordering(operation):
                results = await self._tell_paused(operation)
                if failures := _living(failures_of(results)):
                    raise operation.failed("the runtime stays paused", failures=failures, results=results)
                await trio.lowlevel.checkpoint_if_cancelled()  # from here on it can not be overtaken
                if not self._gate.is_open:
                    self._gate.open()
                    self._orchestrator.trace.emit("runtime.resumed")
            return
        raise self._overtaken(operation)

    async def sleep(
        self,
        level: int,
        *,
        mode: PauseMode,
        stages: str | Iterable[str] | None,
        deadline: float,
        when_asked: WhenAsked,
        retry_after: float | None,
    ) -> tuple[RpcResult, ...]:
        """See `Runtime.sleep`."""
        _check_word("mode", mode, PauseMode)
        if mode == "keep":
            raise InvalidRequest("mode: an engine that sleeps keeps no requests; expected 'wait' or 'abort'")
        if isinstance(level, bool) or level not in (1, 2):
            raise InvalidRequest(f"level: expected 1 or 2, not {level!r}; a pause without sleep is Runtime.pause()")
        pools = self._sleepers(stages)
        door = _door(when_asked, retry_after)
        with self._operation("sleep", mode, deadline) as operation:
            await self._quieten(operation, mode, pools, door)
            async with self._ordering(operation):
                await trio.lowlevel.checkpoint_if_cancelled()
                self._under_way.remove(operation)  # from here on it can not be overtaken: resume() refuses
                return await self._put_to_sleep(operation, level, pools)
        raise self._overtaken(operation)

    async def wake(
        self, tags: Sequence[str] | None, *, stages: str | Iterable[str] | None, deadline: float
    ) -> tuple[RpcResult, ...]:
        """See `Runtime.wake`."""
        pools = choose_pools(self._orchestrator.pools, stages)
        operation = self._begun("wake", None, deadline)
        kwargs = {} if tags is None else {"tags": [tags] if isinstance(tags, str) else list(tags)}
        async with self._ordering(operation):
            results = await self._change(operation, "wake_up", kwargs, self._down(pools), to="running")
        if failures := failures_of(results):
            raise operation.failed("not every replica woke up", failures=failures, results=results)
        return tuple(results)

    # ---- how they meet

    def _begun(self, name: str, mode: PauseMode | None, deadline: float) -> _Operation:
        seconds = check_seconds("deadline", deadline)
        if self._orchestrator.closing:
            raise ShutDown("the runtime is closed; open a new one")
        return _Operation(name, mode, seconds, trio.current_time() + seconds)

    @contextmanager
    def _operation(self, name: str, mode: PauseMode | None, deadline: float) -> Iterator[_Operation]:
        operation = self._begun(name, mode, deadline)
        if mode is None:
            self._check_awake(operation)
        for other in self._under_way:
            if other.mode != mode:
                other.overtaken_by = name if mode is None else f"{name}(mode={mode!r})"
                other.scope.cancel(f"overtaken by {other.overtaken_by}")
        self._under_way.append(operation)
        try:
            with operation.scope:
                yield operation
        finally:
            if operation in self._under_way:
                self._under_way.remove(operation)

    def _overtaken(self, operation: _Operation) -> OperationFailed:
        return operation.failed(f"it was overtaken by {operation.overtaken_by}, which counts")

    @asynccontextmanager
    async def _ordering(self, operation: _Operation) -> AsyncIterator[None]:
        """Wait for the turn to give engines an order."""
        with trio.move_on_at(operation.until) as scope:
            await self._engines.acquire()
        if scope.cancelled_caught:
            raise operation.failed(f"another operation had not ended after {operation.seconds:g} s")
        try:
            yield
        finally:
            self._engines.release()

    def _check_awake(self, operation: _Operation) -> None:
        if down := self._down(self._orchestrator.pools):
            failures = [
                StageFailed(
                    "it is asleep" if self.activity(replica) == "asleep" else "nobody knows whether it is awake",
                    **place_of(replica),
                )
                for replica in down
            ]
            raise operation.failed("not every replica is awake: call wake() first", failures=failures)

    # ---- pausing

    async def _quieten(
        self,
        operation: _Operation,
        mode: PauseMode,
        pools: Sequence[StagePool],
        door: _Door,
        *,
        keep_partial: bool = False,
    ) -> None:
        gate, trace = self._gate, self._orchestrator.trace
        # Up to the first await nobody else runs: what is in flight now is all that can still reach a stage.
        gate.close(refusal=door.refusal, retry_after=door.retry_after)
        self._settled = False
        trace.emit("runtime.pausing", detail=mode)
        if mode == "keep":
            await self._hold(operation, pools)
        else:
            if mode == "abort":
                for task in self._in_flight():
                    task.abort("it was aborted: the runtime is being paused", keep_partial=keep_partial)
                gate.thaw()  # whoever waits there has ended
            elif gate.frozen:
                await self._thaw(operation)
            if _buggify.hook is not None:
                await _buggify.hook("an operator waits")
            await self._drain(operation)
            await self._prove_idle(operation, pools)
        await trio.lowlevel.checkpoint_if_cancelled()  # from here on it can not be overtaken
        self._settled = True
        trace.emit("runtime.paused", detail=mode)

    async def _hold(self, operation: _Operation, pools: Sequence[StagePool]) -> None:
        """Let nothing more reach the stages, and stop their schedulers where they have any."""
        stage_ids = [pool.stage_id for pool in pools]
        self._gate.freeze(stage_ids)
        with trio.move_on_at(operation.until) as scope:
            await self._gate.crossed(stage_ids)
        if scope.cancelled_caught:
            raise self._still_busy(operation, "a stage has not taken in what was being handed to it")
        async with self._ordering(operation):
            calls = [self._pause_call(replica, "keep") for replica in _ready(pools) if knows(replica, _PAUSE)]
            results = await ask_all(calls, operation.left)
        self._check_paused(operation, results)

    async def _thaw(self, operation: _Operation) -> None:
        """Let go on what an earlier pause has kept, so that it can come to its end."""
        async with self._ordering(operation):
            results = await self._tell_paused(operation)
        self._check_paused(operation, results)
        self._gate.thaw()

    async def _drain(self, operation: _Operation) -> None:
        with trio.move_on_at(operation.until):
            while in_flight := self._in_flight():
                await in_flight[0].done.wait()
            return
        raise self._still_busy(operation, "requests are still in flight")

    async def _prove_idle(self, operation: _Operation, pools: Sequence[StagePool]) -> None:
        async with self._ordering(operation):
            replicas = [replica for replica in _ready(pools) if self.activity(replica) not in ("asleep", "unknown")]
            schedulers = [replica for replica in replicas if knows(replica, _PAUSE)]
            others = [replica for replica in replicas if not knows(replica, _PAUSE)]
            # An engine answers this when its scheduler has nothing left and its device is done. All others are
            # trusted with their word, once they have taken in everything that they were sent before.
            calls = [self._pause_call(replica, "wait") for replica in schedulers]
            calls += [Call(replica, _ROUND_TRIP) for replica in others]
            results = await ask_all(calls, operation.left)
        asked = [*schedulers, *others]
        failures = _living(failures_of(results[: len(schedulers)]))
        failures += _living(failures_of(result for result in results[len(schedulers) :] if not result.answered))
        failures += [error for replica in asked if (error := _busy(replica)) is not None]
        if failures:
            raise operation.failed(
                f"not every stage has proved within {operation.seconds:g} s that it is idle; the runtime stays paused",
                failures=failures,
                results=results,
            )

    def _pause_call(self, replica: Replica, mode: PauseMode) -> Call:
        if self.activity(replica) == "running":
            self._activities[replica] = "paused"  # even if it does not answer: it may have heard
        return Call(replica, _PAUSE, (), {"mode": mode, "clear_cache": False})

    async def _tell_paused(self, operation: _Operation) -> list[RpcResult]:
        """Have the schedulers go on that were paused."""
        replicas = [one for one in _ready(self._orchestrator.pools) if self.activity(one) == "paused"]
        results = await ask_all([Call(replica, "resume_scheduler") for replica in replicas], operation.left)
        for replica, result in zip(replicas, results, strict=True):
            if result.error is None:
                self._activities[replica] = "running"
        return results

    def _check_paused(self, operation: _Operation, results: Sequence[RpcResult]) -> None:
        if failures := _living(failures_of(results)):
            raise operation.failed("the runtime stays paused", failures=failures, results=results)

    def _still_busy(self, operation: _Operation, what: str) -> OperationFailed:
        ids = [task.external_id for task in self._in_flight()]
        failures = [
            StageFailed(f"it has {replica.load} in hand", **place_of(replica))
            for replica in self._orchestrator.replicas()
            if replica.load
        ]
        names = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
        return operation.failed(
            f"{what} after {operation.seconds:g} s ({names}); the runtime stays paused and they go on: do it again "
            "to wait for them, or with mode='abort' to end them",
            failures=failures,
            requests=ids,
        )

    # ---- sleeping

    def _sleepers(self, stages: str | Iterable[str] | None) -> list[StagePool]:
        pools = choose_pools(self._orchestrator.pools, stages)
        if stages is None:
            pools = [pool for pool in pools if any(knows(replica, "sleep") for replica in pool.replicas)]
            if not pools:
                raise InvalidRequest(
                    "no stage is known to be able to sleep; name worker stages whose class has sleep() and wake_up()"
                )
        return pools

    async def _put_to_sleep(
        self, operation: _Operation, level: int, pools: Sequence[StagePool]
    ) -> tuple[RpcResult, ...]:
        replicas = list(_ready(pools))
        results = await self._change(operation, "sleep", {"level": level}, replicas, to="asleep")
        if failures := failures_of(results):
            raise operation.failed(
                "not every replica fell asleep; the runtime stays paused: health() says which did, wake() wakes them",
                failures=failures,
                results=results,
            )
        return tuple(results)

    async def _change(
        self,
        operation: _Operation,
        method: str,
        kwargs: Mapping[str, Any],
        replicas: Sequence[Replica],
        *,
        to: Literal["asleep", "running"],
    ) -> list[RpcResult]:
        """Have replicas sleep or wake; returns per replica whether it is (wholly) so."""
        before = {replica: self.activity(replica) for replica in replicas}
        changing = [replica for replica in replicas if before[replica] != to or to == "running"]
        for replica in changing:
            self._activities[replica] = "unknown"
        answers = await ask_all([Call(replica, method, (), kwargs) for replica in changing], operation.left)
        heard = [one for one, answer in zip(changing, answers, strict=True) if answer.answered]
        sleeping = await self._asleep(operation, heard)
        results = {replica: RpcResult(**place_of(replica), result=True) for replica in replicas}
        for replica, answer in zip(changing, answers, strict=True):
            told = sleeping.get(replica)
            now = self._activities[replica] = _judge(before[replica], answer, told, to)
            self._orchestrator.trace.emit("replica.activity", **place_of(replica), detail=now)
            if answer.error is not None:
                results[replica] = answer
            elif told is not None and told.error is not None:
                results[replica] = told
            elif to == "asleep" and now != to:
                error = StageFailed("it says that it is not asleep", **place_of(replica))
                results[replica] = RpcResult(**place_of(replica), error=error)
            else:
                results[replica] = RpcResult(**place_of(replica), result=now == to)
        return [results[replica] for replica in replicas]

    async def _asleep(self, operation: _Operation, replicas: Sequence[Replica]) -> dict[Replica, RpcResult]:
        """Ask those that can be asked whether they are asleep."""
        asked = [replica for replica in replicas if knows(replica, "is_sleeping")]
        answers = await ask_all([Call(replica, "is_sleeping") for replica in asked], operation.left)
        return dict(zip(asked, answers, strict=True))


def _check_word(name: str, word: Any, words: Any) -> None:
    if word not in get_args(words):
        known = ", ".join(repr(one) for one in get_args(words))
        raise InvalidRequest(f"{name}: expected one of {known}, not {word!r}")


def _door(when_asked: WhenAsked, retry_after: float | None) -> _Door:
    _check_word("when_asked", when_asked, WhenAsked)
    refusal = "the runtime is paused; ask again later" if when_asked == "reject" else None
    return _Door(refusal, retry_after)


def _judge(before: Activity, answer: RpcResult, told: RpcResult | None, to: Literal["asleep", "running"]) -> Activity:
    """Conclude what a replica is.

    Args:
        before: what it was.
        answer: what it said to the order.
        told: what it said when it was asked whether it is asleep; None: it can not be asked.
        to: what the order was.
    """
    if not answer.answered:
        return "unknown"
    if told is None:  # its word is all there is
        if answer.error is not None:
            return before
        return "asleep" if to == "asleep" or answer.result is False else "running"
    if told.error is not None:
        return "unknown"
    if not told.result:
        return "running"
    # vLLM says so of an engine that is only paused, too.
    return "asleep" if answer.error is None or before == "asleep" else "unknown"


def _ready(pools: Iterable[StagePool]) -> Iterator[Replica]:
    return (replica for pool in pools for replica in pool.ready())


def _living(failures: Iterable[Exception]) -> list[Exception]:
    """Leave out the deaths: who is dead holds nothing, and the runtime's own policy deals with it."""
    return [error for error in failures if not isinstance(error, EngineDied)]


def _busy(replica: Replica) -> StageFailed | None:
    """What a replica says against its being idle."""
    client = replica.client
    if client is None or replica.state is not ReplicaState.READY:
        return None
    statistics = client.statistics()
    running, waiting = max(0, statistics.running), max(0, statistics.waiting)
    if not running and not waiting:
        return None
    return StageFailed(f"it says that it has {running} running and {waiting} waiting", **place_of(replica))
