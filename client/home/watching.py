"""What ``coterie silo watch-model`` last found about the model in use; it stays in the folder.

``watching/last.json`` is the last look, ``watching/sent/`` has those that were sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsInt

from coterie.client.home.settings import SettingsError
from coterie.system.files import make_folder, write_atomically

FOLDER, LAST, SENT = "watching", "last.json", "sent"
PlainMarks = tuple[tuple[int, int], ...]
"""A hash of each sample, and a number of its person."""
Interval = tuple[float, float, float]
"""A value, and the ends of its 95% interval."""


@dataclass(frozen=True)
class Look:
    """A comparison of new samples with those that the model was taken into use with.

    Attributes:
        at: ISO 8601, UTC.
        model, sha256: the model's name, and the hash of its arrays.
        samples, labelled: new samples whose inputs, and whose answers, were looked at.
        columns: ``drift.Shift`` of each input, as JSON values.
        metric: the metric that decides whether the model is worse; empty without labelled samples.
        figures, before: metric → interval, on the labelled samples, and as recorded before.
        worse: whether the metric is worse than before; None if that cannot be said.
        warnings: for people, one sentence each; empty if all is well.
        rows: marks of the new samples' inputs.
        answered: marks of the labelled samples, with their labels.
    """

    at: str
    model: str
    sha256: str
    samples: int
    labelled: int
    columns: tuple[Mapping[str, Any], ...] = ()
    metric: str = ""
    figures: Mapping[str, Interval] | None = None
    before: Mapping[str, Interval] | None = None
    worse: bool | None = None
    warnings: tuple[str, ...] = ()
    rows: PlainMarks = ()
    answered: PlainMarks = ()


def keep(home: Path, look: Look, name: str = LAST) -> None:
    """Write a look into the silo's folder."""
    file = home / FOLDER / name
    make_folder(file.parent, private=True)
    write_atomically(file, json.dumps(asdict(look)).encode(), private=True)


def last_look(home: Path, name: str = LAST) -> Look | None:
    """Return the last look, or that of another file; None if there is none.

    Raises ``SettingsError`` if it is damaged.
    """
    file = home / FOLDER / name
    try:
        found = Look(**json.loads(file.read_text(encoding="utf-8")))
        rows, answered = plain_marks(found.rows), plain_marks(found.answered)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{file} is damaged: {error}. Remove it, and run `coterie silo watch-model`."
        ) from None
    return replace(
        found,
        columns=tuple(found.columns),
        warnings=tuple(found.warnings),
        rows=rows,
        answered=answered,
    )


def plain_marks(marks: Iterable[Iterable[SupportsInt]]) -> PlainMarks:
    """Return marks (n, 2) as whole numbers of Python."""
    return tuple((int(row), int(person)) for row, person in marks)


def looks_sent(home: Path) -> list[Look]:
    """Return the looks that were sent, in order. Raises ``SettingsError`` if one is damaged."""
    names = (file.name for file in sorted((home / FOLDER / SENT).glob("*.json")))
    return [look for name in names if (look := last_look(home, f"{SENT}/{name}")) is not None]
