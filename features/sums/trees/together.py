"""Trees from parts of rows in one process: a silo's own, and what a group's are tested with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from coterie.features.sums.trees.bins import Columns, agreed
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import (
    Settings,
    best_number,
    boosted,
    constant,
    enough,
    trial,
)
from coterie.features.sums.trees.histograms import Rows


def grown_alone(
    rows: Rows, kept: Rows, held_out: Rows, empty: Ensemble, settings: Settings, *, bins: int
) -> Ensemble:
    """Return trees from ``rows``, as many as a trial with ``kept`` finds best on ``held_out``."""
    faster, tried = trial(settings, len(empty.leaf))
    tested = grown([kept], empty, faster, bins=bins, most=tried)
    most = enough(best_number(held_out.losses(tested)), settings, len(empty.leaf))
    return grown([rows], empty, settings, bins=bins, most=most)


def tried_alone(
    kept: Rows, held_out: Rows, empty: Ensemble, settings: Settings, *, bins: int, most: int
) -> Ensemble:
    """Return as many of the ``most`` first trees of ``kept`` as are best on ``held_out``."""
    trees = grown([kept], empty, settings, bins=bins, most=most)
    return trees.first(best_number(held_out.losses(trees)))


def grown(
    parts: Sequence[Rows],
    empty: Ensemble,
    settings: Settings,
    *,
    bins: int,
    most: int | None = None,
) -> Ensemble:
    """Return the ensemble ``empty`` with all its trees, or ``most``, from sums over the parts.

    ``bins`` is the most bins of a column. Raises ``ValueError`` if no part has enough rows.
    """
    edges = edges_of(parts, len(empty.gain), bins=bins)
    trees = empty.copy()
    trees.base[:] = _answered(
        constant(len(trees.base)), lambda base: np.sum([p.totals(base) for p in parts], axis=0)
    )
    return continued(parts, trees, range(len(trees.leaf))[:most], settings, edges)


def continued(
    parts: Sequence[Rows],
    trees: Ensemble,
    numbers: Sequence[int],
    settings: Settings,
    edges: Columns,
) -> Ensemble:
    """Return the ensemble with the trees of these numbers, after those that it has before them."""
    for done in numbers:
        trees = _answered(
            boosted(trees, done, edges, settings),
            lambda at: np.sum(
                [p.histograms(at.trees, at.done, at.level, at.nodes, edges) for p in parts], axis=0
            ),
        )
    return trees


def edges_of(parts: Sequence[Rows], columns: int, *, bins: int) -> Columns:
    """Return the edges of each column's bins, from sums over the parts."""

    def all_cells(cells: Any) -> Any:
        counts = [part.counts(cells) for part in parts]
        return [np.sum(own, axis=0) for own in zip(*counts, strict=True)]

    edges: Columns = _answered(agreed(columns, bins), all_cells)
    return edges


def _answered(asking: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    question = next(asking)
    while True:
        try:
            question = asking.send(answer(question))
        except StopIteration as end:
            return end.value
