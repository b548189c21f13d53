"""Rows of a table, as a task holds them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import Persons


@dataclass(frozen=True)
class Rows:
    """Rows of a table.

    ``numbers`` (n, numeric columns) are NaN where missing; ``categories`` (n, values) and
    ``missing`` (n, indicators) are 0 or 1. ``odd`` (n, columns), numeric columns first, marks
    undeclared values; ``rows`` are row numbers in the file; ``persons`` or ``blocks`` are set if
    known.
    """

    numbers: NDArray[np.float64]
    categories: NDArray[np.float32]
    missing: NDArray[np.float32]
    odd: NDArray[np.bool_]
    y: NDArray[Any]
    rows: NDArray[np.intp]
    persons: Persons | None = None
    blocks: Persons | None = None

    def take(self, rows: NDArray[np.intp]) -> Rows:
        """Return only these rows."""
        return Rows(
            self.numbers[rows],
            self.categories[rows],
            self.missing[rows],
            self.odd[rows],
            self.y[rows],
            self.rows[rows],
            None if self.persons is None else self.persons[rows],
            None if self.blocks is None else self.blocks[rows],
        )


def digest_of(*parts: Rows) -> bytes:
    """Return a digest of inputs and targets, in the order of the rows."""
    known = hashlib.sha256()
    for part in parts:
        for array in (part.numbers, part.categories, part.odd, part.y):
            known.update(np.ascontiguousarray(array).data)
    return known.digest()
