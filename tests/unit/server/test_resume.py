"""A run that is interrupted anywhere and resumed ends with the models of one that was not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import coterie.client.home.request_counts
import coterie.client.home.rounds
import coterie.client.work.session
import coterie.features.secure.secrets
from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.checkpoint import CheckpointError, Checkpoints
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record.follow import Progress, events
from coterie.strategies import FederationError
from coterie.strategies.rounds import roster as rosters
from coterie.strategies.rounds.result import RunResult
from tests import kit
from tests.kit import CutGrid, Node, PowerCutError, digits, record_of, restart_silos, run

KEYS = {
    **{"strategy": "hcct", "rounds": 5, "local-epochs": 1, "batch-size": 10, "seed": 3},
    **{"wait-for-silos": 0.5, "round-timeout": 5.0, "min-silos": 4},
}
GENERATORS = {"generator-steps": 4, "generator-hidden": 8}
KINDS = {
    "fedavg": {"strategy": "fedavg"},
    "independent": {"strategy": "independent"},
    "hcct": {"strategy": "hcct", "alpha": 10.0},
    "hcct-personal": {"strategy": "hcct", "alpha": 10.0, "personal": "head"},
    "hcct-auto": {"strategy": "hcct", "alpha": "auto", "rounds": 9},
    "fedcollab": {"strategy": "fedcollab", "discriminator-rounds": 2},
    "fedcollab-ditto": {
        "strategy": "fedcollab",
        "c": "auto",
        "discriminator-rounds": 2,
        "personalise": "ditto",
    },
    "apfl": {"strategy": "apfl", "mixture-lr": 0.5},
    "pfedgraph": {"strategy": "pfedgraph", "graph-alpha": 0.2},
    "fedgroup": {"strategy": "fedgroup", "num-groups": 2},
    "fedgroup-sampled": {
        **{"strategy": "fedgroup", "num-groups": 2, "sample": 2, "personal": "head-first"}
    },
    "fedgenp": {"strategy": "fedgenp", **GENERATORS},
    "fedgen": {"strategy": "fedgen", **GENERATORS},
    "fedensemble": {"strategy": "fedensemble", "ensemble-every": 2},
    "fedgroup-generators": {
        **{"strategy": "fedgroup", "num-groups": 2, "sample": 2, "generators": "groups"},
        **GENERATORS,
    },
    "hcct-int8": {"strategy": "hcct", "alpha": 10.0, "wire-format": "delta-int8"},
    "hcct-secure": {"strategy": "hcct", "alpha": 10.0, "secure": True},
    "fedgroup-secure": {"strategy": "fedgroup", "num-groups": 2, "secure": True},
    "auto-secure": {"strategy": "auto", "rounds": 8, "secure": True},
    "hcct-generators": {"strategy": "hcct", "alpha": 10.0, "generators": "groups", **GENERATORS},
}


OWN = {"label-counts": True}
"""At every silo."""


def nodes(home: Path) -> list[Node]:
    return [
        {**node, **OWN, "data.rotation": 90 * (i % 2)}
        for i, node in enumerate(digits("abcd", home))
    ]


def go(folder: Path, silos: InProcessGrid | list[Node], **keys: Any) -> RunResult:
    return run(folder, silos, **{**KEYS, "runs-dir": str(folder.parent), **keys})


interrupted = partial(kit.interrupted, play=go)


def resume(folder: Path, home: Path, **more: Any) -> RunResult:
    # Nodes connect in another order and with other ids than before.
    return go(folder, nodes(home)[::-1], run_id=2, resume=folder.name, **more)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "POLL_S", 0.001)


Whole = Callable[[str], dict[str, Any]]
"""The record of a kind of run without interruption, at separate silos of the same name."""


def played_whole(folders: pytest.TempPathFactory, keys: Callable[[str], dict[str, Any]]) -> Whole:
    @cache
    def record(kind: str) -> dict[str, Any]:
        folder = folders.mktemp("whole")
        go(folder / "run-1", nodes(folder / "homes"), **keys(kind))
        restart_silos()
        return record_of(folder / "run-1")

    return record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return played_whole(tmp_path_factory, KINDS.__getitem__)


def timeless(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds without what differs from run to run."""
    rounds = json.loads(json.dumps(record["rounds"]))
    for entry in rounds:
        del entry["seconds"]
        entry.get("generators", {}).pop("seconds", None)
        for silo in entry["silos"].values():
            del silo["seconds"]
        for phase in entry["phases"].values():
            del phase["seconds"], phase["silo-seconds"]
    return list(rounds)


