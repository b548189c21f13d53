"""α without guessing: a short trial of the few partitions that any α could give.

The papers give α per data set. But all that α does is choose one of a handful of partitions, the
path from all-alone to all-together, and that path is known from one Gram matrix. So after two
rounds alone the server takes the partitions that last longest on the path, with all-alone and
all-together among them, lets every distinct group of them train side by side for a few rounds, all
from w⁰, and has each silo measure its groups' models on data that it holds out of that training.
The partition with the lowest mean error wins. Its α is the geometric middle of the stretch in which
its groups come out on what is compared by then. Nothing leaves a silo but those error rates.

Differs from the paper, which has no such rule. Needs silos that understand ``holdout``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.strategies.errors import FederationError
from coterie.strategies.partition.coalition import HCCTUtility
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.rounds import kit
from coterie.wire import Model

HOLDOUT = 0.2
"""Share of its training data that a silo keeps out of the trial's training."""
LOOK_ROUNDS = 2
"""Rounds that everybody trains alone before the path is looked at. On the demo's silos the right
partition is among the candidates with 7 of 10 seeds after one round, with 10 of 10 after two."""
TRIAL_ROUNDS = 5
"""Rounds of side-by-side training; the last one's models received are what is compared."""
MAX_NON_TRIVIAL = 3
"""Partitions tried beside all-alone and all-together: those that last longest over log α."""
BEYOND = 4.0
"""All-together's α, as a multiple of the smallest at which everybody is together."""
BORDER = 0.1
"""Relative precision of the borders on a path: no candidate hangs on less."""
MAX_ADDED_ROUNDS = 3
"""Rounds that a trial goes on for where no silo could compare all candidates in its last one."""


@dataclass(frozen=True)
class Candidate:
    """One partition that some α gives, that α, and how long it lasts (α_high / α_low)."""

    groups: tuple[kit.Group, ...]
    alpha: float
    ratio: float


@dataclass(frozen=True)
class Trial:
    """A trial under way.

    Attributes:
        candidates: what is compared; all-alone is the first.
        models: distinct group → the model that it starts its next round from.
        errors: distinct group → silo → error on held-out data of the model received in the last
            round.
        rounds_left: rounds still to go; below 0 are those that were added because nobody had
            measured every candidate.
    """

    candidates: tuple[Candidate, ...]
    models: Mapping[kit.Group, Model]
    errors: Mapping[kit.Group, Mapping[str, float]] = field(default_factory=dict)
    rounds_left: int = TRIAL_ROUNDS

    @property
    def groups(self) -> tuple[kit.Group, ...]:
        """The distinct groups, sorted."""
        return tuple(sorted(self.models))

    @property
    def over(self) -> bool:
        """Whether it is time for the verdict: some silo has measured every candidate."""
        if self.rounds_left > 0:
            return False
        return bool(measured_by(self)) or self.rounds_left <= -MAX_ADDED_ROUNDS


@dataclass(frozen=True)
class Landscape:
    """What the path of partitions over α is computed from.

    Attributes:
        names: of the N silos.
        gram: (N, N) inner products of what is compared.
        sizes: (N,) training samples.
        minimums: silo → the smallest group that it accepts, where it stated one.
        solve: the run's own search.
    """

    names: Sequence[str]
    gram: NDArray[np.float64]
    sizes: NDArray[np.float64]
    minimums: Mapping[str, int]
    solve: Callable[[HCCTUtility], list[list[int]]]

    def path(self) -> list[Candidate]:
        """From all-alone to all-together, each with the geometric middle of its stretch."""
        found: list[Candidate] = []
        for stretch in alpha_path(self.gram, self.sizes, solver=self.solve, rtol=BORDER):
            raw = [tuple(sorted(self.names[i] for i in group)) for group in stretch.groups]
            groups = tuple(sorted(kit.form(raw, self.minimums)))
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
    """All-alone, all-together, and the partitions between that last longest over log α.

    Those that the silos' smallest groups let come about; of equal ones the first. All-alone is
    among them also where equal updates keep it off the path but for α = 0.
    """
    path = landscape.path()
    alone = Candidate(tuple((name,) for name in sorted(landscape.names)), 0.0, 1.0)
    middle = [c for c in path[:-1] if c.groups != alone.groups]
    between = sorted(middle, key=lambda c: c.ratio, reverse=True)[:MAX_NON_TRIVIAL]
    distinct: dict[tuple[kit.Group, ...], Candidate] = {}
    first = path[0] if path[0].groups == alone.groups else alone
    for candidate in (first, *between, path[-1]):
        distinct.setdefault(candidate.groups, candidate)
    return tuple(distinct.values())


def open_trial(found: Sequence[Candidate], initial: Model) -> Trial:
    """A trial in which every distinct group starts from w⁰.

    What the silos trained before has seen the samples that the trial measures on. A silo's own
    model knows them best, so from there all-alone would win where data is scarce.
    """
    distinct = {group for candidate in found for group in candidate.groups}
    return Trial(tuple(found), dict.fromkeys(sorted(distinct), initial))


