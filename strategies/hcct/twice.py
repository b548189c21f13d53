"""In secure runs: silos are averaged only with those that two partitions in a row put them with.

A silo is bound for good to the silos of its first sum (``coterie.features.secure.blocks``). The
first partition, made from one round's sketches, may still join silos of two kinds; and a silo that
joins a group later than the others has nobody to be summed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.rounds.minimum_sizes import form
from coterie.strategies.rounds.reports import Group

PATIENCE = 4
"""Partitions in a row that may leave silos waiting for their whole group."""


def confirmed(state: HCCTState, proposed: Sequence[Group]) -> tuple[tuple[Group, ...], int]:
    """Return the next round's groups, and the next state's ``waits``."""
    trained, waits = state.members.groups, state.waits
    groups = twice_together(proposed, state.proposed, trained, waits=waits)
    planned = form(groups, state.members.minimums)
    return planned, waits + 1 if len(planned) > len(proposed) else 0


def twice_together(
    groups: Sequence[Group], before: Sequence[Group], trained: Sequence[Group], *, waits: int
) -> list[Group]:
    """Return the groups; silos that were alone stay so until two partitions agree on their group.

    After ``PATIENCE`` partitions it is enough that a part of a group was together twice.

    Args:
        groups: the new partition.
        before: the previous one, as it was before this rule.
        trained: the groups that trained in this round.
        waits: partitions in a row that have left silos waiting.
    """
    alone = {group[0] for group in trained if len(group) == 1}
    place = {name: number for number, group in enumerate(before) for name in group}
    found: list[Group] = []
    for group in groups:
        joined = {name for name in group if name not in alone}
        accepted = {place[name] for name in joined if name in place}
        joined |= {name for name in group if place.get(name) in accepted}
        found += [tuple(sorted(joined))] if joined else []
        left = set(group) - joined
        for other in before:
            part = left & set(other)
            if part and (part == set(group) == set(other) or waits >= PATIENCE):
                found.append(tuple(sorted(part)))
                left -= part
        found += [(name,) for name in sorted(left)]
    return found
