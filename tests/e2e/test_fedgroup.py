"""FedGroup on real processes: newcomers at a late round, one killed in its cold start, a leaver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.app import app
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.record import Event
from coterie.server.runs.run import execute
from coterie.wire import model_hash
from tests.e2e.conftest import record_of, spec

KEYS: dict[str, Any] = {
    "strategy": "fedgroup",
    "num-groups": 2,
    "pretrain-epochs": 30,
    "local-epochs": 40,
    "batch-size": 64,
    "seed": 3,
}

PLUGIN = '''
import os
import signal

from coterie.tasks.images.digits import Digits

class Doomed(Digits):
    """The digits, but a silo of 41 training samples is killed as soon as it trains on them."""
    def loss(self, outputs, targets):
        if outputs.requires_grad and targets.numel() == 41:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets)
'''


def silo(name: str, index: int, rotation: int, train: int = 40) -> SiloSpec:
    """Of the plug-in task; silos of different indices share no sample."""
    cut = {"train": train, "test": 30, "skip": index * 75, "rotation": rotation}
    return SiloSpec(name, "doomed:Doomed", cut)


@pytest.mark.timeout(300)
def test_late_newcomers_are_placed_one_is_killed_in_its_cold_start_and_a_group_runs_empty(
    federation: LocalFederation, tmp_path: Path
) -> None:
    (tmp_path / "doomed.py").write_text(PLUGIN)
    silos = [
        silo("up1", 0, 0),
        silo("up2", 1, 0),
        silo("down1", 2, 180),
        silo("up3", 3, 0),
        silo("down2", 4, 180),
        silo("lost", 5, 0, train=41),
    ]
    for one in silos:
        federation.start_silo(one, environment={"PYTHONPATH": str(tmp_path)})
    federation.wait_for_silos(6)
    keys = {**KEYS, "task": "doomed:Doomed", "min-silos": 3, "rounds": 5, "round-timeout": 8.0}
    churn = "up3+4, down2+4, lost+4, down1-3"
    run_id, folder = federation.submit(**keys, churn=churn)

    def leave(event: Event) -> None:
        if event.kind == "look" and event.number == 3:
            federation.end_silo("down1")

    assert federation.follow(run_id, folder, leave).status == "completed"
    assert federation.processes["lost"].wait(5) == -9
    record = record_of(folder)
    one, two, three, four, five = record["rounds"]

    # Round 1: a cold start of everybody that the round goes on from.
    assert one["members"] == two["members"] == [["down1"], ["up1", "up2"]]
    assert one["phases"][wire.COLD_START]["messages"] == 3 and not two["phases"]
    assert set(one["silos"]) == {"up1", "up2", "down1"}

    # Round 3: who leaves takes nothing along; the group stays, empty.
    assert three["left"] == ["down1"] and three["members"] == [[], ["up1", "up2"]]
    assert three["empty-groups"] == [0]

    # Round 4: three newcomers; two train in the round of their arrival, one is gone.
    assert four["joined"] == ["down2", "lost", "up3"]
    assert {name: entry["group"] for name, entry in four["placed"].items()} == {
        "down2": 0,
        "up3": 1,
    }
    assert set(four["silos"]) == {"up1", "up2", "up3", "down2"}
    assert four["members"] == [["down2"], ["up1", "up2", "up3"]]
    assert four["cold"] == ["lost"] and four["empty-groups"] == []
    assert four["phases"][wire.COLD_START]["messages"] == 3
    assert "lost: its cold-start is left out" in (folder / "run.log").read_text()
    assert set(five["silos"]) == set(four["silos"])

    # Everybody who has a group owns a model; who left has the last one of its group.
    assert set(record["model-hashes"]) == {"up1", "up2", "up3", "down1", "down2"}
    assert set(record["final-evaluation"]) == {"up1", "up2", "up3", "down2"}


def test_a_newcomers_cold_start_gives_the_models_of_the_in_process_grid(
    trio: LocalFederation, tmp_path: Path
) -> None:
    keys = {**KEYS, "min-silos": 2, "rounds": 4, "churn": "c+3"}
    folder, last = trio.run(**keys)
    assert last.status == "completed"
    record = record_of(folder)
    assert [list(entry["phases"]) for entry in record["rounds"]] == [
        [wire.COLD_START],
        [],
        [wire.COLD_START],
        [],
    ]
    configs = [
        {"name": s.name, "task": s.task, "threads": 1}
        | {f"data.{key}": value for key, value in s.options.items()}
        for s in (spec(name, index) for index, name in enumerate(("a", "b", "c")))
    ]
    again = tmp_path / "in-process"
    execute(InProcessGrid(app, configs), RunConfig.read(keys), run_id=1, folder=again)
    assert record["model-hashes"] == record_of(again)["model-hashes"]
    for name, digest in record["model-hashes"].items():
        assert model_hash(load_file(folder / "models" / f"{name}.safetensors")) == digest
