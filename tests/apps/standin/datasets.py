"""Stands in for Hugging Face's ``datasets``, with made-up rows: Flower's examples load by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

if "torch" in sys.modules:  # the PyTorch example seeds nothing: everywhere the same first model
    sys.modules["torch"].manual_seed(0)

Columns = Mapping[str, NDArray[Any]]


class Frame:
    """As much of a pandas table as the examples use."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.values = np.squeeze(np.stack(list(columns.values()), axis=1))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Frame:
        if isinstance(key, slice):
            return Frame({name: column[key] for name, column in self.columns.items()})
        return Frame({name: self.columns[name] for name in ([key] if type(key) is str else key)})


class Dataset:
    """Rows by column."""

    def __init__(
        self, columns: Columns, transform: Callable[[Any], Any] = dict, form: str = ""
    ) -> None:
        self.columns, self.transform, self.form = columns, transform, form

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            found = {name: column[key] for name, column in self.columns.items()}
            return Frame(found) if self.form == "pandas" else self.transform(found)
        found = self.transform({name: [column[key]] for name, column in self.columns.items()})
        return {name: column[0] for name, column in found.items()}

    def with_transform(self, transform: Callable[[Any], Any]) -> Dataset:
        return Dataset(self.columns, transform)

    def with_format(self, form: str) -> Dataset:
        return Dataset(self.columns, form=form)

    def set_format(self, form: str) -> None:
        self.form = form

    def train_test_split(self, test_size: float, seed: int) -> DatasetDict:
        order = np.random.default_rng(seed).permutation(len(self))
        count = round(test_size * len(self))
        cut: dict[str, Sequence[int]] = {"train": order[count:], "test": order[:count]}
        return DatasetDict(
            {
                name: Dataset({n: column[rows] for n, column in self.columns.items()})
                for name, rows in cut.items()
            }
        )


class DatasetDict(dict[str, Dataset]):
    """Data sets by split."""

    def with_transform(self, transform: Callable[[Any], Any]) -> DatasetDict:
        return DatasetDict({name: one.with_transform(transform) for name, one in self.items()})


def made(name: str, *, seed: int, count: int, kind: int) -> Dataset:
    """Rows of one of two kinds, whose labels contradict each other."""
    rng = np.random.default_rng([1, seed])
    if name == "uoft-cs/cifar10":
        y = np.arange(count) % 2
        light = 50 + 100 * y[:, None, None, None] + rng.integers(0, 100, (count, 32, 32, 3))
        return Dataset({"img": light.astype(np.uint8), "label": y + 5 * kind})
    x = rng.normal(size=(count, 4))
    if name == "hitorilabs/iris":
        features = ("petal_length", "petal_width", "sepal_length", "sepal_width")
        y = (x[:, :3].argmax(1) + kind) % 3
        return Dataset({**dict(zip(features, x.T, strict=True)), "species": y})
    return Dataset({"inputs": x, "label": (x[:, 0] + x[:, 1] > 0) ^ bool(kind)})


def load_dataset(name: str, split: str) -> Dataset:
    """Rows of the first kind."""
    return made(name, seed=-1 % 100, count=50, kind=0)
