"""``coterie compare`` on processes that talk gRPC: the same figures as in one process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.study.compare import compare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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
warm-up = 0
num-groups = 2
rounds-before = 1
first-split = 1
pretrain-epochs = 1
[[strategies]]
strategy = "ifca"
[[strategies]]
strategy = "maxfl"
[[strategies]]
strategy = "perfedavg"
[[strategies]]
strategy = "pfedme"
[[strategies]]
strategy = "fesem"
[[strategies]]
strategy = "fedfa"
[[strategies]]
strategy = "flsc"
[[strategies]]
strategy = "cfl"
[[strategies]]
strategy = "flhc"
[[strategies]]
strategy = "kmeans"
[[strategies]]
strategy = "fednova"
"""


def test_a_federation_of_processes_gives_the_models_and_errors_of_one_process(
    tmp_path: Path,
) -> None:
    file = tmp_path / "try.toml"
    file.write_text(FILE, encoding="utf-8")
    out = io.StringIO()
    here = compare(Console(file=out, width=200), file, folder=tmp_path / "here")
    there = compare(Console(file=out, width=200), file, folder=tmp_path / "there", federation=True)
    assert "as processes of their own" in out.getvalue()
    assert [(r.name, r.error, r.worst) for r in here] == [(r.name, r.error, r.worst) for r in there]
    for record in sorted((tmp_path / "here" / "records").iterdir()):
        one = json.loads((record / "run.json").read_text())
        other = json.loads((tmp_path / "there" / "records" / record.name / "run.json").read_text())
        assert one["model-hashes"] == other["model-hashes"], record.name
