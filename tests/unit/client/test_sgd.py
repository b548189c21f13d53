"""Local training against torch's own optimiser and autograd, and its seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.prepare import warm_up
from coterie.client.work.measure import evaluate
from coterie.client.work.meta_sgd import train_per_fedavg
from coterie.client.work.sgd import TooFewError, TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights
from tests.conftest import assert_equal_models
from tests.unit.client.models import Small, fresh, linear, some_data, with_batch_norm, with_dropout


def trained(plan: TrainPlan, *, seed: int = 1, make: Any = linear, n: int = 10) -> dict[str, Any]:
    task, model = fresh(make)
    train(task, model, some_data(n).train, plan, seed=seed)
    return read_weights(model)


PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


# ---------------------------------------------------------------- seeds


def test_a_seed_is_the_same_for_ever() -> None:
    """sha256("0/a/1/")[:8], little endian, halved: recorded runs can be repeated later."""
    import hashlib

    digest = hashlib.sha256(b"7/north/3/catch-up").digest()
    assert seed_of(7, "north", 3, "catch-up") == int.from_bytes(digest[:8], "little") // 2


@pytest.mark.parametrize("make", [linear, with_dropout, with_batch_norm])
def test_the_same_seed_gives_bit_identical_weights_and_another_does_not(make: Any) -> None:
    assert_equal_models(trained(PLAN, seed=1, make=make), trained(PLAN, seed=1, make=make))
    first, other = trained(PLAN, seed=1, make=make), trained(PLAN, seed=2, make=make)
    assert any(not np.array_equal(first[k], other[k]) for k in first)


# ---------------------------------------------------------------- what is minimised


def by_hand(plan: TrainPlan, seed: int, n: int = 10) -> dict[str, Any]:
    """The explicit objective, loss + μ/2·|w − w_received|², with torch.optim.SGD and autograd."""
    _, model = fresh()
    data = some_data(n)
    anchor = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.SGD(
        model.parameters(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
    )
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(plan.epochs):
        for batch in torch.randperm(n, generator=shuffle).split(plan.batch_size):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train.x[batch]), data.train.y[batch])
            far = sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchor, strict=True))
            (loss + plan.proximal_mu / 2 * far).backward()
            optimiser.step()
    return read_weights(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.05},
        {"proximal_mu": 0.7},
        {"momentum": 0.5, "weight_decay": 0.01, "proximal_mu": 2.0},
    ],
    ids=str,
)
def test_training_equals_torch_optim_sgd_on_the_explicit_objective(
    changes: dict[str, float],
) -> None:
    plan = TrainPlan(epochs=3, batch_size=4, lr=0.1, **changes)
    ours, theirs = trained(plan, seed=5), by_hand(plan, 5)
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-5, atol=1e-6)
    plain = trained(TrainPlan(epochs=3, batch_size=4, lr=0.1), seed=5)
    assert not changes or any(not np.allclose(plain[k], ours[k], atol=1e-4) for k in plain)


@pytest.mark.parametrize("around_zero", [True, False])
def test_a_penalty_pulls_all_but_the_last_bias_to_its_centre(around_zero: bool) -> None:
    """At the end the loss's gradient is −λ(w − c), and 0 at the last bias."""
    task, model = fresh(lambda: nn.Sequential(nn.Linear(4, 3)))
    data = some_data(10)
    centre = None if around_zero else read_weights(model)
    plan = TrainPlan(epochs=500, batch_size=10, lr=0.5, penalty=0.3)
    train(task, model, data.train, plan, seed=1, centre=centre)
    model.zero_grad()
    nn.functional.cross_entropy(model(data.train.x), data.train.y).backward()
    weight, bias = model[0].weight, model[0].bias
    away = weight.detach() - (0 if centre is None else torch.from_numpy(centre["0.weight"]))
    assert away.norm() > 0.1
    torch.testing.assert_close(weight.grad, -0.3 * away, rtol=0, atol=1e-5)
    torch.testing.assert_close(bias.grad, torch.zeros(3), rtol=0, atol=1e-5)


