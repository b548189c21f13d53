"""A race of partitions: which is best for the silos, by errors on samples unseen in training.

Every silo measures every partition, so that partitions are compared by differences within silos,
whose spread is much smaller than that of errors between silos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt

import numpy as np

from coterie.strategies.partition._check import FloatArray

NEAR = 1.0
"""Number of standard errors within which a partition is as good as the best."""
SURE_OF_OWN = 1.0
"""Standard errors by which a silo must expect its group's model to be worse, to keep its own.

Its own model is trained further when the two are measured."""
SURE = 0.975
"""One-sided probability at which a partition is out of the race."""
LEAST_DOUBT = 0.05
"""Probability below which a silo is not considered better off alone."""


@dataclass(frozen=True)
class Standing:
    """One partition's standing relative to the best.

    Attributes:
        error: mean over silos.
        behind: mean over silos of its error minus the best's; 0 for the best itself.
        standard_error: of ``behind``; NaN if unknown.
        out: it is worse beyond chance.
    """

    error: float
    behind: float
    standard_error: float
    out: bool


def standings(
    errors: FloatArray, counts: FloatArray, losses: FloatArray, *, shares: bool
) -> list[Standing]:
    """Compare partitions over the silos that have measured all of them.

    Args:
        errors: (C, N) of C partitions at N silos.
        counts: (N,) samples behind them, > 0.
        losses: (C, N) mean losses, which decide between equal errors.
        shares: errors are shares of samples, so the sampling noise is known: two models that differ
            at no silo may still differ.

    A difference is beyond chance by Student's t over silos (one-sided, 97.5%). The spread over
    silos is replaced by the sampling noise where that is larger.
    """
    mean, loss = errors.mean(axis=1), losses.mean(axis=1)
    best = min(range(len(mean)), key=lambda c: (round(float(mean[c]), 9), float(loss[c])))
    return [_standing(errors[c], errors[best], counts, shares=shares) for c in range(len(errors))]


def _standing(own: FloatArray, best: FloatArray, counts: FloatArray, *, shares: bool) -> Standing:
    differences = own - best
    behind = float(differences.mean())
    if own is best or not differences.any():
        return Standing(float(own.mean()), 0.0, 0.0, False)
    spread = standard_error(differences, sampling_variances(own, best, counts) if shares else None)
    out = bool(np.isfinite(spread)) and behind > quantile(len(own)) * spread
    return Standing(float(own.mean()), behind, spread, out)


def sampling_variances(one: FloatArray, other: FloatArray, counts: FloatArray) -> FloatArray:
    """Return (N,) variances of differences of two error shares on the same samples.

    Assumes errors at one in two of the same places: more than models that share much, less than
    unrelated ones.
    """
    discordant = 0.5 * (one * (1 - other) + other * (1 - one))
    # A share of 0 of n says that it is not above about 1/(n + 2).
    return np.asarray(np.maximum(discordant, 1 / (counts + 2)) / counts)


def loss_variances(errors: FloatArray) -> FloatArray | None:
    """Return (N,) variances of differences of two mean losses on the same samples, or None.

    Args:
        errors: (N, 2) standard errors of both.

    Assumes a correlation of ½: less than of models that share much, more than of unrelated ones.
    """
    one, other = errors.T
    found: FloatArray = one**2 + other**2 - one * other
    return found if (np.isfinite(found) & (found > 0)).all() else None


def standard_error(differences: FloatArray, sampling: FloatArray | None) -> float:
    """Return the standard error of the mean of N paired differences; NaN if unknown for N = 1."""
    number = len(differences)
    seen = float(differences.var(ddof=1)) if number > 1 else float("nan")
    if sampling is None:
        return float(np.sqrt(seen / number))
    return float(np.sqrt(np.nanmax([seen, float(sampling.mean())]) / number))


@cache
def quantile(number: int) -> float:
    """Return Student's t quantile with N − 1 degrees of freedom; the normal one for N ≤ 2."""
    from scipy.stats import norm, t

    return float(t.ppf(SURE, number - 1) if number > 2 else norm.ppf(SURE))


