"""The SuperLink's database: looked at for damage, made small again, and what it holds of silos
deleted for good.

SQLite gives nothing back to the disk by itself: what one large reply took stays the file's. What
the SuperLink needs between runs are a few rows a silo and a run.

Flower deletes the messages of a run that is stopped. Those of a run whose process was killed stay,
and what was deleted leaves its bytes in the file. ``forget`` deletes the messages of chosen nodes,
with those of all runs that are over, and the objects that they consisted of (a model is one message
and many objects), also those in files beside the database; then the file is written anew. Both are
transactions of SQLite, so that a kill leaves the old state or the new one, and both can be done
while the SuperLink works. The tables are those of Flower 1.34; ``tests/e2e/test_operators.py``
holds them against a real one.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from coterie.server.machine import shelf
from coterie.strategies.errors import FederationError

DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ")
"""SQLite's names for what a truncated or overwritten file gives."""
EMPTY_FROM, EMPTY_SHARE = 2 * 2**20, 0.5
"""Bytes, and share of the file, that nothing needs, from which it is worth to make it smaller."""
QUICK_BYTES = 64 * 2**20
"""Needed bytes up to which that takes a moment. The SuperLink waits for it, 5 s at most."""
BUSY_S = 1.0
DEADLINE_S, LOOK_S = 30.0, 0.1

CHOSEN = """
CREATE TEMP TABLE going AS
  SELECT run.run_id AS id FROM run JOIN task ON task.task_id = run.primary_task_id
  WHERE task.finished_at IS NULL;
CREATE TEMP TABLE asked AS
  SELECT message_id AS id FROM message_ins
  WHERE dst_node_id IN (SELECT id FROM nodes) OR run_id NOT IN (SELECT id FROM going);
CREATE TEMP TABLE gone AS
  SELECT id FROM asked UNION
  SELECT message_id FROM message_res
  WHERE src_node_id IN (SELECT id FROM nodes) OR run_id NOT IN (SELECT id FROM going)
    OR reply_to_message_id IN (SELECT id FROM asked);
CREATE TEMP TABLE kept AS
  WITH RECURSIVE tree(id) AS (
    SELECT message_id FROM message_ins WHERE message_id NOT IN (SELECT id FROM gone)
    UNION SELECT message_id FROM message_res WHERE message_id NOT IN (SELECT id FROM gone)
    UNION SELECT child_id FROM object_children JOIN tree ON parent_id = tree.id)
  SELECT id FROM tree;
CREATE TEMP TABLE useless AS
  WITH RECURSIVE tree(id) AS (
    SELECT id FROM gone
    UNION SELECT object_id FROM objects WHERE object_id NOT IN
      (SELECT object_id FROM run_objects WHERE run_id IN (SELECT id FROM going))
    UNION SELECT child_id FROM object_children JOIN tree ON parent_id = tree.id)
  SELECT object_id AS id FROM objects
  WHERE object_id IN (SELECT id FROM tree) AND object_id NOT IN (SELECT id FROM kept);
"""
"""Messages that go (``gone``), and objects that no other message needs (``useless``). What a run
that goes on is just storing belongs to it and to no message yet: it stays."""
DELETED = """
DELETE FROM message_res WHERE message_id IN (SELECT id FROM gone);
DELETE FROM message_ins WHERE message_id IN (SELECT id FROM gone);
UPDATE objects SET ref_count = ref_count - (
    SELECT count(*) FROM object_children
    WHERE child_id = objects.object_id AND parent_id IN (SELECT id FROM useless))
  WHERE object_id IN (SELECT id FROM kept);
DELETE FROM object_children WHERE parent_id IN (SELECT id FROM useless)
  OR child_id IN (SELECT id FROM useless);
DELETE FROM run_objects WHERE object_id IN (SELECT id FROM useless)
  OR run_id NOT IN (SELECT id FROM going);
DELETE FROM objects WHERE object_id IN (SELECT id FROM useless);
"""


