"""Objectives equal the papers' formulas; solvers equal brute force or never beat it."""

from __future__ import annotations

import itertools

import numpy as np
import partition_literal as literal
import pytest

from coterie.strategies.partition.evaluation import evaluate, move_gains
from coterie.strategies.partition.objectives import FedCollabBound, HCCTUtility
from coterie.strategies.partition.solvers import (
    agglomerative,
    optimal,
    relocation,
    solve,
    with_groups,
)


def random_updates(rng, num_silos, num_parameters=12):
    """Updates in a few hidden directions with noise, so that grouping has something to find."""
    centres = rng.standard_normal((rng.integers(1, 4), num_parameters))
    noise = rng.uniform(0.1, 2.0) * rng.standard_normal((num_silos, num_parameters))
    size = rng.uniform(0.01, 10, (num_silos, 1))
    return size * (centres[rng.integers(len(centres), size=num_silos)] + noise)


def random_sizes(rng, num_silos):
    return rng.integers(5, 1000, num_silos)


def random_distances(rng, num_silos):
    half = np.triu(rng.random((num_silos, num_silos)), 1)
    return half + half.T


def random_groups(rng, num_silos):
    labels = rng.integers(num_silos, size=num_silos)
    return [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]


def hcct_case(rng, num_silos):
    updates, sizes = random_updates(rng, num_silos), random_sizes(rng, num_silos)
    alpha = 10 ** rng.uniform(0, 3) * (rng.uniform(0.2, 5, num_silos) if rng.random() < 0.5 else 1)
    return updates, sizes, np.broadcast_to(alpha, num_silos)


def hcct(updates, sizes, alpha):
    return HCCTUtility.from_gram(updates @ updates.T, sizes, alpha=alpha)


def fedcollab(rng, num_silos):
    distances, sizes = random_distances(rng, num_silos), random_sizes(rng, num_silos)
    c = 10 ** rng.uniform(-0.5, 1.5)
    return distances, sizes, c, FedCollabBound.from_distances(distances, sizes, c=c)


@pytest.mark.parametrize("seed", range(5))
def test_values_beside_a_group_are_those_of_a_member(seed):
    rng = np.random.default_rng(seed)
    objective, groups = hcct(*hcct_case(rng, 9)), random_groups(rng, 9)
    beside = objective.values_beside(groups)
    for i, (k, group) in itertools.product(range(9), enumerate(groups)):
        joined = objective.member_values([*group, i])[-1]
        assert np.isnan(beside[i, k]) if i in group else np.isclose(beside[i, k], joined)


# --- values ---------------------------------------------------------------------------------------


def test_hcct_equals_the_paper_on_250_cases():
    """Eqs. 8-17: the utility of any partition, and the partition of Algorithm 2."""
    rng = np.random.default_rng(0)
    num_equal = 0
    for _ in range(250):
        updates, sizes, alpha = hcct_case(rng, int(rng.integers(1, 10)))
        objective = hcct(updates, sizes, alpha)
        groups = random_groups(rng, len(sizes))
        total = sum(literal.group_utility(updates, sizes, alpha, group) for group in groups)
        assert evaluate(objective, groups).objective == pytest.approx(total, abs=1e-10)
        expected = literal.client_partition(updates, sizes, alpha)
        total = sum(literal.group_utility(updates, sizes, alpha, group) for group in expected)
        result = agglomerative(objective)
        assert result.objective == pytest.approx(total, abs=1e-10)
        assert result.num_steps == len(sizes) - len(result.groups)
        num_equal += result.groups == expected
    assert num_equal == 250


def test_hcct_silo_values_equal_eq_9():
    rng = np.random.default_rng(1)
    for _ in range(50):
        updates, sizes, alpha = hcct_case(rng, 7)
        groups = random_groups(rng, 7)
        result = evaluate(hcct(updates, sizes, alpha), groups)
        for group in groups:
            for silo in group:
                expected = literal.silo_utility(updates, sizes, alpha, silo, group)
                assert result.values[silo] == pytest.approx(expected, abs=1e-12)


def test_fedcollab_equals_the_poster():
    rng = np.random.default_rng(2)
    for _ in range(300):
        num_silos = int(rng.integers(1, 10))
        distances, sizes, c, objective = fedcollab(rng, num_silos)
        groups = random_groups(rng, num_silos)
        result = evaluate(objective, groups)
        expected = literal.fedcollab_bound(distances, sizes, groups, c)
        assert result.objective == pytest.approx(expected, rel=1e-12)
        assert sum(result.values) == pytest.approx(expected, rel=1e-12)


