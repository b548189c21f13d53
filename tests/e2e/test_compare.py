"""``coterie compare`` on processes that talk gRPC: the same figures as in one process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.study.compare import compare

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
    "kmeans": "num-groups = 2\npretrain-epochs = 1",
    "fednova": "",
}


@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(("fednova", "perfedavg", "kmeans"), id="representative"),
        pytest.param(tuple(KEYS), id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_federation_of_processes_gives_the_models_and_errors_of_one_process(
    tmp_path: Path, strategies: tuple[str, ...]
) -> None:
    file = tmp_path / "try.toml"
    chosen = [f'[[strategies]]\nstrategy = "{name}"\n{KEYS[name]}\n' for name in strategies]
    file.write_text(FILE + "".join(chosen), encoding="utf-8")
    out = io.StringIO()
    here = compare(Console(file=out, width=200), file, folder=tmp_path / "here")
    there = compare(Console(file=out, width=200), file, folder=tmp_path / "there", federation=True)
    assert "as processes of their own" in out.getvalue()
    assert len(here) == len(strategies) + 1, "and alone"
    assert [(r.name, r.error, r.worst) for r in here] == [(r.name, r.error, r.worst) for r in there]
    for record in sorted((tmp_path / "here" / "records").iterdir()):
        one = json.loads((record / "run.json").read_text())
        other = json.loads((tmp_path / "there" / "records" / record.name / "run.json").read_text())
        assert one["model-hashes"] == other["model-hashes"], record.name
