"""Files that a kill or a power cut must not damage.

A file is written under another name, synced, and renamed, and its folder is synced: whatever
happens, what is there afterwards is the old file or the new one, whole. Two processes that may
write into one folder at the same time take turns by locking it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "lock"
UNKNOWN = 0
"""In place of a process: there may be one."""
LOOK_S = 0.1
"""How long to wait before a lock is tried again."""


class LockedError(Exception):
    """Another process holds a lock for longer than the deadline."""


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, and those above it, so that they are still there after a power cut.

    Args:
        folder: may be there already.
        private: only the owner may look into it, if it is made here.

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
    """A new file to write; it takes the target's place when the block ends without an error.

    Args:
        target: in a folder into which no other process writes this file meanwhile.
        private: only the owner may read it, from the first byte on.
        synced: whether it must be on the disk before going on.

    Raises:
        OSError: nothing was changed, unless the folder itself could not be synced at the end.
    """
    unfinished = target.with_name(target.name + ".tmp")
    try:
        unfinished.unlink(missing_ok=True)  # left by a process that was killed
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


@contextmanager
def replacing_named(target: Path) -> Iterator[Path]:
    """``replacing`` for a file that a person names: through links, and straight into a pipe."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if target.exists() and not target.is_file():
        yield target
        return
    with replacing(target.resolve()) as unfinished:
        yield unfinished


def write_atomically(target: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file so that it is there whole or not at all; arguments as for ``replacing``."""
    with replacing(target, private=private) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY)
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)


def write_named(target: Path, content: bytes) -> None:
    """Write a file that a person names so that it is there whole or not at all."""
    with replacing_named(target) as unfinished:
        unfinished.write_bytes(content)


def append_line(file: Path, line: bytes, *, synced: bool) -> None:
    """Append a line, after a line break if a crash has cut off the last one.

    Args:
        file: made if it is not there.
        line: without its end.
        synced: whether the line must be on the disk before going on.
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
    """Whole lines of a file after a position, and the position after them.

    A file that has become shorter is read from its beginning; of one that cannot be read there are
    none.
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
    """Why a write failed, in words; of a full disk safetensors tells in its text alone."""
    is_full = getattr(error, "errno", None) == errno.ENOSPC or "(os error 28)" in str(error)
    return "the disk is full" if is_full else str(error)


REMEDIES = {
    errno.ENOSPC: "Free space on its disk, or name a folder on another one",
    errno.EDQUOT: "Free space within this account's quota, or name a folder on another disk",
    errno.EROFS: "Name a folder on a disk that can be written",
    errno.EACCES: "Give this account the right, or name another place",
    errno.EISDIR: "Name a file, such as one in this folder",
    errno.ENOTDIR: "A file stands where a folder is needed: name another place",
}


def explained(error: OSError) -> str:
    """Which file or folder an error is about, what was wrong, and what to do."""
    if error.filename is None or error.strerror is None:
        return str(error)
    remedy = REMEDIES.get(error.errno or 0, "")
    return f"{error.filename}: {error.strerror}. {remedy}.".removesuffix(" .")


@contextmanager
def locked(folder: Path, *, name: str = LOCK, deadline_s: float = 0.0) -> Iterator[None]:
    """Hold a folder: two processes that wrote the same files would ruin them.

    The lock ends with the process, however that ends.

    Args:
        folder: must be there.
        name: of the lock's file.
        deadline_s: how long to wait for the process that holds it.

    Raises:
        LockedError: that process held it for longer.
        OSError: the folder cannot be written, or its disk knows no locks.
    """
    deadline = time.monotonic() + deadline_s
    with (folder / name).open("a+") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() >= deadline:
                raise LockedError(f"{folder / name} is held by process {held_by(folder, name)}")
            time.sleep(LOOK_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def held_by(folder: Path, name: str = LOCK) -> int | None:
    """The process that holds a folder, ``UNKNOWN`` if that cannot be told, None if none does.

    Looking takes no more than leave to read: the folder may be another account's.
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
