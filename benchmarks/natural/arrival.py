"""How near a federation's linear models come to the optimum that scikit-learn finds.

    python -m benchmarks.natural.arrival --data FOLDER [--sets impact_tbi,parkinsons]

FOLDER holds the sets as ``NAME.npz``. For each set: log loss, or squared error, of FedAvg's model
on all training rows after 20 rounds with the defaults; that of scikit-learn's regression of the
same rows with the same penalty; and the same without bounds on influence, which also change the
optimum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge

from benchmarks.kit import UNBOUNDED, nodes, train
from benchmarks.natural.data import Floats, Fold, fold, registered
from benchmarks.natural.federated import RUN
from benchmarks.natural.scores import score
from benchmarks.natural.tables import SETS


def models(file: Path, found: Fold, **keys: Any) -> dict[str, tuple[Floats, Floats]]:
    """Return silo → slopes (K, p) and intercepts (K,) after a run."""
    silos = nodes(
        registered(file, "linear"), list(found.silos), {"file": str(file), "fold": 0, "seed": 0}
    )
    trained = train(silos, {**RUN, **keys, "seed": 0}).result.models
    arrays = {
        name: [a.numpy().astype(float) for a in own.values()] for name, own in trained.items()
    }
    return {name: (slopes, intercepts) for name, (slopes, intercepts) in arrays.items()}


def regression(
    parts: Sequence[tuple[Floats, NDArray[Any]]], classes: int, penalty: float
) -> tuple[Floats, Floats]:
    """Return scikit-learn's slopes and intercepts; ``penalty``: of half the squared norm."""
    x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
    if not classes:
        ridge = Ridge(alpha=penalty / 2).fit(x, y)
        return ridge.coef_[None], np.array([ridge.intercept_])
    # Of two classes it has one vector, the difference of our two, which halves their penalty.
    strength = (2 if classes == 2 else 1) / penalty
    found = LogisticRegression(C=strength, max_iter=5000, tol=1e-8).fit(x, y)
    slopes, intercepts = found.coef_, found.intercept_
    if classes == 2:
        slopes, intercepts = np.vstack([-slopes, slopes]) / 2, np.array([-1, 1]) * intercepts / 2
    return slopes, intercepts


def loss(
    model: tuple[Floats, Floats], parts: Sequence[tuple[Floats, NDArray[Any]]], classes: int
) -> float:
    """Return a model's mean loss over all rows."""
    x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
    outputs = x @ model[0].T + model[1]
    if classes:
        outputs = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        outputs /= outputs.sum(axis=1, keepdims=True)
    return score(outputs, y, classes)["loss"]


def line(file: Path) -> str:
    """Return one set's row of the table."""
    found = fold(file, 0, 0)
    parts = {name: (own.x_train, own.y_train) for name, own in found.silos.items()}
    every, classes = list(parts.values()), found.classes
    best = loss(regression(every, classes, float(len(parts))), every, classes)
    ours = [
        loss(next(iter(models(file, found, strategy="fedavg", **keys).values())), every, classes)
        for keys in ({}, UNBOUNDED)
    ]
    gaps = "".join(f" {100 * (one / best - 1):+.2f}% |" for one in ours)
    return f"| {SETS.get(file.stem, file.stem)} | {best:.4f} |{gaps}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    given = parser.parse_args()
    print("| set | scikit-learn | FedAvg | without bounds on influence |\n|---|---|---|---|")
    for name in given.sets.split(","):
        print(line(given.data / f"{name}.npz"), flush=True)


if __name__ == "__main__":
    main()
