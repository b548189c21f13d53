"""The wire: what goes in comes out, and damaged bytes are a WireError and nothing else."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie import wire
from coterie.wire import Description, WireError, decode_arrays, decode_description, encode_arrays
from coterie.wire.description import FOLLOWING
from tests.conftest import assert_equal_models

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")

PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])


def plain_record(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"w": Array("float64", (3,), stype, data)})


def packed_record(data: bytes) -> ArrayRecord:
    return ArrayRecord({"safetensors": Array("uint8", (len(data),), "safetensors", data)})


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# ---------------------------------------------------------------- arrays


@PACKED
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_come_back_bit_for_bit(dtype: str, packed: bool) -> None:
    model = {
        "b.weight": np.arange(12).reshape(3, 4).astype(dtype),
        "a.bias": np.array([1], dtype=dtype),
        "empty": np.zeros((0, 3), dtype=dtype),
    }
    assert_equal_models(decode_arrays(encode_arrays(model, packed=packed)), model)


@PACKED
def test_a_zero_dimensional_array_keeps_its_shape(packed: bool) -> None:
    """BatchNorm's num_batches_tracked is one; as (1,) every silo refuses it."""
    model = {"num_batches_tracked": np.array(3, dtype=np.int64)}
    assert_equal_models(decode_arrays(encode_arrays(model, packed=packed)), model)


@PACKED
def test_the_models_own_order_is_kept(packed: bool) -> None:
    model = {name: np.ones(i + 1, np.float32) for i, name in enumerate(["z", "a", "m", "B", "é"])}
    model["i"] = np.ones(1, np.int64)
    assert list(decode_arrays(encode_arrays(model, packed=packed))) == [
        "z",
        "a",
        "m",
        "B",
        "é",
        "i",
    ]


@PACKED
def test_arrays_that_are_not_contiguous_come_back_by_value(packed: bool) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    model = {"t": base.T, "s": base[::2, ::3], "r": base[::-1], "f": np.asfortranarray(base)}
    assert_equal_models(decode_arrays(encode_arrays(model, packed=packed)), model)


@PACKED
def test_big_endian_arrays_come_back_by_value(packed: bool) -> None:
    model = {"w": np.arange(5, dtype=">f4")}
    decoded = decode_arrays(encode_arrays(model, packed=packed))
    np.testing.assert_array_equal(decoded["w"], [0, 1, 2, 3, 4])


@PACKED
def test_nan_infinity_and_minus_zero_survive(packed: bool) -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    decoded = decode_arrays(encode_arrays({"w": array}, packed=packed))["w"]
    assert decoded.tobytes() == array.tobytes()


@PACKED
def test_a_model_without_arrays_comes_back_empty(packed: bool) -> None:
    assert decode_arrays(encode_arrays({}, packed=packed)) == {}


@settings(max_examples=40)
@given(
    model=st.dictionaries(
        st.text(st.characters(categories=("L", "M", "N", "P", "S")), min_size=1, max_size=8),
        hnp.arrays(
            st.sampled_from([np.dtype(d) for d in DTYPES]),
            hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3),
        ),
        max_size=4,
    ).filter(lambda model: "__metadata__" not in model),
    packed=st.booleans(),
)
def test_any_model_comes_back_bit_for_bit(model: dict[str, Any], packed: bool) -> None:
    decoded = decode_arrays(encode_arrays(model, packed=packed))
    assert list(decoded) == list(model)
    for name, array in model.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


def test_encoding_does_not_change_the_model() -> None:
    model = {"w": np.arange(6, dtype=">f4").reshape(2, 3).T}
    before = model["w"].copy()
    for packed in (False, True):
        encode_arrays(model, packed=packed)
    assert model["w"].dtype == before.dtype
    np.testing.assert_array_equal(model["w"], before)


def test_packed_is_told_from_plain() -> None:
    model = {"w": np.ones(2, np.float32)}
    assert wire.is_packed(encode_arrays(model, packed=True))
    assert not wire.is_packed(encode_arrays(model, packed=False))
    assert not wire.is_packed(encode_arrays({"safetensors": np.ones(2)}, packed=False))


def test_a_packed_model_is_one_object_and_bytes_are_those_of_arrays() -> None:
    model = {f"layer{i}": np.ones(100, np.float32) for i in range(8)}
    packed = encode_arrays(model, packed=True)
    assert len(packed) == 1
    assert len(packed["safetensors"].data) >= 8 * 400


