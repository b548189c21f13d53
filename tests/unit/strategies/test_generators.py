"""The server's generators: signs by hand, stacked = separate, what heads say of the latents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie import wire
from coterie.strategies.errors import FederationError
from coterie.strategies.fedgenp import generators as module
from coterie.strategies.fedgenp.generators import others_loss, reversed_loss, train_shared_generator
from coterie.strategies.fedgenp.latent import (
    Generator,
    GeneratorPlan,
    Objective,
    common_layers,
    fresh_generator,
    linear_head,
    out_of_line,
    predictor_arrays,
    predictor_shape,
)
from coterie.wire import Model

LAYERS: wire.Layers = (("positive",), ("linear", "head.weight", "head.bias"))
CLASSES, LATENT = 4, 6
train_generators = partial(module.train_generators, drawing=np.random.default_rng(3))


def head(seed: int, *, turn: int = 0) -> Model:
    """A head that tells classes by their own coordinates; ``turn`` renames the classes."""
    rng = np.random.default_rng(seed)
    weight = np.zeros((CLASSES, LATENT))
    weight[np.arange(CLASSES), np.arange(CLASSES)] = 3
    weight = np.roll(weight, turn, axis=0) + 0.1 * rng.normal(size=weight.shape)
    return {
        "head.weight": weight.astype(np.float32),
        "head.bias": (0.1 * rng.normal(size=CLASSES)).astype(np.float32),
    }


def fresh(count: int, hidden: int = 16) -> list[Generator]:
    return [
        fresh_generator(
            num_classes=CLASSES, latent=LATENT, hidden=hidden, rng=np.random.default_rng([5, i])
        )
        for i in range(count)
    ]


def rngs(count: int, round: int = 1) -> list[np.random.Generator]:
    return [np.random.default_rng([9, round, i]) for i in range(count)]


def trained(
    heads: Sequence[Model], rounds: int, plan: GeneratorPlan, layers: wire.Layers = LAYERS
) -> tuple[float, float]:
    """Shares that the others' heads, and the own, label as meant after so many rounds."""
    generators, quality = fresh(len(heads)), []
    for round in range(rounds):
        generators, quality = train_generators(
            generators, heads, layers, plan=plan, rngs=rngs(len(heads), round)
        )
    return (float(np.mean([q.others for q in quality])), float(np.mean([q.own for q in quality])))


# ---------------------------------------------------------------- the reversal


def test_the_reversed_gradient_is_the_plain_one_times_minus_the_odds_by_hand() -> None:
    """Two classes, logits (a, b) = (log 3, 0), label 0: p = 3/4 and 1 − p = 1/4.

    Plain −log p: gradient (p − 1, 1 − p) = (−1/4, 1/4). Reversed −log(1 − p): (3/4, −3/4), which
    is the plain one times −p/(1 − p) = −3.
    """
    logits = torch.tensor([[[np.log(3.0)], [0.0]]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0]])
    loss = reversed_loss(logits, labels, "log1mp").sum()
    assert float(loss.detach()) == pytest.approx(np.log(4))
    (gradient,) = torch.autograd.grad(loss, logits)
    np.testing.assert_allclose(gradient.ravel().numpy(), [0.75, -0.75], rtol=1e-12)
    plain = torch.nn.functional.cross_entropy(logits, labels)
    (forward,) = torch.autograd.grad(plain, logits)
    np.testing.assert_allclose(gradient, -3 * forward, rtol=1e-12)


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=6),
    st.integers(0, 5),
    st.sampled_from(["log1mp", "unbounded"]),
)
def test_reversals_point_against_the_own_heads_loss(
    values: list[float], answer: int, reversal: str
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)[None, :, None].requires_grad_()
    labels = torch.tensor([[answer % len(values)]])
    loss = reversed_loss(logits, labels, reversal).sum()  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss, logits)
    (plain,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), logits)
    assert torch.isfinite(gradient).all()
    assert float((gradient * plain).sum()) <= 0
    if reversal == "log1mp":
        assert float(loss.detach()) >= 0
        assert float(gradient.abs().max()) <= 1


def test_clip_stops_counting_at_the_cost_of_a_guess() -> None:
    logits = torch.tensor(
        [[[0.0], [9.0]]], requires_grad=True
    )  # the own head is fooled: −log p = 9
    loss = reversed_loss(logits, torch.tensor([[0]]), "clip")
    assert float(loss.detach()) == pytest.approx(-np.log(2))
    assert float(torch.autograd.grad(loss.sum(), logits)[0].abs().max()) == 0


