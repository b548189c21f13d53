"""The implementation of an operator's commands."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.cli.options import Given
from coterie.server.cli.waiting import print_queue, waiting_rows
from coterie.server.machine.link import MOST_SHOWN, Control
from coterie.server.machine.local import Start, follow_run
from coterie.server.paths import default_runs_dir
from coterie.server.report.final import print_final
from coterie.server.report.view import local_time, showing
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import earlier_run, going_on, parent_of
from coterie.server.runs.record import EVENTS, RECORD, Event, Run, reading
from coterie.server.runs.record.follow import Progress, events
from coterie.server.runs.run import run_folder
from coterie.server.site.queue import AskedQueue, Entry
from coterie.strategies.errors import EXIT_RUN, FederationError, refused
from coterie.system.commandline import plain, print_json
from coterie.system.files import UNKNOWN, held_by
from coterie.system.processes import insistent_interrupts
from coterie.system.terminal import aside, print_table, say, wide

LOG_DEADLINE_S = 7 * 24 * 3600.0
LAST_WORDS_S = 5.0
"""Time after the last event in which a run without a process is still read."""
BEGINNING_S = 10.0
"""Time that a command waits for the start of a run that it does not follow."""
PENDING, START_POLL_S = "pending", 0.5
"""The SuperLink's status of a run that no ServerApp has started, and seconds between two checks."""
MOST_DETAILS = 100
"""Most characters of the details in the table; `coterie runs show` has all of them."""
NOTHING = "–"
COLUMNS = ("run", "strategy", "status", "started", "rounds", "silos", "mean over silos")
STOP_DEADLINE_S, STOP_POLL_S = 60.0, 0.2


def follow(
    calls: Control,
    config: RunConfig,
    options: Given,
    console: Console,
    *,
    run_id: int,
    here: bool,
    detach: bool,
    as_json: bool = False,
) -> int:
    """Show a submitted run until it ends, or not if ``detach``; return the exit status.

    ``options`` are repeated in suggested commands. If ``here``, its record can be read here.
    """
    folder = run_folder(config, run_id=run_id)
    record = folder if config.runs_dir else None
    where = record or f"{folder.name}, at the coordinator"
    say(console, f"run {run_id} is submitted; its record: {where}")
    if detach:
        if as_json:
            print_json({"run-id": run_id, "run": folder.name, "record": record, "queue": None})
        return _await_beginning(console, run_id, folder) if here else 0
    if not here:
        return _follow_log(console, calls, run_id, Start(run_id, config.wait_for_silos))
    progress = Progress(config.resume or config.strategy)
    again = run_id if config.resume or config.parent else None
    with insistent_interrupts(), showing(console, progress, resumed_as=again) as show:
        last = follow_run(calls, run_id, folder, show, wait_s=config.wait_for_silos)
    if last.status != "completed":  # why, was shown
        _print_error(console, folder.name, last)
        if progress.round:  # before the first there is nothing to go on from
            _print_resumption(console, folder.name, options)
        return EXIT_RUN
    print_final(Console(), folder, as_json=as_json)
    return 0


def _print_error(console: Console, run: str, last: Event) -> None:
    """Print why a run failed, if its console is silent."""
    if console.quiet and last.status != "completed":
        print(f"run {run} {last.status}: {last.error}", file=sys.stderr)


def _await_beginning(console: Console, run_id: int, folder: Path) -> int:
    """Wait until a run has its silos or fails, so that a wrong key shows at once.

    A run that still waits for silos after some seconds is left waiting.
    """
    deadline, own, waits = time.monotonic() + BEGINNING_S, False, ""
    try:
        for event in events(
            folder,
            start_deadline_s=BEGINNING_S,
            ended=lambda: "" if time.monotonic() > deadline else None,
            run_id=run_id,
        ):
            own = own or event.run_id == str(run_id)  # not what a resumed run did before
            waits = event.text or waits if own else ""
            if own and event.kind == "end":
                say(console, f"run {folder.name} {event.status}: {event.error}", highlight=False)
                _print_error(console, folder.name, event)
                return 0 if event.status == "completed" else EXIT_RUN
            if own and event.kind in ("here", "ready"):
                return 0
    except FederationError:
        why = waits.removeprefix("waiting for silos")
        say(console, f"run {folder.name} waits for silos{why}.")
    return 0


def _print_resumption(console: Console, run: str, options: Given) -> None:
    line = options.again(f"run resume {shlex.quote(run)}")
    say(console, f"resume it with: {line}", highlight=False)


