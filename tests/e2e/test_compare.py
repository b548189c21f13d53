"""``coterie compare`` on processes that talk gRPC: the same figures as in one process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.study.compare import compare
from tests.tables import declaration

pytestmark = pytest.mark.timeout(600)

FILE = """
seeds = [0]
[[silos]]
name = "a"
options = { train = 20, test = 20 }
[[silos]]
name = "b"
options = { train = 30, test = 20, skip = 40 }
[run]
rounds = 3
local-epochs = 1
"""
KEYS: dict[str, str] = {
    "ifca": "num-groups = 2",
    "maxfl": "warm-up = 0",
    "perfedavg": "",
    "pfedme": "",
    "apfl": "",
    "pfedgraph": "graph-alpha = 0.2",
    "fesem": "num-groups = 2",
    "fedfa": "",
    "flsc": "num-groups = 2",
    "cfl": "first-split = 1",
    "flhc": "rounds-before = 1",
    "kmeans": "num-groups = 2\ncold-start-epochs = 1",
    "fednova": "",
}


@pytest.mark.nightly
def test_a_federation_of_processes_gives_the_models_and_errors_of_one_process(
    tmp_path: Path,
) -> None:
    file = tmp_path / "try.toml"
    chosen = [f'[[strategies]]\nstrategy = "{name}"\n{keys}\n' for name, keys in KEYS.items()]
    file.write_text(FILE + "".join(chosen), encoding="utf-8")
    out = io.StringIO()
    shown = Console(file=out, width=200)
    here = compare(file, folder=tmp_path / "here", progress=shown).rows
    there = compare(file, folder=tmp_path / "there", progress=shown, processes=True).rows
    assert "in separate processes" in out.getvalue()
    assert len(here) == len(KEYS) + 1, "and alone"
    assert [(r.name, r.error, r.worst) for r in here] == [(r.name, r.error, r.worst) for r in there]
    for record in sorted((tmp_path / "here" / "records").iterdir()):
        one = json.loads((record / "run.json").read_text())
        other = json.loads((tmp_path / "there" / "records" / record.name / "run.json").read_text())
        assert one["model-hashes"] == other["model-hashes"], record.name


TABLE = declaration("age", "dose", scale="federation")


@pytest.mark.nightly
def test_silos_that_share_a_scale_get_the_same_models_in_one_process_and_in_several(
    tmp_path: Path,
) -> None:
    (tmp_path / "study.toml").write_text(TABLE)
    silos = ""
    for number, name in enumerate("ab"):
        rows = "".join(
            f"{30 * number + i % 37},{i % 11},{'yes' if i % 37 > 18 else 'no'}\n" for i in range(80)
        )
        (tmp_path / f"{name}.csv").write_text("age,dose,ill\n" + rows)
        silos += f'[[silos]]\nname = "{name}"\noptions = {{ data = "{name}.csv" }}\n'
    file = tmp_path / "try.toml"
    file.write_text(
        f'task = "study.toml"\nseeds = [0]\ncolumn-sums = true\n{silos}[run]\nrounds = 3\n'
        '[[strategies]]\nstrategy = "fedavg"\n',
        encoding="utf-8",
    )
    for where in ("here", "there"):
        compare(file, folder=tmp_path / where, progress=False, processes=where == "there")
    records = sorted((tmp_path / "here" / "records").iterdir())
    assert len(records) == 2
    for record in records:
        one = json.loads((record / "run.json").read_text())
        other = json.loads((tmp_path / "there" / "records" / record.name / "run.json").read_text())
        assert one["model-hashes"] == other["model-hashes"], record.name
    (ledger,) = (tmp_path / "there").rglob("a/ledger.jsonl")
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    (sums, *_) = [entry["values"] for entry in entries if entry["type"] == "query.column_sums"]
    assert sums["metrics"]["column-counts"] == [64, 64]
