"""Updates: the distance by which a training moves a model, and how to clip it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.wire.arrays import Model

PIECE: Final = 2**15
"""Numbers processed at a time."""
JOINT: Final = "sketch"
"""Name of a sketch; the sketch of one module has the module's name and a dot before it."""
SKETCH_NOISE: Final = 1.0
"""Length of a sketch's noise, as a multiple of the sketch's own."""
MOST_ROOM: Final = 2.0
"""A silo with more samples makes more steps: its limit grows with their square root, up to this."""


@dataclass(frozen=True)
class Limit:
    """The largest norm of an update; a longer one is clipped to it.

    All silos of a sum share one limit, so that it only makes their updates more alike: individual
    limits could reduce those of all other silos to nothing.

    Attributes:
        norm: Euclidean, > 0, for a silo with at most ``samples`` samples.
        samples: > 0; with more the limit is higher, up to ``MOST_ROOM`` times.
    """

    norm: float
    samples: float

    def of(self, samples: float) -> float:
        """Return the limit for a silo with this number of samples."""
        return self.norm * min(max(math.sqrt(samples / self.samples), 1.0), MOST_ROOM)


def sketch_noise(sketch: Model) -> float:
    """Return the expected squared norm of the noise in a sketch: its share of the squared norm."""
    share = SKETCH_NOISE**2 / (1 + SKETCH_NOISE**2)
    return share * sum(float(np.square(part, dtype=np.float64).sum()) for part in sketch.values())


def pieces(flat: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array in parts that fit into a processor's cache."""
    for start in range(0, flat.size, PIECE):
        yield flat[start : start + PIECE]


def moved(new: Model, old: Model) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield name and change of floating-point arrays, in ``pieces`` that share one buffer."""
    room = np.empty(PIECE)
    for name, array in new.items():
        if np.issubdtype(array.dtype, np.floating):
            after, before = pieces(array.reshape(-1)), pieces(old[name].reshape(-1))
            for one, other in zip(after, before, strict=True):
                step = room[: one.size]
                step[:] = one - other
                yield name, step


def shortened(new: Model, old: Model, factor: float) -> Model:
    """Return ``old + factor · (new − old)``, in float64; counters as they are in ``new``."""

    def short(name: str, array: NDArray[Any]) -> NDArray[Any]:
        start = old[name].astype(np.float64)
        found: NDArray[Any] = start + factor * (array.astype(np.float64) - start)
        return found.astype(array.dtype)

    return {
        name: short(name, array) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in new.items()
    }


def distance(new: Model, old: Model) -> float:
    """Return the Euclidean distance, over floating-point arrays."""
    steps = (step for _, step in moved(new, old))
    return math.sqrt(math.fsum(float(np.einsum("i,i", step, step)) for step in steps))
