"""Signs of life of a silo's process: its last contact with the SuperLink, and its metrics.

The file ``contact`` in a silo's folder is as old as the last contact: ``coterie silo health``
reads its age, and other monitoring may as well.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import psutil

from coterie import wire
from coterie.client.home.files import CONTACT, LEDGER
from coterie.client.home.local_log import json_object
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.home.watching import last_look
from coterie.client.resident.activity import Tally
from coterie.client.resident.schedule import Schedule, Silo
from coterie.system.exposition import Metric, Sample
from coterie.system.files import new_lines

NOTE_S = 5.0
"""Minimum seconds between two touches of the file."""

BUILD = Metric("coterie_silo_build_info", "gauge", "Always 1; the version is a label.")
CONNECTED = Metric(
    "coterie_silo_contact_timestamp_seconds", "gauge", "When the SuperLink last answered; 0: never."
)
RUNS = Metric("coterie_silo_runs_total", "counter", "Runs that the silo has worked on.")
ROUNDS = Metric("coterie_silo_rounds_total", "counter", "Rounds in which the silo trained.")
WORK = Metric("coterie_silo_work_seconds_total", "counter", "Seconds of work for runs.")
ERRORS = Metric(
    "coterie_silo_errors_total", "counter", "Messages answered with an error or refused."
)
LINK_ERRORS = Metric(
    "coterie_silo_link_errors_total", "counter", "Times that the SuperLink was lost or unreachable."
)
BYTES_OUT = Metric(
    "coterie_silo_bytes_out_total", "counter", "Bytes of arrays sent, according to the ledger."
)
REPLIES = Metric(
    "coterie_silo_ledger_entries_total", "counter", "Replies sent, according to the ledger."
)
MEMORY = Metric("coterie_silo_memory_bytes", "gauge", "Memory of the silo's process.")
DISK = Metric("coterie_silo_disk_free_bytes", "gauge", "Free disk bytes in the silo's folder.")
MODEL_WARNINGS = Metric(
    "coterie_silo_model_warnings", "gauge", "Warnings when the model in use was last looked at."
)
MODEL_SEEN = Metric(
    "coterie_silo_model_look_timestamp_seconds", "gauge", "When that was; without a look: nothing."
)
METRICS = (
    *(BUILD, CONNECTED, RUNS, ROUNDS, WORK, ERRORS, LINK_ERRORS, BYTES_OUT, REPLIES, MEMORY, DISK),
    *(MODEL_WARNINGS, MODEL_SEEN),
)


class Vitals:
    """The last contact of a process with its SuperLink, noted in its silos' folders."""

    def __init__(self, homes: Sequence[str]) -> None:
        self.seen = 0.0
        self.losses = 0
        self._files = [Path(home) / CONTACT for home in homes if home]
        self._noted = 0.0

    def heard(self) -> None:
        """Record that the SuperLink has answered."""
        self.seen = time.time()
        if abs(self.seen - self._noted) >= NOTE_S:
            self._noted = self.seen
            for file in self._files:
                with suppress(OSError):  # the folder is away, or full: the ledger will say so
                    file.touch()

    def lost(self) -> None:
        """Record that the SuperLink was lost or not reached."""
        self.losses += 1


class WatchedSchedule(Schedule[Silo]):
    """A schedule that records every contact."""

    def __init__(self, silos: Iterable[Silo], vitals: Vitals) -> None:
        super().__init__(silos)
        self.vitals = vitals

    def connected(self, silo: Silo) -> bool:
        self.vitals.heard()
        return super().connected(silo)

    def worked(self, silo: Silo) -> None:
        self.vitals.heard()
        super().worked(silo)

    def missed(self, silo: Silo, *, seconds: float) -> None:
        self.vitals.heard()
        super().missed(silo, seconds=seconds)

    def failed(self, silo: Silo, *, was_connected: bool) -> tuple[float, bool]:
        self.vitals.lost()
        return super().failed(silo, was_connected=was_connected)


@dataclass
class LedgerMeter:
    """Running counts of a silo's ledger, which is only ever appended to."""

    file: Path
    bytes: int = 0
    entries: int = 0
    _position: int = 0

    def read(self) -> None:
        """Count what was written since the last call."""
        lines, self._position = new_lines(self.file, self._position)
        for line in lines:
            entry = json_object(line)
            if entry is not None:
                self.entries += 1
                self.bytes += wire.whole(entry.get("bytes"))


def collector(
    silos: Sequence[SiloSettings], vitals: Vitals, tally: Tally
) -> Callable[[], Iterator[Sample]]:
    """Return a function that yields the current metrics of a process."""
    meters = {own.name: LedgerMeter(Path(own.home) / LEDGER) for own in silos if own.home}
    folders = {own.name: Path(own.home) for own in silos if own.home}

    def collect() -> Iterator[Sample]:
        yield Sample(BUILD, 1, {"version": version("coterie")})
        for metric, value in (
            *((CONNECTED, vitals.seen), (LINK_ERRORS, vitals.losses), (RUNS, tally.runs)),
            *((ROUNDS, tally.rounds), (WORK, tally.seconds), (ERRORS, tally.errors)),
        ):
            yield Sample(metric, value)
        for name, meter in meters.items():
            meter.read()
            yield Sample(BYTES_OUT, meter.bytes, {"silo": name})
            yield Sample(REPLIES, meter.entries, {"silo": name})
            yield Sample(DISK, shutil.disk_usage(folders[name]).free, {"silo": name})
            with suppress(SettingsError):  # damaged: as if nobody had looked
                if (look := last_look(folders[name])) is not None:
                    yield Sample(MODEL_WARNINGS, len(look.warnings), {"silo": name})
                    seen = datetime.fromisoformat(look.at).timestamp()
                    yield Sample(MODEL_SEEN, seen, {"silo": name})
        yield Sample(MEMORY, psutil.Process().memory_info().rss)

    return collect
