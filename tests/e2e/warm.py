"""Silos start as forks of one process that has imported torch and Flower: 0.2 s, not 4 s each.

Each is a separate process as any other: it has its own session, environment, signals, log and exit
status, and runs the module or the code of its command line. ``test_network.py`` and the nightly
tests start silos without this.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from coterie.system.processes import Program, tied

ROOT = Path(__file__).parents[2]
IMPORTED = (
    *("sklearn.datasets", "coterie.client.cli.main"),
    *("coterie.client.app", "coterie.client.resident.host", "coterie.engine.fast.silo.link"),
    *("tests.e2e.gated", "tests.e2e.planted"),
)
ASK_BYTES = 1 << 17
START_S = 150.0


class Forked:
    """What of ``subprocess.Popen`` the tests and ``Program`` use. Its status comes by a pipe."""

    def __init__(self, told: int) -> None:
        self._told = told
        self.returncode: int | None = None
        self.pid = self._number(START_S)

    def _number(self, timeout: float | None) -> int:
        if not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a silo", timeout or 0.0)
        said = os.read(self._told, 4)
        assert len(said) == 4, "the process that starts silos is gone"
        return int.from_bytes(said, "little", signed=True)

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; TimeoutExpired after so many seconds."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent() -> socket.socket:
    """Start the process that the silos of this worker are forks of; it ends with the worker."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.Popen(
        tied([sys.executable, "-m", __name__, str(its.fileno())]),
        pass_fds=[its.fileno()],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    its.close()
    return ours


def popen(
    line: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes] | int = subprocess.STDOUT,
    **_: Any,
) -> Forked:
    """Start ``python -m MODULE …`` or ``python -c CODE …`` in a new session, without input."""
    ask = json.dumps([line[1:], dict(env), str(Path.cwd())]).encode()
    told, tells = os.pipe()
    errors = stdout if isinstance(stderr, int) else stderr
    fds = [stdout.fileno(), errors.fileno(), tells]
    socket.send_fds(_parent(), [ask], fds)
    os.close(tells)
    return Forked(told)


class Silo(Program):
    """A program of ``LocalFederation`` that is a silo."""

    def start(self) -> None:
        """Fork it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = popen(self._command, env=self._environment, stdout=log)  # type: ignore[assignment]
        self._started = time.monotonic()


def _tie() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def _keep(tells: int) -> None:
    """Fork the silo, tell its process id and its exit status; return in the silo."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _tie()
    pid = os.fork()
    if not pid:
        return _tie()
    os.write(tells, pid.to_bytes(4, "little", signed=True))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(tells, status.to_bytes(4, "little", signed=True))
    os._exit(0)


def _become(line: list[str], env: Mapping[str, str], folder: str) -> None:
    """Run a module or code as a new Python would."""
    import runpy

    before = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {"", str(Path.cwd())}
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    rest = [one for one in sys.path if one not in before]
    sys.path[:] = [folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *rest]
    option, what, *sys.argv[1:] = line
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(asked: socket.socket) -> None:
    """Fork a silo for each that is asked for; return in a silo."""
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    while (found := socket.recv_fds(asked, ASK_BYTES, 3))[0]:  # until the worker is gone
        if not os.fork():
            break
        for one in found[1]:
            os.close(one)
    else:
        sys.exit()
    asked.close()
    ask, fds, *_ = found
    out, errors, tells = fds
    _keep(tells)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(errors, 2)
    for one in fds:
        os.close(one)
    _become(*json.loads(ask))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
