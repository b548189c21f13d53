"""A silo that serves several tasks: one process, one policy, one ledger; a run takes its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.client.app import app
from coterie.client.cli.check import check_all
from coterie.client.home.folder import Home, create
from coterie.client.home.settings import SettingsError, SiloSettings, Study
from coterie.client.home.studies import study_of, tasks_of
from coterie.client.ledger import read
from coterie.client.resident.host import Host
from coterie.client.resident.serve import _own, serve
from coterie.engine.fast.silo.process import FastSilos
from coterie.engine.inprocess import InProcessGrid
from coterie.engine.port import Connection
from tests.conftest import digits_config
from tests.kit import ask, run
from tests.tables import declaration

DECLARED = declaration("x", name="stroke", target="y")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A second task and its rows."""
    rows = "".join(f"{i % 7},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(80))
    (tmp_path / "rows.csv").write_text("x,y\n" + rows)
    (tmp_path / "stroke.toml").write_text(DECLARED)
    return tmp_path / "stroke.toml"


def both(name: str, index: int, study: Path, **changes: Any) -> dict[str, Any]:
    also = {"also-0.task": str(study), "also-0.data.data": str(study.with_name("rows.csv"))}
    return digits_config(name, index, **also, **changes)


def test_further_tasks_of_silo_toml_reach_the_app_and_come_back(study: Path) -> None:
    home = create(study.parent / "north", "north")
    (home.folder / "silo.toml").write_text(
        'name = "north"\ntask = "digits"\ndata.train = 20\n'
        '[[also]]\ntask = "../stroke.toml"\ndata.data = "../rows.csv"\n'
    )
    settings = Home(home.folder).settings()
    (second,) = settings.also
    assert Path(second.task).resolve() == study
    assert Path(str(second.options["data"])).resolve() == study.with_name("rows.csv")
    assert SiloSettings.from_node_config(settings.to_node_config(), node_id=1) == settings
    assert tasks_of(settings) == ("digits", "stroke")
    own = study_of(settings, "stroke")
    assert own.task == second.task and tasks_of(own) == ("digits", "stroke")
    assert own.policy == settings.policy and study_of(settings, "else") == settings
    lines = list(check_all(settings))
    assert lines.count("  the names of all tasks that it serves: digits, stroke,") == 2
    assert [line.split()[1].rstrip(",") for line in lines if line.startswith("task ")] == [
        "digits",
        "stroke",
    ]


def test_of_several_tasks_each_is_named_and_a_wrong_one_hides_no_other(
    study: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SiloSettings.from_node_config(both("a", 0, study), node_id=1)
    _own([settings])
    said = [r.getMessage() for r in caplog.records if r.name == "coterie.silo"]
    assert {one.partition(", data: ")[0] for one in said} == {
        "silo a, task digits", "silo a, task stroke",
    }  # fmt: skip
    (second,) = settings.also
    wrong = {**second.options, "test-share": 0.0}
    first = Study(settings.task, settings.options)
    swapped = replace(settings, task=second.task, options=wrong, also=(first,))
    lines = list[str]()
    with pytest.raises(
        SettingsError, match=r"^\[data\], task .*stroke.toml: test-share must be ab"
    ):
        lines.extend(check_all(swapped))
    with pytest.raises(SettingsError, match=r"^\[\[also\]\] number 1, task .*stroke.toml: test-sh"):
        for line in check_all(replace(settings, also=(Study(second.task, wrong),))):
            lines.append(line)
    assert sum(line.startswith("task      digits") for line in lines) == 2, "also after a wrong one"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"also-0.task": "digits"}, "two tasks of silo 'a' are called 'digits'"),
        ({"also-0.data.data": "x"}, "also-0.task is missing"),
        ({"also-0.task": "mnist", "privacy-epsilon": 1.0}, "a silo with one task"),
        ({"also-x": "mnist"}, "unknown setting 'also-x'"),
    ],
)
def test_tasks_that_cannot_be_served_together_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        tasks_of(SiloSettings.from_node_config({"name": "a", **settings}, node_id=1))


def test_an_app_in_place_of_several_tasks_is_refused(tmp_path: Path) -> None:
    silo = SiloSettings("a", home=str(tmp_path), also=(Study("digits"),))
    with pytest.raises(SettingsError, match="an app replaces the silo's task"):
        serve(app, [silo], Connection("127.0.0.1:1"))


def test_runs_of_two_tasks_are_served_by_the_same_silos_into_one_ledger(
    study: Path, tmp_path: Path
) -> None:
    nodes = [both(n, i, study, home=str(tmp_path / n)) for i, n in enumerate("ab")]
    grid = InProcessGrid(app, [*nodes, digits_config("c", 2)])
    here = {}
    for task in ("digits", "stroke"):
        keys = {"rounds": 2, "batch-size": 10, "min-silos": 2}
        result = run(tmp_path / task, grid, task=task, strategy="fedcollab", **keys)
        here[task] = set(result.models)
    assert here == {"digits": {"a", "b", "c"}, "stroke": {"a", "b"}}
    assert {entry["run"] for entry in read(tmp_path / "a")} == {"", "digits", "stroke"}


def test_a_run_of_another_task_is_told_which_ones_are_served_and_nothing_of_the_data(
    study: Path,
) -> None:
    reply = ask(wire.DESCRIBE, both("a", 0, study), task="mnist", protocol=1)
    described = wire.decode_description(reply.content)
    assert (described.tasks, described.num_examples, described.schema) == (
        ("digits", "stroke"),
        0,
        "",
    )
    served = ask(wire.DESCRIBE, both("a", 0, study), task="stroke", protocol=1)
    assert wire.decode_description(served.content).num_examples > 0


def test_a_message_that_names_no_task_is_refused_by_a_silo_of_several(study: Path) -> None:
    reply = ask(wire.INITIAL, both("a", 0, study), seed=1)
    assert "serves several tasks, and this message does not name one." in reply.error.reason
    assert not ask(wire.INITIAL, seed=1).has_error()


def test_a_run_of_another_study_is_no_error_and_no_news_in_the_silos_log(
    study: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way = Connection("127.0.0.1:1")
    host = Host(app, [SiloSettings("a")], way, FastSilos(way, several=False))
    config = ConfigRecord({"task": "mnist", "protocol": 1})
    message = Message(RecordDict({wire.CONFIG: config}), 1, wire.DESCRIBE, group_id="0")
    message.metadata.__dict__["_message_id"] = "id"
    with caplog.at_level(logging.DEBUG, logger="coterie"):
        host.activity.answered(message, ask(wire.DESCRIBE, task="mnist"), 0.1)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", "a run of task 'mnist' asked which silos are connected")
    ]
    assert host.activity.tally.runs == 0
