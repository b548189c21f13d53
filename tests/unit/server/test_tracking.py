"""Figures in TensorBoard's event files and in MLflow, read back from there."""

from __future__ import annotations

import json
import struct
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.synthetic import write_run
from coterie.server.runs import tracking as tracking_module
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Round, read_run
from coterie.server.runs.tracking import Tracking, export, open_trackers, scalars
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.reports import RoundReport
from tests.commands import coterie


def scalars_of(folder: Path) -> dict[tuple[str, int], float]:
    """(tag, step) → value of the event files in a folder, by the format of TFRecord."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag, event.step] = value.simple_value
    return found


def test_a_finished_run_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run = read_run(write_run(tmp_path / "run", num_silos=4, num_rounds=3))
    (folder,) = export("tensorboard", run, None)
    found = scalars_of(folder)
    for one in run.rounds:
        for name, value in scalars(one).items():
            assert found[name, one.round] == pytest.approx(value), name
    assert ("error/site-001", 3) in found and ("groups/several", 2) in found


def test_a_run_is_followed_and_errors_go_to_their_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    done = Round(1, groups=(("a",),), seconds={"train": 2.0})
    later = Round(2, groups=(("a",),))
    with Tracking("tensorboard", tmp_path, {"lr": 0.1}) as tracking:
        tracking.round([done], RoundReport(round=1))
        evaluation = {"a": (1.0, 0.5, 10)}
        done = replace(done, after=evaluation)
        report = RoundReport(round=2, evaluated_round=1, evaluation=evaluation)
        tracking.round([done, later], report)
    found = scalars_of(tmp_path / "tensorboard")
    assert found["seconds/train", 1] == 2.0 and found["error/a", 1] == 0.5
    assert ("error/a", 2) not in found and ("groups/alone", 2) in found


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def log(self, figures: Any, step: int) -> None:
            raise OSError("the disk is full")

    monkeypatch.setattr(tracking_module, "open_trackers", lambda *a, **k: [Broken()])
    with Tracking("tensorboard", tmp_path, {}) as tracking:
        for number in (1, 2):
            tracking.round([Round(number, groups=(("a",),))], RoundReport(round=number))
    assert caplog.text.count("has stopped: the disk is full") == 1


def test_an_unknown_tracker_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RunConfig.read({"tracking": "tensorboard, mlflow, wandb"})
    said = (
        r"tracking: must be tensorboard, mlflow or wandb, or several separated by commas.*neptune'"
    )
    with pytest.raises(FederationError, match=said):
        RunConfig.read({"tracking": "tensorboard, neptune"})
    for package in ("tensorboardX", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FederationError, match=r"pip install 'coterie\[tensorboard\]'"):
        open_trackers("tensorboard", folder=tmp_path, config={}, run_name="r")
    with pytest.raises(FederationError, match="pip install mlflow"):
        open_trackers("mlflow", folder=tmp_path, config={}, run_name="r")
    with pytest.raises(FederationError, match="pip install wandb"):
        open_trackers("wandb", folder=tmp_path, config={}, run_name="r")


class FakeWandb(types.ModuleType):
    """Weights & Biases, as far as it is used: ``init`` gives a run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.made: dict[str, Any] = {}
        self.metrics: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, float]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def init(self, **settings: Any) -> FakeWandb:
        self.made = settings
        return self

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, figures: dict[str, float]) -> None:
        self.logged.append(figures)

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def test_weights_and_biases_gets_every_round_under_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = write_run(tmp_path / "run", num_silos=3, num_rounds=2)
    assert coterie("runs", "report", str(folder), "--format", "wandb").returncode == 0
    assert (wandb.made["project"], wandb.made["name"]) == ("coterie", "run")
    assert wandb.made["config"]["strategy"] == "hcct" and wandb.made["dir"] == str(folder)
    assert ("*", "round") in wandb.metrics
    assert [one["round"] for one in wandb.logged] == [1, 2]
    assert all("groups/alone" in one and "error/mean" in one for one in wandb.logged)
    assert wandb.summary == {"status": "completed"} and wandb.exit_code == 0


def test_a_run_that_fails_is_failed_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ValueError, match="no"), Tracking("wandb", tmp_path, {}):
        raise ValueError("no")
    assert wandb.summary == {"status": "failed"} and wandb.exit_code == 1


def with_models(folder: Path) -> Path:
    """Give a written run final models: silos 0 and 2 have one, silo 1 has another."""
    record = json.loads((folder / "run.json").read_text())
    record["model-hashes"] = {f"site-00{i}": "aba"[i] * 64 for i in range(3)}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "models").mkdir()
    for i in range(3):
        (folder / "models" / f"site-00{i}.safetensors").write_bytes(b"aba"[i : i + 1])
    return folder


class FakeMLflow(types.ModuleType):
    """MLflow's client, as far as models are registered."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.MlflowClient = lambda: self
        self.info, self.run_id, self.experiment_id = self, "r1", "0"
        self.done: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*words: Any, **named: Any) -> Any:
            self.done.append((name, *words, named))
            return [] if name.startswith("search") else self

        return call


def test_each_model_is_registered_once_with_its_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run = read_run(with_models(write_run(tmp_path / "run", num_silos=3, num_rounds=2)))
    export("mlflow", run, None)
    made = [one for one in mlflow.done if one[0] == "create_model_version"]
    assert [(one[1], one[2]["source"]) for one in made] == [
        ("coterie-digits", "runs:/r1/models/site-000"),
        ("coterie-digits", "runs:/r1/models/site-001"),
    ]
    assert made[0][2]["tags"]["silos"] == "site-000, site-002"
    assert made[0][2]["tags"]["sha256"] == "a" * 64
    mlflow.done.clear()
    export("mlflow", replace(run, status="stopped"), None)
    assert "create_model_version" not in [one[0] for one in mlflow.done]

    def unreachable() -> None:
        raise RuntimeError("no server at http://mlflow")

    monkeypatch.setattr(mlflow, "MlflowClient", unreachable, raising=False)
    with pytest.raises(FederationError, match="mlflow does not take run: no server at http://mlf"):
        export("mlflow", run, None)


def test_mlflow_gets_figures_and_models_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run = read_run(with_models(write_run(tmp_path / "run", num_silos=3, num_rounds=2)))
    for _ in range(2):  # the second makes further versions
        export("mlflow", run, None)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("coterie").experiment_id
    kept, _ = client.search_runs([experiment])
    assert kept.data.metrics["groups/alone"] >= 0 and kept.data.params["strategy"] == "hcct"
    assert kept.info.status == "FINISHED"
    versions = client.search_model_versions("name = 'coterie-digits'")
    assert {int(one.version): one.tags["silos"] for one in versions} == {
        1: "site-000, site-002", 2: "site-001", 3: "site-000, site-002", 4: "site-001",
    }  # fmt: skip
    own = mlflow.artifacts.download_artifacts("models:/coterie-digits/2", dst_path=str(tmp_path))
    assert (Path(own) / "site-001.safetensors").read_bytes() == b"b"