SHORT = ("hcct-int8", "fedcollab", "fedgroup-secure", "auto-secure")


@pytest.mark.parametrize(
    "kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_the_resumed_run_ends_bit_identical(kind: str, whole: Whole, tmp_path: Path) -> None:
    expected = whole(kind)
    folder = tmp_path / "runs" / "run-1"
    training = wire.TRAIN_APFL if kind == "apfl" else wire.TRAIN
    cut = CutGrid(nodes(tmp_path / "homes"), at=(training, 4), answered=2)
    interrupted(folder, cut, **KINDS[kind])
    resume(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["status"] == "completed"
    assert record["model-hashes"] == expected["model-hashes"]
    assert record["final-evaluation"] == expected["final-evaluation"]
    assert timeless(record) == timeless(expected)
    assert record["resumed"][0]["after-round"] == 3


@pytest.mark.parametrize(
    ("at", "answered", "after"),
    [
        ((wire.DESCRIBE, 0), 0, 0),
        pytest.param((wire.INITIAL, 0), 0, 0, marks=pytest.mark.nightly),
        pytest.param((wire.TRAIN, 1), 3, 0, marks=pytest.mark.nightly),
        ((wire.TRAIN, 2), 0, 1),
        ((wire.TRAIN, 5), 4, 4),
        ((wire.EVALUATE, 5), 1, 5),
    ],
)
def test_a_cut_anywhere_costs_at_most_the_round_under_way(
    at: tuple[str, int], answered: int, after: int, whole: Whole, tmp_path: Path
) -> None:
    keys = KINDS["hcct-personal"]
    expected = whole("hcct-personal")
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=at, answered=answered), **keys)
    resume(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["resumed"][0]["after-round"] == after
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)


@pytest.mark.parametrize(
    ("kind", "answered"),
    [
        pytest.param(wire.EVALUATE_DISCRIMINATOR, 1, marks=pytest.mark.nightly),
        (wire.TRAIN_DISCRIMINATOR, 3),
    ],
)
def test_a_cut_among_the_discriminators_measures_them_again(
    kind: str, answered: int, whole: Whole, tmp_path: Path
) -> None:
    expected, folder = whole("fedcollab"), tmp_path / "runs" / "run-1"
    cut = CutGrid(nodes(tmp_path / "homes"), at=(kind, 1), answered=answered)
    interrupted(folder, cut, **KINDS["fedcollab"])
    resume(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)


def test_a_run_may_be_cut_and_resumed_again_and_again(whole: Whole, tmp_path: Path) -> None:
    keys = KINDS["hcct-personal"]
    expected = whole("hcct-personal")
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    interrupted(folder, CutGrid(nodes(home), at=(wire.TRAIN, 2), answered=4), **keys)
    for round in (2, 3, 5):
        grid = CutGrid(nodes(home), at=(wire.TRAIN, round), answered=round % 3)
        interrupted(folder, grid, resume=folder.name)
    resume(folder, home)
    record = record_of(folder)
    assert record["model-hashes"] == expected["model-hashes"]
    assert [entry["after-round"] for entry in record["resumed"]] == [1, 1, 2, 4]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").iterdir())


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_the_last_three_checkpoints_are_kept_and_what_they_name(tmp_path: Path) -> None:
    go(tmp_path / "run-1", nodes(tmp_path), strategy="fedavg")
    names = [file.name for file in checkpoints(tmp_path / "run-1")]
    # The initial model is in the first round's file, half of which it is.
    assert names == [f"round-{r:06d}.safetensors" for r in (1, 3, 4, 5)]


