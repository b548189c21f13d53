"""More rounds and runs from other runs, on real processes and as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.runs import HCCT, hashes_of, in_process, record_of
from tests.e2e.trio import Trio


def test_more_rounds_and_a_run_from_a_run_as_a_person_types_it(trio: Trio, tmp_path: Path) -> None:
    folder, _ = trio.run(**{**HCCT, "rounds": HCCT["rounds"] - 1})
    done = trio.operator("run", "continue", str(folder), "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert hashes_of(folder) == in_process(tmp_path / "run", **HCCT)["model-hashes"]
    assert "continued after round" in done.stderr + done.stdout
    refused = trio.operator("run", "resume", folder.name)
    assert refused.returncode == 2 and "coterie run continue" in refused.stderr
    done = trio.operator("run", "--from", folder.name, "--rounds", "2", "--set", "lr=0.05")
    assert done.returncode == 0, done.stderr
    (own,) = [
        one for one in trio.runs_dir.iterdir() if record_of(one)["config"]["parent"] == folder.name
    ]
    record = record_of(own)
    assert len(record["rounds"]) == HCCT["rounds"] + 2 and record["config"]["lr"] == 0.05
    assert record["config"]["alpha"] == HCCT["alpha"]
    done = trio.operator("evaluate", folder.name, "--min-silos", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["silo"] for one in found["cells"] if one["figures"]} == {"a", "b", "c"}
    tree = trio.records("runs", "--tree").stdout
    assert f"└ {own.name}" in tree