def test_values_do_not_depend_on_the_size_of_updates_and_samples():
    """Also where squares would leave float64's range without care."""
    rng = np.random.default_rng(3)
    updates, sizes, _ = hcct_case(rng, 6)
    gram = updates @ updates.T
    groups = random_groups(rng, 6)
    plain = evaluate(HCCTUtility.from_gram(gram, sizes, alpha=0), groups)
    for factor in (1e-250, 1e250):
        scaled = HCCTUtility.from_gram(gram * factor, sizes * 1e100, alpha=0)
        assert evaluate(scaled, groups).objective == pytest.approx(plain.objective, rel=1e-12)


def test_negative_distances_are_clipped():
    distances = np.array([[0, -0.2], [-0.2, 0]])
    objective = FedCollabBound.from_distances(distances, [50, 50], c=1)
    assert evaluate(objective, [[0, 1]]).objective == pytest.approx(2 * 1 / 10)


# --- moves ----------------------------------------------------------------------------------------


def moved(groups, silo, target):
    rest = [[member for member in group if member != silo] for group in groups]
    rest = [*rest, [silo]] if target is None else rest
    if target is not None:
        rest[target] = [*rest[target], silo]
    return [group for group in rest if group]


@pytest.mark.parametrize("kind", ["hcct", "fedcollab"])
def test_move_gains_equal_differences_of_totals(kind):
    rng = np.random.default_rng(4)
    for _ in range(5):
        objective = hcct(*hcct_case(rng, 7)) if kind == "hcct" else fedcollab(rng, 7)[-1]
        groups = random_groups(rng, 7)
        here = evaluate(objective, groups)
        gains = move_gains(objective, groups)
        for silo in range(7):
            own = next(k for k, group in enumerate(groups) if silo in group)
            for k in range(len(groups) + 1):
                target = None if k == len(groups) else k
                if k == own or (target is None and len(groups[own]) == 1):
                    assert gains[silo, k] == -np.inf
                    continue
                there = evaluate(objective, moved(groups, silo, target)).objective
                change = objective.sign * (there - here.objective)
                assert gains[silo, k] == pytest.approx(change, abs=1e-10)


def test_alternatives_are_the_best_moves_and_optimum_has_no_better_one():
    rng = np.random.default_rng(5)
    for _ in range(40):
        objective = fedcollab(rng, 8)[-1]
        result = optimal(objective)
        for silo, move in enumerate(result.alternatives):
            there = evaluate(objective, moved(result.groups, silo, move.target)).objective
            assert move.gain == pytest.approx(result.objective - there, abs=1e-10)
            assert move.gain <= 1e-10


def test_one_silo_has_nowhere_to_go():
    result = evaluate(HCCTUtility.from_gram([[2.0]], [10], alpha=5), [[0]])
    assert result.alternatives[0].target is None
    assert result.alternatives[0].gain == 0
    assert result.objective == pytest.approx(1 - 5 / 10)


def test_small_silo_beside_a_huge_one_keeps_its_value():
    """Taking the huge silo out of the sums must not leave its rounding behind."""
    updates = np.array([[1e8, 0.0, 0.0], [0.0, 1e-4, 0.0], [0.0, 1e-4, 1e-4]])
    objective = HCCTUtility.from_gram(updates @ updates.T, [10**6, 3, 2], alpha=1)
    gains = move_gains(objective, [[0, 1, 2]])
    together = evaluate(objective, [[0, 1, 2]]).objective
    apart = evaluate(objective, [[0], [1, 2]]).objective
    assert gains[0, -1] == pytest.approx(apart - together, rel=1e-9)


# --- solvers --------------------------------------------------------------------------------------


def best_by_brute_force(objective, num_silos):
    value = {}
    for size in range(1, num_silos + 1):
        for group in itertools.combinations(range(num_silos), size):
            value[group] = float(objective.member_values(group).sum())
    totals = (
        sum(value[tuple(group)] for group in partition)
        for partition in literal.set_partitions(list(range(num_silos)))
    )
    return max(totals) if objective.sign > 0 else min(totals)


@pytest.mark.parametrize(("num_silos", "num_cases"), [(1, 2), (2, 10), (5, 25), (7, 10), (9, 2)])
@pytest.mark.parametrize("kind", ["hcct", "fedcollab"])
def test_optimal_equals_brute_force(kind, num_silos, num_cases):
    rng = np.random.default_rng(num_silos)
    for _ in range(num_cases):
        objective = (
            hcct(*hcct_case(rng, num_silos)) if kind == "hcct" else fedcollab(rng, num_silos)[-1]
        )
        expected = best_by_brute_force(objective, num_silos)
        assert optimal(objective).objective == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("kind", ["hcct", "fedcollab"])
