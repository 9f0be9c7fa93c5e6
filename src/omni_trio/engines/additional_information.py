"""What an omni request carries beside its prompt, in the form in which omni engines exchange it.

`serialize` makes a `Payload` of nested data, `deserialize` makes nested data of a `Payload`; `encode` and `decode`
are for those who need the payload's bytes by themselves. Encoded with `msgspec.msgpack`, a payload is plain maps::

    {"entries": {"codes.audio": {"tensor_data": ..., "tensor_shape": [2, 4], "tensor_dtype": "int64"},
                 "ids.prompt": {"list_data": [1, 2]},
                 "meta.finished": {"scalar_data": True}}}

The sections `hidden_states`, `embed`, `ids`, `codes` and `meta` are flattened to dotted keys, and
``hidden_states["layers"][n]`` to ``hidden_states.layer_n``; everything else stays at the top. Numbers are in the
byte order of the machine, which is how the format has it: both ends must have the same.

There is no pickle in it: whatever arrives is checked before anything is made of it, and what can not travel, or would
come back as something else, is refused by name. Nothing that goes out or comes back shares memory with what was
given, so either side can go on changing its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from omni_trio.engines.codec import BFLOAT16, MAX_BYTES, CodecError, array_from, as_array, tensor_from

__all__ = ["DTYPES", "SECTIONS", "Arrays", "Entry", "Payload", "decode", "deserialize", "encode", "serialize"]

SECTIONS: Final = frozenset({"hidden_states", "embed", "ids", "codes", "meta"})
"""The top-level keys whose mappings are flattened."""

DTYPES: Final = frozenset(
    {"float32", "float16", BFLOAT16, "float64", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
"""What arrays and tensors may be made of."""

Arrays: TypeAlias = Literal["torch", "numpy"]
"""What arrays come back as: torch tensors on the CPU, or numpy arrays."""

_DTYPE_NAMES: Final = ", ".join(sorted(DTYPES))
_HIDDEN_STATES: Final = "hidden_states"
_LAYERS: Final = "layers"
_LAYER: Final = "layer_"
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")  # of 64 bits

_MAX_DEPTH: Final = 64
"""How deep lists and mappings may be nested: far from where Python or msgpack give up."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value of a payload, in exactly one of three forms; the other fields are None and do not travel.

    Attributes:
        tensor_data: numbers of an array, row by row, in the machine's byte order.
        tensor_shape: its lengths, one per axis; none at all for a single number.
        tensor_dtype: one of `DTYPES`.
        list_data: a list of plain values.
        scalar_data: any other plain value: boolean, number, string, bytes, or a mapping of such.
    """

    tensor_data: bytes | None = None
    tensor_shape: tuple[int, ...] | None = None
    tensor_dtype: str | None = None
    list_data: list[Any] | None = None
    scalar_data: Any = None


class Payload(msgspec.Struct, frozen=True):
    """A request's additional information as it travels.

    Attributes:
        entries: the values by their flattened key.
    """

    entries: dict[str, Entry]


def serialize(info: Mapping[str, Any] | Payload | None, *, max_bytes: int = MAX_BYTES) -> Payload | None:
    """Make a payload of nested data.

    Arrays of numpy and torch become tensors, from any device; lists and tuples become lists; numpy scalars and
    subclasses of Python's plain types become those types. None is left out, and so are sections that are empty.

    Args:
        info: the data. A payload is returned as it is.
        max_bytes: what the arrays may have in all.

    Returns:
        The payload, or None where there is nothing to send. It shares no memory with `info`.

    Raises:
        CodecError: something can not travel, or would come back under another key; the text says where it is.
    """
    if info is None or isinstance(info, Payload):
        return info
    if not isinstance(info, Mapping):
        raise CodecError(f"additional_information is a mapping, a Payload or None, not {_name(info)}")
    entries: dict[str, Entry] = {}
    left = max_bytes
    for key, where, value in _flat(info):
        entry = _entry(value, where, left)
        left -= len(entry.tensor_data or b"")
        entries[key] = entry
    return Payload(entries) if entries else None


def deserialize(
    payload: Payload | Mapping[str, Any] | None, *, arrays: Arrays | None = None, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Make nested data of a payload.

    Args:
        payload: what `serialize` or another omni engine made. A dict is taken to be such data already and returned
            as it is, any other mapping as a dict of the same values; None gives an empty dict.
        arrays: what tensors come back as. Unless told, that is torch where torch has been imported, else numpy.
        max_bytes: what the arrays may have in all.

    Returns:
        The data. Arrays can be written to. They and all else in it are new: two calls share nothing.

    Raises:
        CodecError: an entry is not what it must be, two of them want the same place, or `arrays` can not hold one of
            them: numpy has no bfloat16.
    """
    if arrays not in (None, "torch", "numpy"):
        raise ValueError(f"arrays is 'torch' or 'numpy', not {arrays!r}")
    if payload is None:
        return {}
    if isinstance(payload, Mapping):
        return payload if isinstance(payload, dict) else dict(payload)
    if not isinstance(payload, Payload):
        raise CodecError(f"additional_information arrives as a Payload, a mapping or None, not as {_name(payload)}")
    kind: Arrays = arrays or ("numpy" if sys.modules.get("torch") is None else "torch")
    flat: dict[str, Any] = {}
    left = max_bytes
    for key, entry in payload.entries.items():
        flat[key], size = _value(key, entry, kind, left)
        left -= size
    return _nested(flat)


