"""A run's checkpoints: the committed state after each of the last rounds, written as differences.

A round's file is safetensors, so any tool can inspect the arrays. Each array is named by the
SHA-256 of its type, shape and values. A file has only arrays that no earlier file has. Its metadata
hold the tree of all arrays (``coterie.server.runs.codec``), their names, the earlier files with the
other arrays, and a SHA-256 over all that.

A file is kept while one of the last checkpoints needs it. When most of a file is unused, its other
arrays are written again (``kept-….safetensors``). So all files together never hold much more than
twice the content of the last checkpoints.

All files that a checkpoint names are complete and synced before it gets its name, and nothing that
a kept one names is removed. A crash at any moment leaves the previous one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coterie.server.runs.codec import Arrays, CodecError, decode, encode
from coterie.strategies.errors import FederationError
from coterie.system.files import make_folder, replacing, why_unwritten

FAMILY = "coterie-checkpoint-"
FORMAT = f"{FAMILY}7"
KEPT = 3
"""Rounds that are kept: a damaged file costs the rounds that need it."""
LASTING = "kept-"
"""Name prefix of files with arrays that are still needed when most of their file is not."""


class CheckpointError(FederationError):
    """A checkpoint cannot be written, or none of the existing ones can be read."""


@dataclass(frozen=True)
class _Contents:
    """The metadata of a round's file.

    ``names`` maps names in the ``tree`` to arrays; ``others`` are files with missing arrays.
    """

    tree: str
    names: Mapping[str, str]
    others: tuple[str, ...]

    def about(self) -> dict[str, str]:
        parts = {
            "tree": self.tree,
            "arrays": json.dumps(self.names),
            "files": json.dumps(self.others),
        }
        return {"format": FORMAT, **parts, "sha256": _digest(*parts.values())}


class Checkpoints:
    """The checkpoints of one run, in a folder that holds nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[str] = []
        """What ``load`` passed over, each with the reason."""
        self._stored: dict[str, set[str]] = {}
        """File → arrays in it, of what this process has written, or read and found whole."""

    def save(self, number: int, value: Any) -> int:
        """Commit a value as the state of a round; return the bytes written.

        Raises ``CheckpointError`` if content cannot be stored, or the disk is full or fails.
        """
        try:
            tree, arrays = encode(value)
        except CodecError as error:
            raise CheckpointError(f"round {number} cannot be committed: {error}") from None
        names = {short: _name_of(array) for short, array in arrays.items()}
        try:
            make_folder(self.folder)
            written = self._write(number, tree, names, arrays)
            self._remove_old(number)
            return written
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"round {number} cannot be committed to {self.folder}: {why_unwritten(error)}. "
                "Earlier rounds are safe: free space and continue with `coterie run resume`."
            ) from error

    def _write(self, number: int, tree: str, names: Mapping[str, str], arrays: Arrays) -> int:
        """Write a round's file, after a file with the arrays that outlast their files."""
        target = self.folder / f"round-{number:06d}.safetensors"
        self._stored.pop(target.name, None)  # a round that is repeated
        needed = {names[short]: array for short, array in arrays.items()}
        used = {file: needed.keys() & held for file, held in self._stored.items()}
        lasting: dict[str, NDArray[Any]] = {}
        for file, names_there in used.items():
            there = {name: needed[name] for name in names_there}
            if there and _is_mostly_dead(self.folder / file, there):
                lasting |= there
        written = 0
        if lasting:
            for held in self._stored.values():
                held.difference_update(lasting)
            file = f"{LASTING}{_digest(*sorted(lasting))[:32]}.safetensors"
            written += self._put(self.folder / file, lasting, {})
        others = {file for file, held in self._stored.items() if held & needed.keys()}
        known = set[str]().union(*self._stored.values())
        fresh = {name: array for name, array in needed.items() if name not in known}
        about = _Contents(tree, names, tuple(sorted(others))).about()
        return written + self._put(target, fresh, about)

    def _put(self, file: Path, arrays: Mapping[str, NDArray[Any]], about: dict[str, str]) -> int:
        with replacing(file) as unfinished:
            save_file(dict(arrays), unfinished, metadata=about)
        self._stored[file.name] = set(arrays)
        return file.stat().st_size

    def load(self) -> tuple[int, Any] | None:
        """Return the round and value of the newest intact checkpoint; None if there are none.

        Raises ``CheckpointError`` if there are some, but every one is damaged.
        """
        found = _rounds(self.folder)[-KEPT:]
        for file in reversed(found):
            try:
                value = self._read(file)
                return _number_of(file), value
            except (OSError, ValueError, SafetensorError) as error:
                self.damaged.append(f"checkpoint {file} is damaged: {error}")
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints can be read: {'; '.join(self.damaged)}. "
                "The run cannot be resumed: start a new one with `coterie run`."
            )
        return None

    def _read(self, file: Path) -> Any:
        contents = _contents(file)
        wanted = set(contents.names.values())
        found: dict[str, NDArray[Any]] = {}
        stored: dict[str, set[str]] = {}
        for part in (file.name, *contents.others):
            own = _arrays_of(self.folder / part, wanted - found.keys())
            stored[part] = set(own)
            found |= own
        if missing := wanted - found.keys():
            raise ValueError(f"{len(missing)} of its arrays are in no file")
        value = decode(contents.tree, {short: found[n] for short, n in contents.names.items()})
        self._stored = stored
        return value

    def _remove_old(self, number: int) -> None:
        """Remove all files that no kept checkpoint needs, including later rounds and leftovers."""
        kept = [file for file in _rounds(self.folder) if _number_of(file) <= number][-KEPT:]
        names = set[str]().union(*({file.name, *others_of(file)} for file in kept))
        # Checkpoints go before what they name.
        for other in sorted(self.folder.iterdir(), key=lambda file: file.name, reverse=True):
            if other.name not in names:
                other.unlink()
                self._stored.pop(other.name, None)


