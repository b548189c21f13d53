"""A finished reply that could not be sent yet: kept until it is, also if its process ends.

It holds nothing that the ledger has not noted, and goes nowhere but to the SuperLink that asked.
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
    """A reply, and what else is sent with it.

    Attributes:
        reply: to a message for this silo.
        seconds: that the silo worked for it.
        node_id: under which it was asked: no other may send it.
    """

    reply: Message
    seconds: float
    node_id: int


class Outbox:
    """Holds one reply: a silo works on one message at a time.

    Args:
        home: the silo's folder; empty keeps it in memory alone.
    """

    def __init__(self, home: str) -> None:
        self._file = Path(home) / FILE if home else None
        self.unsent = self._written = _read(self._file) if self._file else None

    def keep(self, unsent: Unsent) -> None:
        """Keep a reply; a full disk costs what is on it, not the reply."""
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
    reply = ""
    with (
        replacing(file, private=True) as unfinished,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as packed,
    ):
        for reply, content in wire.taken_apart(unsent.reply):  # the reply itself comes last
            packed.writestr(reply, content)
        about = {"reply": reply, "seconds": unsent.seconds, "node": unsent.node_id}
        packed.writestr(ABOUT, json.dumps(about))


def _read(file: Path) -> Unsent | None:
    """The reply in a file; one that is damaged is removed, as nobody could send it."""
    try:
        with zipfile.ZipFile(file) as packed:
            about = json.loads(packed.read(ABOUT))
            contents = {name: packed.read(name) for name in packed.namelist() if name != ABOUT}
        reply = wire.put_together(about["reply"], contents, max_bytes=0)
        return Unsent(reply, float(about["seconds"]), int(about["node"]))
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever Flower or zipfile make of damage
        log.warning("%s is damaged (%s): a reply is lost", file, type(error).__name__)
        file.unlink(missing_ok=True)
        return None
