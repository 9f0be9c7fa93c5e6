"""What a caller may say to a worker or diffusion stage: any mapping of plain data, and some words with a meaning."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from omni_trio.engines.codec import CodecError, encode
from omni_trio.messages import StageInput
from omni_trio.pipeline import StageSpec

__all__ = ["find_fault", "merge_params"]

_SEEDS: Final = 1 << 63


def merge_params(stage: StageSpec, params: Any) -> Mapping[str, Any]:
    """Put a caller's parameters over the stage's own.

    Raises:
        ValueError: they are no mapping, can not travel, or a word that has a meaning has a value that has none.
    """
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise ValueError(  # noqa: TRY004 - one kind of error for all that a caller can get wrong
            f"a stage of kind {stage.kind!r} takes its parameters as a mapping, not as {type(params).__name__}"
        )
    if not all(isinstance(key, str) for key in params):
        raise ValueError(f"the names of a {stage.kind} stage's parameters must be strings")
    merged = {**stage.sampling, **params}
    if stage.kind == "diffusion":
        _check(merged)
    try:
        encode(merged)
    except CodecError as error:
        raise ValueError(f"the parameters can not be sent to the worker: {error}") from error
    return MappingProxyType(merged)


def find_fault(stage: StageSpec, given: StageInput) -> str | None:
    """Say what keeps the stage from taking an input; None where nothing does."""
    batch = given.batch
    if batch is None:
        return None
    if stage.kind != "diffusion":
        return f"a stage of kind {stage.kind!r} takes no batch of inputs; make one request of each"
    if not batch:
        return "a batch has at least one input"
    if any(one.batch is not None for one in batch):
        return "a batch within a batch can not be worked on; make one batch of them"
    if any(value is not None for value in (given.text, given.token_ids, given.messages, given.embeds)):
        return "an input with a batch has its prompts there; beside it there can only be 'data'"
    return None


def _check(params: Mapping[str, Any]) -> None:
    for name, (expected, fits) in _KNOWN.items():
        value = params.get(name)
        # None says "as if it were not given".
        if value is not None and not fits(value):
            raise ValueError(f"{name} must be {expected}, not {value!r}")


def _is_whole(value: Any, least: int, below: float = math.inf) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and least <= int(value) < below


def _is_count(value: Any) -> bool:
    return _is_whole(value, 1)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _are_companions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair)


_COUNT: Final = ("a whole number from 1 up", _is_count)

_KNOWN: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "num_inference_steps": _COUNT,
    "num_outputs_per_prompt": _COUNT,
    "height": _COUNT,
    "width": _COUNT,
    "seed": ("a whole number from 0 up to 2**63 - 1", lambda value: _is_whole(value, 0, _SEEDS)),
    "guidance_scale": ("a number", _is_number),
    "cfg_kv_request_ids": ("a mapping of companions' roles to their ids", _are_companions),
}
"""Parameters of diffusion stages with a known meaning: what they must be, in words and as a check."""
