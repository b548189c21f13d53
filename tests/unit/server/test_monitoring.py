"""What a coordinator reports: its numbers, its health, and the alerts on them."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.client.resident import vital
from coterie.engine.control import Node, RunInfo
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Recorder
from coterie.server.site import certificates, coordinator, metrics, steward
from coterie.server.site import health as checks
from coterie.server.site.contacts import Contacts
from coterie.server.site.enrolled import Entry
from coterie.server.site.federation import Federation, create, load
from coterie.server.site.metrics import Collector, RunsMeter
from coterie.server.site.steward import Steward
from coterie.strategies import FederationError
from coterie.strategies.rounds.reports import RoundReport
from coterie.system import health, logs
from coterie.system.exposition import render
from coterie.system.files import locked
from tests.commands import coterie
from tests.kit import until

ALERTS = Path(__file__).parents[3] / "docs/how-to/coterie-alerts.yaml"


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = create(tmp_path / "study", ["127.0.0.1"])
    entry = vars(Entry("a", "key", "2026-01-01", node_id=1))
    made.roster.write_text(json.dumps([entry]))
    return made


class FakeControl:
    """A SuperLink with one silo and two runs, as a context manager like ``control``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> FakeControl:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def nodes(self) -> list[Node]:
        return [Node(1, "key", "online", 10.0, 20.0), Node(2, "other", "unregistered")]

    def runs(self) -> list[RunInfo]:
        return [RunInfo(1, "finished", "failed", "", ""), RunInfo(2, "running", "", "", "")]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink answers."""
    monkeypatch.setattr(steward, "control", FakeControl)
    monkeypatch.setattr(checks, "control", FakeControl)
    monkeypatch.setattr(checks, "listens", lambda _: True)


# ---------------------------------------------------------------- numbers


def numbers(collect: Collector) -> dict[str, float]:
    lines = render(collect()).splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.usefixtures("answering")
def test_the_coordinators_numbers_are_those_of_the_superlink_and_of_the_records(
    federation: Federation,
) -> None:
    watching = Steward(federation, print)
    collect = Collector(federation, watching, {})
    assert numbers(collect)["coterie_superlink_last_answer_timestamp_seconds"] == 0
    watching.look()
    watching.dispatcher.queue.add(RunConfig.read({}))
    recorder = Recorder(federation.runs / "hcct-1", RunConfig.read({}).plain(), run_id=1)
    with locked(recorder.folder):
        for number in (1, 2):
            report = RoundReport(round=number, seconds={"train": 1.5}, left_out={"a": "why"})
            recorder.round(report, {}, {})
        found = numbers(collect)
    assert found['coterie_runs{state="running"}'] == found['coterie_runs{state="failed"}'] == 1
    assert found["coterie_queue_length"] == 1
    assert found['coterie_silos{status="online"}'] == 1
    assert found['coterie_silo_last_contact_timestamp_seconds{silo="a"}'] == 20
    assert found["coterie_rounds_total"] == 2 and found["coterie_round_seconds_total"] == 3
    assert found["coterie_left_out_total"] == 2
    assert found['coterie_run_round{run="hcct-1"}'] == 2
    assert found['coterie_run_rounds_planned{run="hcct-1"}'] == 20
    assert found['coterie_certificate_expiry_timestamp_seconds{certificate="ca"}'] > time.time()
    assert abs(time.time() - found["coterie_superlink_last_answer_timestamp_seconds"]) < 60
    names = {name.partition("{")[0] for name in found}
    assert names == {one.name for one in metrics.METRICS} - {"coterie_restarts_total"}
    assert not [name for name in numbers(collect) if name.startswith("coterie_run_round")]
    recorder.fail(KeyboardInterrupt())


def test_rounds_from_before_the_process_are_not_counted_and_none_is_counted_twice(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "r", {}, run_id=1)
    recorder.round(RoundReport(round=1), {}, {})
    meter = RunsMeter(tmp_path)
    meter.read()
    assert meter.rounds == 0
    recorder.round(RoundReport(round=2), {}, {})
    with (tmp_path / "r" / "events.jsonl").open("a") as events:
        events.write('{"event": "round", "round"')  # still in the writing
    meter.read()
    meter.read()
    assert meter.rounds == 1
    recorder.fail(KeyboardInterrupt())


@pytest.mark.usefixtures("answering")
def test_the_steward_writes_down_who_was_last_there(federation: Federation) -> None:
    Steward(federation, print).look()
    (name, seen), *others = Contacts(federation.folder).seen().items()
    assert (name, seen.status, seen.connected, seen.seen) == ("a", "online", 10.0, 20.0)
    assert not others


def test_a_steward_that_cannot_ask_says_so_once_and_goes_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def away(*_: Any, **__: Any) -> Any:
        raise FederationError("the SuperLink is away.")

    monkeypatch.setattr(steward, "control", away)
    monkeypatch.setattr(steward, "TICK_S", 0.01)
    monkeypatch.setattr(steward, "LOOK_S", 0.01)
    with Steward(federation, said.append) as watching:
        until(lambda: watching.errors >= 3, "three errors")
    assert said == ["The coordinator cannot supervise its runs: the SuperLink is away."]


# ---------------------------------------------------------------- health


@pytest.fixture
def healthy(federation: Federation, answering: None) -> Iterator[Federation]:
    """A federation that is served."""
    import sqlite3

    with sqlite3.connect(federation.database) as opened:
        opened.execute("CREATE TABLE node (id INTEGER)")
    opened.close()
    with locked(federation.folder, name=coordinator.LOCK):
        yield federation


def found(federation: Federation) -> dict[str, int]:
    return {one.what: one.level for one in checks.findings(federation)}


def test_a_coordinator_that_works_is_well(healthy: Federation) -> None:
    done = coterie("federation", "check", "--federation", str(healthy.folder))
    assert done.returncode == 0 and "1 of 1 silo online" in done.stdout
    words = {line.split()[0] for line in done.stdout.splitlines()}
    assert words == {"ok"}


def test_a_coordinator_that_is_not_there_is_bad(federation: Federation) -> None:
    done = coterie("federation", "check", "--federation", str(federation.folder))
    assert done.returncode == 5
    assert re.search(r"^bad +process", done.stdout, re.M)
    assert re.search(r"^bad +superlink +nothing listens at", done.stdout, re.M)


@pytest.mark.parametrize(("days", "level"), [(29, health.WARNING), (2, health.BAD)])
def test_a_certificate_that_ends_soon_is_told(
    days: int, level: int, healthy: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", days)
    healthy.renew_certificate(always=True)
    assert found(healthy)["server cert"] == level and found(healthy)["ca cert"] == health.OK
    done = coterie("federation", "check", "--federation", str(healthy.folder))
    assert done.returncode == level and "a restart of `coterie superlink` renews it" in done.stdout


def test_a_damaged_database_queue_or_a_missing_certificate_is_bad(healthy: Federation) -> None:
    healthy.database.write_bytes(b"x" * 10_000)
    (healthy.folder / "queue.json").write_text("{")
    (healthy.tls / "server.pem").unlink()
    levels = found(healthy)
    assert [levels[w] for w in ("database", "queue", "server cert")] == [health.BAD] * 3
    healthy.database.unlink()
    assert found(healthy)["database"] == health.WARNING


@pytest.mark.parametrize(("free", "level"), [(5e9, 0), (1e9, 1), (1e8, 2)])
def test_a_full_disk_is_told_before_it_is_full(
    free: float, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(10**12, 0, int(free))
    monkeypatch.setattr(health.shutil, "disk_usage", lambda _: usage)
    assert health.disk(tmp_path).level == level


@pytest.mark.usefixtures("answering")
def test_a_superlink_without_a_federation_is_asked_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_FEDERATION", raising=False)
    done = coterie("federation", "check", "--superlink", "127.0.0.1:9093")
    assert done.returncode == 0 and done.stdout.split()[:2] == ["ok", "superlink"]


# ---------------------------------------------------------------- settings


def test_a_command_line_goes_before_coterie_toml(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(logs.ENVIRONMENT, raising=False)
    file = federation.folder / "coterie.toml"
    text = file.read_text().replace('metrics_address = ""', 'metrics_address = "9464"')
    file.write_text(text.replace('log_format = "text"', 'log_format = "json"'))
    own = load(federation.folder).config.monitoring
    assert (own.metrics_address, own.log_format) == ("127.0.0.1:9464", "json")
    config = load(federation.folder).monitored(metrics="0.0.0.0:1", log_format="text").config
    assert (config.monitoring.metrics_address, config.monitoring.log_format) == (
        "0.0.0.0:1",
        "text",
    )
    file.write_text(text.replace('"9464"', '"here"'))
    with pytest.raises(
        FederationError, match=r"monitoring\.metrics_address: must be PORT or HOST:PORT"
    ):
        load(federation.folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--metrics-address", "here"], "must be PORT or HOST:PORT. Got 'here'"),
        (["--log-format", "xml"], "the format of the log must be text or json. Got 'xml'"),
    ],
)
def test_monitoring_that_cannot_be_is_refused(
    line: list[str], said: str, federation: Federation
) -> None:
    done = coterie("superlink", "--federation", str(federation.folder), *line)
    assert done.returncode == 2 and said in done.stderr


def test_numbers_of_a_superlink_without_a_federation_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_FEDERATION", raising=False)
    done = coterie("superlink", "--metrics-address", "9464")
    assert done.returncode == 2 and "name its folder with" in done.stderr


def test_run_log_has_the_format_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setenv(logs.ENVIRONMENT, "json")
    recorder = Recorder(tmp_path / "hcct-1", {}, run_id=1)
    logging.getLogger("coterie.run").warning("b is left out")
    recorder.fail(KeyboardInterrupt())
    (line,) = (tmp_path / "hcct-1" / "run.log").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["part"], entry["run"], entry["message"]) == ("run", "hcct-1", "b is left out")


# ---------------------------------------------------------------- alerts


def test_the_alerts_can_be_read_and_name_only_metrics_that_there_are() -> None:
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    known = {one.name for one in (*metrics.METRICS, *vital.METRICS)}
    named: set[str] = set()
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        own = set(re.findall(r"\bcoterie_\w+", rule["expr"]))
        assert own or rule["expr"].startswith("up{job="), rule["alert"]
        named |= own
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}, "what to do"
    assert named <= known and len(named) > 10


def test_names_of_metrics_follow_prometheus() -> None:
    every = (*metrics.METRICS, *vital.METRICS)
    assert len({one.name for one in every}) == len(every)
    for one in every:
        assert re.fullmatch(r"coterie_[a-z_]+", one.name)
        assert (one.kind == "counter") == one.name.endswith("_total")
