"""Large contents in files, which a SuperLink shares with the ServerApps of its machine.

The SuperLink keeps what arrives over the channel in a private folder. A ServerApp that finds the
folder maps the contents into its memory, and puts those that it sends there. A file is named by the
SHA-256 of its content, is complete or absent, and is deleted with the content. A ServerApp on
another machine uses the channel.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock, Timer

from coterie.system.files import held_by, locked, make_folder

WHERE = sha256(b"coterie: the folder of large objects").hexdigest()
"""A request for this object id returns the location of the folder."""
HELD_S = 10.0
"""How long a process that is about to end may still hold the folder."""
PREFIX, TOKEN, NEW, UNFINISHED, SPARE = "objects-", "token", ".new", ".part", "spare"
LEFT_S = 3600.0
"""Age after which a content that no message names counts as left by a process that was killed."""
SPARE_BYTES, SPARE_S = 2**32, 60.0
"""Most bytes of files kept for reuse, and seconds after the last deletion for which they are
kept."""
SPARE_FREE_BYTES = 2**33
"""Free disk space below which no spare files are kept."""
TRIES, LOOK_S = 8, 0.5
"""Spare files tried per write, and seconds between two searches for more."""


class BlobStore:
    """The folder, as both ends see it. Callers check that names are valid object ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spare = _Spare(folder / SPARE)

    def begin(self, run: int, node: int) -> tuple[Path, int]:
        """Return a new unfinished file, and its descriptor for writing. Raises ``OSError``."""
        unfinished = self.folder / f"{secrets.token_hex(8)}.{run}.{node}{UNFINISHED}"
        descriptor = self._spare.taken(unfinished)
        if descriptor is None:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return unfinished, descriptor

    def offer(self, content: memoryview | bytes, run: int, node: int) -> str:
        """Write a content where the SuperLink finds it; return its name. Raises ``OSError``."""
        with ThreadPoolExecutor(1) as threads:  # hashing and writing both leave Python's lock
            digest = threads.submit(sha256, content)
            unfinished, descriptor = self.begin(run, node)
            try:
                write_at(descriptor, 0, content)
                os.ftruncate(descriptor, len(content))
                name = digest.result().hexdigest()
                unfinished.rename(self.offered(name, run, node))
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        return name

    def offered(self, name: str, run: int, node: int) -> Path:
        """Return the path of a content that a node has sent, until a message of it has the name."""
        return self.folder / f"{name}.{run}.{node}{NEW}"

    def adopt(self, name: str, file: Path) -> None:
        """Move an offered file to its name. Raises ``OSError`` if it is missing."""
        file.rename(self.folder / name)

    def drop(self, name: str) -> None:
        """Delete an object; existing views of it stay valid."""
        with suppress(OSError):
            self._spare.add(self.folder / name)

    def shown(self, name: str) -> memoryview | None:
        """Map a content; None if it has no file. Raises ``OSError`` or ``ValueError``."""
        with self._opened(name) as descriptor:
            if descriptor is None:
                return None
            return memoryview(mmap(descriptor, 0, access=ACCESS_READ))

    def part(self, name: str, at: int, size: int) -> bytes:
        """Return bytes of a content, fewer at its end; none without a file. Raises ``OSError``."""
        with self._opened(name) as descriptor:
            return b"" if descriptor is None else os.pread(descriptor, size, at)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """Open a content, locked against reuse of its file; a map of it keeps the lock."""
        file = self.folder / name
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        try:
            yield descriptor if _held(descriptor, file) else None
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Return whether there is a file of this object."""
        return (self.folder / name).exists()

    def is_whole(self, name: str) -> bool:
        """Return whether the file of an object has its content."""
        with suppress(OSError, ValueError):  # an empty one cannot be shown
            found = self.shown(name)
            return found is not None and sha256(found).hexdigest() == name
        return False

    @property
    def names(self) -> set[str]:
        """The ids of all objects that have a file here."""
        return {file.name for file in self.folder.iterdir() if len(file.name) == len(WHERE)}

    def keep(self, names: Collection[str]) -> None:
        """Delete all other objects, spare files and stale unfinished files."""
        self.forget_unannounced()
        shutil.rmtree(self.folder / SPARE, ignore_errors=True)
        for name in self.names.difference(names):
            (self.folder / name).unlink(missing_ok=True)

    def erase(self, names: Iterable[str], runs: Iterable[int]) -> None:
        """Delete contents, also those dropped before, beside a SuperLink.

        Args:
            names: of contents.
            runs: that have ended: what was put for them and is in no message.
        """
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        for run in runs:
            for file in self.folder.glob(f"*.{run}.*"):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.folder / SPARE, ignore_errors=True)

    def location(self) -> bytes:
        """Return the location of the folder, with a secret that only its readers know."""
        word = (self.folder / TOKEN).read_text(encoding="ascii")
        return json.dumps({"place": str(self.folder), "word": word}).encode()

    def forget_unannounced(self) -> None:
        """Delete files left behind by a process that was killed."""
        for file in (*self.folder.glob(f"*{NEW}"), *self.folder.glob(f"*{UNFINISHED}")):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > LEFT_S:
                    file.unlink()


class _Spare:
    """Files of deleted objects that are reused for new ones.

    Overwriting existing pages costs a tenth of allocating new ones from the kernel or a virtual
    machine's host. A shared lock keeps a file from reuse until its last view is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._files = deque[Path]()
        self._timer: Timer | None = None
        self._added = self._looked = -math.inf

    def add(self, file: Path) -> None:
        """Keep the file of a deleted object, or delete it. Raises ``OSError``."""
        size = file.stat().st_size
        with self._lock:
            full = size * (1 + len(self._files)) > SPARE_BYTES
        if full or shutil.disk_usage(file.parent).free < SPARE_FREE_BYTES:
            file.unlink()
            return
        kept = self._folder / secrets.token_hex(8)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            file.rename(kept)
        except FileNotFoundError:  # a withdrawal has just erased the folder
            file.unlink()
            return
        with self._lock:
            self._files.append(kept)
            self._added = time.monotonic()
            if self._timer is None:
                self._clear_in(SPARE_S)

    def taken(self, name: Path) -> int | None:
        """Return an unused spare file, renamed and open for writing; None if there is none."""
        for _ in range(TRIES):
            file = self._next()
            if file is None:
                return None
            with suppress(FileNotFoundError):  # a ServerApp, or the SuperLink, has taken it
                descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
                try:
                    flock(descriptor, LOCK_EX | LOCK_NB)
                    file.rename(name)
                    return descriptor
                except BlockingIOError:
                    with self._lock:
                        self._files.append(file)
                    os.close(descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
        return None

    def _next(self) -> Path | None:
        with self._lock:
            now = time.monotonic()
            if not self._files and now - self._looked > LOOK_S:
                self._looked = now
                with suppress(FileNotFoundError):
                    self._files.extend(self._folder.iterdir())
            return self._files.popleft() if self._files else None

    def _clear_in(self, seconds: float) -> None:
        self._timer = Timer(seconds, self._clear)
        self._timer.daemon = True
        self._timer.start()

    def _clear(self) -> None:
        with self._lock:
            left = self._added + SPARE_S - time.monotonic()
            if left > 0:
                self._clear_in(left)
                return
            self._timer = None
            for file in self._files:
                file.unlink(missing_ok=True)
            self._files.clear()


def _held(descriptor: int, file: Path) -> bool:
    """Lock a file against reuse while views of it are open; False if it is already reused."""
    with suppress(OSError):
        try:
            flock(descriptor, LOCK_SH | LOCK_NB)
        except BlockingIOError:  # another object is written into it
            return False
        return os.path.samestat(os.fstat(descriptor), file.stat())
    return False


def write_at(descriptor: int, at: int, content: memoryview | bytes) -> None:
    """Write bytes at a position. Raises ``OSError``."""
    left = memoryview(content)
    while left:
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done


def find(location: bytes) -> BlobStore | None:
    """Return the folder in a ``Shelf.location`` answer; None if this machine cannot read it."""
    try:
        asked = json.loads(location)
        shelf = BlobStore(Path(asked["place"]))
        return shelf if shelf.location() == location else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def opened(home: Path) -> Iterator[BlobStore]:
    """Open a new folder of objects in ``home`` for this process; delete those of dead processes.

    Raises ``OSError`` if it cannot be made.
    """
    make_folder(home)
    for left in home.glob(f"{PREFIX}*"):
        if held_by(left) is None:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(mkdtemp(prefix=PREFIX, dir=home))  # for its owner alone
    with ExitStack() as held:
        held.enter_context(locked(folder))
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / TOKEN).write_text(secrets.token_hex(16), encoding="ascii")
        yield BlobStore(folder)


def beside(database: Path) -> Path:
    """Return the folder of objects that belongs to a database."""
    return database.with_name(f"{database.name}.objects")


@contextmanager
def kept(folder: Path, names: Collection[str]) -> Iterator[BlobStore]:
    """Open a folder of objects that outlives this process (see ``beside``).

    Only undamaged objects in ``names`` stay: a power cut may have truncated a file.

    Raises:
        OSError: it cannot be made.
        LockedError: another process has it.
    """
    make_folder(folder, private=True)
    with locked(folder, deadline_s=HELD_S):
        (folder / TOKEN).write_text(secrets.token_hex(16), encoding="ascii")
        shelf = BlobStore(folder)
        shelf.keep({name for name in names if shelf.is_whole(name)})
        try:
            yield shelf
        finally:  # what silos sent is not to lie there while nobody would delete it
            shutil.rmtree(folder / SPARE, ignore_errors=True)
