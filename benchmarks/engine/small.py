"""A small form of the overhead and of the scale benchmark, which ``make nightly`` measures again.

    python -m benchmarks.engine.small

Ratios, each of times in one run: a round with a model of 10 MB and four silos to a bare gRPC
stream of the same bytes, a round of 100 virtual silos in two processes to what their training
takes of it on two cores, the start of a run to a Python that only imports Flower, and half a minute
of ten connected silos without work, SuperLink included, to such a Python, in processor time. Of two
sides each pair is measured one after the other, so that what else the machine does slows both.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.engine.overhead import (
    BARE,
    bare_streams,
    measure_idle,
    residents,
    start_of_run,
)
from benchmarks.engine.scale import record_of_run
from benchmarks.kit import Entry, Store, columns, page, read
from coterie.server.machine.local import LocalFederation

SILOS, PROCESSES, CORES = 100, 2, 2
PAIRS, IDLE_S = 6, 30.0
SIMULATION = f"""\
task = "digits"
silos = {SILOS}
[split]
kind = "iid"
"""


def bytes_ratio(folder: Path) -> float:
    """Median of six runs of four silos with 10 MB: a run's median round, over the mean of the bare
    streams before and after it."""
    with (
        residents(4, folder / "ours") as rounds,
        bare_streams(4, 10, 1 + PAIRS, folder / "bare") as bare,
    ):
        streams, ours = [bare()], []
        for _ in range(PAIRS):
            ours.append(statistics.median(rounds(10, 4)))
            streams.append(bare())
    pairs = zip(ours, pairwise(streams), strict=True)
    return statistics.median(own / statistics.mean(beside) for own, beside in pairs)


def silos_ratio(folder: Path) -> float:
    """Median round of 100 virtual silos, over their training's CPU seconds divided by two."""
    file = folder / "simulation.toml"
    file.write_text(SIMULATION)
    with LocalFederation(folder / "federation") as federation:
        federation.start_partitions(file, SILOS, PROCESSES)
        federation.wait_for_silos(SILOS)
        run, last = federation.run(
            task="digits", strategy="fedavg", rounds=10, min_silos=SILOS, local_epochs=5
        )
        assert last.status == "completed", last
    rounds = record_of_run(run)["rounds"][1:]
    training = [sum(s["seconds"] for s in one["silos"].values()) / CORES for one in rounds]
    seconds = [sum(one["seconds"].values()) for one in rounds]
    return float(statistics.median(seconds) / statistics.median(training))


def start_ratio(folder: Path) -> float:
    """Median of three starts of a run, each after 25 s without work and over a bare import."""
    return statistics.median(own / bare for own, bare in start_of_run(3, folder, idle_s=25.0))


def idle_ratio(folder: Path) -> float:
    """Processor time of a SuperLink and ten silos without work in 30 s, over the mean of a bare
    import's before and after."""
    before = _import_cpu_s()
    used = measure_idle(folder, 10, IDLE_S)
    beside = (before + _import_cpu_s()) / 2
    return float((used["coordinator"] + 10 * used["silo"]) * IDLE_S / beside)


def _import_cpu_s() -> float:
    """Median of three."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", BARE], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(found)


MEASURES = {"bytes": bytes_ratio, "silos": silos_ratio, "start": start_ratio, "idle": idle_ratio}


def measure(parts: Sequence[str]) -> Iterator[Entry]:
    """Each ratio."""
    for what in parts:
        with tempfile.TemporaryDirectory() as folder:
            yield {"what": what, "ratio": round(MEASURES[what](Path(folder)), 3)}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(f"# {__doc__}", columns(entries, {"": "{what}", "ratio": "{ratio:.2f}"}))


STORE = Store("small", document, keys=("what",))


def main() -> None:
    """Measure, print, store."""
    given = read(STORE, __doc__, parts=tuple(MEASURES))
    for found in measure(given.parts):
        given.store.put({"machine": f"{os.cpu_count()} cores", **found})
    print(given.store.text())


if __name__ == "__main__":
    main()
