"""How a round's groups were found, as far as the strategy records it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, overload

import numpy as np
from numpy.typing import NDArray

from coterie.server.runs.record.race import Entrant, Placement, verdict_of
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


class Recorded(Generic[Kind]):
    """A value of a round's details, read on access: raises ``FederationError`` if it is damaged."""

    def __init__(self, key: str, read: Callable[[Fields, str], Kind]) -> None:
        self.key, self.read = key, read

    @overload
    def __get__(self, grouping: None, owner: type) -> Self: ...

    @overload
    def __get__(self, grouping: Grouping, owner: type) -> Kind: ...

    def __get__(self, grouping: Grouping | None, owner: type) -> Self | Kind:
        if grouping is None:
            return self
        fields = Fields(grouping.details, "", [])
        value = self.read(fields, self.key)
        if fields.lost:
            raise refused(DAMAGED.format(self.key, "; ".join(fields.lost)))
        return value


def _structure(fields: Fields, key: str) -> Structure | None:
    fields = fields.inside(key)
    if not fields.values:
        return None
    bounds = fields.inside("bound")
    known = {name: bounds.number(name) for name in bounds.values}
    return fields.read(
        Structure,
        distances=_square(fields, "distances"),
        bounds={name: bound for name, bound in known.items() if math.isfinite(bound)},
        c_interval=_interval(fields.of("c-interval", list)),
    )


def _square(fields: Fields, key: str) -> Square | None:
    names = Fields(fields.values, "", []).names("compared")
    if not names or fields.values.get(key) is None:
        return None
    return Square(names, _array(key, fields.values[key], (len(names), len(names))))


def _row(fields: Fields, key: str) -> FloatArray:
    names = fields.names("compared")
    return np.empty(0) if fields.lost else _array(key, fields.values.get(key), (len(names),))


def _names_of_each(fields: Fields, key: str) -> dict[str, tuple[str, ...]]:
    own = fields.inside(key)
    return {name: own.names(name) for name in own.values}


def _numbers_of_each(fields: Fields, key: str) -> dict[str, dict[str, float]]:
    own = fields.inside(key)
    return {name: own.numbers(name) for name in own.values}


@dataclass(frozen=True)
class Grouping:
    """How a round's groups were found, as far as recorded in its details."""

    details: Mapping[str, Any]

    planned = Recorded("planned", Fields.groups)
    """HCCT's groups of all silos that it knows."""
    compared = Recorded("compared", Fields.names)
    """Silos whose updates were compared."""
    similarity = Recorded("similarity", _square)
    """Cosines of the updates."""
    norms = Recorded("norms", _row)
    """Norms of the compared updates."""
    alphas = Recorded("alphas", _row)
    """α of each compared silo."""
    sizes = Recorded("sizes", _row)
    """Samples of each compared silo."""
    alpha = Recorded("alpha", Fields.number)
    """The run's α if it was found; NaN if there is none yet, or if it was given."""
    by_choice = Recorded("by-choice", Fields.text)
    """Which key's value left every silo alone, or put all together, or empty."""
    own_alpha = Recorded("own-alpha", lambda fields, key: frozenset(fields.names(key)))
    """Silos that stated their own α."""
    structure = Recorded("structure", _structure)
    """FedCollab's structure, if recorded."""
    discriminators = Recorded(
        "discriminators", lambda fields, key: fields.optional(key, DiscriminatorWork)
    )
    """The work on FedCollab's discriminators, in a round that has some."""
    phase = Recorded("phase", Fields.text)
    """The phase of ``auto`` after the round: ``look``, ``race`` or ``hold``."""
    score = Recorded("score", Fields.text)
    """The metric that ``auto`` compares by; empty: the run's primary metric."""
    entrants = Recorded("candidates", lambda fields, key: fields.listed(key, Entrant))
    """The partitions raced in the next round."""
    dropped = Recorded("dropped", lambda fields, key: fields.listed(key, Entrant))
    """Partitions that this round dropped from the race; for its last round, see ``verdict``."""
    judges = Recorded("judges", Fields.names)
    """Silos that have measured all partitions of a race."""
    verdict = Recorded("verdict", verdict_of)
    """The result of a race, in its last round."""
    trainings = Recorded("trainings", Fields.numbers)
    """Silo → passes over its samples so far."""
    traffic = Recorded("bytes", lambda fields, key: fields.optional(key, Traffic))
    """Bytes moved by ``auto``; None where it moved none."""
    probation = Recorded("probation", _names_of_each)
    """Newcomer → the group that it trains alongside for now."""
    placed = Recorded("placed", lambda fields, key: fields.named(key, Placement))
    """Newcomer → its placement in this round."""
    unlabelled = Recorded("unlabelled", lambda fields, key: fields.named(key, Unlabelled))
    """Silos whose samples have no labels yet."""
    testing = Recorded("testing", lambda fields, key: fields.named(key, Unlabelled))
    """Silos that only test, with the group whose model they measured."""
    tested = Recorded("tested", _numbers_of_each)
    """Silo that only tests → its figures of that model."""
    not_summed = Recorded("not-summed", Fields.texts)
    """Silo → why its rows are not in the sums from which its group's trees grew."""
    unfinished = Recorded("unfinished", Fields.texts)
    """Group → how many of its trees had grown when the rounds were over."""

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
