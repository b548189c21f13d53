"""DP-SGD at the silo: what a step is, whose noise it has, and how much of it an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.home.privacy import Privacy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.work.data import Held, Part, Streamed
from coterie.client.work.session import open_session
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.features.privacy import budget
from coterie.features.privacy import dp_sgd as private
from coterie.features.privacy.budget import Budget
from coterie.features.privacy.dp_sgd import (
    Private,
    Stream,
    noise_per_number,
    num_trained,
    require_private,
    train_privately,
)
from coterie.tasks.base import SiloData, TaskError
from coterie.tasks.problems import Problem, Survival
from tests.conftest import assert_equal_models
from tests.unit.client.asked import Listed, Nested
from tests.unit.client.models import Small, fresh, linear, some_data, with_batch_norm, with_dropout

TERMS = Privacy(epsilon=1000.0)
PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    budget._memory.clear()
    yield
    budget._memory.clear()


def at(home: Path | str = "", *, terms: Privacy = TERMS, n: int = 10) -> Private:
    settings = SiloSettings("a", home=str(home), privacy=terms)
    return Private(Budget(settings, n, "run"), "run", 1)


def trained(
    how: Private,
    plan: TrainPlan = PLAN,
    *,
    seed: int = 1,
    part: Part | None = None,
    make: Callable[[], nn.Module] = linear,
) -> dict[str, Any]:
    task, model = fresh(make)
    train_privately(task, model, some_data().train if part is None else part, plan, how, seed=seed)
    return read_weights(model)


def moved(model: dict[str, Any], make: Callable[[], nn.Module] = linear) -> np.ndarray:
    start = read_weights(fresh(make)[1])
    return np.concatenate([(model[name] - start[name]).ravel() for name in start])


# ---------------------------------------------------------------- a step


def test_a_step_without_noise_is_the_mean_of_clipped_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a loop over samples with torch's own clipping."""
    monkeypatch.setattr(Stream, "normal", lambda self, count: np.zeros(count))
    clip = 1.5
    got = trained(at(terms=replace(TERMS, clip=clip)), replace(PLAN, batch_size=10, epochs=1))
    task, model = fresh()
    part, total = some_data().train, [torch.zeros_like(p) for p in model.parameters()]
    norms = []
    for i in range(len(part)):
        model.zero_grad()
        task.loss(model(part.x[i : i + 1]), part.y[i : i + 1]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        for own, p in zip(total, model.parameters(), strict=True):
            own += p.grad
    assert min(norms) < clip < max(norms), "some are clipped and some are not"
    for (name, p), own in zip(model.named_parameters(), total, strict=True):
        expected = (p - 0.1 * own / 10).detach().numpy()
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-6)


