"""Fed-TCGA-BRCA: survival of breast cancer patients in six regions, by Cox's loss.

    python -m benchmarks.natural.brca --data FOLDER [--seeds 10]

FOLDER holds ``brca.csv`` and ``split.csv`` as FLamby prepares them (Ogier du Terrail et al.,
"FLamby", NeurIPS 2022). Its test parts have 1 to 14 events, so every region's patients are
cross-validated here: figures are of all of them, each predicted by a model that has not seen them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.kit import Entry, Store, nodes, page, read, select, spread, table, train
from coterie.tasks import SiloData, Task
from coterie.tasks.base import Option
from coterie.tasks.problems import Survival
from coterie.tasks.trees import Trees

FOLDS = 5
REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")
RUN = {"rounds": 12, "local-steps": 10, "batch-size": 64, "lr": 0.01, "optimiser": "adam"}
METHODS: Mapping[str, Mapping[str, Option]] = {
    "alone": {"strategy": "independent"},
    "FedAvg": {"strategy": "fedavg"},
    "HCCT, α = 100": {"strategy": "hcct", "alpha": "100"},
    "HCCT, α = 300": {"strategy": "hcct", "alpha": "300"},
    "Auto": {"strategy": "auto"},
    "FedGroup, 2 groups": {"strategy": "fedgroup", "num-groups": 2},
    "FedAvg, partial pooling": {"strategy": "fedavg", "personalise": "partial"},
    "FedAvg, fine-tuned": {"strategy": "fedavg", "personalise": "finetune"},
    "Ditto": {"strategy": "fedavg", "personalise": "ditto"},
    "trees, alone": {"strategy": "trees", "given-groups": "each"},
    "trees": {"strategy": "trees"},
    "trees, auto": {"strategy": "auto"},
}
TREES, OF_TREES = (100, 1, 3, 39), {"rounds": 12, "tree-rate": 0.05}
"""Trees, outputs, depth and columns of the methods whose names begin with trees; their run."""
PUBLISHED = {"alone": 0.689, "FedAvg": 0.732, "FedAdam": 0.815}
"""FLamby's c-index, mean over centres and five seeds, on its own test parts."""


