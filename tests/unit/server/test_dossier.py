"""Technical documentation: the record's facts under the laws' headings, and blanks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.synthetic import write_run
from coterie.pictures.document import TO_WRITE, Section, render_document
from coterie.pictures.page import Table
from coterie.server.report.command import build_story
from coterie.server.report.dossier import build_dossier
from coterie.server.runs.record import read_run
from coterie.server.site import audit
from coterie.server.site.federation import create
from tests.commands import coterie


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation with a run of five silos that two people have decided about."""
    made = create(tmp_path_factory.mktemp("study") / "study", addresses=["localhost"])
    folder = write_run(made.folder / "runs" / "hcct-1", num_silos=5, num_rounds=9)
    record = json.loads((folder / "run.json").read_text())
    record |= {"run-id": "17", "model-hashes": {"site-000": "ab" * 32}}
    record |= {"final-metrics": {"site-001": {"auroc": 0.4}}}
    record["config"] |= {"parent": "fedavg-0", "label": "x | y <b>"}
    (folder / "run.json").write_text(json.dumps(record))
    audit.note(made, "enrol", who="ann", silo="site-000", key="k")
    audit.note(made, "enrol", who="ann", silo="elsewhere", key="k")
    audit.note(made, audit.BEGUN, who="bob", run=17)
    audit.note(made, audit.BEGUN, who="eve", run=18)
    return made.folder


def test_it_has_the_records_figures_who_decided_and_every_heading(study: Path) -> None:
    said = coterie("runs", "report", "hcct-1", "--dossier", "--federation", str(study))
    assert said.returncode == 0, said.stderr
    file = Path(said.stdout.strip())
    assert file == study / "runs" / "hcct-1" / "dossier.md"
    text = file.read_text()
    run = read_run(file.parent)
    for silo, error in run.final_errors.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {silo} | "))
        assert run.lead.text(error) in row
    assert "AUROC is at most 0.5: site-001." in text
    assert "abababababababab" in text and "began from fedavg-0" in text
    for number in ("1", "2", "3", "4", "5 and 6", "7 to 9"):
        assert f"## AI Act, Annex IV, {number}: " in text
    for point in ("(7) (a)", "(7) (b)", "(7) (c)", "(7) (d)", "(2), (9) and (11)"):
        assert f"## GDPR, Article 35 {point}: " in text
    acts = [line for line in text.splitlines() if re.match(r"\| 20\d\d-", line)]
    assert [re.split(r" \| ", line)[1:3] for line in acts] == [
        ["ann", "enrol"],
        ["bob", audit.BEGUN],
    ]
    assert "The audit log is intact" in text and text.count(TO_WRITE) > 15
    assert "x | y <b>" not in text and r"x \| y \<b\>" in text


def test_a_changed_log_and_a_missing_one_are_said(study: Path, tmp_path: Path) -> None:
    alone = read_run(write_run(tmp_path / "runs" / "hcct-1", num_silos=3, num_rounds=3))
    active = replace(alone, status="running", seconds=math.nan, refused={"z": "it has no data"})
    text = build_dossier(build_story(active))
    assert "There is no audit log" in text
    assert "| z | it has no data |" in text and "3 silos, duration not recorded" in text
    log = study / audit.AUDIT
    before = log.read_bytes()
    log.write_bytes(before.replace(b'"bob"', b'"eve"'))
    try:
        text = build_dossier(build_story(read_run(study / "runs" / "hcct-1")))
    finally:
        log.write_bytes(before)
    assert "The audit log is intact" not in text


def test_what_does_not_go_with_it_is_refused(study: Path) -> None:
    said = coterie("runs", "report", "hcct-1", "--dossier", "--format", "json",
                   "--federation", str(study))  # fmt: skip
    assert said.returncode == 2 and "--dossier goes with no --format" in said.stderr


def test_texts_form_no_markup_and_empty_tables_are_left_out() -> None:
    table = Table(("a", "b"), [("1\n2", "[x](y)")])
    one = Section("1", "t", ["# no <heading>"], {"T": table, "E": Table(("a",), [])}, ["w"])
    assert render_document("d", [], [one]).splitlines() == [
        "# d", "", "## 1: t", "", r"\# no \<heading\>", "", "**T**", "",
        "| a | b |", "|---|---|", r"| 1 2 | \[x\](y) |", "", f"> {TO_WRITE} w", "",
    ][:-1]  # fmt: skip
