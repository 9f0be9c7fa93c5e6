"""An instrument that keeps what it is told, to be looked at afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import final

from omni_trio.messages import TraceEvent

__all__ = ["Recorder"]


@final
class Recorder:
    """Keeps the newest events. Give it to ``open_runtime(..., instruments=[recorder])``.

    Args:
        max_events: how many to keep; when it is full the oldest goes for each new one.
    """

    def __init__(self, max_events: int = 1_000_000) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, not {max_events}")
        self._events: deque[TraceEvent] = deque(maxlen=max_events)
        self._dropped = 0

    def __call__(self, event: TraceEvent) -> None:
        """Take one event."""
        if len(self._events) == self._events.maxlen:
            self._dropped += 1
        self._events.append(event)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self._events)

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """What it holds, oldest first."""
        return tuple(self._events)

    @property
    def dropped(self) -> int:
        """How many events it had no room for."""
        return self._dropped

    def clear(self) -> None:
        """Forget all events and the count of those dropped."""
        self._events.clear()
        self._dropped = 0
