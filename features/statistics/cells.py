"""Cells of a histogram. Only numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Persons = NDArray[np.integer[Any]]
"""(n,) each sample's person."""

INTERVALS = 16
"""Most intervals, about, between a low and a high value, with many samples beyond."""
SAMPLES = 2
"""Samples per interval, about, as a multiple of the smallest cell that is shown."""
FINEST = 2e-15
"""Smallest step, as a share of the values: finer differences are rounding."""
ROUNDING = 1e-9
"""Tolerance of a division by the step: 0.3 is not below 3 · 0.1."""


def number_of(values: NDArray[Any], persons: Persons | None) -> int:
    """Return how many persons the values are of; without ``persons``, how many values."""
    return len(values) if persons is None else len(np.unique(persons))


def intervals(
    values: NDArray[np.float64], least: int, persons: Persons | None = None, *, samples: int
) -> tuple[int, float, list[int]]:
    """Return round intervals of numbers, of which the first and the last hold ``least`` or more.

    Their width follows from the number of samples, which is public, and from where the first
    interval ends and the last begins, not from what is between or missing: otherwise the choice
    would tell of hidden cells.

    Args:
        values: (n,) finite, from at least ``least`` samples or persons.
        least: smallest cell that is not hidden.
        persons: (n,) person of each sample, where one may have several.
        samples: all of the silo, also those without a value.

    Returns:
        The first interval's number, the step, and the count of each interval. Interval i starts at
        i · step.
    """
    ordered = np.sort(values.astype(np.float64))
    lowest, highest = _ends(values, persons)
    low, high = lowest[least - 1], highest[len(highest) - least]
    if low > high:
        low = high = ordered[(len(ordered) - 1) // 2]
    width = high - low if high > low else abs(low) / 10
    wanted = min(INTERVALS, max(1, samples // (SAMPLES * least)))
    finest = FINEST * max(abs(low), abs(high))
    step = round_step(max(width / wanted, finest)) if width else 1.0
    if np.array_equal(ordered, np.round(ordered)):
        step = max(step, 1.0)
    first, last = (math.floor(end / step + ROUNDING) for end in (low, high))
    places = places_of(values, step, first, last)
    return first, step, np.bincount(places, minlength=last - first + 1).tolist()


def _ends(values: NDArray[np.float64], persons: Persons | None) -> tuple[NDArray[np.float64], ...]:
    """Return the lowest value of each person, sorted, and the highest, sorted."""
    if persons is None:
        return np.sort(values), np.sort(values)
    by_person = np.lexsort((values, persons))
    changes = np.flatnonzero(np.diff(persons[by_person])) + 1
    firsts, lasts = np.append(0, changes), np.append(changes, len(values)) - 1
    return np.sort(values[by_person[firsts]]), np.sort(values[by_person[lasts]])


def places_of(values: NDArray[np.float64], step: float, first: int, last: int) -> NDArray[np.intp]:
    """Return each value's interval, counted from ``first``; values outside go to the ends."""
    numbers = np.clip(np.floor(values / step + ROUNDING), first, last) - first
    return numbers.astype(np.intp)


def ends(size: int) -> frozenset[int]:
    """Return the intervals that are known to be large, of so many; see ``intervals``."""
    return frozenset({0, size - 1})


def round_step(width: float) -> float:
    """Round a width up to 1, 2, 5 or 10 times a power of ten."""
    power = math.floor(math.log10(width))
    step = next(m for m in (1, 2, 5, 10) if m >= width / 10**power - ROUNDING)
    return float(f"{step}e{power}")
