from __future__ import annotations

import enum
import subprocess
import sys
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from omni_trio.engines.additional_information import (
    DTYPES,
    Entry,
    Payload,
    decode,
    deserialize,
    encode,
    serialize,
)
from omni_trio.engines.codec import CodecError


def maps(info):
    """What is on the wire, as somebody without our types reads it."""
    return msgspec.msgpack.decode(encode(serialize(info)))


def from_maps(entries, **options):
    return deserialize(decode(msgspec.msgpack.encode({"entries": entries})), **options)


# --------------------------------------------------------------------------------------------------------------
# On the wire


def test_the_wire_is_plain_maps_with_the_fields_of_the_format_and_no_others():
    info = {
        "codes": {"audio": np.array([[1, 2], [3, 4]], "int32")},
        "ids": {"prompt": [1, 2]},
        "meta": {"finished": True},
        "global_request_id": ["r-1"],
        "omni_final_stage_id": 2,
    }
    numbers = np.array([1, 2, 3, 4], "=i4").tobytes()
    assert maps(info) == {
        "entries": {
            "codes.audio": {"tensor_data": numbers, "tensor_shape": [2, 2], "tensor_dtype": "int32"},
            "ids.prompt": {"list_data": [1, 2]},
            "meta.finished": {"scalar_data": True},
            "global_request_id": {"list_data": ["r-1"]},
            "omni_final_stage_id": {"scalar_data": 2},
        }
    }


def test_layers_get_a_key_each_and_their_number_back():
    layers = {0: [0], 24: [24], -1: [1], np.int64(3): [3]}
    info = {"hidden_states": {"layers": layers, "last": [9]}}
    keys = ["layer_0", "layer_24", "layer_-1", "layer_3", "last"]
    assert list(maps(info)["entries"]) == [f"hidden_states.{key}" for key in keys]
    assert deserialize(serialize(info)) == info


def test_layers_that_are_no_mapping_and_layers_of_other_sections_are_values():
    info = {"hidden_states": {"layers": [1, 2]}, "embed": {"layers": {"1": 2}, "layer_1": 3}}
    assert set(maps(info)["entries"]) == {"hidden_states.layers", "embed.layers", "embed.layer_1"}
    assert deserialize(serialize(info)) == info


def test_only_the_sections_are_flattened_and_only_if_they_are_mappings():
    info = {"codes": [1], "meta": "x", "other": {"a": {"b": [1, None]}}}
    assert maps(info)["entries"] == {
        "codes": {"list_data": [1]},
        "meta": {"scalar_data": "x"},
        "other": {"scalar_data": {"a": {"b": [1, None]}}},
    }
    assert deserialize(serialize(info)) == info


def test_nothing_gives_nothing():
    for nothing in (None, {}, {"a": None}, {"meta": {}}, {"hidden_states": {"layers": {1: None}}, "codes": {}}):
        assert serialize(nothing) is None
    assert deserialize(None) == {}


@pytest.mark.parametrize("value", [False, 0, 0.0, "", b"", [], {}])
def test_what_is_false_is_kept_and_none_is_not(value):
    got = deserialize(decode(encode(serialize({"a": value, "meta": {"b": value, "c": None}, "d": None}))))
    assert got == {"a": value, "meta": {"b": value}}
    assert type(got["a"]) is type(value)


def test_a_payload_is_not_serialised_again_and_a_dict_not_deserialised():
    payload = serialize({"a": 1})
    assert serialize(payload) is payload
    info = {"codes.audio": 1}
    assert deserialize(info) is info
    assert deserialize(MappingProxyType(info)) == info


def test_other_mappings_are_taken_as_well():
    info = MappingProxyType({"codes": MappingProxyType({"a": 1}), "x": MappingProxyType({"y": 2})})
    assert deserialize(serialize(info)) == {"codes": {"a": 1}, "x": {"y": 2}}


def test_senders_that_spell_out_what_is_absent_or_know_more_fields_are_understood():
    absent = dict.fromkeys(Entry.__struct_fields__)
    assert from_maps({"a": {**absent, "list_data": [1]}, "meta.b": {**absent, "scalar_data": 0, "new": 1}}) == {
        "a": [1],
        "meta": {"b": 0},
    }


def test_any_key_is_nested_at_its_first_dot():
    entries = {"a.b.c": {"scalar_data": 1}, "a.d": {"scalar_data": 2}, ".": {"scalar_data": 3}}
    assert from_maps(entries) == {"a": {"b.c": 1, "d": 2}, "": {"": 3}}
    assert deserialize(serialize({"codes": {"b.c": 1}})) == {"codes": {"b.c": 1}}


