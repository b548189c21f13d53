"""FedCollab's silos: those of the paper's scripts, and pairs whose distance is known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

import numpy as np
import torch

from benchmarks.kit import Shared
from coterie.tasks import Task, load_task
from coterie.tasks.base import Option, SiloData
from coterie.tasks.images.datasets import Cifar10, FashionMnist, ImageTask, join, scaled
from coterie.tasks.images.image_files import ImageFiles, read_images
from coterie.tasks.images.scale import per_channel

fashion_mnist = partial(Shared, "fashion-mnist/mlp-200")
cifar10 = partial(Shared, "cifar10/cnn-fedcollab")


def black_corners() -> Task:
    """CIFAR-10 with black in the corners of turned images, which tells the angle."""
    task = Cifar10(model="cnn-fedcollab")
    task.mirrored = False
    return task


class CoarseCifar100(ImageTask):
    """CIFAR-100 by its 20 coarse labels; the network is torchvision's pre-trained ResNet-18.

    ``cifar100_coarse.npz`` has ``x_train`` (50000, 32, 32, 3), ``y_train`` in [0, 20), ``x_test``
    and ``y_test``. The weights are fetched by torchvision, or lie where it keeps them.
    """

    name = "cifar100-coarse"
    num_classes = 20
    models = ("resnet18",)
    shape = (3, 32, 32)
    mirrored = True
    files = ImageFiles(("cifar100_coarse.npz",), (32, 32, 3))
    standard = per_channel((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))

    def model(self) -> torch.nn.Module:
        """The paper's: all layers but the last know ImageNet."""
        from torchvision.models import resnet18  # takes two seconds to load

        made: torch.nn.Module = resnet18(weights="DEFAULT")
        made.fc = torch.nn.Linear(512, self.num_classes)
        return made


cifar100 = partial(Shared, f"{__name__}:CoarseCifar100")
cifar10_corners = partial(Shared, f"{__name__}:black_corners")

OWN_SHARE, SMALL_SHARE, TEST_SHARE = 0.25, np.exp(-5.0), 1 / 7
"""Of a label that one group alone holds; of a small silo; of a silo's samples, for testing."""

HELD = np.zeros((4, 10))
"""The part of each label's samples that each group of five silos holds."""
HELD[:2, 1:4] = HELD[2:, 6:9] = 0.5
HELD[[0, 1, 2, 3], [0, 4, 5, 9]] = OWN_SHARE


def published_silos(labels: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test samples of 20 silos, the very ones of the paper's scripts.

    They shuffle with numpy's legacy generator, label by label, and round shares to integers by
    adding 0.49; a small silo throws away what it does not train on.

    Args:
        labels: shape (n,), in [0, 10): FashionMNIST's training part, then its test part.
        seed: their data seed.

    Returns:
        For each silo the indices to train on and to test on.
    """
    rng = np.random.RandomState(seed)

    def shuffled(y: np.ndarray) -> list[np.ndarray]:
        found = [np.flatnonzero(y == label) for label in range(10)]
        for rows in found:
            rng.shuffle(rows)
        return found

    def cut(rows: list[np.ndarray], shares: np.ndarray) -> list[np.ndarray]:
        """``shares`` (parts, 10) of each label's rows, one part after the other."""
        counts = np.array([len(r) for r in rows])
        ends = np.vstack([np.zeros(10), np.cumsum(shares, axis=0) * counts + 0.49]).astype(int)
        return [
            np.concatenate([r[ends[i, k] : ends[i + 1, k]] for k, r in enumerate(rows)])
            for i in range(len(shares))
        ]

    silos = []
    for number, held in enumerate(cut(shuffled(labels), np.repeat(HELD, 5, axis=0) / 5)):
        rng.shuffle(held)
        used = (1 - TEST_SHARE) * (1.0 if number < 10 else SMALL_SHARE)
        parts = np.array([used, 1 - TEST_SHARE - used, TEST_SHARE])
        kept, _, test = cut(shuffled(labels[held]), np.tile(parts[:, None], (1, 10)))
        silos.append((held[kept], held[test]))
    return silos


class PublishedFashion(Shared):
    """FashionMNIST of the paper's silos. Options: ``data``, ``split-seed``, ``silo``."""

    def __init__(self) -> None:
        super().__init__("fashion-mnist/mlp-200")

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        silos = _published_fashion(str(options["data"]), int(options["split-seed"]))
        return silos[int(options["silo"])]


@lru_cache(maxsize=1)
def _published_fashion(folder: str, seed: int) -> list[SiloData]:
    raw = read_images("fashion-mnist", folder, FashionMnist.files)
    pool = join(raw.train, raw.test)
    return [
        SiloData(
            *(scaled(pool.x[train], FashionMnist.standard), pool.y[train]),
            *(scaled(pool.x[test], FashionMnist.standard), pool.y[test]),
            10,
        )
        for train, test in published_silos(pool.y, seed)
    ]


class Known(Task):
    """Two FashionMNIST silos of one size whose total variation distance is known.

    Options:
        kind: ``label``: the first has labels 0–4, of the second a share has labels 5–9.
            ``concept``: a share of the second's labels is moved on by one. ``feature``: a share of
            the second's images is upside down (an image tells which way up it is: nearly exact).
        share: the distance.
        samples, seed, silo: how many, and which of the two (0 or 1).
        data: the folder.
    """

    name = "known"
    num_classes = 10

    def model(self) -> torch.nn.Module:
        """A small one; its training is of no interest here."""
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        x, y = _fashion(str(options["data"]))
        silo, count = int(options["silo"]), int(options["samples"])
        rng = np.random.default_rng([int(options["seed"]), silo])
        changed = rng.random(count) < float(options["share"]) * silo
        kind = options["kind"]
        low = np.flatnonzero(y < 5) if kind == "label" else np.arange(len(y))
        high = np.flatnonzero(y >= 5) if kind == "label" else low
        # The two silos draw from different halves, so that no image is in both.
        rows = np.where(changed, _half(high, rng, silo, count), _half(low, rng, silo, count))
        images, labels = x[rows].copy(), y[rows].copy()
        if kind == "concept":
            labels[changed] = (labels[changed] + 1) % 10
        if kind == "feature":
            images[changed] = images[changed][:, :, ::-1, ::-1]
        return SiloData(images, labels, images[:1], labels[:1], 10)


def _half(rows: np.ndarray, rng: np.random.Generator, silo: int, count: int) -> np.ndarray:
    return rng.permutation(rows[silo::2])[:count]


@lru_cache(maxsize=1)
def _fashion(folder: str) -> tuple[np.ndarray, np.ndarray]:
    data = load_task("fashion-mnist").load({"data": folder})
    assert isinstance(data, SiloData)
    return data.x_train, data.y_train


def true_distances() -> np.ndarray:
    """Total variation distances of the FashionMNIST silos' labels, (20, 20)."""
    shares = np.zeros((4, 10))
    shares[0, :4], shares[1, 1:5] = [1, 2, 2, 2], [2, 2, 2, 1]
    shares[2, 5:9], shares[3, 6:] = [1, 2, 2, 2], [2, 2, 2, 1]
    each = np.repeat(shares / 7, 5, axis=0)
    return np.asarray(np.abs(each[:, None] - each).sum(axis=2) / 2)