def test_j1_is_the_mean_over_the_other_heads() -> None:
    heads = {"w": torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]], [[3.0], [0.0]]])}
    latents, labels = torch.ones(3, 1, 1), torch.zeros(3, 1, dtype=torch.int64)
    wrong = np.log1p(np.exp([-1.0, 2.0, -3.0]))  # −log p(0) of each head
    expected = [(wrong.sum() - own) / 2 for own in wrong]
    loss = others_loss(heads, (("linear", "w", ""),), latents, labels, torch.arange(3))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_the_own_head_is_fooled_only_with_the_reversal() -> None:
    """What the others agree on and the own head does not; without the reversal all agree."""
    heads, layers = [head(i) for i in range(3)], LAYERS[1:]
    plan = GeneratorPlan(hidden=16, lr=1e-2, reversal_weight=1.0)
    others, own = trained(heads, 5, plan, layers)
    plain_others, plain_own = trained(
        heads, 5, plan.model_copy(update={"reversal": "none"}), layers
    )
    assert others > 0.8 and own < 0.4
    assert plain_others > 0.95 and plain_own > 0.95


def test_latents_keep_their_labels_for_the_others() -> None:
    others, _ = trained([head(i) for i in range(6)], 8, GeneratorPlan(hidden=32, lr=3e-3))
    assert others >= 0.8


def test_long_training_stays_finite_however_sure_the_heads_are() -> None:
    sure = [{name: 50 * array for name, array in head(i).items()} for i in range(3)]
    for reversal in ("log1mp", "clip"):
        generators = fresh(3)
        for round in range(6):
            generators, _ = train_generators(
                generators,
                sure,
                LAYERS,
                plan=GeneratorPlan(hidden=16, lr=0.1, reversal=reversal),  # type: ignore[arg-type]
                rngs=rngs(3, round),
            )
        for generator in generators:
            assert all(np.isfinite(array).all() for array in generator.weights.values())


# ---------------------------------------------------------------- all at once


TO_THE_LETTER: dict[str, Any] = {
    **{"objective": "sum", "optimiser": "sgd", "lr": 0.01},
    **{"reversal": "unbounded", "reversal_weight": 1},
}
"""The paper's eqs. 9 and 10, and its optimiser."""


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"reversal": "none"},
        {"objective": "sum"},
        {"objective": "both", "reversal_weight": 1},
        {"optimiser": "sgd", "lr": 0.01},
        TO_THE_LETTER,
    ],
    ids=["default", "no reversal", "sum", "both", "sgd", "the paper"],
)
def test_stacked_training_is_separate_training(own: dict[str, Any]) -> None:
    """Each generator alone against the same heads, with the same random numbers."""
    keys: dict[str, Any] = {"steps": 20, "hidden": 16, "lr": 1e-3}
    plan = GeneratorPlan(**(keys | own))
    heads = [head(i, turn=i % 2) for i in range(5)]
    start = fresh(5)
    start[2] = train_generators(start[2:4], heads[2:4], LAYERS, plan=plan, rngs=rngs(2))[0][0]
    together, _ = train_generators(start, heads, LAYERS, plan=plan, rngs=rngs(5))
    for i in range(5):
        alone = one_by_one(start[i], heads, i, plan, rngs(5)[i])
        for name in wire.GENERATOR_ARRAYS:
            np.testing.assert_allclose(together[i].weights[name], alone[name], atol=1e-5)


