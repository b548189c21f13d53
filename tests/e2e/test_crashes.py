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
from coterie.server.site.database import damage_of
from coterie.system.files import held_by
from tests.contract.hostile.proxy import Proxy
from tests.e2e.crashes import KEYS, assert_same_outcome, committed, resume, until_event
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import ROOT, finished, hashes_of, record_of, spec, until
from tests.e2e.trio import Trio

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


def test_a_run_that_goes_on_or_is_complete_is_not_resumed(trio: Trio) -> None:
    trio.gate.close()
    run_id, folder = trio.submit(**{**KEYS, **ONE_BATCH})
    trio.gate.hold(3, rounds=1)
    again = ("run", "--resume", folder.name)
    done = trio.operator(*again)
    assert done.returncode == 2 and "still running" in done.stderr
    trio.gate.open()
    assert trio.follow(run_id, folder, lambda event: None).status == "completed"
    done = trio.operator(*again)
    assert done.returncode == 2 and "is complete" in done.stderr
    done = trio.operator("run", "--resume", "nothing-7")
    assert done.returncode == 2 and "there is no run" in done.stderr


@pytest.mark.nightly
def test_a_server_app_killed_while_it_writes_a_checkpoint_loses_nothing(
    trio: Trio, tmp_path: Path
) -> None:
    (tmp_path / "big.py").write_text(BIG)
    own = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for index, name in enumerate(("big1", "big2")):
        options = {"train": 10, "test": 10, "skip": 20 * index}
        trio.start_silo(SiloSpec(name, "big:Big", options), environment=own)
    trio.wait_for_silos(5)
    two = {"personal": "", "task": "big:Big", "min-silos": 2}
    keys = {**KEYS, **two, "local-epochs": 1, "lr": 0.001}
    undisturbed, last = trio.run(**keys)
    assert last.status == "completed", last

    _, folder = trio.submit(**keys)
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
    resume(trio, folder)
    assert record_of(folder)["resumed"][0]["after-round"] >= 1
    assert_same_outcome(folder, undisturbed)
    assert not list(written.glob("*.tmp"))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A separate file system of 2 MB, or of as many as the test says."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = f"size={getattr(request, 'param', 2)}m"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room there; returns the file that takes it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    return ballast


@pytest.mark.nightly
def test_a_full_disk_at_the_coordinator_ends_the_run_and_room_lets_it_go_on(
    trio: Trio, small_disk: Path
) -> None:
    keys = {**KEYS, **ONE_BATCH, "rounds": 6}
    undisturbed, _ = trio.run(**keys)
    trio.runs_dir = small_disk
    trio.gate.close()
    run_id, folder = trio.submit(**keys)
    trio.gate.hold(3, rounds=2)
    ballast = fill(small_disk)
    trio.gate.open()
    until(lambda: held_by(folder) is None, "the end of the run")
    with control(trio.superlink.control_address) as calls:
        said = list(calls.log_lines(run_id, deadline_s=30.0))
    assert any("the disk is full" in line for line in said), said[-5:]
    assert len(list((folder / "checkpoints").glob("round-*.safetensors"))) >= 2
    ballast.unlink()
    resume(trio, folder)
    assert record_of(folder)["resumed"][0]["after-round"] >= 2
    assert_same_outcome(folder, undisturbed)


class OnASmallDisk(Organisations):
    """The coordinator's folder is on a separate disk, with the database and the checkpoints."""

    def __init__(self, disk: Path, folder: Path) -> None:
        self.elsewhere = folder
        super().__init__(disk)

    def home_of(self, name: str) -> Path:
        return self.elsewhere / name

    def log_of(self, name: str) -> Path:
        return self.elsewhere / "logs" / f"{name}.log"


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("small_disk", [12], indirect=True)
def test_a_full_database_costs_no_committed_round_and_the_coordinator_goes_on(
    small_disk: Path, tmp_path: Path
) -> None:
    keys = ("fedavg", "--set", "rounds=5", "--set", "min-silos=2", "--set", "round-timeout=90")
    keys += (*SETTINGS, "--set", f"task={TASK}")
    with OnASmallDisk(small_disk, tmp_path / "elsewhere") as made:
        made.start_superlink()
        made.add("a", 0)
        made.add("b", 1)
        made.wait_for(2)
        expected = finished(made.submit(*keys))
        made.gate.close()
        folder = made.submit(*keys)
        made.gate.hold(2, rounds=1)
        ballast = fill(small_disk)
        made.gate.open()  # the silos' replies find no room in the database
        time.sleep(8)
        before = len(list((folder / "checkpoints").glob("round-*.safetensors")))
        ballast.unlink()
        until(lambda: held_by(folder) is None, "the end of the run", deadline_s=150)
        if record_of(folder)["status"] != "completed":
            made.command("run", "--resume", folder.name)
            assert record_of(folder)["resumed"][0]["after-round"] >= before
        assert hashes_of(folder) == expected
        assert damage_of(made.federation.database) == ""
        assert finished(made.submit(*keys)) == expected, "and another run is as any"
        assert made.processes["superlink"].poll() is None


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_silo_cut_off_for_90_s_is_left_out_and_comes_back(federation: LocalFederation) -> None:
    federation.superlink.wait()
    own = {"PYTHONPATH": str(ROOT)}
    proxy = Proxy(federation.superlink.fleet_address)
    try:
        for index, name in enumerate(("a", "b")):
            federation.start_silo(spec(name, index), environment=own)
        whole = federation.superlink
        federation.superlink = _behind(proxy)
        federation.start_silo(spec("c", 2), environment=own)
        federation.superlink = whole
        federation.wait_for_silos(3)
        _run_id, folder = federation.submit(
            **{**KEYS, "rounds": 400}, local_epochs=100, round_timeout=20.0
        )
        committed(folder, 2)
        proxy.cut()
        cut = time.monotonic()
        until_event(folder, lambda e: e.report is not None and "c" in e.report.left_out)
        time.sleep(max(0.0, 90 - (time.monotonic() - cut)))
        proxy.mend()
        before = read_whole(folder).rounds[-1].round
        back = until_event(
            folder, lambda e: e.report is not None and e.number > before and "c" in e.report.silos
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
