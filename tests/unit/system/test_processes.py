"""Programs that are started, watched and ended, and what signals do meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coterie.system import processes
from coterie.system.processes import (
    Program,
    ProgramError,
    end_with_parent,
    insistent_interrupts,
    noting_signals,
    stop_all,
)
from tests.kit import until


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """Python with a line of code that a test gives it."""
    made = Program("probe", [], log=tmp_path / "logs" / "probe.log", environment=os.environ)
    yield made
    stop_all([made], deadline_s=0.1)


def running(program: Program, code: str) -> Program:
    program._command = [sys.executable, "-c", code]
    program.start()
    return program


def never() -> bool:
    return False


def test_a_program_that_ends_instead_of_starting_is_told_with_the_end_of_its_log(
    program: Program,
) -> None:
    running(program, "print(*range(9), sep='\\n'); raise SystemExit(3)")
    with pytest.raises(ProgramError, match=r"^the probe did not start\. .* ends:\n4\n5\n6\n7\n8$"):
        program.wait_until(never, deadline_s=30)
    assert program.ended and program.process.returncode == 3


def test_a_program_that_is_not_ready_in_time_is_told_with_the_deadline(program: Program) -> None:
    running(program, "import time; time.sleep(60)")
    with pytest.raises(ProgramError, match=r"^the probe did not start within 0 s\."):
        program.wait_until(never, deadline_s=0.2)
    program.wait_until(never, deadline_s=30, stopped=lambda: True)
    assert not program.ended


def test_a_program_that_keeps_ending_is_restarted_after_ever_longer_pauses(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    clock = 100.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        waited[-1] += seconds

    passing = SimpleNamespace(monotonic=lambda: clock, sleep=sleep)
    monkeypatch.setattr(processes, "time", passing)
    said: list[str] = []
    running(program, "raise SystemExit(3)").process.wait(30)
    for _ in range(7):
        waited.append(0.0)
        assert program.restart(said.append, never)
        program.process.wait(30)
    assert [round(seconds) for seconds in waited] == [2, 4, 8, 16, 30, 30, 30]
    assert "The probe ended (status 3); restarting it." in said[0]
    clock += processes.SHORTEST_LIFE_S + 1  # it lived long enough
    waited.append(0.0)
    program.restart(said.append, never)
    assert round(waited[-1]) == 1
    program.process.wait(30)
    before = program.process
    assert not program.restart(said.append, lambda: True) and program.process is before


CHILD = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', %r]); p.wait()"


def test_what_a_program_leaves_behind_ends_with_it(program: Program) -> None:
    running(program, CHILD % "import time; print('up', flush=True); time.sleep(60)")
    program.wait_until(lambda: "up" in program.last_lines(), deadline_s=30)
    (child,) = processes.family([program.process.pid]) - {program.process.pid}
    program.stop(deadline_s=5, rest=signal.SIGKILL)
    assert program.ended
    _until_gone(child)


def _until_gone(pid: int) -> None:
    """Where nobody waits for orphans it stays as a zombie, which holds nothing."""

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(gone, "the orphan to be gone")


@pytest.mark.parametrize(("most", "got"), [(5000, 2000), (500, 500)])
def test_as_many_files_may_be_open_as_the_system_allows(most: int, got: int) -> None:
    code = (
        "import resource; from coterie.system.processes import raise_open_files as up\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {most}))\n"
        "print(up(2000), resource.getrlimit(resource.RLIMIT_NOFILE)[0], up(100))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(got)] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_and_end_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with noting_signals() as stopped:
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
    _until_gone(int(done.stdout))


def test_an_interrupt_that_is_dropped_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a finaliser, as this test drops the first."""
    monkeypatch.setattr("coterie.system.processes.AGAIN_S", 0.1)

    own = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    heard = False
    try:
        with pytest.raises(KeyboardInterrupt), insistent_interrupts():
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            heard = True
            time.sleep(60)
        assert heard
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    finally:
        signal.signal(signal.SIGINT, own)


def test_a_parent_that_ends_in_the_middle_of_a_look_is_missed_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([[2, 1], psutil.NoSuchProcess(2), [2, 1]])
    ended = threading.Event()

    def parents(last: int) -> list[int]:
        found = next(looks, [])
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(processes, "_parents", parents)
    monkeypatch.setattr(processes, "PARENT_PAUSE_S", 0.0)
    monkeypatch.setattr(processes, "PARENT_GRACE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["run", processes.PARENT_OPTION, "2"])
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    end_with_parent(3)
    assert ended.wait(60) and next(looks, None) is None
