"""The sets of rows whose sums have left a silo: no two of them may differ by few rows.

Rows are remembered by hashes, which stay in the silo's folder; a silo without a folder remembers
while its process runs.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.client.work.session import Session
from coterie.features.sums.rows import Rows
from coterie.system.files import make_folder, write_atomically

FOLDER = "answered"
MOST_SETS = 100
"""Most different sets of rows; one more is refused."""
Hashes = NDArray[np.uint64]
"""(n, 2) hash and person of each row; without persons, the second is the row's own number."""

_sets: dict[tuple[str, str, str], list[Hashes]] = {}
"""(silo, home, task) → the sets whose sums have left."""


def differs_little(session: Session, rows: Rows, used: NDArray[np.bool_], least: int) -> str:
    """Return why sums over ``used`` rows (n,) may not leave; empty, once they are remembered.

    ``least`` rows, or persons where one may have several, must differ from every earlier set.
    """
    settings = session.settings
    key = settings.name, settings.home, session.task.name
    marks = rows.kept.get("marks")
    if marks is None:
        marks = rows.kept["marks"] = _marks(rows)
    now: Hashes = marks[used]
    seen = rows.kept.setdefault("leaving", {})
    digest = hashlib.sha256(now.tobytes()).digest(), settings.home
    if seen.get(digest, 0) >= least:  # most exchanges of a fit
        return ""
    sets = _sets[key] = _read(session) if key not in _sets else _sets[key]
    few = [size for one in sets if 0 < (size := _difference(now, one)) < least]
    if few:
        return (
            f"answers no sum over these rows: they differ from rows whose sums have left by fewer "
            f"than {least} (statistics_from), which the difference would show. Use the columns of "
            "the earlier run: other columns have values in other rows."
        )
    if all(_difference(now, one) for one in sets):
        if len(sets) >= MOST_SETS:
            return f"has answered sums over {MOST_SETS} different sets of its rows, and no more."
        sets.append(now)
        _write(session, len(sets), now)
    seen[digest] = least
    return ""


def _marks(rows: Rows) -> Hashes:
    columns = [np.ascontiguousarray(c.values, np.float64) for c in (*rows.inputs, *rows.targets)]
    table = np.ascontiguousarray(np.stack(columns, axis=1))
    hashes = [int.from_bytes(hashlib.blake2b(r.tobytes(), digest_size=8).digest()) for r in table]
    persons = np.arange(len(table)) if rows.persons is None else rows.persons
    return np.stack([np.array(hashes, np.uint64), persons.astype(np.uint64)], axis=1)


def _difference(one: Hashes, other: Hashes) -> int:
    """Return how many rows, or persons, only one of two sets has, whichever has more."""
    return max(_extra(one, other), _extra(other, one))


def _extra(one: Hashes, other: Hashes) -> int:
    values, place, counts = np.unique(one[:, 0], return_inverse=True, return_counts=True)
    others, times = np.unique(other[:, 0], return_counts=True)
    found = np.searchsorted(others, values)
    there = np.minimum(found, max(len(others) - 1, 0))
    same = (found < len(others)) & (others[there] == values) if len(others) else found < 0
    surplus = np.maximum(counts - np.where(same, times[there] if len(others) else 0, 0), 0)
    whose = np.unique(one[surplus[place] > 0, 1])
    return int(min(surplus.sum(), len(whose)))


def _folder(session: Session) -> Path:
    task = hashlib.sha256(session.task.name.encode()).hexdigest()[:16]
    return Path(session.settings.home) / FOLDER / f"sums-{task}"


def _read(session: Session) -> list[Hashes]:
    if not session.settings.home:
        return []
    files = sorted(_folder(session).glob("*.npy"))
    return [np.load(file, allow_pickle=False) for file in files]


def _write(session: Session, number: int, rows: Hashes) -> None:
    if not session.settings.home:
        return
    make_folder(_folder(session), private=True)
    file = io.BytesIO()
    np.save(file, rows)
    write_atomically(_folder(session) / f"{number:04}.npy", file.getvalue(), private=True)


def forget() -> None:
    """Clear what silos without a folder have answered."""
    _sets.clear()
