"""The record of a run in a Flower app of your own, by itself or ``recorded``; its continuation."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import FedMedian

import coterie
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import find_run, read_run
from coterie.server.runs.run import execute
from coterie.server.study.recorded import Recorded
from coterie.strategies import HCCT, FedAvg, FederationError, FirstStage, PerGroup
from coterie.strategies.strategy import GroupStrategy
from tests.commands import coterie as command
from tests.conftest import assert_equal_models, plain_app, plain_initial, plain_nodes

NODES = plain_nodes(0, 0, 1, 1)


def start(strategy: GroupStrategy | Recorded, fault: Any = None, rounds: int = 4) -> Any:
    grid = InProcessGrid(plain_app(fault), NODES)
    return strategy.start(grid=grid, initial_arrays=plain_initial(), num_rounds=rounds)


class FlowersRun(InProcessGrid):
    """A grid of ``flwr run``, which has started run 7."""

    run = SimpleNamespace(run_id=7)  # type: ignore[assignment]


def per_group() -> PerGroup:
    """With a first stage of two rounds."""
    stage = FirstStage(HCCT(alpha=20.0), plain_initial(), num_rounds=2)
    return PerGroup(stage, lambda group: FedMedian(min_available_nodes=1, min_train_nodes=1))


@pytest.mark.parametrize(("made", "name"), [(HCCT, "hcct-7"), (per_group, "pergroup-7")])
def test_a_run_of_flower_leaves_one_record_by_itself(
    made: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    grid = FlowersRun(plain_app(), NODES)
    result = made().start(grid, plain_initial(), 3)
    (folder,) = (tmp_path / "runs").iterdir()
    run = read_run(folder)
    assert (folder.name, run.status, len(run.rounds)) == (name, "completed", 3)
    assert run.final_groups == tuple(map(tuple, result.groups[3]))
    for silo, model in start(made(), rounds=3).held.items():
        assert_equal_models(result.held[silo], model)


def test_a_run_that_cannot_or_shall_not_have_a_record_is_played_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "file" / "runs"))
    with caplog.at_level(logging.WARNING):
        HCCT().start(FlowersRun(plain_app(), NODES), plain_initial(), 1)
    assert "this run has no record" in caplog.text
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    HCCT(record=False).start(FlowersRun(plain_app(), NODES), plain_initial(), 1)
    assert not (tmp_path / "runs").exists()


class Killed(BaseException):
    """The process is gone."""


def test_a_recorded_run_has_the_models_of_any_other_and_the_commands_read_it(
    tmp_path: Path,
) -> None:
    seen: list[int] = []
    own = HCCT(alpha=20.0, on_round=lambda report: seen.append(report.round))
    strategy = coterie.recorded(own, label="mine", runs_dir=tmp_path)
    result, plain = start(strategy), start(HCCT(alpha=20.0))
    assert seen == [1, 2, 3, 4, 4] and strategy.folder is not None
    for name, model in plain.held.items():
        assert_equal_models(result.held[name], model)
    run = read_run(strategy.folder)
    assert (run.status, run.strategy, len(run.rounds)) == ("completed", "hcct", 4)
    assert run.missing == () and run.final_groups == tuple(map(tuple, result.groups[4]))
    where = ("--runs-dir", str(tmp_path))
    for line in (("runs",), ("runs", "explain", "mine"), ("runs", "report", "mine")):
        done = command(*line, *where)
        assert done.returncode == 0, done.stderr
    assert find_run("mine", tmp_path) == strategy.folder, "the label alone is enough"


def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_models(tmp_path: Path) -> None:
    def dies(message: Message, answer: RecordDict) -> RecordDict:
        if message.metadata.group_id == "3":
            raise Killed
        return answer

    first = coterie.recorded(HCCT(alpha=20.0), label="mine", runs_dir=tmp_path)
    with pytest.raises(Killed):
        start(first, dies)
    assert first.folder is not None and read_run(first.folder).status == "stopped"
    for other, had in ((HCCT(alpha=30.0), "alpha = 20.0"), (FedAvg(), "strategy = 'hcct'")):
        with pytest.raises(FederationError, match=f"had {had}. Got"):
            start(coterie.recorded(other, runs_dir=tmp_path, resume="mine"))
    again = coterie.recorded(HCCT(alpha=20.0), runs_dir=tmp_path, resume="mine")
    result, whole = start(again), start(HCCT(alpha=20.0))
    for name, model in whole.held.items():
        assert_equal_models(result.held[name], model)
    run = read_run(first.folder)
    assert run.status == "completed" and [one.round for one in run.rounds] == [1, 2, 3, 4]
    with pytest.raises(FederationError, match="is complete: there is nothing to resume"):
        coterie.recorded(HCCT(alpha=20.0), runs_dir=tmp_path, resume="mine")


def test_only_the_app_can_continue_its_run(tmp_path: Path) -> None:
    def refuses(message: Message, answer: RecordDict) -> RecordDict:
        raise Killed

    first = coterie.recorded(HCCT(alpha=20.0), label="mine", runs_dir=tmp_path)
    with pytest.raises(Killed):
        start(first, refuses)
    assert first.folder is not None
    config = RunConfig.read({"resume": first.folder.name, "runs-dir": str(tmp_path)})
    with pytest.raises(FederationError, match="was started by a Flower app"):
        execute(InProcessGrid(plain_app(), NODES), config, run_id=2, folder=first.folder)
