"""Boosted trees of fixed shape as a network, so that all that takes a model takes them.

Their arrays are those of ``coterie.features.sums.trees.ensemble``, which grows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from coterie.tasks.errors import TaskError
from coterie.tasks.problems import Classes, Labels, Numbers, Problem, Survival

NAMED = re.compile(r"trees(?:-([1-9]\d{0,3})x([1-9]))?")
USUAL = 100, 6
"""Number of trees per output, and their depth."""


class Trees(nn.Module):
    """T trees of depth d for each of K outputs; an answer is the sum of the leaves reached.

    Two classes have one output, the logit of the second. A missing input is NaN. ``gain``, one
    number per column, says how much the splits of the column have reduced the loss.
    """

    feature: torch.Tensor
    threshold: torch.Tensor
    missing_left: torch.Tensor
    gain: torch.Tensor

    def __init__(
        self, trees: int, outputs: int, depth: int, columns: int, *, two_classes: bool = False
    ) -> None:
        super().__init__()
        self.depth, self.two_classes = depth, two_classes
        nodes = (trees, outputs, 2**depth - 1)
        self.base = nn.Parameter(torch.zeros(outputs))
        self.leaf = nn.Parameter(torch.zeros(trees, outputs, 2**depth))
        self.register_buffer("feature", torch.full(nodes, -1, dtype=torch.int32))
        self.register_buffer("threshold", torch.zeros(nodes))
        self.register_buffer("missing_left", torch.zeros(nodes, dtype=torch.int32))
        self.register_buffer("gain", torch.zeros(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return answers (n, K), or logits (n, 2) of two classes, to rows (n, columns)."""
        trees = len(self.leaf)
        if not torch.compiler.is_compiling():  # or exporting
            grown = self.leaf.detach().flatten(1).any(dim=1).nonzero()
            trees = int(grown[-1]) + 1 if len(grown) else 0  # the others answer 0
        leaves = self.leaf.reshape(-1)[self.reached(x, trees)]
        return self.outputs(leaves.sum(dim=1) + self.base)

    def outputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Return answers, as ``forward``, from sums of leaves (n, K)."""
        return torch.cat([torch.zeros_like(sums), sums], dim=1) if self.two_classes else sums

    def reached(self, x: torch.Tensor, trees: int) -> torch.Tensor:
        """Return the place (n, T, K) in the flat ``leaf`` of each leaf of T ``trees`` reached."""
        _, outputs, leaves = self.leaf.shape
        columns = self.feature.reshape(-1).long()
        thresholds = self.threshold.reshape(-1)
        missing_left = self.missing_left.reshape(-1) == 1
        first = torch.arange(trees * outputs, device=x.device) * (leaves - 1)
        at = torch.zeros((x.shape[0], trees * outputs), dtype=torch.long, device=x.device)
        for _ in range(self.depth):
            node = first + at
            column = columns[node]
            value = x.gather(1, column.clamp(min=0))
            left = (value <= thresholds[node]) | (value.isnan() & missing_left[node])
            at = 2 * at + 2 - (left | (column < 0)).long()
        reached = torch.arange(trees * outputs, device=x.device) * leaves + at - (leaves - 1)
        return reached.reshape(x.shape[0], trees, outputs)


def named(name: str, *, shape: tuple[int, ...], problem: Problem) -> Trees:
    """Return trees without a split: ``trees``, or ``trees-TxD`` with T trees of depth D.

    Raises:
        TaskError: the name is another, samples are not rows, or the problem is one without trees.
    """
    found = NAMED.fullmatch(name)
    if found is None:
        raise TaskError(
            "network must be trees, or trees-TxD with T trees of depth D from 1 to 9, such as "
            f"trees-200x4. Got {name!r}."
        )
    if len(shape) != 1:
        raise TaskError(f"network {name!r} is for rows of a table. Got samples of shape {shape}.")
    trees, depth = map(int, found.groups()) if found[1] else USUAL
    if isinstance(problem, Classes):
        two = problem.num_classes == 2
        return Trees(trees, 1 if two else problem.num_classes, depth, *shape, two_classes=two)
    if isinstance(problem, Labels):
        return Trees(trees, problem.num_labels, depth, *shape)
    if isinstance(problem, Numbers):
        return Trees(trees, problem.num_targets, depth, *shape)
    if isinstance(problem, Survival):
        return Trees(trees, 1, depth, *shape)
    raise TaskError(
        f"network {name!r} is for classes, labels, real targets and survival. Got a target of "
        f"kind {problem.kind}."
    )


def takes_missing(task: object) -> bool:
    """Return whether NaN among a task's inputs is a missing value: for trees of a declared task."""
    return bool(getattr(task, "boosted", False))


def importance(gain: NDArray[Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return input → its share of the reduction of the loss, the largest first, those above 0.

    ``gain`` (columns,) is that of ``Trees``. ``inputs`` are the ``columns`` of ``Task.prepared``;
    an input that is not among them has a number, from 1.
    """
    total = float(sum(gain)) or 1.0
    found = {}
    for i, own in enumerate(gain):
        of = inputs[i] if i < len(inputs) else {}
        name = str(of.get("column", f"input {i + 1}"))
        name += f" = {of['category']}" if "category" in of else ""
        found[f"{name} is missing" if "missing" in of else name] = float(own) / total
    return {name: one for name, one in sorted(found.items(), key=lambda x: -x[1]) if one > 0}
