"""Automatic choice of α: a short trial of the few partitions that any α could give.

The papers give α per data set. But α only selects one of a handful of partitions, the path from
all-alone to all-together, and that path follows from one Gram matrix:

1. *Look.* Every silo trains alone from w⁰, with a fold of its training data held out, until groups
   are visible on the path (``SEEN``), for at most ``MAX_LOOK`` rounds or a third of the run.
2. *Trial.* The partitions that last longest on the path, and all-alone and all-together, train side
   by side. Each group starts at the mean of its members' models, none of which has seen its silo's
   fold; all-alone continues. Every silo measures its groups' models on its fold.
3. *Verdict.* Candidates are compared silo by silo. The trial ends when all others are significantly
   worse than one, after at least ``MIN_TRIAL`` rounds. At the end of its budget, ``MAX_TRIAL``
   rounds or two thirds of the run, the partition of smallest risk wins. Models no better than w⁰
   are never chosen.

The winner's α is the geometric middle of the stretch in which its groups then come out. A silo
sends only how often its groups' models erred, and on how many samples.

Differs from the paper, which has no such rule. Needs silos that understand ``holdout``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.strategies.partition.fedgroup import silhouette
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.rounds.algorithm import Order, Updates
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members, minimums_of, staying
from coterie.strategies.rounds.minimum_sizes import accepted, combine, form
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

HOLDOUT = 0.2
"""Share of its training data that a silo holds out until the verdict."""
MIN_LOOK, MAX_LOOK = 2, 6
"""Rounds in which every silo trains alone before the trial. After one round the path is not
informative."""
SEEN = 0.6
"""Silhouette (MADC) from which a partition is visible.

In fifteen-round runs of nine digits silos the hidden groups passed it in round 3 or 4 under feature
and concept shift; without groups (IID, quantity shift) no partition exceeded 0.47 in six rounds."""
MIN_TRIAL, MAX_TRIAL = 3, 6
"""Rounds of parallel training; each measures the received models."""
CONFIDENCE = 0.95
"""Confidence of one-sided tests."""
MAX_NON_TRIVIAL = 3
"""Maximum partitions tried besides all-alone and all-together: the longest over log α."""
BEYOND = 4.0
"""All-together's α, as a multiple of the smallest at which all silos are together."""
BORDER = 0.1
"""Relative precision of the borders on a path; no candidate needs more."""
LEAST_ROUNDS = MIN_LOOK + MIN_TRIAL + 1
"""Minimum rounds of a run; the last one is for the winner."""


PLANNED = 3 * MAX_LOOK
"""Rounds from which a run looks and tries as long as a longer one, if its first silos stay."""


