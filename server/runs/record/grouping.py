"""How a round's groups were found, as far as the strategy records it."""

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
    verdict_of,
)
from coterie.server.runs.record.values import Fields, Groups, Kind
from coterie.strategies.errors import refused

FloatArray = NDArray[np.float64]
MATRICES = ("similarity", "norms", "alphas", "sizes", "distances", "standard-errors")
"""Details of a round that grow with the square of the silos, and the vectors that go with them."""
VECTORS = ("norms", "alphas", "sizes")
"""Those of ``MATRICES`` that grow linearly with the silos."""
DAMAGED = "the record's {} is damaged: {}."


@dataclass(frozen=True)
class Unlabelled:
    """A silo without labels: the silos whose model it has, if any, and why."""

    group: tuple[str, ...]
    why: str


@dataclass(frozen=True, eq=False)
class Square:
    """A number for every pair of silos: row and column i are ``names[i]``; NaN where unknown."""

    names: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True)
class Structure:
    """The groups that FedCollab chose, and alternatives.

    Attributes:
        distances: between the silos' data, in [0, 1].
        bounds: ``chosen``, ``second-best``, ``alone``, ``together`` → error bound, where known.
        c: the run's value.
        c_interval: interval of c in which the answer stays the same, or None.
        kept: another structure has a smaller bound, but only newcomers move.
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
    """The cost of FedCollab's distance measurements; ``bytes`` are those of weights.

    ``missing`` maps silos to the reason why (some of) their distances are missing.
    """

    pairs: int
    rounds: int
    bytes: int
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Bytes of ``auto`` so far: in total, FedAvg's for comparison, and the discriminators' part.

    ``budget`` is the maximum for the whole run, as a multiple of FedAvg's; ``least``: bytes that it
    is never below.
    """

    moved: int
    usual: int
    discriminators: int
    budget: float
    least: int = 0


