"""What a caller holds of one request: the block it lives in, its events, its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self, final

import attrs
import trio

from omni_trio.merging import merge_data
from omni_trio.messages import FinishReason, Modality, Output, Prompt, StageMetrics

from ._orchestrator import Orchestrator
from ._request import RequestTask

__all__ = ["Request", "Result", "StageResult"]


@attrs.frozen(kw_only=True)
class StageResult:
    """All that one final-output stage made for a request."""

    stage: str
    modality: Modality
    text: str
    token_ids: tuple[int, ...]
    data: Mapping[str, Any]
    """Arrays and other values by name, successive ones added up (see `omni_trio.merging`)."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: StageMetrics | None

    @property
    def value(self) -> Any:
        """The result in the stage's modality: text, token ids, or the value in `data` named as the modality."""
        if self.modality == "text":
            return self.text
        if self.modality == "tokens":
            return self.token_ids
        return self.data if self.modality == "data" else self.data.get(self.modality)


@attrs.frozen(kw_only=True)
class Result:
    """The final outputs of one request that ended well."""

    request_id: str
    outputs: Mapping[str, StageResult]
    """By stage name, in the pipeline's order."""
    metrics: tuple[StageMetrics, ...]
    """Of every stage that finished, final output or not, in the pipeline's order."""

    @property
    def text(self) -> str:
        """The text of the first stage whose output is text; empty where there is none."""
        return next((output.text for output in self.outputs.values() if output.modality == "text"), "")

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first final-output stage ended: the request's primary output."""
        return next((output.finish_reason for output in self.outputs.values()), None)

    def __getitem__(self, stage: str) -> StageResult:
        return self.outputs[stage]


@final
class Request:
    """One request, as an async context manager and an async iterator. Made by `Runtime.request`.

    Entering the block admits the request and hands it to the first stage; errors in what was asked are raised
    there. Inside it, iterate over the events, or await `result`. Leaving the block before the end aborts the
    request at every stage, and returns only when all of them have let go (I6).
    """

    def __init__(self, orchestrator: Orchestrator, prompt: Prompt, options: Mapping[str, Any]) -> None:
        self._orchestrator = orchestrator
        self._prompt = prompt
        self._options = options
        self._task: RequestTask | None = None

    @property
    def id(self) -> str:
        """The request's id: the caller's own, or the one that was made for it."""
        return self._entered().external_id

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError("a request can be entered once; ask runtime.request() for another one")
        task = self._task = self._orchestrator.admit(self._prompt, **self._options)
        try:
            await task.at_door.wait()
        except BaseException:
            await self._leave(task)
            raise
        if task.error is not None and not task.admitted:
            await self._leave(task)
            raise task.error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(self._entered())

    async def _leave(self, task: RequestTask) -> None:
        task.abort("its caller left the request's block")
        task.mailbox.tell()
        if task.done.is_set():
            return
        # The task bounds its own clean-up by the abort time-out; twice that means that the trio thread is stuck.
        with trio.move_on_after(2 * self._orchestrator.abort_timeout, shield=True):
            await task.done.wait()

    def _entered(self) -> RequestTask:
        if self._task is None:
            raise RuntimeError("the request is not open: write 'async with runtime.request(...) as request:'")
        return self._task

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | StageMetrics:
        """Wait for the next event. A consumer that is slow gets fewer, larger deltas; nothing is lost.

        Raises:
            StopAsyncIteration: the request ended well.
            RequestError: it did not; raised once, after what had come before.
        """
        event = await self._entered().mailbox.take()
        if event is None:
            raise StopAsyncIteration
        return event

    async def result(self) -> Result:
        """Wait for the end and return the final outputs, as far as they have not been iterated over yet.

        Raises:
            RequestError: the request did not end well.
        """
        events = await self._entered().mailbox.take_all()
        return _result(self.id, events)


def _result(request_id: str, events: Iterable[Output | StageMetrics]) -> Result:
    outputs: dict[int, list[Output]] = {}
    metrics: dict[int, StageMetrics] = {}
    for event in events:
        if isinstance(event, StageMetrics):
            metrics[event.stage_id] = event
            continue
        outputs.setdefault(event.stage_id, []).append(event)
        if event.metrics is not None:
            metrics[event.stage_id] = event.metrics
    return Result(
        request_id=request_id,
        outputs=MappingProxyType(
            {parts[0].stage: _stage_result(parts) for _, parts in sorted(outputs.items(), key=lambda item: item[0])}
        ),
        metrics=tuple(metrics[stage_id] for stage_id in sorted(metrics)),
    )


def _stage_result(parts: list[Output]) -> StageResult:
    last = parts[-1]
    return StageResult(
        stage=last.stage,
        modality=last.modality,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        data=merge_data(part.data for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        metrics=last.metrics,
    )
