"""A silo's discriminators: the wide layer against plain PyTorch, and what its messages say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from coterie import wire
from coterie.client.work.data import Held
from coterie.client.work.discriminators import (
    DiscriminatorPlan,
    Pairs,
    count_hits,
    open_pairs,
    train_stack,
)
from coterie.client.work.session import Session, session_of
from coterie.tasks.base import Task
from coterie.tasks.images.digits import Digits
from coterie.tasks.models import Discriminator, LabelwiseDiscriminator
from coterie.wire import Model, decode_arrays, encode_arrays
from tests import kit
from tests.conftest import assert_equal_models, digits_config
from tests.kit import context
from tests.unit.strategies.test_pooling import silos as levels

LABELS = [1, 0, 0]
PLAN = DiscriminatorPlan(steps=7, batch_size=4, lr=0.05)
OPTIONS: dict[str, Any] = {"samples": 500, "seed": 0}


def session_with(**changes: Any) -> Session:
    return session_of(context(digits_config("a", **changes)))


ARCHITECTURES = pytest.mark.parametrize(
    "make",
    [Discriminator, LabelwiseDiscriminator, lambda *n: Plain(*n)],
    ids=["wide", "labels", "own"],
)


def different(pairs: Pairs) -> Pairs:
    """The same with discriminators that are not copies of each other."""
    generator = torch.Generator().manual_seed(5)
    for parameter in pairs.stack.values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return pairs


def trained_one_by_one(pairs: Pairs, batches: list[torch.Tensor], lr: float) -> list[Model]:
    """Autograd and torch's own SGD, a pair at a time."""
    found = []
    for k, label in enumerate(pairs.labels):
        pairs.module.load_state_dict({name: p[k] for name, p in pairs.stack.items()})
        optimiser = torch.optim.SGD(pairs.module.parameters(), lr=lr)
        for rows in batches:
            y = one_hot(pairs.pool.y[rows], pairs.pool.num_classes).float()
            logits = pairs.module(pairs.pool.x[rows], y)
            optimiser.zero_grad()
            binary_cross_entropy_with_logits(logits, label.expand(len(rows))).backward()
            optimiser.step()
        found.append({n: p.detach().numpy().copy() for n, p in pairs.module.named_parameters()})
    return found


@pytest.mark.parametrize("make", [Discriminator, LabelwiseDiscriminator])
def test_the_first_reply_tells_which_labels_a_silo_has_as_the_documentation_says(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known limit: a change that removes it corrects fedcollab.md and silo-toml.md."""
    monkeypatch.setattr(Digits, "discriminator", lambda self, n: make(n, self.num_classes))
    session = session_with(**{"data.train": 120, "data.test": 20})
    mine = torch.isin(session.data.train.y, torch.tensor([0, 1, 7]))
    few = replace(session.data, train=session.data.train.take(mine.nonzero()[:, 0]))
    pairs = open_pairs(replace(session, data=few), None, [1], samples=500, seed=0)
    before = {name: p.clone() for name, p in pairs.stack.items()}
    train_stack(pairs, DiscriminatorPlan(steps=20, batch_size=32, lr=0.01), seed=1)
    name = "label.weight" if make is Discriminator else "by_label.bias"
    moved = (pairs.stack[name] - before[name]).abs()[0]
    by_label = moved.sum(dim=0) if moved.ndim == 2 else moved
    assert set(by_label.nonzero().flatten().tolist()) == set(pairs.pool.y.tolist()) == {0, 1, 7}
    docs = Path(__file__).parents[3] / "docs"
    explained = (docs / "explanation" / "fedcollab.md").read_text("utf-8")
    assert "reveal which labels the silo has" in explained
    assert "which labels this silo has" in (docs / "reference" / "silo-toml.md").read_text("utf-8")


class Plain(nn.Module):
    """Another architecture, which the wide layer does not know."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(num_features + num_classes, 9), nn.Tanh(), nn.Linear(9, 1)
        )

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([features, labels], dim=1)).squeeze(-1)  # type: ignore[no-any-return]


@ARCHITECTURES
def test_all_discriminators_at_once_are_each_on_its_own(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Digits, "discriminator", lambda self, n: make(n, self.num_classes))
    pairs = different(open_pairs(session_with(), None, LABELS, samples=500, seed=1))
    shuffle = torch.Generator().manual_seed(9)
    epochs = [torch.randperm(10, generator=shuffle).split(4) for _ in range(3)]
    batches = [batch for epoch in epochs for batch in epoch][: PLAN.steps]
    expected = trained_one_by_one(pairs, batches, PLAN.lr)
    before = {name: p.clone() for name, p in pairs.stack.items()}
    train_stack(pairs, PLAN, seed=9)
    for k in range(len(LABELS)):
        for name, array in expected[k].items():
            np.testing.assert_allclose(pairs.stack[name][k], array, atol=2e-6)
    assert all(not torch.equal(before[name], p) for name, p in pairs.stack.items())


