"""What every partition algorithm must do, one table: a new algorithm is one more row."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.strategies.partition import fedgroup
from coterie.strategies.partition.clustering import hierarchical, k_means
from coterie.strategies.partition.gram import gram as gram_of
from coterie.strategies.partition.objectives import FedCollabBound, HCCTUtility
from coterie.strategies.partition.solvers import best_partition, solve


def run_hcct(search, **how):
    """`wish` asks for no, the natural, or all collaboration."""

    def run(gram, sizes, rng, wish="natural"):
        alpha = {"none": 0.0, "natural": 60.0, "all": 1e9}[wish]
        objective = HCCTUtility.from_gram(gram, sizes, alpha=alpha)
        return search(objective, rng=rng, **how).groups

    return run


def run_fedcollab(solver):
    def run(gram, sizes, rng, wish="natural"):
        gram = np.asarray(gram, dtype=float)
        norms = np.sqrt(np.maximum(gram.diagonal(), 0))
        outer = np.outer(norms, norms)
        cosines = np.divide(gram, outer, out=np.zeros_like(gram), where=outer != 0)
        distances = (1 - cosines) / 2
        np.fill_diagonal(distances, 0)
        distances[np.isnan(gram)] = np.nan
        c = {"none": 1e-9, "natural": 6.0, "all": 1e6}[wish]
        bound = FedCollabBound.from_distances(distances, sizes, c=c)
        return solve(bound, solver=solver, rng=rng, num_restarts=10).groups

    return run


def run_hierarchical(metric, *thresholds):
    def run(gram, sizes, rng, wish="natural"):
        distance = dict(zip(("none", "natural", "all"), thresholds, strict=True))[wish]
        return hierarchical(gram, metric=metric, linkage="average", max_distance=distance)

    return run


def run_k_means(gram, sizes, rng, wish="natural"):
    num_silos = len(gram)
    num_groups = {"none": num_silos, "natural": min(3, num_silos), "all": min(1, num_silos)}
    return k_means(gram, num_groups=num_groups[wish], rng=rng)


def run_fedgroup(measure):
    def run(gram, sizes, rng, wish="natural"):
        num_silos = len(gram)
        num_groups = {"none": num_silos, "natural": min(3, num_silos), "all": min(1, num_silos)}
        return fedgroup.cold_start(gram, num_groups=num_groups[wish], measure=measure, rng=rng)

    return run


ALGORITHMS = {
    "hcct agglomerative": run_hcct(solve, solver="agglomerative", num_restarts=10),
    "hcct relocation": run_hcct(solve, solver="relocation", num_restarts=10),
    "hcct optimal": run_hcct(solve, solver="optimal", num_restarts=10),
    "hcct best, exact": run_hcct(best_partition, exact=16),
    "hcct best, searched": run_hcct(best_partition, exact=0),
    "fedcollab agglomerative": run_fedcollab("agglomerative"),
    "fedcollab relocation": run_fedcollab("relocation"),
    "fedcollab optimal": run_fedcollab("optimal"),
    "fedgroup edc": run_fedgroup("edc"),
    "fedgroup madc": run_fedgroup("madc"),
    "k-means": run_k_means,
    "hierarchical cosine": run_hierarchical("cosine", 1e-9, 0.8, 2.0),
    "hierarchical euclidean": run_hierarchical("euclidean", 1e-9, 33.0, 1e6),
}
WITH_SIZES = [name for name in ALGORITHMS if name.startswith(("hcct", "fedcollab"))]
HIDDEN = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]

every = pytest.mark.parametrize("name", ALGORITHMS)


def silos(seed=0, num_silos=9):
    """Gram matrix and sizes of silos in three hidden groups."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((3, 400))
    updates = 1.5 * centres[np.arange(num_silos) % 3] + rng.standard_normal((num_silos, 400))
    return gram_of(updates), rng.integers(80, 120, num_silos)


