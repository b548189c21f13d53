"""Partial pooling: each silo's coefficients, shrunk towards the mean of its group's silos.

Silo i alone estimates yᵢ ~ N(Hᵢ θᵢ, Sᵢ), where Hᵢ selects the coefficients that it has, and
θᵢ ~ N(μ, T) with a diagonal T. The mean and covariance of θᵢ given all silos, with a flat prior for
μ, are those of Gelman et al.: "Bayesian Data Analysis", 2013, section 5.4, for vectors; T is
estimated first (empirical Bayes), each τ² by DerSimonian and Laird. The intercept is that at the
means of the group's columns: at 0, far from the rows, its error would hide how levels differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.features.sums.contract import Array, Arrays
from coterie.features.sums.regression.newton import CENTRES
from coterie.features.sums.regression.numbers import spread


def partly_pooled(whole: Arrays, alone: Sequence[Arrays]) -> list[tuple[Array, Array]]:
    """Return for each silo its shrunk coefficients (p,) and standard errors (p,), in their units.

    ``whole`` is the result of the group's fit, ``alone`` those of its silos alone. The errors
    contain that of μ, but not that of τ². Where a silo lacks a coefficient, both are NaN.
    """
    known = whole["used"] & np.any([one["used"] for one in alone], axis=0)
    change = _change(whole)[np.ix_(known, known)]
    back = np.linalg.inv(change)
    has = [one["used"][known] for one in alone]
    y = [one["coefficients"][known] for one in alone]
    s = [one["covariance"][np.ix_(known, known)] for one in alone]
    between = np.diag(_between(change, y, s, has))
    size = len(change)
    total, weighted, parts = np.zeros((size, size)), np.zeros(size), []
    for values, covariance, own in zip(y, s, has, strict=True):
        h = back[own]
        scale = np.sqrt(np.diag(covariance)[own])
        inner = (h @ between @ h.T + covariance[np.ix_(own, own)]) / np.outer(scale, scale)
        weight = np.linalg.inv(inner) / np.outer(scale, scale)
        total += h.T @ weight @ h
        weighted += h.T @ weight @ values[own]
        parts.append((h, weight, values[own]))
    error = np.linalg.inv(total)
    mean = error @ weighted
    found = []
    for (h, weight, values), own in zip(parts, has, strict=True):
        gain = between @ h.T @ weight
        left = np.eye(size) - gain @ h
        theta = back @ (mean + gain @ (values - h @ mean))
        covariance = back @ (left @ between + left @ error @ left.T) @ back.T
        shown = np.flatnonzero(known)[own]
        result = np.full((2, len(known)), np.nan)
        result[:, shown] = theta[own], np.sqrt(np.diag(covariance)[own])
        found.append((result[0], result[1]))
    return found


def _change(whole: Arrays) -> Array:
    """Return the matrix to the intercept at the means of columns, all in the group's errors."""
    size = len(whole["coefficients"])
    change = np.eye(size)
    constant = size - len(whole[CENTRES])
    change[:constant, constant:] = whole[CENTRES]
    errors = np.sqrt(np.diag(change @ whole["covariance"] @ change.T))
    return np.asarray(change / np.where(errors > 0, errors, 1.0)[:, None])


def _between(
    change: Array, y: Sequence[Array], s: Sequence[Array], has: Sequence[Array]
) -> list[float]:
    """Return τ² of each coefficient; 0 if fewer than two silos have it."""
    moved = [change @ one for one in y]
    errors = [np.sqrt(np.diag(change @ one @ change.T)) for one in s]
    found = []
    for i in range(len(change)):
        own = [n for n, one in enumerate(has) if one[i]]
        differ = spread([float(moved[n][i]) for n in own], [float(errors[n][i]) for n in own])
        found.append(0.0 if differ is None else differ.tau2)
    return found
