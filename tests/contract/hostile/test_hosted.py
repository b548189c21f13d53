"""Processes of several silos behind one node, honest and hostile, at the coordinator's Grid."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.serverapp import Grid

from coterie import wire
from coterie.engine.fast import bundles, inline_objects
from coterie.engine.fast.channel import Part
from coterie.engine.fast.run import announced, parcels
from coterie.engine.fast.superlink import blob_store
from coterie.strategies.rounds.exchange import exchange
from tests.contract.hostile.grids import grid_before
from tests.contract.hostile.test_pulling import Store
from tests.unit.engine.made import Made

SILOS, PART = 3, 1_000
Answer = Callable[[Sequence[Message], Sequence[int]], Made]


def trained(message: Message, number: int) -> Message:
    """A model that tells who sent it."""
    sent = wire.decode_arrays(message.content.array_records["arrays"])
    arrays = wire.encode_arrays({"w": sent["w"] + np.float32(number)}, packed=True)
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": number + 1})})
    return Message(content, reply_to=message)


def honest(messages: Sequence[Message], to: Sequence[int]) -> Made:
    return Made([trained(m, n) for m, n in zip(messages, to, strict=True)], to)


class HostStore(Store):
    """One node, 9, with three silos, and one, 5, that is a stranger's app."""

    def __init__(self, answer: Answer, said: str = str(SILOS)) -> None:
        super().__init__({}, set())
        self.answer, self.said = answer, said
        self.pushed: list[tuple[int, str, list[int] | None]] = []
        self.kept: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}

    def GetNodes(self, request: Any, **_: Any) -> Any:
        return GetNodesResponse(nodes=[Node(node_id=5), Node(node_id=9)])

    def PushMessages(self, request: Any, **_: Any) -> Any:
        trees = list(request.message_object_trees)
        self.waiting = list(zip(request.messages_list, trees, strict=True))
        self.kept |= inline_objects.attached(request)
        wanted = {one.object_id for tree in trees for one in (tree, *tree.children)}
        self.asked = [tree.object_id for tree in trees]
        missing = wanted - self.kept.keys()
        return PushAppMessagesResponse(message_ids=self.asked, objects_to_push=missing)

    def PushObject(self, request: Any, **_: Any) -> Any:
        self.kept[request.object_id] = bytes(request.object_content)
        return type("Stored", (), {"stored": True})

    def Put(self, part: Part, **_: Any) -> bytes:
        so_far = self.parts.pop(part.object_id, b"") + part.object_content
        if len(so_far) < part.size:
            self.parts[part.object_id] = so_far
            return str(len(so_far)).encode()
        name = bundles.object_id(so_far)
        self.kept[name] = so_far
        return name.encode()

    def Get(self, part: Part, **_: Any) -> bytes:
        return self.objects[part.object_id][part.at : part.at + PART]

    def PullObject(self, request: Any, **how: Any) -> Any:
        if request.object_id == blob_store.WHERE:  # of another machine
            return PullObjectResponse(object_content=b"{}")
        return super().PullObject(request, **how)

    def PullMessages(self, request: Any, **_: Any) -> Any:
        answer = PullAppMessagesResponse()
        for header, tree in self.waiting:
            reply = self._reply_to(header, tree.object_id)
            self.objects |= reply.contents
            proto = ProtoMessage()
            proto.metadata.message_id = reply.root
            proto.metadata.reply_to_message_id = tree.object_id
            answer.messages_list.append(proto)
            answer.message_object_trees.append(reply.tree)
        self.waiting = []
        return answer

    def _reply_to(self, header: Any, root: str) -> Made:
        node = header.metadata.dst_node_id
        if not bundles.is_bundle(self.kept[root]):
            asked = Message(RecordDict(), dst_node_id=node, message_type=wire.DESCRIBE)
            self.pushed.append((node, "flower", None))
            error = Error(wire.HOSTS, self.said) if node == 9 else Error(0, "no such message type")
            return Made([Message(error, reply_to=asked)])
        contents = {name: memoryview(one) for name, one in self.kept.items()}
        messages, to = bundles.unbundle(root, self.kept[root], contents, max_bytes=0)
        self.pushed.append((node, messages[0].metadata.message_type, to))
        return self.answer(messages, to or [0])


def grid_of(store: HostStore, *, hosts: bool = True, folder: Path | None = None) -> Grid:
    return grid_before(store, hosts=hosts, folder=folder)


def described(grid: Grid) -> list[int]:
    """The nodes, once all that are there have been asked who they are."""
    asking = [
        Message(
            RecordDict({wire.CONFIG: ConfigRecord({"task": "t"})}),
            dst_node_id=node,
            message_type=wire.DESCRIBE,
        )
        for node in grid.nodes()
    ]
    exchange(grid, asking, deadline_s=0.2)
    return list(grid.nodes())


