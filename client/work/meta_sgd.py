"""Local training of personalised methods: Per-FedAvg's meta-steps and pFedMe's Moreau envelope.

Fallah et al. 2020, https://arxiv.org/abs/2002.07948, Algorithm 1 (first order); Dinh et al.
2020, https://arxiv.org/abs/2006.08848, Algorithm 1. As in ``sgd.train``, training is in place
and seeded, and returns the mean loss of the last epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from flwr.app import RecordDict
from torch import nn

from coterie import wire
from coterie.client.work.data import Part
from coterie.client.work.request import Request
from coterie.client.work.sgd import TrainPlan, autocast, has_batch_norm, require_enough
from coterie.client.work.train import train_and_reply
from coterie.client.work.weights import set_training
from coterie.system.device import seed_torch
from coterie.tasks.base import Task


def train_model_per_fedavg(request: Request) -> RecordDict:
    """Train the received model with Per-FedAvg's steps."""
    session, meta_lr = request.session, request.value(wire.META_LR)
    training = partial(train_per_fedavg, session.task, session.model, meta_lr=meta_lr)
    return train_and_reply(request, training)


def train_model_pfedme(request: Request) -> RecordDict:
    """Train the received model with pFedMe's steps."""
    training = partial(
        train_pfedme,
        request.session.task,
        request.session.model,
        moreau_lambda=request.value(wire.MOREAU_LAMBDA),
        moreau_lr=request.value(wire.MOREAU_LR),
        inner_steps=request.value(wire.INNER_STEPS),
    )
    return train_and_reply(request, training)


def train_per_fedavg(
    task: Task, model: nn.Module, part: Part, plan: TrainPlan, *, meta_lr: float, seed: int
) -> float:
    """Train by ``w ← w − lr · ∇f(w − meta_lr · ∇f(w; B); B′)`` for every batch B′ after batch B.

    The first batch of an epoch has the last one as its B. Momentum and weight decay are not used.
    """
    parameters = _start(model, part, seed)
    mean = 0.0
    for batches in _epochs(model, part, plan, seed):
        total, seen = 0.0, 0
        for before, batch in batches:
            start = [p.detach().clone() for p in parameters]
            _gradients(task, model, part, plan, before)
            _move(parameters, meta_lr)
            loss = _gradients(task, model, part, plan, batch)
            _restore(parameters, start)
            _move(parameters, plan.lr)
            total, seen = total + loss * len(batch), seen + len(batch)
        mean = total / seen
    return mean


def train_pfedme(
    task: Task,
    model: nn.Module,
    part: Part,
    plan: TrainPlan,
    *,
    moreau_lambda: float,
    moreau_lr: float,
    inner_steps: int,
    seed: int,
) -> float:
    """Train by ``w ← w − η λ (w − θ̃)`` for every batch; θ̃: K steps of rate ``plan.lr`` from w."""
    parameters = _start(model, part, seed)
    mean = 0.0
    for batches in _epochs(model, part, plan, seed):
        total, seen = 0.0, 0
        for _, batch in batches:
            common = [p.detach().clone() for p in parameters]
            loss = 0.0
            for _ in range(inner_steps):
                loss = _gradients(task, model, part, plan, batch)
                with torch.no_grad():
                    for p, w in zip(parameters, common, strict=True):
                        if p.grad is not None:
                            p.grad.add_(p - w, alpha=moreau_lambda)
                _move(parameters, plan.lr)
            with torch.no_grad():
                for p, w in zip(parameters, common, strict=True):
                    p.copy_(w - moreau_lr * moreau_lambda * (w - p))
            total, seen = total + loss * len(batch), seen + len(batch)
        mean = total / seen
    return mean


def _start(model: nn.Module, part: Part, seed: int) -> list[nn.Parameter]:
    require_enough(model, part)
    seed_torch(seed)
    set_training(model)
    return [p for p in model.parameters() if p.requires_grad]


def _epochs(
    model: nn.Module, part: Part, plan: TrainPlan, seed: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the batches of every epoch as indices, in pairs of (previous, current)."""
    shuffle = torch.Generator().manual_seed(seed)
    count, device = len(part), part.device
    left = plan.steps
    for _ in range(plan.steps or plan.epochs):  # an epoch is at least one step
        batches = list(torch.randperm(count, generator=shuffle).to(device).split(plan.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 and has_batch_norm(model):
            batches.pop()  # batch statistics of one sample do not exist
        pairs = list(zip([batches[-1], *batches[:-1]], batches, strict=True))
        if not plan.steps:
            yield pairs
            continue
        yield pairs[:left]
        left -= len(pairs)
        if left <= 0:
            return


def _gradients(
    task: Task, model: nn.Module, part: Part, plan: TrainPlan, batch: torch.Tensor
) -> float:
    """Leave the gradients of the batch's loss in ``grad``; return the loss."""
    for parameter in model.parameters():
        parameter.grad = None
    x, y = part.at(batch)
    with autocast(plan.precision, part.device):
        loss = task.training_step(model, x, y)
    loss.backward()
    return float(loss.detach())


def _move(parameters: list[nn.Parameter], lr: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)


def _restore(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
