"""Delete the SuperLink's data about ended runs.

Flower deletes the messages of a stopped run, but not those of a killed one, and deleted rows still
take up space in the file. Deletion works while the SuperLink runs. Each step is a transaction, so
an interruption leaves the old or the new state, and repeating a step is safe.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from coterie.engine.fast.superlink import blob_store

DEADLINE_S, LOOK_S = 30.0, 0.1


class BusyError(Exception):
    """The database stays in use for too long, or cannot be read."""


def forget_ended_runs(database: Path) -> None:
    """Delete all data of ended runs and compact the file, if it exists. Raises ``BusyError``."""
    if not database.exists():
        return
    try:
        _delete(database)
        _write_anew(database)
    except (sqlite3.Error, SQLAlchemyError) as error:
        raise BusyError(
            f"The SuperLink's database {database} cannot be cleaned now "
            f"({getattr(error, 'orig', error)}). If this persists, stop the coordinator, remove "
            "that file and start the coordinator again: it creates a new database, and silos "
            "reconnect by themselves."
        ) from None


def _delete(database: Path) -> None:
    # Flower's inside, which the other commands of operators need not load.
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    stores = ObjectStoreFactory(str(database))
    state = LinkStateFactory(str(database), NoOpFederationManager(), stores).state()
    store = stores.store()
    files = (
        blob_store.BlobStore(blob_store.beside(database))
        if blob_store.beside(database).is_dir()
        else None
    )
    # Only those: the SuperLink may be writing files that the database is to have in a moment.
    known = [] if files is None else [name for name in files.names if name in store]
    ended = [run.run_id for run in state.get_run_info(statuses=["finished"])]
    for run in ended:
        state.cleanup_run(run)
    if files is not None:
        files.erase((name for name in known if name not in store), ended)


def _write_anew(database: Path) -> None:
    with closing(sqlite3.connect(database, timeout=DEADLINE_S, isolation_level=None)) as opened:
        opened.execute("VACUUM")
        deadline = time.monotonic() + DEADLINE_S
        while opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:  # its log still has what was deleted
                raise sqlite3.OperationalError("it is being read")
            time.sleep(LOOK_S)
