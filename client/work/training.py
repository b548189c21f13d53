"""A silo's training: the ordinary loop, or DP-SGD if the silo asks for differential privacy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coterie.client.work import sgd
from coterie.client.work.data import Part
from coterie.client.work.optimisers import Slots
from coterie.client.work.sgd import Beside, TrainPlan
from coterie.client.work.workbench import Workbench
from coterie.tasks.base import Nest
from coterie.wire import Model


def train(
    bench: Workbench,
    part: Part,
    plan: TrainPlan,
    *,
    seed: int,
    towards: Model | None = None,
    added: Callable[[torch.Tensor, Nest], torch.Tensor] | None = None,
    slots: Slots | None = None,
    beside: Beside | None = None,
) -> float:
    """Train the bench's model in place on a part of the silo's training data; return the loss.

    Arguments and errors as ``sgd.train`` and ``private.train_privately``; ``SpentError`` if the
    silo's privacy budget does not allow it.
    """
    private = bench.private()
    if private is None:
        return sgd.train(
            bench.task,
            bench.model,
            part,
            plan,
            seed=seed,
            towards=towards,
            added=added,
            slots=slots,
            beside=beside,
        )
    from coterie.client.work.private import train_privately

    # Refused before it comes to this (coterie.client.home.privacy).
    assert added is None and beside is None, "neither is made private"
    return train_privately(
        bench.task,
        bench.model,
        part,
        plan,
        private,
        seed=seed,
        towards=towards,
        slots=slots,
    )
