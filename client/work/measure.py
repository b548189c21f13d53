"""Evaluation of a model on a silo's data: loss, the primary metric, and all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

import numpy as np
import torch
from torch import nn

from coterie import wire
from coterie.client.work import figures
from coterie.client.work.data import Batch, Data, Part
from coterie.client.work.figures import Array, Figure
from coterie.client.work.weights import load_weights
from coterie.tasks.base import Nest, Persons, Task, TaskError, leaves
from coterie.tasks.problems import Classes, Evidence, Labels, Masks, Numbers, Problem, Survival
from coterie.wire import KNOWN_METRICS, Metric, Model

MOST_AT_ONCE = 1024
"""Most samples of an evaluation batch."""
BATCH_BYTES = 1 << 28
"""Most bytes of a batch, with all activations of a network."""
BLOCKS = 50
"""Most blocks of samples whose losses tell how sure their mean is."""
GROWTH = 16
"""Rough memory of a network, in sample sizes: 10 for ResNet-18 at 224×224."""


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on test data.

    ``loss`` is the mean. ``error`` is what the primary metric lacks of its best value
    (``Metric.shortfall``), lower is better: for classes the share of wrong answers, unless
    another metric is primary. ``figures`` maps metrics to values and intervals, if requested and
    defined; ``trivial`` maps them to their values for the best constant answer.
    """

    loss: float
    error: float
    num_examples: int
    figures: Mapping[str, Figure] = field(default_factory=dict)
    trivial: Mapping[str, float] = field(default_factory=dict)


def leading(task: Task, wanted: str = "") -> Metric:
    """Return the primary metric, by which silos are compared: ``wanted``, else the task's default.

    Raises ``TaskError`` if the task's problem does not have this metric.
    """
    has = task.problem.metrics
    name = wanted or task.metric or has[0]
    if name not in (*has, "loss"):
        raise TaskError(
            f"task {task.name!r} has no metric {name!r}. It has {', '.join(has)} and loss."
        )
    return KNOWN_METRICS[name]


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, part: Part, *, metric: str = "", members: Sequence[Model] = ()
) -> Evaluation:
    """Compute loss and primary metric, with the mean outputs of ``members`` if there are any.

    ``metric`` replaces the task's primary metric; ``TaskError`` if the task does not have it.
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
    """Evaluate in one pass; collect the evidence, too, if the metric or ``in_full`` needs it."""
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
    found = metrics_of(problem, join(evidence))(np.ones((1, n)))[lead.name]
    return Evaluation(loss, lead.shortfall(float(found[0])), n), evidence


def held_out_metrics(found: Evaluation) -> dict[str, float | int]:
    """Return what a silo says of a model that it has evaluated on samples that it held out."""
    return {
        wire.HOLDOUT_ERROR: found.error,
        wire.HOLDOUT_EXAMPLES: found.num_examples,
        wire.HOLDOUT_LOSS: found.loss,
    }


@torch.no_grad()
def loss_error(task: Task, model: nn.Module, part: Part) -> float:
    """Return the standard error of the mean loss, by the spread over at most ``BLOCKS`` blocks."""
    model.eval()
    if task.problem.whole:
        losses = sample_losses(task, model, part)
    else:
        blocks = torch.arange(len(part)).tensor_split(min(BLOCKS, len(part)))
        losses = np.array([float(task.loss(model(x), y)) for x, y in map(part.at, blocks)])
    return float(losses.std(ddof=1)) / sqrt(len(losses)) if len(losses) > 1 else float("inf")


@torch.no_grad()
def sample_losses(task: Task, model: nn.Module, part: Part) -> Array:
    """Return the loss of each sample (n,), or values with the same mean and standard error."""
    if isinstance(task.problem, Survival):
        batches = [(outputs, y) for outputs, y, _ in _answers(model, part)]
        return task.problem.losses(*map(torch.cat, zip(*batches, strict=True))).numpy()
    found = []
    for outputs, y, _ in _answers(model, part):
        for answer, target in zip(outputs, y, strict=True):
            found.append(float(task.loss(answer[None], target[None])))
    return np.array(found)


@torch.no_grad()
def evaluate_with_evidence(
    task: Task, model: nn.Module, part: Part, *, metric: str = ""
) -> tuple[Evaluation, Evidence]:
    """Evaluate as ``evaluate``, and return also what all metrics are computed from."""
    found, parts = _evaluate(task, model, part, metric=metric, in_full=True)
    return found, join(parts)


def evaluate_in_full(task: Task, model: nn.Module, data: Data, *, metric: str = "") -> Evaluation:
    """Evaluate on the test data with every metric, its interval and the best constant answer.

    The constant answer comes from the training targets.
    """
    part, problem = data.test, task.problem
    plain, evidence = evaluate_with_evidence(task, model, part, metric=metric)
    figured = figures_of(problem, evidence, persons=part.persons)
    training, trivial = _array(data.train.targets()), {}
    for name in figured:
        if (same := problem.trivial(training, evidence, name)) is not None:
            found = metrics_of(problem, same)(np.ones((1, len(part))))
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
    """Return those of the problem's metrics that are defined, with their intervals.

    ``thresholds`` replace the usual ones of answers, see ``figures.of_classes``; ``persons``
    (n,) is each sample's person, where one may have several.
    """
    metrics = metrics_of(problem, evidence, thresholds=thresholds)
    found = figures.with_intervals(metrics, len(evidence[0]), seed=seed, persons=persons)
    return {n: f for n, f in found.items() if np.isfinite(f.value) and n in problem.metrics}


def _answers(
    model: nn.Module, part: Part, members: Sequence[Model] = ()
) -> Iterator[tuple[torch.Tensor, Nest, int]]:
    """Yield (outputs, targets, samples) of every batch."""
    model.eval()
    for x, y in part.batches(None, batch_size(part)):
        outputs = _mean_outputs(model, members, x) if members else model(x)
        yield outputs, y, len(leaves(y)[0])


def batch_size(part: Part) -> int:
    """Return how many samples are evaluated at once: a power of two, at most 1,024."""
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
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _array(targets: Nest) -> Array:
    (leaf,) = leaves(targets)
    found: Array = leaf.cpu().numpy()
    return found


def metrics_of(
    problem: Problem, evidence: Evidence, *, thresholds: Sequence[float] = ()
) -> Callable[[Array], Mapping[str, Array]]:
    """Return the function from weights (b, n) to every metric (b,)."""
    how: Mapping[type[Problem], Callable[..., Mapping[str, Array]]] = {
        Classes: figures.of_classes,
        Labels: figures.of_labels,
        Numbers: figures.of_numbers,
        Survival: figures.of_survival,
        Masks: figures.of_masks,
    }
    given = {"thresholds": thresholds} if thresholds else {}
    return partial(how[type(problem)], *evidence, **given)
