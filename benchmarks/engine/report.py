"""How long a report takes and how large it is: a small run beside 200 silos and 500 rounds.

    python -m benchmarks.report

The records are synthetic (groups that form, one silo that strays every round, a join, a leave, a
matrix of similarities), each with a run alone and a global one to compare with. Times are wall and
CPU seconds of ``coterie report`` in a process of its own, imports included.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.synthetic import write_run

SIZES = ((10, 20), (50, 100), (200, 500))
RESULTS = Path(__file__).parent / "results"
LIMIT_S, LIMIT_BYTES = 20.0, 10_000_000


def measure(num_silos: int, num_rounds: int) -> dict[str, Any]:
    """One size: write the records, run the command."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for strategy in ("hcct", "independent", "fedavg"):
            write_run(
                root / f"{strategy}-1",
                num_silos=num_silos,
                num_rounds=num_rounds,
                strategy=strategy,
            )
        before, started = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "coterie.server.cli", "report", "hcct-1", "--runs-dir", folder],
            check=True,
            capture_output=True,
            timeout=600,
        )
        wall, after = time.perf_counter() - started, os.times()
        return {
            "silos": num_silos,
            "rounds": num_rounds,
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
        }


def main() -> None:
    """Measure every size and write the results."""
    rows = [measure(*size) for size in SIZES]
    RESULTS.joinpath("report.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "# The report's time and size",
        "",
        f"`python -m benchmarks.report` on Python {platform.python_version()}, {os.cpu_count()} "
        f"cores, load {os.getloadavg()[0]:.1f} (other work was going on where it is above 1: then "
        f"CPU seconds are the figure to read). Limits: {LIMIT_S:.0f} s, "
        f"{LIMIT_BYTES / 1e6:.0f} MB.",
        "",
        "| silos | rounds | record, MB (three are read) | report, MB | CPU, s | wall, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['silos']} | {row['rounds']} | {row['record-bytes'] / 1e6:.2f} "
            f"| {row['report-bytes'] / 1e6:.2f} | {row['cpu-seconds']} | {row['wall-seconds']} |"
            for row in rows
        ),
    ]
    RESULTS.joinpath("report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
