"""Noise on what enters a sum, far below what training notices, and above the steps of its numbers.

Trained numbers are float32. From a start with large numbers that the model does not react to (a
constant added to all weights of a softmax, for example) an update is only a few of their steps
long, with an integer for every silo; and the sum of a few integers with known and different weights
has one solution. In eleven rounds of one block of three silos, with the learning rate doubled each
time, the updates of all three followed for 94% of such weights. With the noise, such a sum is noise
itself, as if numbers had no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.features.secure.protocol import is_float
from coterie.features.secure.sketches import Stream
from coterie.wire import Model
from coterie.wire.updates import PIECE

BLUR: Final = 2.0**-20
"""Largest noise, relative to a bound on an array's values: 8 steps of float32 there, or more."""


class Blur:
    """Adds uniform noise to a model's floating-point numbers, and then shortens its update.

    Both are done piece by piece, in the model's order, so that no copy of the model is made.

    Args:
        model: before the noise.
        start: what its training began from.
        factor: on the update, in (0, 1].
        largest: for every array, a bound on its values, of which the noise is ``BLUR``.
        key: 32 bytes that only this silo knows, and others for another model. Neither may depend
            on the sum: repetitions could be averaged, and the noise follow from a difference.
    """

    def __init__(
        self, model: Model, start: Model, factor: float, largest: Sequence[float], key: bytes
    ) -> None:
        self._start, self._factor, self._stream = start, factor, Stream(key)
        self._step = {n: most * BLUR / 2**31 for n, most in zip(model, largest, strict=True)}
        self._room, self._before = np.empty(PIECE), np.empty(PIECE)

    def __call__(self, name: str, begin: int, piece: NDArray[Any]) -> NDArray[Any]:
        """Return what enters the sum in place of the numbers of an array from ``begin`` on.

        The next call overwrites it.
        """
        if not is_float(piece):
            return piece
        out, count = self._room[: piece.size], piece.size
        np.multiply(self._stream.take(count).view(np.int32), self._step[name], out=out)
        out += piece
        if self._factor < 1:
            before = self._before[:count]
            before[:] = self._start[name].reshape(-1)[begin : begin + count]
            out -= before
            out *= self._factor
            out += before
        return out
