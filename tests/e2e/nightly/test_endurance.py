"""A long run: what grows with its rounds, and by how much at most.

``COTERIE_ENDURANCE=200x10`` says how many rounds and silos; a short form by default.
What was found is printed (``-s``), and appended to the file that ``COTERIE_FOUND`` names.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from coterie.server.site.database import EMPTY_FROM
from coterie.system.files import held_by
from coterie.system.processes import proportional_memory
from tests.e2e.organisations import SETTINGS, Organisations, processes_of
from tests.e2e.runs import found, record_of, until, until_happened

ROUNDS, SILOS = (int(n) for n in os.environ.get("COTERIE_ENDURANCE", "24x3").split("x"))
WARM = max(ROUNDS // 4, 8)
"""Rounds after which what is made once has been made."""
FILES, THREADS = 4, 4
"""More than then at the end: none leaks; a few come and go."""
CONNECTIONS = 5 * 3
"""Files of the SuperLink's connections to its database: SQLAlchemy keeps five, of three files each,
and makes and closes others as calls happen to come at once."""
MEMORY, MEMORY_A_ROUND = 24e6, 0.1e6
"""Bytes more, of each process."""
DATABASE, DATABASE_OF_ONE = 7e6, 10e3
"""Bytes: of it at first, 4 MB of which are SQLite's log of what it is about to write, and for every
silo and round while the run goes on."""
RECORD, RECORD_OF_ONE = 50e3, 1200
"""The same of the record: ``run.json`` and ``events.jsonl``."""

pytestmark = pytest.mark.timeout(300 + 60 * SILOS + 10 * ROUNDS)


def size(*files: Path) -> int:
    return sum(file.stat().st_size for file in files if file.exists())


def usage(made: Organisations, folder: Path) -> dict[str, dict[str, int]]:
    """Of every process that lives as long as the run."""
    (link,) = processes_of(made.processes["superlink"], "site.gate")
    pids = {"SuperLink": link, "ServerApp": held_by(folder)}
    silos = {name: one.pid for name, one in made.processes.items() if name != "superlink"}
    measured = {}
    for name, pid in {**pids, **silos}.items():
        assert isinstance(pid, int), name
        one = psutil.Process(pid)
        measured[name] = {
            "files": one.num_fds(),
            "threads": one.num_threads(),
            "memory": proportional_memory(pid),
        }
    return measured


def test_a_long_run_grows_by_its_record_alone(tmp_path: Path) -> None:
    with Organisations(tmp_path / "long") as made:
        made.start_superlink()
        for index in range(SILOS):
            made.add(f"s{index}", index)
        made.wait_for(SILOS)
        keys = ("--set", f"rounds={ROUNDS}", "--set", f"min-silos={SILOS}", *SETTINGS)
        folder = made.submit("fedavg", *keys, "--set", "task=tests.e2e.gated:Gated")
        long = 150 + SILOS * ROUNDS
        until_happened(folder, "commit", WARM, deadline_s=long)
        first = usage(made, folder)
        last: dict[str, Any] = {}
        until_happened(folder, "commit", max(WARM + 1, ROUNDS - 3), deadline_s=long)
        last = usage(made, folder)
        database = made.federation.database
        stored = size(database, database.with_name(f"{database.name}-wal"))
        until(lambda: held_by(folder) is None, "the end of the run", deadline_s=120)
        record = record_of(folder)
        assert record["status"] == "completed" and len(record["rounds"]) == ROUNDS
        assert all(len(entry["silos"]) == SILOS for entry in record["rounds"])
        written = size(folder / "run.json", folder / "events.jsonl")
        if stored > 2 * EMPTY_FROM:
            until(lambda: size(database) < EMPTY_FROM, "a small database", deadline_s=150)
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"]]
    more = {
        name: {what: last[name][what] - value for what, value in then.items()}
        for name, then in first.items()
    }
    found(
        rounds=ROUNDS, silos=SILOS, more=more, database=stored, record=written,
        first=round(statistics.median(seconds[1 : WARM + 1]), 3),
        last=round(statistics.median(seconds[-WARM:]), 3),
    )  # fmt: skip
    for name, grown in more.items():
        files = FILES + (CONNECTIONS if name == "SuperLink" else 0)
        assert grown["files"] <= files and grown["threads"] <= THREADS, (name, grown)
        assert grown["memory"] <= MEMORY + MEMORY_A_ROUND * (ROUNDS - WARM), (name, grown)
    assert stored <= DATABASE + DATABASE_OF_ONE * SILOS * ROUNDS
    assert written <= RECORD + RECORD_OF_ONE * SILOS * ROUNDS
