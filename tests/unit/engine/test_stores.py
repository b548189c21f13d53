"""Large objects in files that a SuperLink of Flower 1.34 shares with a ServerApp of its machine."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.grpc_grid import GrpcGrid

from coterie import wire
from coterie.engine.fast import bundles, inline_objects
from coterie.engine.fast.bundles import PIECE_BYTES, Bundle
from coterie.engine.fast.pulled import Piece
from coterie.engine.fast.run import pulling
from coterie.engine.fast.superlink import blob_store, carrying
from coterie.engine.fast.superlink.carrying import Arrivals
from coterie.engine.fast.superlink.leftovers import forget_ended_runs
from coterie.engine.fast.superlink.stores import FiledStore, Laid, SqlStore, laid
from tests.unit.server.superlinks import Signature, serving, silo_of

Store = FiledStore | SqlStore
NUMBERS = 5_000_000
"""Of a model: three pieces of 8 MB and less."""
AT_ONCE_S, LONG_MS = 20.0, 60_000
"""Far more than a notification takes on a loaded machine, and what waiting for it in vain
would."""


@pytest.fixture
def on(tmp_path: Path) -> Iterator[blob_store.BlobStore]:
    with blob_store.opened(tmp_path) as folder:
        yield folder


@contextmanager
def opened(database: Path) -> Iterator[SqlStore]:
    """The store of a SuperLink with a database, until that ends."""
    with ExitStack() as held:
        store = SqlStore(str(database), held.enter_context)
        store.initialize()
        yield store


@pytest.fixture(params=["memory", "database"])
def store(request: Any, tmp_path: Path, on: blob_store.BlobStore) -> Iterator[Store]:
    if request.param == "memory":
        yield FiledStore(on)
        return
    with opened(tmp_path / "state.db") as made:
        yield made


def folder_of(store: Store) -> blob_store.BlobStore:
    assert store.shelf is not None
    return store.shelf


def names(on: blob_store.BlobStore) -> set[str]:
    """Of the objects in the folder."""
    return {file.name for file in on.folder.iterdir()} - {
        blob_store.TOKEN,
        "lock",
        blob_store.SPARE,
    }


def order(seed: int = 0) -> Bundle:
    arrays = wire.encode_arrays({"w": numbers(seed)}, packed=True)
    return bundles.bundle([Message(RecordDict({"arrays": arrays}), 1, "train")])


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMBERS, np.float32)


def kept(store: Store, made: Bundle, run: int = 1) -> None:
    """Announce a bundle and push what is asked for."""
    for name in store.preregister(run, made.tree):
        push(store, name, bytes(made.objects[name]))


def push(store: Store, name: str, content: bytes) -> None:
    """As the SuperLink does with what a silo sends."""
    request = SimpleNamespace(object_id=name, object_content=memoryview(content))
    with laid(store, request):
        store.put(name, request.object_content)


# ---------------------------------------------------------------- the store


def test_a_large_object_lies_in_a_file_and_goes_with_the_last_message_that_has_it(
    store: Store,
) -> None:
    on, made = folder_of(store), order()
    other = Bundle(made.root[::-1], {**made.objects})
    kept(store, made)
    pieces = set(made.objects) - {made.root}
    assert len(pieces) == 3 and names(on) == pieces, "what is small stays in memory"
    for name, content in made.objects.items():
        assert bytes(store.get(name)) == bytes(content)
        if name in pieces:
            assert (on.folder / name).read_bytes() == bundles.body_of(content)
            assert (on.folder / name).stat().st_mode & 0o777 == 0o600
    del other.objects[made.root]
    store.preregister(2, other.tree)  # the same model in another message
    store.delete(made.root)
    assert names(on) == pieces and made.root not in store
    seen = store.get(min(pieces))
    store.delete(other.root)
    assert names(on) == set() and len(store) == 0
    assert bytes(seen) == bytes(made.objects[min(pieces)]), "who looks at it still sees it"


def test_so_it_does_with_the_run_and_with_the_store(store: Store) -> None:
    on = folder_of(store)
    kept(store, order(0), run=1)
    kept(store, order(1), run=2)
    assert len(names(on)) == 6
    store.delete_objects_in_run(1)
    assert len(names(on)) == 3
    store.clear()
    assert names(on) == set()


@pytest.mark.parametrize("size", [10, PIECE_BYTES])
def test_what_is_not_what_its_name_says_is_refused(store: Store, size: int) -> None:
    on = folder_of(store)
    good = bytes(bundles.piece_of(memoryview(bytes(size))))
    name, other = bundles.object_id(good), good[:-1] + b"x"
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    with pytest.raises(ValueError, match="does not match content hash"):
        push(store, name, other)
    with pytest.raises(NoObjectInStoreError):
        push(store, bundles.object_id(other), other)
    assert names(on) == set() and store.get(name) == b""
    push(store, name, good)
    push(store, name, good)
    assert bytes(store.get(name)) == good and len(names(on)) == (size > 10)


@pytest.mark.parametrize(
    "head", [b"ArrayChunk  9\0", b"Message  400000\0", b"ArrayChunk  0400000\0"]
)
def test_an_object_with_another_head_stays_as_it_is_or_is_refused(
    store: Store, head: bytes
) -> None:
    content = head + bytes(400_000)
    name = bundles.object_id(content)
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    try:
        push(store, name, content)
    except Exception as error:
        assert "expected 9 bytes" in str(error)
    else:
        assert store.get(name) == content
    assert names(folder_of(store)) == set()


def test_only_the_process_of_a_run_says_that_an_object_is_there_already(store: Store) -> None:
    on, body = folder_of(store), memoryview(bytes(PIECE_BYTES))
    name = bundles.object_id(bundles.piece_of(body))
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    offered = Laid(on.offered(name))
    with pytest.raises(FileNotFoundError):
        store.put(name, offered)
    on.offer(name, body)
    for empty in (b"", memoryview(b""), Piece(b"", memoryview(b""))):  # as a silo sends it
        with pytest.raises(ValueError, match="does not match"):
            store.put(name, empty)
    assert store.get(name) == b""
    store.put(name, offered)
    assert bytes(store.get(name)) == bytes(bundles.piece_of(body))


def test_where_there_is_no_room_objects_stay_where_flower_has_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blob_store.os, "write", full)
    made = order()
    kept(store, made)
    assert names(folder_of(store)) == set()
    assert all(bytes(store.get(n)) == bytes(c) for n, c in made.objects.items())
    store.delete(made.root)
    assert len(store) == 0


def test_what_flower_does_not_take_leaves_no_file(store: Store) -> None:
    made = order()
    store.preregister(1, made.tree)
    name = min(set(made.objects) - {made.root})
    request = SimpleNamespace(object_id=name, object_content=bytes(made.objects[name]))
    with laid(store, request):
        assert isinstance(request.object_content, Laid)
        assert len(request.object_content) == len(made.objects[name]), "of which its traffic is"
    assert names(folder_of(store)) == set() and store.get(name) == b""


# ---------------------------------------------------------------- beside a database


def test_objects_of_a_database_are_there_after_a_restart_and_only_they(tmp_path: Path) -> None:
    file, made, gone = tmp_path / "state.db", order(0), order(1)
    pieces = sorted(set(made.objects) - {made.root})
    with opened(file) as store:
        kept(store, made)
        kept(store, gone)
        store.preregister(2, order(2).tree)
        size = file.stat().st_size
        assert size < 2_000_000, "the database itself has none of them"
    on = blob_store.BlobStore(blob_store.beside(file))
    assert len(names(on)) == 6 and on.folder.stat().st_mode & 0o777 == 0o700
    # Killed after a file had its name and before the database had it; a disk that lost one's end.
    on.write("f" * 64, b"x").rename(on.folder / ("f" * 64))
    os.truncate(on.folder / pieces[0], 100)
    with opened(file) as store:
        assert names(on) == (set(made.objects) | set(gone.objects)) - {
            *(made.root, gone.root, pieces[0])
        }
        assert store.get(pieces[0]) is None, "which is not there, rather than wrong"
        for name in (*pieces[1:], made.root):
            assert bytes(store.get(name)) == bytes(made.objects[name])
        store.delete(gone.root)
        store.delete(made.root)
        assert names(on) == set()


def test_a_file_stays_until_the_database_has_it_that_its_object_is_gone(tmp_path: Path) -> None:
    made = order()
    with opened(tmp_path / "state.db") as store:
        kept(store, made)
        with pytest.raises(ZeroDivisionError), store.session():
            store.delete(made.root)
            assert made.root not in store
            raise ZeroDivisionError
        on = folder_of(store)
        assert len(names(on)) == 3 and made.root in store
        name = min(names(on))
        assert bytes(store.get(name)) == bytes(made.objects[name])


def test_files_of_ended_runs_are_deleted(tmp_path: Path) -> None:
    file, made = tmp_path / "state.db", order()
    stores = ObjectStoreFactory(str(file))
    state = LinkStateFactory(str(file), NoOpFederationManager(), stores).state()
    run = state.create_run("", "", "", {}, "@none/default", None, "me", "serverapp")
    with opened(file) as store:
        kept(store, made, run)
        on = folder_of(store)
        forget_ended_runs(file)
        assert len(names(on)) == 3, "the run is active"
        (task,) = (one.primary_task_id for one in state.get_run_info(run_ids=[run]))
        state.finish_task(task, "failed", "its process was killed")
        forget_ended_runs(file)
        assert names(on) == set() and len(store) == 0


# ---------------------------------------------------------------- the folder


def test_the_folder_is_for_its_owner_and_goes_with_the_superlink(tmp_path: Path) -> None:
    (tmp_path / "objects-left").mkdir()  # by one that was killed
    (tmp_path / "objects-left" / "0").touch()
    with blob_store.opened(tmp_path) as one, blob_store.opened(tmp_path) as other:
        assert one.folder != other.folder and len(list(tmp_path.iterdir())) == 2
        assert one.folder.stat().st_mode & 0o777 == 0o700
        found = blob_store.find(one.location())
        assert found is not None and found.folder == one.folder
        assert blob_store.find(one.location().replace(b'"word": "', b'"word": "0')) is None
    assert list(tmp_path.iterdir()) == []
    for location in (b"", b"{}", b"[1]", b'{"place": 1}', b'{"place": "/nowhere", "word": "x"}'):
        assert blob_store.find(location) is None


def test_what_a_killed_process_put_there_is_forgotten(on: blob_store.BlobStore) -> None:
    for name in ("a" * 64, "b" * 64):
        on.offer(name, b"x")
    os.utime(on.folder / ("a" * 64 + blob_store.NEW), (0, 0))
    on.forget_unannounced()
    assert names(on) == {"b" * 64 + blob_store.NEW}


def test_a_file_is_written_into_again_when_nobody_looks_at_it(on: blob_store.BlobStore) -> None:
    bodies = [bytes([number]) * blob_store.FROM_BYTES for number in range(3)]
    names_of = [bundles.object_id(bundles.piece_of(memoryview(body))) for body in bodies]

    def put(number: int) -> int:
        on.adopt(names_of[number], on.write(names_of[number], bodies[number]))
        return (on.folder / names_of[number]).stat().st_ino

    first = put(0)
    room = blob_store.Room(1)
    views = [on.shown(names_of[0]), on.shown(names_of[0], room, 0)]
    on.drop(names_of[0])
    assert names(on) == set() and on.shown(names_of[0]) is None
    second = put(1)
    assert second != first and all(view and view.body == bodies[0] for view in views)
    views.pop()
    assert put(2) != first, "a second one still looks"
    del views, room
    on.drop(names_of[1])
    other = blob_store.BlobStore(on.folder)  # a ServerApp's
    taken = {other.write(names_of[0], bodies[0]).stat().st_ino for _ in range(2)}
    assert taken == {first, second}, "either end takes them"
    assert len({other.write(names_of[0], body).stat().st_ino for body in bodies} | taken) == 5


def test_what_is_being_written_into_is_not_shown(on: blob_store.BlobStore) -> None:
    body = bytes(blob_store.FROM_BYTES)
    for name in ("a" * 64, "b" * 64):
        on.adopt(name, on.write(name, body))
    descriptor = os.open(on.folder / ("a" * 64), os.O_RDONLY)
    with os.fdopen(os.open(on.folder / ("a" * 64), os.O_WRONLY)) as writer:
        flock(writer, LOCK_EX)
        assert on.shown("a" * 64) is None
    assert on.shown("a" * 64) is not None
    assert not blob_store._held(descriptor, on.folder / ("b" * 64)), "it has become another's"
    os.close(descriptor)


def test_files_that_are_not_written_again_go(
    on: blob_store.BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "SPARE_S", 1.0)
    monkeypatch.setattr(blob_store, "MOST_SPARE", 2)
    for name in ("a" * 64, "b" * 64, "c" * 64):
        on.adopt(name, on.write(name, bytes(blob_store.FROM_BYTES)))
    for name in ("a" * 64, "b" * 64, "c" * 64):
        on.drop(name)
    spare = on.folder / blob_store.SPARE
    assert len([*spare.iterdir()]) == 2 and names(on) == set()
    deadline = time.monotonic() + AT_ONCE_S
    while [*spare.iterdir()] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [*spare.iterdir()]
    monkeypatch.setattr(blob_store, "SPARE_FREE_BYTES", 2**80)
    on.adopt("a" * 64, on.write("a" * 64, bytes(blob_store.FROM_BYTES)))
    on.drop("a" * 64)
    assert not [*spare.iterdir()], "where the disk is full"


def test_no_file_that_is_written_again_outlives_the_superlink(tmp_path: Path) -> None:
    with blob_store.kept(tmp_path / "objects", ()) as on:
        on.adopt("a" * 64, on.write("a" * 64, bytes(blob_store.FROM_BYTES)))
        on.drop("a" * 64)
        assert [*(on.folder / blob_store.SPARE).iterdir()]
    assert not (on.folder / blob_store.SPARE).exists()


def test_what_is_forgotten_is_in_no_file_that_is_written_again(on: blob_store.BlobStore) -> None:
    """A silo that withdraws is promised that nothing of it is left."""
    for name in ("a" * 64, "b" * 64, "c" * 64):
        on.adopt(name, on.write(name, bytes(blob_store.FROM_BYTES)))
    on.drop("a" * 64)
    blob_store.BlobStore(on.folder).keep({"c" * 64})
    left = {file.name for file in on.folder.rglob("*") if file.is_file()}
    assert left - {blob_store.TOKEN, "lock"} == {"c" * 64}


# ---------------------------------------------------------------- with a ServerApp


@pytest.fixture
def superlink(request: Any, tmp_path: Path) -> Iterator[Any]:
    """A SuperLink with a run, and a silo's calls."""
    database = getattr(request, "param", FLWR_IN_MEMORY_DB_NAME)
    if database != FLWR_IN_MEMORY_DB_NAME:
        database = str(tmp_path / database)
    sign = Signature()
    with serving(tmp_path, database) as made, silo_of(made, sign) as fleet:
        yield SimpleNamespace(
            address=made.address,
            fleet=fleet,
            node=made.enrolled(sign),
            allowances=made.allowances,
            room=made.room,
            run=made.run,
            store=made.store,
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


def fetched(superlink: Any) -> Message:
    """What the silo is sent, by Flower's own stub: any silo reads it."""
    answer = superlink.fleet.PullMessages(fleet_pb2.PullMessagesRequest(node=superlink.node))
    contents = {}
    tree = answer.message_object_trees[0]
    for name in [tree.object_id] + [one.object_id for one in tree.children]:
        request = message_pb2.PullObjectRequest(
            node=superlink.node, run_id=superlink.run, object_id=name
        )
        contents[name] = superlink.fleet.PullObject(request).object_content
        assert bundles.object_id(contents[name]) == name
    (message,), _ = bundles.unbundle(tree.object_id, contents, max_bytes=0)
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=superlink.node, run_id=superlink.run, message_object_id=tree.object_id
    )
    superlink.fleet.ConfirmMessageReceived(confirm)
    return message