@pytest.mark.parametrize(
    "damage",
    [
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("truncated", "empty", "json")),
        *("flipped", "two"),
    ],
)
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    damage: str, whole: Whole, tmp_path: Path
) -> None:
    keys = KINDS["hcct-personal"]
    expected = whole("hcct-personal")
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 5), answered=4), **keys)
    last = checkpoints(folder)[-1]
    if damage == "flipped":
        flip(last)
    elif damage == "truncated":
        last.write_bytes(last.read_bytes()[:-100])
    elif damage == "json":
        last.write_text("{}")
    elif damage == "empty":
        last.write_bytes(b"")
    else:
        for file in checkpoints(folder)[-2:]:
            flip(file)
    resume(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["resumed"][0]["after-round"] == (2 if damage == "two" else 3)
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)
    assert f"{last} is damaged" in (folder / "run.log").read_text()


def test_without_one_whole_checkpoint_a_resumption_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 4)), strategy="fedavg")
    for file in checkpoints(folder):
        flip(file)
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        resume(folder, tmp_path / "homes")


def test_a_torn_event_and_a_left_over_temporary_file_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 3)), strategy="fedavg")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "rou')
    (folder / "checkpoints" / "round-000003.tmp").write_bytes(b"half")
    resume(folder, tmp_path / "homes")
    kinds = [json.loads(line)["event"] for line in (folder / "events.jsonl").open()]
    assert kinds.count("resume") == 1 and kinds.count("start") == 1
    assert kinds[-1] == "end"
    assert all(file.suffix == ".safetensors" for file in checkpoints(folder))


@pytest.mark.parametrize(
    "damage",
    [
        b'{"format": 1, "rou',
        None,
        pytest.param(b"", marks=pytest.mark.nightly),
        pytest.param(b"\xff\xfe", marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_record_does_not_stop_a_resumption(
    damage: bytes | None,
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 3)), strategy="fedavg")
    if damage is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_bytes(damage)
    resume(folder, tmp_path / "homes")
    assert " events.jsonl is used instead." in caplog.text
    undisturbed = whole("fedavg")
    assert record_of(folder)["model-hashes"] == undisturbed["model-hashes"]
    assert timeless(record_of(folder)) == timeless(undisturbed)


def test_damaged_events_do_not_stop_a_resumption(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 3)), strategy="fedavg")
    (folder / "events.jsonl").write_bytes(b"\xff\xfe\x00\n\x80")
    resume(folder, tmp_path / "homes")
    assert record_of(folder)["status"] == "completed"
    followed = events(folder, start_deadline_s=1, ended=lambda: None, run_id=2)
    assert [event.kind for event in followed][-1] == "end"


def test_where_the_configuration_is_lost_a_resumption_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run-1"
    interrupted(folder, CutGrid(nodes(tmp_path / "homes"), at=(wire.TRAIN, 3)), strategy="fedavg")
    for file in ("run.json", "events.jsonl"):
        (folder / file).write_text("{}\n")
    with pytest.raises(FederationError, match=r"run.json|no record of a run"):
        resume(folder, tmp_path / "homes")


def test_a_silo_that_does_not_come_back_is_waited_for_and_then_left(tmp_path: Path) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    keys = {"strategy": "fedavg", "min-silos": 2}
    interrupted(folder, CutGrid(nodes(home), at=(wire.TRAIN, 3)), **keys)
    go(folder, nodes(home)[:3], run_id=2, resume=folder.name)
    record = record_of(folder)
    assert record["status"] == "completed"
    assert record["rounds"][2]["left"] == ["d"]
    assert "continues without d" in (folder / "run.log").read_text()


