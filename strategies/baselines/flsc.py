"""FLSC: K models, and every silo trains the mean of those that fit it best.

Li, Li, Varshney: "Federated Learning with Soft Clustering", IEEE Internet of Things Journal 2022;
as Sun, Kountouris, Zhang describe it (HCCT, section 7.1): a silo takes the mean of its N_g models
of smallest loss as its local model. What it sends back counts in each of them.

Differs from the paper in what IFCA differs from its own: size-weighted means, initial models that
are permutations of w⁰. Cost: as IFCA, K models and K passes over the data a round and silo.
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


class FLSC(GroupStrategy[Choices]):
    """Every silo trains the mean of its N_g best of K models.

    Args:
        num_groups: K, at least 1; may be above the number of silos.
        soft_groups: N_g in [1, K].
        sample: silos a round, drawn by seed; 0 takes all. Only they choose.
        seed: of the initial models and of the draws.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        num_groups: int = 3,
        soft_groups: int = 2,
        sample: int = 0,
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(num_groups >= 1, f"num_groups must be at least 1. Got {num_groups}.")
        require(
            1 <= soft_groups <= num_groups,
            f"soft_groups must be in [1, {num_groups}], at most num_groups. Got {soft_groups}.",
        )
        require(sample >= 0, f"sample must be at least 0. Got {sample}.")
        self.num_groups, self.soft_groups = int(num_groups), int(soft_groups)
        self.sample, self.seed = int(sample), int(seed)

    def first(self, initial: Model) -> Choices:
        """K models, nobody yet."""
        return first_choices(initial, self.num_groups, self.seed)

    def admit(self, state: Choices, silos: Sequence[Silo], *, round: int) -> Choices:
        """A newcomer chooses before it trains, like everybody."""
        return admitted(state, silos)

    def prepare(
        self, state: Choices, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], Choices]:
        """The N_g models of smallest loss."""
        return (yield from choose(state, self._turn(silos, round), count=self.soft_groups))

    def _turn(self, silos: Sequence[Silo], round: int) -> list[Silo]:
        return drawn_silos(silos, self.sample, seed=self.seed, round=round)

    def orders(
        self, state: Choices, silos: Sequence[Silo], *, round: int
    ) -> tuple[Choices, list[Order]]:
        """Train the mean of the chosen models."""
        return ordered(state, silos, self._turn(silos, round))

    def absorb(self, state: Choices, updates: Sequence[Update], *, round: int) -> Choices:
        """Average each model over those who had it among their chosen."""
        return aggregated(state, updates)

    def models(self, state: Choices) -> Mapping[str, Model]:
        """Silo → the mean of the models that it chose last."""
        return state.members.models

    def groups(self, state: Choices) -> Sequence[Group]:
        """Who made the same choice; sharing one model of several is not sharing a group."""
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
