"""The data of FedGroup's Table III, by the published recipes: MNIST, letters, Synthetic(1,1).

Every data set is read and cut once for all its silos. To run any strategy on it::

    train(DATASETS["mnist-mclr"].nodes(folder, seed=0), {"strategy": "fedavg"})

Sources: FedGroup, section IV-A and Tables II–III; its data are made as FedProx's (Li et al., MLSys
2020, https://arxiv.org/abs/1812.06127, section 5.1 and appendix C).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kit import nodes
from coterie.client.work.data import Held
from coterie.client.work.measure import Evaluation, evaluate
from coterie.client.work.weights import load_weights
from coterie.tasks import Task
from coterie.tasks.base import Option, SiloData, TaskError
from coterie.tasks.images.datasets import EmnistLetters, Mnist, join
from coterie.tasks.images.image_files import Images, read_images
from coterie.tasks.models import NETWORKS, SplitModel
from coterie.tasks.options import read_options
from coterie.tasks.splits.shares import cut
from coterie.wire import Model

TEST_SHARE = 0.1
"""Of every silo's samples, kept for testing."""
POWER_LAW: Mapping[str, Option] = {"split": "power-law", "normalise": "per-pixel"}
LETTERS = 10
"""The letters a to j."""


@dataclass(frozen=True)
class Dataset:
    """One row of Table III.

    Attributes:
        task: reference for the silos, ``module:attribute``.
        silos: how many.
        lr, proximal_mu: η, and FedProx's μ.
        num_groups: m.
        notes: how the data differs from the paper's.
    """

    task: str
    silos: int
    lr: float
    proximal_mu: float
    num_groups: int
    notes: str

    @property
    def names(self) -> list[str]:
        """The silos' names, in the order of the split."""
        return [f"silo-{i:04d}" for i in range(self.silos)]

    def nodes(self, folder: str, *, seed: int) -> list[dict[str, Option]]:
        """What each silo is started with. ``folder`` holds the data; ``seed`` is of the split."""
        return nodes(self.task, self.names, {"data": folder, "seed": seed})


class _Shared(Task):
    """A task whose ``load`` gives one silo of a data set that is read once for all."""

    def __init__(
        self,
        name: str,
        model: str,
        *,
        cut_all: Callable[[str, int], list[SiloData]],
        shape: tuple[int, int, int],
        num_classes: int,
    ) -> None:
        self.name, self.num_classes = name, num_classes
        self._model, self._shape = model, shape
        self.cut_all = cut_all

    def model(self) -> torch.nn.Module:
        """The paper's network."""
        return SplitModel(*NETWORKS[self._model](shape=self._shape, num_classes=self.num_classes))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        chosen = read_options(self.name, options, {"data": "", "seed": 0, "silo": 0})
        silo: int = chosen["silo"]
        return self.cut_all(chosen["data"], chosen["seed"])[silo]


@lru_cache(maxsize=1)
def mnist_silos(folder: str, seed: int) -> list[SiloData]:
    """1,000 silos of digits u, u+1 mod 10; sizes by a power law; every pixel standardised."""
    own: dict[str, Option] = {"data": folder, "split-seed": seed}
    return Mnist().load_all({**POWER_LAW, **own, "silos": 1000, "test-share": TEST_SHARE})


@lru_cache(maxsize=1)
def letters_silos(folder: str, seed: int) -> list[SiloData]:
    """200 silos of three neighbouring letters of a–j, lognormal(4, 1) + 5 samples; pixels / 255.

    Where the folder has fewer samples of a letter than that needs, all silos are smaller by one
    factor.
    """
    task = EmnistLetters()
    raw = read_images(task.name, folder, task.files)
    both = join(Images(raw.train.x, raw.train.y - 1), Images(raw.test.x, raw.test.y - 1))
    rng = np.random.default_rng([seed, 0])
    shares = _letter_shares(np.bincount(both.y, minlength=task.num_classes), rng)
    return [
        _held_out(
            (both.x[part, None] / np.float32(255)).astype(np.float32),
            both.y[part],
            task.num_classes,
            rng,
        )
        for part in cut(both.y, shares, rng=rng)
    ]


