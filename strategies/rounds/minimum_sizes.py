"""The smallest groups that silos accept: the only place that enforces ``min_group_size``.

A silo may require a smallest group for averaging its update, itself included. ``form`` forms
groups, ``average`` averages updates, and the engine leaves out silos whose group has become too
small; no algorithm checks this itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from coterie.strategies.rounds.algorithm import Update, Updates
from coterie.strategies.rounds.handles import Model, is_seen
from coterie.strategies.rounds.members import Members, minimums_of, staying
from coterie.strategies.rounds.models import aggregated
from coterie.strategies.rounds.reports import Group


def form(groups: Iterable[Group], minimums: Mapping[str, int]) -> tuple[Group, ...]:
    """Return the groups without the silos that require larger ones; these are alone."""
    kept: list[Group] = []
    alone: list[Group] = []
    for group in groups:
        stay = staying(group, minimums)
        kept += [stay] if stay else []
        alone += [(name,) for name in group if name not in stay]
    return tuple(kept + alone)


def accepted(updates: Updates, group: Sequence[str] = ()) -> list[Update]:
    """Return a group's updates that may be averaged: each silo's minimum holds among them.

    A silo that is alone in ``group`` and whose model nobody sees is always accepted.
    """
    if len(group) == 1 and not any(is_seen(update.model) for update in updates):
        return list(updates)
    stay = staying([u.silo.name for u in updates], minimums_of(u.silo for u in updates))
    return [u for u in updates if u.silo.name in stay]


def combine(updates: Updates) -> Model:
    """Return one model from at least one update, all of which may be averaged."""
    models, sizes = [u.model for u in updates], [u.num_examples for u in updates]
    return aggregated(models, sizes, updates[0].aggregate)


Combine = Callable[[Updates], Model]
"""Makes one model of at least one update, all of which may be averaged."""


def average(
    updates: Updates, group: Sequence[str] = (), *, combine: Combine = combine
) -> Model | None:
    """Return the model of the updates that may be averaged, or None if there are none.

    It is their size-weighted mean, the result of the run's ``aggregate``, or that of ``combine``.
    ``group`` is as in ``accepted``.
    """
    kept = accepted(updates, group)
    return combine(kept) if kept else None


def average_groups(members: Members, updates: Updates, *, combine: Combine = combine) -> Members:
    """Aggregate every group of ``members.groups``: the size-weighted mean of its updates.

    A member whose reply is missing or left out gets its group's mean like the others; a group
    without any answer keeps its models. A silo alone trains its own model. ``combine`` replaces the
    mean.
    """
    models = dict(members.models)
    by_name = {update.silo.name: update for update in updates}
    for group in members.groups:
        own = [by_name[name] for name in group if name in by_name]
        if len(group) == 1:
            models |= {u.silo.name: combine([u]) for u in own}
        elif (mean := average(own, combine=combine)) is not None:
            models |= dict.fromkeys(group, mean)
    return members.holding(models)


def withdraw(groups: Sequence[Group], updates: Updates) -> dict[str, str]:
    """Return silo → why it is left out: too few silos of each of its groups answered."""
    silos = {u.silo.name: u.silo for u in updates if not u.purpose}
    if not minimums_of(silos.values()):
        return {}
    refused: dict[str, str] = {}
    content: set[str] = set()
    unseen = {u.silo.name for u in updates if not is_seen(u.model)}
    for group in groups:
        if len(group) == 1 and group[0] in unseen:
            content.add(group[0])
            continue
        own = [silos[name] for name in group if name in silos]
        stay = staying([silo.name for silo in own], minimums_of(own))
        content.update(stay)
        for silo in own:
            if silo.name not in stay:
                refused[silo.name] = (
                    f"it accepts groups of at least {silo.min_group_size} silos, but only "
                    f"{len(own)} of its group answered."
                )
    return {name: reason for name, reason in refused.items() if name not in content}
