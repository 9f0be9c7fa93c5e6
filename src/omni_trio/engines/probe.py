"""Finds out that a replica no longer answers, and costs nothing while it has no work."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import final

import trio

__all__ = ["Probe"]


@final
class Probe:
    """Watches for signs of life of one replica.

    A dead process is noticed by its end; this is for one that lives and says nothing. While requests are at work
    and nothing has come for `interval` seconds, the replica is asked for a sign of life; if nothing at all comes
    within `timeout` seconds more, it is mute. Without work nothing wakes up (I13).

    Args:
        interval: seconds.
        timeout: seconds.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._heard = trio.current_time()
        self._busy = False
        self._rest = trio.CancelScope()
        """In which the task waits; moving its deadline is how it learns that work has begun or ended."""

    @property
    def patience(self) -> float:
        """Seconds of silence after which a replica counts as mute."""
        return self._interval + self._timeout

    def hear(self) -> None:
        """Something has come from the replica."""
        self._heard = trio.current_time()

    def work(self, *, busy: bool) -> None:
        """Say whether requests are at work. Cheap to say again."""
        if busy is self._busy:
            return
        self._busy = busy
        if busy:
            self._heard = trio.current_time()
            self._rest.deadline = self._heard + self._interval
        else:
            self._rest.deadline = math.inf

    async def until_mute(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Return when the replica is mute. `ask` sends it a question and waits for the answer."""
        while True:
            with trio.CancelScope(deadline=self._heard + self._interval if self._busy else math.inf) as self._rest:
                await trio.sleep_forever()
            heard = self._heard
            if not self._silent_since(heard) or trio.current_time() < heard + self._interval:
                continue
            with trio.move_on_after(self._timeout):
                await ask()
            if self._silent_since(heard):
                return

    def _silent_since(self, heard: float) -> bool:
        return self._busy and self._heard == heard
