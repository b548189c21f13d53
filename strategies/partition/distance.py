"""How different two silos' data are, from what a client discriminator gets right on held-out data.

Source: Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated
Learning", ICML 2023, step 1: a discriminator f(x, y) -> {0, 1} of silos i and j gives

    D_ij = 2 * BalancedAccuracy(f) - 1

on samples that neither silo trained it with. For the best f this is the total variation distance.

Differs from the paper in the score it reports: the paper takes the best of all rounds on the very
samples that it then reports, which is biased upward (0.13 to 0.16 for equal data and 7 samples);
here it is the last round's, with its standard error. The paper's is ``max``; ``cross-fit`` chooses
the round on one half of the held-out samples, scores it on the other, and takes the mean of both
ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray

Score: TypeAlias = Literal["last", "max", "cross-fit"]

SATURATED = 0.99
"""A distance that cannot rise any more, for all that `has_converged` knows."""


@dataclass(frozen=True)
class Distance:
    """An estimated distance of two silos.

    value: 2 * (balanced accuracy) - 1, in [-1, 1]; below 0 by chance.
    error: its standard error.
    rounds: evaluations behind it.
    """

    value: float
    error: float
    rounds: int


def scores(hits: ArrayLike, counts: ArrayLike) -> FloatArray:
    """Return (R,) distances after each of R evaluations, on all held-out samples.

    Args:
        hits: (R, 2, 2) right answers: evaluation, silo of the pair, half of its held-out samples.
        counts: (2, 2) held-out samples, at least one for each silo.
    """
    right, of = _checked(hits, counts)
    return np.asarray((right.sum(axis=2) / of.sum(axis=1)).sum(axis=1) - 1)


def distance(hits: ArrayLike, counts: ArrayLike, *, score: Score = "last") -> Distance:
    """Return the distance to report. Arguments as in `scores`; R >= 1.

    With ``cross-fit`` a silo with a single held-out sample has no second half: then it is ``last``.

    Example: 3 of 4 and 4 of 4 right give 0.75 + 1 - 1.

    >>> distance([[[2, 1], [2, 2]]], [[2, 2], [2, 2]]).value
    0.75
    """
    right, of = _checked(hits, counts)
    if score not in ("last", "max", "cross-fit"):
        raise _check.fail("score", "last, max or cross-fit", repr(score))
    rounds = len(right)
    if score == "cross-fit" and (of > 0).all():
        halves = [_on_half(right, of, chosen_on=half) for half in (0, 1)]
        value = sum(v for v, _ in halves) / 2
        error = float(np.sqrt(sum(e**2 for _, e in halves))) / 2
        return Distance(value, error, rounds)
    values = scores(right, of)
    at = int(values.argmax()) if score == "max" else rounds - 1
    return Distance(float(values[at]), _error(right[at].sum(axis=1), of.sum(axis=1)), rounds)


def _on_half(right: FloatArray, of: FloatArray, *, chosen_on: int) -> tuple[float, float]:
    """Choose the round on one half, the earliest of equals; value and error on the other."""
    at = int((right[:, :, chosen_on] / of[:, chosen_on]).sum(axis=1).argmax())
    hits, counts = right[at, :, 1 - chosen_on], of[:, 1 - chosen_on]
    return float((hits / counts).sum() - 1), _error(hits, counts)


def _error(hits: FloatArray, counts: FloatArray) -> float:
    """Binomial, of the sum of two rates; one hit and one miss added to each, so never 0."""
    rate = (hits + 1) / (counts + 2)
    return float(np.sqrt((rate * (1 - rate) / counts).sum()))


def null_error(counts: ArrayLike) -> float:
    """Return the standard error of a distance whose true value is 0; counts per silo, (2,)."""
    return float(np.sqrt((0.25 / np.asarray(counts, dtype=np.float64)).sum()))


def has_converged(values: Sequence[float], *, floor: int, patience: int, tolerance: float) -> bool:
    """Return whether more rounds are not worth their bytes.

    After `floor` evaluations: the best of the last `patience` is not more than `tolerance` above
    the best before them. Before that only a pair that was told apart (nearly) without fault in
    `patience` evaluations in a row: it cannot get better.
    """
    last = list(values[-patience:])
    if len(last) == patience and min(last) >= SATURATED:
        return True
    if len(values) < max(floor, patience + 1):
        return False
    return max(last) <= max(values[:-patience]) + tolerance


def _checked(hits: ArrayLike, counts: ArrayLike) -> tuple[FloatArray, FloatArray]:
    right: NDArray[np.float64] = np.asarray(hits, dtype=np.float64)
    of: NDArray[np.float64] = np.asarray(counts, dtype=np.float64)
    if right.ndim != 3 or right.shape[1:] != (2, 2) or len(right) == 0:
        raise _check.fail("hits", "of shape (R, 2, 2) with R >= 1", f"shape {right.shape}")
    if of.shape != (2, 2) or (of < 0).any() or (of.sum(axis=1) < 1).any():
        raise _check.fail("counts", "of shape (2, 2), at least 1 per silo", of.tolist())
    if (right < 0).any() or (right > of).any() or not np.isfinite(right).all():
        raise _check.fail("hits", "between 0 and the counts", right.tolist())
    return right, of