def test_too_few_silos_end_a_resumption_with_a_message_and_it_can_be_tried_again(
    tmp_path: Path,
) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    interrupted(folder, CutGrid(nodes(home), at=(wire.TRAIN, 3)), strategy="fedavg")
    with pytest.raises(FederationError, match="waits for"):
        go(folder, nodes(home)[:1], run_id=2, resume=folder.name)
    assert record_of(folder)["status"] == "failed"
    resume(folder, home)
    assert record_of(folder)["status"] == "completed"


def test_the_followers_of_a_resumed_run_see_its_whole_history_and_its_own_end(
    tmp_path: Path,
) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    with pytest.raises(PowerCutError):  # this time the process has said that it failed
        go(folder, CutGrid(nodes(home), at=(wire.TRAIN, 3)), strategy="fedavg")
    resume(folder, home)
    progress = Progress("run")
    seen = list(events(folder, start_deadline_s=1, ended=lambda: None, run_id=2))
    for event in seen:
        progress.feed(event)
    assert [event.kind for event in seen].count("end") == 2
    assert (progress.status, progress.error, progress.round) == ("completed", "", 5)


def test_a_complete_run_is_not_resumed_and_keeps_its_results(tmp_path: Path) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    go(folder, nodes(home), strategy="fedavg", rounds=1)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(FederationError, match="is complete"):
        resume(folder, home)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_a_resumption_of_a_part_of_a_name_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="no run is recorded"):
        resume(tmp_path / "runs" / "un-1", tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["../run-1", "a/b", "a b"])
def test_a_resumed_run_is_named_by_its_folder_alone(name: str) -> None:
    with pytest.raises(FederationError, match="resume"):
        RunConfig.read({"resume": name})


def test_a_run_that_another_version_committed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, (1, 2))
    (file,) = checkpoints.folder.iterdir()
    about = {"format": "coterie-checkpoint-2", "tree": "[]", "sha256": ""}
    save_file({}, file, metadata=about)
    with pytest.raises(
        FederationError, match=r"another version of coterie\. Resume .* start a new"
    ):
        checkpoints.load()


@pytest.mark.nightly
def test_a_run_goes_on_where_part_of_the_model_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen part is in no checkpoint: every silo that starts again makes it again."""
    sessions: dict[str, Any] = {}
    monkeypatch.setattr(coterie.client.work.session, "_sessions", sessions)
    (tmp_path / "study.toml").write_text(
        'kind = "npz"\nname = "study"\nclasses = ["a", "b"]\nshape = [6]\nnetwork = "mlp-64"\n'
        'freeze = "all-but-head"\n'
    )
    for number, name in enumerate("abc"):
        x = np.random.default_rng(number).normal(size=(40, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, number] > 0).astype(np.int64))
    keys = {"task": "study", "strategy": "hcct", "min-silos": 3, "alpha": 10.0}

    def silos(home: Path) -> list[dict[str, Any]]:
        own = {"task": str(tmp_path / "study.toml"), "threads": 1, "device": "cpu"}
        return [
            own | {"name": n, "home": str(home / n), "data.data": str(tmp_path / f"{n}.npz")}
            for n in "abc"
        ]

    go(tmp_path / "whole" / "run-1", silos(tmp_path / "1"), **keys)
    folder = tmp_path / "cut" / "run-1"
    interrupted(folder, CutGrid(silos(tmp_path / "2"), ("train", 3), answered=2), **keys)
    sessions.clear()
    again = silos(tmp_path / "2")[::-1]
    result = go(folder, again, run_id=2, resume="run-1", **keys)
    trained = {"head.weight", "linear_part.weight", "linear_part.bias"}
    assert set(wire.decode_arrays(result.models["a"])) == trained
    hashes = record_of(tmp_path / "whole" / "run-1")["model-hashes"]
    assert len(hashes) == 3 and record_of(folder)["model-hashes"] == hashes
    frozen = {session.frozen for session in sessions.values()}
    assert len(frozen) == 1 and frozen != {""}
