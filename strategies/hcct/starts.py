"""The models that HCCT's groups start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members, staying
from coterie.strategies.rounds.models import holders, weighted_mean
from coterie.strategies.rounds.reports import Group


def group_starts(members: Members, groups: Sequence[Group]) -> dict[str, Model]:
    """Return the size-weighted mean of each group's current models (Algorithm 1, line 15)."""
    starts: dict[str, Model] = {}
    for group in groups:
        if _share_a_model(group, members.models):  # nothing changed hands
            mean = members.models[group[0]]
        else:
            mean = weighted_mean(
                [members.models[n] for n in group], [members.sizes[n] for n in group]
            )
        starts |= dict.fromkeys(group, mean)
    return starts


def common_starts(
    starts: Mapping[str, Model], groups: Sequence[Group], *, before: Members
) -> dict[str, Model]:
    """Return one common start for each existing group to which a silo returns.

    A returning silo takes the present members' start; its old model does not enter their mean. No
    silo's model enters a mean of fewer silos than it accepts: if nothing else is left, each
    continues from its own.
    """
    here = set(before.here)
    common: dict[str, Model] = {}
    for group in groups:
        if _share_a_model(group, starts):
            continue
        stayed = tuple(name for name in group if name in here)
        shown = staying(stayed or group, before.minimums)
        if stayed and shown and _share_a_model(shown, starts):
            common |= dict.fromkeys(group, starts[shown[0]])
        elif shown:
            common |= dict.fromkeys(group, group_starts(before, [shown])[shown[0]])
    return common


def _share_a_model(group: Sequence[str], models: Mapping[str, Model]) -> bool:
    return len(holders({name: models[name] for name in group})) == 1
