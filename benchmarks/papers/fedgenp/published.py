"""The silos of FedGenP's released scripts, and how its released code measures.

Three things there differ from what its paper says, and all methods of its tables share them:

- the data are cut once, with a fixed seed, for all training seeds; a silo is tested on its
  twentieth of the test images of each label that it trains on, and on no other label;
- running statistics of BatchNorm are not exchanged: a silo trains and tests with its own;
- the learning rate falls by 1 % a round.

What is reported is the share of right answers over all silos' tests of the new global model, mean
of the five best rounds of each seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Context, Message

from benchmarks.kit import Shared
from coterie import wire
from coterie.client.work.weights import load_weights
from coterie.tasks.base import Option, SiloData, TaskError
from coterie.tasks.images.datasets import Mnist, scaled
from coterie.tasks.images.image_files import Images, read_images
from coterie.tasks.images.scale import SYMMETRIC
from coterie.wire import Model

SEED, SILOS, LEAST = 42, 20, 10
"""Of the scripts: seed of the cut, silos, fewest samples of a silo."""
MOST_TRIES = 1000
STATISTICS = ("running_mean", "running_var")

Rows = list[np.ndarray]


def published_silos(
    train: np.ndarray, test: np.ndarray, *, alpha: float, ratio: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test samples of 20 silos, the very ones of the released scripts for MNIST.

    With a ratio below 1 every label gives as many samples as one silo may have, which makes "10 %"
    of MNIST 3,000 samples in all, and "5 %" 1,500.

    Args:
        train, test: labels of MNIST's two parts, shape (n,), in [0, 10).
        alpha: of the Dirichlet distribution, > 0.
        ratio: share of the training part that is asked for, in (0, 1].

    Returns:
        For each silo the indices to train on and to test on.

    Raises:
        TaskError: no cut gives every silo ten samples.
    """
    rng = np.random.RandomState(SEED)
    labels = list(range(10))
    random.Random(SEED).shuffle(labels)
    most = ratio * len(train) / SILOS
    for _ in range(MOST_TRIES):
        parts: list[Rows] = [[] for _ in range(SILOS)]
        sizes = np.zeros(SILOS)
        for label in labels:
            rows = np.flatnonzero(train == label)
            rng.shuffle(rows)
            if ratio < 1:
                rows = rows[: int(min(most, int(ratio * len(rows))))]
            shares = rng.dirichlet(np.repeat(alpha, SILOS)) * (sizes < most)
            ends = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            for silo, part in enumerate(np.split(rows, ends)):
                parts[silo].append(part)
                sizes[silo] += len(part)
        if sizes.min() >= LEAST:
            break
    else:
        raise TaskError(
            f"{MOST_TRIES} cuts with α = {alpha} left a silo with fewer than {LEAST} samples: take "
            "a larger α or ratio."
        )
    return list(zip(map(np.concatenate, parts), _tests(parts, labels, test), strict=True))


def _tests(parts: list[Rows], labels: list[int], test: np.ndarray) -> Rows:
    """A twentieth of each label that a silo has, the next ones that nobody has yet."""
    left = {label: np.flatnonzero(test == label) for label in labels}
    each = {label: len(rows) // SILOS for label, rows in left.items()}
    own: Rows = []
    for held in parts:
        chosen = []
        for label, part in sorted(zip(labels, held, strict=True), key=lambda pair: pair[0]):
            if len(part):
                chosen.append(left[label][: each[label]])
                left[label] = left[label][each[label] :]
        own.append(np.concatenate(chosen))
    return own


class PublishedMnist(Shared):
    """MNIST of the released scripts. Options: ``data``, ``alpha``, ``ratio``, ``silo``."""

    def __init__(self) -> None:
        super().__init__("mnist/cnn-fedgen")

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        alpha, ratio = float(options["alpha"]), float(options["ratio"])
        return published_data(str(options["data"]), alpha, ratio)[int(options["silo"])]


@lru_cache(maxsize=1)
def published_data(folder: str, alpha: float, ratio: float) -> list[SiloData]:
    """All silos' data, read once."""
    raw = read_images("mnist", folder, Mnist.files)

    def part(images: Images, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return scaled(images.x[rows], SYMMETRIC), images.y[rows]

    cut = published_silos(raw.train.y, raw.test.y, alpha=alpha, ratio=ratio)
    return [SiloData(*part(raw.train, train), *part(raw.test, test), 10) for train, test in cut]


class OwnStatistics:
    """A ClientApp whose silos keep BatchNorm's running statistics to themselves.

    Args:
        app: what trains and tests.
    """

    def __init__(self, app: Callable[[Message, Context], Message]) -> None:
        self.app = app
        self._kept: dict[int, dict[str, np.ndarray]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """See ``ClientApp``."""
        kind = message.metadata.message_type
        if kind in (wire.TRAIN, wire.EVALUATE):
            given = wire.decode_arrays(message.content.array_records[wire.ARRAYS])
            own = self._kept.get(context.node_id, {})
            message.content[wire.ARRAYS] = wire.encode_arrays({**given, **own}, packed=True)
        reply = self.app(message, context)
        if kind == wire.TRAIN and not reply.has_error():
            trained = wire.decode_arrays(reply.content.array_records[wire.ARRAYS])
            self._kept[context.node_id] = {
                name: array for name, array in trained.items() if name.endswith(STATISTICS)
            }
        return reply

    @torch.no_grad()
    def accuracy(
        self, model: torch.nn.Module, shared: Model, tests: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> float:
        """Share of right answers of a model over all silos' tests, each with its own statistics.

        Args:
            model: of the task; its arrays are overwritten.
            shared: names to arrays, of the global model.
            tests: of every silo in order, images and labels.
        """
        model.eval()
        right = 0
        for number, (x, y) in enumerate(tests, start=1):
            load_weights(model, {**shared, **self._kept.get(number, {})})
            right += int((model(torch.from_numpy(x)).argmax(dim=1).numpy() == y).sum())
        return right / sum(len(y) for _, y in tests)
