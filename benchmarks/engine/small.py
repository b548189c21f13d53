"""A small form of the overhead and of the scale benchmark, which ``make nightly`` measures again.

    python -m benchmarks.engine.small

Ratios, each of times in one run: a round with a model of 10 MB and four silos to a bare gRPC
stream of the same bytes, a round of 100 virtual silos in two processes to what their training
takes of it on two cores, and the start of a run to a Python that only imports Flower.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engine.overhead import bare_stream, resident_rounds, start_of_run
from benchmarks.engine.scale import record_of_run
from benchmarks.kit import Entry, Store, columns, page, read
from coterie.server.machine.local import LocalFederation

SILOS, PROCESSES, CORES = 100, 2, 2
SIMULATION = f"""\
task = "digits"
silos = {SILOS}
[split]
kind = "iid"
"""


def bytes_ratio(folder: Path) -> float:
    """Median round of four silos with 10 MB, over the median bare stream."""
    ours = resident_rounds(4, 10, 12, folder / "ours")
    return statistics.median(ours) / statistics.median(bare_stream(4, 10, 5, folder / "bare"))


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
    """Median of five starts of a run, each over a bare import beside it."""
    return statistics.median(own / bare for own, bare in start_of_run(5, folder))


MEASURES = {"bytes": bytes_ratio, "silos": silos_ratio, "start": start_ratio}


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
