"""FedGroup: EDC and MADC equal the literal formulas; cold starts of groups and newcomers."""

from __future__ import annotations

import warnings

import numpy as np
import partition_literal as literal
import pytest

from coterie.strategies.partition import _check, fedgroup


def random_updates(seed, num_silos=8, num_parameters=40):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_silos, num_parameters)) * rng.uniform(0.1, 10, (num_silos, 1))


def grouped(num_silos=12, num_groups=3, seed=0, num_parameters=500):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_groups, num_parameters))
    noise = rng.standard_normal((num_silos, num_parameters))
    return centres[np.arange(num_silos) % num_groups] + noise


def hidden(num_silos=12, num_groups=3):
    return [list(range(k, num_silos, num_groups)) for k in range(num_groups)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_directions", [1, 3, 8])
def test_edc_equals_full_svd(seed, num_directions):
    updates = random_updates(seed)
    ours = fedgroup.edc(updates @ updates.T, num_directions)
    theirs = literal.edc_embedding(updates, num_directions)
    signs = np.sign((ours * theirs).sum(axis=0))
    assert ours == pytest.approx(theirs * signs, abs=1e-8)
    largest = np.abs(ours * np.linalg.norm(updates, axis=1)[:, None]).argmax(axis=0)
    assert (ours[largest, np.arange(num_directions)] > 0).all()


def test_edc_beyond_the_rank_is_zero():
    updates = np.outer([1.0, 2.0, 3.0], [1.0, 1.0])
    result = fedgroup.edc(updates @ updates.T, 3)
    assert result == pytest.approx(np.array([[1, 0, 0]] * 3), abs=1e-7)


@pytest.mark.parametrize("seed", range(10))
def test_madc_equals_three_loops(seed):
    updates = random_updates(seed, num_silos=3 + seed)
    updates[2] *= seed > 0
    cosines = _check.cosines(updates @ updates.T)
    assert fedgroup.madc(cosines) == pytest.approx(literal.madc(updates), abs=1e-12)


# --- cold start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_labels_equal_clustering_of_the_literal_embedding(measure):
    from sklearn.cluster import AgglomerativeClustering, KMeans

    for seed in range(5):
        updates = grouped(seed=seed, num_silos=10)
        gram, rng = updates @ updates.T, np.random.default_rng(0)
        ours = fedgroup.cold_start(gram, num_groups=3, measure=measure, rng=rng)
        if measure == "edc":
            points = literal.edc_embedding(updates, 3)
            labels = KMeans(3, n_init=10, random_state=0).fit_predict(points)
        else:
            model = AgglomerativeClustering(3, metric="precomputed", linkage="complete")
            labels = model.fit_predict(literal.madc(updates))
        theirs = sorted(np.flatnonzero(labels == k).tolist() for k in range(3))
        assert ours == theirs


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_identical_updates_give_one_group_with_a_warning(measure):
    """Also when rounding makes them differ in the last bits of float32."""
    rng = np.random.default_rng(0)
    gram = np.ones((5, 5)) * (1 + 1e-7 * rng.standard_normal((5, 5)))
    gram = np.tril(gram) + np.tril(gram, -1).T
    with pytest.warns(RuntimeWarning, match="Only 1 different updates: 1 groups, not 3"):
        result = fedgroup.cold_start(gram, num_groups=3, measure=measure, rng=rng)
    assert result == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_zero_updates_are_one_more_direction(measure):
    updates = grouped(num_groups=2, num_silos=6)
    updates[1] = updates[4] = 0
    with pytest.warns(RuntimeWarning, match=r"Zero update of silos \[1, 4\]"):
        result = fedgroup.cold_start(
            updates @ updates.T, num_groups=3, measure=measure, rng=np.random.default_rng(0)
        )
    assert sorted(silo for group in result for silo in group) == list(range(6))
    assert [1, 4] in result


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_all_zero_updates_give_one_group(measure):
    with pytest.warns(RuntimeWarning, match="Only 1 different"):
        result = fedgroup.cold_start(
            np.zeros((4, 4)), num_groups=2, measure=measure, rng=np.random.default_rng(0)
        )
    assert result == [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_groups", [0, 6, 2.0])
def test_cold_start_refuses_bad_numbers(num_groups):
    with pytest.raises(ValueError, match=r"num_groups must be in \[1, 5\]. Got"):
        fedgroup.cold_start(np.eye(5), num_groups=num_groups, rng=np.random.default_rng(0))


def test_cold_start_refuses_unknown_measures():
    with pytest.raises(ValueError, match=r"measure must be edc or madc. Got 'cosine'"):
        fedgroup.cold_start(np.eye(5), num_groups=2, measure="cosine", rng=np.random.default_rng(0))


# --- separation -----------------------------------------------------------------------------------


def test_silhouette_equals_scikit_learn():
    from sklearn.metrics import silhouette_score

    for seed in range(5):
        updates = random_updates(seed, num_silos=9)
        groups = [[0, 3, 5], [1, 2], [4, 6, 7], [8]]
        labels = [next(k for k, g in enumerate(groups) if i in g) for i in range(9)]
        gram = updates @ updates.T
        expected = silhouette_score(literal.madc(updates), labels, metric="precomputed")
        assert fedgroup.silhouette(gram, groups) == pytest.approx(expected)


def test_silhouette_is_high_for_hidden_groups_and_lower_for_wrong_ones():
    updates = grouped()
    gram = updates @ updates.T
    wrong = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert fedgroup.silhouette(gram, hidden()) > 0.85
    assert fedgroup.silhouette(gram, wrong) < 0


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0], [1], [2]]])
def test_silhouette_of_one_group_or_singletons_is_zero(groups):
    assert fedgroup.silhouette(np.eye(3), groups) == 0.0


