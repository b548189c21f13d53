"""A reply that is fetched object by object, in memory, from files of this machine or into one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.fast.bundles import PIECE_BYTES
from coterie.engine.fast.pulled import Content, Piece
from coterie.engine.fast.superlink import blob_store
from coterie.system.files import why_unwritten

log = logging.getLogger("coterie.run")


@dataclass
class Announced:
    """A reply that the SuperLink has announced.

    Attributes:
        message_id: id of the message or bundle that it answers.
        wanted: objects that have not been fetched; the reply's own object comes first.
        most: byte limit.
        why: reason for rejecting it.
        large: pieces that arrive by calls go to the file ``spool``.
        places: positions in ``room`` of the pieces that are mapped from files.
        received: all objects came with the announcement, and the SuperLink knows it.
    """

    message_id: str
    object_id: str
    wanted: list[str]
    contents: dict[str, Content] = field(default_factory=dict)
    most: int = 0
    num_bytes: int = 0
    why: str = ""
    large: bool = False
    spool: Spool | None = None
    places: dict[str, int] = field(default_factory=dict)
    room: blob_store.Room | None = None
    received: bool = False

    @property
    def root(self) -> Content:
        """Its own object; empty while it has not been fetched."""
        return self.contents.get(self.object_id, b"")

    def make_room(self) -> None:
        """Reserve addresses for the pieces that it names: large ones may lie in local files."""
        most = (self.most + wire.MAX_OBJECT_BYTES) // PIECE_BYTES + 1
        named = bundles.pieces_in(self.contents[self.object_id])
        self.places = {name: place for place, name in enumerate(named[:most])}
        if not self.places:
            return
        with suppress(OSError):  # each is shown by itself then
            self.room = blob_store.Room(len(self.places))

    def take(self, object_id: str, content: Content, folder: Path | None) -> None:
        """Add a fetched object; pieces of a large reply go to a file in ``folder``."""
        self.num_bytes += len(content)
        came = not isinstance(content, Piece)
        piece = came and object_id != self.object_id and bundles.is_bundle(content)
        if self.large and piece and folder is not None:
            try:
                self.spool = self.spool or Spool(folder)
                self.spool.add(object_id, bundles.body_of(content))
                return
            except OSError as error:
                self.large = False
                log.warning("large replies are kept in memory: %s", why_unwritten(error))
        self.contents[object_id] = content

    def take_along(self, came: Mapping[str, bytes], folder: Path | None) -> None:
        """Store those of its objects that came with the announcement."""
        own = [name for name in self.wanted if name in came and not self.why]
        for name in own:
            self.take(name, came[name], folder)
        self.wanted = [name for name in self.wanted if name not in own]
        self.received = not self.wanted

    def all_contents(self) -> dict[str, Content]:
        """Return all objects that were fetched."""
        return {**self.contents, **(self.spool.shown() if self.spool else {})}


class Spool:
    """Pieces of a reply in an unnamed file, one after the other."""

    def __init__(self, folder: Path | None) -> None:
        # It lives as long as the reply. Without a buffer, a full disk shows at once and only once.
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._spans: dict[str, tuple[int, int]] = {}
        self._size = 0

    def add(self, object_id: str, body: memoryview) -> None:
        """Append a piece. Raises ``OSError`` if there is no room; earlier pieces stay."""
        done = 0
        while done < len(body):
            done += os.pwrite(self._file.fileno(), body[done:], self._size + done)
        self._spans[object_id] = self._size, self._size + done
        self._size += done

    def shown(self) -> dict[str, Content]:
        """Return the pieces as views of the file, which stays mapped as long as one is in use."""
        if not self._spans:
            return {}
        with self._file:
            held = memoryview(mmap(self._file.fileno(), 0, access=ACCESS_READ))
        return {
            name: bundles.piece_of(held[begin:end]) for name, (begin, end) in self._spans.items()
        }
