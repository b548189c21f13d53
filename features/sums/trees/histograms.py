"""A silo's rows, and the sums over them that grow trees.

A sum over fewer rows than the silo's smallest count does not leave. Bins with fewer rows are joined
to runs of neighbours, and the sum of a run is divided evenly among its bins: their values lie
anywhere in it. The sums of all bins stay. A node with fewer rows is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees import bins
from coterie.features.sums.trees.ensemble import Ensemble, Floats
from coterie.features.sums.trees.survival import losses_of_survival, of_survival

SUMS = 3
"""Sums of a bin: gradients, second derivatives, rows."""

VALUES_AT_ONCE, COLUMNS_AT_ONCE = 2**20, 2048
"""Values that are summed at once (as many as there are sums, if those are more), and columns of
nodes whose bins are joined at once: what that needs is small."""
MOST_KNOWN = 12
"""Groups whose trees are remembered: those of one race at a silo, and more."""
Derivatives = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""Answers (n, K) and targets → first and second derivative of each row's loss by each answer."""


def of_numbers(answers: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return the derivatives of half the squared error."""
    return answers - targets, np.ones_like(answers)


def of_labels(answers: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return the derivatives of the log loss of each of K labels; one label is two classes."""
    chance = 1 / (1 + np.exp(-answers))
    return chance - targets, chance * (1 - chance)


def of_classes(answers: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return the derivatives of the log loss of one of K classes; targets are one-hot."""
    shares = np.exp(answers - answers.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares - targets, shares * (1 - shares)


def losses_of(derivatives: Derivatives, answers: Floats, targets: Floats, base: Floats) -> Floats:
    """Return the loss of each row (n,), whose derivatives these are.

    The squared error of a real target is divided by its mean where every answer is ``base`` (K,):
    targets have different units.
    """
    if derivatives is of_survival:
        return losses_of_survival(answers, targets)
    if derivatives is of_labels:
        losses: Floats = (np.logaddexp(0, answers) - targets * answers).sum(axis=1)
    elif derivatives is of_classes:
        most = answers.max(axis=1)
        whole = most + np.log(np.exp(answers - most[:, None]).sum(axis=1))
        losses = whole - (targets * answers).sum(axis=1)
    else:
        usual = ((base - targets) ** 2).mean(axis=0)
        losses = ((answers - targets) ** 2 / np.where(usual, usual, 1)).sum(axis=1)
    return losses


@dataclass
class Rows:
    """A silo's training rows, with what is remembered between two questions.

    Attributes:
        x: (n, columns), NaN where a value is missing.
        targets: (n, K); of survival (n, 2), time and event.
        derivatives: of the task's loss.
        least: smallest number of rows whose sum may leave.
    """

    x: NDArray[np.float32]
    targets: Floats
    derivatives: Derivatives
    least: int = 1
    _known: list[_Known] = field(default_factory=list)

    @property
    def outputs(self) -> int:
        """The number K of answers to a row."""
        return 1 if self.derivatives is of_survival else self.targets.shape[1]

    def counts(self, cells: Sequence[bins.Ints]) -> list[bins.Ints]:
        columns = zip(self.x.T, cells, strict=True)
        return [_joined(bins.counted(column, own), self.least) for column, own in columns]

    def totals(self, base: NDArray[np.float32]) -> Floats:
        """Return the sums over all rows where every answer is ``base``, shape (K, ``SUMS``).

        Of survival, any constant is as good: the derivatives by it are 0.
        """
        rows, found = len(self.x), np.zeros((len(base), SUMS))
        if self.derivatives is of_survival:
            found[:, 2] = rows * (rows >= self.least)
        elif rows >= self.least:
            answers = np.tile(base.astype(np.float64), (rows, 1))
            first, second = self.derivatives(answers, self.targets)
            found[:] = np.stack(
                [first.sum(axis=0), second.sum(axis=0), np.full(len(base), rows)], 1
            )
        return found

    def losses(self, trees: Ensemble) -> Floats:
        """Return the sum of the losses after 0, 1, … T trees, and the rows, shape (T + 1, 2).

        Both are 0 of too few rows, and of survival without events, which says nothing about trees.
        """
        rows, found = len(self.x), np.zeros((len(trees.leaf) + 1, 2))
        silent = self.derivatives is of_survival and not self.targets[:, 1].any()
        if rows < max(self.least, 1) or silent:
            return found
        base = trees.base.astype(np.float64)
        answers = np.tile(base, (rows, 1))
        for done in range(len(found)):
            trees.added(self.x, answers, max(done - 1, 0), done)
            found[done] = losses_of(self.derivatives, answers, self.targets, base).sum(), rows
        return found

    def histograms(
        self,
        trees: Ensemble,
        done: int,
        level: int,
        nodes: NDArray[np.int64],
        edges: Sequence[NDArray[np.float32]],
    ) -> Floats:
        """Return the sums of each bin in some nodes of the trees that grow.

        Args:
            trees: the trees number ``done`` grow; those before are complete.
            level: of the nodes, from 0.
            nodes: (m, 2), output and node.
            edges: of each column's bins.

        Returns:
            Shape (m, bins of all columns, ``SUMS``). A column's last bin has its missing values.
        """
        known = self._refreshed(trees, done, edges)
        first, second = known.derived
        size = sum(len(own) + 2 for own in edges)
        found = np.zeros((len(nodes), size, SUMS))
        for output in range(len(trees.base)):
            wanted = np.flatnonzero(nodes[:, 0] == output)
            if not len(wanted):
                continue
            reached = trees.nodes(self.x, done, output, level)
            start = np.full(2 ** (level + 1), -1, np.int32)
            start[nodes[wanted, 1]] = np.arange(len(wanted)) * size
            weights = first[:, output], second[:, output], np.ones(len(self.x))
            sums = _summed(known.places, start[reached], np.stack(weights, 1), len(wanted) * size)
            found[wanted] = sums.reshape(len(wanted), size, SUMS)
        return _as_they_may_leave(found, edges, self.least)

    def _refreshed(
        self, trees: Ensemble, done: int, edges: Sequence[NDArray[np.float32]]
    ) -> _Known:
        """Return what is remembered of these bins, with the answers of the complete trees."""
        own = {name: a for name, a in trees.arrays(done).items() if name != "gain"}
        bins_of = tuple(cuts.tobytes() for cuts in edges)
        known = next((one for one in self._known if one.goes_on_to(own, done, bins_of)), None)
        if known is None:
            answers = np.tile(trees.base.astype(np.float64), (len(self.x), 1))
            known = _Known(bins_of, _places(self.x, edges), {}, answers)
            del self._known[: 1 - MOST_KNOWN]
        else:
            self._known.remove(known)
        if known.done < done or not known.derived:
            trees.added(self.x, known.answers, known.done, done)
            known.derived = self.derivatives(known.answers, self.targets)
        known.trees = {name: array.copy() for name, array in own.items()}
        self._known.append(known)
        return known


@dataclass(eq=False)
class _Known:
    """What is remembered of one group's trees.

    Attributes:
        edges: the bytes of each column's edges.
        places: (n, columns) the bin of each value, among those of all columns side by side.
        answers: (n, K) of the trees.
        derived: their derivatives, (n, K) each; empty before the first question.
    """

    edges: tuple[bytes, ...]
    places: NDArray[np.int32]
    trees: Mapping[str, NDArray[Any]]
    answers: Floats
    derived: tuple[Floats, ...] = ()

    @property
    def done(self) -> int:
        """The number of trees that the answers have."""
        return len(self.trees["leaf"]) if self.trees else 0

    def goes_on_to(
        self, trees: Mapping[str, NDArray[Any]], done: int, edges: tuple[bytes, ...]
    ) -> bool:
        """Return whether these are the same bins and trees, or further ones."""
        if self.done > done or edges != self.edges:
            return False
        return all(
            np.array_equal(own, trees[name] if own.ndim == 1 else trees[name][: self.done])
            for name, own in self.trees.items()
        )


def _places(x: NDArray[np.float32], edges: Sequence[NDArray[np.float32]]) -> NDArray[np.int32]:
    """Return the bin (n, columns) of each value, among those of all columns side by side."""
    widths = np.array([len(own) + 2 for own in edges])
    found = np.ascontiguousarray(bins.codes(x, edges).T)
    found += (np.cumsum(widths) - widths).astype(np.int32)
    return found


def _summed(
    places: NDArray[np.int32], start: NDArray[np.int32], weights: Floats, size: int
) -> Floats:
    """Return the sums (size, ``SUMS``) of rows' weights (n, ``SUMS``) in their places (n, columns).

    Places count from ``start`` (n,); where it is negative, the row is not part of any sum. The
    places of a row are a column of a sparse matrix, and the sums its product with the weights.
    """
    from scipy.sparse import csc_array  # only silos need it, and it takes time to load

    own, found = np.flatnonzero(start >= 0), np.zeros((size, SUMS))
    parts = len(own) * places.shape[1] // max(VALUES_AT_ONCE, found.size) + 1
    for rows in np.array_split(own, parts):
        at = places[rows] + start[rows, None]
        ends = np.arange(len(rows) + 1, dtype=np.int32) * at.shape[1]
        ones = csc_array((np.ones(at.size), at.ravel(), ends), shape=(size, len(rows)))
        found += ones @ weights[rows]
    return found


def _as_they_may_leave(sums: Floats, edges: Sequence[NDArray[np.float32]], least: int) -> Floats:
    """Return histograms (m, bins of all columns, ``SUMS``) of ``floored`` columns."""
    if least < 2:
        return sums
    own, whole = bins.there(edges), bins.by_column(sums, edges)
    last = np.tile([len(cuts) for cuts in edges], len(sums))
    sent = floored(whole.reshape(SUMS, len(last), -1), last, least).reshape(whole.shape)
    return np.stack([plane[:, own] for plane in sent], axis=2)


def floored(sums: Floats, last: NDArray[np.intp], least: int) -> Floats:
    """Return sums of columns (``SUMS``, m, bins) as they may leave: over runs of enough rows.

    ``last`` (m,) is the number of the column's last bin of values. The very last bin has the
    missing values; it is only added to others, or gets the others, if one of the two has too few
    rows.
    """
    found, rows = sums.copy(), sums[-1]
    small = ((rows > 0) & (rows < least)).any(axis=1)
    some = rows.sum(axis=1) >= least
    found[:, small & ~some] = 0
    joined = np.flatnonzero(small & some)
    for part in np.array_split(joined, -(-len(joined) // COLUMNS_AT_ONCE)) if len(joined) else ():
        found[:, part] = _floored(sums[:, part], last[part], least)
    return found


def _floored(sums: Floats, last: NDArray[np.intp], least: int) -> Floats:
    """Return the same of columns that have enough rows."""
    values, missing = sums[..., :-1].copy(), sums[..., -1]
    run, single = _runs(values[-1], least)
    few, lone = values[-1].sum(axis=1) < least, missing[-1] < least
    values[:, lone, last[lone]] += missing[:, lone]
    missing[:, lone] = 0
    missing[:, few & ~lone] += values[:, few & ~lone].sum(axis=2)
    values[:, few & ~lone] = 0
    sums[..., :-1] = _spread(values, run, single, last, least)
    return sums


def _runs(rows: Floats, least: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the run of each bin (m, bins), and which bins are a run by themselves.

    A run is over as soon as it has enough rows. One with fewer, before a bin by itself or at the
    end, is part of the run before, or, if it is the first, of the next.
    """
    by_bin = np.ascontiguousarray(rows.T)
    single = by_bin >= least
    run, closed, held = np.empty(single.shape, np.intp), np.zeros(len(rows), np.intp), 0 * by_bin[0]
    for i in range(len(by_bin)):
        held += by_bin[i]
        np.add(closed, single[i], out=run[i])
        full = held >= least
        np.copyto(closed, run[i] + 1, where=full)
        np.copyto(held, 0, where=full)
    run = np.ascontiguousarray(run.T)
    at, count = _numbered(run)
    few = (np.bincount(at.ravel(), rows.ravel(), count) < least)[at]
    return np.where(few, np.where(run > 0, run - 1, 1), run), single.T


def _numbered(run: NDArray[np.intp]) -> tuple[NDArray[np.intp], int]:
    """Return the runs (m, bins) numbered through all columns, and a number that is not used."""
    most = int(run.max()) + 1
    return run + most * np.arange(len(run))[:, None], most * len(run)


def _spread(
    values: Floats,
    run: NDArray[np.intp],
    single: NDArray[np.bool_],
    last: NDArray[np.intp],
    least: int,
) -> Floats:
    """Return the sums of runs with enough rows, in their single bin, or evenly in all of them."""
    at, count = _numbered(run)
    there = np.arange(run.shape[1]) <= last[:, None]
    singles, bins, *sums = (
        np.bincount(at.ravel(), own.ravel(), count) for own in (single, there, *values)
    )
    share = (sums[-1] >= least) / np.maximum(np.where(singles > 0, singles, bins), 1)
    gets = single | (there & (singles == 0)[at])
    return np.stack([(share * own)[at] * gets for own in sums])


def _joined(counts: bins.Ints, least: int) -> bins.Ints:
    """Return the rows in a column's cells, with small counts added to the next one that is full."""
    found, held, last = np.zeros_like(counts), 0, -1
    full = np.flatnonzero(counts)
    for i, rows in zip(full.tolist(), counts[full].tolist(), strict=True):
        held += rows
        if held >= least:
            found[i], held, last = held, 0, i
    if last >= 0:
        found[last] += held
    return found
