"""What travels of a model: what is trained. What is frozen stays as it is, known by its hash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.home.settings import SiloSettings
from coterie.client.work.data import Held
from coterie.client.work.meta_sgd import train_per_fedavg
from coterie.client.work.session import open_session
from coterie.client.work.sgd import TrainPlan, has_batch_norm, require_enough, train
from coterie.client.work.weights import (
    frozen_digest,
    frozen_parts,
    load_weights,
    read_weights,
    travelling,
)
from coterie.tasks import SiloData, Task, TaskError

PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


class Net(nn.Module):
    """Two blocks of a linear layer, BatchNorm and Dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        out: torch.Tensor = self.head(self.second(self.first(x)))
        return out


class Partly(Task):
    """Learns with some of ``Net`` frozen."""

    name = "partly"
    num_classes = 2

    def __init__(self, *frozen: str, kind: torch.dtype = torch.float32) -> None:
        self.frozen, self.kind = frozen, kind

    def model(self) -> nn.Module:
        """Frozen by prefix."""
        model = Net().to(self.kind)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith(self.frozen)
        return model

    def load(self, options: Any) -> SiloData:
        """Noise."""
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2
        return SiloData(x, y, x, y, 2)


def part() -> Held:
    data = Partly().load({})
    return Held(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))


def model_of(*frozen: str) -> nn.Module:
    torch.manual_seed(0)
    return Partly(*frozen).model()


def test_all_travels_if_all_is_trained() -> None:
    model = model_of()
    assert list(travelling(model)) == list(model.state_dict())
    assert frozen_digest(model) == "" and not list(frozen_parts(model))


@pytest.mark.parametrize(
    ("frozen", "travels"),
    [
        (("first.",), {"second.0", "second.1", "head"}),
        (("first.", "second."), {"head"}),  # the second BatchNorm has no parameters of its own
        (("first.0",), {"first.1", "second.0", "second.1", "head"}),
        (("head",), {"first.0", "first.1", "second.0", "second.1"}),
        (("second.0.weight",), {"first.0", "first.1", "second.0", "second.1", "head"}),
    ],
)
def test_statistics_travel_with_what_trains(frozen: tuple[str, ...], travels: set[str]) -> None:
    names = list(travelling(model_of(*frozen)))
    assert {name.rpartition(".")[0] for name in names} == travels
    assert ("second.0.weight" in names) == (not "second.0.weight".startswith(frozen))


@pytest.mark.parametrize("how", ["sgd", "adam", "per-fedavg"])
def test_nothing_that_is_frozen_changes_in_training(how: str) -> None:
    task, model = Partly("first."), model_of("first.")
    before, digest = read_weights(model), frozen_digest(model)
    if how == "per-fedavg":
        train_per_fedavg(task, model, part(), PLAN, meta_lr=0.1, seed=1)
    else:
        plan = TrainPlan(epochs=2, batch_size=4, lr=0.1, weight_decay=0.1, optimiser=how)
        train(task, model, part(), plan, seed=1)
    assert frozen_digest(model) == digest
    assert not model.first.training and model.second.training
    assert torch.equal(model.first(part().x), model.first(part().x)), "dropout must be off"
    after = read_weights(model)
    assert all(not np.array_equal(before[name], after[name]) for name in before)


def test_what_travels_is_put_into_another_model_that_keeps_its_own_rest() -> None:
    source, target = model_of("first."), Partly("first.").model()
    rest = frozen_digest(target)
    assert rest != frozen_digest(source)
    load_weights(target, read_weights(source))
    assert torch.equal(target.head.weight, source.head.weight) and frozen_digest(target) == rest
    with pytest.raises(ValueError, match=r"differ from the task's: \['first\.0\.bias'"):
        load_weights(target, read_weights(model_of()))


def test_a_frozen_batch_norm_needs_no_batch() -> None:
    one = part().take(torch.tensor([0]))
    model = model_of("first.", "second.")
    assert has_batch_norm(model_of("first.")) and not has_batch_norm(model)
    require_enough(model, one)
    train(Partly("first.", "second."), model, one, PLAN, seed=0)


def test_the_hash_is_of_names_types_and_values() -> None:
    model = model_of("first.")
    digests = {frozen_digest(model), frozen_digest(model_of("first.0"))}
    with torch.no_grad():
        model.first[0].bias[0] += 1
    digests.add(frozen_digest(model))
    digests.add(frozen_digest(model.to(torch.bfloat16)))  # which numpy does not have
    assert len(digests) == 4 and all(len(digest) == 64 for digest in digests)


def opened(task: Task, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("coterie.client.work.session.load_task", lambda _: task)
    return open_session(SiloSettings(name="a", task="partly", device="cpu"))


def test_random_frozen_parts_are_the_same_at_all_silos(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    first = opened(Partly("first."), monkeypatch)
    drawn = torch.rand(1)
    second = opened(Partly("first."), monkeypatch)
    assert first.schema == second.schema and first.frozen == second.frozen
    assert first.schema.endswith(f"/frozen-arrays:{first.frozen[:16]}")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn), "opening must leave others' randomness alone"
    assert opened(Partly(), monkeypatch).frozen == ""
    assert "first.0.weight" not in first.describe().buffers
    assert first.describe().buffers == tuple(n for n in travelling(first.model) if "1." in n)


def test_a_model_of_which_nothing_is_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="task 'partly' trains nothing: every parameter"):
        opened(Partly(""), monkeypatch)


def test_arrays_that_cannot_be_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match=r"array 'first\.0\.weight' is of type bfloat16"):
        opened(Partly(kind=torch.bfloat16), monkeypatch)


class Odd(Partly):
    """Has one more buffer, or a layer whose size is not known yet."""

    def __init__(self, buffer: torch.Tensor | None, *, persistent: bool = True) -> None:
        super().__init__("nothing")
        self.buffer, self.persistent = buffer, persistent

    def model(self) -> nn.Module:
        """With that buffer, or lazy."""
        model = Net()
        if self.buffer is None:
            model.head = nn.LazyLinear(2)  # type: ignore[assignment]
        else:
            model.register_buffer("more", self.buffer, persistent=self.persistent)
        return model


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (None, "array 'head.weight' has no shape yet"),
        (
            torch.zeros(2, dtype=torch.complex64),
            "array 'more' must contain real numbers. It is comp",
        ),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "array 'more' is of type float8_e4m3fn"),
        (torch.eye(3).to_sparse(), "array 'more' must be dense and have values. It is sparse_coo"),
        (torch.full((2,), -torch.inf), "array 'more' contains NaN or infinity before any training"),
        (torch.empty(2, device="meta"), "array 'more' must be dense and have values"),
    ],
    ids=["lazy", "complex", "float8", "sparse", "infinite", "meta"],
)
def test_odd_arrays_are_refused_by_name_before_a_run(
    buffer: torch.Tensor | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError) as refused:
        opened(Odd(buffer), monkeypatch)
    assert why in str(refused.value)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float16])
def test_ordinary_buffers_are_taken(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(Odd(torch.ones(2).to(kind)), monkeypatch)
    opened(Odd(torch.ones(2, dtype=torch.complex64), persistent=False), monkeypatch)
