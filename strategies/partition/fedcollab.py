"""FedCollab's collaboration structure: the error bound L, its minimiser, and its robustness.

Source: Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated
Learning", ICML 2023, step 2: with beta_j the share of silo j's samples and alpha_ij the weight of
silo j in the model of silo i,

    L = sum_i ( C / sqrt(m) * sqrt(sum_j alpha_ij^2 / beta_j) + sum_j alpha_ij D_ij )

Differs from the paper in also offering the exact minimum (N <= 16) and HCCT's agglomeration, in
reporting the distance to the next structure, and in `auto_c`: the paper gives c per data set (10,
10, 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check, solvers
from coterie.strategies.partition._check import Groups
from coterie.strategies.partition.evaluation import TOLERANCE, evaluate
from coterie.strategies.partition.objectives import FedCollabBound
from coterie.strategies.partition.solvers import Solver

# Rivals of a structure are listed in full only where that is a matter of a thousand or so.
_MAX_GROUPS_TO_MERGE = 50
_MAX_SILOS_TO_SPLIT = 12


def objective(bound: FedCollabBound, groups: Iterable[Sequence[int]]) -> float:
    """Return FedCollab's bound L of a structure, a partition of the silos; smaller is better.

    Example: with c = 10, two silos of 100 samples at distance 0.5 have L = 2 * 1.0 apart and 2 *
    (0.7071 + 0.25) together.
    """
    return _value(bound, _check.groups(groups, num_silos=len(bound.distances)))


@dataclass(frozen=True)
class StructureReport:
    """L of a chosen structure and of others, and the interval of c in which it stays chosen.

    second_groups, second_best: the best other structure found: one silo moved, two groups merged
        (up to 50 groups), one group split (groups up to 12 silos), all alone, all together, or the
        answer of `agglomerative`. None and infinity for a single silo.
    c_low, c_high: no structure found is better for c between them.
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
    bound: FedCollabBound,
    groups: Iterable[Sequence[int]],
    *,
    solver: Solver = "relocation",
    rng: np.random.Generator | None = None,
    num_restarts: int = 20,
) -> StructureReport:
    """Return the bound of a structure and of its rivals; options as in `solvers.solve`."""
    num_silos = len(bound.distances)
    chosen = _check.groups(groups, num_silos=num_silos)
    rivals = list(_rivals(bound, chosen))
    values = [_value(bound, rival) for rival in rivals]
    second = int(np.argmin(values)) if rivals else None

    def solve(c: float) -> Groups:
        return solvers.solve(
            bound.with_c(c), solver=solver, rng=rng, num_restarts=num_restarts
        ).groups

    c_low, c_high = _c_interval(bound, chosen, rivals, solve)
    return StructureReport(
        groups=chosen,
        chosen=_value(bound, chosen),
        alone=_value(bound, [[silo] for silo in range(num_silos)]),
        together=_value(bound, [list(range(num_silos))]),
        second_best=float("inf") if second is None else values[second],
        second_groups=None if second is None else rivals[second],
        c_low=c_low,
        c_high=c_high,
    )


def _c_interval(
    bound: FedCollabBound, chosen: Groups, rivals: list[Groups], solve: Callable[[float], Groups]
) -> tuple[float, float]:
    """Return the interval of c around the bound's in which no structure found beats `chosen`.

    L of a structure is linear in c, so each structure is best on one interval. Its ends are found
    by solving at the ends that the known structures allow until nothing better turns up: exact with
    `optimal`, otherwise as good as the solver. (nan, nan) if `chosen` is beaten at the bound's c.
    """
    mine = _line(bound, chosen)
    low, high = 0.0, float("inf")
    for rival in rivals:
        low, high = _cut(mine, _line(bound, rival), low, high)
    while low <= bound.c <= high:
        before = (low, high)
        for rival in [solve(end) for end in (low, high) if 0 < end < float("inf")]:
            low, high = _cut(mine, _line(bound, rival), low, high)
        if (low, high) == before:
            return before
    return float("nan"), float("nan")


