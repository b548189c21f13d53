"""FLSC and IFCA: K models, of which every silo trains those that fit its training data best.

- FLSC: Li, Li, Varshney: "Federated Learning with Soft Clustering", IEEE Internet of Things Journal
  2022; as Sun, Kountouris, Zhang describe it (HCCT, section 7.1): a silo takes the mean of its N_g
  models of smallest loss as its local model. Its reply counts in each of them.
- IFCA: Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning",
  NeurIPS 2020, https://arxiv.org/abs/2006.04088; Algorithm 1, model averaging (option II). It is
  FLSC with N_g = 1.

Before every round each sampled silo states its loss of every model
(``coterie.strategies.plain.probes``). It trains the mean of its best, and its reply is averaged
into every model that it chose; a model that no silo chose keeps its weights. Every model goes to
all silos, so an update counts only if enough others count with it for its silo's smallest group.

Differs from the papers in:

- Models are averaged size-weighted (IFCA's silos have equally many samples).
- The K initial models are w⁰ and permutations of it, or w⁰ with noise if it is constant.
- One restart. IFCA's paper takes the best of several by a validation set.

Every silo receives K more models a round, and runs its data through a model K times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.strategies.plain.probes import losses
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Exchanges,
    Order,
    Round,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.minimum_sizes import average
from coterie.strategies.rounds.models import plain_mean
from coterie.strategies.rounds.options import Config, Count, Sample, Seed
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.sampling import drawn_silos

Choice = tuple[int, ...]
NOISE = 0.001
"""Standard deviation of what distinguishes the initial models of which every array is constant."""


@dataclass(frozen=True)
class Choices:
    """The state between rounds.

    Attributes:
        members: groups are silos that made the same choice.
        models: θ_j.
        chosen: silo → the models that it chose last, sorted.
        losses: silo → its loss of every model, if it answered in this round.
    """

    members: Members
    models: tuple[Model, ...]
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class FLSC(Algorithm[Choices]):
    """K models, of which every silo trains the mean of its N_g best; IFCA with N_g = 1."""

    num_groups: Count = Field(
        3, description="K, number of models. With more models than silos, some stay unused."
    )
    soft_groups: Count = Field(
        2, description="N_g, number of models that each silo mixes; at most `num-groups`."
    )
    sample: Sample = 0
    seed: Seed = 0

    def problems(self, training: Config) -> Iterator[str]:
        if self.soft_groups > self.num_groups:
            yield (
                f"soft-groups must be at most num-groups = {self.num_groups}. "
                f"Got {self.soft_groups}"
            )

    @property
    def crosses(self) -> bool:
        """Whether models averaged together began apart: if silos mix several models."""
        return self.soft_groups > 1

    def first(self, initial: Arrays) -> Choices:
        return first_choices(initial, self.num_groups, self.seed)

    def newcomer_model(self, state: Choices) -> Model:
        """Return the first model; a newcomer chooses before it trains."""
        return state.models[0]

    def prepare(self, state: Choices, now: Round) -> Exchanges[Choices]:
        """Choose each silo's N_g models of smallest loss (IFCA, line 6: ĵ = argmin_j F_i(θ_j)).

        Ties go to the first. Models without a finite loss are not taken, even if fewer than N_g
        remain. A silo without an answer keeps its choice, or takes the most frequent one.
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
        """Order each sampled silo's training of its choice's mean, shared by equal choices."""
        by_choice: dict[Choice, list[str]] = {}
        for name in now.names:
            if name in state.chosen:
                by_choice.setdefault(state.chosen[name], []).append(name)
        present = sorted(tuple(sorted(names)) for names in by_choice.values())
        members = _held(state, by_choice).grouped(present)
        turn = drawn_silos(now, self.sample, seed=self.seed)
        return replace(state, members=members), orders_from(members.models, turn)

    def absorb(self, state: Choices, updates: Updates, now: Round) -> Choices:
        """Set θ_j to the mean of the updates that chose it; unchosen models stay."""
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
        """Return, per model, the silos that chose it: all models go to all silos."""
        return [
            tuple(name for name, choice in state.chosen.items() if number in choice)
            for number in range(len(state.models))
        ]

    def details(self, state: Choices) -> Mapping[str, Any]:
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
    """Return K different models: w⁰, and K − 1 copies with each array's values permuted.

    Layers are initialised with independent values of one distribution, so a permutation is as good
    as another draw, and the server needs neither the task nor torch. Constant arrays (BatchNorm's)
    stay as they are. If all are constant, as a linear model's that starts at 0, the copies get
    noise: otherwise no silo could prefer one of them.
    """
    rng = np.random.default_rng([seed, num_models])
    constant = all(np.ptp(array) == 0 for array in initial.values() if array.size)
    vary = _noisy if constant else _permuted
    copies = [{n: vary(a, rng) for n, a in initial.items()} for _ in range(num_models - 1)]
    return Choices(Members(initial), (initial, *copies))


def _permuted(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    return rng.permutation(array.ravel()).reshape(array.shape)


def _noisy(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    if array.dtype.kind != "f":
        return array
    return rng.normal(array, NOISE).astype(array.dtype)


def _best(row: Sequence[float], count: int) -> Choice:
    ranked = np.argsort(row, kind="stable")[:count].tolist()
    return tuple(sorted(number for number in ranked if np.isfinite(row[number])))


def _usual(chosen: Mapping[str, Choice], count: int) -> Choice:
    taken = sorted(chosen.values())
    return max(taken, key=taken.count, default=tuple(range(count)))


def _held(state: Choices, by_choice: Mapping[Choice, Sequence[str]]) -> Members:
    models: dict[str, Model] = {}
    for choice, names in by_choice.items():
        models |= dict.fromkeys(names, plain_mean([state.models[j] for j in choice]))
    return state.members.holding(models)
