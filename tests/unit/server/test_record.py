"""A run's folder: what is in it, and that it is there whole or not at all."""

from __future__ import annotations

import json
import logging
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message
from safetensors import SafetensorError
from safetensors.numpy import load_file

import coterie.server.runs.record.recorder
from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.paths import default_runs_dir
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Recorder, read_unfinished, read_whole, recorder
from coterie.server.runs.record.follow import events
from coterie.server.runs.record.metrics import Lead
from coterie.server.runs.run import _line, execute
from coterie.server.study.comparison import measure
from coterie.strategies import FederationError
from coterie.strategies.errors import EXIT_NO_SILOS
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import Silo
from coterie.wire import model_hash
from tests.conftest import arrays_of, assert_equal_models, digits_config
from tests.kit import dashed, digits, record_of, run

SHORT = {
    **{"strategy": "hcct", "rounds": 3, "local-epochs": 1, "batch-size": 10, "min-silos": 3},
    **{"wait-for-silos": 0.3, "round-timeout": 5.0},
}


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), "stopped", "stopped by Ctrl-C (SIGINT)"),
        (SystemExit(0), "stopped", "stopped by `coterie runs stop`, or by SIGTERM or SIGINT"),
        (SystemExit(3), "failed", "3"),
        (FederationError("no silos"), "failed", "no silos"),
        (ValueError(), "failed", "ValueError"),
        (ValueError("0"), "failed", "0"),
    ],
)
def test_the_record_says_in_words_why_a_run_ended(
    error: BaseException, status: str, said: str, tmp_path: Path
) -> None:
    Recorder(tmp_path, RunConfig.read({}).plain(), run_id=1).fail(error)
    assert record_of(tmp_path)["status"] == lines(tmp_path)[-1]["status"] == status
    assert record_of(tmp_path)["error"] == said and lines(tmp_path)[-1]["error"] == said


def test_a_log_line_means_the_errors_that_are_told() -> None:
    evaluation = {"a": (0.5, 0.25, 10), "b": (math.nan, math.nan, 10)}
    report = RoundReport(2, (("a", "b"),), evaluation=evaluation, evaluated_round=1)
    assert "mean error after round 1: 25.0%" in _line(report, 5, Lead())


