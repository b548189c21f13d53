"""A race of partitions: which is best for the silos, by errors on samples that none trained with.

Every silo measures every partition, so that two partitions are compared by differences within
silos, which have a much smaller spread than errors between silos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt

import numpy as np

from coterie.strategies.partition._check import FloatArray

NEAR = 1.0
"""Standard errors within which a partition is as good as the best."""
SURE_OF_OWN = 1.0
"""Standard errors by which a silo's group must be expected to be worse for it than its own model,
whose training is farther along when the two are measured."""
SURE = 0.975
"""One-sided probability at which a partition is out of the race."""
LEAST_DOUBT = 0.05
"""Probability below which a silo is not thought to be better off alone."""


@dataclass(frozen=True)
class Standing:
    """How one partition stands, beside the best.

    Attributes:
        error: mean over silos.
        behind: mean over silos of its error less that of the best; 0 for the best itself.
        standard_error: of ``behind``; NaN where nobody can say.
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
        shares: errors are shares of samples, so that the noise of a few samples is known: two
            models that differ at no silo may still differ.

    A difference counts as beyond chance by Student's t over silos (one-sided, 97.5 %). The spread
    over silos is not believed where it is smaller than sampling alone would make it.
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
    """(N,) variances of differences of two shares of wrong answers on the same samples.

    As if the two models erred at one in two of the same places: more than models that share much
    do, less than strangers.
    """
    discordant = 0.5 * (one * (1 - other) + other * (1 - one))
    # A share of 0 of n says that it is not above about 1/(n + 2).
    return np.asarray(np.maximum(discordant, 1 / (counts + 2)) / counts)


def standard_error(differences: FloatArray, sampling: FloatArray | None) -> float:
    """Of the mean of N paired differences; NaN of one where no sampling variance is known."""
    number = len(differences)
    seen = float(differences.var(ddof=1)) if number > 1 else float("nan")
    if sampling is None:
        return float(np.sqrt(seen / number))
    return float(np.sqrt(np.nanmax([seen, float(sampling.mean())]) / number))


@cache
def quantile(number: int) -> float:
    """Of Student's t with N − 1 degrees of freedom; of the normal one for a single silo."""
    from scipy.stats import norm, t

    return float(t.ppf(SURE, number - 1) if number > 2 else norm.ppf(SURE))


@dataclass(frozen=True)
class Gain:
    """What a silo gains by its group, as far as is known.

    Attributes:
        measured: its own error alone less that in its group.
        noise: standard error of ``measured``; NaN where nobody can say.
        expected: the same, drawn towards the mean over silos by how noisy its own is.
        standard_error: of ``expected``.
        doubt: how likely it is that the silo is better off alone. Beside ``standard_error`` it
            counts that nobody knows well how much silos differ.
    """

    measured: float
    noise: float
    expected: float
    standard_error: float
    doubt: float = 0.0

    @property
    def own(self) -> bool:
        """The silo is better off with its own model, beyond doubt enough to keep it."""
        return self.expected < -SURE_OF_OWN * self.standard_error

    @property
    def share(self) -> float:
        """Of what the silo's own training makes of its group's model, in the model that it ends
        with: as much as it is in doubt that the group's is better for it."""
        return 0.0 if self.own or self.doubt < LEAST_DOUBT else self.doubt


def shrunken_gains(
    alone: Sequence[float], grouped: Sequence[float], counts: Sequence[float], *, shares: bool
) -> list[Gain]:
    """Every silo's gain by empirical Bayes: the deviations of silos are believed less than their
    mean, the less the fewer samples they were measured on.

    The mean is not believed where it is below 0: the race, which has seen more, has found that the
    groups are no worse than training alone, and only a silo's own evidence speaks against that.

    Args:
        alone, grouped: (N,) errors of the two models.
        counts: (N,) samples behind them.
        shares: errors are shares of samples. Of others the noise is not known, and all that silos
            differ in is taken for noise.

    The variance between silos is what of the differences' is not explained by sampling, and every
    silo counts in the mean by what is known of it (DerSimonian and Laird, 1986): a few samples of
    one silo do not outweigh the many of another.
    """
    one, other = np.array(alone), np.array(grouped)
    differences = one - other
    seen = float(differences.var(ddof=1)) if len(differences) > 1 else 0.0
    if shares:
        noise = sampling_variances(one, other, np.array(counts, dtype=np.float64))
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
    own = np.sqrt(noise) if shares or len(differences) > 1 else np.full(1, np.nan)
    return [
        Gain(float(d), float(n), float(e), float(s), _below_zero(float(e), s**2 + between_error))
        for d, n, e, s in zip(differences, own, expected, errors, strict=True)
    ]


def _below_zero(mean: float, variance: float) -> float:
    """How likely a normal variable is to be below zero."""
    return 0.5 * erfc(mean / sqrt(2 * variance)) if variance > 0 else float(mean < 0)


def _between(differences: FloatArray, noise: FloatArray) -> tuple[float, float]:
    """Variance between silos by the estimate of DerSimonian and Laird, and the standard error that
    this has where silos do not differ; 0 of a single one."""
    weights, freedom = 1 / noise, len(differences) - 1
    mean = float(np.average(differences, weights=weights))
    excess = float((weights * (differences - mean) ** 2).sum()) - freedom
    scale = float(weights.sum() - (weights**2).sum() / weights.sum())
    return (max(excess / scale, 0.0), sqrt(2 * freedom) / scale) if scale > 0 else (0.0, 0.0)
