"""The digits task: options and their bounds, disjoint silos, shifts of domain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.tasks import SiloData, TaskError, load_task
from coterie.tasks.images.digits import NUM_SAMPLES, Digits


def load(**options: Any) -> SiloData:
    return Digits().load({key.replace("_", "-"): value for key, value in options.items()})


def test_data_has_the_types_shapes_and_range_of_the_contract() -> None:
    data = load(train=30, test=20)
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    assert data.y_train.dtype == data.y_test.dtype == np.int64
    assert data.x_train.shape == (30, 1, 8, 8) and data.x_test.shape == (20, 1, 8, 8)
    assert data.num_classes == 10
    assert data.x_train.min() == 0.0 and data.x_train.max() == 1.0


def test_the_data_is_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(4).permutation(NUM_SAMPLES)[10:40]
    data = load(train=20, test=10, skip=10, split_seed=4)
    x = np.concatenate([data.x_train, data.x_test])[:, 0]
    np.testing.assert_array_equal(x, (bunch.images[order] / 16).astype(np.float32))
    np.testing.assert_array_equal(np.concatenate([data.y_train, data.y_test]), bunch.target[order])


def test_disjoint_ranges_share_no_sample_and_together_are_the_whole() -> None:
    from coterie.tasks.images.digits import _digits

    parts = [load(train=599 - 70, test=70, skip=skip) for skip in (0, 599, 1198)]
    x = np.concatenate([np.concatenate([part.x_train, part.x_test]) for part in parts])
    assert len(x) == NUM_SAMPLES
    whole = (_digits()[0] / 16).astype(np.float32).reshape(NUM_SAMPLES, -1)
    rows = x.reshape(NUM_SAMPLES, -1)
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], whole[np.lexsort(whole.T)])


def test_the_same_options_give_the_same_data_and_another_seed_another_order() -> None:
    np.testing.assert_array_equal(load().x_train, load().x_train)
    assert not np.array_equal(load().x_train, load(split_seed=1).x_train)


def test_data_is_the_silos_own_copy() -> None:
    """Changing it changes nobody else's."""
    first = load()
    first.x_train[:] = 0
    first.y_train[:] = 0
    assert load().x_train.any() and load().y_train.any()


@pytest.mark.parametrize("turns", [1, 2, 3, -1, 4])
def test_rotation_turns_every_image_anticlockwise(turns: int) -> None:
    upright, turned = load(train=5, test=3), load(train=5, test=3, rotation=90 * turns)
    for before, after in ((upright.x_train, turned.x_train), (upright.x_test, turned.x_test)):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(np.rot90(one[0], turns), other[0])
    np.testing.assert_array_equal(upright.y_train, turned.y_train)


@pytest.mark.parametrize("shift", [3, 10, -1, 13])
def test_label_shift_is_modulo_ten_and_leaves_images(shift: int) -> None:
    plain, shifted = load(train=40), load(train=40, label_shift=shift)
    np.testing.assert_array_equal(shifted.y_train, (plain.y_train + shift) % 10)
    np.testing.assert_array_equal(shifted.y_test, (plain.y_test + shift) % 10)
    np.testing.assert_array_equal(shifted.x_train, plain.x_train)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": 0}, "train must be at least 1. Got 0"),
        ({"test": 0}, "test must be at least 1. Got 0"),
        ({"train": -5}, "train must be at least 1"),
        ({"skip": -1}, "skip"),
        ({"skip": 1700, "train": 90, "test": 8}, "1797"),
        ({"rotation": 45}, "multiple of 90. Got 45"),
        ({"split-seed": -1}, "split-seed must be at least 0. Got -1"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"train": "many"}, "'train' of task 'digits' must be of type int. Got 'many'"),
        ({"train": None}, "must be of type int"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said.replace(".", r"\.")):
        Digits().load(options)


def test_the_last_sample_can_be_used() -> None:
    assert len(load(skip=1700, train=90, test=7).x_test) == 7


def test_the_model_is_the_networks_split_in_two() -> None:
    torch.manual_seed(0)
    model = load_task("digits").model()
    assert sum(p.numel() for p in model.parameters()) == 6090
    x = torch.rand(3, 1, 8, 8)
    assert model(x).shape == (3, 10)
    assert torch.equal(model(x), model.head(model.representation(x)))
    heads = [name for name in model.state_dict() if name.startswith(Digits.head)]
    assert heads == ["head.weight", "head.bias"]
