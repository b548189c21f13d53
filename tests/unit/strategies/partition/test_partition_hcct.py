"""HCCT: simple entry, newcomers (eqs. 15-16), the path over alpha and its rule, HCCT-E's layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import partition_literal as literal
import pytest

from benchmarks.papers.hcct.observe import choose_alpha
from coterie.strategies.partition import hcct
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import agglomerative, optimal, relocation


def grouped(num_silos=9, num_groups=3, weight=1.5, seed=0, num_parameters=300):
    """Updates around hidden directions: silo i in group i mod num_groups."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_groups, num_parameters))
    noise = rng.standard_normal((num_silos, num_parameters))
    return weight * centres[np.arange(num_silos) % num_groups] + noise


HIDDEN = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def partition(gram, sizes, alpha):
    return agglomerative(HCCTUtility.from_gram(gram, sizes, alpha=alpha)).groups


def test_hungry_and_picky_silos():
    """One alpha per silo: the same two silos merge only where one of them wants data."""
    gram = [[1, 0.5], [0.5, 1]]
    assert partition(gram, [100, 100], alpha=[1, 1]) == [[0], [1]]
    assert partition(gram, [100, 100], alpha=[200, 1]) == [[0, 1]]


def test_place_equals_eqs_15_and_16():
    rng = np.random.default_rng(1)
    joined = 0
    for _ in range(300):
        updates = (
            rng.standard_normal((8, 6)) + 1.5 * rng.standard_normal((2, 6))[rng.integers(2, size=8)]
        )
        sizes, alpha = rng.integers(10, 200, 8), np.full(8, 10 ** rng.uniform(-1, 2.5))
        newcomer = int(rng.integers(8))
        labels = rng.integers(3, size=8)
        labels[newcomer] = -1
        groups = [np.flatnonzero(labels == k).tolist() for k in (2, 0, 1) if (labels == k).any()]
        expected = [literal.benefit(updates, sizes, alpha, g, [newcomer]) for g in groups]
        gram = updates @ updates.T
        result = hcct.placement_benefits(
            HCCTUtility.from_gram(gram, sizes, alpha=alpha), groups, newcomer
        )
        assert result == pytest.approx(expected, abs=1e-10)
        place = hcct.place(gram, sizes, groups, alpha=alpha, newcomer=newcomer)
        assert place == (int(np.argmax(expected)) if max(expected) > 0 else None)
        joined += place is not None
    assert 50 < joined < 250


def test_place_uses_only_the_rows_of_the_groups():
    updates = grouped()
    gram, sizes = updates @ updates.T, [50] * 9
    few = hcct.placement_benefits(HCCTUtility.from_gram(gram, sizes, alpha=20), [[4, 7], [2]], 1)
    rows = [1, 2, 4, 7]
    small = gram[np.ix_(rows, rows)]
    alone = hcct.placement_benefits(
        HCCTUtility.from_gram(small, [50] * 4, alpha=20), [[2, 3], [1]], 0
    )
    assert few == pytest.approx(alone)
    assert hcct.place(gram, sizes, [[0, 3], [4, 7], [2]], alpha=20, newcomer=1) == 1


def test_place_without_groups_is_alone():
    assert hcct.place([[1.0]], [10], [], alpha=5, newcomer=0) is None


@pytest.mark.parametrize("newcomer", [0, 3, -1])
def test_place_refuses_members_and_unknown_rows(newcomer):
    with pytest.raises(ValueError, match="newcomer must be"):
        hcct.place(np.eye(3), [1] * 3, [[0], [1]], alpha=1, newcomer=newcomer)


@pytest.mark.parametrize("solver", ["agglomerative", "optimal"])
def test_path_runs_from_all_alone_to_all_together_without_gaps(solver):
    updates = grouped()
    gram, sizes = updates @ updates.T, np.random.default_rng(2).integers(50, 200, 9)
    path = hcct.alpha_path(gram, sizes, solver=solver)
    assert path[0].alpha_low == 0
    assert len(path[0].groups) == 9
    assert path[-1].alpha_high == np.inf
    assert len(path[-1].groups) == 1
    solve = agglomerative if solver == "agglomerative" else optimal
    for before, stretch in zip([None, *path[:-1]], path, strict=True):
        assert stretch.alpha_low < stretch.alpha_high
        if before:
            assert before.alpha_high == stretch.alpha_low
            assert before.groups != stretch.groups
        if stretch.ratio > 1.01 and stretch.alpha_high < np.inf and stretch.alpha_low > 0:
            for alpha in (stretch.alpha_low * 1.002, stretch.alpha_high / 1.002):
                result = solve(HCCTUtility.from_gram(gram, sizes, alpha=alpha))
                assert result.groups == stretch.groups


def test_path_with_relocation_is_reproducible():
    updates = grouped(6)
    gram = updates @ updates.T

    def search(utility):
        return relocation(utility, rng=np.random.default_rng(3), num_restarts=3).groups

    paths = [hcct.alpha_path(gram, [100] * 6, solver=search, rtol=0.05) for _ in range(2)]
    assert paths[0] == paths[1]
    with pytest.raises(ValueError, match="rng must be"):
        hcct.alpha_path(gram, [100] * 6, solver="relocation")


def test_stay_intervals_are_where_no_move_pays():
    rng = np.random.default_rng(4)
    updates, sizes = grouped(weight=0.8), rng.integers(30, 300, 9)
    gram = updates @ updates.T
    intervals = hcct.stay_intervals(gram, sizes, HIDDEN)
    for alpha in np.geomspace(1, 1e4, 60):
        from coterie.strategies.partition.evaluation import evaluate

        moves = evaluate(HCCTUtility.from_gram(gram, sizes, alpha=alpha), HIDDEN).alternatives
        for (low, high), move in zip(intervals, moves, strict=True):
            assert (low <= alpha <= high) == (move.gain <= 0)
    equal = hcct.stay_intervals(gram, [80] * 9, HIDDEN)
    assert all(high == np.inf for _, high in equal), "a move between groups changes no data term"


