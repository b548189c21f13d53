"""APFL's mixture and pFedGraph's pull at the silo, by hand and through messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import coterie.client.home.rounds
from coterie import wire
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.features.personal.mixture import SHARE, Mixture, mix_in
from coterie.wire import Model
from tests.conftest import assert_equal_models
from tests.kit import model_in, restart_silos
from tests.unit.client.models import batches, fresh, gradient, some_data, with_batch_norm
from tests.unit.client.test_personalisation import ask, error_of, start

Named = dict[str, torch.Tensor]
PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


def parameters(model: nn.Module) -> Named:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def other(model: nn.Module) -> Model:
    """A model of the silo's own that is not the one received."""
    rng = np.random.default_rng(1)
    return {
        k: (a + 0.3 * rng.normal(size=a.shape)).astype(np.float32)
        for k, a in read_weights(model).items()
    }


def mixed(share: float, v: Named, w: Named) -> Named:
    return {k: share * v[k] + (1 - share) * w[k] for k in w}


def trained(plan: TrainPlan, kept: Model | None, *, share: float = 0.4, lr: float = 0.2) -> Any:
    """(w, what is kept) after a training."""
    (task, model), data = fresh(), some_data()
    mixture = Mixture(task, model, data.train, plan, kept=kept, share=share, lr=lr)
    train(task, model, data.train, plan, seed=1, beside=mixture)
    return read_weights(model), mixture.arrays()


@pytest.mark.parametrize("lr", [0.0, 0.2])
def test_the_mixture_is_the_papers_algorithm(lr: float) -> None:
    (_, model), data = fresh(), some_data()
    own, share = other(model), 0.4
    v, w = {k: torch.from_numpy(a.copy()) for k, a in own.items()}, parameters(model)
    for epoch in batches(10, PLAN, 1):
        for batch in epoch:
            x, y = data.train.x[batch], data.train.y[batch]
            g = gradient(model, mixed(share, v, w), x, y)
            towards_share = sum(float(((v[k] - w[k]) * g[k]).sum()) for k in w)
            moved = gradient(model, w, x, y)
            v = {k: v[k] - PLAN.lr * share * g[k] for k in w}
            w = {k: w[k] - PLAN.lr * moved[k] for k in w}
            share = min(max(share - lr * towards_share, 0.0), 1.0)
    got_w, kept = trained(PLAN, {**own, SHARE: np.array(0.4, np.float32)}, share=0.9, lr=lr)
    assert kept[SHARE] == pytest.approx(share, abs=1e-6)
    assert (lr == 0) == (share == 0.4), "the share moves if it may"
    for name in w:
        np.testing.assert_allclose(got_w[name], w[name].numpy(), atol=1e-6)
        np.testing.assert_allclose(kept[name], v[name].numpy(), atol=1e-6)
    load_weights(model, got_w)
    mix_in(model, kept)
    for name, value in mixed(share, v, w).items():
        np.testing.assert_allclose(read_weights(model)[name], value.numpy(), atol=1e-6)


def test_the_share_stays_between_nothing_and_all() -> None:
    (_, model) = fresh()
    for sign in (1, -1):  # a v that is far off on either side of w
        far = {k: (a * np.float32(sign * 9)).astype(np.float32) for k, a in other(model).items()}
        _, kept = trained(PLAN, {**far, SHARE: np.array(0.5, np.float32)}, lr=100.0)
        assert 0 <= float(kept[SHARE]) <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2, "clip_norm": 0.1},
        {"optimiser": "adamw", "balance": "weights"},
        {"momentum": 0.9, "proximal_mu": 0.5, "weight_decay": 0.01},
    ],
)
def test_the_common_model_is_trained_bit_for_bit_as_without_a_mixture(
    changes: dict[str, Any],
) -> None:
    plan = TrainPlan(epochs=2, batch_size=4, lr=0.1, **changes)
    (task, model), data = fresh(), some_data()
    train(task, model, data.train, plan, seed=1)
    w, kept = trained(plan, None)
    assert_equal_models(w, read_weights(model))
    assert any(not np.array_equal(kept[name], w[name]) for name in w)


def test_dropout_in_the_mixture_changes_nothing_of_the_common_model() -> None:
    def with_dropout() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def model_after(*, beside: bool) -> Model:
        (task, _), data = fresh(), some_data()
        model = with_dropout()
        load_weights(model, read_weights(with_dropout()))
        mixture = Mixture(task, model, data.train, PLAN, kept=None, share=0.5, lr=0.1)
        train(task, model, data.train, PLAN, seed=1, beside=mixture if beside else None)
        return read_weights(model)

    assert_equal_models(model_after(beside=True), model_after(beside=False))


