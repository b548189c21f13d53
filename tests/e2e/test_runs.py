"""Runs on real processes: the same models as in one process, through every way to start a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.app import app
from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation
from coterie.server.runs.baselines import BASELINES
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.record import Event
from coterie.server.runs.run import execute
from coterie.wire import model_hash
from tests.e2e.conftest import COTERIE, coterie, record_of, spec, until

KEYS = {"strategy": "hcct", "rounds": 4, "seed": 5, "alpha": 20.0, "min-silos": 3}
ROOT = Path(__file__).parents[2]


def in_process_hashes(
    tmp_path: Path, *names: str, label: str = "in-process", **changes: object
) -> dict[str, str]:
    """Hashes of the models of the same run without processes."""
    silos = [spec(name, index) for index, name in enumerate(names or ("a", "b", "c"))]
    configs = [
        {
            "name": s.name,
            "task": s.task,
            "threads": 1,
            **{f"data.{k}": v for k, v in s.options.items()},
        }
        for s in silos
    ]
    config = RunConfig.read({**KEYS, **changes})
    folder = tmp_path / label
    execute(InProcessGrid(app, configs), config, run_id=1, folder=folder)
    hashes: dict[str, str] = record_of(folder)["model-hashes"]
    return hashes


def test_two_runs_and_the_in_process_grid_give_bit_identical_models(
    trio: LocalFederation, tmp_path: Path
) -> None:
    records = [record_of(trio.run(**KEYS)[0]) for _ in range(2)]
    assert [r["status"] for r in records] == ["completed", "completed"]
    assert records[0]["model-hashes"] == records[1]["model-hashes"]
    assert records[0]["model-hashes"] == in_process_hashes(tmp_path)


def test_generators_of_the_real_federation_are_those_of_the_in_process_grid(
    trio: LocalFederation, tmp_path: Path
) -> None:
    keys = {"strategy": "fedgenp", "generator-steps": 6, "generator-hidden": 16}
    folder, last = trio.run(**{**KEYS, **keys})
    record = record_of(folder)
    assert last.status == "completed"
    assert record["model-hashes"] == in_process_hashes(tmp_path, **keys)
    assert sorted(record["rounds"][-1]["generators"]["receivers"]) == ["a", "b", "c"]
    assert sorted(record["rounds"][-1]["personalised"]) == ["a", "b", "c"]
    for name in ("a", "b", "c"):
        home = trio.folder / "silos" / name
        assert (home / "personalised" / f"{folder.name}.safetensors").exists()


def test_who_does_not_consent_to_fedgen_says_so_at_the_join_on_both_sides(
    trio: LocalFederation,
) -> None:
    folder, last = trio.run(**{**KEYS, "strategy": "fedgen", "wait-for-silos": 5.0})
    assert last.status == "failed"
    for name in ("a", "b", "c"):
        said = f"silo '{name}' does not share its label counts"
        assert said in record_of(folder)["error"]
        assert f"refused a {wire.DESCRIBE} message: {said}" in trio.log_of(name).read_text()


def test_every_baseline_takes_a_newcomer_on_real_processes(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """It joins in round 2 of 3; the models are those of one process, bit for bit."""
    names = ("a", "b", "c", "late")
    for index, name in enumerate(names):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(4)
    short = {"warm-up": 0, "num-groups": 2, "rounds-before": 1, "first-split": 1}
    for strategy in BASELINES:
        keys = {**short, "strategy": strategy, "rounds": 3, "churn": "late+2"}
        folder, last = federation.run(**{**KEYS, **keys})
        record = record_of(folder)
        assert last.status == "completed", (strategy, last)
        assert record["rounds"][1]["joined"] == ["late"], strategy
        assert "late" in record["final-evaluation"], strategy
        expected = in_process_hashes(tmp_path, *names, label=strategy, **keys)
        assert record["model-hashes"] == expected, strategy


def test_another_seed_gives_other_models(trio: LocalFederation, tmp_path: Path) -> None:
    folder, _ = trio.run(**{**KEYS, "seed": 6})
    assert record_of(folder)["model-hashes"] != in_process_hashes(tmp_path)


def test_the_record_holds_models_groups_errors_times_and_bytes(trio: LocalFederation) -> None:
    folder, last = trio.run(**KEYS)
    record = record_of(folder)
    assert last.status == record["status"] == "completed"
    for name, digest in record["model-hashes"].items():
        assert model_hash(load_file(folder / "models" / f"{name}.safetensors")) == digest
    assert [entry["round"] for entry in record["rounds"]] == [1, 2, 3, 4]
    for entry in record["rounds"]:
        assert sorted(n for group in entry["groups"] for n in group) == ["a", "b", "c"]
        assert set(entry["evaluation-after"]) == {"a", "b", "c"}
        assert entry["seconds"]["train"] > 0
        assert entry["silos"]["a"]["bytes-sent"] > 20_000
    assert (folder / "run.log").read_text()
    assert record["seconds-to-first-training"] < 10


def test_every_silo_keeps_its_own_final_model(trio: LocalFederation) -> None:
    folder, _ = trio.run(**KEYS)
    for name, digest in record_of(folder)["model-hashes"].items():
        own = trio.folder / "silos" / name / "models" / f"{folder.name}.safetensors"
        assert model_hash(load_file(own)) == digest


def test_a_script_of_joins_and_leaves_is_followed(federation: LocalFederation) -> None:
    for index, name in enumerate(("a", "b", "c", "late")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(4)
    run_id, folder = federation.submit(**{**KEYS, "rounds": 5}, churn="late+3, b-4")

    def leave(event: Event) -> None:
        if event.kind == "look" and event.number == 4:
            federation.end_silo("b")

    assert federation.follow(run_id, folder, leave).status == "completed"
    rounds = record_of(folder)["rounds"]
    present = [{n for group in entry["groups"] for n in group} for entry in rounds]
    first, later, last = {"a", "b", "c"}, {"a", "b", "c", "late"}, {"a", "c", "late"}
    assert present == [first, first, later, last, last]
    assert rounds[2]["joined"] == ["late"]
    assert rounds[3]["left"] == ["b"]
    assert federation.processes["b"].wait(10) == 0


def test_coterie_run_status_and_runs_tell_what_happened(trio: LocalFederation) -> None:
    control = ["--superlink", trio.superlink.control_address]
    runs = ["--runs-dir", str(trio.runs_dir)]
    done = coterie(
        "run", "hcct", "--alpha", "20", "--rounds", "2", "--min-silos", "3",
        "--set", "local-epochs=1", *control, *runs,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stdout
    status = coterie("status", *control)
    assert "3 silos connected" in status.stdout
    assert "completed" in status.stdout
    assert "hcct" in coterie("runs", *runs).stdout


def test_a_run_goes_on_after_ctrl_c_is_stopped_by_command_and_resumed(
    trio: LocalFederation,
) -> None:
    trio.runs_dir.mkdir(exist_ok=True)
    control, runs = ["--superlink", trio.superlink.control_address], ["--runs-dir", "."]
    line = ["run", "fedavg", "--rounds", "300", "--seed", "3", "--min-silos", "3", *control, *runs]
    follower = subprocess.Popen(
        [*COTERIE, *line],
        cwd=trio.runs_dir,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    said = ""
    for text in follower.stdout:
        said += text
        if "round 2/" in text:
            follower.send_signal(signal.SIGINT)
            break
    said += follower.communicate(timeout=30)[0]
    assert follower.returncode == 130
    (folder,) = (f for f in trio.runs_dir.glob("fedavg-*") if f.name in said)
    options = f"--runs-dir . --superlink {trio.superlink.control_address}"
    assert f"the run continues. Check on it with `coterie watch {folder.name} --runs-dir .`" in said
    assert f"stop it with `coterie stop {folder.name} {options}`" in said
    assert record_of(folder)["status"] == "running"

    done = coterie("stop", folder.name, "--runs-dir", str(trio.runs_dir), *control)
    assert done.returncode == 0, done.stderr
    assert "is stopped after round" in done.stdout and "coterie run --resume" in done.stdout
    record = record_of(folder)
    assert record["status"] == "failed" and record["error"].startswith("stopped by `coterie stop`")
    again = coterie("stop", str(folder), *control)
    assert (again.returncode, "has already ended: stopped" in again.stdout) == (0, True)

    resumed = trio.resume(folder)
    until(lambda: record_of(folder).get("run-id") == str(resumed), "the resumption")
    until(lambda: len(record_of(folder)["rounds"]) > len(record["rounds"]), "another round")
    assert coterie("stop", folder.name, *control, "--runs-dir", str(trio.runs_dir)).returncode == 0


def test_flower_run_starts_the_same_run(trio: LocalFederation, tmp_path: Path) -> None:
    """Through Flower's own command, which ships this checkout's code to the ServerApp."""
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        "[superlink]\ndefault = 'here'\n[superlink.here]\n"
        f"address = '{trio.superlink.control_address}'\ninsecure = true\n"
    )
    keys = [f"{k}={v!r}".replace('"', "'") for k, v in KEYS.items()]
    keys.append(f"runs-dir='{tmp_path / 'runs'}'")
    flwr = Path(sys.executable).with_name("flwr")
    done = subprocess.run(
        [flwr, "run", str(ROOT), "here", "--run-config", " ".join(keys), "--stream"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert record_of(folder)["model-hashes"] == in_process_hashes(tmp_path)


@pytest.mark.timeout(240)
def test_the_same_client_app_serves_under_stock_supernodes(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Two stock SuperNodes, each starting a process per message: slow, and the same models."""
    federation.superlink.wait()
    nodes = []
    environment = {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "nodes"),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
    }
    try:
        for index, name in enumerate(("a", "b")):
            options = " ".join(f"data.{k}={v}" for k, v in spec(name, index).options.items())
            nodes.append(
                subprocess.Popen(
                    [
                        "flower-supernode", "--insecure",
                        "--superlink", federation.superlink.fleet_address,
                        "--clientappio-api-address", f"127.0.0.1:{_free_port()}",
                        "--node-config", f"name='{name}' threads=1 {options}",
                    ],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        with control(federation.superlink.control_address) as calls:
            until(
                lambda: calls.num_online() == 2 or any(n.poll() is not None for n in nodes),
                "two stock SuperNodes",
            )
        assert [node.poll() for node in nodes] == [None, None]
        keys = {**KEYS, "rounds": 1, "min-silos": 2, "strategy": "fedavg"}
        folder, last = federation.run(**keys)
        assert last.status == "completed"
        stock = record_of(folder)["model-hashes"]
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(20)
    for index, name in enumerate(("a", "b")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(2)
    assert record_of(federation.run(**keys)[0])["model-hashes"] == stock


def _free_port() -> int:
    from coterie.server.machine.superlink import Ports

    return Ports.free().fleet
