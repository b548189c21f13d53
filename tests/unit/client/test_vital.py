"""Signs of life of a silo's process: contact, numbers, health, and its log."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from coterie.client.home.files import CONTACT, LEDGER
from coterie.client.home.folder import create
from coterie.client.home.health import findings
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.home.watching import Look, keep
from coterie.client.resident import vital
from coterie.client.resident.activity import Tally
from coterie.client.resident.serve import _exposed, _log, _monitoring
from coterie.client.resident.vital import LedgerMeter, Vitals, WatchedSchedule, collector
from coterie.system import health, logs
from coterie.system.exposition import render
from coterie.system.files import append_line, locked
from tests.commands import coterie


def test_every_answer_of_the_superlink_is_noted_and_every_loss_counted(tmp_path: Path) -> None:
    vitals = Vitals([str(tmp_path), ""])
    schedule = WatchedSchedule(["a"], vitals)
    schedule.failed("a", was_connected=False)
    assert (vitals.seen, vitals.losses) == (0.0, 1) and not (tmp_path / CONTACT).exists()
    for contact in (
        lambda: schedule.connected("a"),
        lambda: schedule.worked("a"),
        lambda: schedule.missed("a", seconds=0.1),
    ):
        vitals.seen = 0.0
        contact()
        assert time.time() - vitals.seen < 60
    assert (tmp_path / CONTACT).exists()


def test_a_folder_that_is_away_costs_no_contact(tmp_path: Path) -> None:
    Vitals([str(tmp_path / "away")]).heard()


def test_the_ledger_is_counted_once_and_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / LEDGER
    for line in ({"bytes": 10}, {"error": "no"}, {"bytes": "x"}):
        append_line(file, json.dumps(line).encode(), synced=False)
    with file.open("a") as opened:
        opened.write("{damaged\n" + '{"bytes": 5')  # the last is still in the writing
    meter = LedgerMeter(file)
    for _ in range(2):
        meter.read()
        assert (meter.bytes, meter.entries) == (10, 3)
    with file.open("a") as opened:
        opened.write("}\n")
    meter.read()
    assert (meter.bytes, meter.entries) == (15, 4)


def test_a_silos_numbers_are_all_there(tmp_path: Path) -> None:
    append_line(tmp_path / LEDGER, b'{"bytes": 7}', synced=False)
    keep(tmp_path, Look("2026-01-01T00:00:00+00:00", "run-1", "", 0, 0))
    vitals, tally = Vitals([]), Tally(runs=2, rounds=5, seconds=1.5, errors=1)
    text = render(collector([SiloSettings("a", home=str(tmp_path))], vitals, tally)())
    for line in ('coterie_silo_bytes_out_total{silo="a"} 7.0', "coterie_silo_rounds_total 5.0"):
        assert line in text.splitlines()
    assert {one.name for one in vital.METRICS} == {
        line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")
    }


def levels(folder: Path) -> dict[str, int]:
    return {one.what: one.level for one in findings(folder)}


def test_a_silo_that_serves_is_well_and_one_that_does_not_is_bad(tmp_path: Path) -> None:
    (tmp_path / CONTACT).touch()
    with locked(tmp_path):
        done = coterie("silo", "health", "--home", str(tmp_path))
    assert done.returncode == 0 and done.stdout.count("ok ") == 4
    done = coterie("silo", "health", "--home", str(tmp_path))
    assert done.returncode == 2 and done.stdout.startswith("bad      process")


@pytest.mark.parametrize(
    ("age", "level", "said"),
    [
        (10, 0, "10 s ago"),
        (100, 1, "100 s ago"),
        (4000, 2, "67 min ago"),
        (400_000, 2, "5 days ago"),
    ],
)
def test_how_long_ago_the_last_contact_was_is_told(
    age: int, level: int, said: str, tmp_path: Path
) -> None:
    file = tmp_path / CONTACT
    file.touch()
    os.utime(file, (time.time() - age, time.time() - age))
    (found,) = [one for one in findings(tmp_path) if one.what == "contact"]
    assert found.level == level and found.text.endswith(said)


def test_a_silo_that_was_never_there_or_cannot_write_its_ledger_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert levels(tmp_path)["contact"] == health.BAD and levels(tmp_path)["ledger"] == health.OK
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert levels(tmp_path)["ledger"] == health.BAD


def test_a_command_line_goes_before_silo_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(logs.ENVIRONMENT, raising=False)
    home = create(tmp_path, "north")
    file = tmp_path / "silo.toml"
    text = file.read_text().replace('metrics_address = ""', 'metrics_address = "9465"')
    file.write_text(text.replace('log_format = "text"', 'log_format = "json"'))
    home = type(home)(tmp_path)
    own = _monitoring(home, "", "")
    assert (own.metrics_address, own.log_format) == ("127.0.0.1:9465", "json")
    assert _monitoring(home, "[::]:1", "text").metrics_address == "[::]:1"
    with pytest.raises(SettingsError, match="must be PORT or HOST:PORT"):
        _monitoring(None, "x", "")
    with pytest.raises(SettingsError, match="text or json"):
        _monitoring(None, "", "xml")


def test_a_port_that_is_taken_is_told_before_the_silo_serves() -> None:
    with _exposed("127.0.0.1:0", lambda: ()) as served:
        address = served.address  # type: ignore[attr-defined]
        with pytest.raises(SettingsError, match=f"cannot serve metrics at {address}"):
            _exposed(address, lambda: ())


def test_a_silos_json_lines_have_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    _log("json", [SiloSettings("north")], verbose=False)
    logging.getLogger("coterie.silo").info("here", extra={"run": "r"})
    entry = json.loads(capsys.readouterr().err)
    assert (entry["part"], entry["silo"], entry["run"], entry["message"]) == (
        "silo", "north", "r", "here"
    )  # fmt: skip
