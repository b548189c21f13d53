"""The executor of ServerApps: Flower's, whose ServerApps begin with all imports done.

Flower's looks for runs once a second, and starts a Python for each, which needs two seconds for
imports. Here a child of the executor, made before that has threads, becomes a process for each run
by a fork.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from coterie.engine.fast.superlink.commands import flower_command, replace_in
from coterie.system.ports import listens

LOOK_S = 0.25  # a look is a call: ten a second cost an idle SuperLink a tenth of a core
START_DEADLINE_S = 60.0
SERVERAPP, ADDRESS = "flwr-serverapp", "--appio-api-address"


def main(prepare: Callable[[], None]) -> None:
    """Run ``flower-superexec`` with this process's arguments.

    ``prepare`` imports all that a ServerApp needs.
    """
    gc.disable()  # imports leave little garbage, and looking for it takes a sixth of their time
    run = flower_command("flower-superexec")
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    serverapp = flower_command(SERVERAPP)
    let_exits_nest()
    prepare()
    gc.freeze()  # what was imported stays in memory that all these processes share
    gc.enable()
    start = forking(serverapp)
    wait_for_superlink(sys.argv[sys.argv.index(ADDRESS) + 1])
    # Its loop has the pause between two looks in itself.
    replace_in(run_superexec, time=SimpleNamespace(sleep=lambda _: time.sleep(LOOK_S)))
    # It starts each program by itself.
    replace_in(
        subprocess_executor, subprocess=SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=start)
    )
    run()


def let_exits_nest() -> None:
    """Let a ServerApp end that is interrupted while it ends.

    Flower refuses the last call of a run that is stopped meanwhile. The ServerApp then interrupts
    itself and calls its exit handlers again, within the first call, which holds their lock.
    """
    from flwr.supercore.exit import exit_handler

    replace_in(exit_handler, _lock_handlers=threading.RLock())


def wait_for_superlink(address: str) -> None:
    """Wait until it listens, at most a minute: after that Flower reports the problem."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not listens(address) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def forking(serverapp: Callable[[], None]) -> Callable[..., None]:
    """Return a function that starts programs as ``subprocess.Popen`` does, without their output.

    ServerApps are forks of a child that is made here and ends with this process; so call this
    before anything makes a thread.
    """
    asked, ask = os.pipe()
    if os.fork() == 0:
        os.close(ask)
        _serve(asked, serverapp)
        sys.exit()
    os.close(asked)

    def start(arguments: Sequence[str], **how: Any) -> None:
        try:
            if arguments[0] == SERVERAPP:
                os.write(ask, json.dumps(list(arguments)).encode() + b"\n")
                return
        except BrokenPipeError:  # somebody ended the child
            pass
        subprocess.Popen(arguments, **how)

    return start


def _serve(asked: int, serverapp: Callable[[], None]) -> None:
    """Start a process for each line of arguments; in that process return when its run is over."""
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    with open(asked, encoding="ascii") as lines:
        for line in lines:
            if os.fork() == 0:
                lines.close()  # only the parent reads: its end must break the executor's pipe
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.argv = json.loads(line)
                serverapp()
                return
