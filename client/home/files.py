"""Files in a silo's home folder: named after a run, written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors.numpy import save_file

from coterie.client.home.settings import SettingsError
from coterie.wire import Model

OTHER_FILES = 512
"""Files that a process needs open beside the locks of its silos' folders."""


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold a silo's folder, made if it is not there; two processes would overwrite their models.

    Raises:
        SettingsError: a process holds it already, or nothing can be written there.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        opened = (home / "lock").open("w")
    except FileExistsError:
        raise SettingsError(
            f"{home} is a file. A silo keeps its models in a folder: name one with --home."
        ) from None
    except OSError as error:
        raise SettingsError(
            f"a silo cannot keep its models in {home}: {error.strerror}. Name a folder that it "
            "may write to with --home."
        ) from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"a silo runs already from {home}. End that process first, or give this silo a "
                "folder of its own (--home)."
            ) from None
        except OSError as error:
            raise SettingsError(
                f"{home} cannot be locked against a second silo: {error.strerror}. Name a folder "
                "on a disk of this machine with --home."
            ) from None
        yield


@contextmanager
def locked_all(homes: Sequence[str]) -> Iterator[None]:
    """Hold the folders of several silos in this process; empty ones keep nothing.

    Raises:
        SettingsError: as ``locked``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(homes) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    with ExitStack() as held:
        for home in filter(None, homes):
            held.enter_context(locked(Path(home)))
        yield


def folder_of(home: str, kind: str, run: str) -> Path:
    """The folder that holds what is of ``kind`` (``personal``, ``alone``) of a run, by round."""
    return Path(home) / kind / _safe(run)


def file_of(home: str, kind: str, run: str) -> Path:
    """The file that holds arrays of ``kind`` (``models``) for a run."""
    return Path(home) / kind / f"{_safe(run)}.safetensors"


def _safe(run: str) -> str:
    """A run's name as a file's: the server gives it, so it must not lead anywhere else."""
    text = "".join(c if c.isalnum() or c in "-_." else "_" for c in run)
    return text.lstrip(".") or "run"


def write_model(file: Path, model: Model, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as safetensors: a temporary file, fsync, rename."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    save_file(model, unfinished, metadata=dict(metadata) if metadata else None)
    _commit(unfinished, file)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file: a temporary file, fsync, rename."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_bytes(content)
    _commit(unfinished, file)


def _commit(unfinished: Path, file: Path) -> None:
    sync(unfinished)
    unfinished.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
