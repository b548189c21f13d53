"""Three solvers for the best partition into coalitions, and the best of them.

Ties go to the lowest indices.

Sources: HCCT Algorithm 2; FedCollab (Bao et al., ICML 2023) step 2. Differs from HCCT in testing
before it merges, and adds to both papers the exact optimum for N <= 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray, Groups
from coterie.strategies.partition.evaluation import (
    TOLERANCE,
    IntArray,
    Partition,
    Places,
    evaluate,
    labels_of,
    num_silos_of,
)
from coterie.strategies.partition.objectives import Objective

MAX_OPTIMAL_SILOS = 16

Solver: TypeAlias = Literal["agglomerative", "relocation", "optimal"]


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
    most = num_silos_of(objective) - num_groups
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
    num_silos = num_silos_of(objective)
    first = np.arange(num_silos)
    if start is not None:
        first = labels_of(_check.groups(start, num_silos=num_silos), num_silos)
    threshold = TOLERANCE * objective.scale
    best: tuple[float, IntArray, int] | None = None
    for _ in range(num_restarts):
        state = Places(objective, first.copy(), len(first))
        num_sweeps = state.settle(rng, threshold)
        total = state.total()
        if best is None or total > best[0] + threshold:
            best = (total, state.labels, num_sweeps)
    assert best is not None
    return evaluate(objective, _check.by_label(best[1].tolist()), num_steps=best[2])


# --- optimal --------------------------------------------------------------------------------------


def optimal(objective: Objective) -> Partition:
    """Return the best of all partitions, by dynamic programming over subsets; N <= 16.

    Among equals, the one that keeps the last silos in the smallest groups, so that silos that gain
    nothing together stay alone. About 3^N / 2 additions; `num_steps` is 0. Raises ValueError for
    more than `MAX_OPTIMAL_SILOS` silos.
    """
    num_silos = num_silos_of(objective)
    if num_silos > MAX_OPTIMAL_SILOS:
        raise _check.fail("num_silos for `optimal`", f"in [1, {MAX_OPTIMAL_SILOS}]", num_silos)
    gains = _subset_gains(objective)
    best = _best_totals(gains, num_silos)
    return evaluate(objective, _trace(gains, best, TOLERANCE * objective.scale))


def _subset_gains(objective: Objective) -> FloatArray:
    """Return the gains of the 2^N subsets; bit i of the index is silo i, the empty set has 0."""
    num_silos = num_silos_of(objective)
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
    state = Places(objective, labels_of(groups, num_silos_of(objective)), len(groups))
    threshold, num_moves = TOLERANCE * objective.scale, 0
    while moved := _swept(state, threshold):
        num_moves += moved
        state.recount()
    return evaluate(objective, _check.by_label(state.labels.tolist()), num_steps=num_moves)


def _swept(state: Places, threshold: float) -> int:
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
    if num_silos_of(objective) <= min(exact, MAX_OPTIMAL_SILOS):
        return optimal(objective)
    polished = relocation(objective, rng=rng, num_restarts=1, start=agglomerative(objective).groups)
    searched = relocation(objective, rng=rng, num_restarts=num_restarts)
    gains = [found.objective * objective.sign for found in (polished, searched)]
    return polished if gains[0] >= gains[1] else searched
