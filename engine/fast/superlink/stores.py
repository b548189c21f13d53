"""Flower's object stores, in memory and in a database, with large contents in files.

The files are in a folder that the SuperLink shares with the ServerApps of its machine
(``coterie.engine.fast.superlink.blob_store``). A content arrives there before a message announces
it, hashed and written: what remains for Flower, which stores one object at a time, is a rename.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from sqlalchemy import event, func, select, text, update

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.fast.channel import PART_BYTES, Part
from coterie.engine.fast.superlink import blob_store
from coterie.engine.fast.superlink.uploads import Uploads
from coterie.engine.flower import inflatable_object, inflatable_utils

FILED = b"filed"
"""Stored in place of a content that is in a file. No object of Flower's has this content."""


class Filed:
    """The base of both stores: large contents are in files of ``shelf``."""

    shelf: blob_store.BlobStore

    def lacks(self, object_id: str) -> bool:
        """Return whether the store waits for this object."""
        raise NotImplementedError

    def is_filed(self, object_id: str) -> bool:
        """Return whether an object's content is in a file."""
        return self.shelf.has(object_id)

    def read(self, asked: Any, answer: Any) -> tuple[Any, int]:
        """Return what is handed out of an object, or of the part that is asked for, and its bytes.

        ``answer`` is Flower's, with a stand-in for a file. None: there is no such content.
        """
        kept, is_part = answer.object_content, isinstance(asked, Part)
        at, size = (asked.at, PART_BYTES) if is_part else (0, wire.MAX_OBJECT_BYTES)
        content = kept[at : at + size]
        if kept == FILED:
            if not self.shelf.has(asked.object_id):  # a power cut has damaged it
                return (None if is_part else PullObjectResponse()), 0
            content = self.shelf.part(asked.object_id, at, size)
        if is_part:
            return (content if answer.object_found else None), len(content)
        if content != kept:
            answer.object_content = content
        return answer, len(content)

    def _stored(self, object_id: str, content: bytes | Path) -> bytes:
        """Return the content for Flower to keep; a file moves to its place if it is expected."""
        if isinstance(content, Path):
            if self.lacks(object_id):
                self.shelf.adopt(object_id, content)
            return FILED
        if object_id != bundles.object_id(content):
            raise ValueError(f"Object ID {object_id} does not match content hash")
        inflatable_utils.validate_object_content(content=content)
        return content


class FiledStore(Filed, InMemoryObjectStore):
    """Flower's store in memory, with a folder that is open while this process lasts."""

    def __init__(self, on: blob_store.BlobStore) -> None:
        super().__init__(verify=False)  # done here: the contents may be in files
        self.shelf = on

    def put(self, object_id: str, object_content: bytes | Path) -> None:
        with self.lock_store:
            super().put(object_id, self._stored(object_id, object_content))

    def is_filed(self, object_id: str) -> bool:
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and entry.content == FILED

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            entry = self.store.get(object_id)
            super().delete(object_id)
            if entry is not None and object_id not in self.store:
                self._drop(object_id, entry.content)

    def clear(self) -> None:
        with self.lock_store:
            for object_id, entry in self.store.items():
                self._drop(object_id, entry.content)
            super().clear()

    def _drop(self, object_id: str, content: bytes) -> None:
        if content == FILED:
            self.shelf.drop(object_id)

    def lacks(self, object_id: str) -> bool:
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and not entry.is_available


class SqlStore(Filed, SqlObjectStore):
    """Flower's store in a database, with a folder next to it that survives a restart.

    Args:
        database_path: as in Flower.
        opened: enters a folder's context.
    """

    def __init__(
        self,
        database_path: str,
        opened: Callable[[AbstractContextManager[blob_store.BlobStore]], blob_store.BlobStore],
    ) -> None:
        super().__init__(database_path, verify=False)
        self._opened, self._turn = opened, Lock()

    def initialize(self, log_queries: bool = False) -> list[str]:
        """Create the tables as Flower does; delete files that do not match the database."""
        tables = super().initialize(log_queries)
        if self._engine is not None and not self._is_in_memory_sqlite:
            folder = blob_store.beside(Path(str(self._engine.url.database)))
            self.shelf = self._opened(blob_store.kept(folder, self._filed()))
        return tables

    def _filed(self) -> set[str]:
        found = self.query(
            "SELECT object_id FROM objects WHERE length(content) = :size AND content = :filed",
            {"size": len(FILED), "filed": FILED},
        )
        return {str(row["object_id"]) for row in found}

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Announce objects as Flower does, after removing parts that were announced of a content.

        A content has no parts. Flower refuses a message that names other parts of an object than
        an earlier one did: another silo's reply with the same model, or the run's next model.
        """
        nodes = inflatable_object.iterate_object_tree(object_tree)
        leaves = [node.object_id for node in nodes if not node.children]
        with self._mutation_session():
            self._forget_parts(leaves)
            return super().preregister(run_id, object_tree)

    def _forget_parts(self, contents: Sequence[str]) -> None:
        is_content = (StoredObject.is_available == 0) | (
            func.length(StoredObject.content) == len(FILED)
        )
        found = (
            select(ObjectChild)
            .join(StoredObject, StoredObject.object_id == ObjectChild.parent_id)
            .where(ObjectChild.parent_id.in_(contents), is_content)
        )
        with self.session() as session:
            for pair in session.scalars(found).all():
                named = update(StoredObject).where(StoredObject.object_id == pair.child_id)
                session.execute(named.values(ref_count=StoredObject.ref_count - 1))
                session.delete(pair)

    def put(self, object_id: str, object_content: bytes | Path) -> None:
        with self._turn:
            content = self._stored(object_id, object_content)
        super().put(object_id, content)

    def delete(self, object_id: str) -> None:
        """Delete an object as Flower does; its file is deleted after the commit."""
        with self.session() as session:
            super().delete(object_id)
            if self.shelf.has(object_id) and object_id not in self:
                event.listen(session, "after_commit", lambda _: self._drop(object_id), once=True)

    def _drop(self, object_id: str) -> None:
        """Delete the file, unless the object was announced again meanwhile."""
        assert self._engine is not None
        there = text("SELECT 1 FROM objects WHERE object_id = :name")
        with self._turn, self._engine.connect() as opened:
            if opened.execute(there, {"name": object_id}).first() is None:
                self.shelf.drop(object_id)

    def clear(self) -> None:
        super().clear()
        self.shelf.keep(())

    def lacks(self, object_id: str) -> bool:
        asked = "SELECT is_available FROM objects WHERE object_id = :name"
        return any(not row["is_available"] for row in self.query(asked, {"name": object_id}))


class Stores(ObjectStoreFactory):
    """Flower's factory of its object store, which is one of these.

    Args:
        database: as in Flower.
        home: where the folder of a store in memory lies.
        folders: holds the folder until the SuperLink has ended.
    """

    def __init__(self, database: str, home: Path, folders: ExitStack) -> None:
        super().__init__(database)

        self._store: FiledStore | SqlStore
        if database == FLWR_IN_MEMORY_DB_NAME:
            self._store = FiledStore(folders.enter_context(blob_store.opened(home)))
        else:
            self._store = SqlStore(database, folders.enter_context)
            self._store.initialize()
        self.uploads = Uploads(self._store.shelf)

    def store(self) -> FiledStore | SqlStore:
        """Return the store."""
        return self._store
