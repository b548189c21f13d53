"""Rows from histograms of trees: what a coordinator rebuilds that asks what it likes.

    python -m benchmarks.privacy.histograms

A silo of 353 patients (scikit-learn's diabetes data, ten columns, in standard deviations) answers
with sums over at least ``statistics_from`` rows. A cell is found if the guess is at most 0.05
standard deviations off, a row if all its cells are.

- *one by one*: the trees split each node in halves, down to 512 leaves; a row's guess is the median
  of each column in the smallest node with its rows that is answered;
- *by differences*: two nodes that differ by the rows between two values of a column, for 30 rows.
  Their sums are over many rows, their difference is over one. Each cell is found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes

from coterie.features.sums.trees import questions
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Level
from coterie.features.sums.trees.histograms import Rows, of_numbers

FLOORS = 1, 5, 20
ROWS, TARGETS, DEPTH = 353, 30, 9
NEAR = 0.05
GRID: NDArray[np.float32] = np.arange(-5, 5 + NEAR, NEAR, dtype=np.float32)
Matrix = NDArray[np.float32]


def patients() -> Matrix:
    """Return the rows (n, 10) in standard deviations."""
    x = np.asarray(load_diabetes().data[:ROWS], np.float64)
    return np.asarray((x - x.mean(axis=0)) / x.std(axis=0), np.float32)


def silo(x: Matrix, least: int) -> Rows:
    """Return a silo with these rows."""
    return Rows(x, np.zeros((len(x), 1)), of_numbers, least)


def asked(rows: Rows, trees: Ensemble, level: int, nodes: Any, edges: Any) -> Any:
    """Return what the silo answers about nodes of the first tree."""
    pairs = np.array([[0, node] for node in nodes])
    (question,) = questions.levels(Level(trees, 0, level, pairs), edges)
    return questions.answer(question.arrays, rows)


def one_by_one(x: Matrix, least: int) -> NDArray[np.bool_]:
    """Return which cells (n, columns) are found."""
    rows, columns = silo(x, least), x.shape[1]
    trees = Ensemble.empty(1, 1, DEPTH, columns)
    edges, wide = [GRID] * columns, len(GRID) + 2
    guess = np.zeros_like(x)
    for level in range(DEPTH):
        nodes = np.arange(2**level - 1, 2 ** (level + 1) - 1)
        here = trees.nodes(x, 0, 0, level)
        for node in nodes:
            counts = asked(rows, trees, level, [node], edges)[0, :, 2].reshape(columns, wide)
            if not counts.any():
                continue
            share = np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
            middle = np.minimum((share < 0.5).sum(axis=1), len(GRID) - 1)
            guess[here == node] = GRID[middle] - NEAR / 2
            widest = int(np.argmax((share > 0.9).argmax(axis=1) - (share > 0.1).argmax(axis=1)))
            trees.feature[0, 0, node] = widest
            trees.threshold[0, 0, node] = GRID[max(middle[widest] - 1, 0)]
    return np.asarray(np.abs(guess - x) <= NEAR)


@dataclass(frozen=True)
class Counting:
    """Counts rows below two thresholds, from sums over at least ``least`` rows."""

    rows: Rows

    def below(self, column: int, end: float, other: int, value: float) -> int:
        """Return the rows up to ``end`` in a column and up to ``value`` in another."""
        trees = Ensemble.empty(1, 1, 3, self.rows.x.shape[1])
        trees.feature[0, 0, :2] = column, other
        trees.threshold[0, 0, :2] = end, value
        edges = [np.empty(0, np.float32)] * self.rows.x.shape[1]
        width = len(edges[0]) + 2
        (whole,) = asked(self.rows, trees, 1, [1], edges)[:, :width, 2].sum(axis=1)
        low, high = asked(self.rows, trees, 2, [3, 4], edges)[:, :width, 2].sum(axis=1)
        return int(low or whole - high)


def by_differences(x: Matrix, least: int) -> NDArray[np.bool_]:
    """Return which cells of the first rows with a value of their own in a column are found."""
    counting, column = Counting(silo(x, least)), 2
    order = np.argsort(x[:, column], kind="stable")
    values = x[order, column]
    alone = np.flatnonzero((np.diff(values[:-1]) > 0) & (np.diff(values[1:]) > 0)) + 1
    picked = alone[np.linspace(0, len(alone) - 1, TARGETS).astype(int)]
    found = np.zeros((TARGETS, x.shape[1]), np.bool_)
    for place, at in enumerate(picked):
        ends = float(values[at - 1]), float(values[at])
        for other in range(x.shape[1]):
            low, high = 0, len(GRID) - 1
            while low < high:
                middle = (low + high) // 2
                before, after = (
                    counting.below(column, end, other, float(GRID[middle])) for end in ends
                )
                low, high = (low, middle) if after > before else (middle + 1, high)
            true = x[order[at], other]
            found[place, other] = abs(GRID[low] - NEAR / 2 - true) <= NEAR
    return found


def main() -> None:
    """Print the table."""
    x = patients()
    print("| `statistics_from` | one by one: cells, rows, % | by differences: cells, rows, % |")
    print("|---|---|---|")
    for least in FLOORS:
        cells = [attack(x, least) for attack in (one_by_one, by_differences)]
        shown = [f"{100 * one.mean():.0f}, {100 * one.all(axis=1).mean():.0f}" for one in cells]
        print(f"| {least} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
