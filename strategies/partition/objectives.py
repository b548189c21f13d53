"""The value of a coalition, as HCCT and FedCollab define it.

Both papers value a coalition C by sums over its members and over pairs of members, so both
objectives are functions of a few additive numbers:

* HCCT (utility of a group, eqs. 9 and 14, to maximise), with D_C the samples of C, weights
  ``w_i = D_i / max D``, ``Q_ij = w_i w_j G_ij`` and ``S_ij = w_j G_ij / |u_i|``::

      U(C) = - (sum of alpha_i) / D_C + S(C, C) / sqrt(Q(C, C))

* FedCollab (its error bound L, to minimise), with ``T_ij = D_j distance_ij``::

      L(C) = |C| c / sqrt(D_C) + T(C, C) / D_C

where ``X(C, C)`` is the sum of ``X_ij`` over all i and j in C. When two coalitions merge, these
sums add: a merge or a move costs O(1) arithmetic and never forms a P-dimensional vector.

Sources: HCCT eqs. 8-17; FedCollab (Bao et al., ICML 2023) step 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray


@runtime_checkable
class Objective(Protocol):
    """The input of a solver: additive numbers per silo and pair, and the gain of their sums."""

    @property
    def single(self) -> FloatArray:
        """(V, N) numbers that add over the members of a coalition."""

    @property
    def pair(self) -> FloatArray:
        """(M, N, N) symmetric numbers that add over all ordered pairs of members."""

    @property
    def scale(self) -> float:
        """The size of one silo's gain, which separates improvements from rounding."""

    @property
    def sign(self) -> int:
        """+1 if the paper maximises the objective, -1 if it minimises it."""

    def gain(self, single: FloatArray, pair: FloatArray) -> FloatArray:
        """Return the gains (higher is better) of coalitions with sums (V, ...) and (M, ...)."""

    def member_values(self, members: Sequence[int]) -> FloatArray:
        """Return the paper's value (not the gain) of every member of one coalition."""


@dataclass(frozen=True, eq=False)
class HCCTUtility:
    """HCCT's utility to maximise, eqs. 8-9 and 14; build it with `from_gram`.

    Differs from the paper in leaving out the constant beta, which cancels in every benefit, and in
    allowing one alpha per silo.
    """

    single: FloatArray  # (3, N): alpha, samples, one
    pair: FloatArray  # (2, N, N): Q and the symmetric part of S
    received: FloatArray  # (N, N): S, whose row i adds up to silo i's inner product with a group
    sign: int = 1

    @classmethod
    def from_gram(
        cls, gram: ArrayLike, sizes: ArrayLike, *, alpha: float | ArrayLike
    ) -> HCCTUtility:
        """Build the utility of N silos.

        Args:
            gram: (N, N) inner products of the silos' updates.
            sizes: (N,) numbers of training samples, > 0.
            alpha: the paper's trade-off constant, >= 0, in samples: one number or one per silo.

        Warns of zero updates, whose cosine is 0 to everything, even to their own group. Raises
        ValueError for other shapes, values that are not finite, and sizes <= 0.
        """
        checked = _check.gram(gram)
        num_silos = len(checked)
        samples = _check.sizes(sizes, num_silos=num_silos)
        alphas = _check.per_silo("alpha", alpha, num_silos=num_silos)
        _check.warn_zero_updates(checked.diagonal())
        pair, received = _hcct_sums(checked, samples)
        return cls(np.stack([alphas, samples, np.ones(num_silos)]), pair, received)

    def with_alpha(self, alpha: float | ArrayLike) -> HCCTUtility:
        """Return the same utility with another alpha, sharing the matrices."""
        single = self.single.copy()
        single[0] = _check.per_silo("alpha", alpha, num_silos=single.shape[1])
        return replace(self, single=single)

    @property
    def scale(self) -> float:
        return 1.0 + float((self.single[0] / self.single[1]).max())

    def gain(self, single: FloatArray, pair: FloatArray) -> FloatArray:
        alphas, samples, count = single
        # A mean of cosines is in [-1, 1]. Saying so keeps a Gram matrix with float32 rounding
        # from promising more than perfect agreement.
        cosines = np.clip(_over_root(pair[1], pair[0]), -count, count)
        return np.asarray(cosines - alphas / samples)

    def member_values(self, members: Sequence[int]) -> FloatArray:
        rows = list(members)
        square = np.ix_(rows, rows)
        inner, norm2 = self.received[square].sum(axis=1), self.pair[0][square].sum()
        cosines = np.clip(_over_root(inner, np.full(len(rows), norm2)), -1.0, 1.0)
        return np.asarray(cosines - self.single[0, rows] / self.single[1, rows].sum())

    def values_beside(self, groups: Sequence[Sequence[int]]) -> FloatArray:
        """Return (N, K) utilities of every silo in group k if it joined; NaN in its own group."""
        member = np.zeros((self.single.shape[1], len(groups)))
        for k, group in enumerate(groups):
            member[list(group), k] = 1.0
        pairs = self.pair[0] @ member
        norm2 = (member * pairs).sum(axis=0) + 2 * pairs + self.pair[0].diagonal()[:, None]
        inner = self.received @ member + self.received.diagonal()[:, None]
        alphas, samples = self.single[0, :, None], self.single[1]
        total = samples @ member + samples[:, None]
        values = np.clip(_over_root(inner, norm2), -1.0, 1.0) - alphas / total
        return np.asarray(np.where(member > 0, np.nan, values))


