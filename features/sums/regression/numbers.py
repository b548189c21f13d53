"""Inference from coefficients: intervals, p-values, and how far silos differ.

The coefficient of each silo alone is an estimate with a standard error; Cochran's Q tests whether
all silos have the same one, and τ² is the variance between silos by the method of moments
(DerSimonian, Laird: "Meta-analysis in clinical trials", Controlled Clinical Trials 7, 1986, eq. 9;
I² by Higgins, Thompson, Statistics in Medicine 21, 2002, eq. 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
UNLIKE = 1e7
"""If two silos' errors of a coefficient differ by a larger factor, one of them is false."""


@dataclass(frozen=True)
class Estimate:
    """A coefficient with its interval of 95%.

    ``statistic`` is value / error, with a t distribution in a linear regression and otherwise a
    normal one; ``p`` is of the hypothesis that the coefficient is 0.
    """

    value: float
    error: float
    low: float
    high: float
    statistic: float
    p: float


@dataclass(frozen=True)
class Spread:
    """How the coefficients of silos differ, and their means over silos.

    Attributes:
        silos: number of estimates, at least two.
        q, p: Cochran's Q, and p of the hypothesis that all silos have the same coefficient.
        i2: share of the variance that is between silos, from 0 to 1.
        tau2: variance of the coefficient between silos.
        fixed: mean weighted by 1 / error².
        random: mean weighted by 1 / (error² + τ²), for a further silo of the same kind.
    """

    silos: int
    q: float
    p: float
    i2: float
    tau2: float
    fixed: Estimate
    random: Estimate


def estimate(value: float, error: float, *, freedom: float = math.inf) -> Estimate:
    """Return a coefficient with its interval, by t with ``freedom`` degrees of freedom."""
    from scipy.special import ndtr, ndtri, stdtr, stdtrit

    above = 1 - (1 - LEVEL) / 2
    normal = math.isinf(freedom)
    half = error * float(ndtri(above) if normal else stdtrit(freedom, above))
    statistic = value / error
    tail = float(ndtr(-abs(statistic)) if normal else stdtr(freedom, -abs(statistic)))
    return Estimate(value, error, value - half, value + half, statistic, 2 * tail)


def spread(values: Sequence[float], errors: Sequence[float]) -> Spread | None:
    """Return how estimates differ; None for fewer than two, or if one error is false."""
    from scipy.special import gammaincc

    if len(values) < 2 or max(errors) > UNLIKE * min(errors):
        return None
    weights = [1 / error**2 for error in errors]
    fixed = _mean(values, weights)
    q = math.fsum(w * (v - fixed.value) ** 2 for w, v in zip(weights, values, strict=True))
    freedom = len(values) - 1
    total = math.fsum(weights)
    scale = total - math.fsum(w**2 for w in weights) / total
    tau2 = max(0.0, (q - freedom) / scale)
    random = _mean(values, [1 / (error**2 + tau2) for error in errors])
    i2 = max(0.0, (q - freedom) / q) if q > 0 else 0.0
    return Spread(len(values), q, float(gammaincc(freedom / 2, q / 2)), i2, tau2, fixed, random)


def _mean(values: Sequence[float], weights: Sequence[float]) -> Estimate:
    total = math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    return estimate(mean, 1 / math.sqrt(total))