@ARCHITECTURES
def test_hits_are_counted_on_held_out_samples_in_two_halves(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Digits, "discriminator", lambda self, n: make(n, self.num_classes))
    pairs = different(
        open_pairs(session_with(**{"data.train": 23}), None, LABELS, samples=9, seed=1)
    )
    pool = pairs.pool
    assert (len(pool.x), len(pool.x_held)) == (9, 14)
    found = count_hits(pairs)
    assert found["counts"].tolist() == [7, 7]
    for k, label in enumerate(LABELS):
        pairs.module.load_state_dict({name: p[k] for name, p in pairs.stack.items()})
        logits = pairs.module(pool.x_held, one_hot(pool.y_held, pool.num_classes).float())
        right = ((logits > 0) == bool(label)).tolist()
        assert found["hits"][k].tolist() == [sum(right[0::2]), sum(right[1::2])]


class Dropping(Plain):
    """One with Dropout, as a task may bring it."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.body = nn.Sequential(nn.Dropout(0.5), *self.body)


def test_dropout_is_on_in_training_and_off_in_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "discriminator", lambda self, n: Dropping(n, self.num_classes))
    session = session_with(**{"data.train": 200})
    pairs = different(open_pairs(session, None, LABELS, samples=9, seed=1))
    found, pool = count_hits(pairs), pairs.pool
    assert_equal_models(count_hits(pairs), found)
    without = Plain(pool.x.shape[1], pool.num_classes)
    for k, label in enumerate(LABELS):
        stack = {name: p[k] for name, p in pairs.stack.items()}
        shifted = {  # the layers without the Dropout before them
            f"body.{int(name.split('.')[1]) - 1}.{name.split('.')[2]}": p
            for name, p in stack.items()
        }
        without.load_state_dict(shifted)
        logits = without(pool.x_held, one_hot(pool.y_held, pool.num_classes).float())
        assert found["hits"][k].sum() == ((logits > 0) == bool(label)).sum()
    fresh = different(open_pairs(session, None, LABELS, samples=9, seed=1))
    dropped: list[bool] = []
    for one in (pairs, fresh):  # scored before, and not
        one.module.register_forward_hook(lambda module, *_: dropped.append(module.training))
        train_stack(one, PLAN, seed=9)
    assert dropped and all(dropped)
    assert_equal_models(pairs.arrays(), fresh.arrays())


def test_no_sample_is_both_trained_with_and_held_out_and_the_cut_stays() -> None:
    session = session_with()
    one, again = (open_pairs(session, None, LABELS, samples=500, seed=4).pool for _ in range(2))
    assert torch.equal(one.x_held, again.x_held)
    rows = {tuple(row.tolist()) for row in one.x}
    assert not rows & {tuple(row.tolist()) for row in one.x_held}
    other = open_pairs(session, None, LABELS, samples=500, seed=5).pool
    assert not torch.equal(one.x_held, other.x_held)


@pytest.mark.parametrize("most", [0, 8_000, 1_500])
def test_two_silos_of_one_task_learn_to_tell_each_other_apart(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Federated averaging by hand: upright and turned digits; FedCollab's made smaller, too."""
    if most:
        monkeypatch.setattr(Digits, "discriminator", Task.discriminator)
    sessions = [session_with(**{"data.train": 60}), session_of(context(TURNED))]
    assert distance(sessions, most_bytes=most) > 0.6


@pytest.mark.parametrize("labelled", [True, False])
def test_real_targets_tell_silos_apart(labelled: bool) -> None:
    """Rows of one kind, and targets of other levels; without labels nothing shows it."""
    sessions = [session_of(context(silo)) for silo in levels([-3.0, 3.0])]
    found = distance(sessions, labelled=labelled)
    assert found > 0.6 if labelled else found < 0.3


def distance(sessions: list[Session], **options: Any) -> float:
    """Train a discriminator of two silos in eight rounds, and return their distance."""
    stack: Model | None = None
    for number in range(8):
        trained = []
        for session, label in zip(sessions, (1, 0), strict=True):
            pairs = open_pairs(session, stack, [label], **OPTIONS, **options)
            train_stack(pairs, DiscriminatorPlan(20, 16, 0.01), seed=number)
            trained.append(pairs.arrays())
        stack = {name: (trained[0][name] + trained[1][name]) / 2 for name in trained[0]}
    rates = []
    for session, label in zip(sessions, (1, 0), strict=True):
        found = count_hits(open_pairs(session, stack, [label], **OPTIONS, **options))
        rates.append(found["hits"].sum() / found["counts"].sum())
    return float(sum(rates)) - 1


