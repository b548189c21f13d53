"""A silo's large table: processor time and memory to load 1,000,000 rows of 40 columns.

    python -m benchmarks.engine.tables                  # both; a minute on two cores
    python -m benchmarks.engine.tables --parts comma    # of plain, comma

``plain`` has decimal points and no missing numbers; ``comma`` has decimal commas, points between
thousands, and 5 % missing. The files are deleted afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.kit import Column, Entry, Store, columns, page, read

NUMBERS, CATEGORIES, VALUES = 30, 10, ("a", "b", "c", "d")
DECLARATION = f"""
kind = "table"
name = "large"
target = "y"
classes = ["no", "yes"]
network = "mclr"
numeric = [{", ".join(f'"n{i}"' for i in range(NUMBERS))}]
[categorical]
{"".join(f"c{i} = {list(VALUES)}{chr(10)}" for i in range(CATEGORIES))}
"""
LOAD = """
import json, resource, sys
from pathlib import Path
import numpy, pyarrow.csv
from coterie.tasks.own.declared import load_declared

def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text()  # that of getrusage has the parent's memory
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    return now.ru_utime + now.ru_stime, peak_kb * 1024 / 1e6

folder = Path(sys.argv[1])
task, (before_s, start_mb) = load_declared(folder / "large.toml"), used()
data = task.load({"data": str(folder / "large.csv"), **json.loads(sys.argv[2])})
cpu_s, peak_mb = used()
x = [data.x_train, data.x_test]
print(json.dumps({
    "rows": sum(map(len, x)), "cpu_s": cpu_s - before_s, "start_mb": start_mb, "peak_mb": peak_mb,
    "samples_mb": sum(part.nbytes for part in x) / 1e6,
}))
"""
"""What a silo's process does before it joins. This one imports nothing else."""
OPTIONS = {
    "plain": {},
    "comma": {"separator": ";", "decimal": ",", "thousands": "."},
}
WRITTEN_AT_ONCE = 10_000


def write_table(file: Path, rows: int, *, comma: bool) -> None:
    """Random numbers, categories and classes."""
    draw, separator = np.random.default_rng(0), ";" if comma else ","
    names = [f"n{i}" for i in range(NUMBERS)] + [f"c{i}" for i in range(CATEGORIES)] + ["y"]
    swapped = str.maketrans(",.", ".,")
    with file.open("w") as out:
        out.write(separator.join(names) + "\n")
        for start in range(0, rows, WRITTEN_AT_ONCE):
            count = min(WRITTEN_AT_ONCE, rows - start)
            numbers = draw.normal(50, 10, (count, NUMBERS)) * (100 if comma else 1)
            missing = draw.random((count, NUMBERS)) < (0.05 if comma else 0)
            texts = np.array(VALUES)[draw.integers(0, len(VALUES), (count, CATEGORIES))]
            classes = np.array(["no", "yes"])[draw.integers(0, 2, count)]
            for row in range(count):
                cells = [
                    "" if gone else f"{value:,.4f}".translate(swapped) if comma else f"{value:.4f}"
                    for value, gone in zip(numbers[row].tolist(), missing[row], strict=True)
                ]
                out.write(separator.join([*cells, *texts[row], classes[row]]) + "\n")


def measure(part: str, *, rows: int) -> Entry:
    """What a process of its own finds of a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "large.toml").write_text(DECLARATION)
        write_table(folder / "large.csv", rows, comma=part == "comma")
        command = [sys.executable, "-c", LOAD, name, json.dumps(OPTIONS[part])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600)
        size = (folder / "large.csv").stat().st_size
    return {**json.loads(done.stdout), "file_mb": size / 1e6}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    shown: dict[str, Column] = {
        "table": "{part}",
        "rows": "{rows:,}",
        "file, MB": "{file_mb:.0f}",
        "processor time, s": "{cpu_s:.1f}",
        "at the start, MB": "{start_mb:.0f}",
        "at most, MB": "{peak_mb:,.0f}",
        "times the samples": lambda row: f"{row['peak_mb'] / row['samples_mb']:.1f}",
    }
    machines = dict.fromkeys(entry["machine"] for entry in entries)
    return page(
        "# Loading a large table",
        "Made by `python -m benchmarks.engine.tables`.",
        f"Machine: {'; '.join(machines)}.",
        f"{NUMBERS} numbers and {CATEGORIES} categories of {len(VALUES)} values. `comma` has "
        "decimal commas, points between thousands, and 5% missing. The memory at most includes "
        "that at the start, of Python, numpy and pyarrow.",
        columns(entries, shown, rule="---:"),
    )


STORE = Store("tables", document, keys=("part",))


def main() -> None:
    """Measure, print, store."""
    given = read(STORE, __doc__, parts=tuple(OPTIONS), size={"default": 1_000_000, "type": int})
    for part in given.parts:
        found = measure(part, rows=given.size)
        given.store.put({"part": part, "machine": f"{os.cpu_count()} cores", **found})
    print(given.store.text())


if __name__ == "__main__":
    main()
