"""Learning problems: their losses, what targets must be, and that each one learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.work.data import Data, Held
from coterie.client.work.measure import (
    evaluate,
    evaluate_in_full,
    leading,
    loss_error,
    sample_losses,
)
from coterie.client.work.sgd import TrainPlan, train
from coterie.tasks.base import Task, TaskError
from coterie.tasks.problems import Classes, Labels, Masks, Numbers, Problem, Survival


class Learned(Task):
    """A linear model of five numbers for any problem."""

    name = "learned"

    def __init__(self, problem: Problem, outputs: int) -> None:
        self.its_problem, self.outputs = problem, outputs
        self.num_classes = getattr(problem, "num_classes", 0)

    @property
    def problem(self) -> Problem:
        return self.its_problem

    def model(self) -> nn.Module:
        return nn.Linear(5, self.outputs)

    def load(self, options: object) -> None:  # type: ignore[override]
        raise NotImplementedError


class Pixels(Learned):
    """A class for every pixel of a 6×6 image, by its brightness."""

    def model(self) -> nn.Module:
        return nn.Conv2d(1, self.outputs, 3, padding=1)


def some(n: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (n, 5) and a hidden number (n,) that follows from them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=draw)
    return x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0])


def samples(kind: str) -> tuple[Task, Held]:
    x, hidden = some()
    if kind == "class":
        return Learned(Classes(2), 2), Held(x, (hidden > 0).long())
    if kind == "labels":
        return Learned(Labels(2), 2), Held(x, torch.stack([hidden > 0, x[:, 0] > 0], 1).float())
    if kind == "number":
        return Learned(Numbers(1, "days"), 1), Held(x, hidden[:, None] + 3)
    if kind == "survival":
        times = torch.exp(-hidden)
        return Learned(Survival(), 1), Held(x, torch.stack([times, (times < 3).float()], 1))
    images = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return Pixels(Masks(2), 2), Held(images, (images[:, 0] > 0.5).long())


KINDS = ("class", "labels", "number", "survival", "mask")


@pytest.mark.parametrize("kind", KINDS)
def test_each_problem_learns_and_beats_the_best_single_answer(kind: str) -> None:
    task, part = samples(kind)
    torch.manual_seed(0)
    model, data = task.model(), Data(part, part)
    before = evaluate(task, model, part)
    train(task, model, part, TrainPlan(epochs=60, batch_size=20, lr=0.1), seed=0)
    after = evaluate_in_full(task, model, data)
    assert after.loss < before.loss
    assert after.error < before.error
    lead = leading(task)
    value = after.figures[lead.name].value
    assert lead.shortfall(value) == pytest.approx(after.error, abs=1e-6)
    assert set(after.figures) <= set(task.problem.metrics)
    if kind != "mask":
        trivial = lead.shortfall(after.trivial[lead.name])
        assert after.error < trivial
    figure = after.figures[lead.name]
    assert figure.low <= figure.value <= figure.high


def test_cox_loss_is_the_partial_likelihood() -> None:
    risk = torch.tensor([0.3, -1.0, 0.7, 0.1, 0.2])
    time = torch.tensor([2.0, 5.0, 2.0, 1.0, 4.0])
    event = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    expected = 0.0
    for i in range(5):
        if event[i]:
            at_risk = risk[time >= time[i]]
            expected -= float(risk[i] - torch.logsumexp(at_risk, 0)) / 3
    found = Survival().loss(risk[:, None], torch.stack([time, event], 1))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_without_an_event_there_is_nothing_to_learn_and_no_error() -> None:
    loss = Survival().loss(torch.zeros(3, 1, requires_grad=True), torch.tensor([[1.0, 0.0]] * 3))
    loss.backward()
    assert float(loss) == 0


def test_the_error_of_a_survival_loss_is_that_of_leaving_out_one_sample_after_the_other() -> None:
    """The losses of small blocks are not those of their samples among all."""
    task, part = samples("survival")
    torch.manual_seed(0)
    model = task.model().eval()
    losses = sample_losses(task, model, part)
    assert losses.mean() == pytest.approx(evaluate(task, model, part).loss, rel=1e-5)
    x, y = part.at(torch.arange(len(part)))
    outputs = model(x)
    without = torch.eye(len(part)) == 0
    found = [float(Survival().loss(outputs[own], y[own])) for own in without]
    jackknife = np.std(found) * np.sqrt(len(part) - 1)
    assert loss_error(task, model, part) == pytest.approx(jackknife, rel=0.05)
    assert not Survival().losses(outputs, y * torch.tensor([1.0, 0.0])).any(), "without an event"


def test_a_survival_loss_is_measured_over_the_whole_test_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, part = samples("survival")
    torch.manual_seed(0)
    model = task.model()
    whole = evaluate(task, model, part).loss
    monkeypatch.setattr("coterie.client.work.measure.MOST_AT_ONCE", 7)
    assert evaluate(task, model, part).loss == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("problem", "targets", "said"),
    [
        (Classes(3), np.array([0.0, 1.0]), "whole numbers, one per sample"),
        (Classes(3), np.array([0, 3]), r"labels must be in \[0, 2\]. Got labels from 0 to 3"),
        (Labels(2), np.array([[0.0, 2.0]]), "0 or 1, 2 per sample"),
        (Numbers(2), np.zeros((3, 1), np.float32), "2 per sample"),
        (Numbers(1), np.array([[1.0], [np.nan], [np.inf]]), r"in sample 2 \(and 1 others\)"),
        (Survival(), np.array([[1.0, 0.5]]), "events 0 or 1"),
        (Survival(), np.array([[-1.0, 1.0]]), "times must be at least 0"),
        (Masks(2), np.full((1, 2, 2), 2), r"labels must be in \[0, 1\]"),
    ],
)
def test_targets_that_do_not_fit_are_refused_in_words(
    problem: Problem, targets: np.ndarray, said: str
) -> None:
    with pytest.raises(TaskError, match=said):
        problem.check(targets, "training")


def test_a_metric_that_the_problem_does_not_have_is_refused_with_those_it_has() -> None:
    task, _ = samples("number")
    with pytest.raises(TaskError, match="no metric 'auroc'"):
        leading(task, "auroc")


def test_a_leading_metric_is_a_shortfall() -> None:
    task, part = samples("class")
    torch.manual_seed(0)
    model = task.model()
    full = evaluate_in_full(task, model, Data(part, part))
    by_auroc = evaluate(task, model, part, metric="auroc")
    assert by_auroc.error == pytest.approx(1 - full.figures["auroc"].value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", ["", "loss"])
def test_a_full_evaluation_asks_the_model_once_and_gives_what_the_plain_one_gives(
    kind: str, metric: str
) -> None:
    task, part = samples(kind)
    torch.manual_seed(0)
    model = task.model()
    asked = []
    model.register_forward_hook(lambda *_: asked.append(1))
    full = evaluate_in_full(task, model, Data(part, part), metric=metric)
    assert len(asked) == 1, "all samples are one batch"
    plain = evaluate(task, model, part, metric=metric)
    assert (full.loss, full.error, full.num_examples) == (
        plain.loss,
        plain.error,
        plain.num_examples,
    )
    assert full.figures and not plain.figures


@pytest.mark.parametrize("balance", ["weights", "sampling"])
def test_balancing_finds_the_rare_class(balance: str) -> None:
    torch.manual_seed(1)
    x, hidden = some(200)
    part = Held(x, (hidden + torch.randn(200) * 2 > 4.0).long())  # few, and not clearly cut
    task = Learned(Classes(2), 2)
    found = {}
    for how in ("none", balance):
        torch.manual_seed(0)
        model = task.model()
        train(task, model, part, TrainPlan(2, 16, 0.01, balance=how), seed=0)
        found[how] = evaluate_in_full(task, model, Data(part, part)).figures["sensitivity"].value
    assert found[balance] > found["none"] + 0.05


def test_balancing_needs_classes() -> None:
    task, part = samples("number")
    with pytest.raises(TaskError, match="which has no classes"):
        train(task, task.model(), part, TrainPlan(1, 16, 0.1, balance="weights"), seed=0)
