"""HCCT's partition, the placing of newcomers, and the choice of alpha and of the layer.

Source: Sun, Kountouris, Zhang, "How to Collaborate: Towards Maximizing the Generalization
Performance in Cross-Silo Federated Learning" (HCCT), https://arxiv.org/abs/2401.13236, eqs. 8-17
and 19, Algorithm 2; newcomers as in Section 7.3. Differs from the paper in testing before it
merges, and in allowing one alpha per silo.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check, solvers
from coterie.strategies.partition._check import FloatArray, Groups
from coterie.strategies.partition.evaluation import TOLERANCE, move_gains
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import Solver

_NUM_POINTS = 48  # alphas that are solved before the changes between them are bisected


# --- newcomers ------------------------------------------------------------------------------------


def place(
    gram: ArrayLike,
    sizes: ArrayLike,
    groups: Iterable[Sequence[int]],
    *,
    alpha: float | ArrayLike,
    newcomer: int,
) -> int | None:
    """Return the index of the group a newcomer joins, or None if it stays alone.

    It joins the group of largest benefit (eqs. 15-16) if that is > 0; ties go to the lowest index.
    Several newcomers are placed one by one against the same groups, so that their order does not
    matter; those that join none may still form a group.

    Args:
        gram, sizes, alpha: as in `partition`, of the members and the newcomer.
        groups: the existing groups, by row of `gram`, in the order that the result refers to. Rows
            in no group are ignored.
        newcomer: the newcomer's row.

    Raises ValueError for bad matrices and for a newcomer that is already in a group.
    """
    objective = HCCTUtility.from_gram(gram, sizes, alpha=alpha)
    benefits = placement_benefits(objective, groups, newcomer)
    if not len(benefits) or benefits.max() <= TOLERANCE * objective.scale:
        return None
    return int(benefits.argmax())


def placement_benefits(
    objective: HCCTUtility, groups: Iterable[Sequence[int]], newcomer: int
) -> FloatArray:
    """Return (K,) benefits of a newcomer joining each of K groups, eq. 15; see `place`."""
    num_silos = objective.single.shape[1]
    given = [list(group) for group in groups]
    _check.groups(given, num_silos=num_silos, cover=False)
    newcomer = _check.integer("newcomer", newcomer, low=0, high=num_silos - 1)
    if any(newcomer in group for group in given):
        raise _check.fail("newcomer", "in no group", f"{newcomer}")

    def value(members: Sequence[int]) -> float:
        return float(objective.member_values(members).sum())

    alone = value([newcomer])
    return np.array([value([*group, newcomer]) - value(group) - alone for group in given])


# --- alpha ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """A partition and the interval of alpha over which it is the answer."""

    alpha_low: float
    alpha_high: float
    groups: Groups

    @property
    def ratio(self) -> float:
        """alpha_high / alpha_low: the stretch's length on a log scale."""
        return self.alpha_high / self.alpha_low if self.alpha_low > 0 else float("inf")


def alpha_path(
    gram: ArrayLike,
    sizes: ArrayLike,
    *,
    solver: Solver | Callable[[HCCTUtility], Groups] = "agglomerative",
    rtol: float = 1e-3,
) -> tuple[Stretch, ...]:
    """Return the partitions from all alone (alpha = 0) to all together (alpha = infinity).

    Stretches follow each other without gaps. `_NUM_POINTS` values, evenly spaced in log alpha
    between the first pair that gains by merging (known exactly) and the first alpha that puts all
    silos together, are solved; changes between neighbours are bisected to a relative `rtol`. A
    partition that exists only between two grid points of equal answers is missed. `solver` is not
    `relocation`; it may be a function that partitions by a utility.

    Valid for sizes up to 1e15 times each other. If large silos gain less than rounding next to
    small ones' utility, the solver separates them at any alpha; from `_together_from` on they are
    together regardless, as the formula demands.
    """
    objective = HCCTUtility.from_gram(gram, sizes, alpha=0.0)
    together_from = _together_from(objective)

    def answer(alpha: float) -> Groups:
        if alpha >= together_from:
            return [list(range(objective.single.shape[1]))]
        utility = objective.with_alpha(alpha)
        if callable(solver):
            return solver(utility)
        return solvers.solve(utility, solver=solver).groups

    if objective.single.shape[1] == 1:
        return (Stretch(0.0, float("inf"), [[0]]),)
    low, high = _alpha_range(objective, answer)
    grid = np.geomspace(low, high, _NUM_POINTS)
    grid[0], grid[-1] = low, high
    points = [(float(alpha), answer(float(alpha))) for alpha in grid]
    for left, right in list(pairwise(points)):
        points += _between(answer, left, right, rtol)
    return _stretches(sorted(points, key=lambda point: point[0]))


