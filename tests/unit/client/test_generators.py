"""The silo's side of generators: its split, the loss on latents, consent, what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from coterie import wire
from coterie.client.work.generators import describe_head, latent_loss
from coterie.strategies.fedgenp.generators import generate
from coterie.strategies.fedgenp.latent import fresh_generator
from coterie.tasks import load_task
from coterie.tasks.base import SiloData, Task
from coterie.tasks.models import SplitModel
from coterie.wire import Model, decode_arrays, encode_arrays
from tests.conftest import digits_config
from tests.kit import ask, initial, model_in, reason, train


class Split(Task):
    """Three classes; any network."""

    name, num_classes = "split", 3

    def __init__(self, representation: nn.Module, head: nn.Module, prefix: str = "head.") -> None:
        self.parts, self.head = (representation, head), prefix

    def model(self) -> nn.Module:
        return SplitModel(*self.parts)

    def load(self, options: Any) -> SiloData:
        raise NotImplementedError


BODY = nn.Sequential(nn.Linear(4, 5), nn.ReLU())


def generator(num_classes: int = 3, latent: int = 5, seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return fresh_generator(num_classes=num_classes, latent=latent, hidden=8, rng=rng).weights


# ---------------------------------------------------------------- the split


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Split(BODY, nn.Linear(5, 3)), (("positive",), ("linear", "head.weight", "head.bias"))),
        (
            Split(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))),
            (
                ("linear", "head.0.weight", "head.0.bias"),
                ("tanh",),
                ("linear", "head.2.weight", "head.2.bias"),
            ),
        ),
        (
            Split(nn.Sequential(BODY, nn.Dropout()), nn.Linear(5, 3, bias=False)),
            (("linear", "head.weight", ""),),
        ),
        (Split(nn.Flatten(), nn.Linear(4, 3)), ()),  # latents would be the data itself
        (Split(BODY, nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))), ()),
        (Split(BODY, nn.Linear(5, 3), prefix="classifier."), ()),
        (Split(BODY, nn.Linear(5, 3), prefix=""), ()),
    ],
)
def test_the_head_is_described_by_its_layers(task: Split, expected: wire.Layers) -> None:
    assert describe_head(task, task.model()) == expected


def test_a_model_that_diverged_in_the_run_before_has_its_split_still() -> None:
    task = Split(BODY, nn.Linear(5, 3))
    model = task.model()
    fresh = describe_head(task, model)
    with torch.no_grad():
        model.get_parameter("head.weight").fill_(torch.nan)
    assert fresh and describe_head(task, model) == fresh


class Cosine(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.normalize(x), self.weight, self.bias)


def test_an_activation_used_twice_is_described_twice() -> None:
    act = nn.ReLU()
    head = nn.Sequential(nn.Linear(5, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 3))
    task = Split(BODY, head.train())
    kinds = [kind for kind, *_ in describe_head(task, task.model())]
    assert kinds == ["positive", "linear", "relu", "linear", "relu", "linear"]
    assert head.training, "it is tried out in eval mode, and put back"


@pytest.mark.parametrize(
    "head",
    [
        Cosine(5, 3),
        nn.Sequential(nn.Linear(5, 3), Cosine(3, 3)),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
        nn.Linear(5, 8),  # the task has three classes
        nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 3)),
    ],
)
def test_what_the_server_could_not_compute_as_the_silo_does_is_no_split(head: nn.Module) -> None:
    task = Split(BODY, head)
    assert describe_head(task, task.model()) == ()


@pytest.mark.parametrize(
    ("name", "splits"), [("digits", True), ("mnist", True), ("mnist/mclr", False)]
)
def test_built_in_tasks_split_where_there_is_something_to_split(name: str, splits: bool) -> None:
    task = load_task(name)
    assert bool(describe_head(task, task.model())) is splits


# ---------------------------------------------------------------- the loss


def test_the_silo_draws_the_latents_that_the_server_would() -> None:
    """One step by hand: the same labels, noise and normal numbers through the server's network."""
    task, weights = Split(BODY, nn.Linear(5, 3)), generator()
    model = task.model()
    added = latent_loss(
        task, model, weights, seed=4, device=torch.device("cpu"), generated_weight=2.0,
        distil_weight=0.0,
    )  # fmt: skip
    targets = torch.tensor([0, 1, 2, 1])
    loss = added(torch.zeros(4, 3), targets)
    rng = np.random.default_rng(4)
    labels = torch.from_numpy(rng.choice(3, size=4, p=[1 / 3] * 3))
    noise = torch.from_numpy(rng.random((4, wire.NOISE), dtype=np.float32))
    normal = torch.from_numpy(rng.standard_normal((4, 5), dtype=np.float32))
    inputs = torch.cat([nn.functional.one_hot(labels, 3).float(), noise], dim=1)
    stacked = {name: torch.from_numpy(array)[None] for name, array in weights.items()}
    latents = nn.functional.softplus(generate(stacked, inputs[None], normal[None])[0])
    expected = 2 * nn.functional.cross_entropy(model.head(latents), labels)
    torch.testing.assert_close(loss, expected)


