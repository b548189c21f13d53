"""Local training and one global model: the baselines that every grouping has to beat.

- ``Independent``: every silo trains by itself.
- ``FedAvg``: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of
  Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm
  1). With ``proximal-mu`` in the training configuration the silos' objective is that of FedProx (Li
  et al., MLSys 2020, https://arxiv.org/abs/1812.06127).

All means are size-weighted.
"""

from __future__ import annotations

from typing import ClassVar

from coterie import wire
from coterie.strategies.rounds.algorithm import Algorithm, Order, Round, State, Updates, orders_from
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Plain, global_model, together
from coterie.strategies.rounds.minimum_sizes import accepted, average_groups
from coterie.strategies.rounds.options import Sample, Seed
from coterie.strategies.rounds.sampling import drawn_silos


class Independent(Algorithm[Plain]):
    """Local training: every silo trains its own model from w⁰ and receives nothing from others."""

    alone = True
    works_unseen = True

    @property
    def averages(self) -> bool:
        return False

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        members = state.members.grouped((name,) for name in now.names)
        return Plain(members), orders_from(members.models, now.silos)

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        """Make each update its silo's model."""
        return Plain(average_groups(state.members, updates))


class OneModel(Algorithm[State]):
    """The base of algorithms with one global model, which all silos train."""

    hands_on = True
    kind: ClassVar[str] = wire.TRAIN
    """Message type of the training."""

    def newcomer_model(self, state: State) -> Model:
        return global_model(self.members(state))

    def orders(self, state: State, now: Round) -> tuple[State, list[Order]]:
        """Let silos train the global model; a silo that was away gets the current one."""
        members = together(self.members(state), now.silos)
        orders = orders_from(members.models, now.silos, self.kind)
        return self.with_members(state, members), orders


class FedAvg(OneModel[Plain]):
    """The size-weighted mean of all updates, every round."""

    sample: Sample = 0
    seed: Seed = 0
    works_unseen = True
    takes_steps = True

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        """Let the drawn silos train the global model."""
        members = together(state.members, now.silos)
        turn = drawn_silos(now, self.sample, seed=self.seed)
        return Plain(members), orders_from(members.models, turn)

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        """Give the mean to all connected silos; without any answer the model stays."""
        kept = accepted(updates, state.members.here)
        return Plain(average_groups(state.members, kept))
