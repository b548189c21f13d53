"""Finished replies that could not be sent yet: kept until they are, also if their process ends.

They hold nothing that the ledger has not noted, and go nowhere but to the SuperLink that asked.
"""

from __future__ import annotations

import json
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from coterie import wire
from coterie.system.files import make_folder, replacing

log = logging.getLogger("coterie.silo")

FILE = "unsent.zip"
ABOUT = "about.json"


@dataclass(frozen=True)
class Unsent:
    """What answers one message, or those of one bundle, and what else is sent with it.

    Attributes:
        replies: to messages for the silos of this process.
        to: for each the number of its silo; None: a single one to a message that came by itself.
        seconds: that the silos worked for them.
        node_id: under which they were asked: no other may answer.
        bundled: the other side reads bundles.
    """

    replies: tuple[Message, ...]
    seconds: float
    node_id: int
    to: tuple[int, ...] | None = None
    bundled: bool = False


class Outbox:
    """Holds what answers one message, or one bundle: a process works on one at a time.

    Args:
        home: the silo's folder; empty keeps it in memory alone.
    """

    def __init__(self, home: str) -> None:
        self._file = Path(home) / FILE if home else None
        self.unsent = self._written = _read(self._file) if self._file else None

    def keep(self, unsent: Unsent) -> None:
        """Keep them; a full disk costs what is on it, not the replies."""
        self.unsent = unsent
        if self._file is not None and self._written is not unsent:
            self._written = unsent
            try:
                make_folder(self._file.parent)
                _write(self._file, unsent)
            except OSError as error:
                log.warning("the reply is kept in memory alone: %s", error)

    def clear(self) -> None:
        """It was sent, or nobody waits for it any more."""
        if self._written is not None and self._file is not None:
            self._file.unlink(missing_ok=True)
        self.unsent = self._written = None


def _write(file: Path, unsent: Unsent) -> None:
    packed_up = wire.bundle(unsent.replies, unsent.to)
    with (
        replacing(file, private=True) as unfinished,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as packed,
    ):
        for name, content in packed_up.objects.items():
            packed.writestr(name, bytes(content))
        about = {"root": packed_up.root, "seconds": unsent.seconds, "node": unsent.node_id}
        packed.writestr(ABOUT, json.dumps({**about, "bundled": unsent.bundled}))


def _read(file: Path) -> Unsent | None:
    """What is in a file; one that is damaged is removed, as nobody could send it."""
    try:
        with zipfile.ZipFile(file) as packed:
            about = json.loads(packed.read(ABOUT))
            contents = {name: packed.read(name) for name in packed.namelist() if name != ABOUT}
        replies, to = wire.unbundle(about["root"], contents, max_bytes=0)
        whose = None if to is None else tuple(to)
        seconds, node_id = float(about["seconds"]), int(about["node"])
        return Unsent(tuple(replies), seconds, node_id, whose, bool(about["bundled"]))
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever Flower or zipfile make of damage
        log.warning("%s is damaged (%s): a reply is lost", file, type(error).__name__)
        file.unlink(missing_ok=True)
        return None
