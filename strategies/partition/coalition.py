"""The value of a coalition, and three solvers for the best partition into coalitions.

Both papers value a coalition C by sums over its members and over pairs of members, so both
objectives are functions of a few additive numbers:

* HCCT (utility of a group, eqs. 9 and 14, to maximise), with D_C the samples of C, weights
  ``w_i = D_i / max D``, ``Q_ij = w_i w_j G_ij`` and ``S_ij = w_j G_ij / |u_i|``::

      U(C) = - (sum of alpha_i) / D_C + S(C, C) / sqrt(Q(C, C))

* FedCollab (its error bound L, to minimise), with ``T_ij = D_j distance_ij``::

      L(C) = |C| c / sqrt(D_C) + T(C, C) / D_C

where ``X(C, C)`` is the sum of ``X_ij`` over all i and j in C. When two coalitions merge, these
sums add: a merge or a move costs O(1) arithmetic and never forms a P-dimensional vector.

Solvers maximise an `Objective`'s *gain*: the utility, or minus the bound. A change is an
improvement if it raises the total by more than `TOLERANCE` times the size of one silo's gain, so
that rounding alone neither merges nor separates silos. Ties go to the lowest indices.

Sources: HCCT eqs. 8-17 and Algorithm 2; FedCollab (Bao et al., ICML 2023) step 2. Differs from HCCT
in testing before it merges, and adds to both papers the exact optimum for N <= 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray, Groups

TOLERANCE = 1e-12
MAX_OPTIMAL_SILOS = 16

IntArray: TypeAlias = NDArray[np.intp]
Solver: TypeAlias = Literal["agglomerative", "relocation", "optimal"]


# --- objectives -----------------------------------------------------------------------------------


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


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One silo's best alternative while all other silos stay.

    `target` is the index of the group it would join, or None to train alone. `gain` is the change
    of the total, > 0 if better in the objective's own sense (utility up, bound down). A single silo
    on its own has None and 0.
    """

    target: int | None
    gain: float


@dataclass(frozen=True)
class Partition:
    """A partition of N silos with its evaluation.

    groups: sorted lists of silos, ordered by their first.
    objective: total utility (HCCT) or bound (FedCollab), in the paper's sign.
    values: each silo's own part of it.
    num_steps: merges, sweeps of the winning restart, or 0.
    alternatives: each silo's best move away from this partition.
    """

    groups: Groups
    objective: float
    values: tuple[float, ...]
    num_steps: int
    alternatives: tuple[Move, ...]


def evaluate(
    objective: Objective, groups: Iterable[Sequence[int]], *, num_steps: int = 0
) -> Partition:
    """Return a partition with its objective, silo values and alternatives.

    Raises ValueError if `groups` is not a partition of the objective's silos.
    """
    checked = _check.groups(groups, num_silos=_num_silos(objective))
    values = np.zeros(_num_silos(objective))
    for group in checked:
        values[group] = objective.member_values(group)
    moves = []
    for gains in move_gains(objective, checked):
        column = int(gains.argmax())
        nowhere = not np.isfinite(gains[column])
        target = None if nowhere or column == len(checked) else column
        moves.append(Move(target, 0.0 if nowhere else float(gains[column])))
    return Partition(
        groups=checked,
        objective=float(values.sum()),
        values=tuple(values.tolist()),
        num_steps=num_steps,
        alternatives=tuple(moves),
    )


def move_gains(objective: Objective, groups: Sequence[Sequence[int]]) -> FloatArray:
    """Return (N, K + 1) changes of the total if silo i moves to group k, or (last) alone.

    Moves that change nothing are -inf: to the own group, and alone for a silo that is alone.
    """
    state = _State(objective, _labels(groups, _num_silos(objective)), len(groups))
    return np.stack([state.gains(silo) for silo in range(len(state.labels))])


def _num_silos(objective: Objective) -> int:
    return int(objective.single.shape[1])


def _labels(groups: Sequence[Sequence[int]], num_silos: int) -> IntArray:
    labels = np.zeros(num_silos, dtype=np.intp)
    for index, group in enumerate(groups):
        labels[list(group)] = index
    return labels


# --- agglomerative --------------------------------------------------------------------------------


