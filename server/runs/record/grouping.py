"""How a round's groups were found, as far as the strategy tells the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.server.runs.record.race import (
    Entrant,
    Placement,
    Verdict,
    entrants_of,
    placements_of,
    verdict_of,
)
from coterie.server.runs.record.values import Fields, Groups, Kind
from coterie.strategies.errors import refused

FloatArray = NDArray[np.float64]
MATRICES = ("similarity", "norms", "alphas", "sizes", "distances", "standard-errors")
"""Details of a round that grow with the square of the silos, and what goes with them."""
VECTORS = ("norms", "alphas", "sizes")
"""Of these the ones that grow with the silos only."""
DAMAGED = "the record's {} is damaged: {}."


@dataclass(frozen=True)
class Unlabelled:
    """A silo without labels: the silos whose model it has, none if it has none, and why."""

    group: tuple[str, ...]
    why: str


@dataclass(frozen=True, eq=False)
class Square:
    """A number for every pair of silos: row and column i are ``names[i]``; NaN where unknown."""

    names: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True)
class Structure:
    """What FedCollab says of the groups that it chose.

    Attributes:
        distances: of the silos' data, in [0, 1].
        bounds: ``chosen``, ``second-best``, ``alone``, ``together`` → error bound, where known.
        c: what the run has.
        c_interval: in which c the answer stays the same, or None.
        kept: another structure has a smaller bound; nobody but newcomers moves.
        second_groups: of the next best structure.
    """

    distances: Square | None
    bounds: Mapping[str, float]
    c: float
    c_interval: tuple[float, float] | None
    kept: bool
    second_groups: Groups


@dataclass(frozen=True)
class DiscriminatorWork:
    """What FedCollab's measurement of distances took: pairs, rounds, bytes of weights; and silo →
    why it has (some) distances missing."""

    pairs: int
    rounds: int
    bytes: int
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Bytes of ``auto`` so far: all, what FedAvg would have moved, the discriminators' of all; and
    the most in the whole run, as a multiple of FedAvg's."""

    moved: int
    usual: int
    discriminators: int
    budget: float