class Brca(Task):
    """A linear Cox model of 39 features. Options: ``data``, ``silo``, ``fold``, ``folds``."""

    name = "brca"
    problem = Survival()

    def model(self) -> nn.Module:
        """As FLamby's."""
        return nn.Linear(39, 1)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Of one region: all folds but one to train on, that one to test on."""
        x, y, region = _patients(str(options["data"]))
        rows = np.flatnonzero(region == int(options["silo"]))
        x, y = x[rows], y[rows]
        folds = int(options["folds"])
        # Events and others by themselves, so that every fold has its share of both.
        order = np.argsort(y[:, 1] + np.random.default_rng(0).random(len(y)) / 2)
        test = np.zeros(len(y), dtype=bool)
        test[order[int(options["fold"]) :: folds]] = True
        age, spread_of_age = x[~test, 0].mean(), x[~test, 0].std()
        x[:, 0] = (x[:, 0] - age) / spread_of_age
        return SiloData(x[~test], y[~test], x[test], y[test])


class BrcaTrees(Brca):
    """Boosted trees on the same patients."""

    name = "brca-trees"

    def model(self) -> nn.Module:
        """As small as on the other sets of ``benchmarks.natural``."""
        return Trees(*TREES)


@lru_cache(maxsize=1)
def _patients(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (n, 39), time in days and event (n, 2), region (n,)."""
    with (Path(folder) / "split.csv").open(encoding="utf-8") as lines:
        part = {row["pid"]: int(row["fold2"].split("_")[1]) for row in csv.DictReader(lines)}
    with (Path(folder) / "brca.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["pid"] in part]
    names = [name for name in rows[0] if name not in ("pid", "E", "T")]
    x = np.array([[float(row[name]) for name in names] for row in rows], np.float32)
    y = np.array([[float(row["T"]), float(row["E"])] for row in rows], np.float32)
    return x, y, np.array([part[row["pid"]] for row in rows])


def measure(folder: str, method: str, *, seed: int, fold: int, folds: int) -> Entry:
    """One run of six silos: every region's c-index, NaN where the fold defines none."""
    boosted = method.startswith("trees")
    task, keys = ("BrcaTrees", OF_TREES) if boosted else ("Brca", RUN)
    options: dict[str, Option] = {"data": folder, "fold": fold, "folds": folds}
    silos = nodes(f"{__name__}:{task}", REGIONS, options, sums="trees" * boosted)
    trained = train(silos, {**keys, **METHODS[method], "seed": seed})
    index = {name: 1 - error for name, error in trained.errors.items()}
    known = {name: round(value, 4) for name, value in index.items() if np.isfinite(value)}
    return {"method": method, "seed": seed, "fold": fold, "folds": folds, "concordance": known}


def document(entries: Sequence[Entry]) -> str:
    """The table."""
    rows = []
    for method in METHODS:
        own = select(entries, method=method)
        if not own:
            continue
        by_seed = []
        for seed in sorted({e["seed"] for e in own}):
            found = [e["concordance"] for e in select(own, seed=seed)]
            means = [np.mean([f[r] for f in found if r in f] or [np.nan]) for r in REGIONS]
            by_seed.append(means)
        regions = np.array(by_seed).mean(axis=0)
        mean = [100 * float(np.mean(means)) for means in by_seed]
        published = f"{100 * PUBLISHED[method]:.1f}" if method in PUBLISHED else ""
        cells = [f"{100 * value:.0f}" for value in regions]
        rows.append([method, spread(mean), _beside_alone(own, entries), *cells, published])
    head = ["method", "mean of regions", "− alone", *REGIONS, "FLamby"]
    return page(
        "# Fed-TCGA-BRCA: Cox regression in six regions",
        "Made by `python -m benchmarks.natural.brca --data FOLDER`.",
        "Concordance index in %, on patients that a model has not seen: five folds of every "
        "region's 51 to 311 patients, mean over folds, ± standard deviation over seeds. *− alone*: "
        "the difference from local training, ± its standard error over folds, mean over seeds. "
        "FLamby's figures are from its own test sets, which have 1 to 14 events (five seeds; "
        f"FedAdam {100 * PUBLISHED['FedAdam']:.1f}), so they are not comparable. Boosted trees: at "
        f"most {TREES[0]}, of depth {TREES[2]}.",
        table(head, rows),
    )


def _beside_alone(own: Sequence[Entry], entries: Sequence[Entry]) -> str:
    """The difference to training alone, of equal seeds and folds. A region whose index one fold
    alone defines adds nothing to the standard error."""
    alone = {(e["seed"], e["fold"]): e["concordance"] for e in select(entries, method="alone")}
    by_fold: dict[tuple[str, int], list[float]] = {}
    for entry in own if own[0]["method"] != "alone" else ():
        other = alone.get((entry["seed"], entry["fold"]), {})
        for region, value in entry["concordance"].items():
            if region in other:
                by_fold.setdefault((region, entry["fold"]), []).append(value - other[region])
    if not by_fold:
        return ""
    folds = [[100 * float(np.mean(v)) for (r, _), v in by_fold.items() if r == n] for n in REGIONS]
    means = [float(np.mean(values or [np.nan])) for values in folds]
    errors = [np.var(values, ddof=1) / len(values) for values in folds if len(values) > 1]
    return f"{np.mean(means):+.1f} ± {np.sqrt(sum(errors)) / len(REGIONS):.1f}"


STORE = Store("brca", document, keys=("method", "seed", "fold", "folds"))


def cells(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield what to measure: whole folds of all methods first."""
    for seed, fold, method in product(range(seeds), range(FOLDS), METHODS):
        yield {"method": method, "seed": seed, "fold": fold, "folds": FOLDS}


def fill(store: Store, folder: Path, *, seeds: int) -> None:
    """Measure what is missing of the set in a folder, and print the page."""
    store.fill(cells(seeds), lambda **cell: measure(str(folder), **cell))
    print(store.text())


def main() -> None:
    """Measure what is missing, and print the page."""
    given = read(STORE, __doc__, data=True, seeds=10)
    fill(given.store, Path(given.data), seeds=given.seeds)


if __name__ == "__main__":
    main()
