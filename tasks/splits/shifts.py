"""Domain shifts: the same data with rotated images or renamed labels.

They turn one data set into several organisations (FedCollab: feature shift and concept shift).
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError


def rotate(images: NDArray[Any], degrees: float, *, mirrored: bool = False) -> NDArray[Any]:
    """Rotate images (n, H, W) or (n, H, W, C) anticlockwise about their centre.

    Multiples of 90° are exact and keep the dtype; H and W change places at 90° and 270°. Other
    angles are bilinear and give float32. ``mirrored`` fills from outside by reflection instead of
    0, because black corners of a photograph would reveal the angle.
    """
    if not isfinite(degrees):
        raise TaskError(f"rotation must be a finite number of degrees. Got {degrees}.")
    if degrees % 90 == 0:
        return np.rot90(images, int(degrees // 90) % 4, axes=(1, 2))
    height, width = images.shape[1:3]
    rows, columns = _sources(height, width, degrees)
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = (rows - top).astype(np.float32), (columns - left).astype(np.float32)
    tail = (1,) * (images.ndim - 3)
    out = np.zeros(images.shape, dtype=np.float32)
    for row, by_row in ((top, 1 - down), (top + 1, down)):
        for column, by_column in ((left, 1 - right), (left + 1, right)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = np.where(mirrored | inside, by_row * by_column, np.float32(0))
            weight = weight.reshape(height, width, *tail)
            out += weight * images[:, _reflected(row, height), _reflected(column, width)]
    return out


def _reflected(index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return indices reflected at both ends; those inside are unchanged."""
    around = index % (2 * size)
    return np.minimum(around, 2 * size - 1 - around)


def _sources(
    height: int, width: int, degrees: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the source row and column of each pixel of the rotated image, each of shape (H, W)."""
    angle = np.deg2rad(degrees)
    y = np.arange(height)[:, None] - (height - 1) / 2
    x = np.arange(width)[None, :] - (width - 1) / 2
    rows = np.cos(angle) * y + np.sin(angle) * x + (height - 1) / 2
    columns = np.cos(angle) * x - np.sin(angle) * y + (width - 1) / 2
    return rows, columns


def permutation(num_classes: int, *, seed: int, number: int) -> NDArray[np.int64]:
    """Return the ``number``-th label permutation of this seed; number 0 changes nothing.

    Its shape is (num_classes,): the label that each label becomes (FedCollab's concept shift).
    """
    if number == 0:
        return np.arange(num_classes)
    if number < 0 or seed < 0:
        raise TaskError(f"a permutation's number and seed must be ≥ 0. Got {number}, {seed}.")
    return np.random.default_rng([seed, 1, number]).permutation(num_classes)