def agglomerative(objective: Objective, *, num_groups: int = 0) -> Partition:
    """Merge the best pair of groups while that is an improvement (HCCT Algorithm 2).

    Starts from N silos alone; a merged group takes the lower index. O(N^2) memory, O(N^2) to O(N^3)
    time. Differs from the paper's listing, which merges before it tests.

    Args:
        num_groups: merge to this number regardless of the gain, as HCCT's authors do for their
            Figs. 5 and 6; 0 leaves the number open.
    """
    state = _Merging(objective)
    threshold = -np.inf if num_groups else TOLERANCE * objective.scale
    most = _num_silos(objective) - num_groups
    num_merges = 0
    while num_merges < most and (best := state.best()) is not None and best[0] > threshold:
        state.merge(best[1], best[2])
        num_merges += 1
    return evaluate(objective, _check.by_label(state.labels.tolist()), num_steps=num_merges)


class _Merging:
    """Groups, their additive sums, and the benefit of merging each pair.

    A group is stored under its lowest silo. `benefit` holds each pair above the diagonal, -inf
    elsewhere; `top` and `partner` are each row's largest benefit and its first column, so that
    finding the best pair does not scan N^2 numbers after every merge.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.single = objective.single.copy()
        self.pair = objective.pair.copy()
        num_silos = self.single.shape[1]
        self.labels = np.arange(num_silos)
        self.alive = np.ones(num_silos, dtype=bool)
        own = np.diagonal(self.pair, axis1=1, axis2=2)
        self.value = np.array(objective.gain(self.single, own))
        self.benefit = np.full((num_silos, num_silos), -np.inf)
        for row in range(num_silos - 1):
            self.benefit[row, row + 1 :] = self._benefits(row, slice(row + 1, None))
        self.partner = self.benefit.argmax(axis=1)
        self.top = self.benefit[np.arange(num_silos), self.partner]

    def best(self) -> tuple[float, int, int] | None:
        """Return the largest benefit with its pair; ties go to the lowest indices."""
        row = int(self.top.argmax())
        if self.top[row] == -np.inf:
            return None
        return float(self.top[row]), row, int(self.partner[row])

    def merge(self, low: int, high: int) -> None:
        """Join group `high` to group `low`, low < high: rows and columns add."""
        self.single[:, low] += self.single[:, high]
        self.pair[:, low, :] += self.pair[:, high, :]
        self.pair[:, :, low] += self.pair[:, :, high]
        self.labels[self.labels == high] = low
        self.alive[high] = False
        self.value[low] = self.objective.gain(self.single[:, low], self.pair[:, low, low])
        self._refresh(low, high)

    def _benefits(self, group: int, others: slice | IntArray) -> FloatArray:
        """Return the benefit of merging one group with each other (HCCT eq. 15)."""
        single = self.single[:, others] + self.single[:, group, None]
        own = np.diagonal(self.pair, axis1=1, axis2=2)
        pair = own[:, others] + own[:, group, None] + 2 * self.pair[:, group, others]
        together = self.objective.gain(single, pair)
        return np.asarray(together - self.value[others] - self.value[group])

    def _refresh(self, low: int, high: int) -> None:
        self.benefit[high, :] = self.benefit[:, high] = -np.inf
        self.top[high] = -np.inf
        others = np.flatnonzero(self.alive)
        others = others[others != low]
        benefits = self._benefits(low, others)
        before = others < low
        above, new = others[before], benefits[before]
        self.benefit[above, low] = new
        self.benefit[low, others[~before]] = benefits[~before]
        # A row above finds its best pair in the merged group, or keeps the one that it had, or
        # has lost it and must look again.
        wins = (new > self.top[above]) | ((new == self.top[above]) & (low <= self.partner[above]))
        self.top[above[wins]], self.partner[above[wins]] = new[wins], low
        lost = self.alive & np.isin(self.partner, (low, high))
        lost[above[wins]] = False
        lost[low] = True
        rows = np.flatnonzero(lost)
        self.partner[rows] = self.benefit[rows].argmax(axis=1)
        self.top[rows] = self.benefit[rows, self.partner[rows]]


# --- relocation -----------------------------------------------------------------------------------


def relocation(
    objective: Objective,
    *,
    rng: np.random.Generator,
    num_restarts: int = 100,
    start: Iterable[Sequence[int]] | None = None,
) -> Partition:
    """Move single silos while that is an improvement: FedCollab's greedy search.

    A sweep visits the silos in random order; each goes to the group, or on its own, where the total
    is best. A restart begins with all silos alone, or from `start`, and ends after a sweep without
    changes; the best of `num_restarts` is returned, the earliest of equals. One restart often ends
    in a poor partition. O(sweeps * N^2) per restart.
    """
    num_restarts = _check.integer("num_restarts", num_restarts, low=1, high=1_000_000)
    num_silos = _num_silos(objective)
    first = np.arange(num_silos)
    if start is not None:
        first = _labels(_check.groups(start, num_silos=num_silos), num_silos)
    threshold = TOLERANCE * objective.scale
    best: tuple[float, IntArray, int] | None = None
    for _ in range(num_restarts):
        state = _State(objective, first.copy(), len(first))
        num_sweeps = state.settle(rng, threshold)
        total = state.total()
        if best is None or total > best[0] + threshold:
            best = (total, state.labels, num_sweeps)
    assert best is not None
    return evaluate(objective, _check.by_label(best[1].tolist()), num_steps=best[2])


class _State:
    """The silos' labels in K places, and the additive sums of every place (some empty)."""

    def __init__(self, objective: Objective, labels: IntArray, num_places: int) -> None:
        self.objective = objective
        self.labels = labels
        self.num_places = num_places
        self.own = np.diagonal(objective.pair, axis1=1, axis2=2)
        self.recount()

    def recount(self) -> None:
        """Compute all sums from the labels, once a sweep, so that rounding cannot accumulate."""
        member = np.zeros((len(self.labels), self.num_places))
        member[np.arange(len(self.labels)), self.labels] = 1.0
        self.count = member.sum(axis=0)
        self.single = self.objective.single @ member
        self.pair = np.einsum("ik,mik->mk", member, self.objective.pair @ member)
        self.value = self._gain(self.single, self.pair, self.count)

    def total(self) -> float:
        self.recount()
        return float(self.value.sum())

    def gains(self, silo: int) -> FloatArray:
        """Return the change of the total if one silo moves to each place, or (last) a new one."""
        source = int(self.labels[silo])
        entering = self._entering(silo)
        with_silo = self._gain(self.single + self.objective.single[:, silo, None], entering, 1.0)
        alone = self.objective.gain(self.objective.single[:, silo], self.own[:, silo])
        left = self._without(silo, source)[2]
        gains = np.append(with_silo - self.value, alone) + (left - self.value[source])
        gains[:-1][self.count == 0] = -np.inf
        gains[source] = -np.inf
        if self.count[source] == 1:
            gains[-1] = -np.inf
        return np.asarray(gains)

    def move(self, silo: int, target: int) -> None:
        source = int(self.labels[silo])
        entering = self._entering(silo)[:, target]
        single, pair, value = self._without(silo, source)
        self.single[:, target] += self.objective.single[:, silo]
        self.pair[:, target] = entering
        self.count[target] += 1
        self.value[target] = self.objective.gain(self.single[:, target], self.pair[:, target])
        self.single[:, source], self.pair[:, source], self.value[source] = single, pair, value
        self.count[source] -= 1
        self.labels[silo] = target

    def settle(self, rng: np.random.Generator, threshold: float) -> int:
        """Sweep until nothing moves; return the number of sweeps."""
        num_sweeps, changed = 0, True
        while changed:
            changed = self._sweep(rng.permutation(len(self.labels)), threshold)
            num_sweeps += 1
        return num_sweeps

    def _sweep(self, order: IntArray, threshold: float) -> bool:
        self.recount()
        changed = False
        for silo in order.tolist():
            gains = self.gains(silo)
            target = int(gains.argmax())
            if gains[target] > threshold:
                empty = int((self.count == 0).argmax())
                self.move(silo, empty if target == self.num_places else target)
                changed = True
        return changed

    def _entering(self, silo: int) -> FloatArray:
        rows = [
            np.bincount(self.labels, weights=matrix[silo], minlength=self.num_places)
            for matrix in self.objective.pair
        ]
        return np.asarray(self.pair + 2 * np.stack(rows) + self.own[:, silo, None])

    def _without(self, silo: int, source: int) -> tuple[FloatArray, FloatArray, float]:
        rest = np.flatnonzero(self.labels == source)
        rest = rest[rest != silo]
        single = self.objective.single[:, rest].sum(axis=1)
        if not len(rest):
            return single, np.zeros(len(self.own)), 0.0
        inner = self.objective.pair[:, silo, rest].sum(axis=1)
        pair = self.pair[:, source] - 2 * inner - self.own[:, silo]
        # Taking away what is nearly everything leaves the rounding of what is taken away.
        if (np.abs(pair) < 1e-6 * np.abs(self.pair[:, source])).any():
            pair = self.objective.pair[:, rest[:, None], rest].sum(axis=(1, 2))
        return single, pair, float(self.objective.gain(single, pair))

    def _gain(self, single: FloatArray, pair: FloatArray, count: FloatArray | float) -> FloatArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            gains = self.objective.gain(single, pair)
        return np.asarray(np.where(np.asarray(count) > 0, gains, 0.0))


