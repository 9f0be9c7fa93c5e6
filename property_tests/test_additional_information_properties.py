"""What is serialised comes back the same, and alone; whatever else arrives is a `CodecError`, never worse."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis.extra.numpy as npst
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_trio.engines.additional_information import (
    DTYPES,
    SECTIONS,
    Entry,
    Payload,
    decode,
    deserialize,
    encode,
    serialize,
)
from omni_trio.engines.codec import CodecError

NUMPY_DTYPES = sorted(DTYPES - {"bfloat16"})

shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(lambda dtype: npst.arrays(dtype, shapes))
bfloat16s = npst.arrays("int16", shapes).map(lambda bits: torch.from_numpy(bits).view(torch.bfloat16))
tensors = arrays.map(torch.from_numpy) | bfloat16s

scalars = st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
plain = st.recursive(
    st.none() | scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4),
    max_leaves=10,
)
# A None of its own and an empty section are what does not come back.
values = plain.filter(lambda value: value is not None)
names = st.text(max_size=6)


def tops(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Nested data whose arrays are `leaves`."""
    leaves = leaves | values
    inner = st.dictionaries(names, leaves, min_size=1, max_size=3)
    numbered = st.dictionaries(st.integers(-(10**17), 10**18 - 1), leaves, min_size=1, max_size=3)
    states = st.fixed_dictionaries(
        {}, optional={"layers": numbered, "last": leaves, "of.all": leaves, "layer": leaves}
    ).filter(bool)
    optional = {section: inner | leaves.filter(lambda value: not isinstance(value, dict)) for section in SECTIONS}
    known = st.fixed_dictionaries({}, optional={**optional, "hidden_states": states})
    others = st.dictionaries(names.filter(lambda name: "." not in name and name not in SECTIONS), leaves, max_size=3)
    return st.builds(lambda first, second: first | second, known, others)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    # Bit for bit: NaN is not equal to itself.
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(same_size).numpy().tobytes()


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype and first.shape == second.shape and tensor_bytes(first) == tensor_bytes(second)
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        keys = {key: key for key in second}
        found = all(math.isnan(key) if key != key else same(key, keys.get(key)) for key in first)  # noqa: PLR0124
        return found and len(first) == len(second) and all(same(first[k], second[k]) for k in first if k in second)
    return first == second or (first != first and second != second)  # noqa: PLR0124


def sent(info: Any, **options: Any) -> dict[str, Any]:
    """As it arrives at another process."""
    payload = serialize(info)
    return deserialize(None if payload is None else decode(encode(payload)), **options)


@given(tops(tensors))
def test_round_trip_as_tensors(info: dict[str, Any]) -> None:
    assert same(sent(info, arrays="torch"), info)
    assert same(deserialize(serialize(info), arrays="torch"), info)


@given(tops(arrays))
def test_round_trip_as_numpy(info: dict[str, Any]) -> None:
    assert same(sent(info, arrays="numpy"), info)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@given(data=st.data())
def test_every_dtype_in_every_shape_and_stride(dtype: str, data: st.DataObject) -> None:
    bits = data.draw(npst.arrays("int16" if dtype == "bfloat16" else dtype, shapes))
    tensor = torch.from_numpy(bits)
    if dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    if tensor.ndim:
        tensor = tensor.permute(*reversed(range(tensor.ndim)))[:: data.draw(st.integers(1, 3))]
    if tensor.is_floating_point() and data.draw(st.booleans()):
        tensor = tensor.requires_grad_()
    payload = serialize({"x": tensor})
    assert payload is not None
    entry = payload.entries["x"]
    assert (entry.tensor_shape, entry.tensor_dtype) == (tuple(tensor.shape), dtype)
    assert len(entry.tensor_data or b"") == tensor.numel() * tensor.element_size()
    assert same(sent({"x": tensor}, arrays="torch")["x"], tensor.detach())


@given(arrays)
def test_numpy_views_of_any_stride_and_byte_order_become_tensors_as_well(array: np.ndarray) -> None:
    view = array.T[::-1] if array.ndim else array
    swapped = view.astype(view.dtype.newbyteorder(">"))
    for one in (view, swapped):
        assert same(sent({"x": one}, arrays="torch")["x"], torch.from_numpy(np.array(view, order="C")))


