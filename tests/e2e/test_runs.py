"""Runs on real processes: the same models as in one process, through every way to start a run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie import wire
from coterie.client import ledger
from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation
from coterie.server.runs.record import Event
from coterie.strategies.registry import STRATEGIES
from tests.e2e.gated import TASK
from tests.e2e.organisations import SETTINGS
from tests.e2e.runs import (
    COMMAND_S,
    COTERIE,
    HCCT,
    KEYS,
    NAMES,
    ROOT,
    hashes_of,
    in_process,
    record_of,
    spec,
    supernode,
    until,
)
from tests.e2e.test_foreign_app import ENVIRONMENT, programs, wait_for_two
from tests.e2e.trio import Trio

SHORT: dict[str, dict[str, Any]] = {
    "auto": {"rounds": 8},
    "maxfl": {"warm-up": 0},
    "ifca": {"num-groups": 2},
    "flsc": {"num-groups": 2},
    "fesem": {"num-groups": 2},
    "cfl": {"first-split": 1},
    "flhc": {"rounds-before": 1},
    "kmeans": {"num-groups": 2},
    "fedgroup": {"num-groups": 2},
    "fedcollab": {"discriminator-rounds": 1},
    "fedgenp": {"generator-steps": 6, "generator-hidden": 16},
}
"""Keys with which a strategy is quick."""
REPRESENTATIVE = ("fedgenp",)
"""Generators, and message types of its own. The others: make nightly."""
CONSENT = {"fedgen"}
"""Needs silos that share their label counts; it is asked for and refused in a test of its own."""


@pytest.fixture(scope="module")
def usual(resident_trio: Trio) -> Path:
    """The folder of a run that several tests look at."""
    resident_trio.mend()
    folder, last = resident_trio.run(**HCCT)
    assert last.status == "completed"
    return folder


def test_two_runs_and_the_in_process_grid_give_bit_identical_models(
    usual: Path, trio: Trio, tmp_path: Path
) -> None:
    again = hashes_of(trio.run(**HCCT)[0])
    assert again == hashes_of(usual)
    assert again == in_process(tmp_path / "run", **HCCT)["model-hashes"]


def test_rounded_updates_of_real_processes_make_the_models_of_one(
    trio: Trio, tmp_path: Path
) -> None:
    keys = {**HCCT, "wire-format": "delta-int8"}
    folder, _ = trio.run(**keys)
    same = in_process(tmp_path / "run", **keys)
    assert hashes_of(folder) == same["model-hashes"]
    recorded = record_of(folder)["rounds"][-1]["silos"]["a"]
    assert recorded["bytes-received"] < 0.6 * recorded["bytes-sent"] < 0.6 * 13_000
    (left,) = [
        entry
        for entry in ledger.read(trio.folder / "silos" / "a", run=folder.name)
        if entry["type"] == wire.TRAIN and entry["round"] == 4
    ]
    assert left["bytes"] == recorded["bytes-received"]
    assert left["values"]["metrics"]["update-lost"] == recorded["update-lost"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(REPRESENTATIVE, id="representative"),
        pytest.param(sorted(set(STRATEGIES) - CONSENT), id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_strategy_takes_a_newcomer_on_real_processes(
    trio: Trio, tmp_path: Path, strategies: Sequence[str]
) -> None:
    """It joins in round 2; the models are those of one process, bit for bit."""
    trio.add("late", 3)
    trio.wait_for_silos(4)
    for strategy in strategies:
        keys = {
            **KEYS,
            "rounds": 3,
            **SHORT.get(strategy, {}),
            "strategy": strategy,
            "churn": "late+2",
        }
        folder, last = trio.run(**keys)
        record = record_of(folder)
        assert last.status == "completed", (strategy, last)
        assert record["rounds"][1]["joined"] == ["late"], strategy
        assert "late" in record["final-evaluation"], strategy
        expected = in_process(tmp_path / strategy, *NAMES, "late", **keys)
        assert record["model-hashes"] == expected["model-hashes"], strategy


@pytest.mark.nightly
def test_auto_resumes_in_the_middle_of_a_race_and_places_a_newcomer(
    trio: Trio, tmp_path: Path
) -> None:
    """Bit for bit as in one process that was never interrupted."""
    trio.add("late", 3)
    trio.wait_for_silos(4)
    keys = {**KEYS, "strategy": "auto", "rounds": 10, "churn": "late+8"}
    _, folder = trio.submit(**keys)
    until(lambda: "race" in _phases(folder), "the race")
    assert trio.operator("runs", "stop", folder.name).returncode == 0
    assert len(record_of(folder)["rounds"]) < 10
    resumed = trio.resume(folder)
    last = trio.follow(resumed, folder, lambda event: None)
    assert last.status == "completed"
    record = record_of(folder)
    expected = in_process(tmp_path / "whole", *NAMES, "late", **keys)
    assert record["model-hashes"] == expected["model-hashes"]
    assert set(record["rounds"][7]["probation"]) == {"late"}
    (verdict,) = (one["verdict"] for one in record["rounds"] if "verdict" in one)
    assert verdict["complete"]


def _phases(folder: Path) -> list[str]:
    file = folder / "run.json"
    return [one.get("phase", "") for one in record_of(folder)["rounds"]] if file.exists() else []


def test_a_script_of_joins_and_leaves_is_followed(trio: Trio) -> None:
    trio.add("late", 3)
    trio.wait_for_silos(4)
    run_id, folder = trio.submit(**{**HCCT, "rounds": 5}, churn="late+3, b-4")

    def leave(event: Event) -> None:
        if event.kind == "look" and event.number == 4:
            trio.end_silo("b")

    assert trio.follow(run_id, folder, leave).status == "completed"
    rounds = record_of(folder)["rounds"]
    present = [{n for group in entry["groups"] for n in group} for entry in rounds]
    first, later, last = {"a", "b", "c"}, {"a", "b", "c", "late"}, {"a", "c", "late"}
    assert present == [first, first, later, last, last]
    assert rounds[2]["joined"] == ["late"]
    assert rounds[3]["left"] == ["b"]
    assert trio.processes["b"].wait(60) == 0


def test_coterie_run_status_and_runs_tell_what_happened_and_another_seed_gives_other_models(
    usual: Path, trio: Trio
) -> None:
    done = trio.operator(
        "run", "hcct", "--alpha", "20", "--rounds", "4", "--min-silos", "3", "--seed", "6",
        "--task", TASK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round 4/4" in done.stdout
    found = [folder for folder in trio.runs_dir.glob("hcct-*") if str(folder) in done.stdout]
    (folder,) = found
    assert hashes_of(folder) != hashes_of(usual)
    status = trio.control("status")
    assert "3 silos connected" in status.stdout
    assert "completed" in status.stdout
    assert folder.name in trio.records("runs").stdout


def test_the_superlinks_log_says_who_came_and_has_no_line_per_message(
    usual: Path, trio: Trio
) -> None:
    said = (trio.folder / "superlink" / "superlink.log").read_text()
    assert said.count("[Fleet.ActivateNode] Activated") >= 3
    assert "Messages]" not in said


def test_a_run_goes_on_after_ctrl_c_is_stopped_by_command_and_resumed(trio: Trio) -> None:
    trio.runs_dir.mkdir(exist_ok=True)
    address = trio.superlink.control_address
    line = ["run", "fedavg", "--rounds", "300", "--seed", "3", "--min-silos", "3", "--task", TASK]
    line += SETTINGS
    trio.gate.close()
    follower = subprocess.Popen(
        [*COTERIE, *line, "--superlink", address, "--runs-dir", "."],
        cwd=trio.runs_dir,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    trio.gate.hold(3, rounds=2)
    said = ""
    for text in follower.stdout:
        said += text
        if "round 2/" in text:
            follower.send_signal(signal.SIGINT)
            break
    said += follower.communicate(timeout=COMMAND_S)[0]
    assert follower.returncode == 130
    (folder,) = (f for f in trio.runs_dir.glob("fedavg-*") if f.name in said)
    look = f"`coterie runs watch {folder.name} --runs-dir .`"
    assert f"the run continues. Check on it with {look}" in said
    options = f"--runs-dir . --superlink {address}"
    assert f"stop it with `coterie runs stop {folder.name} {options}`" in said
    assert record_of(folder)["status"] == "running"

    done = trio.operator("runs", "stop", folder.name)
    assert done.returncode == 0, done.stderr
    assert "is stopped after round" in done.stdout and "coterie run resume" in done.stdout
    record = record_of(folder)
    assert record["status"] == "stopped"
    assert record["error"].startswith("stopped by `coterie runs stop`")
    again = trio.control("runs", "stop", str(folder))
    assert (again.returncode, "has already ended: stopped" in again.stdout) == (0, True)
    with control(address) as calls:
        assert not calls.stop(int(record["run-id"]))

    trio.gate.open()
    resumed = trio.resume(folder)
    until(lambda: record_of(folder).get("run-id") == str(resumed), "the resumption")
    until(lambda: len(record_of(folder)["rounds"]) > len(record["rounds"]), "another round")
    assert trio.operator("runs", "stop", folder.name).returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_same_client_app_serves_under_stock_supernodes(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Two stock SuperNodes, each starting a process per message: slow, and the same models."""
    federation.superlink.wait()
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path / "nodes")}
    lines = []
    for index, name in enumerate(("a", "b")):
        options = " ".join(f"data.{k}={v}" for k, v in spec(name, index).options.items())
        lines.append(supernode(federation, f"name='{name}' task='{TASK}' threads=1 {options}"))
    with programs(*lines, env=environment) as nodes:
        with control(federation.superlink.control_address) as calls:
            wait_for_two(calls, nodes)
        keys = {**KEYS, "rounds": 1, "min-silos": 2, "strategy": "fedavg"}
        folder, last = federation.run(**keys)
        assert last.status == "completed"
        stock = record_of(folder)["model-hashes"]
    for index, name in enumerate(("a", "b")):
        federation.start_silo(spec(name, index), environment={"PYTHONPATH": str(ROOT)})
    federation.wait_for_silos(2)
    assert record_of(federation.run(**keys)[0])["model-hashes"] == stock
