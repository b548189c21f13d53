"""Updates: how far a training has moved a model, and how to shorten that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.wire.arrays import Model

PIECE: Final = 2**15
"""Numbers that are worked on at once."""
JOINT: Final = "sketch"
"""What a sketch is called; of one module, with its name and a dot before it."""
MOST_ROOM: Final = 2.0
"""A silo with more samples makes more steps, so its limit grows with their square root, so far."""


@dataclass(frozen=True)
class Limit:
    """How long an update may be; one that is longer is shortened to it.

    It is one for all silos of a sum, so that it only makes their parts more alike: with a limit
    for each, all others' could be made as good as nothing.

    Attributes:
        norm: Euclidean, > 0, of a silo with so many samples or fewer.
        samples: > 0; with more the limit is higher, up to ``MOST_ROOM`` times.
    """

    norm: float
    samples: float

    def of(self, samples: float) -> float:
        """The longest of a silo with so many samples."""
        return self.norm * min(max(math.sqrt(samples / self.samples), 1.0), MOST_ROOM)


def pieces(flat: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array in parts that fit into a processor's cache."""
    for start in range(0, flat.size, PIECE):
        yield flat[start : start + PIECE]


def moved(new: Model, old: Model) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """What changed of floating-point arrays: name and numbers, in ``pieces``, each of which the
    next is written over."""
    room = np.empty(PIECE)
    for name, array in new.items():
        if np.issubdtype(array.dtype, np.floating):
            after, before = pieces(array.reshape(-1)), pieces(old[name].reshape(-1))
            for one, other in zip(after, before, strict=True):
                step = room[: one.size]
                step[:] = one - other
                yield name, step


def shortened(new: Model, old: Model, factor: float) -> Model:
    """``old + factor · (new − old)``, in float64; counters as they are in ``new``."""

    def short(name: str, array: NDArray[Any]) -> NDArray[Any]:
        start = old[name].astype(np.float64)
        found: NDArray[Any] = start + factor * (array.astype(np.float64) - start)
        return found.astype(array.dtype)

    return {
        name: short(name, array) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in new.items()
    }


def distance(new: Model, old: Model) -> float:
    """Euclidean, of floating-point arrays."""
    steps = (step for _, step in moved(new, old))
    return math.sqrt(math.fsum(float(np.einsum("i,i", step, step)) for step in steps))


def within(new: Model, old: Model, longest: float) -> Model:
    """``new``, no farther from ``old`` than that."""
    norm = distance(new, old)
    return new if norm <= longest else shortened(new, old, longest / norm)