# --------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3,), (2, 3, 4)])
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype, shape):
    tensor = torch.arange(24)[: int(np.prod(shape))].reshape(shape).to(getattr(torch, dtype))
    got = deserialize(decode(encode(serialize({"x": tensor}))), arrays="torch")["x"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(got, tensor)
    if dtype == "bfloat16":
        with pytest.raises(CodecError, match=r"entry 'x' is of bfloat16.*arrays='torch'"):
            deserialize(serialize({"x": tensor}), arrays="numpy")
    else:
        array = deserialize(serialize({"x": tensor}), arrays="numpy")["x"]
        assert (array.dtype.name, array.shape) == (dtype, tuple(shape))
        assert np.array_equal(array, tensor.numpy())


def test_bfloat16_keeps_its_odd_bits():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    got = deserialize(decode(encode(serialize({"x": bits.view(torch.bfloat16)}))), arrays="torch")["x"]
    assert torch.equal(got.view(torch.int16), bits)


def test_tensors_that_are_not_laid_out_plainly():
    base = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (base.mT, base[:, ::2], base[:0], base[0, 0, 0].expand(3, 3), base.clone().requires_grad_()):
        assert torch.equal(deserialize(serialize({"x": tensor}), arrays="torch")["x"], tensor.detach())
    weight = torch.nn.Parameter(torch.ones(2))
    assert not deserialize(serialize({"x": weight}), arrays="torch")["x"].requires_grad
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert imaginary.is_neg()
    assert deserialize(serialize({"x": imaginary}), arrays="torch")["x"].tolist() == [-2.0]


def test_numpy_arrays_travel_as_tensors_in_the_order_of_the_machine():
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    entry = serialize({"x": array}).entries["x"]
    assert (entry.tensor_data, entry.tensor_shape, entry.tensor_dtype) == (
        array.astype("=i4").tobytes(),
        (2, 3),
        "int32",
    )


def test_booleans_that_were_other_numbers_once_are_sent_as_booleans():
    numbers = np.array([0, 1, 2, 255], "uint8")
    for odd in (numbers.view("bool"), torch.from_numpy(numbers).view(torch.bool)):
        entry = serialize({"x": odd}).entries["x"]
        assert entry.tensor_data == b"\0\1\1\1"
    assert numbers[2] == 2


def test_decoded_arrays_can_be_written_to_and_are_nobody_elses():
    given = np.zeros(3)
    inner = [1]
    payload = serialize({"x": given, "y": {"z": inner}})
    given[:] = 1
    inner.append(2)
    first = deserialize(payload, arrays="numpy")
    first["x"][:] = 2
    first["y"]["z"].append(3)
    assert deserialize(payload, arrays="torch")["x"].add_(1).tolist() == [1, 1, 1]
    assert deserialize(payload, arrays="numpy")["y"] == {"z": [1]}


class Colour(enum.StrEnum):
    RED = "red"


def test_values_come_back_as_plain_ones():
    info = {
        "tuple": (1, (2, 3)),
        "half": np.float16(0.5),
        "yes": np.True_,
        "colour": Colour.RED,
        "bytes": bytearray(b"x"),
        "keys": {1: "a", np.int8(2): "b", None: "c", 0.5: "e", b"k": "f"},
    }
    want = {
        "tuple": [1, [2, 3]],
        "half": 0.5,
        "yes": True,
        "colour": "red",
        "bytes": b"x",
        "keys": {1: "a", 2: "b", None: "c", 0.5: "e", b"k": "f"},
    }
    for got in (deserialize(serialize(info)), deserialize(decode(encode(serialize(info))))):
        assert got == want
        assert [type(value) for value in got.values()] == [type(value) for value in want.values()]
    assert serialize({"x": (1,)}).entries["x"].list_data == [1]


# --------------------------------------------------------------------------------------------------------------
# Refusals say where and what


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"a.b": 1}, r"additional_information\['a\.b'\]: a dot in a key"),
        ({1: 1}, r"\[1\]: a key here is a string"),
        ({"codes": {0: 1}}, r"\['codes'\]\[0\]: a key here is a string"),
        ({"hidden_states": {"layer_3": 1}}, r"\['hidden_states'\]\['layer_3'\]: .* put it into 'layers'"),
        ({"hidden_states": {"layer_norm": 1}}, "put it into 'layers'"),
        ({"hidden_states": {"layers": {"3": 1}}}, r"\['layers'\]\['3'\]: the key of a layer is an integer"),
        ({"hidden_states": {"layers": {True: 1}}}, "the key of a layer is an integer"),
        ({"hidden_states": {"layers": {10**18: 1}}}, "the key of a layer is an integer"),
        ({"\ud800": 1}, "not Unicode"),
        ({"codes": {"a": object()}}, r"\['codes'\]\['a'\]: an object of type builtins\.object can not travel"),
        ({"x": {"y": [1, {2}]}}, r"information\['x'\]\['y'\]\[1\]: an object of type builtins\.set can not travel"),
        ({"x": [torch.ones(1)]}, r"\['x'\]\[0\]: .*Tensor can not travel here.* under keys of their own"),
        ({"x": {"y": np.ones(1)}}, r"\['x'\]\['y'\]: an object of type numpy\.ndarray"),
        ({"x": [1, "\ud800"]}, r"\['x'\]\[1\]: a string that is not Unicode"),
        ({"x": 1 << 64}, r"\['x'\]: an integer of more than 64 bits"),
        ({"x": {(1, 2): 3}}, r"\['x'\]: the key \(1, 2\) can not travel"),
        ({"x": Decimal(1)}, r"decimal\.Decimal can not travel"),
        ({"x": np.timedelta64(1, "ns")}, r"numpy\.timedelta64 can not travel"),
        ({"x": 1j}, "complex can not travel"),
        ({"x": nested(65)}, r"\[0\]: lists and mappings can be nested 64 deep"),
        ({"x": np.ones(1, "uint16")}, r"\['x'\]: an array of dtype uint16 can not travel here; it takes bfloat16,"),
        ({"x": np.array([None])}, r"\['x'\]: an array of dtype object can not travel"),
        ({"x": np.ma.masked_array([1, 2])}, r"\['x'\]: a masked array can not travel"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, r"\['x'\]: an array of dtype complex64 can not travel here"),
        ({"x": torch.ones(1).to(torch.float8_e4m3fn)}, r"\['x'\]: a tensor of torch\.float8_e4m3fn on cpu can not"),
        ({"x": torch.ones(1, device="meta")}, r"\['x'\]: a tensor of torch\.float32 on meta can not travel"),
        ({"x": torch.ones(1).to_sparse()}, r"\['x'\]: a tensor of .* can not travel"),
        ({"x": torch.ones([1] * 65)}, r"\['x'\]: a tensor of .* can not travel"),
        ([1], "a mapping, a Payload or None, not builtins.list"),
    ],
)
def test_what_can_not_be_sent(info, words):
    with pytest.raises(CodecError, match=words):
        serialize(info)