def _together_from(objective: HCCTUtility) -> float:
    """Return an alpha from which every merge pays, for any updates.

    Merging A and B, D_A <= D_B, saves at least alpha / (2 D_A) of eq. 15's first term and costs at
    most 2 N of its cosines; no D_A exceeds the sum of all sizes.
    """
    samples = objective.single[1]
    return 4.0 * len(samples) * float(samples.sum())


_Answer = Callable[[float], Groups]
_Point = tuple[float, Groups]


def _alpha_range(objective: HCCTUtility, answer: _Answer) -> tuple[float, float]:
    """Return an alpha at which all are alone (if any > 0), and one at which all are together."""
    first = _first_merge(objective)
    num_silos = objective.single.shape[1]
    samples = objective.single[1]
    # Silos with equal updates merge at any alpha > 0: begin where alpha no longer matters.
    low = max(first * (1 - 1e-9), 1e-6 * float(samples.min()))
    while first > 0 and len(answer(low)) < num_silos:
        low *= 0.5
    high = 2 * max(low, float(samples.max()))
    while len(answer(high)) > 1:
        high *= 2
    while high / 2 > low and len(answer(high / 2)) == 1:
        high /= 2
    return low, high


def _first_merge(objective: HCCTUtility) -> float:
    """Return the smallest alpha at which two silos gain by merging; eq. 15 is linear in alpha."""
    samples, ones = objective.single[1], objective.single[2]
    i, j = np.triu_indices(len(samples), k=1)
    pair = objective.pair
    own = np.diagonal(pair, axis1=1, axis2=2)
    zero = np.zeros(len(i))
    counts = np.stack([zero, samples[i] + samples[j], ones[i] + ones[j]])
    together = objective.gain(counts, own[:, i] + own[:, j] + 2 * pair[:, i, j])
    alone = objective.gain(objective.single * [[0.0], [1.0], [1.0]], own)
    saved = 1 / samples[i] + 1 / samples[j] - 2 / (samples[i] + samples[j])
    lost = alone[i] + alone[j] - together
    return max(float((lost / saved).min()), 0.0)


def _between(answer: _Answer, left: _Point, right: _Point, rtol: float) -> list[_Point]:
    """Bisect differing neighbours to within `rtol`; return the points in between."""
    if left[1] == right[1] or right[0] / left[0] - 1 <= rtol:
        return []
    alpha = float(np.sqrt(left[0] * right[0]))
    middle = (alpha, answer(alpha))
    return [middle, *_between(answer, left, middle, rtol), *_between(answer, middle, right, rtol)]


def _stretches(points: Sequence[_Point]) -> tuple[Stretch, ...]:
    """Join points of equal answers; borders are geometric means of neighbouring alphas."""
    stretches = []
    low = 0.0
    for here, there in pairwise(points):
        if here[1] != there[1]:
            border = float(np.sqrt(here[0] * there[0]))
            stretches.append(Stretch(low, border, here[1]))
            low = border
    return (*stretches, Stretch(low, float("inf"), points[-1][1]))


