"""Tasks with a training step or a whole loop: what the engine still holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.work.optimisers import Schedule
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import read_weights
from coterie.tasks.base import Passes, Task, TaskError
from tests.conftest import arrays_of, assert_equal_models
from tests.unit.client.kinds import Kinds, play, refusal
from tests.unit.client.models import fresh, some_data

PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


class Mixed(Kinds):
    """Mixup: inputs and losses of a mini-batch and of the same in another order, mixed."""

    name = "mixed"

    def training_step(self, model: nn.Module, x: Any, y: Any) -> torch.Tensor:
        other = torch.randperm(len(x))
        outputs = model(0.7 * x + 0.3 * x[other])
        return 0.7 * self.loss(outputs, y) + 0.3 * self.loss(outputs, y[other])


class Looping(Kinds):
    """The run's own plain loop, written down once more."""

    name, head = "looping", "2."

    def train(self, model: nn.Module, passes: Passes) -> float:
        mean = 0.0
        for batches in passes:
            total, seen = 0.0, 0
            for x, y in batches:
                model.zero_grad()
                loss = self.loss(model(x), y)
                loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(p.grad, alpha=passes.lr)  # type: ignore[arg-type]
                total, seen = total + float(loss.detach()) * len(y), seen + len(y)
            mean = total / seen
        return mean


class Adaptive(Kinds):
    """Its own optimiser."""

    name = "adaptive"

    def optimiser(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=lr)


def trained(task: Task, plan: TrainPlan = PLAN, **how: Any) -> tuple[Any, float]:
    _, model = fresh()
    loss = train(task, model, some_data(10).train, plan, seed=3, **how)
    return read_weights(model), loss


# ---------------------------------------------------------------- the step


def test_a_training_step_is_what_is_minimised() -> None:
    _, model = fresh()
    part, task = some_data(10).train, Mixed()
    torch.manual_seed(3)
    shuffle, losses = torch.Generator().manual_seed(3), []
    for rows in torch.randperm(10, generator=shuffle).split(4):
        model.zero_grad()
        loss = task.training_step(model, part.x[rows], part.y[rows])
        loss.backward()
        losses.append(float(loss.detach()) * len(rows))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    got, mean = trained(task, replace(PLAN, epochs=1))
    for name, array in read_weights(model).items():
        np.testing.assert_allclose(got[name], array, rtol=1e-6)
    assert mean == pytest.approx(sum(losses) / 10, rel=1e-6)
    assert not np.array_equal(got["0.weight"], trained(fresh()[0])[0]["0.weight"])


def test_the_step_that_every_task_has_changes_no_bit() -> None:
    class Same(Kinds):
        def training_step(self, model: nn.Module, x: Any, y: Any) -> torch.Tensor:
            return self.loss(model(x), y)

    for plan in (PLAN, replace(PLAN, momentum=0.9, proximal_mu=0.2), replace(PLAN, accumulate=2)):
        assert_equal_models(trained(Same(), plan)[0], trained(fresh()[0], plan)[0])


def test_a_training_step_goes_with_fednova_and_meta_steps(tmp_path: Path) -> None:
    for strategy in ("fednova", "perfedavg", "pfedme"):
        found = play(tmp_path / strategy, Mixed, strategy, lr=0.01)
        plain = play(tmp_path / f"{strategy}-plain", Kinds, strategy, lr=0.01)
        one, other = arrays_of(found.models["a"]), arrays_of(plain.models["a"])
        assert not np.array_equal(one["0.weight"], other["0.weight"])


def test_what_is_added_to_outputs_and_class_weights_do_not_go_with_a_step(tmp_path: Path) -> None:
    reason = refusal(tmp_path / "g", Mixed, "fedavg", generators="silos")
    assert (
        "has its own training_step, which cannot be combined with this run's generated-weight"
        in reason
    )
    reason = refusal(tmp_path / "b", Mixed, balance="weights")
    assert (
        "balance = 'weights' cannot be used for task" in reason
        and "which has its own training_step" in reason
    )


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("changes", [{}, {"epochs": 3}, {"steps": 5}, {"batch_size": 16}])
def test_a_loop_of_the_tasks_own_gets_the_same_mini_batches(changes: dict[str, int]) -> None:
    plan = replace(PLAN, **changes)
    one, loss = trained(Looping(), plan)
    other, expected = trained(fresh()[0], plan)
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_loop_is_told_the_rate_of_the_schedule() -> None:
    plan = replace(PLAN, schedule=Schedule("cosine", 0.2, 0.0, 1.0))
    one, other = trained(Looping(), plan)[0], trained(fresh()[0], plan)[0]
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, rtol=1e-5, atol=1e-7)


def test_a_federation_with_a_loop_repeats_itself_bit_for_bit(tmp_path: Path) -> None:
    one, other = play(tmp_path / "one", Looping), play(tmp_path / "other", Looping)
    assert_equal_models(arrays_of(one.models["b"]), arrays_of(other.models["b"]))


@pytest.mark.parametrize(
    ("strategy", "keys", "named"),
    [
        ("fedavg", {"proximal-mu": 0.1}, "proximal-mu = 0.1"),
        ("fedavg", {"momentum": 0.9}, "momentum = 0.9"),
        ("fedavg", {"optimiser": "adamw"}, "optimiser = adamw"),
        ("fedavg", {"keep-optimiser": True}, "keep-optimiser = True"),
        ("fedavg", {"clip-norm": 1.0}, "clip-norm = 1.0"),
        ("fedavg", {"precision": "bfloat16"}, "precision = bfloat16"),
        ("fedavg", {"personalise": "ditto"}, "ditto-lambda = 1.0"),
        ("fedavg", {"personal": "head-first"}, "personal = head-first"),
        ("fedavg", {"generators": "silos"}, "generated-weight = 1.0"),
        ("fednova", {}, "plain-steps = True"),
        ("perfedavg", {}, "plain-steps = True"),
    ],
)
def test_what_a_loop_leaves_without_effect_is_refused_at_the_join(
    tmp_path: Path, strategy: str, keys: dict[str, Any], named: str
) -> None:
    reason = refusal(tmp_path, Looping, strategy, **keys)
    assert f"has its own train, which cannot be combined with this run's {named}." in reason


def test_fednova_cannot_count_the_steps_of_a_tasks_own_optimiser(tmp_path: Path) -> None:
    assert "has its own optimiser, which cannot be combined with this run's plain-steps" in refusal(
        tmp_path, Adaptive, "fednova"
    )


def test_a_loop_that_skips_mini_batches_or_returns_no_number_is_named() -> None:
    class Lazy(Kinds):
        def train(self, model: nn.Module, passes: Passes) -> float:
            for _ in next(iter(passes)):
                pass
            return 0.0

    class Silent(Kinds):
        def train(self, model: nn.Module, passes: Passes) -> Any:
            for batches in passes:
                list(batches)

    with pytest.raises(TaskError, match=r"must use every mini-batch .* It left out 3 of 6"):
        trained(Lazy())
    with pytest.raises(TaskError, match=r"must return the mean loss .* Got NoneType"):
        trained(Silent())
