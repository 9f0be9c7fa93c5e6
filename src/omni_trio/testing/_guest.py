"""One trio run that a synchronous program drives, call by call, on a virtual clock."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio
import trio.testing

from ._determinism import seeded_scheduler

__all__ = ["Guest"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Guest:
    """A trio run in guest mode, whose host is whoever calls `run`: between two calls nothing happens in it.

    Background tasks live on in `nursery` from call to call. Virtual time passes only inside of a call, and only
    while every task waits for it. Nothing is left to chance: equal calls under an equal seed do the same.
    """

    def __init__(self, seed: int, *, patience: float) -> None:
        self.nursery: trio.Nursery
        """For tasks that outlive a call."""
        self._patience = patience
        self._ticks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._result: outcome.Outcome[None] | None = None
        self._ready = False
        self._raised = False
        self._stop = trio.Event()
        self._scheduler = contextlib.ExitStack()
        self._scheduler.enter_context(seeded_scheduler(seed))
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._ticks.put,
            done_callback=self._done,
            host_uses_signal_set_wakeup_fd=False,
            clock=trio.testing.MockClock(autojump_threshold=0),
        )
        while not self._ready and self._result is None:
            self._tick()
        self._check_running()

    def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call an async function inside the run, let the run go on until it returns, and return what it returns.

        Raises:
            AssertionError: it had not returned after `patience` virtual seconds.
            Exception: what it raised; or what a background task raised, which ends the run.
        """
        answer: list[outcome.Outcome[T]] = []
        self._check_running()
        self.nursery.start_soon(self._answer, answer, function, args)
        while not answer:
            self._tick()
            self._check_running()
        return answer[0].unwrap()

    def close(self) -> None:
        """Cancel what still runs and end the run. Doing it again does nothing.

        Raises:
            Exception: what a background task raised, unless `run` has raised it.
        """
        try:
            self._stop.set()
            while self._result is None:
                self._tick()
            self._check(self._result)
        finally:
            self._scheduler.close()

    async def _answer(
        self, answer: list[outcome.Outcome[T]], function: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts]
    ) -> None:
        # Whatever waits for ever would else make the host wait, on a clock that is not virtual.
        with trio.move_on_after(self._patience) as scope:
            try:
                answer.append(outcome.Value(await function(*args)))
            except Exception as error:
                answer.append(outcome.Error(error))
        if scope.cancelled_caught:
            name = getattr(function, "__qualname__", repr(function))
            words = f"{name} has not returned within {self._patience:g} virtual seconds"
            answer.append(outcome.Error(AssertionError(words)))

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            self._ready = True
            await self._stop.wait()
            nursery.cancel_scope.cancel("the simulation is over")

    def _done(self, result: outcome.Outcome[None]) -> None:
        self._result = result

    def _tick(self) -> None:
        self._ticks.get()()

    def _check_running(self) -> None:
        if self._result is not None:
            self._check(self._result)
            raise RuntimeError("the simulation is over")

    def _check(self, result: outcome.Outcome[Any]) -> None:
        if self._raised:
            return
        self._raised = True
        try:
            result.unwrap()
        except ExceptionGroup as group:
            raise _lone(group) from None


def _lone(error: Exception) -> Exception:
    """What is in a group that is around nothing else: one failed check is one failed check."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