def test_a_step_is_opacus_own() -> None:
    """Clipped sums and their scale, on the same samples, against Opacus' optimiser."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    task, model = fresh()
    part = some_data().train
    sums = private._Sums(
        task, model, dict(model.named_parameters()), 0.7, "float32", torch.device("cpu")
    )
    ours, _ = sums.of(part, torch.arange(10), seed=0)
    theirs = GradSampleModule(fresh()[1])
    optimiser = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.7,
        expected_batch_size=10,
    )
    task.loss(theirs(part.x), part.y).backward()
    optimiser.pre_step()
    for own, p in zip(ours, theirs.parameters(), strict=True):
        np.testing.assert_allclose(own / 10, p.grad.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("far", [1e4, 1e30, float("inf"), float("nan")])
def test_one_sample_moves_the_sum_by_no_more_than_the_clip(far: float) -> None:
    task, model = fresh()
    part, named = some_data().train, dict(model.named_parameters())
    x = part.x.clone()
    x[3] = far
    sums = private._Sums(task, model, named, 0.5, "float32", torch.device("cpu"))
    others = torch.tensor([i for i in range(10) if i != 3])
    with_it, _ = sums.of(Held(x, part.y), torch.arange(10), seed=0)
    without, _ = sums.of(Held(x, part.y), others, seed=0)
    squares = [float((a - b).square().sum()) for a, b in zip(with_it, without, strict=True)]
    assert sum(squares) <= (0.5 * (1 + 1e-5)) ** 2


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, momentum=0.9, weight_decay=0.2),
        replace(PLAN, proximal_mu=2.0, epochs=5),
        replace(PLAN, accumulate=2, steps=7),
        replace(PLAN, momentum=0.5, penalty=3.0, epochs=5),
    ],
)
def test_the_noise_is_there_and_as_large_as_the_update_says(plan: TrainPlan) -> None:
    """Gradients are clipped to next to nothing, so that what moves is noise."""
    terms = Privacy(1000.0, noise=500.0, clip=1e-6)
    part = some_data().train
    task, model = fresh(lambda: nn.Linear(4, 20_000, bias=not plan.penalty))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    said = noise_per_number(task, model, part, plan, terms)
    assert said is not None
    train_privately(task, model, part, plan, at(terms=terms), seed=0)
    squares = [float(p.detach().square().sum()) for p in model.parameters()]
    assert sum(squares) == pytest.approx(said * num_trained(model), rel=0.03)


def test_how_much_noise_there_is_is_not_said_where_it_is_not_known() -> None:
    task, model = fresh()
    part = some_data().train
    for plan in (replace(PLAN, optimiser="adam"), replace(PLAN, clip_norm=1.0)):
        assert noise_per_number(task, model, part, plan, TERMS) is None


def test_every_sample_is_in_a_step_by_chance() -> None:
    """Poisson sampling: sizes of batches vary as the accountant has it."""
    stream = Stream(bytes(32))
    counts = [(stream.uniform(1000) <= 0.1).sum() for _ in range(500)]
    assert np.mean(counts) == pytest.approx(100, abs=2)
    assert np.var(counts) == pytest.approx(90, rel=0.2)


def test_the_stream_is_normal_and_its_key_s() -> None:
    numbers = Stream(bytes(32)).normal(200_001)
    assert len(numbers) == 200_001 and np.isfinite(numbers).all()
    assert abs(numbers.mean()) < 0.01 and numbers.std() == pytest.approx(1, rel=0.01)
    assert np.mean(np.abs(numbers) < 1.96) == pytest.approx(0.95, abs=0.003)
    assert np.array_equal(Stream(bytes(32)).normal(5), Stream(bytes(32)).normal(5))
    assert not np.array_equal(Stream(b"1" * 32).normal(5), Stream(bytes(32)).normal(5))


# ---------------------------------------------------------------- whose noise


def test_no_two_trainings_of_a_silo_with_a_folder_have_the_same_noise(tmp_path: Path) -> None:
    how = at(tmp_path, terms=Privacy(1000.0, noise=10.0))
    first, again = (moved(trained(how)) for _ in range(2))
    assert np.linalg.norm(first - again) > 0.5 * np.linalg.norm(first)
    assert how.budget.spent().charges == 2


def test_a_silo_without_a_folder_repeats_itself_by_the_seed() -> None:
    assert_equal_models(trained(at()), trained(at()))
    assert not np.array_equal(moved(trained(at(), seed=2)), moved(trained(at())))


def test_without_privacy_a_silo_trains_as_ever() -> None:
    plan = replace(PLAN, momentum=0.9, proximal_mu=0.1, penalty=0.2)
    settings = SiloSettings("a", options={"train": 30, "test": 10}, device="cpu")
    session = open_session(settings)
    start = read_weights(session.model)
    models = []
    for own in (session.train, partial(train, session.task, session.model)):
        load_weights(session.model, start)
        loss = own(session.data.train, plan, seed=3)
        models.append({**read_weights(session.model), "loss": np.array(loss)})
    assert_equal_models(models[0], models[1])


# ---------------------------------------------------------------- any model of a task


def test_nests_branches_dropout_and_datasets_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Nested()
    task.name = "nested"
    data = task.load({"rows": 12})
    assert isinstance(data, SiloData)
    part = Held(
        {
            "numbers": torch.from_numpy(data.x_train["numbers"]),
            "more": [torch.from_numpy(data.x_train["more"][0])],
        },
        torch.from_numpy(data.y_train),
    )
    model = task.model()
    before = read_weights(model)
    assert train_privately(task, model, part, PLAN, at(), seed=0) > 0
    assert not np.array_equal(read_weights(model)["numbers.weight"], before["numbers.weight"])
    assert np.isfinite(moved(trained(at(), make=with_dropout), with_dropout)).all()
    held = some_data().train
    streamed = Streamed(
        Listed(held.x.numpy(), held.y.numpy()), torch.arange(10), torch.device("cpu")
    )
    monkeypatch.setattr(Stream, "normal", lambda self, count: np.zeros(count))
    whole = replace(PLAN, batch_size=10, epochs=1)  # all samples are drawn: no chance in it
    assert_equal_models(trained(at(), whole, part=streamed), trained(at(), whole, part=held))


class Deciding(nn.Linear):
    """What it does depends on what it sees, which torch.func cannot follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 0 else -super().forward(x)


