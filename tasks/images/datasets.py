"""Built-in image tasks: MNIST, FashionMNIST, EMNIST letters, CIFAR-10.

Option ``data`` names a folder with the user's data (layouts: ``image_files``). By default the whole
folder is this silo's data. In a simulation many silos share one folder: ``split`` and its keys
(``tasks.splits``) cut it, and ``silo`` selects the share; every silo computes the same cut from the
same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import Option, Samples, SiloData, Task, TaskError, read_array
from coterie.tasks.images.image_files import ImageFiles, Images, RawImages, read_images
from coterie.tasks.images.scale import Scale, per_channel, read_scale
from coterie.tasks.options import read_options
from coterie.tasks.splits import Share
from coterie.tasks.splits.options import (
    SPLIT_KEYS,
    SPLIT_OPTIONS,
    check_split,
    shares_of,
    silos_asked,
)
from coterie.tasks.splits.shifts import permutation, rotate

if TYPE_CHECKING:
    import torch

OPTIONS: dict[str, Option] = {
    "data": "",
    "download": False,
    "first-label": 0,
    "normalise": "symmetric",
    "train": 0,
    "test": 0,
    "rotation": 0.0,
    "label-permutation": 0,
    **SPLIT_OPTIONS,
}
GREY = (28, 28)

Part = tuple[NDArray[np.float32], NDArray[np.int64]]
_Key = tuple[int, float, bytes]


class NamedNetwork(Task):
    """An image task with a choice of networks.

    ``models`` are names in ``coterie.tasks.models.NETWORKS``, the default first; ``shape`` is that
    of one sample as the model sees it, (C, H, W).
    """

    models: tuple[str, ...]
    shape: tuple[int, int, int]

    def __init__(self, *, model: str = "") -> None:
        self.model_name = model or self.models[0]
        if self.model_name.removesuffix("+groupnorm") not in self.models:
            raise TaskError(
                f"task {self.name!r} has no model {model!r}. It has: {', '.join(self.models)}, "
                "and each as NAME+groupnorm."
            )

    def model(self) -> torch.nn.Module:
        """Return the network that the task's name selects, as representation and head."""
        from coterie.tasks.models import named

        return named(self.model_name, shape=self.shape, num_classes=self.num_classes)


