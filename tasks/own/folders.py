"""Find files in folders, and account for every one: it is used, or left out for a reason.

What operating systems, file servers and editors leave behind is not data, nor is what is hidden.
What cannot be read is refused by name, because half a data set must not be lost without a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coterie.tasks.base import TaskError

LEFT_BEHIND = frozenset({
    *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
    *("thumbs.db", "ehthumbs.db", "desktop.ini"),  # Windows
    *("$recycle.bin", "recycler", "system volume information"),
    *("@eadir", "@tmp", "#recycle", "#snapshot"),  # Synology
    *("@recycle", "@recently-snapshot", "@__thumb"),  # QNAP
    *("lost+found", "~snapshot", "__pycache__"),
})  # fmt: skip
"""Names, in lower case, of what systems leave in folders and do not hide."""
HIDDEN = (".", "~$")
"""What the names of other such things begin with; Office marks open documents by the second."""

HIDDEN_KIND = "hidden, or left behind by a system or program"
NOT_READ = "in places that are not read"
UNREADABLE = "unreadable"
NO_FILE = "neither files nor folders"
NO_ENDING = "without a usual ending"
DICOM = (".dcm", ".dicom", ".ima")
MORE = " and others"
DICOM_ADVICE = (
    "DICOM files are not read: convert them to 16-bit grey PNG files first, all silos in the same "
    "way"
)


def plain(path: Path | str) -> str:
    """A name that every encoding of Unicode can write: bytes that are no UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass
class Account:
    """What became of the files in a folder.

    Attributes:
        place: the folder.
        used: files that samples are made of.
        left: why files were left out → how many were, and the first of them.
        said: what else a person should know of the folder, sentences without a full stop.
    """

    place: Path
    used: set[Path] = field(default_factory=set)
    left: dict[str, tuple[int, Path]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def leave(self, why: str, path: Path, count: int = 1) -> None:
        """Count files that are left out, of which ``path`` is the first or the folder."""
        before, first = self.left.get(why, (0, path))
        if count:
            self.left[why] = before + count, first

    def leave_all(self, why: str, paths: Iterable[Path]) -> None:
        """Count each of them."""
        for path in paths:
            self.leave(why, path)

    def keep_only(self, kept: Collection[Path]) -> None:
        """Count all others of the files used as left out: they cannot be read."""
        self.leave_all(UNREADABLE, sorted(self.used.difference(kept)))
        self.used.intersection_update(kept)

    @property
    def total(self) -> str:
        """Numbers alone, which hold no name of a file: for a card."""
        left = sum(count for count, _ in self.left.values())
        each = ", ".join(f"{count} {why}" for why, (count, _) in self.left.items())
        said = f"{len(self.used)} of {len(self.used) + left} files used, {left} left out"
        return f"{said} ({each})" if each else said

    def lines(self) -> Iterator[str]:
        """For people: how many files were used, and which were left out, with a name per reason."""
        left = sum(count for count, _ in self.left.values())
        yield (
            f"{plain(self.place.name)!r}: {len(self.used) + left} files, {len(self.used)} used, "
            f"{left} left out{':' * bool(left)}"
        )
        yield from (f"  {reason}" for reason in self.reasons())
        yield from [f"  {DICOM_ADVICE}"] if self.has_dicom else []
        yield from self.said

    def reasons(self) -> Iterator[str]:
        """Why files were left out, with how many and the name of one."""
        for why, (count, first) in self.left.items():
            yield f"{count} {why} ({self.called(first)!r}{MORE * (count > 1)})"

    @property
    def has_dicom(self) -> bool:
        """Whether some of the files that are left out are of that format, by their names."""
        return any(why == f"ending in {ending}" for why in self.left for ending in DICOM)

    def called(self, path: Path) -> str:
        """A path below the folder, for people."""
        inside = path.relative_to(self.place) if path.is_relative_to(self.place) else path
        return plain(inside)


def is_hidden(name: str) -> bool:
    """Whether a file or folder with this name is no data."""
    return name.startswith(HIDDEN) or name.lower() in LEFT_BEHIND


@dataclass(frozen=True)
class Walk:
    """Reads folders for an account.

    Attributes:
        account: that counts what is left out.
        skip: leave out what cannot be read instead of refusing it.
        never_hidden: names of folders that are data whatever they begin with.
    """

    account: Account
    skip: bool = False
    never_hidden: Collection[str] = ()

    def inside(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Folders and files directly in a folder, sorted by name.

        Raises:
            TaskError: names what cannot be read.
        """
        folders: list[Path] = []
        files: list[Path] = []
        for entry in self._entries(folder):
            path = Path(entry.path)
            if is_hidden(entry.name) and entry.name not in self.never_hidden:
                self.account.leave(HIDDEN_KIND, path, _count(path))
            elif (kind := self._kind(entry)) is not None:
                (folders if kind == "folder" else files).append(path)
        return folders, files

    def files(self, folder: Path) -> list[Path]:
        """All files in a folder and its sub-folders, sorted. Links are followed, each folder once.

        Raises:
            TaskError: names what cannot be read.
        """
        found: list[Path] = []
        seen: set[str] = set()
        waiting = [folder]
        while waiting:
            place = waiting.pop()
            if (real := os.path.realpath(place)) in seen:
                continue  # a link that leads back
            seen.add(real)
            folders, files = self.inside(place)
            found += files
            waiting += reversed(folders)
        return sorted(found)

    def leave_folder(self, folder: Path) -> None:
        """Count a folder that is not read."""
        self.account.leave(NOT_READ, folder, _count(folder))

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse("folder", folder, error.strerror or str(error))
            return []

    def _kind(self, entry: os.DirEntry[str]) -> str | None:
        """``folder`` or ``file``; None if it is counted as something else."""
        path = Path(entry.path)
        try:
            if entry.is_dir():
                return "folder"
            if entry.is_file():
                return "file"
            path.stat()  # raises if it is a link that leads nowhere
        except OSError as error:
            lost = isinstance(error, FileNotFoundError) and path.is_symlink()
            why = "it leads to nothing that is there" if lost else error.strerror or str(error)
            self._refuse("link" if path.is_symlink() else "file", path, why)
        else:
            self.account.leave(NO_FILE, path)
        return None

    def _refuse(self, what: str, path: Path, why: str) -> None:
        if not self.skip:
            raise TaskError(
                f"{what} {str(path)!r} cannot be read: {why}. Give the silo's account the right "
                "to read it, correct or remove it; or leave out what cannot be read with the "
                "silo's option skip-unreadable = true."
            )
        self.account.leave(UNREADABLE, path)


def _count(path: Path) -> int:
    """1 for a file or a link; for a folder its files, and its folders that cannot be read."""
    if path.is_symlink():
        return 1
    closed: list[OSError] = []  # a file is none that can be walked, either
    return sum(len(files) for _, _, files in os.walk(path, onerror=closed.append)) + len(closed)


def by_ending(files: Iterable[Path], endings: Collection[str], account: Account) -> list[Path]:
    """The files with one of these endings; the account counts the others by theirs."""
    found = []
    for path in files:
        ending = path.suffix.lower()
        if ending in endings:
            found.append(path)
        else:
            usual = re.fullmatch(r"\.[a-z][a-z0-9]{0,7}", ending)
            account.leave(f"ending in {ending}" if usual else NO_ENDING, path)
    return found
