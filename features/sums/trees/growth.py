"""The coordinator's part: questions to the silos of a group, and splits from the sums.

A question is answered by every silo of the group with an array; the sum of these is sent back into
the generator. With the sums of one trainer that has all rows, the trees are its trees.

Trees may also split by silo: its number is then one more column, of categories, which no silo has
to state. At a node categories are sorted by their mean gradient, so that the best set of them is a
beginning of that order (Fisher: "On Grouping for Maximum Homogeneity", JASA 1958).

A silo sends nothing of a node in which it has few rows. But the sums of a node's two children are
those of the node, whatever was sent: what lacks is divided between both, as the histogram of the
node expects, and in a child among the bins like the rows that were sent (``_completed``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees.bins import Columns, by_column
from coterie.features.sums.trees.ensemble import Ensemble, Floats

Edges = Sequence[NDArray[np.float32]]
Sides = NDArray[np.int8]
NEWTON = 6
"""Newton steps to the best constant answer; one is enough for real numbers."""
EQUAL = 1e-9
"""Relative difference below which two gains are equal: the first split wins. Sums over silos are
rounded differently from one trainer's."""
TINY, HALF = 1e-9, 0.5
"""Rows: fewer than any that are expected; fewer than any that lack, but for rounding."""
LEFT, RIGHT = 1, 2
"""The side of a node's silo, where the node splits by silo; elsewhere 0."""
FASTER, FASTEST = 5.0, 0.5
"""The learning rate of a trial: as a multiple of the run's, and at most."""
HOLDOUT = 0.2
"""Share of a silo's rows that a trial holds out."""
NOWHERE = np.float32(-1e15)
"""A threshold that no value is below: the lowest that a model may have."""


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


def trial(settings: Settings, trees: int) -> tuple[Settings, int]:
    """Return how trees grow on trial, and how many: they learn as much as all ``trees``."""
    rate = min(FASTER * settings.rate, max(FASTEST, settings.rate))
    return replace(settings, rate=rate), ceil(trees * settings.rate / rate - 1e-9)


def best_number(losses: Floats) -> int:
    """Return the number of trees after which the loss is smallest, of 0 to T; the first of equals.

    ``losses`` (T + 1, 2) are sums of losses, and the rows behind them; T if there are none.
    """
    return int(losses[:, 0].argmin()) if losses[0, 1] else len(losses) - 1


def enough(best: int, settings: Settings, trees: int) -> int:
    """Return how many of ``trees`` learn as much as the ``best`` first ones of a trial."""
    faster, tried = trial(settings, trees)
    return trees if best >= tried else min(round(best * faster.rate / settings.rate), trees)


@dataclass(frozen=True)
class Level:
    """The question for the sums of some nodes, (m, 2) output and node, of the trees ``done``.

    ``sides`` is as in ``boosted``.
    """

    trees: Ensemble
    done: int
    level: int
    nodes: NDArray[np.int64]
    sides: Sides | None = None


