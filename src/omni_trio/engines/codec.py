"""Values between processes without pickle: msgpack, with arrays as raw buffers beside it.

A message is a list of frames. The first is msgpack; every array of some size is a frame of its own, neither
copied on its way in nor on its way out. Whatever arrives is checked before anything is made of it: a message
can be wrong, but it can not run code, and an array is never larger than the bytes that came with it.

What travels: None, booleans, integers of 64 bits, floats, strings, bytes, lists, mappings, numpy arrays of
booleans and numbers, numpy scalars, torch tensors. What arrives differs in this: tuples and sets are lists,
numpy scalars are Python's, torch tensors are numpy arrays on the CPU, except for those of bfloat16, which numpy
does not know and which stay tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, overload

import msgspec
import numpy as np

__all__ = ["BFLOAT16", "MAX_BYTES", "CodecError", "array_from", "as_array", "decode", "encode", "tensor_from"]

MAX_BYTES: Final = 1 << 31
"""Bytes that one message may have, unless told otherwise."""

_INLINE: Final = 1024
"""Bytes up to which an array travels inside the msgpack: cheaper than a frame of its own."""

_ARRAY: Final = 1
"""The msgpack extension code of an array."""

_MAX_DIMENSIONS: Final = 64
"""What numpy and torch can hold; a longer shape is not even multiplied out."""

BFLOAT16: Final = "bfloat16"
"""The one dtype that numpy does not know: its arrays are the bits, as int16."""

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

_T = TypeVar("_T")


class CodecError(ValueError):
    """A value can not travel, or what arrived is no message."""


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array, as it stands in the msgpack."""

    dtype: str
    shape: tuple[int, ...]
    frame: int
    """Index of its frame; 0, the msgpack's own, where `data` has its bytes."""
    data: bytes = b""


def encode(value: Any, *, max_bytes: int = MAX_BYTES) -> list[bytes | memoryview]:
    """Turn a value into frames.

    Args:
        value: anything that travels (see the module), or a `msgspec.Struct` of such.
        max_bytes: how large the message may be in all.

    Returns:
        The msgpack first, then one buffer per large array: views of the arrays, so send them before the arrays
        change.

    Raises:
        CodecError: something in it can not travel, or it is too large.
    """
    buffers: list[memoryview] = []

    def hook(item: Any) -> Any:
        if (found := as_array(item)) is not None:
            return _encode_array(*found, buffers)
        if isinstance(item, np.bool_ | np.integer | np.floating):
            return item.item()
        if isinstance(item, np.generic):
            return hook(np.asarray(item))
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, Sequence):
            return list(item)
        raise CodecError(
            f"an object of type {type(item).__module__}.{type(item).__qualname__} can not travel between processes; "
            "make plain data, numpy arrays or torch tensors of it"
        )

    try:
        header = msgspec.msgpack.encode(value, enc_hook=hook)
    except CodecError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(f"the value can not travel between processes: {error}") from error
    _check_size((header, *buffers), max_bytes)
    return [header, *buffers]


@overload
def decode(frames: Sequence[Any], *, max_bytes: int = ...) -> Any: ...
@overload
def decode(frames: Sequence[Any], *, type: type[_T], max_bytes: int = ...) -> _T: ...


def decode(frames: Sequence[Any], *, type: Any = Any, max_bytes: int = MAX_BYTES) -> Any:  # noqa: A002 - as in msgspec
    """Turn frames back into the value.

    Arrays share the memory of their frames: they can be written to where those can, and keep them alive.

    Args:
        frames: what `encode` made, as bytes or anything with a buffer.
        type: what the value must be, as for `msgspec.msgpack.decode`.
        max_bytes: how large the message may be in all.

    Raises:
        CodecError: the frames are no message, or one that is too large, or not of that type; or it has a tensor
            of bfloat16 and there is no torch here.
    """
    try:
        buffers = [memoryview(frame).cast("B") for frame in frames]
    except (TypeError, ValueError) as error:
        raise CodecError(f"a frame is not a contiguous buffer: {error}") from error
    if not buffers:
        raise CodecError("a message has at least one frame")
    _check_size(buffers, max_bytes)
    unused = set(range(1, len(buffers)))

    def hook(code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise CodecError(f"unknown extension {code} in the message")
        array = msgspec.msgpack.decode(data, type=_Array)
        if array.frame == 0:
            # A copy, so that small arrays can be written to as large ones can.
            return _decode_array(array, memoryview(bytearray(array.data)))
        if array.data or array.frame not in unused:
            raise CodecError(f"an array is in frame {array.frame}, which is not there or another array's")
        unused.remove(array.frame)
        return _decode_array(array, buffers[array.frame])

    try:
        value = msgspec.msgpack.decode(buffers[0], type=type, ext_hook=hook)
    except CodecError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"not a message: {error}") from error
    if unused:
        raise CodecError(f"{len(unused)} frames of the message belong to no array")
    return value