TURNED = digits_config("b", 5, **{"data.train": 60, "data.rotation": 90})


def test_a_silo_of_one_class_only_trains_and_scores_like_any_other() -> None:
    session = session_with()
    threes = torch.full_like(session.data.train.y, 3)
    one_class = replace(session.data, train=Held(session.data.train.x, threes))
    pairs = open_pairs(replace(session, data=one_class), None, LABELS, samples=500, seed=0)
    train_stack(pairs, PLAN, seed=0)
    assert all(torch.isfinite(parameter).all() for parameter in pairs.stack.values())
    assert count_hits(pairs)["hits"].sum(axis=1).tolist() == [10, 10, 10], "its own label, always"


# ---------------------------------------------------------------- messages


def ask(kind: str, arrays: Model | None = None, **config: Any) -> Message:
    entries = {"seed": 0, "server_round": 1, "purpose": "discriminator-1", "pair_labels": "100"}
    entries |= {"steps": 3, "batch_size": 8, "lr": 0.01} | config
    stack = {} if arrays is None else {wire.DISCRIMINATORS: encode_arrays(arrays, packed=True)}
    return kit.ask(kind, model={}, records=stack, **entries)


def stack_in(reply: Message) -> Model:
    assert not reply.has_error(), reply.error.reason
    return decode_arrays(reply.content[wire.DISCRIMINATORS])


def test_the_first_message_needs_no_arrays_and_the_next_is_scored_before_training() -> None:
    first = ask(wire.TRAIN_DISCRIMINATOR)
    assert wire.HITS not in first.content
    stack = stack_in(first)
    assert {array.shape[0] for array in stack.values()} == {3}
    metrics = wire.read_metrics(first.content)
    each = sum(array[0].nbytes for array in stack.values())
    assert (metrics["num-examples"], metrics["held-out"]) == (20, 10)
    assert metrics["discriminator-bytes"] == each
    second = ask(wire.TRAIN_DISCRIMINATOR, stack, purpose="discriminator-2")
    scored = ask(wire.EVALUATE_DISCRIMINATOR, stack)
    assert_equal_models(
        decode_arrays(second.content[wire.HITS]), decode_arrays(scored.content[wire.HITS])
    )
    assert wire.DISCRIMINATORS not in scored.content
    assert decode_arrays(scored.content[wire.HITS])["counts"].tolist() == [5, 5]


def test_the_same_message_gives_the_same_bits_whatever_came_between() -> None:
    one = stack_in(ask(wire.TRAIN_DISCRIMINATOR))
    ask(wire.TRAIN_DISCRIMINATOR, pair_labels="1")
    assert_equal_models(stack_in(ask(wire.TRAIN_DISCRIMINATOR)), one)


def test_nothing_but_weights_hits_and_counts_leaves_the_silo() -> None:
    reply = ask(wire.TRAIN_DISCRIMINATOR, stack_in(ask(wire.TRAIN_DISCRIMINATOR)))
    assert set(reply.content) == {wire.ARRAYS, wire.DISCRIMINATORS, wire.HITS, wire.METRICS}
    assert set(decode_arrays(reply.content[wire.HITS])) == {"hits", "counts"}
    assert set(reply.content[wire.METRICS]) == {
        wire.NUM_EXAMPLES, wire.HELD_OUT, wire.DISCRIMINATOR_BYTES, wire.SECONDS
    }  # fmt: skip