@given(tops(arrays))
def test_what_goes_out_shares_nothing_with_what_was_given(info: dict[str, Any]) -> None:
    before = copy.deepcopy(info)
    payload = serialize(info)
    spoil(info)
    first = deserialize(payload, arrays="numpy")
    assert same(first, before)
    spoil(first)
    assert same(deserialize(payload, arrays="numpy"), before)


def spoil(value: Any) -> None:
    """Change everything in it that can be changed."""
    if isinstance(value, np.ndarray):
        value[...] = np.where(value == 0, 1, 0)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list):
        for item in value:
            spoil(item)
        value.append("spoilt")


shape_numbers = st.integers(-2, 5) | st.integers(-(1 << 63), (1 << 63) - 1)
wire = st.recursive(
    st.none() | scalars | st.just(msgspec.msgpack.Ext(5, b"x")) | st.datetimes(timezones=st.timezones()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4),
    max_leaves=8,
)
wire_keys = st.builds("".join, st.lists(st.sampled_from([".", "layer_", "layers", "1", "01", "-", "x", *SECTIONS])))
forged_entries = st.fixed_dictionaries(
    {},
    optional={
        "tensor_data": st.binary(max_size=64) | wire,
        "tensor_shape": st.lists(shape_numbers, max_size=4) | st.just([0] * 70) | wire,
        "tensor_dtype": st.sampled_from([*DTYPES, "float8", "object", "uint16", ""]) | wire,
        "list_data": wire,
        "scalar_data": wire,
        "else": wire,
    },
)
forged = st.fixed_dictionaries({"entries": st.dictionaries(wire_keys, forged_entries, max_size=3)}) | wire


def received(data: bytes) -> None:
    for kind in ("torch", "numpy"):
        try:
            got = deserialize(decode(data), arrays=kind)
        except CodecError:
            continue
        assert type(got) is dict


@given(st.binary(max_size=80))
def test_noise(data: bytes) -> None:
    received(data)


@given(forged)
def test_forged_payloads(payload: Any) -> None:
    received(msgspec.msgpack.encode(payload))


@given(st.sampled_from(sorted(DTYPES)), st.lists(shape_numbers, max_size=4), st.binary(max_size=64))
def test_forged_tensors_have_the_bytes_that_they_say_or_are_refused(dtype: str, shape: list[int], data: bytes) -> None:
    entry = {"tensor_data": data, "tensor_shape": shape, "tensor_dtype": dtype}
    try:
        got = deserialize(decode(msgspec.msgpack.encode({"entries": {"x": entry}})), arrays="torch")
    except CodecError:
        return
    assert list(got["x"].shape) == shape
    assert got["x"].numel() * got["x"].element_size() == len(data)


@given(tops(tensors), st.data())
def test_damaged_payloads(info: dict[str, Any], data: st.DataObject) -> None:
    payload = serialize(info)
    damaged = bytearray(b"\x80" if payload is None else encode(payload))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    received(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    received(bytes(damaged))


anything = plain | arrays | tensors | st.sampled_from([object(), {1, 2}, 1 << 70, "\ud800", (1, 2), 1j, Entry()])


@given(st.dictionaries(names | st.integers() | st.none(), anything | st.dictionaries(names | st.integers(), anything)))
def test_whatever_is_given_is_sent_or_refused(info: dict[Any, Any]) -> None:
    try:
        payload = serialize(info)
    except CodecError as error:
        assert str(error).startswith("additional_information[")  # noqa: PT017 - not each of them raises
        return
    if payload is not None:
        deserialize(decode(encode(payload)), arrays="torch")


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Entry.__struct_fields__, anything)), anything)
def test_payloads_built_by_hand_are_checked_as_well(fields: dict[str, Any], key: Any) -> None:
    try:
        entries = {key: Entry(**fields)}
    except TypeError:
        return
    try:
        deserialize(Payload(entries), arrays="torch")
    except CodecError:
        pass