def _letter_shares(counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    silos, classes = 200, 3
    sizes = rng.lognormal(4.0, 1.0, size=silos) + 5
    rows = np.repeat(np.arange(silos), classes)
    columns = (rows + np.tile(np.arange(classes), silos)) % LETTERS
    wanted = np.zeros((silos, len(counts)))
    wanted[rows, columns] = np.repeat(sizes / classes, classes)
    factor = max(1.0, float((wanted.sum(axis=0)[:LETTERS] / counts[:LETTERS]).max()))
    shares: NDArray[np.float64] = wanted / (factor * np.maximum(counts, 1))
    return shares


@lru_cache(maxsize=1)
def synthetic_silos(folder: str, seed: int) -> list[SiloData]:
    """Synthetic(1,1) of FedProx: 100 silos, 60 features, 10 classes, lognormal(4, 2) + 50 samples.

    Silo k has a model of its own, ``y = argmax(W x + b)`` with W, b ~ N(u_k, 1) and u_k ~ N(0, 1),
    and features ``x ~ N(v_k, Σ)`` with v_k ~ N(B_k, 1), B_k ~ N(0, 1), Σ_jj = j^−1.2.
    """
    rng = np.random.default_rng([seed, 1])
    silos, features, classes = 100, 60, 10
    sizes = rng.lognormal(4.0, 2.0, size=silos).astype(np.int64) + 50
    deviations = np.arange(1, features + 1) ** -0.6
    made = []
    for size in sizes.tolist():
        mean_weight, mean_feature = rng.normal(size=2)
        weights = rng.normal(mean_weight, 1.0, size=(features, classes))
        biases = rng.normal(mean_weight, 1.0, size=classes)
        centre = rng.normal(mean_feature, 1.0, size=features)
        x = rng.normal(centre, deviations, size=(size, features))
        y = (x @ weights + biases).argmax(axis=1)
        made.append(_held_out(x.astype(np.float32)[:, None, None], y, classes, rng))
    return made


def _held_out(
    x: NDArray[np.float32], y: NDArray[np.int64], num_classes: int, rng: np.random.Generator
) -> SiloData:
    """Nine tenths for training, at least one sample on either side."""
    order = rng.permutation(len(x))
    count = min(max(round(TEST_SHARE * len(x)), 1), len(x) - 1)
    test, train = order[:count], order[count:]
    return SiloData(x[train], y[train], x[test], y[test], num_classes)


class TestSets:
    """All silos' test data on the server's side, stacked, to measure models on many silos at once.

    The benchmark alone can do that: a coordinator never sees a silo's data.

    Attributes:
        num_examples: of all silos.
    """

    __test__ = False  # for pytest: no test class

    def __init__(self, task: Task, silos: Sequence[SiloData]) -> None:
        self._task, self._model = task, task.model()
        self._all = Held(
            torch.from_numpy(np.concatenate([s.x_test for s in silos])),
            torch.from_numpy(np.concatenate([s.y_test for s in silos])),
        )
        ends = np.cumsum([0, *(len(s.y_test) for s in silos)])
        self.num_examples = int(ends[-1])
        self._rows = [torch.arange(start, end) for start, end in pairwise(ends.tolist())]

    def evaluate(self, weights: Model, silos: Sequence[int]) -> Evaluation:
        """Loss and error of a model on the test data of these silos, by number; at least one."""
        rows = torch.cat([self._rows[i] for i in silos])
        some = self._all
        if len(rows) < len(some):
            some = some.take(rows)
        load_weights(self._model, weights)
        return evaluate(self._task, self._model, some)


def all_silos(name: str, folder: str, seed: int) -> tuple[Task, list[SiloData]]:
    """The task of a data set, and every silo's data.

    Raises:
        TaskError: no such data set, or its files are not in the folder.
    """
    if name not in DATASETS:
        raise TaskError(f"data set must be one of {', '.join(DATASETS)}. Got {name!r}.")
    task = TASKS[name.replace("-", "_")]()
    return task, task.cut_all(folder, seed)


_IMAGE: dict[str, Any] = {"shape": (1, 28, 28)}
_MNIST = partial(_Shared, cut_all=mnist_silos, num_classes=10, **_IMAGE)
_LETTERS = partial(_Shared, cut_all=letters_silos, num_classes=26, **_IMAGE)
mnist_mclr = partial(_MNIST, "mnist-mclr", "mclr")
mnist_mlp = partial(_MNIST, "mnist-mlp", "mlp-128")
femnist_mclr = partial(_LETTERS, "femnist-mclr", "mclr")
femnist_mlp = partial(_LETTERS, "femnist-mlp", "mlp-512")
synthetic_mclr = partial(
    _Shared, "synthetic-mclr", "mclr", cut_all=synthetic_silos, shape=(1, 1, 60), num_classes=10
)
TASKS = {
    "mnist_mclr": mnist_mclr,
    "mnist_mlp": mnist_mlp,
    "femnist_mclr": femnist_mclr,
    "femnist_mlp": femnist_mlp,
    "synthetic_mclr": synthetic_mclr,
}

_LETTERS_NOTE = (
    "Letters a–j of EMNIST's subset with 1,200 of each: silos are smaller than the paper's by one "
    "factor, 0.55 (10,105 samples in all, the paper's 18,345), and have no writers."
)
_ROWS: dict[str, tuple[int, float, float, int, str]] = {
    "mnist-mclr": (1000, 0.03, 1.0, 3, ""),
    "mnist-mlp": (1000, 0.03, 1.0, 3, ""),
    "femnist-mclr": (200, 0.003, 1.0, 5, _LETTERS_NOTE),
    "femnist-mlp": (200, 0.003, 1.0, 5, _LETTERS_NOTE),
    "synthetic-mclr": (100, 0.01, 1.0, 5, ""),
}
DATASETS = {
    name: Dataset(f"benchmarks.papers.fedgroup.data:{name.replace('-', '_')}", *row)
    for name, row in _ROWS.items()
}
"""Table III's rows that can be made here; m, η and μ are the paper's."""
