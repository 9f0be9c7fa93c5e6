"""What is checked, what the kit has to know of it, and how it is opened: with a bound on every wait."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypeAlias, TypeVar

import attrs
import trio

from omni_trio.messages import StageInput
from omni_trio.pipeline import StageSpec
from omni_trio.stages import ReplicaContext
from omni_trio.testing._determinism import seeded_scheduler

from ._rules import CLIENT_RULES
from ._violation import ConformanceError

__all__ = ["VARIANTS", "Leave", "Subject", "broken", "describe", "numbers", "seeded", "within"]

T = TypeVar("T")

Leave: TypeAlias = Literal["normally", "cancelled"]

VARIANTS = 6
"""How many different requests there are; requests beyond them are like earlier ones."""

_MARGIN = 1.0
"""Seconds on top of `ReplicaContext.close_timeout`: what is cut off at it ends a little later."""


def numbers(index: int) -> StageInput:
    """The usual request: some token ids, others for each index."""
    return StageInput(token_ids=tuple(range(10 * index + 1, 10 * index + 4 + index)))


@attrs.frozen(kw_only=True)
class Subject:
    """One client under test."""

    make: Callable[..., AbstractAsyncContextManager[Any]]
    stage: StageSpec
    request: Callable[[int], StageInput]
    params: Any
    long_params: Any
    session: Callable[[int, int], StageInput] | None
    session_params: Any
    bad_inputs: Sequence[StageInput]
    expect: Callable[[int], Sequence[int] | str] | None
    deterministic: bool
    timeout: float
    close_timeout: float
    quiet: float
    seed: int
    thorough: bool
    skip: Mapping[int, str]
    alone: dict[int, Any] = attrs.field(factory=dict, repr=False)
    """What each request gets where it is alone, by variant."""
    _inputs: dict[int, StageInput] = attrs.field(factory=dict, repr=False)
    _replicas: itertools.count[int] = attrs.field(factory=itertools.count, repr=False)

    def input(self, number: int) -> StageInput:
        """The input of a request: one object per variant, as the runtime hands one prompt to several stages."""
        variant = number % VARIANTS
        if variant not in self._inputs:
            self._inputs[variant] = self.request(variant)
        return self._inputs[variant]

    async def with_client(
        self,
        make: Callable[..., AbstractAsyncContextManager[Any]],
        body: Callable[[Any], Awaitable[T]],
        *,
        leave: Leave = "normally",
        state: str = "idle",
        example: str = "",
    ) -> T:
        """Open a client, run `body` with what `make` yields, and see that it closes in time.

        Args:
            make: opens it; is given a `ReplicaContext` if it takes an argument.
            body: what to do with it.
            leave: ``cancelled``: the block is left because the scope around it is cancelled.
            state: what the client is in when it is left, in words.
            example: code for `ConformanceError`.
        """
        guard = _Guard(self.close_timeout + _MARGIN)
        result: list[T] = []
        failure: Exception | None = None
        crash: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guard.watch, trio.lowlevel.current_task(), self.stage.start_timeout)
            try:
                with guard.scope, trio.CancelScope() as outer:
                    async with make(*self._context(make)) as client:
                        guard.opened.set()
                        try:
                            result.append(await body(client))
                        except Exception as error:
                            failure = error
                        guard.leaving.set()
                        if leave == "cancelled":
                            outer.cancel("checking that the client closes when it is cancelled")
                            await trio.lowlevel.checkpoint()
            except Exception as error:
                crash = error
            nursery.cancel_scope.cancel("the client is closed")
        if failure is not None:
            raise failure
        if crash is not None:
            raise broken(26, f"the client's block raised {describe(crash)}", example) from crash
        if guard.overdue == "close":
            how = "although its block was cancelled, " if leave == "cancelled" else ""
            limit = f"close_timeout ({self.close_timeout:g} s)"
            raise broken(24, f"{how}closing a client that was {state} did not end within {limit}", example)
        if guard.overdue == "start":
            raise broken(25, f"it was not open within start_timeout ({self.stage.start_timeout:g} s)", example)
        return result[0]

    def _context(self, make: Callable[..., Any]) -> tuple[ReplicaContext, ...]:
        if not _takes_an_argument(make):
            return ()
        return (
            ReplicaContext(
                stage=self.stage,
                stage_id=0,
                replica_id=next(self._replicas),
                want_text=True,
                report=lambda _: None,
                close_timeout=self.close_timeout,
            ),
        )

    async def cancelled_start(self, steps: int, example: str) -> None:
        """Cancel a start after some scheduler steps, and see that it ends."""
        guard = _Guard(self.close_timeout + _MARGIN)
        crash: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guard.watch, trio.lowlevel.current_task(), math.inf)
            with guard.scope, trio.CancelScope() as outer:
                # Cancelling a scope that has been left does nothing.
                nursery.start_soon(_cancel_after, outer, steps, guard)  # noqa: ASYNC111 - see above
                try:
                    async with self.make(*self._context(self.make)):
                        await trio.sleep_forever()
                except Exception as error:
                    crash = error
            nursery.cancel_scope.cancel("the start has ended")
        if crash is not None:
            raise broken(25, f"cancelled at its start, the client raised {describe(crash)}", example) from crash
        if guard.overdue is not None:
            limit = f"close_timeout ({self.close_timeout:g} s)"
            raise broken(25, f"a start that was cancelled did not end within {limit}", example)


async def _cancel_after(scope: trio.CancelScope, steps: int, guard: _Guard) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    guard.opened.set()
    guard.leaving.set()
    scope.cancel("checking that a start can be cancelled")


def _takes_an_argument(make: Callable[..., Any]) -> bool:
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # no signature to look at
        return True
    return True


class _Guard:
    """Ends a block that does not end: cancels it when its time is up, and then lifts its shields."""

    def __init__(self, patience: float) -> None:
        self.scope = trio.CancelScope()
        self.opened = trio.Event()
        self.leaving = trio.Event()
        self.overdue: Literal["start", "close"] | None = None
        self._patience = patience

    async def watch(self, task: trio.lowlevel.Task, start_timeout: float) -> None:
        with trio.move_on_after(start_timeout):
            await self.opened.wait()
        if self.opened.is_set():
            await self.leaving.wait()
            await trio.sleep(self._patience)
            self.overdue = "close"
        else:
            self.overdue = "start"
        self.scope.cancel("its time is up")
        await trio.sleep(self._patience)
        _unshield(task, self.scope)


_STATUS = "_cancel_status"
"""A private name of trio's, seen in 0.22 to 0.35. Where it is another one, only shielded waits stay unbounded."""


def _unshield(task: trio.lowlevel.Task, scope: trio.CancelScope) -> None:
    """Let a cancellation of `scope` reach a task and its children through all shields inside of it."""
    status: Any = getattr(task, _STATUS, None)  # nothing public ends a shielded wait that is not ours
    while status is not None and (inner := getattr(status, "_scope", scope)) is not scope:
        inner.shield = False
        status = status._parent  # noqa: SLF001 - see above
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            _unshield(child, scope)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make trio's scheduler do the same again, where it can be made to."""
    # What fails has to fail again while it is made smaller. With a trio that can not be seeded, most does anyway.
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(seeded_scheduler(seed))
        yield


async def within(seconds: float, function: Callable[..., Awaitable[Any]], *args: Any) -> tuple[bool, Any]:
    """Call an async function and return whether it returned in time, and what."""
    with trio.move_on_after(seconds) as scope:
        return True, await function(*args)
    assert scope.cancelled_caught  # nothing else ends the block without a return
    return False, None


def broken(number: int, problem: str, example: str = "") -> ConformanceError:
    """Make the error for a rule of clients."""
    return ConformanceError(CLIENT_RULES[number], problem, example)


def describe(error: BaseException) -> str:
    """Return an error in words; of a group, what is in it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
