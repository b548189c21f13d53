"""FedAvg: one model for everybody.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, Algorithm 1
with every silo in every round, or ``sample`` of them. With ``proximal-mu`` in the training
configuration the silos' objective is FedProx's (Li et al., MLSys 2020,
https://arxiv.org/abs/1812.06127).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from coterie.strategies.errors import require
from coterie.strategies.rounds.grouping import (
    Members,
    average_groups,
    drawn_silos,
    enrol,
    global_model,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class FedAvg(GroupStrategy[Members]):
    """The size-weighted mean of all updates, every round.

    Args:
        sample: K, silos a round, drawn by seed; 0 takes all.
        seed: of the draws.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        sample: int = 0,
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        for name, count in {"sample": sample, "seed": seed}.items():
            require(count >= 0, f"{name} must be at least 0. Got {count}.")
        self.sample, self.seed = int(sample), int(seed)

    def first(self, initial: Model) -> Members:
        """Nobody yet."""
        return Members(initial)

    def admit(self, state: Members, silos: Sequence[Silo], *, round: int) -> Members:
        """A newcomer starts from the global model."""
        return enrol(state, silos, global_model(state))

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Train the global model. Who was away gets today's, not the one it left with."""
        state = together(state, silos)
        turn = drawn_silos(silos, self.sample, seed=self.seed, round=round)
        return state, orders_from(state.models, turn)

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """The mean goes to everybody who is here; without any answer the model stays."""
        return average_groups(state, updates)

    def models(self, state: Members) -> Mapping[str, Model]:
        """Silo → the global model (who left, the last that it had)."""
        return state.models

    def groups(self, state: Members) -> Sequence[Group]:
        """One."""
        return state.groups

    def sizes(self, state: Members) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.sizes
