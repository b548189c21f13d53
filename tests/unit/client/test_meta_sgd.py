"""Per-FedAvg's and pFedMe's steps against autograd by hand, and tests of adapted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import coterie.client.work.session
from coterie import wire
from coterie.client.work.measure import evaluate
from coterie.client.work.meta_sgd import train_per_fedavg, train_pfedme
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import load_weights, read_weights
from tests import kit
from tests.conftest import assert_equal_models, digits_config
from tests.kit import initial, model_in, restart_silos
from tests.unit.client.models import batches, fresh, gradient, some_data, with_batch_norm

PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


def assert_near(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in read_weights(model).items():
        np.testing.assert_allclose(value, expected[name].numpy(), atol=1e-6, err_msg=name)


def test_per_fedavg_is_the_first_order_formula() -> None:
    (task, model), data = fresh(), some_data()
    w = {k: v.detach().clone() for k, v in model.named_parameters()}
    for epoch in batches(10, PLAN, 1):
        for before, batch in zip([epoch[-1], *epoch[:-1]], epoch, strict=True):
            inner = gradient(model, w, data.train.x[before], data.train.y[before])
            ahead = {k: w[k] - 0.05 * inner[k] for k in w}
            outer = gradient(model, ahead, data.train.x[batch], data.train.y[batch])
            w = {k: w[k] - PLAN.lr * outer[k] for k in w}
    train_per_fedavg(task, model, data.train, PLAN, meta_lr=0.05, seed=1)
    assert_near(model, w)


def test_pfedme_is_the_papers_formula() -> None:
    (task, model), data = fresh(), some_data()
    lam, eta, inner = 3.0, 0.2, 4
    w = {k: v.detach().clone() for k, v in model.named_parameters()}
    for epoch in batches(10, PLAN, 1):
        for batch in epoch:
            theta = dict(w)
            for _ in range(inner):
                g = gradient(model, theta, data.train.x[batch], data.train.y[batch])
                theta = {k: theta[k] - PLAN.lr * (g[k] + lam * (theta[k] - w[k])) for k in w}
            w = {k: w[k] - eta * lam * (w[k] - theta[k]) for k in w}
    train_pfedme(
        task, model, data.train, PLAN, moreau_lambda=lam, moreau_lr=eta, inner_steps=inner, seed=1
    )
    assert_near(model, w)


def trained(plan: TrainPlan, how: str) -> dict[str, Any]:
    (task, model), data = fresh(), some_data()
    if how == "per_fedavg":
        train_per_fedavg(task, model, data.train, plan, meta_lr=0.05, seed=1)
    else:
        train_pfedme(
            task, model, data.train, plan, moreau_lambda=3.0, moreau_lr=0.2, inner_steps=2, seed=1
        )
    return read_weights(model)


@pytest.mark.parametrize("how", ["per_fedavg", "pfedme"])
def test_steps_take_the_place_of_epochs(how: str) -> None:
    """Ten samples in batches of four: three steps an epoch."""
    for epochs in (1, 9):
        six = trained(TrainPlan(epochs=epochs, batch_size=4, lr=0.1, steps=6), how)
        assert_equal_models(six, trained(PLAN, how))
    four, six = (trained(TrainPlan(1, 4, 0.1, steps=steps), how) for steps in (4, 6))
    assert any(not np.array_equal(four[name], six[name]) for name in six)


def test_a_single_step_of_per_fedavg_too_has_the_epoch_s_last_batch_before_it() -> None:
    (task, model), data = fresh(), some_data()
    w = {k: v.detach().clone() for k, v in model.named_parameters()}
    (epoch,) = batches(10, TrainPlan(1, 4, 0.1), 1)
    inner = gradient(model, w, data.train.x[epoch[-1]], data.train.y[epoch[-1]])
    ahead = {k: w[k] - 0.05 * inner[k] for k in w}
    outer = gradient(model, ahead, data.train.x[epoch[0]], data.train.y[epoch[0]])
    plan = TrainPlan(epochs=1, batch_size=4, lr=0.1, steps=1)
    train_per_fedavg(task, model, data.train, plan, meta_lr=0.05, seed=1)
    assert_near(model, {k: w[k] - 0.1 * outer[k] for k in w})


def test_a_last_batch_of_one_is_left_out_with_batch_norm() -> None:
    task, model = fresh(with_batch_norm)
    plan = TrainPlan(epochs=1, batch_size=3, lr=0.1)
    train_per_fedavg(task, model, some_data(10).train, plan, meta_lr=0.05, seed=1)
    assert int(read_weights(model)["1.num_batches_tracked"]) == 6  # two passes over three batches


# ---------------------------------------------------------------- messages


def ask(kind: str, model: Any, node: dict[str, Any] | None = None, **config: Any) -> Message:
    own = {"server_round": 1, "local_epochs": 1, "batch_size": 8, "lr": 0.05, **config}
    return kit.ask(kind, node, model=model, **own)


def session() -> Any:
    (only,) = coterie.client.work.session._sessions.values()
    return only


ADAPT = {"adapt_steps": 4, "adapt_lr": 0.2, "adapt_mu": 0.5}


def adapted(model: Any) -> Any:
    load_weights(session().model, model)
    plan = TrainPlan(4, len(session().data.train.x), 0.2, proximal_mu=0.5)
    train(session().task, session().model, session().data.train, plan, seed=0)
    return evaluate(session().task, session().model, session().data.test)


@pytest.mark.parametrize("kind", [wire.TRAIN, wire.TRAIN_PER_FEDAVG, wire.TRAIN_PFEDME])
def test_the_received_model_is_tested_adapted_and_trained_as_it_came(kind: str) -> None:
    model = initial()
    with_test = ask(kind, model, evaluate_received=True, **ADAPT)
    without = ask(kind, model)
    got, plain = (model_in(m) for m in (with_test, without))
    assert_equal_models(got, plain)
    metrics = wire.read_metrics(with_test.content)
    expected = adapted(model)
    assert metrics[wire.RECEIVED_ERROR] == expected.error
    assert metrics[wire.RECEIVED_LOSS] == pytest.approx(expected.loss)


def test_the_kept_model_is_the_adapted_one(tmp_path: Path) -> None:
    node = digits_config("a", home=str(tmp_path))
    model = initial()
    restart_silos()
    reply = ask(wire.EVALUATE, model, node, keep=True, run="r", **ADAPT)
    expected = adapted(model)
    assert wire.read_metrics(reply.content)[wire.ERROR] == expected.error
    (file,) = tmp_path.rglob("*.safetensors")
    saved = load_file(file)
    for name, value in read_weights(session().model).items():
        np.testing.assert_array_equal(saved[name], value)


def test_evaluation_on_training_data_says_their_number_and_loss() -> None:
    model = initial()
    metrics = wire.read_metrics(ask(wire.EVALUATE_TRAINING, model).content)
    load_weights(session().model, model)
    data = session().data
    with torch.no_grad():
        logits = session().model.eval()(data.train.x)
    assert metrics[wire.NUM_EXAMPLES] == len(data.train.x)
    assert metrics[wire.LOSS] == pytest.approx(float(cross_entropy(logits, data.train.y)), rel=1e-5)
    wrong = float((logits.argmax(1) != data.train.y).float().mean())
    assert metrics[wire.ERROR] == pytest.approx(wrong)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (wire.TRAIN_PFEDME, {"inner_steps": 0}),
        (wire.TRAIN_PFEDME, {"moreau_lambda": -1.0}),
        (wire.TRAIN_PER_FEDAVG, {"meta_lr": "much"}),
        (wire.TRAIN, {"adapt_steps": -1}),
        (wire.EVALUATE, {"adapt_steps": 2.5}),
        (wire.EVALUATE_TRAINING, {"task": "another"}),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: str, wrong: dict[str, Any]) -> None:
    reply = ask(kind, initial(), **wrong)
    assert reply.has_error()
    (key,) = wrong
    assert key.replace("_", "-") in str(reply.error.reason)
