"""Cells of a histogram, and which of them are hidden so that none can be derived. Only numpy."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Persons = NDArray[np.integer[Any]]
"""(n,) each sample's person."""

INTERVALS = 16
"""Most intervals, about, between a low and a high value, with many samples beyond."""
SAMPLES = 2
"""Samples per interval, about, as a multiple of the smallest cell that is shown."""
ROUNDING = 1e-9
"""Tolerance of a division by the step: 0.3 is not below 3 · 0.1."""


def number_of(values: NDArray[Any], persons: Persons | None) -> int:
    """Return how many persons the values are of; without ``persons``, how many values."""
    return len(values) if persons is None else len(np.unique(persons))


def persons_by_cell(
    places: NDArray[np.intp], size: int, persons: Persons | None
) -> list[frozenset[int]] | None:
    """Return the persons in each cell; None if every sample is from a different person."""
    if persons is None:
        return None
    return [frozenset(persons[places == cell].tolist()) for cell in range(size)]


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
    step = round_step(width / wanted) if width else 1.0
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


def suppress(
    cells: Sequence[int],
    least: int,
    members: Sequence[frozenset[int]] | None = None,
    large: Collection[int] = (),
) -> list[int | None] | None:
    """Hide small cells, and enough others that none can be derived, even knowing the rule.

    Args:
        cells: sample counts, whose sum is public.
        least: smallest count that is shown. Empty cells are shown too: nobody is in them.
        members: persons in each cell, where one may have several samples; a cell, or several
            together, is then small if few persons are in it.
        large: cells that everyone knows to hold ``least`` or more. They are never hidden: what is
            above ``least`` in them is little, and would bound what is hidden with them.

    Returns:
        The counts, with None for hidden ones: none of them, at least two, or all. None if nothing
        can be hidden without ``large`` ones.
    """

    def many(*places: int) -> int:
        if members is None:
            return sum(cells[i] for i in places)
        return len(frozenset[int]().union(*(members[i] for i in places)))

    each = [many(i) for i in range(len(cells))]
    hidden = {i for i, number in enumerate(each) if 0 < number < least}
    if not hidden:
        return list(cells)
    all_of_them: list[int | None] | None = None if large else [None] * len(cells)
    if sum(each) <= len(cells) * (least - 1):  # all of them could be small
        return all_of_them
    # The next ones in order, not the smallest: how many are in them is then no hint.
    first = min(hidden)
    following = [(first + i) % len(cells) for i in range(1, len(cells))]
    others = iter([i for i in following if each[i] >= least and i not in large])
    while not all(
        _is_open(total, len(hidden), least)
        for total in (many(*hidden), sum(cells[i] for i in hidden))
    ):
        other = next(others, None)
        if other is None:
            return all_of_them
        hidden.add(other)
    return [None if i in hidden else cell for i, cell in enumerate(cells)]


def _is_open(total: int, number: int, least: int) -> bool:
    """Return whether hidden cells with this sum stay ambiguous.

    If each were as small or as large as a small cell can be, the sum would reveal them.
    """
    return number > 1 and total >= least and total not in (number, number * (least - 1))
