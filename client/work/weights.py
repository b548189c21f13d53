"""A model's weights, in and out."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from coterie.wire import Model


def load_weights(model: nn.Module, weights: Model) -> None:
    """Copy arrays into the model's parameters and buffers.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    state = model.state_dict()
    if list(state) != list(weights):
        missing = sorted(set(state) ^ set(weights))
        raise ValueError(f"the model received has other arrays than the task's: {missing[:3]}")
    with torch.no_grad():
        for name, own in state.items():
            received = weights[name]
            if tuple(own.shape) != received.shape:
                raise ValueError(
                    f"array {name!r} must have shape {tuple(own.shape)}. Got {received.shape}."
                )
            own.copy_(torch.from_numpy(np.array(received, copy=True)))


def read_weights(model: nn.Module) -> Model:
    """The model's parameters and buffers as numpy copies, in the model's order."""
    return {
        name: tensor.detach().cpu().numpy().copy() for name, tensor in model.state_dict().items()
    }
