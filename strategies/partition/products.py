"""Inner products of updates, added up over rounds.

Sketches of different rounds have different projections, so updates cannot be accumulated from them.
Accumulated are the inner products of every round's updates instead: with sums S_ij and squares A_ij
= Σ|u_i|² over the rounds that i and j share, the cosine of a pair is S_ij / √(A_ij A_ji), also if
one of them came later or missed rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.strategies.partition._check import FloatArray
from coterie.strategies.partition.gram import without_noise


@dataclass(frozen=True, eq=False)
class Products:
    """Sums over the rounds that two silos share.

    Attributes:
        names: N silos, sorted.
        sums: (4, N, N): inner product of i and j; squared norm of i; expected squared norm of the
            noise in i; length of the updates. All 0 for silos that share no round.
    """

    names: tuple[str, ...] = ()
    sums: FloatArray = field(default_factory=lambda: np.zeros((4, 0, 0)))

    def without(self, names: Collection[str]) -> Products:
        """Return the sums of the other silos."""
        kept = [i for i, name in enumerate(self.names) if name not in names]
        return Products(tuple(self.names[i] for i in kept), self.sums[np.ix_(range(4), kept, kept)])

    def rows(self, names: Sequence[str]) -> list[int]:
        """Return the silos' rows."""
        at = {name: row for row, name in enumerate(self.names)}
        return [at[name] for name in names]


def with_round(
    before: Products,
    names: Sequence[str],
    matrix: FloatArray,
    noise: Sequence[float],
    *,
    num_parameters: int,
    decay: float,
) -> Products:
    """Return the sums with one more round.

    Args:
        names: N silos that trained in the round.
        matrix: (N, N) inner products of their updates, with the noise in them.
        noise: (N,) expected squared norms of the noise.
        num_parameters: length of the updates.
        decay: factor in [0, 1] on a silo's update in its next round, as of an accumulated update.
    """
    found = Products(tuple(sorted({*before.names, *names})))
    sums = np.zeros((4, len(found.names), len(found.names)))
    old, now = found.rows(before.names), found.rows(names)
    sums[np.ix_(range(4), old, old)] = before.sums
    ones = np.ones_like(matrix)
    new = [matrix, matrix.diagonal()[:, None] * ones, np.array(noise)[:, None] * ones]
    here = np.ix_(range(4), now, now)
    sums[here] = np.stack([*new, num_parameters * ones]) + decay**2 * sums[here]
    return Products(found.names, sums)


def gram_of_rounds(products: Products, names: Sequence[str]) -> FloatArray:
    """Return the (N, N) inner products of silos' updates over all their rounds, less the noise.

    ``names`` are N silos, each with at least one round.
    """
    rows = products.rows(names)
    inner, squares, noise, lengths = products.sums[np.ix_(range(4), rows, rows)]
    both = np.sqrt(squares * squares.T)
    cosines = np.divide(inner, both, out=np.zeros_like(inner), where=both > 0)
    scale = np.sqrt(squares.diagonal())
    result = cosines * np.outer(scale, scale)
    np.fill_diagonal(result, squares.diagonal())
    width = int(lengths.diagonal().min())
    return without_noise(_valid(result), noise.diagonal(), num_parameters=width)


def _valid(matrix: FloatArray) -> FloatArray:
    """Return the matrix without negative eigenvalues, which pairs of different rounds can cause."""
    values, vectors = np.linalg.eigh(matrix)
    if values[0] >= -1e-9 * max(values[-1], 0.0):
        return matrix
    positive = (vectors * np.maximum(values, 0.0)) @ vectors.T
    scale = np.sqrt(matrix.diagonal() / np.maximum(positive.diagonal(), np.finfo(float).tiny))
    result = positive * np.outer(scale, scale)
    return np.asarray((result + result.T) / 2)
