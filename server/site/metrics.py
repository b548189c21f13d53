"""The coordinator's metrics for Prometheus, from its process and its folder.

Docs: docs/how-to/monitor.md. Counters start with the process.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from os import getpid
from pathlib import Path

from coterie.server.runs.record import EVENTS, Event, Round, event_of
from coterie.server.site import certificates
from coterie.server.site.federation import Federation
from coterie.server.site.steward import Steward
from coterie.strategies.errors import FederationError
from coterie.system.exposition import Metric, Sample
from coterie.system.files import held_by, new_lines
from coterie.system.processes import Program, family, proportional_memory

MAX_RUNS = 50
"""Limit on runs with separate metrics; there are rarely that many at once."""
STATES = ("pending", "starting", "running", "completed", "failed", "stopped")

BUILD = Metric("coterie_build_info", "gauge", "Always 1; the version is a label.")
RUNS = Metric("coterie_runs", "gauge", "Runs known to the SuperLink, by state.")
QUEUE = Metric("coterie_queue_length", "gauge", "Queued runs.")
ROUND = Metric("coterie_run_round", "gauge", "Last round of each active run.")
PLANNED = Metric("coterie_run_rounds_planned", "gauge", "Planned rounds of each active run.")
ROUNDS = Metric("coterie_rounds_total", "counter", "Completed rounds.")
SECONDS = Metric(
    "coterie_round_seconds_total", "counter", "Total duration of those rounds, in seconds."
)
OUT = Metric("coterie_bytes_to_silos_total", "counter", "Bytes of arrays sent to silos.")
IN = Metric("coterie_bytes_from_silos_total", "counter", "Bytes of arrays received from silos.")
LEFT_OUT = Metric(
    "coterie_left_out_total", "counter", "Times that a silo was left out of a round, with a reason."
)
SILOS = Metric("coterie_silos", "gauge", "Enrolled silos: online, offline, or never connected.")
CONTACT = Metric(
    "coterie_silo_last_contact_timestamp_seconds", "gauge", "Time of a silo's last contact, or 0."
)
LOOK = Metric(
    "coterie_superlink_last_answer_timestamp_seconds", "gauge", "When the SuperLink last answered."
)
RESTARTS = Metric("coterie_restarts_total", "counter", "Restarts of a program.")
ERRORS = Metric("coterie_errors_total", "counter", "Coordinator errors while supervising runs.")
MEMORY = Metric(
    "coterie_memory_bytes", "gauge", "Memory by part; shared pages are divided among processes."
)
DISK = Metric("coterie_disk_free_bytes", "gauge", "Free disk bytes in the federation's folder.")
CERTIFICATE = Metric(
    "coterie_certificate_expiry_timestamp_seconds", "gauge", "Expiry time of a certificate."
)
METRICS = (
    *(BUILD, RUNS, QUEUE, ROUND, PLANNED, ROUNDS, SECONDS, OUT, IN, LEFT_OUT, SILOS, CONTACT, LOOK),
    *(RESTARTS, ERRORS, MEMORY, DISK, CERTIFICATE),
)


@dataclass
class _Run:
    """The state of one active run."""

    position: int = 0
    planned: int = 0
    round: int = 0
    going_on: bool = False


@dataclass
class RunsMeter:
    """A counter of new entries in the records of runs; entries from before it do not count."""

    folder: Path
    rounds: int = 0
    seconds: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    left_out: int = 0
    _runs: dict[Path, _Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for file in self._files():
            with suppress(OSError):
                self._runs[file] = _Run(file.stat().st_size)

    def _files(self) -> Iterable[Path]:
        return self.folder.glob(f"*/{EVENTS}")

    def read(self) -> None:
        """Count new entries since the last call."""
        for file in self._files():
            run = self._runs.setdefault(file, _Run())
            lines, run.position = new_lines(file, run.position)
            for line in lines:
                event = event_of(line.decode(errors="replace"))
                if event is not None:
                    self._count(event, run)

    def _count(self, event: Event, run: _Run) -> None:
        run.going_on = event.kind != "end"
        if event.kind in ("start", "resume"):
            planned = event.config.get("rounds")
            run.planned = planned if isinstance(planned, int) else run.planned
            run.round = max(event.number, 0)
        elif event.kind == "round" and event.report is not None:
            run.round = event.report.round
            self._count_round(event.report)

    def _count_round(self, one: Round) -> None:
        self.rounds += 1
        self.seconds += sum(one.phase_seconds.values())
        sent, received = one.num_bytes
        self.bytes_out += sent
        self.bytes_in += received
        self.left_out += len(one.left_out)

    def going_on(self) -> Mapping[str, _Run]:
        """Return name → state of the runs whose process is alive."""
        found = {
            file.parent.name: run
            for file, run in self._runs.items()
            if run.going_on and held_by(file.parent) is not None
        }
        return dict(list(found.items())[-MAX_RUNS:])


class Collector:
    """A collector of the coordinator's metrics; ``programs`` maps parts to processes."""

    def __init__(
        self, federation: Federation, steward: Steward, programs: Mapping[str, Program]
    ) -> None:
        self._federation, self._steward, self._programs = federation, steward, programs
        self._meter = RunsMeter(federation.runs)

    def __call__(self) -> Iterator[Sample]:
        yield Sample(BUILD, 1, {"version": version("coterie")})
        yield from self._runs()
        yield from self._silos()
        yield from self._machine()

    def _runs(self) -> Iterator[Sample]:
        runs = Counter(run.sub_status or run.status for run in self._steward.snapshot.runs)
        for state in STATES:
            yield Sample(RUNS, runs[state], {"state": state})
        with suppress(FederationError):  # the queue is damaged
            yield Sample(QUEUE, len(self._steward.dispatcher.queue.waiting()))
        self._meter.read()
        for name, run in self._meter.going_on().items():
            yield Sample(ROUND, run.round, {"run": name})
            yield Sample(PLANNED, run.planned, {"run": name})
        meter = self._meter
        for metric, value in (
            *((ROUNDS, meter.rounds), (SECONDS, meter.seconds), (OUT, meter.bytes_out)),
            *((IN, meter.bytes_in), (LEFT_OUT, meter.left_out), (ERRORS, self._steward.errors)),
        ):
            yield Sample(metric, value)

    def _silos(self) -> Iterator[Sample]:
        snapshot = self._steward.snapshot
        statuses = Counter(one.status for one in snapshot.silos.values())
        for status, label in (
            ("online", "online"),
            ("offline", "offline"),
            ("registered", "never"),
        ):
            yield Sample(SILOS, statuses[status], {"status": label})
        for name, one in sorted(snapshot.silos.items()):
            yield Sample(CONTACT, one.seen, {"silo": name})
        yield Sample(LOOK, snapshot.at)

    def _machine(self) -> Iterator[Sample]:
        yield Sample(MEMORY, proportional_memory(getpid()), {"part": "coordinator"})
        for name, program in self._programs.items():
            own = [] if program.ended else family([program.process.pid])
            yield Sample(MEMORY, sum(map(proportional_memory, own)), {"part": name})
            yield Sample(RESTARTS, program.restarts, {"part": name})
        yield Sample(DISK, shutil.disk_usage(self._federation.folder).free)
        for name, file in (("ca", "ca.pem"), ("server", "server.pem")):
            ends = certificates.ends(self._federation.tls / file)
            yield Sample(CERTIFICATE, ends.timestamp(), {"certificate": name})