@pytest.mark.parametrize("most", [40_000, 5_000, 600])
def test_a_discriminator_is_made_as_small_as_it_must_be(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedCollab's, of 64 pixels and ten digits, has 61,604 bytes."""
    monkeypatch.setattr(Digits, "discriminator", Task.discriminator)
    assert open_pairs(session_with(), None, [1], **OPTIONS).bytes_each == 61_604
    one = open_pairs(session_with(), None, [1], **OPTIONS, most_bytes=most)
    sent = one.arrays()
    assert sum(array.nbytes for array in sent.values()) == one.bytes_each <= most
    assert one.bytes_each > 0.75 * most
    assert {array.dtype for array in sent.values()} == {np.dtype(np.float16)}
    other = open_pairs(session_of(context(TURNED)), sent, [0], **OPTIONS, most_bytes=most)
    assert_equal_models(other.arrays(), sent)
    assert one.pool.x.shape[1] == other.pool.x.shape[1] == one.module.features.in_features


def test_one_that_fits_stays_as_it_is_and_one_of_a_task_s_own_sees_fewer_features() -> None:
    whole = open_pairs(session_with(), None, [1], **OPTIONS)
    same = open_pairs(session_with(), None, [1], **OPTIONS, most_bytes=whole.bytes_each)
    assert_equal_models(same.arrays(), whole.arrays())
    half = open_pairs(session_with(), None, [1], **OPTIONS, most_bytes=whole.bytes_each // 2)
    assert half.short and half.pool.x.shape == whole.pool.x.shape
    less = open_pairs(session_with(), None, [1], **OPTIONS, most_bytes=whole.bytes_each // 3)
    assert isinstance(less.module, LabelwiseDiscriminator) and less.pool.x.shape[1] == 32
    least = open_pairs(session_with(), None, [1], **OPTIONS, most_bytes=10)
    assert least.bytes_each == less.bytes_each, "for the coordinator to see that it is too large"


def test_asked_without_pairs_a_silo_says_what_it_can_hold_out() -> None:
    counts = {}
    for train in (1, 2, 20):
        reply = ask(
            wire.EVALUATE_DISCRIMINATOR,
            pair_labels="",
            node=digits_config("a", **{"data.train": train}),
        )
        counts[train] = wire.read_metrics(reply.content)[wire.HELD_OUT]
    assert counts == {1: 0, 2: 1, 20: 10}


@pytest.mark.parametrize("metrics", ["", "train-loss,loss,error,seconds"])
def test_what_the_server_must_know_leaves_whatever_metrics_may(metrics: str) -> None:
    reply = ask(wire.EVALUATE_DISCRIMINATOR, node=digits_config("a", **{"share-metrics": metrics}))
    needed = {wire.NUM_EXAMPLES, wire.HELD_OUT, wire.DISCRIMINATOR_BYTES}
    assert needed == set(wire.read_metrics(reply.content)) - {wire.SECONDS}


@pytest.mark.parametrize("kind", [wire.EVALUATE_DISCRIMINATOR, wire.TRAIN_DISCRIMINATOR])
@pytest.mark.parametrize("said", [{}, {"group_size": 1}, {"group_size": 2}, {"group_size": 9}])
def test_a_pair_is_a_group_of_two_whatever_the_message_says(
    kind: str, said: dict[str, int]
) -> None:
    reply = ask(kind, node=digits_config("a", **{"min-group-size": 3}), **said)
    assert reply.has_error() and "needs groups of at least 3 silos" in reply.error.reason
    assert not ask(kind, node=digits_config("a", **{"min-group-size": 2}), **said).has_error()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"pair_labels": "12"}, "pair-labels must consist of the digits 0 and 1"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"lr": -1.0}, "lr must be a number of at least 0"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"task": "mnist"}, "the run is of task 'mnist'"),
        ({"node": digits_config("a", **{"data.train": 1})}, "no sample to train on."),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    config: dict[str, Any], reason: str
) -> None:
    reply = ask(wire.TRAIN_DISCRIMINATOR, **config)
    assert reply.has_error() and reason in reply.error.reason


def test_discriminators_of_another_shape_are_refused() -> None:
    stack = stack_in(ask(wire.TRAIN_DISCRIMINATOR))
    reply = ask(wire.TRAIN_DISCRIMINATOR, stack, pair_labels="1")
    assert "'by_label.weight' must be float32 of shape (1, 10, 64)" in reply.error.reason
    reply = ask(wire.TRAIN_DISCRIMINATOR, {"odd": np.zeros((3, 2), np.float32)})
    assert "differ from the task's" in reply.error.reason


class Normed(Digits):
    def discriminator(self, num_features: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(num_features))


def test_a_discriminator_with_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "discriminator", Normed.discriminator)
    reply = ask(wire.TRAIN_DISCRIMINATOR)
    assert reply.has_error() and "must not have buffers" in reply.error.reason


def test_what_a_task_s_features_say_of_the_data_does_not_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def features(self: Digits, x: Any) -> Any:
        raise ValueError("Mueller, Hans")

    monkeypatch.setattr(Digits, "discriminator_features", features)
    reply = ask(wire.TRAIN_DISCRIMINATOR)
    assert reply.error.code == wire.FAILED and "Mueller" not in reply.error.reason


@pytest.mark.parametrize(
    ("shape", "num_features"), [((1, 28, 28), 784), ((3, 32, 32), 768), ((7,), 7), ((1, 8, 8), 64)]
)
def test_large_images_are_averaged_down(shape: tuple[int, ...], num_features: int) -> None:
    x = torch.rand(2, *shape)
    features = Task.discriminator_features(Digits(), x)
    assert features.shape == (2, num_features)
    assert float(features.mean()) == pytest.approx(float(x.mean()), abs=1e-5)
