"""A SuperLink in this process, its channel for contents, a silo and a ServerApp."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.run import Run
from flwr.superlink.grid.grpc_grid import GrpcGrid

from coterie import wire
from coterie.engine.fast import bundles, channel, inline_objects
from coterie.engine.fast.channel import FROM_BYTES, GET, HEAD, PART_BYTES, PUT, Part
from coterie.engine.fast.run import announced as announced_reply
from coterie.engine.fast.run import pulling
from coterie.engine.fast.superlink import blob_store, carrying, uploads
from coterie.engine.fast.superlink.carrying import Arrivals
from coterie.engine.flower import ObjectPullError
from tests.unit.engine.made import NUMBERS, Made, names, numbers
from tests.unit.server.superlinks import Signature, serving, silo_of

AT_ONCE_S, LONG_MS = 20.0, 60_000
"""Far more than a notification takes on a loaded machine, and what waiting for it in vain
would."""


# ---------------------------------------------------------------- with a ServerApp


@pytest.fixture
def superlink(request: Any, tmp_path: Path) -> Iterator[Any]:
    """A SuperLink with a run, and a silo's calls."""
    database = getattr(request, "param", FLWR_IN_MEMORY_DB_NAME)
    if database != FLWR_IN_MEMORY_DB_NAME:
        database = str(tmp_path / database)
    sign = Signature()
    with serving(tmp_path, database) as made, silo_of(made, sign) as silo:
        yield SimpleNamespace(
            address=made.address,
            fleet=silo,
            parts=[],
            node=made.enrolled(sign),
            allowances=made.allowances,
            room=made.room,
            run=made.run,
            store=made.store,
            state=made.state,
            token=made.token,
        )


def grid_of(superlink: Any) -> Any:
    """A run's Grid, which takes the silo for one that reads bundles."""
    inner: Any = GrpcGrid(superlink.address, insecure=True, token=superlink.token)
    made: Any = Run.create_empty(superlink.run)
    inner.set_run(made)
    grid: Any = pulling.fast_engine(inner)
    grid._nodes.bundling.add(superlink.node.node_id)
    return grid


def calling(superlink: Any, name: str) -> Callable[[Part], bytes]:
    """A call of the channel by the silo, which is noted."""
    call = {PUT: superlink.fleet.Put, GET: superlink.fleet.Get}[name]

    def invoke(part: Part) -> bytes:
        superlink.parts.append((name, part.at))
        return bytes(call(part, metadata=part.head))

    return invoke


def fetched(superlink: Any) -> Message:
    """What the silo is sent."""
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    blobs = bundles.blobs_of(came[tree.object_id])
    contents = {
        blob.name: memoryview(b"".join(got(superlink, blob.name, blob.size))) for blob in blobs
    }
    assert {one.object_id for one in tree.children} == set(contents)
    assert all(bundles.object_id(content) == name for name, content in contents.items())
    root = came[tree.object_id]
    (message,), _ = bundles.unbundle(tree.object_id, root, contents, max_bytes=0)
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=superlink.node, run_id=superlink.run, message_object_id=tree.object_id
    )
    superlink.fleet.ConfirmMessageReceived(confirm)
    return message


def got(superlink: Any, name: str, size: int) -> Iterator[bytes]:
    return channel.get(calling(superlink, GET), superlink.node, superlink.run, name, size)


def put(superlink: Any, content: bytes, upload: str = "") -> str:
    own = upload or channel.new_upload()
    call = calling(superlink, PUT)
    return channel.put(call, superlink.node, superlink.run, memoryview(content), own)


def replied(superlink: Any, message: Message, seed: int, *, whole: bool = True) -> tuple[Any, Made]:
    """The silo's reply, with or without the contents that it names, and the answer to it."""
    record = wire.encode_arrays({"w": numbers(seed)}, packed=True)
    reply = Message(RecordDict({"arrays": record}), reply_to=message)
    made = Made([reply])
    for name in made.blobs if whole else ():
        assert put(superlink, made.contents[name]) == name
    return announced(superlink, reply, made, [made.contents[made.root]]), made


