"""How successive outputs of one stage add up: the one place that knows.

Tokens and text are appended. Values in `data` add up by key:

* arrays and tensors are concatenated: under ``audio`` on the last axis (samples), else on the first; where the
  shapes do not allow it, audio is flattened, and of anything else the last one stays;
* lists are appended;
* all else (numbers, strings, ``sample_rate``) is replaced by the newer value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["merge_data"]


def merge_data(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the data of successive outputs. The parts and what is in them stay as they are."""
    columns: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            columns.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else _merge(key, values) for key, values in columns.items()}


def _merge(key: str, values: Sequence[Any]) -> Any:
    newest = values[-1]
    kind = _kind(newest)
    if kind is None or any(_kind(value) != kind for value in values):
        return newest
    if kind == "list":
        return [item for value in values for item in value]
    arrays = [value for value in values if value.ndim]
    if not arrays or len(arrays) != len(values):
        return newest
    axis = -1 if key == "audio" else 0
    try:
        return _concatenate(kind, arrays, axis)
    except (ValueError, RuntimeError):  # numpy's and torch's words for shapes that do not fit
        if key != "audio":
            return newest
        return _concatenate(kind, [array.reshape(-1) for array in arrays], 0)


def _kind(value: Any) -> str | None:
    if isinstance(value, list):
        return "list"
    # An array can only exist where its library has been imported, so neither needs to be imported here.
    for library, array in (("numpy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(library)
        if module is not None and isinstance(value, getattr(module, array)):
            return library
    return None


def _concatenate(kind: str, arrays: Sequence[Any], axis: int) -> Any:
    if kind == "numpy":
        return sys.modules["numpy"].concatenate(arrays, axis=axis)
    return sys.modules["torch"].cat(list(arrays), dim=axis)
