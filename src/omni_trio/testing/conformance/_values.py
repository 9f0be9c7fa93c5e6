"""What a value is now, so that it can be compared with what it is later; and what two values share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np

__all__ = ["mutable_parts", "overlap", "snapshot", "write"]


def snapshot(value: Any) -> Any:
    """Return what can be compared with a later snapshot of the same value: numbers of arrays, fields of objects.

    Private fields (``_name``) are left out: what an object keeps there for itself is not what it says.
    """
    return _snapshot(value, ())


def _snapshot(value: Any, around: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, str | bytes | int | float | type):
        return value
    if id(value) in around:
        return "..."
    around = (*around, id(value))
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return type(value).__name__, _public(fields, around)
    if isinstance(value, Mapping):
        return {key: _snapshot(item, around) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_snapshot(item, around) for item in value))
    if isinstance(value, AbstractSet):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if _is_tensor(value):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    fields_of = getattr(value, "__dict__", None)
    if fields_of and not callable(value):
        return type(value).__name__, _public(fields_of, around)
    return value


def _public(fields: Mapping[str, Any], around: tuple[int, ...]) -> dict[str, Any]:
    return {name: _snapshot(item, around) for name, item in fields.items() if not name.startswith("_")}


def mutable_parts(value: Any) -> Iterator[Any]:
    """Give the lists, mappings and arrays in a value; not a bridge's state and parameters, nor empty mappings."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in ("state", "params"):
                yield from mutable_parts(getattr(value, name))
    elif isinstance(value, Mapping):
        if value:  # the empty one is the default, which all inputs share
            yield value
        for item in value.values():
            yield from mutable_parts(item)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        for item in value:
            if not isinstance(item, int | str):
                yield from mutable_parts(item)
    elif isinstance(value, np.ndarray) or _is_tensor(value):
        yield value


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays have memory in common."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    if _is_tensor(one) and _is_tensor(other):
        same: bool = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        return one.numel() > 0 and same
    return False


def write(value: Any) -> str:
    """Return a value as code: structs without what is usual, arrays as long as they are small."""
    if isinstance(value, msgspec.Struct):
        usual = {field.name: field for field in msgspec.structs.fields(value)}
        fields = {
            name: item for name in value.__struct_fields__ if not _is_usual(usual[name], item := getattr(value, name))
        }
        return f"{type(value).__name__}({', '.join(f'{name}={write(item)}' for name, item in fields.items())})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(write, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(write, value)) + "]"
    if isinstance(value, np.ndarray):
        if value.size <= 64:
            return f"np.array({value.tolist()!r}, dtype={str(value.dtype)!r})"
        return f"np.zeros({value.shape!r}, dtype={str(value.dtype)!r})"
    return repr(value)


def _is_usual(field: Any, value: Any) -> bool:
    if field.default is not msgspec.NODEFAULT:
        return bool(snapshot(value) == snapshot(field.default))
    return field.default_factory is not msgspec.NODEFAULT and snapshot(value) == snapshot(field.default_factory())


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
