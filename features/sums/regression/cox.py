"""Cox's partial likelihood of a silo's rows as sums for a regression, with ties by Efron."""

from __future__ import annotations

from typing import Final

import numpy as np

from coterie.features.sums.spells import Array, Spells

SMALLEST: Final = -600.0
"""Smallest log of a weight beside the largest: exp of it is not 0."""


def partial(spells: Spells, z: Array, beta: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return the negative log partial likelihood of coefficients (p,) for columns (n, p).

    Returns:
        It (1,), its gradient (p,) and Hessian (p, p), and the weights (n,) of rows in these.
    """
    z, event, at = z[spells.order], spells.event, spells.event > 0
    z = z - z.mean(axis=0)  # changes nothing, but for rounding
    eta = z @ beta
    eta -= eta.max()
    weights = np.exp(np.maximum(eta, SMALLEST))
    risk = spells.to_time(weights)
    means = spells.to_time(weights[:, None] * z) / risk[:, None]
    hazards = weights * spells.until(1 / risk)
    return (
        np.array([np.log(risk).sum() - eta[at].sum()]),
        z.T @ (hazards - event),
        z.T @ (z * hazards[:, None]) - means.T @ means,
        hazards - event,
        hazards,
    )
