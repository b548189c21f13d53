"""Independent training: every silo alone. The baseline that collaboration has to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coterie.strategies.rounds.grouping import Members, average_groups, enrol, orders_from
from coterie.strategies.rounds.loop import Group, GroupStrategy, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class Independent(GroupStrategy[Members]):
    """Every silo trains its own model from w⁰ and never hears of another. See ``GroupStrategy``."""

    def first(self, initial: Model) -> Members:
        """Nobody yet."""
        return Members(initial)

    def admit(self, state: Members, silos: Sequence[Silo], *, round: int) -> Members:
        """A newcomer starts from w⁰, whenever it comes."""
        return enrol(state, silos, state.initial)

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Train your own model."""
        alone = replace(state, groups=tuple((silo.name,) for silo in silos))
        return alone, orders_from(state.models, silos)

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """Each update becomes its silo's model."""
        return average_groups(state, updates)

    def models(self, state: Members) -> Mapping[str, Model]:
        """Silo → its own model."""
        return state.models

    def groups(self, state: Members) -> Sequence[Group]:
        """Singletons."""
        return state.groups

    def sizes(self, state: Members) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.sizes
