"""Mean and deviation of a silo's own numbers, by which they are standardised."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import ColumnScale, Persons
from coterie.tasks.draws import num_persons

ROUNDING = 1e-12
"""Numbers whose difference is a smaller share of them are the same."""


def scale_of(numbers: NDArray[np.floating[Any]]) -> ColumnScale:
    """Mean and deviation of training rows (n, columns), without what is missing."""
    count, mean, squares = moments(numbers)
    width = np.where(squares > 0, np.sqrt(squares / np.maximum(count, 1)), 1.0)
    found: ColumnScale = np.stack([mean, width], axis=1).tolist()
    return found


def moments(numbers: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], ...]:
    """Of each column what is there, its mean, and its squared deviations' sum; 0 of a constant."""
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
    """(columns, 3) ``moments`` of training rows, a line for each column of all parts; with
    ``persons`` a fourth number, how many of them have one there."""
    sums = np.concatenate([np.stack(moments(part), axis=1) for part in parts])
    if persons is None:
        return sums
    told = [num_persons(persons[there]) for part in parts for there in np.isfinite(part).T]
    return np.column_stack([sums, told])
