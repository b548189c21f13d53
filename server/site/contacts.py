"""The coordinator's knowledge of its silos beyond their keys: tasks and last contact.

    silos.json      name → the silo's last answer to a run; runs write it
    contacts.json   name → last contact with the SuperLink; the coordinator's process writes it

Both only save questions: if they are missing or damaged, every silo is asked again.
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
"""Key → converter of its value."""
SILOS, CONTACTS = "silos.json", "contacts.json"
LOCK, LOCK_DEADLINE_S = "silos.lock", 10.0
ASK_AGAIN_S = 3600.0
"""Time after which a silo of other tasks is asked again."""


@dataclass(frozen=True)
class Served:
    """A silo's statement of its tasks, with Flower's id of its key; ``at``: seconds since 1970."""

    node: int
    tasks: tuple[str, ...]
    at: float


@dataclass(frozen=True)
class Contact:
    """The SuperLink's information about a silo; for ``status`` see ``link.Node``.

    Attributes:
        node: Flower's id of its key.
        connected: start of its latest connection, seconds since 1970; 0: never.
        seen: last contact, to half a minute; 0: never.
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
        """Return silo → last statement, for silos that were ever asked."""
        kinds: Kinds = {"node": int, "tasks": _names, "at": float}
        return {n: Served(**entry) for n, entry in _entries(self.folder / SILOS, kinds)}

    def seen(self) -> Mapping[str, Contact]:
        """Return silo → last contact noted by the coordinator's process."""
        kinds: Kinds = {"node": int, "status": str, "connected": float, "seen": float}
        return {n: Contact(**entry) for n, entry in _entries(self.folder / CONTACTS, kinds)}

    def objection(self, node: int, name: str, task: str) -> str:
        """Return why a silo need not be asked whether it serves a task; empty if it must be asked.

        It is asked if nothing is known, after an hour, and if it has connected since.
        """
        served, contact = self.served().get(name), self.seen().get(name)
        if served is None or contact is None or served.node != node or contact.node != node:
            return ""
        is_old = time.time() - served.at > ASK_AGAIN_S or contact.connected > served.at
        if is_old or task in served.tasks:
            return ""
        return f"it serves task {', '.join(map(repr, served.tasks))}, {wire.OTHER_TASK} {task!r}."

    def note(self, stated: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        """Save what silos said: silo → its node and tasks. If that fails, they are asked again."""
        try:
            with locked(self.folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
                known = {n: asdict(one) for n, one in self.served().items()}
                now = time.time()
                known |= {n: asdict(Served(*said, now)) for n, said in stated.items()}
                write_atomically(self.folder / SILOS, json.dumps(known, indent=1).encode())
        except (OSError, LockedError) as error:
            log.warning("the tasks that silos serve could not be saved: %s", error)

    def note_seen(self, contacts: Mapping[str, Contact]) -> None:
        """Save the last contacts. Raises ``OSError``."""
        entries = {name: asdict(contact) for name, contact in contacts.items()}
        write_atomically(self.folder / CONTACTS, json.dumps(entries, indent=1).encode())


def _entries(file: Path, kinds: Kinds) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete entries of a file, also of a damaged one, converted by ``kinds``."""
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
