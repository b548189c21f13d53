"""A federation on this machine, each part in its own process: for demos, tests, benchmarks."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coterie import wire
from coterie.engine.port import Engine
from coterie.server.machine.link import Control, bundle_of_app, control
from coterie.server.machine.superlink import Ports, SuperLink
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import resume_command
from coterie.server.runs.record import Event
from coterie.server.runs.record.follow import events
from coterie.server.runs.run import run_folder
from coterie.strategies.errors import FederationError
from coterie.system.files import held_by
from coterie.system.processes import (
    Program,
    closing_on_signals,
    family,
    proportional_memory,
    stop_all,
    uninterrupted,
)
from coterie.tasks.base import Option

JOIN_DEADLINE_S, JOIN_MORE_S, PROCESS_S = 120.0, 0.3, 5.0
"""Seconds for silos to connect, and additional seconds per silo and per process: each imports
PyTorch, and all of them, with the SuperLink, share this machine's cores."""
START_DEADLINE_S = 60.0
LATE_S, LATE_AGAIN_S = 30.0, 60.0
"""Seconds until the first message that a run has not started, and between further ones."""
WHERE_TO_LOOK = (
    "Is its executor running? See its log: logs/executor.log in the federation's folder, or "
    "the output of `coterie superlink`."
)
STOP_DEADLINE_S = 15.0
ENDING_DEADLINE_S = 60.0
"""Time for the process of a run that the SuperLink has ended to record that."""
SUPERLINK_AWAY_S = 300.0
"""How long a SuperLink may be unreachable before following a run fails."""
AWAY_SAID_S = 5.0
"""Seconds after which the one who follows is told that it does not answer."""
DEAD_S = 20.0
"""The same if the run's process has ended as well."""


@dataclass(frozen=True)
class SiloSpec:
    """How to start one silo; ``app`` is a ClientApp as ``module:attribute``, in place of a task."""

    name: str
    task: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    threads: int = 1
    label_counts: bool = False
    column_sums: bool = False
    sums: bool = False
    unlabelled: str = ""
    app: str = ""

    def arguments(self, address: str, home: Path) -> list[str]:
        """Return the silo's command line, after ``python -m coterie.client``."""
        served = ["--app", self.app] if self.app else ["--task", self.task]
        own = ["serve", "--name", self.name, *served, "--superlink", address]
        own += ["--threads", str(self.threads), "--home", str(home)]
        own += ["--alpha", str(self.alpha)] if self.alpha is not None else []
        own += ["--share-label-counts"] if self.label_counts else []
        own += ["--share-column-sums"] if self.column_sums else []
        own += ["--share-sums"] if self.sums else []
        own += ["--unlabelled", self.unlabelled] if self.unlabelled else []
        for key, value in self.options.items():
            own += ["--set", f"{key}={value}"]
        return own

    def node_config(self) -> dict[str, Option]:
        """Return Flower's node config, for a silo that runs in this process."""
        own: dict[str, Option] = {"name": self.name, "task": self.task, "threads": self.threads}
        own |= {"alpha": self.alpha} if self.alpha is not None else {}
        own |= {"label-counts": True} if self.label_counts else {}
        own |= {"column-sums": True} if self.column_sums else {}
        own |= {"sums": ",".join(wire.SUMMED)} if self.sums else {}
        own |= {"unlabelled": self.unlabelled} if self.unlabelled else {}
        return own | {f"data.{key}": value for key, value in self.options.items()}


