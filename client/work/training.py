"""Local SGD on one silo's tensors.

The loop is a bare PyTorch loop: data lives on the device, a batch is an index into it, nothing
is copied per step. Randomness comes from (run seed, silo, round, purpose) alone, so the order in
which silos train does not matter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.optim.sgd import sgd

from coterie.tasks.base import Task, TaskError
from coterie.wire import Model

EVALUATION_BATCH = 1024


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


def seed_of(run_seed: int, silo: str, round_number: int, purpose: str) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = f"{run_seed}/{silo}/{round_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


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


def warm_up(task: Task, model: nn.Module, data: Tensors) -> None:
    """Run every kind of work once on a few samples: first calls are slow, and fail early here.

    The model's weights are changed; every message overwrites them.

    Raises:
        TooFewError: the model cannot be trained with so few samples.
    """
    few = Tensors(data.x_train[:4], data.y_train[:4], data.x_test[:4], data.y_test[:4])
    evaluate(task, model, few)
    train(task, model, few, TrainPlan(epochs=1, batch_size=4, lr=1e-6), seed=0)


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """Seconds between enter and exit, as ``seconds``."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start


def tensors(
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