def test_nothing_beats_optimal(kind, capsys):
    rng = np.random.default_rng(6)
    num_cases, reached = 30, {"agglomerative": 0, "relocation": 0}
    for case in range(num_cases):
        num_silos = int(rng.integers(2, 10))
        objective = (
            hcct(*hcct_case(rng, num_silos)) if kind == "hcct" else fedcollab(rng, num_silos)[-1]
        )
        best = optimal(objective)
        for name in reached:
            own = np.random.default_rng(case)
            result = solve(objective, solver=name, rng=own, num_restarts=10)
            lead = objective.sign * (result.objective - best.objective)
            assert lead <= 1e-9
            reached[name] += lead >= -1e-9
    shares = {name: count / num_cases for name, count in reached.items()}
    with capsys.disabled():
        print(f"\n{kind}: share of {num_cases} cases with the optimum: {shares}")
    assert shares["relocation"] >= 0.9
    assert shares["agglomerative"] >= 0.5


def test_more_restarts_are_never_worse_and_one_is_not_enough():
    rng = np.random.default_rng(7)
    worse = 0
    for case in range(30):
        objective = fedcollab(rng, 10)[-1]
        few = relocation(objective, rng=np.random.default_rng(case), num_restarts=1)
        many = relocation(objective, rng=np.random.default_rng(case), num_restarts=20)
        assert many.objective <= few.objective + 1e-12
        worse += few.objective > many.objective + 1e-9
    assert worse > 0


def test_relocation_may_start_from_a_structure():
    objective = fedcollab(np.random.default_rng(8), 9)[-1]
    best = optimal(objective).groups
    result = relocation(objective, rng=np.random.default_rng(0), num_restarts=1, start=best)
    assert result.groups == best
    assert result.num_steps == 1


def test_relocation_ends_where_no_silo_wants_to_move():
    rng = np.random.default_rng(9)
    for _ in range(20):
        result = relocation(hcct(*hcct_case(rng, 12)), rng=rng, num_restarts=2)
        assert max(move.gain for move in result.alternatives) <= 1e-9


class WholeNumbers:
    """A third objective, whose gains are whole numbers: ties are exact, and there are many."""

    sign = 1
    scale = 1.0

    def __init__(self, rng, num_silos):
        half = np.triu(rng.integers(-2, 3, (num_silos, num_silos)), 1).astype(float)
        self.pair = (half + half.T)[None]
        self.single = np.ones((1, num_silos))

    def gain(self, single, pair):
        return pair[0]

    def member_values(self, members):
        return self.pair[0][np.ix_(members, members)].sum(axis=1)


def test_agglomerative_takes_the_first_of_equals_at_every_merge():
    rng = np.random.default_rng(12)
    for _ in range(200):
        objective = WholeNumbers(rng, 9)
        assert agglomerative(objective).groups == plain_search(objective, 9)


def test_agglomerative_at_scale_equals_the_plain_search():
    """The bookkeeping of best partners against a search over all pairs at every merge."""
    rng = np.random.default_rng(10)
    for num_silos, alpha in [(40, 1e2), (60, 1e3), (60, 1e6)]:
        updates, sizes = random_updates(rng, num_silos), random_sizes(rng, num_silos)
        objective = hcct(updates, sizes, alpha)
        assert agglomerative(objective).groups == plain_search(objective, num_silos)


def plain_search(objective, num_silos):
    groups = [[silo] for silo in range(num_silos)]
    value = {}

    def total(group):
        key = tuple(sorted(group))
        if key not in value:
            value[key] = float(objective.member_values(key).sum())
        return value[key]

    while len(groups) > 1:
        pairs = itertools.combinations(range(len(groups)), 2)
        gain, a, b = max(
            (
                (total(groups[a] + groups[b]) - total(groups[a]) - total(groups[b]), a, b)
                for a, b in pairs
            ),
            key=lambda entry: entry[0],
        )
        if gain <= 1e-12 * objective.scale:
            break
        groups[a] = groups[a] + groups[b]
        del groups[b]
    return sorted(sorted(group) for group in groups)


def test_optimal_refuses_more_than_16_silos():
    objective = HCCTUtility.from_gram(np.eye(17), [1] * 17, alpha=1)
    with pytest.raises(ValueError, match=r"must be in \[1, 16\]. Got 17"):
        optimal(objective)