def test_a_model_that_torch_cannot_vectorise_is_trained_sample_by_sample() -> None:
    task, model = fresh(lambda: Deciding(4, 3))
    named = dict(model.named_parameters())
    sums = private._Sums(task, model, named, 1e9, "float32", torch.device("cpu"))
    part = some_data().train
    found, _ = sums.of(part, torch.arange(10), seed=0)
    expected = torch.zeros_like(model.weight)
    for i in range(10):
        loss = task.loss(model(part.x[i : i + 1]), part.y[i : i + 1])
        expected += torch.autograd.grad(loss, model.weight)[0]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6)


class Counting(nn.Module):
    """Writes down what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += x.sum(dim=0)
        out: torch.Tensor = self.layer(x)
        return out


def test_what_a_module_notes_of_the_data_does_not_leave_with_its_buffers() -> None:
    task, model = fresh(Counting)
    train(task, model, some_data().train, PLAN, seed=0)
    assert read_weights(model)["seen"].any()
    assert not trained(at(), make=Counting)["seen"].any()


class OwnLoop(Small):
    def train(self, model: nn.Module, passes: Any) -> float:
        raise NotImplementedError


class Lives(Small):
    @property
    def problem(self) -> Problem:
        return Survival()


def test_what_cannot_be_private_is_refused_with_the_reason() -> None:
    with pytest.raises(TaskError, match=r"BatchNorm, which mixes samples\. Use .* GroupNorm"):
        require_private(*fresh(with_batch_norm))
    with pytest.raises(TaskError, match="it has its own train"):
        require_private(OwnLoop(linear), linear())
    with pytest.raises(
        TaskError, match=r"its loss \(survival\) is computed over all samples together and is"
    ):
        require_private(Lives(linear), linear())
    require_private(*fresh(with_dropout))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": float("nan")}, "epsilon must be above 0"),
        ({"epsilon": 1.0, "noise": 0.05}, "noise must be at least 0.1"),
        ({"epsilon": 1.0, "clip": 0.0}, "clip must be above 0"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta must be above 0 and below 1"),
    ],
)
def test_terms_out_of_bounds_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Privacy(**values)


def test_delta_must_be_less_than_one_of_the_samples() -> None:
    assert Privacy(1.0).delta_of(200) == pytest.approx(1 / 2000)
    with pytest.raises(ValueError, match="delta must be below 1/200"):
        Privacy(1.0, delta=0.005).delta_of(200)
    with pytest.raises(SettingsError, match=r"in \[privacy\], delta must be below 1/10"):
        _ = at(terms=Privacy(1.0, delta=0.1)).budget.delta