@contextmanager
def _opened(database: Path, *, mode: str) -> Iterator[sqlite3.Connection]:
    uri = f"{database.resolve().as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as opened:
        yield opened


def damage_of(database: Path) -> str:
    """What is wrong with the SuperLink's database; empty if nothing is, or there is none."""
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
    """Give the SuperLink a new database if its own is damaged.

    Who is enrolled is in the roster, where runs stand is in their checkpoints.
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
        f"The SuperLink's database was damaged ({damage}) and is now {aside}. It begins with a new "
        "one. Silos come back by themselves; a run that was going on is resumed with "
        "`coterie run --resume RUN`."
    )


def compact(database: Path, say: Callable[[str], None], *, most: float = QUICK_BYTES) -> None:
    """Give the disk back what nothing in the database needs any more, where that is worth it.

    A SuperLink may have it open: it waits meanwhile, and where it is in the middle of something,
    or the disk has no room for the copy that SQLite makes, nothing happens.

    Args:
        most: bytes that are needed, above which nothing happens.
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
    except (sqlite3.Error, OSError):  # busy, damaged or full: each is told elsewhere
        return
    say(f"The SuperLink's database was {whole / 1e6:.1f} MB and is {needed / 1e6:.1f} MB now.")


# ---------------------------------------------------------------- what it holds of silos


class BusyError(FederationError):
    """The database is in use for too long, or has another form."""


class Found(NamedTuple):
    """How much of it there is."""

    messages: int = 0
    objects: int = 0


def of_nodes(database: Path, nodes: Sequence[int]) -> Found:
    """What ``forget`` would delete.

    Args:
        database: of the SuperLink; need not be there.
        nodes: Flower's ids of them.

    Raises:
        BusyError: see there.
    """
    if not database.exists():
        return Found()
    with _working(database) as opened:
        return _choose(opened, nodes)


def forget(database: Path, nodes: Sequence[int]) -> None:
    """Delete what is kept of nodes, and of runs that are over, and write the file anew.

    Raises:
        BusyError: see there; repeating it does no harm.
    """
    if not database.exists():
        return
    with _working(database) as opened:
        opened.execute("BEGIN IMMEDIATE")
        _choose(opened, nodes)
        for statement in _statements(DELETED):
            opened.execute(statement)
        opened.execute("COMMIT")
        left = {str(name) for (name,) in opened.execute("SELECT object_id FROM objects")}
        if shelf.beside(database).is_dir():
            shelf.Shelf(shelf.beside(database)).keep(left)
        opened.execute("VACUUM")
        deadline = time.monotonic() + DEADLINE_S
        while opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:  # its log still has what was deleted
                raise sqlite3.OperationalError("it is being read")
            time.sleep(LOOK_S)


def _choose(opened: sqlite3.Connection, nodes: Sequence[int]) -> Found:
    opened.execute("CREATE TEMP TABLE nodes (id INTEGER)")
    signed = [(node - (1 << 64) if node >= 1 << 63 else node,) for node in nodes]
    opened.executemany("INSERT INTO nodes VALUES (?)", signed)
    for statement in _statements(CHOSEN):
        opened.execute(statement)
    counted = (opened.execute(f"SELECT count(*) FROM {name}") for name in ("gone", "useless"))
    return Found(*(int(found.fetchone()[0]) for found in counted))


def _statements(script: str) -> list[str]:
    """One by one: ``executescript`` would end the transaction first."""
    return [part for part in script.split(";") if part.strip()]


@contextmanager
def _working(database: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(database, timeout=DEADLINE_S, isolation_level=None)) as opened:
            yield opened
    except sqlite3.Error as error:
        raise BusyError(
            f"The SuperLink's database {database} cannot be cleaned now ({error}). If it stays so, "
            "stop the coordinator, remove that file and start it again: it makes a new one, and "
            "silos come back by themselves.",
            phase="withdrawal",
        ) from None
