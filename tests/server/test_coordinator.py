"""The coordinator's folder: one process serves it, and its SuperLink's database may be damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from coterie.server.site import coordinator
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
        pytest.raises(FederationError, match=r"is served already, by process \d+\. .* stop that"),
    ):
        coordinator.serve(federation, print)


def test_a_whole_database_stays(federation: Federation) -> None:
    before = federation.database.read_bytes()
    said: list[str] = []
    coordinator.set_aside_if_damaged(federation, said.append)
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
    coordinator.set_aside_if_damaged(federation, said.append)
    assert not file.exists()
    (aside,) = federation.folder.glob("superlink.db.damaged-*")
    assert aside.read_bytes() == bytes(content)
    assert str(aside) in said[0] and "coterie run --resume" in said[0]


def test_without_a_database_nothing_is_damaged(federation: Federation) -> None:
    federation.database.unlink()
    assert coordinator.damage_of(federation.database) == ""
