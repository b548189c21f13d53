"""Many silos in one process, and ``coterie simulate``: the models of the real federation."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation
from coterie.server.study.given import of_file
from coterie.server.study.simulate import configured
from tests.commands import coterie
from tests.e2e.runs import record_of, until, until_happened

TEXT = """\
task = "digits"
silos = 6
seed = 3
[split]
kind = "dirichlet"
dirichlet-alpha = 1.0
permutations = 2
[run]
strategy = "hcct"
rounds = 2
local-epochs = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A simulation of six silos."""
    path = tmp_path / "six.toml"
    path.write_text(TEXT)
    return path


def only_record(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("*/run.json")
    return record_of(path.parent)


@pytest.mark.timeout(300)
def test_one_process_and_several_over_grpc_give_bit_identical_models(
    file: Path, tmp_path: Path
) -> None:
    done = coterie("simulate", str(file), "--runs-dir", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stdout and "silo-5" in done.stdout
    (kept,) = (tmp_path / "one").glob("*/run.log")
    assert "round 2/2" in kept.read_text() and "INFO" not in done.stderr
    many = ["--processes", "2", "--workdir", str(tmp_path / "processes")]
    runs = ["--runs-dir", str(tmp_path / "two")]
    done = coterie("simulate", str(file), *runs, *many)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = only_record(tmp_path / "one"), only_record(tmp_path / "two")
    assert one["model-hashes"] == two["model-hashes"]
    own = sorted((tmp_path / "processes" / "silos").glob("silo-*/models/*.safetensors"))
    assert len(own) == 6, "every silo keeps its own model"
    for log in (tmp_path / "processes" / "silos").glob("*/silo.log"):
        assert "Traceback" not in log.read_text()


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_silos_of_processes_come_back_answer_for_all_when_one_is_told_to_end_and_sign_off(
    federation: LocalFederation, file: Path, tmp_path: Path
) -> None:
    federation.start_partitions(file, 6, 2)
    federation.wait_for_silos(6)
    first, second = federation.processes.values()
    with control(federation.superlink.control_address) as calls:
        federation.superlink.stop()
        federation.superlink.start()
        federation.wait_for_silos(6)

        config = configured(of_file(file), {"rounds": 2}, runs_dir=tmp_path / "runs")
        folder, last = federation.run(**config.plain())
        assert last.status == "completed"
        assert all(not entry["left-out"] for entry in record_of(folder)["rounds"])

        keys = {"local-epochs": 15, "rounds": 3}
        config = configured(of_file(file), keys, runs_dir=tmp_path / "runs")
        run_id, folder = federation.submit(**config.plain())
        until_happened(folder, "round", 1)
        first.send_signal(signal.SIGTERM)
        assert federation.follow(run_id, folder, lambda event: None).status == "completed"
        assert first.wait(30) == 0 and second.poll() is None
        record = record_of(folder)
        assert len(record["final-evaluation"]) >= 3
        assert len(record["rounds"][-1]["silos"]) >= 3

        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0
        until(lambda: calls.num_online() == 0, "the silos to be gone", deadline_s=10)
