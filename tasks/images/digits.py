"""scikit-learn's handwritten digits (1,797 real images of 8×8), with optional domain shifts.

The data come with scikit-learn, so nothing is downloaded. ``rotation`` (feature shift) and
``label-shift`` (concept shift: the same image means another class) let one machine simulate several
organisations with different data.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import Option, SiloData, Task, TaskError
from coterie.tasks.options import read_options
from coterie.tasks.splits import Share
from coterie.tasks.splits.options import (
    SPLIT_KEYS,
    SPLIT_OPTIONS,
    check_split,
    shares_of,
    silos_asked,
)
from coterie.tasks.splits.shifts import rotate

if TYPE_CHECKING:
    import torch

NUM_SAMPLES = 1797

OPTIONS: dict[str, Option] = {
    "train": 100,
    "test": 70,
    "skip": 0,
    "split-seed": 0,
    "rotation": 0,
    "label-shift": 0,
    **SPLIT_OPTIONS,
    "test-share": 0.3,
}
OWN_CUT = ("train", "test", "skip")


class Digits(Task):
    """Ten classes, images of 1×8×8, a small convolutional network.

    Options:
        train, test: number of training and test samples.
        skip: first sample of this silo in the seeded order; silos with disjoint ranges share no
            sample.
        split-seed: seed of that order, or of the split.
        split: ``none``, or a kind of ``tasks.splits`` that replaces ``train``, ``test`` and
            ``skip``; with ``silos``, ``silo`` (from 0), ``test-share`` and the kind's keys as
            ``split-alpha``, ….
        rotation: degrees anticlockwise, a multiple of 90.
        label-shift: added to every label, modulo 10.
    """

    name = "digits"
    num_classes = 10

    def model(self) -> torch.nn.Module:
        """Return two convolutions (16, 32 channels) with a linear head: 6,090 parameters."""
        from coterie.tasks.models import SplitModel, small_cnn

        return SplitModel(*small_cnn(num_classes=self.num_classes))

    def discriminator_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return pixels scaled to suit the usual learning rate of discriminators, 0.01."""
        return 10 * x.flatten(1)

    def discriminator(self, num_features: int) -> torch.nn.Module:
        """Return a discriminator for a few dozen samples and labels with differing meanings."""
        from coterie.tasks.models import LabelwiseDiscriminator

        return LabelwiseDiscriminator(num_features, self.num_classes)

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        return {"axes": "channels (1, grey), height, width", "pixels": "from 0 to 16, then / 16"}

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Return this silo's share of the embedded data set."""
        chosen = self._options(options)
        if chosen["split"] != "none":
            (data,) = self.load_all(options, [chosen["silo"]])
            return data
        train, test, skip = chosen["train"], chosen["test"], chosen["skip"]
        order = np.random.default_rng(chosen["split-seed"]).permutation(NUM_SAMPLES)
        mine = order[skip : skip + train + test]
        return self._silo(Share(mine[:train], mine[train:]), chosen)

    def load_all(
        self, options: Mapping[str, Option], silos: Sequence[int] | None = None
    ) -> list[SiloData]:
        chosen = self._options(options)
        if chosen["split"] == "none":
            raise TaskError("several silos need a split: name its kind with option 'split'.")
        _, labels = _digits()
        shares = shares_of(options, chosen, labels, test_labels=None, num_classes=self.num_classes)
        return [self._silo(shares[silo], chosen) for silo in silos_asked(silos, len(shares))]

    def _options(self, options: Mapping[str, Option]) -> dict[str, Any]:
        chosen = read_options(self.name, options, {**OPTIONS, **SPLIT_KEYS})
        check_split(options, chosen)
        if chosen["split"] == "none":
            _check_cut(chosen)
        elif stray := [key for key in OWN_CUT if key in options]:
            raise TaskError(f"option {stray[0]!r} cannot be combined with a split. Leave it out.")
        if chosen["rotation"] % 90:
            raise TaskError(f"rotation must be a multiple of 90. Got {chosen['rotation']}.")
        return chosen

    def _silo(self, share: Share, chosen: Mapping[str, Any]) -> SiloData:
        images, labels = _digits()
        names = np.arange(self.num_classes) if share.labels is None else share.labels

        def part(indices: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            turned = rotate(images[indices], share.rotation + chosen["rotation"])[:, None]
            x = np.ascontiguousarray(turned, dtype=np.float32) / np.float32(16)
            return x, names[(labels[indices] + chosen["label-shift"]) % self.num_classes]

        return SiloData(*part(share.train), *part(share.test), self.num_classes)


def _check_cut(chosen: Mapping[str, int]) -> None:
    for key in ("train", "test"):
        if chosen[key] < 1:
            raise TaskError(f"{key} must be at least 1. Got {chosen[key]}.")
    if chosen["split-seed"] < 0:
        raise TaskError(f"split-seed must be at least 0. Got {chosen['split-seed']}.")
    if chosen["skip"] < 0 or chosen["skip"] + chosen["train"] + chosen["test"] > NUM_SAMPLES:
        raise TaskError(
            f"skip + train + test must be in [2, {NUM_SAMPLES}], the size of the data set. "
            f"Got {chosen['skip']} + {chosen['train']} + {chosen['test']}."
        )


@lru_cache(maxsize=1)
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return images (1797, 8, 8) with values 0–16, and labels (1797,).

    Reads the file inside scikit-learn without importing scikit-learn, which would cost every silo
    process a second and 100 MB.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise TaskError("the digits come with scikit-learn, which is not installed here.")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        with gzip.open(file, "rt") as text:
            table = np.loadtxt(text, delimiter=",")
    else:  # a scikit-learn that keeps the file elsewhere
        from sklearn.datasets import load_digits

        bunch = load_digits()
        table = np.column_stack([bunch.data, bunch.target])
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
