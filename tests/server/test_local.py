"""What is left of a federation of processes when a person ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from server.local import LocalFederation

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
DEAF = [sys.executable, "-c", IGNORES + "time.sleep(60)"]


def sleeper() -> subprocess.Popen[bytes]:
    """A process that does not end when it is asked to, in a session of its own."""
    process = subprocess.Popen(DEAF, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_second_interrupt_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.local.STOP_DEADLINE_S", 1.0)
    federation = LocalFederation(tmp_path)
    silo = federation.processes["a"] = sleeper()
    federation.superlink._process = superlink = sleeper()
    monkeypatch.setattr("server.superlink.STOP_DEADLINE_S", 0.1)
    again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    before = signal.getsignal(signal.SIGINT)
    federation.__exit__()
    again.join()
    assert silo.poll() is not None and superlink.poll() is not None
    assert signal.getsignal(signal.SIGINT) == before


def test_the_superlink_is_stopped_whatever_becomes_of_the_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFederation, "_reap", staticmethod(interrupted))
    monkeypatch.setattr("server.superlink.STOP_DEADLINE_S", 0.1)
    federation = LocalFederation(tmp_path)
    federation.processes["a"] = sleeper()
    federation.superlink._process = superlink = sleeper()
    with pytest.raises(KeyboardInterrupt):
        federation.__exit__()
    assert superlink.poll() is not None
