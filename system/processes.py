"""Processes of this machine: start, watch, restart and end them; their descendants and memory.

On Linux the kernel ends a child with its parent. Elsewhere a child may outlive its parent, and
memory is unknown.
"""

from __future__ import annotations

import getpass
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

PARENT_OPTION = "--parent-pid"
PARENT_PAUSE_S, PARENT_GRACE_S = 0.5, 3.0
AGAIN_S = 2.0
"""Seconds after which a dropped Ctrl-C is raised again."""
LOOK_S = 0.05
"""Polling interval in seconds."""
SHORTEST_LIFE_S = 5.0
"""A program that ends sooner than this after its start is restarted after a longer pause."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process besides Ctrl-C: from people, service managers, or a closed
terminal."""

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
    """Return the command line of a child that is killed when this process ends.

    The child sets this up itself, before it becomes the command: a function between fork and exec
    is not safe in a process with threads. Linux ties a child to the thread that starts it, so only
    a child of the main thread is tied.
    """
    if sys.platform != "linux" or not _in_main_thread():
        return list(command)
    return [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), *command]


@contextmanager
def closing_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise ``SystemExit``, so that resources are closed in order.

    Ignored signals, such as SIGHUP under nohup, stay ignored. Earlier handlers are restored.
    """
    taken = [s for s in ENDING if _in_main_thread() and signal.getsignal(s) != signal.SIG_IGN]

    def close(signum: int, frame: FrameType | None) -> None:
        for number in taken:  # a second one would break the closing off
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    with _handled(taken, close):
        yield


@contextmanager
def insistent_interrupts() -> Iterator[None]:
    """Have Ctrl-C raise ``KeyboardInterrupt`` repeatedly until this block is left.

    Python drops exceptions that are raised in a finaliser or in a callback of C code, and a person
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

    with _handled((signal.SIGINT, signal.SIGALRM), interrupt):
        try:
            yield
        finally:
            if came:
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Block signals during this block, which must have its own deadlines."""
    with _handled((signal.SIGINT, *ENDING) if _in_main_thread() else (), signal.SIG_IGN):
        yield


@contextmanager
def noting_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM, SIGINT or SIGHUP has come.

    None of them ends the process during this block.
    """
    came: list[int] = []
    numbers = [signal.SIGINT, *(s for s in ENDING if signal.getsignal(s) != signal.SIG_IGN)]
    with _handled(numbers, lambda signum, frame: came.append(signum)):
        yield lambda: bool(came)


def _in_main_thread() -> bool:
    """Return whether this is the main thread, the only one in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class ProgramError(Exception):
    """A program did not start. The text has the reason and the end of its log."""


class Program:
    """A program that this process starts and watches.

    It writes into a log, has its own session so that no signal of the terminal reaches it, and ends
    with this process. ``environment`` is its complete environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = FIRST_PAUSE_S
        self.restarts = 0

    def start(self) -> None:
        """Start it without waiting."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tied(self._command),  # left behind, it would hold its ports and folders
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        self._started = time.monotonic()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    @property
    def ended(self) -> bool:
        """Whether it is not running."""
        return self._process is None or self._process.poll() is not None

    def last_lines(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def wait_until(
        self,
        ready: Callable[[], bool],
        *,
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until it is ready, or ``stopped``.

        Raises:
            ProgramError: it ended, or was not ready by the deadline.
        """
        deadline = time.monotonic() + deadline_s
        while not (ready() or stopped()):
            late = time.monotonic() > deadline
            if self.ended or late:
                within = f" within {deadline_s:.0f} s" if late else ""
                raise ProgramError(
                    f"the {self.name} did not start{within}. Its log ends:\n{self.last_lines()}"
                )
            time.sleep(LOOK_S)

    def restart(self, say: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
        """Restart it after a pause; return whether it was started.

        The pause grows while the program ends at once. ``say`` receives a message that it ended;
        ``stopped`` returns whether to give up instead.
        """
        lived = time.monotonic() - self._started
        longer = min(2 * self._pause, MAX_PAUSE_S)
        self._pause = FIRST_PAUSE_S if lived > SHORTEST_LIFE_S else longer
        status = self.process.returncode
        say(f"The {self.name} ended (status {status}); restarting it. Its log: {self.log}")
        due = time.monotonic() + self._pause
        while time.monotonic() < due:
            if stopped():
                return False
            time.sleep(LOOK_S)
        self.start()
        self.restarts += 1
        return True

    def stop(self, *, deadline_s: float, rest: signal.Signals) -> None:
        """End it, and send ``rest`` to the processes that it leaves behind."""
        if self.ended:
            return
        others = psutil.Process(self.process.pid).children(recursive=True)
        stop_all([self], deadline_s=deadline_s)
        for other in others:
            with suppress(psutil.NoSuchProcess):
                other.send_signal(rest)


def stop_all(programs: Iterable[Program], *, deadline_s: float) -> None:
    """Terminate programs, and kill those that do not end by the deadline."""
    running = [program.process for program in programs if not program.ended]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(deadline_s)


def end_with_parent(exit_code: int) -> None:
    """End this ServerApp's process when the executor that started it, or its parent, is gone.

    Flower also watches the executor, but its orderly exit waits for calls that are repeated until
    the SuperLink answers, which will never happen. Committed data are safe at any moment.
    """
    if PARENT_OPTION not in sys.argv:
        return
    executor = int(sys.argv[sys.argv.index(PARENT_OPTION) + 1])
    before = _parents(executor)

    def watch() -> None:
        found = before
        while found == before:
            time.sleep(PARENT_PAUSE_S)
            with suppress(psutil.NoSuchProcess):  # one has just ended: look again
                found = _parents(executor)
        time.sleep(PARENT_GRACE_S)
        os._exit(exit_code)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _parents(last: int) -> list[int]:
    """Return the processes above this one, up to the parent of the ``last``; none without that."""
    above = [process.pid for process in psutil.Process().parents()]
    return above[: above.index(last) + 2] if last in above else []


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files of this process and its children; return the new limit.

    It is lower than ``wanted`` if the system does not allow it. Connections count as files.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    aim = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if allowed != resource.RLIM_INFINITY and allowed < aim:
        with suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if allowed == resource.RLIM_INFINITY else allowed


def family(pids: Iterable[int]) -> set[int]:
    """Return these processes and all their descendants."""
    found = set(pids)
    for pid in tuple(found):
        with suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def proportional_memory(pid: int) -> int:
    """Return a process's memory in bytes; 0 if it ended.

    A page that n processes share counts as 1/n.
    """
    with suppress(psutil.NoSuchProcess):
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", 0))
    return 0


def utc_now() -> str:
    """Return date and time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def account() -> str:
    """Return the name of the account that this process runs under."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        return f"account {os.getuid()}"
