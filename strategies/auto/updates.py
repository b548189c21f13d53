"""What a round's updates change: silos' own models, held groups' models, and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.candidates import AS_IT_IS, Candidate
from coterie.strategies.auto.evidence import by_loss, measurement, noted
from coterie.strategies.auto.state import ALONE, GROUP, AutoState, group_of, share_of
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.products import Products, with_round
from coterie.strategies.rounds.algorithm import Round, Update, Updates
from coterie.strategies.rounds.handles import Model, is_seen
from coterie.strategies.rounds.members import present_groups
from coterie.strategies.rounds.minimum_sizes import average
from coterie.strategies.rounds.models import comparable, difference, same_model, weighted_mean
from coterie.strategies.rounds.reports import Group


def with_alone(state: AutoState, updates: Updates, *, unseen: bool) -> AutoState:
    alone = [u for u in updates if _is_by_itself(state, u)]
    if is_trees(state.members.initial):  # which silos grow at home
        return state
    if unseen and alone:
        state = replace(state, products=_with_products(state.products, alone))
    for update in alone:
        name = update.silo.name
        key = (ALONE, name) if name in state.probation else (name,)
        if (
            found := measurement(update, loss_decides=by_loss(state))
        ) and update.start is state.members.initial:
            state = replace(state, untrained={**state.untrained, name: found.error})
        state = replace(state, alone={**state.alone, name: update.model})
        state = replace(state, measured=noted(state, key, [update]))
        if own := update.noise_in():
            before = state.noise.get(name, 0.0)
            state = replace(state, noise={**state.noise, name: before + own})
    return state


def _is_by_itself(state: AutoState, update: Update) -> bool:
    own = not update.purpose and _holds_own(state, update.silo.name)
    return update.purpose == ALONE or own


def _with_products(products: Products, updates: Updates) -> Products:
    sketches = [difference(update.model, update.start) for update in updates]
    return with_round(
        products,
        [update.silo.name for update in updates],
        gram([list(sketch.values()) for sketch in sketches]),
        [u.noise_in(sketch) for u, sketch in zip(updates, sketches, strict=True)],
        num_parameters=sum(array.size for array in sketches[0].values()),
        decay=1.0,
    )


def products_of_alone(state: AutoState, names: Sequence[str], now: Round) -> NDArray[np.float64]:
    """Return the inner products of what silos' own trainings have changed since w⁰."""
    buffers = sorted({name for silo in now.silos for name in silo.buffers})
    moved = [
        comparable(
            difference(state.alone[name], state.members.initial),
            similarity="parameters",
            buffers=buffers,
        )
        for name in names
    ]
    noise = [state.noise.get(name, 0.0) for name in names]
    return gram([list(one.values()) for one in moved], noise=noise)


def has_begun(state: AutoState, name: str) -> bool:
    """Return whether a silo has trained its own model, or summed its first gradients."""
    if is_trees(state.members.initial):
        return name in state.trees.roots
    own, initial = state.alone.get(name), state.members.initial
    return own is not None and own is not initial and not same_model(own, initial)


def beginning(state: AutoState, group: Group) -> Model:
    """Return the model from which a group is raced: the mean of its silos', or no tree."""
    if is_trees(state.members.initial):
        return state.members.initial
    sizes = [max(state.members.sizes[name], 1.0) for name in group]
    return weighted_mean([state.alone[name] for name in group], sizes)


def with_held(state: AutoState, updates: Updates) -> AutoState:
    """Average every held group's updates, without silos on probation.

    Trees are not changed by training, and where they split by silo each holds others.
    """
    models = dict(state.group_models)
    for group in () if is_trees(state.members.initial) else state.group_models:
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
        new = name in state.probation and name in state.beside and not update.purpose
        if new and not state.penalty:  # then its own model of the group's counts
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


def distinct_held(
    state: AutoState, found: Sequence[Candidate], names: Sequence[str]
) -> tuple[Candidate, ...]:
    """Return the candidates, and the held partition if it is none of them."""
    if state.held:
        now = present_groups(state.held, names)
        if now not in {c.groups for c in found}:
            found = (*found, Candidate(now, AS_IT_IS))
    return tuple(found)
