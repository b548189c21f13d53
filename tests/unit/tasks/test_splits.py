"""Splits: every kind is a partition of (a part of) the samples, seeded, and refuses nonsense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.tasks import TaskError, load_task
from coterie.tasks import splits as s
from coterie.tasks.splits import shares


def by(draw, **keys):
    """A split of labels by the shares that one kind draws for their classes."""

    def split(y, rng):
        return s.cut(y, draw(shares.count_classes(y), **keys, rng=rng), rng=rng)

    return split


SPLITS = {
    "iid": lambda y, rng: s.cut(y, shares.iid_shares(7), rng=rng),
    "sizes": lambda y, rng: s.cut(y, shares.sizes_shares([50, 1, 20], len(y)), rng=rng),
    "half_normal": by(shares.half_normal_shares, silos=9, min_samples=1),
    "dirichlet": by(shares.dirichlet_shares, silos=6, alpha=0.5, min_samples=1),
    "classes_per_silo": by(shares.classes_per_silo_shares, silos=8, classes=3),
    "one_class_shards": by(shares.one_class_shards_shares, silos=5, shards=20),
    "power_law": by(shares.power_law_shares, silos=12, classes=2, base=2, sigma=2.0),
    "label_groups": lambda y, rng: s.cut(
        y,
        shares.shrink(
            shares.label_groups_shares(
                shares.count_classes(y), 4, groups=[[0, 1], [1, 2]], own_share=0.25
            ),
            2,
            0.5,
        ),
        rng=rng,
    ),
    "three_silos": lambda y, rng: s.cut(
        y, shares.three_silos_shares(shares.count_classes(y), rng=rng)[0], rng=rng
    ),
}
CONFIGS = {
    "iid": {"silos": 5},
    "sizes": {"silos": 3, "sizes": "60,30x2"},
    "half-normal": {"silos": 5, "min-samples": 5},
    "dirichlet": {"silos": 5, "dirichlet-alpha": 1.0, "min-samples": 10},
    "classes-per-silo": {"silos": 5},
    "one-class-shards": {"silos": 5, "shards": 20},
    "power-law": {"silos": 10, "base": 4},
    "label-groups": {"silos": 4, "small-from": 2, "small-share": 0.1},
    "three-silos": {},
}
labels_of_five = st.lists(st.integers(0, 4), min_size=60, max_size=150).map(
    lambda drawn: np.concatenate([np.array(drawn), np.repeat(np.arange(5), 20)])
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(per_class: int, num_classes: int = 10, seed: int = 0) -> np.ndarray:
    return rng(seed).permutation(np.repeat(np.arange(num_classes), per_class))


def assert_disjoint(parts: list[np.ndarray], available: int) -> None:
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    assert joined.min() >= 0
    assert joined.max() < available
    assert all((np.diff(part) > 0).all() for part in parts)


# --- common properties


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=15, deadline=None)
@given(labels=labels_of_five, seed=st.integers(0, 2**32))
def test_a_split_is_disjoint_seeded_and_leaves_its_input_alone(name, labels, seed):
    before = labels.copy()
    parts = SPLITS[name](labels, rng(seed))
    again = SPLITS[name](labels, rng(seed))
    assert_disjoint(parts, len(labels))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert np.array_equal(labels, before)


@pytest.mark.parametrize(
    "name", ["iid", "half_normal", "dirichlet", "one_class_shards", "power_law", "three_silos"]
)
def test_nothing_is_left_out_where_the_kind_uses_everything(name):
    labels = balanced(40, 5)
    assert sum(len(part) for part in SPLITS[name](labels, rng())) == len(labels)


@pytest.mark.parametrize("name", ["iid", "half_normal", "dirichlet", "one_class_shards"])
def test_another_seed_gives_another_split(name):
    labels = balanced(40, 5)
    one, other = (SPLITS[name](labels, rng(seed)) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    count=st.integers(1, 200),
    scale=st.floats(0.1, 1.0),
)
def test_every_silo_gets_its_exact_share_rounded_up_or_down(weights, count, scale):
    wanted = np.array(weights)[:, None] * scale / max(sum(weights), 1e-9)
    parts = s.cut(np.zeros(count, dtype=int), wanted, rng=rng())
    for part, share in zip(parts, wanted[:, 0], strict=True):
        assert abs(len(part) - share * count) < 1 + 1e-6


# --- each kind


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(part) for part in SPLITS["iid"](balanced(10), rng())]
    assert max(sizes) - min(sizes) <= 1


def test_half_normal_sizes_have_the_distribution_of_an_absolute_normal():
    split = by(shares.half_normal_shares, silos=2000, min_samples=1)
    sizes = np.array([len(part) for part in split(balanced(10000), rng())])
    # of |N(0, 1)|: deviation / mean = sqrt(π / 2 − 1) = 0.756
    assert sizes.std() / sizes.mean() == pytest.approx(0.756, abs=0.03)
    assert sizes.min() >= 1


def test_small_alpha_concentrates_classes_and_large_alpha_does_not():
    labels = balanced(500)
    spread = {}
    for alpha in (0.05, 100.0):
        split = by(shares.dirichlet_shares, silos=10, alpha=alpha, min_samples=1)
        parts = split(labels, rng())
        largest = [np.bincount(labels[p], minlength=10).max() / len(p) for p in parts]
        spread[alpha] = np.mean(largest)
    assert spread[0.05] > 0.5
    assert spread[100.0] < 0.2


@pytest.mark.parametrize("alpha", [1e-4, 0.01, 1e6])
def test_dirichlet_works_at_its_ends(alpha):
    split = by(shares.dirichlet_shares, silos=20, alpha=alpha, min_samples=1)
    parts = split(balanced(100, 26), rng(3))
    assert min(len(part) for part in parts) >= 1


@settings(max_examples=30, deadline=None)
@given(silos=st.integers(1, 30), classes=st.integers(1, 10), seed=st.integers(0, 99))
def test_classes_per_silo_gives_that_many_to_everyone_and_uses_classes_evenly(silos, classes, seed):
    labels = balanced(60)
    split = by(shares.classes_per_silo_shares, silos=silos, classes=classes)
    parts = split(labels, rng(seed))
    held = [set(labels[part]) for part in parts]
    assert all(len(own) == classes for own in held)
    holders = np.bincount([c for own in held for c in own], minlength=10)
    assert holders.max() - holders.min() <= 1


def test_one_class_shards_are_whole_and_of_one_class():
    labels = balanced(200)
    parts = by(shares.one_class_shards_shares, silos=10, shards=100)(labels, rng())
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert (counts % 20 == 0).all()  # a shard is 2,000 / 100 samples
    assert counts.sum() == 2000
    assert (counts.sum(axis=1) >= 20).all()


def test_power_law_has_fedgroups_two_neighbouring_classes_and_its_long_tail():
    labels = balanced(6900, seed=1)
    split = by(shares.power_law_shares, silos=1000, classes=2, base=5, sigma=2.0)
    parts = split(labels, rng())
    for user in (0, 9, 537):
        assert set(labels[parts[user]]) == {user % 10, (user + 1) % 10}
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 69000
    assert sizes.min() >= 10
    assert np.median(sizes) < 40 < sizes.mean() < 0.1 * sizes.max()


def test_label_groups_reproduce_fedcollabs_numbers():
    labels, tests = balanced(6000), balanced(1000, seed=1)
    found = s.make_split({"kind": "label-groups", "silos": 20}, labels, test_labels=tests)
    counts = [np.bincount(labels[share.train], minlength=10).tolist() for share in found]
    assert counts[:5] == [[300, 600, 600, 600, 0, 0, 0, 0, 0, 0]] * 5
    assert counts[5:10] == [[0, 600, 600, 600, 300, 0, 0, 0, 0, 0]] * 5
    assert counts[10:15] == [[0, 0, 0, 0, 0, 2, 4, 4, 4, 0]] * 5
    assert counts[15:] == [[0, 0, 0, 0, 0, 0, 4, 4, 4, 2]] * 5
    assert all(len(share.test) == 350 for share in found)


def test_three_silos_are_hccts_example():
    labels = balanced(100)
    first, second, third = SPLITS["three_silos"](labels, rng())
    assert [len(first), len(second), len(third)] == [100, 400, 500]
    assert set(labels[first]) == set(labels[second])
    assert not set(labels[first]) & set(labels[third])


# --- make_split


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("with_test", [True, False])
def test_every_kind_can_be_had_by_configuration(kind, with_test):
    labels, tests = balanced(40), balanced(30, seed=1)
    config = {"kind": kind, "seed": 3, **CONFIGS[kind]}
    if not with_test:
        config["test-share"] = 0.25
    if kind == "dirichlet" and not with_test:
        config["min-samples"] = 5
    given_tests = tests if with_test else None
    found = s.make_split(config, labels, test_labels=given_tests)
    again = s.make_split(config, labels, test_labels=given_tests)
    trains, held = [x.train for x in found], [x.test for x in found]
    assert_disjoint(trains, len(labels))
    assert_disjoint(held, len(tests) if with_test else len(labels))
    if not with_test:
        assert_disjoint(trains + held, len(labels))
    for one, other in zip(found, again, strict=True):
        assert np.array_equal(one.train, other.train)
        assert np.array_equal(one.test, other.test)


def test_a_silo_is_tested_on_its_own_distribution():
    labels, tests = balanced(500), balanced(100, seed=1)
    config = {"kind": "dirichlet", "silos": 5, "dirichlet-alpha": 0.3, "min-samples": 50}
    for share in s.make_split(config, labels, test_labels=tests):
        train = np.bincount(labels[share.train], minlength=10) / 5
        test = np.bincount(tests[share.test], minlength=10)
        assert np.abs(train - test).max() <= 1.2


def test_test_share_holds_out_that_part_of_each_silo_and_never_all_of_it():
    found = s.make_split({"kind": "iid", "silos": 10, "test-share": 0.1}, balanced(20))
    assert [(len(x.train), len(x.test)) for x in found] == [(18, 2)] * 10
    found = s.make_split({"kind": "iid", "silos": 10, "test-share": 0.99}, balanced(2))
    assert [(len(x.train), len(x.test)) for x in found] == [(1, 1)] * 10


def test_test_all_gives_everyone_the_whole_test_part():
    config = {"kind": "iid", "silos": 4, "test": "all"}
    found = s.make_split(config, balanced(8), test_labels=balanced(3))
    assert all(np.array_equal(x.test, np.arange(30)) for x in found)


def test_samples_takes_only_so_many_in_all():
    config = {"kind": "half-normal", "silos": 20, "samples": 2400, "min-samples": 2}
    found = s.make_split(config, balanced(600), test_labels=balanced(100))
    assert sum(len(x.train) for x in found) == 2400
    assert min(len(x.train) for x in found) >= 2


def test_rotations_and_permutations_go_by_groups_of_silos():
    config = {"kind": "iid", "silos": 8, "rotations": "-25,25,155,205", "permutations": 4}
    found = s.make_split(config, balanced(20), test_labels=balanced(20))
    assert [x.rotation for x in found] == [-25, -25, 25, 25, 155, 155, 205, 205]
    assert found[0].labels is None
    maps = [tuple(x.labels) for x in found[2:]]
    assert maps[0] == maps[1]
    assert len(set(maps)) == 3
    assert all(sorted(names) == list(range(10)) for names in maps)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "kind of split must be one of"),
        ({"kind": "fair"}, "kind of split must be one of"),
        ({"kind": "iid"}, "needs silos"),
        ({"kind": "iid", "silos": 101}, r"silos must be in \[1, 100\]"),
        ({"kind": "iid", "silos": 2, "alpha": 1}, "has no key 'alpha'"),
        ({"kind": "iid", "silos": 2.5}, "'silos' of a split must be of type int"),
        ({"kind": "iid", "silos": "two"}, "'silos' of a split must be of type int"),
        ({"kind": "iid", "silos": 2, "seed": -1}, "seed of a split must be at least 0"),
        ({"kind": "iid", "silos": 2, "samples": 101}, "at most the 100 available"),
        ({"kind": "iid", "silos": 2, "test": "half"}, "'own' or 'all'"),
        ({"kind": "iid", "silos": 2, "permutations": 0}, "permutations must be at least 1"),
        ({"kind": "iid", "silos": 2, "rotations": "left"}, "rotations of a split"),
        ({"kind": "iid", "silos": 2, "test-share": 0.2}, "separate test part"),
        ({"kind": "iid", "silos": 20, "min-samples": 6}, "fewer than 6"),
        ({"kind": "iid", "silos": 40}, "without test samples"),
        ({"kind": "sizes", "silos": 2, "sizes": "50,51"}, "together at most the 100"),
        ({"kind": "sizes", "silos": 3, "sizes": "50,50"}, "3 sizes, as many as silos"),
        ({"kind": "sizes", "silos": 1, "sizes": "many"}, "cannot be read as numbers"),
        (
            {"kind": "half-normal", "silos": 20, "min-samples": 6},
            r"min-samples must be in \[0, 5\]",
        ),
        ({"kind": "dirichlet", "silos": 2, "dirichlet-alpha": 0}, "alpha must be"),
        ({"kind": "dirichlet", "silos": 2, "dirichlet-alpha": float("nan")}, "alpha must be"),
        ({"kind": "dirichlet", "silos": 10, "min-samples": 11}, "no Dirichlet split"),
        ({"kind": "classes-per-silo", "silos": 2, "classes": 11}, r"must be in \[1, 10\]. Got 11"),
        ({"kind": "one-class-shards", "silos": 2, "shards": 9}, "shards must be at least 10"),
        ({"kind": "one-class-shards", "silos": 2, "shards": 101}, "cannot be made from 100"),
        ({"kind": "power-law", "silos": 20, "base": 5}, "too few for 5"),
        ({"kind": "power-law", "silos": 5, "sigma": -1}, "sigma must be at least 0"),
        ({"kind": "label-groups", "silos": 4, "groups": "0,10"}, r"labels in \[0, 9\]"),
        ({"kind": "label-groups", "silos": 1, "groups": "0;1"}, "2 groups for 1 silos"),
        ({"kind": "label-groups", "silos": 4, "groups": "0,0"}, "none of them twice"),
        ({"kind": "label-groups", "silos": 4, "own-share": 0}, "own-share must be"),
        ({"kind": "label-groups", "silos": 4, "small-share": 2}, "small-share in"),
        ({"kind": "three-silos", "silos": 4}, "has 3 silos"),
    ],
)
def test_an_impossible_split_is_refused_with_its_reason(config, says):
    with pytest.raises(TaskError, match=says):
        s.make_split(config, balanced(10), test_labels=balanced(3))


def test_without_a_test_part_a_test_share_is_needed():
    with pytest.raises(TaskError, match="needs test-share"):
        s.make_split({"kind": "iid", "silos": 2}, balanced(10))


@pytest.mark.parametrize("labels", [np.zeros(3), np.zeros((2, 2), int), np.array([-1, 0]), []])
def test_labels_that_are_none_are_refused(labels):
    with pytest.raises(TaskError):
        s.make_split({"kind": "iid", "silos": 1, "test-share": 0.5}, labels)


# --- transforms


def test_a_small_angle_more_than_90_degrees_is_close_to_90_degrees():
    images = rng().integers(0, 256, size=(3, 11, 11, 3)).astype(np.uint8)
    turned, exact = s.rotate(images, 90.001), s.rotate(images, 90)
    assert exact.dtype == np.uint8
    assert np.abs(turned[:, 1:-1, 1:-1] - exact[:, 1:-1, 1:-1]).max() < 1


@settings(max_examples=20, deadline=None)
@given(degrees=st.floats(-720, 720))
def test_turning_there_and_back_restores_a_smooth_image(degrees):
    y, x = np.mgrid[-14:15, -14:15]
    image = (200 * np.exp(-((x - 3) ** 2 + y**2) / 30))[None].astype(np.float32)
    back = s.rotate(s.rotate(image, degrees), -degrees)
    assert np.abs(back - image).max() < 10


def test_turning_is_anticlockwise_and_fills_with_black():
    image = np.zeros((1, 21, 21), dtype=np.float32)
    image[0, 10, 18] = 255.0  # right of the middle
    row, column = np.unravel_index(s.rotate(image, 45.0)[0].argmax(), (21, 21))
    assert (row, column) == (4, 16)  # now above right
    assert s.rotate(np.full((1, 21, 21), 255, np.uint8), 45.0)[0, 0, 0] == 0


def test_a_mirrored_turn_has_no_corners_that_tell_its_angle():
    white = np.full((1, 20, 20, 3), 255, np.uint8)
    turned = s.rotate(white, 25.0, mirrored=True)
    assert np.abs(turned - 255).max() < 1e-2
    image = rng().integers(0, 256, size=(1, 20, 20)).astype(np.uint8)
    wide = np.pad(image, ((0, 0), (20, 20), (20, 20)), mode="symmetric")
    inside = s.rotate(wide, 25.0)[:, 20:40, 20:40]
    assert np.allclose(s.rotate(image, 25.0, mirrored=True), inside, atol=1e-3)


def test_photographs_are_mirrored_where_they_are_turned(tmp_path):
    """And not digits, whose background is black."""
    white = np.full((40, 32, 32, 3), 255, np.uint8)
    for task, images in (("cifar10", white), ("mnist", white[:, :28, :28, 0])):
        y = np.arange(40) % 10
        given = {"x_train": images, "y_train": y, "x_test": images, "y_test": y}
        np.savez(tmp_path / f"{task}.npz", **given)
        data = load_task(task).load({"data": str(tmp_path), "rotation": 25.0})
        assert (data.x_train.min() > 0.99) == (task == "cifar10")


def test_an_angle_that_is_no_number_is_refused():
    with pytest.raises(TaskError, match="finite number of degrees"):
        s.rotate(np.zeros((1, 3, 3)), float("nan"))


def test_permutation_zero_changes_nothing_and_others_are_seeded():
    assert np.array_equal(s.permutation(10, seed=4, number=0), np.arange(10))
    one, again = (s.permutation(10, seed=4, number=2) for _ in range(2))
    assert np.array_equal(one, again)
    assert sorted(one) == list(range(10))
    assert not np.array_equal(one, s.permutation(10, seed=5, number=2))