@dataclass(frozen=True)
class Gain:
    """A silo's gain by its group.

    Attributes:
        measured: its error alone minus that in its group.
        noise: standard error of ``measured``; NaN if unknown.
        expected: ``measured`` shrunk towards the mean over silos according to its noise.
        standard_error: of ``expected``; NaN if unknown.
        doubt: probability that the silo is better off alone. Unlike ``standard_error`` it includes
            the uncertainty of how much silos differ.
    """

    measured: float
    noise: float
    expected: float
    standard_error: float
    doubt: float = 0.0

    @property
    def own(self) -> bool:
        """Whether the silo is better off with its own model, with enough certainty to keep it."""
        return self.expected < -SURE_OF_OWN * self.standard_error

    @property
    def share(self) -> float:
        """The share of the silo's own last training of its group's model in its final model."""
        return 0.0 if self.own or self.doubt < LEAST_DOUBT else self.doubt


def shrunken_gains(
    alone: Sequence[float],
    grouped: Sequence[float],
    counts: Sequence[float],
    *,
    shares: bool,
    variances: FloatArray | None = None,
) -> list[Gain]:
    """Return every silo's gain by empirical Bayes: fewer samples shrink it more to the mean.

    A mean below 0 is replaced by 0: the race, with more evidence, has found the groups no worse
    than training alone, and only a silo's own evidence can contradict that.

    Args:
        alone, grouped: (N,) errors of the two models.
        counts: (N,) samples behind them.
        shares: errors are shares of samples.
        variances: (N,) of the differences by sampling, of others. If they are unknown, all
            differences between silos are taken for noise.

    The variance between silos is the part of the differences' variance that sampling does not
    explain; the mean weighs every silo by its precision (DerSimonian and Laird, 1986), so that a
    few samples of one silo do not outweigh the many of another.
    """
    one, other = np.array(alone), np.array(grouped)
    if shares:
        variances = sampling_variances(one, other, np.array(counts, dtype=np.float64))
    differences = one - other
    seen = float(differences.var(ddof=1)) if len(differences) > 1 else 0.0
    if variances is not None:
        noise = variances
        between, between_error = _between(differences, noise)
        weights = 1 / (between + noise)
        mean_variance = 1 / float(weights.sum())
    else:
        noise = np.full(len(differences), seen)
        between, between_error = 0.0, _between(differences, noise)[1] if seen > 0 else 0.0
        weights, mean_variance = np.ones(len(differences)), seen / len(differences)
    mean = max(float(np.average(differences, weights=weights)), 0.0)
    belief = between / (between + noise) if between > 0 else np.zeros_like(noise)
    expected = mean + belief * (differences - mean)
    errors = np.sqrt(belief * noise + (1 - belief) ** 2 * mean_variance)
    below = [
        _below_zero(float(e), s**2 + between_error) for e, s in zip(expected, errors, strict=True)
    ]
    known = variances is not None or len(differences) > 1
    own, errors = (np.sqrt(noise), errors) if known else (np.full(1, np.nan),) * 2
    return [
        Gain(*map(float, one))
        for one in zip(differences, own, expected, errors, below, strict=True)
    ]


def _below_zero(mean: float, variance: float) -> float:
    return 0.5 * erfc(mean / sqrt(2 * variance)) if variance > 0 else float(mean < 0)


def _between(differences: FloatArray, noise: FloatArray) -> tuple[float, float]:
    """Return the variance between silos (DerSimonian and Laird) and its null standard error."""
    weights, freedom = 1 / noise, len(differences) - 1
    mean = float(np.average(differences, weights=weights))
    excess = float((weights * (differences - mean) ** 2).sum()) - freedom
    scale = float(weights.sum() - (weights**2).sum() / weights.sum())
    return (max(excess / scale, 0.0), sqrt(2 * freedom) / scale) if scale > 0 else (0.0, 0.0)
