"""How long a report takes and how large it is: a small run beside 200 silos and 500 rounds.

    python -m benchmarks.engine.report

The records are synthetic (groups that form, one silo that strays every round, a join, a leave, a
matrix of similarities), each with a run alone and a global one to compare with. Times are wall and
CPU seconds of ``coterie runs report`` in a process of its own, imports included.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.synthetic import write_run
from benchmarks.kit import Entry, Store, columns, page, read

SIZES = ((10, 20), (50, 100), (200, 500), (1000, 500))
LIMIT_S, LIMIT_BYTES = 20.0, 10_000_000


def measure(silos: int, rounds: int) -> Entry:
    """One size: write the records, run the command."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for strategy in ("hcct", "independent", "fedavg"):
            write_run(root / f"{strategy}-1", num_silos=silos, num_rounds=rounds, strategy=strategy)
        before, started = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "coterie.server.cli", "report", "hcct-1", "--runs-dir", folder],
            check=True,
            capture_output=True,
            timeout=600,
        )
        wall, after = time.perf_counter() - started, os.times()
        return {
            "record-bytes": (root / "hcct-1" / "run.json").stat().st_size,
            "report-bytes": (root / "hcct-1" / "report.html").stat().st_size,
            "wall-seconds": round(wall, 2),
            "cpu-seconds": round(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system,
                2,
            ),
            "machine": f"Python {platform.python_version()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}",
        }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    machines = dict.fromkeys(entry["machine"] for entry in entries)
    return page(
        "# The report's time and size",
        f"`python -m benchmarks.engine.report` on {'; '.join(machines)} (other work was going on "
        "where it is above 1: then CPU seconds are the figure to read). Limits: "
        f"{LIMIT_S:.0f} s, {LIMIT_BYTES / 1e6:.0f} MB.",
        columns(
            entries,
            {
                "silos": "{silos}",
                "rounds": "{rounds}",
                "record, MB (three are read)": lambda row: f"{row['record-bytes'] / 1e6:.2f}",
                "report, MB": lambda row: f"{row['report-bytes'] / 1e6:.2f}",
                "CPU, s": "{cpu-seconds}",
                "wall, s": "{wall-seconds}",
            },
        ),
    )


STORE = Store("report", document, keys=("silos", "rounds"))


def main() -> None:
    """Measure every size and write the results."""
    given = read(STORE, __doc__)
    for silos, rounds in SIZES:
        given.store.put({"silos": silos, "rounds": rounds, **measure(silos, rounds)})
    print(given.store.text())


if __name__ == "__main__":
    main()
