"""Replies as a SuperLink holds them: objects that lack, are too many or too large, or are odd."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)

from coterie import wire
from coterie.engine.fast.run import appcalls
from coterie.strategies.rounds.exchange import exchange
from tests.contract.hostile.grids import grid_before


class FakeError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INTERNAL

    def details(self) -> str:
        return "database\x1b[2J is locked"


def test_a_run_that_is_stopped_is_ended_by_flowers_own_call() -> None:
    """Which sends one signal, no matter who else finds it out at that moment."""

    class GoneError(FakeError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAUTHENTICATED

    asked = []

    class FlowersGrid:
        def get_node_ids(self) -> list[int]:
            asked.append(len(asked))
            raise GoneError if len(asked) > 1 else SystemExit(0)

    with pytest.raises(SystemExit):
        appcalls._is_lasting(FlowersGrid(), GoneError())
    assert appcalls._is_lasting(FlowersGrid(), GoneError()) and asked == [0, 1]
    assert appcalls._is_lasting(FlowersGrid(), FakeError()) and asked == [0, 1]


class Store:
    """A SuperLink's runtime API, in which the replies are what a test puts there.

    Attributes:
        change: node → what becomes of the (objects, tree) of its reply.
        broken: nodes whose replies make ``PullMessages`` fail.
    """

    def __init__(self, change: Mapping[int, Callable[..., Any]], broken: set[int]) -> None:
        self.change, self.broken = change, broken
        self.objects: dict[str, bytes] = {}
        self.replies: dict[str, tuple[int, str, ObjectTree]] = {}
        self.confirmed: list[str] = []

    def PushMessages(self, request: Any, **_: Any) -> Any:
        ids = []
        for proto, tree in zip(request.messages_list, request.message_object_trees, strict=True):
            message_id, node = tree.object_id, proto.metadata.dst_node_id
            sent = Message(RecordDict(), dst_node_id=node, message_type=wire.TRAIN, group_id="1")
            sent.metadata.__dict__["_message_id"] = message_id
            arrays = ArrayRecord({"w": Array(np.full(3, node, np.float32))})
            content = RecordDict(
                {"arrays": arrays, "metrics": MetricRecord({"num-examples": node})}
            )
            reply = Message(content, reply_to=sent)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = {k: o.deflate() for k, o in get_all_nested_objects(reply).items()}
            found = (objects, get_object_tree(reply))
            objects, tree = self.change.get(node, lambda *same: same)(*found)
            self.objects |= objects
            self.replies[message_id] = node, tree.object_id, tree
            ids.append(message_id)
        return PushAppMessagesResponse(message_ids=ids)

    def PullMessages(self, request: Any, **_: Any) -> Any:
        found = [(i, *self.replies[i]) for i in request.message_ids if i in self.replies]
        if any(node in self.broken for _, node, _, _ in found):
            raise FakeError
        answer = PullAppMessagesResponse()
        for message_id, _, object_id, tree in found:
            proto = ProtoMessage()
            proto.metadata.message_id, proto.metadata.reply_to_message_id = object_id, message_id
            answer.messages_list.append(proto)
            answer.message_object_trees.append(tree)
            del self.replies[message_id]
        return answer

    def PullObject(self, request: Any, **_: Any) -> Any:
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None,
            object_available=bool(content),
            object_content=content or b"",
        )

    def PushObject(self, request: Any, **_: Any) -> Any:
        raise AssertionError("no object is wanted")

    def ConfirmMessageReceived(self, request: Any, **_: Any) -> None:
        self.confirmed.append(request.message_object_id)


def ask(change: Callable[..., Any] | None = None, *, broken: bool = False) -> tuple[Any, Store]:
    """The replies of nodes 1, 2 and 3, of which 2 is hostile."""
    store = Store({2: change} if change else {}, {2} if broken else set())
    grid = grid_before(store)
    messages = [
        Message(RecordDict(), dst_node_id=node, message_type=wire.TRAIN, group_id="1")
        for node in (1, 2, 3)
    ]
    return exchange(grid, messages, deadline_s=0.2), store


def emptied(kind: bytes, content: bytes) -> Callable[..., Any]:
    """The objects of a kind have this content, with the ids that they had."""
    return lambda objects, tree: (
        {k: content if o.startswith(kind) else o for k, o in objects.items()},
        tree,
    )


def dropped(objects: Any, tree: Any) -> Any:
    return {k: o for k, o in objects.items() if not o.startswith(b"ArrayChunk")}, tree


def wide(objects: Any, tree: Any) -> Any:
    leaves = [ObjectTree(object_id=f"{i:064x}") for i in range(wire.MAX_OBJECTS)]
    return objects, ObjectTree(object_id=tree.object_id, children=leaves)


def often(objects: Any, tree: Any) -> Any:
    """One piece of a megabyte that its array names 400 times."""
    piece = b"ArrayChunk  1048576\0" + b"\0" * 2**20
    body = json.dumps(
        {"dtype": "f4", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 400}
    ).encode()
    head = f"Array {get_object_id(piece)} {len(body)}\0".encode()
    more = {get_object_id(piece): piece}
    changed = {k: head + body if o.startswith(b"Array ") else o for k, o in objects.items()}
    return changed | more, ObjectTree(
        object_id=tree.object_id,
        children=[*tree.children, ObjectTree(object_id=get_object_id(piece))],
    )


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "a record that is no JSON": (emptied(b"RecordDict", b"RecordDict  1\0{"), "JSON"),
    "a message without content": (emptied(b"Message", b"Message  0\0"), "cannot be read"),
    "an object of an odd kind": (emptied(b"Array ", b"Odd  0\0"), "cannot be read"),
    "bytes without a head": (emptied(b"MetricRecord", b"\xff\xfe"), "cannot be read"),
    "an object that is not there": (dropped, "could not be found"),
    "too many objects": (wide, "more than 25,000 objects"),
    "a piece that is named 400 times": (often, "in total, more than"),
    "another root": (
        lambda objects, tree: (objects, ObjectTree(object_id="../etc")),
        "invalid ids.",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_reply_that_cannot_be_read_is_an_error_of_its_silo_alone(what: str) -> None:
    change, why = BAD[what]
    (one, two, three), store = ask(change)
    for node, reply in ((1, one), (3, three)):
        (array,) = wire.decode_arrays(reply.content.array_records["arrays"]).values()
        assert array.tolist() == [node] * 3
    assert two.error.code == wire.UNREADABLE and why in two.error.reason
    assert two.error.reason.isprintable()
    assert len(store.confirmed) == 3, "the SuperLink may delete all of them"


def test_a_reply_that_is_announced_and_never_sent_waits_until_the_deadline_alone() -> None:
    replies, _ = ask(emptied(b"ArrayChunk", b""))
    assert [reply is None for reply in replies] == [False, True, False]


def test_a_superlink_that_fails_on_one_reply_is_asked_for_each_by_itself() -> None:
    (one, two, three), _ = ask(broken=True)
    assert one.has_content() and three.has_content()
    assert "the SuperLink cannot send it: INTERNAL" in two.error.reason
    assert "\x1b" not in two.error.reason
