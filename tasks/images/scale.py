"""Scaling of pixels from 0–255 to what a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError


@dataclass(frozen=True)
class Scale:
    """The map ``(pixel − shift) / width``, by scalars or arrays for images with channels last."""

    shift: float | NDArray[np.float32]
    width: float | NDArray[np.float32]

    def __call__(self, images: NDArray[Any]) -> NDArray[np.float32]:
        """Scale pixels 0–255 of any type to float32."""
        return ((images.astype(np.float32) - self.shift) / self.width).astype(np.float32)

    def described(self) -> dict[str, Any]:
        """Return the scale as JSON values, for ``Task.prepared``."""
        return {
            "pixels": "from 0 to 255, then (pixel − shift) / width",
            "shift": np.asarray(self.shift).tolist(),
            "width": np.asarray(self.width).tolist(),
        }


SYMMETRIC = Scale(127.5, 127.5)
FIXED = {"symmetric": SYMMETRIC, "unit": Scale(0.0, 255.0)}


def per_channel(means: tuple[float, ...], deviations: tuple[float, ...]) -> Scale:
    """Return the scale by channel means and standard deviations of pixels from 0 to 1."""
    shift, width = (255 * np.asarray(numbers, np.float32) for numbers in (means, deviations))
    return Scale(shift, width)


def read_scale(normalise: str, channels: int, *, others: tuple[str, ...] = ()) -> Scale:
    """Return the scale that a word or numbers define.

    Args:
        normalise: ``symmetric`` = pixel / 127.5 − 1; ``unit`` = pixel / 255; or channel means and
            deviations of pixels from 0 to 1, as ``0.49,0.48,0.45/0.25,0.24,0.26``; one number
            applies to all channels.
        others: further words that the caller accepts, for the error message.

    Raises:
        TaskError: the text is neither, or the numbers do not fit.
    """
    if (fixed := FIXED.get(normalise)) is not None:
        return fixed
    try:
        means, deviations = (
            tuple(float(number) for number in part.split(",")) for part in normalise.split("/")
        )
    except ValueError:
        raise TaskError(
            f"normalise must be {', '.join([*FIXED, *others])}, or means and deviations of pixels "
            f"from 0 to 1, such as 0.5/0.25. Got {normalise!r}."
        ) from None
    if {len(means), len(deviations)} - {1, channels}:
        raise TaskError(
            f"normalise={normalise} has {len(means)} means and {len(deviations)} deviations. "
            f"Expected one, or one for each of {channels} channels."
        )
    if not np.isfinite([*means, *deviations]).all() or min(deviations) <= 0:
        raise TaskError(
            f"normalise={normalise}: all numbers must be finite, and deviations above 0."
        )
    with np.errstate(all="ignore"):
        scale = per_channel(means, deviations)
        black_and_white = scale(np.array([[0.0], [255.0]]))
    if not np.isfinite(black_and_white).all():
        raise TaskError(
            f"normalise={normalise}: scaled pixels exceed the range of float32. Expected means "
            "and deviations of pixels from 0 to 1, such as 0.5/0.25."
        )
    return scale
