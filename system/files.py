"""Files that a crash must not damage: written whole or not at all, by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.tasks.base import TaskError, place_of

LOCK = "lock"
UNKNOWN = 0
"""In place of a process: there may be one."""
LOCK_DEADLINE_S = 60.0
"""How long to wait for the process before: one that lost its SuperLink needs some time to end."""


def place(named: str | Path) -> Path:
    """The file or folder that a user names.

    Raises:
        FederationError: it begins with ``~`` and somebody who has no home here.
    """
    try:
        return place_of(str(named))
    except TaskError as error:
        raise FederationError(str(error), exit_code=EXIT_CONFIG) from None


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit_file(unfinished: Path, target: Path) -> None:
    """Put a file that was written under another name in its place, for good."""
    sync(unfinished)
    unfinished.replace(target)
    sync(target.parent)


def write_atomically(target: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: temporary file, fsync, rename."""
    unfinished = target.with_name(target.name + ".tmp")
    try:
        unfinished.write_bytes(content)
        commit_file(unfinished, target)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room; safetensors says so in words alone."""
    return getattr(error, "errno", None) == errno.ENOSPC or "(os error 28)" in str(error)


@contextmanager
def locked(folder: Path, *, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
    """Hold a run's folder: two processes that wrote one record would ruin it.

    The lock ends with the process, however that ends.

    Raises:
        FederationError: another process holds it for longer than the deadline.
    """
    deadline = time.monotonic() + deadline_s
    with (folder / LOCK).open("a+") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise FederationError(
                    f"the run in {folder} is still going on, in process {held_by(folder)}. "
                    "Stop that one first."
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def held_by(folder: Path) -> int | None:
    """The process that holds a run's folder, ``UNKNOWN`` if that cannot be told, None if none does.

    Looking takes no more than leave to read: the run may be another account's.
    """
    try:
        with (folder / LOCK).open() as file:
            if _try_lock(file.fileno(), fcntl.LOCK_SH):
                return None
            return int(file.read() or UNKNOWN)
    except FileNotFoundError:
        return None
    except OSError:
        return UNKNOWN


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
