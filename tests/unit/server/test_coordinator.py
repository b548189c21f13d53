"""The coordinator's folder: one process serves it, and its SuperLink's database may be damaged."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from coterie.server.machine import superlink
from coterie.server.site import coordinator, database
from coterie.server.site.database import compact, damage_of, set_aside_if_damaged
from coterie.server.site.federation import Federation, create
from coterie.strategies import FederationError
from coterie.system.files import locked


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = create(tmp_path / "coordinator", ["127.0.0.1"])
    with sqlite3.connect(made.database) as opened:
        opened.execute("CREATE TABLE node (id INTEGER, key TEXT)")
        opened.executemany("INSERT INTO node VALUES (?, ?)", [(i, "k" * 100) for i in range(2000)])
    opened.close()
    return made


def test_a_folder_is_served_by_one_process(federation: Federation) -> None:
    with (
        locked(federation.folder, name=coordinator.LOCK),
        pytest.raises(FederationError, match=r"process \d+ already serves .* stop that"),
    ):
        coordinator.serve(federation, print)


@pytest.mark.parametrize("installed", ["1.33.1", "1.35.0", "1.42.0", "2.0.0"])
def test_another_flower_is_refused_with_the_one_that_is_needed(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("0.0.0.0:1", "127.0.0.1:2", "127.0.0.1:3")
    assert superlink.gated_command(*at, "--insecure")[-1] == "--insecure"
    monkeypatch.setattr(superlink, "version", lambda _: installed)
    said = rf"Flower {re.escape(installed)} is installed here\. A coordinator needs 1\.34: "
    with pytest.raises(FederationError, match=said):
        superlink.gated_command(*at)
    with pytest.raises(FederationError, match=said):
        superlink.plain_command("127.0.0.1", superlink.Ports())


def test_a_whole_database_stays(federation: Federation) -> None:
    before = federation.database.read_bytes()
    said: list[str] = []
    set_aside_if_damaged(federation.database, said.append)
    assert not said
    assert federation.database.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "header"])
def test_a_damaged_database_is_named_and_set_aside(damage: str, federation: Federation) -> None:
    file = federation.database
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "overwritten":
        content[4096:40960] = b"\xff" * 36864
    else:
        content[:100] = b"x" * 100
    file.write_bytes(content)
    said: list[str] = []
    set_aside_if_damaged(federation.database, said.append)
    assert not file.exists()
    (aside,) = federation.folder.glob("superlink.db.damaged-*")
    assert aside.read_bytes() == bytes(content)
    assert str(aside) in said[0] and "coterie run resume" in said[0]


def test_without_a_database_nothing_is_damaged(federation: Federation) -> None:
    federation.database.unlink()
    assert damage_of(federation.database) == ""


def filled(database: Path, megabytes: int) -> sqlite3.Connection:
    """A database as the SuperLink has it, in which a large reply was and is no more."""
    opened = sqlite3.connect(database, isolation_level=None)
    opened.execute("PRAGMA journal_mode=WAL")
    opened.execute("CREATE TABLE objects (content BLOB)")
    for _ in range(megabytes):
        opened.execute("INSERT INTO objects VALUES (zeroblob(1000000))")
    opened.execute("DELETE FROM objects")
    opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return opened


def test_what_a_large_reply_took_is_given_back_under_an_open_superlink(
    federation: Federation,
) -> None:
    said: list[str] = []
    held = filled(federation.database, 12)
    assert federation.database.stat().st_size > 12e6
    compact(federation.database, said.append)
    assert federation.database.stat().st_size < 0.5e6
    assert re.fullmatch(r"The SuperLink's database was 12\.\d MB and is 0\.\d MB now\.", said[0])
    assert held.execute("SELECT count(*) FROM node").fetchone() == (2000,)
    held.execute("INSERT INTO node VALUES (2000, 'k')")
    held.close()
    compact(federation.database, said.append)
    assert len(said) == 1 and damage_of(federation.database) == ""


def test_a_database_that_is_in_use_full_of_need_or_without_room_is_left_as_it_is(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    said: list[str] = []
    held = filled(federation.database, 12)
    held.execute("BEGIN IMMEDIATE")
    compact(federation.database, said.append)
    held.execute("COMMIT")
    compact(federation.database, said.append, most=1e5)
    usage = type(shutil.disk_usage(federation.folder))(10**12, 0, 500_000)
    with monkeypatch.context() as patch:
        patch.setattr(database.shutil, "disk_usage", lambda _: usage)
        compact(federation.database, said.append)
    assert not said and federation.database.stat().st_size > 12e6
    held.close()
    compact(federation.database, said.append)
    assert said
