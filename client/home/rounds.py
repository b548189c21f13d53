"""Arrays that a silo saves: their place in its folder, and those kept from round to round.

A coordinator that recovers from a crash repeats a few rounds. So a silo keeps the arrays of the
last rounds, and a round always starts from those *before* it: repeating it gives the same result.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from coterie.client.home.settings import SiloSettings
from coterie.system.files import make_folder, write_atomically
from coterie.wire import Model

log = logging.getLogger("coterie.silo")

KEPT = 4
"""Rounds on disk: one more than the coordinator's checkpoints, which may lack the last round."""
IN_MEMORY = 2
"""Rounds in memory: the last one, and the one before it to repeat it."""
MAX_RUNS = 4
"""Runs whose arrays of one kind are kept in memory for one silo; on disk, for arrays that only the
run itself needs."""

PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Texts that are names of files as they are."""

_memory: dict[tuple[str, str, str, str], dict[int, Model]] = {}
"""(silo, home, kind, run) → round → arrays: the only copy without a home, else a cache."""


def keep(
    settings: SiloSettings,
    kind: str,
    model: Model,
    *,
    run: str,
    number: int,
    on_disk: bool = True,
    passing: bool = False,
) -> None:
    """Save arrays as those after a round, and delete those of later rounds.

    Later rounds belong to a past that was rolled back. Without ``on_disk`` the arrays are kept in
    memory only, even if the silo has a folder. ``passing`` arrays are needed only by the run
    itself: those of the last ``MAX_RUNS`` runs remain, of an ended run the last round's.
    """
    key = (settings.name, settings.home, kind, run)
    rounds = {r: kept for r, kept in _memory.pop(key, {}).items() if r < number}
    for old in [k for k in _memory if k[:3] == key[:3]][: -MAX_RUNS + 1]:
        del _memory[old]
    _memory[key] = dict(sorted((rounds | {number: model}).items())[-IN_MEMORY:])
    if not settings.home:
        return
    folder = folder_of(settings.home, kind, run)
    if passing and on_disk:
        make_room(folder)
    for later, file in files_of(folder).items():
        if later > number:
            file.unlink()
    if on_disk:
        write_model(folder / f"round-{number:06d}.safetensors", model)
    for file in list(files_of(folder).values())[:-KEPT]:
        file.unlink()


def make_room(folder: Path) -> None:
    """Before a run's first arrays of a kind are saved, remove those of the most idle runs.

    ``MAX_RUNS`` remain, this one counted.
    """
    if folder.exists():
        return
    runs = [one for one in folder.parent.glob("*") if one.is_dir()]
    for before in sorted(runs, key=lambda one: one.stat().st_mtime)[: 1 - MAX_RUNS]:
        _remove(before)


def forget(settings: SiloSettings, kind: str, *, run: str, but: int | None = None) -> None:
    """Remove a run's arrays, except those of the round ``but``."""
    key = (settings.name, settings.home, kind, run)
    kept = {number: model for number, model in _memory.pop(key, {}).items() if number == but}
    if kept:
        _memory[key] = kept
    if settings.home:
        _remove(folder_of(settings.home, kind, run), but=but)


def keep_newest(settings: SiloSettings, kind: str, *, run: str) -> None:
    """Remove a run's arrays except those of its last round: more rounds may be added to it."""
    found = newest(settings, kind, run=run, before=sys.maxsize)
    forget(settings, kind, run=run, but=None if found is None else found[0])


def kinds(settings: SiloSettings, run: str) -> set[str]:
    """Return the kinds of arrays that are saved for a run."""
    own = (settings.name, settings.home)
    found = {kind for *whose, kind, known in _memory if (*whose,) == own and known == run}
    if settings.home:
        folders = Path(settings.home).glob(f"*/{folder_of(settings.home, '', run).name}")
        found |= {folder.parent.name for folder in folders}
    return found


def _remove(folder: Path, *, but: int | None = None) -> None:
    for number, file in files_of(folder).items():
        if number != but:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


def latest(settings: SiloSettings, kind: str, *, run: str, before: int) -> Model | None:
    """Return the newest arrays of an earlier round than ``before``, or None."""
    found = newest(settings, kind, run=run, before=before)
    return None if found is None else found[1]


def newest(settings: SiloSettings, kind: str, *, run: str, before: int) -> tuple[int, Model] | None:
    """Return the newest arrays of an earlier round than ``before`` with their round, or None."""
    rounds = _memory.get((settings.name, settings.home, kind, run), {})
    known = [r for r in rounds if r < before]
    if known:
        return max(known), rounds[max(known)]
    if not settings.home:
        return None
    found = {r: f for r, f in files_of(folder_of(settings.home, kind, run)).items() if r < before}
    for number in sorted(found, reverse=True):
        try:
            return number, dict(load_file(found[number]))
        except (OSError, SafetensorError) as error:
            log.error("%s is damaged (%s): trying the round before", found[number], error)
    return None


def files_of(folder: Path) -> dict[int, Path]:
    """Return round → file, in order."""
    files = sorted(folder.glob("round-*.safetensors"))
    return {int(file.stem.removeprefix("round-")): file for file in files}


def folder_of(home: str, kind: str, run: str) -> Path:
    """Return the folder of a run's arrays of ``kind`` (``personal``, ``alone``), by round.

    The coordinator chooses the run's name, which must not escape the silo's folder.
    """
    return Path(home) / kind / file_name(run)


def file_name(text: str) -> str:
    """Return a name of a file for a text; two texts have two names.

    A text of letters, digits and ``-_.`` is its own name. Any other is shortened and gets a
    ``~``, which no such text has, and its hash.
    """
    if PLAIN.fullmatch(text):
        return text
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in text[:40])
    return f"{safe.lstrip('.') or 'run'}~{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def file_of(home: str, kind: str, run: str) -> Path:
    """Return the file of a run's arrays of ``kind`` (``models``)."""
    folder = folder_of(home, kind, run)
    return folder.with_name(f"{folder.name}.safetensors")


def write_model(file: Path, model: Model, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as safetensors, atomically."""
    make_folder(file.parent)
    content = save(dict(model), metadata=dict(metadata) if metadata else None)
    write_atomically(file, content, private=True)
