"""Stages: concerns around every round, such as stragglers, each in one place.

The engine calls all stages in order at three points of a round: when it decides who takes part,
when orders go out, and after training. Stages do not know each other. What a stage remembers is a
frozen value, which the run's checkpoints keep under the stage's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from coterie.strategies.rounds import kit

ENDED_EARLY = "ended-early"
"""Key of the note with which a stage ends the run; its value is the reason in words."""


@dataclass(frozen=True)
class Room:
    """Silos that are connected in a round, and which of them are not asked.

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
    """The outcome of a round's training.

    Attributes:
        now: the round as the algorithm saw it.
        algorithm, state: who trained it, and where it stands after it.
        orders, checked: what each silo was asked, and its reply after all checks.
        trained: updates of the round's own training that count, or of silos that train alone.
        silent: silos that did not answer another question of this round.
        seconds: for each exchange since the previous round's training, silo → seconds until it
            answered or was given up.
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
    """One concern. Every method does nothing by default.

    Attributes:
        name: its folder in ``features``.
        first: what it remembers before round 1.
    """

    name: ClassVar[str]
    first: ClassVar[Any] = None

    def admit(self, mine: Any, room: Room) -> Room:
        """Return the room with the silos that this stage lets rest."""
        return room

    def outgoing(self, mine: Any, orders: Sequence[kit.Order], now: kit.Round) -> list[kit.Order]:
        """Return the round's orders as they are to be sent."""
        return list(orders)

    def after(self, mine: Any, played: Played) -> tuple[Any, dict[str, Any]]:
        """Return what it remembers from now on, and its notes for the record."""
        return mine, {}


@dataclass(frozen=True)
class Stages:
    """All stages of a run, and what each remembers.

    Attributes:
        all: in the order in which they are called.
        kept: name → what it remembers.
    """

    all: tuple[Stage, ...]
    kept: Mapping[str, Any]

    def _with_memory(self) -> list[tuple[Stage, Any]]:
        return [(stage, self.kept.get(stage.name, stage.first)) for stage in self.all]

    def resting(self, here: Sequence[kit.Silo], number: int) -> dict[str, str]:
        """Return silo → why it is not asked in this round."""
        room = Room(number, tuple(here), {})
        for stage, mine in self._with_memory():
            room = stage.admit(mine, room)
        return dict(room.resting)

    def outgoing(self, orders: Sequence[kit.Order], now: kit.Round) -> list[kit.Order]:
        """Return the round's orders after all stages."""
        for stage, mine in self._with_memory():
            orders = stage.outgoing(mine, orders, now)
        return list(orders)

    def after(self, played: Played) -> tuple[Stages, dict[str, Any]]:
        """Return the stages after a round, and their notes."""
        kept, notes = dict(self.kept), dict[str, Any]()
        for stage, mine in self._with_memory():
            kept[stage.name], more = stage.after(mine, played)
            notes |= more
        return replace(self, kept=kept), notes
