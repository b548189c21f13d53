"""Large contents in files, which a SuperLink shares with a ServerApp of its machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.proto import message_pb2
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.fast.channel import FROM_BYTES, PART_BYTES, Part
from coterie.engine.fast.superlink import blob_store
from coterie.engine.fast.superlink.leftovers import forget_ended_runs
from coterie.engine.fast.superlink.stores import FILED, FiledStore, SqlStore
from tests.unit.engine.made import Made, names, numbers

Store = FiledStore | SqlStore


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


def order(seed: int = 0) -> Made:
    """Two large contents, and the bundle that names them."""
    record = wire.encode_arrays({"w": numbers(seed)}, packed=True)
    other = wire.encode_arrays({"w": numbers(seed)[::-1]}, packed=True)
    return Made([Message(RecordDict({"arrays": record, "others": other}), 1, "train")])


def kept(store: Store, made: Made, run: int = 1) -> None:
    """Announce a bundle whose contents have been put."""
    for name in store.preregister(run, made.tree):
        push(store, name, made.contents[name])


def push(store: Store, name: str, content: bytes) -> None:
    """As the SuperLink does with what has arrived: a large content lies in a file."""
    if len(content) < FROM_BYTES:
        store.put(name, content)
        return
    on = folder_of(store)
    assert on.offer(content, 1, 2) == bundles.object_id(content)
    store.put(name, on.offered(bundles.object_id(content), 1, 2))


def part_of(store: Store, name: str, at: int = 0) -> Any:
    """What the SuperLink hands out of an object from there on."""
    content = store.get(name)
    answer = message_pb2.PullObjectResponse(
        object_found=content is not None, object_content=content or b""
    )
    return store.read(Part(Node(node_id=1), 1, name, at, 2**30), answer)[0]


def stored(store: Store, name: str) -> bytes:
    """The whole of an object."""
    found = b""
    while part := part_of(store, name, len(found)):
        found += part
    return found


def adopt(on: blob_store.BlobStore, name: str, content: bytes) -> int:
    """Put a file under any name; return its number."""
    found = on.offer(content, 1, 2)
    on.adopt(name, on.offered(found, 1, 2))
    return (on.folder / name).stat().st_ino


# ---------------------------------------------------------------- the store


def test_a_large_content_lies_in_a_file_and_goes_with_the_last_message_that_names_it(
    store: Store,
) -> None:
    on, made = folder_of(store), order()
    kept(store, made)
    assert len(made.blobs) == 2 and names(on) == set(made.blobs), "what is small stays with Flower"
    for name, content in made.contents.items():
        assert stored(store, name) == content
        if name in made.blobs:
            assert (on.folder / name).read_bytes() == content
            assert (on.folder / name).stat().st_mode & 0o777 == 0o600
    leaves = [message_pb2.ObjectTree(object_id=name) for name in made.blobs]
    other = message_pb2.ObjectTree(object_id=made.root[::-1], children=leaves)
    assert store.preregister(2, other) == [made.root[::-1]], "the same model in another message"
    store.delete(made.root)
    assert names(on) == set(made.blobs) and made.root not in store
    seen = on.shown(min(made.blobs))
    store.delete(made.root[::-1])
    assert names(on) == set() and len(store) == 0
    assert seen == made.contents[min(made.blobs)], "who looks at it still sees it"


def test_so_it_does_with_the_run_and_with_the_store(store: Store) -> None:
    on = folder_of(store)
    kept(store, order(0), run=1)
    kept(store, order(1), run=2)
    assert len(names(on)) == 4
    store.delete_objects_in_run(1)
    assert len(names(on)) == 2
    store.clear()
    assert names(on) == set()


def test_what_is_not_what_its_name_says_is_refused(store: Store) -> None:
    good = bundles._as_object(b"content")
    name, other = bundles.object_id(good), good[:-1] + b"x"
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    for bad in (other, b"", FILED):  # the last stands for a file
        with pytest.raises(ValueError, match="does not match content hash"):
            store.put(name, bad)
    with pytest.raises(NoObjectInStoreError):
        store.put(bundles.object_id(other), other)
    assert names(folder_of(store)) == set() and store.get(name) == b""
    store.put(name, good)
    store.put(name, good)
    assert store.get(name) == stored(store, name) == good


def test_parts_that_a_silo_announced_of_a_content_keep_no_other_message_from_it(
    store: Store,
) -> None:
    made = order()
    name = next(iter(made.blobs))
    part = message_pb2.ObjectTree(object_id="a" * 64)
    forged = message_pb2.ObjectTree(object_id=name, children=[part])
    store.preregister(1, message_pb2.ObjectTree(object_id="b" * 64, children=[forged]))
    kept(store, made, run=2)
    assert stored(store, name) == made.contents[name]
    store.delete(made.root)
    store.delete_objects_in_run(1)
    assert len(store) == 0 and names(folder_of(store)) == set()


def test_an_object_that_flower_does_not_know_is_refused(store: Store) -> None:
    for content in (FILED, b"ArrayChunk  9\0" + bytes(400)):
        name = bundles.object_id(content)
        store.preregister(1, message_pb2.ObjectTree(object_id=name))
        with pytest.raises(Exception, match="unexpected structure"):
            store.put(name, content)
        assert store.get(name) == b""


def test_a_file_is_taken_once_and_only_if_it_is_expected(store: Store) -> None:
    on, content = folder_of(store), bytes(FROM_BYTES)
    name = bundles.object_id(content)
    with pytest.raises(NoObjectInStoreError):
        push(store, name, content)
    left = on.offered(name, 1, 2)
    assert left.exists() and names(on) == {left.name}
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    with pytest.raises(FileNotFoundError):
        store.put(name, on.offered(name, 1, 3))
    assert store.get(name) == b""
    store.put(name, left)
    assert not left.exists() and stored(store, name) == content
    push(store, name, content)
    assert left.exists(), "it was there already; the other is deleted later"


def test_a_content_is_read_in_parts(store: Store) -> None:
    content = bytes(range(256)) * (2**16 + 1)
    name = bundles.object_id(content)
    store.preregister(1, message_pb2.ObjectTree(object_id=name))
    assert part_of(store, name) == b"" and part_of(store, "f" * 64) is None
    push(store, name, content)
    parts = [part_of(store, name, at) for at in range(0, 4 * PART_BYTES, PART_BYTES)]
    assert b"".join(parts) == content and [*map(len, parts)][2:] == [256, 0]
    (folder_of(store).folder / name).unlink()
    assert part_of(store, name) is None


# ---------------------------------------------------------------- beside a database


def test_objects_of_a_database_are_there_after_a_restart_and_only_they(tmp_path: Path) -> None:
    file, made, gone = tmp_path / "state.db", order(0), order(1)
    pieces = sorted(made.blobs)
    with opened(file) as store:
        kept(store, made)
        kept(store, gone)
        store.preregister(2, order(2).tree)
        size = file.stat().st_size
        assert size < 2_000_000, "the database itself has none of them"
    on = blob_store.BlobStore(blob_store.beside(file))
    assert len(names(on)) == 4 and on.folder.stat().st_mode & 0o777 == 0o700
    # Killed after a file had its name and before the database had it; a disk that lost one's end.
    adopt(on, "f" * 64, b"x")
    os.truncate(on.folder / pieces[0], 100)
    with opened(file) as store:
        assert names(on) == {*made.blobs, *gone.blobs} - {pieces[0]}
        assert part_of(store, pieces[0]) is None, "which is not there, rather than wrong"
        for name in (*pieces[1:], made.root):
            assert stored(store, name) == made.contents[name]
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
        assert len(names(on)) == 2 and made.root in store
        name = min(names(on))
        assert stored(store, name) == made.contents[name]


def test_files_of_ended_runs_are_deleted(tmp_path: Path) -> None:
    file, made = tmp_path / "state.db", order()
    stores = ObjectStoreFactory(str(file))
    state = LinkStateFactory(str(file), NoOpFederationManager(), stores).state()
    run = state.create_run("", "", "", {}, "@none/default", None, "me", "serverapp")
    with opened(file) as store:
        kept(store, made, run)
        on = folder_of(store)
        on.offer(b"in no message", run, 2)
        os.close(on.begin(run, 2)[1])
        forget_ended_runs(file)
        assert len(names(on)) == 4, "the run is active"
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
    old, new = (on.offered(on.offer(body, 1, 2), 1, 2) for body in (b"a", b"b"))
    os.utime(old, (0, 0))
    on.forget_unannounced()
    assert names(on) == {new.name}


def test_a_file_is_written_into_again_when_nobody_looks_at_it(on: blob_store.BlobStore) -> None:
    bodies = [bytes([number]) * FROM_BYTES for number in range(3)]
    first = adopt(on, "a" * 64, bodies[0])
    views = [on.shown("a" * 64), on.shown("a" * 64)]
    on.drop("a" * 64)
    assert names(on) == set() and on.shown("a" * 64) is None
    assert on.part("a" * 64, 0, 5) == b""
    second = adopt(on, "b" * 64, bodies[1])
    assert second != first and all(view == bodies[0] for view in views)
    views.pop()
    assert adopt(on, "c" * 64, bodies[2]) != first, "a second one still looks"
    del views
    on.drop("b" * 64)
    other = blob_store.BlobStore(on.folder)  # a ServerApp's
    taken = {adopt(other, letter * 64, bodies[0][:5]) for letter in "de"}
    assert taken == {first, second}, "either end takes them"
    assert (on.folder / ("e" * 64)).read_bytes() == bodies[0][:5], "and nothing is left in them"
    assert len({adopt(other, letter * 64, b"x") for letter in "fgh"} | taken) == 5


def test_what_is_being_written_into_is_not_shown(on: blob_store.BlobStore) -> None:
    for letter in "ab":
        adopt(on, letter * 64, bytes(FROM_BYTES))
    descriptor = os.open(on.folder / ("a" * 64), os.O_RDONLY)
    with os.fdopen(os.open(on.folder / ("a" * 64), os.O_WRONLY)) as writer:
        flock(writer, LOCK_EX)
        assert on.shown("a" * 64) is None and on.part("a" * 64, 0, 5) == b""
    assert on.shown("a" * 64) is not None
    assert not blob_store._held(descriptor, on.folder / ("b" * 64)), "it has become another's"
    os.close(descriptor)


def test_files_that_are_not_written_again_go(
    on: blob_store.BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "SPARE_BYTES", 2 * FROM_BYTES)
    for letter in "abc":
        adopt(on, letter * 64, bytes(FROM_BYTES))
    for letter in "abc":
        on.drop(letter * 64)
    spare = on.folder / blob_store.SPARE
    assert len([*spare.iterdir()]) == 2 and names(on) == set()
    timer = on._spare._timer
    assert timer is not None and timer.interval == blob_store.SPARE_S
    timer.cancel()
    monkeypatch.setattr(blob_store, "SPARE_S", 0.0)
    timer.function()  # as it does when its time has come
    assert not [*spare.iterdir()]
    monkeypatch.setattr(blob_store, "SPARE_FREE_BYTES", 2**80)
    adopt(on, "a" * 64, bytes(FROM_BYTES))
    on.drop("a" * 64)
    assert not [*spare.iterdir()], "where the disk is full"


def test_no_file_that_is_written_again_outlives_the_superlink(tmp_path: Path) -> None:
    with blob_store.kept(tmp_path / "objects", ()) as on:
        adopt(on, "a" * 64, bytes(FROM_BYTES))
        on.drop("a" * 64)
        assert [*(on.folder / blob_store.SPARE).iterdir()]
    assert not (on.folder / blob_store.SPARE).exists()


def test_what_is_forgotten_is_in_no_file_that_is_written_again(on: blob_store.BlobStore) -> None:
    """A silo that withdraws is promised that nothing of it is left."""
    for letter in "abc":
        adopt(on, letter * 64, bytes(FROM_BYTES))
    on.drop("a" * 64)
    blob_store.BlobStore(on.folder).keep({"c" * 64})
    left = {file.name for file in on.folder.rglob("*") if file.is_file()}
    assert left - {blob_store.TOKEN, "lock"} == {"c" * 64}