def _hcct_sums(gram: FloatArray, samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    # Cosines do not depend on a common factor of the updates or of the weights: dividing both
    # by their largest keeps tiny and huge updates away from the limits of float64.
    largest = float(gram.diagonal().max())
    unit = gram / largest if largest > 0 else gram
    weights = samples / samples.max()
    norms = np.sqrt(unit.diagonal())
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    received = weights * unit * inverse[:, None]
    products = weights[:, None] * weights * unit
    return np.stack([products, 0.5 * (received + received.T)]), received


def _over_root(inner: FloatArray, norm2: FloatArray) -> FloatArray:
    """Return inner / sqrt(norm2), and 0 where the group's update is zero."""
    inner, norm2 = np.asarray(inner), np.asarray(norm2)
    return np.divide(
        inner, np.sqrt(np.maximum(norm2, 0.0)), out=np.zeros_like(inner), where=norm2 > 0
    )


@dataclass(frozen=True, eq=False)
class FedCollabBound:
    """FedCollab's error bound L to minimise; build it with `from_distances`.

    With alpha_ij = beta_j / beta(C) inside a coalition and 0 outside, the poster's first term is
    exactly c / sqrt(D_C) for each member.
    """

    single: FloatArray  # (2, N): one, samples
    pair: FloatArray  # (1, N, N): the symmetric part of T
    distances: FloatArray  # (N, N), clipped to [0, 1]
    c: float
    sign: int = -1

    @classmethod
    def from_distances(cls, distances: ArrayLike, sizes: ArrayLike, *, c: float) -> FedCollabBound:
        """Build the bound of N silos.

        Args:
            distances: (N, N) symmetric estimates, 0 on the diagonal; clipped to [0, 1], as chance
                can push 2 * (balanced accuracy) - 1 below 0.
            sizes: (N,) numbers of training samples, > 0.
            c: the paper's hyperparameter C, > 0, in roots of samples.
        """
        checked = _check.distances(distances)
        samples = _check.sizes(sizes, num_silos=len(checked))
        c = _check.number("c", c, above=True)
        sums = 0.5 * checked * (samples[:, None] + samples)
        return cls(np.stack([np.ones(len(checked)), samples]), sums[None], checked, c)

    def with_c(self, c: float) -> FedCollabBound:
        """Return the same bound with another c, sharing the matrices."""
        return replace(self, c=_check.number("c", c, above=True))

    @property
    def scale(self) -> float:
        return self.c / float(np.sqrt(self.single[1].min())) + float(self.distances.max())

    def gain(self, single: FloatArray, pair: FloatArray) -> FloatArray:
        count, samples = single
        return np.asarray(-count * self.c / np.sqrt(samples) - pair[0] / samples)

    def member_values(self, members: Sequence[int]) -> FloatArray:
        rows = list(members)
        samples = self.single[1, rows]
        distance = self.distances[np.ix_(rows, rows)] @ samples / samples.sum()
        return np.asarray(self.c / np.sqrt(samples.sum()) + distance)
