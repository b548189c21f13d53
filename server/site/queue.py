"""The queue of waiting runs: ``queue.json`` in a federation's folder.

``coterie run --queue`` adds an entry, at the coordinator or through its gate (``AskedQueue``); the
coordinator's process submits it when its turn comes. Every change is on disk before it takes
effect. So a kill loses no entry, and none is submitted twice: each submission carries a digest that
only its entry has.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie.engine.control import RunInfo, digest_of
from coterie.server.machine.link import Control, bundle_of
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import going_on
from coterie.server.runs.record import reading
from coterie.server.site import audit
from coterie.server.site.contacts import Contacts
from coterie.server.site.federation import Federation
from coterie.strategies.errors import FederationError, refused
from coterie.system.files import LockedError, locked, write_atomically
from coterie.system.processes import account, utc_now

FILE, LOCK, LOCK_DEADLINE_S = "queue.json", "queue.lock", 30.0
WAITING, STARTING, STARTED, REFUSED = "waiting", "starting", "started", "refused"
MAX_ENDED = 50
"""Entries kept after their turn, for clients that wait for them."""
MAX_TRIES = 3
"""Attempts to submit a run to a SuperLink that rejects it."""


@dataclass(frozen=True)
class Entry:
    """A run that waits, or waited.

    Attributes:
        id: for example ``q7``.
        priority: the highest goes first; among equals the oldest.
        alone: wait while another run uses the same silos; if false, wait only for a free place.
        at: when it was added, ISO 8601, UTC.
        state: waiting, starting, started or refused.
        run_id: Flower's, once started.
        bundle: digest of the last submission.
        tries: failed submissions.
        by: who added it: an operator's name, or the account on the coordinator's machine.
    """

    id: str
    keys: Mapping[str, Any]
    priority: int = 0
    alone: bool = True
    at: str = ""
    state: str = WAITING
    run_id: int = 0
    bundle: str = ""
    tries: int = 0
    error: str = ""
    by: str = ""

    @property
    def number(self) -> int:
        """The position in the order in which entries were added."""
        return int(self.id.removeprefix("q"))

    @property
    def config(self) -> RunConfig:
        """The run's configuration. Raises ``FederationError`` if this release rejects it."""
        return RunConfig.read_from_flower(self.keys)

    @property
    def waits(self) -> bool:
        """Whether its turn has not come yet."""
        return self.state in (WAITING, STARTING)


def waiting_of(entries: Iterable[Entry]) -> list[Entry]:
    """Return the waiting entries, the next one first."""
    return sorted(
        (one for one in entries if one.waits), key=lambda one: (-one.priority, one.number)
    )


class AskedQueue:
    """The queue as operators have it; ``act`` has an act done, here or at the coordinator."""

    def __init__(self, act: Callable[..., Mapping[str, Any]]) -> None:
        self._act = act

    def entries(self) -> list[Entry]:
        """Return all entries, oldest first. Raises ``FederationError`` if they cannot be read."""
        try:
            return [Entry(**one) for one in self._act("waiting")["entries"]]
        except (KeyError, TypeError):
            raise refused(
                "the coordinator's queue was written by a different version of coterie. "
                "Install the coordinator's version here."
            ) from None

    def add(self, keys: Mapping[str, Any], *, priority: int = 0, alone: bool = True) -> Entry:
        """Add a run (see ``enqueue``)."""
        options = {"priority": str(priority), "alone": "yes" if alone else "no"}
        return Entry(**self._act("queue", keys=json.dumps(dict(keys)), **options)["entry"])

    def take_away(self, entry_id: str) -> None:
        """Remove a waiting run (see ``Queue.take_away``)."""
        self._act("take away", id=entry_id)


