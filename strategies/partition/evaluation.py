"""A partition's value, and what moving one silo would change in it.

Solvers maximise an `Objective`'s *gain*: the utility, or minus the bound. A change is an
improvement if it raises the total by more than `TOLERANCE` times the size of one silo's gain, so
that rounding alone neither merges nor separates silos.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray, Groups
from coterie.strategies.partition.objectives import Objective

TOLERANCE = 1e-12

IntArray: TypeAlias = NDArray[np.intp]


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
    checked = _check.groups(groups, num_silos=num_silos_of(objective))
    values = np.zeros(num_silos_of(objective))
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
    state = Places(objective, labels_of(groups, num_silos_of(objective)), len(groups))
    return np.stack([state.gains(silo) for silo in range(len(state.labels))])


def num_silos_of(objective: Objective) -> int:
    return int(objective.single.shape[1])


def labels_of(groups: Sequence[Sequence[int]], num_silos: int) -> IntArray:
    labels = np.zeros(num_silos, dtype=np.intp)
    for index, group in enumerate(groups):
        labels[list(group)] = index
    return labels


class Places:
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