def test_no_penalty_is_too_large() -> None:
    """A gradient step of λ = 10⁶ would diverge at any usual learning rate."""
    task, model = fresh(with_batch_norm)
    plan = TrainPlan(epochs=2, batch_size=4, lr=0.1, penalty=1e6)
    train(task, model, some_data(10).train, plan, seed=1)
    kept = {name: p.detach() for name, p in model.named_parameters()}
    free = kept.pop("3.bias")
    assert max(float(p.abs().max()) for p in kept.values()) < 1e-4
    assert float(free.abs().max()) > 1e-2


def test_steps_are_mini_batches_however_many_epochs_that_takes() -> None:
    """Ten samples in batches of four: three steps an epoch."""
    two = TrainPlan(epochs=2, batch_size=4, lr=0.1)
    for same in (TrainPlan(1, 4, 0.1, steps=6), TrainPlan(9, 4, 0.1, steps=6)):
        assert_equal_models(trained(same), trained(two))
    task, model = fresh()
    start = read_weights(model)
    data = some_data(10)
    batch = torch.randperm(10, generator=torch.Generator().manual_seed(1))[:4]
    loss = nn.functional.cross_entropy(model(data.train.x[batch]), data.train.y[batch])
    loss.backward()
    said = train(
        task, model, data.train, TrainPlan(epochs=5, batch_size=4, lr=0.1, steps=1), seed=1
    )
    assert said == pytest.approx(loss.item())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = start[name] - np.float32(0.1) * parameter.grad.numpy()
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_stay() -> None:
    task, model = fresh()
    model[0].weight.requires_grad_(False)
    before, frozen = read_weights(model), model[0].weight.clone()
    train(task, model, some_data().train, PLAN, seed=1)
    after = read_weights(model)
    assert torch.equal(model[0].weight, frozen) and "0.weight" not in after
    assert not np.array_equal(before["2.weight"], after["2.weight"])


def test_the_loss_reported_is_the_mean_over_the_last_epochs_samples() -> None:
    """With a learning rate of almost nothing it is the loss of the model itself."""
    task, model = fresh()
    data = some_data(10)
    expected = float(nn.functional.cross_entropy(model(data.train.x), data.train.y))
    got = train(task, model, data.train, TrainPlan(epochs=2, batch_size=4, lr=1e-12), seed=1)
    assert got == pytest.approx(expected, rel=1e-5)


def test_bfloat16_trains_float32_weights_to_nearly_the_same_model() -> None:
    exact = trained(PLAN)
    half = trained(TrainPlan(epochs=2, batch_size=4, lr=0.1, precision="bfloat16"))
    for name, array in exact.items():
        assert half[name].dtype == np.float32
        np.testing.assert_allclose(half[name], array, atol=0.02)
    assert any(not np.array_equal(half[k], exact[k]) for k in exact)


# ---------------------------------------------------------------- BatchNorm


def test_a_last_batch_of_one_is_skipped_where_batch_norm_cannot_have_it() -> None:
    task, model = fresh(with_batch_norm)
    train(task, model, some_data(9).train, TrainPlan(epochs=1, batch_size=4, lr=0.1), seed=1)
    assert int(model[1].num_batches_tracked) == 2


def test_a_last_batch_of_one_counts_where_there_is_no_batch_norm() -> None:
    plan = TrainPlan(epochs=2, batch_size=4, lr=0.1)
    np.testing.assert_allclose(
        trained(plan, n=9)["0.weight"], by_hand(plan, 1, n=9)["0.weight"], atol=1e-6
    )


def test_the_loss_of_an_epoch_with_a_skipped_sample_is_the_mean_of_the_others() -> None:
    class Constant(Small):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.sum() * 0 + 2.0

    torch.manual_seed(0)
    task = Constant(with_batch_norm)
    plan = TrainPlan(epochs=1, batch_size=4, lr=0.1)
    assert train(task, task.model(), some_data(9).train, plan, seed=1) == pytest.approx(2.0)


