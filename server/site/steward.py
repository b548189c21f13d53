"""The background work of the coordinator's process: observe, note, dispatch.

A thread asks the SuperLink for its silos and runs, notes the last contact of silos, and submits
queued runs when their turn comes. Each problem is reported once and retried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Event, Thread

from coterie.engine.control import RunInfo
from coterie.server.machine.link import Control, control
from coterie.server.site import enrolled, operators
from coterie.server.site.contacts import Contact, Contacts
from coterie.server.site.federation import Federation
from coterie.server.site.queue import Dispatcher

TICK_S, LOOK_S = 1.0, 10.0
"""Seconds between two checks of the queue, and of the SuperLink if nothing is queued."""
NOTE_S = 60.0
"""Interval of notes about silos without changes."""


@dataclass(frozen=True)
class Snapshot:
    """The last answer of the SuperLink: enrolled silos and all runs; ``at`` 0: none yet."""

    at: float = 0.0
    silos: Mapping[str, Contact] = field(default_factory=dict)
    runs: tuple[RunInfo, ...] = ()


class Steward:
    """The watcher of a federation whose SuperLink runs here; a context manager."""

    def __init__(self, federation: Federation, say: Callable[[str], None]) -> None:
        self.snapshot = Snapshot()
        self.errors = 0
        self.dispatcher = Dispatcher(federation, say)
        self._federation, self._say = federation, say
        self._contacts = Contacts(federation.folder)
        self._noted = Snapshot()
        self._said = ""
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="steward", daemon=True)

    def __enter__(self) -> Steward:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LOOK_S)

    def _watch(self) -> None:
        due = 0.0
        while not self._ended.wait(TICK_S):
            try:
                waits = bool(self.dispatcher.queue.waiting())
                if waits or time.monotonic() >= due:
                    due = time.monotonic() + LOOK_S
                    self.look()
                self._said = ""
            except Exception as error:  # of gRPC, of the disk: it may pass
                self.errors += 1
                due = time.monotonic() + LOOK_S
                if str(error) != self._said:
                    self._said = str(error)
                    self._say(f"The coordinator cannot supervise its runs: {error}")

    @property
    def is_idle(self) -> bool:
        """Whether no run was active when the SuperLink was last asked, a moment ago."""
        seen = self.snapshot
        return time.time() - seen.at < 2 * LOOK_S and all(run.ended for run in seen.runs)

    def look(self) -> None:
        """Ask the SuperLink once.

        Raises:
            FederationError, OSError: it cannot be asked, or its answer cannot be noted.
        """
        made = self._federation
        identity = operators.local_identity(made)
        with control(made.control_address, root_certificates=made.ca, identity=identity) as calls:
            self.snapshot = Snapshot(time.time(), self._silos(calls), tuple(calls.runs()))
            self._note()
            self.dispatcher.dispatch(calls)

    def _silos(self, calls: Control) -> dict[str, Contact]:
        names = enrolled.names_by_node(self._federation.roster)
        return {
            names[node.node_id]: Contact(node.node_id, node.status, node.connected, node.seen)
            for node in calls.nodes()
            if node.node_id in names
        }

    def _note(self) -> None:
        """Save the last contacts, if they are news."""
        now, before = self.snapshot, self._noted
        if now.at - before.at >= NOTE_S or _states(now) != _states(before):
            self._contacts.note_seen(now.silos)
            self._noted = now


def _states(snapshot: Snapshot) -> Mapping[str, Contact]:
    return {name: replace(one, seen=0.0) for name, one in snapshot.silos.items()}
