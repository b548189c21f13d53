"""FedGroup on real processes: newcomers at a late round, one killed in its cold start, a leaver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.server.runs.record import Event
from coterie.wire import model_hash
from tests.e2e.gated import DIES, TASK
from tests.e2e.runs import in_process, record_of
from tests.e2e.trio import Trio

KEYS: dict[str, Any] = {
    "strategy": "fedgroup",
    "task": TASK,
    "num-groups": 2,
    "cold-start-epochs": 30,
    "local-epochs": 40,
    "batch-size": 64,
    "seed": 1,
}


@pytest.mark.nightly
def test_late_newcomers_are_placed_one_is_killed_in_its_cold_start_and_a_group_runs_empty(
    trio: Trio,
) -> None:
    trio.add("down1", 3, rotation=90)
    trio.add("down2", 4, rotation=90)
    trio.add("lost", 5, train=DIES)
    trio.wait_for_silos(6)
    keys = {**KEYS, "min-silos": 3, "rounds": 5, "round-timeout": 8.0}
    run_id, folder = trio.submit(**keys, churn="c+4, down2+4, lost+4, down1-3")

    def leave(event: Event) -> None:
        if event.kind == "look" and event.number == 3:
            trio.end_silo("down1")

    assert trio.follow(run_id, folder, leave).status == "completed"
    assert trio.processes["lost"].wait(60) == -9
    record = record_of(folder)
    one, two, three, four, five = record["rounds"]

    # Round 1: a cold start of everybody that the round goes on from.
    assert one["members"] == two["members"] == [["a", "b"], ["down1"]]
    assert one["phases"][wire.COLD_START]["messages"] == 3 and not two["phases"]
    assert set(one["silos"]) == {"a", "b", "down1"}

    # Round 3: who leaves takes nothing along; the group stays, empty.
    assert three["left"] == ["down1"] and three["members"] == [["a", "b"], []]
    assert three["empty-groups"] == [1]

    # Round 4: three newcomers; two train in the round of their arrival, one is gone.
    assert four["joined"] == ["c", "down2", "lost"]
    assert {name: entry["group"] for name, entry in four["placed"].items()} == {"down2": 1, "c": 0}
    assert set(four["silos"]) == {"a", "b", "c", "down2"}
    assert four["members"] == [["a", "b", "c"], ["down2"]]
    assert four["cold"] == ["lost"] and four["empty-groups"] == []
    assert four["phases"][wire.COLD_START]["messages"] == 3
    assert "lost: its cold-start is left out" in (folder / "run.log").read_text()
    assert set(five["silos"]) == set(four["silos"])

    # Everybody who has a group owns a model; who left has the last one of its group.
    assert set(record["model-hashes"]) == {"a", "b", "c", "down1", "down2"}
    assert set(record["final-evaluation"]) == {"a", "b", "c", "down2"}


@pytest.mark.nightly
def test_a_newcomers_cold_start_gives_the_models_of_the_in_process_grid(
    trio: Trio, tmp_path: Path
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
    assert record["model-hashes"] == in_process(tmp_path / "run", **keys)["model-hashes"]
    for name, digest in record["model-hashes"].items():
        assert model_hash(load_file(folder / "models" / f"{name}.safetensors")) == digest
