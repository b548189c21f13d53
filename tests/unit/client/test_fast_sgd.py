"""The benchmarks' own training loop stands in for the silo's, and gives what that gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.papers.fedgroup.fast_sgd import fast_silos
from coterie.client.home.folder import create
from coterie.wire import Model
from tests.kit import run

TASK = """
kind = "npz"
name = "study"
classes = ["no", "yes"]
shape = [1, 2, 3]
network = "mlp-128"
"""


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_silos_with_the_benchmarks_loop_train_the_same_models(tmp_path: Path, mu: float) -> None:
    (tmp_path / "study.toml").write_text(TASK)
    rng = np.random.default_rng(0)
    nodes = []
    for name in ("a", "b"):
        x = rng.normal(size=(80, 1, 2, 3)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0, 0, 0] > 0).astype(int))
        home = create(
            tmp_path / name, name, task=str(tmp_path / "study.toml"), data=tmp_path / f"{name}.npz"
        )
        nodes.append(home.settings().to_node_config() | {"home": "", "device": "cpu"})

    def model(folder: Path) -> Model:
        run(folder, nodes, task="study", rounds=2, proximal_mu=mu, optimiser="sgd")
        return load_file(folder / "models" / "a.safetensors")

    own = model(tmp_path / "own")
    with fast_silos():
        fast = model(tmp_path / "fast")
    assert any((own[name] != fast[name]).any() for name in own), "it was another loop"
    for name in own:
        np.testing.assert_allclose(fast[name], own[name], atol=1e-5)
