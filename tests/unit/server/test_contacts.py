"""What is known of silos from earlier runs, and that a run does not ask those of other tasks."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie import wire
from coterie.server.machine.superlink import Ports
from coterie.server.runs import roster as rosters
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.server.runs.roster import EnrolledRoster
from coterie.server.runs.run import execute
from coterie.server.site import contacts as module
from coterie.server.site.contacts import CONTACTS, SILOS, Contact, Contacts
from coterie.server.site.enrolled import Entry
from coterie.server.site.federation import create
from coterie.server.site.operator import print_roster
from coterie.wire.enrolment import public_pem
from tests.conftest import digits_config
from tests.kit import Tap


@pytest.fixture
def contacts(tmp_path: Path) -> Contacts:
    """Silo a, node 1, connected a minute ago, has said since that it serves digits."""
    found = Contacts(tmp_path)
    connected = time.time() - 60
    found.note_seen({"a": Contact(1, "online", connected, time.time())})
    found.note({"a": (1, ("digits",))})
    return found


def test_a_silo_of_other_tasks_need_not_be_asked(contacts: Contacts) -> None:
    assert contacts.objection(1, "a", "mnist") == (
        "it serves task 'digits', the run is of task 'mnist'."
    )
    assert contacts.objection(1, "a", "digits") == ""


def test_a_silo_is_asked_when_it_connected_since_or_after_an_hour_or_has_another_key(
    contacts: Contacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contacts.objection(2, "a", "mnist") == "" and contacts.objection(1, "b", "mnist") == ""
    before = contacts.seen()["a"]
    contacts.note_seen({"a": replace(before, connected=time.time() + 1)})
    assert contacts.objection(1, "a", "mnist") == ""
    contacts.note_seen({"a": before})
    assert contacts.objection(1, "a", "mnist")
    monkeypatch.setattr(module, "ASK_AGAIN_S", -1.0)
    assert contacts.objection(1, "a", "mnist") == ""


@pytest.mark.parametrize("file", [SILOS, CONTACTS])
@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"a": {"node": "x"}}', "[" * 100_000])
def test_a_damaged_file_costs_only_that_silos_are_asked(
    file: str, content: str, contacts: Contacts
) -> None:
    (contacts.folder / file).write_text(content)
    assert contacts.objection(1, "a", "mnist") == ""
    contacts.note({"a": (1, ("mnist",))})
    assert contacts.served()["a"].tasks == ("mnist",)


def test_what_cannot_be_written_down_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Contacts(tmp_path / "gone").note({"a": (1, ("digits",))})
    assert "the tasks that silos serve could not be saved:" in caplog.text


def test_the_roster_tells_tasks_and_last_contact_of_silos_that_are_enrolled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create(tmp_path / "study", ["localhost"], control_port=Ports.free().control)
    key = public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()).decode()
    entries = [
        Entry("a", key, "2026-01-01", node_id=1),
        Entry("b", key, "2026-01-01", node_id=2),
        Entry("c", key, "2026-01-01", removed="2026-02-02", node_id=3),
    ]
    made.roster.write_text(json.dumps([vars(entry) for entry in entries]))
    contacts = Contacts(made.folder)
    for name, node in (("a", 1), ("b", 9), ("c", 3)):  # b said it with an earlier key
        contacts.note({name: (node, ("readm", "stroke"))})
    seen = datetime(2026, 3, 4, 5, 6, 7).timestamp()
    contacts.note_seen({"a": Contact(1, "offline", 1.0, seen)})
    print_roster(made)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: re.split(r"  +", line.strip()) for line in lines}
    assert rows["a"][2:4] == ["2026-03-04 05:06:07", "readm, stroke"]
    assert "not asked yet" in rows["b"]
    assert rows["c"][1] == "removed 2026-02-02" and "readm, stroke" not in rows["c"]


def nodes_asked(grid: Tap) -> list[int]:
    """Return who was asked who it is, as often as it was."""
    kind = wire.DESCRIBE
    return sorted(m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == kind)


def study(tmp_path: Path) -> tuple[Tap, dict[int, str], Contacts]:
    """Two silos of digits, and one of another task."""
    task = tmp_path / "stroke.toml"
    task.write_text(
        'kind="table"\nname="stroke"\ntarget="y"\nclasses=["0","1"]\nnumeric=["x"]\nnetwork="mclr"'
    )
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{i % 5},{i % 2}\n" for i in range(60)))
    other = {"name": "c", "task": str(task), "data.data": str(tmp_path / "rows.csv")}
    grid = Tap([digits_config("a"), digits_config("b", 1), {**other, "threads": 1}])
    names = dict(zip(grid.get_node_ids(), "abc", strict=True))
    contacts = Contacts(tmp_path)
    contacts.note_seen({name: Contact(node, "online", 1.0, 2.0) for node, name in names.items()})
    return grid, names, contacts


def test_a_silo_of_another_study_is_neither_an_error_nor_not_let_in_and_is_asked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid, names, contacts = study(tmp_path)
    config = RunConfig.read({"strategy": "hcct", "rounds": 1, "min-silos": 2, "local-epochs": 1})
    for number in (1, 2):
        folder = tmp_path / str(number)
        execute(grid, config, run_id=number, folder=folder, enrolled=lambda: names, known=contacts)
        assert read_run(folder).refused == {} and set(read_run(folder).silos) == {"a", "b"}
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    assert nodes_asked(grid) == [1, 1, 2, 2, 3]
    assert contacts.served()["c"].tasks == ("stroke",)


def test_a_silo_that_was_not_asked_is_asked_in_the_same_run_once_it_has_connected_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rosters, "CHECK_AGAIN_S", 0.0)
    grid, names, contacts = study(tmp_path)
    contacts.note({"a": (1, ("other",))})  # it says something else now
    who = EnrolledRoster(task="digits", enrolled=lambda: names, known=contacts)
    assert [silo.name for silo in who.present(grid, number=1)] == ["b"]
    assert who.elsewhere["a"].startswith("it serves task 'other'")
    contacts.note_seen({"a": Contact(1, "online", time.time() + 1, 0.0)})
    assert [silo.name for silo in who.present(grid, number=2)] == ["a", "b"]
    assert "a" not in who.elsewhere


def test_a_task_that_no_silo_is_known_to_serve_ends_the_run_without_asking(tmp_path: Path) -> None:
    grid, names, contacts = study(tmp_path)
    for node, name in names.items():
        contacts.note({name: (node, ("digits",))})
    config: Any = RunConfig.read({"task": "mnist", "wait-for-silos": 60.0})
    with pytest.raises(Exception, match="Name their task with --task"):
        execute(
            grid, config, run_id=1, folder=tmp_path / "r", enrolled=lambda: names, known=contacts
        )
    assert nodes_asked(grid) == []
