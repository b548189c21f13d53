"""Local training of one silo.

The loop is a bare PyTorch loop. Arrays lie on the device and a batch is an index into them: nothing
is copied per step; datasets come through a DataLoader. Randomness comes from (run seed, silo,
round, purpose) alone, so the order in which silos train does not matter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Protocol

import numpy as np
import torch
from torch import nn

from coterie.client.work.data import Part
from coterie.client.work.optimisers import Schedule, Slots, optimiser_of
from coterie.client.work.weights import frozen_parts, set_training
from coterie.tasks.base import Nest, Task, TaskError, leaves
from coterie.tasks.problems import Classes
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
        momentum, weight_decay: ≥ 0; momentum is SGD's.
        proximal_mu: μ of FedProx's μ/2·|w − w_received|², ≥ 0.
        cosine_lambda: λ of pFedGraph's −λ·cos(w, w_received), ≥ 0.
        precision: ``float32``, or ``bfloat16`` or ``float16`` for autocast.
        steps: exactly so many mini-batches in place of ``epochs``; 0 takes whole epochs.
        optimiser: ``sgd``, or a name in ``torch.optim``.
        schedule: of the learning rate over the run; None: constant.
        clip_norm: the gradient's largest norm; 0: any.
        accumulate: mini-batches whose gradients make one step.
        balance: ``weights`` or ``sampling`` make up for classes of unlike size at this silo.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    cosine_lambda: float = 0.0
    precision: str = "float32"
    steps: int = 0
    optimiser: str = "sgd"
    schedule: Schedule | None = None
    clip_norm: float = 0.0
    accumulate: int = 1
    balance: str = "none"


class Beside(Protocol):
    """A second model that learns from the mini-batches of a training, and changes nothing of it."""

    def backward(self, x: Nest, y: Nest) -> None:
        """Add its gradient of a mini-batch."""
        ...

    def step(self, lr: float) -> None:
        """Move it along the gradients since its last step. The model trained moves after it."""
        ...


def seed_of(run_seed: int, silo: str, round_number: int, purpose: str) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = f"{run_seed}/{silo}/{round_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def train(
    task: Task,
    model: nn.Module,
    part: Part,
    plan: TrainPlan,
    *,
    seed: int,
    towards: Model | None = None,
    added: Callable[[torch.Tensor, Nest], torch.Tensor] | None = None,
    slots: Slots | None = None,
    beside: Beside | None = None,
) -> float:
    """Train in place; return the mean loss over the last epoch's samples.

    Args:
        task: gives the loss.
        model: changed in place.
        part: training samples.
        plan: what to do.
        seed: of the shuffling and of the model's own randomness (dropout).
        towards: model that the pulls of the plan go to, in place of the one trained from.
        added: (outputs, targets) of a mini-batch → what is added to its loss; not part of the
            loss returned.
        slots: the optimiser's state, to begin from and to leave behind; None: it begins afresh.
        beside: learns from the same mini-batches.

    Raises:
        TooFewError: see ``require_enough``.
        TaskError: the plan asks for what the task cannot do.
    """
    require_enough(model, part)
    torch.manual_seed(seed)
    shuffle = torch.Generator().manual_seed(seed)
    set_training(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    pulled = plan.proximal_mu > 0 or plan.cosine_lambda > 0
    anchor = _anchor(named, towards) if pulled else []
    known = {} if slots is None else slots
    optimiser = optimiser_of(plan, task, model, named, known)
    loss_of = loss_for(task, part, plan)
    total = torch.zeros((), device=part.device)
    a_pass = steps_of_a_pass(model, part, plan)
    planned = plan.steps or plan.epochs * a_pass
    done = 0
    while done < planned:  # a pass over the samples, of at least one step
        total.zero_()
        seen = 0
        order = _order(part, plan, shuffle)[: min(planned - done, a_pass) * plan.batch_size]
        for x, y in part.batches(order, plan.batch_size, seed=seed + done):
            if done % plan.accumulate == 0:
                for parameter in parameters:
                    parameter.grad = None
            with autocast(plan.precision, part.device):
                outputs = model(x)
                loss = loss_of(outputs, y)
                objective = loss if added is None else loss + added(outputs, y)
            optimiser.backward(objective)
            if beside is not None:
                beside.backward(x, y)
            total += loss.detach() * len(leaves(y)[0])
            seen += len(leaves(y)[0])
            done += 1
            if done % plan.accumulate == 0 or done == planned:
                optimiser.finish_gradients(parameters)
                if plan.proximal_mu > 0:
                    _add_proximal_gradient(parameters, anchor, plan.proximal_mu)
                if plan.cosine_lambda > 0:
                    _add_cosine_gradient(parameters, anchor, plan.cosine_lambda)
                rate = optimiser.rate((done - 1) / planned)
                if beside is not None:
                    beside.step(rate)
                optimiser.step(rate)
    if slots is not None:
        optimiser.remember(slots)
    return float(total) / seen


def steps_of_a_pass(model: nn.Module, part: Part, plan: TrainPlan) -> int:
    """Mini-batches of a pass; one of a single sample is left out before a BatchNorm."""
    whole, rest = divmod(len(part), plan.batch_size)
    if rest == 1 and whole and has_batch_norm(model):
        return whole  # batch statistics of one sample do not exist
    return whole + (rest > 0)


def _order(part: Part, plan: TrainPlan, shuffle: torch.Generator) -> torch.Tensor:
    if plan.balance != "sampling":
        return torch.randperm(len(part), generator=shuffle)
    y = part.targets().cpu()
    chances = 1 / torch.bincount(y)[y].double()
    return torch.multinomial(chances, len(part), replacement=True, generator=shuffle)


def loss_for(
    task: Task, part: Part, plan: TrainPlan
) -> Callable[[torch.Tensor, Nest], torch.Tensor]:
    """The task's loss; with class weights n / (K · n_k) of this silo's training labels if asked."""
    if plan.balance == "none":
        return task.loss
    problem = task.problem
    if not isinstance(problem, Classes) or type(task).loss is not Task.loss:
        raise TaskError(
            f"balance = {plan.balance!r} is for tasks with classes and no loss of their own; "
            f"task {task.name!r} is not one."
        )
    if plan.balance == "sampling":
        return task.loss
    counts = torch.bincount(part.targets(), minlength=problem.num_classes)
    weights = len(part) / (counts.clamp(min=1) * (counts > 0).sum())
    return partial(problem.loss, weights=weights.float())


def _anchor(named: Mapping[str, nn.Parameter], towards: Model | None) -> list[torch.Tensor]:
    if towards is None:
        return [p.detach().clone() for p in named.values()]
    return [torch.from_numpy(np.array(towards[name])).to(p.device) for name, p in named.items()]


def _add_proximal_gradient(
    parameters: list[nn.Parameter], anchor: list[torch.Tensor], mu: float
) -> None:
    """Add the gradient μ·(w − w_received) of FedProx's term, without building its graph."""
    with torch.no_grad():
        for parameter, start in zip(parameters, anchor, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=mu)