def of_images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def test_one_sample_is_too_few_where_batch_norm_has_no_statistics_of_it() -> None:
    task, model = fresh(with_batch_norm)
    before = read_weights(model)
    for work in (
        lambda: train(task, model, some_data(1).train, PLAN, seed=1),
        lambda: train_per_fedavg(task, model, some_data(1).train, PLAN, meta_lr=0.1, seed=1),
        lambda: warm_up(task, model, some_data(1)),
    ):
        with pytest.raises(TooFewError, match="BatchNorm cannot be trained on one sample"):
            work()
    assert_equal_models(read_weights(model), before)


def test_one_image_is_enough_where_its_pixels_are_normalised_together() -> None:
    task, model = fresh(of_images)
    train(task, model, some_data(1).train, TrainPlan(epochs=1, batch_size=4, lr=0.1), seed=1)
    assert int(model[1].num_batches_tracked) == 1, "the check leaves no trace"


# ---------------------------------------------------------------- weights


def test_weights_that_are_read_and_loaded_are_the_same_bit_for_bit() -> None:
    _, model = fresh(with_batch_norm)
    weights = read_weights(model)
    torch.manual_seed(9)
    other = with_batch_norm()
    load_weights(other, weights)
    assert_equal_models(read_weights(other), weights)


def test_weights_read_are_copies_and_weights_loaded_are_not_held() -> None:
    _, model = fresh()
    weights = read_weights(model)
    weights["0.weight"][:] = 7
    assert not (model[0].weight == 7).any()
    load_weights(model, weights)
    weights["0.weight"][:] = 8
    assert (model[0].weight == 7).all()


@pytest.mark.parametrize("change", ["missing", "more", "shape", "transposed"])
def test_other_weights_than_the_models_are_refused_by_name(change: str) -> None:
    _, model = fresh()
    weights = read_weights(model)
    if change == "missing":
        del weights["2.bias"]
    elif change == "more":
        weights["9.bias"] = np.zeros(1, np.float32)
    elif change == "shape":
        weights["2.bias"] = np.zeros(4, np.float32)
    else:
        weights["2.bias"] = weights["2.bias"][None]
    with pytest.raises(ValueError, match=r"[29]\.bias"):
        load_weights(model, weights)


def test_read_only_arrays_can_be_loaded() -> None:
    """What is decoded from a message's bytes cannot be written to."""
    _, model = fresh()
    weights = read_weights(model)
    for array in weights.values():
        array.setflags(write=False)
    load_weights(model, weights)


# ---------------------------------------------------------------- evaluation


def test_evaluation_is_the_mean_loss_and_the_share_of_wrong_answers() -> None:
    task, model = fresh(with_dropout)
    data = some_data(4, 50)
    result = evaluate(task, model, data.test)
    with torch.no_grad():
        outputs = model.eval()(data.test.x)
    assert result.num_examples == 50
    assert result.error == pytest.approx(
        float((outputs.argmax(1) != data.test.y).float().mean()), abs=1e-6
    )
    expected = float(nn.functional.cross_entropy(outputs, data.test.y))
    assert result.loss == pytest.approx(expected, rel=1e-5)


def test_evaluation_in_several_batches_weighs_the_last_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, model = fresh()
    data = some_data(4, 50)
    whole = evaluate(task, model, data.test)
    monkeypatch.setattr("coterie.client.work.measure.MOST_AT_ONCE", 16)
    assert evaluate(task, model, data.test).loss == pytest.approx(whole.loss, rel=1e-5)
    assert evaluate(task, model, data.test).error == whole.error


def test_evaluation_does_not_change_the_model() -> None:
    task, model = fresh(with_batch_norm)
    before = read_weights(model)
    evaluate(task, model, some_data().test)
    assert_equal_models(read_weights(model), before)


@pytest.mark.parametrize("n", [1, 2, 10])
def test_warming_up_works_with_the_smallest_silos(n: int) -> None:
    task, model = fresh()
    warm_up(task, model, some_data(n, 1))
