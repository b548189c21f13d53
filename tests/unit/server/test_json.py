"""``--json``: one document on standard output, with the fields that the reference page has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import coterie.server.cli.commands
import coterie.server.machine.link
from benchmarks.engine.synthetic import write_run
from coterie.client.home import approvals
from coterie.client.home.folder import create as create_silo
from coterie.engine.control import RunInfo
from coterie.features.statistics.survey import Survey
from coterie.server.cli.main import app
from coterie.server.report.statistics import statistics_summary
from coterie.server.runs.config import RunConfig
from coterie.server.site.federation import create
from coterie.server.site.queue import Entry, Queue
from tests import kit
from tests.conftest import digits_config
from tests.rules.test_imports import ROOT

PAGE = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")


def documented(command: str) -> set[str]:
    """The fields of a command, as the page has them; of an object by name, only the object."""
    own = PAGE.split(f"## coterie {command}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", own, flags=re.MULTILINE)
    return {
        name for row in rows for names in row.split("`, `") for name in named(names.strip("` "))
    }


def named(names: str) -> list[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    if (braces := re.search(r"\{(.*?)\}", names)) is None:
        return [names]
    return [
        name
        for part in braces[1].split(",")
        for name in named(names[: braces.start()] + part + names[braces.end() :])
    ]


def fields_of(document: Any, path: str = "") -> set[str]:
    """The paths of all fields of a document, written as on the page."""
    if isinstance(document, list):
        found = {name for one in document for name in fields_of(one, f"{path}[]")}
        return found or {f"{path}[]"}
    if isinstance(document, dict) and not path.endswith(BY_NAME):
        start = f"{path}." if path else ""
        return {name for key, one in document.items() for name in fields_of(one, start + key)}
    return {path}


BY_NAME = (
    *("about", "terms", "unlabelled", "silos", "values", "figures", "left-out", "silent", "failed"),
    *("estimate", "alone", "partly-pooled", "between-silos", "if-left"),
)


def printed(*line: str) -> Any:
    done = CliRunner().invoke(app, [*line, "--json"])
    return json.loads(done.stdout)


class Calls:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def num_online(self) -> int:
        return 3

    def runs(self) -> list[RunInfo]:
        return [RunInfo(7, "finished", "completed", "", "")]

    def submit(self, config: RunConfig) -> int:
        return 8

    def nodes(self) -> list[Any]:
        return []

    def act(self, what: str, **_: str) -> dict[str, Any]:
        return {"entries": [asdict(Entry("q1", {"strategy": "fedavg"}))]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A federation with a recorded run, a run that waits, a member and an operator."""
    folder = tmp_path_factory.mktemp("place")
    made = create(folder / "study", ["localhost:9092"])
    write_run(made.runs / "hcct-1", num_silos=3, num_rounds=2, strategy="hcct")
    Queue(made.folder).add(RunConfig.read({"strategy": "fedavg"}))
    silo = create_silo(folder / "north", "north")
    (folder / "silo.toml").write_text('name = "a"\ntask = "digits"\n', encoding="utf-8")
    kit.train(kit.initial(), digits_config("a", home=str(folder)))
    (folder / "approvals").mkdir()
    one = approvals.Approval("hcct-7", {"rounds": 3}, asked="2026-01-01T00:00:00+00:00")
    (folder / "approvals" / "one.json").write_text(json.dumps(asdict(one)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_FEDERATION", str(made.folder))
        patch.setenv("COTERIE_OPERATOR", str(folder / "ada"))
        printed_by = CliRunner().invoke(app, ["members", "enrol", silo.request()])
        assert printed_by.exit_code == 0, printed_by.stderr
        asked = CliRunner().invoke(app, ["operator", "init", "--name", "ada"]).stdout.strip()
        assert not CliRunner().invoke(app, ["operator", "enrol", asked, "--role", "run"]).exit_code
        yield folder


@pytest.mark.parametrize(
    "command",
    [
        "status", "runs", "runs show RUN", "runs explain RUN", "run --detach", "members list",
        "operator list", "federation audit", "federation check", "federation upgrade-check",
        "silo pending", "silo check", "silo ledger",
    ],
)  # fmt: skip
def test_the_fields_that_are_printed_are_those_of_the_page(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        coterie.server.machine.link, "control", lambda *_, **__: nullcontext(Calls())
    )
    monkeypatch.setattr(coterie.server.cli.commands, "BEGINNING_S", 0.1)
    line = ["hcct-1" if word == "RUN" else word for word in command.split()]
    line += ["--home", str(place)] if line[0] == "silo" else []
    found = fields_of(printed(*line))
    if command in ("status", "runs"):
        assert {name for name in found if name.startswith("queue")} == QUEUE
        found -= QUEUE if command == "status" else set()
        found |= {"queue[]"} if command == "status" else set()
    assert found == documented(f"{command} --json")


QUEUE = {name for name in documented("runs --json") if name.startswith("queue")}


def test_the_summary_of_the_data_has_the_fields_of_the_page() -> None:
    survey = statistics_summary(Survey("heart", {}))
    own = {name.removesuffix("[]") for name in documented("stats --json")}
    assert survey.keys() == own


def test_every_page_of_a_list_names_an_option_that_the_command_has() -> None:
    for command in re.findall(r"^## coterie (.*) --json$", PAGE, flags=re.MULTILINE):
        words = [word for word in command.split() if word.islower() and word[0] != "-"]
        assert "--json" in CliRunner().invoke(app, [*words, "--help"]).stdout, command
