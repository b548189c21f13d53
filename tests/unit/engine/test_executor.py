"""ServerApps are forks of one child, which ends with the executor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from flwr.supercore.exit import exit_handler

from coterie.engine.fast.superlink.executor import let_exits_nest
from tests.kit import until

EXECUTOR = """
import json, os, signal, sys
from pathlib import Path
from coterie.engine.fast.superlink import executor

def serverapp():
    made = Path(sys.argv[1] + ".part")
    made.write_text(json.dumps([os.getpid(), os.getppid()]))
    made.rename(sys.argv[1])
    if made.stem == "goes-on":
        signal.pause()

executor.SERVERAPP = "touch"  # another program would do if the child is gone
start = executor.forking(serverapp)
for line in sys.stdin:
    start(["touch", line.strip()])
"""


def test_server_apps_are_forks_of_one_child_that_ends_with_the_executor(tmp_path: Path) -> None:
    executor = subprocess.Popen([sys.executable, "-c", EXECUTOR], stdin=subprocess.PIPE, text=True)
    try:
        (first, child), (second, same) = (
            json.loads(started(executor, tmp_path / name)) for name in ("1", "2")
        )
        assert first != second and child == same != executor.pid
        until(lambda: not psutil.pid_exists(first), "the kernel forgets a run's process")
    finally:
        executor.kill()
        executor.wait(20)
    until(lambda: not psutil.pid_exists(child), "the child ends")


def test_without_the_child_a_program_is_started_also_while_a_run_goes_on(tmp_path: Path) -> None:
    executor = subprocess.Popen([sys.executable, "-c", EXECUTOR], stdin=subprocess.PIPE, text=True)
    run, child = json.loads(started(executor, tmp_path / "goes-on"))
    os.kill(child, signal.SIGKILL)
    try:
        until(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "the child ends")
        assert started(executor, tmp_path / "2") == ""
    finally:
        os.kill(run, signal.SIGKILL)
        executor.communicate(timeout=20)


def test_an_exit_that_is_interrupted_by_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [])
    monkeypatch.setattr(exit_handler, "_lock_handlers", exit_handler._lock_handlers)
    let_exits_nest()
    calls = []

    def interrupted() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            exit_handler.trigger_exit_handlers()

    exit_handler.add_exit_handler(interrupted)
    ending = threading.Thread(target=exit_handler.trigger_exit_handlers, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive() and calls == [0, 1]


def started(executor: subprocess.Popen[str], file: Path) -> str:
    """Have it start a ServerApp; return what that wrote."""
    print(file, file=executor.stdin, flush=True)
    until(file.exists, "it starts")
    return file.read_text()
