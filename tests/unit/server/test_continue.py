"""A complete run gets more rounds, and ends like one that was played in one go."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie import wire
from coterie.server.cli.submitting import _say_what_was_planned
from coterie.server.runs import going_on
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import reading
from coterie.strategies import FederationError
from coterie.strategies.auto import budget
from coterie.strategies.hcct import alpha as trials
from tests.commands import coterie
from tests.kit import CutGrid, record_of, restart_silos
from tests.unit.server.test_resume import Whole, go, interrupted, nodes, played_whole, timeless

KINDS: dict[str, dict[str, Any]] = {
    "hcct": {
        **{"strategy": "hcct", "alpha": 10.0, "personal": "head", "wire-format": "delta-int8"},
        **{"optimiser": "adamw", "lr": 0.01, "keep-optimiser": True, "validation": 0.2},
    },
    "fedgroup": {"strategy": "fedgroup", "num-groups": 2},
    "ditto": {"strategy": "hcct", "alpha": 10.0, "personalise": "ditto"},
    "best": {"strategy": "fedavg", "validation": 0.2, "keep": "best"},
    "secure": {"strategy": "hcct", "alpha": 10.0, "secure": True},
}
SHORT = ("hcct", "secure")
FIRST, ALL = 2, 4


def more(folder: Path, home: Path, added: int = ALL - FIRST) -> None:
    # Nodes connect in another order and with other ids than before.
    go(folder, nodes(home)[::-1], run_id=2, resume=folder.name, **{"more-rounds": added})


def first(folder: Path, home: Path, **keys: Any) -> None:
    go(folder, nodes(home), **{"rounds": FIRST, **keys})
    restart_silos()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return played_whole(tmp_path_factory, lambda kind: {**KINDS[kind], "rounds": ALL})


@pytest.mark.parametrize(
    "kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_a_continued_run_equals_one_played_in_one_go(
    kind: str, whole: Whole, tmp_path: Path
) -> None:
    expected, folder = whole(kind), tmp_path / "runs" / "run-1"
    first(folder, tmp_path / "homes", **KINDS[kind])
    assert record_of(folder)["model-hashes"] != expected["model-hashes"]
    more(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["status"] == "completed" and record["config"]["rounds"] == ALL
    assert record["model-hashes"] == expected["model-hashes"]
    assert record["final-evaluation"] == expected["final-evaluation"]
    assert timeless(record) == timeless(expected)
    (entry,) = record["resumed"]
    assert (entry["after-round"], entry["added"]) == (FIRST, ALL - FIRST)
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    (again,) = [event for event in events if event["event"] == "resume"]
    assert again["config"]["rounds"] == ALL and again["config"]["more-rounds"] == 0
    assert reading.read_run(folder).missing == ()


@pytest.mark.nightly
def test_auto_equals_one_go_from_as_many_rounds_as_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, folder, home = {"strategy": "auto"}, tmp_path / "runs" / "run-1", tmp_path / "homes"
    monkeypatch.setattr(budget, "PLANNED", 6)
    go(tmp_path / "whole", nodes(tmp_path / "others"), **keys, rounds=8)
    restart_silos()
    first(folder, home, **keys, rounds=6)
    said = Console(file=io.StringIO(), width=200)
    keys_of_more = {"resume": folder.name, "runs-dir": str(folder.parent), "more-rounds": 2}
    _say_what_was_planned(RunConfig.read(keys_of_more), said)
    assert "one run of all rounds would have been different: auto has" in said.file.getvalue(), (  # type: ignore[attr-defined]
        "in truth it plans 20"
    )
    more(folder, home, 2)
    record, expected = record_of(folder), record_of(tmp_path / "whole")
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)
    assert [entry["phase"] for entry in record["rounds"]][4:] == ["hold"] * 4


def test_longer_runs_look_and_try_alike_for_alpha() -> None:
    begun = range(trials.MIN_LOOK, trials.MAX_LOOK + 1)
    for rounds in range(trials.PLANNED, 60):
        assert trials.look_until(rounds) == trials.MAX_LOOK < trials.last_to_begin(rounds)
        assert {trials.budget(rounds, one) for one in begun} == {trials.MAX_TRIAL}
    assert trials.look_until(trials.PLANNED - 1) < trials.MAX_LOOK


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "hcct", "alpha": 10.0}, ""),
        ({"strategy": "hcct", "alpha": "auto"}, "fewer than 18 rounds"),
        ({"strategy": "hcct", "alpha": "auto", "rounds": 18}, ""),
        ({"strategy": "auto", "rounds": 19}, "fewer than 20 rounds"),
        ({"strategy": "auto", "rounds": 20}, ""),
    ],
)
def test_what_follows_the_number_of_rounds_is_said(
    keys: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.read({"task": "digits", "rounds": 8, **keys})
    monkeypatch.setattr(going_on, "recorded_config", lambda run: config)
    monkeypatch.setattr(reading, "read_whole", lambda folder: None)
    found = going_on.planned_by_rounds(Path())
    assert why in found and bool(why) == bool(found)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keys", "planned"),
    [
        ({"strategy": "hcct", "alpha": "auto"}, trials.PLANNED),
        ({"strategy": "auto"}, budget.PLANNED),
    ],
    ids=["alpha", "auto"],
)
def test_a_run_that_plans_equals_one_played_in_one_go(
    keys: dict[str, Any], planned: int, tmp_path: Path
) -> None:
    go(tmp_path / "whole", nodes(tmp_path / "others"), **keys, rounds=planned + 2)
    restart_silos()
    folder = tmp_path / "runs" / "run-1"
    first(folder, tmp_path / "homes", **keys, rounds=planned)
    more(folder, tmp_path / "homes", 2)
    assert record_of(folder)["model-hashes"] == record_of(tmp_path / "whole")["model-hashes"]


@pytest.mark.parametrize(
    ("number", "answered"),
    [
        pytest.param(FIRST + 1, 0, marks=pytest.mark.nightly),
        (FIRST + 1, 2),
        pytest.param(ALL, 4, marks=pytest.mark.nightly),
    ],
)
def test_a_continuation_that_was_killed_is_resumed(
    number: int, answered: int, whole: Whole, tmp_path: Path
) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    first(folder, home, **KINDS["hcct"])
    cut = CutGrid(nodes(home), at=(wire.TRAIN, number), answered=answered)
    interrupted(folder, cut, resume=folder.name, **{"more-rounds": ALL - FIRST})
    with pytest.raises(FederationError, match=r"Finish it first: `coterie run resume run-1`"):
        more(folder, home)
    go(folder, nodes(home), run_id=3, resume=folder.name)
    record, expected = record_of(folder), whole("hcct")
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)
    assert [entry["added"] for entry in record["resumed"]] == [ALL - FIRST, 0]
    words = [one.words for one in reading.read_run(folder).resumed]
    assert words[0] == "continued after round 2 for 2 more rounds"
    assert words[1] == f"resumed after round {number - 1}"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"schedule": "cosine"}, r"schedule = cosine"),
        ({"lr-warm-up": 0.2}, r"lr-warm-up"),
        (
            {"patience": 1, "validation": 0.2, "lr": 1e-9, "rounds": 3},
            r"it ended early, and would again",
        ),
    ],
)
def test_a_run_whose_end_was_planned_gets_no_more_rounds(
    keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    first(folder, home, strategy="fedavg", **keys)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(FederationError, match=f"(?s){why}.*--from run-1"):
        more(folder, home)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    record = record_of(folder)
    record["rounds"][-1]["trees"] = {"*": 4}
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(FederationError, match=f"(?s){why}.*Start a new run: trees"):
        more(folder, home)


def test_without_a_checkpoint_nothing_is_lost(tmp_path: Path) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    first(folder, home, strategy="fedavg")
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    before = record_of(folder)
    with pytest.raises(FederationError, match="has no checkpoint"):
        more(folder, home)
    assert record_of(folder) == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["continue", "run-1"], "give --rounds"),
        (["continue", "run-1", "--rounds", "2", "--seed", "3"], "leave out seed"),
        (["hcct", "--continue", "run-1", "--rounds", "2"], "leave out hcct"),
        (["--continue", "run-1", "--resume", "run-1", "--rounds", "2"], "for a complete one"),
    ],
)
def test_a_continuation_takes_only_a_number_of_rounds(words: list[str], why: str) -> None:
    said = coterie("run", *words)
    assert said.returncode == 2 and why in said.stderr
