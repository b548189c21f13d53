"""Own models in a race: how much of its group's model a silo takes, for linear models and trees.

A partition may lose a race only because its silos have other base rates, or slopes that differ a
little. So when a race of linear models is over, one or two partitions are measured once more: every
silo makes its own model of its group's, with an own intercept and slopes that are shrunk to the
group's with a penalty λ, for each λ of a grid, and measures it on its held-out samples
(``coterie.strategies.plain.pooling``). The best λ of each is a further candidate of the decision.
Of boosted trees, the silo's own are the constant, the leaf values and a few trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from coterie import wire
from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.budget import Budget, bytes_of, holdout, pass_of, planned
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.evidence import (
    HOLDOUT,
    MEASURES,
    converges,
    judges_of,
    measurement,
    noted,
    standings_of,
)
from coterie.strategies.auto.state import GROUP, AutoState, Measured, group_of, key_of, offered
from coterie.strategies.partition.race import Standing
from coterie.strategies.plain import hidden, pooling
from coterie.strategies.rounds.algorithm import Exchanges, Round, Update
from coterie.strategies.rounds.members import present_groups
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.roster import Silo

MOST_TRIED = 2
"""Partitions that are measured with own models."""
LEAST_JUDGES = 0.5
"""Share of a race's judges that must have measured own models; else these are no candidates."""


def offers(state: AutoState, now: Round) -> bool:
    """Return whether silos are asked for own models: of linear models that are trained exactly.

    Of trees, too. In a secure run they are not (``coterie.features.consensus``).
    """
    exact = converges(state) and hidden.minimises(now.config)
    exact = exact or is_trees(state.members.initial)
    return exact and not (now.unseen or now.config.get(wire.PERSONALISE))


def _tried(state: AutoState) -> tuple[float, ...]:
    return pooling.TRIED_LEAVES if is_trees(state.members.initial) else pooling.TRIED


def tried(state: AutoState, now: Round) -> list[Candidate]:
    """Return the partitions to measure with own models, which stay in the race to its end.

    They are the held one, if the race is run again, all together, and the best of the others.
    """
    if not offers(state, now):
        return []
    held = present_groups(state.held, sorted(state.raced))
    found = zip(state.candidates, standings_of(state), strict=True)
    several = [(c, s) for c, s in found if any(len(group) > 1 for group in c.groups)]

    def place(one: tuple[Candidate, Standing]) -> tuple[bool, bool, float]:
        candidate, standing = one
        new = (candidate.groups, candidate.by_silo) != (held, state.by_silo)
        return new, not candidate.is_together or candidate.by_silo, standing.behind

    return [candidate for candidate, _ in sorted(several, key=place)[:MOST_TRIED]]


def cost(
    state: AutoState, partitions: Sequence[Candidate], now: Round
) -> tuple[dict[str, float], float]:
    """Return what measuring partitions costs: silo → passes over its samples, and exchanges.

    Of trees the passes are 0: their budget counts trees that grow.
    """
    times = {
        silo.name: sum(len(group_of(one.groups, silo.name)) > 1 for one in partitions)
        for silo in now.silos
        if _can(silo)
    }
    values = _tried(state)
    each = 0 if is_trees(state.members.initial) else len(values) - 1
    passes = {n: k * each * pass_of(now.here[n]) for n, k in times.items() if k}
    return passes, sum(times.values()) * len(values) / 2  # models go one way


def entries(penalty: float) -> Config:
    """Return the entries of a message to a silo that makes its own of the model that it holds."""
    return {wire.PERSONALISE: wire.PARTIAL, wire.OWN_PENALTY: penalty}


def measured(state: AutoState, limits: Budget, now: Round) -> Exchanges[AutoState]:
    """Let silos measure own models, as far as the budgets allow; add the best to the race."""
    judges = judges_of(state)
    for candidate in tried(state, now):
        passes, exchanges = cost(state, [candidate], now)
        left = planned(now) - state.number
        whole = {name: more + left for name, more in passes.items() if more}
        if not limits.allows(state, whole, exchanges + left * len(now.names), now):
            continue
        wanted = [
            (now.here[name], offered(state, key_of(candidate, name), name)) for name in passes
        ]
        found = yield from pooling.ask(
            wanted, holdout=HOLDOUT, tried=_tried(state), entries=pooling.with_penalty
        )
        state = _charged(state, passes, [u for own in found.values() for u in own.values()])
        state = _with_best(state, candidate, found, judges)
    return state


def of_newcomers(state: AutoState, now: Round) -> Exchanges[AutoState]:
    """Let newcomers measure their own model of their group's, if its silos hold own models."""
    new = [now.here[n] for n in sorted(state.probation) if n in state.beside and n in now.here]
    new = [silo for silo in new if state.penalty and _can(silo)]
    wanted = [(silo, state.group_models[state.beside[silo.name]]) for silo in new]
    found = yield from pooling.ask(
        wanted, holdout=HOLDOUT, tried=(state.penalty,), entries=pooling.with_penalty
    )
    answers = list(found[state.penalty].values())
    for one in answers:
        state = replace(state, measured=noted(state, (GROUP, one.silo.name), [one]))
    grows = is_trees(state.members.initial)
    return _charged(state, {silo.name: 0 if grows else pass_of(silo) for silo in new}, answers)


def _can(silo: Silo) -> bool:
    """Return whether a silo makes own models: not one with a privacy budget, which they cost."""
    return silo.described and not silo.private and bool(holdout(silo))


def _charged(state: AutoState, passes: Mapping[str, float], answers: list[Update]) -> AutoState:
    done = {name: state.trainings.get(name, 0.0) + more for name, more in passes.items()}
    moved = state.moved + sum(map(bytes_of, answers))
    return replace(state, trainings={**state.trainings, **done}, moved=moved)


def _with_best(
    state: AutoState,
    candidate: Candidate,
    found: Mapping[float, Mapping[str, Update]],
    judges: frozenset[str],
) -> AutoState:
    """Note the measurements at every λ; add the best λ as a candidate, if enough judges know it."""
    own = {penalty: _losses(updates.values()) for penalty, updates in found.items()}
    known = frozenset.intersection(*(frozenset(by_silo) for by_silo in own.values()))
    lone = {group[0] for group in candidate.groups if len(group) == 1}
    if not known or len(judges & (known | lone)) < LEAST_JUDGES * len(judges):
        return state
    notes = {key: dict(of) for key, of in state.measured.items()}
    for penalty, by_silo in own.items():
        for name in sorted(known):
            key = key_of(replace(candidate, penalty=penalty), name)
            # The model is as it stands; it counts like the last measurements of others.
            notes.setdefault(key, {})[name] = (by_silo[name],) * MEASURES
    means = {p: float(np.mean([own[p][n].loss for n in sorted(known)])) for p in own if p}
    best = replace(candidate, penalty=min(means, key=lambda penalty: (means[penalty], -penalty)))
    return replace(state, measured=notes, candidates=(*state.candidates, best))


def _losses(updates: Iterable[Update]) -> dict[str, Measured]:
    found = {u.silo.name: measurement(u, loss_decides=True) for u in updates}
    return {name: one for name, one in found.items() if one is not None}
