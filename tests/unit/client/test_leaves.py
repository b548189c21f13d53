"""A silo's own leaf values are those of one penalised regression on the leaves that rows reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from coterie.client.work.data import Held
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Settings
from coterie.features.sums.trees.histograms import Rows, of_classes, of_labels, of_numbers
from coterie.features.sums.trees.leaves import train_leaves
from coterie.features.sums.trees.together import grown
from coterie.tasks import SiloData, Task
from coterie.tasks.base import Option
from coterie.tasks.problems import Classes, Numbers, Problem
from coterie.tasks.trees import Trees, named

ROWS, MORE = 400, 2
"""Rows of the silo, and trees of the model that did not grow."""


class Table(Task):
    """Rows of a table, for the problem given."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @property
    def problem(self) -> Problem:
        return self._problem

    def model(self) -> Trees:
        return named(f"trees-{5 + MORE}x3", shape=(4,), problem=self.problem)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Return rows of a silo with another level and relation, and, to test on, the group's."""
        draw = np.random.default_rng(0)
        x = draw.normal(size=(2 * ROWS, 4)).astype(np.float32)
        z = x @ [1.0, -1.0, 0.5, 0.0] + draw.normal(size=len(x))
        z[ROWS:] = 0.5 - 0.3 * z[ROWS:]
        if isinstance(self.problem, Classes):
            y = (z > 0).astype(np.int64) + (z > 1) * (self.problem.num_classes > 2)
        else:
            y = z.astype(np.float32)[:, None]
        return SiloData(x[ROWS:], y[ROWS:], x[:ROWS], y[:ROWS])


def grown_for(task: Table) -> tuple[Trees, Held]:
    """Return a group's trees, and the silo's rows."""
    rows, model = task.load({}), task.model()
    x, y = np.asarray(rows.x_test), np.asarray(rows.y_test)
    if isinstance(task.problem, Numbers):
        group = Rows(x, y.astype(float), of_numbers)
    elif model.two_classes:
        group = Rows(x, y[:, None].astype(float), of_labels)
    else:
        group = Rows(x, np.eye(3)[y], of_classes)
    empty = Ensemble.of({name: array.numpy() for name, array in model.state_dict().items()})
    trees = grown([group], empty, Settings(0.3), bins=16, most=5)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in trees.arrays().items()})
    return model, Held(*(torch.from_numpy(np.asarray(a)) for a in (rows.x_train, rows.y_train)))


def rows_of(model: Trees, part: Held) -> Any:
    """Return (n, m · 8 + 1): which leaves of one output rows reach, and the constant."""
    assert isinstance(part.x, torch.Tensor)
    reached = model.reached(part.x, 5)[:, :5, 0].numpy()
    inside = np.zeros((len(reached), 5 * 8 + 1))
    np.put_along_axis(inside, reached, 1.0, axis=1)
    inside[:, -1] = 1
    return inside


def test_they_are_a_penalised_regression_on_leaves() -> None:
    """Least squares: λ of the constant, 5 λ of each of the leaves of 5 trees."""
    task = Table(Numbers())
    model, part = grown_for(task)
    group = {name: array.clone() for name, array in model.state_dict().items()}
    assert isinstance(part.x, torch.Tensor) and isinstance(part.y, torch.Tensor)
    with torch.no_grad():
        left = (part.y - model(part.x)).numpy()[:, 0].astype(float)
    inside, penalty = rows_of(model, part), 4.0
    strength = np.diag([penalty * 5] * 40 + [penalty])
    expected = np.linalg.solve(2 * inside.T @ inside + strength, 2 * inside.T @ left)
    train_leaves(task, model, part, penalty)
    found = (model.leaf - group["leaf"])[:5].detach().numpy().ravel()
    np.testing.assert_allclose(found, expected[:-1], atol=2e-5)
    np.testing.assert_allclose((model.base - group["base"]).item(), expected[-1], atol=2e-5)
    assert not model.leaf[5:].any(), "trees that did not grow answer nothing"
    for name in ("feature", "threshold", "missing_left", "gain"):
        assert torch.equal(model.state_dict()[name], group[name])


@pytest.mark.parametrize("classes", [2, 3])
def test_of_classes_no_other_values_have_a_smaller_penalised_loss(classes: int) -> None:
    task = Table(Classes(classes))
    model, part = grown_for(task)
    assert isinstance(part.x, torch.Tensor) and isinstance(part.y, torch.Tensor)
    group = {name: array.clone() for name, array in model.state_dict().items()}
    before = task.loss(model(part.x), part.y).item()
    train_leaves(task, model, part, 3.0)
    loss = task.loss(model(part.x), part.y)
    assert loss.item() < before - 0.05
    leaf, base = model.leaf - group["leaf"], model.base - group["base"]
    whole = len(part) * loss + 3.0 / 2 * (5 * leaf.square().sum() + base.square().sum())
    of_leaves, of_base = torch.autograd.grad(whole, [model.leaf, model.base])
    slopes = [one.abs().max().item() for one in (of_leaves[:5], of_base)]
    assert max(slopes) < 0.02, "of 400 rows"


def test_a_large_penalty_leaves_the_groups_trees_and_so_does_no_row() -> None:
    task = Table(Numbers())
    model, part = grown_for(task)
    group = {name: array.clone() for name, array in model.state_dict().items()}
    train_leaves(task, model, part.take(torch.arange(0)), 1.0)
    assert all(torch.equal(array, group[name]) for name, array in model.state_dict().items())
    train_leaves(task, model, part, 1e6)
    torch.testing.assert_close(model.leaf, group["leaf"], atol=1e-3, rtol=0)
    torch.testing.assert_close(model.base, group["base"], atol=1e-3, rtol=0)


def test_trees_that_did_not_grow_leave_the_own_constant() -> None:
    task = Table(Numbers())
    model, (_, part) = task.model(), grown_for(task)
    assert isinstance(part.y, torch.Tensor)
    train_leaves(task, model, part, 1e-3)
    assert model.base.item() == pytest.approx(part.y.mean().item(), abs=1e-3)
    assert not model.leaf.any()