def stop_run(name: str, options: Given) -> int:
    """Stop a run at the SuperLink and wait until its process has ended; return the exit status.

    ``name`` is the run's folder, name or id; without a record here, any text that ends in its id.
    Raises ``FederationError`` if there is no such run, or the SuperLink does not know it.
    """
    address, _, root = options.place()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    run_id, folder = _known_run(name, root)
    with options.control() as calls:
        known = [info for info in calls.runs() if info.run_id == run_id]
        if not known:
            raise refused(
                f"the SuperLink at {address} does not know run {run_id}. `coterie status` lists "
                "the runs that it knows; --federation or --superlink choose another SuperLink."
            )
        if not known[0].ended and not calls.stop(run_id):  # it ended by itself meanwhile
            known = calls.runs(run_id)
        if known[0].ended:
            console.print(f"run {run_id} has already ended: {known[0].sub_status}.")
            return 0
    if folder is None:
        console.print(f"run {run_id} is stopped; its record is at the coordinator.")
        return 0
    deadline = time.monotonic() + STOP_DEADLINE_S
    while held_by(folder):
        if time.monotonic() > deadline:
            console.print(
                f"run {run_id} is stopped, but its process {held_by(folder)} did not end within "
                f"{STOP_DEADLINE_S:.0f} s. Its log: {folder / 'run.log'}"
            )
            return EXIT_RUN
        time.sleep(STOP_POLL_S)
    run = reading.read_run(folder)
    rounds = f" after round {len(run.rounds)} of {run.planned_rounds}" * bool(run.planned_rounds)
    console.print(f"run {run_id} is stopped{rounds}; its record: {folder}")
    _print_resumption(console, name if folder == Path(name) else folder.name, options)
    return 0


def _known_run(name: str, root: Path | None) -> tuple[int, Path | None]:
    """Return a run's latest id, and its folder if it is recorded here."""
    number = re.search(r"\d+$", name)
    try:
        folder = reading.find_run(name, root)
        recorded = reading.read_run(folder, brief=True).run_id
    except FederationError:
        if number is None:
            raise
        return int(number[0]), None
    if not recorded.isdecimal():
        raise refused(
            f"{folder / 'run.json'} is damaged: its run-id is {recorded!r}. Name the run by its "
            "id; `coterie status` lists them."
        )
    return int(recorded), folder


def resumable(calls: Control, config: RunConfig) -> RunConfig:
    """Check the record of the run to resume, and stop the run if its process was killed.

    Raises ``FederationError`` if there is no such run, it is complete, or it is still running.
    """
    folder = reading.find_run(config.resume, Path(config.runs_dir))
    run, _ = earlier_run(config, folder)
    before = [info for info in calls.runs() if str(info.run_id) == run.run_id]
    if any(not info.ended for info in before):
        holder = held_by(folder)
        if holder == UNKNOWN:
            raise refused(
                f"whether the run in {folder} is still running cannot be determined, because its "
                "lock cannot be read. Resume it from the account that it runs under."
            )
        if holder is not None:
            raise refused(f"the run in {folder} is still running.")
        calls.stop(int(run.run_id))  # its process was killed and Flower has not noticed yet
    return going_on(config, folder)


def watch_run(name: str | None, options: Given) -> int:
    """Show a run that is recorded on this machine until it ends; return the exit status.

    Raises ``FederationError`` if there is no such run, its process was killed, or it was silent for
    longer than a round may take.
    """
    root = options.place().runs_dir
    folder = reading.newest_run(root) if name is None else reading.find_run(name, root)
    if folder is None:
        raise refused(f"no run is recorded in {root or default_runs_dir()}.")
    file = folder / EVENTS
    progress = Progress(folder.name)

    def ended() -> str | None:
        limit = sum(progress.config.get(key, 600.0) for key in ("round-timeout", "wait-for-silos"))
        silent = time.time() - file.stat().st_mtime
        if silent > LAST_WORDS_S and held_by(folder) is None:
            line = options.again(f"run resume {shlex.quote(folder.name)}")
            return f"its process is gone. Resume it with: {line}"
        return (
            f"nothing was written for {silent:.0f} s; its process may hang"
            if silent > limit
            else None
        )

    console, last = aside(), Event("end")
    with showing(console, progress) as show:
        for event in events(folder, start_deadline_s=60.0, ended=ended):
            show(event)
            last = event if event.status else last
    _print_error(console, folder.name, last)
    return 0 if last.status == "completed" else EXIT_RUN


def _follow_log(console: Console, calls: Control, run_id: int, start: Start) -> int:
    """Follow a remote run by the output of its ServerApp, once there is one."""
    while all(info.status == PENDING for info in calls.runs(run_id)):
        if news := start.news():
            say(console, news, highlight=False)
        time.sleep(START_POLL_S)
    for line in calls.log_lines(run_id, deadline_s=LOG_DEADLINE_S):
        say(console, wire.plain_text(line, MOST_SHOWN), highlight=False)
    (info,) = calls.runs(run_id)
    ended = wire.plain_text(f"{info.status} {info.sub_status} {info.why}", MOST_SHOWN)
    console.print(f"run {run_id}: {ended}", markup=False)
    return 0 if info.sub_status == "completed" else EXIT_RUN


