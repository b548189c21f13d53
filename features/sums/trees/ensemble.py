"""An ensemble of boosted trees as arrays of fixed shape.

Node i of a tree of depth d has the children 2i + 1 (left) and 2i + 2; nodes 0 to 2^d − 2 split, the
next 2^d are leaves. A node that does not split sends every row to the left, so that its leaf is the
leftmost one below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NONE = -1
"""Feature of a node that does not split."""


@dataclass(frozen=True)
class Ensemble:
    """Trees; the answer to a row is ``base`` plus the leaves that it reaches.

    Attributes:
        base: float32 (K,), of each output.
        feature: int32 (T, K, 2^d − 1), the column; NONE: no split.
        threshold: float32, same shape; values up to it go left.
        missing_left: int32, same shape; 1: missing values (NaN) go left.
        leaf: float32 (T, K, 2^d).
        gain: float32 (columns,), how much the splits of each column have reduced the loss.
    """

    base: NDArray[np.float32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    missing_left: NDArray[np.int32]
    leaf: NDArray[np.float32]
    gain: NDArray[np.float32]

    @classmethod
    def empty(cls, trees: int, outputs: int, depth: int, columns: int) -> Self:
        """Return an ensemble that answers 0 to every row."""
        nodes = (trees, outputs, 2**depth - 1)
        return cls(
            np.zeros(outputs, np.float32),
            np.full(nodes, NONE, np.int32),
            np.zeros(nodes, np.float32),
            np.zeros(nodes, np.int32),
            np.zeros((trees, outputs, 2**depth), np.float32),
            np.zeros(columns, np.float32),
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the checked ensemble of these arrays.

        Raises:
            KeyError, ValueError: they are not an ensemble's.
        """
        found = cls(**{field.name: arrays[field.name] for field in fields(cls)})
        trees, outputs, leaves = found.leaf.shape
        (columns,) = found.gain.shape
        if leaves not in (2, 4, 8, 16, 32, 64, 128, 256, 512):
            raise ValueError("trees have 2 to 512 leaves")
        like = cls.empty(trees, outputs, found.depth, columns)
        for field in fields(cls):
            got, wanted = getattr(found, field.name), getattr(like, field.name)
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                raise ValueError(f"{field.name} must be {wanted.dtype} of shape {wanted.shape}")
            if not np.isfinite(got).all():
                raise ValueError(f"{field.name} must be finite")
        if found.feature.size and not NONE <= found.feature.min() <= found.feature.max() < columns:
            raise ValueError(f"a split is of a column beyond the {columns}")
        return found

    @property
    def depth(self) -> int:
        """The number of splits from the root to a leaf."""
        return int(self.leaf.shape[2]).bit_length() - 1

    def arrays(self, trees: int | None = None) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, of the first ``trees`` only."""
        own: dict[str, NDArray[Any]] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a if a.ndim == 1 else a[:trees] for name, a in own.items()}

    def first(self, trees: int) -> Self:
        """Return the same with the first ``trees`` only; all others answer 0. ``gain`` stays."""
        outputs, columns = len(self.base), len(self.gain)
        found, empty = self.copy(), self.empty(len(self.leaf), outputs, self.depth, columns)
        for name, array in found.arrays().items():
            if array.ndim > 1:
                array[trees:] = empty.arrays()[name][trees:]
        return found

    def copy(self) -> Self:
        """Return an ensemble whose arrays may be written."""
        return type(self)(*(array.copy() for array in self.arrays().values()))

    def equals(self, other: Self) -> bool:
        return all(map(np.array_equal, self.arrays().values(), other.arrays().values()))

    def nodes(
        self, x: NDArray[np.float32], tree: int, output: int, levels: int
    ) -> NDArray[np.intp]:
        """Return the node (n,) that each row reaches after some levels of a tree."""
        at, values = np.zeros(len(x), np.intp), x.reshape(-1)
        first = np.arange(len(x)) * x.shape[1]
        splits = self.feature[tree, output] != NONE
        column = np.where(splits, self.feature[tree, output], 0)
        highest = np.where(splits, self.threshold[tree, output], np.float32(np.inf))
        missing = (self.missing_left[tree, output] == 1) | ~splits
        for _ in range(levels):
            value = values.take(first + column.take(at))
            left = (value <= highest.take(at)) | (np.isnan(value) & missing.take(at))
            at = 2 * at + 2 - left
        return at

    def added(self, x: NDArray[np.float32], answers: Floats, start: int, end: int) -> None:
        """Add the leaves of the trees from ``start`` to before ``end`` to answers (n, K)."""
        first = 2**self.depth - 1
        for tree in range(start, end):
            for output in range(len(self.base)):
                reached = self.nodes(x, tree, output, self.depth) - first
                answers[:, output] += self.leaf[tree, output][reached]

    def answers(self, x: NDArray[np.float32]) -> Floats:
        """Return answers (n, K) to rows (n, columns), in which NaN is a missing value."""
        found = np.tile(self.base.astype(np.float64), (len(x), 1))
        self.added(x, found, 0, len(self.leaf))
        return found