def _rounds(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _number_of(file: Path) -> int:
    return int(file.stem.removeprefix("round-"))


def _contents(file: Path) -> _Contents:
    """Read the metadata of a round's file.

    Raises:
        CheckpointError: another version of coterie wrote it.
        OSError, SafetensorError, ValueError: it is damaged.
    """
    with safe_open(file, framework="np") as opened:
        about: Mapping[str, str] = opened.metadata() or {}
    written = about.get("format", "")
    if written != FORMAT and written.startswith(FAMILY):
        raise CheckpointError(
            f"{file.parent} was committed by another version of coterie. Resume the run with "
            "that version, or start a new run."
        )
    if written != FORMAT:
        raise ValueError(f"it does not have format {FORMAT}")
    try:
        names, others = json.loads(about["arrays"]), json.loads(about["files"])
        found = _Contents(about["tree"], names, tuple(others))
    except (KeyError, TypeError) as error:
        raise ValueError(f"its metadata lack {error}") from None
    if found.about() != about:
        raise ValueError("its content does not match its SHA-256")
    return found


def others_of(file: Path) -> tuple[str, ...]:
    """Return the files that a round's file names; none if it cannot be used any more."""
    try:
        return _contents(file).others
    except (CheckpointError, OSError, ValueError, SafetensorError):
        return ()


def _arrays_of(file: Path, wanted: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return those of the wanted arrays that are in a file.

    Raises ``OSError``, ``SafetensorError`` or ``ValueError`` if one is damaged.
    """
    with safe_open(file, framework="np") as opened:
        found = {name: opened.get_tensor(name) for name in {*opened.keys()} & {*wanted}}
    for name, array in found.items():
        if _name_of(array) != name:
            raise ValueError(f"the content of {file.name} does not match its SHA-256")
    return found


def _is_mostly_dead(file: Path, needed: Arrays) -> bool:
    """Return whether the needed arrays are less than half of a file's bytes."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return 2 * sum(array.nbytes for array in needed.values()) < file.stat().st_size - 8 - header


def _name_of(array: NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype}|{array.shape}|".encode())
    digest.update(np.asarray(array, order="C").data)
    return digest.hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
