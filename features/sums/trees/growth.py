"""The coordinator's part: questions to the silos of a group, and splits from the sums.

A question is answered by every silo of the group with an array; the sum of these is sent back into
the generator. With the sums of one trainer that has all rows, the trees are its trees.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees.bins import Columns
from coterie.features.sums.trees.ensemble import Ensemble, Floats

Edges = Sequence[NDArray[np.float32]]
NEWTON = 6
"""Newton steps to the best constant answer; one is enough for real numbers."""
EQUAL = 1e-9
"""Relative difference below which two gains are equal: the first split wins. Sums over silos are
rounded differently from one trainer's."""


@dataclass(frozen=True)
class Settings:
    """How trees grow.

    Attributes:
        rate: learning rate, the factor on every leaf.
        penalty: λ ≥ 0, on squared leaves.
        min_rows: smallest number of rows of a child.
        min_second: smallest sum of second derivatives of a child.
    """

    rate: float = 0.1
    penalty: float = 1.0
    min_rows: int = 20
    min_second: float = 1e-3


@dataclass(frozen=True)
class Level:
    """The question for the sums of some nodes, (m, 2) output and node, of the trees ``done``."""

    trees: Ensemble
    done: int
    level: int
    nodes: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """The best splits of m nodes; ``left`` and ``right`` are their sums (m, 3)."""

    worth: NDArray[np.bool_]
    column: NDArray[np.intp]
    edge: NDArray[np.intp]
    missing_left: NDArray[np.bool_]
    gain: Floats
    left: Floats
    right: Floats


def constant(outputs: int) -> Generator[NDArray[np.float32], Floats, NDArray[np.float32]]:
    """Yield constant answers (K,), receive their sums (K, 3); return the best one.

    Raises:
        ValueError: the sums are over no row.
    """
    base = np.zeros(outputs, np.float32)
    for _ in range(NEWTON):
        sums = yield base
        if not (sums[:, 2] > 0).all():
            raise ValueError("no silo of the group has enough rows to sum over")
        step = sums[:, 0] / np.maximum(sums[:, 1], 1e-3 * sums[:, 2])
        base = (base - step).astype(np.float32)
    return base


def boosted(
    trees: Ensemble, done: int, edges: Columns, settings: Settings
) -> Generator[Level, Floats, Ensemble]:
    """Grow the tree ``done`` of every output, level by level; every level is one question.

    The sums that are received have the shape (m, bins of all columns, 3), as in
    ``histograms.Rows.histograms``. Returns the ensemble with the trees.
    """
    grown, outputs, depth = trees.copy(), len(trees.base), trees.depth
    open_nodes = np.stack([np.arange(outputs), np.zeros(outputs, np.int64)], axis=1)
    first = 2**depth - 1
    for level in range(depth):
        sums = yield Level(grown, done, level, open_nodes)
        found = best_splits(sums, edges, settings)
        following = []
        for i, (output, node) in enumerate(open_nodes.tolist()):
            if not found.worth[i]:
                if not level:
                    whole = sums[i, : len(edges[0]) + 2].sum(axis=0)
                    grown.leaf[done, output, 0] = _leaf(whole, settings)
                continue
            column = int(found.column[i])
            grown.feature[done, output, node] = column
            grown.threshold[done, output, node] = edges[column][found.edge[i]]
            grown.missing_left[done, output, node] = found.missing_left[i]
            grown.gain[column] += found.gain[i]
            for child, own in ((2 * node + 1, found.left[i]), (2 * node + 2, found.right[i])):
                leaf = child
                while leaf < first:
                    leaf = 2 * leaf + 1
                grown.leaf[done, output, leaf - first] = _leaf(own, settings)
                following.append((output, child))
        if not following:
            break
        open_nodes = np.array(following, np.int64)
    return grown


def best_splits(sums: Floats, edges: Edges, settings: Settings) -> Split:
    """Return the split with the largest gain of each of m nodes (Chen and Guestrin, eq. 7).

    Values up to an edge go left. Missing values go to the side with the larger gain.
    """
    widths = [len(own) for own in edges]
    shape = (sums.shape[2], len(sums), len(edges), max([*widths, 1]))
    left, whole, missing = np.zeros(shape), np.zeros(shape[:3]), np.zeros(shape[:3])
    allowed, start = np.zeros(shape[2:], np.bool_), 0
    for column, width in enumerate(widths):
        own = np.moveaxis(sums[:, start : start + width + 2], 2, 0)
        left[:, :, column, :width] = np.cumsum(own[..., :width], axis=2)
        whole[:, :, column], missing[:, :, column] = own.sum(axis=2), own[..., -1]
        allowed[column, :width] = True
        start += width + 2
    floor = np.array([settings.min_second, settings.min_rows]) * (1 - EQUAL)
    before = _score(whole, settings)
    gain = np.zeros((*shape[1:], 2))
    sides = [left, left + missing[..., None]]
    for i, one in enumerate(sides):
        other = whole[..., None] - one
        fits = allowed & (np.minimum(one, other)[1:] >= floor[:, None, None, None]).all(axis=0)
        worth = _score(one, settings) + _score(other, settings) - before[..., None]
        gain[..., i] = np.where(fits, worth, 0.0)
    flat = gain.reshape(len(sums), -1)
    most = flat.max(axis=1)
    scale = np.maximum(before.max(axis=1), 1e-30)
    best = np.argmax(flat >= most[:, None] * (1 - EQUAL), axis=1)
    column, edge, side = np.unravel_index(best, (*shape[2:], 2))
    rows = np.arange(len(sums))
    lefts = np.where(side, sides[1][:, rows, column, edge], left[:, rows, column, edge])
    rights = whole[:, rows, column] - lefts
    return Split(most > EQUAL * scale, column, edge, side.astype(np.bool_), most, lefts.T, rights.T)


def _score(sums: Floats, settings: Settings) -> Floats:
    found: Floats = sums[0] ** 2 / np.maximum(sums[1] + settings.penalty, 1e-12)
    return found


def _leaf(sums: Floats, settings: Settings) -> float:
    return float(-settings.rate * sums[0] / max(sums[1] + settings.penalty, 1e-12))
