"""Reading and writing the weights of a model that travel.

Trained parameters travel, and buffers (running statistics) of the modules that train. The frozen
rest stays in the model as the task made it, the same at every silo; its ``frozen_digest`` is
part of a silo's schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from coterie.wire import Model


def frozen_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules whose parameters are all frozen.

    Each comes with the prefix of its arrays' names, such as ``layer1.``, which is empty if the
    whole model is frozen. A module without parameters (Dropout) belongs to its parent.
    """
    return _frozen_parts("", model)


def _frozen_parts(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    trained = {parameter.requires_grad for parameter in module.parameters()}
    if trained == {False}:
        yield prefix, module
    elif False in trained:
        # Not named_children, which leaves out a module that comes a second time.
        for name, part in module._modules.items():
            if part is not None:
                yield from _frozen_parts(f"{prefix}{name}.", part)


def travelling(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own tensors that travel, by name, in the model's order."""
    frozen = tuple(prefix for prefix, _ in frozen_parts(model))
    state = model.state_dict(keep_vars=True)
    return {
        name: tensor.detach()
        for name, tensor in state.items()
        if tensor.requires_grad
        or (not isinstance(tensor, nn.Parameter) and not name.startswith(frozen))
    }


def frozen_digest(model: nn.Module) -> str:
    """Return the SHA-256 of names, types, shapes and bytes that do not travel; empty if all do."""
    travels = travelling(model)
    frozen = {name: t for name, t in model.state_dict().items() if name not in travels}
    digest = hashlib.sha256()
    for name, tensor in sorted(frozen.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""


def set_training(model: nn.Module) -> None:
    """Put the model in training mode, except frozen parts: their statistics must not change."""
    model.train()
    for _, part in frozen_parts(model):
        part.eval()


def load_weights(model: nn.Module, weights: Model) -> None:
    """Copy arrays into the tensors that travel; ``ValueError`` if names or shapes differ."""
    state = travelling(model)
    if list(state) != list(weights):
        missing = sorted(set(state) ^ set(weights))
        raise ValueError(f"the arrays of the model received differ from the task's: {missing[:3]}")
    with torch.no_grad():
        for name, own in state.items():
            received = weights[name]
            if tuple(own.shape) != received.shape:
                raise ValueError(
                    f"array {name!r} must have shape {tuple(own.shape)}. Got {received.shape}."
                )
            if own.device.type == "cpu":
                np.copyto(own.numpy(), received, casting="unsafe")
            else:  # torch takes no memory that cannot be written to
                own.copy_(torch.from_numpy(np.array(received, copy=True)))


def read_weights(model: nn.Module) -> Model:
    """Return the model's arrays that travel, as numpy copies, in the model's order."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in travelling(model).items()}
