"""Processes of this machine: who descends from whom, what ends with whom, and memory.

Linux only: descendants and memory are read from its /proc, and its kernel ends a child with its
parent. Elsewhere there are no descendants, no memory is known, and a child may outlive its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PARENT_OPTION = "--parent-pid"
PARENT_PAUSE_S, PARENT_GRACE_S = 0.5, 3.0


AGAIN_S = 2.0
"""After a Ctrl-C that nobody has heard it is raised again."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends a process beside Ctrl-C: a person or a service manager, a terminal that is closed."""

TIE = """
import os, signal, sys
parent, *command = sys.argv[1:]
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() == int(parent):  # it may have ended before the line above
    os.execv(command[0], command)
"""


def tied(command: Sequence[str]) -> list[str]:
    """The command line of a child that is killed when this process ends, however it ends.

    The child asks for it itself, before it becomes the command: a function between fork and exec
    is not safe in a process that has threads. Linux ties a child to the thread that starts it, so
    only a child of the main thread is tied.
    """
    if sys.platform != "linux" or not _in_main_thread():
        return list(command)
    return [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), *command]


@contextmanager
def closing_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise ``SystemExit``, so that what is open is closed in order.

    What is ignored, as SIGHUP under nohup, stays so. The handlers before are restored.
    """
    taken = [s for s in ENDING if _in_main_thread() and signal.getsignal(s) != signal.SIG_IGN]

    def close(signum: int, frame: FrameType | None) -> None:
        for number in taken:  # a second one would break the closing off
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    before = {number: signal.signal(number, close) for number in taken}
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def insistent_interrupts() -> Iterator[None]:
    """Have Ctrl-C raise ``KeyboardInterrupt`` until it is heard, that is, until this is left.

    What is raised in a finaliser or in a callback of C code is dropped by Python, and a person
    would have to press it again.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    finally:
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _restore(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no signal break off what is done here, which has deadlines of its own."""
    numbers = (signal.SIGINT, *ENDING) if _in_main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        _restore(before)


def _in_main_thread() -> bool:
    """Others are told of no signal."""
    return threading.current_thread() is threading.main_thread()


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end_with_parent(exit_code: int) -> None:
    """End this ServerApp's process when the executor that started it, or its starter, is gone.

    Flower watches the executor too, but its orderly exit waits for calls that are being repeated
    until the SuperLink answers, which it never will. What is committed is safe at any moment.
    """
    if PARENT_OPTION not in sys.argv:
        return
    before = _forebears()

    def watch() -> None:
        while _forebears() == before:
            time.sleep(PARENT_PAUSE_S)
        time.sleep(PARENT_GRACE_S)
        os._exit(exit_code)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _forebears() -> tuple[int, int | None]:
    parent = os.getppid()
    return parent, _parent_of(parent)


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it ended meanwhile, or there is no /proc


def family(pids: Sequence[int]) -> set[int]:
    """These processes and all that descend from them."""
    if not Path("/proc").is_dir():
        return set(pids)
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent_of(int(entry.name))) is not None:
            parents[int(entry.name)] = parent
    found = set(pids)
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def stop_with_family(
    process: subprocess.Popen[bytes], *, deadline_s: float, rest: signal.Signals
) -> None:
    """End a process, in order if it does so in time; what it leaves behind is sent ``rest``."""
    others = family([process.pid]) - {process.pid}
    process.terminate()
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(deadline_s)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, rest)


def proportional_memory(pid: int) -> int:
    """Bytes of a process's memory, pages shared by n processes counted as 1/n; 0 if it ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it ended meanwhile
    return 0