def test_statistics_of_the_mixture_are_its_own() -> None:
    (task, model), data = fresh(with_batch_norm), some_data(10)
    mixture = Mixture(task, model, data.train, PLAN, kept=None, share=0.5, lr=0.1)
    train(task, model, data.train, PLAN, seed=1, beside=mixture)
    own, shared = mixture.arrays(), read_weights(model)
    assert own["1.num_batches_tracked"] == shared["1.num_batches_tracked"] > 0
    assert not np.array_equal(own["1.running_mean"], shared["1.running_mean"])
    mix_in(model, own)
    np.testing.assert_array_equal(read_weights(model)["1.running_mean"], own["1.running_mean"])


# ---------------------------------------------------------------- pFedGraph's pull


def test_the_pull_is_the_gradient_of_the_cosine() -> None:
    (task, model), data = fresh(), some_data()
    towards, lam = other(model), 0.8
    w = {k: p.requires_grad_() for k, p in parameters(model).items()}
    r = torch.cat([torch.from_numpy(towards[k]).ravel() for k in w])
    for epoch in batches(10, PLAN, 1):
        for batch in epoch:
            out = functional_call(model, w, (data.train.x[batch],))
            flat = torch.cat([p.ravel() for p in w.values()])
            cosine = torch.nn.functional.cosine_similarity(flat, r, dim=0)
            objective = cross_entropy(out, data.train.y[batch]) - lam * cosine
            steps = torch.autograd.grad(objective, list(w.values()))
            w = {
                k: (p - PLAN.lr * g).detach().requires_grad_()
                for (k, p), g in zip(w.items(), steps, strict=True)
            }
    plan = TrainPlan(PLAN.epochs, PLAN.batch_size, PLAN.lr, cosine_lambda=lam)
    train(task, model, data.train, plan, seed=1, towards=towards)
    for name, value in read_weights(model).items():
        np.testing.assert_allclose(value, w[name].detach().numpy(), atol=1e-6, err_msg=name)


def test_a_strong_pull_keeps_the_direction_of_the_model_received() -> None:
    model = start()

    def cosine(strength: float) -> float:
        reply = ask(wire.TRAIN, model, server_round=1, cosine_lambda=strength, local_epochs=3)
        own = model_in(reply)
        one, other = (np.concatenate([m[k].ravel() for k in model]) for m in (own, model))
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    assert cosine(0.0) < cosine(0.5) < cosine(5.0) <= 1 + 1e-6


# ---------------------------------------------------------------- messages

APFL = {"personalise": "apfl", "mixture": 0.4, "mixture_lr": 0.5}


def kept(round: int, home: str = "") -> Model:
    return coterie.client.home.rounds._memory[("a", home, "apfl", "one")][round]


def test_apfl_sends_the_common_model_alone_and_is_tested_with_the_mixture() -> None:
    first, second = start(1), start(2)
    shared = ask(wire.TRAIN_APFL, first, server_round=1, **APFL)
    plain = ask(wire.TRAIN, first, server_round=1)
    assert_equal_models(model_in(shared), model_in(plain))
    assert set(shared.content) == {wire.ARRAYS, wire.METRICS}
    own_metrics = set(wire.read_metrics(shared.content))
    assert own_metrics == set(wire.read_metrics(plain.content)), "α does not leave"
    own, share = kept(1), float(kept(1)[SHARE])
    assert 0 < share != 0.4
    reply = ask(wire.EVALUATE, second, server_round=1, **APFL)
    mixture = {k: (share * own[k] + (1 - share) * a).astype(np.float32) for k, a in second.items()}
    assert wire.read_metrics(reply.content)[wire.ERROR] == pytest.approx(error_of(mixture))
    again = ask(wire.TRAIN_APFL, second, server_round=2, evaluate_received=True, **APFL)
    stated = wire.read_metrics(again.content)[wire.RECEIVED_ERROR]
    assert stated == pytest.approx(error_of(mixture))


def test_a_round_done_twice_or_after_a_restart_gives_the_same(tmp_path: Path) -> None:
    home = str(tmp_path)
    ask(wire.TRAIN_APFL, start(1), home=home, server_round=1, **APFL)
    ask(wire.TRAIN_APFL, start(2), home=home, server_round=2, **APFL)
    once = kept(2, home)
    restart_silos()
    ask(wire.TRAIN_APFL, start(2), home=home, server_round=2, **APFL)
    again = kept(2, home)
    assert set(again) == set(once) and SHARE in once
    for name, array in once.items():
        np.testing.assert_array_equal(again[name], array)


def test_a_training_for_another_purpose_keeps_nothing() -> None:
    ask(wire.TRAIN_APFL, start(), server_round=1, purpose="trial", **APFL)
    assert not coterie.client.home.rounds._memory


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"mixture must be in \[0, 1\]. Got 1.5"):
        ask(wire.TRAIN_APFL, start(), server_round=1, **{**APFL, "mixture": 1.5})
