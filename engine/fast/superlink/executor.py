"""The executor of ServerApps: Flower's, with a process ready for the next run.

Flower's looks for runs once a second, and starts a Python for each, which needs more than a second
for imports and waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from coterie.engine.fast.superlink.commands import flower_command, replace_in
from coterie.system.ports import listens

LOOK_S = 0.1
START_DEADLINE_S = 60.0
SERVERAPP, NEXT, ADDRESS = "flwr-serverapp", "--next", "--appio-api-address"


def main(module: str, prepare: Callable[[], None]) -> None:
    """Run ``flower-superexec`` with its arguments; with ``--next``, be a process that waits.

    Args:
        module: the caller's; ``python -m module --next`` starts a process that waits.
        prepare: imports in that process all that a ServerApp needs.
    """
    if sys.argv[1:] == [NEXT]:
        wait_for_a_run(prepare)
        return
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    wait_for_superlink(sys.argv[sys.argv.index(ADDRESS) + 1])
    # Its loop has the pause between two looks in itself.
    replace_in(run_superexec, time=SimpleNamespace(sleep=lambda _: time.sleep(LOOK_S)))
    # It starts each by itself, and has no place for a process that is there already.
    own = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=_Starter(module).start)
    replace_in(subprocess_executor, subprocess=own)
    flower_command("flower-superexec")()


def wait_for_superlink(address: str) -> None:
    """Wait until it listens, at most a minute: after that Flower reports the problem."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not listens(address) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


class _Starter:
    """A starter of programs for the executor; ServerApps use the waiting process."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._running: list[subprocess.Popen[str]] = []
        self._next = self._another()

    def start(self, arguments: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a program, as ``subprocess.Popen`` does."""
        if arguments[0] != SERVERAPP:
            return subprocess.Popen(arguments, **how)
        process, self._next = self._next, self._another()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(list(arguments)) + "\n")
            process.stdin.close()
        except BrokenPipeError:  # somebody ended it
            return subprocess.Popen(arguments, **how)
        self._running = [one for one in (*self._running, process) if one.poll() is None]
        return process

    def _another(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module, NEXT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def wait_for_a_run(prepare: Callable[[], None]) -> None:
    """Prepare, and run a ServerApp when its arguments arrive on stdin."""
    be_serverapp = flower_command(SERVERAPP)
    prepare()
    line = sys.stdin.readline()
    if not line:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    sys.argv = json.loads(line)
    be_serverapp()
