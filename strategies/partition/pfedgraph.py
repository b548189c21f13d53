"""pFedGraph's collaboration weights: a quadratic programme on the simplex.

Source: Ye, Ni, Wu, Chen, Wang: "Personalized Federated Learning with Inferred Collaboration
Graphs", ICML 2023, https://proceedings.mlr.press/v202/ye23b.html. Row i of the collaboration graph
is

    w_i = argmin_{w ≥ 0, Σ w = 1}  −Σ_j w_j cos(Δ_i, Δ_j) + α |w − p|²,

with p_j = D_j / D, the shares of the samples. Completing the square, this is the point of the
simplex nearest to ``p + cos_i / (2α)``, which sorting finds exactly (Held, Wolfe, Crowder,
"Validation of subgradient optimization", 1974) without a solver.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray


def collaborators(similarities: ArrayLike, sizes: ArrayLike, *, alpha: float) -> FloatArray:
    """Return (N,) weights w_i of one silo, ≥ 0 and with sum 1.

    Args:
        similarities: (N,) cosines of its update with all silos' updates, including its own.
        sizes: (N,) numbers of training samples, > 0.
        alpha: α > 0; large gives the shares of the samples (FedAvg), small the most similar silos.

    Raises:
        ValueError: a cosine or α that is not finite, or a size that is not above 0.

    Example: two silos of one size with opposite updates.

    >>> collaborators([1.0, -1.0], [10, 10], alpha=1.0).tolist()
    [1.0, 0.0]
    """
    cosines = np.asarray(similarities, dtype=np.float64)
    if cosines.ndim != 1 or len(cosines) == 0 or not np.isfinite(cosines).all():
        raise _check.fail("similarities", "finite, of shape (N,) with N >= 1", cosines.tolist())
    alpha = _check.number("alpha", alpha, above=True)
    counts = _check.sizes(sizes, num_silos=len(cosines))
    return nearest_on_simplex(counts / counts.sum() + cosines / (2 * alpha))


def nearest_on_simplex(point: FloatArray) -> FloatArray:
    """Return the point of ``{w ≥ 0, Σ w = 1}`` nearest to ``point``, (N,): max(point − τ, 0).

    τ makes the sum 1 over the k largest entries, for the largest k whose smallest entry exceeds it.
    """
    falling = np.sort(point)[::-1]
    taus = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    count = int(np.flatnonzero(falling > taus)[-1])
    return np.asarray(np.maximum(point - taus[count], 0.0))
