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
from typing import Final

import numpy as np

from coterie.features.secure.protocol import is_float
from coterie.features.secure.sketches import Stream
from coterie.wire import Model
from coterie.wire.updates import PIECE, pieces

BLUR: Final = 2.0**-20
"""Largest noise, relative to a bound on an array's values: 8 steps of float32 there, or more."""


def blurred(model: Model, largest: Sequence[float], key: bytes) -> Model:
    """Return a model in float64, with uniform noise on its floating-point numbers.

    Args:
        largest: for every array, a bound on its values, of which the noise is ``BLUR``.
        key: 32 bytes that only this silo knows, and others for another model. Neither may depend
            on the sum: repetitions could be averaged, and the noise follow from a difference.
    """
    stream, room, found = Stream(key), np.empty(PIECE), dict(model)
    for (name, array), most in zip(model.items(), largest, strict=True):
        if is_float(array):
            found[name] = np.empty(array.shape)
            both = zip(pieces(array.reshape(-1)), pieces(found[name].reshape(-1)), strict=True)
            for piece, out in both:
                noise = room[: piece.size]
                np.multiply(stream.take(piece.size).view(np.int32), most * BLUR / 2**31, out=noise)
                np.add(piece, noise, out=out)
    return found