def one_by_one(
    generator: Generator,
    heads: Sequence[Model],
    own: int,
    plan: GeneratorPlan,
    rng: np.random.Generator,
) -> Model:
    """The same training written plainly: one generator, torch's own, a loop over the heads."""
    size = (plan.steps, plan.batch)
    labels = torch.from_numpy(rng.integers(CLASSES, size=size))
    noise = torch.from_numpy(rng.random((*size, 32), dtype=np.float32))
    normal = torch.from_numpy(rng.standard_normal((*size, LATENT), dtype=np.float32))
    weights = {n: torch.tensor(a, requires_grad=True) for n, a in generator.weights.items()}
    adam = plan.optimiser == "adam"
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    optimiser = kind(list(weights.values()), lr=plan.lr)
    for name, weight in weights.items() if adam else ():
        optimiser.state[weight] = {
            "step": torch.tensor(float(generator.steps)),
            "exp_avg": torch.tensor(generator.mean[name]),
            "exp_avg_sq": torch.tensor(generator.square[name]),
        }
    for step in range(plan.steps):
        y = labels[step]
        x = torch.cat([torch.nn.functional.one_hot(y, CLASSES).float(), noise[step]], dim=1)
        h = torch.relu(x @ weights["hidden.weight"] + weights["hidden.bias"])
        mean = h @ weights["mean.weight"] + weights["mean.bias"]
        log_variance = h @ weights["spread.weight"] + weights["spread.bias"]
        z = torch.nn.functional.softplus(
            mean + torch.exp(log_variance.clamp(max=4) / 2) * normal[step]
        )
        logits = [
            z @ torch.tensor(one["head.weight"]).T + torch.tensor(one["head.bias"]) for one in heads
        ]
        wrong = torch.stack([torch.nn.functional.cross_entropy(one, y) for one in logits])
        others = torch.cat([wrong[:own], wrong[own + 1 :]])
        taught = others.sum() if plan.objective == "sum" else others.mean()
        p = torch.softmax(logits[own], dim=1)[torch.arange(len(y)), y]
        own_term = -wrong[own] if plan.reversal == "unbounded" else -torch.log1p(-p).mean()
        against = plan.reversal_weight * own_term
        if plan.reversal == "none":
            loss = taught
        elif plan.objective == "both":
            loss = taught + against
        else:
            loss = against if step % 2 else taught
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def test_a_receivers_generator_does_not_depend_on_the_order_of_the_receivers() -> None:
    heads, plan = [head(i) for i in range(4)], GeneratorPlan(steps=10, hidden=8)
    forward, _ = train_generators(fresh(4), heads, LAYERS, plan=plan, rngs=rngs(4))
    back, _ = train_generators(fresh(4)[::-1], heads[::-1], LAYERS, plan=plan, rngs=rngs(4)[::-1])
    for one, other in zip(forward, back[::-1], strict=True):
        for name in wire.GENERATOR_ARRAYS:
            np.testing.assert_allclose(one.weights[name], other.weights[name], atol=1e-5)


