"""What ``coterie silo watch-model`` last found about the model in use; it stays in the folder.

``watching/last.json`` is the last look, ``watching/sent/`` has those that were sent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie.client.home.settings import SettingsError
from coterie.system.files import make_folder, write_atomically

FOLDER, LAST, SENT = "watching", "last.json", "sent"
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
        rows: a hash of each new sample's inputs.
        answered: a hash of each labelled sample, with its label.
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
    rows: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


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
        rows=tuple(found.rows),
        answered=tuple(found.answered),
    )


def look_to_send(home: Path, least: int) -> Look | None:
    """Return the look that may leave.

    The difference of two looks describes the samples that changed between them. So the last one
    that was sent leaves again until ``least`` samples, or none, differ from those of every one.
    """
    now, sent = last_look(home), looks_sent(home)
    if now is None:
        return None
    for look in sent:
        if any(0 < _apart(*own) < least for own in zip(_samples(look), _samples(now), strict=True)):
            return sent[-1]
    if now not in sent[-1:]:
        keep(home, now, f"{SENT}/{len(sent):04}.json")
    return now


def _samples(look: Look) -> tuple[Counter[str], Counter[str]]:
    """Return the samples that a look's columns, and its metric, are about."""
    return Counter(look.rows), Counter(look.answered)


def _apart(old: Counter[str], new: Counter[str]) -> int:
    return max((old - new).total(), (new - old).total())


def looks_sent(home: Path) -> list[Look]:
    """Return the looks that were sent, in order. Raises ``SettingsError`` if one is damaged."""
    names = (file.name for file in sorted((home / FOLDER / SENT).glob("*.json")))
    return [look for name in names if (look := last_look(home, f"{SENT}/{name}")) is not None]
