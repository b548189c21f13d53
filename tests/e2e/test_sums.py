"""Models fitted by sums over TLS and real processes equal those in one process, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

from coterie.server.runs.contribution import SUMS
from coterie.server.runs.fitted import read_fitted
from tests.e2e.gated import TASK
from tests.e2e.organisations import Organisations
from tests.e2e.runs import finished, hashes_of
from tests.kit import run
from tests.unit.server.test_regression import regress, sites


def test_a_person_fits_a_regression_and_grows_trees_and_gets_what_one_process_gets(
    pair: Organisations, tmp_path: Path
) -> None:
    nodes = [{**node, "name": f"clinic-{node['name']}"} for node in sites(tmp_path / "sites")[:2]]
    task = tmp_path / "sites" / "heart.toml"
    task.write_text(task.read_text().replace('"mclr"', '"trees-4x3"'))
    for node in nodes:
        name, allowed = str(node["name"]), '[policy]\nsums = ["regression", "trees"]'
        node["sums"] = "regression,trees"
        request = pair.make(name, {"data": str(node["data.data"])}, extra=allowed)
        settings = pair.home_of(name) / "silo.toml"
        settings.write_text(settings.read_text().replace(TASK, str(node["task"])))
        pair.join(name, pair.enrol(request))
        pair.start_silo(name)
    pair.wait_for(4)
    found = json.loads(pair.command("regress", "logistic", "--task", "heart", "--json"))
    assert found["groups"][0]["members"] == ["clinic-a", "clinic-b"]
    (file,) = (pair.coordinator / "runs").glob(f"regression-*/{SUMS}")
    here = regress(tmp_path / "here", nodes)
    assert found["exchanges"] == here.fits.exchanges
    arrays = read_fitted(file).groups[0].state.arrays
    for name, array in here.groups[0].state.arrays.items():
        assert array.tobytes() == arrays[name].tobytes(), name
    for strategy, rounds in (("trees", 2), ("auto", 6)):
        folder = pair.submit(strategy, "--task", "heart", "--rounds", str(rounds))
        there = finished(folder)
        run(tmp_path / strategy, nodes, task="heart", strategy=strategy, rounds=rounds)
        assert there == hashes_of(tmp_path / strategy)
        assert strategy == "auto" or len(set(there.values())) == 1
