"""Algorithms that the benchmarks alone need: groups that are given, silos drawn by another rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from coterie import wire
from coterie.strategies.plain.fedavg import FedAvg
from coterie.strategies.rounds.algorithm import Algorithm, Order, Round, Update, orders_from
from coterie.strategies.rounds.handles import arrays_of
from coterie.strategies.rounds.members import Plain
from coterie.strategies.rounds.minimum_sizes import average_groups
from coterie.strategies.rounds.reports import Group


class FixedGroups(Algorithm[Plain]):
    """Groups that are given and stay.

    With ``first_statistics`` BatchNorm's statistics are those of a group's first silo, as HCCT's
    authors released it.
    """

    fixed: tuple[Group, ...]
    first_statistics: bool = False

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        """Everybody trains its group's model."""
        members = state.members.grouped(self.fixed)
        return Plain(members), orders_from(members.models, now.silos)

    def absorb(self, state: Plain, updates: Sequence[Update], now: Round) -> Plain:
        """The mean, but for statistics that are the first silo's."""
        members = average_groups(state.members, updates)
        if not self.first_statistics:
            return Plain(members)
        by_name = {update.silo.name: update for update in updates}
        models = dict(members.models)
        for group in self.fixed:
            first = by_name[group[0]]
            statistics = {name: arrays_of(first.model)[name] for name in first.silo.buffers}
            models |= dict.fromkeys(group, arrays_of(models[group[0]]) | statistics)
        return Plain(members.holding(models))


class Sampled(FedAvg):
    """FedAvg with some silos a round, and a learning rate that follows a rule.

    ``active`` silos a round are drawn by ``draw`` and the round; ``factor`` gives the round's
    factor on the learning rate.
    """

    active: int
    draw: int
    factor: Callable[[int], float]

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        """Some of FedAvg's orders, each with this round's learning rate."""
        state, orders = super().orders(state, now)
        rng = np.random.default_rng([self.draw, now.number])
        turn = set(rng.choice(len(orders), size=min(self.active, len(orders)), replace=False))
        lr = float(now.config[wire.LR]) * self.factor(now.number)
        return state, [replace(o, config={wire.LR: lr}) for i, o in enumerate(orders) if i in turn]
