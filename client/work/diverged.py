"""Detection of a training that ended in NaN or infinity, and advice against it."""

from __future__ import annotations

import math

import numpy as np

from coterie.wire import Model

ADVICE = (
    "Try a smaller lr, clip-norm, or inputs of a smaller range (scale or bounds in the task's "
    "declaration)."
)
"""Keys of a run first, then of a task."""


def odd_array(model: Model) -> str:
    """Return the name of the first array that holds NaN or infinity; empty if none does."""
    finite = {
        name: array.dtype.kind != "f" or np.isfinite(array).all() for name, array in model.items()
    }
    return next((name for name, right in finite.items() if not right), "")


def divergence(model: Model, loss: float) -> str:
    """Return a sentence about what is not finite after a training; empty if all is."""
    if name := odd_array(model):
        return f"array {name!r} contains NaN or infinity: the training has diverged. {ADVICE}"
    if not math.isfinite(loss):
        return f"the loss is NaN or infinite: the training is diverging. {ADVICE}"
    return ""
