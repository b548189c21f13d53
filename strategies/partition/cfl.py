"""When and where a group of clustered federated learning is split, from inner products alone.

Source: Sattler, Müller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, https://arxiv.org/abs/1910.01991;
Algorithm 1 (optimal bipartition), eqs. for the two stopping criteria in Algorithm 3.

scikit-learn is imported by `bipartition`, not by this module.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import Groups


def mean_norm(gram: ArrayLike, sizes: ArrayLike) -> float:
    """Return the norm of the size-weighted mean update of N silos.

    Args:
        gram: (N, N) inner products of the updates.
        sizes: (N,) numbers of training samples, > 0.
    """
    checked = _check.gram(gram)
    weights = _check.sizes(sizes, num_silos=len(checked))
    weights = weights / weights.sum()
    return float(np.sqrt(max(float(weights @ checked @ weights), 0.0)))


def is_split_due(
    gram: ArrayLike, sizes: ArrayLike, *, max_mean_norm: float, min_largest_norm: float
) -> bool:
    """Tell whether a group stands still as a whole while a member does not.

    Args:
        gram, sizes: as in `mean_norm`.
        max_mean_norm: ε₁; the mean update's norm must be below.
        min_largest_norm: ε₂; the largest update's norm must be above.
    """
    checked = _check.gram(gram)
    if len(checked) < 2:
        return False
    largest = float(np.sqrt(checked.diagonal().max()))
    return mean_norm(checked, sizes) < max_mean_norm and largest > min_largest_norm


def bipartition(gram: ArrayLike) -> Groups:
    """Return the two groups whose largest cosine across is smallest, ordered by their first silo.

    That is single linkage stopped at two groups: Algorithm 1 merges the two most similar groups
    until two are left, and no other bipartition has a smaller largest cross-similarity.

    Raises ValueError for a bad matrix and fewer than two silos.
    """
    checked = _check.gram(gram)
    if len(checked) < 2:
        raise _check.fail("num_silos of a bipartition", ">= 2", len(checked))
    from sklearn.cluster import AgglomerativeClustering

    distances = 1.0 - _check.cosines(checked)
    np.fill_diagonal(distances, 0.0)
    model = AgglomerativeClustering(2, metric="precomputed", linkage="single")
    return _check.by_label(model.fit_predict(distances).tolist())
