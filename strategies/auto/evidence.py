"""The silos' measurements of the models of a race, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from coterie import wire
from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.state import AutoState, Entrant, Measured, Trial, key_of
from coterie.strategies.partition.race import (
    NEAR,
    Gain,
    Standing,
    loss_variances,
    shrunken_gains,
    standings,
)
from coterie.strategies.rounds.algorithm import Update
from coterie.strategies.rounds.models import is_linear
from coterie.strategies.rounds.reports import Group

HOLDOUT = 0.2
"""Share of its training data that a silo holds out during look and race."""
MEASURES = 2
"""Number of a model's last measurements that are averaged."""
LEARNED = 0.75
"""Error relative to w⁰'s that may end a look early; before, updates and errors mean little."""


def by_loss(state: AutoState) -> bool:
    """Return whether losses decide instead of errors.

    A loss says more per sample than an error: it is a proper score. That of a network, however,
    says more about how sure it is than about who should train with whom, so only linear models,
    linear parts of networks while these are trained, and trees are compared by it.
    """
    return converges(state) or is_trees(state.members.initial)


def converges(state: AutoState) -> bool:
    """Return whether models are trained to their minimum: linear ones, or linear parts."""
    return state.linear_first or is_linear(state.members.initial)


def compares_losses(state: AutoState) -> bool:
    """Return whether losses decide a race from its beginning: not of apps that tell only errors."""
    found = (m.share for of in state.measured.values() for own in of.values() for m in own)
    return by_loss(state) and not any(found)


def measurement(update: Update, *, loss_decides: bool = False) -> Measured | None:
    """Return a silo's measurement of the model it received, or None if missing or invalid.

    With ``loss_decides`` the loss takes the place of the error.
    """
    metrics = update.metrics
    error = metrics.get(wire.HOLDOUT_ERROR, float("nan"))
    count = update.held_out(HOLDOUT)
    share = update.silo.metric == wire.ERROR
    if not count > 0:
        return None
    loss = metrics.get(wire.HOLDOUT_LOSS, float("nan"))
    if loss_decides and update.silo.described:  # other apps may measure errors only
        noise = metrics.get(wire.HOLDOUT_LOSS_ERROR, float("nan"))
        return Measured(loss, loss, count, False, noise) if np.isfinite(loss) else None
    if not np.isfinite(error) or (share and not 0 <= error <= 1):
        return None
    return Measured(error, loss if np.isfinite(loss) else error, count, share)


def noted(
    state: AutoState, key: Group, updates: Iterable[Update]
) -> dict[Group, Mapping[str, tuple[Measured, ...]]]:
    """Return the measurements with these added; a silo without a new one keeps the earlier ones."""
    before, times = dict(state.measured.get(key, {})), 1
    if is_trees(state.members.initial):  # trees only become better: the last measurement counts
        times = MEASURES
    for update in updates:
        if (found := measurement(update, loss_decides=by_loss(state))) is not None:
            own = (*before.get(update.silo.name, ()), *[found] * times)
            before[update.silo.name] = own[-MEASURES:]
    return {**state.measured, key: before}


def has_learned(state: AutoState) -> bool:
    """Return whether training alone has cut the mean error over silos to ``LEARNED`` of w⁰'s."""
    last = {
        n: own[-1].error for g, of in state.measured.items() for n, own in of.items() if g == (n,)
    }
    both = sorted(last.keys() & state.untrained.keys())
    now, before = (
        float(np.mean([of[n] for n in both])) if both else 0.0 for of in (last, state.untrained)
    )
    return bool(both) and now <= LEARNED * before


def judges_of(state: AutoState, last: int = MEASURES) -> frozenset[str]:
    """Return silos that measured every candidate ``last`` times (the second: after training)."""
    if not state.candidates:
        return frozenset()
    return frozenset.intersection(
        *(
            frozenset(
                name
                for group in c.groups
                for name, found in state.measured.get(key_of(c, group[0]), {}).items()
                if len(found) >= last
            )
            for c in state.candidates
        )
    )


def mean_of(found: Sequence[Measured]) -> Measured:
    """Return the mean of these measurements."""
    return Measured(
        float(np.mean([m.error for m in found])),
        float(np.mean([m.loss for m in found])),
        found[-1].count,
        found[-1].share,
        found[-1].noise,
    )


def standings_of(state: AutoState, last: int = MEASURES) -> list[Standing]:
    """Return the candidates' standings by the ``last`` measurements; all equal without judges."""
    judges = sorted(judges_of(state, last))
    if not judges:
        nothing = Standing(float("nan"), 0.0, float("nan"), False)
        return [nothing] * len(state.candidates)
    table = [
        [mean_of(state.measured[key_of(c, name)][name][-last:]) for name in judges]
        for c in state.candidates
    ]
    errors = np.array([[m.error for m in row] for row in table])
    return standings(
        errors,
        np.array([m.count for m in table[0]]),
        np.array([[m.loss for m in row] for row in table]),
        shares=all(m.share for m in table[0]),
    )


