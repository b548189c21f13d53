"""The model that a silo uses, and those that it used before: copies that no run overwrites.

``in-use/history.json`` lists them, the newest last; each is a file in ``in-use/``, named by the
model and the hash of its arrays. A copy is complete before the list names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.client.home.settings import SettingsError
from coterie.system.files import make_folder, write_atomically
from coterie.system.processes import account, utc_now

FOLDER, HISTORY = "in-use", "history.json"
NAMED = 12
"""Digits of a hash in the name of a copy."""


@dataclass(frozen=True)
class Use:
    """A decision to use a model.

    Attributes:
        model: its name in the silo's folder when it was chosen: ``RUN``, ``personalised/RUN``.
        file: its copy, in ``in-use/``.
        sha256: of its arrays.
        since: ISO 8601, UTC.
        by: account of the person who decided.
    """

    model: str
    file: str
    sha256: str
    since: str
    by: str


def history(home: Path) -> tuple[Use, ...]:
    """Return the models that were in use, the present one last; empty if none was chosen.

    Raises ``SettingsError`` if the list is damaged.
    """
    file = home / FOLDER / HISTORY
    try:
        return tuple(Use(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{file} is damaged: {error}. Remove it, and choose the model with `coterie silo use`."
        ) from None


def file_in_use(home: Path) -> Path | None:
    """Return the file of the model in use; None if none was chosen.

    Raises ``SettingsError`` if the list is damaged or the file is gone.
    """
    uses = history(home)
    if not uses:
        return None
    file = home / FOLDER / uses[-1].file
    if not file.exists():
        raise SettingsError(
            f"the model in use, {file}, is gone. Choose another one with `coterie silo use`."
        )
    return file


def use(home: Path, model: str, content: bytes, sha256: str) -> Use:
    """Use a model from now on; ``content`` is its file, with the card."""
    stem = f"{model.replace('/', '-')}-{sha256[:NAMED]}"
    chosen = Use(model, f"{stem}.safetensors", sha256, utc_now(), account())
    make_folder(home / FOLDER, private=True)
    write_atomically(home / FOLDER / chosen.file, content, private=True)
    _write(home, [*history(home), chosen])
    return chosen


def back(home: Path) -> Use:
    """Use the previous model again, and return it; the list loses the last one.

    Raises ``SettingsError`` if there is none.
    """
    uses = history(home)
    if len(uses) < 2:
        raise SettingsError(
            "no model was in use before. `coterie silo models` lists the models; "
            "`coterie silo use` chooses one."
        )
    before = uses[-2]
    if not (home / FOLDER / before.file).exists():
        raise SettingsError(f"the model before, {home / FOLDER / before.file}, is gone.")
    _write(home, uses[:-1])
    return before


def _write(home: Path, uses: Sequence[Use]) -> None:
    text = json.dumps([asdict(one) for one in uses], indent=1)
    write_atomically(home / FOLDER / HISTORY, text.encode(), private=True)
