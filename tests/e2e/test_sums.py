"""Models fitted by masked sums over TLS and real processes equal those in one process, bit for bit.

Trees equal also those of sums that are not masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.server.runs.contribution import SUMS
from coterie.server.runs.fitted import read_fitted
from tests.e2e.gated import TASK
from tests.e2e.organisations import Organisations
from tests.e2e.runs import finished, hashes_of
from tests.kit import record_of, run
from tests.unit.server.test_cox import sites as relapses
from tests.unit.server.test_regression import regress, sites


def test_a_person_fits_regressions_and_grows_trees_and_gets_what_one_process_gets(
    pair: Organisations, tmp_path: Path
) -> None:
    nodes = [{**node, "name": f"clinic-{node['name']}"} for node in sites(tmp_path / "sites")[:2]]
    task = tmp_path / "sites" / "heart.toml"
    task.write_text(task.read_text().replace('"mclr"', '"any-4x3"'))
    survival = [{**one, "name": f"ward-{one['name']}"} for one in relapses(tmp_path / "wards")[:2]]
    task = tmp_path / "wards" / "relapse.toml"
    task.write_text(task.read_text().replace('"mclr"', '"any-4x3"'))
    for node in (*nodes, *survival):
        name, allowed = str(node["name"]), '[policy]\nsums = ["regression", "trees"]'
        node["sums"] = "regression,trees"
        request = pair.make(name, {"data": str(node["data.data"])}, extra=allowed)
        settings = pair.home_of(name) / "silo.toml"
        settings.write_text(settings.read_text().replace(TASK, str(node["task"])))
        pair.join(name, pair.enrol(request))
        pair.start_silo(name)
    pair.wait_for(6)
    for who, task, model in ((nodes, "heart", "logistic"), (survival, "relapse", "cox")):
        before, secure = set((pair.coordinator / "runs").iterdir()), model == "logistic"
        more = ["--secure"] if secure else []
        found = json.loads(pair.command("regress", model, "--task", task, "--json", *more))
        assert found["groups"][0]["members"] == [node["name"] for node in who]
        (folder,) = set((pair.coordinator / "runs").iterdir()) - before
        here = regress(tmp_path / model, who, task=task, model=model, secure=secure)
        assert found["exchanges"] == here.fits.exchanges
        arrays = read_fitted(folder / SUMS).groups[0].state.arrays
        for name, array in here.groups[0].state.arrays.items():
            assert array.tobytes() == arrays[name].tobytes(), (model, name)
    for strategy, who, rounds, more in (
        ("trees", nodes, 2, ["--secure"]),
        ("auto", survival, 6, []),
    ):
        name = "heart" if more else "relapse"
        only = {"task.family": "trees", "personalise": "partial"} if more else {}
        more = [*more, *(part for k, v in only.items() for part in ("--set", f"{k}={v}"))]
        folder = pair.submit(strategy, "--task", name, "--rounds", str(rounds), *more)
        there = finished(folder)
        keys = {"strategy": strategy, "rounds": rounds, "local-epochs": 5, **only}
        run(tmp_path / strategy, who, task=name, **keys)
        assert there == hashes_of(tmp_path / strategy)
        assert own_penalties(folder) == own_penalties(tmp_path / strategy)
        assert len(own_penalties(folder)) == bool(only)
        races = [own_models_raced(one) for one in (folder, tmp_path / strategy)]
        assert races[0] == races[1] and bool(races[0]) == (strategy == "auto")
        assert strategy == "auto" or len(set(there.values())) == 1
    entries = [json.loads(line) for line in (pair.home_of("clinic-a") / "ledger.jsonl").open()]
    left = [e for e in entries if e["type"] in (wire.TRAIN_SUMS, wire.EVALUATE_HISTOGRAMS)]
    masked = [e for e in left if "summed" in e]
    assert {tensor["record"] for e in masked for tensor in e["tensors"]} == {wire.MASKED}
    assert {tuple(e["summed"]["blocks"][0]) for e in masked} == {("clinic-a", "clinic-b")}
    assert {e["type"] for e in masked} == {wire.TRAIN_SUMS, wire.EVALUATE_HISTOGRAMS}


def own_penalties(folder: Path) -> list[Any]:
    """Return what rounds say of the λ of silos' own models, and of the losses that chose it."""
    return [r["own-penalty"] for r in record_of(folder)["rounds"] if "own-penalty" in r]


def own_models_raced(folder: Path) -> list[Any]:
    """Return the candidates of the race of trees whose silos have own leaf values."""
    trees = [r["boosted"] for r in record_of(folder)["rounds"] if "boosted" in r]
    raced = [one for own in trees if "verdict" in own for one in own["verdict"]["candidates"]]
    return [one for one in raced if "own-penalty" in one]
