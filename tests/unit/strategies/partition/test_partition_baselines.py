"""Numerics of the baselines: CFL's splits, k-means, hierarchical clustering, FedNova's factors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering

from coterie.strategies.partition.cfl import bipartition, is_split_due, mean_norm
from coterie.strategies.partition.clustering import distances, hierarchical, k_means, seed_centres
from coterie.strategies.partition.fednova import accumulation, coefficients
from coterie.strategies.partition.gram import gram


def vectors(count: int, seed: int = 0, dimension: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dimension))


THREE_KINDS = np.concatenate(
    [0.1 * vectors(4, seed=k) + 3 * vectors(1, seed=50 + k) for k in range(3)]
)
KINDS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# ---------------------------------------------------------------- CFL


@pytest.mark.parametrize("count", range(2, 9))
def test_no_bipartition_has_a_smaller_largest_cosine_across(count: int) -> None:
    for seed in range(5):
        matrix = gram(vectors(count, seed))
        cosines = 1 - distances(matrix, metric="cosine")

        def across(part: tuple[int, ...], cosines: np.ndarray = cosines) -> float:
            rest = [i for i in range(count) if i not in part]
            return float(cosines[np.ix_(part, rest)].max())

        found = bipartition(matrix)
        best = min(
            across(part) for size in range(1, count) for part in combinations(range(count), size)
        )
        assert across(tuple(found[0])) == pytest.approx(best)
        assert found[0][0] == 0 and sorted(found[0] + found[1]) == list(range(count))


def test_a_group_is_split_when_it_stands_still_and_a_member_does_not() -> None:
    opposed = gram([[3.0, 0.1], [-3.0, 0.1]])
    even = {"max_mean_norm": 0.2, "min_largest_norm": 2.0}
    assert mean_norm(opposed, [5, 5]) == pytest.approx(0.1)
    assert mean_norm(opposed, [3, 1]) == pytest.approx(np.hypot(1.5, 0.1))
    assert is_split_due(opposed, [5, 5], **even)
    assert not is_split_due(opposed, [3, 1], **even)  # the mean still moves
    assert not is_split_due(opposed, [5, 5], max_mean_norm=0.2, min_largest_norm=4.0)
    assert not is_split_due(opposed[:1, :1], [5], max_mean_norm=9.0, min_largest_norm=0.0)


def test_one_silo_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="num_silos of a bipartition must be >= 2"):
        bipartition([[1.0]])


# ---------------------------------------------------------------- clusterings


def test_distances_are_those_of_the_updates() -> None:
    points = vectors(5)
    matrix = gram(points)
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.testing.assert_allclose(distances(matrix, metric="euclidean"), apart, atol=1e-7)
    units = points / np.linalg.norm(points, axis=1)[:, None]
    np.testing.assert_allclose(distances(matrix, metric="cosine"), 1 - units @ units.T, atol=1e-12)


def test_k_means_and_its_seeds_find_what_is_far_apart() -> None:
    matrix = gram(THREE_KINDS)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        assert k_means(matrix, num_groups=3, rng=rng) == KINDS
        kinds = {row // 4 for row in seed_centres(matrix, num_groups=3, rng=rng)}
        assert kinds == {0, 1, 2}


def test_equal_updates_make_one_group_and_one_seed() -> None:
    matrix = gram([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    rng = np.random.default_rng(0)
    assert k_means(matrix, num_groups=3, rng=rng) == [[0, 2], [1]]
    assert len(seed_centres(matrix, num_groups=3, rng=rng)) == 2
    nothing = np.zeros((3, 3))
    assert k_means(nothing, num_groups=2, rng=rng) == [[0, 1, 2]]
    assert len(seed_centres(nothing, num_groups=2, rng=rng)) == 1


@pytest.mark.parametrize("linkage", ["average", "complete", "single", "ward"])
def test_hierarchical_clustering_on_inner_products_is_that_of_the_updates(linkage: str) -> None:
    points = vectors(9)
    for limit in (0.5, 2.0, 3.0, 100.0):
        direct = AgglomerativeClustering(None, linkage=linkage, distance_threshold=limit)  # type: ignore[arg-type]
        labels = direct.fit_predict(points)
        groups = hierarchical(
            gram(points),
            metric="euclidean",
            linkage=linkage,
            max_distance=limit,  # type: ignore[arg-type]
        )
        together = {(i, j) for g in groups for i in g for j in g}
        assert together == {(i, j) for i in range(9) for j in range(9) if labels[i] == labels[j]}


# ---------------------------------------------------------------- FedNova


@given(
    steps=st.integers(1, 30),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_accumulation_is_how_far_unit_gradients_carry(
    steps: int, momentum: float, decay: float
) -> None:
    """Constant gradients of 1, lr 1: momentum, and a proximal pull ``decay`` to the start."""
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + (1.0 - decay * moved)
        moved += velocity
    assert accumulation(steps, momentum=momentum, decay=decay) == pytest.approx(moved)


def test_accumulation_of_plain_sgd_is_the_number_of_steps() -> None:
    assert accumulation(7) == 7
    assert accumulation(3, momentum=0.5) == pytest.approx(1.75 + 1.5 + 1.0)
    with pytest.raises(ValueError, match="steps must be in"):
        accumulation(0)


def test_coefficients_are_the_papers() -> None:
    sizes, steps = np.array([10.0, 30.0]), np.array([2.0, 8.0])
    p = sizes / 40
    np.testing.assert_allclose(coefficients(sizes, steps), (p @ steps) * p / steps)
    np.testing.assert_allclose(coefficients(sizes, [5.0, 5.0]), p)
    np.testing.assert_allclose(coefficients(sizes, 10 * steps), coefficients(sizes, steps))
