"""Tells instruments what happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

import trio

from omni_trio.messages import TraceEvent

__all__ = ["Instrument", "Trace"]

Instrument: TypeAlias = Callable[[TraceEvent], None]
"""Is called on the trio thread at each event, in order. It must be quick and must not block."""

_logger = logging.getLogger("omni_trio")


class Trace:
    """Fans events out. Falsy while nobody listens, so that a hot path can skip making the event."""

    __slots__ = ("_instruments",)

    def __init__(self, instruments: Iterable[Instrument]) -> None:
        self._instruments = list(instruments)

    def __bool__(self) -> bool:
        return bool(self._instruments)

    def emit(
        self,
        name: str,
        *,
        request_id: str | None = None,
        stage: str | None = None,
        stage_id: int | None = None,
        replica_id: int | None = None,
        detail: str = "",
        value: float = 0.0,
    ) -> None:
        """Tell all instruments. One that raises is taken off and logged: a request must not fail for it."""
        if not self._instruments:
            return
        event = TraceEvent(
            time=trio.current_time(),
            name=name,
            request_id=request_id,
            stage=stage,
            stage_id=stage_id,
            replica_id=replica_id,
            detail=detail,
            value=value,
        )
        for instrument in tuple(self._instruments):
            try:
                instrument(event)
            except Exception:
                _logger.exception("the instrument %r raised and is taken off", instrument)
                self._instruments.remove(instrument)
