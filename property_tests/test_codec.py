"""Invariant tested: what is encoded decodes to the same; whatever else arrives is a `CodecError`, never worse."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as npst
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_trio.engines.codec import CodecError, decode, encode
from omni_trio.messages import StageInput

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]

arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40))
)
tensors = npst.arrays("int16", npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)).map(
    lambda bits: torch.from_numpy(bits).view(torch.bfloat16)
)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars | arrays | tensors,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(first.view(torch.int16), second.view(torch.int16))
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second or (math.isnan(first) and math.isnan(second))


def sent(frames: list[Any]) -> list[bytearray]:
    """As they come out of a socket: copied, and writable."""
    return [bytearray(frame) for frame in frames]


@given(values)
def test_round_trip(value: Any) -> None:
    assert same(decode(sent(encode(value))), value)


@given(arrays, st.data())
def test_views_of_any_stride_and_byte_order(array: np.ndarray, data: st.DataObject) -> None:
    view = array.T
    if view.ndim:
        view = view[:: data.draw(st.sampled_from([-1, 1, 2]))]
    swapped = view.astype(view.dtype.newbyteorder(">"))
    for one in (view, swapped):
        assert same(decode(sent(encode(one))), np.asarray(view, order="C"))


@given(values, st.data())
def test_damaged_messages_are_codec_errors_or_messages(value: Any, data: st.DataObject) -> None:
    frames = sent(encode(value))
    match data.draw(st.sampled_from(["flip", "cut", "drop", "add", "swap"])):
        case "flip":
            frame = data.draw(st.sampled_from(frames))
            if frame:
                frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            frame = data.draw(st.sampled_from(frames))
            del frame[data.draw(st.integers(0, len(frame))) :]
        case "drop":
            frames.pop(data.draw(st.integers(0, len(frames) - 1)))
        case "add":
            frames.append(bytearray(data.draw(st.binary(max_size=20))))
        case "swap":
            frames.reverse()
    try:
        decode(frames)
    except CodecError:
        pass


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_noise(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except CodecError:
        pass


@given(
    st.sampled_from([*DTYPES, "object", "bfloat16", "V8", "O", ""]),
    st.lists(st.integers(-2, 5) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
    st.integers(-2, 3),
    st.binary(max_size=64),
    st.binary(max_size=64),
)
def test_forged_arrays(dtype: str, shape: list[int], frame: int, inline: bytes, beside: bytes) -> None:
    array = msgspec.msgpack.encode([dtype, shape, frame, inline])
    header = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, array))
    try:
        made = decode([header, beside])
    except CodecError:
        return
    size = made.nbytes if isinstance(made, np.ndarray) else made.numel() * 2
    assert size == len(beside)
    assert frame == 1


@given(st.integers(0, 5000), st.integers(0, 6000))
def test_size_limit_is_for_the_whole_message(length: int, limit: int) -> None:
    frames = encode(np.zeros(length, "uint8"))
    size = sum(map(len, frames))
    for call in (lambda: encode(np.zeros(length, "uint8"), max_bytes=limit), lambda: decode(frames, max_bytes=limit)):
        if size > limit:
            with pytest.raises(CodecError, match=f"{size} bytes is too large: the limit is {limit}"):
                call()
        else:
            call()


@given(st.none() | arrays | tensors, st.dictionaries(st.text(), values, max_size=3))
def test_stage_inputs(embeds: Any, data: dict[str, Any]) -> None:
    given_input = StageInput(embeds=embeds, data=data, token_ids=(1, 2), messages=({"role": "user", "content": []},))
    got = decode(sent(encode(given_input)), type=StageInput)
    assert same(got.embeds, embeds)
    assert same(got.data, data)
    assert (got.token_ids, got.messages, got.text) == ((1, 2), ({"role": "user", "content": []},), None)