def print_status(options: Given, *, as_json: bool = False) -> None:
    """Print connected silos and known runs."""
    address = options.place().superlink
    console = Console()
    with options.control() as calls:
        online, known = calls.num_online(), calls.runs()
        queue: list[Entry] = []
        with suppress(FederationError):  # a federation alone has one, and one of this release
            queue = AskedQueue(calls.act).entries() if options.place().root_certificates else []
    rows = [
        {
            "run": info.run_id,
            "status": info.sub_status or info.status,
            "submitted": local_time(info.pending_at)[:19],
            "details": info.why,
        }
        for info in known
    ]
    if as_json:
        waits = waiting_rows(queue)
        print_json({"superlink": address, "silos": online, "runs": rows, "queue": waits})
        return
    silos, runs = wire.counted(online, "silo"), wire.counted(len(known), "run")
    console.print(f"SuperLink at {address}: {silos} connected, {runs}", markup=False)
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(Text(wire.plain_text(cell, MOST_DETAILS)) for cell in row.values()))
        wide(console).print(table)
    print_queue(queue)


def print_runs(
    folder: Path | None, queue: Sequence[Entry] = (), *, tree: bool = False, as_json: bool = False
) -> None:
    """Print recorded runs, newest last, and those that wait.

    With ``tree``, each run stands below the one that it began from.
    """
    console = Console()
    root = folder or default_runs_dir()
    records = sorted(root.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    rows = [_summary(path.parent) for path in records]
    if as_json:
        print_json({"runs": rows, "queue": waiting_rows(queue)})
        return
    if tree:
        rows = list(_as_tree(rows))
    if rows:
        # A run's name is to be typed, so it is never cut.
        print_table(console, COLUMNS, (row.cells().values() for row in rows), folding=COLUMNS[:2])
    else:
        say(console, f"no runs are recorded in {root}")
    print_queue(queue)


def _as_tree(rows: Sequence[_Row]) -> Iterator[_Row]:
    """Yield rows with each run below its parent, and indented."""
    known = {row.run for row in rows}

    def below(parent: str, indent: str) -> Iterator[_Row]:
        for row in rows:
            if (row.parent if row.parent in known else "") == parent:
                yield replace(row, run=indent + row.run)
                yield from below(row.run, indent.replace("└ ", "  ") + "└ ")

    yield from below("", "")


def print_run(name: str, root: Path | None, *, as_json: bool = False) -> None:
    folder = reading.find_run(name, root)
    row = _summary(folder)
    if as_json:
        print_json({**plain(row), "record": folder})
        return
    more = {"begun from": row.parent} if row.parent else {}
    more |= {"why": row.error} if row.error else {}
    known = {what: cell for what, cell in row.cells().items() if cell != NOTHING}
    for what, cell in {**known, **more, "record": str(folder)}.items():
        say(Console(), f"{what:16} {cell}", highlight=False)


def _status(run: Run) -> str:
    """Return the status of a run; one whose process was killed is interrupted."""
    if run.status not in ("starting", "running"):
        return run.status
    holder = held_by(run.folder)
    if holder is None:
        return "interrupted"
    return f"{run.status} (lock unreadable)" if holder == UNKNOWN else run.status


@dataclass(frozen=True)
class _Row:
    """The facts of a recorded run; ``mean`` is the text of ``mean_error`` in the run's metric.

    ``parent`` is the run that it began from, ``asks`` the model and task of a regression, ``error``
    why a run failed; each may be empty.
    """

    run: str
    strategy: str
    status: str
    started: str
    rounds: int
    planned_rounds: int
    silos: int
    mean: str
    mean_error: float | None
    parent: str
    asks: str
    error: str

    def cells(self) -> dict[str, str]:
        """Return the facts for people, by the columns of their table."""
        planned = f"{self.rounds}/{self.planned_rounds}" if self.planned_rounds else NOTHING
        started = local_time(self.started)[5:16]
        facts = (self.status, started, planned, str(self.silos), self.mean)
        return dict(zip(COLUMNS, (self.run, self.asks or self.strategy, *facts), strict=True))


def _summary(folder: Path) -> _Row:
    damage = ""
    try:
        run = reading.read_whole(folder, brief=True)
    except FederationError:
        damage = ", damaged"
        try:
            run = reading.read_run(folder, brief=True)
        except FederationError:
            run, damage = Run(folder, status="damaged"), ""
    known = run.mean_error is not None
    return _Row(
        folder.name,
        run.strategy,
        _status(run) + damage,
        run.started,
        len(run.rounds),
        run.planned_rounds,
        len(run.silos),
        f"{run.lead.title} {run.lead.text(run.mean_error)}" if known else NOTHING,
        run.mean_error,
        parent_of(run),
        _asks(run),
        run.error,
    )


def _asks(run: Run) -> str:
    """Return kind, task and target of a regression; empty for other runs."""
    if run.strategy not in wire.BY_SUMS:
        return ""
    named = [str(run.config[key]) for key in ("model", "task", "target") if run.config.get(key)]
    return wire.plain_text(f"{run.strategy} ({', '.join(named)})")