class ImageTask(NamedNetwork):
    """Images from a folder, with a choice of networks.

    Options:
        data: the folder (or an ``.npz``). Required.
        download: fetch missing data through torchvision.
        first-label: number of the first class in the files.
        normalise: as in ``tasks.images.scale.read_scale``; or ``standard`` = the channel means and
            deviations published for this data set; or ``per-pixel`` = each pixel standardised over
            the whole folder, training and test part (FedGroup).
        train, test: maximum number of this silo's samples, drawn at random; 0 = all.
        rotation: degrees anticlockwise, any angle.
        label-permutation: number of a seeded permutation of the labels; 0 = none.
        split: ``none`` or a kind of ``tasks.splits``, with ``silos``, ``silo`` (from 0), and the
            kind's keys as ``split-alpha``, ``split-shards``, ….
        split-seed: seed of the split and of all other randomness here.
        test-share: 0 = test on this silo's share of the folder's test part; otherwise both parts
            are joined before the cut, and each silo keeps this share for testing.

    Attributes:
        standard: the scale of ``normalise=standard``.
        mirrored: fill the corners of a rotated image by reflection, as FedCollab's code does, not
            with black, which is the background of digits and clothing but not of photographs.
    """

    standard: Scale
    mirrored = False
    files: ImageFiles
    shape = (1, *GREY)
    first_label = 0

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Load this silo's data; raise ``TaskError`` if folder, split or options are invalid."""
        chosen = self._options(options)
        if chosen["split"] != "none":
            if chosen["silo"] < 0:
                raise TaskError("with a split, option 'silo' must give the silo's number, from 0.")
            (data,) = self.load_all(options, [chosen["silo"]])
            return data
        raw = self._raw(chosen)
        share = Share(np.arange(len(raw.train.y)), np.arange(len(raw.test.y)))
        return self._silo(raw, share, chosen, self._scale(chosen, raw), silo=0)

    def load_all(
        self, options: Mapping[str, Option], silos: Sequence[int] | None = None
    ) -> list[SiloData]:
        """Load silos of a split from one reading of the folder. Equal test sets share one array."""
        chosen = self._options(options)
        if chosen["split"] == "none":
            raise TaskError("several silos need a split: name its kind with option 'split'.")
        raw = self._raw(chosen)
        scale = self._scale(chosen, raw)
        tests = None if chosen["test-share"] else raw.test.y
        shares = shares_of(
            options, chosen, raw.train.y, test_labels=tests, num_classes=self.num_classes
        )
        made: dict[_Key, Part] = {}
        return [
            self._silo(raw, shares[silo], chosen, scale, silo=silo, made=made)
            for silo in silos_asked(silos, len(shares))
        ]

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Read images (n, H, W) or (n, H, W, 3), scaled like the silo's own but not rotated.

        Only bytes (uint8) are scaled; numbers of another type are unchanged.
        """
        chosen = self._options(options)
        images = read_array(file)
        if images.dtype != np.uint8:
            return Samples(np.asarray(images, dtype=np.float32))
        channels, *size = self.shape
        expected = tuple(size) if channels == 1 else (*size, channels)
        if images.shape[1:] != expected:
            raise TaskError(
                f"images in {file} must be uint8 of shape {('n', *expected)}. Got {images.shape}."
            )
        return Samples(scaled(images, self._scale(chosen)))

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """Describe axes and scale; empty for ``normalise=per-pixel``."""
        chosen = self._options(options)
        if chosen["normalise"] == "per-pixel":
            return {}
        return {"axes": "channels, height, width", **self._scale(chosen).described()}

    def _options(self, options: Mapping[str, Option]) -> dict[str, Any]:
        defaults = {**OPTIONS, **SPLIT_KEYS, "first-label": self.first_label}
        chosen = read_options(self.name, options, defaults)
        check_bounds(chosen, ("train", "test", "label-permutation", "split-seed"))
        check_split(options, chosen)
        return chosen

    def _raw(self, chosen: Mapping[str, Any]) -> RawImages:
        raw = read_images(self.name, chosen["data"], self.files, download=chosen["download"])
        first = chosen["first-label"]
        train, test = (Images(part.x, part.y - first) for part in (raw.train, raw.test))
        for y in (train.y, test.y):
            if len(y) and not 0 <= y.min() <= y.max() < self.num_classes:
                raise TaskError(
                    f"labels of task {self.name!r} must be in [{first}, "
                    f"{first + self.num_classes - 1}]. Got {y.min() + first} to {y.max() + first}. "
                    "If they count from elsewhere, set first-label."
                )
        if not chosen["test-share"]:
            return RawImages(train, test)
        both = join(train, test)
        return RawImages(both, both)  # both parts of a share are indices into the whole

    def _scale(self, chosen: Mapping[str, Any], raw: RawImages | None = None) -> Scale:
        """Return the scale; ``raw`` is the folder's content if already read."""
        if chosen["normalise"] == "per-pixel":
            return _per_pixel(raw or self._raw(chosen))
        if chosen["normalise"] == "standard":
            return self.standard
        return read_scale(str(chosen["normalise"]), self.shape[0], others=("standard", "per-pixel"))

    def _silo(
        self,
        raw: RawImages,
        share: Share,
        chosen: Mapping[str, Any],
        scale: Scale,
        *,
        silo: int,
        made: dict[_Key, Part] | None = None,
    ) -> SiloData:
        """Return one silo's data; ``made`` caches test sets that several silos share."""
        rng = np.random.default_rng([chosen["split-seed"], 2, silo])
        train = cap(share.train, chosen["train"], rng)
        test = cap(share.test, chosen["test"], rng)
        names = permutation(
            self.num_classes, seed=chosen["split-seed"], number=chosen["label-permutation"]
        )
        if share.labels is not None:
            names = names[share.labels]
        turn = share.rotation + chosen["rotation"]

        def part(images: Images, indices: NDArray[np.int64]) -> Part:
            turned = rotate(images.x[indices], turn, mirrored=self.mirrored)
            return scaled(turned, scale), names[images.y[indices]]

        key = (id(share.test), turn, names.tobytes())
        made = {} if made is None else made
        if chosen["test"] or key not in made:  # with a cap each silo has a draw of its own
            made[key] = part(raw.test, test)
        return SiloData(*part(raw.train, train), *made[key], self.num_classes)


