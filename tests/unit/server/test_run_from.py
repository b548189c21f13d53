"""A run that begins from another's groups and models, or from the model in a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie import wire
from coterie.server.report.page import repeat_command
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import _why_not_from, parent_of
from coterie.server.runs.record import reading
from coterie.strategies import FederationError
from tests.commands import coterie
from tests.kit import CutGrid, Node, digits, record_of, restart_silos
from tests.unit.server.test_resume import OWN, go, interrupted, nodes, timeless

First = Callable[[str], Path]
TURNED = ("b", "d", "e")
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": "fedavg"},
    "hcct": {"strategy": "hcct", "alpha": 10.0},
    "fedgroup": {"strategy": "fedgroup", "num-groups": 2},
}


def silos_of(names: str, home: Path, *, skip: int) -> list[Node]:
    own = {"data.train": 60, "data.test": 20, **OWN}
    return [
        {**one, **own, "data.rotation": 90 * (one["name"] in TURNED), "data.skip": skip + 80 * i}
        for i, one in enumerate(digits(names, home))
    ]


def today(home: Path) -> list[Node]:
    """Without d, with a newcomer that is turned like b, and with other samples."""
    return silos_of("abce", home, skip=800)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A complete run of a kind, which nothing may change."""

    @cache
    def played(kind: str) -> Path:
        root = tmp_path_factory.mktemp(kind)
        silos = silos_of("abcd", root / "homes", skip=0)
        go(root / "run-1", silos, **{"local-epochs": 8, **KINDS[kind], "rounds": 3})
        restart_silos()
        return root / "run-1"

    return played


@pytest.fixture
def first(runs: Callable[[str], Path], tmp_path: Path) -> First:
    """The same in the test's own folder."""
    return lambda kind: Path(shutil.copytree(runs(kind), tmp_path / "runs" / "run-1"))


def branch(folder: Path, silos: Any, run_id: int = 7, **keys: Any) -> Path:
    own = folder.parent / f"run-{run_id}"
    go(own, silos, run_id=run_id, parent="run-1", **{"local-epochs": 8, **keys, "min-silos": 4})
    return own


@pytest.mark.parametrize(
    "kind", [*(pytest.param(n, marks=pytest.mark.nightly) for n in ("fedavg", "hcct")), "fedgroup"]
)
def test_silos_of_today_go_on_in_their_groups_and_newcomers_are_placed(
    kind: str, first: First, tmp_path: Path
) -> None:
    keys, folder = KINDS[kind], first(kind)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    own = branch(folder, today(tmp_path / "new"), **keys, rounds=4, lr=0.05)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    record = record_of(own)
    assert record["status"] == "completed" and record["config"]["parent"] == "run-1"
    assert [entry["round"] for entry in record["rounds"]] == list(range(1, 8))
    then, old = timeless(record)[:3], timeless(record_of(folder))
    assert all(one.pop("evaluation-after") for one in (then[2], old[2])) and then == old
    begun = record["rounds"][3]
    assert (begun["joined"], begun["left"]) == (["e"], ["d"])
    # The models that silos received first are the old ones, so they are not as bad as w⁰.
    received = begun["evaluation"]
    untrained = record_of(folder)["initial-evaluation"]
    assert all(received[n]["error"] < untrained[n]["error"] - 0.1 for n in "abc")
    if kind != "fedavg":
        assert sorted(record["final-groups"]) == [["a", "c"], ["b", "e"]]
    run = reading.read_run(own)
    assert parent_of(run) == "run-1" and run.started
    repeated = repeat_command(run)
    assert "--set parent=run-1" in repeated and "--set rounds=4" in repeated
    assert "parent" not in repeat_command(run, {"strategy": "independent"})
    assert reading.read_run(own).resumed[-1].words == "continued after round 3 for 4 more rounds"