@dataclass(frozen=True)
class Grouping:
    """How a round's groups were found, as far as the strategy says so.

    A value is read when it is asked for.

    Args:
        details: of the round.

    Raises:
        FederationError: from an attribute, if what is there is damaged.
    """

    details: Mapping[str, Any]

    @property
    def planned(self) -> Groups:
        """HCCT's groups, of everybody that it knows."""
        return self._whole("planned", Fields.groups)

    @property
    def compared(self) -> tuple[str, ...]:
        """Whose updates were compared."""
        return self._whole("compared", Fields.names)

    @property
    def similarity(self) -> Square | None:
        """Cosines of the updates."""
        return self._square("similarity", self.details)

    @property
    def norms(self) -> FloatArray:
        """Lengths of the updates, one for each that was compared."""
        return self._row("norms")

    @property
    def terms(self) -> tuple[FloatArray, FloatArray] | None:
        """α and samples of each that was compared; None in older records."""
        if "alphas" not in self.details or "sizes" not in self.details:
            return None
        return self._row("alphas"), self._row("sizes")

    @property
    def alpha(self) -> float:
        """What ``alpha = auto`` found; NaN if nothing yet, or where α was given."""
        return self._whole("alpha", Fields.number)

    @property
    def own_alpha(self) -> frozenset[str]:
        """Who stated an α of its own."""
        return frozenset(self._whole("own-alpha", Fields.names))

    @property
    def num_groups(self) -> int:
        """Of FedGroup, empty ones too; 0 if it does not say."""
        return len(self._whole("members", lambda told, key: told.of(key, list)))

    @property
    def separation(self) -> float:
        """FedGroup's silhouette of the groups, NaN if unknown."""
        return self._whole("separation", Fields.number)

    @property
    def structure(self) -> Structure | None:
        """FedCollab's."""
        told = self._whole("structure", Fields.inside)
        if not told.values:
            return None
        bounds = told.inside("bound")
        known = {name: bounds.number(name) for name in bounds.values}
        structure = told.read(
            Structure,
            distances=self._square("distances", told.values),
            bounds={name: bound for name, bound in known.items() if math.isfinite(bound)},
            c_interval=_interval(told.of("c-interval", list)),
        )
        self._check("structure", told)
        return structure

    @property
    def discriminators(self) -> DiscriminatorWork | None:
        """FedCollab's, of a round in which there are some."""
        told = self._whole("discriminators", Fields.inside)
        return told.read(DiscriminatorWork) if told.values else None

    @property
    def phase(self) -> str:
        """Of ``auto``, after the round: ``look``, ``race`` or ``hold``."""
        return self._whole("phase", Fields.text)

    @property
    def entrants(self) -> tuple[Entrant, ...]:
        """The partitions that are raced in the next round."""
        return self._whole("candidates", entrants_of)

    @property
    def dropped(self) -> tuple[Entrant, ...]:
        """Those that are out of the race as of this round; see ``verdict`` for its last round."""
        return self._whole("dropped", entrants_of)

    @property
    def judges(self) -> tuple[str, ...]:
        """Silos that have measured all partitions of a race."""
        return self._whole("judges", Fields.names)

    @property
    def verdict(self) -> Verdict | None:
        """How a race ended, in its last round."""
        return self._whole("verdict", verdict_of)

    @property
    def trainings(self) -> Mapping[str, float]:
        """Passes over its samples that each silo has made."""
        return self._whole("trainings", Fields.numbers)

    @property
    def traffic(self) -> Traffic | None:
        """What ``auto`` has moved; None in older records."""
        told = self._whole("bytes", Fields.inside)
        return told.read(Traffic) if told.values else None

    @property
    def probation(self) -> Mapping[str, tuple[str, ...]]:
        """Newcomer → the group beside which it trains for now."""
        told = self._whole("probation", Fields.inside)
        return {name: told.names(name) for name in told.values}

    @property
    def placed(self) -> Mapping[str, Placement]:
        """Newcomer → what became of it in this round."""
        return self._whole("placed", placements_of)

    @property
    def unlabelled(self) -> Mapping[str, Unlabelled]:
        """Silos whose samples have no labels yet."""
        return self._whole(
            "unlabelled",
            lambda told, key: {name: one.read(Unlabelled) for name, one in told.each(key)},
        )

    def without_matrices(self) -> dict[str, Any]:
        """The details, and the structure in them, without what is large."""
        kept = {key: value for key, value in self.details.items() if key not in MATRICES}
        if isinstance(kept.get("structure"), dict):
            kept["structure"] = {k: v for k, v in kept["structure"].items() if k not in MATRICES}
        return kept

    @property
    def num_cells(self) -> int:
        """Of all matrices."""
        nested = self.details.get("structure") or {}
        return sum(
            len(holder[key]) ** 2
            for holder in (self.details, nested)
            for key in MATRICES
            if key not in VECTORS and key in holder
        )

    def _whole(self, key: str, read: Callable[[Fields, str], Kind]) -> Kind:
        told = Fields(self.details, "", [])
        value = read(told, key)
        self._check(key, told)
        return value

    def _check(self, key: str, told: Fields) -> None:
        if told.lost:
            raise refused(DAMAGED.format(key, "; ".join(told.lost)))

    def _row(self, key: str) -> FloatArray:
        return _array(key, self.details.get(key), (len(self.compared),))

    def _square(self, key: str, holder: Mapping[str, Any]) -> Square | None:
        names = Fields(holder, "", []).names("compared")
        if not names or holder.get(key) is None:
            return None
        return Square(names, _array(key, holder[key], (len(names), len(names))))


def _interval(ends: list[Any]) -> tuple[float, float] | None:
    """Without an end at the top for None; older records have None at the bottom for no interval."""
    if len(ends) != 2 or ends[0] is None:
        return None
    return float(ends[0]), math.inf if ends[1] is None else float(ends[1])


def _array(key: str, value: object, shape: tuple[int, ...]) -> FloatArray:
    try:
        found = np.array(value, dtype=float)
    except (TypeError, ValueError):
        raise refused(DAMAGED.format(key, "not an array of numbers")) from None
    if found.shape != shape:
        raise refused(DAMAGED.format(key, f"its shape must be {shape}, got {found.shape}"))
    return found