def look_until(rounds: int) -> int:
    """Return the last round of a look; ``rounds`` of the run, 0 if unknown."""
    return max(MIN_LOOK, min(MAX_LOOK, rounds // 3)) if rounds else MAX_LOOK


def last_to_begin(rounds: int) -> int:
    """Return the last round at whose end a trial may begin."""
    return rounds - MIN_TRIAL - 1


def budget(rounds: int, begun: int) -> int:
    """Return the maximum rounds of a trial that begins at the end of round ``begun``."""
    return max(MIN_TRIAL, min(MAX_TRIAL, 2 * rounds // 3 - begun)) if rounds else MAX_TRIAL


@dataclass(frozen=True)
class Candidate:
    """A partition that some α gives, that α, and its stretch (α_high / α_low)."""

    groups: tuple[Group, ...]
    alpha: float
    ratio: float


@dataclass(frozen=True)
class Found:
    """A silo's measurement on its held-out samples."""

    error: float
    num_examples: int


@dataclass(frozen=True)
class Trial:
    """An ongoing trial.

    Attributes:
        candidates: partitions compared; all-alone is the first.
        models: distinct group → the model that it starts its next round from.
        untrained: silo → its error with w⁰, if measured.
        found: distinct group → silo → its measurement of the model received in the last round.
        rounds_left: rounds left of its budget.
        leader: index of the candidate ahead when silos last could compare all.
    """

    candidates: tuple[Candidate, ...]
    models: Mapping[Group, Model]
    untrained: Mapping[str, Found] = field(default_factory=dict)
    found: Mapping[Group, Mapping[str, Found]] = field(default_factory=dict)
    rounds_left: int = MAX_TRIAL
    played: int = 0
    leader: int | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The distinct groups, sorted."""
        return tuple(sorted(self.models))


@dataclass(frozen=True)
class Landscape:
    """The input for the path of partitions over α.

    Attributes:
        gram: (N, N) inner products of what is compared.
        sizes: (N,) training samples.
        minimums: silo → the smallest group that it accepts, if it stated one.
        solve: the run's own search.
    """

    names: Sequence[str]
    gram: NDArray[np.float64]
    sizes: NDArray[np.float64]
    minimums: Mapping[str, int]
    solve: Callable[[HCCTUtility], list[list[int]]]

    def path(self) -> list[Candidate]:
        """Return the candidates from all-alone to all-together, each at its stretch's middle α."""
        found: list[Candidate] = []
        for stretch in alpha_path(self.gram, self.sizes, solver=self.solve, rtol=BORDER):
            raw = [tuple(sorted(self.names[i] for i in group)) for group in stretch.groups]
            groups = tuple(sorted(form(raw, self.minimums)))
            low, high = stretch.alpha_low, stretch.alpha_high
            if len(raw) == 1:  # equal updates merge at any α above 0: then the silos' scale will do
                alpha = BEYOND * low or float(self.sizes.mean())
            elif len(raw) == len(self.names):
                alpha = 0.0
            else:
                alpha = float(np.sqrt(low * high)) or high / 2
            found.append(Candidate(groups, alpha, stretch.ratio))
        return found


def candidates(landscape: Landscape) -> tuple[Candidate, ...]:
    """Return all-alone, all-together, and the partitions between that last longest over log α.

    Partitions respect the silos' smallest groups; of equal ones the first is kept. All-alone is
    always included, even if equal updates restrict it to α = 0.
    """
    path = landscape.path()
    alone = Candidate(tuple((name,) for name in sorted(landscape.names)), 0.0, 1.0)
    middle = [c for c in path[:-1] if c.groups != alone.groups]
    between = sorted(middle, key=lambda c: c.ratio, reverse=True)[:MAX_NON_TRIVIAL]
    distinct: dict[tuple[Group, ...], Candidate] = {}
    first = path[0] if path[0].groups == alone.groups else alone
    for candidate in (first, *between, path[-1]):
        distinct.setdefault(candidate.groups, candidate)
    return tuple(distinct.values())


def is_visible(found: Sequence[Candidate], landscape: Landscape) -> bool:
    """Return whether one of these partitions is well separated."""
    row = {name: number for number, name in enumerate(landscape.names)}
    return any(
        silhouette(landscape.gram, [[row[name] for name in group] for group in c.groups]) >= SEEN
        for c in found
    )


def held_out(updates: Updates) -> dict[str, Found]:
    """Return silo → its measurement of the model it received, if it reported one."""
    found = {}
    for update in updates:
        error = update.metrics.get(wire.HOLDOUT_ERROR, float("nan"))
        stated = wire.HOLDOUT_EXAMPLES in update.metrics
        count = update.held_out(HOLDOUT) if stated else HOLDOUT * update.num_examples
        if isfinite(error) and isfinite(count):
            found[update.silo.name] = Found(error, max(1, round(count)))
    return found


def open_trial(
    found: Sequence[Candidate],
    members: Members,
    *,
    untrained: Mapping[str, Found],
    rounds_left: int = MAX_TRIAL,
) -> Trial:
    """Return a trial in which every distinct group starts from the mean of its members' models."""
    distinct = sorted({group for candidate in found for group in candidate.groups})
    models = {
        group: weighted_mean(
            [members.models[name] for name in group], [members.sizes[name] for name in group]
        )
        for group in distinct
    }
    return Trial(tuple(found), models, untrained, rounds_left=rounds_left)


def orders(trial: Trial, silos: Sequence[Silo]) -> list[Order]:
    """Order each silo's training of every distinct group that it is in.

    Alone is its ordinary training; the other orders have a purpose to distinguish them. A silo
    receives the number of group members present and skips groups that are too small for it.
    """
    here = {silo.name: silo for silo in silos}
    minimums = minimums_of(silos)
    work = []
    for silo in silos:
        for number, group in enumerate(trial.groups):
            if silo.name not in group:
                continue
            purpose = "" if len(group) == 1 else f"trial-{number}"
            taking_part = staying([name for name in group if name in here], minimums)
            if purpose and silo.name not in taking_part:
                continue
            config = {wire.HOLDOUT: HOLDOUT, wire.GROUP_SIZE: max(len(taking_part), 1)}
            work.append(Order(silo, trial.models[group], purpose=purpose, config=config))
    return work


def continue_trial(trial: Trial, updates: Updates) -> Trial:
    """Return the trial after a round, with groups aggregated and measurements and leader noted."""
    models: dict[Group, Model] = dict(trial.models)
    found: dict[Group, Mapping[str, Found]] = {}
    for number, group in enumerate(trial.groups):
        purpose = "" if len(group) == 1 else f"trial-{number}"
        mine = [u for u in updates if u.purpose == purpose and u.silo.name in group]
        mine = mine if len(group) == 1 else accepted(mine)
        if not mine:
            continue
        models[group] = combine(mine)
        found[group] = held_out(mine)
    after = replace(
        trial,
        models=models,
        found=found,
        rounds_left=trial.rounds_left - 1,
        played=trial.played + 1,
    )
    return replace(after, leader=_least_risk(after)) if measured_by(after) else after


def measured_by(trial: Trial) -> list[str]:
    """Return the silos that measured every candidate in the last round and can compare them."""
    each = [
        {name for group in c.groups for name in trial.found.get(group, ())}
        for c in trial.candidates
    ]
    return sorted(set.intersection(*each))


def is_decided(trial: Trial) -> bool:
    """Return whether every other candidate is significantly worse than the leader."""
    if trial.played < MIN_TRIAL or trial.leader is None or not measured_by(trial):
        return False
    best = errors_of(trial)[trial.leader]
    return all(
        _is_better(best, other)
        for number, other in enumerate(errors_of(trial))
        if number != trial.leader
    )


def errors_of(trial: Trial) -> list[dict[str, Found]]:
    """Return, per candidate, the last measurements of the silos that can compare all."""
    judges = set(measured_by(trial))
    return [
        {n: trial.found[group][n] for group in c.groups for n in sorted(judges & set(group))}
        for c in trial.candidates
    ]


def mean_error(found: Mapping[str, Found]) -> float:
    return float(np.mean([one.error for one in found.values()]))


def _least_risk(trial: Trial) -> int:
    """Return the candidate that could at worst be least behind another, by mean plus error.

    Candidates no better than w⁰ are excluded, except all-alone. Ties go to the one that lasts
    longest over log α.
    """
    errors = errors_of(trial)
    learnt = [
        number
        for number, found in enumerate(errors)
        if number == 0 or has_learnt(found, trial.untrained)
    ]

    def risk(number: int) -> float:
        others = [difference(errors[number], errors[other]) for other in learnt if other != number]
        return max([mean + error for mean, error in others], default=0.0)

    return min(learnt, key=lambda i: (round(risk(i), 9), -trial.candidates[i].ratio))


def has_learnt(found: Mapping[str, Found], untrained: Mapping[str, Found]) -> bool:
    """Return whether a model is significantly better than w⁰; True if no silo measured w⁰."""
    known = {name: one for name, one in found.items() if name in untrained}
    return not known or _is_better(known, {name: untrained[name] for name in known})


def difference(one: Mapping[str, Found], other: Mapping[str, Found]) -> tuple[float, float]:
    """Return the mean error difference of two models over N silos, and its standard error.

    Pairs are silos, so that what makes a silo's samples hard for both cancels. As a few silos may
    agree by chance, the standard error is at least that of the fewest samples on which only one
    model errs that explain the differences, with at least one per silo.
    """
    pairs = [(one[name], other[name]) for name in sorted(one)]
    gaps = np.array([a.error - b.error for a, b in pairs])
    if not gaps.any():
        return 0.0, 0.0
    counts = np.array([a.num_examples for a, _ in pairs])
    apart = np.maximum(np.abs(gaps), 1 / counts)
    sampled = np.maximum(apart - gaps**2, 0) / counts
    spread = float(gaps.var(ddof=1)) / len(gaps) if len(gaps) > 1 else 0.0
    return float(gaps.mean()), sqrt(max(spread, float(sampled.sum()) / len(gaps) ** 2))


def _is_better(one: Mapping[str, Found], other: Mapping[str, Found]) -> bool:
    """Return whether a model errs less than another on these silos, by a paired t-test."""
    from scipy.stats import t

    mean, error = difference(one, other)
    return mean < -error * float(t.ppf(CONFIDENCE, max(len(one) - 1, 1))) and mean < 0


def verdict(trial: Trial, *, last: bool) -> dict[str, Any]:
    """Return and log a trial's outcome; ``last``: the run ends with it."""
    best = trial.candidates[trial.leader or 0]
    judges = measured_by(trial)
    errors = [mean_error(found) if judges else None for found in errors_of(trial)]
    how = "decided" if is_decided(trial) else "undecided, of smallest risk"
    if trial.leader is None:
        how = "alone, because no silo measured all partitions"
    elif not judges:
        how = "ahead when silos last measured all partitions"
    elif trial.leader == 0 and not any(
        has_learnt(found, trial.untrained) for found in errors_of(trial)
    ):
        how = "alone, because no model is better than untrained ones yet"
    if last and not is_decided(trial):
        how += "; the run ended before the trial"
    measured = ", ".join(
        f"{_name(c)}" + ("" if error is None else f": {100 * error:.1f}%")
        for c, error in zip(trial.candidates, errors, strict=True)
    )
    doubtful = trial.leader is None or not judges or last
    log.log(
        logging.WARNING if doubtful else logging.INFO,
        "alpha = auto took %s (%s) after %d rounds; held-out errors of %s: %s",
        *(_name(best), how, trial.played, wire.counted(len(judges), "silo"), measured),
    )
    return {
        "how": how,
        "rounds": trial.played,
        "judges": judges,
        "candidates": [
            {"alpha": c.alpha, "groups": [list(group) for group in c.groups], "error": error}
            for c, error in zip(trial.candidates, errors, strict=True)
        ],
    }


def alpha_of(winner: Candidate, landscape: Landscape) -> float:
    """Return the α that gives the winner's groups on what is compared now.

    The trial's candidates come from the first rounds' updates; those accumulated since are less
    noisy and more alike, so the same groups lie elsewhere on the path. If they are no longer on it,
    the α of the partition that differs in the fewest pairs of silos is taken. If the path is a
    single partition, the trial's α stays.
    """
    path = landscape.path()
    if len(path) == 1:
        return winner.alpha
    known = set(landscape.names) & {name for group in winner.groups for name in group}
    pairs = _pairs(winner.groups, known)
    distances = [len(pairs ^ _pairs(c.groups, known)) for c in path]
    nearest = [c for c, d in zip(path, distances, strict=True) if d == min(distances)]
    return max(nearest, key=lambda c: c.ratio).alpha


def _pairs(groups: Sequence[Group], known: Set[str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        pair for group in groups for pair in combinations(sorted(known & set(group)), 2)
    )


def _name(candidate: Candidate) -> str:
    return f"α {candidate.alpha:.3g}, {wire.counted(len(candidate.groups), 'group')}"
