"""What the coordinator knows of its silos beside their keys: which tasks they serve, last contact.

    silos.json      name → what the silo said when a run last asked it; runs write it
    contacts.json   name → when the SuperLink last heard of it; the coordinator's process writes it

Both only spare questions: without them, or where they are damaged, every silo is asked again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.system.files import LockedError, locked, write_atomically

log = logging.getLogger("coterie.run")

Kinds = Mapping[str, Callable[[Any], Any]]
"""How the values of an entry are read."""
SILOS, CONTACTS = "silos.json", "contacts.json"
LOCK, LOCK_DEADLINE_S = "silos.lock", 10.0
ASK_AGAIN_S = 3600.0
"""A silo that said it serves other tasks is asked again after so long."""


@dataclass(frozen=True)
class Served:
    """What a silo said of itself.

    Attributes:
        node: Flower's id of its key.
        tasks: names of those that it serves.
        at: when it said so, seconds since 1970.
    """

    node: int
    tasks: tuple[str, ...]
    at: float


@dataclass(frozen=True)
class Contact:
    """What the SuperLink says of a silo.

    Attributes:
        node: Flower's id of its key.
        status: as in ``coterie.server.machine.link.Node``.
        connected: when its present or last connection began, seconds since 1970; 0: never.
        seen: when it was last heard of, to half a minute; 0: never.
    """

    node: int
    status: str
    connected: float
    seen: float


class Contacts:
    """The two files in a federation's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def served(self) -> Mapping[str, Served]:
        """Silo → what it said last, of those that were ever asked."""
        kinds: Kinds = {"node": int, "tasks": _names, "at": float}
        return {n: Served(**told) for n, told in _entries(self.folder / SILOS, kinds)}

    def seen(self) -> Mapping[str, Contact]:
        """Silo → when it was last there, as far as the coordinator's process wrote it down."""
        kinds: Kinds = {"node": int, "status": str, "connected": float, "seen": float}
        return {n: Contact(**told) for n, told in _entries(self.folder / CONTACTS, kinds)}

    def objection(self, node: int, name: str, task: str) -> str:
        """Why a silo need not be asked whether it serves a task; empty if it is to be asked.

        It is asked if nothing is known, after an hour, and if it has connected since.
        """
        served, contact = self.served().get(name), self.seen().get(name)
        if served is None or contact is None or served.node != node or contact.node != node:
            return ""
        is_old = time.time() - served.at > ASK_AGAIN_S or contact.connected > served.at
        if is_old or task in served.tasks:
            return ""
        return f"it serves task {', '.join(map(repr, served.tasks))}, {wire.OTHER_TASK} {task!r}."

    def note(self, told: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        """Write down what silos said of themselves; a failure costs only that they are asked again.

        Args:
            told: silo → its node, and the tasks that it serves.
        """
        try:
            with locked(self.folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
                known = {n: asdict(one) for n, one in self.served().items()}
                now = time.time()
                known |= {n: asdict(Served(*said, now)) for n, said in told.items()}
                write_atomically(self.folder / SILOS, json.dumps(known, indent=1).encode())
        except (OSError, LockedError) as error:
            log.warning("which tasks silos serve could not be written down: %s", error)

    def note_seen(self, contacts: Mapping[str, Contact]) -> None:
        """Write down who was last there; raises ``OSError``."""
        told = {name: asdict(contact) for name, contact in contacts.items()}
        write_atomically(self.folder / CONTACTS, json.dumps(told, indent=1).encode())


def _entries(file: Path, kinds: Kinds) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole entries of a file, read as ``kinds`` say; of a damaged one those that can be."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        entries = [*read.items()]
    except (OSError, ValueError, RecursionError, AttributeError):
        return
    for name, entry in entries:
        with suppress(KeyError, ValueError, TypeError, OverflowError):
            yield name, {key: kind(entry[key]) for key, kind in kinds.items()}


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(str, value))
