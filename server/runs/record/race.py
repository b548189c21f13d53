"""The recorded race of ``auto`` in a round, as typed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.server.runs.record.values import Fields, Groups


@dataclass(frozen=True)
class Standing:
    """A mean held-out error over silos, its distance from the best, and the standard error."""

    error: float = math.nan
    behind: float = math.nan
    standard_error: float = math.nan


@dataclass(frozen=True)
class Entrant:
    """A raced partition.

    Attributes:
        source: the method that proposed it.
        groups: of all silos of the race.
        samples: number behind a silo's model, mean over silos.
        supported: the silos' discriminators propose it.
        by_silo: the groups' trees may split by silo.
        own_penalty: λ with which silos make their own models of their group's; 0: they do not.
        error, behind, standard_error: decide the race; see ``Standing``.
        out: it was worse beyond chance.
        dropped: the round after which it was dropped; 0 if it was in the race to the end.
        latest: from every silo's last measurement alone.
    """

    source: str = ""
    groups: Groups = ()
    samples: float = math.nan
    supported: bool = False
    by_silo: bool = False
    own_penalty: float = 0.0
    error: float = math.nan
    behind: float = math.nan
    standard_error: float = math.nan
    out: bool = False
    dropped: int = 0
    latest: Standing = field(default_factory=Standing)


@dataclass(frozen=True)
class Gain:
    """A silo's gain over local training: as measured, and as expected from all silos' measurements.

    ``own``: it keeps its own model; ``share``: its last own training's weight in its final model.
    """

    measured: float = math.nan
    noise: float = math.nan
    expected: float = math.nan
    standard_error: float = math.nan
    own: bool = False
    share: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A silo's measurements: the number of samples, and the error of every entrant's model."""

    count: float
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of a race, which opened after round ``began``.

    ``left`` are silos that are alone because most of their group keep their own models.
    """

    began: int
    round: int
    complete: bool
    shares: bool
    judges: tuple[str, ...]
    winner: int
    entrants: tuple[Entrant, ...]
    gains: Mapping[str, Gain]
    trials: Mapping[str, Trial]
    converged: bool = False
    left: tuple[str, ...] = ()

    @property
    def chosen(self) -> Entrant:
        """The winning partition."""
        return self.entrants[self.winner]

    @property
    def silos(self) -> tuple[str, ...]:
        return tuple(sorted(name for group in self.chosen.groups for name in group))

    @property
    def own(self) -> tuple[str, ...]:
        """Silos that keep their own models."""
        return tuple(name for name, gain in self.gains.items() if gain.own)

    @property
    def alone(self) -> int | None:
        """Index of the entrant in which every silo trains alone, or None."""
        single = (all(len(group) == 1 for group in e.groups) for e in self.entrants)
        return next((number for number, is_alone in enumerate(single) if is_alone), None)


@dataclass(frozen=True)
class Placement:
    """The placement of a newcomer; errors that it kept back are NaN."""

    group: tuple[str, ...]
    joins: bool
    count: float
    alone: float
    grouped: float


def verdict_of(fields: Fields, key: str) -> Verdict | None:
    """Parse the verdict, if the round has one."""
    own = fields.inside(key)
    if not own.values:
        return None
    entrants = own.listed("candidates", Entrant)
    trials = {name: _trial(one, len(entrants)) for name, one in own.each("trials")}
    verdict = own.read(Verdict, entrants=entrants, trials=trials)
    if verdict.winner >= len(entrants):
        own.lose("winner")
        return None
    return verdict


def _trial(fields: Fields, number: int) -> Trial:
    errors: list[Any] = fields.of("errors", list)
    if len(errors) != number:
        fields.lose("errors")
        errors = [None] * number
    each = (Fields({"error": error}, fields.place, fields.lost).number("error") for error in errors)
    return Trial(fields.amount("count"), tuple(each))
