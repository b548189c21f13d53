"""Trees per group over gRPC, on resident silos: who comes, goes or is silent; record and report."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import trees
from coterie.server.machine.link import Control, control
from coterie.server.machine.local import LocalFederation
from coterie.server.study.result import Result
from coterie.wire import model_hash
from tests.commands import coterie as command
from tests.e2e.runs import ROOT, until_happened
from tests.e2e.test_foreign_app import APPS, programs, start_app
from tests.kit import until

pytestmark = pytest.mark.nightly
A, B = ["silo-0", "silo-2", "silo-4"], ["silo-1", "silo-3", "silo-5"]
TIMEOUT_S = 10.0


def submitted(calls: Control, silos: int, rounds: int, gate: str = "") -> int:
    """Start a run; return its id."""
    config = {"silos": silos, "rounds": rounds, "gate": gate, "timeout": TIMEOUT_S}
    components = {"serverapp": "quick_trees:server", "clientapp": "quick_trees:server"}
    app = {"publisher": "tests", "components": components, "config": config}
    project = {"name": "trees", "version": "1.0.0", "description": "", "license": "Apache-2.0"}
    files = {"quick_trees.py": (APPS / "quick_trees.py").read_bytes()}
    return start_app(calls, {"project": project, "tool": {"flwr": {"app": app}}}, files)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFederation]:
    """A SuperLink whose ServerApps can import the benchmarks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with LocalFederation(tmp_path / "federation") as local:
        local.superlink.wait()
        yield local


@pytest.mark.timeout(400)
def test_trees_per_group_over_grpc(federation: LocalFederation, tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    runs, gate = federation.folder / "superlink" / "runs", tmp_path / "gate"
    gate.mkdir()

    def line(partitions: str) -> list[str]:
        found = [sys.executable, "-m", "coterie.client", "serve", "--set", "seed=0", "--app"]
        found += ["benchmarks.engine.trees:app", "--partitions", f"{partitions}/6", "--superlink"]
        return [*found, federation.superlink.fleet_address, "--home", str(tmp_path / partitions)]

    def online(calls: Control, number: int) -> None:
        until(lambda: calls.num_online() == number, f"{number} silos", deadline_s=100)

    def ended(calls: Control, run_id: int) -> Result:
        until(lambda: calls.runs(run_id)[0].ended, "the run to end", deadline_s=100)
        return Result(runs / f"pergroup-{run_id}")

    with control(federation.superlink.control_address) as calls, programs(line("0-3")):
        online(calls, 4)
        same = ended(calls, submitted(calls, 4, 2))
        here = trees.boosted(trees.first_stage(), 0, rounds=2, silos=4)
        hashes = {name: model_hash(model) for name, model in here.held.items()}
        assert same.run.model_hashes == hashes, same.run.error

        with programs(line("4-4")) as (leaver,):
            online(calls, 5)
            run_id = submitted(calls, 5, 6, str(gate))
            folder = runs / f"pergroup-{run_id}"

            (gate / "1").touch()
            until_happened(folder, "round", 2)
            with programs(line("5-5")):
                online(calls, 6)
                (gate / "2").touch()
                until_happened(folder, "round", 3)
                leaver.send_signal(signal.SIGSTOP)
                (gate / "3").touch()
                until_happened(folder, "round", 4)
                leaver.send_signal(signal.SIGCONT)
                leaver.terminate()
                online(calls, 5)
                for number in (4, 5, 6):
                    (gate / str(number)).touch()
                result = ended(calls, run_id)
    run = result.run
    assert run.status == "completed", run.error
    by_round = {one.round: [list(group) for group in one.groups] for one in run.rounds}
    assert by_round[1] == by_round[2] == [A, B[:2]]
    assert by_round[3] == [A, B], "the newcomer is with its kind"
    assert "silo-4" in run.rounds[3].left_out, "it was silent until the deadline"
    assert by_round[5] == by_round[6] == [A[:2], B]
    assert all(row["error"] < 0.1 for row in result.metric_rows), result.metric_rows
    for verb in ("report", "show"):
        done = command("runs", verb, folder.name, "--runs-dir", str(runs))
        assert done.returncode == 0, done.stderr
