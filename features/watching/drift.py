"""Drift of inputs: the population stability index of each column, and a test of it.

The index of two samples with shares p and q of the cells is Σ (p − q) ln(p / q) (Siddiqi, "Credit
Risk Scorecards", Wiley 2006). Without drift, it is about (cells − 1) · (1/n + 1/m) for n and m
samples (Yurdakul and Naranjo, "Statistical properties of the population stability index", Journal
of Risk Model Validation 2020): with few samples a large index means nothing. So a column has
drifted if its index is large and Pearson's test of equal shares rejects, at a level that Holm's
procedure divides among the columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, chi2_contingency

from coterie.tasks.base import Column, Persons

LEVEL = 0.01
"""Probability that any column of samples without drift is found."""
LARGE, VERY_LARGE = 0.1, 0.25
"""Siddiqi's limits: below the first the population is stable, above the second it has changed."""
MOST_CELLS, PER_CELL = 10, 20
"""Most cells between the smallest and the largest number, and samples per cell, of a reference."""
EXPECTED = 5
"""Least expected count of a cell (Cochran); smaller ones are joined with the next."""


@dataclass(frozen=True)
class Reference:
    """How many samples of a column were in each cell when the model was taken into use.

    Attributes:
        edges: of a column of numbers: cell i holds those from ``edges[i − 1]`` to below
            ``edges[i]``; the first and the last cell hold what is beyond all samples.
        categories: of another column, one cell each.
        counts: of the cells, of samples without a value, and of those whose value is undeclared.
        independent: share of the samples that count as independent (``independent``).
    """

    name: str
    edges: tuple[float, ...]
    categories: tuple[str, ...]
    counts: tuple[int, ...]
    independent: float = 1.0


@dataclass(frozen=True)
class Shift:
    """How a column's new samples differ from its reference.

    Attributes:
        samples: new samples.
        psi: population stability index.
        by_chance: its mean, about, without drift.
        needed: new samples from which an index above ``VERY_LARGE`` would be found; 0: however
            many there are, the reference has too few.
        p: of Pearson's test; 1 if there are too few samples for it.
        drifted: the verdict.
    """

    name: str
    samples: int
    psi: float
    by_chance: float
    needed: int
    p: float
    drifted: bool = False

    @property
    def few(self) -> bool:
        """Whether there are too few samples to find a large drift."""
        return not self.drifted and (not self.needed or self.samples < self.needed)


def independent(persons: Persons | None) -> float:
    """Return the share of samples (n,) that count as independent, if persons have several.

    Samples of one person count as equal (Kish, "Survey Sampling", Wiley 1965, section 8.2), so this
    is the least that they can be worth.
    """
    if persons is None or not len(persons):
        return 1.0
    each = np.unique(persons, return_counts=True)[1]
    return float(each.sum() / (each**2).sum())


def reference_of(column: Column, persons: Persons | None = None) -> Reference:
    """Return the reference of a column: at most ``MOST_CELLS`` cells with equal shares."""
    edges: tuple[float, ...] = ()
    if not column.categories:
        values = column.values[column.present]
        cells = min(max(len(values) // PER_CELL, 2), MOST_CELLS)
        inner = np.quantile(values, np.arange(cells) / cells) if len(values) else np.empty(0)
        ends = [np.nextafter(values.max(), np.inf)] if len(values) else []
        edges = tuple(np.unique([*inner, *ends]).tolist())
    cells_of = Reference(column.name, edges, tuple(column.categories), ())
    found = counts(cells_of, column)
    return Reference(column.name, edges, cells_of.categories, found, independent(persons))


def counts(reference: Reference, column: Column) -> tuple[int, ...]:
    """Count a column's samples in the cells of a reference."""
    there = column.present
    values = column.values[there]
    size = len(reference.categories) or len(reference.edges) + 1
    places = (
        values.astype(np.intp)
        if reference.categories
        else np.searchsorted(reference.edges, values, side="right")
    )
    odd = 0 if column.odd is None else int(column.odd.sum())
    found = np.bincount(places, minlength=size).tolist()
    return (*found, len(there) - int(there.sum()) - odd, odd)


def shifts(
    references: Sequence[Reference], columns: Sequence[Column], persons: Persons | None = None
) -> list[Shift]:
    """Compare new samples with their references; raise ``ValueError`` for other columns."""
    new = {column.name: column for column in columns}
    for one in references:
        found = new.get(one.name)
        if found is None or tuple(found.categories) != one.categories:
            raise ValueError(f"column {one.name!r} is missing, or has other categories")
    share = independent(persons)
    each = [_shift(one, new[one.name], len(references), share) for one in references]
    return _verdicts(each)


def _shift(reference: Reference, column: Column, columns: int, share: float) -> Shift:
    both = np.array([reference.counts, counts(reference, column)], dtype=np.float64)
    samples = int(both[1].sum())
    both *= [[reference.independent], [share]]
    old, new = both.sum(axis=1)
    both = _joined(both)
    cells = both.shape[1]
    needed = math.ceil(_needed(max(cells, 2), old, columns) / share)
    if cells < 2:
        # Two cells are the fewest of any test.
        return Shift(reference.name, samples, 0.0, 0.0, needed, 1.0)
    p = float(chi2_contingency(both, correction=False).pvalue)
    by_chance = (cells - 1) * (1 / new + 1 / old)
    return Shift(reference.name, samples, stability(*both), by_chance, needed, p)


def stability(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """Return the population stability index of two rows of counts (cells,).

    Half a sample is added to every cell, so that an empty one has a logarithm.
    """
    p, q = ((row + 0.5) / (row + 0.5).sum() for row in (old, new))
    return float(((p - q) * np.log(p / q)).sum())


def _needed(cells: int, old: float, columns: int) -> int:
    """Return how many new samples make ``VERY_LARGE`` significant; 0: none would."""
    limit = chi2.ppf(1 - LEVEL / columns, cells - 1)
    rest = VERY_LARGE / limit - 1 / old if old else 0.0
    return max(int(np.ceil(1 / rest)), cells * EXPECTED) if rest > 0 else 0


def _joined(both: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts (2, cells) with small cells joined; empty ones are left out.

    Which ones are joined follows from the sums over both rows, which are the same with and without
    drift.
    """
    share = both.sum(axis=1).min() / both.sum()
    cells: list[NDArray[np.float64]] = []
    held = np.zeros(2)
    for cell in both.T:
        held = held + cell
        if held.sum() * share >= EXPECTED:
            cells.append(held)
            held = np.zeros(2)
    if cells:
        cells[-1] = cells[-1] + held
    return np.array(cells or [held]).T


def _verdicts(found: Sequence[Shift]) -> list[Shift]:
    """Return the shifts with their verdicts, by Holm's procedure over all columns."""
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    significant: set[int] = set()
    for rank, i in enumerate(order):
        if found[i].p > LEVEL / (len(found) - rank):
            break
        significant.add(i)
    return [
        Shift(**asdict(one) | {"drifted": i in significant and one.psi >= LARGE})
        for i, one in enumerate(found)
    ]


def plain_references(references: Sequence[Reference]) -> list[dict[str, Any]]:
    """Return references as JSON values."""
    return [asdict(one) for one in references]


def references_of(plain: Sequence[Mapping[str, Any]]) -> list[Reference]:
    """Return the inverse of ``plain_references``; raise ``TypeError`` for anything else."""
    return [
        Reference(
            *(str(one["name"]), tuple(one["edges"]), tuple(one["categories"])),
            *(tuple(one["counts"]), float(one["independent"])),
        )
        for one in plain
    ]
