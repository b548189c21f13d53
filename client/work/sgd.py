"""Local SGD on one silo's tensors.

The loop is a bare PyTorch loop: data lives on the device, a batch is an index into it, nothing
is copied per step. Randomness comes from (run seed, silo, round, purpose) alone, so the order in
which silos train does not matter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.optim.sgd import sgd

from coterie.client.work.tensors import Tensors
from coterie.tasks.base import Task, TaskError
from coterie.wire import Model


class TooFewError(TaskError):
    """There are too few samples to train this model with. The text says nothing of the data."""


@dataclass(frozen=True)
class TrainPlan:
    """How long and how to train. Bounds are checked by whoever reads it from a message.

    Attributes:
        epochs: passes over the training data, ≥ 1.
        batch_size: ≥ 1; the last batch of an epoch may be smaller.
        lr: learning rate, > 0.
        momentum, weight_decay: of SGD, ≥ 0.
        proximal_mu: μ of FedProx's μ/2·|w − w_received|², ≥ 0.
        precision: ``float32``, or ``bfloat16`` for autocast.
        steps: exactly so many mini-batches in place of ``epochs``; 0 takes whole epochs.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    precision: str = "float32"
    steps: int = 0


def seed_of(run_seed: int, silo: str, round_number: int, purpose: str) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = f"{run_seed}/{silo}/{round_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def train(
    task: Task,
    model: nn.Module,
    data: Tensors,
    plan: TrainPlan,
    *,
    seed: int,
    towards: Model | None = None,
    added: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> float:
    """Train in place; return the mean loss over the last epoch's samples.

    Args:
        task: gives the loss.
        model: changed in place.
        data: the training part is used.
        plan: what to do.
        seed: of the shuffling and of the model's own randomness (dropout).
        towards: model that the proximal term pulls to, in place of the one trained from.
        added: (outputs, targets) of a mini-batch → what is added to its loss; not part of the
            loss returned.

    Raises:
        TooFewError: see ``require_enough``.
    """
    require_enough(model, data)
    torch.manual_seed(seed)
    shuffle = torch.Generator().manual_seed(seed)
    model.train()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    anchor = _anchor(named, towards) if plan.proximal_mu > 0 else []
    buffers: list[torch.Tensor | None] = [None] * len(parameters)
    x, y, device = data.x_train, data.y_train, data.x_train.device
    total = torch.zeros((), device=device)
    left = plan.steps
    for _ in range(plan.steps or plan.epochs):  # an epoch is at least one step
        total.zero_()
        seen = 0
        order = torch.randperm(len(x), generator=shuffle).to(device)
        for batch in order.split(plan.batch_size):
            if len(batch) == 1 and len(x) > 1 and has_batch_norm(model):
                continue  # batch statistics of one sample do not exist
            for parameter in parameters:
                parameter.grad = None
            with autocast(plan.precision, device):
                outputs = model(x[batch])
                loss = task.loss(outputs, y[batch])
                objective = loss if added is None else loss + added(outputs, y[batch])
            objective.backward()
            if anchor:
                _add_proximal_gradient(parameters, anchor, plan.proximal_mu)
            _sgd_step(parameters, buffers, plan)
            total += loss.detach() * len(batch)
            seen += len(batch)
            left -= 1
            if left == 0:
                return float(total) / seen
    return float(total) / seen


def _anchor(named: Mapping[str, nn.Parameter], towards: Model | None) -> list[torch.Tensor]:
    if towards is None:
        return [p.detach().clone() for p in named.values()]
    return [torch.from_numpy(np.array(towards[name])).to(p.device) for name, p in named.items()]


def _sgd_step(
    parameters: list[nn.Parameter], buffers: list[torch.Tensor | None], plan: TrainPlan
) -> None:
    """torch's own functional SGD. ``torch.optim.SGD`` computes the same, but making one imports
    the compiler stack: 1.3 s and 100 MB in every silo process that never compiles anything."""
    used = [(p, i) for i, p in enumerate(parameters) if p.grad is not None]
    slots = [buffers[i] for _, i in used]
    with torch.no_grad():
        sgd(
            [p for p, _ in used],
            [cast(torch.Tensor, p.grad) for p, _ in used],
            slots,
            weight_decay=plan.weight_decay,
            momentum=plan.momentum,
            lr=plan.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
    for (_, i), slot in zip(used, slots, strict=True):
        buffers[i] = slot


def _add_proximal_gradient(
    parameters: list[nn.Parameter], anchor: list[torch.Tensor], mu: float
) -> None:
    """Add the gradient μ·(w − w_received) of FedProx's term, without building its graph."""
    with torch.no_grad():
        for parameter, start in zip(parameters, anchor, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=mu)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether training normalises by the statistics of a batch, which one sample does not have."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def require_enough(model: nn.Module, data: Tensors) -> None:
    """Check that the model can be trained with so few samples.

    Raises:
        TooFewError: there is one sample, of which the model's BatchNorm has no statistics. Where an
            image's pixels are normalised together it has.
    """
    if len(data.x_train) > 1 or not has_batch_norm(model):
        return
    try:
        with torch.no_grad():
            deepcopy(model).train()(data.x_train)  # a copy: its running statistics would change
    except ValueError:
        raise TooFewError(
            "a model with BatchNorm cannot be trained on one sample. Give the silo more training "
            "data, hold out less of it (guard, alpha = auto), or take a network without BatchNorm."
        ) from None


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision where the plan asks for it."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """Seconds between enter and exit, as ``seconds``."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
