"""Large objects in files, which a SuperLink shares with the ServerApps of its machine.

Flower passes every object between the two by a call, which copies it about ten times. Here the
SuperLink keeps large objects in a private folder. A ServerApp that finds the folder maps them into
its memory, and puts the objects that it sends there. A file is named by the SHA-256 of its object,
is complete or absent, and is deleted with the object. A ServerApp on another machine uses calls.

A file holds an object's body. Its head gives only the length of the body.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from hashlib import sha256
from mmap import ACCESS_READ, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock, Timer

from coterie.engine.fast import bundles
from coterie.engine.fast.bundles import PIECE_BYTES
from coterie.engine.fast.pulled import Piece
from coterie.system.files import held_by, locked, make_folder

WHERE = sha256(b"coterie: the folder of large objects").hexdigest()
"""A request for this object id returns the location of the folder."""
FROM_BYTES = 2**18
"""Smallest size of an object that is worth a file."""
HELD_S = 10.0
"""How long a process that is about to end may still hold the folder."""
PREFIX, TOKEN, NEW, UNFINISHED, SPARE = "objects-", "token", ".new", ".part", "spare"
LEFT_S = 600.0
"""Age after which an unannounced file counts as left by a process that was killed."""
MOST_SPARE, SPARE_S = 512, 60.0
"""Most files kept for reuse, of at most ``PIECE_BYTES`` each, and seconds after the last deletion
for which they are kept."""
SPARE_FREE_BYTES = 2**33
"""Free disk space below which no spare files are kept."""
TRIES, LOOK_S = 8, 0.5
"""Spare files tried per write, and seconds between two searches for more."""
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Linux flags that Python does not name."""


class BlobStore:
    """The folder, as both ends see it. Callers check that names are valid object ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spare = _Spare(folder / SPARE)

    def write(self, name: str, body: memoryview | bytes) -> Path:
        """Write an object's body into a temporary file for ``adopt``. Raises ``OSError``."""
        unfinished = self.folder / f"{name}.{secrets.token_hex(4)}{UNFINISHED}"
        try:
            descriptor = self._spare.taken(unfinished)
            if descriptor is None:
                descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(descriptor, len(body))
                left = memoryview(body)
                while left:
                    left = left[os.write(descriptor, left) :]
            finally:
                os.close(descriptor)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return unfinished

    def offer(self, name: str, body: memoryview | bytes) -> None:
        """Write an object's body where the SuperLink finds it. Raises ``OSError``."""
        self.write(name, body).rename(self.offered(name))

    def offered(self, name: str) -> Path:
        """Return the path at which a ServerApp puts an object."""
        return self.folder / (name + NEW)

    def adopt(self, name: str, file: Path) -> None:
        """Move a written or offered file to its name. Raises ``OSError`` if it is missing."""
        file.rename(self.folder / name)

    def drop(self, name: str) -> None:
        """Delete an object; existing views of it stay valid."""
        with suppress(OSError):
            self._spare.add(self.folder / name)

    def shown(self, name: str, room: Room | None = None, place: int = 0) -> Piece | None:
        """Map an object, in ``room`` if given; None if it has no file. Raises ``OSError``."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if not _held(descriptor, self.folder / name):
                return None
            size = os.fstat(descriptor).st_size
            held = room.show(descriptor, size, place) if room is not None else None
            if held is None:
                held = memoryview(mmap(descriptor, size, access=ACCESS_READ))
        finally:
            os.close(descriptor)
        return bundles.piece_of(held)

    def has(self, name: str) -> bool:
        """Return whether there is a file of this object."""
        return (self.folder / name).exists()

    def is_whole(self, name: str) -> bool:
        """Return whether the file of an object has its content."""
        with suppress(OSError, ValueError):  # an empty one cannot be shown
            found = self.shown(name)
            return found is not None and bundles.object_id(found) == name
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

    def erase(self, names: Iterable[str]) -> None:
        """Delete objects and the bytes of those that were dropped before, beside a SuperLink."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
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
        with self._lock:
            full = len(self._files) >= MOST_SPARE
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


class Room:
    """Consecutive addresses for ``places`` pieces of a reply, ``PIECE_BYTES`` each.

    Raises ``OSError`` if this machine provides no such addresses.
    """

    def __init__(self, places: int) -> None:
        self._held = mmap(
            *(-1, places * PIECE_BYTES),
            flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            prot=PROT_READ | PROT_WRITE,
        )
        self._map = ctypes.CDLL(None, use_errno=True).mmap
        self._map.restype = ctypes.c_void_p
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._map.argtypes = [address, size, number, number, number, ctypes.c_long]

    def show(self, descriptor: int, size: int, place: int) -> memoryview | None:
        """Map a file at a place; None if it does not fit there."""
        begin = place * PIECE_BYTES
        if not 0 < size <= PIECE_BYTES or begin + PIECE_BYTES > len(self._held):
            return None
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._held, begin))
        if self._map(at, size, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) != at:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return memoryview(self._held)[begin : begin + size].toreadonly()


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
