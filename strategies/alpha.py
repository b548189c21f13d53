"""α without guessing: a short trial of the few partitions that any α could give.

The papers give α per data set. But all that α does is choose one of a handful of partitions, the
path from all-alone to all-together, and that path is known from one Gram matrix. So the server
takes the partitions that last longest on the path, with all-alone and all-together among them,
lets every distinct group of them train side by side for a few rounds from the same start, and
has each silo measure its groups' models on data that it holds out of all training so far. The
partition with the lowest mean error wins, and its α is the geometric middle of its stretch.
Nothing leaves a silo but those error rates.

Differs from the paper, which has no such rule. Needs silos that understand ``holdout``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

import wire
from strategies.errors import FederationError
from strategies.grouping import averaged, feasible
from strategies.loop import Group, Order, Update
from strategies.models import weighted_mean
from strategies.partition.coalition import MAX_OPTIMAL_SILOS
from strategies.partition.hcct import alpha_path
from strategies.roster import Silo
from wire import Model

__all__ = [
    "Candidate",
    "Trial",
    "candidates",
    "continue_trial",
    "open_trial",
    "orders",
    "possible",
    "sparing_orders",
    "verdict",
]

log = logging.getLogger("coterie.run")

HOLDOUT = 0.2
"""Share of its training data that a silo keeps out of the trial's training."""
TRIAL_ROUNDS = 4
"""Rounds of side-by-side training; the last one's models received are what is compared."""
MAX_NON_TRIVIAL = 3
"""Partitions tried beside all-alone and all-together: those that last longest over log α."""
BEYOND = 4.0
"""All-together's α, as a multiple of the smallest at which everybody is together."""


@dataclass(frozen=True)
class Candidate:
    """One partition that some α gives, that α, and how long it lasts (α_high / α_low)."""

    groups: tuple[Group, ...]
    alpha: float
    ratio: float


@dataclass(frozen=True)
class Trial:
    """A trial under way.

    Attributes:
        candidates: what is compared; all-alone is the first.
        models: distinct group → the model that it starts its next round from.
        errors: distinct group → silo → error on held-out data of the model last received.
        rounds_left: rounds still to go.
    """

    candidates: tuple[Candidate, ...]
    models: Mapping[Group, Model]
    errors: Mapping[Group, Mapping[str, float]] = field(default_factory=dict)
    rounds_left: int = TRIAL_ROUNDS

    @property
    def groups(self) -> tuple[Group, ...]:
        """The distinct groups, sorted."""
        return tuple(sorted(self.models))


def candidates(
    gram: NDArray[np.float64], sizes: NDArray[np.float64], names: Sequence[str]
) -> tuple[Candidate, ...]:
    """All-alone, all-together, and the non-trivial partitions that last longest over log α.

    Args:
        gram: (N, N) inner products of the updates.
        sizes: (N,) training samples.
        names: of the N silos.
    """
    solver = "optimal" if len(names) <= MAX_OPTIMAL_SILOS else "agglomerative"
    path = alpha_path(gram, sizes, solver=solver)  # type: ignore[arg-type]
    alone, together = path[0], path[-1]
    between = sorted(
        (s for s in path if 1 < len(s.groups) < len(names)), key=lambda s: s.ratio, reverse=True
    )
    found = [Candidate(tuple((name,) for name in sorted(names)), 0.0, alone.ratio)]
    for stretch in between[:MAX_NON_TRIVIAL]:
        groups = tuple(sorted(tuple(names[i] for i in group) for group in stretch.groups))
        middle = float(np.sqrt(stretch.alpha_low * stretch.alpha_high))
        found.append(Candidate(groups, middle or stretch.alpha_high / 2, stretch.ratio))
    if len(names) > 1:
        everybody = (tuple(sorted(names)),)
        found.append(Candidate(everybody, BEYOND * together.alpha_low, together.ratio))
    return tuple(found)


