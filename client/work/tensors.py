"""A silo's data and a model's weights on its device, and what the model is worth on the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from coterie.tasks.base import Task
from coterie.wire import Model

EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Tensors:
    """A silo's data on its device."""

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, share of wrong answers in [0, 1], number of samples."""

    loss: float
    error: float
    num_examples: int


def to_device(
    data: Mapping[str, np.ndarray],
    device: torch.device,
    moved: dict[int, torch.Tensor] | None = None,
) -> Tensors:
    """Move numpy arrays ``x_train, y_train, x_test, y_test`` to the device.

    Args:
        data: the four arrays.
        device: where to.
        moved: what was moved before, by the array's ``id``: an array that several silos have in
            common is on the device once.
    """
    moved = {} if moved is None else moved
    for array in data.values():
        if id(array) not in moved:
            moved[id(array)] = torch.from_numpy(array).to(device)
    return Tensors(**{key: moved[id(array)] for key, array in data.items()})


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


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, data: Tensors, *, members: Sequence[Model] = ()
) -> Evaluation:
    """Loss and error on the silo's test data; of the members' mean logits if there are any."""
    model.eval()
    n = len(data.x_test)
    loss = torch.zeros((), device=data.x_test.device)
    wrong = torch.zeros((), device=data.x_test.device)
    for x, y in zip(
        data.x_test.split(EVALUATION_BATCH), data.y_test.split(EVALUATION_BATCH), strict=True
    ):
        outputs = _mean_outputs(model, members, x) if members else model(x)
        loss += task.loss(outputs, y) * len(x)
        wrong += task.errors(outputs, y)
    return Evaluation(float(loss) / n, float(wrong) / n, n)


def _mean_outputs(model: nn.Module, members: Sequence[Model], x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), device=x.device)
    for member in members:
        load_weights(model, member)
        total = total + model(x)
    return total / len(members)


def hold_out(data: Tensors, share: float, *, seed: int) -> Tensors:
    """The training data without a share of it, which takes the place of the test data.

    Args:
        data: of the silo, at least 2 training samples.
        share: in (0, 0.5]; at least one sample is held out.
        seed: of the choice; the same seed holds out the same samples.
    """
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))
    count = max(1, round(share * len(order)))
    held, kept = order[:count].to(data.x_train.device), order[count:].to(data.x_train.device)
    return Tensors(data.x_train[kept], data.y_train[kept], data.x_train[held], data.y_train[held])
