"""Clusterings of updates for baselines: k-means, and hierarchical with a threshold.

Sources: k-means on local models as in Ghosh, Hong, Yin, Ramchandran: "Robust Federated Learning in
a Heterogeneous Environment", 2019, https://arxiv.org/abs/1906.06629; hierarchical clustering as in
Briggs, Fan, Andras: "Federated learning with hierarchical clustering of local updates to improve
training on non-IID data", IJCNN 2020, https://arxiv.org/abs/2004.11791 (FL+HC).

The N x N inner products suffice: N points in at most N dimensions have the same distances as the
P-dimensional updates. scikit-learn is imported where it is called.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray, Groups

Metric: TypeAlias = Literal["cosine", "euclidean"]
Linkage: TypeAlias = Literal["average", "complete", "single", "ward"]

# Squared distances below this share of the largest squared norm count as none.
_SAME = 1e-6
_NUM_INITS = 10  # k-means++ starts; the best inertia wins


def distances(gram: ArrayLike, *, metric: Metric) -> FloatArray:
    """Return (N, N) distances: Euclidean, or 1 - cosine (in [0, 2])."""
    checked = _check.gram(gram)
    if metric not in ("cosine", "euclidean"):
        raise _check.fail("metric", "cosine or euclidean", repr(metric))
    if metric == "cosine":
        result = 1.0 - _check.cosines(checked)
    else:
        squares = checked.diagonal()
        result = np.sqrt(np.maximum(squares[:, None] + squares - 2 * checked, 0.0))
    np.fill_diagonal(result, 0.0)
    return np.asarray(result)


def k_means(gram: ArrayLike, *, num_groups: int, rng: np.random.Generator) -> Groups:
    """Return the groups of k-means (k-means++, best of ten), ordered by first silo.

    Args:
        gram: (N, N) inner products of the updates.
        num_groups: K in [1, N]; fewer groups result if there are fewer different updates.

    Raises ValueError for a bad matrix or number.
    """
    checked = _check.gram(gram)
    num_groups = _check.integer("num_groups", num_groups, low=1, high=len(checked))
    # For each silo the first one with the same update.
    first_equal = [int(row.argmax()) for row in _squares(checked) == 0]
    if len(set(first_equal)) <= num_groups:
        return _check.by_label(first_equal)
    return k_means_of(_points(checked), num_groups, rng)


def k_means_of(points: FloatArray, num_groups: int, rng: np.random.Generator) -> Groups:
    """Return the groups of k-means on (N, d) points, at least ``num_groups`` of them distinct."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    seed = int(rng.integers(2**31))
    model = KMeans(num_groups, init="k-means++", n_init=_NUM_INITS, random_state=seed)
    with threadpool_limits(limits=1):  # N points are too few to share, and one thread repeats
        return _check.by_label(model.fit_predict(points).tolist())


def hierarchical(
    gram: ArrayLike, *, metric: Metric, linkage: Linkage, max_distance: float
) -> Groups:
    """Return the groups of agglomerative clustering, ordered by first silo.

    Args:
        gram: (N, N) inner products of the updates.
        metric: distance of two updates; ``ward`` needs ``euclidean``.
        linkage: distance of two groups.
        max_distance: the paper's T; groups farther apart are not merged.

    Raises ValueError for a bad matrix, metric, linkage or distance.
    """
    checked = _check.gram(gram)
    max_distance = _check.number("max_distance", max_distance)
    if linkage not in ("average", "complete", "single", "ward"):
        raise _check.fail("linkage", "average, complete, single or ward", repr(linkage))
    if linkage == "ward" and metric != "euclidean":
        raise _check.fail("metric", "euclidean with linkage ward", repr(metric))
    apart = distances(checked, metric=metric)
    if len(checked) == 1:
        return [[0]]
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(
        n_clusters=None,
        metric="euclidean" if linkage == "ward" else "precomputed",
        linkage=linkage,
        distance_threshold=np.nextafter(max_distance, np.inf),  # as far as that still merges
    )
    points = _points(checked) if linkage == "ward" else apart
    return _check.by_label(model.fit_predict(points).tolist())


def seed_centres(gram: ArrayLike, *, num_groups: int, rng: np.random.Generator) -> list[int]:
    """Return the silos that k-means++ seeding picks as centres, at most `num_groups`.

    The first is drawn uniformly, each next with probability proportional to the squared distance to
    the nearest centre so far (Arthur, Vassilvitskii 2007). Equal updates give one centre only.
    """
    checked = _check.gram(gram)
    squares = _squares(checked)
    centres = [int(rng.integers(len(checked)))]
    while len(centres) < num_groups:
        nearest = squares[:, centres].min(axis=1)
        if not nearest.any():
            break
        centres.append(int(rng.choice(len(checked), p=nearest / nearest.sum())))
    return centres


def _squares(gram: FloatArray) -> FloatArray:
    """Return (N, N) squared distances; those within float32 rounding of 0 are set to 0."""
    squares = distances(gram, metric="euclidean") ** 2
    squares[squares <= _SAME * gram.diagonal().max()] = 0.0
    return squares


def _points(gram: FloatArray) -> FloatArray:
    """Return N points in N dimensions with these inner products."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