def play(folder: Path, who: Any = None, **changes: Any) -> RunResult:
    """Play a short run of HCCT with three silos."""
    return run(folder, who or digits(), run_id=42, **(SHORT | dashed(changes)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A run of HCCT over three silos, recorded."""
    folder = tmp_path_factory.mktemp("runs") / "hcct-42"
    return folder, play(folder)


def test_equal_models_have_equal_hashes_whatever_the_order_and_others_do_not() -> None:
    model = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
    same = dict(reversed(list(model.items())))
    assert model_hash(model) == model_hash(same)
    others = [
        model | {"w": model["w"].reshape(3, 2)},
        model | {"w": model["w"].astype(np.float64)},
        model | {"b": np.nextafter(model["b"], np.float32(1))},
        {"x": model["w"], "b": model["b"]},
    ]
    assert len({model_hash(model), *map(model_hash, others)}) == 5


def test_records_go_where_the_operator_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    assert default_runs_dir() == tmp_path / "home" / "runs"
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "elsewhere"))
    assert default_runs_dir() == tmp_path / "elsewhere"


def test_a_large_record_is_not_written_after_every_round_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "LARGE_BYTES", 0)
    monkeypatch.setattr(recorder, "WRITING_SHARE", 1e-9)
    made = Recorder(tmp_path, RunConfig.read({}).plain(), run_id=1)
    for number in (1, 2, 3):
        made.round(RoundReport(number, (("a", "b"),)), {}, {})
    assert record_of(tmp_path)["rounds"] == []
    assert [one.round for one in read_unfinished(tmp_path).rounds] == [1, 2, 3]
    made.fail(KeyboardInterrupt())
    assert [one["round"] for one in record_of(tmp_path)["rounds"]] == [1, 2, 3]


# ---------------------------------------------------------------- a run that ended well


def test_a_finished_run_says_what_it_was(finished: tuple[Path, RunResult]) -> None:
    data = record_of(finished[0])
    assert (data["status"], data["run-id"], data["format"]) == ("completed", "42", 1)
    assert data["config"] == RunConfig.read(SHORT).plain()
    assert set(data["versions"]) == {"python", "coterie", "flwr", "numpy", "torch"}
    assert data["seconds"] >= data["seconds-to-first-training"] >= 0
    facts = {"num-examples": 20, "alpha": None, "node-id": "1", "release": version("coterie")}
    assert data["silos"]["a"] == facts
    assert data["refused"] == {}
    assert "error" not in data


def test_every_round_is_recorded_with_its_groups_silos_bytes_and_times(
    finished: tuple[Path, RunResult],
) -> None:
    folder, result = finished
    rounds = record_of(folder)["rounds"]
    assert [entry["round"] for entry in rounds] == [1, 2, 3]
    for entry in rounds:
        assert entry["groups"] == result.groups[entry["round"]]
        assert set(entry["silos"]) == {"a", "b", "c"}
        assert all(s["bytes-sent"] == 4 * 6090 for s in entry["silos"].values())
        assert all(s["seconds"] > 0 and s["train-loss"] > 0 for s in entry["silos"].values())
        assert {"prepare", "train", "aggregate"} <= set(entry["seconds"])
        assert len(entry["similarity"]) == 3


def test_training_beside_the_rounds_own_and_what_comes_after_them_are_recorded(
    tmp_path: Path,
) -> None:
    """MAXFL trains silos' own models beside the global one; FedEnsemble hands all models on."""
    play(tmp_path / "maxfl", strategy="maxfl", warm_up=1, own_rounds=2)
    one, two, three = record_of(tmp_path / "maxfl")["rounds"]
    assert "own-model" not in {**one["phases"], **three["phases"]}
    beside = two["phases"]["own-model"]
    assert (beside["exchanges"], beside["messages"], beside["seconds"]) == (0, 3, 0)
    assert beside["bytes-sent"] == beside["bytes-received"] == 3 * 4 * 6090
    assert beside["silo-seconds"] > 0 and three["phases"]["evaluate.training"]["silo-seconds"] > 0

    play(tmp_path / "ensemble", strategy="fedensemble")
    data = record_of(tmp_path / "ensemble")
    after = data["final-phases"][wire.ENSEMBLE]
    assert (after["messages"], after["bytes-sent"]) == (3, 3 * 3 * 4 * 6090)
    trained = 2 * 9 * 4 * 6090
    run = read_whole(tmp_path / "ensemble")
    assert measure(run).num_bytes == trained + after["bytes-sent"]
    (phase,) = run.rounds_to_end()[-1].phases.items()
    assert phase[0] == wire.ENSEMBLE and phase[1].silo_seconds == after["silo-seconds"] > 0
    assert (phase[1].bytes_sent, phase[1].bytes_received) == (after["bytes-sent"], 0)


def test_every_evaluation_is_filed_with_the_round_whose_models_it_is_of(
    finished: tuple[Path, RunResult],
) -> None:
    folder, result = finished
    data = record_of(folder)
    for report in result.rounds:
        expected = {name: error for name, (_, error, _) in report.evaluation.items()}
        if report.evaluated_round == 0:
            filed = data["initial-evaluation"]
        else:
            filed = data["rounds"][report.evaluated_round - 1]["evaluation-after"]
        assert {name: entry["error"] for name, entry in filed.items()} == expected
        assert set(expected) == {"a", "b", "c"}
    assert data["final-evaluation"] == data["rounds"][-1]["evaluation-after"]
    assert data["final-groups"] == data["rounds"][-1]["groups"]


def test_final_models_are_kept_with_their_hashes(finished: tuple[Path, RunResult]) -> None:
    folder, result = finished
    hashes = record_of(folder)["model-hashes"]
    assert sorted(file.name for file in (folder / "models").iterdir()) == [
        "a.safetensors", "b.safetensors", "c.safetensors",
    ]  # fmt: skip
    for name, arrays in result.models.items():
        loaded = load_file(folder / "models" / f"{name}.safetensors")
        assert model_hash(loaded) == model_hash(arrays_of(arrays)) == hashes[name]


def test_the_unit_is_that_which_most_silos_state(tmp_path: Path) -> None:
    record = Recorder(tmp_path, {}, run_id=1)
    units = {"a": "days", "b": "years", "c": "years"}
    silos = {
        n: Silo(n, i, described=True, metric="mae", unit=units[n]) for i, n in enumerate("abc")
    }
    record.ready(silos)
    record.finish({})
    assert read_whole(tmp_path).lead == Lead("mae", "years")


def test_events_tell_the_run_as_it_happened(finished: tuple[Path, RunResult]) -> None:
    recorded = lines(finished[0])
    kinds = [event["event"] for event in recorded]
    assert kinds[:5] == ["start", "look", "here", "ready", "look"]
    assert kinds[-2:] == ["final", "end"]
    assert kinds.count("round") == 3
    assert [event["at"] for event in recorded] == sorted(event["at"] for event in recorded)
    assert recorded[2]["silos"] == recorded[3]["silos"] == ["a", "b", "c"]
    answers = [event for event in recorded if event["event"] == "answer"]
    assert [event["work"] for event in answers] == ["train"] * 3 + ["evaluate"]
    assert all(event["silos"] == ["a", "b", "c"] for event in answers)
    assert recorded[-1]["status"] == "completed"
    followed = list(events(finished[0], start_deadline_s=1, ended=lambda: None))
    assert [event.kind for event in followed] == kinds


def test_large_matrices_are_kept_for_the_last_rounds_only(tmp_path: Path) -> None:
    config = RunConfig.read(SHORT)
    kept = Recorder(tmp_path, config.plain(), run_id=1)
    names = [f"s{i}" for i in range(200)]
    rows = [[0.5] * 200] * 200
    for number in range(1, 6):
        details = {"planned": [names], "compared": names, "similarity": rows, "norms": [1.0] * 200}
        kept.round(RoundReport(round=number, details=details), {}, {})
    kept.finish({})
    rounds = record_of(tmp_path)["rounds"]
    assert [entry["round"] for entry in rounds if "similarity" in entry] == [4, 5]
    assert all("planned" in entry for entry in rounds) and "norms" not in rounds[0]
    assert all("similarity" not in event for event in lines(tmp_path))


def test_the_log_is_kept_and_the_logger_let_go(finished: tuple[Path, RunResult]) -> None:
    assert (finished[0] / "run.log").exists()
    handlers = logging.getLogger("coterie").handlers
    assert not any(isinstance(handler, logging.FileHandler) for handler in handlers)


def test_the_record_is_whole_after_every_round(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def watching(message: Message, context: Context) -> Message:
        if message.metadata.message_type == wire.TRAIN and context.node_config["name"] == "a":
            data = record_of(tmp_path / "run")
            seen.append((data["status"], len(data["rounds"])))
        return app(message, context)

    play(tmp_path / "run", InProcessGrid(watching, digits()), strategy="fedavg")  # type: ignore[arg-type]
    assert seen == [("running", 0), ("running", 1), ("running", 2)]


# ---------------------------------------------------------------- a run that went wrong


def test_a_run_without_silos_is_recorded_as_failed_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FederationError) as caught:
        play(tmp_path / "run", digits("a"))
    assert caught.value.exit_code == EXIT_NO_SILOS
    data = record_of(tmp_path / "run")
    assert data["status"] == "failed"
    assert "1 of at least 3 have joined" in data["error"]
    recorded = lines(tmp_path / "run")
    assert [event["event"] for event in recorded] == ["start", "look", "waits", "end"]
    assert recorded[2]["text"] == "waiting for silos: 1 of at least 3 have joined"
    assert recorded[-1]["error"] == data["error"]


def test_silos_that_are_refused_are_in_the_record(tmp_path: Path) -> None:
    nodes = [*digits(), digits_config("a", 3)]
    play(tmp_path / "run", nodes)
    assert "another silo with that name" in record_of(tmp_path / "run")["refused"]["a"]


@pytest.mark.parametrize(
    ("away", "task", "said"),
    [
        (0, "mnist", r"every enrolled silo refuses.*Name their task with --task, and"),
        (0, "digit", r"every enrolled silo refuses.*Did you mean --task digits\?"),
        (
            1,
            "mnist",
            r"only 1 of the enrolled silos can take part, and min-silos is 3: a, b, c serve ta",
        ),
    ],
)
def test_a_task_that_too_few_enrolled_silos_may_serve_ends_the_run_at_once(
    away: int, task: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="coterie")
    grid = InProcessGrid(app, digits())
    names = dict(zip(grid.get_node_ids(), "abc", strict=True)) | dict.fromkeys(
        range(99, 99 + away), "away"
    )
    config = RunConfig.read(SHORT | {"task": task, "wait-for-silos": 100.0})
    with pytest.raises(FederationError, match=said) as caught:
        execute(grid, config, run_id=42, folder=tmp_path / "run", enrolled=lambda: names)
    assert caught.value.exit_code == EXIT_NO_SILOS
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
    assert record_of(tmp_path / "run")["refused"] == {}


@pytest.mark.parametrize("away", [None, 3])
@pytest.mark.parametrize(
    ("task", "hint"), [("digit", ". Did you mean --task digits?"), ("mnist", "")]
)
def test_a_run_whose_silos_are_not_there_yet_waits_for_them(
    task: str, hint: str, away: int | None, tmp_path: Path
) -> None:
    """Also where nobody is enrolled: only silos of another study are connected."""
    grid = InProcessGrid(app, digits())
    names = dict(zip(grid.get_node_ids(), "abc", strict=True))
    names |= dict.fromkeys(range(99, 99 + (away or 0)), "away")
    config = RunConfig.read(SHORT | {"task": task})
    with pytest.raises(FederationError, match="timed out after 0 s") as caught:
        execute(
            *(grid, config),
            run_id=42,
            folder=tmp_path / "run",
            enrolled=None if away is None else lambda: names,
        )
    why = f"a, b, c serve task 'digits', the run is of task '{task}'"
    assert why in str(caught.value) and f"start silos that serve '{task}'" in str(caught.value)
    (waits,) = [event for event in lines(tmp_path / "run") if event["event"] == "waits"]
    assert waits["text"] == f"waiting for silos: 0 of at least 3 have joined; {why}{hint}"


def test_a_reply_left_out_is_in_record_events_and_log(tmp_path: Path) -> None:
    def failing(message: Message, context: Context) -> Message:
        meta = message.metadata
        name = context.node_config["name"]
        if meta.message_type == wire.TRAIN and name == "b" and meta.group_id == "2":
            return Message(Error(wire.FAILED, "the disk is full"), reply_to=message)
        return app(message, context)

    grid = InProcessGrid(failing, digits())  # type: ignore[arg-type]
    play(tmp_path / "run", grid)
    data = record_of(tmp_path / "run")
    assert data["status"] == "completed"
    assert [entry["left-out"] for entry in data["rounds"]] == [{}, {"b": "the disk is full"}, {}]
    assert set(data["rounds"][1]["silos"]) == {"a", "c"}
    assert "b is left out: the disk is full" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize("answer", ["error", "nothing", "nan"])
def test_a_silo_that_gives_no_initial_model_ends_the_run_with_its_name(
    answer: str, tmp_path: Path
) -> None:
    def failing(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == wire.INITIAL:
            if answer == "error":
                return wire.refusal("no.", message)
            if answer == "nothing":
                del reply.content[wire.ARRAYS]
            else:
                model = wire.decode_arrays(reply.content[wire.ARRAYS])
                bad = {k: a * np.float32(np.nan) for k, a in model.items()}
                reply.content[wire.ARRAYS] = wire.encode_arrays(bad, packed=True)
        return reply

    grid = InProcessGrid(failing, digits())  # type: ignore[arg-type]
    with pytest.raises(FederationError):
        play(tmp_path / "run", grid)
    assert record_of(tmp_path / "run")["status"] == "failed"


def test_an_interrupted_run_is_recorded_as_stopped(tmp_path: Path) -> None:
    def interrupted(message: Message, context: Context) -> Message:
        if message.metadata.message_type == wire.TRAIN:
            raise KeyboardInterrupt
        return app(message, context)

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "run", InProcessGrid(interrupted, digits()))  # type: ignore[arg-type]
    data = record_of(tmp_path / "run")
    assert (data["status"], data["error"]) == ("stopped", "stopped by Ctrl-C (SIGINT)")


def test_a_run_whose_models_cannot_be_written_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(arrays: Any, file: Path) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(coterie.server.runs.record.recorder, "save_file", full)
    with pytest.raises(FederationError, match=r"the disk is full.*coterie run resume run"):
        play(tmp_path / "run", rounds=1)
    assert record_of(tmp_path / "run")["status"] == "failed"


def test_models_are_written_as_they_are_however_they_lie(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "run", RunConfig.read({}).plain(), run_id=1)
    turned = {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "n": np.array(7)}
    kept.finish({"a": turned}, global_model=turned)
    for file in ("models/a.safetensors", "global.safetensors"):
        np.testing.assert_equal(load_file(tmp_path / "run" / file), turned)


def test_final_models_that_silos_share_are_not_copied_for_each(tmp_path: Path) -> None:
    result = play(tmp_path / "run", rounds=1, strategy="fedavg")
    assert len(result.held) == 3 and len({id(model) for model in result.held.values()}) == 1
    for name, model in result.held.items():
        assert_equal_models(model, arrays_of(result.models[name]))


@pytest.mark.parametrize("name", ["../../outside", "../run"])
def test_a_model_is_never_written_outside_the_models_folder(name: str, tmp_path: Path) -> None:
    """Also where a silo states a name that leads elsewhere: refusing the name is fine."""

    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == wire.DESCRIBE and context.node_config["name"] == "c":
            reply.content[wire.CONFIG]["name"] = name
        return reply

    grid = InProcessGrid(lying, digits())  # type: ignore[arg-type]
    play(tmp_path / "runs" / "run", grid, rounds=1, min_silos=2)
    files = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.safetensors")}
    folders = {Path(f).parent for f in files}
    assert folders == {Path("runs/run/models"), Path("runs/run/checkpoints")}


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "run", RunConfig.read({}).plain(), run_id=1)
    report = RoundReport(
        round=1, groups=(("a",),), evaluated_round=0, evaluation={"a": (float("nan"), 0.5, 3)}
    )
    kept.round(report, {}, {})
    kept.finish({})
    text = (tmp_path / "run" / "run.json").read_text()
    assert "NaN" not in text
    assert record_of(tmp_path / "run")["initial-evaluation"]["a"]["loss"] is None
