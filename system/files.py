"""File writes that survive a kill or a power cut.

A file is written under another name, synced, and renamed, and its folder is synced: afterwards
there is the complete old file or the complete new one. Processes that may write into one folder at
the same time take turns by locking it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "lock"
UNKNOWN = 0
"""In place of a process id: some process may hold the lock."""
LOOK_S = 0.1
"""Seconds between two attempts to take a lock."""
GLANCE_S = 1.0
"""More seconds than ``held_by`` holds a lock."""
LEFT_BEHIND_S = 3600
"""Seconds after which an unfinished file is nobody's."""


class LockedError(Exception):
    """Another process held a lock beyond the deadline."""


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, if it is missing, and its parents so that they survive a power cut.

    If it is made here and ``private``, only the owner may access it.

    Raises:
        OSError: it is a file, or cannot be made.
    """
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    sync(folder.parent)


@contextmanager
def replacing(target: Path, *, private: bool = False, synced: bool = True) -> Iterator[Path]:
    """Yield a new file to write; it replaces the target when the block ends without an error.

    Of processes that write the target at the same time, the last replaces what the others wrote. If
    ``private``, only the owner may read it, from the first byte on; if ``synced``, it is flushed to
    the disk.

    Raises:
        OSError: nothing was changed, unless only the final sync of the folder failed.
    """
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        _remove_left_behind(target, unfinished)
        mode = 0o600 if private else 0o666
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield unfinished
        if synced:
            sync(unfinished)
        unfinished.replace(target)
        if synced:
            sync(target.parent)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if (
            isinstance(error, OSError)
            and error.errno is not None  # a library's text says all by itself
            and error.filename in (None, str(unfinished))
        ):
            error.filename, error.filename2 = str(target), None  # what a person knows
        raise


def _remove_left_behind(target: Path, unfinished: Path) -> None:
    """Remove what processes that were killed left of a file; it takes no hour to write one."""
    unfinished.unlink(missing_ok=True)  # of an earlier process with this one's id
    for left in target.parent.glob(f"{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_BEHIND_S:
                left.unlink()


@contextmanager
def replacing_named(target: Path) -> Iterator[Path]:
    """Run ``replacing`` for a file named by a person; follow links, and write pipes directly."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if target.exists() and not target.is_file():
        yield target
        return
    with replacing(target.resolve()) as unfinished:
        yield unfinished


def write_atomically(target: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file completely or not at all; arguments as for ``replacing``."""
    with replacing(target, private=private) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY)
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)


def write_named(target: Path, content: bytes) -> None:
    """Write a file named by a person completely or not at all."""
    with replacing_named(target) as unfinished:
        unfinished.write_bytes(content)


def append_line(file: Path, line: bytes, *, synced: bool) -> None:
    """Append a line, given without its end; first a line break if a crash has cut off the last one.

    The file is made if it is missing, and the line flushed to the disk if ``synced``.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if synced and size == 0:
            sync(file.parent)  # the file's name must be on the disk as well
        is_cut_off = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        _write(descriptor, (b"\n" if is_cut_off else b"") + line + b"\n")
        if synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_lines(file: Path, position: int) -> tuple[list[bytes], int]:
    """Return the complete lines of a file after a position, and the position after them.

    A file that has become shorter is read from its beginning; an unreadable one has no lines.
    """
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < position:
                position = 0
            opened.seek(position)
            content = opened.read()
    except OSError:
        return [], position
    whole = content[: content.rfind(b"\n") + 1]
    return whole.splitlines(), position + len(whole)


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def why_unwritten(error: Exception) -> str:
    """Return why a write failed; safetensors reports a full disk only in the error's text."""
    is_full = getattr(error, "errno", None) == errno.ENOSPC or "(os error 28)" in str(error)
    return "the disk is full" if is_full else str(error)


REMEDIES = {
    errno.ENOSPC: "Free space on its disk, or name a folder on another one",
    errno.EDQUOT: "Free space within this account's quota, or name a folder on another disk",
    errno.EROFS: "Name a folder on a disk that can be written",
    errno.EACCES: "Give this account permission, or name another place",
    errno.EISDIR: "Name a file, such as one in this folder",
    errno.ENOTDIR: "A file is where a folder is needed: name another place",
}


def explained(error: OSError) -> str:
    """Return an error's file or folder, its cause, and a remedy."""
    if error.filename is None or error.strerror is None:
        return str(error)
    remedy = REMEDIES.get(error.errno or 0, "")
    return f"{error.filename}: {error.strerror}. {remedy}.".removesuffix(" .")


@contextmanager
def locked(folder: Path, *, name: str = LOCK, deadline_s: float = GLANCE_S) -> Iterator[None]:
    """Lock an existing folder until the block or the process ends, waiting up to ``deadline_s``.

    The default is long enough for another process that only calls ``held_by``.

    Raises:
        LockedError: another process held the lock for longer.
        OSError: the folder cannot be written, or its disk does not support locks.
    """
    deadline = time.monotonic() + deadline_s
    with (folder / name).open("a+") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() >= deadline:
                raise LockedError(f"{folder / name} is locked by process {held_by(folder, name)}")
            time.sleep(LOOK_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def held_by(folder: Path, name: str = LOCK) -> int | None:
    """Return the process that holds a folder, None if none does, ``UNKNOWN`` if this is unclear.

    This needs only read access: the folder may be another account's.
    """
    try:
        with (folder / name).open() as file:
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
