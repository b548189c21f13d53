"""Boosted trees by sums: seconds beside Flower's bagging of XGBoost trees, and memory.

    python -m benchmarks.engine.boosting

Silos are processes on this machine. In ``beside`` four of them, of 10,000 rows each, have 100 trees
of depth 6 in the end: by sums, by secure sums, and by ``FedXgbBagging`` on stock SuperNodes, where
each round adds one tree of every silo. Rates, bins and penalties are the same. In ``growth`` fifty
silos share 250,000 rows, then 1,000,000, and grow 10 trees. Needs XGBoost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.engine import boosting_app
from benchmarks.engine.boosting_app import BINS, COLUMNS, DEPTH, PENALTY, RATE, TEST_ROWS, rows_of
from benchmarks.engine.overhead import processes, round_times, stock_nodes, wait_online
from benchmarks.engine.scale import record_of_run, watching
from benchmarks.kit import Column, Entry, Store, columns, page, read, select
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import SuperLink
from coterie.tasks import SiloData, Task, trees
from coterie.tasks.base import Option

SILOS, ROWS, TREES, ROUNDS = 4, 10_000, 100, 5
MANY, MANY_ROWS, FEW_TREES = 50, (250_000, 1_000_000), 10


class Drawn(Task):
    """Trees of rows that are drawn at the silo. Options: ``silo``, ``rows``."""

    num_classes = 2
    metric = "auroc"

    def __init__(self, count: int) -> None:
        self.name, self.count = f"drawn-{count}", count

    def model(self) -> nn.Module:
        """Return trees."""
        named = f"trees-{self.count}x{DEPTH}"
        return trees.named(named, shape=(COLUMNS,), problem=self.problem)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Draw a silo's rows; all are tested with the same."""
        own = rows_of(int(options["silo"]), int(options["rows"]))
        return SiloData(*own, *rows_of(-1, TEST_ROWS))


DRAWN_100, DRAWN_10 = Drawn(TREES), Drawn(FEW_TREES)


def by_sums(task: str, silos: int, rows: int, rounds: int, **more: Any) -> Entry:
    """Grow trees by sums with so many silos of so many rows."""
    task = f"benchmarks.engine.boosting:{task}"
    with tempfile.TemporaryDirectory() as folder, LocalFederation(Path(folder)) as federation:
        for number in range(silos):
            options = {"silo": number, "rows": rows}
            federation.start_silo(SiloSpec(f"silo-{number:02d}", task, options, sums=True))
        federation.wait_for_silos(silos)
        with watching(federation) as usage:
            record, last = federation.run(
                **{"strategy": "trees", "task": task, "rounds": rounds, "min-silos": silos},
                **{"tree-rate": RATE, "leaf-penalty": PENALTY, "column-bins": BINS},
                **{"leaf-rows": 1, "round-timeout": 3000.0, **more},
            )
        assert last.status == "completed", last
        found = record_of_run(record)
    final = list(found["final-evaluation"].values())
    return {
        "rounds-seconds": round(sum(sum(one["seconds"].values()) for one in found["rounds"]), 1),
        "seconds": round(found["seconds"], 1),
        "loss": final[0]["loss"],
        "auroc": 1 - final[0]["error"],
        "megabytes": {name: round(peak / 1e6) for name, peak in usage.peak.items()},
    }


def by_bagging(silos: int, rows: int, rounds: int) -> Entry:
    """Grow trees with ``FedXgbBagging`` on stock SuperNodes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with SuperLink(folder / "superlink") as superlink:
            nodes = stock_nodes(superlink, silos)
            lines = [[*one, "--node-config", f"silo={silo}"] for silo, one in enumerate(nodes)]
            with processes(lines, folder):
                wait_online(superlink, silos)
                seconds, loss, area = round_times(
                    superlink,
                    "server_app",
                    deadline_s=1800,
                    app=Path(boosting_app.__file__),
                    **{"nodes": silos, "rows": rows, "rounds": rounds},
                )
    return {"rounds-seconds": round(seconds, 1), "loss": loss, "auroc": area}


# ---------------------------------------------------------------- measurements

BESIDE: Mapping[str, Callable[[], Entry]] = {
    "by sums": lambda: by_sums("DRAWN_100", SILOS, ROWS, ROUNDS),
    "by secure sums": lambda: by_sums("DRAWN_100", SILOS, ROWS, ROUNDS, secure=True),
    "FedXgbBagging": lambda: by_bagging(SILOS, ROWS, TREES // SILOS),
}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    beside: dict[str, Column] = {
        "trees": "{how}",
        "seconds in rounds": "{rounds-seconds:.0f}",
        "of the run": lambda one: f"{one['seconds']:.0f}" if "seconds" in one else "–",
        "log loss": "{loss:.3f}",
        "AUROC": "{auroc:.3f}",
    }
    growth: dict[str, Column] = {
        "rows": "{rows:,}",
        "seconds in rounds": "{rounds-seconds:.0f}",
        "ServerApp": "{megabytes[ServerApp]} MB",
        "SuperLink": "{megabytes[SuperLink]} MB",
        "largest silo": lambda one: f"{_largest(one['megabytes'])} MB",
    }
    return page(
        "# Boosted trees by sums",
        f"Made by `python -m benchmarks.engine.boosting`. {SILOS} silos of {ROWS:,} rows of "
        f"{COLUMNS} columns, {TREES}\ntrees of depth {DEPTH}, two cores:",
        columns(select(entries, part="beside"), beside),
        f"{MANY} silos, {FEW_TREES} trees of depth {DEPTH}; every silo also grows as many alone:",
        columns(select(entries, part="growth"), growth),
    )


def _largest(megabytes: Mapping[str, int]) -> int:
    return max(most for name, most in megabytes.items() if name.startswith("silo-"))


STORE = Store("boosting", document, keys=("part", "how", "rows"))


def main() -> None:
    """Measure the parts, and replace what is stored of them."""
    given = read(STORE, __doc__, parts=("beside", "growth"))
    if "beside" in given.parts:
        for how, measure in BESIDE.items():
            given.store.put({"part": "beside", "how": how, **measure()})
    if "growth" in given.parts:
        for rows in MANY_ROWS:
            found = by_sums("DRAWN_10", MANY, rows // MANY, 1)
            given.store.put({"part": "growth", "rows": rows, **found})
    print(given.store.text())


if __name__ == "__main__":
    main()