def _check_size(buffers: Sequence[bytes | memoryview], max_bytes: int) -> None:
    size = sum(len(buffer) for buffer in buffers)
    if size > max_bytes:
        raise CodecError(f"a message of {size} bytes is too large: the limit is {max_bytes}")


def _encode_array(array: np.ndarray[Any, Any], dtype: str, buffers: list[memoryview]) -> msgspec.msgpack.Ext:
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    shape = array.shape
    if array.nbytes <= _INLINE:
        described = _Array(dtype, shape, 0, array.tobytes())
    else:
        buffers.append(array.reshape(-1).view(np.uint8).data)
        described = _Array(dtype, shape, len(buffers))
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(described))


def _decode_array(array: _Array, buffer: memoryview) -> Any:
    made = array_from(buffer, array.shape, array.dtype, byteorder="<")
    return tensor_from(made, array.dtype) if array.dtype == BFLOAT16 else made


def as_array(value: Any) -> tuple[np.ndarray[Any, Any], str] | None:
    """Return the numbers of an array or tensor, on the host, and the name of their dtype.

    Args:
        value: anything. A tensor may be on any device and may require gradients.

    Returns:
        A numpy array, of any strides and byte order, that shares the memory of `value` where it can, and the
        dtype's name, such as ``float32``; with bfloat16 the array is of int16. None where `value` is neither a
        numpy array nor a torch tensor.

    Raises:
        CodecError: it is of a dtype or a layout that does not travel.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise CodecError("a masked array can not travel between processes; fill it, or send data and mask apart")
        array, dtype = value, value.dtype.name
        if dtype == BFLOAT16:
            array = array.view(np.int16)
    elif _is_tensor(value):
        array, dtype = _from_tensor(value)
    else:
        return None
    if dtype not in _DTYPES and dtype != BFLOAT16:
        raise CodecError(f"an array of dtype {dtype} can not travel between processes; it takes {', '.join(_DTYPES)}")
    if dtype == "bool" and _has_odd_bytes(array):
        array = array.view(np.uint8) != 0
    return array, dtype


def array_from(
    buffer: memoryview, shape: Sequence[int], dtype: str, *, byteorder: Literal["<", "="]
) -> np.ndarray[Any, Any]:
    """Make an array of bytes that came from elsewhere, having checked that they are one.

    Args:
        buffer: the numbers, row by row; the array shares its memory.
        shape: one length per axis.
        dtype: the name that `as_array` gave; with bfloat16 the array is of int16.
        byteorder: ``<`` for little-endian numbers, ``=`` for this machine's.

    Raises:
        CodecError: the dtype is unknown, the shape impossible, or not that of so many bytes.
    """
    known = np.dtype(np.int16) if dtype == BFLOAT16 else _DTYPES.get(dtype)
    if known is None:
        raise CodecError(f"unknown dtype {dtype!r} in the message")
    if len(shape) > _MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise CodecError(f"a shape of {tuple(shape[:_MAX_DIMENSIONS])} is not possible")
    if math.prod(shape) * known.itemsize != len(buffer):
        raise CodecError(f"an array of {dtype} of shape {tuple(shape)} does not have {len(buffer)} bytes")
    bits = known.newbyteorder(byteorder)
    try:
        array = (np.frombuffer(buffer, bits) if len(buffer) else np.empty(0, bits)).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise CodecError(f"an array of shape {tuple(shape)} can not be made: {error}") from error
    if dtype == "bool" and _has_odd_bytes(array):
        raise CodecError("an array of bool has bytes other than 0 and 1")
    return array


def tensor_from(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """Make a torch tensor of what `array_from` made; it shares the memory, where that can be written to.

    Raises:
        CodecError: torch can not be imported.
    """
    try:
        import torch  # noqa: PLC0415 - only for what needs it
    except ImportError as error:
        raise CodecError(
            f"a tensor of {dtype} has arrived, and torch can not be imported here to hold it; install torch, or have "
            "the sender convert it to a numpy array, bfloat16 with .float() first"
        ) from error
    # Torch has no read-only tensors.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor


def _has_odd_bytes(booleans: np.ndarray[Any, Any]) -> bool:
    # Bytes that are neither false nor true make numpy and torch disagree with themselves later on. They come about by
    # viewing other numbers as booleans.
    return bool((booleans.view(np.uint8) > 1).any())


def _is_tensor(value: Any) -> bool:
    # Where there is a tensor, torch has been imported; nothing else should import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_tensor(tensor: Any) -> tuple[np.ndarray[Any, Any], str]:
    import torch  # noqa: PLC0415 - is there already, since there is a tensor

    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy(), BFLOAT16
        array = plain.numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        raise CodecError(f"a tensor of {tensor.dtype} on {tensor.device} can not travel: {error}") from error
    return array, array.dtype.name
