"""Updates in fewer bytes: what arrives is what was sent, less what the silo knows that it lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.wire import (
    Model,
    WireError,
    num_rounded_bytes,
    restore_model,
    restore_update,
    round_model,
    round_update,
)
from coterie.wire.formats import HUGE, KINDS, LEAST_VECTOR, SCALES, Rounded
from coterie.wire.half_precision import PART, largest_of, narrow, widened
from tests.conftest import assert_equal_models

EACH = pytest.mark.parametrize("how", KINDS)
SHAPES = {"conv": (8, 4, 3, 3), "head": (3, 40), "narrow": (5, 4), "long": (LEAST_VECTOR,)}
MANY = {"rows": (7, PART // 3), "row": (2, PART + 5), "large": (2 * PART + 1,)}
"""Arrays that are worked on in parts: of some rows, of one row, of none."""
SHARE = {"delta-fp16": 4e-4, "delta-int8": 2e-2}
"""Of a normally distributed update, what is rounded away at most."""


def pair(seed: int = 0, size: float = 0.01) -> tuple[Model, Model]:
    """A model before and after a training."""
    rng = np.random.default_rng(seed)
    sent: Model = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    sent |= {"bias": np.ones(7, np.float32), "var": np.full((4, 4), 1e-3, np.float32)}
    sent |= {"seen": np.array(3), "on": np.array([True]), "half": np.ones((9, 9), np.float16)}
    sent["wide"] = rng.normal(size=(6, 50))
    moved: dict[str, Any] = {
        k: (size * rng.normal(size=a.shape)).astype(a.dtype) for k, a in sent.items() if k != "half"
    }
    moved |= {"seen": np.array(2), "on": np.array([False]), "half": np.ones((9, 9), np.float16)}
    trained: Model = {k: (a + moved[k]).astype(a.dtype) for k, a in sent.items()}  # type: ignore[operator]
    return sent, trained


def rounded(trained: Model, sent: Model, how: str, **more: Any) -> Rounded:
    update = round_update(trained, sent, how, exact={"var"}, **more)
    assert update is not None
    return update


@EACH
@pytest.mark.parametrize("size", [1e-9, 0.01, 1e7])
def test_an_update_of_any_size_arrives_but_for_what_the_silo_keeps(how: str, size: float) -> None:
    sent, trained = pair(size=size)
    if size < 1e-3:  # what would be lost in the sum with a larger number
        trained = {k: (a - sent[k] if a.dtype.kind == "f" else a) for k, a in trained.items()}  # type: ignore[operator]
        sent = {k: (a * 0 if a.dtype.kind == "f" else a) for k, a in sent.items()}  # type: ignore[operator]
    update = rounded(trained, sent, how)
    arrived = restore_update(update.arrays, sent, how)
    assert {k: (a.dtype, a.shape) for k, a in arrived.items()} == {
        k: (a.dtype, a.shape) for k, a in sent.items()
    }
    assert set(update.lost) == {*SHAPES, "wide"} and 0 < update.share < SHARE[how]
    for name, lost in update.lost.items():
        came = trained[name] - lost  # type: ignore[operator]
        largest = np.abs(trained[name]).max()
        np.testing.assert_allclose(arrived[name], came, rtol=0, atol=3e-7 * largest)
    for name in ("bias", "var", "seen", "on", "half"):
        np.testing.assert_array_equal(arrived[name], trained[name])
        assert update.arrays[name].dtype == trained[name].dtype


@EACH
@given(seed=st.integers(0, 2**16), rounds=st.integers(2, 6))
def test_what_is_lost_in_one_round_is_sent_in_the_next(how: str, seed: int, rounds: int) -> None:
    """However many rounds, the sum of what arrived lacks no more than was lost in the last."""
    before: Model | None = None
    wanted: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    arrived: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    for number in range(rounds):
        sent, trained = pair(seed + number)
        update = rounded(trained, sent, how, before=before)
        model, before = restore_update(update.arrays, sent, how), update.lost
        for name in SHAPES:
            wanted[name] = wanted[name] + (trained[name].astype(float) - sent[name])
            arrived[name] = arrived[name] + (model[name].astype(float) - sent[name])
    assert before is not None
    for name in SHAPES:
        np.testing.assert_allclose(wanted[name] - arrived[name], before[name], atol=1e-5)


def test_eight_bits_are_a_quarter_and_every_output_has_a_scale() -> None:
    sent, trained = pair()
    arrays = {how: rounded(trained, sent, how).arrays for how in KINDS}
    assert {arrays["delta-int8"][name].dtype for name in SHAPES} == {np.dtype(np.int8)}
    assert {arrays["delta-fp16"][name].dtype for name in SHAPES} == {np.dtype(np.float16)}
    assert arrays["delta-int8"][SCALES].shape == (8 + 3 + 1 + 1 + 6,)
    assert arrays["delta-fp16"][SCALES].shape == (5,)


@EACH
def test_no_change_is_sent_as_none(how: str) -> None:
    sent, _ = pair()
    update = rounded(sent, sent, how)
    assert update.norm == update.share == 0 and not np.any(update.arrays[SCALES])
    assert_equal_models(restore_update(update.arrays, sent, how), sent)


@EACH
@pytest.mark.parametrize("value", [np.nan, np.inf, 3 * HUGE])
@pytest.mark.parametrize("name", ["conv", "bias"])
def test_what_no_model_holds_is_not_rounded(how: str, value: float, name: str) -> None:
    """The coordinator names the array; what was lost before waits."""
    sent, trained = pair()
    trained[name].flat[1] = value
    update = round_update(trained, sent, how)
    assert update is None or (name == "bias" and value > HUGE)


def test_a_model_in_16_bits_is_the_model_but_for_their_last() -> None:
    sent, _ = pair()
    small = round_model(sent, exact={"var"})
    like = {name: (array.shape, str(array.dtype)) for name, array in sent.items()}
    found = restore_model(small, like)
    assert num_rounded_bytes(sent, exact={"var"}) == sum(array.nbytes for array in small.values())
    for name, array in sent.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        if name in SHAPES or name == "wide":
            np.testing.assert_allclose(found[name], array, rtol=5e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(found[name], array)
    assert restore_model(sent, like) is sent
    broken: Model = {**sent, "conv": np.full((8, 4, 3, 3), np.nan, np.float32)}
    assert round_model(broken) is broken, "it is not rounded"


@EACH
def test_updates_too_small_for_16_bits_add_up_all_the_same(how: str) -> None:
    """The coordinator adds them to the model as it was before it was rounded."""
    model: Model = {"w": np.full((4, 40), 1.7, np.float32)}
    like = {"w": ((4, 40), "float32")}
    for _ in range(50):
        received = restore_model(round_model(model), like)
        trained: Model = {"w": received["w"] + np.float32(1e-5)}  # type: ignore[operator]
        update = round_update(trained, received, how)
        assert update is not None
        model = restore_update(update.arrays, model, how)
    np.testing.assert_allclose(model["w"], 1.7 + 50e-5, rtol=2e-5)


@EACH
def test_a_model_as_it_is_stays_so(how: str) -> None:
    """A silo that knows no formats sends one; a run that asks for none gets no other."""
    sent, trained = pair()
    assert restore_update(trained, sent, how) is trained
    update = rounded(trained, sent, how)
    assert restore_update(update.arrays, sent, "float32") is update.arrays


@EACH
@pytest.mark.parametrize(
    "scales",
    [
        *(np.float32([]), np.float32([1, 1]), np.ones(10**6, np.float32)),
        *(np.full(19, -1, np.float32), np.full(19, np.nan, np.float32)),
        *(np.full(19, np.inf, np.float32), np.ones(19), np.ones((19, 1), np.float32)),
        np.float32(1),
    ],
    ids=str,
)
def test_scales_that_do_not_fit_are_refused(how: str, scales: Any) -> None:
    sent, trained = pair()
    update = rounded(trained, sent, how)
    with pytest.raises(WireError, match="scales"):
        restore_update({**update.arrays, SCALES: np.asarray(scales)}, sent, how)


@EACH
@given(
    dtype=st.sampled_from(["int8", "float16", "float32", "float64", "int64", "bool"]),
    shape=st.sampled_from([(), (3,), (3, 40), (40, 3), (0, 3)]),
    count=st.integers(0, 30),
    scale=st.floats(0, 2.0**96, width=32),
)
def test_whatever_arrives_is_restored_left_or_refused(
    how: str, dtype: str, shape: tuple[int, ...], count: int, scale: float
) -> None:
    sent, trained = pair()
    arrays = rounded(trained, sent, how).arrays
    arrays |= {"head": np.ones(shape).astype(dtype), SCALES: np.full(count, scale, np.float32)}
    try:
        arrived = restore_update(arrays, sent, how)
    except WireError:
        return
    assert set(arrived) == set(sent) and arrived["head"].size <= 120


# ---------------------------------------------------------------- numbers of 16 bits

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
"""All that there are."""


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype == np.float16 else np.uint32)


def test_all_numbers_of_16_bits_are_widened_as_numpy_does() -> None:
    finite = HALVES[np.isfinite(HALVES)]
    np.testing.assert_array_equal(bits(widened(finite)), bits(finite.astype(np.float32)))
    np.testing.assert_array_equal(widened(HALVES), HALVES.astype(np.float32))
    for infinite in np.float16([[1, np.inf], [1, -np.inf]]):  # the first beyond what is finite
        np.testing.assert_array_equal(widened(infinite), infinite.astype(np.float32))
    twice = np.stack([finite, finite])[:, ::3]  # not one behind the other
    np.testing.assert_array_equal(widened(twice), twice.astype(np.float32))
    assert widened(np.zeros((0, 2), np.float16)).dtype == np.float32
    one = widened(np.array(-1.5, np.float16))
    assert (one.shape, one) == ((), -1.5)
    other = np.ones(3)
    assert widened(other) is other


def test_numbers_are_narrowed_as_numpy_does() -> None:
    exact = np.sort(HALVES[np.abs(HALVES) <= 1].astype(np.float32))
    between = (exact[1:] + exact[:-1]) / 2
    rng = np.random.default_rng(0)
    small = rng.uniform(-1, 1, 10**5) * 2.0 ** -rng.integers(0, 150, 10**5)
    for values in (exact, between, *(np.nextafter(between, np.float32(x)) for x in (-2, 2)), small):
        own = values.astype(np.float32)
        made = np.empty(own.shape, np.float16)
        narrow(own, made)
        np.testing.assert_array_equal(bits(made), bits(own.astype(np.float16)))
    long = np.resize(HALVES[np.isfinite(HALVES)], 3 * PART + 1)
    np.testing.assert_array_equal(bits(widened(long)), bits(long.astype(np.float32)))
    assert largest_of(np.append(long, np.float16(np.inf))) == np.inf


@EACH
def test_what_is_rounded_in_parts_is_what_the_whole_array_would_be(how: str) -> None:
    rng = np.random.default_rng(3)
    sent: Model = {k: rng.normal(size=s).astype(np.float32) for k, s in MANY.items()}
    trained: Model = {k: a + rng.normal(size=a.shape).astype(a.dtype) for k, a in sent.items()}
    before: Model = {k: np.full_like(a, 1e-3) for k, a in sent.items()}
    update = rounded(trained, sent, how, before=before)
    arrived, begin, squares = restore_update(update.arrays, sent, how), 0, [0.0, 0.0]
    for name, start in sent.items():
        wanted: Any = trained[name] - start + before[name]  # type: ignore[operator]
        rows = start.shape[0] if how == "delta-int8" and start.ndim > 1 else 1
        scales = update.arrays[SCALES][begin : begin + rows]
        begin += rows
        largest = np.abs(wanted).reshape(rows, -1).max(axis=1)
        if how == "delta-int8":
            np.testing.assert_array_equal(scales, largest / np.float32(127))
        else:
            assert scales / 2 <= largest <= scales and np.log2(scales) % 1 == 0
        each = scales.reshape(-1, *[1] * (start.ndim - 1))
        numbers: Any = update.arrays[name]
        nearest = np.rint(wanted / each) if how == "delta-int8" else (wanted / each)
        np.testing.assert_array_equal(numbers, nearest.astype(numbers.dtype))
        value = numbers.astype(np.float32) * each
        np.testing.assert_array_equal(update.lost[name], wanted - value)
        np.testing.assert_array_equal(arrived[name], start + value)
        squares[0] += float(np.square(wanted, dtype=float).sum())
        squares[1] += float(np.square(wanted - value, dtype=float).sum())
    assert begin == update.arrays[SCALES].size
    np.testing.assert_allclose(update.norm**2, squares[0])
    np.testing.assert_allclose((update.norm * update.share) ** 2, squares[1])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int8, np.bool_])
def test_the_largest_size_is_found_and_so_is_what_is_no_number(kind: type) -> None:
    assert largest_of(np.zeros(0, kind)) == 0
    assert largest_of(np.array([0, 1, 0], kind)) == 1
    if kind is not np.bool_:
        assert largest_of(np.array([[3, -7], [0, 2]], kind)) == 7
    if np.issubdtype(kind, np.floating):
        assert largest_of(np.array([1, -np.inf], kind)) == np.inf
        assert np.isnan(largest_of(np.array([np.inf, np.nan, 1], kind)))
