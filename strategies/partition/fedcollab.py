"""FedCollab's collaboration structure: the error bound L, its minimiser, and how firm it is.

Source: Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated
Learning", ICML 2023, step 2: with beta_j the share of silo j's samples and alpha_ij the weight
of silo j in the model of silo i,

    L = sum_i ( C / sqrt(m) * sqrt(sum_j alpha_ij^2 / beta_j) + sum_j alpha_ij D_ij )

Differs from the paper in offering the exact minimum (N <= 16) and HCCT's agglomeration beside
the greedy search, and in reporting how far the chosen structure is from the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from strategies.partition import _check
from strategies.partition import coalition as _coalition
from strategies.partition._check import Groups
from strategies.partition.coalition import TOLERANCE, FedCollabBound, Partition, Solver

# Rivals of a structure are listed in full only where that is a matter of a thousand or so.
_MAX_GROUPS_TO_MERGE = 50
_MAX_SILOS_TO_SPLIT = 12

__all__ = ["StructureReport", "c_interval", "objective", "report", "solve"]


def objective(
    distances: ArrayLike, sizes: ArrayLike, groups: Iterable[Sequence[int]], *, c: float
) -> float:
    """Return FedCollab's bound L of a structure; smaller is better.

    Args:
        distances: (N, N) symmetric distances of the silos' data, 0 on the diagonal; clipped to
            [0, 1].
        sizes: (N,) numbers of training samples, > 0.
        groups: a partition of the silos.
        c: the paper's hyperparameter C, > 0.

    Example: two silos of 100 samples at distance 0.5 have L = 2 * 1.0 apart and
    2 * (0.7071 + 0.25) together, with c = 10.
    """
    bound = FedCollabBound.from_distances(distances, sizes, c=c)
    return _value(bound, _check.groups(groups, num_silos=len(bound.distances)))


def solve(
    distances: ArrayLike,
    sizes: ArrayLike,
    *,
    c: float,
    solver: Solver = "relocation",
    rng: np.random.Generator | None = None,
    num_restarts: int = 100,
) -> Partition:
    """Return the structure of smallest bound that the solver finds.

    `rng` (needed by `relocation`) and `num_restarts` are those of `coalition.relocation`; the
    rest as in `objective`. Raises ValueError for bad matrices, c <= 0, and N > 16 with `optimal`.
    """
    bound = FedCollabBound.from_distances(distances, sizes, c=c)
    return _coalition.solve(bound, solver=solver, rng=rng, num_restarts=num_restarts)


@dataclass(frozen=True)
class StructureReport:
    """L of a chosen structure beside others, and the interval of c in which it stays chosen.

    second_groups, second_best: the best other structure found: one silo moved, two groups
        merged (up to 50 groups), one group split in two (groups up to 12 silos), all alone, all
        together, or the answer of `agglomerative`. None and infinity for a single silo.
    c_low, c_high: no structure found is better anywhere between them.
    """

    groups: Groups
    chosen: float
    alone: float
    together: float
    second_best: float
    second_groups: Groups | None
    c_low: float
    c_high: float


def report(
    distances: ArrayLike,
    sizes: ArrayLike,
    groups: Iterable[Sequence[int]],
    *,
    c: float,
    solver: Solver = "relocation",
    rng: np.random.Generator | None = None,
    num_restarts: int = 20,
) -> StructureReport:
    """Return the bound of a structure beside its rivals. Arguments as in `solve`."""
    bound = FedCollabBound.from_distances(distances, sizes, c=c)
    num_silos = len(bound.distances)
    chosen = _check.groups(groups, num_silos=num_silos)
    rivals = list(_rivals(bound, chosen))
    values = [_value(bound, rival) for rival in rivals]
    second = int(np.argmin(values)) if rivals else None
    interval = c_interval(
        distances, sizes, chosen, c=c, solver=solver, rng=rng, num_restarts=num_restarts
    )
    return StructureReport(
        groups=chosen,
        chosen=_value(bound, chosen),
        alone=_value(bound, [[silo] for silo in range(num_silos)]),
        together=_value(bound, [list(range(num_silos))]),
        second_best=float("inf") if second is None else values[second],
        second_groups=None if second is None else rivals[second],
        c_low=interval[0],
        c_high=interval[1],
    )


def c_interval(
    distances: ArrayLike,
    sizes: ArrayLike,
    groups: Iterable[Sequence[int]],
    *,
    c: float,
    solver: Solver = "relocation",
    rng: np.random.Generator | None = None,
    num_restarts: int = 20,
) -> tuple[float, float]:
    """Return the interval of c around `c` in which no structure found beats `groups`.

    L of a structure is a line in c, so the smallest L over all structures is concave and the
    structure that is best at `c` is best on one interval. Its ends are found by solving at the
    ends of the interval allowed by the structures known so far, until nothing better turns up:
    exact with `optimal`, otherwise as good as the solver. (nan, nan) where `groups` is beaten
    at `c` itself.
    """
    bound = FedCollabBound.from_distances(distances, sizes, c=c)
    chosen = _check.groups(groups, num_silos=len(bound.distances))
    mine = _line(bound, chosen)
    low, high = 0.0, float("inf")
    for rival in _rivals(bound, chosen):
        low, high = _cut(mine, _line(bound, rival), low, high)
    while low <= c <= high:
        ends = [end for end in (low, high) if 0 < end < float("inf")]
        found = [
            _coalition.solve(
                bound.with_c(end), solver=solver, rng=rng, num_restarts=num_restarts
            ).groups
            for end in ends
        ]
        before = (low, high)
        for rival in found:
            low, high = _cut(mine, _line(bound, rival), low, high)
        if (low, high) == before:
            return before
    return float("nan"), float("nan")


def _value(bound: FedCollabBound, groups: Groups) -> float:
    return float(sum(bound.member_values(group).sum() for group in groups))


def _line(bound: FedCollabBound, groups: Groups) -> tuple[float, float]:
    """Return (slope, constant) of L as a function of c."""
    slope = sum(len(group) / float(np.sqrt(bound.single[1, group].sum())) for group in groups)
    return slope, _value(bound, groups) - slope * bound.c


def _cut(
    mine: tuple[float, float], rival: tuple[float, float], low: float, high: float
) -> tuple[float, float]:
    """Cut [low, high] to the c at which my line is not above the rival's."""
    slope, constant = mine[0] - rival[0], mine[1] - rival[1]
    if abs(slope) <= TOLERANCE * mine[0]:
        return (low, high) if constant <= TOLERANCE * (1 + abs(mine[1])) else (1.0, -1.0)
    crossing = -constant / slope
    # Ends that were cut before by the same crossing must not creep by its rounding.
    if slope > 0:
        return low, crossing if crossing < high * (1 - 1e-9) else high
    return crossing if crossing > low * (1 + 1e-9) else low, high


