"""The list of enrolled silos, and how the SuperLink is made to follow it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.server.site.enrolled import Node, enrol, names_by_node, read, remove, sync
from coterie.strategies.errors import FederationError
from coterie.system.files import locked
from coterie.wire.enrolment import Request, public_pem


def request(name: str) -> Request:
    return Request(name, public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()))


class Link:
    """A SuperLink's table of nodes, with its rule that a key is never registered twice."""

    def __init__(self) -> None:
        self.table: dict[str, Node] = {}
        self.calls: list[str] = []

    def nodes(self) -> Sequence[Node]:
        return list(self.table.values())

    def register(self, key: bytes) -> int:
        assert key.decode() not in self.table
        node = Node(100 + len(self.table), key.decode(), "registered")
        self.table[key.decode()] = node
        self.calls.append(f"register {node.node_id}")
        return node.node_id

    def unregister(self, node_id: int) -> None:
        (node,) = [n for n in self.table.values() if n.node_id == node_id]
        self.table[node.key] = replace(node, status="unregistered")
        self.calls.append(f"unregister {node_id}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "roster.json"


def test_a_name_belongs_to_its_key(file: Path) -> None:
    first = request("a")
    assert enrol(file, first) == enrol(file, first), "asking twice changes nothing"
    assert len(read(file)) == 1
    with pytest.raises(FederationError, match="the name 'a' belongs to another key"):
        enrol(file, request("a"))
    with pytest.raises(FederationError, match="this key is enrolled already, as 'a'"):
        enrol(file, replace(first, name="b"))


def test_a_removed_key_never_comes_back_but_its_name_may(file: Path) -> None:
    first = request("a")
    enrol(file, first)
    remove(file, "a")
    for name in ("a", "b"):
        with pytest.raises(FederationError, match="never accepted again"):
            enrol(file, replace(first, name=name))
    enrol(file, request("a"))
    assert [bool(entry.removed) for entry in read(file)] == [True, False]
    with pytest.raises(FederationError, match=r"no silo 'b' is enrolled. Enrolled: a\."):
        remove(file, "b")


def test_removing_concerns_who_is_enrolled_today(file: Path) -> None:
    enrol(file, request("a"))
    before = remove(file, "a")
    with pytest.raises(FederationError, match=r"no silo 'a' is enrolled. Enrolled: none."):
        remove(file, "a")
    second = request("a")
    enrol(file, second)
    assert remove(file, "a").key == second.key.decode()
    assert before in read(file), "the first removal stays as it was"


def test_the_superlink_is_made_to_know_exactly_the_enrolled(file: Path) -> None:
    link = Link()
    enrol(file, request("a"))
    enrol(file, request("b"))
    assert names_by_node(file) == {}, "the SuperLink does not know yet"
    sync(file, link)
    assert sorted(names_by_node(file).values()) == ["a", "b"]
    again = list(link.calls)
    sync(file, link)
    assert link.calls == again
    remove(file, "a")
    sync(file, link)
    assert list(names_by_node(file).values()) == ["b"]
    assert [node.status for node in link.nodes()] == ["unregistered", "registered"]


def test_a_superlink_that_lost_its_database_is_told_anew(file: Path) -> None:
    enrol(file, request("a"))
    enrol(file, request("gone"))
    sync(file, Link())
    remove(file, "gone")
    empty = Link()
    empty.table["other"] = Node(1, "other", "online")  # somebody whom nobody enrolled
    nodes = sync(file, empty)
    assert set(nodes) == {"a"}
    assert empty.table["other"].status == "unregistered"
    assert names_by_node(file) == {nodes["a"].node_id: "a"}


def test_a_damaged_list_is_not_taken_for_an_empty_one(file: Path) -> None:
    file.write_text("[{")
    with pytest.raises(FederationError, match="cannot be read"):
        read(file)


def test_a_list_that_another_command_holds_is_not_waited_for_without_end(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.site.register.LOCK_DEADLINE_S", 0.2)
    said = rf"cannot be changed: .* locked by process {os.getpid()}\)\. Stop that process"
    with locked(file.parent, name="roster.lock"), pytest.raises(FederationError, match=said):
        enrol(file, request("a"))
    assert read(file) == []


def _enrol_some(file: Path, start: int) -> None:
    for number in range(start, start + 5):
        enrol(file, request(f"silo-{number}"))


def test_two_operators_at_once_lose_nobody(file: Path) -> None:
    context = get_context("spawn")  # a fork of a process with threads may never return
    workers = [context.Process(target=_enrol_some, args=(file, 5 * i)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(read(file)) == 10
