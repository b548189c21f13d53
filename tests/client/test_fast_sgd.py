"""The benchmarks' own training loop stands in for the silo's, and gives what that gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import coterie.client.work.workbench
from benchmarks.papers.fedgroup.fast_sgd import fast_silos
from coterie.client.app import app
from coterie.client.home.folder import create
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import execute
from coterie.wire import Model

TASK = """
kind = "npz"
name = "study"
classes = ["no", "yes"]
shape = [6]
network = "mlp-128"
"""


@pytest.fixture(autouse=True)
def fresh_workbenches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coterie.client.work.workbench, "_workbenches", {})


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_silos_with_the_benchmarks_loop_train_the_same_models(tmp_path: Path, mu: float) -> None:
    (tmp_path / "study.toml").write_text(TASK)
    rng = np.random.default_rng(0)
    nodes = []
    for name in ("a", "b"):
        x = rng.normal(size=(80, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(int))
        home = create(
            tmp_path / name, name, task=str(tmp_path / "study.toml"), data=tmp_path / f"{name}.npz"
        )
        nodes.append(home.settings().to_node_config() | {"home": ""})
    keys = {"strategy": "fedavg", "task": "study", "rounds": 2, "min-silos": 2, "proximal-mu": mu}

    def model(folder: Path) -> Model:
        execute(InProcessGrid(app, nodes), RunConfig.read(keys), run_id=1, folder=folder)
        return load_file(folder / "models" / "a.safetensors")

    own = model(tmp_path / "own")
    with fast_silos():
        fast = model(tmp_path / "fast")
    assert any((own[name] != fast[name]).any() for name in own), "it was another loop"
    for name in own:
        np.testing.assert_allclose(fast[name], own[name], atol=1e-5)
