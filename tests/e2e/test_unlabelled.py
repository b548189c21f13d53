"""A silo without labels on real processes: its model is that of one process, and labels come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.app import app
from coterie.client.ledger import read
from coterie.client.work.card import read_card
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.local import SiloSpec
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute
from coterie.tasks import load_task
from coterie.wire import model_hash
from tests.conftest import silo
from tests.e2e.gated import GATE, ONE_BATCH, TASK
from tests.e2e.runs import NAMES, record_of, spec, until
from tests.e2e.trio import Trio

KEYS: dict[str, Any] = {
    **{"strategy": "fedgroup", "task": TASK, "num-groups": 2, "cold-start-epochs": 30},
    **{"local-epochs": 10, "batch-size": 16, "seed": 1, "min-silos": 5, "rounds": 3},
}
TURNED = {"rotation": 180}


def unlabelled(folder: Path) -> SiloSpec:
    """Samples of the turned kind, in a file that says no more."""
    options = {"skip": 900, "train": 70, "test": 1, **TURNED}
    np.save(folder / "new.npy", load_task("digits").load(options).x_train)
    return SiloSpec("new", TASK, unlabelled=str(folder / "new.npy"))


def begin(trio: Trio, folder: Path) -> SiloSpec:
    own = unlabelled(folder)
    for number, name in enumerate(("turned1", "turned2"), start=3):
        trio.add(name, number, **TURNED)
    trio.start_silo(own, environment=trio.gate.environment)
    trio.wait_for_silos(6)
    return own


@pytest.mark.nightly
def test_a_silo_without_labels_gets_the_model_of_its_group_as_in_one_process(
    trio: Trio, tmp_path: Path
) -> None:
    own = begin(trio, tmp_path)
    home = trio.folder / "silos" / "new"
    folder, last = trio.run(**KEYS)
    assert last.status == "completed"
    record = record_of(folder)
    placed = record["rounds"][-1]["unlabelled"]
    assert placed["new"]["group"] == ["turned1", "turned2"]
    kept = load_file(home / "models" / f"{folder.name}.safetensors")
    assert model_hash(kept) == record["model-hashes"]["turned1"]
    card = read_card(home / "models" / f"{folder.name}.safetensors")
    assert "look most like those of this group" in card.placed, "names are not sent"
    kinds = {entry["type"] for entry in read(home, run=folder.name)} - {wire.DESCRIBE}
    assert kinds == {wire.TRAIN_PLACING, wire.EVALUATE_PLACING, wire.EVALUATE}
    specs = [spec(name, index) for index, name in enumerate(NAMES)]
    specs += [spec(f"turned{n}", n + 2, **TURNED) for n in (1, 2)]
    configs = [one.node_config() for one in (*specs, own)]
    execute(InProcessGrid(app, configs), RunConfig.read(KEYS), run_id=1, folder=tmp_path / "run")
    again = record_of(tmp_path / "run")
    assert again["model-hashes"] == record["model-hashes"]
    assert again["rounds"][-1]["unlabelled"] == record["rounds"][-1]["unlabelled"]
    assert silo(["predict", "--home", str(home), "--task", TASK, "--input", own.unlabelled]) == 0


@pytest.mark.nightly
def test_when_labels_come_in_a_run_the_silo_trains(trio: Trio, tmp_path: Path) -> None:
    own = begin(trio, tmp_path)
    trio.gate.close()
    run_id, folder = trio.submit(**KEYS | ONE_BATCH | {"rounds": 4, "cold-start-epochs": 1})
    trio.gate.hold(5)
    trio.end_silo("new")
    trio.processes["new"].wait(20)
    del trio.programs["new"]
    until(lambda: trio.num_online() == 5, "the silo without labels to be gone")
    labelled = replace(own, unlabelled="", options={"skip": 900, "train": 40, "test": 30, **TURNED})
    open_way = {key: value for key, value in trio.gate.environment.items() if key != GATE}
    trio.start_silo(labelled, environment=open_way)  # it trains a little before it joins
    until(lambda: trio.num_online() == 6, "the silo to be back with labels")
    trio.gate.open()
    assert trio.follow(run_id, folder, lambda event: None).status == "completed"
    record = record_of(folder)
    assert "new" in record["rounds"][-1]["silos"]
    assert "unlabelled" not in record["rounds"][-1]
    assert "new" in record["model-hashes"]
