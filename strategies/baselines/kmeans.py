"""k-means on updates: every silo trains from w⁰ once, and k-means makes the groups.

Ghosh, Hong, Yin, Ramchandran: "Robust Federated Learning in a Heterogeneous Environment", 2019,
https://arxiv.org/abs/1906.06629, with FedAvg inside the groups: the baseline "KMeans" of FedCollab.
All silos start from one w⁰, so that clustering updates is clustering local models.

A newcomer trains from w⁰ too, and joins the group with the nearest mean update; the paper has no
newcomers. Groups never change. FedAvg's messages: it works with any ClientApp.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from coterie import wire
from coterie.strategies.baselines.oneshot import (
    OneShot,
    admitted,
    described,
    formed,
    ordered,
    placed,
    trained,
)
from coterie.strategies.baselines.placing import compared, constant_lr
from coterie.strategies.errors import require
from coterie.strategies.partition.clustering import k_means
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.grouping import Members
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class KMeans(GroupStrategy[OneShot]):
    """Groups by k-means on the updates of round 1.

    Args:
        num_groups: K, at least 1; with fewer silos there are as many groups as silos.
        pretrain_epochs: local epochs of round 1; 0 takes those of a round.
        seed: of k-means++.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        num_groups: int = 3,
        pretrain_epochs: int = 0,
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(num_groups >= 1, f"num_groups must be at least 1. Got {num_groups}.")
        require(pretrain_epochs >= 0, f"pretrain_epochs must be at least 0. Got {pretrain_epochs}.")
        self.num_groups, self.seed = int(num_groups), int(seed)
        self.pretrain_epochs = int(pretrain_epochs)

    def _pretraining(self) -> dict[str, int | float | str | bool]:
        config = constant_lr(self.train_config, 1)
        if self.pretrain_epochs:  # a silo that is told steps does not count epochs
            config |= {wire.LOCAL_EPOCHS: self.pretrain_epochs, wire.LOCAL_STEPS: 0}
        return config

    def demands(self) -> Mapping[str, int | float | str | bool]:
        """The length of the pre-training, if it is not a round's."""
        return {wire.PRETRAIN_EPOCHS: self.pretrain_epochs} if self.pretrain_epochs else {}

    def first(self, initial: Model) -> OneShot:
        """Nobody yet."""
        return OneShot(Members(initial))

    def admit(self, state: OneShot, silos: Sequence[Silo], *, round: int) -> OneShot:
        """Everybody starts from w⁰."""
        return admitted(state, silos)

    def prepare(
        self, state: OneShot, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], OneShot]:
        """Place newcomers."""
        return (yield from placed(state, silos, metric="euclidean", config=self._pretraining()))

    def orders(
        self, state: OneShot, silos: Sequence[Silo], *, round: int
    ) -> tuple[OneShot, list[Order]]:
        """Pre-train, or train your group's model."""
        first = state.origin is None
        state, orders = ordered(state, silos)
        if first:
            orders = [replace(order, config=self._pretraining()) for order in orders]
        return state, orders

    def absorb(self, state: OneShot, updates: Sequence[Update], *, round: int) -> OneShot:
        """Form the groups, or train them."""
        if state.origin is not None:
            return trained(state, updates)
        if not updates:
            return state
        matrix = gram([list(compared(u).values()) for u in updates])
        wanted = min(self.num_groups, len(updates))
        rng = np.random.default_rng([self.seed, round])
        return formed(state, updates, k_means(matrix, num_groups=wanted, rng=rng))

    def models(self, state: OneShot) -> Mapping[str, Model]:
        """Silo → its group's model."""
        return state.members.models

    def groups(self, state: OneShot) -> Sequence[Group]:
        """Of who is here."""
        return state.members.groups

    def sharing(self, state: OneShot) -> Sequence[Group]:
        """Once there are groups, those of one silo too: newcomers get the group's model."""
        return self.groups(state) if state.origin is not None else super().sharing(state)

    def sizes(self, state: OneShot) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: OneShot) -> Mapping[str, Any]:
        """Groups by number, empty ones too."""
        return described(state)
