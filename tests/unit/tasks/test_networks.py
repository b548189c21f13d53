"""Networks by name, weights from a file, and runs that train only a part of them."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from coterie import wire
from coterie.client.cli.check import check
from coterie.client.cli.predict import predict
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import read as read_ledger
from coterie.client.work.card import read_card
from coterie.client.work.generators import describe_head
from coterie.client.work.session import open_session
from coterie.client.work.weights import read_weights, travelling
from coterie.strategies import FederationError
from coterie.tasks import TaskError, load_task, networks
from tests.conftest import digits_config
from tests.kit import Tap, run
from tests.rules.test_docs import DOCS, blocks

NAMES = ("a", "b", "c")
SHAPE = (3, 32, 32)
STUDY = """
kind = "npz"
name = "study"
classes = ["dark", "light"]
shape = [3, 32, 32]
network = "torchvision/{network}"
"""
FROZEN = (
    STUDY.format(network="resnet18") + 'weights = "resnet18.safetensors"\nfreeze = "all-but-head"'
)
SHORT = {"rounds": 2, "local_epochs": 1, "task": "study"}


def resnet(file: Path, *, classes: int = 1000, seed: int = 0) -> str:
    """Write random weights, with statistics of pictures as ``pictures`` makes them."""
    torch.manual_seed(seed)
    model, _ = networks.make("torchvision/resnet18", shape=SHAPE, num_classes=classes)
    with torch.no_grad():
        model(torch.from_numpy(pictures(0)["x"][:64]))
    save_file(model.state_dict(), file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pictures(silo: int, size: int = 200) -> dict[str, Any]:
    """Noise, a little lighter in the second class."""
    rng = np.random.default_rng(silo)
    y = np.arange(size) % 2
    x = rng.normal(size=(size, *SHAPE)) + y[:, None, None, None] - 0.5
    return {"x": x.astype(np.float32), "y": y}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A declaration with a frozen ResNet-18, its file of weights, and 600 pictures at 3 silos."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(FROZEN)
    resnet(folder / "resnet18.safetensors")
    for number, name in enumerate(NAMES):
        np.savez(folder / f"{name}.npz", **pictures(number))
    return folder


def nodes(study: Path, home: Path, **changes: Any) -> list[dict[str, Any]]:
    task = str(study / "study.toml")
    return [
        {"name": name, "task": task, "device": "cpu", "threads": 1, "home": str(home / name)}
        | {"data.data": str(study / f"{name}.npz")}
        | changes
        for name in NAMES
    ]


def play(
    study: Path, home: Path, *, configs: list[dict[str, Any]] | None = None, **keys: Any
) -> tuple[list[Message], Any]:
    """Play a run; return every message that passed, both ways, and the result."""
    grid = Tap(nodes(study, home) if configs is None else configs)
    result = run(home / "run", grid, **(SHORT | keys))
    return [*grid.sent, *grid.got], result


def arrays_of(message: Message) -> Mapping[str, np.ndarray[Any, Any]]:
    if message.has_error():
        return {}
    records = message.content.array_records.values()
    return {name: a for record in records for name, a in wire.decode_arrays(record).items()}


def silo_settings(config: Mapping[str, Any]) -> SiloSettings:
    return SiloSettings.from_node_config(dict(config), node_id=1)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "hcct", "keep_every": 1},
        *(
            pytest.param(keys, marks=pytest.mark.nightly)
            for keys in (
                {"strategy": "hcct", "layers": "fc."},
                {"strategy": "hcct", "layers": "auto", "validation": 0.2},
                {"strategy": "fedgroup", "num_groups": 2, "cold_start_steps": 4},
                {"strategy": "fedgenp", "generator_steps": 2},
                {"strategy": "fedavg", "personalise": "ditto", "evaluate_trained": True},
            )
        ),
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_a_frozen_backbone_stays_at_home(keys: dict[str, Any], study: Path, tmp_path: Path) -> None:
    passed, result = play(study, tmp_path, **keys)
    own = {"fc.weight", "fc.bias"}
    models = [set(arrays_of(m)) for m in passed if "fc.weight" in arrays_of(m)]
    assert models and all(names & own == own for names in models)
    for message in passed:
        held = arrays_of(message)
        assert not any(name.startswith(("layer", "conv1", "bn1")) for name in held)
        if set(held) == own:
            assert sum(a.nbytes for a in held.values()) == 4 * (2 * 512 + 2)
        if not message.has_error() and keys["strategy"] != "fedgenp":
            assert len(message.content.array_records) <= 1
            sent = sum(
                len(a.data) for r in message.content.array_records.values() for a in r.values()
            )
            assert sent < 100_000
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    assert len(errors) == 3 and max(errors) < 0.3
    named = {
        t["name"] for name in NAMES for e in read_ledger(tmp_path / name) for t in e["tensors"]
    }
    assert own <= named and not any(name.startswith("layer") for name in named)
    kept = list(tmp_path.rglob("*.safetensors"))
    assert kept and not any(
        name.split("/")[-1].startswith("layer") for file in kept for name in _names(file)
    )
    if keys["strategy"] != "fedgenp":  # which also keeps its generators
        assert max(file.stat().st_size for file in kept) < 100_000


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="np") as opened:
        return list(opened.keys())


@pytest.mark.nightly
def test_a_kept_model_is_completed_from_the_task(study: Path, tmp_path: Path) -> None:
    play(study, tmp_path, strategy="hcct")
    config = nodes(study, tmp_path)[0]
    (file,) = (tmp_path / "a" / "models").glob("*.safetensors")
    with safe_open(file, framework="np") as opened:
        assert set(opened.keys()) == {"fc.weight", "fc.bias"}
    card = read_card(file)
    session = open_session(silo_settings(config))
    assert card.frozen == session.frozen and card.frozen in file.with_suffix(".md").read_text()
    options = {"data": config["data.data"]}
    answers = predict(file, None, options=options)
    assert float((answers.classes != answers.labels).mean()) == pytest.approx(card.test_error)

    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(study / "study.toml", other)
    digest = resnet(other / "resnet18.safetensors", seed=1)
    with pytest.raises(
        TaskError, match="is not the one that the saved model was trained with"
    ) as said:
        predict(file, None, source=str(other / "study.toml"), options=options)
    assert f"resnet18.safetensors now has SHA-256 {digest}" in str(said.value)
    (other / "resnet18.safetensors").unlink()
    with pytest.raises(TaskError, match=r"resnet18\.safetensors' cannot be read: No such file"):
        predict(file, None, source=str(other / "study.toml"), options=options)


def test_a_silo_with_another_file_is_refused_before_it_sees_a_model(
    study: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(study / "study.toml", other)
    theirs = resnet(other / "resnet18.safetensors", seed=1)
    ours = hashlib.sha256((study / "resnet18.safetensors").read_bytes()).hexdigest()
    configs = nodes(study, tmp_path)
    configs[2]["task"] = str(other / "study.toml")
    with pytest.raises(FederationError) as said:
        play(study, tmp_path, configs=configs, strategy="hcct")
    text = str(said.value)
    assert (
        "c was refused: its initial weights differ: its resnet18.safetensors "
        f"has SHA-256 {theirs[:16]}…, that of a, b (resnet18.safetensors) {ours[:16]}…"
    ) in text
    sent = list(read_ledger(tmp_path / "c"))
    assert {entry["type"] for entry in sent} == {wire.DESCRIBE}
    assert not any(entry.get("tensors") for entry in sent)


def test_schemas_without_a_file_are_as_ever(tmp_path: Path) -> None:
    """A run of an earlier version goes on; frozen hashes are only where something is frozen."""
    (tmp_path / "study.toml").write_text(
        'kind = "npz"\nname = "study"\nclasses = ["a", "b"]\nshape = [3]\nnetwork = "mclr"\n'
    )
    np.savez(tmp_path / "x.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    config = {"name": "a", "task": str(tmp_path / "study.toml"), "threads": 1, "device": "cpu"}
    own = open_session(silo_settings(config | {"data.data": str(tmp_path / "x.npz")}))
    digits = open_session(silo_settings(digits_config("a")))
    assert (digits.schema, own.schema) == ("f9936c9d8036c724", "3616c840d868b881")


def test_check_says_what_leaves_and_what_stays(study: Path, tmp_path: Path) -> None:
    text = "\n".join(check(silo_settings(nodes(study, tmp_path)[0])))
    digest = hashlib.sha256((study / "resnet18.safetensors").read_bytes()).hexdigest()
    assert "at most: 2 arrays of the model, 4,104 bytes:\n  fc.weight 2×512 float32" in text
    assert f"The model starts from resnet18.safetensors, SHA-256\n  {digest}" in text
    assert "Frozen (not trained, not sent): 44," in text and "layer1" not in text


def test_layers_that_are_not_trained_cannot_be_personal(study: Path, tmp_path: Path) -> None:
    for layers, said in (
        ("head", "'fc.' matches every array that is trained: nothing would be shared"),
        ("layer4.", "no array is named layer4.…; the model has fc.weight, fc.bias, …. Frozen"),
    ):
        with pytest.raises(FederationError, match="0 of at least 3 have joined") as error:
            play(study, tmp_path / layers, strategy="fedavg", personal=layers)
        assert said in str(error.value)


@pytest.mark.nightly
def test_the_head_of_a_library_s_network_can_be_personal(study: Path, tmp_path: Path) -> None:
    text = STUDY.format(network="shufflenet_v2_x0_5") + 'freeze = ["conv1.", "stage2."]'
    (tmp_path / "study.toml").write_text(text)
    for name in NAMES:
        shutil.copy(study / f"{name}.npz", tmp_path)
    passed, _ = play(tmp_path, tmp_path, strategy="hcct", personal="head", validation=0.2)
    sent = {name for message in passed for name in arrays_of(message)}
    beginnings = {name.split(".")[0] for name in sent}
    assert beginnings == {"stage3", "stage4", "conv5"}, "neither fc nor what is frozen"
    assert "stage3.0.branch1.1.running_mean" in sent


# ---------------------------------------------------------------- networks by name


@pytest.mark.parametrize(
    ("name", "head", "splits"),
    [
        ("torchvision/mobilenet_v3_small", "classifier.3.", True),
        ("torchvision/squeezenet1_1", "classifier.1.", False),
        ("torchvision/googlenet", "fc.", True),
        ("timm/resnet10t", "fc.", True),
        ("timm/vit_tiny_patch16_224", "head.", True),
        ("timm/convnext_atto", "head.fc.", True),
        ("mlp-128", "head.", True),
    ],
)
def test_the_last_layer_is_the_head(name: str, head: str, splits: bool) -> None:
    if name.startswith("timm/"):
        pytest.importorskip("timm", reason="timm is not installed (extra: networks)")
    model, found = networks.make(name, shape=(3, 64, 64), num_classes=5)
    assert found == head and model.training
    assert model.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 5)

    class One:
        num_classes = 5

    One.head = head  # type: ignore[attr-defined]
    layers = describe_head(One(), model)  # type: ignore[arg-type]
    wanted = ("linear", f"{head}weight", f"{head}bias")
    assert [layer for layer in layers if layer[0] == "linear"] == ([wanted] if splits else [])
    networks.freeze(model, "all-but-head", head=head)
    assert set(travelling(model)) == {f"{head}weight", f"{head}bias"}


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("resnet18", SHAPE, r"unet, or torchvision/NAME or timm/NAME\. Got 'resnet18'"),
        (
            "torchvision/resnet19",
            SHAPE,
            "has no image classification network 'resnet19'. It has resnet18",
        ),
        ("torchvision/fcn_resnet50", SHAPE, "no image classification network"),
        (
            "torchvision/resnet18",
            (1, 32, 32),
            "networks need colour images: give shape three channels",
        ),
        ("torchvision/resnet18", (5,), "it needs images: channels, height, width"),
        ("torchvision/vgg11_bn", (3, 8, 8), "Output size is too small"),
        ("cnn-hcct", (5,), "mclr and the mlp networks accept every shape"),
    ],
)
def test_networks_that_cannot_be_made(name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        networks.make(name, shape=shape, num_classes=2)


def test_timm_is_asked_only_for_what_it_has_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm", reason="timm is not installed (extra: networks)")
    with pytest.raises(
        TaskError, match=r"timm has no image classification network 'hf-hub:timm/resnet18\.a1_in1k'"
    ):
        networks.make("timm/hf-hub:timm/resnet18.a1_in1k", shape=SHAPE, num_classes=2)
    with pytest.raises(TaskError, match="its output is not only that of its last layer"):
        networks.make("timm/deit_tiny_distilled_patch16_224", shape=SHAPE, num_classes=2)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TaskError, match=r"needs timm, .* pip install 'coterie\[networks\]'"):
        networks.make("timm/resnet10t", shape=SHAPE, num_classes=2)


# ---------------------------------------------------------------- files of weights


def small(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return networks.make("cnn-fedgen", shape=(1, 8, 8), num_classes=3)[0]


def test_a_file_brings_all_but_a_head_of_other_classes(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    arrays = small().state_dict()
    old = {name: a for name, a in arrays.items() if not name.endswith("num_batches_tracked")}
    for change in ({}, {"head.weight": torch.zeros(9, 32), "head.bias": torch.zeros(9)}):
        save_file({**old, **change}, file)
        model = small(seed=1)
        fresh = model.head.weight.clone()
        name, digest = networks.load_file(model, file, head="head.")
        assert (name, digest) == (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
        found = model.state_dict()
        rest = [n for n in old if not n.startswith("head.")]
        assert rest and all(torch.equal(found[n], arrays[n]) for n in rest)
        assert torch.equal(found["head.weight"], fresh if change else arrays["head.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"representation.0.bias": None}, r"lacks arrays of the network: representation\.0\.bias"),
        ({"tail": torch.zeros(1)}, r"has arrays that the network does not have: tail\. Was it"),
        ({"representation.0.bias": torch.zeros(7)}, "of other shapes than the network's: repr"),
    ],
)
def test_a_file_of_another_network_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    arrays = {n: a for n, a in {**small().state_dict(), **change}.items() if a is not None}
    save_file(arrays, tmp_path / "w.safetensors")
    model = small(seed=1)
    before = read_weights(model)
    with pytest.raises(TaskError, match=said):
        networks.load_file(model, tmp_path / "w.safetensors", head="head.")
    assert all(np.array_equal(a, before[n]) for n, a in read_weights(model).items())


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"PK not this")
    for file, said in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "w.safetensors", "is no"),
    ):
        with pytest.raises(TaskError, match=said):
            networks.load_file(small(), file)


def test_a_declaration_may_state_the_checksum(study: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((study / "resnet18.safetensors").read_bytes()).hexdigest()
    file = tmp_path / "study.toml"
    shutil.copy(study / "resnet18.safetensors", tmp_path)
    file.write_text(f'{FROZEN}\nchecksum = "{digest}"')
    task = load_task(str(file))
    task.model()
    assert task.weights == ("resnet18.safetensors", digest) and task.head == "fc."
    resnet(tmp_path / "resnet18.safetensors", seed=1)
    for one in (task, load_task(str(file))):
        with pytest.raises(TaskError, match=f"resnet18.safetensors has SHA-256 .* but {digest} is"):
            one.model()
    (tmp_path / "plain.toml").write_text(FROZEN)
    silent = load_task(str(tmp_path / "plain.toml"))
    silent.model()
    shutil.copy(study / "resnet18.safetensors", tmp_path)
    with pytest.raises(TaskError, match="is expected"):  # the file has changed since it was read
        silent.model()
    for more, said in (('checksum = "12"', "checksum: string should match"), ("", "name it as")):
        text = more or f'checksum = "{digest}"'
        file.write_text(STUDY.format(network="resnet18") + text)
        with pytest.raises(TaskError, match=said):
            load_task(str(file))


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        ('["layer9."]', r"freeze names 'layer9\.', but no parameter's name begins with"),
        ('["conv", "stage", "fc"]', "freeze names all parameters: nothing would be trained"),
        ('"backbone"', "is wrong: freeze"),
        ('[""]', "is wrong: freeze"),
    ],
)
def test_what_cannot_be_frozen(freeze: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY.format(network="shufflenet_v2_x0_5") + f"freeze = {freeze}")
    with pytest.raises(TaskError, match=said):
        load_task(str(file)).model()


# ---------------------------------------------------------------- LoRA


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["hcct", "fedavg"])
def test_the_transformer_of_the_guide_learns_by_lora(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: networks)")
    pytest.importorskip("peft", reason="peft is not installed (extra: networks)")
    (code,) = blocks(DOCS / "how-to" / "networks.md", "python")
    assert len(code.text.splitlines()) <= 40
    (tmp_path / "sentences.py").write_text(code.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    configs = []
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)
        y = np.arange(80) % 2
        tokens = rng.integers(1, 5, (80, 16)) + 4 * y[:, None]
        mask = np.arange(16) < rng.integers(8, 17, (80, 1))
        inputs = {"input_ids": tokens, "attention_mask": mask.astype(np.int64)}
        np.savez(tmp_path / f"{name}.npz", y=y, **inputs)
        configs.append(
            {"name": name, "task": "sentences:Sentences", "device": "cpu", "threads": 1}
            | {"data.data": str(tmp_path / f"{name}.npz")}
        )
    keys = {"task": "sentences:Sentences", "local_epochs": 4, "momentum": 0.9}
    passed, result = play(tmp_path, tmp_path, configs=configs, strategy=strategy, **keys)
    sent = {name: a.nbytes for message in passed for name, a in arrays_of(message).items()}
    assert len(sent) == 2 * 2 * 2 + 2 and all("lora_" in n or "classifier" in n for n in sent)
    assert sum(sent.values()) < 20_000
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    assert max(errors) < 0.3
    sys.modules.pop("sentences", None)


@pytest.mark.parametrize("name", ["cnn-fedbn", "cnn-fedgen", "torchvision/resnet18"])
def test_every_network_has_a_form_with_group_norm(name: str) -> None:
    """One sample gives the same alone and among others, and there are no running statistics."""
    shape = (3, 32, 32)
    torch.manual_seed(0)
    model, head = networks.make(f"{name}+groupnorm", shape=shape, num_classes=4)
    assert not list(model.buffers()) and head == networks.make(name, shape=shape, num_classes=4)[1]
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert norms and all(norm.num_channels // norm.num_groups >= 6 for norm in norms)
    x = torch.randn(5, *shape)
    assert torch.allclose(model.train()(x)[2:3], model(x[2:3]), atol=1e-4)


def test_a_built_in_task_takes_the_form_with_group_norm_by_its_name() -> None:
    task = load_task("mnist/cnn-fedgen+groupnorm")
    assert task.name == "mnist/cnn-fedgen+groupnorm" and not list(task.model().buffers())
    with pytest.raises(TaskError, match=r"has no model 'cnn-nothing\+groupnorm'"):
        load_task("mnist/cnn-nothing+groupnorm")
