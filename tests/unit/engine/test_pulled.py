"""Objects as the SuperLink gives them: read where they lie, and as Flower reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from google.protobuf.message import DecodeError

from coterie import wire
from coterie.engine.fast import bundles, pulled
from coterie.engine.fast.objects import put_together
from coterie.engine.fast.pulled import Piece, Pulled, Pushed


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2_097_152])
def test_an_object_is_not_copied_on_its_way_in(size: int) -> None:
    content = bytes(size - 1) + b"x"
    sent = PullObjectResponse(object_found=True, object_available=True, object_content=content)
    data = sent.SerializeToString()
    read = pulled.read_pulled(data)
    assert isinstance(read, Pulled) and read.object_content.obj is data
    assert read.object_content == content and read.object_found and read.object_available


@pytest.mark.parametrize(
    "data",
    [
        PullObjectResponse().SerializeToString(),
        PullObjectResponse(object_found=True).SerializeToString(),
        PullObjectResponse(object_found=True, object_available=True).SerializeToString(),
        # Fields in another order, or one of them twice, as any implementation may write them.
        b"\x1a\x01x\x08\x01\x10\x01",
        b"\x08\x01\x10\x01\x1a\x01x\x1a\x01y",
        b"\x08\x01\x10\x01\x1a\x01x\x10\x00",
    ],
)
def test_what_is_written_otherwise_is_read_as_flower_reads_it(data: bytes) -> None:
    assert pulled.read_pulled(data) == PullObjectResponse.FromString(data)


@pytest.mark.parametrize(
    "data",
    [b"\x08\x01\x10\x01\x1a", b"\x08\x01\x10\x01\x1a\x05x", b"\x08\x01\x10\x01\x1a" + b"\xff" * 9],
)
def test_what_is_cut_off_is_refused(data: bytes) -> None:
    with pytest.raises(Exception, match="parsing message"):
        pulled.read_pulled(data)


def fetched(objects: dict[str, Any]) -> dict[str, memoryview]:
    found = {}
    for name, content in objects.items():
        sent = PullObjectResponse(
            object_found=True, object_available=True, object_content=bytes(content)
        )
        found[name] = pulled.read_pulled(sent.SerializeToString()).object_content
    return found


@pytest.mark.parametrize("inline", [0, 12_000_000])
def test_messages_are_made_of_objects_that_lie_where_they_came(inline: int) -> None:
    model = {"w": np.arange(3_000_000, dtype=np.float32), "n": np.array(7)}
    content = RecordDict({"config": ConfigRecord({"round": 3})})
    content["arrays"] = wire.encode_arrays(model, packed=True)
    message = Message(content, dst_node_id=1, message_type="train")
    made = bundles.bundle([message], inline=inline)
    (got,), _ = bundles.unbundle(made.root, fetched(made.objects), max_bytes=0)
    assert got.content["config"] == content["config"]
    assert wire.model_hash(wire.decode_arrays(got.content["arrays"])) == wire.model_hash(model)


def test_so_are_messages_in_flowers_own_form() -> None:
    content = RecordDict({"arrays": wire.encode_arrays({"w": np.arange(5.0)}, packed=False)})
    message = Message(content, dst_node_id=1, message_type="train")
    objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    got = put_together(message.object_id, fetched(objects), max_bytes=1000)
    np.testing.assert_array_equal(wire.decode_arrays(got.content["arrays"])["w"], np.arange(5.0))


# ---------------------------------------------------------------- requests to store an object


def request(content: bytes) -> PushObjectRequest:
    return PushObjectRequest(
        node=Node(node_id=7),
        run_id=2**63,
        object_id="ab" * 32,
        object_content=content,
        session_id="s",
    )


def fields(read: Any) -> tuple[Any, ...]:
    content = bytes(read.object_content)
    return read.node, read.run_id, read.object_id, read.session_id, content


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300_000])
def test_a_request_is_read_as_flower_reads_it_and_not_copied(size: int) -> None:
    content = bytes(size)
    sent = request(content)
    data = sent.SerializeToString()
    read = pulled.read_push(data)
    assert fields(read) == fields(sent)
    assert not size or (isinstance(read.object_content, memoryview))
    assert not size or read.object_content.obj is data  # type: ignore[union-attr]
    piece = Piece(content[:1], memoryview(content)[1:])
    for own in (content, memoryview(content), piece):
        pushed = Pushed(sent.node, sent.run_id, sent.object_id, "s", own)
        assert PushObjectRequest.FromString(pushed.SerializeToString()) == sent


@pytest.mark.parametrize(
    "more",
    [
        b"\x22\x01y",  # the content twice: the last one counts
        b"\x22\x00",
        b"\x98\x06\x05\xa2\x06\x02hi\xa9\x06" + bytes(8) + b"\xb5\x06" + bytes(4),  # unknown ones
    ],
)
def test_fields_that_come_twice_or_are_unknown_mean_what_they_mean_to_flower(more: bytes) -> None:
    data = request(b"x").SerializeToString() + more
    assert fields(pulled.read_push(data)) == fields(PushObjectRequest.FromString(data))


@pytest.mark.parametrize(
    "more", [b"\x22", b"\x22\x05x", b"\x22" + b"\xff" * 11, b"\x23", b"\xff" * 11, b"\xa9\x06x"]
)
def test_a_request_that_is_cut_off_is_refused(more: bytes) -> None:
    for read in (pulled.read_push, PushObjectRequest.FromString):
        with pytest.raises(DecodeError):
            read(request(b"x").SerializeToString() + more)


@pytest.mark.parametrize(
    "answer",
    [
        Pulled(),
        Pulled(True, False),
        Pulled(True, True, b"x" * 300),
        Pulled(True, True, Piece(b"x", memoryview(b"y" * 300))),
        PullObjectResponse(object_found=True, object_available=True, object_content=b"xy"),
    ],
)
def test_an_answer_is_written_as_flower_writes_it(answer: Any) -> None:
    content = bytes(answer.object_content)
    found = {"object_found": answer.object_found, "object_available": answer.object_available}
    written = PullObjectResponse(**found, object_content=content).SerializeToString()
    assert pulled.write_pulled(answer) == written
