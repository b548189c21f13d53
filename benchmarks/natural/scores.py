"""Scores of answers, the same for every method: proper scores first."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.client.work.figures import of_classes

LEAST = 1e-6
"""Least probability that a log loss counts with: some methods answer 0 for a class."""
SECONDARY = {"auc": "auroc", "calibration": "calibration-error"}
"""Score → the product's metric, of classes."""


def score(answers: NDArray[Any], targets: NDArray[Any], classes: int) -> dict[str, float]:
    """Return ``loss`` and, of classes, the scores of ``SECONDARY`` that are defined.

    Args:
        answers: (m, K) probabilities, or (m,) answers to real targets.
        targets: (m,).
        classes: K, or 0.

    The loss is the mean log loss, or the mean squared error of scaled targets.
    """
    if not classes:
        return {"loss": float(np.mean((answers.reshape(-1) - targets) ** 2))}
    chosen = np.clip(answers[np.arange(len(targets)), targets], LEAST, 1)
    metrics = of_classes(answers, targets, np.ones((1, len(targets))))
    return {
        "loss": float(-np.log(chosen).mean()),
        **secondary({name: float(values[0]) for name, values in metrics.items()}),
    }


def secondary(metrics: dict[str, float]) -> dict[str, float]:
    """Return the scores of ``SECONDARY`` among the product's metrics."""
    found = {name: metrics.get(metric, float("nan")) for name, metric in SECONDARY.items()}
    return {name: value for name, value in found.items() if isfinite(value)}