# --- optimal --------------------------------------------------------------------------------------


def optimal(objective: Objective) -> Partition:
    """Return the best of all partitions, by dynamic programming over subsets; N <= 16.

    Among equals, the one that keeps the last silos in the smallest groups, so that silos that gain
    nothing together stay alone. About 3^N / 2 additions; `num_steps` is 0. Raises ValueError for
    more than `MAX_OPTIMAL_SILOS` silos.
    """
    num_silos = _num_silos(objective)
    if num_silos > MAX_OPTIMAL_SILOS:
        raise _check.fail("num_silos for `optimal`", f"in [1, {MAX_OPTIMAL_SILOS}]", num_silos)
    gains = _subset_gains(objective)
    best = _best_totals(gains, num_silos)
    return evaluate(objective, _trace(gains, best, TOLERANCE * objective.scale))


def _subset_gains(objective: Objective) -> FloatArray:
    """Return the gains of the 2^N subsets; bit i of the index is silo i, the empty set has 0."""
    num_silos = _num_silos(objective)
    single = np.zeros((len(objective.single), 1))
    pair = np.zeros((len(objective.pair), 1))
    for silo in range(num_silos):
        inner = _subset_sums(objective.pair[:, silo, :silo])
        entered = pair + 2 * inner + objective.pair[:, silo, silo, None]
        pair = np.concatenate([pair, entered], axis=1)
        single = np.concatenate([single, single + objective.single[:, silo, None]], axis=1)
    gains = np.zeros(2**num_silos)
    gains[1:] = objective.gain(single[:, 1:], pair[:, 1:])
    return gains


