"""HCCT's options on the demo's silos, over ten seeds: what memory, solver and α are worth.

    python -m benchmarks.papers.hcct.digits [--seeds 10] [--only ROWS]

Nine silos of three hidden kinds as in ``coterie demo``, without join and leave, 20 rounds, on the
in-process Grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Node, Store, page, read, select, spread, table, train
from coterie.server.machine.local import SiloSpec
from coterie.server.study.demo import hidden_groups, silos

ROUNDS = 20
SETTLED = 7
"""From this round on the groups should stand; ``auto`` needs so many to find them."""

SETTINGS: dict[str, Mapping[str, Any]] = {
    "alone": {"strategy": "independent"},
    "global (FedAvg)": {"strategy": "fedavg"},
    "HCCT, the paper: last update, greedy, α = 50": {
        "memory": 0.0,
        "solver": "agglomerative",
        "alpha": 50.0,
    },
    "last update, best partition, α = 50": {"memory": 0.0, "alpha": 50.0},
    "memory 1, greedy, α = 50": {"solver": "agglomerative", "alpha": 50.0},
    "memory 1, greedy, α = 100": {"solver": "agglomerative", "alpha": 100.0},
    "memory 1, best partition, α = 25": {"alpha": 25.0},
    "**memory 1, best partition, α = 50** (default)": {"alpha": 50.0},
    "memory 1, best partition, α = 100": {"alpha": 100.0},
    "memory 1, best partition, α = auto": {"alpha": "auto"},
    "HCCT-E (one layer), α = 50": {"layers": "auto", "alpha": 50.0},
    "HCCT-P (personal head), α = 50": {"personal": "head", "alpha": 50.0},
}
HEADS = ("mean error", "best–worst seed", "hidden groups at the end", f"in rounds ≥ {SETTLED}")


def node(spec: SiloSpec) -> Node:
    """What one of the demo's silos is started with."""
    return {"name": spec.name, "threads": 1, **{f"data.{k}": v for k, v in spec.options.items()}}


def measure(setting: str, seed: int) -> Entry:
    """Mean error over silos, and in how many settled rounds the groups were the hidden ones."""
    nodes = [node(spec) for spec in silos(seed)]
    done = train(nodes, {"strategy": "hcct", "seed": seed, "rounds": ROUNDS, **SETTINGS[setting]})
    groups, hidden = done.result.groups, hidden_groups([str(n["name"]) for n in nodes])
    right = [groups[t] == hidden for t in range(SETTLED, ROUNDS + 1)]
    return {
        "error": float(np.mean(list(done.errors.values()))),
        "right at the end": right[-1],
        "right rounds": float(np.mean(right)),
        "changes": sum(groups[t] != groups[t - 1] for t in range(2, ROUNDS + 1)),
    }


def error_cells(runs: Sequence[Entry]) -> list[str]:
    """Mean ± deviation over seeds, and the best and the worst seed, in %."""
    errors = 100 * np.array([run["error"] for run in runs])
    return [spread(errors, 1), f"{errors.min():.1f}–{errors.max():.1f}"]


def by_setting(entries: Sequence[Entry], settings: Iterable[str]) -> dict[str, list[Any]]:
    """Setting → its runs, of those that have any."""
    return {name: runs for name in settings if (runs := select(entries, setting=name))}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    found = by_setting(entries, SETTINGS)
    rows = ([name, *error_cells(runs), *_group_cells(name, runs)] for name, runs in found.items())
    return page(
        "# HCCT on the demo's silos",
        f"Nine silos of scikit-learn's digits, three hidden groups, {ROUNDS} rounds, "
        f"{max(map(len, found.values()), default=0)} seeds.\n"
        "Made by `python -m benchmarks.papers.hcct.digits`. Errors in %, mean over silos; mean ± "
        "standard\ndeviation over seeds, and the best and the worst seed.",
        table(("setting", *HEADS, f"changes in {ROUNDS - 1}"), rows),
    )


def _group_cells(name: str, runs: Sequence[Entry]) -> list[str]:
    if "strategy" in SETTINGS[name]:
        return ["", "", ""]
    right = sum(run["right at the end"] for run in runs)
    share, changes = (np.mean([run[key] for run in runs]) for key in ("right rounds", "changes"))
    return [f"{right} of {len(runs)}", f"{100 * share:.0f} %", f"{changes:.1f}"]


STORE = Store("hcct_digits", document, keys=("setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, rows=SETTINGS, seeds=10)
    cells = ({"setting": s, "seed": i} for s, i in product(given.only, range(given.seeds)))
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
