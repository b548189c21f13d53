"""Mean and deviation of a silo's own numbers, for standardising them; targets in 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import ColumnScale, Persons, TaskError
from coterie.tasks.draws import num_persons

ROUNDING = 1e-12
"""Numbers whose relative difference is smaller count as equal."""
COARSE = 0.01
"""Largest error of a target in 32 bits, as a share of its standard deviation."""


def scale_of(numbers: NDArray[np.floating[Any]]) -> ColumnScale:
    """Return mean and deviation of training rows (n, columns), ignoring missing values."""
    count, mean, squares = moments(numbers)
    width = np.where(squares > 0, np.sqrt(squares / np.maximum(count, 1)), 1.0)
    found: ColumnScale = np.stack([mean, width], axis=1).tolist()
    return found


def moments(numbers: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], ...]:
    """Return each column's count, mean, and sum of squared deviations (0 for a constant)."""
    numbers = numbers.astype(np.float64, copy=False)
    present = np.isfinite(numbers)
    there = present.sum(axis=0)
    count = np.maximum(there, 1)
    mean = np.where(present, numbers, 0).sum(axis=0) / count
    deviations = numbers - mean
    np.square(deviations, out=deviations)
    deviations[~present] = 0
    squares = deviations.sum(axis=0)
    del deviations
    low = np.where(present, numbers, np.inf).min(axis=0)
    high = np.where(present, numbers, -np.inf).max(axis=0)
    # A constant's deviation is not 0 but what rounding its mean leaves.
    constant = high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))
    return there.astype(np.float64), mean, np.where(constant, 0.0, squares)


def sums_of(persons: Persons | None, *parts: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return (columns, 3) ``moments`` of training rows, one line per column of all parts.

    With ``persons`` a fourth number gives the persons with a value in the column.
    """
    sums = np.concatenate([np.stack(moments(part), axis=1) for part in parts])
    if persons is None:
        return sums
    counts = [num_persons(persons[there]) for part in parts for there in np.isfinite(part).T]
    return np.column_stack([sums, counts])


def in_32_bits(exact: NDArray[Any], names: Sequence[str], place: Path) -> NDArray[np.float32]:
    """Return targets (n, columns) in 32 bits; ``TaskError`` if these blur one's differences.

    ``names`` of the columns are for the error.
    """
    exact = exact.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = exact.astype(np.float32)
        spread = exact.std(axis=0)
        blurred = (spread > 0) & ~(np.abs(kept - exact).max(axis=0) <= COARSE * spread)
    if blurred.any():
        raise TaskError(
            f"{names[int(blurred.argmax())]} of {str(place)!r} has numbers whose differences 32 "
            "bits cannot hold: subtract a number, or use another unit, on which all silos agree."
        )
    return kept
