"""What is left of a federation of processes when a person ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from coterie.server.machine.local import LocalFederation
from coterie.server.machine.superlink import SuperLink
from coterie.server.site.coordinator import _stopping
from coterie.system.processes import insistent_interrupts

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
DEAF = [sys.executable, "-c", IGNORES + "time.sleep(60)"]


def sleeper() -> subprocess.Popen[bytes]:
    """A process that does not end when it is asked to, in a session of its own."""
    process = subprocess.Popen(DEAF, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_interrupt_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.machine.local.STOP_DEADLINE_S", 1.0)
    federation = LocalFederation(tmp_path)
    silo = federation.processes["a"] = sleeper()
    federation.superlink._process = superlink = sleeper()
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    again = threading.Timer(0.3, os.kill, (os.getpid(), number))
    again.start()
    before = signal.getsignal(number)
    federation.__exit__()
    again.join()
    assert silo.poll() is not None and superlink.poll() is not None
    assert signal.getsignal(number) == before


def test_the_superlink_is_stopped_whatever_becomes_of_the_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFederation, "_reap", staticmethod(interrupted))
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    federation = LocalFederation(tmp_path)
    federation.processes["a"] = sleeper()
    federation.superlink._process = superlink = sleeper()
    with pytest.raises(KeyboardInterrupt):
        federation.__exit__()
    assert superlink.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_process_ends_the_federation(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(superlink: SuperLink) -> None:
        superlink._process = sleeper()

    monkeypatch.setattr(SuperLink, "start", start)
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, LocalFederation(tmp_path) as federation:
        superlink = federation.superlink._process
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number
    assert superlink is not None and superlink.poll() is not None
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SuperLink, "start", lambda superlink: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LocalFederation(tmp_path):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_coordinator_ends_its_superlink_in_order(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with _stopping() as stopped:
        assert not stopped()
        os.kill(os.getpid(), number)
        assert stopped()
    assert signal.getsignal(number) == before


KILLED = """
import os, signal, subprocess, sys
from coterie.system.processes import tied
child = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
process = subprocess.Popen(tied(child), stdout=subprocess.PIPE, start_new_session=True)
process.stdout.readline()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_who_is_killed_takes_its_children_along() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, timeout=30)
    assert done.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 5
    # Where nobody waits for orphans it stays as a zombie, which holds nothing.
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_interrupt_that_is_dropped_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a finaliser, as this test drops the first."""
    monkeypatch.setattr("coterie.system.processes.AGAIN_S", 0.1)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    heard = False
    with pytest.raises(KeyboardInterrupt), insistent_interrupts():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        heard = True
        time.sleep(5)
    assert heard
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
