"""Whether requests get through to the stages: closed while the runtime is paused."""

from __future__ import annotations

import trio

__all__ = ["Gate"]


class Gate:
    """Stands between admission and the first stage; where it is frozen, in front of every stage."""

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._opened.set()
        self.frozen = False
        """Whether requests that have begun have to wait as well."""

    @property
    def is_open(self) -> bool:
        """Whether new requests get through."""
        return self._opened.is_set()

    def close(self, *, freeze: bool = False) -> None:
        """Let no new request through; with `freeze`, hold those that have begun as well."""
        if self._opened.is_set():
            self._opened = trio.Event()
        self.frozen = self.frozen or freeze

    def open(self) -> None:
        """Let all through that wait. Doing it again does nothing."""
        self.frozen = False
        self._opened.set()

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while not self._opened.is_set():
            await self._opened.wait()
