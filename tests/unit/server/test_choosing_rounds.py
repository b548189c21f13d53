"""Which round counts: the best one is kept, rounds that bring nothing more are not played."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from coterie import wire
from coterie.client.home import best, rounds
from coterie.client.home.best import Best
from coterie.client.home.settings import SiloSettings
from coterie.client.work.card import Card, read_card
from coterie.server.report.command import write_report
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.strategies import FederationError
from coterie.strategies.rounds.result import RunResult
from coterie.wire import model_hash
from tests.conftest import arrays_of, assert_equal_models
from tests.kit import CutGrid, Node, PowerCutError, Tap, restart_silos
from tests.unit.client.kinds import Kinds, nodes_of, play

KEYS = {
    **{"rounds": 6, "batch_size": 8, "lr": 0.3, "lr_decay": 1.0, "seed": 1},
    **{"min_silos": 3, "wait_for_silos": 1.0},
}


class Worsening(Kinds):
    """Learns for three rounds of twelve; then its steps lead away from what is right."""

    name = "worsening"

    def __init__(self) -> None:
        self.done = 0.0

    def lr_factor(self, done: float) -> float:
        self.done = done
        return 1.0

    def training_step(self, model: nn.Module, x: Any, y: Any) -> torch.Tensor:
        loss = self.loss(model(x), y)
        return loss if self.done < 0.25 else -0.3 * loss


def nodes(folder: Path, task: type[Kinds] = Worsening, **more: Any) -> list[Node]:
    return nodes_of(task, folder, **more)


def run(folder: Path, task: type[Kinds] = Worsening, **keys: Any) -> RunResult:
    return play(folder, task, **(KEYS | keys))


def card_at(folder: Path, silo: str = "a") -> Card:
    return read_card(folder / silo / "models" / "run.safetensors")


def kept_at(folder: Path, silo: str = "a") -> dict[str, Any]:
    return dict(load_file(folder / silo / "models" / "run.safetensors"))


CHOOSING = {"rounds": 12, "validation": 0.25, "keep": "best"}


# ---------------------------------------------------------------- the best model is kept


def test_a_silo_keeps_the_round_that_was_best_on_its_validation_data(tmp_path: Path) -> None:
    found = run(tmp_path, **CHOOSING)
    card = card_at(tmp_path)
    assert 1 <= card.round < 12 and (card.rounds, card.best_of) == (12, 12)
    assert card.validation == 0.25 and card.validation_examples == 10
    assert card.sha256 == model_hash(kept_at(tmp_path)) != found.models["a"]
    # The same rounds, one fewer at a time: what is kept is the last model of that many.
    until = run(tmp_path / "until", **{**CHOOSING, "rounds": 12, "keep_every": card.round})
    name = f"run-round-{card.round:06d}.safetensors"
    at_the_time = dict(load_file(tmp_path / "until" / "a" / "models" / name))
    assert_equal_models(kept_at(tmp_path), at_the_time)
    assert_equal_models(arrays_of(until.models["a"]), arrays_of(found.models["a"]))
    text = (tmp_path / "a" / "models" / "run.md").read_text(encoding="utf-8")
    assert f"the model after round {card.round}, the best of those measured until" in text
    files = list((tmp_path / "a" / "best" / "run").iterdir())
    assert [file.name for file in files] == [f"round-{card.round:06d}.safetensors"]


def test_what_is_told_of_validation_is_the_error_of_each_rounds_model(tmp_path: Path) -> None:
    grid = Tap(nodes(tmp_path))
    run(tmp_path, silos=grid, **CHOOSING)
    errors = {}
    for reply in grid.got:
        meta = reply.metadata
        if meta.message_type == wire.TRAIN and meta.src_node_id == 1:
            metrics = reply.content.metric_records[wire.METRICS]
            errors[int(meta.group_id) - 1] = float(metrics[wire.RECEIVED_VALIDATION_ERROR])
    card = card_at(tmp_path)
    assert sorted(errors) == list(range(12))
    of_rounds = {number: error for number, error in errors.items() if number >= 1}
    assert card.validation_error == min(of_rounds.values()) == of_rounds[card.round]


def test_the_last_model_is_kept_by_default_and_validation_data_are_not_trained_on(
    tmp_path: Path,
) -> None:
    last = run(tmp_path / "last", validation=0.25)
    assert card_at(tmp_path / "last").round == 6 and card_at(tmp_path / "last").best_of == 0
    assert not (tmp_path / "last" / "a" / "best").exists()
    whole = run(tmp_path / "whole")
    one, other = arrays_of(last.models["a"]), arrays_of(whole.models["a"])
    assert not np.array_equal(one["0.weight"], other["0.weight"])


def test_a_resumed_run_keeps_the_same_best_model(tmp_path: Path) -> None:
    run(tmp_path / "whole", **CHOOSING)
    restart_silos()
    grid = CutGrid(nodes(tmp_path / "cut"), (wire.TRAIN, 7), 2)
    with pytest.raises(PowerCutError):
        run(tmp_path / "cut", silos=grid, **CHOOSING)
    restart_silos()
    run(tmp_path / "cut", resume="run", runs_dir=str(tmp_path / "cut"))
    for silo in "abc":
        assert card_at(tmp_path / "cut", silo).round == card_at(tmp_path / "whole", silo).round
        assert_equal_models(kept_at(tmp_path / "cut", silo), kept_at(tmp_path / "whole", silo))


def test_the_best_of_the_rounds_before_is_not_lost_to_one_that_never_was(tmp_path: Path) -> None:
    own = SiloSettings("a", "digits", home=str(tmp_path))

    def model(value: float) -> dict[str, Any]:
        return {"w": np.full(2, value, np.float32)}

    def offer(number: int, error: float, value: float | None = None) -> int:
        worth = Best(error, 0.0, number, 10)
        found = best.consider(own, model(number if value is None else value), worth, run="r")
        return 0 if found is None else found.round

    assert [offer(1, 0.5), offer(2, 0.4), offer(3, 0.4), offer(4, 0.1)] == [1, 2, 2, 4]
    assert offer(4, 0.45) == 2, "round 4 is repeated, and is another one now"
    assert offer(5, float("nan")) == 2 and offer(6, 0.1, float("nan")) == 2
    assert offer(20, 0.3) == 20
    assert best.load(own, Best(0.3, 0.0, 20, 10), run="r")["w"].tolist() == [20.0, 20.0]
    files = sorted(rounds.files_of(rounds.folder_of(str(tmp_path), best.KIND, "r")))
    assert files == [2, 20]
    (tmp_path / "best" / "r" / "round-000020.safetensors").write_bytes(b"torn")
    assert offer(21, 0.35) == 21, "of what is damaged nothing is believed"


def test_best_models_of_runs_that_never_ended_do_not_fill_the_disk(tmp_path: Path) -> None:
    own, runs = SiloSettings("a", "digits", home=str(tmp_path)), 2 * rounds.MAX_RUNS
    for number in range(runs):
        for played in (1, 2):
            worth = Best(1 / played, 0.0, played, 10)
            best.consider(own, {"w": np.zeros(2, np.float32)}, worth, run=f"run-{number}")
        folder = tmp_path / "best" / f"run-{number}"
        os.utime(folder, (number, number))
    left = {folder.name for folder in (tmp_path / "best").iterdir()}
    assert left == {f"run-{number}" for number in range(runs - rounds.MAX_RUNS, runs)}
    assert len(list((tmp_path / "best" / f"run-{runs - 1}").iterdir())) == 2


# ---------------------------------------------------------------- rounds that are not played


def test_a_run_ends_when_validation_has_not_improved_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coterie")
    found = run(tmp_path, rounds=12, validation=0.25, patience=3, keep="best")
    played = found.rounds[-2].round
    assert 4 < played < 12 and found.rounds[-1].final
    record = read_run(tmp_path / "run")
    assert record.status == "completed" and len(record.rounds) == played
    assert "has not improved for 3 rounds; it was lowest after round" in record.ended_early
    assert record.final is not None and set(record.final.evaluation) == {"a", "b", "c"}
    assert "the run stops early" in (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    (page,) = write_report(str(tmp_path / "run"))
    assert "ended early" in page.read_text(encoding="utf-8")
    card = card_at(tmp_path)
    assert (card.rounds, card.best_of) == (12, played) and card.round <= played - 3
    assert not list((tmp_path / "a" / "models").glob("run-round-*")), "it is the final one"
    # What was played is what a run without patience plays.
    whole = run(tmp_path / "whole", rounds=12, validation=0.25)
    for one, other in zip(found.rounds[:played], whole.rounds, strict=False):
        assert one.evaluation == other.evaluation


@pytest.mark.parametrize("cut", ["early", "end"])
def test_a_run_that_is_resumed_ends_at_the_same_round(tmp_path: Path, cut: str) -> None:
    keys = {"rounds": 12, "validation": 0.25, "patience": 3, "keep": "best"}
    whole = run(tmp_path / "whole", **keys)
    played = whole.rounds[-2].round
    restart_silos()
    at = (wire.TRAIN, played - 1) if cut == "early" else (wire.EVALUATE, played)
    with pytest.raises(PowerCutError):
        run(tmp_path / "cut", silos=CutGrid(nodes(tmp_path / "cut"), at, 1), **keys)
    restart_silos()
    resumed = run(tmp_path / "cut", resume="run", runs_dir=str(tmp_path / "cut"))
    assert (
        read_run(tmp_path / "cut" / "run").ended_early
        == read_run(tmp_path / "whole" / "run").ended_early
    )
    assert_equal_models(arrays_of(resumed.models["b"]), arrays_of(whole.models["b"]))
    assert_equal_models(kept_at(tmp_path / "cut"), kept_at(tmp_path / "whole"))


def test_patience_goes_by_what_silos_let_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = nodes(tmp_path, **{"share-metrics": "train-loss"})
    found = run(tmp_path, silos=silent, rounds=5, validation=0.25, patience=1)
    assert found.rounds[-2].round == 5
    assert "no silo reported its error on validation data" in caplog.text


def test_silos_evaluate_every_few_rounds_and_after_the_last(tmp_path: Path) -> None:
    found = run(tmp_path / "some", rounds=5, evaluate_every=2)
    record = read_run(tmp_path / "some" / "run")
    assert [one.round for one in record.rounds if one.after] == [2, 4, 5]
    assert record.final is not None and len(record.final.evaluation) == 3
    every = run(tmp_path / "all", rounds=5)
    assert_equal_models(arrays_of(found.models["c"]), arrays_of(every.models["c"]))
    expected = {r.evaluated_round: r.evaluation for r in every.rounds}
    got = {r.evaluated_round: r.evaluation for r in found.rounds if r.evaluation}
    assert got == {number: expected[number] for number in (0, 2, 4, 5)}
    (page,) = write_report(str(tmp_path / "some" / "run"))
    assert page.exists()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"keep": "best"}, "keep = best needs validation data"),
        ({"patience": 3}, "patience needs validation data"),
        ({"validation": 0.6}, "validation must be at least 0 and at most 0.5"),
        ({"evaluate-every": 0}, "evaluate-every must be at least 1"),
        ({"keep": "first"}, "keep must be last or best"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(FederationError, match=problem):
        RunConfig.read(keys)