# ---------------------------------------------------------------- damaged arrays


@settings(max_examples=150)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_arrays(plain_record(data))
    with pytest.raises(WireError):
        decode_arrays(packed_record(data))


@settings(max_examples=200)
@given(
    where=st.integers(0, 10_000),
    new=st.binary(max_size=4),
    cut=st.integers(0, 4),
    whole=st.booleans(),
)
def test_a_damaged_packed_model_is_decoded_or_a_wire_error(
    where: int, new: bytes, cut: int, whole: bool
) -> None:
    model = {"w": np.arange(6, dtype=np.float32), "n": np.array([1], np.int64)}
    data = encode_arrays(model, packed=True)["safetensors"].data
    where %= len(data)
    damaged = data[:where] + new + (data[where + cut :] if whole else b"")
    try:
        decoded = decode_arrays(packed_record(damaged))
    except WireError:
        return
    assert all(isinstance(array, np.ndarray) for array in decoded.values())


def test_a_flipped_bit_in_a_plain_array_is_decoded_or_a_wire_error() -> None:
    good = npy(np.arange(2, dtype=np.float32))
    others = {}
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        try:
            decoded = decode_arrays(plain_record(bytes(data)))
            assert isinstance(decoded["w"], np.ndarray)
        except WireError:
            continue
        except Exception as error:
            others[bit] = repr(error)
    assert others == {}


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3))
    return file.getvalue()


def huge() -> bytes:
    """An array of three numbers that says it has 10¹⁴."""
    short, long = b"'shape': (3,), }" + b" " * 14, b"'shape': (99999999999999,), }" + b" "
    assert short in npy(np.zeros(3))
    return npy(np.zeros(3)).replace(short, long)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(npy(np.zeros(3))[:-1], id="short"),
        pytest.param(b"\x80\x04K\x01.", id="pickle"),
        pytest.param(b"PK\x03\x04 no zip", id="broken-zip"),
        pytest.param(zipped(), id="zip"),
        pytest.param(huge(), id="huge"),
    ],
)
def test_a_plain_array_that_is_none_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_arrays(plain_record(data))
    assert zipfile.is_zipfile(io.BytesIO(zipped()))


def test_objects_are_never_unpickled() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(WireError):
        decode_arrays(plain_record(file.getvalue()))


def test_arrays_of_another_serialisation_are_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_arrays(plain_record(npy(np.zeros(3)), stype="torch.Tensor"))


@pytest.mark.parametrize(
    "order",
    [b'["w"]', b'["w", "n", "n"]', b'["w", "x"]', b"5", b"null", b"[[]]", b'[1, "w"]', b"\xff",
     b"[" * 100_000],
    ids=["fewer", "twice", "other", "number", "null", "nested", "mixed", "not-utf8", "deep"],
)  # fmt: skip
def test_a_packed_model_with_a_wrong_order_is_a_wire_error(order: bytes) -> None:
    from safetensors.numpy import save

    blob = save({"w": np.zeros(2, np.float32), "n": np.zeros(1, np.int64)})
    data = len(order).to_bytes(8, "little") + order + blob
    with pytest.raises(WireError):
        decode_arrays(packed_record(data))


# ---------------------------------------------------------------- descriptions

FULL = Description(
    name="north",
    num_examples=120,
    task="digits",
    schema="abc",
    parts={"numeric": "0" * 16, "the order of numeric": "f" * 16},
    alpha=2.5,
    device="cpu",
    versions={"torch": "2.6", "coterie": "0.1.0"},
    buffers=("bn.running_mean", "bn.running_var"),
    min_group_size=3,
    max_local_epochs=4,
    tasks=("digits", "stroke"),
    protocol=1,
    mark="0123456789abcdef",
)


def test_a_description_comes_back_equal() -> None:
    assert decode_description(wire.encode_description(FULL)) == FULL


ODD_MARKS = ("0123", "0123456789ABCDEF", 7, "0123456789abcdef0")
ODD_PARTS = ("[]", "{", '{"a": 3}', '{"A\\n": "0000000000000000"}', '{"a": "patient"}', 7)


