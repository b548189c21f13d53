"""Counts of a silo's training samples, column by column, that identify no individual.

Every column divides the silo's training samples into cells: the samples in each interval of numbers
or each category, those without a value, and those whose value the declaration does not allow.
Ranges, medians and shares follow from these counts. A cell that the silo hides is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_ANSWER_BYTES, MAX_NAME, MAX_WORD, plain_text
from coterie.wire.names import CONFIG

MAX_COLUMNS, MAX_CELLS = 1000, 256
"""Most inputs and targets of one silo, and most cells of one column."""
MOST_COUNTED = 1_000_000_000
MAX_LEAST = 1_000_000
Cell = int | None
_STATISTICS = "statistics"


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

    name: str
    cells: tuple[Cell, ...]
    missing: Cell = 0
    odd: Cell = 0
    categories: tuple[str, ...] = ()
    first: int = 0
    step: float = 0.0

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """All cells of the samples; the last two are ``missing`` and ``odd``."""
        return (*self.cells, self.missing, self.odd)


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

    samples: int
    tests: int
    least: int
    shapes: tuple[tuple[int, ...], ...] = ()
    inputs: tuple[ColumnCounts, ...] = ()
    targets: tuple[ColumnCounts, ...] = ()
    left_out: int = 0


def encode_statistics(statistics: Statistics) -> RecordDict:
    """Return the content of the answer to ``query.statistics``."""
    text = json.dumps(plain_statistics(statistics), ensure_ascii=False)
    return RecordDict({CONFIG: ConfigRecord({_STATISTICS: text})})


def decode_statistics(content: RecordDict) -> Statistics:
    """Read the answer to ``query.statistics``.

    It may describe the rows that the silo had before a few of them changed.

    Raises:
        WireError: a field is missing, of the wrong kind, or impossible.
    """
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        raise WireError(f"statistics need a ConfigRecord {CONFIG!r}.")
    try:
        text = config[_STATISTICS]
        if not isinstance(text, str) or len(text) > MAX_ANSWER_BYTES:
            raise ValueError(f"they must be a text of at most {MAX_ANSWER_BYTES:,} characters")
        found = statistics_of(json.loads(text))
    except KeyError as missing:
        raise WireError(f"statistics need {missing}.") from None
    except Exception as error:  # values from elsewhere, of any kind
        raise WireError(f"its statistics cannot be read: {plain_text(error, 200)}.") from None
    return found


def plain_statistics(statistics: Statistics) -> dict[str, Any]:
    """Return the statistics as JSON values."""
    own = vars(statistics)
    return own | {part: [vars(one) for one in own[part]] for part in ("inputs", "targets")}


def statistics_of(plain: Any) -> Statistics:
    """Return the checked inverse of ``plain_statistics``.

    Raises:
        KeyError, TypeError, ValueError: it is something else, or impossible.
    """
    samples = _count(plain["samples"])
    columns = [plain["inputs"], plain["targets"]]
    if not all(isinstance(part, list) for part in columns) or sum(map(len, columns)) > MAX_COLUMNS:
        raise ValueError(f"they must be lists of at most {MAX_COLUMNS} columns")
    inputs, targets = (tuple(_column(one, samples) for one in part) for part in columns)
    for part in (inputs, targets):
        if len({column.name for column in part}) != len(part):
            raise ValueError("two columns have one name")
    least = _count(plain["least"])
    if not 1 <= least <= MAX_LEAST:
        raise ValueError("the smallest cell must have at least one sample")
    return Statistics(
        samples, _count(plain["tests"]), least, _shapes(plain["shapes"]), inputs, targets,
        _count(plain["left_out"]),
    )  # fmt: skip


def _column(plain: Any, samples: int) -> ColumnCounts:
    cells, categories = _list(plain["cells"]), _list(plain["categories"])
    if not 1 <= len(cells) <= MAX_CELLS or (categories and len(categories) != len(cells)):
        raise ValueError(f"a column must have 1 to {MAX_CELLS} cells, all with names or none")
    column = ColumnCounts(
        plain_text(_text(plain["name"]), MAX_NAME),
        tuple(map(_cell, cells)),
        _cell(plain["missing"]),
        _cell(plain["odd"]),
        tuple(plain_text(_text(name), MAX_WORD) for name in categories),
        _whole(plain["first"]),
        _step(plain["step"]),
    )
    if not math.isfinite(column.first * column.step + len(cells) * column.step):
        raise ValueError("its intervals have no end")
    _check_sum(column.all_cells, samples)
    return column


def _check_sum(cells: Sequence[Cell], samples: int) -> None:
    """Check a column's sum; a single hidden cell is refused, as it could be computed."""
    shown = [cell for cell in cells if cell is not None]
    hidden = len(cells) - len(shown)
    if sum(shown) > samples or (not hidden and sum(shown) != samples):
        raise ValueError("the cells of a column do not add up to the samples")
    if hidden == 1:
        raise ValueError("a column hides only one cell, which can be computed from the others")


def _shapes(plain: Any) -> tuple[tuple[int, ...], ...]:
    shapes = tuple(tuple(_count(n) for n in _list(shape)) for shape in _list(plain))
    if len(shapes) > MAX_CELLS or any(len(shape) > 8 for shape in shapes):
        raise ValueError("shapes have at most 8 axes")
    return shapes


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return value


def _cell(value: Any) -> Cell:
    return None if value is None else _count(value)


def _count(value: Any) -> int:
    if not 0 <= _whole(value) <= MOST_COUNTED:
        raise ValueError("a count is out of bounds")
    return int(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 10**18:
        raise TypeError("expected a whole number")
    return value


def _step(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    if not (math.isfinite(value) and 0 <= value <= 1e100):
        raise ValueError("a step is out of bounds")
    return float(value)
