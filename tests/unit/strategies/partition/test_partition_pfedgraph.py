"""pFedGraph's rows against a literal minimisation, and what follows from the formula."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.strategies.partition.pfedgraph import collaborators, nearest_on_simplex


def literal(cosines: np.ndarray, sizes: np.ndarray, alpha: float) -> np.ndarray:
    """The best of all supports: on each, the minimum where Lagrange's condition holds."""
    p = sizes / sizes.sum()
    best, least = p, np.inf
    for count in range(1, len(p) + 1):
        for support in map(list, combinations(range(len(p)), count)):
            # −c + 2α(w − p) + λ = 0 on the support, and Σ w = 1 gives λ.
            free = p[support] + cosines[support] / (2 * alpha)
            w = np.zeros(len(p))
            w[support] = free + (1 - free.sum()) / count
            value = -w @ cosines + alpha * ((w - p) ** 2).sum()
            if (w >= 0).all() and value < least:
                best, least = w, value
    return best


CASES = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-1, 1), min_size=n, max_size=n),
        st.lists(st.integers(1, 500), min_size=n, max_size=n),
        st.sampled_from([0.05, 0.3, 0.8, 5.0, 100.0]),
    )
)


@given(CASES)
def test_a_row_is_the_minimum_of_the_papers_objective(
    case: tuple[list[float], list[int], float],
) -> None:
    cosines, sizes, alpha = np.array(case[0]), np.array(case[1], float), case[2]
    row = collaborators(cosines, sizes, alpha=alpha)
    assert (row >= 0).all() and row.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(row, literal(cosines, sizes, alpha), atol=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16))
def test_no_point_of_the_simplex_is_nearer(values: list[float]) -> None:
    """The projection's own condition: the way to it makes no acute angle with any corner."""
    point = np.array(values)
    found = nearest_on_simplex(point)
    scale = max(1.0, float(np.abs(point).max()))
    assert (found >= 0).all() and abs(found.sum() - 1) < 1e-9 * scale
    corners = np.eye(len(point)) - found
    assert (corners @ (point - found) <= 1e-8 * scale).all()


def test_large_alpha_is_fedavg_and_small_alpha_the_most_alike() -> None:
    cosines, sizes = [1.0, 0.9, -0.5], [10, 30, 60]
    np.testing.assert_allclose(collaborators(cosines, sizes, alpha=1e9), [0.1, 0.3, 0.6], atol=1e-8)
    assert collaborators(cosines, sizes, alpha=1e-3).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], [0], 1.0), "sizes"),
        (([1.0], [1], 0.0), "alpha must be finite and > 0"),
        (([np.nan], [1], 1.0), "similarities must be finite"),
        (([], [], 1.0), "similarities must be finite, of shape"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[list[float], list[int], float], text: str
) -> None:
    cosines, sizes, alpha = arguments
    with pytest.raises(ValueError, match=text):
        collaborators(cosines, sizes, alpha=alpha)
