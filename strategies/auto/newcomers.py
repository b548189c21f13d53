"""Newcomers: the group whose model suits their data, a probation beside it, and their placing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coterie.strategies.auto.budget import bytes_of
from coterie.strategies.auto.evidence import fits
from coterie.strategies.auto.state import ALONE, GROUP, AutoState, Measured, Placement
from coterie.strategies.plain import probes
from coterie.strategies.rounds.algorithm import Exchanges, Round
from coterie.strategies.rounds.replies import error_of
from coterie.strategies.rounds.reports import Group

log = logging.getLogger("coterie.run")

PROBATION = 2
"""Rounds that a newcomer trains with a group before its update counts there."""


def nearest(state: AutoState, now: Round) -> Exchanges[AutoState]:
    """Let newcomers measure every group's model, and note whose is best on their own data."""
    offered = sorted(group for group in state.held if group in state.group_models)
    new = [s for s in now.silos if s.name in state.probation and s.name not in state.beside]
    new = [silo for silo in new if silo.described]
    if not new or not offered:
        return state
    found = yield from probes.ask(new, [state.group_models[group] for group in offered])
    moved = sum(bytes_of(answer) for own in found.values() for answer in own.values())
    state = replace(state, moved=state.moved + moved)
    beside = dict(state.beside)
    for name, answers in found.items():
        own = [
            (error_of(a.metrics), probes.loss_of(a), number)
            for number, a in answers.items()
            if np.isfinite(probes.loss_of(a))
        ]
        least = state.members.minimums.get(name, 1)
        accepted = [entry for entry in own if len(offered[entry[2]]) + 1 >= least]
        if accepted:
            beside[name] = offered[min(accepted)[2]]
    return replace(state, beside=beside)


def after_probation(state: AutoState, now: Round) -> AutoState:
    """Place newcomers after probation: with their group if it is not worse, or alone."""
    if not state.held:
        return state
    rounds = {name: count + (name in now.names) for name, count in state.probation.items()}
    held, models = list(state.held), dict(state.group_models)
    placed = {name: own for name, own in state.placed.items() if name not in rounds}
    over = [n for n, count in rounds.items() if count >= PROBATION]
    for name in over:
        beside = state.beside.get(name)
        group = next((g for g in held if beside and set(beside) <= set(g)), None)
        measured = state.measured.get((ALONE, name), {}), state.measured.get((GROUP, name), {})
        alone, grouped = (own.get(name, ()) for own in measured)
        held = [g for g in held if name not in g or len(g) > 1]
        joins = group is not None and fits(alone, grouped)
        placed[name] = _placement(now, group or (), alone, grouped, joins=joins)
        log.info(
            "auto: newcomer %s %s",
            name,
            "joins " + ", ".join(group) if joins and group else "stays alone",
        )
        if joins and group is not None:
            larger = tuple(sorted((*group, name)))
            models[larger] = models.pop(group)
            held = [larger if g == group else g for g in held]
        else:
            held.append((name,))
    return replace(
        state,
        held=tuple(sorted(held)),
        group_models=models,
        placed=placed,
        probation={n: c for n, c in rounds.items() if n not in over},
        beside={n: _now_in(g, held) for n, g in state.beside.items() if n not in over},
    )


def _placement(
    now: Round,
    group: Group,
    alone: Sequence[Measured],
    grouped: Sequence[Measured],
    *,
    joins: bool,
) -> Placement:
    last = [own[-1].error if own else float("nan") for own in (alone, grouped)]
    count = next((own[-1].count for own in (alone, grouped) if own), 0.0)
    return Placement(now.number, group, joins, count, *last)


def _now_in(group: Group, held: Sequence[Group]) -> Group:
    return next((g for g in held if set(group) <= set(g)), group)
