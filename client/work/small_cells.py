"""Counts of samples that leave a silo: which of them are hidden, so that none can be derived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Persons = NDArray[np.integer[Any]]
"""(n,) each sample's person."""


def persons_by_cell(
    places: NDArray[np.intp], size: int, persons: Persons | None
) -> list[frozenset[int]] | None:
    """Return the persons in each cell; None if every sample is from a different person."""
    if persons is None:
        return None
    return [frozenset(persons[places == cell].tolist()) for cell in range(size)]


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
