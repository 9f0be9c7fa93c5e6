"""What the families' bridges share: looking things up, copying them, declaring themselves."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from omni_trio.bridges._contract import Bridge, BridgeContext, BridgeSpec, Reads, RunIn
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput

__all__ = [
    "copied",
    "declared",
    "find",
    "ids_from",
    "mapping",
    "multimodal",
    "one_of",
    "row_count",
    "rows",
    "said_by_user",
    "whole_number",
]

_PLAIN = (str, bytes, int, float, complex, type(None))
_MULTIMODAL = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_INFORMATION = "additional_information"


def declared(function: Bridge, reads: Iterable[Reads], run_in: RunIn) -> BridgeSpec:
    """Say what a callable object is as a bridge: what the decorator does for functions."""
    kind = type(function)
    return BridgeSpec(f"{kind.__module__}:{kind.__qualname__}", function, frozenset(reads), run_in)


def mapping() -> Any:
    """Make a field that holds a mapping of its own, which nobody can change through the one that was given."""
    return attrs.field(factory=dict, converter=dict, hash=False)


def whole_number(minimum: int) -> Callable[[Any, Any, Any], None]:
    """Make a validator of fields that are integers of at least `minimum`."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if type(value) is not int or value < minimum:
            raise ValueError(f"{attribute.name}: expected a whole number of {minimum} or more, not {value!r}")

    return check


def one_of(*values: Any) -> Callable[[Any, Any, Any], None]:
    """Make a validator of fields that are one of `values`."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value not in values:
            raise ValueError(f"{attribute.name}: expected one of {', '.join(map(repr, values))}, not {value!r}")

    return check


def find(data: Mapping[str, Any], key: str) -> Any:
    """Return what is under a dotted key, flat or nested, or None.

    ``hidden_states.layer_24`` is found at ``["hidden_states"]["layers"][24]`` too.
    """
    if (value := data.get(key)) is not None:
        return value
    section, _, name = key.partition(".")
    inside = data.get(section)
    if not name or not isinstance(inside, Mapping):
        return None
    if (value := inside.get(name)) is not None:
        return value
    layers = inside.get("layers")
    if section != "hidden_states" or not isinstance(layers, Mapping):
        return None
    number = name.removeprefix("layer_")
    return layers.get(int(number)) if number.isdecimal() else None


def ids_from(value: Any, what: str) -> list[int]:
    """Return token ids that came as a list, a tuple or an array of one dimension.

    Raises:
        InvalidRequest: they are none.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        try:
            return [operator.index(item) for item in value]
        except TypeError:
            pass
    raise InvalidRequest(f"{what} must be token ids: a list or an array of one dimension, of whole numbers")


def row_count(value: Any, what: str) -> int:
    """Return how many rows an array of shape [rows, width] has.

    Raises:
        InvalidRequest: it is no such array.
    """
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or len(shape) != 2:  # torch's sizes are tuples too
        got = f"shape {list(shape)}" if isinstance(shape, tuple) else type(value).__name__
        raise InvalidRequest(f"{what} must be an array or a tensor of shape [tokens, hidden], not {got}")
    return int(shape[0])


def rows(value: Any, start: int, stop: int, dtype: str | None = None) -> Any:
    """Return a copy of these rows on the CPU, as `dtype` or as they are."""
    part = value[start:stop]
    if _is_tensor(part):
        wanted = part.dtype if dtype is None else getattr(sys.modules["torch"], dtype)
        return part.detach().to(device="cpu", dtype=wanted, copy=True)
    return part.astype(part.dtype if dtype is None else dtype, copy=True)


def copied(value: Any) -> Any:
    """Return a copy that shares no memory with `value`, whatever that is.

    Raises:
        InvalidRequest: something in it can not be copied.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if _is_tensor(value):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidRequest(
            f"an object of type {type(value).__name__} can not be copied ({error}); give arrays, images or plain data"
        ) from error


def multimodal(prompt: StageInput) -> dict[str, Any]:
    """Return copies of the images, sounds and the like that the user gave, by the keys that engines know."""
    return {key: copied(prompt.data[key]) for key in _MULTIMODAL if prompt.data.get(key) is not None}


def said_by_user(context: BridgeContext, keys: Iterable[str]) -> dict[str, Any]:
    """Return what the user said under some keys, in ``additional_information`` or beside it; text as a list of one.

    Omni engines have such values in lists.
    """
    data = context.prompt.data
    inside = data.get(_INFORMATION)
    places = (inside, data) if isinstance(inside, Mapping) else (data,)
    said = {}
    for key in keys:
        value = next((place[key] for place in places if place.get(key) is not None), None)
        if value is not None:
            said[key] = [value] if isinstance(value, str) else copied(value)
    return said


def _is_tensor(value: Any) -> bool:
    # A tensor can only exist where torch has been imported, so it need not be imported here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