class Mnist(ImageTask):
    """Handwritten digits, 1×28×28, 10 classes."""

    name = "mnist"
    num_classes = 10
    models = ("cnn-fedgenp", "mclr", "mlp-128", "mlp-64", "mlp-200", "mlp-512", "cnn-fedgen")
    files = ImageFiles(("mnist.npz",), GREY, "MNIST/raw", torchvision=("MNIST", {}))
    standard = per_channel((0.1307,), (0.3081,))


class FashionMnist(ImageTask):
    """Pieces of clothing, 1×28×28, 10 classes."""

    name = "fashion-mnist"
    num_classes = 10
    models = ("mlp-64", "mlp-200", "mclr", "mlp-128", "mlp-512", "cnn-fedgenp", "cnn-fedgen")
    files = ImageFiles(
        ("fashion_mnist.npz",), GREY, "FashionMNIST/raw", torchvision=("FashionMNIST", {})
    )
    standard = per_channel((0.2860,), (0.3530,))


class EmnistLetters(ImageTask):
    """Handwritten letters, upright, 1×28×28, 26 classes. The files' labels count from 1."""

    name = "emnist-letters"
    num_classes = 26
    first_label = 1
    models = ("cnn-fedgenp", "mclr", "mlp-512", "mlp-128", "mlp-64", "mlp-200", "cnn-fedgen")
    files = ImageFiles(
        ("emnist_letters.npz",),
        GREY,
        "EMNIST/raw",
        ("emnist-letters-train", "emnist-letters-test"),
        transposed=True,
        torchvision=("EMNIST", {"split": "letters"}),
    )
    standard = per_channel((0.1722,), (0.3309,))


class Cifar10(ImageTask):
    """Photographs, 3×32×32, 10 classes."""

    name = "cifar10"
    num_classes = 10
    models = ("cnn-hcct", "cnn-fedcollab", "mclr")
    shape = (3, 32, 32)
    mirrored = True
    files = ImageFiles(
        ("cifar10.npz",), (32, 32, 3), batches="cifar-10-batches-py", torchvision=("CIFAR10", {})
    )
    standard = per_channel((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def scaled(images: NDArray[Any], scale: Scale) -> NDArray[np.float32]:
    """Scale pixels 0–255 and put the channels first."""
    x = scale(images)
    return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))


def check_bounds(chosen: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise ``TaskError`` for negative numbers."""
    for key in keys:
        if chosen[key] < 0:
            raise TaskError(f"{key} must be at least 0. Got {chosen[key]}.")


def cap(part: NDArray[np.int64], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return at most ``most`` of the indices, drawn at random and sorted; 0 = all."""
    if not most or most >= len(part):
        return part
    return np.sort(rng.choice(part, size=most, replace=False))


def join(first: Images, second: Images) -> Images:
    """Concatenate both sets."""
    return Images(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]))


def _per_pixel(raw: RawImages) -> Scale:
    """Return every pixel's mean and deviation, from integer sums: no float copy of the data."""
    parts = [raw.train.x] if raw.test is raw.train else [raw.train.x, raw.test.x]
    count = sum(len(images) for images in parts)
    if count == 0:
        raise TaskError("normalise=per-pixel needs at least one image in the folder.")
    total, squares = 0, 0
    for images in parts:
        for start in range(0, len(images), 4096):
            block = images[start : start + 4096].astype(np.int64)
            total, squares = total + block.sum(axis=0), squares + (block * block).sum(axis=0)
    mean = np.asarray(total) / count
    deviation = np.sqrt(np.maximum(np.asarray(squares) / count - mean**2, 0.0))
    # 0.001 as in the generator of FedProx: many pixels of MNIST's margin are always 0
    return Scale(mean.astype(np.float32), (deviation + 0.001).astype(np.float32))