def _rivals(bound: FedCollabBound, chosen: Groups) -> Iterator[Groups]:
    """Other structures near the chosen one: moves, merges, splits, the extremes, other solvers."""
    num_silos = len(bound.distances)
    found = [
        [[silo] for silo in range(num_silos)],
        [list(range(num_silos))],
        _coalition.agglomerative(bound).groups,
        *_moved(bound, chosen),
        *_merged(chosen),
        *_split(chosen),
    ]
    seen = {_key(chosen)}
    for groups in found:
        if _key(groups) not in seen:
            seen.add(_key(groups))
            yield sorted(groups)


def _key(groups: Groups) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _moved(bound: FedCollabBound, chosen: Groups) -> Iterator[Groups]:
    for silo, move in enumerate(_coalition.evaluate(bound, chosen).alternatives):
        rest = [[member for member in group if member != silo] for group in chosen]
        if move.target is None:
            rest.append([silo])
        else:
            rest[move.target] = sorted([*rest[move.target], silo])
        yield [group for group in rest if group]


def _merged(chosen: Groups) -> Iterator[Groups]:
    if len(chosen) > _MAX_GROUPS_TO_MERGE:
        return
    for a, b in combinations(range(len(chosen)), 2):
        others = [group for k, group in enumerate(chosen) if k not in (a, b)]
        yield [*others, sorted(chosen[a] + chosen[b])]


def _split(chosen: Groups) -> Iterator[Groups]:
    for k, group in enumerate(chosen):
        if len(group) > _MAX_SILOS_TO_SPLIT:
            continue
        others = [other for index, other in enumerate(chosen) if index != k]
        for mask in range(1, 2 ** (len(group) - 1)):
            out = [silo for bit, silo in enumerate(group) if mask >> bit & 1]
            yield [*others, [silo for silo in group if silo not in out], out]