def orders(trial: Trial, silos: Sequence[kit.Silo]) -> list[kit.Order]:
    """Every silo trains the model of every distinct group that it is in.

    Alone is its ordinary training; the others have a purpose, so that they are told apart. A silo
    is told how many of a group are here, and is not asked where that is too few for it.
    """
    here = {silo.name: silo for silo in silos}
    minimums = kit.minimums_of(silos)
    work = []
    for silo in silos:
        for number, group in enumerate(trial.groups):
            if silo.name not in group:
                continue
            purpose = "" if len(group) == 1 else f"trial-{number}"
            taking_part = kit.staying([name for name in group if name in here], minimums)
            if purpose and silo.name not in taking_part:
                continue
            config = {wire.HOLDOUT: HOLDOUT, wire.GROUP_SIZE: max(len(taking_part), 1)}
            work.append(kit.Order(silo, trial.models[group], purpose=purpose, config=config))
    return work


def continue_trial(trial: Trial, updates: kit.Updates) -> Trial:
    """The trial after a round: every group aggregated, this round's errors noted."""
    models: dict[kit.Group, Model] = dict(trial.models)
    errors: dict[kit.Group, Mapping[str, float]] = {}
    for number, group in enumerate(trial.groups):
        purpose = "" if len(group) == 1 else f"trial-{number}"
        mine = [u for u in updates if u.purpose == purpose and u.silo.name in group]
        mine = mine if len(group) == 1 else kit.accepted(mine)
        if not mine:
            continue
        models[group] = kit.weighted_mean([u.model for u in mine], [u.num_examples for u in mine])
        errors[group] = {
            u.silo.name: u.metrics[wire.HOLDOUT_ERROR]
            for u in mine
            if wire.HOLDOUT_ERROR in u.metrics
        }
    return replace(trial, models=models, errors=errors, rounds_left=trial.rounds_left - 1)


def measured_by(trial: Trial) -> frozenset[str]:
    """The silos that have measured every candidate in the last round: who can compare them."""
    return frozenset.intersection(
        *(
            frozenset(name for group in c.groups for name in trial.errors.get(group, ()))
            for c in trial.candidates
        )
    )


def verdict(trial: Trial) -> tuple[Candidate, dict[str, float]]:
    """The candidate with the lowest mean error, over silos that measured all, and every one's.

    Of equals the one that lasts longest over log α wins.

    Raises:
        FederationError: no silo measured every candidate.
    """
    judges = measured_by(trial)
    if not judges:
        raise FederationError(
            "alpha = auto needs the errors that silos measure on data they hold out, and no silo "
            "gave one for every partition tried. ClientApps other than coterie's do not hold out "
            "data, and silos may keep their error to themselves (metrics in silo.toml). "
            "Give alpha as a number.",
            phase="alpha",
        )
    scores = [
        float(np.mean([trial.errors[g][name] for g in c.groups for name in g if name in judges]))
        for c in trial.candidates
    ]
    ranked = sorted(
        range(len(scores)), key=lambda i: (round(scores[i], 9), -trial.candidates[i].ratio)
    )
    best = trial.candidates[ranked[0]]
    named = {_name(c): score for c, score in zip(trial.candidates, scores, strict=True)}
    text = ", ".join(f"{name}: {100 * score:.1f} %" for name, score in named.items())
    kit.log.info(
        "alpha = auto chose %s; held-out errors of %d silo(s): %s", _name(best), len(judges), text
    )
    return best, named


def alpha_of(winner: Candidate, landscape: Landscape) -> float:
    """The α that gives the winner's groups on what is compared now.

    The trial's candidates come from the first rounds' updates. What is added up since is less noisy
    and more alike, so the same groups lie elsewhere on the path. Where they are not on it any more:
    the α of the partition that differs in the fewest pairs of silos. A path of one partition says
    nothing: then the trial's α stays.
    """
    path = landscape.path()
    if len(path) == 1:
        return winner.alpha
    known = set(landscape.names) & {name for group in winner.groups for name in group}
    pairs = _pairs(winner.groups, known)
    distances = [len(pairs ^ _pairs(c.groups, known)) for c in path]
    nearest = [c for c, d in zip(path, distances, strict=True) if d == min(distances)]
    return max(nearest, key=lambda c: c.ratio).alpha


def _pairs(groups: Sequence[kit.Group], known: Set[str]) -> frozenset[tuple[str, str]]:
    """The pairs of these silos that are together."""
    return frozenset(
        pair for group in groups for pair in combinations(sorted(known & set(group)), 2)
    )


def _name(candidate: Candidate) -> str:
    return f"α {candidate.alpha:.3g}, {len(candidate.groups)} group(s)"