def test_the_same_random_numbers_give_the_same_bits_on_any_number_of_threads() -> None:
    heads, plan = [head(i) for i in range(3)], GeneratorPlan(steps=5, hidden=8)
    one, _ = train_generators(fresh(3), heads, LAYERS, plan=plan, rngs=rngs(3))
    torch.set_num_threads(2)
    try:
        two, _ = train_generators(fresh(3), heads, LAYERS, plan=plan, rngs=rngs(3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        for name in wire.GENERATOR_ARRAYS:
            np.testing.assert_array_equal(a.weights[name], b.weights[name])


def test_deeper_heads_are_computed_layer_by_layer() -> None:
    rng = np.random.default_rng(0)
    layers: wire.Layers = (("linear", "a", ""), ("tanh",), ("linear", "b", "c"))
    heads = [
        {
            "a": rng.normal(size=(5, LATENT)).astype(np.float32),
            "b": rng.normal(size=(CLASSES, 5)).astype(np.float32),
            "c": rng.normal(size=CLASSES).astype(np.float32),
        }
        for _ in range(2)
    ]
    assert predictor_shape(dict(enumerate(heads)), layers) == (LATENT, CLASSES)  # type: ignore[arg-type]
    _, quality = train_generators(
        fresh(2), heads, layers, plan=GeneratorPlan(steps=200, hidden=32, lr=1e-2), rngs=rngs(2)
    )
    assert min(q.others for q in quality) > 0.6


# ---------------------------------------------------------------- FedGen's


def test_the_shared_generator_believes_a_head_for_the_labels_of_its_silo() -> None:
    """Head 1 calls every class by another's name, but its silo has none of them but class 0."""
    counts = np.array([[0, 50, 50, 50], [50, 0, 0, 0]])
    generator = fresh(1, hidden=32)[0]
    heads = [head(0), head(1, turn=1)]
    plan = GeneratorPlan(steps=200, hidden=32, lr=1e-2)
    generator, _ = train_shared_generator(
        generator, heads, LAYERS, counts, plan=plan, rng=rngs(1)[0]
    )
    z = latents_of(generator, labels=np.array([0, 1, 2, 3] * 50))
    answers = [(z @ one["head.weight"].T + one["head.bias"]).argmax(axis=1) for one in heads]
    labels = np.array([0, 1, 2, 3] * 50)
    assert (answers[1][labels == 0] == 0).mean() > 0.9
    assert (answers[0][labels > 0] == labels[labels > 0]).mean() > 0.9


def latents_of(generator: Generator, labels: np.ndarray) -> np.ndarray:
    rng, w = np.random.default_rng(1), generator.weights
    x = np.concatenate([np.eye(CLASSES)[labels], rng.random((len(labels), 32))], axis=1)
    h = np.maximum(x @ w["hidden.weight"] + w["hidden.bias"], 0)
    return np.logaddexp(0, h @ w["mean.weight"] + w["mean.bias"])


# ---------------------------------------------------------------- bad input


def test_heads_of_different_shapes_are_named() -> None:
    other = {name: array[:3] for name, array in head(1).items()}
    with pytest.raises(
        FederationError, match=r"the same shape: 'head\.weight' is \(4, 6\) at a and .* b"
    ):
        predictor_shape({"a": head(0), "b": other}, LAYERS)


def test_most_silos_say_what_the_predictor_is() -> None:
    shorter = LAYERS[1:]
    assert common_layers([("a", shorter), ("b", LAYERS), ("c", LAYERS)]) == LAYERS
    assert common_layers([("a", ()), ("b", LAYERS), ("c", LAYERS)]) == LAYERS
    assert common_layers([("a", LAYERS), ("b", shorter)]) == LAYERS, "the first of two"
    assert common_layers([("a", ()), ("b", LAYERS)]) == LAYERS


def test_silos_without_a_latent_split_are_named_with_what_to_do() -> None:
    with pytest.raises(FederationError, match=r"silo b reports no latent split.*SplitModel"):
        common_layers([("a", LAYERS), ("b", ()), ("c", ())])


def test_a_personal_head_is_refused() -> None:
    with pytest.raises(FederationError, match="Is the head personal"):
        predictor_arrays({"body": np.zeros(3)}, LAYERS)


@pytest.mark.parametrize("prefix", ["x", ""])
def test_a_prefix_must_name_a_linear_head(prefix: str) -> None:
    model: Model = {"a.w": np.zeros((2, 3)), "b.w": np.zeros((2, 3))}
    with pytest.raises(FederationError, match="must name one weight"):
        linear_head(model, prefix)
    assert linear_head(model, "a") == (("linear", "a.w", ""),)


# ---------------------------------------------------------------- many, and what is out of line


def test_with_too_many_heads_each_step_asks_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As good as with all, and never more logits at once than allowed."""
    most, seen = 3 * CLASSES * 8 * 32, []
    asked = module._all_heads

    def watched(*args: torch.Tensor) -> torch.Tensor:
        seen.append(asked(*args))
        return seen[-1]

    monkeypatch.setattr(module, "_all_heads", watched)
    monkeypatch.setattr(module, "MAX_LOGITS", most)
    plan = GeneratorPlan(steps=40, hidden=32, lr=1e-2, reversal_weight=0.1)
    others, _ = trained([head(i) for i in range(8)], 4, plan)
    assert others > 0.95
    training = [logits for logits in seen if logits.requires_grad]
    assert {len(logits) for logits in training} == {3}
    assert max(logits.numel() for logits in training) <= most
    heads = {"w": torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]], [[3.0], [0.0]]])}
    loss = others_loss(
        heads,
        (("linear", "w", ""),),
        torch.ones(3, 1, 1),
        torch.zeros(3, 1).long(),
        torch.tensor([0, 2]),
    )
    wrong = np.log1p(np.exp([-1.0, -3.0]))  # of the heads 0 and 2
    np.testing.assert_allclose(loss, [wrong[1], wrong.mean(), wrong[0]], rtol=1e-5)


def test_a_head_far_larger_than_the_others_is_out_of_line() -> None:
    usual = {str(i): head(i) for i in range(4)}
    assert out_of_line(usual) == {}
    huge = {name: 1e3 * array for name, array in head(9).items()}
    assert list(out_of_line(usual | {"x": huge})) == ["x"]
    assert list(out_of_line({"a": head(1), "x": huge})) == ["x"], "of two, too"
    nothing = {name: 0 * array for name, array in head(9).items()}
    assert out_of_line({"a": nothing, "b": nothing}) == {}


def test_a_generator_that_would_not_be_finite_stays_as_it_was() -> None:
    broken = {name: np.full_like(array, np.nan) for name, array in head(1).items()}
    before = fresh(2)
    after, _ = train_generators(
        before, [head(0), broken], LAYERS, plan=GeneratorPlan(steps=4, hidden=16), rngs=rngs(2)
    )
    assert [new is old for new, old in zip(after, before, strict=True)] == [True, True]


@pytest.mark.parametrize("objective", ["mean", "both"])
def test_no_weight_on_the_reversal_is_no_reversal(objective: Objective) -> None:
    heads = [head(i) for i in range(3)]
    results = [
        train_generators(fresh(3), heads, LAYERS, plan=plan, rngs=rngs(3))[0][0].weights
        for plan in (
            GeneratorPlan(steps=6, hidden=16, reversal="none"),
            GeneratorPlan(steps=6, hidden=16, reversal_weight=0, objective=objective),
        )
    ]
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])