def encode(payload: Payload) -> bytes:
    """Return the payload as msgpack.

    Raises:
        CodecError: it has something that msgpack has not; what `serialize` makes never does.
    """
    try:
        return msgspec.msgpack.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(f"the payload can not travel: {error}") from error


def decode(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES) -> Payload:
    """Return the payload that is in these bytes; what its entries say is checked by `deserialize`.

    Raises:
        CodecError: they are no payload, or more than `max_bytes`.
    """
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise CodecError(f"a payload of {size} bytes is too large: the limit is {max_bytes}")
    try:
        return msgspec.msgpack.decode(data, type=Payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, BufferError) as error:
        raise CodecError(f"not a payload: {error}") from error


def _flat(info: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Give, of all that is to be sent, the flattened key, where it is, and the value."""
    for given, value in info.items():
        key, where = _key(given)
        if "." in key:
            raise CodecError(f"{where}: a dot in a key means nesting to whoever receives it; nest the value instead")
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _flat_section(key, value)
        elif value is not None:
            yield key, where, value


def _flat_section(section: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    for given, value in values.items():
        name, where = _key(section, given)
        if section == _HIDDEN_STATES and name.startswith(_LAYER):
            raise CodecError(f"{where}: keys that begin with {_LAYER!r} stand for layers; put it into {_LAYERS!r}")
        if section == _HIDDEN_STATES and name == _LAYERS and isinstance(value, Mapping):
            for number, layer in value.items():
                at_layer = _at(where, number)
                plain = _plain(number, at_layer)
                if type(plain) is not int or not _NUMBER.fullmatch(str(plain)):
                    raise CodecError(f"{at_layer}: the key of a layer is an integer of up to 18 digits")
                if layer is not None:
                    yield f"{section}.{_LAYER}{plain}", at_layer, layer
        elif value is not None:
            yield f"{section}.{name}", where, value


def _key(*path: Any) -> tuple[str, str]:
    """Return the last of these keys, which must be a string, and where it is."""
    where = _at("additional_information", *path)
    if not isinstance(path[-1], str):
        raise CodecError(f"{where}: a key here is a string, not of type {_name(path[-1])}")
    return str(_plain(path[-1], where)), where


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest what is flat, at the first dot of each key; no value ever takes another one's place."""
    top: dict[Any, Any] = {}
    groups: dict[tuple[str, ...], dict[Any, Any]] = {(): top}

    def put(path: tuple[Any, ...], value: Any, key: str) -> None:
        above, last = path[:-1], path[-1]
        if above not in groups:
            groups[above] = {}
            put(above, groups[above], key)
        if last in groups[above]:
            raise CodecError(f"entry {key!r:.80} has the place of another entry")
        groups[above][last] = value

    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if not dot:
            put((key,), value, key)
        elif section == _HIDDEN_STATES and name.startswith(_LAYER):
            number = name.removeprefix(_LAYER)
            if not _NUMBER.fullmatch(number):
                raise CodecError(f"entry {key!r:.80} does not say the number of its layer")
            put((section, _LAYERS, int(number)), value, key)
        else:
            put((section, name), value, key)
    return top


def _entry(value: Any, where: str, max_bytes: int) -> Entry:
    try:
        found = as_array(value)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from error
    if found is None:
        plain = _plain(value, where)
        return Entry(list_data=plain) if isinstance(plain, list) else Entry(scalar_data=plain)
    array, dtype = found
    if dtype not in DTYPES:
        raise CodecError(f"{where}: an array of dtype {dtype} can not travel here; it takes {_DTYPE_NAMES}")
    if array.nbytes > max_bytes:
        raise CodecError(f"{where}: its {array.nbytes} bytes are too many; the payload has room for {max_bytes} more")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return Entry(tensor_data=native.tobytes(), tensor_shape=array.shape, tensor_dtype=dtype)


# A payload that was built by hand, unlike a decoded one, can have anything in it.
def _value(key: Any, entry: Any, kind: Arrays, max_bytes: int) -> tuple[Any, int]:
    """Return an entry's value, and how many bytes of array it has."""
    where = f"entry {key!r:.80}"
    if not isinstance(key, str) or not isinstance(entry, Entry):
        raise CodecError(f"{where}: an entry has a string as its key, and is an Entry")
    tensor: tuple[Any, Any, Any] = (entry.tensor_data, entry.tensor_shape, entry.tensor_dtype)
    forms = (any(part is not None for part in tensor), entry.list_data is not None, entry.scalar_data is not None)
    if sum(forms) != 1:
        raise CodecError(f"{where} must be exactly one of tensor, list and scalar, and is {sum(forms)} of them")
    if not forms[0]:
        return _plain(entry.scalar_data if forms[2] else entry.list_data, where), 0
    data, shape, dtype = tensor
    whole = isinstance(data, bytes | bytearray) and isinstance(shape, tuple | list) and isinstance(dtype, str)
    if not whole or not all(type(length) is int for length in shape):
        raise CodecError(f"{where}: a tensor has bytes as tensor_data, integers as tensor_shape, and a tensor_dtype")
    if dtype not in DTYPES:
        raise CodecError(f"{where}: unknown dtype {dtype!r:.80}; it takes {_DTYPE_NAMES}")
    if dtype == BFLOAT16 and kind == "numpy":
        raise CodecError(f"{where} is of bfloat16, which numpy does not have; ask for arrays='torch'")
    if len(data) > max_bytes:
        raise CodecError(f"{where}: its {len(data)} bytes are too many; the payload has room for {max_bytes} more")
    try:
        array = array_from(memoryview(bytearray(data)), shape, dtype, byteorder="=")
        return tensor_from(array, dtype) if kind == "torch" else array, len(data)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from error


def _plain(value: Any, where: str) -> Any:
    """Return a copy made of Python's plain types alone."""
    try:
        return _copy(value, 0)
    except CodecError as error:
        raise CodecError(f"{where}{error}") from None


# What it raises begins with where it is, put together on the way out: lists of tokens are long, refusals are rare.
def _copy(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise CodecError(": an integer of more than 64 bits can not travel; send it as a string")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f": a string that is not Unicode can not travel: {error}") from None
        # Unlike str(), this gives the value of an enumeration's member.
        return str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, list | tuple | Mapping):
        raise CodecError(
            f": an object of type {_name(value)} can not travel here; what travels is plain data, and arrays and "
            "tensors under keys of their own"
        )
    if depth == _MAX_DEPTH:
        raise CodecError(f": lists and mappings can be nested {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return dict(zip(map(_copy_key, value), _copy_all(value.items(), depth + 1), strict=True))
    return _copy_all(enumerate(value), depth + 1)


def _copy_key(key: Any) -> Any:
    if isinstance(key, tuple | Mapping):
        raise CodecError(f": the key {key!r:.80} can not travel; make a string of it")
    return _copy(key, _MAX_DEPTH)


def _copy_all(items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
    copies = []
    for step, item in items:
        try:
            copies.append(_copy(item, depth))
        except CodecError as error:
            raise CodecError(f"[{step!r:.80}]{error}") from None
    return copies


def _at(root: str, *path: Any) -> str:
    return root + "".join(f"[{step!r:.80}]" for step in path)


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
