"""The SuperLink's database: checks for damage, and compaction.

SQLite never returns space to the disk by itself: after one large reply the file stays large.
Between runs the SuperLink needs only a few rows per silo and run.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ")
"""SQLite's error names for a truncated or overwritten file."""
EMPTY_FROM, EMPTY_SHARE = 2 * 2**20, 0.5
"""Unused bytes, and their share of the file, from which compacting is worthwhile."""
QUICK_BYTES = 64 * 2**20
"""Used bytes up to which compaction is quick; the SuperLink waits for it, at most 5 s."""
BUSY_S = 1.0


@contextmanager
def _opened(database: Path, *, mode: str) -> Iterator[sqlite3.Connection]:
    uri = f"{database.resolve().as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as opened:
        yield opened


def damage_of(database: Path) -> str:
    """Return the damage of the SuperLink's database; empty if it is intact or missing."""
    if not database.exists():
        return ""
    try:
        with _opened(database, mode="ro") as opened:
            (found,) = opened.execute("PRAGMA quick_check(1)").fetchone()
            return "" if found == "ok" else str(found)
    except sqlite3.DatabaseError as error:
        damaged = getattr(error, "sqlite_errorname", "").startswith(DAMAGE)
        return str(error) if damaged else ""  # else it is busy, or may not be read now


def set_aside_if_damaged(database: Path, say: Callable[[str], None]) -> None:
    """Move a damaged database away, so that the SuperLink starts a new one.

    The roster has the enrolled silos, and checkpoints have the state of runs.
    """
    damage = damage_of(database)
    if not damage:
        return
    aside = database.with_name(f"{database.name}.damaged-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    for suffix in ("-wal", "-shm", ""):
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    say(
        f"The SuperLink's database was damaged ({damage}) and is now {aside}. The SuperLink "
        "starts with a new one. Silos reconnect by themselves; resume an active run with "
        "`coterie run resume RUN`."
    )


def compact(database: Path, say: Callable[[str], None], *, most: float = QUICK_BYTES) -> None:
    """Shrink the database if enough of it is unused and at most ``most`` bytes are needed.

    A SuperLink that has it open waits meanwhile. If it is busy, or the disk has no room for
    SQLite's copy, nothing happens.
    """
    if not database.exists():
        return
    try:
        with _opened(database, mode="rw") as opened:
            size, pages, empty = (
                int(opened.execute(f"PRAGMA {what}").fetchone()[0])
                for what in ("page_size", "page_count", "freelist_count")
            )
            whole, unused = size * pages, size * empty
            needed, room = whole - unused, shutil.disk_usage(database.parent).free
            if unused < max(EMPTY_FROM, EMPTY_SHARE * whole) or needed > min(most, room / 3):
                return
            opened.execute("VACUUM")
            opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (sqlite3.Error, OSError):  # busy, damaged or full: each is reported elsewhere
        return
    say(f"The SuperLink's database was {whole / 1e6:.1f} MB and is {needed / 1e6:.1f} MB now.")
