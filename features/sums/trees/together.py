"""Trees from parts of rows in one process: a silo's own, and what a group's are tested with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from coterie.features.sums.trees.bins import agreed
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Settings, boosted, constant
from coterie.features.sums.trees.histograms import Rows


def grown(parts: Sequence[Rows], empty: Ensemble, settings: Settings, *, bins: int) -> Ensemble:
    """Return the ensemble ``empty`` with all its trees, from sums over the parts.

    ``bins`` is the most bins of a column. Raises ``ValueError`` if no part has enough rows.
    """

    def all_cells(cells: Any) -> Any:
        counts = [part.counts(cells) for part in parts]
        return [np.sum(own, axis=0) for own in zip(*counts, strict=True)]

    edges = _answered(agreed(len(empty.gain), bins), all_cells)
    trees = empty.copy()
    trees.base[:] = _answered(
        constant(len(trees.base)), lambda base: np.sum([p.totals(base) for p in parts], axis=0)
    )
    for done in range(len(trees.leaf)):
        trees = _answered(
            boosted(trees, done, edges, settings),
            lambda at: np.sum(
                [p.histograms(at.trees, at.done, at.level, at.nodes, edges) for p in parts], axis=0
            ),
        )
    return trees


def _answered(asking: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    question = next(asking)
    while True:
        try:
            question = asking.send(answer(question))
        except StopIteration as end:
            return end.value
