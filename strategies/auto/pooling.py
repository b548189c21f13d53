"""The last step of a race: how much of its group's model a silo takes, in the best partitions.

A partition says who trains together, and λ how much of the result a silo keeps
(``coterie.strategies.plain.pooling``). So the best partitions are measured once more: with the λ
that suits each, beside all silos alone, on the samples that were held out from the beginning. A
partition that loses as it is may win with silos' own intercepts or slopes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coterie import wire
from coterie.strategies.auto.budget import EPOCHS_OWN, Budget, bytes_of, holdout, pass_of
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.evidence import (
    HOLDOUT,
    MEASURES,
    by_preference,
    entrants_of,
    measurement,
    scored,
    standings_of,
)
from coterie.strategies.auto.state import AutoState, Measured
from coterie.strategies.plain.pooling import GRID, TRIED, ask, best_penalty
from coterie.strategies.rounds.algorithm import Exchanges, Round, Update
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

Tried = Mapping[float, Mapping[str, Measured]]
"""λ → silo of a group → what it measured of its own model."""


def chooses(now: Round) -> bool:
    """Return whether λ is open."""
    return wire.opens_penalty(now.config)


def reserve(left: int) -> float:
    """Return the trainings that own models of two partitions take if ``left`` rounds are left."""
    return EPOCHS_OWN * (2 * len(GRID) + left)


def shortlist(state: AutoState) -> list[Candidate]:
    """Return the partitions that are tried with every λ: the best with groups, and all together.

    All together is what partial pooling is known for; it may be out as it is.
    """
    found = standings_of(state)
    wanted = by_preference(state.candidates, found, state.members.sizes)
    others = sorted(set(range(len(found))) - set(wanted), key=lambda n: (found[n].behind, n))
    grouped = [state.candidates[n] for n in (*wanted, *others)]
    several = [c for c in grouped if any(len(group) > 1 for group in c.groups)]
    together = [c for c in several if c.is_together]
    return list(dict.fromkeys([*several[:1], *together]))


def pooled(state: AutoState, now: Round, limits: Budget) -> Exchanges[AutoState]:
    """Return the state of a race whose best partitions have been measured, each with its λ."""
    silos = [s for s in now.silos if s.described and s.name in state.raced and holdout(s)]
    best = shortlist(state)
    while best and not _affordable(state, best, silos, now, limits):
        best.pop()
    if not best or not silos:
        return state
    groups = list(dict.fromkeys(g for c in best for g in c.groups if len(g) > 1))
    wanted = {"alone": [(s, state.alone[s.name], 0.0) for s in silos]}
    for number, group in enumerate(groups):
        model = state.models[group]
        inside = [s for s in silos if s.name in group]
        wanted[str(number)] = [(s, model, penalty) for s in inside for penalty in TRIED]
    found = yield from ask(wanted, holdout=HOLDOUT)
    state = _charged(state, [u for own in found.values() for u in own.values()])
    measured = {
        key: {name: m for name, u in own.items() if (m := measurement(u)) is not None}
        for key, own in found.items()
    }
    tried: dict[Group, Tried] = {
        group: {penalty: measured.get((str(n), penalty), {}) for penalty in TRIED}
        for n, group in enumerate(groups)
    }
    alone = measured.get(("alone", 0.0), {})
    if not alone or not any(of for own in tried.values() for of in own.values()):
        return state
    return _measured(state, best, tried, alone)


def _measured(
    state: AutoState,
    best: Sequence[Candidate],
    tried: Mapping[Group, Tried],
    alone: Mapping[str, Measured],
) -> AutoState:
    """Put the measurements at each partition's λ in the place of the race's.

    A group that is in two partitions has the λ of the better one. Partitions that are not tried end
    their race in its last round.
    """
    known: dict[Group, Mapping[str, Measured]] = {(name,): {name: m} for name, m in alone.items()}
    chosen = []
    for candidate in best:
        own = [tried[g] for g in candidate.groups if g in tried]
        penalty = best_penalty(*_losses(state, candidate, own))
        chosen.append(replace(candidate, penalty=penalty))
        for group in candidate.groups:
            if group in tried:
                known.setdefault(group, tried[group][penalty])
    trivial = [c for c in state.candidates if all(len(group) == 1 for group in c.groups)]
    left = [c for c in state.candidates if c.groups not in {b.groups for b in best}]
    dropped = [
        replace(one, dropped=state.number)
        for one in entrants_of(state)
        if one.candidate in left and one.candidate not in trivial
    ]
    measured = {g: {n: (m,) * MEASURES for n, m in own.items()} for g, own in known.items()}
    return replace(
        state,
        candidates=(*trivial, *chosen),
        dropped=(*state.dropped, *dropped),
        measured={**state.measured, **measured},
    )


def _losses(
    state: AutoState, candidate: Candidate, tried: Sequence[Tried]
) -> tuple[dict[float, dict[str, tuple[float, float]]], dict[str, float]]:
    """Return λ → silo → its score and samples, and silo → its score one round earlier."""
    groups = {name: group for group in candidate.groups for name in group}
    every = [
        (name, [own[p][name] for p in TRIED], state.measured.get(groups[name], {}).get(name, ()))
        for own in tried
        for name in sorted(set.intersection(*(set(own[p]) for p in TRIED)))
    ]
    known = [(name, now, before[-1]) for name, now, before in every if before]
    table = scored([[*now, before] for _, now, before in known])
    losses = {
        penalty: {n: (m[k].loss, m[k].count) for (n, _, _), m in zip(known, table, strict=True)}
        for k, penalty in enumerate(TRIED)
    }
    return losses, {n: m[-1].loss for (n, _, _), m in zip(known, table, strict=True)}


def _affordable(
    state: AutoState, best: Sequence[Candidate], silos: Sequence[Silo], now: Round, limits: Budget
) -> bool:
    """Return whether the budgets allow this, and silos' own trainings in all rounds left."""
    left = now.rounds - now.number + 1
    groups = {group for c in best for group in c.groups if len(group) > 1}
    inside = {s.name: sum(s.name in group for group in groups) for s in silos}
    sent = sum(1 + times * len(TRIED) for times in inside.values()) / 2  # models one way
    return limits.allows_bytes(state, now, sent + left * len(now.silos)) and all(
        state.trainings.get(s.name, 0.0)
        + EPOCHS_OWN * (inside[s.name] * len(GRID) * pass_of(s) + left)
        + left
        <= limits.trainings * now.rounds
        for s in silos
    )


def _charged(state: AutoState, answers: Sequence[Update]) -> AutoState:
    done = dict(state.trainings)
    for update in answers:
        if not update.purpose.endswith("-0"):
            name = update.silo.name
            done[name] = done.get(name, 0.0) + EPOCHS_OWN * pass_of(update.silo)
    return replace(
        state, trainings=done, moved=state.moved + sum(bytes_of(update) for update in answers)
    )
