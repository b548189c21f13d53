"""What commands do with a federation's queue: add a run, wait for its turn, show, take away."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.server.cli.view import local_time
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import reading
from coterie.server.site.coordinator import answers
from coterie.server.site.federation import Federation
from coterie.server.site.queue import REFUSED, STARTED, Entry, Queue, task_of
from coterie.strategies.errors import refused
from coterie.system.terminal import wide

LOOK_S = 0.5


@dataclass(frozen=True)
class Turn:
    """Whether a run waits for its turn, and as what.

    Attributes:
        federation: whose queue it is; None: there is none here.
        wanted: it was asked for.
        priority: of the run.
    """

    federation: Federation | None
    wanted: bool = False
    priority: int = 0

    def queue(self) -> Queue | None:
        """Where the run is to wait; None: it is submitted at once.

        Raises:
            FederationError: it was asked for where no federation's folder is.
        """
        if self.federation is None and self.wanted:
            raise refused(
                "--queue needs the federation's folder, where the queue is: name it with "
                "--federation, on the coordinator's machine."
            )
        if self.federation is None or not (self.wanted or self.federation.config.runs.at_once):
            return None
        return Queue(self.federation.folder)

    def add(self, queue: Queue, config: RunConfig, console: Console) -> Entry:
        """Put the run into the queue and say so.

        Raises:
            FederationError: it resumes a run that cannot be resumed.
        """
        assert self.federation is not None
        if config.resume:  # before anybody waits for a run that cannot go on
            found = reading.find_run(config.resume, Path(config.runs_dir))
            reading.read_unfinished(found)
            keys = {"resume": found.name, "runs-dir": str(found.resolve().parent)}
            config = RunConfig.read(keys)
        entry = queue.add(config, priority=self.priority, alone=self.wanted)
        folder = shlex.quote(str(self.federation.folder))
        line = f"coterie runs --federation {folder}"
        _say(console, f"run {entry.id} is in the queue. `{line}` shows it.")
        if not answers(self.federation):
            _say(console, "The coordinator is not running: the run waits until it is.")
        return entry


def wait_for_turn(queue: Queue, entry: Entry, console: Console) -> int:
    """Wait until a run was submitted, however long that takes; return its id.

    Raises:
        FederationError: it was taken out of the queue, or refused.
    """
    before = 0
    while (found := queue.find(entry.id)) is not None:
        if found.state == STARTED:
            return found.run_id
        if found.state == REFUSED:
            raise refused(f"run {entry.id} was not started: {found.error}")
        ahead = [one.id for one in queue.waiting()].index(entry.id) if found.waits else 0
        if ahead + 1 != before:
            before = ahead + 1
            _say(console, f"run {entry.id} waits for its turn: place {before} in the queue")
        time.sleep(LOOK_S)
    raise refused(f"run {entry.id} was taken out of the queue.")


def print_queue(federation: Federation | None) -> None:
    """Runs that wait, the next one first."""
    waiting = Queue(federation.folder).waiting() if federation else []
    if not waiting:
        return
    console = Console()
    table = Table(title="waiting", title_justify="left", box=None, padding=(0, 1))
    for column in ("queue", "priority", "strategy", "task", "since", "waits for"):
        table.add_column(column, no_wrap=True)
    for one in waiting:
        what = "the same silos" if one.alone else "a place"
        cells = (one.id, str(one.priority), _what(one), task_of(one.keys), local_time(one.at), what)
        table.add_row(*map(Text, cells))
    wide(console).print(table)


def _what(entry: Entry) -> str:
    resumed = entry.keys.get("resume")
    return f"resumes {resumed}" if resumed else str(entry.keys.get("strategy", ""))


def is_entry(name: str) -> bool:
    """Whether a run is named as one of the queue."""
    return re.fullmatch(r"q\d+", name) is not None


def take_away(name: str, federation: Federation | None) -> None:
    """Take a run out of the queue.

    Raises:
        FederationError: it does not wait there, or no federation's folder is here.
    """
    if federation is None:
        raise refused(f"{name} is a run in a queue: name the federation's folder, --federation.")
    Queue(federation.folder).take_away(name)
    _say(Console(), f"{name} is taken out of the queue.")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
