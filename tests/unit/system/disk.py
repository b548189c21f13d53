"""Stops a program before any of its file-system calls, and cuts the power of a simulated disk."""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save

CALLS = (
    "open", "write", "fsync", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir",
    "truncate", "ftruncate", "chmod", "fchmod",
)  # fmt: skip
NEED_ROOM = ("write", "mkdir")
"""Those of them that a full disk refuses."""
NEVER = 10**9


class Killed(BaseException):
    """In place of the process's end: no handler may do anything to a file any more."""


def kill() -> None:
    raise Killed


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """What a power cut may leave of a folder: what was synced, and perhaps newer names.

    Content that was never synced is lost. Names in a folder are those of its last sync (the worst
    case) or those of now (also possible: a file system may write them whenever it likes).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._kept: dict[int, int] = {}
        """Inode → descriptor: while it is open, its number is not given to another file."""
        for folder, _, files in os.walk(root):
            self._note(Path(folder))
            for file in files:
                self._note(Path(folder) / file)

    def close(self) -> None:
        for descriptor in self._kept.values():
            os.close(descriptor)

    def _note(self, path: Path) -> None:
        inode = self.made(path)
        self.synced(self._kept[inode])

    def made(self, path: Path) -> int:
        """A file or folder is new, or was there before."""
        descriptor = os.open(path, os.O_RDONLY)
        about = os.fstat(descriptor)
        if about.st_ino in self._kept:
            os.close(descriptor)
        else:
            self._kept[about.st_ino] = descriptor
            if stat.S_ISDIR(about.st_mode):
                self._names[about.st_ino] = {}
        return about.st_ino

    def synced(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            self._names[about.st_ino] = {e.name: e.inode() for e in os.scandir(descriptor)}
        else:
            self._contents[about.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def after_power_cut(self, copy: Path, *, names_of_now: bool) -> Path:
        """What the machine finds when it is started again."""
        self._build(self.root.stat().st_ino, copy, names_of_now)
        return copy

    def _build(self, inode: int, target: Path, names_of_now: bool) -> None:
        about = os.fstat(self._kept[inode])
        if not stat.S_ISDIR(about.st_mode):
            target.write_bytes(self._contents.get(inode, b""))
            target.chmod(stat.S_IMODE(about.st_mode))
            return
        target.mkdir(mode=stat.S_IMODE(about.st_mode))
        if names_of_now:
            names = {e.name: e.inode() for e in os.scandir(self._kept[inode])}
        else:
            names = self._names[inode]
        for name, child in names.items():
            self._build(child, target / name, names_of_now)


@contextmanager
def watched(
    disk: Disk,
    *,
    stop_before: int = NEVER,
    die: Callable[[], None] = kill,
    only: Collection[str] = CALLS,
) -> Iterator[None]:
    """Count file-system calls, and end before one of them and before all that follow.

    Args:
        disk: is notified of them.
        stop_before: number of the call, from 0.
        die: how to end.
        only: calls that count, and that are ended.
    """
    count = 0
    inner = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            if name in only:
                if count >= stop_before:
                    die()
                count += 1
            result = inner[name](*args, **options)
            with mock.patch.multiple(os, **inner):
                if name in ("open", "mkdir") and Path(args[0]).is_relative_to(disk.root):
                    disk.made(Path(args[0]))
                if name == "fsync":
                    disk.synced(args[0])
            return result

        return call

    with ExitStack() as patched:
        patched.enter_context(mock.patch.multiple(os, **{name: wrapped(name) for name in CALLS}))
        for module in (io, builtins):
            patched.enter_context(mock.patch.object(module, "open", _reading_only(open)))
        for module in ("checkpoint", "record.recorder"):
            name = f"coterie.server.runs.{module}.save_file"
            patched.enter_context(mock.patch(name, save_in_steps))
        yield


def _reading_only(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What C code writes cannot be stopped in the middle: only locks may be opened so."""

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        writes = set(mode) & set("wax+")
        assert not writes or str(file).endswith("lock"), f"{file} is written past os.write"
        return inner(file, mode, *args, **options)

    return opened


def save_in_steps(
    arrays: dict[str, np.ndarray], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """``safetensors.numpy.save_file``, which is C code, as calls that can be stopped between."""
    content = save(arrays, metadata=metadata)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, content[: len(content) // 2])
    os.write(descriptor, content[len(content) // 2 :])
    os.close(descriptor)
