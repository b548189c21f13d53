"""Exact training of linear models, against scikit-learn and written-out objectives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch import nn

from coterie.client.work.data import Held
from coterie.client.work.linear import GRID, PRIOR, linear_layer, tuned_penalty
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.tasks.problems import Numbers, Problem
from tests.conftest import assert_equal_models
from tests.unit.client.models import Small, with_batch_norm

PLAN = TrainPlan(epochs=1, batch_size=8, lr=0.1, optimiser="auto", length=math.inf)


class Real(Small):
    """One real target."""

    name = "real"

    @property
    def problem(self) -> Problem:
        return Numbers()


def rows(n: int = 60, *, real: bool = False, largest: float = 1.0) -> Held:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((n, 4)) * np.array([1, 1, 1, largest])
    score = x @ np.array([1.0, -1.0, 0.5, 1 / largest]) + draw.standard_normal(n)
    y = score[:, None].astype(np.float32) if real else np.digitize(score, [-0.5, 0.7])
    return Held(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))


def layer(outputs: int = 3) -> Any:
    return lambda: nn.Sequential(nn.Linear(4, outputs))


def trained(
    plan: TrainPlan = PLAN, part: Held | None = None, task: Small | None = None, **how: Any
) -> dict[str, Any]:
    task = task or Small(layer())
    torch.manual_seed(0)
    model = task.model()
    train(task, model, rows() if part is None else part, plan, seed=1, **how)
    return {name: array.astype(float) for name, array in read_weights(model).items()}


def slope(
    part: Held, arrays: dict[str, Any], *, strength: float, centre: Any = 0.0
) -> dict[str, torch.Tensor]:
    """Return the gradient of mean cross-entropy + λ/2·|w − c|² of the weights."""
    weight, bias = (torch.tensor(arrays[n], requires_grad=True) for n in ("0.weight", "0.bias"))
    assert isinstance(part.x, torch.Tensor) and isinstance(part.y, torch.Tensor)
    loss = nn.functional.cross_entropy(part.x.double() @ weight.T + bias, part.y)
    (loss + strength / 2 * (weight - torch.as_tensor(centre)).square().sum()).backward()
    assert weight.grad is not None and bias.grad is not None
    return {"weight": weight.grad, "bias": bias.grad}


def test_classes_reach_scikit_learns_default() -> None:
    part = rows()
    ours = trained()
    theirs = LogisticRegression(tol=1e-8, max_iter=1000).fit(part.x.numpy(), part.y.numpy())  # type: ignore[union-attr]
    # Each class's weights against their mean: only differences have a meaning.
    shown = ours["0.weight"] - ours["0.weight"].mean(axis=0)
    np.testing.assert_allclose(shown, theirs.coef_, rtol=0, atol=5e-3)


def test_real_targets_reach_ridge_regression() -> None:
    part = rows(real=True)
    ours = trained(replace(PLAN, penalty=0.5), part, Real(layer(1)))
    n = len(part)  # mean of squares + λ/2·|w|²: scikit-learn's α is λn/2
    theirs = Ridge(alpha=0.5 * n / 2).fit(part.x.numpy(), part.y.numpy()[:, 0])  # type: ignore[union-attr]
    np.testing.assert_allclose(ours["0.weight"][0], theirs.coef_, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours["0.bias"][0], theirs.intercept_, rtol=0, atol=1e-4)


@pytest.mark.parametrize("real", [True, False])
def test_rows_for_which_sgd_diverges_are_learned(real: bool) -> None:
    part = rows(real=real, largest=1000.0)
    task = Real(layer(1)) if real else Small(layer())
    exact = trained(replace(PLAN, length=0.0), part, task)
    assert all(np.isfinite(array).all() for array in exact.values())
    if real:
        steps = trained(replace(PLAN, epochs=20, optimiser="sgd"), part, task)
        assert not all(np.isfinite(array).all() for array in steps.values())


def test_penalty_centre_and_proximal_term_are_in_the_minimum() -> None:
    part = rows()
    centre = {"0.weight": np.full((3, 4), 0.3, np.float32), "0.bias": np.zeros(3, np.float32)}
    found = slope(
        part, a := trained(replace(PLAN, penalty=0.2), centre=centre), strength=0.2, centre=0.3
    )
    assert float(found["weight"].abs().max()) < 1e-5 and float(found["bias"].abs().max()) < 2e-3
    pulled = trained(replace(PLAN, proximal_mu=0.2, penalty=1e-9), towards=centre)
    found = slope(part, pulled, strength=0.2, centre=0.3)
    assert float(found["weight"].abs().max()) < 1e-5
    assert not np.allclose(a["0.bias"], pulled["0.bias"])  # FedProx's term has the bias as well
    found = slope(part, trained(), strength=PRIOR / len(part))
    assert float(found["weight"].abs().max()) < 1e-5


def test_a_step_has_the_length_of_its_mini_batches_and_no_randomness() -> None:
    part, task = rows(), Small(layer())
    torch.manual_seed(0)
    start = read_weights(task.model())["0.weight"]
    plan = replace(PLAN, length=0.0, penalty=1e-9, epochs=2)  # 16 mini-batches at 0.1
    after = trained(plan)
    found = slope(part, after, strength=1 / 1.6, centre=start.astype(float))
    assert float(found["weight"].abs().max()) < 1e-5
    assert_equal_models(after, trained(plan))
    short = np.abs(trained(replace(plan, lr=1e-4))["0.weight"] - start).max()
    assert 0 < short < 0.01 * np.abs(after["0.weight"] - start).max()


def test_a_class_that_is_missing_stays_possible() -> None:
    part = rows()
    one = Held(part.x, torch.zeros(60, dtype=torch.int64))
    arrays = trained(part=one)
    assert np.abs(arrays["0.bias"]).max() < 10


def test_the_penalty_suits_rows_that_are_held_out() -> None:
    """Rows that are copies of each other seem to be known, unless they are one person's."""
    draw = np.random.default_rng(3)
    x = torch.from_numpy(draw.standard_normal((40, 80)).astype(np.float32))
    noise = torch.from_numpy(draw.standard_normal((40, 1)).astype(np.float32))
    task = Real(lambda: nn.Sequential(nn.Linear(80, 1)))

    def found(y: torch.Tensor, times: int = 1, persons: Any = None) -> float:
        part = Held(x.repeat(times, 1), y.repeat(times, 1), persons)
        model = task.model()
        return tuned_penalty(task, model, model[0], part) * len(part)

    assert found(x.sum(dim=1, keepdim=True) + noise) < found(noise) == pytest.approx(max(GRID))
    assert found(noise, 6) <= 10
    assert found(noise, 6, np.tile(np.arange(40), 6)) == pytest.approx(max(GRID))


def test_only_linear_models_of_rows_are_exact() -> None:
    part = rows()
    assert isinstance(part.x, torch.Tensor)
    makes: dict[str, Any] = {
        "bent": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        "deep": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        "normed": with_batch_norm,
    }
    for make in makes.values():
        task = Small(make)
        model = task.model()
        before = read_weights(model)
        assert linear_layer(task, model, part, PLAN) is None
        assert_equal_models(before, read_weights(model))
    task = Small(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    model = task.model()
    before = read_weights(model)
    assert linear_layer(task, model, part, PLAN) is model[1]
    assert_equal_models(before, read_weights(model))
    pictures = Held(part.x.view(60, 1, 2, 2), part.y)
    assert linear_layer(task, model, pictures, PLAN) is None
    for changes in ({"optimiser": "sgd"}, {"momentum": 0.5}, {"clip_norm": 1.0}, {"accumulate": 2}):
        assert linear_layer(task, model, part, replace(PLAN, **changes)) is None  # type: ignore[arg-type]
    load_weights(model, before)
