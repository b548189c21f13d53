"""A silo's samples column by column: what a table has, or what stands for it in other data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from coterie.client.work.data import Part
from coterie.client.work.measure import batch_size
from coterie.tasks.base import Column, Option, Task, leaves
from coterie.tasks.problems import Labels, Masks, Numbers, Survival

MOST_FEATURES = 64
"""Largest sample with a column per number; larger ones and images give statistics per channel."""
YES_NO = ("no", "yes")


def inputs_of(task: Task, options: Mapping[str, Option], part: Part) -> Iterator[Column]:
    """Yield the inputs of training samples: a table's columns, else those of ``part``."""
    own = task.columns(options)
    yield from own or columns_of(part)


def columns_of(part: Part) -> Iterator[Column]:
    """Yield the inputs as the model sees them: every number, or figures of every channel."""
    parts = [leaves(x) for x, _ in part.batches(None, batch_size(part))]
    for number, batches in enumerate(zip(*parts, strict=True), start=1):
        of = f" of input {number}" if len(parts[0]) > 1 else ""
        yield from _columns([batch.cpu() for batch in batches], of)


def _columns(batches: Sequence[torch.Tensor], of: str) -> Iterator[Column]:
    shape = batches[0].shape[1:]
    if len(shape) <= 1 and math.prod(shape) <= MOST_FEATURES:
        table = torch.cat([batch.reshape(len(batch), -1).double() for batch in batches]).numpy()
        for i, values in enumerate(table.T, start=1):
            yield Column(f"number {i}{of}" if table.shape[1] > 1 else f"number{of}", values)
        return
    channels = shape[0] if len(shape) > 1 else 1
    if channels > MOST_FEATURES:
        channels = 1
    flat = [batch.reshape(len(batch), channels, -1).double() for batch in batches]
    means = torch.cat([batch.mean(dim=2) for batch in flat]).numpy()
    spreads = torch.cat([batch.std(dim=2, correction=0) for batch in flat]).numpy()
    for i in range(channels):
        which = f" of channel {i + 1}" if channels > 1 else ""
        yield Column(f"mean of a sample{which}{of}", means[:, i])
        yield Column(f"deviation within a sample{which}{of}", spreads[:, i])


def targets_of(task: Task, part: Part) -> Iterator[Column]:
    """Yield the targets, one column each; none where a sample has no single target."""
    problem, names = task.problem, [str(name) for name in task.classes]
    if isinstance(problem, Masks):
        yield from _masks(names or list(map(str, range(problem.num_classes))), part)
        return
    y = part.targets()
    if not isinstance(y, torch.Tensor):
        return
    found = y.cpu().double().numpy().reshape(len(part), -1)
    if isinstance(problem, Survival):
        yield Column("time", found[:, 0])
        yield Column("event", found[:, 1], YES_NO)
    elif isinstance(problem, Labels | Numbers):
        kinds = YES_NO if isinstance(problem, Labels) else ()
        for i, values in enumerate(found.T):
            yield Column(names[i] if i < len(names) else f"target {i + 1}", values, kinds)
    else:
        names = names or list(map(str, range(task.num_classes)))
        yield Column(task.class_column, found[:, 0], names)


def _masks(names: Sequence[str], part: Part) -> Iterator[Column]:
    """Yield, for each class, whether it is in a sample's mask."""
    found = [
        torch.stack([(y == i).flatten(1).any(dim=1) for i in range(len(names))], dim=1).cpu()
        for _, y in part.batches(None, batch_size(part))
    ]
    for name, values in zip(names, torch.cat(found).numpy().T, strict=True):
        yield Column(f"{name} in a mask", values.astype(np.float64), YES_NO)
