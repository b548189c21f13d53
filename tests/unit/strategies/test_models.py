"""Arithmetic on models, beside the same in plain numpy."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.strategies.rounds.models import (
    COLUMNS,
    SUMMED,
    accumulate,
    difference,
    distance,
    is_statistic,
    weighted_mean,
)
from tests.conftest import assert_equal_models


def model(value: float, counter: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    return {
        "w": np.full((2, 3), value, dtype),
        "bn.running_mean": np.full(3, 10 * value, dtype),
        "bn.num_batches_tracked": np.array(counter, np.int64),
    }


def test_the_mean_is_weighted_and_keeps_types_shapes_and_order() -> None:
    mean = weighted_mean([model(1.0), model(4.0)], [2, 1])
    assert_equal_models(mean, model(2.0))


def test_the_longest_training_members_counter_is_taken() -> None:
    mean = weighted_mean([model(0, 7), model(0, 12), model(0, 3)], [1, 1, 100])
    assert mean["bn.num_batches_tracked"] == 12
    assert mean["bn.num_batches_tracked"].dtype == np.int64
    assert mean["bn.num_batches_tracked"].shape == ()


def test_one_model_is_its_own_mean() -> None:
    only = model(3.0)
    assert weighted_mean([only], [0.5]) is only


def test_a_weight_of_zero_counts_for_nothing() -> None:
    np.testing.assert_array_equal(weighted_mean([model(1), model(9)], [1, 0])["w"], 1)


def test_sums_are_taken_in_double_precision() -> None:
    """Ten thousand ones beside one of 1e8: float32 sums would lose them."""
    arrays = [{"w": np.array([1e8], np.float32)}] + [{"w": np.array([1.0], np.float32)}] * 10_000
    mean = weighted_mean(arrays, [1.0] * len(arrays))["w"]
    np.testing.assert_array_equal(mean, np.float32((1e8 + 1e4) / 10_001))


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(0.1, 1e6), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    factor=st.floats(1e-3, 1e3),
)
def test_a_mean_lies_between_its_parts_and_only_the_ratio_of_weights_counts(
    weights: list[float], seed: int, factor: float
) -> None:
    rng = np.random.default_rng(seed)
    parts = [{"w": rng.normal(size=4).astype(np.float32)} for _ in weights]
    mean = weighted_mean(parts, weights)["w"]
    stack = np.stack([part["w"] for part in parts])
    assert (mean <= stack.max(axis=0)).all() and (mean >= stack.min(axis=0)).all()
    literal = sum(w * part["w"].astype(float) for w, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(mean, literal / sum(weights), rtol=1e-6, atol=1e-6)
    scaled = weighted_mean(parts, [factor * w for w in weights])["w"]
    np.testing.assert_allclose(scaled, mean, rtol=1e-6, atol=1e-7)


def test_arguments_are_not_changed() -> None:
    parts = [model(1.0, 1), model(4.0, 2)]
    weighted_mean(parts, [1, 1])
    update = difference(parts[1], parts[0])
    accumulate(update, update, decay=0.5)
    assert_equal_models(parts[0], model(1.0, 1))
    assert_equal_models(parts[1], model(4.0, 2))
    np.testing.assert_array_equal(update["w"], 3)


def test_an_update_is_new_minus_old_without_counters() -> None:
    update = difference(model(5.0, 9), model(2.0, 3))
    assert list(update) == ["w", "bn.running_mean"]
    np.testing.assert_array_equal(update["w"], 3)
    assert update["w"].dtype == np.float32


@pytest.mark.parametrize(("decay", "expected"), [(1.0, 5.0), (0.5, 4.0), (0.0, 3.0)])
def test_memory_is_decayed_and_added_to(decay: float, expected: float) -> None:
    memory, update = {"w": np.full(2, 2.0, np.float32)}, {"w": np.full(2, 3.0, np.float32)}
    added = accumulate(memory, update, decay=decay)
    np.testing.assert_array_equal(added["w"], expected)
    assert added["w"].dtype == np.float32
    np.testing.assert_array_equal(accumulate(None, update, decay=decay)["w"], 3)


@pytest.mark.parametrize(
    ("name", "statistic"),
    [("a.running_mean", True), ("a.running_var", True), ("a.weight", False), ("b", True)],
)
def test_statistics_are_told_by_name_or_by_description(name: str, statistic: bool) -> None:
    assert is_statistic(name, buffers=["b"]) is statistic


def test_the_distance_is_that_of_all_values_and_needs_no_memory_for_them() -> None:
    draw = np.random.default_rng(0)
    one, other = (
        {
            "w": draw.standard_normal((3, SUMMED + 5), np.float32),
            "b": draw.standard_normal(7),
            "count": np.array(draw.integers(9)),
            "bn.running_mean": draw.standard_normal(5, np.float32),
        }
        for _ in range(2)
    )
    apart = np.concatenate([np.ravel(one[name] - other[name]).astype(float) for name in "wb"])
    assert distance(one, other) == pytest.approx(np.linalg.norm(apart), rel=1e-12)
    large = {"w": np.zeros(4_000_000, np.float32)}
    tracemalloc.start()
    assert distance(large, {"w": np.ones(4_000_000, np.float32)}) == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 19_000_000, "beside the one model of 16 MB that is made here"


def test_the_distance_of_numbers_of_16_bits_is_not_rounded_to_them() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.standard_normal((2, COLUMNS + 5), np.float32).astype(np.float16)
    exact = np.linalg.norm(one.astype(float) - other.astype(float))
    assert distance({"w": one}, {"w": other}) == pytest.approx(exact, rel=1e-7)
    assert exact != pytest.approx(np.linalg.norm((one - other).astype(float)), rel=1e-7)


def test_a_mean_of_numbers_of_16_bits_is_rounded_to_the_nearest() -> None:
    rng = np.random.default_rng(0)
    size = 2 * COLUMNS + 3
    whole = [rng.normal(size=size).astype(np.float16) for _ in range(3)]
    whole[0][:4] = whole[1][:4] = whole[2][:4] = np.float16([65504, -65504, 6e-8, -0.0])
    mean = weighted_mean([{"w": one} for one in whole], [1.0, 2.0, 5.0])["w"]
    exact = sum(
        one.astype(float) * share for one, share in zip(whole, (1 / 8, 2 / 8, 5 / 8), strict=True)
    )
    np.testing.assert_array_equal(mean, np.asarray(exact, np.float32).astype(np.float16))
    assert mean.dtype == np.float16 and mean[0] == 65504
