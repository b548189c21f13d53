"""Groups formed once, from the updates of one round, each a FedAvg of its own from then on.

State and steps shared by FL+HC and k-means on updates: some rounds of FedAvg, one round whose
updates are clustered, then groups that stay. A newcomer after that trains once from the model that
the clustered updates started from, and joins the group whose mean update is nearest to its own.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.strategies.baselines.placing import compared, nearest, placing_order
from coterie.strategies.partition.clustering import Metric
from coterie.strategies.rounds.grouping import (
    Members,
    average_groups,
    counted,
    enrol,
    global_model,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, Order, Update
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class OneShot:
    """What such a strategy knows between two rounds.

    Attributes:
        members: every silo's model and size; ``groups`` of who is here.
        origin: the model from which the clustered updates started; None before.
        group_of: silo → number of its group.
        group_models, directions: per group, its model and its members' mean update.
    """

    members: Members
    origin: Model | None = None
    group_of: Mapping[str, int] = field(default_factory=dict)
    group_models: tuple[Model, ...] = ()
    directions: tuple[Model, ...] = ()


def admitted(state: OneShot, silos: Sequence[Silo]) -> OneShot:
    """Let silos in: with the global model, or with that of the clustering to be placed."""
    start = global_model(state.members) if state.origin is None else state.origin
    return replace(state, members=enrol(state.members, silos, start))


def placed(
    state: OneShot,
    silos: Sequence[Silo],
    *,
    metric: Metric,
    config: Mapping[str, int | float | str | bool],
) -> Generator[Sequence[Order], list[Update], OneShot]:
    """Find a group for those who have none. Who does not answer is asked again next round."""
    new = [silo for silo in silos if silo.name not in state.group_of]
    if state.origin is None or not new:
        return state
    answers = yield [placing_order(silo, state.origin, config) for silo in new]
    found = {u.silo.name: nearest(u, state.directions, metric=metric) for u in answers}
    sizes = {**state.members.sizes, **{u.silo.name: u.num_examples for u in answers}}
    members = replace(state.members, sizes=sizes)
    return replace(state, members=members, group_of={**state.group_of, **found})


def ordered(state: OneShot, silos: Sequence[Silo]) -> tuple[OneShot, list[Order]]:
    """Before there are groups all train the global model, then everybody its group's."""
    if state.origin is None:
        state = replace(state, members=together(state.members, silos))
        return state, orders_from(state.members.models, silos)
    grouped = [silo for silo in silos if silo.name in state.group_of]
    state = _handed_out(state, [silo.name for silo in grouped])
    return state, orders_from(state.members.models, grouped)


def formed(state: OneShot, updates: Sequence[Update], groups: Sequence[Sequence[int]]) -> OneShot:
    """The groups, given as rows of ``updates``, which all started from one model."""
    members, here = state.members, [name for group in state.members.groups for name in group]
    directions: list[Model] = []
    models: list[Model] = []
    group_of: dict[str, int] = {}
    for number, rows in enumerate(groups):
        own = [updates[row] for row in rows]
        directions.append(weighted_mean([compared(u) for u in own], [1.0] * len(own)))
        kept = counted(own)
        models.append(
            weighted_mean([u.model for u in kept], [u.num_examples for u in kept])
            if kept
            else updates[0].start
        )
        group_of |= {u.silo.name: number for u in own}
    sizes = {**members.sizes, **{u.silo.name: u.num_examples for u in updates}}
    log.info("%d groups: %s", len(groups), [[updates[i].silo.name for i in g] for g in groups])
    state = replace(
        state,
        members=replace(members, sizes=sizes),
        origin=updates[0].start,
        group_of=group_of,
        group_models=tuple(models),
        directions=tuple(directions),
    )
    return _handed_out(state, here)


def trained(state: OneShot, updates: Sequence[Update]) -> OneShot:
    """Every group's FedAvg; a group that nobody answered for keeps its model."""
    groups = [[u for u in updates if u.silo.name in group] for group in state.members.groups]
    kept = [update for group in groups for update in counted(group)]
    members = average_groups(state.members, kept)
    models = list(state.group_models)
    for group in members.groups:
        if group[0] in state.group_of:
            models[state.group_of[group[0]]] = members.models[group[0]]
    return replace(state, members=members, group_models=tuple(models))


def described(state: OneShot) -> dict[str, Any]:
    """For the record: members of every group by number, also of those with nobody here."""
    members: list[list[str]] = [[] for _ in state.group_models]
    for group in state.members.groups:
        for name in group:
            if name in state.group_of:
                members[state.group_of[name]].append(name)
    return {"members": members}


def _handed_out(state: OneShot, here: Sequence[str]) -> OneShot:
    """Everybody here that is in a group holds its model; who is in none is alone."""
    found: dict[Any, list[str]] = {}
    for name in sorted(here):
        found.setdefault(state.group_of.get(name, name), []).append(name)
    groups: tuple[Group, ...] = tuple(sorted(tuple(names) for names in found.values()))
    own = {n: state.group_models[state.group_of[n]] for n in here if n in state.group_of}
    members = replace(state.members, models={**state.members.models, **own}, groups=groups)
    return replace(state, members=members)