def test_stay_interval_is_nan_for_a_silo_in_the_wrong_group_at_every_alpha():
    gram = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    intervals = hcct.stay_intervals(gram, [10, 10, 10], [[0, 2], [1]])
    assert np.isnan(intervals[0]).all()


@pytest.mark.parametrize("seed", range(5))
def test_choice_of_alpha_finds_hidden_groups(seed):
    updates = grouped(seed=seed, weight=1.2)
    gram = updates @ updates.T
    choice = choose_alpha(gram, [100] * 9)
    assert choice.groups == HIDDEN
    assert choice.ratio > 2
    assert partition(gram, [100] * 9, alpha=choice.alpha) == HIDDEN


@pytest.mark.parametrize("num_groups", [1, 9])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3, 4))]
)
def test_choice_of_alpha_is_none_without_groups(num_groups, seed):
    updates = grouped(num_groups=num_groups, seed=seed, num_parameters=2000)
    choice = choose_alpha(updates @ updates.T, [100] * 9)
    assert choice.alpha is None
    assert choice.groups is None
    assert choice.reason.startswith("nothing non-trivial persists")


@pytest.mark.parametrize("num_silos", [1, 2])
def test_choice_of_alpha_for_one_or_two_silos_is_none(num_silos):
    choice = choose_alpha(np.eye(num_silos), [10] * num_silos)
    assert (choice.alpha, choice.ratio) == (None, 1.0)


def test_choice_of_alpha_with_equal_updates():
    """Two pairs of equal updates at right angles hold from alpha = 0 on."""
    gram = np.kron(np.eye(2), np.ones((2, 2)))
    choice = choose_alpha(gram, [100] * 4)
    assert choice.groups == [[0, 1], [2, 3]]
    assert partition(gram, [100] * 4, alpha=choice.alpha) == choice.groups


def test_choice_of_alpha_with_all_updates_equal_is_none():
    assert choose_alpha(np.ones((4, 4)), [100] * 4).alpha is None


# --- HCCT-E ---------------------------------------------------------------------------------------


def test_layer_choice_equals_eq_19():
    rng = np.random.default_rng(5)
    shapes = {"conv.0.weight": (4, 3), "conv.0.bias": (4,), "head.weight": (2, 4), "scale": (1,)}
    updates = [{k: rng.standard_normal(s) + 1 for k, s in shapes.items()} for _ in range(6)]
    result = hcct.layer_choice(updates)
    layers = {"conv.0": ["conv.0.weight", "conv.0.bias"], "head": ["head.weight"]}
    for layer, names in {**layers, "scale": ["scale"]}.items():
        flat = np.array([np.concatenate([u[n].ravel() for n in names]) for u in updates])
        mean = flat.mean(axis=0)
        expected = np.square(flat - mean).sum() / (len(flat) * (mean @ mean))
        assert result.scores[layer] == pytest.approx(expected)
    assert result.layer == max(result.scores, key=result.scores.__getitem__)
    assert list(result.scores) == ["conv.0", "head", "scale"]


def test_layer_choice_takes_a_normalisation_only_where_there_is_nothing_else():
    differing, alike = np.array([[3.0, -1.0]]), np.array([[1.0, 1.1]])
    updates = [
        {
            "norm.weight": differing[:, i],
            "norm.bias": differing[:, i],
            "fc.weight": alike[:, i : i + 1],
        }
        for i in range(2)
    ]
    result = hcct.layer_choice(updates)
    assert result.layer == "fc" and result.scores["norm"] > result.scores["fc"]
    vectors = [{name: a for name, a in update.items() if "norm" in name} for update in updates]
    assert hcct.layer_choice(vectors).layer == "norm"


def test_layer_choice_of_cancelling_and_equal_layers():
    result = hcct.layer_choice(
        [
            {"a.weight": [1.0], "b.weight": [2.0], "c.weight": [0.0]},
            {"a.weight": [-1.0], "b.weight": [2.0], "c.weight": [0.0]},
        ]
    )
    assert result.layer == "a"
    assert result.scores == {"a": np.inf, "b": 0.0, "c": 0.0}


@pytest.mark.parametrize(
    "updates",
    [
        [],
        [{}],
        [{"a": [1.0]}, {"b": [1.0]}],
        [{"a": [1.0]}, {"a": [1.0, 2.0]}],
        [{"a": [1.0]}, {"a": [np.nan]}],
    ],
)
def test_layer_choice_refuses_bad_updates(updates):
    with pytest.raises(ValueError, match="updates must"):
        hcct.layer_choice(updates)


@pytest.mark.parametrize("solver", ["agglomerative", "optimal"])
@pytest.mark.parametrize("ratio", [1e3, 1e13, 1e15])
def test_the_path_ends_together_however_unequal_the_sizes(ratio, solver):
    """What two large silos gain is less than rounding beside the small ones' utility."""
    updates = np.random.default_rng(12).normal(size=(4, 6))
    sizes = [1.0, ratio, 1.0, ratio]
    path = hcct.alpha_path(updates @ updates.T, sizes, solver=solver)
    assert path[0].groups == [[0], [1], [2], [3]] and path[-1].groups == [[0, 1, 2, 3]]
    assert np.isfinite(path[-1].alpha_low) and path[-1].alpha_high == float("inf")
    assert all(low.alpha_high == high.alpha_low for low, high in pairwise(path))
