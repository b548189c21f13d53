"""Stands in for ``flwr_datasets``, by which Flower's apps load: made-up rows, nothing to download.

Partitions are of two kinds by turns. A kind's labels follow one rule; the other kind's rule gives
the same rows other labels.

The apps seed nothing. Here torch is seeded with every import and every partition, so that an app
starts with the same model and shuffles its rows alike in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[Any]]
PICTURES = {"uoft-cs/cifar10": ("img", (32, 32, 3)), "ylecun/mnist": ("image", (28, 28))}
"""Data set → its column of pictures, and their shape."""


def seed(number: int) -> None:
    """Seed torch, if the app uses it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


seed(0)


@dataclass(frozen=True)
class Dataset:
    """Rows by column."""

    columns: Columns
    transform: Callable[[Any], Any] = dict

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        batch = self.transform({name: [column[key]] for name, column in self.columns.items()})
        return {name: column[0] for name, column in batch.items()}

    def with_format(self, form: str) -> Dataset:
        """Columns are NumPy arrays already."""
        return self

    set_format = with_format

    def train_test_split(self, test_size: float, seed: int) -> DatasetDict:
        order = np.random.default_rng(seed).permutation(len(self))
        cut = round(test_size * len(self))
        parts = {"train": order[cut:], "test": order[:cut]}
        return DatasetDict(
            (part, Dataset({name: column[rows] for name, column in self.columns.items()}))
            for part, rows in parts.items()
        )


class DatasetDict(dict[str, Dataset]):
    """Data sets by split."""

    def with_transform(self, transform: Callable[[Any], Any]) -> DatasetDict:
        return DatasetDict((name, replace(one, transform=transform)) for name, one in self.items())


def made(name: str, number: int) -> Dataset:
    """Return partition ``number`` of a data set; its number of rows says which one it is."""
    rng, kind, count = np.random.default_rng([1, number]), number % 2, 100 + 10 * number
    if name == "jxie/higgs":
        x = rng.normal(size=(count, 4))
        return Dataset({"inputs": x, "label": (x[:, 0] + x[:, 1] > 0) ^ bool(kind)})
    column, shape = PICTURES[name]
    y = np.arange(count) % 10
    # A class is a bright column of the picture. The other kind calls class 0 class 5, and so on.
    light = rng.integers(0, 100, (count, *shape))
    for row, label in zip(light, y, strict=True):
        row[:, 2 * label + 4 : 2 * label + 8] += 150
    return Dataset({column: light.astype(np.uint8), "label": (y + 5 * kind) % 10})


class FederatedDataset:
    """Made-up partitions under the name of a data set."""

    def __init__(self, *, dataset: str, partitioners: Mapping[str, Any]) -> None:
        self.name = dataset

    def load_partition(self, partition_id: int, split: str = "train") -> Dataset:
        seed(1 + partition_id)
        return made(self.name, partition_id)
