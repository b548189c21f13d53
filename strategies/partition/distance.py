"""The distance of two silos' data, from a discriminator's accuracy on held-out data.

Source: Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated
Learning", ICML 2023, step 1: a discriminator f(x, y) -> {0, 1} of silos i and j gives

    D_ij = 2 * BalancedAccuracy(f) - 1

on samples that neither silo trained it with. For the best f this is the total variation distance.

Differs from the paper in the reported score: the paper's ``max``, the best of all rounds on the
same samples, is biased upward (0.13 to 0.16 for equal data and 7 samples); the default here is the
last round's, with its standard error. ``cross-fit`` chooses the round on one half of the held-out
samples, scores it on the other, and averages both ways.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray

Score: TypeAlias = Literal["last", "max", "cross-fit"]

SATURATED = 0.99
"""A distance that `has_converged` regards as unable to rise further."""


@dataclass(frozen=True)
class Distance:
    """An estimated distance of two silos, its standard error, and the number of evaluations.

    ``value`` is 2 * (balanced accuracy) - 1, in [-1, 1]; below 0 by chance.
    """

    value: float
    error: float
    rounds: int


def scores(hits: ArrayLike, counts: ArrayLike) -> FloatArray:
    """Return (R,) distances after each of R evaluations, on all held-out samples.

    Args:
        hits: (R, 2, 2) correct answers: evaluation, silo of the pair, half of its held-out samples.
        counts: (2, 2) held-out samples, at least one per silo.
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
    """Return value and error on one half for the best round (earliest of equals) on the other."""
    at = int((right[:, :, chosen_on] / of[:, chosen_on]).sum(axis=1).argmax())
    hits, counts = right[at, :, 1 - chosen_on], of[:, 1 - chosen_on]
    return float((hits / counts).sum() - 1), _error(hits, counts)


def _error(hits: FloatArray, counts: FloatArray) -> float:
    """Return the binomial error of a sum of two rates, with a hit and a miss added to each."""
    rate = (hits + 1) / (counts + 2)
    return float(np.sqrt((rate * (1 - rate) / counts).sum()))


def null_error(counts: ArrayLike) -> float:
    """Return the standard error of a distance of true value 0; ``counts`` (2,) is per silo."""
    return float(np.sqrt((0.25 / np.asarray(counts, dtype=np.float64)).sum()))


def any_apart(found: Collection[Distance]) -> bool:
    """Return whether any of these distances is above 0 beyond chance.

    One-sided, 97.5% for all of them together (Bonferroni), by their standard errors.
    """
    from scipy.stats import norm

    least = float(norm.isf(0.025 / max(len(found), 1)))
    return any(one.value > least * one.error for one in found)


def has_converged(values: Sequence[float], *, floor: int, patience: int, tolerance: float) -> bool:
    """Return whether more rounds are not worth their bytes.

    True after `floor` evaluations if the best of the last `patience` is at most `tolerance` above
    the best before, and earlier if the last `patience` values are all (nearly) perfect.
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