def possible(found: Sequence[Candidate], minimums: Mapping[str, int]) -> tuple[Candidate, ...]:
    """The candidates as the silos' smallest groups let them be; the first of equal ones."""
    distinct: dict[tuple[Group, ...], Candidate] = {}
    for candidate in found:
        groups = tuple(sorted(feasible(candidate.groups, minimums)))
        distinct.setdefault(groups, replace(candidate, groups=groups))
    return tuple(distinct.values())


def open_trial(
    found: Sequence[Candidate], models: Mapping[str, Model], sizes: Mapping[str, float]
) -> Trial:
    """A trial in which every distinct group starts from its members' mean model."""
    distinct = {group for candidate in found for group in candidate.groups}
    starts = {
        group: weighted_mean([models[n] for n in group], [sizes[n] for n in group])
        for group in sorted(distinct)
    }
    return Trial(tuple(found), starts)


def orders(trial: Trial, silos: Sequence[Silo]) -> list[Order]:
    """Every silo trains the model of every distinct group that it is in.

    Alone is its ordinary training; the others have a purpose, so that they are told apart.
    """
    work = []
    for silo in silos:
        for number, group in enumerate(trial.groups):
            if silo.name in group:
                purpose = "" if len(group) == 1 else f"trial-{number}"
                config = {wire.HOLDOUT: HOLDOUT, wire.GROUP_SIZE: len(group)}
                work.append(Order(silo, trial.models[group], purpose=purpose, config=config))
    return work


def sparing_orders(models: Mapping[str, Model], silos: Sequence[Silo]) -> list[Order]:
    """What comes before the trial: everybody trains alone, without what the trial measures on.

    A model that has seen a silo's held-out samples once knows them for the rest of the trial, and
    none knows them as well as the silo's own: all-alone would win where data is scarce.
    """
    return [Order(silo, models[silo.name], config={wire.HOLDOUT: HOLDOUT}) for silo in silos]


def continue_trial(trial: Trial, updates: Sequence[Update]) -> Trial:
    """The trial after a round: every group aggregated, every error noted."""
    models, errors = dict(trial.models), dict(trial.errors)
    for number, group in enumerate(trial.groups):
        purpose = "" if len(group) == 1 else f"trial-{number}"
        mine = [u for u in updates if u.purpose == purpose and u.silo.name in group]
        mine = averaged(mine)
        if not mine:
            continue
        models[group] = weighted_mean([u.model for u in mine], [u.num_examples for u in mine])
        errors[group] = {
            u.silo.name: u.metrics[wire.HOLDOUT_ERROR]
            for u in mine
            if wire.HOLDOUT_ERROR in u.metrics
        }
    return replace(trial, models=models, errors=errors, rounds_left=trial.rounds_left - 1)


def verdict(trial: Trial) -> tuple[Candidate, dict[str, float]]:
    """The candidate with the lowest mean error over silos, and every candidate's.

    Of equals the one that lasts longest over log α wins.

    Raises:
        FederationError: no silo measured anything.
    """
    scores = [_score(trial, candidate) for candidate in trial.candidates]
    if not any(np.isfinite(scores)):
        raise FederationError(
            "alpha = auto needs silos that hold out data and measure on it (coterie silos). "
            "Give alpha as a number.",
            phase="alpha",
        )
    ranked = sorted(
        (i for i, score in enumerate(scores) if np.isfinite(score)),
        key=lambda i: (round(scores[i], 9), -trial.candidates[i].ratio),
    )
    best = trial.candidates[ranked[0]]
    named = {_name(c): score for c, score in zip(trial.candidates, scores, strict=True)}
    text = ", ".join(f"{name}: {100 * score:.1f} %" for name, score in named.items())
    log.info("alpha = auto chose %.3g (%s); held-out errors: %s", best.alpha, _name(best), text)
    return best, named


def _score(trial: Trial, candidate: Candidate) -> float:
    measured = [
        error for group in candidate.groups for error in trial.errors.get(group, {}).values()
    ]
    return float(np.mean(measured)) if measured else float("nan")


def _name(candidate: Candidate) -> str:
    return f"α {candidate.alpha:.3g}, {len(candidate.groups)} group(s)"
