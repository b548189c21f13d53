"""The rounds of a race: who trains which group, which candidates drop out, and what is held."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coterie import wire
from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto import growing
from coterie.strategies.auto.budget import Budget, holdout, pass_of, planned
from coterie.strategies.auto.candidates import AS_IT_IS, Candidate, trivial
from coterie.strategies.auto.decision import decision
from coterie.strategies.auto.entries import verdict_text
from coterie.strategies.auto.evidence import (
    MEASURES,
    behind_alone,
    compares_losses,
    converges,
    entrants_of,
    gains_of,
    judges_of,
    noted,
    trials_of,
)
from coterie.strategies.auto.state import AutoState, Entrant, Verdict, holding, key_of, offered
from coterie.strategies.rounds.algorithm import Order, Round, Updates
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import minimums_of, present_groups, staying
from coterie.strategies.rounds.minimum_sizes import average
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.options import Scalar
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

MAX_RACE = 4
"""Maximum rounds of a race; relevant differences show in fewer."""
UNDECIDED = 0.5
"""Share of the run up to which a race continues while all-alone is still in it."""
HOLD_SHARE = 0.2
"""Minimum share of the run's rounds left for the winner, which trains on all data."""


def race_orders(state: AutoState, silo: Silo, now: Round) -> list[Order]:
    """Order a training of every raced group that the silo is in and accepts."""
    minimums, work = minimums_of(now.silos), []
    for number, group in enumerate(sorted(state.models)):
        taking_part = staying([name for name in group if name in now.here], minimums)
        if silo.name in taking_part:
            config: dict[str, Scalar] = {**holdout(silo), wire.GROUP_SIZE: len(taking_part)}
            model = offered(state, group, silo.name)
            work.append(Order(silo, model, purpose=f"race-{number}", config=config))
    return work


def with_raced(state: AutoState, updates: Updates) -> AutoState:
    models, measured = dict(state.models), state.measured
    for number, group in enumerate(sorted(state.models)):
        mine = [u for u in updates if u.purpose == f"race-{number}" and u.silo.name in group]
        mean = None if group in state.trees.arms else average(mine)
        if mean is not None:
            models[group] = mean
        measured = noted(replace(state, measured=measured), group, mine)
    return replace(state, models=models, measured=measured)


def goes_on(
    state: AutoState,
    kept: Sequence[Candidate],
    limits: Budget,
    now: Round,
    ahead: tuple[Mapping[str, float], float],
) -> bool:
    """Return whether a race between these goes on for another round.

    Args:
        ahead: what measuring own models will cost: silo → passes, and exchanges of models.
    """
    raced, left = now.number - state.since, planned(now) - now.number
    if left <= max(1, round(HOLD_SHARE * planned(now))):
        return False
    # Groups are still learning when a silo by itself has learned what it can: whether they are
    # better than alone takes longer to see than which of them is.
    alone = kept[0].groups == trivial(now.names, {})[0].groups
    if raced >= MAX_RACE and not (alone and now.number < UNDECIDED * planned(now)):
        return False
    if raced > MEASURES and not judges_of(state):
        return False
    groups = {group for c in kept for group in c.groups if len(group) > 1}
    arms = {name: 1 + sum(name in group for group in groups) for name in now.names}
    later, exchanges = ahead
    passes = {n: k * pass_of(now.here[n]) + left - 1 + later.get(n, 0.0) for n, k in arms.items()}
    exchanges += sum(arms.values()) + (left - 1) * len(arms)
    return limits.allows(state, passes, exchanges, now)


def reduced(state: AutoState, now: Round, kept: Sequence[Candidate]) -> AutoState:
    """Continue the race without the candidates that drop out, and their models."""
    entrants = _with_dropped(entrants_of(state), now, kept)
    kept = tuple(one.candidate for one in entrants if not one.dropped)
    groups = {group for candidate in kept for group in candidate.groups}
    return replace(
        state,
        candidates=kept,
        dropped=(*state.dropped, *(one for one in entrants if one.dropped)),
        models={group: model for group, model in state.models.items() if group in groups},
    )


def would_leave(state: AutoState, winner: Candidate) -> bool:
    """Return whether a silo would keep its own model, by the measurements so far.

    Secure runs do not race groups that differ by one silo. Elsewhere such groups keep a race open,
    so that groups have trained longer by its end, and fewer silos seem to lose.
    """
    return any(gain.own for gain in gains_of(state, winner).values())


def decided(state: AutoState, now: Round, *, complete: bool) -> AutoState:
    """End the race: hold the groups of its decision, and note the verdict."""
    found = decision(state, unseen=now.unseen)
    raced = (*_with_dropped(entrants_of(state), now), *state.dropped)
    verdict = Verdict(
        state.since,
        now.number,
        raced,
        tuple(sorted(judges_of(state))),
        next(n for n, one in enumerate(raced) if _same(one.candidate, found.winner)),
        found.gains,
        trials=trials_of(state, [entrant.candidate for entrant in raced]),
        shares=all(m.share for of in state.measured.values() for n in of for m in of[n]),
        score=wire.LOSS if compares_losses(state) else "",
        converged=converges(state),
        complete=complete,
        left=found.left,
    )
    log.info("auto: %s", verdict_text(verdict, found.keeping))
    away = [n for g in state.held for n in g if n not in state.raced]
    single = state.raced.difference(*found.groups).union(away)
    models = {group: _model_to_hold(state, found.winner, group) for group in found.groups}
    held = replace(
        state,
        phase="hold",
        since=now.number,
        verdict=verdict,
        held=tuple(sorted((*found.groups, *((name,) for name in single)))),
        group_models=models,
        own=found.own,
        penalty=found.winner.penalty,
        by_silo=found.winner.by_silo,
        measures_own=False,
        models={},
        measured={},
        candidates=(),
        dropped=(),
        probation={n: 0 for n in now.names if n not in state.raced},
        beside={},
    )
    return growing.settled(held, state) if is_trees(state.members.initial) else held


def _model_to_hold(state: AutoState, winner: Candidate, group: Group) -> Model:
    """Return a group's model; a new group starts from its members', trained for longer."""
    if state.trees.arms:
        return state.models[key_of(replace(winner, penalty=0.0), group[0])]
    if group in state.group_models:
        return state.group_models[group]
    if not state.held:
        return state.models[group]
    held = holding(state)
    return weighted_mean(
        [held[n] for n in group], [max(state.members.sizes[n], 1.0) for n in group]
    )


def _same(one: Candidate, other: Candidate) -> bool:
    return (one.groups, one.penalty, one.by_silo) == (other.groups, other.penalty, other.by_silo)


def _with_dropped(
    entrants: Sequence[Entrant], now: Round, kept: Sequence[Candidate] = ()
) -> tuple[Entrant, ...]:
    return tuple(
        replace(e, dropped=now.number) if e.standing.out and e.candidate not in kept else e
        for e in entrants
    )


def fell_behind(state: AutoState) -> bool:
    """Return whether the held groups are behind all-alone in a repeated race."""
    groups = present_groups(state.held, sorted(state.raced))
    raced = (*state.candidates, *(one.candidate for one in state.dropped))
    held = Candidate(groups, AS_IT_IS, penalty=state.penalty, by_silo=state.by_silo)
    measured = bool(judges_of(state)) and groups in {one.groups for one in raced}
    measured = measured and any(key_of(held, name) in state.measured for name in state.raced)
    return measured and behind_alone(state, held)