def answered(superlink: Any, message: Message, seed: int) -> Bundle:
    """The silo's reply, by Flower's own stub."""
    content = RecordDict({"arrays": wire.encode_arrays({"w": numbers(seed)}, packed=True)})
    answer, made = replied(superlink, message, content, lambda _: ())
    for name in answer.objects_to_push:
        push_object(superlink, answer, made, name)
    return made


def replied(
    superlink: Any,
    message: Message,
    content: RecordDict,
    along: Callable[[Bundle], Iterable[bytes]],
) -> tuple[Any, Bundle]:
    """What the SuperLink answers to a reply, and what that consists of."""
    reply = Message(content, reply_to=message)
    made = bundles.bundle([reply])
    reply.metadata.__dict__["_message_id"] = made.root
    request = fleet_pb2.PushMessagesRequest(
        node=superlink.node,
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[made.tree],
    )
    inline_objects.attach(request, along(made))
    return superlink.fleet.PushMessages(request), made


def push_object(superlink: Any, announced: Any, made: Bundle, name: str) -> None:
    """An object of a reply that was announced to the SuperLink."""
    pushed = message_pb2.PushObjectRequest(
        node=superlink.node,
        run_id=superlink.run,
        session_id=announced.session_id,
        object_id=name,
        object_content=bytes(made.objects[name]),
    )
    assert superlink.fleet.PushObject(pushed).stored


