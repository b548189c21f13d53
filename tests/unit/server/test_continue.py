"""A complete run gets more rounds, and ends like one that was played in one go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import wire
from coterie.server.runs.record import reading
from coterie.strategies import FederationError
from tests.commands import coterie
from tests.kit import CutGrid, record_of, restart_silos
from tests.unit.server.test_resume import go, interrupted, nodes, timeless

KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": "fedavg"},
    "hcct": {"strategy": "hcct", "alpha": 10.0, "personal": "head"},
    "fedgroup": {"strategy": "fedgroup", "num-groups": 2},
    "ditto": {"strategy": "hcct", "alpha": 10.0, "personalise": "ditto"},
    "optimiser": {"strategy": "fedavg", "optimiser": "adamw", "lr": 0.01, "keep-optimiser": True},
    "int8": {"strategy": "hcct", "alpha": 10.0, "wire-format": "delta-int8"},
    "best": {"strategy": "fedavg", "validation": 0.2, "keep": "best"},
    "secure": {"strategy": "hcct", "alpha": 10.0, "secure": True},
}
FIRST, ALL = 3, 5


def more(folder: Path, home: Path, added: int = ALL - FIRST) -> None:
    # Nodes connect in another order and with other ids than before.
    go(folder, nodes(home)[::-1], run_id=2, resume=folder.name, **{"more-rounds": added})


def first(folder: Path, home: Path, **keys: Any) -> None:
    go(folder, nodes(home), **{**keys, "rounds": FIRST})
    restart_silos()


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_run_equals_one_played_in_one_go(kind: str, tmp_path: Path) -> None:
    keys = {**KINDS[kind], "rounds": ALL}
    go(tmp_path / "whole" / "run-1", nodes(tmp_path / "whole-homes"), **keys)
    restart_silos()
    expected, folder = record_of(tmp_path / "whole" / "run-1"), tmp_path / "runs" / "run-1"
    first(folder, tmp_path / "homes", **keys)
    assert record_of(folder)["model-hashes"] != expected["model-hashes"]
    more(folder, tmp_path / "homes")
    record = record_of(folder)
    assert record["status"] == "completed" and record["config"]["rounds"] == ALL
    assert record["model-hashes"] == expected["model-hashes"]
    assert record["final-evaluation"] == expected["final-evaluation"]
    assert timeless(record) == timeless(expected)
    (entry,) = record["resumed"]
    assert (entry["after-round"], entry["added"]) == (FIRST, ALL - FIRST)


def test_auto_keeps_what_it_knows_and_plans_by_all_rounds(tmp_path: Path) -> None:
    """It plans race and extra epochs by the number of rounds, so one go would be another run."""
    keys, folder, home = {"strategy": "auto"}, tmp_path / "runs" / "run-1", tmp_path / "homes"
    go(folder, nodes(home), **keys, rounds=8)
    restart_silos()
    before = record_of(folder)
    more(folder, home, 4)
    record = record_of(folder)
    assert len(record["rounds"]) == 12 and timeless(record)[:8] == timeless(before)
    phases = [entry["phase"] for entry in record["rounds"]]
    assert phases[7:] == ["hold"] * 5
    done = [entry["trainings"]["a"] for entry in record["rounds"]]
    assert done[7] < done[8] <= done[11]


@pytest.mark.parametrize(("number", "answered"), [(FIRST + 1, 0), (FIRST + 1, 2), (ALL, 4)])
def test_a_continuation_that_was_killed_is_resumed(
    number: int, answered: int, tmp_path: Path
) -> None:
    keys, home = KINDS["optimiser"], tmp_path / "homes"
    go(tmp_path / "whole" / "run-1", nodes(tmp_path / "whole-homes"), **keys)
    restart_silos()
    folder = tmp_path / "runs" / "run-1"
    first(folder, home, **keys)
    cut = CutGrid(nodes(home), at=(wire.TRAIN, number), answered=answered)
    interrupted(folder, cut, resume=folder.name, **{"more-rounds": ALL - FIRST})
    with pytest.raises(FederationError, match=r"Finish it first: `coterie run resume run-1`"):
        more(folder, home)
    go(folder, nodes(home), run_id=3, resume=folder.name)
    record, expected = record_of(folder), record_of(tmp_path / "whole" / "run-1")
    assert record["model-hashes"] == expected["model-hashes"]
    assert timeless(record) == timeless(expected)
    assert [entry["added"] for entry in record["resumed"]] == [ALL - FIRST, 0]
    words = [one.words for one in reading.read_run(folder).resumed]
    assert words[0] == "continued after round 3 for 2 more rounds"
    assert words[1] == f"resumed after round {number - 1}"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"schedule": "cosine"}, r"schedule = cosine"),
        ({"lr-warm-up": 0.2}, r"lr-warm-up"),
        ({"patience": 1, "validation": 0.2, "lr": 1e-9}, r"it ended early, and would again"),
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


def test_the_record_stays_readable_for_json(tmp_path: Path) -> None:
    folder, home = tmp_path / "runs" / "run-1", tmp_path / "homes"
    first(folder, home, strategy="fedavg")
    more(folder, home)
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    (again,) = [event for event in events if event["event"] == "resume"]
    assert again["config"]["rounds"] == ALL and again["config"]["more-rounds"] == 0
    assert reading.read_run(folder).missing == ()
