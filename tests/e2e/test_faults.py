"""What goes wrong in the world: killed silos, wrong silos, a lost SuperLink, taken ports."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import Ports
from coterie.server.runs.record import Event
from tests.e2e.conftest import coterie, record_of, spec, until

KEYS = {"strategy": "fedavg", "rounds": 3, "min-silos": 3, "seed": 1}

PLUGIN = '''
from coterie.tasks.images.digits import Digits

class Moody(Digits):
    """The digits, but its silo fails when it has exactly 41 training samples."""
    def loss(self, outputs, targets):
        if outputs.requires_grad and targets.numel() == 41:
            raise ZeroDivisionError("a secret value: 41")
        return super().loss(outputs, targets)
'''


def run_silo(*arguments: str, deadline_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``coterie silo`` that is expected to end by itself."""
    return coterie("silo", *arguments, deadline_s=deadline_s)


def test_a_silo_killed_in_a_round_is_left_out_and_the_run_goes_on(
    federation: LocalFederation,
) -> None:
    for index, name in enumerate(("a", "b", "c")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(3)
    run_id, folder = federation.submit(**KEYS, local_epochs=300, round_timeout=25.0)

    def kill(event: Event) -> None:
        if event.kind == "round" and event.number == 1:
            time.sleep(0.7)  # now it trains round 2
            federation.end_silo("b", how=signal.SIGKILL)

    assert federation.follow(run_id, folder, kill).status == "completed"
    record = record_of(folder)
    assert record["rounds"][0]["left-out"] == {}
    assert set(record["rounds"][1]["left-out"]) == {"b"}
    assert set(record["rounds"][1]["silos"]) == {"a", "c"}
    assert set(record["final-evaluation"]) == {"a", "c"}
    assert "b is left out" in (folder / "run.log").read_text()


def test_a_silo_told_to_end_while_it_trains_says_so_and_ends_at_once(
    federation: LocalFederation,
) -> None:
    for index, name in enumerate(("a", "b")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(2)
    run_id, folder = federation.submit(**{**KEYS, "min-silos": 2}, local_epochs=400)
    ended: list[float] = []

    def end(event: Event) -> None:
        if event.kind == "round" and event.number == 1:
            time.sleep(0.7)
            started = time.monotonic()
            federation.end_silo("b")
            assert federation.processes["b"].wait(20) == 0
            ended.append(time.monotonic() - started)

    assert federation.follow(run_id, folder, end).status == "completed"
    assert ended[0] < 10
    reason = record_of(folder)["rounds"][1]["left-out"]["b"]
    # Flower's own words, if the signal came before the silo had fetched its message.
    assert "shutting down" in reason or "Node Unavailable" in reason


def test_an_exception_in_a_task_is_an_error_reply_and_the_silo_lives_on(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Also the plug-in point: the task is a module of the user's own."""
    (tmp_path / "moody.py").write_text(PLUGIN)
    own = {"PYTHONPATH": str(tmp_path)}
    for index, (name, train) in enumerate((("a", 40), ("b", 41), ("c", 42))):
        options = {"train": train, "test": 30, "skip": 80 * index}
        federation.start_silo(SiloSpec(name, "moody:Moody", options), environment=own)
    federation.wait_for_silos(3)
    folder, last = federation.run(**KEYS, task="moody:Moody", batch_size=64)
    assert last.status == "completed"
    left_out = record_of(folder)["rounds"][0]["left-out"]
    assert list(left_out) == ["b"]
    assert "ZeroDivisionError" in left_out["b"]
    assert "secret" not in (folder / "run.json").read_text(), "values stay at the silo"
    assert "a secret value" in federation.log_of("b").read_text()
    assert federation.processes["b"].poll() is None


def test_a_silo_of_another_task_is_refused_with_the_reason_on_both_sides(
    federation: LocalFederation, tmp_path: Path
) -> None:
    (tmp_path / "moody.py").write_text(PLUGIN)
    for index, name in enumerate(("a", "b")):
        federation.start_silo(spec(name, index))
    federation.start_silo(SiloSpec("odd", "moody:Moody"), environment={"PYTHONPATH": str(tmp_path)})
    federation.wait_for_silos(3)
    folder, last = federation.run(**{**KEYS, "min-silos": 2})
    assert last.status == "completed"
    record = record_of(folder)
    assert set(record["silos"]) == {"a", "b"}
    assert any("serves task 'moody:Moody'" in why for why in record["refused"].values())
    until(lambda: "the run is of task" in federation.log_of("odd").read_text(), "the silo's log")


def test_the_second_silo_of_a_name_is_refused(federation: LocalFederation) -> None:
    federation.start_silo(spec("a", 0))
    federation.start_silo(spec("b", 1))
    federation.wait_for_silos(2)
    first = federation.programs["a"]
    # It replaces only the federation's note of the process; a's folder would be refused, too.
    federation.start_silo(spec("a", 2), home=federation.folder / "silos" / "elsewhere")
    federation.programs["a-first"] = first
    federation.wait_for_silos(3)
    folder, last = federation.run(**{**KEYS, "min-silos": 2})
    assert last.status == "completed"
    record = record_of(folder)
    assert set(record["silos"]) == {"a", "b"}
    assert "another silo of that name" in record["refused"]["a"]


def test_silos_come_back_by_themselves_after_the_superlink_was_restarted(
    federation: LocalFederation,
) -> None:
    for index, name in enumerate(("a", "b", "c")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(3)
    federation.superlink.stop()
    time.sleep(1)
    federation.superlink.start()
    federation.wait_for_silos(3)
    assert federation.run(**KEYS)[1].status == "completed"


def test_without_silos_a_run_says_what_it_waits_for_and_gives_up(
    federation: LocalFederation, tmp_path: Path
) -> None:
    federation.superlink.wait()
    done = coterie(
        "run", "fedavg", "--set", "wait-for-silos=2",
        "--superlink", federation.superlink.control_address, "--runs-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 3
    assert "gave up after 2 s: waiting for silos: 0 of at least 2 here" in done.stdout


def test_an_unreachable_superlink_is_named_and_the_status_is_not_zero() -> None:
    port = Ports.free().control
    done = coterie("run", "fedavg", "--superlink", f"127.0.0.1:{port}")
    assert done.returncode != 0
    assert f"no SuperLink answers at 127.0.0.1:{port}" in done.stderr


def test_a_silo_without_a_superlink_says_so_and_gives_up_after_its_patience() -> None:
    port = Ports.free().fleet
    done = run_silo("--name", "a", "--superlink", f"127.0.0.1:{port}", "--patience", "1")
    assert done.returncode == 5
    assert f"the SuperLink at 127.0.0.1:{port} cannot be reached" in done.stderr
    assert "gave up" in done.stderr


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = coterie("superlink", "--fleet-port", str(port))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 (fleet API) cannot be used" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "nonsense"], "no task is called 'nonsense'"),
        (["--task", "no_such_module:Task"], "cannot be imported"),
        (["--set", "train=0"], "train must be at least 1"),
        (["--set", "colour=red"], "has no option 'colour'"),
        (["--set", "novalue"], "--set takes KEY=VALUE"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or cuda:N"),
        (["--alpha", "-1"], "alpha must be finite and at least 0"),
    ],
)
def test_a_silo_that_cannot_train_is_refused_before_it_joins(
    arguments: list[str], said: str
) -> None:
    done = run_silo("--name", "a", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "connected" not in done.stderr


def test_an_empty_data_folder_is_refused_before_the_silo_joins(tmp_path: Path) -> None:
    done = run_silo("--name", "a", "--task", "mnist", "--set", f"data={tmp_path}")
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "strategy"),
        (["hcct", "--set", "alhpa=3"], "unknown key 'alhpa'"),
        (["hcct", "--alpha", "-1"], "alpha"),
        (["hcct", "--rounds", "0"], "rounds"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_key_named(
    arguments: list[str], said: str
) -> None:
    done = coterie("run", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_help_of_every_command_shows_an_example() -> None:
    for command in (
        *("demo", "init", "superlink", "enrol", "roster", "remove", "run", "status", "runs"),
        *("simulate", "executor", "stop"),
        *("silo", "silo init", "silo join", "silo check", "silo start"),
    ):
        done = coterie(*command.split(), "--help")
        assert done.returncode == 0
        assert "xample" in done.stdout and "coterie" in done.stdout
