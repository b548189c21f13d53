"""Optimisers and schedules beside torch's own loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.work.optimisers import Schedule, Slots, class_of
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import read_weights
from coterie.tasks.base import Task, TaskError
from tests.unit.client.models import fresh, some_data

PLAN = TrainPlan(epochs=2, batch_size=5, lr=0.05)


def trained(plan: TrainPlan, *, slots: Slots | None = None, task: Task | None = None) -> Any:
    own, model = fresh()
    train(task or own, model, some_data(10).train, plan, seed=3, slots=slots)
    return read_weights(model)


def bare(make: Any, *, epochs: int = 2, clip: float = 0.0) -> Any:
    """The same steps with an optimiser of torch's."""
    _, model = fresh()
    part = some_data(10).train
    optimiser = make(model.parameters())
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(epochs):
        for rows in torch.randperm(10, generator=shuffle).split(5):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(part.x[rows]), part.y[rows]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimiser.step()
    return read_weights(model)


def assert_same(one: Any, other: Any) -> None:
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "AdamW", "adam", "rmsprop", "adagrad", "nadam"])
def test_an_optimiser_by_name_is_torchs(name: str) -> None:
    plan = replace(PLAN, optimiser=name, weight_decay=0.1)
    kind = class_of(name)
    assert_same(trained(plan), bare(lambda p: kind(p, lr=0.05, weight_decay=0.1)))


def test_an_unknown_optimiser_is_refused_with_those_there_are() -> None:
    with pytest.raises(TaskError, match=r"one of adadelta, .*adamw.*, sgd\. Got 'adamm'"):
        trained(replace(PLAN, optimiser="adamm"))
    with pytest.raises(TaskError, match="Got 'lbfgs'"):
        class_of("lbfgs")


def test_gradients_are_clipped_by_their_norm() -> None:
    clipped = trained(replace(PLAN, clip_norm=0.01))
    assert_same(clipped, bare(lambda p: torch.optim.SGD(p, lr=0.05), clip=0.01))


def test_accumulated_gradients_are_those_of_one_large_batch() -> None:
    small = trained(replace(PLAN, batch_size=5, accumulate=2))
    assert_same(small, trained(replace(PLAN, batch_size=10)))


def test_the_last_step_takes_what_is_left() -> None:
    three = replace(PLAN, epochs=1, batch_size=4, accumulate=2)  # 4 + 4, then 2 alone
    moved = trained(three)
    assert not np.array_equal(moved["0.weight"], trained(replace(three, steps=2))["0.weight"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_an_optimiser_remembers_carries_over_rounds(name: str) -> None:
    plan = replace(PLAN, epochs=1, optimiser=name, momentum=0.9 if name == "sgd" else 0.0)
    slots: Slots = {}
    task, model = fresh()
    part = some_data(10).train
    train(task, model, part, plan, seed=3, slots=slots)
    assert slots
    kept = {key: value.clone() for key, value in slots.items()}
    middle = {key: value.clone() for key, value in model.state_dict().items()}
    train(task, model, part, plan, seed=4, slots=kept)
    continued = read_weights(model)
    model.load_state_dict(middle)
    train(task, model, part, plan, seed=4)
    assert not np.array_equal(continued["0.weight"], read_weights(model)["0.weight"])


def test_a_task_may_bring_its_own_optimiser() -> None:
    class Own(type(fresh()[0])):  # type: ignore[misc]
        def optimiser(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": model.parameters(), "lr": lr * 2}], lr=lr)

    task = Own(lambda: None)
    assert_same(trained(PLAN, task=task), trained(replace(PLAN, lr=0.1)))


@pytest.mark.parametrize(
    ("kind", "warm_up", "done", "factor"),
    [
        ("constant", 0.2, 0.1, 0.5),
        ("constant", 0.2, 0.5, 1.0),
        ("cosine", 0.0, 0.5, 0.5),
        ("cosine", 0.0, 0.0, 1.0),
        ("cosine", 0.5, 0.75, 0.5),
        ("step", 0.0, 0.49, 1.0),
        ("step", 0.0, 0.5, 0.1),
        ("step", 0.0, 0.8, 0.01),
    ],
)
def test_schedules_run_over_the_whole_run(
    kind: str, warm_up: float, done: float, factor: float
) -> None:
    assert Schedule(kind, warm_up, 0.0, 1.0).factor(done) == pytest.approx(factor)
    # Ten rounds: what is done is round and share of the round.
    begin = math.floor(done * 10) / 10
    by_round = Schedule(kind, warm_up, begin, 0.1).factor((done - begin) * 10)
    assert by_round == pytest.approx(factor)


def test_a_constant_schedule_changes_no_bit() -> None:
    plain = trained(PLAN)
    scheduled = trained(replace(PLAN, schedule=Schedule("constant", 0.0, 0.3, 0.1)))
    assert all(np.array_equal(plain[name], scheduled[name]) for name in plain)
