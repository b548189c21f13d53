"""What the commands refuse, and with which words, before anything starts or joins."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from coterie.server.machine.superlink import Ports
from tests.commands import coterie


def test_an_unreachable_superlink_is_named_and_the_status_is_not_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coterie.server.machine.link.CONNECT_DEADLINE_S", 0.5)
    port = Ports.free().control
    done = coterie("run", "fedavg", "--superlink", f"127.0.0.1:{port}")
    assert done.returncode != 0
    assert f"no SuperLink answers at 127.0.0.1:{port}" in done.stderr


def test_a_silo_without_a_superlink_says_so_and_gives_up_after_its_patience() -> None:
    port = Ports.free().fleet
    done = coterie(
        "silo", "serve", "--name", "a", "--superlink", f"127.0.0.1:{port}", "--retry-for", "1"
    )
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
    done = coterie("silo", "serve", "--name", "a", *arguments, "--retry-for", "0")
    assert done.returncode == 2
    assert said in done.stderr
    assert "connected" not in done.stderr


def test_an_empty_data_folder_is_refused_before_the_silo_joins(tmp_path: Path) -> None:
    folder = ["--set", f"data={tmp_path}", "--retry-for", "0"]
    done = coterie("silo", "serve", "--name", "a", "--task", "mnist", *folder)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "strategy"),
        (["hcct", "--set", "alhpa=3"], "unknown key 'alhpa'"),
        (["hcct", "--alpha", "-1"], "alpha"),
        (["hcct", "--rounds", "0"], "rounds"),
        (["fedcollab", "--size-weight", "0"], "wrong: c"),
        (["fedcollab", "--size-weight", "-1"], "wrong: c"),
        (["fedcollab", "--size-weight", "much"], "wrong: c"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_key_named(
    arguments: list[str], said: str
) -> None:
    done = coterie("run", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_run_that_is_resumed_keeps_its_strategy() -> None:
    done = coterie("run", "hcct", "--resume", "hcct-7")
    assert done.returncode == 2 and "the strategy and the keys that it had" in done.stderr


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
    for command in (["simulate", str(path)], ["silo", "serve", "--simulation", str(path)]):
        done = coterie(*command)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
        assert "connected" not in done.stderr


def test_a_missing_data_folder_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('task = "mnist"\ndata = "none"\nsilos = 2\n[split]\nkind = "iid"\n')
    for command in (["simulate", str(path)], ["silo", "serve", "--simulation", str(path)]):
        done = coterie(*command)
        assert done.returncode == 2
        assert str(tmp_path / "none") in done.stderr and "does not exist" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--partitions", "0/4"], "belongs to a split"),
        (["--threads", "2"], "give --name, --partitions or --simulation"),
    ],
)
def test_partitions_that_are_none_are_refused(arguments: list[str], said: str) -> None:
    done = coterie("silo", "serve", *arguments)
    assert done.returncode == 2 and said in " ".join(done.stderr.split())