@pytest.mark.parametrize("shared", [True, False], ids=["same machine", "another machine"])
@pytest.mark.parametrize("superlink", [FLWR_IN_MEMORY_DB_NAME, "state.db"], indirect=True)
def test_models_travel_both_ways_by_files_or_by_calls(
    superlink: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, calls = grid_of(superlink), list[str]()
    if not shared:
        monkeypatch.setattr(blob_store, "find", lambda location: None)
    for stub in (grid._stub, grid._objects):
        for call in ("PushObject", "PullObject"):
            noted(stub, call, calls)
    arrays = wire.encode_arrays({"w": numbers(0)}, packed=True)
    sent = Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train", ttl=60.0)
    (asked,) = grid.push([sent])
    on = superlink.store.shelf
    assert len(names(on)) == 3 and not [name for name in names(on) if name.endswith(blob_store.NEW)]
    pushed = sorted(size for call, size in calls if call == "PushObject")
    assert len(pushed) == 4 and (pushed[:3] == [0, 0, 0]) is shared
    message = fetched(superlink)
    got = wire.decode_arrays(message.content["arrays"])
    np.testing.assert_array_equal(got["w"], numbers(0))
    assert names(on) == set(), "it is deleted when the silo has it"
    message.metadata.__dict__["_message_id"] = asked
    answered(superlink, message, 7)
    calls.clear()
    (reply,) = grid.pull([asked], 0.0)
    assert len([call for call, _ in calls if call == "PullObject"]) == (0 if shared else 3)
    assert names(on) == set() and len(superlink.store) == 0
    update = wire.decode_arrays(reply.content["arrays"])["w"]
    np.testing.assert_array_equal(update, numbers(7))
    assert not update.flags.writeable
    if shared:  # it is where its files are shown, and stays there as long as anybody looks
        assert "mmap" in str(type(owner_of(reply.content["arrays"]["safetensors"])))
        del reply
        gc.collect()
        np.testing.assert_array_equal(update, numbers(7))


def test_pieces_that_come_while_they_are_asked_for_lie_beside_the_others(
    superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, late = grid_of(superlink), set[str]()
    arrays = wire.encode_arrays({"w": numbers(0)}, packed=True)
    sent = Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train", ttl=60.0)
    (asked,) = grid.push([sent])
    message = fetched(superlink)
    message.metadata.__dict__["_message_id"] = asked
    answered(superlink, message, 7)
    inner = grid._shown

    def shown(reply: Any, name: str) -> Any:
        if name in late:
            return inner(reply, name)
        late.add(name)
        return None

    monkeypatch.setattr(grid, "_shown", shown)
    brought = list[int]()
    pull = grid._objects.PullObject

    def noting(request: Any, **how: Any) -> Any:
        answer = pull(request, **how)
        brought.append(len(answer.object_content))
        return answer

    grid._objects.PullObject = noting
    (reply,) = grid.pull([asked], 0.0)
    assert len(late) == len(brought) == 3 and not any(brought)
    assert "mmap" in str(type(owner_of(reply.content["arrays"]["safetensors"]))), "not copied"
    assert not grid._sent, "what was sent is let go"
    update = wire.decode_arrays(reply.content["arrays"])["w"]
    np.testing.assert_array_equal(update, numbers(7))


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
    (message,), _ = bundles.unbundle(answer.message_object_trees[0].object_id, came, max_bytes=0)
    message.metadata.__dict__["_message_id"] = answer.messages_list[0].metadata.message_id
    return message


def reply_along(superlink: Any, message: Message, content: RecordDict) -> tuple[Any, Bundle]:
    """The silo's reply with its objects in the same call."""

    def along(made: Bundle) -> list[bytes]:
        return [*inline_objects.small(made.sent(made.objects)).values(), b"of nobody"]

    return replied(superlink, message, content, along)


def configured(**entries: Any) -> RecordDict:
    return RecordDict({wire.CONFIG: ConfigRecord(entries)})


@pytest.mark.parametrize("superlink", [FLWR_IN_MEMORY_DB_NAME, "state.db"], indirect=True)
def test_a_small_message_and_its_reply_take_a_call_each_at_either_end(superlink: Any) -> None:
    grid, calls = grid_of(superlink), list[Any]()
    names_of_calls = ("PushMessages", "PullMessages", "PushObject", "ConfirmMessageReceived")
    for stub, own in ((grid._stub, names_of_calls), (grid._objects, ["PullObject"])):
        for call in own:
            noted(stub, call, calls)
    grid._along = True
    grid._find_shelf()
    calls.clear()
    sent = Message(configured(n=1), superlink.node.node_id, "train", ttl=60.0)
    (asked,) = grid.push([sent])
    assert [name for name, _ in calls] == ["PushMessages"]
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    assert set(came) == {tree.object_id} and len(superlink.store) == 0, "it counts as received"
    (message,), _ = bundles.unbundle(tree.object_id, came, max_bytes=0)
    assert message.content[wire.CONFIG]["n"] == 1
    message.metadata.__dict__["_message_id"] = asked
    calls.clear()
    announced, made = reply_along(superlink, message, configured(n=2))
    assert not announced.objects_to_push
    assert len(superlink.store) == 1 and superlink.store.get(made.root), "and nobody's is not kept"
    (reply,) = grid.pull([asked], 0.0)
    assert [name for name, _ in calls] == ["PullMessages"]
    assert reply.content[wire.CONFIG]["n"] == 2 and len(superlink.store) == 0


def test_large_pieces_do_not_go_along_and_their_message_does(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid._along = True
    arrays = wire.encode_arrays({"w": numbers(0)}, packed=True)
    sent = Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train", ttl=60.0)
    (asked,) = grid.push([sent])
    answer, came = asked_along(superlink)
    (tree,) = answer.message_object_trees
    assert set(came) == {tree.object_id} and len(superlink.store) == 4, "it is not confirmed"
    pieces = {
        one.object_id: superlink.fleet.PullObject(
            message_pb2.PullObjectRequest(
                node=superlink.node, run_id=superlink.run, object_id=one.object_id
            )
        ).object_content
        for one in tree.children
    }
    (message,), _ = bundles.unbundle(tree.object_id, came | pieces, max_bytes=0)
    np.testing.assert_array_equal(wire.decode_arrays(message.content["arrays"])["w"], numbers(0))
    message.metadata.__dict__["_message_id"] = asked
    content = RecordDict({"arrays": wire.encode_arrays({"w": numbers(7)}, packed=True)})
    announced, made = reply_along(superlink, message, content)
    assert set(announced.objects_to_push) == set(made.objects) - {made.root}
    assert not grid.pull([asked], 0.0)
    (reply,) = grid._announced.values()
    assert set(reply.wanted) == set(announced.objects_to_push) and not reply.received
    for name in announced.objects_to_push:
        push_object(superlink, announced, made, name)
    (got,) = grid.pull([asked], 0.0)
    np.testing.assert_array_equal(wire.decode_arrays(got.content["arrays"])["w"], numbers(7))


def test_the_rest_of_a_reply_is_waited_for_at_the_superlink(
    superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held until it is there, instead of looking again and again."""
    monkeypatch.setattr(pulling, "PATIENCE_MS", LONG_MS)
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    grid, calls = grid_of(superlink), list[Any]()
    (asked,) = grid.push([message_to(superlink)])
    message = handed_out(superlink)
    content = RecordDict({"arrays": wire.encode_arrays({"w": numbers(7)}, packed=True)})
    announced, made = reply_along(superlink, message, content)
    noted(grid._objects, "PullObject", calls)

    def push() -> None:
        for name in [one for one in made.objects if one in announced.objects_to_push]:
            time.sleep(0.1)
            push_object(superlink, announced, made, name)

    with ThreadPoolExecutor(1) as threads:
        began, sending, got = time.monotonic(), threads.submit(push), list[Message]()
        while not got and time.monotonic() - began < AT_ONCE_S:
            assert grid._holds(1)
            got = grid.pull([asked], 0.0)
        sending.result()
    assert got and len(calls) <= 8, "at 5 ms a look they would be fifty"
    np.testing.assert_array_equal(wire.decode_arrays(got[0].content["arrays"])["w"], numbers(7))


def test_who_sends_no_more_delays_the_others_in_turn_and_not_for_long(superlink: Any) -> None:
    grid = grid_of(superlink)
    asked = list(grid.push([message_to(superlink), message_to(superlink)]))
    for _ in asked:
        content = RecordDict({"arrays": wire.encode_arrays({"w": numbers(7)}, packed=True)})
        reply_along(superlink, handed_out(superlink), content)
    began, first = time.monotonic(), list[str]()
    for _ in range(2):
        assert grid.pull(asked, 0.0) == []
        first.append(next(iter(grid._announced)))
    assert set(first) == set(asked)
    assert 0.9 <= time.monotonic() - began < AT_ONCE_S


def test_who_does_not_say_so_is_sent_objects_by_calls(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    request = fleet_pb2.PullMessagesRequest(node=superlink.node)
    answer = superlink.fleet.PullMessages(request)
    assert (
        answer.messages_list and not inline_objects.attached(answer) and len(superlink.store) == 1
    )


def test_what_a_silo_sends_along_counts_as_what_it_sends(superlink: Any) -> None:
    """By its allowance; a node that has sent too much finds that its run is over."""
    grid = grid_of(superlink)
    grid.push([message_to(superlink)])
    message = handed_out(superlink)
    used = superlink.allowances._account(superlink.run, superlink.node.node_id)
    before = used.num_bytes
    _, made = reply_along(superlink, message, configured(words="x" * 5000))
    assert used.num_bytes - before == len(made.objects[made.root])


def test_a_silo_is_told_of_a_message_when_its_objects_are_there(superlink: Any) -> None:
    node, there, store = superlink.node.node_id, list[int](), superlink.store
    superlink.room.looks(node)
    superlink.room.hold(
        node, lambda _: there.append(sum(one.is_available for one in store.store.values()))
    )
    grid = grid_of(superlink)
    grid._along = True
    grid.push([message_to(superlink)])
    assert there == [1]


def owner_of(array: Array) -> object:
    """The buffer that holds an array's bytes."""
    return memoryview(array.data).obj


def noted(stub: Any, name: str, calls: list[Any]) -> None:
    """Note the calls of a name, and how much each brings."""
    inner = getattr(stub, name)

    def call(request: Any, **how: Any) -> Any:
        calls.append((name, len(getattr(request, "object_content", b""))))
        return inner(request, **how)

    setattr(stub, name, call)


def test_a_superlink_that_has_lost_its_folder_is_sent_objects_by_calls(superlink: Any) -> None:
    grid = grid_of(superlink)
    grid._find_shelf()
    lost = grid._shelf
    assert lost is not None and lost.folder == superlink.store.shelf.folder
    grid._shelf = blob_store.BlobStore(lost.folder.parent)  # another folder that is there
    arrays = wire.encode_arrays({"w": numbers(0)}, packed=True)
    sent = Message(RecordDict({"arrays": arrays}), superlink.node.node_id, "train", ttl=60.0)
    grid.push([sent])
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


def message_to(superlink: Any) -> Message:
    content = RecordDict({"arrays": wire.encode_arrays({"w": np.zeros(3)}, packed=True)})
    return Message(content, superlink.node.node_id, "train", ttl=60.0)


def test_an_object_on_its_way_is_given_to_who_was_held_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MOST_PATIENCE_MS", LONG_MS)
    arrivals, answers = Arrivals(), iter([False, True])
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(
            arrivals.held, lambda: next(answers), lambda there: not there, patient(), again=True
        )
        until_held(arrivals)
        assert not held.done()
        with arrivals.coming():
            pass
        assert held.result(AT_ONCE_S)


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
        arrivals.held(lambda: None, lambda _: True, patient(), again=False)

    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(ask)
        until_held(arrivals)
        threads.submit(ask).result(AT_ONCE_S)
        assert not held.done()
        with arrivals.coming():
            pass
        held.result(AT_ONCE_S)


def test_replies_of_other_apps_are_read_as_before(superlink: Any) -> None:
    """Flower's own pieces, of 5 MB, are objects like any other."""
    record = ArrayRecord({"w": Array(numbers(3))})
    message = Message(RecordDict({"arrays": record}), superlink.node.node_id, "train", ttl=60.0)
    grid = grid_of(superlink)
    grid._nodes.bundling.clear()
    (asked,) = grid.push([message])
    assert asked and len(names(superlink.store.shelf)) == 4
