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
from coterie.strategies.rounds import kit
from coterie.wire import Model


class Independent(kit.Algorithm[kit.Plain]):
    """Every silo trains its own model from w⁰ and never hears of another."""

    alone = True
    works_unseen = True

    @property
    def averages(self) -> bool:
        """There is nothing to average."""
        return False

    def orders(self, state: kit.Plain, now: kit.Round) -> tuple[kit.Plain, list[kit.Order]]:
        """Train your own model."""
        members = state.members.grouped((name,) for name in now.names)
        return kit.Plain(members), kit.orders_from(members.models, now.silos)

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """Each update becomes its silo's model."""
        return kit.Plain(kit.average_groups(state.members, updates))


class OneModel(kit.Algorithm[kit.State]):
    """What the algorithms of one global model have in common: who trains from what."""

    kind: ClassVar[str] = wire.TRAIN
    """Message type of the training."""

    def newcomer_model(self, state: kit.State) -> Model:
        """The global model."""
        return kit.global_model(self.members(state))

    def orders(self, state: kit.State, now: kit.Round) -> tuple[kit.State, list[kit.Order]]:
        """Train the global model. Who was away gets today's, not the one it left with."""
        members = kit.together(self.members(state), now.silos)
        orders = kit.orders_from(members.models, now.silos, self.kind)
        return self.with_members(state, members), orders


class FedAvg(OneModel[kit.Plain]):
    """The size-weighted mean of all updates, every round."""

    sample: kit.Sample = 0
    seed: kit.Seed = 0
    works_unseen = True

    def orders(self, state: kit.Plain, now: kit.Round) -> tuple[kit.Plain, list[kit.Order]]:
        """Whose turn it is trains the global model."""
        members = kit.together(state.members, now.silos)
        turn = kit.drawn_silos(now, self.sample, seed=self.seed)
        return kit.Plain(members), kit.orders_from(members.models, turn)

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """The mean goes to everybody who is here; without any answer the model stays."""
        return kit.Plain(kit.average_groups(state.members, updates))
