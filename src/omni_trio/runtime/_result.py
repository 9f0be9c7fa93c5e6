"""What a request comes to: its events, added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from omni_trio.merging import merge_data
from omni_trio.messages import FinishReason, Modality, Output, Progress, StageMetrics

__all__ = ["Completion", "Result", "StageResult", "collect_result"]


@attrs.frozen(kw_only=True)
class Completion:
    """One of several answers (``n`` of the sampling params) of a stage."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: Any = None
    """As vLLM gives them, one entry per token; None where none were asked for."""


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
    completions: tuple[Completion, ...] = ()
    """All answers, by number: one, unless ``n`` of the sampling params asked for more. `text` and the like are those
    of the first."""

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


def collect_result(request_id: str, events: Iterable[Output | StageMetrics | Progress]) -> Result:
    """Add up the events of a request that ended well."""
    outputs: dict[int, list[Output]] = {}
    metrics: dict[int, StageMetrics] = {}
    for event in events:
        if isinstance(event, StageMetrics):
            metrics[event.stage_id] = event
            continue
        if isinstance(event, Progress):
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
    by_index: dict[int, list[Output]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    completions = tuple(_completion(by_index[index]) for index in sorted(by_index))
    first, last = completions[0], parts[-1]
    return StageResult(
        stage=last.stage,
        modality=last.modality,
        text=first.text,
        token_ids=first.token_ids,
        data=merge_data(part.data for part in parts),
        finish_reason=first.finish_reason,
        stop_reason=first.stop_reason,
        metrics=last.metrics,
        completions=completions,
    )


def _completion(parts: list[Output]) -> Completion:
    last = parts[-1]
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return Completion(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs or None,
    )
