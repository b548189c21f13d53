"""Members: every silo that ever took part, its model and size, and the last round's groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

ROUNDING = 1e-12
"""Relative tolerance: rounding in a sum must not cut equal weights."""
FEWEST_CAPPED = 3
"""Fewest weights to which a largest share applies."""


@dataclass(frozen=True)
class Members:
    """Every silo that ever took part; a silo that is away keeps its model and its size.

    Attributes:
        initial: w⁰.
        sizes: silo → number of training samples, from its last accepted reply (or as stated).
        groups: the groups that trained together in the last round.
        minimums: silo → the smallest group that it accepts, if it stated one.
        data: silo → its ``Silo.data``, as last stated.
    """

    initial: Arrays
    models: Mapping[str, Model] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    minimums: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def here(self) -> list[str]:
        """The silos of the last round, group by group."""
        return [name for group in self.groups for name in group]

    def holding(self, models: Mapping[str, Model]) -> Members:
        """Return members with these models replacing the silos' own."""
        return replace(self, models={**self.models, **models})

    def grouped(self, groups: Iterable[Group]) -> Members:
        """Return members with these groups."""
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Plain:
    """The state of an algorithm that remembers only its members."""

    members: Members


def minimums_of(silos: Iterable[Silo]) -> dict[str, int]:
    """Return silo → smallest group, for silos that require more than themselves."""
    return {silo.name: silo.min_group_size for silo in silos if silo.min_group_size > 1}


def staying(group: Sequence[str], minimums: Mapping[str, int]) -> tuple[str, ...]:
    """Return the silos of a group that accept its final size.

    Every silo that leaves makes the group smaller for the others, so the check is repeated until
    all that remain accept it.
    """
    stay = tuple(group)
    while fewer := [name for name in stay if minimums.get(name, 1) > len(stay)]:
        stay = tuple(name for name in stay if name not in fewer)
    return stay


def present_groups(groups: Iterable[Group], here: Iterable[str]) -> tuple[Group, ...]:
    """Return the groups without silos that are away; a connected silo in none of them is alone."""
    here = sorted(here)
    kept = [tuple(sorted(set(group) & set(here))) for group in groups]
    grouped = {name for group in kept for name in group}
    return tuple(sorted([*filter(None, kept), *((n,) for n in here if n not in grouped)]))


def with_absent(
    planned: Sequence[Group], before: Sequence[Group], here: Sequence[str]
) -> tuple[Group, ...]:
    """Add absent silos to ``planned``, next to their previous group members."""
    absent = {name for group in before for name in group} - set(here)
    groups = [set(group) for group in planned]
    for group in before:
        away = absent & set(group)
        if away:
            target = next((g for g in groups if g & set(group)), None)
            if target is None:
                groups.append(away)
            else:
                target |= away
    return tuple(tuple(sorted(group)) for group in groups)


def enrol(members: Members, new: Sequence[Silo], model: Model) -> Members:
    """Add silos with ``model`` as their current model."""
    return replace(
        members,
        models={**members.models, **{silo.name: model for silo in new}},
        sizes={**members.sizes, **{silo.name: float(silo.num_examples) for silo in new}},
    )


def with_minimums(members: Members, silos: Sequence[Silo]) -> Members:
    """Return members with the connected silos' current smallest groups, which may have changed."""
    here = {silo.name for silo in silos}
    others = {name: least for name, least in members.minimums.items() if name not in here}
    return replace(members, minimums={**others, **minimums_of(silos)})


def with_data(members: Members, silos: Sequence[Silo]) -> Members:
    """Return members with what the connected silos now state about their data."""
    stated = {silo.name: silo.data for silo in silos if silo.described}
    return replace(members, data={**members.data, **stated})


def renewed(members: Members, silos: Sequence[Silo]) -> frozenset[str]:
    """Return the connected silos that state different data than last time."""
    known = members.data
    return frozenset(s.name for s in silos if s.described and known.get(s.name, s.data) != s.data)


def with_sizes(members: Members, stated: Mapping[str, float]) -> Members:
    """Return members with the sizes that silos state now."""
    return replace(members, sizes={**members.sizes, **stated})


