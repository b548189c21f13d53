"""IFCA: K models, and every silo trains the one with the smallest loss on its data.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS
2020, https://arxiv.org/abs/2006.04088; Algorithm 1, model averaging (option II).

Differs from the paper in:

- Models are averaged size-weighted (the paper's silos have equally many samples).
- The K initial models are w⁰ and permutations of it, see ``choosing.first_choices``.
- One restart. The paper takes the best of several by a validation set.

Every silo is sent K models more a round, and runs its data K times through a model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

from coterie.strategies.baselines.choosing import (
    Choices,
    admitted,
    aggregated,
    choose,
    choosers,
    described,
    first_choices,
    ordered,
)
from coterie.strategies.errors import require
from coterie.strategies.rounds.grouping import drawn_silos
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class IFCA(GroupStrategy[Choices]):
    """Every silo trains, of K models, the one that fits its training data best.

    Args:
        num_groups: K, at least 1. May be above the number of silos: then models stay unused.
        sample: silos a round, drawn by seed; 0 takes all. Only they choose.
        seed: of the initial models and of the draws.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        num_groups: int = 3,
        sample: int = 0,
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(num_groups >= 1, f"num_groups must be at least 1. Got {num_groups}.")
        require(sample >= 0, f"sample must be at least 0. Got {sample}.")
        self.num_groups, self.sample, self.seed = int(num_groups), int(sample), int(seed)

    def first(self, initial: Model) -> Choices:
        """K models, nobody yet."""
        return first_choices(initial, self.num_groups, self.seed)

    def admit(self, state: Choices, silos: Sequence[Silo], *, round: int) -> Choices:
        """A newcomer chooses before it trains, like everybody."""
        return admitted(state, silos)

    def prepare(
        self, state: Choices, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], Choices]:
        """Line 6: ĵ = argmin_j F_i(θ_j)."""
        return (yield from choose(state, self._turn(silos, round), count=1))

    def _turn(self, silos: Sequence[Silo], round: int) -> list[Silo]:
        return drawn_silos(silos, self.sample, seed=self.seed, round=round)

    def orders(
        self, state: Choices, silos: Sequence[Silo], *, round: int
    ) -> tuple[Choices, list[Order]]:
        """Train the chosen model."""
        return ordered(state, silos, self._turn(silos, round))

    def absorb(self, state: Choices, updates: Sequence[Update], *, round: int) -> Choices:
        """Average each model over those who chose it."""
        return aggregated(state, updates)

    def models(self, state: Choices) -> Mapping[str, Model]:
        """Silo → the model that it chose last."""
        return state.members.models

    def groups(self, state: Choices) -> Sequence[Group]:
        """Who chose the same model."""
        return state.members.groups

    def sharing(self, state: Choices) -> Sequence[Group]:
        """Of every model, who chose it: all models go to everybody."""
        return choosers(state)

    def sizes(self, state: Choices) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: Choices) -> Mapping[str, Any]:
        """Choices, losses, and models that nobody chose."""
        return described(state)
