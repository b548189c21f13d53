"""Warnings about a table's values. They give a row's number, not its value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAR, RARE, LEAST_TO_JUDGE = 50.0, 0.02, 20
"""A number is probably a slip if it is this many interquartile ranges from the median, and such
numbers are this rare among at least this many."""
ALMOST = 0.9
"""Above this share of missing values, a column is almost empty."""
ALIKE, FEWEST_TURNS = 0.5, 20
"""Above this correlation, neighbouring rows have similar targets. With fewer changes of direction,
the file is sorted by the target."""
SENTINEL = re.compile(r"-(1|([789])\2*)")
"""Numbers such as -1 and -999 stand for a missing value, even if there is only one."""


def says_little(column: str, empty: float, *, varies: bool) -> Iterator[str]:
    """Warn about a column from which nothing can be learned.

    ``empty`` is the share of training rows without a value, ``varies`` whether two values occur.
    """
    if empty > ALMOST:
        yield f"{column} is empty in {100 * empty:.0f}% of the training rows"
    elif not varies:
        yield f"{column} is the same in all training rows"


def odd_numbers(column: str, values: NDArray[np.float64], rows: NDArray[np.intp]) -> Iterator[str]:
    """Warn about values that look like a code for missing, or like a slip.

    ``values`` (n,) are NaN where missing; ``rows`` (n,) are row numbers in the file, from 0.
    """
    negative = values < 0
    if _is_code(values[negative]) and np.nanmedian(values) > 0:
        yield (
            f"{column} has only one value below 0, in {_where(rows[negative])}. If it is a code "
            "for missing, add it to missing under [data] in silo.toml"
        )
        values = np.where(negative, np.nan, values)
    present = values[np.isfinite(values)]
    if len(present) < LEAST_TO_JUDGE or np.ptp(present) == 0:
        return
    low, middle, high = np.percentile(present, (25, 50, 75))
    far = np.abs(values - middle) > FAR * max(high - low, abs(middle) / FAR)
    if far.any() and far.sum() <= RARE * len(present):
        yield (
            f"{column} is very far from all other values in {_where(rows[far])}. If it is an "
            "error, correct it, or declare bounds"
        )


def similar_neighbours(targets: NDArray[Any]) -> Iterator[str]:
    """Warn if neighbouring rows have similar targets, as in measurements over time.

    ``targets`` (n,) are class numbers, or (n, targets) real numbers, in the order of the file.
    """
    found = max(map(_similarity, targets.reshape(len(targets), -1).T))
    if found > ALIKE:
        yield (
            f"neighbouring rows of the file have similar targets (correlation {found:.2f}), as in "
            "measurements over time. If so, held-out rows are easier to predict than new ones, and "
            "groups look better than they are. Set blocks under [data] in silo.toml to a column of "
            "longer periods, such as the month, or group to the column that identifies persons"
        )


def _similarity(targets: NDArray[Any]) -> float:
    """Return how well the row before predicts a target (n,): 0 by chance, 1 exactly."""
    if targets.dtype.kind == "f":
        steps = np.diff(targets)
        turns = np.count_nonzero(np.diff(np.sign(steps[steps != 0])))
        ranks = np.unique(targets, return_inverse=True)[1]
        apart = ranks - ranks.mean()
        alike, most = float(apart[1:] @ apart[:-1]), float(apart @ apart)
    else:
        turns = np.count_nonzero(np.diff(targets))
        chance = float(((np.bincount(targets) / len(targets)) ** 2).sum())
        alike, most = float((targets[1:] == targets[:-1]).mean()) - chance, 1 - chance
    return alike / most if turns >= FEWEST_TURNS else 0.0


def _is_code(negative: NDArray[np.float64]) -> bool:
    """Return whether negative values are one code: a repeated value, or a usual code."""
    same = len(negative) > 0 and (negative == negative[0]).all()
    return bool(same and (len(negative) > 1 or SENTINEL.fullmatch(f"{negative[0]:g}")))


def _where(rows: NDArray[np.intp]) -> str:
    first = f"row {rows[0] + 1}"
    return first if len(rows) == 1 else f"{len(rows)} training rows (the first is {first})"