def test_only_the_head_learns_from_latents() -> None:
    task = Split(nn.Linear(4, 5), nn.Linear(5, 3))
    model = task.model()
    added = latent_loss(
        task, model, generator(), seed=0, device=torch.device("cpu"), generated_weight=1.0,
        distil_weight=0.0,
    )  # fmt: skip
    model.zero_grad()
    added(torch.zeros(2, 3), torch.tensor([0, 1])).backward()
    assert model.head.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.representation.parameters())


def test_labels_are_drawn_by_the_shares_that_came_with_the_generator() -> None:
    """Only label 2 is drawn, so a head that is sure of it has no loss."""
    head = nn.Linear(5, 3)
    nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor([0.0, 0.0, 40.0])
    task = Split(BODY, head)
    model = task.model()
    losses = []
    for extra in ({}, {wire.LABELS: np.array([0.0, 0.0, 1.0])}):
        added = latent_loss(
            task, model, generator() | extra, seed=1, device=torch.device("cpu"),
            generated_weight=1.0, distil_weight=0.0,
        )  # fmt: skip
        losses.append(float(added(torch.zeros(32, 3), torch.zeros(32, dtype=torch.int64)).detach()))
    assert losses[0] > 10 and losses[1] < 1e-6


def test_distilling_pulls_the_answers_to_those_on_latents_of_the_own_labels() -> None:
    task = Split(BODY, nn.Linear(5, 3))
    model = task.model()
    added = latent_loss(
        task, model, generator(), seed=1, device=torch.device("cpu"), generated_weight=0.0,
        distil_weight=3.0,
    )  # fmt: skip
    outputs = torch.zeros(4, 3, requires_grad=True)
    loss = added(outputs, torch.tensor([0, 0, 1, 2]))
    loss.backward()
    assert float(loss.detach()) > 0
    assert outputs.grad is not None and outputs.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mean.bias": np.zeros(7, np.float32)}, "'mean.bias' must have shape"),
        ({"hidden.weight": np.zeros((2, 8), np.float32)}, "'hidden.weight' must have shape"),
        ({"labels": np.zeros(3)}, "must be 3 shares"),
        ({"labels": np.ones(5)}, "must be 3 shares"),
        ({"labels": np.array([1.0, -0.5, 1.0])}, "must be 3 shares"),
        ({"labels": np.array([1.0, np.inf, 1.0])}, "must contain only finite numbers"),
        ({"labels": np.array(["1", "2", "3"])}, "must contain only finite numbers"),
        (
            {"mean.bias": np.full(5, np.nan, np.float32)},
            "'mean.bias' must contain only finite numbers",
        ),
        ({"mean.bias": np.ones(5, np.complex64)}, "'mean.bias' must contain only finite numbers"),
        ({"hidden.weight": np.float32(1)}, "'hidden.weight' must have shape"),
        ({"hidden.bias": np.array(1, np.float32)}, "'hidden.weight' must have shape"),
        ({"hidden.weight": np.zeros((3 + 40, 8), np.float32)}, "'hidden.weight' must have shape"),
    ],
)
def test_a_generator_that_does_not_fit_is_refused(change: Model, said: str) -> None:
    task = Split(BODY, nn.Linear(5, 3))
    with pytest.raises(ValueError, match=said):
        latent_loss(
            task, task.model(), generator() | change, seed=0, device=torch.device("cpu"),
            generated_weight=1.0, distil_weight=0.0,
        )  # fmt: skip
    incomplete = generator()
    del incomplete["spread.bias"]
    with pytest.raises(ValueError, match=r"no array 'spread\.bias'"):
        latent_loss(
            task, task.model(), incomplete, seed=0, device=torch.device("cpu"),
            generated_weight=1.0, distil_weight=0.0,
        )  # fmt: skip


def test_without_a_weight_nothing_is_added_and_no_randomness_used_up() -> None:
    task = Split(BODY, nn.Linear(5, 3))
    added = latent_loss(
        task, task.model(), generator(), seed=0, device=torch.device("cpu"),
        generated_weight=0.0, distil_weight=0.0,
    )  # fmt: skip
    assert added is None


# ---------------------------------------------------------------- messages


