"""Counts of a silo's training samples, column by column, that identify no individual.

Every column divides the silo's training samples into cells: the samples in each interval of numbers
or each category, those without a value, and those whose value the declaration does not allow.
Ranges, medians and shares follow from these counts. A cell that the silo hides is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, Field, TypeAdapter

from coterie.wire.checked import checked_answer
from coterie.wire.limits import MAX_NAME, MAX_WORD, plain_text
from coterie.wire.names import CONFIG

MAX_COLUMNS, MAX_CELLS = 1000, 256
"""Most inputs and targets of one silo, and most cells of one column."""
MOST_COUNTED = 1_000_000_000
MOST_STEPS = 10**15
"""Most steps from 0 to an interval: with more, its ends would be the same float."""
MAX_LEAST = 1_000_000
Count = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNTED)]
Cell = Count | None
Name = Annotated[str, AfterValidator(lambda text: plain_text(text, MAX_NAME))]
Word = Annotated[str, AfterValidator(lambda text: plain_text(text, MAX_WORD))]
_ENTRY = "statistics"


@dataclass(frozen=True)
class ColumnCounts:
    """Counts of a silo's training samples in one column.

    Attributes:
        cells: samples in each interval or category. None: hidden, because few are in it, or because
            another hidden cell could be computed from it.
        missing: samples without a value.
        odd: samples whose value is outside the declared categories or bounds.
        categories: names of the cells; empty: they are intervals of numbers.
        first, step: cell i holds numbers from (first + i)·step to below (first + i + 1)·step; the
            first and the last also hold those beyond. A step of 0 reveals nothing about the
            numbers: there are too few, or too many categories.
    """

    name: Name
    cells: Annotated[tuple[Cell, ...], Field(min_length=1, max_length=MAX_CELLS, fail_fast=True)]
    missing: Cell
    odd: Cell
    categories: Annotated[tuple[Word, ...], Field(max_length=MAX_CELLS, fail_fast=True)]
    first: Annotated[int, Field(strict=True, ge=-MOST_STEPS, le=MOST_STEPS)]
    step: Annotated[float, Field(strict=True, ge=0, le=1e100, allow_inf_nan=False)]

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """All cells of the samples; the last two are ``missing`` and ``odd``."""
        return (*self.cells, self.missing, self.odd)


def _with_names(column: ColumnCounts) -> ColumnCounts:
    if column.categories and len(column.categories) != len(column.cells):
        raise ValueError("all cells of a column have names, or none")
    if column.categories and column.step:
        raise ValueError("a column has categories or intervals, not both")
    return column


Shape = Annotated[tuple[Count, ...], Field(max_length=8)]
Column = Annotated[ColumnCounts, AfterValidator(_with_names)]
Columns = Annotated[tuple[Column, ...], Field(max_length=MAX_COLUMNS, fail_fast=True)]


@dataclass(frozen=True)
class Statistics:
    """A silo's statistics of its data.

    Attributes:
        samples, tests: number of training and of test samples. Columns count the former.
        least: cells with fewer samples are hidden.
        shapes: of a sample's inputs.
        inputs, targets: columns; empty if the silo's policy does not allow them.
        left_out: number of columns omitted because there are too many.
    """

    samples: Count
    tests: Count
    least: Annotated[int, Field(strict=True, ge=1, le=MAX_LEAST)]
    shapes: Annotated[tuple[Shape, ...], Field(max_length=MAX_CELLS, fail_fast=True)]
    inputs: Columns
    targets: Columns
    left_out: Count


def _with_sums(statistics: Statistics) -> Statistics:
    """Check the columns' names and sums."""
    for part in (statistics.inputs, statistics.targets):
        if len({column.name for column in part}) != len(part):
            raise ValueError("two columns have one name")
        for column in part:
            _check_sum(column.all_cells, statistics.samples)
    if len(statistics.inputs) + len(statistics.targets) > MAX_COLUMNS:
        raise ValueError(f"they must be of at most {MAX_COLUMNS} columns")
    return statistics


def _check_sum(cells: Sequence[Cell], samples: int) -> None:
    """Check a column's sum; a single hidden cell is refused, as it could be computed."""
    shown = [cell for cell in cells if cell is not None]
    hidden = len(cells) - len(shown)
    if sum(shown) > samples or (not hidden and sum(shown) != samples):
        raise ValueError("the cells of a column do not add up to the samples")
    if hidden == 1:
        raise ValueError("a column hides only one cell, which can be computed from the others")


Checked = Annotated[Statistics, AfterValidator(_with_sums)]
"""Statistics of a silo; they may describe the rows before a few of them changed."""
_STATISTICS = TypeAdapter[Statistics](Checked)


def encode_statistics(statistics: Statistics) -> RecordDict:
    """Return the content of the answer to ``query.statistics``."""
    text = _STATISTICS.dump_json(statistics).decode()
    return RecordDict({CONFIG: ConfigRecord({_ENTRY: text})})


def decode_statistics(content: RecordDict) -> Statistics:
    """Read the answer to ``query.statistics``.

    Raises:
        WireError: a field is missing, of the wrong kind, or impossible.
    """
    return checked_answer(content, _ENTRY, _STATISTICS, "its statistics")
