"""What the SuperLink keeps of silos, in a database as Flower makes it, and how it is deleted."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from sqlalchemy import Engine, event

from coterie.engine.fast.superlink import leftovers
from coterie.engine.fast.superlink.leftovers import BusyError, forget_ended_runs

OVER, GOING = 1, -2
"""Runs: one whose process was killed, one that goes on."""
A, C = 5, (1 << 64) - 9
"""Nodes; Flower's ids have 64 bits, of which SQLite knows 63 and a sign."""
SECRETS = {what: f"{what} of c, nobody else's ".encode() * 400 for what in ("model", "rest", "old")}
SHARED = b"the model that a and c received " * 400


def name_of(letter: str) -> str:
    return letter * 64


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A database with a run of a that goes on, an ended one of a and c, and bytes of neither."""
    file = tmp_path / "superlink.db"
    stores = ObjectStoreFactory(str(file))
    LinkStateFactory(str(file), NoOpFederationManager(), stores).state()
    with closing(sqlite3.connect(file, isolation_level=None)) as opened:
        opened.execute("PRAGMA secure_delete = OFF")  # as where SQLite is built so
        for run, task, finished in ((OVER, 11, "2026-01-01"), (GOING, 12, None)):
            opened.execute(
                "INSERT INTO task (task_id, type, run_id, pending_at, finished_at) "
                "VALUES (?, 'serverapp', ?, '2026-01-01', ?)",
                (task, run, finished),
            )
            opened.execute(
                "INSERT INTO run (run_id, primary_task_id, override_config) VALUES (?, ?, '{}')",
                (run, task),
            )
        store(opened, "1", OVER, to=C, parts="sm")
        store(opened, "2", GOING, to=A, parts="s")
        store(opened, "3", OVER, to=A, reply_from=C, parts="r")
        for letter, content in (
            *(("s", SHARED), ("m", SECRETS["model"]), ("r", SECRETS["rest"])),
            *(("p", b"on its way"), ("o", SECRETS["old"])),
        ):
            opened.execute(
                "INSERT OR REPLACE INTO objects (object_id, content, is_available, ref_count) "
                "VALUES (?, ?, 1, (SELECT count(*) FROM object_children WHERE child_id = ?))",
                (name_of(letter), content, name_of(letter)),
            )
        opened.execute("INSERT INTO run_objects VALUES (?, ?)", (GOING, name_of("p")))
        opened.execute("DELETE FROM objects WHERE object_id = ?", (name_of("o"),))
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert SECRETS["old"][1000:1100] in file.read_bytes(), "what was deleted long ago"
    return file


def store(
    opened: sqlite3.Connection,
    name: str,
    run: int,
    *,
    to: int,
    parts: Sequence[str],
    reply_from: int = 0,
) -> None:
    """A message of these parts, and perhaps a reply of another's with them."""
    of, root = (signed(to), name_of(name)), name_of(name)
    opened.execute(
        "INSERT INTO message_ins (message_id, run_id, dst_node_id) VALUES (?, ?, ?)",
        (root, run, of[0]),
    )
    if reply_from:
        root = name_of("9")
        opened.execute(
            "INSERT INTO message_res (message_id, run_id, src_node_id, reply_to_message_id) "
            "VALUES (?, ?, ?, ?)",
            (root, run, signed(reply_from), name_of(name)),
        )
    insert = "INSERT OR IGNORE INTO objects (object_id, content, is_available) VALUES (?, '', 1)"
    opened.execute(insert, (root,))
    opened.execute("INSERT INTO run_objects VALUES (?, ?)", (run, root))
    for part in parts:
        opened.execute(insert, (name_of(part),))
        opened.execute("INSERT INTO object_children VALUES (?, ?)", (root, name_of(part)))
        opened.execute("INSERT OR IGNORE INTO run_objects VALUES (?, ?)", (run, name_of(part)))


def signed(node: int) -> int:
    return node - (1 << 64) if node >= 1 << 63 else node


def content_of(file: Path) -> bytes:
    """The file, and its log."""
    return b"".join(part.read_bytes() for part in sorted(file.parent.glob(f"{file.name}*")))


def as_it_should_be(file: Path) -> None:
    content = content_of(file)
    for what, secret in SECRETS.items():
        assert secret[1000:1100] not in content, what
    assert SHARED[:100] in content and b"on its way" in content
    stores = ObjectStoreFactory(str(file))
    LinkStateFactory(str(file), NoOpFederationManager(), stores).state()
    kept = stores.store()
    shared = ObjectTree(object_id=name_of("s"))
    assert kept.get_object_tree(name_of("2")) == ObjectTree(
        object_id=name_of("2"), children=[shared]
    )
    assert len(kept) == 3, "a's message, the model in it, and what is on its way"
    kept.delete(name_of("2"))
    assert len(kept) == 1, "nothing counts on the model any more"


def test_messages_of_ended_runs_go_with_every_byte(made: Path) -> None:
    with closing(sqlite3.connect(made)) as working:  # the SuperLink, which has it open
        working.execute("SELECT count(*) FROM run").fetchall()
        forget_ended_runs(made)
    as_it_should_be(made)
    forget_ended_runs(made)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_a_kill_at_any_point_leaves_the_rest_to_the_next_call(
    every: int, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real SIGKILL before the first, second, … statement, until nothing is left to do."""
    for stop in range(1, 99, every):
        child = os.fork()
        if not child:
            count, connect = 0, sqlite3.connect

            def step(*_: Any) -> None:
                nonlocal count
                count += 1
                if count == stop:  # noqa: B023 - the child lives in this turn alone
                    os.kill(os.getpid(), signal.SIGKILL)

            class Dying(sqlite3.Connection):
                def execute(self, *args: Any) -> Any:
                    step()
                    return super().execute(*args)

            event.listen(Engine, "before_cursor_execute", step)
            monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Dying))
            forget_ended_runs(made)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        with closing(sqlite3.connect(made)) as opened:
            assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert 15 < stop < 50 and status == 0
    as_it_should_be(made)


def test_what_cannot_be_cleaned_says_what_to_do(made: Path, monkeypatch: Any) -> None:
    forget_ended_runs(made.with_name("none"))
    assert not made.with_name("none").exists()
    monkeypatch.setattr(leftovers, "DEADLINE_S", 0.1)
    with closing(sqlite3.connect(made, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match=r"cannot be cleaned now \(.*locked"):
            forget_ended_runs(made)
    with closing(sqlite3.connect(made, isolation_level=None)) as reads:
        reads.execute("BEGIN")
        reads.execute("SELECT * FROM objects").fetchone()
        with pytest.raises(BusyError, match="cannot be cleaned now"):
            forget_ended_runs(made)
    made.with_name("other.db").write_bytes(b"no database" * 100)
    with pytest.raises(BusyError, match="not a database"):
        forget_ended_runs(made.with_name("other.db"))