def ask(
    answer: Answer, megabytes: float = 0.0, folder: Path | None = None
) -> tuple[list[Any], HostStore]:
    """A round with the three silos of node 9."""
    store = HostStore(answer)
    grid = grid_of(store, folder=folder)
    own = described(grid)[1:]
    record = wire.encode_arrays(
        {"w": np.arange(int(250_000 * megabytes) + 1, dtype="f4")}, packed=True
    )
    orders = [
        Message(RecordDict({"arrays": record}), dst_node_id=node, message_type=wire.TRAIN)
        for node in reversed(own)
    ]
    return exchange(grid, orders, deadline_s=0.2)[::-1], store


def test_the_silos_of_a_process_are_nodes_of_their_own_and_share_a_bundle() -> None:
    replies, store = ask(honest)
    for number, reply in enumerate(replies):
        (array,) = wire.decode_arrays(reply.content.array_records["arrays"]).values()
        assert array.tolist() == [number]
        assert reply.content["metrics"]["num-examples"] == number + 1
    assert store.pushed == [(5, "flower", None), (9, "flower", None), (9, wire.TRAIN, [2, 1, 0])]


def test_a_bundle_has_a_size_beyond_which_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parcels, "HOST_BYTES", 2_500_000)
    replies, store = ask(honest, megabytes=1)
    assert all(reply.has_content() for reply in replies)
    assert [to for _, kind, to in store.pushed if kind == wire.TRAIN] == [[2, 1], [0]]


def test_ids_hold_while_a_node_is_there_and_go_with_it() -> None:
    store = HostStore(honest)
    grid = grid_of(store)
    first = described(grid)
    assert len(first) == 1 + SILOS and first[0] == 5 and 9 not in first
    assert list(grid.nodes()) == first
    store.GetNodes = lambda request, **_: GetNodesResponse(nodes=[Node(node_id=5)])  # type: ignore[method-assign]
    assert list(grid.nodes()) == [5]


@pytest.mark.parametrize(
    "said", ["", "1", "-3", "10001", "9" * 4000, "0" * 8 + "5" * 9, "٣", "many"]
)
def test_a_process_that_says_no_number_stays_one_node(said: str) -> None:
    assert described(grid_of(HostStore(honest, said))) == [5, 9]


def test_where_silos_are_enrolled_no_node_is_more_than_one() -> None:
    assert described(grid_of(HostStore(honest), hosts=False)) == [5, 9]


def answers(change: Callable[[list[Message], list[int]], tuple[Any, Any]]) -> Answer:
    def made(messages: Sequence[Message], to: Sequence[int]) -> Made:
        replies = [trained(m, n) for m, n in zip(messages, to, strict=True)]
        return Made(*change(replies, list(to)))

    return made


BAD: dict[str, tuple[Answer, str]] = {
    "none for one of them": (
        answers(lambda replies, to: (replies[:2], to[:2])),
        "sent no answer for it",
    ),
    "two for one": (answers(lambda replies, to: (replies, [2, 1, 1])), "sent no answer for it"),
    "for a silo that it does not have": (
        answers(lambda replies, to: (replies, [2, 1, 700])),
        "sent no answer for it",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_silo_that_its_process_does_not_answer_for_is_left_out_alone(what: str) -> None:
    answer, why = BAD[what]
    (none, one, two), _ = ask(answer)
    assert none.error.code == wire.UNREADABLE and why in none.error.reason
    assert one.has_content() and two.has_content()


def test_one_answer_for_all_is_an_error_of_each() -> None:
    def refused(messages: Sequence[Message], to: Sequence[int]) -> Made:
        return Made([Message(Error(wire.REFUSED, "out of memory"), reply_to=messages[0])])

    replies, _ = ask(refused)
    assert len(replies) == SILOS and all("out of memory" in r.error.reason for r in replies)


def test_a_large_reply_waits_in_a_file_and_is_shown_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced, "LARGE_BYTES", 1)
    monkeypatch.setattr(bundles, "INLINE_BYTES", 100)
    replies, _ = ask(honest, megabytes=0.03, folder=tmp_path)
    for number, reply in enumerate(replies):
        packed = reply.content.array_records["arrays"]["safetensors"]
        assert isinstance(packed.data, memoryview) and isinstance(packed.data.obj, mmap)
        (array,) = wire.decode_arrays(reply.content.array_records["arrays"]).values()
        assert (array == np.arange(7501) + number).all() and array.flags.aligned
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_full_disk_costs_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "LARGE_BYTES", 1)
    monkeypatch.setattr(bundles, "INLINE_BYTES", 100)
    room, files = 20_000, announced.TemporaryFile

    def small(**how: Any) -> Any:
        file = files(**how)

        class Full(type(file)):  # type: ignore[misc]
            def write(self, data: bytes) -> int:
                if file.tell() + len(data) > room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(file.write(data[:700]))  # a write may be short

        return Full(file.fileno(), "r+b", closefd=False)

    monkeypatch.setattr(announced, "TemporaryFile", small)
    replies, _ = ask(honest, megabytes=0.03, folder=tmp_path)
    for number, reply in enumerate(replies):
        (array,) = wire.decode_arrays(reply.content.array_records["arrays"]).values()
        assert (array == np.arange(7501) + number).all()
