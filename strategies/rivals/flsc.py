"""FLSC and IFCA: K models, of which every silo trains those that fit its training data best.

- FLSC: Li, Li, Varshney: "Federated Learning with Soft Clustering", IEEE Internet of Things Journal
  2022; as Sun, Kountouris, Zhang describe it (HCCT, section 7.1): a silo takes the mean of its N_g
  models of smallest loss as its local model. What it sends back counts in each of them.
- IFCA: Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning",
  NeurIPS 2020, https://arxiv.org/abs/2006.04088; Algorithm 1, model averaging (option II). It is
  FLSC with N_g = 1.

Before every round each silo whose turn it is is asked for its loss of every model
(``coterie.strategies.plain.probes``). It trains the mean of its best, and what it sends back is
averaged into every model that it chose; a model that nobody chose keeps its weights. Every model is
sent to everybody, so an update counts only where enough others count with it for its silo's
smallest group.

Differs from the papers in:

- Models are averaged size-weighted (IFCA's silos have equally many samples).
- The K initial models are w⁰ and permutations of it.
- One restart. IFCA's paper takes the best of several by a validation set.

Every silo is sent K models more a round, and runs its data K times through a model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie.strategies.plain.probes import losses
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Exchanges,
    Order,
    Round,
    Updates,
    drawn_silos,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import plain_mean, same_model
from coterie.strategies.rounds.options import Config, Count, Sample, Seed
from coterie.strategies.rounds.policy import average
from coterie.strategies.rounds.reports import Group

log = logging.getLogger("coterie.run")

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """What is known between two rounds.

    Attributes:
        members: every silo's model and size; a group is who made the same choice.
        models: θ_j.
        chosen: silo → the models that it chose last, sorted.
        losses: silo → its loss of every model, as far as it answered in this round.
    """

    members: Members
    models: tuple[Model, ...]
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class FLSC(Algorithm[Choices]):
    """Every silo trains the mean of its N_g best of K models; IFCA with N_g = 1."""

    num_groups: Count = Field(
        3, description="K, number of models; with more than silos some stay unused."
    )
    soft_groups: Count = Field(
        2, description="N_g, models that a silo mixes; at most `num-groups`."
    )
    sample: Sample = 0
    seed: Seed = 0

    def problems(self, training: Config) -> Iterator[str]:
        """More models mixed than there are."""
        if self.soft_groups > self.num_groups:
            yield (
                f"soft-groups must be at most num-groups = {self.num_groups}. "
                f"Got {self.soft_groups}"
            )

    @property
    def crosses(self) -> bool:
        """What trained a mean of several models counts in each of them."""
        return self.soft_groups > 1

    def first(self, initial: Arrays) -> Choices:
        """K models; no members yet."""
        return first_choices(initial, self.num_groups, self.seed)

    def newcomer_model(self, state: Choices) -> Model:
        """The first: a newcomer chooses before it trains, like everybody."""
        return state.models[0]

    def prepare(self, state: Choices, now: Round) -> Exchanges[Choices]:
        """The N_g models of smallest loss (IFCA, line 6: ĵ = argmin_j F_i(θ_j)).

        Of equals the first. A model without a finite loss is not taken, also where fewer remain
        than N_g. Who does not answer keeps its choice; who never answered takes the most frequent.
        """
        silos = drawn_silos(now, self.sample, seed=self.seed)
        stated = yield from losses(silos, state.models)
        best = {name: _best(row, self.soft_groups) for name, row in stated.items()}
        chosen = {**state.chosen, **best}
        usual = _usual(chosen, self.soft_groups)
        for silo in silos:
            chosen.setdefault(silo.name, usual)
        return replace(state, chosen=chosen, losses=stated)

    def orders(self, state: Choices, now: Round) -> tuple[Choices, list[Order]]:
        """Whose turn it is trains the mean of what it chose; one model for the same choice."""
        by_choice: dict[Choice, list[str]] = {}
        for name in now.names:
            if name in state.chosen:
                by_choice.setdefault(state.chosen[name], []).append(name)
        present = sorted(tuple(sorted(names)) for names in by_choice.values())
        members = _held(state, by_choice).grouped(present)
        turn = drawn_silos(now, self.sample, seed=self.seed)
        return replace(state, members=members), orders_from(members.models, turn)

    def absorb(self, state: Choices, updates: Updates, now: Round) -> Choices:
        """θ_j: the mean of what came back from those who chose it, else as it was."""
        means = [
            average([u for u in updates if number in state.chosen[u.silo.name]])
            for number in range(len(state.models))
        ]
        models = tuple(
            old if new is None else new for old, new in zip(state.models, means, strict=True)
        )
        state = replace(state, models=models)
        by_choice = {state.chosen[group[0]]: group for group in state.members.groups}
        return replace(state, members=_held(state, by_choice))

    def sharing(self, state: Choices) -> Sequence[Group]:
        """Of every model, who chose it: all models go to everybody."""
        return [
            tuple(name for name, choice in state.chosen.items() if number in choice)
            for number in range(len(state.models))
        ]

    def details(self, state: Choices) -> Mapping[str, Any]:
        """What every silo here chose, its losses, and models that none of them chose."""
        here = sorted(state.members.here)
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


def first_choices(initial: Arrays, num_models: int, seed: int) -> Choices:
    """K different models: w⁰, and K − 1 others with every array's values in another order.

    Layers are initialised with independent values of one distribution, so that a permutation of
    them is as good as another draw, and the server needs neither the task nor torch. Arrays with
    one value throughout (BatchNorm's) stay as they are.
    """
    rng = np.random.default_rng([seed, num_models])
    models = [initial] + [
        {name: rng.permutation(a.ravel()).reshape(a.shape) for name, a in initial.items()}
        for _ in range(num_models - 1)
    ]
    if num_models > 1 and all(same_model(model, initial) for model in models):
        log.warning("every array of w⁰ is constant: the %d models start equal", num_models)
    return Choices(Members(initial), tuple(models))


def _best(row: Sequence[float], count: int) -> Choice:
    ranked = np.argsort(row, kind="stable")[:count].tolist()
    return tuple(sorted(number for number in ranked if np.isfinite(row[number])))


def _usual(chosen: Mapping[str, Choice], count: int) -> Choice:
    taken = sorted(chosen.values())
    return max(taken, key=taken.count, default=tuple(range(count)))


def _held(state: Choices, by_choice: Mapping[Choice, Sequence[str]]) -> Members:
    """Every silo holds the mean of the models that it chose."""
    models: dict[str, Model] = {}
    for choice, names in by_choice.items():
        models |= dict.fromkeys(names, plain_mean([state.models[j] for j in choice]))
    return state.members.holding(models)