@pytest.mark.nightly
def test_a_run_from_another_that_is_killed_is_resumed(first: First, tmp_path: Path) -> None:
    keys, folder = {**KINDS["hcct"], "local-epochs": 2, "rounds": 2}, first("hcct")
    whole = branch(folder, today(tmp_path / "1"), **keys)
    for number, at in enumerate([(wire.DESCRIBE, 0), (wire.TRAIN, 4), (wire.TRAIN, 5)], 8):
        restart_silos()
        home, own = tmp_path / str(number), folder.parent / f"run-{number}"
        cut = CutGrid(today(home), at=at, answered=1)
        interrupted(own, cut, parent="run-1", **keys)
        go(own, today(home), run_id=20, resume=own.name)
        assert record_of(own)["model-hashes"] == record_of(whole)["model-hashes"]
        assert timeless(record_of(own))[3:] == timeless(record_of(whole))[3:]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "fedgroup"}, "strategy must be the same, hcct. Got fedgroup"),
        ({"secure": True}, r"for that run alone \(secure\)"),
        ({"personal": "head"}, r"for that run alone \(personal = head\)"),
        ({"personalise": "ditto"}, r"for that run alone \(personalise = ditto\)"),
        ({"strategy": "apfl"}, r"for that run alone \(strategy = apfl\)"),
        ({"schedule": "step"}, "follows the planned number of rounds"),
        ({"parent": "run-2"}, "there is no run 'run-2'"),
    ],
)
def test_what_cannot_begin_from_another_run_is_refused(
    keys: dict[str, Any], why: str, first: First, tmp_path: Path
) -> None:
    folder = first("hcct")
    with pytest.raises(FederationError, match=why):
        go(folder.parent / "run-9", nodes(tmp_path / "new"), **{"parent": "run-1", **keys})
    assert not (folder.parent / "run-9" / "run.json").exists()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "hcct", "personal": "head"}, "personal = head"),
        ({"strategy": "hcct", "personalise": "ditto"}, "personalise = ditto"),
        ({"strategy": "hcct", "secure": True}, "secure"),
        ({"strategy": "apfl"}, "strategy = apfl"),
    ],
)
def test_no_run_begins_where_silos_held_something_for_the_old_one_alone(
    keys: dict[str, Any], why: str, first: First
) -> None:
    before, now = (RunConfig.read({"task": "digits", **own}) for own in (keys, KINDS["hcct"]))
    found = [*_why_not_from(reading.read_run(first("hcct")), before, now)]
    assert f"silos hold models or layers for that run alone ({why})" in found


@pytest.mark.nightly
def test_silos_of_another_schema_are_refused_by_name(first: First, tmp_path: Path) -> None:
    folder = first("fedavg")
    odd = [{**one, "task": "mnist"} if one["name"] == "e" else one for one in today(tmp_path / "n")]
    own = folder.parent / "run-7"
    go(own, odd, run_id=7, parent="run-1", strategy="fedavg", rounds=1, **{"min-silos": 3})
    assert record_of(own)["rounds"][-1]["groups"] == [["a", "b", "c"]]


def test_a_model_file_replaces_the_initial_model_of_any_strategy(
    first: First, tmp_path: Path
) -> None:
    folder = first("fedavg")
    file = folder / "models" / "a.safetensors"
    own = folder.parent / "run-2"
    go(own, silos_of("abcd", tmp_path / "new", skip=0), parent=str(file), **KINDS["fedgroup"])
    record, before = record_of(own), record_of(folder)
    began = {name: one["error"] for name, one in record["initial-evaluation"].items()}
    assert began == {name: one["error"] for name, one in before["final-evaluation"].items()}
    assert len(record["rounds"]) == 5
    assert parent_of(reading.read_run(own)) == "run-1"


def test_a_secure_run_begins_from_a_file_too(first: First, tmp_path: Path) -> None:
    folder = first("fedavg")
    own, file = folder.parent / "run-2", folder / "models" / "a.safetensors"
    keys = {"strategy": "hcct", "alpha": 10.0, "secure": True, "rounds": 2, "parent": str(file)}
    go(own, nodes(tmp_path / "new"), **keys)
    assert record_of(own)["status"] == "completed"


@pytest.mark.parametrize("damage", ["shape", "name", "nan", "torn", "gone"])
def test_a_file_that_does_not_fit_is_refused_by_the_names_of_its_arrays(
    damage: str, first: First, tmp_path: Path
) -> None:
    folder = first("fedavg")
    arrays = dict(load_file(folder / "models" / "a.safetensors"))
    name, file = min(arrays), tmp_path / "old.safetensors"
    why = {"shape": f"'{name}' is float32 of shape", "name": "'extra' is not the silos'"}
    why |= {"nan": "NaN or infinity", "torn": "cannot be read", "gone": "cannot be read"}
    if damage == "shape":
        arrays[name] = np.zeros((3, 3), np.float32)
    if damage == "name":
        arrays["extra"] = np.zeros(3, np.float32)
    if damage == "nan":
        arrays[name] = np.full_like(arrays[name], np.nan)
    if damage != "gone":
        save_file(arrays, file)
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(FederationError, match=why[damage]):
        go(folder.parent / "run-2", nodes(tmp_path / "new"), strategy="hcct", parent=str(file))


def test_the_list_of_runs_shows_which_began_from_which(first: First, tmp_path: Path) -> None:
    folder = first("fedavg")
    for run_id, parent in ((3, "run-1"), (2, "run-3"), (4, "run-1")):
        restart_silos()
        own = folder.parent / f"run-{run_id}"
        keys = {"strategy": "fedavg", "rounds": 1, "parent": parent}
        go(own, nodes(tmp_path / f"{run_id}"), run_id=run_id, **keys)
    said = coterie("runs", "--tree", "--runs-dir", str(folder.parent))
    names = [line.split("fedavg")[0].rstrip() for line in said.stdout.splitlines()]
    names = [line for line in names if "run-" in line]
    assert [name.strip() for name in names] == ["run-1", "└ run-3", "└ run-2", "└ run-4"]
    assert names[1].index("└") < names[2].index("└") == names[2].index("run-2") - 2
    shown = coterie("runs", "show", "run-2", "--runs-dir", str(folder.parent))
    assert "begun from" in shown.stdout and "run-3" in shown.stdout