def _add_cosine_gradient(
    parameters: list[nn.Parameter], anchor: list[torch.Tensor], strength: float
) -> None:
    """Add the gradient of −λ·cos(w, w_received), of all parameters as one vector.

    That is −λ/|w| · (r − cos·w/|w|) with r = w_received/|w_received|; 0 where either is zero.
    """
    with torch.no_grad():
        length, other = (_length(vector) for vector in (parameters, anchor))
        if not (length > 0 and other > 0):
            return
        pairs = list(zip(parameters, anchor, strict=True))
        cosine = sum(float(torch.sum(p * a)) for p, a in pairs) / (length * other)
        for parameter, start in pairs:
            if parameter.grad is not None:
                parameter.grad.add_(start, alpha=-strength / (length * other))
                parameter.grad.add_(parameter, alpha=strength * cosine / length**2)


def _length(tensors: Sequence[torch.Tensor]) -> float:
    """Euclidean, of all as one vector."""
    return sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether training normalises by the statistics of a batch, which one sample does not have.

    A frozen BatchNorm does not: it keeps to its running statistics.
    """
    frozen = {id(module) for _, part in frozen_parts(model) for module in part.modules()}
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and id(m) not in frozen
        for m in model.modules()
    )


def require_enough(model: nn.Module, part: Part) -> None:
    """Check that the model can be trained with so few samples.

    Raises:
        TooFewError: there is one sample, of which the model's BatchNorm has no statistics. Where an
            image's pixels are normalised together it has.
    """
    if len(part) > 1 or not has_batch_norm(model):
        return
    try:
        with torch.no_grad():
            tried = deepcopy(model)  # its running statistics would change
            set_training(tried)
            tried(part.at(torch.zeros(1, dtype=torch.int64))[0])
    except ValueError:
        raise TooFewError(
            "a model with BatchNorm cannot be trained on one sample. Give the silo more training "
            "data, hold out less of it (guard, alpha = auto), or take a network without BatchNorm."
        ) from None


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision where the plan asks for it."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """Seconds between enter and exit, as ``seconds``."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
