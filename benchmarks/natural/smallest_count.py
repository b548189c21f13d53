"""What the smallest count of a sum costs boosted trees: the same rows, with and without it.

    python -m benchmarks.natural.smallest_count --data FOLDER [--parts impact_tbi] [--folds 2]

FOLDER holds the sets as ``NAME.npz``. The trees are those of all silos together, grown in this
process from four fifths of each silo's training rows: of sets with a calendar, of its days.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, page, read, select, table
from benchmarks.natural.data import Silo, fold, folds_of
from benchmarks.natural.tables import SETS
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Settings, best_number
from coterie.features.sums.trees.histograms import Rows, of_classes, of_labels, of_numbers
from coterie.features.sums.trees.together import grown

TREES, DEPTH, BINS = 100, 6, 64
COUNTS = (1, 10)
"""Smallest counts: none, and the default of ``statistics_from``."""


def measure(*, data: str, dataset: str, fold: int, least: int) -> dict[str, Any]:
    """Return the mean loss on held-out rows after the best number of trees, and that number."""
    found = _fold(Path(data) / f"{dataset}.npz", fold, 0)
    parts = [_parts(silo, found.classes, least) for silo in found.silos.values()]
    outputs = parts[0][0].outputs
    empty = Ensemble.empty(TREES, outputs, DEPTH, found.width)
    trees = grown([train for train, _ in parts], empty, Settings(), bins=BINS)
    losses = np.sum([held_out.losses(trees) for _, held_out in parts], axis=0)
    best = best_number(losses)
    return {"loss": round(float(losses[best, 0] / losses[best, 1]), 5), "trees": best}


_fold = fold


def _parts(silo: Silo, classes: int, least: int) -> tuple[Rows, Rows]:
    """Return a silo's rows to grow from, and those to measure on, of which none are too few."""
    blocks = np.random.default_rng(0).permutation(np.unique(silo.blocks))
    held_out = np.isin(silo.blocks, blocks[: len(blocks) // 5])
    x, y = silo.x_train.astype(np.float32), silo.y_train
    targets = np.eye(classes)[y.astype(np.intp)] if classes > 2 else y[:, None].astype(np.float64)
    derivatives = {0: of_numbers, 2: of_labels}.get(classes, of_classes)
    train = Rows(x[~held_out], targets[~held_out], derivatives, least)
    return train, Rows(x[held_out], targets[held_out], derivatives)


def document(entries: Sequence[Entry]) -> str:
    """Return the page."""
    lines = []
    for dataset in SETS:
        own = [select(entries, dataset=dataset, least=least) for least in COUNTS]
        if all(own):
            lines.append([SETS[dataset], *(", ".join(f"{e['loss']:.3f}" for e in o) for o in own)])
    return page(
        "# What the smallest count costs trees",
        "Made by `python -m benchmarks.natural.smallest_count --data FOLDER`.",
        f"{TREES} trees of depth {DEPTH} of all silos together, rate {Settings().rate}. Mean loss "
        "on held-out rows after the best number of trees, fold by fold.",
        table(["set", "no smallest count", f"{COUNTS[1]} rows"], lines),
    )


STORE = Store("smallest_count", document, keys=("dataset", "fold", "least"))


def main() -> None:
    """Measure what is missing, and print the page."""
    folds = {"type": int, "default": 2, "help": "how many"}
    given = read(STORE, __doc__, data=True, parts=SETS, folds=folds)
    cells = (
        {"dataset": name, "fold": number, "least": least}
        for name, number, least in product(given.parts, range(given.folds), COUNTS)
        if number < folds_of(name)
    )
    given.store.fill(cells, lambda **cell: measure(data=given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
