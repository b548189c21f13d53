"""Boosted trees in coalitions: the bins with which discriminators see rows, and what grows.

All silos agree on bins before their first pair is measured; newcomers are measured with these, too.
Then every coalition grows trees as in the strategy ``trees``. A coalition whose members change
keeps the trees that most of its silos with trees had, and otherwise begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from coterie.features.sums.trees.asking import Growing, Grown, grow
from coterie.features.sums.trees.coordinator import Growth, Trees, TreesState, bins_of
from coterie.strategies.rounds.algorithm import Exchanges, Round
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.members import Members, staying
from coterie.strategies.rounds.reports import Group

Kept = TypeVar("Kept")


def agreed(growth: Growth, members: Members, now: Round) -> Exchanges[Arrays]:
    """Let all silos agree on bins and a constant answer; empty if they cannot."""
    here = staying(now.names, members.minimums)
    one = Growing(growth.growth, growth.column_bins, here, Grown(members.initial), 0)
    yield from grow([one], now, members.minimums)
    return bins_of(one.grown)


def growing(growth: Growth, groups: Sequence[Group]) -> Trees:
    """Return the strategy that grows trees in these groups."""
    options = {name: getattr(growth, name) for name in Growth.model_fields}
    return Trees(given_groups=";".join(",".join(group) for group in groups), **options)


def regrouped(state: TreesState, groups: Sequence[Group], members: Members) -> TreesState:
    """Return the trees for these groups, of silos that are here; those of absent silos stay."""
    here = {name for group in groups for name in group}
    sources = {}
    for group in groups:
        held = {key: len(set(key.split(",")) & set(group)) for key in state.grown}
        most = max(held, key=lambda key: held[key], default="")
        if 2 * held.get(most, 0) > sum(held.values()):
            sources[",".join(group)] = most

    def of(known: Mapping[str, Kept]) -> dict[str, Kept]:
        away = {key: own for key, own in known.items() if here.isdisjoint(key.split(","))}
        moved = {key: known[source] for key, source in sources.items() if source in known}
        return away | moved

    return replace(
        state,
        members=members,
        grown=of(state.grown),
        trials=of(state.trials),
        tried=of(state.tried),
    )
