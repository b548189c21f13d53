"""Tests and calibration of given models. Only numpy, and scipy where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, isfinite, nan, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS = 25
"""Most Newton steps of a logistic regression."""
ENOUGH = 1e-9
LARGEST = 30.0
"""Largest log odds of a probability; where a regression moves beyond it, there is no answer."""
HALF_WIDTH = 1.959963984540054
"""Standard errors from the middle of a 95% interval to its end."""


def calibration_of_classes(chances: Array, y: NDArray[np.int64], weights: Array) -> Array:
    """Compute intercept and slope of a model of two classes, (2, b); NaN without both classes.

    The intercept is that of a logistic regression of the class on the model's log odds with slope
    1 ("calibration in the large", best 0), the slope that of one with both free (best 1); see Van
    Calster et al., "Calibration: the Achilles heel of predictive analytics", BMC Medicine 2019.

    Args:
        chances: (n,) probability of the second class.
        y: (n,) 0 or 1.
        weights: (b, n).
    """
    bounded = np.clip(chances, 1e-12, 1 - 1e-12)
    odds = np.clip(np.log(bounded) - np.log1p(-bounded), -LARGEST, LARGEST)
    (intercept,) = _logistic(odds[None] * 0 + 1, y, weights, offset=odds)
    _, slope = _logistic(np.stack([np.ones_like(odds), odds]), y, weights)
    return np.stack([intercept, slope])


def calibration_of_numbers(answers: Array, y: Array, weights: Array) -> Array:
    """Compute intercept and slope of answers to a real target, (2, b).

    The intercept is the mean of target less answer (best 0, in the target's unit), the slope that
    of a linear regression of the target on the answer (best 1; NaN for equal answers).

    Args:
        answers, y: (n,).
        weights: (b, n).
    """
    total = weights.sum(axis=1)
    middle = weights @ answers / total
    centred = answers - middle[:, None]
    square = (weights * centred**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (weights * centred * (y - y.mean())).sum(axis=1) / square
    varies = square > 1e-20 * (weights @ answers**2)  # more than rounding
    return np.stack([weights @ (y - answers) / total, np.where(varies, slope, np.nan)])


def _logistic(x: Array, y: NDArray[np.int64], weights: Array, offset: Array | None = None) -> Array:
    """Return the coefficients (k, b) of weighted logistic regressions by Newton's method.

    ``x`` is (k, n) with k of 1 or 2. NaN where there is no finite answer: one class alone, equal
    inputs, or classes that a limit separates.
    """
    found = np.zeros((len(x), len(weights)))
    given = 0.0 if offset is None else offset
    with np.errstate(all="ignore"):
        for _ in range(STEPS):
            chances = 1 / (1 + np.exp(-np.clip(found.T @ x + given, -500, 500)))
            slope = np.einsum("kn,bn->bk", x, weights * (y - chances))
            curve = np.einsum("kn,ln,bn->bkl", x, x, weights * chances * (1 - chances))
            step = _solved(curve, slope).T
            found = found + step
            if not np.any(np.abs(step) > ENOUGH):
                break
        found[:, ~(np.abs(found) <= LARGEST).all(axis=0)] = np.nan
        found[:, np.abs(step).max(axis=0) > 1e-4] = np.nan
    return found


def _solved(curve: Array, slope: Array) -> Array:
    """Solve (b, k, k) systems; NaN where one is singular."""
    if slope.shape[1] == 1:
        return slope / curve[:, 0]
    a, b, d = curve[:, 0, 0], curve[:, 0, 1], curve[:, 1, 1]
    det = np.where(a * d - b * b > 1e-12 * a * d, a * d - b * b, np.nan)[:, None]
    adjugate = np.stack([d * slope[:, 0] - b * slope[:, 1], a * slope[:, 1] - b * slope[:, 0]])
    solved: Array = adjugate.T / det
    return solved


def standard_error(low: float | None, high: float | None) -> float:
    """Return about the standard error behind a 95% interval; NaN without one."""
    return nan if low is None or high is None else (high - low) / (2 * HALF_WIDTH)


def discordant_p(only_first: int, only_second: int) -> float:
    """Return McNemar's exact p from the samples that only one of two models answers wrongly."""
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0


def normal_p(value: float, deviation: float) -> float | None:
    """Return the two-sided p of a value with this standard error; None if it has none."""
    if not (isfinite(value) and isfinite(deviation) and deviation >= 0):
        return None
    if deviation == 0:
        return 1.0 if value == 0 else None
    return erfc(abs(value) / deviation / sqrt(2))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number (Holm, "A simple sequentially rejective multiple
    test procedure", Scandinavian Journal of Statistics 1979), in the order given."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    found, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        found[i] = least
    return found
