"""An algorithm played by hand, without silos and messages; and a roster of silos' minimums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.strategies import GroupStrategy
from coterie.strategies.rounds.algorithm import Order, Round, Update
from coterie.strategies.rounds.conversation import stated_sizes
from coterie.strategies.rounds.play import welcome, with_stated_sizes
from coterie.strategies.rounds.roster import Silo


class Minimums:
    """The nodes as silos, some of which accept no small groups: node → smallest group."""

    def __init__(self, minimums: Mapping[int, int]) -> None:
        self.minimums = minimums

    def present(self, grid: Any, *, number: int) -> list[Silo]:
        return [
            Silo(f"silo-{n - 1}", n, num_examples=100, min_group_size=self.minimums.get(n, 1))
            for n in sorted(grid.get_node_ids())
        ]


class ByHand:
    """The steps of a strategy's rounds; every other attribute is its algorithm's."""

    def __init__(self, strategy: GroupStrategy) -> None:
        self.algorithm, self.config = strategy.algorithm, strategy.train_config
        self.here: tuple[Silo, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def now(self, silos: Sequence[Silo], round: int) -> Round:
        """The round, with these silos here."""
        self.here = tuple(silos)
        return Round(round, self.here, self.config)

    def admit(self, state: Any, silos: Sequence[Silo], *, round: int) -> Any:
        """The round begins with these silos here; who is new is let in."""
        return welcome(self.algorithm, state, self.now(silos, round))

    def prepare(self, state: Any, silos: Sequence[Silo], *, round: int) -> Any:
        """The round begins; what is asked before the training."""
        state = self.admit(state, silos, round=round)
        return self.algorithm.prepare(state, self.now(silos, round))

    def orders(self, state: Any, silos: Sequence[Silo], *, round: int) -> tuple[Any, list[Order]]:
        """The round begins, with nothing asked before the training; what everybody trains."""
        return self.go_on(self.admit(state, silos, round=round), silos, round=round)

    def go_on(self, state: Any, silos: Sequence[Silo], *, round: int) -> tuple[Any, list[Order]]:
        """What everybody trains, in a round that has begun."""
        return self.algorithm.orders(state, self.now(silos, round))

    def absorb(self, state: Any, updates: Sequence[Update], *, round: int) -> Any:
        """The state after the training of who was here last."""
        state = with_stated_sizes(self.algorithm, state, stated_sizes(updates))
        return self.algorithm.absorb(state, updates, self.now(self.here, round))

    def finish(self, state: Any, silos: Sequence[Silo], *, round: int) -> Any:
        """What is asked after the last round."""
        return self.algorithm.finish(state, self.now(silos, round))

    def comparing(self, state: Any, *, round: int) -> bool:
        """Whether partitions are compared in this round."""
        return self.algorithm.comparing(state, self.now(self.here, round))
