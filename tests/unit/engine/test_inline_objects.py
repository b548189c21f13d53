"""Small objects travel in the call that tells of their message."""

from __future__ import annotations

import hashlib

from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from hypothesis import given
from hypothesis import strategies as st

from coterie.engine.fast import inline_objects
from coterie.engine.fast.channel import FROM_BYTES


def request() -> PushMessagesRequest:
    return PushMessagesRequest(
        messages_list=[Message(metadata=Metadata(run_id=7))],
        message_object_trees=[ObjectTree(object_id="ab")],
        clientapp_runtime_list=[0.5],
    )


def named(*contents: bytes) -> dict[str, bytes]:
    return {hashlib.sha256(one).hexdigest(): one for one in contents}


@given(contents=st.lists(st.binary(min_size=1, max_size=300), max_size=5, unique=True))
def test_what_goes_along_comes_out_and_the_request_is_as_it_was(contents: list[bytes]) -> None:
    sent = request()
    inline_objects.attach(sent, contents)
    came = PushMessagesRequest.FromString(sent.SerializeToString())
    assert came.messages_list == request().messages_list, "to Flower it is as ever"
    assert inline_objects.attached(came) == named(*contents)
    assert came == request() and came.ByteSize() == request().ByteSize(), "counted once"
    assert inline_objects.attached(came) == {}


def test_only_what_is_small_goes_along_and_only_so_much_in_one_call() -> None:
    large, small = bytes(FROM_BYTES), b"x" * (FROM_BYTES - 1)
    assert inline_objects.small([("large", large), ("none", b""), ("small", small)]) == {
        "small": small
    }
    many = [(str(i), small) for i in range(20)]
    assert list(inline_objects.small(many)) == [str(i) for i in range(16)]
    assert list(inline_objects.small(many, 2 * len(small) + 5)) == ["0", "1"]


def test_of_what_a_stranger_sends_no_more_is_looked_at() -> None:
    contents = [bytes([i]) * (FROM_BYTES - 1) for i in range(20)]
    sent = request()
    inline_objects.attach(sent, [b"", bytes(FROM_BYTES), *contents])
    assert inline_objects.attached(sent) == named(*contents[:16])


def test_other_fields_that_flower_does_not_have_are_no_objects() -> None:
    sent = PullMessagesResponse()
    other = inline_objects._varint(inline_objects.FIELD + 1 << 3 | 2) + b"\x01x"
    number = inline_objects._varint(inline_objects.FIELD << 3) + b"\x05"
    sent.MergeFromString(other + number)
    assert inline_objects.attached(sent) == {}
    inline_objects.attach(sent, [b"own"])
    assert inline_objects.attached(sent) == named(b"own")
