"""What a round's updates change: silos' own models, held groups' models, and measurements."""

from __future__ import annotations

from dataclasses import replace

from coterie.strategies.auto.evidence import measurement, noted
from coterie.strategies.auto.state import ALONE, GROUP, AutoState, group_of, share_of
from coterie.strategies.rounds.algorithm import Update, Updates
from coterie.strategies.rounds.handles import is_seen
from coterie.strategies.rounds.minimum_sizes import average


def with_alone(state: AutoState, updates: Updates) -> AutoState:
    for update in updates:
        name = update.silo.name
        by_itself = update.purpose == ALONE or (not update.purpose and _holds_own(state, name))
        if not by_itself:
            continue
        key = (ALONE, name) if name in state.probation else (name,)
        if (found := measurement(update)) and update.start is state.members.initial:
            state = replace(state, untrained={**state.untrained, name: found.error})
        measured = noted(state, key, [update])
        state = replace(state, alone={**state.alone, name: update.model}, measured=measured)
        if own := update.noise_in():
            before = state.noise.get(name, 0.0)
            state = replace(state, noise={**state.noise, name: before + own})
    return state


def with_held(state: AutoState, updates: Updates) -> AutoState:
    """Average every held group's updates, without silos on probation."""
    models = dict(state.group_models)
    for group in state.group_models:
        mine = [u for u in updates if u.silo.name in group and _of_group(state, u)]
        mean = average(mine)
        if mean is not None:
            models[group] = mean
    latest = {
        u.silo.name: u.model
        for u in updates
        if state.phase == "hold" and is_seen(u.model) and _of_group(state, u)
        if share_of(state, u.silo.name) > 0 and group_of(state.held, u.silo.name) in models
    }
    state = replace(state, group_models=models, latest=latest)
    for update in updates:
        name = update.silo.name
        if name in state.probation and name in state.beside and not update.purpose:
            state = replace(state, measured=noted(state, (GROUP, name), [update]))
    return state


def _holds_own(state: AutoState, name: str) -> bool:
    if name in state.probation:
        return name not in state.beside
    return name in state.own or len(group_of(state.held, name)) == 1


def _of_group(state: AutoState, update: Update) -> bool:
    if update.silo.name in state.probation:
        return False
    if update.silo.name in state.own:
        return update.purpose == GROUP
    return not update.purpose