@dataclass(frozen=True)
class Grouping:
    """How a round's groups were found, as far as recorded in its details.

    Values are parsed on access, which raises ``FederationError`` if they are damaged.
    """

    details: Mapping[str, Any]

    @property
    def planned(self) -> Groups:
        """HCCT's groups of all silos that it knows."""
        return self._whole("planned", Fields.groups)

    @property
    def compared(self) -> tuple[str, ...]:
        """Silos whose updates were compared."""
        return self._whole("compared", Fields.names)

    @property
    def similarity(self) -> Square | None:
        """Cosines of the updates."""
        return self._square("similarity", self.details)

    @property
    def norms(self) -> FloatArray:
        """Norms of the compared updates."""
        return self._row("norms")

    @property
    def alphas(self) -> FloatArray:
        """α of each compared silo."""
        return self._row("alphas")

    @property
    def sizes(self) -> FloatArray:
        """Samples of each compared silo."""
        return self._row("sizes")

    @property
    def alpha(self) -> float:
        """The run's α if it was found; NaN if there is none yet, or if it was given."""
        return self._whole("alpha", Fields.number)

    @property
    def by_choice(self) -> str:
        """Which key's value left every silo alone, or put all together, or empty."""
        return self._whole("by-choice", Fields.text)

    @property
    def own_alpha(self) -> frozenset[str]:
        """Silos that stated their own α."""
        return frozenset(self._whole("own-alpha", Fields.names))

    @property
    def structure(self) -> Structure | None:
        """FedCollab's structure, if recorded."""
        fields = self._whole("structure", Fields.inside)
        if not fields.values:
            return None
        bounds = fields.inside("bound")
        known = {name: bounds.number(name) for name in bounds.values}
        structure = fields.read(
            Structure,
            distances=self._square("distances", fields.values),
            bounds={name: bound for name, bound in known.items() if math.isfinite(bound)},
            c_interval=_interval(fields.of("c-interval", list)),
        )
        self._check("structure", fields)
        return structure

    @property
    def discriminators(self) -> DiscriminatorWork | None:
        """The work on FedCollab's discriminators, in a round that has some."""
        return self._whole(
            "discriminators", lambda fields, key: fields.optional(key, DiscriminatorWork)
        )

    @property
    def phase(self) -> str:
        """The phase of ``auto`` after the round: ``look``, ``race`` or ``hold``."""
        return self._whole("phase", Fields.text)

    @property
    def score(self) -> str:
        """The metric that ``auto`` compares by; empty: the run's primary metric."""
        return self._whole("score", Fields.text)

    @property
    def entrants(self) -> tuple[Entrant, ...]:
        """The partitions raced in the next round."""
        return self._whole("candidates", lambda fields, key: fields.listed(key, Entrant))

    @property
    def dropped(self) -> tuple[Entrant, ...]:
        """Partitions that this round dropped from the race; for its last round, see ``verdict``."""
        return self._whole("dropped", lambda fields, key: fields.listed(key, Entrant))

    @property
    def judges(self) -> tuple[str, ...]:
        """Silos that have measured all partitions of a race."""
        return self._whole("judges", Fields.names)

    @property
    def verdict(self) -> Verdict | None:
        """The result of a race, in its last round."""
        return self._whole("verdict", verdict_of)

    @property
    def trainings(self) -> Mapping[str, float]:
        """Silo → passes over its samples so far."""
        return self._whole("trainings", Fields.numbers)

    @property
    def traffic(self) -> Traffic | None:
        """Bytes moved by ``auto``; None where it moved none."""
        return self._whole("bytes", lambda fields, key: fields.optional(key, Traffic))

    @property
    def probation(self) -> Mapping[str, tuple[str, ...]]:
        """Newcomer → the group that it trains alongside for now."""
        fields = self._whole("probation", Fields.inside)
        return {name: fields.names(name) for name in fields.values}

    @property
    def placed(self) -> Mapping[str, Placement]:
        """Newcomer → its placement in this round."""
        return self._whole("placed", lambda fields, key: fields.named(key, Placement))

    @property
    def unlabelled(self) -> Mapping[str, Unlabelled]:
        """Silos whose samples have no labels yet."""
        return self._whole("unlabelled", lambda fields, key: fields.named(key, Unlabelled))

    @property
    def testing(self) -> Mapping[str, Unlabelled]:
        """Silos that only test, with the group whose model they measured."""
        return self._whole("testing", lambda fields, key: fields.named(key, Unlabelled))

    @property
    def tested(self) -> Mapping[str, Mapping[str, float]]:
        """Silo that only tests → its figures of that model."""
        fields = self._whole("tested", Fields.inside)
        return {name: fields.numbers(name) for name in fields.values}

    @property
    def not_summed(self) -> Mapping[str, str]:
        """Silo → why its rows are not in the sums from which its group's trees grew."""
        return self._whole("not-summed", Fields.texts)

    @property
    def unfinished(self) -> Mapping[str, str]:
        """Group → how many of its trees had grown when the rounds were over."""
        return self._whole("unfinished", Fields.texts)

    def without_matrices(self) -> dict[str, Any]:
        """Return the details, and the structure in them, without matrices."""
        kept = {key: value for key, value in self.details.items() if key not in MATRICES}
        if isinstance(kept.get("structure"), dict):
            kept["structure"] = {k: v for k, v in kept["structure"].items() if k not in MATRICES}
        return kept

    @property
    def num_cells(self) -> int:
        """Number of cells in all matrices."""
        nested = self.details.get("structure") or {}
        return sum(
            len(holder[key]) ** 2
            for holder in (self.details, nested)
            for key in MATRICES
            if key not in VECTORS and key in holder
        )

    def _whole(self, key: str, read: Callable[[Fields, str], Kind]) -> Kind:
        fields = Fields(self.details, "", [])
        value = read(fields, key)
        self._check(key, fields)
        return value

    def _check(self, key: str, fields: Fields) -> None:
        if fields.lost:
            raise refused(DAMAGED.format(key, "; ".join(fields.lost)))

    def _row(self, key: str) -> FloatArray:
        return _array(key, self.details.get(key), (len(self.compared),))

    def _square(self, key: str, holder: Mapping[str, Any]) -> Square | None:
        names = Fields(holder, "", []).names("compared")
        if not names or holder.get(key) is None:
            return None
        return Square(names, _array(key, holder[key], (len(names), len(names))))


def _interval(ends: list[Any]) -> tuple[float, float] | None:
    """Parse an interval; no upper end means ∞, no lower end no interval."""
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
