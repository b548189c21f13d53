"""Placement of unlabelled silos: they are given a model and train none.

An unlabelled silo gets the model of the group whose data resemble its own most. FedCollab's client
discriminators (``coterie.strategies.fedcollab.discriminators``) measure that on features alone,
between it and silos of each group; they need no labels, and the algorithm is not involved. With
a single group there is nothing to measure, and nothing leaves.

Differences that features do not show, such as labels that mean different things, cannot be
measured: groups are then equally near, and the record says that it was a guess.

No unlabelled silo gets the model of a single silo, or of fewer silos than its silos accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.strategies.fedcollab.discriminators import Discriminators, Pair, measure, takes_part
from coterie.strategies.partition.distance import Distance
from coterie.strategies.rounds.algorithm import Exchanges, Round
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

MOST_COMPARED, PER_GROUP = 12, 2
"""Silos that an unlabelled one is compared with, in total and of one group: their discriminators
are most of what it moves, and a third adds little to two."""
SURE, LIKELY = 2.0, 1.0
"""Standard errors by which a group is nearer than the next to be sure, or likely."""
UNLIKE = 0.5
"""Distance from which data are called unlike: half of a perfect discriminator's."""


@dataclass(frozen=True)
class UnlabelledSilo:
    """A silo without labels, as it was compared so far.

    Attributes:
        distances: silo → how far apart their data look.
        tried: silos that it was to be compared with, but without a distance.
        refused: why it takes part in no comparison, by its own conditions; empty if it may.
        data: what it stated about its data (``Silo.data``); with others it is compared again.
    """

    distances: Mapping[str, Distance] = field(default_factory=dict)
    tried: frozenset[str] = frozenset()
    refused: str = ""
    data: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class UnlabelledSilos:
    """All unlabelled silos of a run, by name."""

    of: Mapping[str, UnlabelledSilo] = field(default_factory=dict)


@dataclass(frozen=True)
class Near:
    """How near a group's data are: the mean distance over its compared silos; NaN if none.

    ``error`` is its standard error, ``compared`` the number of those silos.
    """

    group: Group
    distance: float
    error: float
    compared: int


@dataclass(frozen=True)
class Place:
    """The group that an unlabelled silo belongs to; ``found`` if the silo gets its model.

    ``groups`` are those whose model it may have, the nearest first and uncompared ones last.
    """

    groups: tuple[Near, ...]
    why: str
    found: bool

    def entry(self) -> dict[str, Any]:
        return {
            "group": list(self.groups[0].group) if self.found else [],
            "why": self.why,
            "groups": [
                {
                    "silos": list(near.group),
                    "compared": near.compared,
                    **(
                        {
                            "distance": round(near.distance, 6),
                            "standard-error": round(near.error, 6),
                        }
                        if near.compared
                        else {}
                    ),
                }
                for near in self.groups
            ],
        }


def shown(groups: Sequence[Group], minimums: Mapping[str, int]) -> list[Group]:
    """Return the groups whose model an unlabelled silo may have."""
    least = {name: max(2, minimums.get(name, 1)) for group in groups for name in group}
    return [group for group in groups if all(least[name] <= len(group) for name in group)]


