"""A run's checkpoints: what was committed after each of the last rounds, each in one file.

A file is safetensors, so that any tool can look at the arrays; its metadata hold the tree that
they hang in (``coterie.server.runs.codec``) and a SHA-256 over everything. A crash while one is
written leaves the one before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coterie.server.runs.codec import Arrays, CodecError, decode, encode
from coterie.strategies.errors import FederationError
from coterie.system.files import make_folder, replacing, why_unwritten

FAMILY = "coterie-checkpoint-"
FORMAT = f"{FAMILY}2"
KEPT = 3
"""How many of the last rounds are kept: a damaged file costs one round, not the run."""


class CheckpointError(FederationError):
    """A checkpoint cannot be written, or none of those that are there can be read."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds nothing else; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[str] = []
        """What ``load`` passed over, each with the reason."""

    def save(self, number: int, value: Any) -> int:
        """Commit a value as that of a round; return the bytes written.

        Raises:
            CheckpointError: it holds what cannot be stored, or the disk is full or fails.
        """
        try:
            tree, arrays = encode(value)
        except CodecError as error:
            raise CheckpointError(
                f"round {number} cannot be committed: {error}", round_number=number, phase="commit"
            ) from None
        target = self.folder / f"round-{number:06d}.safetensors"
        about = {"format": FORMAT, "tree": tree, "sha256": _digest(tree, arrays)}
        try:
            make_folder(self.folder)
            with replacing(target) as unfinished:
                save_file(arrays, unfinished, metadata=about)
            self._remove_old()
            return target.stat().st_size
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"round {number} cannot be committed to {self.folder}: {why_unwritten(error)}. The "
                "rounds before are safe: make room and go on with `coterie run --resume`.",
                round_number=number,
                phase="commit",
            ) from error

    def load(self) -> tuple[int, Any] | None:
        """The newest checkpoint that is whole, with its round; None where there are none.

        Raises:
            CheckpointError: there are some, but every one is damaged.
        """
        found = self._files()
        for file in reversed(found):
            try:
                return int(file.stem.removeprefix("round-")), _read(file)
            except (OSError, ValueError, SafetensorError) as error:
                self.damaged.append(f"checkpoint {file} is damaged: {error}")
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints can be read: {'; '.join(self.damaged)}. "
                "The run cannot be resumed: start a new one with `coterie run`."
            )
        return None

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))

    def _remove_old(self) -> None:
        """Also what a process that was killed has left, under whatever name."""
        for other in set(self.folder.iterdir()) - set(self._files()[-KEPT:]):
            other.unlink()


def _read(file: Path) -> Any:
    with safe_open(file, framework="np") as opened:
        about: Mapping[str, str] = opened.metadata() or {}
        written = about.get("format", "")
        if written != FORMAT and written.startswith(FAMILY):
            raise CheckpointError(
                f"{file.parent} was committed by another version of coterie. Resume the run with "
                "that version, or start it anew."
            )
        if written != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tree = about.get("tree", "")
    if _digest(tree, arrays) != about.get("sha256"):
        raise ValueError("its content does not match its SHA-256")
    return decode(tree, arrays)


def _digest(tree: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(tree.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"|{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(np.asarray(array, order="C").data)
    return digest.hexdigest()