def place(bound: FedCollabBound, groups: Iterable[Sequence[int]], newcomer: int) -> Groups:
    """Return the best structure in which only the newcomer moves.

    Args:
        bound: of all silos.
        groups: of placed silos; unplaced ones are ignored.
        newcomer: its row; it joins the group, or stays alone, where the total L is smallest. Ties
            go to the first group, and to a group before alone.
    """
    num_silos = len(bound.distances)
    newcomer = _check.integer("newcomer", newcomer, low=0, high=num_silos - 1)
    present = [sorted(group) for group in groups]
    options = [
        [*present[:k], sorted([*group, newcomer]), *present[k + 1 :]]
        for k, group in enumerate(present)
    ]
    checked = [
        _check.groups(option, num_silos=num_silos, cover=False)
        for option in [*options, [*present, [newcomer]]]
    ]
    return checked[int(np.argmin([_value(bound, option) for option in checked]))]


def auto_c(sizes: ArrayLike, errors: ArrayLike, *, num_errors: float = 2.0) -> float:
    """Return the smallest c at which noise alone keeps no two silos apart.

    Two silos at distance D have a smaller bound together if
    ``c * (1/sqrt(m_i) + 1/sqrt(m_j) - 2/sqrt(m_i + m_j)) > D``. Here D is `num_errors` standard
    errors: what silos with *equal* data may well appear to have. Silos that differ by less than can
    be measured are then together; those that differ by more are apart as far as their sizes allow.
    With half of m samples held out at silos of one size, c is 3.4 for any m.

    Args:
        sizes: (N,) numbers of training samples, > 0, N >= 1.
        errors: (N, N) standard errors of the distances for equal data (`distance.null_error`); NaN
            if a pair was not measured.
        num_errors: > 0.

    Returns:
        The largest over the measured pairs; 1 if there is none.
    """
    noise = np.asarray(errors, dtype=np.float64)
    if noise.ndim != 2 or noise.shape[0] != noise.shape[1] or (noise < 0).any():
        raise _check.fail("errors", "a square matrix, >= 0 or NaN", f"shape {noise.shape}")
    samples = _check.sizes(sizes, num_silos=len(noise))
    wanted = _check.number("num_errors", num_errors, above=True)
    single = 1 / np.sqrt(samples)
    saved = single[:, None] + single - 2 / np.sqrt(samples[:, None] + samples)
    pairs = np.triu(np.isfinite(noise), 1)
    return float((wanted * noise[pairs] / saved[pairs]).max()) if pairs.any() else 1.0


def _value(bound: FedCollabBound, groups: Groups) -> float:
    return float(sum(bound.member_values(group).sum() for group in groups))


def _line(bound: FedCollabBound, groups: Groups) -> tuple[float, float]:
    slope = sum(len(group) / float(np.sqrt(bound.single[1, group].sum())) for group in groups)
    return slope, _value(bound, groups) - slope * bound.c


def _cut(
    mine: tuple[float, float], rival: tuple[float, float], low: float, high: float
) -> tuple[float, float]:
    """Cut [low, high] to the c at which ``mine`` is not above ``rival``."""
    slope, constant = mine[0] - rival[0], mine[1] - rival[1]
    if abs(slope) <= TOLERANCE * mine[0]:
        return (low, high) if constant <= TOLERANCE * (1 + abs(mine[1])) else (1.0, -1.0)
    crossing = -constant / slope
    # Ends that were cut before by the same crossing must not creep by its rounding.
    if slope > 0:
        return low, crossing if crossing < high * (1 - 1e-9) else high
    return crossing if crossing > low * (1 + 1e-9) else low, high


def _rivals(bound: FedCollabBound, chosen: Groups) -> Iterator[Groups]:
    """Yield structures near the chosen one: moves, merges, splits, extremes, greedy merging."""
    num_silos = len(bound.distances)
    found = [
        [[silo] for silo in range(num_silos)],
        [list(range(num_silos))],
        solvers.agglomerative(bound).groups,
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
    for silo, move in enumerate(evaluate(bound, chosen).alternatives):
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