class Queue:
    """The queue file; safe to use from several processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> list[Entry]:
        """Return all entries. Raises ``FederationError`` if the file is damaged."""
        return self._read()[1]

    def waiting(self) -> list[Entry]:
        """Return the waiting entries, the next one first; raises as ``entries``."""
        return waiting_of(self.entries())

    def find(self, entry_id: str) -> Entry | None:
        """Return the entry with that id, or None; raises as ``entries``."""
        return next((one for one in self.entries() if one.id == entry_id), None)

    def add(
        self, config: RunConfig, *, priority: int = 0, alone: bool = True, by: str = ""
    ) -> Entry:
        """Add a run behind those of its priority; raises as ``entries``."""
        with self._held():
            number, entries = self._read()
            entry = Entry(f"q{number}", config.plain(), priority, alone, utc_now(), by=by)
            self._write(number + 1, [*entries, entry])
        return entry

    def take_away(self, entry_id: str) -> Entry:
        """Remove a waiting entry.

        Raises ``FederationError`` if there is none with that id, or it no longer waits.
        """
        with self._held():
            number, entries = self._read()
            found = [one for one in entries if one.id == entry_id]
            if not found:
                raise refused(f"no run {entry_id!r} is in the queue. `coterie runs` lists them.")
            if found[0].state != WAITING:
                run = f" as run {found[0].run_id}" if found[0].run_id else ""
                raise refused(f"{entry_id} is no longer queued: it is {found[0].state}{run}.")
            self._write(number, [one for one in entries if one.id != entry_id])
        return found[0]

    def change(self, entry: Entry, **changes: Any) -> Entry | None:
        """Update an entry; return None if it was removed meanwhile."""
        with self._held():
            number, entries = self._read()
            if all(one.id != entry.id for one in entries):
                return None
            changed = replace(entry, **changes)
            self._write(number, [changed if one.id == entry.id else one for one in entries])
        return changed

    def _read(self) -> tuple[int, list[Entry]]:
        file = self.folder / FILE
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            return int(read["next"]), [Entry(**one) for one in read["entries"]]
        except FileNotFoundError:
            return 1, []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise refused(
                f"{file} cannot be read: {error}. Remove it, and queue the runs again."
            ) from None

    def _write(self, number: int, entries: Sequence[Entry]) -> None:
        ended = [one.id for one in entries if not one.waits]
        old = set(ended[:-MAX_ENDED])
        kept = [asdict(one) for one in entries if one.id not in old]
        text = json.dumps({"next": number, "entries": kept}, indent=1)
        write_atomically(self.folder / FILE, text.encode())

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with locked(self.folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
                yield
        except LockedError as error:
            raise refused(f"the queue cannot be changed: {error}. Try again.") from None


def enqueue(
    made: Federation,
    keys: Mapping[str, Any],
    *,
    priority: int = 0,
    alone: bool = True,
    who: str = "",
) -> Entry:
    """Add a run to a federation's queue, and note it in the audit log.

    ``who`` is the operator; if empty, the account of this process. Raises ``FederationError`` if a
    key is unknown, or the run cannot be resumed.
    """
    config = RunConfig.read(keys)
    if config.resume:  # before anybody waits for a run that cannot go on
        config = going_on(config, reading.find_run(config.resume, Path(config.runs_dir)))
    plain = config.plain()
    about = {key: plain[key] for key in ("strategy", "task", "resume") if plain.get(key)}
    with audit.acting(made, "queue", who=who, priority=priority, **about):
        return Queue(made.folder).add(config, priority=priority, alone=alone, by=who or account())


def who_queued(made: Federation, bundle: str) -> str:
    """Return who queued the run of this bundle; empty if it is not from the queue."""
    return next((one.by for one in Queue(made.folder).entries() if one.bundle == bundle), "")


class Dispatcher:
    """The submitter of queued runs whose turn has come; only in the coordinator's process."""

    def __init__(self, federation: Federation, say: Callable[[str], None]) -> None:
        self.queue = Queue(federation.folder)
        self._at_once = federation.config.runs.at_once
        self._contacts = Contacts(federation.folder)
        self._say = say

    def dispatch(self, calls: Control) -> None:
        """Submit every run that need not wait any longer.

        Raises ``FederationError`` if the SuperLink cannot be reached, or the queue cannot be read.
        """
        if not self.queue.waiting():
            return
        runs = calls.runs()
        self._settle(runs)
        going = [task_of(run.keys) for run in runs if not run.ended]
        for entry in self.turns(going):
            self._submit(entry, calls)

    def turns(self, going: Sequence[str]) -> list[Entry]:
        """Return the entries whose turn it is; ``going`` has the task of each active run."""
        room = self._at_once - len(going) if self._at_once else len(self.queue.waiting())
        held, found = list(going), list[Entry]()
        for entry in self.queue.waiting():
            task = task_of(entry.keys)
            if entry.alone and any(self._share_silos(task, other) for other in held):
                held.append(task)  # nobody with less priority gets its silos before it
            elif len(found) < room:
                held.append(task)
                found.append(entry)
        return found

    def _share_silos(self, one: str, other: str) -> bool:
        served = self._contacts.served().values()
        return one == other or any({one, other} <= {*silo.tasks} for silo in served)

    def _settle(self, runs: Sequence[RunInfo]) -> None:
        """Resolve entries whose submission was interrupted before its result was noted."""
        submitted = {run.bundle: run.run_id for run in runs}
        for entry in self.queue.waiting():
            if entry.state != STARTING:
                continue
            if entry.bundle in submitted:
                self.queue.change(entry, state=STARTED, run_id=submitted[entry.bundle], error="")
            else:
                again = entry.tries < MAX_TRIES
                self.queue.change(entry, state=WAITING if again else REFUSED)

    def _submit(self, entry: Entry, calls: Control) -> None:
        noted: Entry | None = entry
        try:
            config = entry.config
            bundle = bundle_of(config, f"{entry.id} {secrets.token_hex(8)}")
            noted = self.queue.change(entry, state=STARTING, bundle=digest_of(bundle))
            if noted is None:  # it was taken away
                return
            run_id = calls.submit(config, bundle)
        except FederationError as error:  # the next look says whether it was submitted after all
            tries = entry.tries + 1
            self.queue.change(noted or entry, state=STARTING, tries=tries, error=str(error))
            self._say(f"Queued run {entry.id} was not started: {error}")
            return
        self.queue.change(noted, state=STARTED, run_id=run_id, error="")
        self._say(f"Queued run {entry.id} was submitted as run {run_id}.")


def task_of(keys: Mapping[str, Any]) -> str:
    """Return the task of a run; a resumed run has it in its record."""
    if keys.get("resume"):
        try:
            root = Path(str(keys["runs-dir"])) if keys.get("runs-dir") else None
            recorded = reading.read_run(reading.find_run(str(keys["resume"]), root))
            return str(recorded.config.get("task", ""))
        except FederationError:
            return ""
    return str(keys.get("task", ""))
