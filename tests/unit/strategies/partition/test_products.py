"""Inner products added up over rounds, in place of accumulated updates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.strategies.partition.products import Products, gram_of_rounds, with_round


def added(
    rounds: list[dict[str, np.ndarray]], *, noise: float = 0.0, decay: float = 1.0
) -> Products:
    products = Products()
    for updates in rounds:
        names = sorted(updates)
        matrix = np.stack([updates[name] for name in names])
        squares = [noise] * len(names)
        products = with_round(
            products, names, matrix @ matrix.T, squares, num_parameters=matrix.shape[1], decay=decay
        )
    return products


@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 1.0]))
def test_of_silos_that_miss_no_round_the_matrices_add_up(seed: int, decay: float) -> None:
    rng = np.random.default_rng(seed)
    rounds = [{name: rng.normal(size=8) for name in "abc"} for _ in range(3)]
    expected = np.zeros((3, 3))
    for updates in rounds:
        matrix = np.stack([updates[name] for name in "abc"])
        expected = decay**2 * expected + matrix @ matrix.T
    got = gram_of_rounds(added(rounds, decay=decay), "abc")
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_a_newcomer_is_compared_by_the_rounds_that_it_shares() -> None:
    """Otherwise rounds of before it came would make it unlike everybody."""
    along, across = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    rounds = [{"a": 2 * along, "b": across}, {"a": along, "b": across, "c": 3 * along}]
    matrix = gram_of_rounds(added(rounds), "abc")
    norms = np.sqrt(matrix.diagonal())
    cosines = matrix / np.outer(norms, norms)
    np.testing.assert_allclose(cosines, [[1, 0, 1], [0, 1, 0], [1, 0, 1]], atol=1e-9)
    assert norms == pytest.approx([np.sqrt(5), np.sqrt(2), 3])


def test_silos_that_share_no_round_are_not_alike() -> None:
    one = np.array([1.0, 0.0])
    products = added([{"a": one, "b": one}, {"c": one}])
    assert gram_of_rounds(products, "ac")[0, 1] == 0


def test_a_silo_whose_data_changed_begins_again() -> None:
    one, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    products = added([{"a": one, "b": one}])
    matrix = np.stack([one, other])
    renewed = with_round(
        products.without("b"), "ab", matrix @ matrix.T, [0.0, 0.0], num_parameters=2, decay=1.0
    )
    got = gram_of_rounds(renewed, "ab")
    np.testing.assert_allclose(got, [[2, 0], [0, 1]], atol=1e-9)


def test_noise_is_taken_off() -> None:
    rng = np.random.default_rng(0)
    common, size = rng.normal(size=2000), 2000
    rounds = [
        {name: common + rng.normal(size=size) for name in "ab"},
        {name: common + rng.normal(size=size) for name in "ab"},
    ]
    matrix = gram_of_rounds(added(rounds, noise=float(size)), "ab")
    assert matrix[0, 1] / np.sqrt(matrix[0, 0] * matrix[1, 1]) == pytest.approx(1, abs=0.1)


@given(st.integers(0, 2**16))
def test_the_matrix_is_valid_with_any_newcomers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rounds = [{name: rng.normal(size=3) for name in "abcd" if rng.random() < 0.6} for _ in range(5)]
    products = added([updates for updates in rounds if updates])
    if products.names:
        matrix = gram_of_rounds(products, products.names)
        np.testing.assert_array_equal(matrix, matrix.T)
        values = np.linalg.eigvalsh(matrix)
        assert values[0] >= -1e-6 * values[-1]
