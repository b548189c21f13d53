"""FedCollab: the bound, its minimiser, and the report of how firm the structure is."""

from __future__ import annotations

import numpy as np
import partition_literal as literal
import pytest

from coterie.strategies.partition import fedcollab, solvers
from coterie.strategies.partition.objectives import FedCollabBound

bound_of = FedCollabBound.from_distances


def label_shift():
    """True distances and sizes of the paper's FashionMNIST label shift.

    Silos 0-4, 5-9, 10-14, 15-19 hold labels 0-3, 1-4, 5-8, 6-9; a label that only one group of
    its pair holds is half as frequent there as the others (1/7 and 2/7 of the samples).
    """
    shares = np.zeros((4, 10))
    shares[0, :4], shares[1, 1:5] = [1, 2, 2, 2], [2, 2, 2, 1]
    shares[2, 5:9], shares[3, 6:] = [1, 2, 2, 2], [2, 2, 2, 1]
    shares = np.repeat(shares / 7, 5, axis=0)
    distances = np.abs(shares[:, None] - shares).sum(axis=2) / 2
    return distances, [2100] * 10 + [14] * 10


def random_case(rng, num_silos):
    half = np.triu(rng.random((num_silos, num_silos)), 1)
    return half + half.T, rng.integers(10, 1000, num_silos)


def test_example_of_the_docstring():
    distances = [[0, 0.5], [0.5, 0]]
    bound = bound_of(distances, [100, 100], c=10)
    assert fedcollab.objective(bound, [[0], [1]]) == pytest.approx(2)
    together = fedcollab.objective(bound, [[0, 1]])
    assert together == pytest.approx(2 * (0.5**0.5 + 0.25))


@pytest.mark.parametrize("solver", ["relocation", "agglomerative"])
def test_label_shift_of_the_paper(solver):
    distances, sizes = label_shift()
    rng = np.random.default_rng(0)
    bound = bound_of(distances, sizes, c=10)
    result = solvers.solve(bound, solver=solver, rng=rng, num_restarts=20)
    assert result.groups == [list(range(5)), list(range(5, 10)), list(range(10, 20))]
    report = fedcollab.report(bound, result.groups, rng=rng, num_restarts=10)
    assert report.chosen == pytest.approx(result.objective)
    assert report.chosen < report.second_best <= min(report.alone, report.together)
    # Known from an independent calculation with these distances.
    assert (report.c_low, report.c_high) == pytest.approx((2.04, 12.33), abs=0.01)


def test_report_equals_the_poster_and_finds_the_second_best():
    rng = np.random.default_rng(1)
    exact = 0
    for _ in range(10):
        distances, sizes = random_case(rng, 6)
        values = sorted(
            (literal.fedcollab_bound(distances, sizes, groups, 5.0), sorted(map(sorted, groups)))
            for groups in literal.set_partitions(list(range(6)))
        )
        bound = bound_of(distances, sizes, c=5.0)
        result = solvers.solve(bound, solver="optimal")
        report = fedcollab.report(bound, result.groups, solver="optimal")
        assert report.groups == values[0][1]
        assert report.chosen == pytest.approx(values[0][0])
        everyone = [list(range(6))]
        alone = [[i] for i in range(6)]
        for value, groups in [(report.together, everyone), (report.alone, alone)]:
            expected = literal.fedcollab_bound(distances, sizes, groups, 5.0)
            assert value == pytest.approx(expected)
        assert report.second_best >= values[1][0] - 1e-12
        exact += report.second_groups == values[1][1]
    assert exact >= 8


def test_interval_of_c_is_exact_with_the_optimal_solver():
    rng = np.random.default_rng(2)
    for _ in range(10):
        distances, sizes = random_case(rng, 7)

        def groups_at(c, distances=distances, sizes=sizes):
            return solvers.solve(bound_of(distances, sizes, c=c), solver="optimal").groups

        groups = groups_at(6.0)
        bound = bound_of(distances, sizes, c=6.0)
        report = fedcollab.report(bound, groups, solver="optimal")
        low, high = report.c_low, report.c_high
        assert low <= 6 <= high
        for c in np.linspace(max(low, 1e-3) * 1.0001, min(high, 1e3) / 1.0001, 5):
            assert groups_at(c) == groups
        if low > 0:
            assert groups_at(low * 0.9999) != groups
        if high < np.inf:
            assert groups_at(high * 1.0001) != groups


def test_interval_is_nan_for_a_structure_that_is_beaten():
    distances, sizes = label_shift()
    bound = bound_of(distances, sizes, c=10)
    report = fedcollab.report(
        bound, [list(range(20))], rng=np.random.default_rng(0), num_restarts=5
    )
    assert np.isnan([report.c_low, report.c_high]).all()


def test_report_of_one_silo():
    report = fedcollab.report(bound_of([[0.0]], [25], c=10), [[0]], rng=np.random.default_rng(0))
    assert report.chosen == report.alone == report.together == pytest.approx(2.0)
    assert (report.second_best, report.second_groups) == (np.inf, None)
    assert (report.c_low, report.c_high) == (0.0, np.inf)


def test_relocation_needs_a_generator():
    with pytest.raises(ValueError, match="rng must be"):
        solvers.solve(bound_of(np.zeros((2, 2)), [1, 1], c=1), solver="relocation")


@pytest.mark.parametrize("c", [0, -3.0, np.nan])
def test_bad_c_is_refused(c):
    with pytest.raises(ValueError, match="c must be finite and > 0"):
        bound_of(np.zeros((2, 2)), [1, 1], c=c)
    with pytest.raises(ValueError, match="c must be finite and > 0"):
        bound_of(np.zeros((2, 2)), [1, 1], c=1).with_c(c)
