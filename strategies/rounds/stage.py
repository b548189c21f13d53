"""One concern around every round, in one place: who takes part, what goes out, what is remembered.

The engine calls all stages in their order, at three moments of a round. A stage knows no other.
What it remembers is a frozen value, which lies in the run's checkpoints under its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from coterie.strategies.rounds import kit

ENDED_EARLY = "ended-early"
"""The note of a stage that ends the run, with the reason in words."""


@dataclass(frozen=True)
class Room:
    """Who is here in a round, and who of them is not asked.

    Attributes:
        number: of the round.
        here: all silos that are connected.
        resting: silo → why it is not asked.
    """

    number: int
    here: tuple[kit.Silo, ...]
    resting: Mapping[str, str]


@dataclass(frozen=True)
class Played:
    """What a round's training brought.

    Attributes:
        now: the round as the algorithm saw it.
        algorithm, state: who trained it, and where it stands after it.
        orders, checked: what was asked of each silo, and the replies after all checks.
        trained: updates of the round's own training, of all that count or train alone.
        silent: silos that left another question unanswered.
        seconds: of each exchange since the last such moment, silo → until it had answered or was
            given up.
        deadline_s: of an exchange.
    """

    now: kit.Round
    algorithm: kit.Algorithm[Any]
    state: Any
    orders: Sequence[kit.Order]
    checked: kit.Checked
    trained: kit.Updates
    silent: frozenset[str]
    seconds: Sequence[Mapping[str, float]]
    deadline_s: float


class Stage:
    """A concern; every verb does nothing by default.

    Attributes:
        name: of its folder.
        first: what it remembers before round 1.
    """

    name: ClassVar[str]
    first: ClassVar[Any] = None

    def admit(self, mine: Any, room: Room) -> Room:
        """The room with whom this stage lets rest."""
        return room

    def outgoing(self, mine: Any, orders: Sequence[kit.Order], now: kit.Round) -> list[kit.Order]:
        """The round's orders on their way out."""
        return list(orders)

    def after(self, mine: Any, played: Played) -> tuple[Any, dict[str, Any]]:
        """What it remembers from now on, and its notes for the record."""
        return mine, {}


@dataclass(frozen=True)
class Stages:
    """All stages of a run, with what they remember.

    Attributes:
        all: in the order in which they are called.
        kept: name → what it remembers.
    """

    all: tuple[Stage, ...]
    kept: Mapping[str, Any]

    def _with_memory(self) -> list[tuple[Stage, Any]]:
        return [(stage, self.kept.get(stage.name, stage.first)) for stage in self.all]

    def resting(self, here: Sequence[kit.Silo], number: int) -> dict[str, str]:
        """Silo → why it is not asked in this round."""
        room = Room(number, tuple(here), {})
        for stage, mine in self._with_memory():
            room = stage.admit(mine, room)
        return dict(room.resting)

    def outgoing(self, orders: Sequence[kit.Order], now: kit.Round) -> list[kit.Order]:
        """The round's orders as they go out."""
        for stage, mine in self._with_memory():
            orders = stage.outgoing(mine, orders, now)
        return list(orders)

    def after(self, played: Played) -> tuple[Stages, dict[str, Any]]:
        """The stages after a round, and what they note."""
        kept, notes = dict(self.kept), dict[str, Any]()
        for stage, mine in self._with_memory():
            kept[stage.name], more = stage.after(mine, played)
            notes |= more
        return replace(self, kept=kept), notes
