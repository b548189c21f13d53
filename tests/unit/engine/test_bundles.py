"""Bundles: what goes in comes out, and whatever else arrives is a WireError and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from coterie import wire
from coterie.engine.fast import bundles
from coterie.wire import WireError
from coterie.wire.limits import MAX_INDEX_BYTES, MAX_RECORDS
from tests.conftest import assert_equal_models
from tests.unit.engine.made import Made


def order(record: ArrayRecord, text: str = "") -> Message:
    content = RecordDict(
        {
            "arrays": record,
            "config": ConfigRecord({"text": text, "lr": 0.1, "many": [1, 2]}),
            "metrics": MetricRecord({"loss": 0.25}),
        }
    )
    return Message(content, dst_node_id=7, message_type=wire.TRAIN, group_id="3")


def model(size: int) -> wire.Model:
    return {"w": np.arange(size, dtype=np.float32), "n": np.array([5])}


@pytest.mark.parametrize("size", [1, 3, 5000, 3_000_000], ids=lambda size: f"{size} numbers")
def test_a_message_comes_back_as_it_was(size: int) -> None:
    sent = order(wire.encode_arrays(model(size), packed=True), "x" * (size % 7))
    made = Made([sent])
    assert len(made.blobs) == (size == 3_000_000), "a large array is beside it"
    named = [(blob.name, blob.size) for blob in bundles.blobs_of(made.content)]
    assert named == [(name, len(data)) for name, data in made.blobs.items()]
    validate_object_content(made.content)  # as the SuperLink does
    (came,), to = made.read(20_000_000)
    assert to is None and came.metadata.message_id == made.root
    assert dict(came.content["config"]) == dict(sent.content["config"])
    assert came.content["metrics"]["loss"] == 0.25 and came.metadata.group_id == "3"
    arrays = wire.decode_arrays(came.content.array_records["arrays"])
    assert_equal_models(arrays, model(size))
    assert all(array.flags.aligned for array in arrays.values())


def test_arrays_that_are_alike_are_named_once_and_count_as_often_as_they_occur() -> None:
    alike = {name: Array("uint8", (20,), "raw", bytes(2000)) for name in ("v", "w")}
    made = Made([order(ArrayRecord(alike))], inline=1000)
    assert len(made.blobs) == len(made.tree.children) == len(bundles.blobs_of(made.content)) == 1
    (came,), _ = made.read(4000)
    assert len(came.content.array_records["arrays"]["w"].data) == 2000
    with pytest.raises(WireError, match="4,000 bytes in total"):
        made.read(3999)


def test_arrays_are_aligned_at_every_length_of_a_bundle() -> None:
    record = wire.encode_arrays(model(3), packed=True)
    for length in range(150):  # the head grows by a digit on the way
        made = Made([order(record, "x" * length)])
        assert made.content.index(bytes(record["safetensors"].data)) % 8 == 0


def test_errors_and_arrays_of_flowers_own_form_travel_too() -> None:
    plain = order(ArrayRecord({"w": Array(np.arange(3.0))}))
    refused = Message(Error(wire.REFUSED, "no"), reply_to=plain)
    made = Made([plain, refused], [4, 0])
    (came, error), to = made.read()
    assert to == [4, 0] and error.error.reason == "no"
    assert [m.metadata.message_id for m in (came, error)] == [f"{made.root}.0", f"{made.root}.1"]
    array = came.content.array_records["arrays"]["w"]
    assert isinstance(array.data, bytes) and array.numpy().tolist() == [0, 1, 2]


def test_what_messages_share_is_stored_and_held_once() -> None:
    shared = wire.encode_arrays(model(10_000), packed=True)
    made = Made([order(shared, str(i)) for i in range(50)], range(50), inline=1000)
    assert len(made.blobs) == 1 and len(made.content) < 30_000
    assert [tree.object_id for tree in made.tree.children] == list(made.blobs)
    came, _ = made.read(50_000)
    assert len({id(one.content.array_records["arrays"]["safetensors"].data) for one in came}) == 1


def test_a_packed_model_is_a_safetensors_file_behind_the_order_of_its_names() -> None:
    blob = wire.encode_arrays({"z": np.ones(3, np.float16), "a": np.array(True)}, packed=True)
    data = blob["safetensors"].data
    start = 8 + int.from_bytes(data[:8], "little")
    assert json.loads(data[8:start]) == ["z", "a"]
    read = dict(sorted(load(data[start:]).items()))  # which gives them in any order
    assert_equal_models(read, {"a": np.array(True), "z": np.ones(3, np.float16)})


# ---------------------------------------------------------------- what is no bundle


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Made:
    """A good bundle with another index."""
    record = wire.encode_arrays(model(3000), packed=True)
    made = Made([order(record), order(record)], [0, 1], inline=1000)
    body, index, start = bundles._opened(made.content)
    index = change(index) or index
    head = json.dumps(index).encode()
    made.content = bundles._as_object(len(head).to_bytes(8, "little"), head, body[start:])
    return made


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no messages": (lambda index: {**index, "messages": [], "to": []}, "contains 0 messages"),
    "two without saying whose": (lambda index: {**index, "to": None}, "contains 2 messages"),
    "fewer owners": (lambda index: {**index, "to": [0]}, "the silo of each message"),
    "owners that are no numbers": (
        lambda index: {**index, "to": [0, -1]},
        "something other than numbers",
    ),
    "sizes that are no numbers": (
        lambda index: {**index, "messages": [True, 2]},
        "something other than numbers",
    ),
    "another length": (
        lambda index: {**index, "arrays": [*index["arrays"], 8]},
        "does not match its index",
    ),
    "a content that is missing": (
        lambda index: {**index, "arrays": [["f" * 64, 12_100]]},
        "KeyError",
    ),
    "another size of a content": (
        lambda index: {**index, "arrays": [[index["arrays"][0][0], 7]]},
        "instead of 7",
    ),
    "a content without a size": (
        lambda index: {**index, "arrays": [index["arrays"][0][:1]]},
        "Error",
    ),
    "a negative place": (lambda index: {**index, "arrays": [-8]}, "something other than numbers"),
    "a reference beyond": (lambda index: {**index, "refs": [0, 9]}, "IndexError"),
    "more references": (lambda index: {**index, "refs": [0, 0, 0]}, "more arrays"),
    "fewer references": (lambda index: {**index, "refs": [0]}, "StopIteration"),
    "no index": (lambda index: "text", "TypeError"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bundle_that_is_not_what_it_says_is_refused_in_words(what: str) -> None:
    change, why = BAD[what]
    with pytest.raises(WireError, match=why):
        rewritten(change).read(100_000)


MANY: dict[str, RecordDict] = {
    "records": RecordDict({f"r{i}": MetricRecord() for i in range(MAX_RECORDS + 1)}),
    "entries": RecordDict({"m": MetricRecord(dict.fromkeys(map(str, range(25_001)), 1))}),
    "arrays": RecordDict(
        {"a": ArrayRecord(dict.fromkeys(map(str, range(25_001)), Array("f4", (0,), "raw", b"")))}
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_too_many_entries_are_refused_before_objects_are_made_of_them(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made([Message(MANY[what], dst_node_id=7, message_type=wire.TRAIN)])
    monkeypatch.setattr(bundles, "message_from_proto", lambda proto: pytest.fail("it was read"))
    with pytest.raises(WireError, match=r"it contains .* more than"):
        made.read(100_000)


def test_an_index_or_a_header_of_many_megabytes_is_refused_unread() -> None:
    length = MAX_INDEX_BYTES + 1
    long = length.to_bytes(8, "little") + b"[" * length
    with pytest.raises(WireError, match="a bundle's index has more than"):
        bundles.blobs_of(bundles._as_object(long))
    for data in (long, (2).to_bytes(8, "little") + b"[]" + long):
        packed = ArrayRecord({"safetensors": Array("uint8", (1,), "safetensors", data)})
        with pytest.raises(WireError, match="describes its arrays in 8,388,609 bytes"):
            wire.decode_arrays(packed)


@pytest.mark.parametrize(
    "place",
    [["../etc", 5], ["f" * 63, 5], [5, 5], ["f" * 64, 0], ["f" * 64, -1], ["f" * 64, 1.5], ["f"]],
)
def test_a_content_that_cannot_exist_is_not_asked_for(place: list[Any]) -> None:
    made = rewritten(lambda index: {**index, "arrays": [place]})
    with pytest.raises(WireError):
        bundles.blobs_of(made.content)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 700), flip=st.integers(1, 255), cut=st.integers(0, 40))
def test_damaged_bytes_are_refused_or_read_and_nothing_else(at: int, flip: int, cut: int) -> None:
    made = Made([order(wire.encode_arrays(model(3), packed=True))])
    content = bytearray(made.content)
    content[at % len(content)] ^= flip
    try:
        made.content = bytes(content[: len(content) - cut])
        bundles.blobs_of(made.content)
        came, _ = made.read(100_000)
        for one in came:
            for record in one.content.array_records.values():
                wire.decode_arrays(record)
    except (WireError, ValueError):  # ValueError: of a message that has become an error
        pass


HEADERS: dict[str, Any] = {
    "offsets beyond the end": {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}},
    "another shape": {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "a size that is negative": {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "an unknown type": {"w": {"dtype": "O", "shape": [2], "data_offsets": [0, 8]}},
    "bytes of nobody": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "two that overlap": {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("w", "v")
    },
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_packed_model_that_is_not_what_it_says_is_refused(what: str) -> None:
    names, header = json.dumps(list(HEADERS[what])).encode(), json.dumps(HEADERS[what]).encode()
    sizes = [len(part).to_bytes(8, "little") for part in (names, header)]
    data = b"".join((sizes[0], names, sizes[1], header, bytes(8)))
    record = ArrayRecord({"safetensors": Array("uint8", (len(data),), "safetensors", data)})
    with pytest.raises(WireError):
        wire.decode_arrays(record)