def stay_intervals(
    gram: ArrayLike,
    sizes: ArrayLike,
    groups: Iterable[Sequence[int]],
    *,
    alpha: float | ArrayLike = 0.0,
    own: Collection[int] = (),
) -> tuple[tuple[float, float], ...]:
    """Return each silo's interval of alpha in which leaving its group brings no gain.

    In the interval, neither moving to another group nor training alone would raise the total
    utility while all other silos stay. Exact: the gain of a move is linear in alpha. (nan, nan) for
    a silo that has a better place at every alpha.

    Args:
        gram, sizes: as in `HCCTUtility.from_gram`.
        alpha: the values in use, one number or one per silo; only matters with `own`.
        own: silos with their own alpha. The interval of each refers to that alpha with all others
            fixed; the other silos' intervals refer to the shared one, with those of `own` fixed.
    """
    objective = HCCTUtility.from_gram(gram, sizes, alpha=alpha)
    checked = _check.groups(groups, num_silos=objective.single.shape[1])
    given, samples = objective.single[:2]
    shared = ~np.isin(np.arange(len(given)), [*own])
    at_zero = move_gains(objective.with_alpha(np.where(shared, 0.0, given)), checked)
    at_one = move_gains(objective.with_alpha(np.where(shared, 1.0, given)), checked)
    slope = at_one - np.where(at_zero > -np.inf, at_zero, 0)
    slope[np.abs(slope) <= TOLERANCE] = 0  # between groups of equal silos the data term is the same
    intervals = [_never_positive(*lines) for lines in zip(at_zero, slope, strict=True)]
    totals = np.array([samples[group].sum() for group in checked])
    at_given = move_gains(objective, checked) if own else at_zero
    home = {silo: total for group, total in zip(checked, totals, strict=True) for silo in group}
    for silo in own:  # its alpha is in its own utility alone: -alpha / D
        there = np.append(totals + samples[silo], samples[silo])
        rise = 1 / home[silo] - 1 / there
        intervals[silo] = _never_positive(at_given[silo] - rise * given[silo], rise)
    return tuple(intervals)


def _never_positive(at_zero: FloatArray, slope: FloatArray) -> tuple[float, float]:
    """Return the alphas >= 0 at which no line ``at_zero + slope * alpha`` is above 0."""
    low, high = 0.0, float("inf")
    for start, rise in zip(at_zero.tolist(), slope.tolist(), strict=True):
        if start == -np.inf:
            continue
        if rise < 0:
            low = max(low, -start / rise)
        elif rise > 0:
            high = min(high, -start / rise)
        elif start > TOLERANCE:
            high = -1.0
    return (low, high) if low <= high else (float("nan"), float("nan"))


# --- HCCT-E ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerChoice:
    """The layer of largest relative variance, eq. 19, and every layer's score."""

    layer: str
    scores: dict[str, float]


def layer_choice(updates: Sequence[Mapping[str, ArrayLike]]) -> LayerChoice:
    """Choose the layer on which silos differ most, for HCCT-E (eq. 19).

    Args:
        updates: one mapping per silo from parameter name to array, with equal names and shapes. A
            layer is a module with all its parameters: the name without its last dotted part.
            Modules with vectors only, such as normalisations, are chosen only if no module has a
            matrix or kernel.

    The score of layer l is ``sum_i |g_i[l] - mean[l]|^2 / (N |mean[l]|^2)``, the paper's Var / Mean
    made dimensionless: infinite if silos differ about a mean of zero, 0 if all are equal. Ties go
    to the first. Raises ValueError for no silo, no layer, other names or shapes, and values not
    finite.
    """
    if not len(updates) or not updates[0]:
        raise _check.fail("updates", "of at least one silo and layer", "none")
    spread: dict[str, float] = {}
    centre: dict[str, float] = {}
    for name in updates[0]:
        layer = name.rpartition(".")[0] or name
        variance, mean = _moments(updates, name)
        spread[layer] = spread.get(layer, 0.0) + variance
        centre[layer] = centre.get(layer, 0.0) + mean
    scores = {layer: _ratio(spread[layer], centre[layer]) for layer in spread}
    weights = {name.rpartition(".")[0] or name for name, a in updates[0].items() if np.ndim(a) > 1}
    candidates = [layer for layer in scores if layer in weights] or list(scores)
    return LayerChoice(max(candidates, key=lambda layer: scores[layer]), scores)


def _moments(updates: Sequence[Mapping[str, ArrayLike]], name: str) -> tuple[float, float]:
    """Return the mean squared distance from the mean update, and the mean's squared norm."""
    arrays = []
    for silo, update in enumerate(updates):
        if update.keys() != updates[0].keys():
            raise ValueError(f"updates must have the layers of silo 0. Silo {silo} has others.")
        arrays.append(np.asarray(update[name]))
        if arrays[-1].shape != arrays[0].shape or not np.isfinite(arrays[-1]).all():
            raise ValueError(
                f"updates must be finite and of one shape. Silo {silo}, layer {name} is not."
            )
    mean = np.zeros(arrays[0].shape)
    for array in arrays:
        mean += array / len(arrays)
    distances = [np.square(array - mean).sum() for array in arrays]
    return float(np.mean(distances)), float(np.square(mean).sum())


def _ratio(variance: float, mean: float) -> float:
    if mean > 0:
        return variance / mean
    return float("inf") if variance > 0 else 0.0
