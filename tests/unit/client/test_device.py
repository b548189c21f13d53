"""Which device a silo computes on, and what is said of one that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.client.home.folder import create
from coterie.strategies.fedgenp import generators
from coterie.system.device import device_of
from tests.conftest import silo

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCompile with …"


@pytest.fixture
def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that this PyTorch has no kernels for."""
    zeros: Callable[..., torch.Tensor] = torch.zeros

    def refusing(*shape: Any, device: Any = None, **more: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            raise RuntimeError(NO_KERNEL)
        return zeros(*shape, device=device, **more)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", refusing)


def test_auto_takes_the_cpu_in_place_of_a_gpu_that_cannot_compute_and_says_why(
    unsupported: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_of("auto").type == "cpu"
    (said,) = [r.getMessage() for r in caplog.records]
    assert "the GPU cannot be used" in said and "no kernel image is available" in said


def test_a_check_on_such_a_machine_ends_well(
    unsupported: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "a", "a")
    assert silo(["check", "--home", str(tmp_path / "a")]) == 0
    assert "device    cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("cuda", "no kernel image is available for execution on the device. Use auto or cpu.$"),
        ("cuda:0", "no kernel image is available"),
        ("cuda:7", "PyTorch finds 1 CUDA device, and cuda:0 is the first. Use auto or cpu.$"),
    ],
)
def test_a_device_that_is_named_and_cannot_be_used_is_refused_in_a_sentence(
    device: str, why: str, unsupported: None
) -> None:
    with pytest.raises(ValueError, match=f"^device '{device}' cannot be used: .*{why}"):
        device_of(device)


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:x"])
def test_a_device_that_coterie_does_not_know_is_refused_by_name(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = create(tmp_path / "a", "a").folder
    text = (home / "silo.toml").read_text()
    assert 'device = "auto"' in text
    (home / "silo.toml").write_text(text.replace('device = "auto"', f'device = "{device}"'))
    assert silo(["check", "--home", str(home)]) == 2
    assert f"device must be auto, cpu, cuda or cuda:N. Got '{device}'" in capsys.readouterr().err


def test_generators_are_trained_on_the_cpu_where_the_gpu_cannot_compute(
    unsupported: None, caplog: pytest.LogCaptureFixture
) -> None:
    generators._device.cache_clear()
    assert {generators._device("auto").type for _ in range(3)} == {"cpu"}
    generators._device.cache_clear()
    assert caplog.text.count("the GPU cannot be used") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("network", ["cnn-fedbn", "torchvision/resnet18"])
def test_convolutions_on_a_gpu_give_the_same_bits_again(network: str) -> None:
    draw = np.random.default_rng(0)
    silos = {
        f"silo-{n}": (draw.normal(size=(128, 3, 32, 32)).astype("f4"), draw.integers(0, 10, 128))
        for n in range(2)
    }
    first, second = (
        coterie.simulate(silos, network=network, strategy="fedavg", rounds=2, progress=False)
        for _ in range(2)
    )
    for silo_id, model in first.models.items():
        for name, array in model.items():
            assert array.tobytes() == second.models[silo_id][name].tobytes(), name
