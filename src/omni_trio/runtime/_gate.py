"""Whether requests get through to the stages: closed while the runtime is paused.

There are two barriers. The door holds requests that no stage has seen yet. Behind it, single stages can be frozen:
then nothing more is handed over to them, of requests that have begun either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import trio

from omni_trio.errors import Paused

__all__ = ["Gate"]


class Gate:
    """Stands between admission and the first stage, and in front of every stage. Stages go by their index."""

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._opened.set()
        self._looks_again = trio.Event()
        """Replaced whenever those who wait at the door have to look again."""
        self._refusal: str | None = None
        self._retry_after: float | None = None
        self._frozen: frozenset[int] = frozenset()
        self._thawed = trio.Event()
        self._crossing: Counter[int] = Counter()
        self._crossed = trio.Event()
        self.waiting = 0
        """Requests that wait at the door."""

    @property
    def is_open(self) -> bool:
        """Whether new requests get through."""
        return self._opened.is_set()

    @property
    def frozen(self) -> frozenset[int]:
        """The stages that nothing is handed over to."""
        return self._frozen

    # ---- for whoever pauses

    def close(self, *, refusal: str | None = None, retry_after: float | None = None) -> None:
        """Let no new request through.

        Args:
            refusal: what those are told that come or wait; None: they wait.
            retry_after: what they are told with it (`Paused.retry_after`).
        """
        if self._opened.is_set():
            self._opened = trio.Event()
        self._refusal, self._retry_after = refusal, retry_after
        self._look_again()

    def open(self) -> None:
        """Let all through that wait, and thaw every stage. Doing it again does nothing."""
        self._refusal = self._retry_after = None
        self.thaw()
        self._opened.set()
        self._look_again()

    def _look_again(self) -> None:
        self._looks_again.set()
        self._looks_again = trio.Event()

    def freeze(self, stage_ids: Collection[int]) -> None:
        """Begin no hand-over to these stages any more; those already frozen stay so."""
        if not self._frozen:
            self._thawed = trio.Event()
        self._frozen |= frozenset(stage_ids)

    def thaw(self) -> None:
        """Begin hand-overs to all stages again."""
        self._frozen = frozenset()
        self._thawed.set()

    async def crossed(self, stage_ids: Collection[int]) -> None:
        """Wait until no hand-over to these stages is under way."""
        while any(self._crossing[stage_id] for stage_id in stage_ids):
            if self._crossed.is_set():
                self._crossed = trio.Event()
            await self._crossed.wait()

    # ---- for requests

    async def passed(self) -> None:
        """Wait until the door is open.

        Raises:
            Paused: it is closed, and those who come are refused.
        """
        if self._opened.is_set():
            return
        self.waiting += 1
        try:
            while not self._opened.is_set():
                if self._refusal is not None:
                    raise Paused(self._refusal, retry_after=self._retry_after)
                await self._looks_again.wait()
        finally:
            self.waiting -= 1

    async def thawed(self, stage_id: int) -> None:
        """Wait until the stage is not frozen."""
        while stage_id in self._frozen:
            await self._thawed.wait()

    def begin(self, stage_id: int) -> None:
        """A hand-over to a stage begins; it is not frozen."""
        self._crossing[stage_id] += 1

    def end(self, stage_id: int) -> None:
        """A hand-over to a stage is over, one way or another."""
        self._crossing[stage_id] -= 1
        if not self._crossing[stage_id]:
            self._crossed.set()