def test_lists_may_be_nested_up_to_the_limit_and_no_cycle_is_followed_for_ever():
    assert deserialize(decode(encode(serialize({"x": nested(64)})))) == {"x": nested(64)}
    cycle = []
    cycle.append(cycle)
    with pytest.raises(CodecError, match="nested 64 deep"):
        serialize({"x": cycle})


TENSOR = {"tensor_data": b"\0" * 8, "tensor_shape": [2], "tensor_dtype": "int32"}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"x": {}}, "entry 'x' must be exactly one of tensor, list and scalar, and is 0 of them"),
        ({"x": {**TENSOR, "list_data": []}}, "is 2 of them"),
        ({"x": {"list_data": [], "scalar_data": 0}}, "is 2 of them"),
        ({"x": {**TENSOR, "tensor_dtype": None}}, "and a tensor_dtype"),
        ({"x": {"tensor_dtype": "int32"}}, "entry 'x': a tensor has bytes as tensor_data"),
        ({"x": {**TENSOR, "tensor_dtype": "object"}}, "entry 'x': unknown dtype 'object'"),
        ({"x": {**TENSOR, "tensor_dtype": "complex64"}}, "unknown dtype 'complex64'"),
        ({"x": {**TENSOR, "tensor_shape": [-1, -2]}}, r"entry 'x': a shape of \(-1, -2\) is not possible"),
        ({"x": {**TENSOR, "tensor_shape": [1] * 65}}, "is not possible"),
        ({"x": {**TENSOR, "tensor_shape": [3]}}, r"entry 'x': an array of int32 of shape \(3,\) does not have 8 bytes"),
        ({"x": {**TENSOR, "tensor_shape": [1 << 62, 1 << 62]}}, "does not have 8 bytes"),
        ({"x": {**TENSOR, "tensor_data": b"", "tensor_shape": [1 << 62, 0, 5]}}, "can not be made"),
        (
            {"x": {**TENSOR, "tensor_dtype": "bool", "tensor_shape": [8], "tensor_data": b"\2" * 8}},
            "other than 0 and 1",
        ),
        ({"x": {"list_data": [msgspec.msgpack.Ext(1, b"")]}}, r"entry 'x'\[0\]: .*Ext can not travel"),
        ({"hidden_states.layer_x": {"scalar_data": 1}}, "does not say the number of its layer"),
        ({"hidden_states.layer_1": TENSOR, "hidden_states.layer_01": TENSOR}, "'hidden_states.layer_01' has the place"),
        ({"hidden_states.layers": TENSOR, "hidden_states.layer_1": TENSOR}, "has the place of another"),
        ({"a": {"scalar_data": {}}, "a.b": TENSOR}, "entry 'a.b' has the place of another"),
        ({"a.b": TENSOR, "a": {"scalar_data": {}}}, "entry 'a' has the place of another"),
        ({"x": 1}, "not a payload: .*`object`"),
        ([], "not a payload"),
    ],
)
def test_what_is_no_payload(entries, words):
    with pytest.raises(CodecError, match=words):
        from_maps(entries, arrays="torch")


