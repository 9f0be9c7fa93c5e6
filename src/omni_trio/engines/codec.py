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
from typing import Any, Final, TypeVar, overload

import msgspec
import numpy as np

__all__ = ["MAX_BYTES", "CodecError", "decode", "encode"]

MAX_BYTES: Final = 1 << 31
"""Bytes that one message may have, unless told otherwise."""

_INLINE: Final = 1024
"""Bytes up to which an array travels inside the msgpack: cheaper than a frame of its own."""

_ARRAY: Final = 1
"""The msgpack extension code of an array."""

_BFLOAT16: Final = "bfloat16"

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<")
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
        if isinstance(item, np.ndarray):
            return _encode_array(item, item.dtype.name, buffers)
        if isinstance(item, np.bool_ | np.integer | np.floating):
            return item.item()
        if isinstance(item, np.generic):
            return hook(np.asarray(item))
        if isinstance(item, Mapping):
            return dict(item)
        if _is_tensor(item):
            return _encode_array(*_from_tensor(item), buffers)
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
    if isinstance(array, np.ma.MaskedArray):
        raise CodecError("a masked array can not travel between processes; fill it, or send data and mask apart")
    if dtype not in _DTYPES and dtype != _BFLOAT16:
        raise CodecError(
            f"an array of dtype {array.dtype} can not travel between processes; it takes {', '.join(_DTYPES)}"
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    array = np.asarray(array, order="C")
    shape = array.shape
    if array.nbytes <= _INLINE:
        described = _Array(dtype, shape, 0, array.tobytes())
    else:
        buffers.append(array.reshape(-1).view(np.uint8).data)
        described = _Array(dtype, shape, len(buffers))
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(described))


def _decode_array(array: _Array, buffer: memoryview) -> Any:
    bits = np.dtype("<i2") if array.dtype == _BFLOAT16 else _DTYPES.get(array.dtype)
    if bits is None:
        raise CodecError(f"unknown dtype {array.dtype!r} in the message")
    if any(length < 0 for length in array.shape):
        raise CodecError(f"a shape of {array.shape} is not possible")
    if math.prod(array.shape) * bits.itemsize != len(buffer):
        raise CodecError(f"an array of {array.dtype} of shape {array.shape} does not have {len(buffer)} bytes")
    try:
        flat = np.frombuffer(buffer, bits) if len(buffer) else np.empty(0, bits)
        shaped = flat.reshape(array.shape)
    except (ValueError, OverflowError) as error:
        raise CodecError(f"an array of shape {array.shape} can not be made: {error}") from error
    return _to_bfloat16(shaped) if array.dtype == _BFLOAT16 else shaped


def _is_tensor(value: Any) -> bool:
    # Where there is a tensor, torch has been imported; nothing else should import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_tensor(tensor: Any) -> tuple[np.ndarray[Any, Any], str]:
    import torch  # noqa: PLC0415 - is there already, since there is a tensor

    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy(), _BFLOAT16
        array = plain.numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise CodecError(f"a tensor of {tensor.dtype} on {tensor.device} can not travel: {error}") from error
    return array, array.dtype.name


def _to_bfloat16(bits: np.ndarray[Any, Any]) -> Any:
    try:
        import torch  # noqa: PLC0415 - only for what needs it
    except ImportError as error:
        raise CodecError(
            "a bfloat16 tensor has arrived, and torch can not be imported here to hold it; install torch, or have "
            "the sender convert it, with .float() for one"
        ) from error
    if not bits.flags.writeable:
        # Torch has no read-only tensors.
        bits = bits.copy()
    return torch.from_numpy(bits).view(torch.bfloat16)
