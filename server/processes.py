"""Processes of this machine: who descends from whom, and how much memory they take.

Both are read from Linux's /proc; elsewhere there are no descendants and no memory is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["end_with_parent", "family", "proportional_memory", "stop_with_family"]

PARENT_OPTION = "--parent-pid"
PARENT_PAUSE_S, PARENT_GRACE_S = 0.5, 3.0


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