@dataclass(frozen=True)
class Split:
    """The best splits of m nodes."""

    worth: NDArray[np.bool_]
    column: NDArray[np.intp]
    edge: NDArray[np.intp]
    missing_left: NDArray[np.bool_]
    gain: Floats


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
    trees: Ensemble, done: int, edges: Columns, settings: Settings, sides: Sides | None = None
) -> Generator[Level, Floats, Ensemble]:
    """Grow the tree ``done`` of every output, level by level; every level is one question.

    Args:
        sides: if trees may split by silo, (T, K, 2^d − 1, S + 1) ``LEFT`` or ``RIGHT`` of each of S
            silos and of any other, where a node does; the new tree's are written into it.

    The sums that are received have the shape (m, bins of all columns, 3), as in
    ``histograms.Rows.histograms``; with ``sides``, (S + 1, m, bins of all columns, 3), by silo.
    Returns the ensemble with the trees.
    """
    grown, outputs, depth = trees.copy(), len(trees.base), trees.depth
    open_nodes = np.stack([np.arange(outputs), np.zeros(outputs, np.int64)], axis=1)
    expected = None
    for level in range(depth):
        answer = yield Level(grown, done, level, open_nodes, sides)
        by_silo, whole = _completed(answer[None] if sides is None else answer, expected, edges)
        sums, cuts = by_silo.sum(axis=0), tuple(edges)
        orders = np.empty((len(open_nodes), 0), np.intp)
        if sides is not None:
            orders, of_silos = _sorted_silos(whole, settings)
            sums = np.concatenate([sums, of_silos], axis=1)
            cuts = (*cuts, np.arange(len(orders[0]) - 1, dtype=np.float32))
        found = best_splits(sums, cuts, settings)
        following, children = [], []
        for i, (output, node) in enumerate(open_nodes.tolist()):
            leaf = _leaf(whole[:, i].sum(axis=0), settings)
            grown.leaf[done, output, _leaf_below(node, depth)] = leaf
            if not found.worth[i]:
                continue
            if sides is not None and found.column[i] == len(edges):
                rows = sums[i, -len(orders[i]) - 1 :, 2]
                sides[done, output, node] = own = _sides_of(found, i, orders[i], rows)
                left = np.where((own == LEFT)[:, None], whole[:, i], 0)
            else:
                _write_split(grown, (done, output, node), found, i, edges)
                left = _left_of(by_silo[:, i], found, i, edges)
            for child, part in ((2 * node + 1, left), (2 * node + 2, whole[:, i] - left)):
                leaf = _leaf(part.sum(axis=0), settings)
                grown.leaf[done, output, _leaf_below(child, depth)] = leaf
                following.append((output, child))
                children.append(part)
        if not following:
            break
        open_nodes, expected = np.array(following, np.int64), np.stack(children, axis=1)
    return grown


def _completed(sums: Floats, expected: Floats | None, edges: Edges) -> tuple[Floats, Floats]:
    """Return histograms with the rows that were not sent, and the sums of whole nodes.

    Args:
        sums: (S, m, bins of all columns, 3), of single silos, or of all as one (S = 1); nodes
            beside each other are children of one node.
        expected: (S, m, 3), their parts of the histogram of that node, which add up to its sums;
            None of roots, whose sums are all that is known.
    """
    sent: Floats = sums[:, :, : len(edges[0]) + 2].sum(axis=2)
    if expected is None:
        return sums, sent
    lacks = (expected - sent).reshape(len(sums), -1, 2, 3)
    wanted = np.maximum(lacks[..., 2:], TINY)
    if len(sums) > 1:  # a silo sends all of a node, or nothing
        wanted = np.where(sent.reshape(lacks.shape)[..., 2:] > 0, 0, wanted)
    share = wanted / np.maximum(wanted.sum(axis=2, keepdims=True), TINY)
    both = lacks.sum(axis=2, keepdims=True)
    more = np.where(both[..., 2:] < HALF, 0, both * share).reshape(sent.shape)
    rows = sums[..., 2].sum(axis=0)
    like = rows / np.maximum(sent[..., 2].sum(axis=0), 1)[:, None]
    return sums + more[:, :, None] * like[..., None], sent + more


def _left_of(sums: Floats, found: Split, i: int, edges: Edges) -> Floats:
    """Return the sums (S, 3) left of a node's split, of its histograms (S, bins of all, 3)."""
    column = int(found.column[i])
    start = sum(len(own) + 2 for own in edges[:column])
    left: Floats = sums[:, start : start + found.edge[i] + 1].sum(axis=1)
    if found.missing_left[i]:
        left = left + sums[:, start + len(edges[column]) + 1]
    return left


def for_silo(trees: Ensemble, sides: Sides, silo: int) -> Ensemble:
    """Return the trees that split by silo as those of one silo, number −1 for any other.

    Where it goes right, a node sends every row to the right: nothing is below its threshold.
    """
    right = sides[: len(trees.leaf), ..., silo] == RIGHT
    return replace(
        trees,
        feature=np.where(right, np.int32(0), trees.feature),
        threshold=np.where(right, NOWHERE, trees.threshold),
        missing_left=np.where(right, np.int32(0), trees.missing_left),
    )


