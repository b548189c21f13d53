"""A silo's own report: from its own files, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord

from coterie.client.cli.report import build_page, read_silo
from coterie.client.home.local_log import JOURNAL, note
from coterie.client.home.settings import SettingsError
from tests.conftest import silo
from tests.kit import digits, run

TENSORS = [{"name": "fc.weight", "shape": [10, 4], "bytes": 160}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of one of three silos that trained three rounds together."""
    root = tmp_path_factory.mktemp("homes")
    for name in "abc":
        (root / name).mkdir()
    run(root / "fedavg-1", digits("abc", root), local_epochs=1)
    return root / "a"


def test_the_journal_holds_what_the_record_holds(home: Path) -> None:
    record = json.loads((home.parent / "fedavg-1" / "run.json").read_text())
    run = read_silo(home)
    assert run.name == "fedavg-1" and run.num_samples == 20
    errors = {e["round"]: e["evaluation-after"]["a"]["error"] for e in record["rounds"]}
    errors[0] = record["initial-evaluation"]["a"]["error"]
    assert run.errors == pytest.approx(errors)
    losses = {e["round"]: e["silos"]["a"]["train-loss"] for e in record["rounds"]}
    assert run.losses == pytest.approx(losses)
    assert run.group_sizes == {1: 3, 2: 3, 3: 3}
    assert "trivial" not in json.dumps(record), "it tells class frequencies, and stays here"


def test_the_command_writes_a_page_of_this_silo_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert silo(["report", "--home", str(home)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(home / "report.html")
    assert printed.err == f"Drawing the report of {home} …\n"
    html = (home / "report.html").read_text()
    assert "It last trained with 2 others." in html and html.count("<svg xmlns") == 8
    run = read_silo(home)
    wrong = round(run.errors[3] * run.tested)
    assert run.wrong == wrong and f"test data ({wrong} of {run.tested:.0f} samples)" in html
    assert "The constant baseline has an error of" in html
    assert run.outbound is not None and run.outbound["train"].messages == 3
    assert run.outbound["train"].bytes == 3 * 24360
    assert "train-loss" in run.outbound["train"].values


def test_the_command_finds_the_folder_as_the_others_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COTERIE_SILO", str(home))
    assert silo(["report"]) == 0
    monkeypatch.delenv("COTERIE_SILO")
    monkeypatch.chdir(home)
    assert silo(["report"]) == 0
    assert capsys.readouterr().out.split() == [str(home / "report.html"), "report.html"]


def test_a_ledger_says_what_left(tmp_path: Path) -> None:
    note(str(tmp_path), "train", "r", ConfigRecord({"server-round": 1}), {"train-loss": 0.5})
    values = {"metrics": {"seconds": 1.0, "train-loss": 0.5}}
    entry = {"run": "r", "round": 1, "type": "train", "tensors": TENSORS, "bytes": 160}
    entry["values"] = values
    lines: list[Any] = [entry, entry, "no object", {"run": ""}, {"run": "r", "tensors": 5}]
    (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{broken")
    run = read_silo(tmp_path)
    assert run.outbound is not None
    assert run.outbound["train"].messages == 2 and run.outbound["train"].bytes == 320
    assert run.outbound["train"].tensors == {"fc.weight": "10×4"}
    assert run.outbound["train"].values == dict.fromkeys(("seconds", "train-loss"))
    page = build_page(run, tmp_path)
    assert page.tables["What left the silo"].rows[1][:3] == ("train", "2", "320")
    assert "damaged: 2 lines of ledger.jsonl" in page.missing


def test_a_home_without_a_journal_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert silo(["report", "--home", str(tmp_path)]) == 2
    assert "has no journal of a run" in capsys.readouterr().err
    note(str(tmp_path), "train", "r", ConfigRecord(), {})
    with pytest.raises(SettingsError, match=r"no run 'q'\. Its runs: r"):
        read_silo(tmp_path, "q")


def test_a_journal_that_cannot_be_written_costs_only_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / JOURNAL).mkdir()
    note(str(tmp_path), "train", "r", ConfigRecord(), {})
    assert "the journal could not be written" in caplog.text
    note("", "train", "r", ConfigRecord(), {})
