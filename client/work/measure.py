"""What a model is worth on a silo's test data: loss, the leading metric, and all the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from coterie.client.work import figures
from coterie.client.work.data import Batch, Data, Part
from coterie.client.work.figures import Array, Figure
from coterie.client.work.weights import load_weights
from coterie.tasks.base import Nest, Persons, Task, TaskError, leaves
from coterie.tasks.problems import Classes, Evidence, Labels, Masks, Numbers, Problem, Survival
from coterie.wire import KNOWN_METRICS, Metric, Model

MOST_AT_ONCE = 1024
"""Samples of an evaluation batch, if they are small."""
BATCH_BYTES = 1 << 28
"""What a batch may take with all that a network makes of its inputs."""
GROWTH = 16
"""How many times a sample's bytes a network holds at once, roughly: ResNet-18 at 224×224 ten."""


@dataclass(frozen=True)
class Evaluation:
    """A model on test data.

    Attributes:
        loss: mean.
        error: of the leading metric what is missing to the best value (``Metric.shortfall``): lower
            is better. Of classes the share of wrong answers, unless another metric leads.
        num_examples: samples.
        figures: metric → its value and interval, as far as they were asked for and are defined.
        trivial: metric → its value if the answer were always the same, the best such one.
    """

    loss: float
    error: float
    num_examples: int
    figures: Mapping[str, Figure] = field(default_factory=dict)
    trivial: Mapping[str, float] = field(default_factory=dict)


def leading(task: Task, wanted: str = "") -> Metric:
    """The metric by which silos are compared.

    Args:
        task: says which, or leaves it to its problem.
        wanted: a name in place of the task's; empty: the task's.

    Raises:
        TaskError: the task's problem does not have this metric.
    """
    has = task.problem.metrics
    name = wanted or task.metric or has[0]
    if name not in (*has, "loss"):
        raise TaskError(
            f"metric {name!r} is not one of task {task.name!r}, which has "
            f"{', '.join(has)} and loss."
        )
    return KNOWN_METRICS[name]


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    part: Part,
    *,
    metric: str = "",
    members: Sequence[Model] = (),
) -> Evaluation:
    """Loss and leading metric; of the members' mean outputs if there are any.

    Args:
        task: gives loss and problem.
        model: the one to evaluate.
        part: on which samples.
        metric: that leads, in place of the task's.
        members: weights of models that answer together.

    Raises:
        TaskError: the task does not have this metric.
    """
    found, _ = _evaluate(task, model, part, metric=metric, members=members)
    return found


def _evaluate(
    task: Task,
    model: nn.Module,
    part: Part,
    *,
    metric: str,
    members: Sequence[Model] = (),
    in_full: bool = False,
) -> tuple[Evaluation, list[Evidence]]:
    """In one pass what ``evaluate`` gives, and the evidence, if the metric or ``in_full`` asks."""
    lead, problem = leading(task, metric), task.problem
    # The usual case needs no more than a count, on the device.
    counted = lead.name == "error" and isinstance(problem, Classes)
    wrong = torch.zeros((), device=part.device)
    total = torch.zeros((), device=part.device)
    evidence: list[Evidence] = []
    whole: list[Batch] = []
    for outputs, y, size in _answers(model, part, members):
        if problem.whole:
            whole.append((outputs, y))
        else:
            total += task.loss(outputs, y) * size
        if counted:
            wrong += (outputs.argmax(dim=1) != y).sum()
        if in_full or not (counted or lead.name == "loss"):
            evidence.append(problem.evidence(outputs, y))
    n = len(part)
    loss = (
        float(task.loss(*map(torch.cat, zip(*whole, strict=True)))) if whole else float(total) / n
    )
    if counted:
        return Evaluation(loss, float(wrong) / n, n), evidence
    if lead.name == "loss":
        return Evaluation(loss, loss, n), evidence
    found = _metrics(problem, join(evidence))(np.ones((1, n)))[lead.name]
    return Evaluation(loss, lead.shortfall(float(found[0])), n), evidence


@torch.no_grad()
def evaluate_in_full(
    task: Task, model: nn.Module, data: Data, *, metric: str = "", seed: int = 0
) -> Evaluation:
    """The same on the test data with every metric, its interval, and what is trivial.

    Args:
        task, model: see ``evaluate``.
        data: the training targets say what the best single answer is.
        metric: that leads.
        seed: of the bootstrap.
    """
    part, problem = data.test, task.problem
    plain, parts = _evaluate(task, model, part, metric=metric, in_full=True)
    evidence = join(parts)
    figured = figures_of(problem, evidence, seed=seed, persons=part.persons)
    training, trivial = _array(data.train.targets()), {}
    for name in figured:
        if (same := problem.trivial(training, evidence, name)) is not None:
            found = _metrics(problem, same)(np.ones((1, len(part))))
            trivial[name] = float(found[name][0])
    return replace(plain, figures=figured, trivial=trivial)


def figures_of(
    problem: Problem,
    evidence: Evidence,
    *,
    seed: int = 0,
    thresholds: Sequence[float] = (),
    persons: Persons | None = None,
) -> dict[str, Figure]:
    """The problem's metrics, as far as they are defined, with their intervals.

    Args:
        problem, evidence: of all samples.
        seed: of the bootstrap.
        thresholds: of the answers, in place of the usual; see ``figures.of_classes``.
        persons: whose the samples are, where one may have several.
    """
    metrics = _metrics(problem, evidence, thresholds=thresholds)
    found = figures.with_intervals(metrics, len(evidence[0]), seed=seed, persons=persons)
    return {n: f for n, f in found.items() if np.isfinite(f.value) and n in problem.metrics}


def _answers(
    model: nn.Module, part: Part, members: Sequence[Model] = ()
) -> Iterator[tuple[torch.Tensor, Nest, int]]:
    """(outputs, targets, samples) of every batch, made one at a time."""
    model.eval()
    for x, y in part.batches(None, batch_size(part)):
        outputs = _mean_outputs(model, members, x) if members else model(x)
        yield outputs, y, len(leaves(y)[0])


def batch_size(part: Part) -> int:
    """Samples that are evaluated at once: a power of two, at most 1,024."""
    fits = BATCH_BYTES // (GROWTH * max(part.sample_bytes, 1))
    return min(MOST_AT_ONCE, 1 << max(fits.bit_length() - 1, 0))


def _mean_outputs(model: nn.Module, members: Sequence[Model], x: Nest) -> torch.Tensor:
    total: torch.Tensor | None = None
    for member in members:
        load_weights(model, member)
        total = model(x) if total is None else total + model(x)
    assert total is not None
    return total / len(members)


def join(parts: Sequence[Evidence]) -> Evidence:
    """The evidence of all batches."""
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _array(targets: Nest) -> Array:
    (leaf,) = leaves(targets)
    found: Array = leaf.cpu().numpy()
    return found


def _metrics(
    problem: Problem, evidence: Evidence, *, thresholds: Sequence[float] = ()
) -> Callable[[Array], Mapping[str, Array]]:
    """Weights (b, n) → every metric (b,)."""
    how: Mapping[type[Problem], Callable[..., Mapping[str, Array]]] = {
        Classes: figures.of_classes,
        Labels: figures.of_labels,
        Numbers: figures.of_numbers,
        Survival: figures.of_survival,
        Masks: figures.of_masks,
    }
    given = {"thresholds": thresholds} if thresholds else {}
    return partial(how[type(problem)], *evidence, **given)