class LocalFederation:
    """A SuperLink and silos, each in its own process; a context manager.

    The processes have their own sessions: no signal of the terminal reaches them, and they are
    always ended in order, however this process is ended.
    """

    def __init__(self, folder: Path, *, ports: Ports | None = None, executes: bool = True) -> None:
        self.folder = folder
        self.runs_dir = folder / "runs"
        self.superlink = SuperLink(folder / "superlink", ports=ports, executes=executes)
        self.programs: dict[str, Program] = {}
        self._more_silos = 0
        """Than nodes: those of a process share one."""
        self._signals = ExitStack()

    def __enter__(self) -> LocalFederation:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._signals.enter_context(closing_on_signals())
        try:
            self.superlink.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._signals, uninterrupted():  # a second signal leaves nothing running either
            try:
                stop_all(self.programs.values(), deadline_s=STOP_DEADLINE_S)
            finally:
                self.superlink.stop()

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[bytes]]:
        """The processes of silos, by the name of a silo or of those that share one."""
        return {name: program.process for name, program in self.programs.items()}

    def log_of(self, name: str) -> Path:
        """Return a silo's log file."""
        return self.folder / "silos" / name / "silo.log"

    def start_silo(
        self,
        spec: SiloSpec,
        *,
        home: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start a silo's process; it joins when it is ready.

        ``home`` is its folder, by default ``silos/NAME``; ``environment`` extends this process's.
        """
        home = home or self.folder / "silos" / spec.name
        line = spec.arguments(self.superlink.fleet_address, home)
        self._start(spec.name, line, environment)

    def start_partitions(self, file: Path, silos: int, processes: int) -> None:
        """Start at most ``processes`` processes for the silos of a simulation file.

        Silo i is in process ``i · processes // silos`` (see ``coterie.tasks.simulation``).
        """
        ends = [-(-silos * i // processes) for i in range(processes + 1)]
        for first, end in itertools.pairwise(ends):
            name = f"silos-{first}-{end - 1}"
            line = ["serve", "--simulation", str(file.resolve())]
            line += [
                "--partitions",
                f"{first}-{end - 1}",
                "--superlink",
                self.superlink.fleet_address,
            ]
            self._start(name, [*line, "--home", str(self.folder / "silos")], {})
            self._more_silos += max(end - first - 1, 0)

    def _start(self, name: str, line: Sequence[str], environment: Mapping[str, str]) -> None:
        self.programs[name] = Program(
            f"silo {name!r}",
            [sys.executable, "-m", "coterie.client", *line],
            log=self.log_of(name),
            environment={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **environment},
        )
        self.programs[name].start()

    def end_silo(self, name: str, *, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to a silo's process."""
        self.processes[name].send_signal(how)

    def wait_for_silos(self, count: int) -> None:
        """Wait until ``count`` silos are connected, at most two minutes and some seconds for each.

        Raises ``FederationError`` if too few connected, or a silo ended; with the end of its log.
        """
        within_s = JOIN_DEADLINE_S + JOIN_MORE_S * count + PROCESS_S * len(self.programs)
        deadline = time.monotonic() + within_s
        self.superlink.wait(within_s)
        with control(self.superlink.control_address) as calls:
            while (online := calls.num_online()) < count - self._more_silos:
                self._raise_for_ended()
                if time.monotonic() > deadline:
                    raise FederationError(
                        f"only {online} of {count - self._more_silos} silo processes connected "
                        f"within {within_s:.0f} s. Their logs are in {self.folder / 'silos'}."
                    )
                time.sleep(0.1)

    def _raise_for_ended(self) -> None:
        for program in self.programs.values():
            if status := program.process.poll():
                raise FederationError(
                    f"{program.name} ended with status {status}. Its log ends:\n"
                    f"{program.last_lines()}"
                )

    def submit(self, **keys: Any) -> tuple[int, Path]:
        """Start a run; return its id and the folder of its record."""
        given = {key.replace("_", "-"): value for key, value in keys.items()}
        config = RunConfig.read({"runs-dir": str(self.runs_dir), **given})
        with control(self.superlink.control_address) as calls:
            run_id = calls.submit(config)
        return run_id, run_folder(config, run_id=run_id)

    @contextmanager
    def run_app(self, run_config: Mapping[str, Any]) -> Iterator[Engine]:
        """Provide the engine of a run of silos with an app; this process is its ServerApp."""
        from coterie.engine.fast.run.here import run_here  # loads much of Flower

        with control(self.superlink.control_address) as calls:
            run_id = calls.start(bundle_of_app(run_config), {})
        if run_id is None:
            raise FederationError("the SuperLink did not start the run.")
        with run_here(self.superlink.runtime_address, run_id) as engine:
            yield engine

    def resume(self, folder: Path) -> int:
        """Resume a run of this federation; return its new id."""
        return self.submit(resume=folder.name)[0]

    def follow(self, run_id: int, folder: Path, take: Callable[[Event], None]) -> Event:
        """Pass a run's events to ``take`` until it ends; return the last one."""
        with control(self.superlink.control_address) as calls:
            return follow_run(calls, run_id, folder, take)

    def run(self, **keys: Any) -> tuple[Path, Event]:
        """Submit a run and wait for it; return the record's folder and the last event."""
        run_id, folder = self.submit(**keys)
        return folder, self.follow(run_id, folder, lambda event: None)

    def memory(self) -> int:
        """Return the memory of all processes in bytes, with shared pages counted once."""
        silos = {one.process.pid for one in self.programs.values() if not one.ended}
        return sum(proportional_memory(pid) for pid in family(self.superlink.pids | silos))


class Start:
    """The time that a submitted run takes to begin; at least ``wait_s``, its wait for silos."""

    def __init__(self, run_id: int, wait_s: float) -> None:
        self.deadline_s = max(START_DEADLINE_S, wait_s)
        self._run_id, self._since, self._due_s = run_id, time.monotonic(), LATE_S

    def news(self) -> str:
        """Return a message after half a minute, and each minute after that; empty otherwise.

        Raises ``FederationError`` if it has not begun by the deadline.
        """
        waited_s = time.monotonic() - self._since
        if waited_s > self.deadline_s:
            raise FederationError(
                f"the run has not begun after {self.deadline_s:.0f} s. {WHERE_TO_LOOK}"
            )
        if waited_s < self._due_s:
            return ""
        self._due_s += LATE_AGAIN_S
        return (
            f"the coordinator has not started run {self._run_id} for {waited_s:.0f} s. "
            f"{WHERE_TO_LOOK} Ctrl-C does not stop the run."
        )


def follow_run(
    calls: Control, run_id: int, folder: Path, take: Callable[[Event], None], *, wait_s: float = 0.0
) -> Event:
    """Follow a run whose record is on this machine; return its last event.

    The SuperLink may be away for a while. ``take`` receives the events, and ``waits`` while the run
    does not begin. For ``wait_s`` see ``Start``.
    """
    start, begun, seen = Start(run_id, wait_s), False, time.monotonic()
    over: float | None = None
    due = AWAY_SAID_S

    def ended() -> str | None:
        nonlocal seen, over, due
        if not begun and (news := start.news()):
            take(Event("waits", text=news))
        try:
            found = calls.runs(run_id)
        except FederationError as error:
            away = time.monotonic() - seen
            again = f"start it, and continue with `{resume_command(folder)}`"
            if begun and away > DEAD_S and held_by(folder) is None:
                return f"the SuperLink does not answer, and the run's process has ended: {again}"
            if away > SUPERLINK_AWAY_S:
                text = f"the SuperLink has not answered for {away:.0f} s ({error}): {again}."
                raise FederationError(text) from None
            if away > due:
                due = away + LATE_AGAIN_S
                text = f"the SuperLink has not answered for {away:.0f} s; waiting for it"
                take(Event("waits", text=text))
            return None
        seen, due = time.monotonic(), AWAY_SAID_S
        if not found or not found[0].ended:
            return None
        over = over or seen
        if held_by(folder) and seen - over < ENDING_DEADLINE_S:
            return None  # its process is about to write how it ended
        return f"{found[0].sub_status}: {found[0].why}"

    for event in events(folder, start_deadline_s=start.deadline_s, ended=ended, run_id=run_id):
        begun = begun or event.run_id == str(run_id)
        take(event)
    return event
