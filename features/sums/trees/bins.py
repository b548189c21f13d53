"""Bins of columns, from counts that are summed over silos.

A column's values are counted in cells, first in coarse ones that are the same for all data, as the
bits of a 32-bit number give them (sign, exponent, first bit of the mantissa). Cells with many rows
are divided further, until none has more rows than half a bin. The edges between bins are then
quantiles of all silos' rows, off by at most half a bin, and no silo has stated its quantiles.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees.ensemble import Floats

Ints = NDArray[np.int64]
Columns = tuple[NDArray[np.float32], ...]
"""The edges of each column's bins, ascending; a value belongs to the first edge not below it."""

USUAL = 64
"""Most bins of a column, besides that of missing values, unless a run says otherwise."""
LOWEST, WIDTH = -(2**31), 2**22
"""Place of the first cell, and the size of the first cells."""
INFINITE = 0x7F800000
"""Place of infinity; what lies beyond is not a number."""
PARTS = 64
"""Parts into which a cell is divided."""
MOST_CUTS = 20_000
"""Most cells, or edges between bins, of a column."""
FINER = 4
"""Most divisions: afterwards a cell is a single number."""


def places(x: NDArray[np.float32]) -> Ints:
    """Return the place of each number among all 32-bit numbers, in their order; 0 is that of 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def numbers(places: Ints) -> NDArray[np.float32]:
    """Return the inverse of ``places``."""
    bits = np.where(places >= 0, places, -places | 0x80000000)
    found: NDArray[np.float32] = bits.astype(np.uint32).view(np.float32)
    return found


def agreed(columns: int, bins: int) -> Generator[list[Ints], list[Ints], Columns]:
    """Yield each column's cells, by their ascending first places; receive the summed counts.

    Return the edges of at most ``bins`` bins per column.
    """
    cells = [np.arange(LOWEST, -LOWEST, WIDTH)] * columns
    counts = yield cells
    for _ in range(FINER):
        finer = [_divided(own, n, bins) for own, n in zip(cells, counts, strict=True)]
        if all(len(new) == len(old) for new, old in zip(finer, cells, strict=True)):
            break
        cells = finer
        counts = yield cells
    return tuple(_edges(own, n, bins) for own, n in zip(cells, counts, strict=True))


def counted(x: NDArray[np.float32], cells: Ints) -> Ints:
    """Return how many numbers (n,) lie in each cell; missing ones count nowhere."""
    at = np.searchsorted(cells, places(x[~np.isnan(x)]), "right") - 1
    return np.bincount(at, minlength=len(cells)).astype(np.int64)


def of_no_number(cells: Ints) -> NDArray[np.bool_]:
    """Return which cells, of any number of columns side by side, have no finite number."""
    following = np.append(cells[1:], LOWEST)  # the next column begins at the lowest
    below = (following > LOWEST) & (following <= 1 - INFINITE)
    return below | (cells >= INFINITE)


def codes(x: NDArray[np.float32], edges: Sequence[NDArray[np.float32]]) -> NDArray[np.int32]:
    """Return the bin (columns, n) of each value; missing ones are in the bin behind the last."""
    found = np.empty(x.shape[::-1], np.int32)
    for i, own in enumerate(edges):
        found[i] = np.searchsorted(own, x[:, i], "left")
        found[i, np.isnan(x[:, i])] = len(own) + 1
    return found


def there(edges: Sequence[NDArray[np.float32]]) -> NDArray[np.bool_]:
    """Return which bins the columns have, of (columns, bins); the last has the missing values.

    The others that a column has are the first ones.
    """
    widths = np.array([len(own) for own in edges], np.intp)[:, None]
    found: NDArray[np.bool_] = np.arange(int(widths.max(initial=1)) + 2) <= widths
    found[:, -1] = True
    return found


def by_column(sums: Floats, edges: Sequence[NDArray[np.float32]]) -> Floats:
    """Return sums (m, bins of all columns, 3) as (3, m, columns, bins), as in ``there``.

    Bins that a column does not have are 0.
    """
    own = there(edges)
    found: Floats = np.zeros((sums.shape[2], len(sums), *own.shape))
    for plane, part in zip(found, np.moveaxis(sums, 2, 0), strict=True):
        plane[:, own] = part
    return found


def _divided(cells: Ints, counts: Ints, bins: int) -> Ints:
    """Return the cells with those divided that have more rows than half a bin.

    Silos add up small counts, so with few rows most cells seem to have too many: these stay.
    """
    ends = np.append(cells[1:], -LOWEST)
    heavy = (counts * 2 * bins > counts.sum()) & (ends - cells > 1)
    parts = cells[heavy, None] + (ends - cells)[heavy, None] * np.arange(PARTS) // PARTS
    found = np.unique(np.concatenate([cells, parts.ravel()]))
    return found if len(found) <= MOST_CUTS else cells


def _edges(cells: Ints, counts: Ints, bins: int) -> NDArray[np.float32]:
    """Return edges between the cells that have rows, at quantiles if there are more than bins."""
    ends = np.append(cells[1:], -LOWEST) - 1
    full = np.flatnonzero(counts > 0)
    if len(full) < 2:
        return np.empty(0, np.float32)
    last, following = numbers(ends[full[:-1]]), numbers(cells[full[1:]])
    middle = ((last.astype(np.float64) + following) / 2).astype(np.float32)
    edges: NDArray[np.float32] = np.where(middle < following, middle, last)
    if len(full) <= bins:
        return edges
    share = np.cumsum(counts[full])[:-1] * bins // counts.sum()
    some: NDArray[np.float32] = edges[np.diff(share, prepend=0) > 0]
    return some