def by_preference(
    candidates: Sequence[Candidate],
    found: Sequence[Standing],
    sizes: Mapping[str, float],
    *,
    converged: bool = False,
) -> list[int]:
    """Return the indices of candidates that may be held, most wanted first.

    These are the ones as good as the best. Among them, what the measurements cannot tell apart is
    decided by prior knowledge: those with most data come first, as their models have more to learn
    and vary less; but before them a supported candidate that is not behind the one with most data,
    as discriminators have compared the silos' data.
    Models that have ``converged`` have no more to learn: all together comes first, then a supported
    candidate, then the smallest loss.
    """
    near = [n for n, s in enumerate(found) if not s.out and s.behind <= NEAR * s.standard_error]

    data = {n: 0.0 if converged else samples_behind(candidates[n], sizes) for n in near}
    widest = min((-data[n], found[n].behind) for n in near) if near else (0.0, 0.0)

    def rank(number: int) -> tuple[bool, bool, float, bool, float]:
        one, behind = candidates[number], found[number].behind
        first = converged and one.is_together
        favoured = one.supported and (converged or behind <= widest[1])
        return not first, not favoured, -data[number], one.by_silo, behind

    return sorted(near, key=rank)


def behind_alone(state: AutoState, candidate: Candidate) -> bool:
    """Return whether a partition's mean error over the judges exceeds that of all silos alone.

    Chance is not considered; errors equal to nine digits, as in the race, are not behind. Local
    training is measured to the end of a race, even after it dropped out. A partition without a silo
    that measured both counts as behind.
    """
    own, alone = [], []
    for name in sorted(judges_of(state)):
        both = [
            state.measured.get(key, {}).get(name, ()) for key in (key_of(candidate, name), (name,))
        ]
        if min(map(len, both)) >= MEASURES:
            own.append(mean_of(both[0]).error)
            alone.append(mean_of(both[1]).error)
    return not own or round(float(np.mean(own)), 9) > round(float(np.mean(alone)), 9)


def samples_behind(candidate: Candidate, sizes: Mapping[str, float]) -> float:
    """Return the training samples behind a silo's model, averaged over silos."""
    totals = [(len(group), sum(sizes[n] for n in group)) for group in candidate.groups]
    return sum(n * total for n, total in totals) / sum(n for n, _ in totals)


def entrants_of(state: AutoState) -> tuple[Entrant, ...]:
    """Return every remaining candidate with its standing."""
    return tuple(
        Entrant(candidate, standing, latest, samples_behind(candidate, state.members.sizes))
        for candidate, standing, latest in zip(
            state.candidates, standings_of(state), standings_of(state, last=1), strict=True
        )
    )


def trials_of(state: AutoState, raced: Sequence[Candidate]) -> dict[str, Trial]:
    """Return what every silo measured of the models that these candidates offered it."""
    found = {}
    for name in sorted(state.raced):
        own = [state.measured.get(key_of(c, name), {}).get(name, ()) for c in raced]
        if any(own):
            means = [mean_of(m) if m else None for m in own]
            count = next(m.count for m in means if m)
            found[name] = Trial(count, tuple(m.error if m else float("nan") for m in means))
    return found


def gains_of(state: AutoState, winner: Candidate) -> dict[str, Gain]:
    """Return each silo's gain by its group, for silos that measured both models."""
    found = {}
    for group in winner.groups:
        for name in group if len(group) > 1 else ():
            alone = state.measured.get((name,), {}).get(name)
            together = state.measured.get(key_of(winner, name), {}).get(name)
            if alone and together:
                found[name] = (mean_of(alone), mean_of(together))
    if not found:
        return {}
    gains = shrunken_gains(
        [a.error for a, _ in found.values()],
        [t.error for _, t in found.values()],
        [t.count for _, t in found.values()],
        shares=all(t.share for _, t in found.values()),
        variances=loss_variances(np.array([[a.noise, t.noise] for a, t in found.values()])),
    )
    return dict(zip(found, gains, strict=True))


def fits(alone: Sequence[Measured], grouped: Sequence[Measured]) -> bool:
    """Return whether the group is no worse than alone by a newcomer's last measurement of both."""
    if not alone or not grouped:
        return bool(grouped) or not alone
    return (grouped[-1].error, grouped[-1].loss) <= (alone[-1].error, alone[-1].loss)