def _sorted_silos(sums: Floats, settings: Settings) -> tuple[NDArray[np.intp], Floats]:
    """Return each node's silos by mean gradient, and their sums as those of a column's bins.

    ``sums`` are (S + 1, m, 3), the last of other silos, which count as missing values; the results
    are (m, S) and (m, S + 1, 3).
    """
    own = sums[:-1].swapaxes(0, 1)
    mean = own[..., 0] / np.maximum(own[..., 1] + settings.penalty, 1e-12)
    orders = np.argsort(mean, axis=1, kind="stable")
    ordered = np.take_along_axis(own, orders[..., None], axis=1)
    return orders, np.concatenate([ordered, sums[-1][:, None]], axis=1)


def _sides_of(found: Split, i: int, order: NDArray[np.intp], rows: Floats) -> Sides:
    """Return the side of each silo and, last, of any other.

    ``rows`` (S + 1,) are the silos' by that order and the others'. A silo without any goes to the
    side with more of them.
    """
    cut = found.edge[i] + 1
    left = found.missing_left[i] if rows[-1] else rows[:cut].sum() >= rows[cut:].sum()
    sides = np.full(len(order) + 1, RIGHT, np.int8)
    sides[order[:cut]] = LEFT
    sides[-1] = LEFT if left else RIGHT
    sides[order[rows[:-1] == 0]] = sides[-1]
    return sides


def _write_split(
    grown: Ensemble, at: tuple[int, int, int], found: Split, i: int, edges: Edges
) -> None:
    column = int(found.column[i])
    grown.feature[at] = column
    grown.threshold[at] = edges[column][found.edge[i]]
    grown.missing_left[at] = found.missing_left[i]
    grown.gain[column] += found.gain[i]


def _leaf_below(node: int, depth: int) -> int:
    """Return the number of the leftmost leaf below a node."""
    levels = depth + 1 - (node + 1).bit_length()
    return (node + 1 << levels) - (1 << depth)


def best_splits(sums: Floats, edges: Edges, settings: Settings) -> Split:
    """Return the split with the largest gain of each of m nodes (Chen and Guestrin, eq. 7).

    Values up to an edge go left. Missing values go to the side with the larger gain.
    """
    bins = by_column(sums, edges)
    whole, missing, width = bins.sum(axis=3), bins[..., -1], bins.shape[3] - 2
    left = np.cumsum(bins[..., :width], axis=3)
    allowed = np.arange(width) < np.array([[len(own)] for own in edges])
    before = _score(whole, settings)
    sides = [left, left + missing[..., None]] if missing.any() else [left]
    gain = np.empty((*left.shape[1:], len(sides)))
    for i, one in enumerate(sides):
        other = whole[..., None] - one
        worth = _score(one, settings) + _score(other, settings) - before[..., None]
        fits = allowed & _large_enough(one, settings) & _large_enough(other, settings)
        gain[..., i] = np.where(fits, worth, 0.0)
    flat = gain.reshape(len(sums), -1)
    most = flat.max(axis=1)
    scale = np.maximum(before.max(axis=1), 1e-30)
    best = np.argmax(flat >= most[:, None] * (1 - EQUAL), axis=1)
    column, edge, side = np.unravel_index(best, gain.shape[1:])
    return Split(most > EQUAL * scale, column, edge, side.astype(np.bool_), most)


def _large_enough(child: Floats, settings: Settings) -> NDArray[np.bool_]:
    """Return whether children, (3, …) sums, may be split off."""
    second, rows = settings.min_second * (1 - EQUAL), settings.min_rows * (1 - EQUAL)
    enough: NDArray[np.bool_] = (child[1] >= second) & (child[2] >= rows)
    return enough


def _score(sums: Floats, settings: Settings) -> Floats:
    found: Floats = sums[0] ** 2
    found /= np.maximum(sums[1] + settings.penalty, 1e-12)
    return found


def _leaf(sums: Floats, settings: Settings) -> float:
    return float(-settings.rate * sums[0] / max(sums[1] + settings.penalty, 1e-12))