@pytest.mark.parametrize(
    ("entry", "odd"),
    [*(("data-mark", odd) for odd in ODD_MARKS), *((wire.SCHEMA_PARTS, odd) for odd in ODD_PARTS)],
)
def test_odd_entries_of_a_description_are_a_wire_error(entry: str, odd: object) -> None:
    content = wire.encode_description(FULL)
    content[wire.CONFIG][entry] = odd
    with pytest.raises(WireError, match="cannot be read"):
        decode_description(content)


def test_two_schemas_differ_in_what_does_not_follow_from_something_else() -> None:
    ours = {"numeric": "1", "the order of numeric": "2", "network": "3", FOLLOWING[0]: "4"}
    assert wire.differences(ours, ours) == []
    assert wire.differences(ours, ours | {"the order of numeric": "0"}) == ["the order of numeric"]
    both = ours | {"the order of numeric": "0", "numeric": "0", FOLLOWING[0]: "0"}
    assert wire.differences(ours, both) == ["numeric"]
    assert wire.differences(ours, ours | {FOLLOWING[0]: "0"}) == [FOLLOWING[0]]


def test_a_description_without_alpha_has_none() -> None:
    plain = Description(name="a", num_examples=1, task="digits", schema="s")
    decoded = decode_description(wire.encode_description(plain))
    assert decoded.alpha is None
    assert decoded.buffers == ()
    assert decoded.protocol == wire.PROTOCOL


def test_a_description_holds_no_label_and_no_statistic() -> None:
    """The agreed keys and no other: what a silo says of itself is reviewed here."""
    keys = set(wire.encode_description(FULL)[wire.CONFIG])
    assert keys == {
        "name", "num-examples", "task", "schema", "device", "versions", "buffers", "protocol",
        "schema-parts", "pooled-columns", "alpha", "head",
        "min-group-size", "max-local-epochs", "primary-metric", "unit", "tasks", "data-mark",
    }  # fmt: skip


@pytest.mark.parametrize(
    "key", ["name", "num-examples", "task", "schema", "device", "versions", "buffers", "protocol"]
)
def test_a_description_without_a_field_names_it(key: str) -> None:
    content = wire.encode_description(FULL)
    del content[wire.CONFIG][key]
    with pytest.raises(WireError, match=key):
        decode_description(content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 3),
        ("num-examples", "many"),
        ("num-examples", True),
        ("alpha", "high"),
        ("versions", "{"),
        ("versions", "[1]"),
        ("buffers", "5"),
        ("protocol", "1"),
        ("num-examples", float("nan")),
        ("num-examples", float("inf")),
        ("protocol", float("nan")),
        ("buffers", "[" * 100_000),
        ("tasks", '"digits"'),
        ("tasks", "[1]"),
        ("versions", " " * 2**20 + "{}"),
        ("tasks", '["a\\nb"]'),
        ("tasks", str(["x"] * 33).replace("'", '"')),
    ],
)
def test_a_description_of_the_wrong_kind_is_a_wire_error(key: str, value: Any) -> None:
    content = wire.encode_description(FULL)
    content[wire.CONFIG][key] = value
    with pytest.raises(WireError):
        decode_description(content)


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"config": MetricRecord({"a": 1})})])
def test_an_answer_without_a_config_is_a_wire_error(content: RecordDict) -> None:
    with pytest.raises(WireError, match="config"):
        decode_description(content)


# ---------------------------------------------------------------- metrics, refusals


def test_metrics_are_scalars_by_key() -> None:
    content = RecordDict({"metrics": MetricRecord({"loss": 0.5, "num-examples": 3, "all": [1, 2]})})
    assert wire.read_metrics(content) == {"loss": 0.5, "num-examples": 3}


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"metrics": ConfigRecord({"a": 1})})])
def test_a_reply_without_metrics_has_none(content: RecordDict) -> None:
    assert wire.read_metrics(content) == {}


def test_a_refusal_is_an_error_reply_with_the_reason() -> None:
    message = Message(RecordDict(), dst_node_id=4, message_type=wire.TRAIN, group_id="2")
    reply = wire.refusal("not with me.", message)
    assert reply.has_error()
    assert (reply.error.code, reply.error.reason) == (wire.REFUSED, "not with me.")
    assert reply.metadata.dst_node_id == message.metadata.src_node_id
    assert wire.REFUSED != wire.FAILED
