"""Criteria for splitting a group in clustered federated learning, from inner products alone.

Source: Sattler, Müller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, https://arxiv.org/abs/1910.01991;
Algorithm 1 (optimal bipartition), eqs. for the two stopping criteria in Algorithm 3.

Only `bipartition` imports scikit-learn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import Groups


def mean_norm(gram: ArrayLike, sizes: ArrayLike) -> float:
    """Return the norm of N silos' mean update; `gram` is (N, N), weights `sizes` (N,) > 0."""
    checked = _check.gram(gram)
    weights = _check.sizes(sizes, num_silos=len(checked))
    weights = weights / weights.sum()
    return float(np.sqrt(max(float(weights @ checked @ weights), 0.0)))


def is_split_due(
    gram: ArrayLike, sizes: ArrayLike, *, max_mean_norm: float, min_largest_norm: float
) -> bool:
    """Return whether a group's mean update is small while a member's update is large.

    The mean update's norm must be below ε₁, `max_mean_norm`, and the largest update's above ε₂,
    `min_largest_norm`. `gram` and `sizes` are as in `mean_norm`.
    """
    checked = _check.gram(gram)
    if len(checked) < 2:
        return False
    largest = float(np.sqrt(checked.diagonal().max()))
    return mean_norm(checked, sizes) < max_mean_norm and largest > min_largest_norm


def bipartition(gram: ArrayLike) -> Groups:
    """Return the two groups with the smallest largest cosine across, ordered by first silo.

    This is single linkage stopped at two groups: Algorithm 1 merges the most similar groups until
    two are left. Raises ValueError for a bad matrix and fewer than two silos.
    """
    checked = _check.gram(gram)
    if len(checked) < 2:
        raise _check.fail("num_silos of a bipartition", ">= 2", len(checked))
    from sklearn.cluster import AgglomerativeClustering

    distances = 1.0 - _check.cosines(checked)
    np.fill_diagonal(distances, 0.0)
    model = AgglomerativeClustering(2, metric="precomputed", linkage="single")
    return _check.by_label(model.fit_predict(distances).tolist())