def test_bytes_that_are_no_payload():
    for data in (b"", b"\xc1", b"\x91" * 100_000, b"\x80", memoryview(b"abab")[::2]):
        with pytest.raises(CodecError, match="not a payload"):
            decode(data)


def test_payloads_built_by_hand_are_checked_too():
    entries = [
        1,
        Entry(tensor_data="x", tensor_shape=(1,), tensor_dtype="int8"),
        Entry(tensor_data=b"x", tensor_shape=(1.0,), tensor_dtype="int8"),
        Entry(tensor_data=b"x", tensor_shape=("1",), tensor_dtype="int8"),
        Entry(scalar_data=object()),
    ]
    for entry in entries:
        with pytest.raises(CodecError, match="entry 'x'"):
            deserialize(Payload({"x": entry}))
    with pytest.raises(CodecError, match="string as its key"):
        deserialize(Payload({1: Entry(scalar_data=1)}))
    with pytest.raises(CodecError, match=r"not as types\.SimpleNamespace"):
        deserialize(SimpleNamespace(entries={}))
    with pytest.raises(CodecError, match="the payload can not travel"):
        encode(Payload({"x": Entry(scalar_data=object())}))


def test_sizes_are_limited_for_all_arrays_together():
    info = {"a": np.zeros(60, "int8"), "codes": {"b": np.zeros(60, "int8")}}
    payload = serialize(info, max_bytes=120)
    with pytest.raises(CodecError, match=r"\['codes'\]\['b'\]: its 60 bytes are too many; .* room for 59 more"):
        serialize(info, max_bytes=119)
    assert deserialize(payload, max_bytes=120)
    with pytest.raises(CodecError, match=r"entry 'codes\.b': its 60 bytes are too many"):
        deserialize(payload, max_bytes=119)
    data = encode(payload)
    assert decode(data, max_bytes=len(data)) == payload
    with pytest.raises(CodecError, match=f"{len(data)} bytes is too large"):
        decode(data, max_bytes=len(data) - 1)


# --------------------------------------------------------------------------------------------------------------
# Torch only where it is needed


PROGRAM = """
import numpy as np
from omni_trio.engines.additional_information import CodecError, deserialize, serialize

payload = serialize({"codes": {"audio": np.arange(3)}, "meta": {"finished": True}})
got = deserialize(payload)
print(type(got["codes"]["audio"]).__module__, got["meta"], sys.modules.get("torch"))
try:
    print(type(deserialize(payload, arrays="torch")["codes"]["audio"]))
except CodecError as error:
    print(error)
"""


def printed(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_torch_is_imported_for_who_asks_and_for_nobody_else():
    assert printed(f"import sys{PROGRAM}") == ["numpy {'finished': True} None", "<class 'torch.Tensor'>"]


def test_without_torch_all_else_goes_on():
    first, second = printed(f"import sys; sys.modules['torch'] = None{PROGRAM}")
    assert first == "numpy {'finished': True} None"
    assert second.startswith("entry 'codes.audio': a tensor of int64 has arrived, and torch can not be imported here")


def test_what_arrays_become_is_as_asked_or_torch_where_that_is_loaded():
    payload = serialize({"x": np.ones(2)})
    assert type(deserialize(payload)["x"]) is torch.Tensor
    assert type(deserialize(payload, arrays="numpy")["x"]) is np.ndarray
    with pytest.raises(ValueError, match="'torch' or 'numpy', not 'jax'"):
        deserialize(payload, arrays="jax")
