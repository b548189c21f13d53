"""Strategies that the benchmarks alone need: groups that are given, silos drawn by another rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie import wire
from coterie.strategies import FedAvg, Independent
from coterie.strategies.rounds.grouping import Members, orders_from
from coterie.strategies.rounds.loop import Group, Order, Update
from coterie.strategies.rounds.roster import Silo


class FixedGroups(Independent):
    """Groups that are given and stay.

    Args:
        groups: by name.
        first_statistics: BatchNorm's statistics are those of a group's first silo, as HCCT's
            authors released it.
    """

    def __init__(
        self, groups: Sequence[Group], *, first_statistics: bool = False, **keys: Any
    ) -> None:
        super().__init__(**keys)
        self.fixed = tuple(groups)
        self.first_statistics = first_statistics

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Everybody trains its group's model."""
        return replace(state, groups=self.fixed), orders_from(state.models, silos)

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """The mean, but for statistics that are the first silo's."""
        state = super().absorb(state, updates, round=round)
        if not self.first_statistics:
            return state
        by_name = {update.silo.name: update for update in updates}
        models = dict(state.models)
        for group in self.fixed:
            first = by_name[group[0]]
            statistics = {name: first.model[name] for name in first.silo.buffers}
            models |= dict.fromkeys(group, models[group[0]] | statistics)
        return replace(state, models=models)


class Sampled(FedAvg):
    """FedAvg with some silos a round, and a learning rate that follows a rule.

    Args:
        active: silos a round, drawn by ``draw`` and the round.
        factor: round → factor on the learning rate.
    """

    def __init__(
        self, *, active: int, draw: int, factor: Callable[[int], float], **keys: Any
    ) -> None:
        super().__init__(**keys)
        self.active, self.draw, self.factor = active, draw, factor

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Some of FedAvg's orders, each with this round's learning rate."""
        state, orders = super().orders(state, silos, round=round)
        rng = np.random.default_rng([self.draw, round])
        turn = set(rng.choice(len(orders), size=min(self.active, len(orders)), replace=False))
        lr = float(self.train_config[wire.LR]) * self.factor(round)
        return state, [replace(o, config={wire.LR: lr}) for i, o in enumerate(orders) if i in turn]