def test_training_with_a_generator_is_another_training_and_tells_no_labels() -> None:
    config = digits_config("a")
    model = initial(node=config)
    plain = train(model, config)
    own = {wire.GENERATOR: encode_arrays(generator(10, 128), packed=True)}
    replies = [train(model, config, records=own) for _ in range(2)]
    first, again = (model_in(reply) for reply in replies)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert not np.array_equal(first["head.weight"], model_in(plain)["head.weight"])
    assert set(replies[0].content) == {wire.ARRAYS, wire.METRICS}
    assert set(replies[0].content[wire.METRICS]) == {"num-examples", "train-loss", "seconds"}


def test_a_wrong_generator_is_refused_in_words() -> None:
    config = digits_config("a")
    model = initial(node=config)
    own = {wire.GENERATOR: encode_arrays(generator(10, 64), packed=True)}
    reply = train(model, config, records=own)
    assert reply.has_error() and "'mean.weight' must have shape" in reply.error.reason


def test_the_personalised_model_is_evaluated_and_kept(tmp_path: Path) -> None:
    config = digits_config("a", home=str(tmp_path))
    model = initial(node=config)
    keys = {wire.EVALUATE_TRAINED: True, wire.RUN: "r1"}
    reply = train(model, config, **keys)
    trained = model_in(reply)
    kept = load_file(tmp_path / "personalised" / "r1.safetensors")
    for name, array in trained.items():
        np.testing.assert_array_equal(kept[name], array)
    error = reply.content[wire.METRICS][wire.TRAINED_ERROR]
    again = ask(wire.EVALUATE, config, model=trained)
    assert again.content[wire.METRICS][wire.ERROR] == error


def test_a_training_that_went_to_nan_leaves_the_kept_personalised_model(tmp_path: Path) -> None:
    config = digits_config("a", home=str(tmp_path))
    model = initial(node=config)
    keys = {wire.EVALUATE_TRAINED: True, wire.RUN: "r1"}
    train(model, config, **keys)
    files = sorted((tmp_path / "personalised").iterdir())
    before = [file.read_bytes() for file in files]
    huge = {name: array * np.float32(1e25) for name, array in initial(node=config).items()}
    reply = train(huge, config, **keys)
    trained = model_in(reply)
    assert not all(np.isfinite(array).all() for array in trained.values())
    assert [file.read_bytes() for file in files] == before


def test_label_counts_are_told_with_the_silos_own_consent_alone() -> None:
    assert "label_counts = true" in reason(ask(wire.LABEL_COUNTS))
    consenting = digits_config("b", **{"label-counts": True})
    counts = decode_arrays(ask(wire.LABEL_COUNTS, consenting).content[wire.LABELS])
    labels = load_task("digits").load({"train": 20, "test": 20, "skip": 0}).y_train
    np.testing.assert_array_equal(counts[wire.LABELS], np.bincount(labels, minlength=10))


def test_an_ensemble_is_the_mean_of_the_logits(tmp_path: Path) -> None:
    config = digits_config("a", home=str(tmp_path))
    own = initial(node=config)
    other = {name: array + np.float32(0.05) for name, array in own.items()}
    members = {
        f"{wire.MEMBER}{i}": encode_arrays(m, packed=True) for i, m in enumerate([own, other])
    }
    reply = ask(wire.ENSEMBLE, config, records=members, keep=True, run="r")
    task = load_task("digits")
    model, data = task.model(), task.load({"train": 20, "test": 20, "skip": 0})
    logits = []
    with torch.no_grad():
        for weights in (own, other):
            model.load_state_dict({n: torch.from_numpy(a) for n, a in weights.items()})
            logits.append(model.eval()(torch.from_numpy(data.x_test)))
    wrong = ((logits[0] + logits[1]).argmax(dim=1).numpy() != data.y_test).mean()
    assert reply.content[wire.METRICS][wire.ERROR] == pytest.approx(wrong)
    assert len(load_file(tmp_path / "ensembles" / "r.safetensors")) == 2 * len(own)
    assert ask(wire.ENSEMBLE, config).has_error()


@pytest.mark.parametrize(
    ("network", "positive"),
    [("torchvision/resnet18", True), ("torchvision/shufflenet_v2_x0_5", True),
     ("torchvision/efficientnet_b0", False)],
)  # fmt: skip
def test_latents_of_a_library_s_network_are_positive_where_it_ends_in_a_relu(
    network: str, positive: bool, tmp_path: Path
) -> None:
    """The generator's latents then pass a softplus, as those of the paper's networks do."""
    (tmp_path / "study.toml").write_text(
        f'kind = "npz"\nname = "study"\nclasses = ["a", "b"]\nshape = [3, 32, 32]\n'
        f'network = "{network}"\n'
    )
    task = load_task(str(tmp_path / "study.toml"))
    torch.manual_seed(0)
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    layers = describe_head(task, model)
    assert [kind for kind, *_ in layers] == ["positive"] * positive + ["linear"]
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training, "as it was"
