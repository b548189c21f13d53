"""Seconds of boosted trees by summed histograms, plain and secure, with real processes.

    python -m benchmarks.engine.boosted                 # 100 trees of depth 6
    python -m benchmarks.engine.boosted --trees 10      # a tenth of it

Four silos of 10,000 rows and 30 columns each; plain and secure runs of one federation, in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import make_classification

from benchmarks.kit import Entry, Store, page, read, table
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.record import reading

SILOS, ROWS, COLUMNS, DEPTH, ROUNDS = 4, 10_000, 30, 6, 5
TASK = """
kind = "table"
name = "study"
target = "y"
classes = ["no", "yes"]
numeric = [{columns}]
network = "trees-{trees}x{depth}"
"""


def measure(trees: int) -> Entry:
    """Seconds and bytes of a run, plain and secure, and whether both have the same trees."""
    x, y = make_classification(
        SILOS * ROWS, COLUMNS, n_informative=12, n_redundant=6, flip_y=0.05, random_state=0
    )
    names = [f"x{i}" for i in range(COLUMNS)]
    found: dict[str, Any] = {"trees": trees}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "study.toml"
        columns = ", ".join(f'"{name}"' for name in names)
        task.write_text(TASK.format(columns=columns, trees=trees, depth=DEPTH))
        with LocalFederation(Path(folder) / "federation") as federation:
            for silo in range(SILOS):
                own, file = slice(silo * ROWS, (silo + 1) * ROWS), Path(folder) / f"{silo}.csv"
                lines = np.column_stack(
                    [np.char.mod("%.6g", x[own]), np.array(["no", "yes"])[y[own]]]
                )
                text = [",".join(line) for line in [[*names, "y"], *lines.tolist()]]
                file.write_text("\n".join(text))
                federation.start_silo(
                    SiloSpec(f"silo-{silo}", str(task), {"data": str(file)}, sums=True)
                )
            federation.wait_for_silos(SILOS)
            keys: dict[str, Any] = {"strategy": "trees", "task": "study", "rounds": ROUNDS}
            keys["min-silos"] = SILOS
            hashes = []
            for how in ("plain", "secure"):
                record, last = federation.run(**keys, secure=how == "secure")
                assert last.status == "completed", last
                run = reading.read_whole(record)
                found[how] = sum(sum(entry.seconds.values()) for entry in run.rounds)
                cost = [entry.phases["evaluate.histograms"] for entry in run.rounds]
                found[f"{how}-exchanges"] = sum(one.exchanges for one in cost)
                found[f"{how}-megabytes"] = sum(one.bytes_received for one in cost) / 1e6
                hashes.append(run.model_hashes)
            found["same"] = hashes[0] == hashes[1]
    return found


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    heads = (
        "trees",
        "plain, s",
        "secure, s",
        "ratio",
        "exchanges",
        "plain, MB",
        "secure, MB",
        "same",
    )
    rows = [
        [
            str(one["trees"]),
            *(f"{one[how]:.1f}" for how in ("plain", "secure")),
            f"{one['secure'] / one['plain']:.2f}",
            str(one["secure-exchanges"]),
            *(f"{one[f'{how}-megabytes']:,.0f}" for how in ("plain", "secure")),
            "yes" if one["same"] else "no",
        ]
        for one in entries
    ]
    return page(
        "# Boosted trees by sums",
        f"{SILOS} silos of {ROWS:,} rows and {COLUMNS} columns, trees of depth {DEPTH}, real "
        "processes on one machine.\nMade by `python -m benchmarks.engine.boosted`. Megabytes are "
        "those of all histograms.",
        table(heads, rows),
    )


STORE = Store("boosted", document, keys=("trees",))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, trees={"type": int, "default": 100, "help": "of a run"})
    given.store.fill([{"trees": given.trees}], measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