def capped(weights: Mapping[str, float], max_share: float) -> dict[str, float]:
    """Cap weights so that none exceeds ``max_share`` of their sum after capping.

    Args:
        weights: name → weight > 0.
        max_share: in (0, 1]; raised to an equal share if smaller.

    Returns:
        The weights, the largest ones reduced; fewer than three are unchanged.
    """
    if len(weights) < FEWEST_CAPPED:
        return dict(weights)
    share = max(max_share, 1 / len(weights))
    ordered, limit = sorted(weights.values(), reverse=True), math.inf
    for count, weight in enumerate(ordered):  # so many, the largest, are cut to the limit
        limit = share * math.fsum(ordered[count:]) / (1 - share * count) * (1 + ROUNDING)
        if weight <= limit:
            break
    return {name: min(weight, limit) for name, weight in weights.items()}


def stated_samples(members: Members, names: Iterable[str], max_share: float) -> list[float]:
    """Return the training samples that silos state, >= 1, each at most a share of all.

    ``sizes`` are the weights of the last training: `max-share` has limited them by group, and who
    held samples out stated fewer. A silo that states no samples has this weight.

    Args:
        members: all silos.
        names: the silos asked for, in the order of the result.
        max_share: the most of one silo, in (0, 1].
    """
    stated = {name: members.data[name][0] if name in members.data else 0 for name in names}
    counts = {name: max(float(n or members.sizes[name]), 1.0) for name, n in stated.items()}
    return list(capped(counts, max_share).values())


def mean_of_all(members: Members) -> Model:
    """Return the size-weighted mean model of the last round's silos; w⁰ before round 1."""
    here = [name for name in members.here if members.sizes[name] > 0]
    names = sorted(staying(here, members.minimums))
    if not names:
        return members.initial
    return weighted_mean([members.models[n] for n in names], [members.sizes[n] for n in names])


def global_model(members: Members) -> Model:
    """Return the model of the last round's only group; w⁰ before round 1."""
    return members.models[members.groups[0][0]] if members.groups else members.initial


def together(members: Members, silos: Sequence[Silo]) -> Members:
    """Put all connected silos into one group with the global model, returning ones too."""
    if not silos:  # silos that have it keep it
        return members
    here = tuple(silo.name for silo in silos)
    return members.holding(dict.fromkeys(here, global_model(members))).grouped([here])


def hand_out(members: Members, model: Model) -> Members:
    """Give ``model`` to every silo of the present groups."""
    return members.holding(dict.fromkeys(members.here, model))


def by_number(here: Iterable[str], number_of: Mapping[str, int], count: int) -> list[list[str]]:
    """Return the connected silos of each of ``count`` groups, by group number."""
    members: list[list[str]] = [[] for _ in range(count)]
    for name in here:
        if name in number_of:
            members[number_of[name]].append(name)
    return members


def give_out(
    members: Members,
    here: Iterable[str],
    number_of: Mapping[str, int],
    models: Sequence[Model] | Mapping[int, Model],
) -> Members:
    """Give silos their group's model, and group them by it; a silo in no group is alone.

    ``number_of`` is silo → number of its group, ``models`` has the groups' models by number.
    """
    found: dict[int | str, list[str]] = {}
    for name in sorted(here):
        found.setdefault(number_of.get(name, name), []).append(name)
    groups = sorted(tuple(names) for names in found.values())
    own = {n: models[number_of[n]] for names in groups for n in names if n in number_of}
    return members.holding(own).grouped(groups)


def cosine_matrix(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Return the cosines of an (N, N) Gram matrix; 0 for an update that is zero."""
    lengths = np.sqrt(np.diag(matrix))
    scale = np.where(lengths > 0, lengths, 1.0)
    return tuple(tuple(row) for row in (matrix / scale[:, None] / scale[None, :]).tolist())


def comparison(
    names: Sequence[str], cosines: Sequence[Sequence[float]], lengths: Sequence[float]
) -> dict[str, Any]:
    """Return the record's entries for compared updates: silos, cosines and norms."""
    if not names:
        return {}
    return {
        "compared": list(names),
        "similarity": [[round(cosine, 6) for cosine in row] for row in cosines],
        "norms": [float(f"{length:.6g}") for length in lengths],
    }