def _subset_sums(values: FloatArray) -> FloatArray:
    """Return (M, 2^n) sums over all subsets of (M, n) numbers."""
    sums = np.zeros((len(values), 1))
    for column in values.T:
        sums = np.concatenate([sums, sums + column[:, None]], axis=1)
    return sums


def _best_totals(gains: FloatArray, num_silos: int) -> FloatArray:
    """Return the best total of a partition of each subset.

    The group of a subset's highest silo k is {k} and some subset s of the lower silos; the rest is
    a subset t disjoint from s. The 3^k pairs (s, t) are pairs of the low bits, in one vector, times
    pairs of the high bits, in a loop.
    """
    best = np.zeros_like(gains)
    for silo in range(num_silos):
        low_bits = min(silo, 8)
        low_s, low_t, starts = _disjoint_pairs(low_bits)
        high_s, high_t, _ = _disjoint_pairs(silo - low_bits)
        top, done = 1 << silo, best[: 1 << silo].reshape(-1, 1 << low_bits)
        group = gains[top : 2 * top].reshape(done.shape)
        new = np.full_like(done, -np.inf)
        for s, t in zip(high_s.tolist(), high_t.tolist(), strict=True):
            totals = np.maximum.reduceat(group[s][low_s] + done[t][low_t], starts)
            np.maximum(new[s | t], totals, out=new[s | t])
        best[top : 2 * top] = new.ravel()
    return best


