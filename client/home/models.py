"""Where a silo's folder holds the arrays of a run, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.numpy import save

from coterie.system.files import make_folder, write_atomically
from coterie.wire import Model


def folder_of(home: str, kind: str, run: str) -> Path:
    """The folder that holds what is of ``kind`` (``personal``, ``alone``) of a run, by round."""
    return Path(home) / kind / _as_file_name(run)


def file_of(home: str, kind: str, run: str) -> Path:
    """The file that holds arrays of ``kind`` (``models``) for a run."""
    return Path(home) / kind / f"{_as_file_name(run)}.safetensors"


def _as_file_name(run: str) -> str:
    """A run's name as a file's: the server gives it, so it must not lead anywhere else."""
    text = "".join(c if c.isalnum() or c in "-_." else "_" for c in run)
    return text.lstrip(".") or "run"


def write_model(file: Path, model: Model, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as safetensors, whole or not at all."""
    make_folder(file.parent)
    content = save(dict(model), metadata=dict(metadata) if metadata else None)
    write_atomically(file, content, private=True)
