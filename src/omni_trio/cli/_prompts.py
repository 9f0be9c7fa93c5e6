"""What the user asks for: prompts from a file, parameters from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, nearest
from omni_trio.runtime._admission import checked_prompt, split_params

__all__ = ["BadLine", "Job", "Params", "parse_params", "read_jobs"]

Params: TypeAlias = dict[str, dict[str, Any]]
"""Parameters by stage."""

_KEYS = ("prompt", "request_id", "sampling_params", "deadline")


@attrs.frozen(kw_only=True)
class Job:
    """One prompt with what is asked for it."""

    line: int
    prompt: StageInput
    request_id: str | None = None
    params: Params = attrs.field(factory=dict)
    deadline: float | None = None
    """Seconds; None: the one of the command line."""


class BadLine(Exception):
    """A line that is no prompt, or a parameter that is none; the text says why."""


def parse_params(pipeline: Pipeline, texts: Iterable[str]) -> Params:
    """Read ``stage.key=value``; a value that is JSON is taken as such, any other as text.

    Raises:
        BadLine: it is not of that form, or there is no such stage.
    """
    names = [stage.name for stage in pipeline.stages]
    params: Params = {}
    for text in texts:
        place, equals, value = text.partition("=")
        stage, dot, key = place.partition(".")
        if not (equals and dot and key):
            raise BadLine(f"{text!r} is not of the form stage.key=value")
        if stage not in names:
            raise BadLine(f"no stage is called {stage!r}{nearest(stage, names)} (stages: {', '.join(names)})")
        try:
            params.setdefault(stage, {})[key] = json.loads(value)
        except ValueError:
            params.setdefault(stage, {})[key] = value
    return params


def read_jobs(pipeline: Pipeline, lines: Iterable[bytes], params: Params) -> Iterator[Job | tuple[int, BadLine]]:
    """Read prompts, one JSON object per line; a line that is none comes with its number and the reason."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _job(pipeline, number, line, params)
            except BadLine as error:
                yield number, error


def _job(pipeline: Pipeline, number: int, line: bytes, params: Params) -> Job:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise BadLine(f"this is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadLine('expected an object such as {"prompt": "..."}')
    for key in data:
        if key not in _KEYS:
            raise BadLine(f"unknown key {key!r}{nearest(key, _KEYS)} (keys: {', '.join(_KEYS)})")
    request_id, deadline = data.get("request_id"), data.get("deadline")
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise BadLine("request_id: expected a text that is not empty")
    if deadline is not None and not (_is_number(deadline) and deadline > 0):
        raise BadLine("deadline: expected a number of seconds above 0")
    return Job(
        line=number,
        prompt=_prompt(pipeline, data.get("prompt")),
        request_id=request_id,
        params=_merged(params, _by_stage(pipeline, data.get("sampling_params"))),
        deadline=deadline,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _prompt(pipeline: Pipeline, value: object) -> StageInput:
    if not isinstance(value, str | list):
        raise BadLine("prompt: expected a text or a list of token ids")
    try:
        return checked_prompt(value, pipeline)
    except InvalidRequest as error:
        raise BadLine(f"prompt: {error.message}") from error


def _by_stage(pipeline: Pipeline, given: object) -> Params:
    """Deal parameters out to the stages, as the runtime does."""
    try:
        dealt = split_params(given, pipeline)
    except InvalidRequest as error:
        raise BadLine(error.message) from error
    params: Params = {}
    for stage_id, values in dealt.items():
        name = pipeline.stages[stage_id].name
        if isinstance(values, dict):
            params[name] = values
        elif values is not None:
            raise BadLine(f"sampling_params: expected an object for the stage {name!r}, not {json.dumps(values):.80}")
    return params


def _merged(*layers: Mapping[str, Mapping[str, Any]]) -> Params:
    merged: Params = {}
    for layer in layers:
        for stage, values in layer.items():
            merged.setdefault(stage, {}).update(values)
    return merged