def test_optimal_at_16_silos():
    rng = np.random.default_rng(11)
    objective = fedcollab(rng, 16)[-1]
    best = optimal(objective)
    other = relocation(objective, rng=rng, num_restarts=5)
    assert best.objective <= other.objective + 1e-9
    assert sorted(silo for group in best.groups for silo in group) == list(range(16))


def test_solve_refuses_unknown_names_and_relocation_without_generator():
    objective = HCCTUtility.from_gram(np.eye(2), [1, 1], alpha=1)
    with pytest.raises(ValueError, match="Got 'greedy'"):
        solve(objective, solver="greedy")
    with pytest.raises(ValueError, match="rng must be a numpy Generator"):
        solve(objective, solver="relocation")
    with pytest.raises(ValueError, match="num_restarts must be in"):
        relocation(objective, rng=np.random.default_rng(0), num_restarts=0)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups", [[[0]], [[0, 1], [1]], [[0, 1], []], [[0, 2]], [[0, 1], [2]], [[-1, 0]]]
)
def test_evaluate_refuses_what_is_no_partition(groups):
    with pytest.raises(ValueError, match="groups must be"):
        evaluate(HCCTUtility.from_gram(np.eye(2), [1, 1], alpha=1), groups)


@pytest.mark.parametrize(
    ("gram", "sizes", "alpha", "message"),
    [
        (np.eye(2), [1, 1], -1, "alpha must be finite and >= 0"),
        (np.eye(2), [1, 1], np.nan, "alpha must be finite and >= 0"),
        (np.eye(2), [1, 1], [1, 2, 3], "alpha must be one number or one for each of 2"),
        (np.eye(2), [1], 1, "sizes must be one number for each of 2"),
        (np.ones((2, 3)), [1, 1], 1, "gram must be a square matrix"),
        ([[1, 0], [0, -1]], [1, 1], 1, "gram must be non-negative on its diagonal"),
        ([[1, 0.5], [-0.5, 1]], [1, 1], 1, "gram must be symmetric"),
    ],
)
def test_hcct_refuses_bad_input(gram, sizes, alpha, message):
    with pytest.raises(ValueError, match=message):
        HCCTUtility.from_gram(gram, sizes, alpha=alpha)


@pytest.mark.parametrize("c", [0, -1, np.inf, np.nan])
def test_fedcollab_refuses_bad_c(c):
    with pytest.raises(ValueError, match="c must be finite and > 0"):
        FedCollabBound.from_distances(np.zeros((2, 2)), [1, 1], c=c)


def test_fedcollab_refuses_a_distance_to_oneself():
    with pytest.raises(ValueError, match=r"0 on the diagonal. Got 0.5 for silo 1"):
        FedCollabBound.from_distances(np.diag([0, 0.5]), [1, 1], c=1)


def test_results_are_plain_and_frozen():
    result = agglomerative(HCCTUtility.from_gram(np.eye(3), [1, 2, 3], alpha=1))
    assert all(type(value) is float for value in result.values)
    with pytest.raises(AttributeError):
        result.objective = 0.0


# --- a number of groups that is given -------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 9, 12])
def test_as_many_groups_as_asked_and_none_better_by_one_move(num_groups):
    rng = np.random.default_rng(31)
    for _ in range(20):
        objective = hcct(*hcct_case(rng, 9))
        merged, found = (
            agglomerative(objective, num_groups=num_groups),
            with_groups(objective, num_groups),
        )
        assert len(merged.groups) == len(found.groups) == min(num_groups, 9)
        assert found.objective >= merged.objective - 1e-12
        for silo, gains in enumerate(move_gains(objective, found.groups)):
            (home,) = [group for group in found.groups if silo in group]
            assert len(home) == 1 or gains[:-1].max(initial=-np.inf) <= 1e-9


def test_merging_to_a_number_of_groups_goes_on_where_it_costs_and_ends_where_it_gains():
    """Three opposite pairs: alone is best without data hunger, together with."""
    updates = np.kron(np.eye(3), [[1.0, 0.0], [1.0, 0.1]])
    for alpha, free in ((0.0, 6), (1e6, 1)):
        objective = HCCTUtility.from_gram(updates @ updates.T, [10] * 6, alpha=alpha)
        assert len(agglomerative(objective).groups) == free
        assert with_groups(objective, 3).groups == [[0, 1], [2, 3], [4, 5]]
