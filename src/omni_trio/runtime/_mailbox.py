"""What waits for one request's consumer: at most one merged delta per stage, and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import trio

from omni_trio.merging import merge_data
from omni_trio.messages import Output, Progress, StageMetrics, StageOutput
from omni_trio.stages.leg import Leg

from . import _buggify
from ._signal import Signal

__all__ = ["Mailbox"]

_JOIN_AT = 256
"""Parts of text that are kept apart before they are joined, so that a consumer that never reads costs one
string rather than one object per token."""


_PROGRESS = -1
"""Stands for the number of a completion where the entry is how far a stage has come."""

_Key: TypeAlias = Leg | tuple[Leg, int, int]
"""A leg; or a leg, the number of one of several completions, and the number of a segment of a session."""

Event: TypeAlias = Output | StageMetrics | Progress


class _Merged:
    """Several outputs of one leg that the consumer has not taken yet."""

    __slots__ = ("data", "last", "logprobs", "text", "token_ids")

    def __init__(self, first: StageOutput) -> None:
        self.token_ids: list[int] = list(first.token_ids)
        self.text: list[str] = [first.text] if first.text else []
        self.data: list[Mapping[str, Any]] = [first.data] if first.data else []
        self.logprobs: list[Any] = list(first.logprobs or ())
        self.last = first

    def add(self, output: StageOutput) -> None:
        self.token_ids.extend(output.token_ids)
        if output.text:
            self.text.append(output.text)
            if len(self.text) >= _JOIN_AT:
                self.text = ["".join(self.text)]
        if output.data:
            self.data.append(output.data)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        self.last = output


class Mailbox:
    """Outputs on their way to the consumer of one request.

    Putting never blocks and never fails: a reader serves many requests and must not wait for one consumer. What
    the consumer has not taken yet is merged per stage (and completion, and segment of a session), so the box holds
    one entry for each of these however slow the consumer is, and content is never lost or reordered within a stage
    (I4).
    """

    __slots__ = ("_closed", "_entries", "_error", "_quiet", "_signal", "_when_told")

    def __init__(self) -> None:
        self._entries: dict[_Key, StageOutput | _Merged | StageMetrics] = {}
        self._signal = Signal()
        self._error: BaseException | None = None
        self._closed = False
        self._quiet = False
        self._when_told: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        """Whether the end has been put in."""
        return self._closed

    def put(self, leg: Leg, output: StageOutput) -> None:
        """Add one output of a stage."""
        entries = self._entries
        key: _Key = leg if not output.index and leg.segments is None else (leg, output.index, leg.segment)
        waiting = entries.get(key)
        if waiting is None:
            entries[key] = output
        else:
            if isinstance(waiting, StageOutput):
                waiting = entries[key] = _Merged(waiting)
            if isinstance(waiting, _Merged):
                waiting.add(output)
            if output.finish_reason is not None and len(entries) > 1:
                entries[key] = entries.pop(key)  # the stage's last word comes last
        if not self._quiet:
            self._signal.set()

    def put_progress(self, leg: Leg, output: StageOutput) -> None:
        """Add the notice that a stage has come to another step; the newest is enough."""
        self._entries[leg, _PROGRESS, 0] = output
        if not self._quiet:
            self._signal.set()

    def drain(self) -> list[Event]:
        """Take out what is in the box now, one event per stage."""
        events = []
        while self._entries:
            event = self._next()
            assert event is not None  # there was an entry
            events.append(event)
        return events

    def drop(self) -> None:
        """Throw away what is in the box: a new turn of a session has begun."""
        self._entries.clear()

    def put_metrics(self, leg: Leg, metrics: StageMetrics) -> None:
        """Add the notice that a stage whose outputs are not final has finished."""
        self._entries[leg] = metrics
        if not self._quiet:
            self._signal.set()

    def close(self, error: BaseException | None = None, *, discard: bool = False) -> None:
        """Put in the end: the first call counts, later ones do nothing.

        Args:
            error: what the consumer shall get raised, after what is still in the box; None: it ended well.
            discard: throw away what is still in the box.
        """
        if self._closed:
            return
        self._closed = True
        self._error = error
        if discard:
            self._entries.clear()
        self._signal.set()

    def when_told(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the consumer has been given the error, or does not want to hear it any more."""
        self._when_told = callback

    def tell(self) -> None:
        """The consumer knows how the request ended. Doing it again does nothing."""
        callback, self._when_told = self._when_told, None
        if callback is not None:
            callback()

    async def take(self) -> Event | None:
        """Return the next event, or None at the end.

        Raises:
            BaseException: the error that `close` was given, at each call.
        """
        if self._entries or self._closed:
            await trio.lowlevel.checkpoint()
        while not (self._entries or self._closed):
            await self._signal.wait()
            if _buggify.hook is not None:
                await _buggify.hook("a caller wakes")
        return self._next()

    async def take_all(self) -> list[Event]:
        """Wait for the end and return all that has come since the last call, one event per stage.

        The task is woken once, at the end, rather than once per output.

        Raises:
            BaseException: the error that `close` was given.
        """
        self._quiet = True
        try:
            while not self._closed:
                await self._signal.wait()
                if _buggify.hook is not None:
                    await _buggify.hook("a caller wakes")
        finally:
            self._quiet = False
        if self._error is not None:
            self._entries.clear()
        events = self.drain()
        self._next()  # raises what the box was closed with
        return events

    def _next(self) -> Event | None:
        if self._entries:
            key = next(iter(self._entries))
            entry = self._entries.pop(key)
            if isinstance(entry, StageMetrics):
                return entry
            return _event(key, 0, 0, entry) if isinstance(key, Leg) else _event(*key, entry)
        self.tell()
        if self._error is not None:
            raise self._error
        return None


def _event(leg: Leg, index: int, segment: int, entry: StageOutput | _Merged) -> Output | Progress:
    token_ids: Sequence[int]
    data: Mapping[str, Any]
    if isinstance(entry, _Merged):
        last = entry.last
        token_ids, text, data = entry.token_ids, "".join(entry.text), merge_data(entry.data)
        logprobs = entry.logprobs or None
    else:
        last = entry
        token_ids, text, data, logprobs = entry.token_ids, entry.text, entry.data or {}, entry.logprobs
    if index == _PROGRESS:
        step, total = last.progress or (0, 0)
        return Progress(
            request_id=leg.external_id,
            stage=leg.stage,
            stage_id=leg.stage_id,
            replica_id=leg.replica.replica_id,
            step=step,
            total=total,
        )
    finished = last.finish_reason is not None
    return Output(
        request_id=leg.external_id,
        stage=leg.stage,
        stage_id=leg.stage_id,
        replica_id=leg.replica.replica_id,
        modality=leg.modality,
        index=index,
        turn=leg.turn,
        segment=segment,
        token_ids=token_ids,
        text=text,
        data=data,
        segment_end=last.segment_end,
        finished=finished,
        finish_reason=last.finish_reason or last.completion_finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        metrics=leg.metrics if finished else None,
    )
