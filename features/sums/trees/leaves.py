"""A silo's own leaf values of boosted trees, shrunk to those of its group.

The splits stay. With m trees, wₗ in their leaves and the constant b, own values minimise

    Σ losses of the silo's rows + λ/2 · (b − b_group)² + λ m/2 · Σ (wₗ − wₗ of the group)².

So own answers minus the group's are a Gaussian process whose covariance between two rows is 1/λ,
times 1 plus the share of trees in which both reach the same leaf (Rasmussen and Williams: "Gaussian
Processes for Machine Learning", 2006, section 2.1). λ means the same whatever the number of trees
and their learning rate, so one that is chosen with a trial's trees suits those that follow. Nothing
is drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch

from coterie.client.work.data import Part
from coterie.client.work.linear import minimum
from coterie.tasks.base import Task
from coterie.tasks.trees import Trees

ARRIVED = 1e-6
"""Largest entry of the gradient of the mean loss at which the minimum is reached."""


def train_leaves(task: Task, model: Trees, part: Part, penalty: float) -> None:
    """Give the model received its own leaf values and constant, in place; λ is ``penalty`` > 0."""
    rows = len(part)
    if not rows:
        return
    x, y = part.at(torch.arange(rows))
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    y = y.cpu().double() if y.is_floating_point() else y.cpu()
    with torch.no_grad():
        used = ((model.leaf != 0).flatten(1).any(1) | (model.feature >= 0).flatten(1).any(1)).cpu()
        reached = model.reached(x, len(model.leaf)).cpu()
        leaf, base = model.leaf.cpu().double(), model.base.cpu().double()
        group = leaf.reshape(-1)[reached].sum(dim=1) + base
        # In units in which all departures have the same penalty.
        scale = 1 / sqrt(max(int(used.sum()), 1))
        first = torch.cumsum(used, 0) - 1
        leaves = leaf[0].numel()
        own = reached[:, used] - ((torch.arange(len(used)) - first) * leaves)[used][:, None]
        shape = own.shape

    def loss_at(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        moved = values["leaf"].index_select(0, own.reshape(-1)).reshape(shape).sum(dim=1)
        return task.loss(model.outputs(group + values["base"] + scale * moved), y)

    start = {"base": base.numpy() * 0, "leaf": leaf[used].reshape(-1).numpy() * 0}
    strength, zero = dict.fromkeys(start, penalty / rows), dict.fromkeys(start, 0.0)
    found = minimum(loss_at, start, strength, zero, gradient=ARRIVED)
    with torch.no_grad():
        leaf[used] += scale * torch.from_numpy(found["leaf"]).reshape(leaf[used].shape)
        model.leaf.copy_(leaf)
        model.base.copy_(base + torch.from_numpy(found["base"]))
