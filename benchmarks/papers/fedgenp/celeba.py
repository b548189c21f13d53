"""CelebA of FedGenP's paper: 25 silos with ten celebrities each; is the face smiling?

CelebA is not among the project's data, and its terms allow research only. Whoever has it, in the
layout that torchvision downloads, names the folder that holds ``celeba``:

    celeba/identity_CelebA.txt      000001.jpg 2880
    celeba/list_attr_celeba.txt     number of images; names of attributes; 000001.jpg -1 1 -1 …
    celeba/img_align_celeba/000001.jpg, …

As LEAF has it, celebrities with fewer than five images are left out and each keeps a tenth of its
images for testing; as FedGen's script has it, 250 of them are drawn, images become 84×84 in
colour, and the network is that of its released code. Pixels are scaled to −1..1, where that code
feeds 0..255 to a convolution with BatchNorm behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from coterie.tasks.base import Option, SiloData, Task, TaskError
from coterie.tasks.images.scale import SYMMETRIC
from coterie.tasks.models import SplitModel

SILOS, EACH = 25, 10
"""Silos, and celebrities of each."""
FEWEST, TEST_SHARE = 5, 0.1
SIDE, SEED = 84, 42
ATTRIBUTE = "Smiling"


class CelebA(Task):
    """Options: ``data``, the folder that holds ``celeba``; ``silo``, from 0."""

    name, num_classes = "celeba", 2

    def model(self) -> torch.nn.Module:
        """Conv 16, 32, 64, each with stride 2, BatchNorm, ReLU and pooling; 32 latents."""
        layers: list[torch.nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [
                torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
                torch.nn.BatchNorm2d(outputs),
                torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
            ]
        layers += [torch.nn.Flatten(), torch.nn.Linear(64, 32)]
        return SplitModel(torch.nn.Sequential(*layers), torch.nn.Linear(32, 2))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        return celeba_data(str(options["data"]))[int(options["silo"])]


@lru_cache(maxsize=1)
def celeba_data(folder: str, silos: int = SILOS, each: int = EACH) -> list[SiloData]:
    """All silos' data, read once.

    Raises:
        TaskError: a file is missing or says something else, or there are too few celebrities.
    """
    root = Path(folder) / "celeba"
    people = [row for row in _lines(root / "identity_CelebA.txt") if len(row) == 2]
    files, identities = (np.array(column) for column in zip(*people, strict=True))
    smiling = _smiling(root / "list_attr_celeba.txt", files)

    def part(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = [_image(root / "img_align_celeba" / files[row]) for row in rows]
        return SYMMETRIC(np.stack(images)), smiling[rows]

    cut = celebrities(identities, silos=silos, each=each)
    return [SiloData(*part(train), *part(test), 2) for train, test in cut]


def celebrities(
    identities: np.ndarray, *, silos: int = SILOS, each: int = EACH
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test images of every silo.

    Args:
        identities: who is on an image, shape (images,), any type.
        silos, each: silos, and celebrities of each.

    Raises:
        TaskError: there are fewer celebrities with five images or more.
    """
    names, counts = np.unique(identities, return_counts=True)
    known = names[counts >= FEWEST]
    if len(known) < silos * each:
        raise TaskError(
            f"{silos} silos of {each} celebrities need {silos * each} with {FEWEST} images or "
            f"more each. There are {len(known)}."
        )
    rng = np.random.default_rng(SEED)
    chosen = rng.choice(known, size=(silos, each), replace=False)
    cut = []
    for group in chosen:
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for name in group:
            rows = rng.permutation(np.flatnonzero(identities == name))
            tests = max(1, int(TEST_SHARE * len(rows)))
            parts[0].append(rows[tests:])
            parts[1].append(rows[:tests])
        cut.append((np.concatenate(parts[0]), np.concatenate(parts[1])))
    return cut


def _lines(file: Path) -> list[list[str]]:
    """A file's lines, each as its words."""
    try:
        return [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise TaskError(f"CelebA: {file} cannot be read: {error.strerror}.") from None


def _smiling(file: Path, images: np.ndarray) -> np.ndarray:
    """1 where an image's face smiles, else 0; shape (images,), int64."""
    lines = _lines(file)
    if len(lines) < 2 or ATTRIBUTE not in lines[1]:
        raise TaskError(f"CelebA: {file} has no attribute {ATTRIBUTE} in its second line.")
    column = lines[1].index(ATTRIBUTE) + 1
    values = {row[0]: row[column] == "1" for row in lines[2:] if len(row) > column}
    missing = [image for image in images if image not in values]
    if missing:
        raise TaskError(f"CelebA: {file} does not say whether {missing[0]} is {ATTRIBUTE}.")
    return np.array([values[image] for image in images], dtype=np.int64)


def _image(file: Path) -> np.ndarray:
    """(3, 84, 84), uint8."""
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB").resize((SIDE, SIDE))).transpose(2, 0, 1)
    except OSError as error:
        raise TaskError(f"CelebA: {file} cannot be read: {error}.") from None
