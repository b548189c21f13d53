"""What discriminators see of rows whose model is trees: places among bins that silos agreed on.

Trees take numbers as they are, with missing ones, and no silo knows the others' means. But silos
agree on bins of each column before a tree grows, and every silo is sent these bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.trees.bins import Columns, codes
from coterie.features.sums.trees.questions import joined, parted

Floats32 = NDArray[np.float32]
PARTS = 8
"""Parts of a column's bins that discriminators tell apart."""
CUTS = (-0.5, 0.0, 0.5)
"""Borders between classes of real targets."""


@dataclass(frozen=True)
class Seen:
    """How all silos of a run see rows.

    Attributes:
        edges: of each column's bins.
        base: (K,), the constant answer that is best for all rows.
        num_classes: of real targets.
    """

    num_classes: ClassVar[int] = len(CUTS) + 1

    edges: Columns
    base: Floats32

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], columns: int, outputs: int) -> Self:
        """Return what a message has; raise ``ValueError`` if it does not fit the rows."""
        try:
            base, edges = arrays["base"], parted("edges", arrays, columns)
        except KeyError as missing:
            raise ValueError(f"it lacks {missing}") from None
        if base.shape != (outputs,) or base.dtype != np.float32 or not np.isfinite(base).all():
            raise ValueError("it must have one finite answer per output")
        return cls(tuple(edges), base)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {**joined("edges", self.edges), "base": self.base}

    def features(self, x: Floats32) -> Floats32:
        """Return features (n, PARTS · columns) of rows (n, columns), in which NaN is missing.

        A column's are 1 or −1, by whether a value is in the upper bins: in the last seven eighths,
        six eighths, …; and then 1 if it is missing, else 0. All are scaled by the number of
        columns, so that the same learning rate suits wide and narrow tables.
        """
        last = np.array([max(len(own), 1) for own in self.edges])
        place = codes(x, self.edges).T / last
        upper = np.where(place[..., None] * PARTS >= np.arange(1, PARTS), 1.0, -1.0)
        missing = np.isnan(x)[..., None]
        found = np.concatenate([np.where(missing, 0.0, upper), missing], axis=2)
        scaled: Floats32 = (found.reshape(len(x), -1) * (PARTS / x.shape[1]) ** 0.5).astype(
            np.float32
        )
        return scaled

    def classes(self, y: Floats32) -> NDArray[np.int64]:
        """Return a class (n,) of ``num_classes`` for real targets (n, K).

        It says how far they are, on average, from the constant answer. The unit is this silo's root
        mean square distance: the silos know no common one.
        """
        apart = y - self.base.astype(np.float64)
        unit = np.sqrt(np.mean(apart**2, axis=0))
        found: NDArray[np.int64] = np.searchsorted(
            CUTS, (apart / np.where(unit > 0, unit, 1)).mean(axis=1)
        ).astype(np.int64)
        return found
