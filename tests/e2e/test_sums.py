"""Models fitted by masked sums over TLS and real processes equal those in one process, bit for bit.

Trees equal also those of sums that are not masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import wire
from coterie.server.runs.contribution import SUMS
from coterie.server.runs.fitted import read_fitted
from tests.e2e.gated import TASK
from tests.e2e.organisations import Organisations
from tests.e2e.runs import finished, hashes_of
from tests.kit import record_of, run
from tests.unit.server.test_cox import sites as relapses
from tests.unit.server.test_regression import regress, sites

Nodes = list[dict[str, Any]]
"""What silos are started with, in one process."""


@pytest.fixture(scope="module")
def clinics(
    resident_pair: Organisations, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Organisations, dict[str, Nodes]]:
    """Two silos of a task with classes, and two of one with survival times: task → its silos."""
    folder, pair = tmp_path_factory.mktemp("sums"), resident_pair
    pair.mend()
    nodes = [{**node, "name": f"clinic-{node['name']}"} for node in sites(folder / "sites")[:2]]
    survival = [{**one, "name": f"ward-{one['name']}"} for one in relapses(folder / "wards")[:2]]
    for task in (folder / "sites" / "heart.toml", folder / "wards" / "relapse.toml"):
        task.write_text(task.read_text().replace('"mclr"', '"any-3x2"'))
    for node in (*nodes, *survival):
        name, allowed = str(node["name"]), '[policy]\nsums = ["regression", "trees"]'
        node["sums"] = "regression,trees"
        request = pair.make(name, {"data": str(node["data.data"])}, extra=allowed)
        settings = pair.home_of(name) / "silo.toml"
        settings.write_text(settings.read_text().replace(TASK, str(node["task"])))
        pair.join(name, pair.enrol(request))
        pair.start_silo(name)
    pair.wait_for(6)
    return pair, {"heart": nodes, "relapse": survival}


@pytest.mark.parametrize(
    ("task", "model"),
    [("heart", "logistic"), pytest.param("relapse", "cox", marks=pytest.mark.nightly)],
)
def test_a_person_fits_regressions_and_gets_what_one_process_gets(
    clinics: tuple[Organisations, dict[str, Nodes]], tmp_path: Path, task: str, model: str
) -> None:
    (pair, silos), secure = clinics, model == "logistic"
    before, more = set((pair.coordinator / "runs").iterdir()), ["--secure"] if secure else []
    found = json.loads(pair.command("regress", model, "--task", task, "--json", *more))
    assert found["groups"][0]["members"] == [node["name"] for node in silos[task]]
    (folder,) = set((pair.coordinator / "runs").iterdir()) - before
    here = regress(tmp_path / model, silos[task], task=task, model=model, secure=secure)
    assert found["exchanges"] == here.fits.exchanges
    arrays = read_fitted(folder / SUMS).groups[0].state.arrays
    for name, array in here.groups[0].state.arrays.items():
        assert array.tobytes() == arrays[name].tobytes(), (model, name)
    if secure:
        _assert_masked(pair, wire.TRAIN_SUMS)


@pytest.mark.parametrize(
    ("strategy", "task", "rounds", "keys"),
    [
        ("trees", "heart", 2, {"personalise": "partial", "secure": True}),
        pytest.param("fedcollab", "heart", 2, {}, marks=pytest.mark.nightly),
        pytest.param("auto", "relapse", 6, {}, marks=pytest.mark.nightly),
    ],
)
def test_a_person_grows_trees_and_gets_what_one_process_gets(
    clinics: tuple[Organisations, dict[str, Nodes]],
    tmp_path: Path,
    strategy: str,
    task: str,
    rounds: int,
    keys: dict[str, Any],
) -> None:
    pair, silos = clinics
    only: dict[str, Any] = {"column-bins": 16}
    only |= {} if strategy == "auto" else {"task.family": "trees"}
    more = [p for k, v in {**only, **keys}.items() if v is not True for p in ("--set", f"{k}={v}")]
    more += ["--secure"] * ("secure" in keys)
    folder = pair.submit(strategy, "--task", task, "--rounds", str(rounds), *more)
    there = finished(folder)
    usual = {"strategy": strategy, "rounds": rounds, "local-epochs": 5, "task": task}
    unmasked = {key: value for key, value in keys.items() if key != "secure"}
    run(tmp_path / strategy, silos[task], **usual, **only, **unmasked)
    assert there == hashes_of(tmp_path / strategy)
    assert own_penalties(folder) == own_penalties(tmp_path / strategy)
    assert len(own_penalties(folder)) == ("personalise" in keys)
    races = [own_models_raced(one) for one in (folder, tmp_path / strategy)]
    assert races[0] == races[1] and bool(races[0]) == (strategy == "auto")
    if strategy == "trees":
        assert len(set(there.values())) == 1
        _assert_masked(pair, wire.EVALUATE_HISTOGRAMS)


def _assert_masked(pair: Organisations, kind: str) -> None:
    """Assert that sums of this kind left a silo masked, over both clinics."""
    entries = [json.loads(line) for line in (pair.home_of("clinic-a") / "ledger.jsonl").open()]
    masked = [e for e in entries if e["type"] == kind and "summed" in e]
    assert masked
    assert {tensor["record"] for e in masked for tensor in e["tensors"]} == {wire.MASKED}
    assert {tuple(e["summed"]["blocks"][0]) for e in masked} == {("clinic-a", "clinic-b")}


def own_penalties(folder: Path) -> list[Any]:
    """Return what rounds say of the λ of silos' own models, and of the losses that chose it."""
    return [r["own-penalty"] for r in record_of(folder)["rounds"] if "own-penalty" in r]


def own_models_raced(folder: Path) -> list[Any]:
    """Return the candidates of the race of trees whose silos have own leaf values."""
    trees = [r["boosted"] for r in record_of(folder)["rounds"] if "boosted" in r]
    raced = [one for own in trees if "verdict" in own for one in own["verdict"]["candidates"]]
    return [one for one in raced if "own-penalty" in one]
