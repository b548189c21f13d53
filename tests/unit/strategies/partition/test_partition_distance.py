"""Distances from a discriminator's hits: the poster's formula, its error, its bias, the rule."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.strategies.partition import distance as d
from coterie.strategies.partition import fedcollab
from coterie.strategies.partition.objectives import FedCollabBound
from coterie.strategies.partition.solvers import solve

COUNTS = [[10, 10], [5, 5]]


def draws(rng, rates, counts, rounds):
    """Hits of a discriminator with these rates of right answers, (rounds, 2, 2)."""
    return rng.binomial(np.array(counts), np.array(rates)[:, None], (rounds, 2, 2))


def test_equal_to_two_balanced_accuracies_minus_one():
    hits = [[[10, 8], [5, 2]], [[4, 6], [5, 5]]]
    balanced = [0.5 * (18 / 20 + 7 / 10), 0.5 * (10 / 20 + 10 / 10)]
    assert d.scores(hits, COUNTS) == pytest.approx([2 * b - 1 for b in balanced])


def test_last_max_and_cross_fit_take_their_rounds():
    hits = [[[10, 5], [5, 5]], [[5, 10], [5, 5]], [[5, 5], [5, 5]]]
    assert d.distance(hits, COUNTS).value == pytest.approx(0.5)
    assert d.distance(hits, COUNTS, score="max").value == pytest.approx(0.75)
    # Each half is perfect in a round in which the other half is not.
    assert d.distance(hits, COUNTS, score="cross-fit").value == pytest.approx(0.5)
    assert d.distance(hits, COUNTS).rounds == 3


def test_cross_fit_without_a_second_half_is_the_last():
    hits, counts = [[[1, 0], [4, 4]], [[0, 0], [4, 4]]], [[1, 0], [4, 4]]
    assert d.distance(hits, counts, score="cross-fit") == d.distance(hits, counts)


def test_the_maximum_is_biased_for_equal_data_and_the_others_are_not():
    rng = np.random.default_rng(0)
    cases = [draws(rng, [0.5, 0.5], [[4, 3], [4, 3]], 6) for _ in range(2000)]
    mean = {
        score: np.mean([d.distance(hits, [[4, 3], [4, 3]], score=score).value for hits in cases])
        for score in ("last", "max", "cross-fit")
    }
    assert abs(mean["last"]) < 0.02 and abs(mean["cross-fit"]) < 0.02
    assert mean["max"] > 0.1


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.9, 0.6)])
def test_the_standard_error_is_the_spread_of_the_estimates(rates):
    rng = np.random.default_rng(1)
    counts = [[40, 40], [30, 30]]
    found = [d.distance(draws(rng, rates, counts, 1), counts) for _ in range(3000)]
    spread = np.std([one.value for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.05)
    if rates == (0.5, 0.5):
        assert d.null_error([80, 60]) == pytest.approx(spread, rel=0.05)


def test_a_perfect_score_still_has_an_error():
    assert d.distance([[[1, 0], [1, 0]]], [[1, 0], [1, 0]]).error > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], False),
        ([0.2, 1.0, 1.0], True),  # cannot rise any more, whatever the floor
        ([0.1, 0.2, 0.2, 0.2], False),  # below the floor
        ([0.1, 0.2, 0.3, 0.305, 0.308], True),
        ([0.1, 0.2, 0.3, 0.305, 0.32], False),
        ([0.5, 0.4, 0.3, 0.2, 0.1], True),
    ],
)
def test_a_pair_stops_when_more_rounds_are_not_worth_it(values, expected):
    assert d.has_converged(values, floor=5, patience=2, tolerance=0.01) is expected


def test_bad_hits_and_counts_are_named():
    with pytest.raises(ValueError, match=r"hits must be of shape \(R, 2, 2\)"):
        d.scores(np.zeros((0, 2, 2)), COUNTS)
    with pytest.raises(ValueError, match="hits must be between 0 and the counts"):
        d.scores([[[11, 0], [0, 0]]], COUNTS)
    with pytest.raises(ValueError, match="counts must be of shape"):
        d.scores([[[0, 0], [0, 0]]], [[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="score must be last, max or cross-fit"):
        d.distance([[[0, 0], [0, 0]]], COUNTS, score="best")


# --- c = auto, and the place of a newcomer


def equal_sizes(num_silos, size):
    held_out = size - size // 2
    return [size] * num_silos, np.full((num_silos, num_silos), d.null_error([held_out, held_out]))


@pytest.mark.parametrize("size", [14, 100, 1000])
def test_auto_c_does_not_depend_on_the_size_where_all_are_equal(size):
    assert fedcollab.auto_c(*equal_sizes(3, size)) == pytest.approx(3.414, abs=0.05)


def test_at_auto_c_two_silos_within_the_noise_are_together_and_others_apart():
    sizes, errors = equal_sizes(2, 100)
    c = fedcollab.auto_c(sizes, errors)
    for distance, together in [(1.99 * errors[0, 1], True), (2.01 * errors[0, 1], False)]:
        bound = FedCollabBound.from_distances([[0, distance], [distance, 0]], sizes, c=c)
        found = solve(bound, solver="optimal")
        assert (len(found.groups) == 1) is together


def test_auto_c_takes_the_noisiest_pair_and_leaves_out_the_unmeasured():
    sizes = [2100, 2100, 14]
    errors = np.full((3, 3), 0.01)
    errors[0, 2] = errors[2, 0] = np.nan
    assert fedcollab.auto_c(sizes, errors) == pytest.approx(0.02 / (2 / 2100**0.5 - 2 / 4200**0.5))
    assert fedcollab.auto_c([5], [[np.nan]]) == 1.0
    with pytest.raises(ValueError, match="errors must be a square matrix"):
        fedcollab.auto_c([5], [[-1.0]])


def test_a_newcomer_is_placed_where_the_bound_is_smallest_and_nobody_else_moves():
    rng = np.random.default_rng(4)
    for _ in range(50):
        half = np.triu(rng.random((6, 6)), 1)
        distances, sizes = half + half.T, rng.integers(5, 500, 6)
        groups = [[0, 3], [1], [4, 5]]
        bound = FedCollabBound.from_distances(distances, sizes, c=6.0)
        found = fedcollab.place(bound, groups, 2)
        options = [
            [[0, 2, 3], [1], [4, 5]],
            [[0, 3], [1, 2], [4, 5]],
            [[0, 3], [1], [2, 4, 5]],
            [[0, 3], [1], [2], [4, 5]],
        ]
        values = [fedcollab.objective(bound, option) for option in options]
        assert found == options[int(np.argmin(values))]


def test_the_first_silo_is_placed_alone():
    assert fedcollab.place(FedCollabBound.from_distances([[0.0]], [10], c=1.0), [], 0) == [[0]]
