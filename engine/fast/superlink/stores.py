"""Flower's object stores, in memory and in a database, with large objects in files.

The files are in a folder that the SuperLink shares with the ServerApps of its machine
(``engine.fast.superlink.blob_store``). An object is checked and written before Flower stores it,
which it does one at a time: so objects of several silos are written in parallel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from sqlalchemy import event, text

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.fast.pulled import Content, Piece
from coterie.engine.fast.superlink import blob_store
from coterie.engine.flower import inflatable_utils
from coterie.system.files import LockedError, why_unwritten

log = logging.getLogger("flwr")

FILED = b"filed"
"""Stored in place of a content that is in a file. No object has this content."""


@dataclass(frozen=True)
class Laid:
    """A stand-in for a checked content that lies in a file.

    Attributes:
        file: moved into the store's folder if Flower stores the object.
        size: of the object; 0 if a ServerApp put the file there without a call.
    """

    file: Path
    size: int = 0

    def __len__(self) -> int:
        return self.size


class Filed:
    """The base of both stores: large objects are in files of ``shelf``, if there is one."""

    shelf: blob_store.BlobStore | None = None

    def lacks(self, object_id: str) -> bool:
        """Return whether the store waits for this object."""
        raise NotImplementedError

    def written(self, object_id: str, content: Content) -> Laid | None:
        """Write an expected object to a file; None if it is small or does not match its name.

        Flower stores one object at a time, so the slow part is done first.
        """
        body = _body_of(content)
        if self.shelf is None or body is None or not self.lacks(object_id):
            return None
        if object_id != bundles.object_id(content):
            return None  # ``put`` reports that
        try:
            return Laid(self.shelf.write(object_id, body), len(content))
        except OSError as error:
            log.warning("an object is stored without a file: %s", why_unwritten(error))
            return None

    def _stored(self, object_id: str, content: Content | Laid) -> bytes:
        """Return the content for Flower to keep; move a ``Laid`` file to its place if expected."""
        if isinstance(content, Laid):
            if self.shelf is not None and self.lacks(object_id):
                self.shelf.adopt(object_id, content.file)
            return FILED
        whole = bytes(content)
        if object_id != bundles.object_id(whole):
            raise ValueError(f"Object ID {object_id} does not match content hash")
        inflatable_utils.validate_object_content(content=whole)
        return whole

    def _shown(self, object_id: str, content: bytes | None) -> Any:
        """Return the object for a content that Flower kept; None if its file is gone."""
        if content != FILED:
            return content
        return self.shelf.shown(object_id) if self.shelf is not None else None


class FiledStore(Filed, InMemoryObjectStore):
    """Flower's store in memory, with a folder that is open while this process lasts."""

    def __init__(self, on: blob_store.BlobStore | None) -> None:
        super().__init__(verify=False)  # done here: the contents may be no bytes
        self.shelf = on

    def put(self, object_id: str, object_content: Content | Laid) -> None:
        with self.lock_store:
            super().put(object_id, self._stored(object_id, object_content))

    def get(self, object_id: str) -> Any:
        with self.lock_store:
            return self._shown(object_id, super().get(object_id))

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
        if content == FILED and self.shelf is not None:
            self.shelf.drop(object_id)

    def lacks(self, object_id: str) -> bool:
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and not entry.is_available


class SqlStore(Filed, SqlObjectStore):
    """Flower's store in a database, with a folder next to it that survives a restart.

    Args:
        database_path: as in Flower.
        opened: enters a folder's context; returns None if that fails.
    """

    def __init__(
        self,
        database_path: str,
        opened: Callable[
            [AbstractContextManager[blob_store.BlobStore]], blob_store.BlobStore | None
        ],
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

    def put(self, object_id: str, object_content: Content | Laid) -> None:
        with self._turn:
            content = self._stored(object_id, object_content)
        super().put(object_id, content)

    def get(self, object_id: str) -> Any:
        return self._shown(object_id, super().get(object_id))

    def delete(self, object_id: str) -> None:
        """Delete an object as Flower does; its file is deleted after the commit."""
        with self.session() as session:
            super().delete(object_id)
            if self.shelf is not None and self.shelf.has(object_id) and object_id not in self:
                event.listen(session, "after_commit", lambda _: self._drop(object_id), once=True)

    def _drop(self, object_id: str) -> None:
        """Delete the file, unless the object was announced again meanwhile."""
        assert self.shelf is not None and self._engine is not None
        there = text("SELECT 1 FROM objects WHERE object_id = :name")
        with self._turn, self._engine.connect() as opened:
            if opened.execute(there, {"name": object_id}).first() is None:
                self.shelf.drop(object_id)

    def clear(self) -> None:
        super().clear()
        if self.shelf is not None:
            self.shelf.keep(())

    def lacks(self, object_id: str) -> bool:
        asked = "SELECT is_available FROM objects WHERE object_id = :name"
        return any(not row["is_available"] for row in self.query(asked, {"name": object_id}))


def _body_of(content: Content) -> memoryview | None:
    """Return the part of an object that goes to a file; None if it stays in memory."""
    if len(content) < blob_store.FROM_BYTES or not bundles.is_bundle(content):
        return None
    try:
        body = bundles.body_of(content)
    except wire.WireError:
        return None
    own = bundles.piece_of(body)
    return body if len(own) == len(content) and _begins(content, own.head) else None


def _begins(content: Content, head: bytes) -> bool:
    return not isinstance(content, Piece) and bytes(content[: len(head)]) == head


@contextmanager
def laid(store: object, request: Any) -> Iterator[None]:
    """Replace a large content in a request to store it by a file, for the duration of the block."""
    made = None
    if isinstance(store, Filed):
        made = store.written(request.object_id, request.object_content)
    if made is None:
        yield
        return
    request.object_content = made
    try:
        yield
    finally:
        made.file.unlink(missing_ok=True)  # it was not taken


class Stores(ObjectStoreFactory):
    """Flower's factory of its object store, which is one of these.

    Args:
        database: as in Flower.
        home: where the folder of a store in memory lies.
        folders: holds the folder until the SuperLink has ended.
    """

    def __init__(self, database: str, home: Path, folders: ExitStack) -> None:
        super().__init__(database)

        def opened(
            folder: AbstractContextManager[blob_store.BlobStore],
        ) -> blob_store.BlobStore | None:
            try:
                return folders.enter_context(folder)
            except (OSError, LockedError) as error:
                log.warning("large objects are stored without files: %s", why_unwritten(error))
                return None

        self._store: FiledStore | SqlStore
        if database == FLWR_IN_MEMORY_DB_NAME:
            self._store = FiledStore(opened(blob_store.opened(home)))
        else:
            self._store = SqlStore(database, opened)
            self._store.initialize()

    def store(self) -> FiledStore | SqlStore:
        """Return the store."""
        return self._store
