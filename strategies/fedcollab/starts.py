"""The model that a coalition starts from when its members change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group


def starts(members: Members, trained: Set[str], group: Group) -> dict[str, Model]:
    """Return the mean of what the members' coalitions had reached, one model each, or w⁰.

    Absent silos count only if no member was present. A model of fewer silos than these accept is
    not shown to others: if nothing else is left, each silo continues from its own.
    """
    reached = []
    for before in members.groups:
        behind = tuple(n for n in before if n in trained)
        inside = tuple(n for n in behind if n in group)
        if inside:
            reached.append(_Reached(inside, behind, members.models[inside[0]]))
    if not reached:
        known = [n for n in group if n in trained]
        reached = [_Reached((n,), (n,), members.models[n]) for n in known]
    if not reached:
        return dict.fromkeys(group, members.initial)
    if len(reached) > 1 or set(group) - set(reached[0].behind):
        reached = _shown(reached, members.minimums)
    if not reached:
        return {n: members.models[n] if n in trained else members.initial for n in group}
    sizes = [sum(members.sizes[n] for n in own.names) for own in reached]
    return dict.fromkeys(group, weighted_mean([own.model for own in reached], sizes))


@dataclass(frozen=True)
class _Reached:
    """A model that members ``names`` have reached: a mean of the silos ``behind`` it."""

    names: Group
    behind: Group
    model: Model


def _shown(reached: Sequence[_Reached], minimums: Mapping[str, int]) -> list[_Reached]:
    """Return the models whose joint mean has as many silos as all behind it accept."""
    kept = list(reached)
    while True:
        count = sum(len(own.behind) for own in kept)
        fewer = [own for own in kept if all(minimums.get(n, 1) <= count for n in own.behind)]
        if len(fewer) == len(kept):
            return kept
        kept = fewer