def look(
    unlabelled: UnlabelledSilos,
    here: Sequence[Silo],
    groups: Sequence[Group],
    now: Round,
    bins: Arrays | None,
) -> Exchanges[UnlabelledSilos]:
    """Compare unlabelled silos with silos of the groups that they have not been compared with.

    ``unlabelled`` has all known ones, ``here`` the connected ones; ``now`` has those that train.
    ``bins``: in which rows of trees are seen; None if models are not trees, empty while there are
    none, in which case nothing is compared.
    """
    found = {
        silo.name: known
        if (known := unlabelled.of.get(silo.name)) and known.data == silo.data
        else UnlabelledSilo(data=silo.data)
        for silo in here
    }
    away = {name: one for name, one in unlabelled.of.items() if name not in now.here}
    asks = len(groups) > 1 and (bins is None or bins)
    due = {s.name: _due(found[s.name], groups, now) for s in here} if asks else {}
    pairs = [_pair(name, other) for name, others in due.items() for other in others]
    if not pairs:
        return UnlabelledSilos({**away, **found})
    silos = [*here, *now.silos]
    measured = yield from measure(pairs, silos, Discriminators(), labelled=False, bins=bins)
    for silo in here:
        name, before, others = silo.name, found[silo.name], due[silo.name]
        pairs_of = {other: _pair(name, other) for other in others}
        distances = {
            o: measured.distances[pair]
            for o, pair in pairs_of.items()
            if pair in measured.distances
        }
        own = name in measured.refused or not takes_part(silo)
        found[name] = replace(
            before,
            distances={**before.distances, **distances},
            tried=before.tried | (set(others) - distances.keys()),
            refused=measured.missing.get(name, "") if own else before.refused,
        )
    return UnlabelledSilos({**away, **found})


def _pair(one: str, other: str) -> Pair:
    return min(one, other), max(one, other)


def _due(unlabelled: UnlabelledSilo, groups: Sequence[Group], now: Round) -> list[str]:
    """Return silos to compare with: of each unknown group, the largest that can be."""
    if unlabelled.refused:
        return []
    each = max(1, min(PER_GROUP, MOST_COMPARED // len(groups)))
    due: list[str] = []
    for group in groups:
        if unlabelled.distances.keys() & set(group):
            continue
        able = [now.here[n] for n in group if n in now.here and n not in unlabelled.tried]
        able = [silo for silo in able if takes_part(silo)]
        due += [s.name for s in sorted(able, key=lambda s: (-s.num_examples, s.name))[:each]]
    return sorted(due)


def place(unlabelled: UnlabelledSilo, groups: Sequence[Group], *, alone: bool) -> Place:
    """Return the group whose model an unlabelled silo is given.

    Args:
        groups: whose models it may have.
        alone: no silo gets anything from another in this run.
    """
    near = sorted((_near(unlabelled, group) for group in groups), key=_by_distance)
    if alone:
        return Place(
            (), "no model: every silo trains alone and shares its model with no other", found=False
        )
    if not near:
        return Place((), "no model: no group's model is available to it", found=False)
    if len(near) == 1:
        return Place(tuple(near), "the model of the only group, without a comparison", found=True)
    if not near[0].compared:
        why = unlabelled.refused.rstrip(".") or "it could not be compared with any group"
        return Place(tuple(near), f"no model: {why}", found=False)
    return Place(tuple(near), _words(near), found=True)


def _near(unlabelled: UnlabelledSilo, group: Group) -> Near:
    known = [unlabelled.distances[name] for name in group if name in unlabelled.distances]
    if not known:
        return Near(group, float("nan"), float("nan"), 0)
    error = float(np.sqrt(sum(one.error**2 for one in known))) / len(known)
    return Near(group, float(np.mean([one.value for one in known])), error, len(known))


def _by_distance(near: Near) -> tuple[bool, float, Group]:
    return (not near.compared, near.distance if near.compared else 0.0, near.group)


def _words(near: Sequence[Near]) -> str:
    """Return how a group was chosen, and how certain that is, as text."""
    first, rest = near[0], [one for one in near[1:] if one.compared]
    said = (
        "its data look most like those of this group: a classifier distinguishes them "
        f"{_share(first)} better than by guessing"
    )
    if first.distance - SURE * first.error > UNLIKE:
        said += ", so they resemble no group's data"
    if not rest:
        return said + "; no other group could be compared"
    second = rest[0]
    apart = (second.distance - first.distance) / float(np.hypot(first.error, second.error))
    sure = (
        "which is beyond chance"
        if apart >= SURE
        else "which may be chance"
        if apart >= LIKELY
        else "which is not a difference: the choice is a guess"
    )
    return f"{said}, and those of the next nearest group {_share(second)}, {sure}"


def _share(near: Near) -> str:
    return f"{100 * max(near.distance, 0.0):.0f} ± {100 * near.error:.0f}%"
