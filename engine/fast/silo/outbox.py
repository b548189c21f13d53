"""Finished replies that are not sent yet, kept until they are, even if their process ends.

They hold only what the ledger has recorded, and go only to the SuperLink that asked.
"""

from __future__ import annotations

import json
import logging
import zipfile
from dataclasses import replace
from pathlib import Path

from flwr.app import Array, Error

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.flower import message_from
from coterie.engine.port import Unsent
from coterie.system.files import make_folder, replacing

log = logging.getLogger("coterie.silo")

FILE = "unsent.zip"
ABOUT = "about.json"


class Outbox:
    """The replies to one message or bundle, also on disk in ``home`` unless that is empty."""

    def __init__(self, home: str) -> None:
        self._file = Path(home) / FILE if home else None
        self.unsent = self._written = _read(self._file) if self._file else None

    def keep(self, unsent: Unsent) -> None:
        """Keep replies; if the disk is full, only in memory."""
        self.unsent = unsent
        if self._file is not None and self._written is not unsent:
            self._written = unsent
            try:
                make_folder(self._file.parent)
                _write(self._file, unsent)
            except OSError as error:
                log.warning("the reply is kept only in memory: %s", error)

    def give_up(self, why: str) -> None:
        """Keep error replies in place of those that cannot be sent."""
        assert self.unsent is not None
        error = Error(wire.UNREADABLE, wire.plain_text(why))
        errors = tuple(message_from(reply, error=error) for reply in self.unsent.replies)
        self.keep(replace(self.unsent, replies=errors))

    def clear(self) -> None:
        """Drop the replies, which were sent or are not wanted any more."""
        if self._written is not None and self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:  # sent again by the next process, it counts once
                log.warning("a reply that was sent or dropped stays on disk: %s", error)
        self.unsent = self._written = None


def _write(file: Path, unsent: Unsent) -> None:
    contents = dict[str, memoryview]()

    def put(array: Array) -> str:
        content = memoryview(array.data)
        name = bundles.object_id(content)
        contents[name] = content
        return name

    made = bundles.bundle(unsent.replies, put, unsent.to)
    root = bundles.object_id(made.content)
    with (
        replacing(file, private=True) as unfinished,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as packed,
    ):
        for name, content in (*contents.items(), (root, made.content)):
            packed.writestr(name, bytes(content))
        about = {"root": root, "seconds": unsent.seconds, "node": unsent.node_id}
        packed.writestr(ABOUT, json.dumps({**about, "bundled": unsent.bundled}))


def _read(file: Path) -> Unsent | None:
    """Read a file of replies; remove it if it is damaged, since it cannot be sent."""
    try:
        with zipfile.ZipFile(file) as packed:
            about = json.loads(packed.read(ABOUT))
            names = set(packed.namelist()) - {ABOUT}
            contents = {name: memoryview(packed.read(name)) for name in names}
        root = about["root"]
        replies, to = bundles.unbundle(root, contents[root], contents, max_bytes=0)
        whose = None if to is None else tuple(to)
        seconds, node_id = float(about["seconds"]), int(about["node"])
        return Unsent(tuple(replies), seconds, node_id, whose, bool(about["bundled"]))
    except FileNotFoundError:
        return None
    except OSError as error:  # it may be whole
        log.warning("%s cannot be read now (%s): a reply is not sent", file, error)
        return None
    except Exception as error:  # whatever Flower or zipfile make of damage
        log.warning("%s is damaged (%s): a reply is lost", file, type(error).__name__)
        file.unlink(missing_ok=True)
        return None
