"""Everybody alone, and everybody together: what every grouping has to beat.

- ``Independent``: every silo for itself.
- ``FedAvg``: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of
  Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629,
  Algorithm 1. With ``proximal-mu`` in the training configuration the silos' objective is FedProx's
  (Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127).

All means are size-weighted.
"""

from __future__ import annotations

from typing import ClassVar

from coterie import wire
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Order,
    Round,
    State,
    Updates,
    drawn_silos,
    orders_from,
)
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Plain, global_model, together
from coterie.strategies.rounds.options import Sample, Seed
from coterie.strategies.rounds.policy import average_groups


class Independent(Algorithm[Plain]):
    """Every silo trains its own model from w⁰ and never hears of another."""

    alone = True
    works_unseen = True

    @property
    def averages(self) -> bool:
        """There is nothing to average."""
        return False

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        """Train your own model."""
        members = state.members.grouped((name,) for name in now.names)
        return Plain(members), orders_from(members.models, now.silos)

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        """Each update becomes its silo's model."""
        return Plain(average_groups(state.members, updates))


class OneModel(Algorithm[State]):
    """What the algorithms of one global model have in common: who trains from what."""

    kind: ClassVar[str] = wire.TRAIN
    """Message type of the training."""

    def newcomer_model(self, state: State) -> Model:
        """The global model."""
        return global_model(self.members(state))

    def orders(self, state: State, now: Round) -> tuple[State, list[Order]]:
        """Train the global model. Who was away gets today's, not the one it left with."""
        members = together(self.members(state), now.silos)
        orders = orders_from(members.models, now.silos, self.kind)
        return self.with_members(state, members), orders


class FedAvg(OneModel[Plain]):
    """The size-weighted mean of all updates, every round."""

    sample: Sample = 0
    seed: Seed = 0
    works_unseen = True

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        """Whose turn it is trains the global model."""
        members = together(state.members, now.silos)
        turn = drawn_silos(now, self.sample, seed=self.seed)
        return Plain(members), orders_from(members.models, turn)

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        """The mean goes to everybody who is here; without any answer the model stays."""
        return Plain(average_groups(state.members, updates))
