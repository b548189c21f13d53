"""Parts of a federation are killed, cut off or run full; nothing that was committed is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.record import read_whole
from coterie.system.files import held_by
from tests.e2e.conftest import coterie, record_of, spec, until
from tests.e2e.crashes import (
    KEYS,
    assert_same_outcome,
    committed,
    kill_server_app,
    kill_superlink,
    restart_superlink,
    resume,
    start_silos,
    until_event,
)
from tests.e2e.proxy import Proxy

BIG = '''
import torch
from coterie.tasks.images.digits import Digits

class Big(Digits):
    """The digits with a model of 15 MB, so that writing a checkpoint takes a while."""
    def model(self):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 60000, bias=False),
            torch.nn.AdaptiveAvgPool1d(10),
        )
'''


def test_a_killed_server_app_and_a_killed_superlink_cost_at_most_a_round(
    federation: LocalFederation,
) -> None:
    start_silos(federation)
    undisturbed, _ = federation.run(**KEYS, rounds=6)

    _, folder = federation.submit(**KEYS, rounds=6)
    committed(folder, 2)
    kill_server_app(folder)
    runs = coterie("runs", "--runs-dir", str(federation.runs_dir)).stdout
    assert "interrupted" in runs
    said = resume(federation, folder)
    assert "round 6/6" in said
    assert_same_outcome(folder, undisturbed)
    assert record_of(folder)["resumed"][0]["after-round"] >= 2

    _run_id, folder = federation.submit(**KEYS, rounds=6)
    committed(folder, 3)
    kill_superlink(federation)
    restart_superlink(federation, folder)
    resume(federation, folder)
    assert_same_outcome(folder, undisturbed)
    assert record_of(folder)["resumed"][0]["after-round"] >= 3


def test_a_run_that_goes_on_or_is_complete_is_not_resumed(federation: LocalFederation) -> None:
    start_silos(federation)
    run_id, folder = federation.submit(**KEYS, rounds=4, local_epochs=60)
    committed(folder, 1)
    again = [
        "run", "--resume", folder.name, "--runs-dir", str(federation.runs_dir),
        "--superlink", federation.superlink.control_address,
    ]  # fmt: skip
    done = coterie(*again)
    assert done.returncode == 2 and "still running" in done.stderr
    assert federation.follow(run_id, folder, lambda event: None).status == "completed"
    done = coterie(*again)
    assert done.returncode == 2 and "is complete" in done.stderr
    done = coterie("run", "--resume", "nothing-7", *again[3:])
    assert done.returncode == 2 and "0 runs in" in done.stderr
    done = coterie("run", "hcct", "--resume", folder.name)
    assert done.returncode == 2 and "give a strategy, or --resume" in done.stderr


def test_a_server_app_killed_while_it_writes_a_checkpoint_loses_nothing(
    federation: LocalFederation, tmp_path: Path
) -> None:
    (tmp_path / "big.py").write_text(BIG)
    for index, name in enumerate(("a", "b")):
        options = {"train": 10, "test": 10, "skip": 20 * index}
        own = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        federation.start_silo(SiloSpec(name, "big:Big", options), environment=own)
    federation.wait_for_silos(2)
    keys = {
        **KEYS,
        "personal": "",
        "task": "big:Big",
        "min-silos": 2,
        "local-epochs": 1,
        "lr": 0.001,
    }
    undisturbed, last = federation.run(**keys, rounds=4)
    assert last.status == "completed", last

    _, folder = federation.submit(**keys, rounds=4)
    committed(folder, 1)
    written = folder / "checkpoints"
    deadline = time.monotonic() + 60
    while not (unfinished := list(written.glob("*.tmp"))):
        assert time.monotonic() < deadline, "waited for a checkpoint that is being written"
    pid = held_by(folder)
    assert pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: held_by(folder) is None, "the ServerApp's end")
    assert unfinished[0].exists(), "it was killed while it wrote"
    resume(federation, folder)
    assert record_of(folder)["resumed"][0]["after-round"] >= 1
    assert_same_outcome(folder, undisturbed)
    assert not list(written.glob("*.tmp"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_at_the_coordinator_ends_the_run_and_room_lets_it_go_on(
    federation: LocalFederation, small_disk: Path
) -> None:
    start_silos(federation)
    keys = {**KEYS, "rounds": 6, "local_epochs": 60}  # long enough to fill the disk in between
    undisturbed, _ = federation.run(**keys)
    federation.runs_dir = small_disk
    run_id, folder = federation.submit(**keys)
    committed(folder, 2)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    until(lambda: held_by(folder) is None, "the end of the run")
    with control(federation.superlink.control_address) as calls:
        said = list(calls.log_lines(run_id, deadline_s=30.0))
    assert any("the disk is full" in line for line in said), said[-5:]
    assert len(list((folder / "checkpoints").glob("round-*.safetensors"))) >= 2
    ballast.unlink()
    resume(federation, folder)
    assert record_of(folder)["resumed"][0]["after-round"] >= 2
    assert_same_outcome(folder, undisturbed)


@pytest.mark.timeout(300)
def test_a_silo_cut_off_for_90_s_is_left_out_and_comes_back(federation: LocalFederation) -> None:
    federation.superlink.wait()
    proxy = Proxy(federation.superlink.fleet_address)
    try:
        for index, name in enumerate(("a", "b")):
            federation.start_silo(spec(name, index))
        whole = federation.superlink
        federation.superlink = _behind(proxy)
        federation.start_silo(spec("c", 2))
        federation.superlink = whole
        federation.wait_for_silos(3)
        _run_id, folder = federation.submit(
            **KEYS, rounds=400, local_epochs=100, round_timeout=20.0
        )
        committed(folder, 2)
        proxy.cut()
        cut = time.monotonic()
        until_event(folder, lambda e: e.report is not None and "c" in e.report.left_out)
        time.sleep(max(0.0, 90 - (time.monotonic() - cut)))
        proxy.mend()
        before = read_whole(folder).rounds[-1].round
        back = until_event(
            folder,
            lambda e: e.report is not None and e.number > before and "c" in e.report.silos,
        )
        assert back.report is not None and set(back.report.silos) == {"a", "b", "c"}
        assert federation.processes["c"].poll() is None
        for entry in record_of(folder)["rounds"]:
            assert {"a", "b"} <= set(entry["silos"]), "the others were not disturbed"
    finally:
        proxy.close()


def _behind(proxy: Proxy) -> object:
    class Behind:
        fleet_address = proxy.address

    return Behind()
