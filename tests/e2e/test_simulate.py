"""Many silos in one process, and ``coterie simulate``: the models of the real federation."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from coterie.server.machine.local import LocalFederation
from coterie.server.runs.record import Event
from coterie.server.study.simulate import node_configs, read
from tests.e2e.conftest import coterie, record_of, until

TEXT = """\
task = "digits"
silos = 12
seed = 3
[split]
kind = "dirichlet"
alpha = 1.0
permutations = 2
[run]
strategy = "hcct"
rounds = 3
local-epochs = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A simulation of twelve silos."""
    path = tmp_path / "twelve.toml"
    path.write_text(TEXT)
    return path


def only_record(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("*/run.json")
    return record_of(path.parent)


@pytest.mark.timeout(300)
def test_one_process_and_several_over_grpc_give_bit_identical_models(
    file: Path, tmp_path: Path
) -> None:
    done = coterie("simulate", str(file), "--runs-dir", str(tmp_path / "one"), deadline_s=120)
    assert done.returncode == 0, done.stderr
    assert "round 3/3" in done.stdout and "silo-11" in done.stdout
    (kept,) = (tmp_path / "one").glob("*/run.log")
    assert "round 3/3" in kept.read_text() and "INFO" not in done.stderr
    many = ["--processes", "2", "--dir", str(tmp_path / "processes")]
    runs = ["--runs-dir", str(tmp_path / "two")]
    done = coterie("simulate", str(file), *runs, *many, deadline_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = only_record(tmp_path / "one"), only_record(tmp_path / "two")
    assert one["model-hashes"] == two["model-hashes"]
    own = sorted((tmp_path / "processes" / "silos").glob("silo-*/models/*.safetensors"))
    assert len(own) == 12, "every silo keeps its own model"
    for log in (tmp_path / "processes" / "silos").glob("*/silo.log"):
        assert "Traceback" not in log.read_text()


@pytest.mark.timeout(300)
def test_silos_of_a_process_come_back_after_the_superlink_was_restarted_and_sign_off(
    federation: LocalFederation, file: Path, tmp_path: Path
) -> None:
    federation.start_partitions(file, 12, 1)
    federation.wait_for_silos(12)
    federation.superlink.stop()
    time.sleep(1)
    federation.superlink.start()
    federation.wait_for_silos(12)
    _, config = read(file, tmp_path / "runs", {})
    folder, last = federation.run(**config.plain())
    assert last.status == "completed"
    assert all(not entry["left-out"] for entry in record_of(folder)["rounds"])
    (process,) = federation.processes.values()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    from coterie.server.machine.link import control

    with control(federation.superlink.control_address) as calls:
        until(lambda: calls.num_online() == 0, "the silos to be gone", deadline_s=10)


@pytest.mark.timeout(300)
def test_a_process_of_silos_told_to_end_while_one_trains_answers_for_all(
    federation: LocalFederation, file: Path, tmp_path: Path
) -> None:
    federation.start_partitions(file, 12, 2)
    federation.wait_for_silos(12)
    _, config = read(file, tmp_path / "runs", {"local-epochs": 15, "rounds": 2})
    run_id, folder = federation.submit(**config.plain())
    first, second = federation.processes.values()

    def end(event: Event) -> None:
        if event.kind == "round" and event.number == 1:
            time.sleep(0.5)
            first.send_signal(signal.SIGTERM)

    assert federation.follow(run_id, folder, end).status == "completed"
    assert first.wait(30) == 0 and second.poll() is None
    record = record_of(folder)
    assert len(record["final-evaluation"]) >= 6
    assert len(record["rounds"][1]["silos"]) >= 6


def test_the_configs_of_the_grid_are_those_of_the_processes(file: Path, tmp_path: Path) -> None:
    simulation, _ = read(file, tmp_path, {})
    first = node_configs(simulation)[0]
    assert first["name"] == "silo-00" and first["data.silo"] == 0 and first["data.silos"] == 12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('kind = "classes-per-silo"\nclasses = 11', "classes"),
        ('kind = "sizes"\nsizes = "1700,1,1,1,1,1,1,1,1,1,1,1"', "without test samples"),
        ('kind = "nonsense"', "split must be none or one of"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path, change: str, said: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f"silos = 12\n[split]\n{change}\n")
    for command in (["simulate", str(path)], ["silo", "--simulation", str(path)]):
        done = coterie(*command)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
        assert "connected" not in done.stderr


def test_a_missing_data_folder_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('task = "mnist"\ndata = "none"\nsilos = 2\n[split]\nkind = "iid"\n')
    for command in (["simulate", str(path)], ["silo", "--simulation", str(path)]):
        done = coterie(*command)
        assert done.returncode == 2
        assert str(tmp_path / "none") in done.stderr and "does not exist" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--partitions", "0-5"], "must be FIRST-LAST/TOTAL"),
        (["--partitions", "3-5/4"], "must lie in 0-3"),
        (["--partitions", "0/4"], "belongs to a split"),
        ([], "a silo needs --name"),
    ],
)
def test_partitions_that_are_none_are_refused(arguments: list[str], said: str) -> None:
    done = coterie("silo", *arguments)
    assert done.returncode == 2 and said in done.stderr