@pytest.mark.parametrize("measure", ["edc", "madc"])
@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_number_of_groups_is_found(measure, num_groups):
    updates = grouped(num_groups=num_groups, num_parameters=1000)
    rng = np.random.default_rng(0)
    result = fedgroup.choose_num_groups(updates @ updates.T, measure=measure, rng=rng)
    assert result.num_groups == num_groups
    assert list(result.silhouettes) == list(range(2, 12))


@pytest.mark.parametrize("measure", ["edc", "madc"])
@pytest.mark.parametrize("seed", range(5))
def test_number_of_groups_is_one_without_groups(measure, seed):
    updates = grouped(num_groups=1, seed=seed, num_parameters=1000)
    rng = np.random.default_rng(0)
    result = fedgroup.choose_num_groups(updates @ updates.T, measure=measure, rng=rng)
    assert result.num_groups == 1


@pytest.mark.parametrize("gram", [[[1.0]], np.eye(2), np.ones((5, 5)), np.zeros((5, 5))])
def test_number_of_groups_of_degenerate_updates_is_one(gram):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fedgroup.choose_num_groups(gram, rng=np.random.default_rng(0))
    assert result.num_groups == 1


# --- newcomers ------------------------------------------------------------------------------------


def assigned(inner, norms, norm):
    return fedgroup.assign(fedgroup.similarities(inner, norms, norm))


def test_assign_equals_eq_9():
    rng = np.random.default_rng(0)
    for _ in range(200):
        directions, update = rng.standard_normal((4, 10)), rng.standard_normal(10)
        directions *= rng.uniform(0.1, 10, (4, 1))
        norms = np.linalg.norm(directions, axis=1)
        result = assigned(directions @ update, norms, float(np.linalg.norm(update)))
        assert result == literal.assignment(directions, update)


def test_direction_norms_are_those_of_the_mean_updates():
    updates = random_updates(0)
    groups = [[5, 1], [0, 2, 7]]
    expected = [np.linalg.norm(updates[group].mean(axis=0)) for group in groups]
    assert fedgroup.direction_norms(updates @ updates.T, groups) == pytest.approx(expected)


def test_assign_of_a_zero_update_is_the_first_group_with_a_warning():
    with pytest.warns(RuntimeWarning, match="Zero update of a newcomer"):
        assert assigned([0.0, 0.0], [1.0, 2.0], 0.0) == 0


def test_zero_directions_have_cosine_zero():
    assert fedgroup.similarities([0.0, -1.0], [0.0, 1.0], 2.0).tolist() == [0.0, -0.5]
    assert assigned([0.0, -1.0], [0.0, 1.0], 2.0) == 0


@pytest.mark.parametrize(
    ("inner", "norms", "norm"),
    [
        ([], [], 1.0),
        ([1.0], [1.0, 2.0], 1.0),
        ([np.nan], [1.0], 1.0),
        ([1.0], [-1.0], 1.0),
        ([1.0], [1.0], -1.0),
        ([1.0], [1.0], np.inf),
        ([1.0, 2.0], 1.0, 1.0),
    ],
)
def test_similarities_refuse_bad_input(inner, norms, norm):
    with pytest.raises(ValueError, match="must be"):
        fedgroup.similarities(inner, norms, norm)
