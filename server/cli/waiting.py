"""The queue on the command line: add a run, wait for its turn, list, remove."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coterie.server.cli.options import Given
from coterie.strategies.errors import refused
from coterie.system.terminal import say

if TYPE_CHECKING:
    from coterie.server.runs.config import RunConfig
    from coterie.server.site.queue import AskedQueue, Entry

LOOK_S, REMOTE_LOOK_S = 0.5, 3.0


@dataclass(frozen=True)
class Turn:
    """Whether a run was asked to wait for its turn, and with which priority."""

    given: Given = field(default_factory=Given)
    wanted: bool = False
    priority: int = 0

    def queue(self) -> AskedQueue | None:
        """Return the queue for the run; None if it is submitted at once.

        Raises ``FederationError`` if it was asked for without a federation, which has the queue.
        """
        made = self.given.made()
        is_limited = made is not None and made.config.runs.at_once
        return queue_of(self.given, "--queue") if self.wanted or is_limited else None

    def add(self, queue: AskedQueue, config: RunConfig, console: Console) -> Entry:
        """Add the run to the queue and report it.

        Raises ``FederationError`` if it cannot be resumed, or the role is missing.
        """
        made = self.given.made()
        entry = queue.add(config.plain(), priority=self.priority, alone=self.wanted)
        line = self.given.again("status")
        if made is not None:
            line = f"coterie runs --federation {shlex.quote(str(made.folder))}"
        say(console, f"run {entry.id} is in the queue. `{line}` shows it.")
        if made is not None:
            from coterie.server.site.coordinator import answers

            if not answers(made):
                say(console, "The coordinator is not running: the run waits until it is.")
        return entry


def queue_of(given: Given, what: str) -> AskedQueue:
    """Return the queue of a federation here, or of a coordinator named by address and CA.

    Raises ``FederationError`` if there is neither.
    """
    from coterie.server.site.queue import AskedQueue

    if given.made() is None and (given.superlink is None or given.root_certificates is None):
        raise refused(
            f"{what} needs a federation, which has the queue: name its folder with --federation, "
            "or its coordinator elsewhere with --superlink and --root-certificates."
        )
    return AskedQueue(given.act)


def wait_for_turn(queue: AskedQueue, entry: Entry, console: Console, *, look_s: float) -> int:
    """Wait without a limit until a run is submitted; return its id.

    Raises ``FederationError`` if it was removed from the queue, or rejected.
    """
    from coterie.server.site.queue import REFUSED, STARTED, waiting_of

    before = 0
    while True:
        entries = queue.entries()
        found = next((one for one in entries if one.id == entry.id), None)
        if found is None:
            raise refused(f"run {entry.id} was taken out of the queue.")
        if found.state == STARTED:
            return found.run_id
        if found.state == REFUSED:
            raise refused(f"run {entry.id} was not started: {found.error}")
        ahead = [one.id for one in waiting_of(entries)].index(entry.id)
        if ahead + 1 != before:
            before = ahead + 1
            say(
                console,
                f"run {entry.id} waits for its turn: place {before} in the queue",
                highlight=False,
            )
        time.sleep(look_s)


def waiting_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the waiting runs as rows of a table, the next one first."""
    from coterie.server.report.view import local_time
    from coterie.server.site.queue import task_of, waiting_of

    return [
        {
            "queue": one.id,
            "priority": one.priority,
            "strategy": _what(one),
            "task": task_of(one.keys),
            "since": local_time(one.at),
            "by": one.by,
            "waits-for": "the same silos" if one.alone else "a place",
        }
        for one in waiting_of(entries)
    ]


def print_queue(entries: Sequence[Entry]) -> None:
    """Print the waiting runs, the next one first."""
    from coterie.system.terminal import print_table
    from coterie.wire import plain_text

    if rows := waiting_rows(entries):
        header = [column.replace("-", " ") for column in rows[0]]
        cells = (map(plain_text, row.values()) for row in rows)  # perhaps from elsewhere
        print_table(Console(), header, cells, folding=(), title="waiting")


def _what(entry: Entry) -> str:
    resumed = entry.keys.get("resume")
    return f"resumes {resumed}" if resumed else str(entry.keys.get("strategy", ""))


def is_entry(name: str) -> bool:
    """Return whether a name is that of a queued run."""
    return re.fullmatch(r"q\d+", name) is not None


def take_away(name: str, given: Given) -> None:
    """Remove a run from the queue.

    Raises ``FederationError`` if it does not wait there, or no federation is named.
    """
    queue_of(given, f"{name} is a run in a queue, and to stop it").take_away(name)
    say(Console(), f"{name} is taken out of the queue.")
