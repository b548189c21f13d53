"""Find files in folders, and account for each: it is used, or left out for a reason.

Hidden files and leftovers of operating systems, file servers and editors are not data. Unreadable
files are refused by name, so that no data are lost silently.
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
"""Names, in lower case, that systems leave in folders without hiding them."""
HIDDEN = (".", "~$")
"""Prefixes of other such names; Office marks open documents with the second."""

HIDDEN_KIND = "hidden, or left behind by a system or program"
NOT_READ = "in folders that are not read"
UNREADABLE = "unreadable"
NO_FILE = "neither files nor folders"
NO_ENDING = "without a known extension"
DICOM = (".dcm", ".dicom", ".ima")
MORE = " and others"
DICOM_ADVICE = (
    "DICOM files are not read: convert them to 16-bit grey PNG files first, all silos in the same "
    "way"
)


def plain(path: Path | str) -> str:
    """Return a name in valid Unicode; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass
class Account:
    """The record of which files in a folder were used.

    Attributes:
        used: files that samples are made of.
        left: reason → number of files left out, and the first of them.
        said: other remarks on the folder, as sentences without a full stop.
    """

    place: Path
    used: set[Path] = field(default_factory=set)
    left: dict[str, tuple[int, Path]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def leave(self, why: str, path: Path, count: int = 1) -> None:
        """Count files as left out; ``path`` is the first of them, or their folder."""
        before, first = self.left.get(why, (0, path))
        if count:
            self.left[why] = before + count, first

    def leave_all(self, why: str, paths: Iterable[Path]) -> None:
        """Count each of these files as left out."""
        for path in paths:
            self.leave(why, path)

    def keep_only(self, kept: Collection[Path]) -> None:
        """Count all other used files as left out because they cannot be read."""
        self.leave_all(UNREADABLE, sorted(self.used.difference(kept)))
        self.used.intersection_update(kept)

    @property
    def total(self) -> str:
        """A summary in numbers, without file names: for a card."""
        left = sum(count for count, _ in self.left.values())
        each = ", ".join(f"{count} {why}" for why, (count, _) in self.left.items())
        said = f"{len(self.used)} of {len(self.used) + left} files used, {left} left out"
        return f"{said} ({each})" if each else said

    def lines(self) -> Iterator[str]:
        """Yield for display the numbers of files used and left out, with a name per reason."""
        left = sum(count for count, _ in self.left.values())
        yield (
            f"{plain(self.place.name)!r}: {len(self.used) + left} files, {len(self.used)} used, "
            f"{left} left out{':' * bool(left)}"
        )
        yield from (f"  {reason}" for reason in self.reasons())
        yield from [f"  {DICOM_ADVICE}"] if self.has_dicom else []
        yield from self.said

    def reasons(self) -> Iterator[str]:
        """Yield each reason for leaving files out, with their number and one name."""
        for why, (count, first) in self.left.items():
            yield f"{count} {why} ({self.called(first)!r}{MORE * (count > 1)})"

    @property
    def has_dicom(self) -> bool:
        """Whether some files left out are DICOM, by their names."""
        return any(why == f"ending in {ending}" for why in self.left for ending in DICOM)

    def called(self, path: Path) -> str:
        """Return a path below the folder, for display."""
        inside = path.relative_to(self.place) if path.is_relative_to(self.place) else path
        return plain(inside)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name is not data."""
    return name.startswith(HIDDEN) or name.lower() in LEFT_BEHIND


@dataclass(frozen=True)
class Walk:
    """A reader of folders that fills an account.

    ``skip`` leaves out what cannot be read instead of refusing it; folders named in
    ``never_hidden`` are data even if they look hidden.
    """

    account: Account
    skip: bool = False
    never_hidden: Collection[str] = ()

    def inside(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Return folders and files in a folder, sorted; raise ``TaskError`` if unreadable."""
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
        """Return all files below a folder, sorted; raise ``TaskError`` for what is unreadable.

        Links are followed, but each folder is read once.
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
        """Count a folder as not read."""
        self.account.leave(NOT_READ, folder, _count(folder))

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse("folder", folder, error.strerror or str(error))
            return []

    def _kind(self, entry: os.DirEntry[str]) -> str | None:
        """Return ``folder`` or ``file``; None if it is counted as left out."""
        path = Path(entry.path)
        try:
            if entry.is_dir():
                return "folder"
            if entry.is_file():
                return "file"
            path.stat()  # raises if it is a link that leads nowhere
        except OSError as error:
            lost = isinstance(error, FileNotFoundError) and path.is_symlink()
            why = (
                "it is a link to something that does not exist"
                if lost
                else error.strerror or str(error)
            )
            self._refuse("link" if path.is_symlink() else "file", path, why)
        else:
            self.account.leave(NO_FILE, path)
        return None

    def _refuse(self, what: str, path: Path, why: str) -> None:
        if not self.skip:
            raise TaskError(
                f"{what} {str(path)!r} cannot be read: {why}. Give the silo's account "
                "permission to read it, correct or remove it; or skip unreadable files with "
                "the silo's option skip-unreadable = true."
            )
        self.account.leave(UNREADABLE, path)


def _count(path: Path) -> int:
    """Return 1 for a file or link; for a folder its files and unreadable folders."""
    if path.is_symlink():
        return 1
    closed: list[OSError] = []  # a file is none that can be walked, either
    return sum(len(files) for _, _, files in os.walk(path, onerror=closed.append)) + len(closed)


def by_ending(files: Iterable[Path], endings: Collection[str], account: Account) -> list[Path]:
    """Return the files with one of these endings; the account counts the others."""
    found = []
    for path in files:
        ending = path.suffix.lower()
        if ending in endings:
            found.append(path)
        else:
            usual = re.fullmatch(r"\.[a-z][a-z0-9]{0,7}", ending)
            account.leave(f"ending in {ending}" if usual else NO_ENDING, path)
    return found
