"""What a bridge promises, checked: for any bridge and any contexts of one request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from omni_trio.bridges import Bridge, BridgeContext, ExpandContext, resolve_bridge
from omni_trio.engines.additional_information import serialize
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput

__all__ = ["check_bridge", "check_expand", "context", "snapshot"]

_UNREAD: Mapping[str, Any] = {"text": "", "data": {}}


def context(**fields: Any) -> BridgeContext:
    """Make a context of a plain request whose source has ended, unless told otherwise."""
    usual = {
        "request_id": "r",
        "prompt": StageInput(text="hello"),
        "source": "thinker",
        "stage": "talker",
        "token_ids": (),
        "text": "",
        "data": {},
        "finished": True,
        "finish_reason": "stop" if fields.get("finished", True) else None,
    }
    return BridgeContext(**{**usual, **fields})


def check_bridge(
    bridge: Bridge | str, contexts: Sequence[BridgeContext], *, travels: bool = True
) -> list[StageInput | None]:
    """Run a bridge over the contexts of one request, in order, and check what every bridge promises.

    It raises nothing but `InvalidRequest`, returns an input or None, changes nothing that it is given, shares no memory
    with it, needs only what it says it reads, and does the same again. Its `state` is made here.

    Args:
        bridge: a function, or the name of one.
        contexts: as the runtime would give them, one per call.
        travels: whether ``additional_information`` must be what omni engines can exchange: not where a context has
            what they could not.

    Returns:
        What it made, call by call.

    Raises:
        AssertionError: it breaks a promise.
        InvalidRequest: it refused a context, and broke no promise.
    """
    spec = resolve_bridge(bridge)
    made, refusal = _run(spec.function, contexts)
    unread = {name: value for name, value in _UNREAD.items() if name not in spec.reads}
    for what, given in (
        ("the same contexts", contexts),
        (f"nothing but {sorted(spec.reads)}", [_without(one, unread) for one in contexts]),
    ):
        again, refusal_again = _run(spec.function, given)
        assert snapshot(again) == snapshot(made), f"given {what}, it made something else"
        assert str(refusal_again) == str(refusal), f"given {what}, it said something else"
    if refusal is not None:
        raise refusal
    for item in (item for one in made if one is not None for item in (one, *(one.batch or ()))):
        if travels:
            serialize(item.data.get("additional_information"))  # raises where it could not
    return made


def check_expand(expand: Callable[[ExpandContext], Any], given: ExpandContext) -> list[Any]:
    """As `check_bridge`, for a function that makes companions: their roles differ, too."""
    before = snapshot(given)
    companions, again = list(expand(given)), list(expand(given))
    assert snapshot(given) == before, "it changed what it was given"
    assert snapshot(companions) == snapshot(again), "it made something else the second time"
    _assert_own_memory(given, *companions)
    _assert_own_memory(companions, *again)
    assert len({one.role for one in companions}) == len(companions)
    for one in companions:
        _assert_input(one.input)
    return companions


def snapshot(value: Any) -> Any:
    """Return what can be compared with what a value is later: numbers of arrays with their dtype and shape."""
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, *(snapshot(getattr(value, name)) for name in value.__struct_fields__))
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(snapshot, value))
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if _is_tensor(value):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    return value


def _run(function: Bridge, contexts: Sequence[BridgeContext]) -> tuple[list[StageInput | None], InvalidRequest | None]:
    state: dict[str, Any] = {}
    made: list[StageInput | None] = []
    for one in contexts:
        given = msgspec.structs.replace(one, state=state)
        before = snapshot(one)
        try:
            result = function(given)
        except InvalidRequest as refusal:
            assert snapshot(one) == before, "it changed what it was given"
            return made, refusal
        except Exception as error:
            raise AssertionError(f"it raised {type(error).__name__}: {error}") from error
        assert snapshot(one) == before, "it changed what it was given"
        assert result is None or isinstance(result, StageInput), f"it returned {type(result).__name__}"
        if result is not None:
            _assert_input(result)
            _assert_own_memory(one, result)
            _assert_own_memory([earlier for earlier in made if earlier is not None], result)
            for index, item in enumerate(result.batch or ()):
                _assert_own_memory(result.batch[:index], item)
        made.append(result)
    return made, None


def _without(one: BridgeContext, unread: Mapping[str, Any]) -> BridgeContext:
    companions = {role: msgspec.structs.replace(output, **unread) for role, output in one.companions.items()}
    return msgspec.structs.replace(one, companions=companions, **unread)


def _assert_input(made: StageInput) -> None:
    for one in (made, *(made.batch or ())):
        assert one.token_ids is None or all(type(token) is int for token in one.token_ids)
        assert one.text is None or type(one.text) is str


def _assert_own_memory(given: Any, *made: Any) -> None:
    theirs = {id(part): part for part in _mutable(given)}
    arrays = [part for part in theirs.values() if not isinstance(part, list | dict)]
    for ours in (part for one in made for part in _mutable(one)):
        assert id(ours) not in theirs, f"it handed on a {type(ours).__name__} that is not its own"
        for array in arrays:
            assert not _overlap(ours, array), "it handed on an array whose memory is not its own"


def _mutable(value: Any) -> Iterator[Any]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in ("state", "params") and not (name == "data" and not getattr(value, name)):
                yield from _mutable(getattr(value, name))
    elif isinstance(value, Mapping):
        if value:  # the empty one is the default, which all inputs share
            yield value
        for item in value.values():
            yield from _mutable(item)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        for item in value:
            if not isinstance(item, int | str):
                yield from _mutable(item)
    elif isinstance(value, np.ndarray) or _is_tensor(value):
        yield value


def _overlap(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    if _is_tensor(one) and _is_tensor(other):
        return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return False


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