def _disjoint_pairs(num_bits: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return all 3^n pairs of disjoint subsets, ordered by union, and where each union starts."""
    s = np.zeros(1, dtype=np.intp)
    t = s
    for bit in (1 << np.arange(num_bits)).tolist():
        s, t = np.concatenate([s, s | bit, s]), np.concatenate([t, t, t | bit])
    order = np.argsort(s | t, kind="stable")
    s, t = s[order], t[order]
    return s, t, np.searchsorted(s | t, np.arange(1 << num_bits))


def _trace(gains: FloatArray, best: FloatArray, threshold: float) -> Groups:
    """Read the groups off the table of best totals, the group of the highest silo first."""
    groups = []
    rest = len(gains) - 1
    while rest:
        top = 1 << (rest.bit_length() - 1)
        subsets = np.flatnonzero((np.arange(top) & ~rest) == 0)
        totals = gains[top | subsets] + best[(rest ^ top) ^ subsets]
        good = subsets[totals >= totals.max() - threshold].tolist()
        chosen = top | min(good, key=lambda subset: (subset.bit_count(), subset))
        groups.append([silo for silo in range(chosen.bit_length()) if chosen >> silo & 1])
        rest ^= chosen
    return groups


# --- solvers by name, and the best of them --------------------------------------------------------


def solve(
    objective: Objective,
    *,
    solver: Solver,
    rng: np.random.Generator | None = None,
    num_restarts: int = 100,
) -> Partition:
    """Run the named solver; `rng` and `num_restarts` are those of `relocation`.

    Raises ValueError for an unknown name and for `relocation` without a generator.
    """
    if solver == "agglomerative":
        return agglomerative(objective)
    if solver == "optimal":
        return optimal(objective)
    if solver != "relocation":
        raise _check.fail("solver", "agglomerative, relocation or optimal", repr(solver))
    if rng is None:
        raise _check.fail("rng", "a numpy Generator for relocation", "None")
    return relocation(objective, rng=rng, num_restarts=num_restarts)


def with_groups(objective: Objective, num_groups: int) -> Partition:
    """Return a good partition into `num_groups` groups: greedy merging, then single moves.

    Silos move one at a time, in order, while the total gains; no group is opened or emptied.
    `num_steps` counts the moves. With at least as many groups as silos, all are alone. Raises
    ValueError for `num_groups` < 1.
    """
    num_groups = _check.integer("num_groups", num_groups, low=1, high=2**31)
    groups = agglomerative(objective, num_groups=num_groups).groups
    state = _State(objective, _labels(groups, _num_silos(objective)), len(groups))
    threshold, num_moves = TOLERANCE * objective.scale, 0
    while moved := _swept(state, threshold):
        num_moves += moved
        state.recount()
    return evaluate(objective, _check.by_label(state.labels.tolist()), num_steps=num_moves)


def _swept(state: _State, threshold: float) -> int:
    """Move every silo of a larger group to its best place; return the number of moves."""
    num_moves = 0
    for silo, home in enumerate(state.labels.tolist()):
        gains = state.gains(silo)[:-1]
        if state.count[home] > 1 and len(gains) > 1 and gains.max() > threshold:
            state.move(silo, int(gains.argmax()))
            num_moves += 1
    return num_moves


def best_partition(
    objective: Objective,
    *,
    rng: np.random.Generator,
    num_restarts: int = 20,
    exact: int = MAX_OPTIMAL_SILOS,
) -> Partition:
    """Return the exact optimum for few silos, else the better of two searches.

    Args:
        num_restarts: of ``relocation`` from singletons.
        exact: number of silos, at most ``MAX_OPTIMAL_SILOS``, up to which the answer is the
            optimum, which takes a tenth of a second.

    Greedy merging commits early: two small silos with nothing in common but their size are joined
    before either meets a larger silo of its own kind, and are never separated. Its answer is
    therefore improved by single moves and compared with relocation from singletons.
    """
    if _num_silos(objective) <= min(exact, MAX_OPTIMAL_SILOS):
        return optimal(objective)
    polished = relocation(objective, rng=rng, num_restarts=1, start=agglomerative(objective).groups)
    searched = relocation(objective, rng=rng, num_restarts=num_restarts)
    gains = [found.objective * objective.sign for found in (polished, searched)]
    return polished if gains[0] >= gains[1] else searched