def announced(superlink: Any, reply: Message, made: Made, along: Iterable[bytes]) -> Any:
    reply.metadata.__dict__["_message_id"] = made.root
    request = fleet_pb2.PushMessagesRequest(
        node=superlink.node,
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[made.tree],
    )
    inline_objects.attach(request, along)
    return superlink.fleet.PushMessages(request)


def model_to(superlink: Any, seed: int = 0) -> Message:
    arrays = wire.encode_arrays({"w": numbers(seed)}, packed=True)
    return Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train", ttl=60.0)


@pytest.mark.parametrize("shared", [True, False], ids=["same machine", "another machine"])
@pytest.mark.parametrize(
    "superlink",
    [FLWR_IN_MEMORY_DB_NAME, pytest.param("state.db", marks=pytest.mark.nightly)],
    indirect=True,
)
def test_models_travel_both_ways_by_files_or_by_calls(
    superlink: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, calls = grid_of(superlink), list[str]()
    if not shared:
        monkeypatch.setattr(blob_store, "find", lambda location: None)
    for call in ("Put", "Get", "PushObject"):
        noted(grid._objects, call, calls)
    (asked,) = grid.push([model_to(superlink)])
    on = superlink.store.shelf
    assert len(names(on)) == 1 and not [name for name in names(on) if name.endswith(blob_store.NEW)]
    assert [name for name, _ in calls] == ([] if shared else ["Put"] * 3)
    message = fetched(superlink)
    assert superlink.parts == [(GET, at * PART_BYTES) for at in range(3)]
    got = wire.decode_arrays(message.content["arrays"])
    np.testing.assert_array_equal(got["w"], numbers(0))
    assert names(on) == set(), "it is deleted when the silo has it"
    message.metadata.__dict__["_message_id"] = asked
    answer, _ = replied(superlink, message, 7)
    assert not answer.objects_to_push
    calls.clear()
    (reply,) = grid.pull([asked], 0.0)
    assert [name for name, _ in calls] == ([] if shared else ["Get"] * 3)
    assert names(on) == set() and len(superlink.store) == 0
    update = wire.decode_arrays(reply.content["arrays"])["w"]
    np.testing.assert_array_equal(update, numbers(7))
    assert not update.flags.writeable
    if shared:  # it is where its file is shown, and stays there as long as anybody looks
        assert "mmap" in str(type(owner_of(reply.content["arrays"]["safetensors"])))
        del reply
        gc.collect()
        np.testing.assert_array_equal(update, numbers(7))


def test_a_model_for_several_silos_is_stored_once(superlink: Any) -> None:
    grid, arrays = grid_of(superlink), wire.encode_arrays({"w": numbers(0)}, packed=True)
    messages = [
        Message(RecordDict({"arrays": arrays, **configured(n=n)}), superlink.node.node_id, "train")
        for n in range(3)
    ]
    grid.push(messages)
    assert len(names(superlink.store.shelf)) == 1 and len(superlink.store) == 4
    grid.push([Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train")])
    assert len(names(superlink.store.shelf)) == 1, "nor is it kept in another file"
    for left in (1, 1, 1, 0):
        fetched(superlink)
        assert len(names(superlink.store.shelf)) == left


def test_what_a_silo_has_put_twice_is_kept_once(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid.push([message_to(superlink), message_to(superlink)])
    for _ in range(2):
        answer, made = replied(superlink, handed_out(superlink), 7)
        assert not answer.objects_to_push and names(superlink.store.shelf) == set(made.blobs)


@pytest.mark.parametrize("full", [False, True], ids=["in a file", "with a full disk"])
def test_a_large_reply_that_comes_by_calls_need_not_fit_in_memory(
    superlink: Any, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "find", lambda location: None)
    monkeypatch.setattr(announced_reply, "LARGE_BYTES", NUMBERS)
    grid = grid_of(superlink)
    grid._folder = tmp_path / "gone" if full else tmp_path
    (asked,) = grid.push([model_to(superlink)])
    message = fetched(superlink)
    message.metadata.__dict__["_message_id"] = asked
    replied(superlink, message, 7)
    (reply,) = grid.pull([asked], 0.0)
    record = reply.content["arrays"]
    np.testing.assert_array_equal(wire.decode_arrays(record)["w"], numbers(7))
    assert ("mmap" in str(type(owner_of(record["safetensors"])))) is not full


def test_a_silo_that_waits_is_asked_who_it_is_in_one_object(superlink: Any) -> None:
    room, node = superlink.room, superlink.node.node_id
    grid, calls = grid_of(superlink), list[str]()
    grid._nodes.bundling.clear()
    noted(grid._stub, "PushMessages", calls)  # of a bundle

    def question() -> Message:
        content = RecordDict({wire.CONFIG: ConfigRecord({wire.TASK: "t"})})
        return Message(content, node, wire.DESCRIBE, ttl=60.0)

    assert all(grid.push([question()])) and not calls, "as Flower has it: it may be any"
    asked = fleet_pb2.PullMessagesRequest(node=superlink.node)
    assert superlink.fleet.PullMessages(asked).messages_list
    assert not superlink.fleet.PullMessages(asked).messages_list
    room.hold(node, lambda why: None)
    assert all(grid.push([question()])) and len(calls) == 1
    config = fetched(superlink).content[wire.CONFIG]
    assert config[wire.TASK] == "t" and config[wire.BUNDLES]
    calls.clear()
    room.came([node])
    assert all(grid.push([question()])) and not calls, "it is no longer queued:"


# ---------------------------------------------------------------- objects along with messages

ALONG = ((wire.ALONG, "1"),)


def asked_along(superlink: Any) -> tuple[Any, dict[str, bytes]]:
    """What the silo is handed out, and what came along."""
    request = fleet_pb2.PullMessagesRequest(node=superlink.node)
    answer = superlink.fleet.PullMessages(request, metadata=ALONG)
    return answer, inline_objects.attached(answer)


def handed_out(superlink: Any) -> Message:
    """The message that the silo is handed out, of what came along."""
    answer, came = asked_along(superlink)
    root = answer.message_object_trees[0].object_id
    (message,), _ = bundles.unbundle(root, came[root], {}, max_bytes=0)
    message.metadata.__dict__["_message_id"] = answer.messages_list[0].metadata.message_id
    return message


def reply_along(superlink: Any, message: Message, content: RecordDict) -> tuple[Any, Made]:
    """The silo's small reply in the same call."""
    reply = Message(content, reply_to=message)
    made = Made([reply])
    return announced(superlink, reply, made, [made.contents[made.root], b"of nobody"]), made


def configured(**entries: Any) -> RecordDict:
    return RecordDict({wire.CONFIG: ConfigRecord(entries)})


@pytest.mark.parametrize("superlink", [FLWR_IN_MEMORY_DB_NAME, "state.db"], indirect=True)
def test_a_small_message_and_its_reply_take_a_call_each_at_either_end(superlink: Any) -> None:
    grid, calls = grid_of(superlink), list[Any]()
    names_of_calls = ("PushMessages", "PullMessages", "PushObject", "ConfirmMessageReceived")
    for stub, own in ((grid._stub, names_of_calls), (grid._objects, ["PullObject"])):
        for call in own:
            noted(stub, call, calls)
    grid._find_channel()
    calls.clear()
    sent = Message(configured(n=1), superlink.node.node_id, "train", ttl=60.0)
    (asked,) = grid.push([sent])
    assert [name for name, _ in calls] == ["PushMessages"]
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    assert set(came) == {tree.object_id} and len(superlink.store) == 0, "it counts as received"
    (message,), _ = bundles.unbundle(tree.object_id, came[tree.object_id], {}, max_bytes=0)
    assert message.content[wire.CONFIG]["n"] == 1
    message.metadata.__dict__["_message_id"] = asked
    calls.clear()
    announced, made = reply_along(superlink, message, configured(n=2))
    assert not announced.objects_to_push
    assert len(superlink.store) == 1 and superlink.store.get(made.root), "and nobody's is not kept"
    (reply,) = grid.pull([asked], 0.0)
    assert [name for name, _ in calls] == ["PullMessages"]
    assert reply.content[wire.CONFIG]["n"] == 2 and len(superlink.store) == 0


def test_a_message_whose_contents_do_not_go_along_is_confirmed_by_who_has_them(
    superlink: Any,
) -> None:
    grid_of(superlink).push([model_to(superlink)])
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    assert set(came) == {tree.object_id} and len(superlink.store) == 2, "it is not confirmed"


def test_a_large_bundle_is_a_content_itself(superlink: Any) -> None:
    grid, text = grid_of(superlink), "x" * FROM_BYTES
    (asked,) = grid.push([configured_to(superlink, text=text)])
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    assert not came and names(superlink.store.shelf) == {tree.object_id}
    request = message_pb2.PullObjectRequest(
        node=superlink.node, run_id=superlink.run, object_id=tree.object_id
    )
    root = superlink.fleet.PullObject(request).object_content
    (message,), _ = bundles.unbundle(tree.object_id, root, {}, max_bytes=0)
    assert message.content[wire.CONFIG]["text"] == text
    message.metadata.__dict__["_message_id"] = asked
    reply = Message(configured(text=text[::-1]), reply_to=message)
    made = Made([reply])
    assert put(superlink, made.contents[made.root]) == made.root
    assert not announced(superlink, reply, made, []).objects_to_push
    (came_back,) = grid.pull([asked], 0.0)
    assert came_back.content[wire.CONFIG]["text"] == text


def test_a_reply_whose_contents_are_on_their_way_is_waited_for_alone(superlink: Any) -> None:
    """It may be seen in the moment between Flower's record of it and that of its contents."""
    grid = grid_of(superlink)
    asked = list(grid.push([message_to(superlink), message_to(superlink)]))
    answer, made = replied(superlink, handed_out(superlink), 7, whole=False)
    reply_along(superlink, handed_out(superlink), configured(n=2))
    assert set(answer.objects_to_push) == set(made.blobs)
    (first,) = grid.pull(asked, 0.0)
    assert first.content[wire.CONFIG]["n"] == 2
    assert not grid._holds(1), "it is asked for again and again"
    assert not grid.pull(asked, 0.0)
    (name,) = made.blobs
    put(superlink, made.contents[name])
    offered = superlink.store.shelf.offered(name, superlink.run, superlink.node.node_id)
    superlink.store.put(name, offered)
    (second,) = grid.pull(asked, 0.0)
    np.testing.assert_array_equal(wire.decode_arrays(second.content["arrays"])["w"], numbers(7))


@pytest.mark.parametrize(
    ("size", "said"), [(2**20, "instead of"), (2**40, "more than"), (5, "instead of")]
)
def test_a_content_of_another_size_is_an_error_of_its_silo(
    superlink: Any, size: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_of(superlink)
    (asked,) = grid.push([message_to(superlink)])
    message = handed_out(superlink)

    reply = Message(model_to(superlink, 7).content, reply_to=message)
    made = Made([reply])
    body, index, start = bundles._opened(made.content)
    (place,) = index["arrays"]
    put(superlink, made.contents[place[0]])
    place[1] = size
    head = json.dumps(index).encode()
    content = bundles._as_object(len(head).to_bytes(8, "little"), head, body[start:])
    made.root = bundles.object_id(content)
    made.tree.object_id = made.root
    announced(superlink, reply, made, [content])
    (error,) = grid.pull([asked], 0.0)
    assert error.error.code == wire.UNREADABLE and said in error.error.reason


# ---------------------------------------------------------------- hostile calls of the channel


def test_an_upload_goes_on_where_it_was_cut(superlink: Any) -> None:
    content, upload = bytes(range(256)) * 2**17, channel.new_upload()
    call, left = calling(superlink, PUT), [2]

    def cut(part: Part) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError
        return call(part)

    args = superlink.node, superlink.run, memoryview(content), upload
    with pytest.raises(ConnectionError):
        channel.put(cut, *args)
    superlink.parts.clear()
    assert channel.put(call, *args) == bundles.object_id(content)
    assert superlink.parts == [(PUT, at * PART_BYTES) for at in (0, 2, 3)], "the first one asks"
    superlink.parts.clear()
    assert channel.put(call, *args) == bundles.object_id(content), "its last answer was lost"
    assert superlink.parts == [(PUT, 0)]


def test_a_forgotten_upload_begins_again(superlink: Any) -> None:
    content, forgets = bytes(3 * PART_BYTES), [True]
    call = calling(superlink, PUT)

    def forgetful(part: Part) -> bytes:
        if part.at == PART_BYTES and forgets:
            forgets.pop()
            part = Part(part.node, part.run_id, "other", part.at, part.size, part.object_content)
        return call(part)

    name = channel.put(
        *(forgetful, superlink.node, superlink.run, memoryview(content), channel.new_upload())
    )
    assert name == bundles.object_id(content) and not forgets

    def always(part: Part) -> bytes:
        return channel.UNKNOWN

    with pytest.raises(channel.ChannelError, match="forgotten"):
        channel.put(always, superlink.node, superlink.run, memoryview(content), "u")


@pytest.mark.parametrize(
    "head",
    [
        *("", "x", "[]", "{}", "5", '[1, 2, "a", 0]', '[1, 2, "a", 5, 4]', '[1, 2, "../a", 0, 4]'),
        *('[1, 2, "", 0, 4]', '[-1, 2, "a", 0, 4]', '[1, 2, "a", 0.5, 4]', '[1, 2, "a", 0, true]'),
        *(f'[1, 2, "{65 * "a"}", 0, 4]', f'[1, 2, "a", 0, {2**41}]', "[" * 5000),
        "[1, 2, 5, 0, 4]",
    ],
)
def test_a_call_that_describes_no_part_is_refused(superlink: Any, head: str) -> None:
    for call in (superlink.fleet.Put, superlink.fleet.Get):
        with pytest.raises(grpc.RpcError) as refused:
            call(Part(superlink.node, superlink.run, "a", 0), metadata=((HEAD, head),))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_parts_that_do_not_fit_are_not_stored(superlink: Any) -> None:
    def part(at: int, size: int, content: bytes, upload: str = "u") -> bytes:
        own = Part(superlink.node, superlink.run, upload, at, size, content)
        return calling(superlink, PUT)(own)

    assert part(5, 9, b"xxxx") == channel.UNKNOWN, "without a beginning"
    assert part(0, 9, b"12345") == b"5"
    assert part(0, 9, b"12") == part(3, 9, b"xxxx") == b"5", "it has come already"
    for at, size, content in ((6, 9, b"xxx"), (5, 9, b"xxxxx"), (5, 8, b"xxx")):
        assert part(at, size, content) == channel.UNKNOWN
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        part(5, 9, b"")
    assert part(5, 9, b"6789").decode() == bundles.object_id(b"123456789")


def test_a_silo_has_few_unfinished_uploads(superlink: Any) -> None:
    def begin(upload: str, at: int = 0) -> bytes:
        own = Part(superlink.node, superlink.run, upload, at, 9, b"x")
        return calling(superlink, PUT)(own)

    for number in range(uploads.MOST + 1):
        assert begin(f"u{number}") == b"1"
    assert begin("u0", 1) == channel.UNKNOWN and begin("u1", 1) == b"2"
    folder = superlink.store.shelf.folder
    assert len([*folder.glob(f"*{blob_store.UNFINISHED}")]) == uploads.MOST


def test_what_a_silo_puts_counts_as_what_it_sends(superlink: Any) -> None:
    used = superlink.allowances._account(superlink.run, superlink.node.node_id)
    before = used.num_bytes, used.num_objects
    put(superlink, bytes(PART_BYTES + 1))
    assert (used.num_bytes, used.num_objects) == (before[0] + PART_BYTES + 1, before[1] + 1)
    used.num_bytes = used.most_bytes + wire.MAX_MODEL_BYTES
    with pytest.raises(grpc.RpcError) as refused:
        put(superlink, b"x")
    assert "limit" in refused.value.details()
    before = used.most_bytes
    grid_of(superlink).push([model_to(superlink)])
    fetched(superlink)
    assert used.most_bytes - before > 8 * 4 * NUMBERS, "and what it gets raises its limit"


@pytest.mark.parametrize("call", ["Put", "Get"])
def test_a_stranger_and_a_run_that_is_over_are_refused(superlink: Any, call: str) -> None:
    body = b"x" if call == "Put" else b""

    def refused(node: Node, run: int) -> Any:
        part = Part(node, run, "a" * 64, 0, 1, body)
        with pytest.raises(grpc.RpcError) as error:
            getattr(superlink.fleet, call)(part, metadata=part.head)
        return error.value.code()

    other = Node(node_id=superlink.node.node_id + 1)
    assert refused(other, superlink.run) == grpc.StatusCode.UNAUTHENTICATED
    assert refused(superlink.node, superlink.run + 1) == grpc.StatusCode.INTERNAL, (
        "as Flower has it"
    )
    (task,) = (r.primary_task_id for r in superlink.state.get_run_info(run_ids=[superlink.run]))
    superlink.state.finish_task(task, "stopped", "")
    assert refused(superlink.node, superlink.run) == grpc.StatusCode.PERMISSION_DENIED
    with grpc.insecure_channel(superlink.address) as stranger:
        method = stranger.unary_unary(PUT if call == "Put" else GET)
        for metadata in ((), (("flwr-task-token", "guess"),)):
            part = Part(Node(node_id=1), superlink.run, "a", 0, 1)
            with pytest.raises(grpc.RpcError) as error:
                method(body, metadata=(*metadata, *part.head))
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert names(superlink.store.shelf) == set()


def test_what_another_silo_has_put_cannot_be_announced(superlink: Any) -> None:
    content = bytes(FROM_BYTES)
    name = put(superlink, content)
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    on, node = superlink.store.shelf, superlink.node.node_id
    on.offered(name, superlink.run, node).rename(on.offered(name, superlink.run, node + 1))
    reply = Message(RecordDict(), reply_to=handed_out(superlink))
    made = Made([reply])
    made.tree.children.add(object_id=name)
    answer = announced(superlink, reply, made, [made.contents[made.root]])
    assert answer.objects_to_push == [name]


def test_a_content_that_is_not_there_is_said_to_be_missing(superlink: Any) -> None:
    with pytest.raises(ObjectPullError):
        next(got(superlink, "f" * 64, 5))


def test_who_does_not_say_so_is_sent_objects_by_calls(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    request = fleet_pb2.PullMessagesRequest(node=superlink.node)
    answer = superlink.fleet.PullMessages(request)
    assert (
        answer.messages_list and not inline_objects.attached(answer) and len(superlink.store) == 1
    )


def test_what_a_silo_sends_along_counts_as_what_it_sends(superlink: Any) -> None:
    """By its allowance; a silo that has sent too much finds that its run is over."""
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    message = handed_out(superlink)
    used = superlink.allowances._account(superlink.run, superlink.node.node_id)
    before = used.num_bytes
    _, made = reply_along(superlink, message, configured(words="x" * 5000))
    assert used.num_bytes - before == len(made.contents[made.root])


def test_a_silo_is_told_of_a_message_when_its_objects_are_there(superlink: Any) -> None:
    node, there, store = superlink.node.node_id, list[int](), superlink.store
    superlink.room.looks(node)(0)
    superlink.room.hold(
        node, lambda _: there.append(sum(one.is_available for one in store.store.values()))
    )
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    assert there == [1]


def owner_of(array: Array) -> object:
    """Return the object that owns the memory of an array."""
    return memoryview(array.data).obj


def noted(stub: Any, name: str, calls: list[Any]) -> None:
    """Note the calls of a name, and how much each brings."""
    inner = getattr(stub, name)

    def call(request: Any, **how: Any) -> Any:
        calls.append((name, len(getattr(request, "object_content", b""))))
        return inner(request, **how)

    setattr(stub, name, call)


def test_a_folder_that_is_gone_is_looked_for_again(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid._find_channel()
    own = grid._store
    assert own is not None and own.folder == superlink.store.shelf.folder
    grid._store = blob_store.BlobStore(own.folder / "gone")
    grid.push([model_to(superlink)])
    assert grid._store.folder == own.folder
    np.testing.assert_array_equal(
        wire.decode_arrays(fetched(superlink).content["arrays"])["w"], numbers(0)
    )


@pytest.mark.parametrize("patience", ["", "0", "x", "-1"])
def test_a_silo_that_does_not_want_it_is_not_held(superlink: Any, patience: str) -> None:
    metadata = ((wire.PATIENCE, patience),) if patience else ()
    asked = fleet_pb2.PullMessagesRequest(node=superlink.node)
    assert not superlink.fleet.PullMessages(
        asked, metadata=metadata, timeout=AT_ONCE_S
    ).messages_list


def test_a_silo_that_wants_it_is_held_until_there_may_be_a_message(
    superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    metadata = ((wire.PATIENCE, str(LONG_MS)),)
    asked = fleet_pb2.PullMessagesRequest(node=superlink.node)
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(superlink.fleet.PullMessages, asked, metadata=metadata)
        time.sleep(0.2)
        assert not held.done()
        grid_of(superlink).push([message_to(superlink)])
        answer = held.result(AT_ONCE_S)
    assert not answer.messages_list
    assert len(superlink.fleet.PullMessages(asked, metadata=metadata).messages_list) == 1, (
        "whoever was held might be gone: a message goes to a call that begins when it is there"
    )


@pytest.mark.parametrize("patience, seconds", [("300", 0.3), (str(60_000), 0.5)])
def test_a_silo_is_held_as_long_as_it_wants_and_not_too_long(
    superlink: Any, monkeypatch: pytest.MonkeyPatch, patience: str, seconds: float
) -> None:
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", 500)
    metadata = ((wire.PATIENCE, patience),)
    asked, began = fleet_pb2.PullMessagesRequest(node=superlink.node), time.monotonic()
    assert not superlink.fleet.PullMessages(
        asked, metadata=metadata, timeout=AT_ONCE_S
    ).messages_list
    assert time.monotonic() - began >= seconds


def configured_to(superlink: Any, **entries: Any) -> Message:
    return Message(configured(**entries), superlink.node.node_id, "train", ttl=60.0)


def message_to(superlink: Any) -> Message:
    content = RecordDict({"arrays": wire.encode_arrays({"w": np.zeros(3)}, packed=True)})
    return Message(content, superlink.node.node_id, "train", ttl=60.0)


def patient() -> Any:
    """The context of a call that wants to be held as long as may be."""
    return SimpleNamespace(invocation_metadata=lambda: ((wire.PATIENCE, str(LONG_MS)),))


def until_held(arrivals: Arrivals) -> None:
    deadline = time.monotonic() + AT_ONCE_S
    while not arrivals._held:
        assert time.monotonic() < deadline, "nobody is held"
        time.sleep(0.005)


def test_only_so_many_calls_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "MOST_HELD", 1)
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    arrivals = Arrivals()

    def ask() -> None:
        arrivals.held(lambda: SimpleNamespace(messages_list=[]), patient())

    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(ask)
        until_held(arrivals)
        threads.submit(ask).result(AT_ONCE_S)
        assert not held.done()
        with arrivals.coming():
            pass
        held.result(AT_ONCE_S)


def held_for(arrivals: Arrivals, most: int, ask: Callable[[], None] = lambda: None) -> Any:
    """Hold a call in vain for so many messages."""

    def look() -> Any:
        ask()
        return SimpleNamespace(messages_list=[])

    return arrivals.held(look, patient(), most)


def come(arrivals: Arrivals, count: int = 1) -> None:
    for _ in range(count):
        with arrivals.coming():
            pass


def test_a_call_is_held_until_as_many_have_come_as_it_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrying, "GATHER_S", LONG_MS / 1000)
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    arrivals = Arrivals()
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(held_for, arrivals, 3)
        until_held(arrivals)
        come(arrivals, 2)
        time.sleep(0.2)
        assert not held.done(), "the third may come at once"
        come(arrivals)
        held.result(AT_ONCE_S)
        threads.submit(held_for, arrivals, 2, lambda: come(arrivals, 2)).result(AT_ONCE_S)


def test_a_call_is_not_held_for_those_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    arrivals = Arrivals()
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(held_for, arrivals, 3)
        until_held(arrivals)
        come(arrivals)
        held.result(AT_ONCE_S)


def test_replies_of_other_apps_are_read_as_before(superlink: Any) -> None:
    """Flower's own pieces, of 5 MB, are objects like any other."""
    record = ArrayRecord({"w": Array(numbers(3))})
    message = Message(RecordDict({"arrays": record}), superlink.node.node_id, "train", ttl=60.0)
    grid = grid_of(superlink)
    grid._nodes.bundling.clear()
    (asked,) = grid.push([message])
    assert asked and not names(superlink.store.shelf) and len(superlink.store) == 8