def run(name, gram, sizes, seed=0, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return ALGORITHMS[name](gram, sizes, np.random.default_rng(seed), **options)


@every
def test_hidden_groups_are_found(name):
    assert run(name, *silos()) == HIDDEN


@every
@settings(max_examples=3, deadline=None)
@given(order=st.permutations(range(9)), seed=st.integers(0, 3))
def test_names_and_order_of_silos_do_not_matter(name, order, seed):
    gram, sizes = silos(seed)
    there = run(name, gram[np.ix_(order, order)], sizes[list(order)])
    back = sorted(sorted(order[silo] for silo in group) for group in there)
    assert back == run(name, gram, sizes)


@every
def test_same_seed_same_result(name):
    rng = np.random.default_rng(1)
    updates = rng.standard_normal((12, 30))
    gram, sizes = gram_of(updates), rng.integers(10, 200, 12)
    assert run(name, gram, sizes, seed=5) == run(name, gram, sizes, seed=5)


@every
def test_inputs_are_unchanged(name):
    gram, sizes = silos()
    kept = gram.copy(), sizes.copy()
    run(name, gram, sizes)
    assert (gram == kept[0]).all()
    assert (sizes == kept[1]).all()


@every
def test_groups_are_sorted_plain_lists_and_a_partition(name):
    rng = np.random.default_rng(2)
    groups = run(name, gram_of(rng.standard_normal((10, 8))), rng.integers(5, 500, 10))
    assert groups == sorted(sorted(group) for group in groups)
    assert sorted(silo for group in groups for silo in group) == list(range(10))
    assert all(type(silo) is int for group in groups for silo in group)


@every
@pytest.mark.parametrize("wish", ["none", "natural", "all"])
def test_one_silo(name, wish):
    assert run(name, [[4.0]], [10], wish=wish) == [[0]]


@every
@pytest.mark.parametrize("wish", ["natural", "all"])
@pytest.mark.parametrize("num_silos", [2, 3, 7])
def test_identical_updates_go_together(name, wish, num_silos):
    updates = np.tile(np.random.default_rng(3).standard_normal(1000).astype(np.float32), (7, 1))
    result = run(name, gram_of(updates[:num_silos]), [100] * num_silos, wish=wish)
    assert result == [list(range(num_silos))]


@every
def test_a_zero_update_is_placed_once(name):
    gram, sizes = silos()
    gram[4] = gram[:, 4] = 0
    groups = run(name, gram, sizes)
    assert sorted(silo for group in groups for silo in group) == list(range(9))


# Where the number of groups is fixed, a zero update may take one of them for itself.
@pytest.mark.parametrize("name", WITH_SIZES)
def test_a_zero_update_leaves_the_other_silos_groups_as_they_are(name):
    gram, sizes = silos()
    gram[4] = gram[:, 4] = 0
    others = [[silo for silo in group if silo != 4] for group in run(name, gram, sizes)]
    assert [group for group in others if group] == [[0, 3, 6], [1, 7], [2, 5, 8]]


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n.startswith(("hcct", "fedgroup"))])
def test_a_zero_update_is_warned_about(name):
    gram, sizes = silos()
    gram[4] = gram[:, 4] = 0
    with pytest.warns(RuntimeWarning, match=r"Zero update of silos \[4\]"):
        ALGORITHMS[name](gram, sizes, np.random.default_rng(0))


@every
@pytest.mark.parametrize("seed", range(3))
def test_no_wish_for_data_means_all_alone(name, seed):
    """HCCT's alpha = 0, FedCollab's c near 0, FedGroup's m = N."""
    assert run(name, *silos(seed), wish="none") == [[silo] for silo in range(9)]


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n.startswith("hcct")])
def test_alpha_zero_leaves_even_identical_updates_alone(name):
    """Rounding of the inner products must not look like a benefit."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        updates = np.tile(rng.standard_normal(997).astype(np.float32), (9, 1))
        gram = gram_of(updates) * (1 + 1e-7 * rng.standard_normal((9, 9)))
        result = run(name, (gram + gram.T) / 2, rng.integers(1, 1000, 9), wish="none")
        assert result == [[silo] for silo in range(9)]


@every
@pytest.mark.parametrize("seed", range(3))
def test_boundless_wish_for_data_means_all_together(name, seed):
    assert run(name, *silos(seed), wish="all") == [list(range(9))]


@every
def test_no_silo_is_refused(name):
    with pytest.raises(ValueError, match="at least one silo"):
        run(name, np.empty((0, 0)), [])


@every
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_is_refused(name, value):
    gram, sizes = silos()
    gram[1, 2] = gram[2, 1] = value
    with pytest.raises(ValueError, match=r"must be (finite|square)"):
        run(name, gram, sizes)


@pytest.mark.parametrize("name", WITH_SIZES)
@pytest.mark.parametrize("size", [0, -5, np.nan, np.inf])
def test_bad_sizes_are_refused(name, size):
    gram, sizes = silos()
    sizes = sizes.astype(float)
    sizes[6] = size
    with pytest.raises(ValueError, match=r"sizes must be finite and > 0. Got .* for silo 6"):
        run(name, gram, sizes)


def test_imports_need_neither_flwr_nor_torch_nor_scikit_learn():
    code = """
import sys
for name in ("flwr", "torch", "torchvision", "sklearn", "scipy"):
    sys.modules[name] = None
import coterie.strategies.partition
from coterie.strategies.partition import fedcollab, fedgroup, gram, hcct, objectives, solvers
utility = objectives.HCCTUtility.from_gram(gram.gram([[1.0, 0.0], [1.0, 0.0]]), [9, 9], alpha=9)
assert solvers.agglomerative(utility).groups == [[0, 1]]
"""
    root = Path(__file__).parents[4]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
