"""Several models of which every silo chooses by loss: state and steps of IFCA and FLSC.

The server keeps K models. Before every round each silo that is here is asked for its loss of
each (``probes``); it trains the mean of its ``count`` best, and what it sends back is
averaged, size-weighted, into every model that it chose. A model that nobody chose keeps its
weights. Every model is sent to everybody, so an update counts only where enough others count with
it for its silo's ``min_group_size``.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.strategies.baselines.probes import losses
from coterie.strategies.rounds.grouping import Members, counted, enrol, orders_from
from coterie.strategies.rounds.loop import Group, Order, Update
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Choices:
    """What a strategy of K models knows between two rounds.

    Attributes:
        members: every silo's model and size; a group is who made the same choice.
        models: θ_j.
        chosen: silo → the models that it chose last, sorted.
        losses: silo → its loss of every model, as far as it answered in this round.
    """

    members: Members
    models: tuple[Model, ...]
    chosen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def first_choices(initial: Model, num_models: int, seed: int) -> Choices:
    """K different models: w⁰, and K − 1 others with every array's values in another order.

    Layers are initialised with independent values of one distribution, so that a permutation of
    them is as good as another draw, and the server needs neither the task nor torch. Arrays with
    one value throughout (BatchNorm's) stay as they are.
    """
    rng = np.random.default_rng([seed, num_models])
    models = [initial] + [_permuted(initial, rng) for _ in range(num_models - 1)]
    if num_models > 1 and all(_same(model, initial) for model in models):
        log.warning("every array of w⁰ is constant: the %d models start equal", num_models)
    return Choices(Members(initial), tuple(models))


def _permuted(model: Model, rng: np.random.Generator) -> Model:
    return {name: rng.permutation(a.ravel()).reshape(a.shape) for name, a in model.items()}


def _same(one: Model, other: Model) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in one.items())


def admitted(state: Choices, silos: Sequence[Silo]) -> Choices:
    """Let silos in; they choose like the others before they train."""
    return replace(state, members=enrol(state.members, silos, state.models[0]))


def choose(
    state: Choices, silos: Sequence[Silo], *, count: int
) -> Generator[Sequence[Order], list[Update], Choices]:
    """Ask for all losses; every silo takes its ``count`` best models, of equals the first.

    A model without a finite loss is not taken, also where fewer remain than ``count``. Who does
    not answer keeps its choice; who never answered takes the most frequent one.
    """
    stated = yield from losses(silos, state.models)
    chosen = {**state.chosen, **{name: _best(row, count) for name, row in stated.items()}}
    usual = _usual(chosen, count)
    for silo in silos:
        chosen.setdefault(silo.name, usual)
    return replace(state, chosen=chosen, losses=stated)


def _best(row: Sequence[float], count: int) -> tuple[int, ...]:
    ranked = np.argsort(row, kind="stable")[:count].tolist()
    return tuple(sorted(number for number in ranked if np.isfinite(row[number])))


def _usual(chosen: Mapping[str, tuple[int, ...]], count: int) -> tuple[int, ...]:
    taken = sorted(chosen.values())
    return max(taken, key=taken.count, default=tuple(range(count)))


def ordered(
    state: Choices, silos: Sequence[Silo], turn: Sequence[Silo]
) -> tuple[Choices, list[Order]]:
    """Whose turn it is trains the mean of what it chose; the same arrays for the same choice."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for silo in silos:
        if silo.name in state.chosen:
            groups.setdefault(state.chosen[silo.name], []).append(silo.name)
    present = tuple(sorted(tuple(sorted(names)) for names in groups.values()))
    members = replace(_held(state, groups), groups=present)
    return replace(state, members=members), orders_from(members.models, turn)


def _held(state: Choices, groups: Mapping[tuple[int, ...], Sequence[str]]) -> Members:
    """Every silo holds the mean of the models that it chose."""
    models = dict(state.members.models)
    for choice, names in groups.items():
        mean = weighted_mean([state.models[j] for j in choice], [1.0] * len(choice))
        models |= dict.fromkeys(names, mean)
    return replace(state.members, models=models)


def aggregated(state: Choices, updates: Sequence[Update]) -> Choices:
    """θ_j: the size-weighted mean of what came back from those who chose it, else as it was."""
    models = list(state.models)
    for number in range(len(models)):
        own = counted([u for u in updates if number in state.chosen[u.silo.name]])
        if own:
            models[number] = weighted_mean([u.model for u in own], [u.num_examples for u in own])
    sizes = {**state.members.sizes, **{u.silo.name: u.num_examples for u in updates}}
    state = replace(state, models=tuple(models), members=replace(state.members, sizes=sizes))
    by_choice: dict[tuple[int, ...], Group] = {
        state.chosen[group[0]]: group for group in state.members.groups
    }
    return replace(state, members=_held(state, by_choice))


def choosers(state: Choices) -> list[Group]:
    """Per model, the silos that chose it last."""
    return [
        tuple(name for name, choice in state.chosen.items() if number in choice)
        for number in range(len(state.models))
    ]


def described(state: Choices) -> dict[str, Any]:
    """For the record: what every silo that is here chose, and its losses."""
    here = sorted(name for group in state.members.groups for name in group)
    return {
        "chosen": {name: list(state.chosen[name]) for name in here},
        "losses": {
            n: [round(x, 6) if np.isfinite(x) else None for x in state.losses[n]]
            for n in here
            if n in state.losses
        },
        "unused-models": sorted(
            set(range(len(state.models))) - {j for name in here for j in state.chosen[name]}
        ),
    }
