"""State and steps shared by strategies whose silos train in groups. Functions, no inheritance."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from coterie import wire
from coterie.strategies.rounds.loop import Group, Order, Update
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo, minimums_of, staying
from coterie.wire import Model

log = logging.getLogger("coterie.run")

DEFAULT_BATCH = 32
"""Batch size of a silo that is told none."""


@dataclass(frozen=True)
class Members:
    """Every silo that ever took part; who is away keeps its model and its size.

    Attributes:
        initial: w⁰.
        models: silo → its current model.
        sizes: silo → number of training samples, from its last accepted reply (or as stated).
        groups: who trained together in the last round.
        minimums: silo → the smallest group that it accepts, where it stated one.
    """

    initial: Model
    models: Mapping[str, Model] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    minimums: Mapping[str, int] = field(default_factory=dict)


def enrol(members: Members, silos: Sequence[Silo], model: Model) -> Members:
    """Let silos in with ``model`` as their current model."""
    return replace(
        members,
        models={**members.models, **{silo.name: model for silo in silos}},
        sizes={**members.sizes, **{silo.name: float(silo.num_examples) for silo in silos}},
        minimums={**members.minimums, **minimums_of(silos)},
    )


def with_minimums(members: Members, silos: Sequence[Silo]) -> Members:
    """With the smallest groups that the silos here accept now: one may return with another."""
    here = {silo.name for silo in silos}
    others = {name: least for name, least in members.minimums.items() if name not in here}
    return replace(members, minimums={**others, **minimums_of(silos)})


def feasible(groups: Sequence[Group], minimums: Mapping[str, int]) -> tuple[Group, ...]:
    """The groups without the silos that accept no group so small: these are alone."""
    kept: list[Group] = []
    alone: list[Group] = []
    for group in groups:
        stay = staying(group, minimums)
        kept += [stay] if stay else []
        alone += [(name,) for name in group if name not in stay]
    return tuple(kept + alone)


def averaged(updates: Sequence[Update], *, alone: bool = False) -> list[Update]:
    """Those of a group's updates that may be averaged: each silo's minimum holds among them.

    Args:
        updates: of a group's members.
        alone: the group has one member, which is always allowed.
    """
    if alone:
        return list(updates)
    stay = staying([u.silo.name for u in updates], minimums_of(u.silo for u in updates))
    return [u for u in updates if u.silo.name in stay]


def counted(updates: Sequence[Update]) -> list[Update]:
    """``averaged``, for groups that formed after the training: the log names who is left out."""
    kept = averaged(updates)
    names = {update.silo.name for update in kept}
    for update in updates:
        if update.silo.name not in names:
            log.warning(
                "%s's update does not count: it accepts groups of at least %d, its own has %d",
                update.silo.name,
                update.silo.min_group_size,
                len(updates),
            )
    return kept


def mean_of_all(members: Members) -> Model:
    """The size-weighted mean of the current models of who was here last; w⁰ before round 1."""
    here = [name for group in members.groups for name in group if members.sizes[name] > 0]
    if not here:
        return members.initial
    names = sorted(staying(here, members.minimums))
    if not names:
        return members.initial
    return weighted_mean([members.models[n] for n in names], [members.sizes[n] for n in names])


def drawn(names: Sequence[str], count: int, rng: np.random.Generator) -> frozenset[str]:
    """``count`` of these silos at random; all of them if there are no more, or ``count`` is 0."""
    if not count or count >= len(names):
        return frozenset(names)
    return frozenset(rng.choice(list(names), size=count, replace=False).tolist())


def drawn_silos(silos: Sequence[Silo], count: int, *, seed: int, round: int) -> list[Silo]:
    """Whose turn it is in a round: ``drawn`` by seed and round."""
    names = sorted(silo.name for silo in silos)
    turn = drawn(names, count, np.random.default_rng([seed, round]))
    return [silo for silo in silos if silo.name in turn]


def num_batches(silo: Silo, train_config: Mapping[str, int | float | str | bool]) -> int:
    """Mini-batches of one epoch at a silo that described itself."""
    return ceil(silo.num_examples / int(train_config.get(wire.BATCH_SIZE, DEFAULT_BATCH)))


def orders_from(models: Mapping[str, Model], silos: Sequence[Silo]) -> list[Order]:
    """Everybody trains from the model that it holds."""
    return [Order(silo, models[silo.name]) for silo in silos]


def average_groups(members: Members, updates: Sequence[Update]) -> Members:
    """Aggregate every group of ``members.groups``: the size-weighted mean of what came back.

    A member whose reply is missing or left out gets its group's mean like the others; a group
    of which nobody answered keeps its models. Who accepts no group so small does not count.
    """
    models = dict(members.models)
    by_name = {update.silo.name: update for update in updates}
    for group in members.groups:
        own = [by_name[name] for name in group if name in by_name]
        answered = averaged(own, alone=len(group) == 1)
        if answered:
            mean = weighted_mean([u.model for u in answered], [u.num_examples for u in answered])
            models |= dict.fromkeys(group, mean)
    sizes = {**members.sizes, **{name: u.num_examples for name, u in by_name.items()}}
    return replace(members, models=models, sizes=sizes)


def global_model(members: Members) -> Model:
    """What everybody who was here last holds, where all are one group; w⁰ before round 1."""
    return members.models[members.groups[0][0]] if members.groups else members.initial


def together(members: Members, silos: Sequence[Silo]) -> Members:
    """All who are here as one group with the global model; who was away gets today's."""
    here = tuple(silo.name for silo in silos)
    models = {**members.models, **dict.fromkeys(here, global_model(members))}
    return replace(members, models=models, groups=(here,))


def hand_out(members: Members, model: Model, updates: Sequence[Update]) -> Members:
    """``model`` to everybody of the present groups; sizes as the updates state them."""
    here = [name for group in members.groups for name in group]
    sizes = {**members.sizes, **{u.silo.name: u.num_examples for u in updates}}
    return replace(members, models={**members.models, **dict.fromkeys(here, model)}, sizes=sizes)


def cosine_matrix(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Cosines from an (N, N) Gram matrix; 0 with an update that is zero."""
    lengths = np.sqrt(np.diag(matrix))
    scale = np.where(lengths > 0, lengths, 1.0)
    return tuple(tuple(row) for row in (matrix / scale[:, None] / scale[None, :]).tolist())


def comparison(
    names: Sequence[str], cosines: Sequence[Sequence[float]], lengths: Sequence[float]
) -> dict[str, Any]:
    """What a record keeps of updates that were compared: whose, their cosines, their lengths."""
    if not names:
        return {}
    return {
        "compared": list(names),
        "similarity": [[round(cosine, 6) for cosine in row] for row in cosines],
        "norms": [float(f"{length:.6g}") for length in lengths],
    }
