"""A run's report: what it says is what the record says, whatever state that is in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.engine.synthetic import write_run
from coterie.pictures.page import Fold, Table, render
from coterie.pictures.style import GROUPS, LIGHT
from coterie.server.cli.commands import print_runs
from coterie.server.report.answer import chance_of
from coterie.server.report.command import build_story, print_report, write_report
from coterie.server.report.explain import print_explanation
from coterie.server.report.final import print_final
from coterie.server.report.history import follow_groups
from coterie.server.report.page import build_page, make_pictures, repeat_command, summary
from coterie.server.report.view import picture
from coterie.server.runs.going_on import complete
from coterie.server.runs.record import Round, read_run
from coterie.server.runs.record.follow import Progress
from coterie.server.runs.record.metrics import Lead
from coterie.server.site.federation import create
from coterie.strategies.errors import FederationError
from tests.commands import coterie

EVERY_PICTURE = [
    "groups", "outcomes", "curves", "matrix", "loss", "seconds", "silo-seconds", "bytes",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three comparable runs side by side."""
    root = tmp_path_factory.mktemp("runs")
    for strategy in ("hcct", "independent", "fedavg"):
        write_run(root / f"{strategy}-1", num_silos=8, num_rounds=9, strategy=strategy)
    return root


def damaged(runs: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the run, its record changed."""
    folder.mkdir()
    record = json.loads((runs / "hcct-1" / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "events.jsonl").write_text((runs / "hcct-1" / "events.jsonl").read_text())
    return folder


def all_sites(folder: Path) -> Table:
    return build_page(build_story(read_run(folder))).tables["All sites"]


# ---------------------------------------------------------------- figures


def test_the_error_of_silos_own_models_is_shown_where_a_run_asked_for_it(
    runs: Path, tmp_path: Path
) -> None:
    def ask(record: dict[str, Any]) -> None:
        for number, entry in enumerate(record["rounds"]):
            if number < 5:
                entry["personalised"] = {"site-001": {"loss": 0.1, "error": number / 10}}

    table = all_sites(damaged(runs, tmp_path / "own", ask))
    own = {row[0]: row[table.header.index("own last training (Per)")] for row in table.rows}
    assert own["site-001"] == "40.0%" and own["site-002"] == "–"
    assert "Per" not in str(all_sites(runs / "hcct-1").header)


@pytest.mark.parametrize("listed", [True, False])
def test_a_unit_with_brackets_is_printed_as_it_is(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.report.final.MAX_SILOS_LISTED", 60 if listed else 0)
    monkeypatch.setattr("coterie.server.report.final._write_report", lambda *_: None)
    beside = {"silos": 3, "mean-accuracy": 0.5, "mean-accuracy-alone": 0.4, "ipr": 1.0, "rsd": 0.1}
    more = {"metric": "mae", "unit": "[/][degF]", "collaboration": beside}
    console = Console(file=StringIO(), width=200)
    print_final(console, with_errors(tmp_path / "hcct-1", LOCAL, **more))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.2 [/][degF]" in text and "0.5 [/][degF], local 0.6 [/][degF]" in text
    progress = Progress("hcct", groups=(("a",),), errors={"a": 0.2}, lead=Lead("mae", "[/][degF]"))
    console.print(picture(progress))
    assert "0.2 [/][degF]" in console.file.getvalue()[len(text) :]  # type: ignore[attr-defined]


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_the_last_table_has_it_too(
    listed: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.report.final.MAX_SILOS_LISTED", 60 if listed else 0)
    monkeypatch.setattr(
        "coterie.server.report.command.write_report", lambda folder: ["report.html"]
    )
    own = {"a": {"loss": 1.0, "error": 0.125}}
    record = {
        "silos": {name: {"num-examples": 10} for name in "ab"},
        "final-evaluation": {name: {"error": 0.25} for name in "ab"},
        "final-groups": [["a", "b"]],
        "final-details": {"by-choice": "every silo trains alone at alpha = 0"},
        "rounds": [{"round": 1, **({"personalised": own} if asked else {})}, {"round": 2}],
        "seconds": 1.0,
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    console = Console(file=StringIO(), width=120)
    print_final(console, tmp_path)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "25.0%" in text and "every silo trains alone at alpha = 0." in text
    assert ("Per" in text, "12.5%" in text) == (asked, asked)


def test_the_end_says_of_which_figure_a_model_is_known_to_have_learned_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "coterie.server.report.command.write_report", lambda folder: ["report.html"]
    )
    known = {
        "alpha": {"error": 0.5, "trivial": 0.4, "auroc": 0.4},
        "beta": {"error": 0.3, "trivial": 0.4, "auroc": 0.8},
        "gamma": {"error": 0.5, "r2": -0.1},
        "delta": {"error": 0.5, "auroc": 0.5},
        "eta": {"error": 0.5, "auroc": 0.3},
    }
    record = {
        "silos": {name: {"num-examples": 10} for name in known},
        "final-evaluation": {name: {"error": own["error"]} for name, own in known.items()},
        "final-metrics": known,
        "final-groups": [list(known)],
        "rounds": [{"round": 1}],
        "seconds": 1.0,
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    console = Console(file=StringIO(), width=120)
    print_final(console, tmp_path)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if "best constant" in line or "at most" in line] == [
        "no better than the best constant answer: alpha",
        "AUROC is at most 0.5: delta, eta",
        "R² is at most 0: gamma",
    ]


def configured(root: Path, strategy: str, keys: dict[str, Any]) -> Path:
    """A run whose configuration has these keys too."""
    folder = write_run(root / f"{strategy}-1", num_silos=4, num_rounds=3, strategy=strategy)
    record = json.loads((folder / "run.json").read_text())
    record["config"] |= keys
    (folder / "run.json").write_text(json.dumps(record))
    first, rest = (folder / "events.jsonl").read_text().split("\n", 1)
    start = json.loads(first) | {"config": record["config"]}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n" + rest)
    return folder


TUNED = {"personalise": "finetune", "personal-epochs": 1, "ditto-lambda": 1.0}


@pytest.mark.parametrize(
    ("own", "alone", "comparable"),
    [
        ({"local-steps": 5}, {}, False),
        ({"local-steps": 5}, {"local-steps": 5, "local-epochs": 9}, True),
        ({"proximal-mu": 0.1}, {}, False),
        ({"optimiser": "adamw"}, {}, False),
        ({"balance": "weights"}, {}, False),
        ({"task.network": "mlp-8"}, {}, False),
        ({"task.network": "mlp-8"}, {"task.network": "mlp-8", "own-penalty": 3.0}, True),
        (TUNED, {}, False),
        (TUNED, TUNED | {"personal-epochs": 2}, False),
        (TUNED, TUNED | {"ditto-lambda": 2.0}, True),
        (
            TUNED | {"personalise": "ditto"},
            TUNED | {"personalise": "ditto", "ditto-lambda": 2.0},
            False,
        ),
        (
            {"personal-epochs": 1, "personalise": "none"},
            {"personal-epochs": 2, "personalise": "none"},
            True,
        ),
    ],
)
def test_only_a_run_of_the_same_training_is_compared(
    own: dict[str, Any], alone: dict[str, Any], comparable: bool, tmp_path: Path
) -> None:
    folder = configured(tmp_path, "hcct", own)
    configured(tmp_path, "independent", alone)
    assert build_story(read_run(folder)).gains.alone_run == ("independent-1" if comparable else "")


@pytest.mark.parametrize(
    ("own", "alone", "comparable"),
    [
        ({"personalise": "partial", "lr": 0.1}, {"personalise": "none", "lr": 0.2}, True),
        ({"tree-rate": 0.2}, {"tree-rate": 0.1}, False),
        ({"rounds": 9}, {"rounds": 8}, False),
        ({"task.x": 9}, {"task.x": 8}, False),
    ],
)
def test_trees_are_compared_with_those_of_single_silos_that_grow_alike(
    own: dict[str, Any], alone: dict[str, Any], comparable: bool, tmp_path: Path
) -> None:
    run = read_run(configured(tmp_path, "auto", own))
    configured(tmp_path, "trees", {"given-groups": "each", **alone})
    boosted = replace(run.rounds[-1], details={"trees": {"*": 6}})
    story = build_story(replace(run, rounds=(*run.rounds[:-1], boosted)))
    assert story.gains.alone_run == ("trees-1" if comparable else "")


@pytest.mark.parametrize(("secretive", "mean"), [("a", "25.0%"), ("ab", "–")])
@pytest.mark.parametrize("listed", [True, False])
def test_a_silo_that_tells_no_error_has_a_dash_and_no_part_in_means(
    listed: bool,
    secretive: str,
    mean: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("coterie.server.report.final.MAX_SILOS_LISTED", 60 if listed else 0)
    (tmp_path / "fedavg-1").mkdir()
    record = {
        "status": "completed",
        "started": "2026-01-01T00:00:00",
        "config": {"strategy": "fedavg", "rounds": 1},
        "silos": {name: {"num-examples": 10} for name in "ab"},
        "final-evaluation": {n: {"error": None if n in secretive else 0.25} for n in "ab"},
        "final-groups": [["a", "b"]],
        "rounds": [],
        "seconds": 1.0,
    }
    (tmp_path / "fedavg-1" / "run.json").write_text(json.dumps(record))
    console = Console(file=StringIO(), width=120)
    print_final(console, tmp_path / "fedavg-1")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert mean in text and "–" in text if listed else mean in text
    print_runs(tmp_path)
    assert capsys.readouterr().out.rstrip().endswith(mean)


def test_runs_are_listed_by_this_machine_s_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "hcct-1", num_silos=2, num_rounds=2)  # at 03:04:05 UTC on 2 January
    try:
        for zone, shown in (("UTC", "01-02 03:04"), ("XYZ+05:30", "01-01 21:34")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            print_runs(tmp_path)
            assert shown in capsys.readouterr().out
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_folder_is_printed_as_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "r [test]"
    print_runs(root)
    run = write_run(root / "hcct-[b]1", num_silos=2, num_rounds=2)
    print_runs(root)
    said = capsys.readouterr().out
    assert "no runs are recorded in" in said and "r [test]" in said and "hcct-[b]1" in said
    monkeypatch.setattr(
        "coterie.server.report.command.write_report", lambda folder: [run / "report.html"]
    )
    console = Console(file=StringIO(), width=300)
    print_final(console, run)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"models and record: {run}" in text and f"report: {run}" in text


def test_figures_stand_beside_their_intervals_counts_and_the_best_single_answer(
    runs: Path, tmp_path: Path
) -> None:
    def add_figures(record: dict[str, Any]) -> None:
        name, own = next(iter(record["final-evaluation"].items()))
        own |= {"error": 0.12, "num-examples": 25}
        figures = {"error-low": 0.02, "error-high": 0.31, "auroc": 0.8, "trivial": 0.24}
        record["final-metrics"] = {name: figures | {"auroc-low": 0.7, "auroc-high": 0.9}}

    folder = damaged(runs, tmp_path / "more", add_figures)
    run = read_run(folder)
    name = next(iter(run.final_errors))
    tables = build_page(build_story(run)).tables
    table = tables["All sites"]
    (row,) = [dict(zip(table.header, r, strict=True)) for r in table.rows if r[0] == name]
    assert row["error"] == "12.0%" and row["test samples"] == "25, 3 wrong"
    assert row["95% interval of the error"] == "2.0 to 31.0"
    assert row["constant baseline"] == "24.0%"
    metrics = tables["Metrics after the last round, with 95% intervals"]
    assert metrics.rows == [(name, "0.800 (0.700 to 0.900)")]
    plain = all_sites(runs / "hcct-1").header
    assert "constant baseline" not in plain and "interval" not in str(plain)
    assert plain[:6] == ["silo", "gain, points", "error", "local", "global", "group"]


def test_who_left_early_is_shown_and_not_counted(runs: Path) -> None:
    story = build_story(read_run(runs / "hcct-1"))
    assert "site-000" in story.gains.together and "site-000" not in story.gains.gain
    page = build_page(story)
    (row,) = [r for r in page.tables["All sites"].rows if r[0] == "site-000"]
    assert row[5] == "left" and row[1] == "–" and "left before round 7" in row[9]
    assert "One site is not compared: site-000 (left early)." in page.detail


def test_who_trains_nothing_has_no_training_samples_and_has_not_left(
    runs: Path, tmp_path: Path
) -> None:
    def adds(record: dict[str, Any]) -> None:
        own = {"group": ["site-001"], "why": "the only group"}
        record["silos"] |= {name: {"num-examples": 9.0} for name in ("new", "t")}
        record["rounds"][-1]["unlabelled"] = {"new": own}  # the end has only what has changed
        record["final-details"] = {"testing": {"t": own}}

    folder = damaged(runs, tmp_path / "three", adds)
    table = all_sites(folder)
    columns = [table.header.index(name) for name in ("group", "training samples", "remark")]
    rows = {row[0]: [row[at] for at in columns] for row in table.rows}
    assert rows["new"] == ["–", "–", "its samples have no labels yet"]
    assert rows["t"] == ["–", "–", "only tests"]
    console = Console(file=StringIO(), width=200)
    print_explanation("three", silo="new", number=None, root=tmp_path, console=console)
    assert "new: its samples have no labels yet; has the model of" in console.file.getvalue()


def with_errors(folder: Path, errors: dict[str, float], **more: Any) -> Path:
    """A complete run of one round whose silos end with these errors, on 70 samples each."""
    folder.mkdir(parents=True)
    evaluation = {n: {"error": error, "num-examples": 70} for n, error in errors.items()}
    record = {
        "status": "completed",
        "config": {"strategy": folder.name.split("-")[0], "rounds": 1, "task": "digits"},
        "silos": {name: {"num-examples": 10} for name in errors},
        "rounds": [{"round": 1, "groups": [list(errors)], "evaluation-after": evaluation}],
        "final-evaluation": evaluation,
        "final-groups": [list(errors)],
        "seconds": 1.0,
    }
    (folder / "run.json").write_text(json.dumps(record | more))
    start = {"event": "start", "at": 0.0, "config": record["config"], "run-id": "1"}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    return folder


LOCAL = {"a": 0.2, "b": 0.2, "c": 0.1}
CHANCE = "; with 70 test samples, differences below about {} points may be chance: {} larger."


@pytest.mark.parametrize(
    ("errors", "lead", "said"),
    [
        (
            {"a": 0.1, "b": 0.2, "c": 0.1},
            "One of three sites does better than with local training, two the same, none worse"
            + CHANCE.format(12, "none is"),
            ["from 16.7% to 13.3% on average", "Largest gain: a, 20.0% → 10.0% (7 of its 70"],
        ),
        (
            {"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.0},
            "Two of three sites do better than with local training, one worse"
            + CHANCE.format(12, "none is"),
            ["Worse: c, 10.0% → 20.0%", "One site is not compared: d (no local baseline)."],
        ),
        (
            {"a": 0.0, "b": 0.0, "c": 0.05},
            "All three sites do better than with local training" + CHANCE.format(9, "two are"),
            ["The error falls"],
        ),
        (
            {"a": 0.3, "b": 0.2, "c": 0.1},
            "None of three sites do better than with local training, two the same, one worse"
            + CHANCE.format(13, "none is"),
            ["The error rises from 16.7% to 20.0% on average."],
        ),
    ],
)
def test_the_first_sentences_are_the_answer(
    errors: dict[str, float], lead: str, said: list[str], tmp_path: Path
) -> None:
    with_errors(tmp_path / "independent-1", LOCAL)
    page = build_page(build_story(read_run(with_errors(tmp_path / "hcct-1", errors))))
    assert page.lead == lead
    assert all(text in page.detail for text in said), page.detail
    better = sum(errors[name] < error for name, error in LOCAL.items())
    assert page.figures["better than local"] == f"{better}/3" and len(page.figures) <= 4


def test_an_error_above_1_does_not_cost_the_report(tmp_path: Path) -> None:
    with_errors(tmp_path / "independent-1", LOCAL)
    page = build_page(build_story(read_run(with_errors(tmp_path / "hcct-1", LOCAL | {"b": 9.0}))))
    assert page.lead.startswith("None of three sites do better than with local training")


def test_how_sure_the_answer_is_follows_from_counts_or_recorded_intervals(tmp_path: Path) -> None:
    def said(name: str, metric: str, width: float | None) -> str:
        ends = {f"{metric}-low": 0.1, f"{metric}-high": 0.1 + (width or 0)} if width else {}
        more = {"metric": metric, "final-metrics": dict.fromkeys(LOCAL, ends)}
        own, alone = (
            read_run(with_errors(tmp_path / f"{strategy}-{name}", LOCAL, **more))
            for strategy in ("hcct", "independent")
        )
        return chance_of(build_story(own, alone=alone))

    unpaired = 100 * 1.96 * (2 * (1 / 6) * (5 / 6) / 70) ** 0.5
    assert said("1", "error", None) == CHANCE.format(f"{unpaired:.0f}", "none is").strip("; .")
    assert "about 14 points" in said("2", "error", 0.2), "√2 · half of 20 points"
    assert said("3", "auroc", None) == ""
    assert said("4", "auroc", 0.2) == (
        "by the 95% intervals, differences below about 14 points may be chance: none is larger"
    )


def test_comparable_runs_are_found_beside_it(runs: Path) -> None:
    story = build_story(read_run(runs / "hcct-1"))
    assert (story.gains.alone_run, story.gains.common_run) == ("independent-1", "fedavg-1")
    alone = read_run(runs / "independent-1").last_errors()
    own = read_run(runs / "hcct-1").rounds[-1].errors
    assert story.gains.gain == pytest.approx({n: alone[n] - own[n] for n in own})
    figures = summary(story)
    better = sum(alone[n] > own[n] for n in own)
    assert figures["ipr"] == pytest.approx(better / len(own))
    third = figures["silos"]["site-003"]
    assert third["error-local"] == pytest.approx(alone["site-003"])
    assert figures["local-run"] == "independent-1"


@pytest.mark.parametrize(
    ("kind", "taken", "expected"),
    [("html", "folder", "a file"), ("json", "folder", "a file"), ("svg", "page.html", "a folder")],
)
def test_what_is_written_to_is_of_the_right_kind(
    kind: str, taken: str, expected: str, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(FederationError, match=f"--output must name {expected}.*{taken}"):
        write_report("hcct-1", kind=kind, root=runs, out=tmp_path / taken)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "page.html"]


def test_a_complete_run_stays_complete_where_no_page_can_be_written(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coterie.server.report.command.write_named", full)
    console = Console(file=StringIO(), width=120)
    print_final(console, runs / "hcct-1")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no report was written: [Errno 28] No space left on device" in text


def test_a_run_of_other_settings_is_not_compared(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "hcct-1", num_silos=8, num_rounds=9)
    write_run(tmp_path / "independent-1", num_silos=8, num_rounds=8, strategy="independent")
    page = build_page(build_story(read_run(tmp_path / "hcct-1")))
    assert "nothing to compare this run with" in page.lead
    (command,) = [text for title, text in page.commands.items() if "--baseline-local" in title]
    assert command.startswith("coterie run independent --set rounds=9")
    story = build_story(read_run(tmp_path / "hcct-1"), alone=read_run(runs / "independent-1"))
    assert story.gains.gain, "a run that is named is taken"


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The run with a changed record."""
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def other_training_data(record: dict[str, Any]) -> None:
    record["silos"]["site-002"]["num-examples"] = 101.0


def other_test_data(record: dict[str, Any]) -> None:
    record["final-evaluation"]["site-002"]["num-examples"] = 71


def other_metric(record: dict[str, Any]) -> None:
    record["metric"] = "auroc"


@pytest.mark.parametrize("change", [other_training_data, other_test_data, other_metric])
def test_a_run_of_silos_with_other_data_is_not_compared(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    run = read_run(configured(tmp_path, "hcct", {}))
    alone = configured(tmp_path, "independent", {})
    assert build_story(run).gains.alone_run == "independent-1"
    changed(alone, change)
    story = build_story(run)
    assert not story.gains.alone_run and "as many samples at every silo" in build_page(story).lead


@pytest.mark.parametrize(("own", "its", "comparable"), [("a", "b", 0), ("a", "a", 1), ("", "b", 1)])
def test_simulated_runs_are_compared_where_their_data_was_made_alike(
    own: str, its: str, comparable: bool, tmp_path: Path
) -> None:
    folder, alone = configured(tmp_path, "hcct", {}), configured(tmp_path, "independent", {})
    for where, note in ((folder, own), (alone, its)):
        if note:
            (where / "silos.txt").write_text(f"{note}\n")
    assert bool(build_story(read_run(folder)).gains.alone_run) == bool(comparable)


def test_the_run_of_most_silos_is_compared(tmp_path: Path) -> None:
    run = read_run(configured(tmp_path, "hcct", {}))
    configured(tmp_path, "independent", {})
    write_run(tmp_path / "independent-2", num_silos=3, num_rounds=3, strategy="independent")
    assert build_story(run).gains.alone_run == "independent-1", "though the other is newer"


@pytest.mark.parametrize(
    ("option", "named", "said"),
    [
        (
            "alone",
            "fedavg-1",
            "--baseline-local must name a completed run of independent. fedavg-1 is a run of f",
        ),
        (
            "common",
            "independent-1",
            "--baseline-global must name a completed run of fedavg. independent-1",
        ),
        ("common", "hcct-1", "--baseline-global must name a run other than the reported hcct-1"),
        ("alone", "independent-2", "independent-2 is a run of independent, running"),
        ("alone", "independent-3", "a run of the same task, digits. independent-3 has task mnist"),
        (
            "alone",
            "independent-4",
            "a run with the same primary metric, error. independent-4 has auroc",
        ),
    ],
)
def test_a_run_that_is_named_is_of_its_strategy_complete_and_of_the_task(
    option: str, named: str, said: str, tmp_path: Path
) -> None:
    size = {"num_silos": 2, "num_rounds": 2}
    for strategy in ("hcct", "fedavg", "independent"):
        write_run(tmp_path / f"{strategy}-1", strategy=strategy, **size)
    write_run(tmp_path / "independent-2", strategy="independent", status="running", **size)
    other = write_run(tmp_path / "independent-3", strategy="independent", **size)
    changed(other, lambda record: record["config"].update(task="mnist"))
    changed(write_run(tmp_path / "independent-4", strategy="independent", **size), other_metric)
    with pytest.raises(FederationError, match=re.escape(said)):
        write_report("hcct-1", root=tmp_path, kind="json", **{option: named})
    with pytest.raises(FederationError, match=r"not with tensorboard of hcct-1: leave them out"):
        write_report("hcct-1", root=tmp_path, kind="tensorboard", **{option: named})


def test_the_command_repeats_what_is_not_a_default(runs: Path) -> None:
    run = read_run(runs / "hcct-1")
    assert repeat_command(run) == "coterie run hcct --set rounds=9 --set alpha=50.0"
    odd = replace(run, config={**run.config, "label": "a b", "lr": 0.5})
    own = "--set alpha=50.0 --set lr=0.5 --set 'label=a b'"
    assert repeat_command(odd) == f"coterie run hcct --set rounds=9 {own}"
    page = build_page(build_story(odd))
    assert page.title.startswith("a b on ") and page.subtitle.startswith(f"run {run.name} · ")


def unfinished(folder: Path) -> Path:
    return changed(folder, lambda record: record.update(status="stopped"))


def test_how_to_repeat_a_run_of_a_federation_names_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "study" / "runs" / "r", num_silos=2, num_rounds=2))
    assert "--federation" not in repeat_command(run)
    (tmp_path / "study" / "coterie.toml").touch()
    where = f" --federation {tmp_path / 'study'}"
    assert repeat_command(run).endswith(where)
    titles = build_page(build_story(run)).commands
    assert f"coterie runs report r --baseline-local RUN{where})" in str(list(titles))
    with pytest.raises(FederationError, match=f"`coterie run resume r{where}`"):
        complete(unfinished(run.folder))


def test_work_beside_the_training_is_in_what_the_run_cost(runs: Path, tmp_path: Path) -> None:
    trial = {"seconds": 0.0, "bytes-sent": 3e6, "bytes-received": 1e6, "silo-seconds": 2.5}
    placing = {"seconds": 0.004, "bytes-sent": 0, "bytes-received": 0}  # of an older release

    def change(record: dict[str, Any]) -> None:
        record["rounds"][0]["phases"] = {"trial": trial, "train": placing}
        record["final-phases"] = {"trial": trial}

    changed = read_run(damaged(runs, tmp_path / "run", change))
    captions = {picture.key: picture.caption for picture in make_pictures(build_story(changed))[0]}
    assert "Other messages of all sites: trial 8 MB." in captions["bytes"]
    assert "Other work of all sites: trial 5.0 s." in captions["silo-seconds"]
    before = read_run(runs / "hcct-1").rounds[0].phase_seconds
    after = changed.rounds[0].phase_seconds
    assert after["train"] == pytest.approx(before["train"] + 0.004)
    assert sum(after.values()) == pytest.approx(sum(before.values()))


# ---------------------------------------------------------------- groups over rounds


def history(*groups: list[str]) -> Any:
    return follow_groups(
        [
            Round(i, tuple(tuple(part) for part in one), joined=(), left=())
            for i, one in enumerate([g if isinstance(g, list) else [g] for g in groups], start=1)
        ]
    )


def test_a_group_keeps_its_letter_and_colour_while_members_change() -> None:
    groups = history(["ab", "cd"], ["abc", "d"], ["acd", "b"], ["ac", "bd"])
    first = {name: where[0] for name, where in groups._at(groups.stretches[0]).items()}
    last = {name: where[0] for name, where in groups.now.items()}
    assert first["a"] == last["a"] == "A" and last["c"] == "A"
    assert len(set(groups.colours.values())) == len(groups.colours)
    assert groups.since == {"a": 1, "c": 2, "b": 4, "d": 4}


def test_equal_groups_in_another_order_are_one_stretch() -> None:
    groups = history(["ab", "cd"], ["dc", "ba"], ["abcd"])
    assert [(s.first, s.last) for s in groups.stretches] == [(1, 2), (3, 3)]


def test_silos_that_are_alone_have_no_letter() -> None:
    groups = history(["a", "b", "c"], ["ab", "c"])
    assert {where[0] for where in groups._at(groups.stretches[0]).values()} == {""}
    assert groups.now["c"][0] == "" and groups.now["a"][0] == "A"


def test_the_largest_of_many_groups_have_colours_and_letters_follow_the_names() -> None:
    many = [*(a + b for a, b in zip("abcdefghijk", "ABCDEFGHIJK", strict=True)), "wxyz"]
    now = history(many).now
    assert [now[group[-1]][0] for group in many] == list("ABCDEFGHIJKL")
    assert now["w"][1] != LIGHT["muted"], "the largest group has a colour, though its name is last"
    assert sum(now[group[0]][1] == LIGHT["muted"] for group in many) == len(many) - len(GROUPS)


def test_many_changes_are_thinned_to_the_largest() -> None:
    quiet, loud = ["ab", "cd", "e"], ["ac", "bd", "e"]
    groups = history(*[quiet, ["ab", "cde"]] * 10, loud, *[quiet, ["ab", "cde"]] * 10)
    columns, count = groups.columns(5)
    assert (len(columns), count) == (5, 41)
    assert columns[0].label == "1" or columns[0].label.startswith("1–")
    assert columns[-1].label == "41"
    assert any({b.members for b in c.blocks} == {("a", "c"), ("b", "d"), ("e",)} for c in columns)


# ---------------------------------------------------------------- the page


def test_every_picture_of_an_hcct_run_is_there(runs: Path) -> None:
    pictures, gaps = make_pictures(build_story(read_run(runs / "hcct-1")))
    assert [picture.key for picture in pictures] == EVERY_PICTURE
    assert gaps == []


def test_fedcollabs_structure_stands_beside_others(runs: Path, tmp_path: Path) -> None:
    structure = {
        "compared": ["site-001", "site-002"], "distances": [[0.0, 0.4], [0.4, 0.0]], "c": 10.0,
        "bound": {"chosen": 1.5, "alone": 2.0, "together": 1.75, "second-best": None},
        "c-interval": [2.04, None], "second-groups": [["site-001"], ["site-002"]],
    }  # fmt: skip

    def collab(record: dict[str, Any]) -> None:
        record["config"]["strategy"] = "fedcollab"
        record["rounds"][2]["structure"] = structure

    pictures, gaps = make_pictures(build_story(read_run(damaged(runs, tmp_path / "run", collab))))
    found = {picture.key: picture for picture in pictures}
    assert "distance of the sites' data" in found["matrix"].caption.lower() and gaps == []
    caption = found["structure"].caption
    assert "c from 2.04 to ∞; this run has c = 10" in caption
    assert "next best: site-001 | site-002" in caption
    table = found["structure"].table
    assert table is not None
    assert table.rows == [("chosen", "1.5"), ("all alone", "2"), ("all together", "1.75")]


def test_the_page_holds_the_figures_and_nothing_from_elsewhere(runs: Path, tmp_path: Path) -> None:
    (file,) = write_report("hcct-1", root=runs, out=tmp_path / "r.html")
    html = file.read_text()
    assert html.count('<svg xmlns="') == 2 * len(EVERY_PICTURE)
    for text in (
        "Why each site is in its group",
        "stays for α",
        "better than local",
        "share accordingly",
        "Nothing was checked: the record compares no updates.",
        "The least firm: ",
        "site-007",
        "coterie run hcct",
        "3.11.2",
    ):
        assert text in html
    assert "src=" not in html.replace("xlink", "") and "<script" not in html
    assert "What is missing" not in html
    nav = html[html.index("<nav") : html.index("</nav>")]
    assert re.findall(r">([\w ]+)</a>", nav) == [
        "Groups", "Was it worth it", "Curves", "Why", "Details",
    ]  # fmt: skip
    assert all(f' id="{key}"' in html for key in re.findall('href="#([^"]+)"', nav))


def test_the_outlier_check_opens_if_something_happened_and_gives_reasons_for_blanks(
    runs: Path, tmp_path: Path
) -> None:
    def check(name: str, **entry: object) -> Fold:
        folder = damaged(runs, tmp_path / name, lambda r: r["rounds"][-1].update(entry))
        return {one.key: one for one in build_page(build_story(read_run(folder))).folds}["outliers"]

    measured = {"norms": {"site-001": 1.5}, "cosines": {"site-001": 0.5}}
    fold = check("quiet", influence=measured)
    assert not fold.open and fold.text == "No update was clipped and no site was quarantined."
    rows = {row[0]: row[1:] for row in fold.tables["Each site's updates"].rows}
    assert rows["site-001"] == ("0.50", "1.50", "never", "never")
    assert rows["site-002"][0] == "group too small"
    fold = check("clipped", influence=measured | {"clipped": {"site-001": 0.5}})
    assert fold.open and fold.text == "Clipped: site-001."
    assert not check("nothing").tables["Each site's updates"].rows


def test_the_configuration_lists_what_differs_and_folds_the_rest(runs: Path) -> None:
    page = build_page(build_story(read_run(runs / "hcct-1")))
    assert dict(page.tables["Configuration"].rows).keys() == {"alpha", "rounds", "strategy"}
    (record,) = [one for one in page.folds if one.key == "record"]
    assert "lr" in dict(record.tables["Keys at their defaults"].rows)
    assert dict(record.tables["Runs compared with"].rows)["local training"] == "independent-1"


def test_other_formats(runs: Path, tmp_path: Path) -> None:
    (file,) = write_report("hcct-1", root=runs, kind="json", out=tmp_path / "r.json")
    assert json.loads(file.read_text())["run"] == "hcct-1"
    files = write_report("hcct-1", root=runs, kind="png", out=tmp_path / "png")
    assert [f.name for f in files] == [f"{key}.png" for key in EVERY_PICTURE]
    with pytest.raises(FederationError, match="format must be one of html, json"):
        write_report("hcct-1", root=runs, kind="pdf")


def test_the_command_line_writes_and_says_where(runs: Path, tmp_path: Path) -> None:
    done = coterie(
        *("runs", "report", "hcct-1", "--runs-dir", str(runs)),
        *("--format", "json", "--output", str(tmp_path / "x.json")),
        *("--baseline-local", "independent-1", "--baseline-global", "fedavg-1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "x.json")


def test_the_command_says_what_it_does_before_it_draws(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"root": runs, "alone": None, "common": None}
    print_report("hcct-1", kind="html", out=tmp_path / "x.html", **asked)
    printed = capsys.readouterr()
    assert printed.err == "Drawing the report of hcct-1 …\n"
    assert printed.out == f"{tmp_path / 'x.html'}\n"
    print_report("hcct-1", kind="json", out=tmp_path / "x.json", **asked)
    assert capsys.readouterr().err == "", "nothing is drawn"


@pytest.mark.parametrize("command", ["report", "watch", "explain"])
def test_commands_find_the_federations_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_FEDERATION", "")
    study = create(tmp_path / "study", ["fl.example.org"])
    write_run(study.runs / "hcct-1", num_silos=4, num_rounds=3, strategy="hcct")
    for options, folder in ((["--federation", str(study.folder)], tmp_path), ([], study.folder)):
        monkeypatch.chdir(folder)
        done = coterie("runs", command, "hcct-1", *options)
        assert done.returncode == 0, done.stderr
        assert "hcct" in done.stdout


def test_a_silo_named_script_is_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "a&b", "$x^2$", "nul\x00", "x" * 300, "ok"]
    write_run(tmp_path / "run", num_silos=6, num_rounds=4, names=names)
    html = render(build_page(build_story(read_run(tmp_path / "run"))))
    assert "<script" not in html and "\x00" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "$x^2$" in html, "not set as mathematics"


# ---------------------------------------------------------------- damage


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_silos=4, num_rounds=5, status="running")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["config"]["rounds"] = 20
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    run = read_run(tmp_path / "run")
    assert run.missing == ("the run is active or was interrupted: 5 of 20 rounds are recorded",)
    assert "5 of 20 rounds" in build_page(build_story(run)).subtitle


def test_a_stopped_and_resumed_run_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_silos=4, num_rounds=5, status="stopped")
    record = json.loads((folder / "run.json").read_text())
    again = {"after-round": 2, "at": "2026-01-01T10:00:00+00:00", "previous-run-id": "7"}
    record |= {"resumed": [again], "seconds": 24.9, "error": "stopped by Ctrl-C (SIGINT)"}
    (folder / "run.json").write_text(json.dumps(record))
    run = read_run(folder)
    assert run.missing == ("the run was stopped by Ctrl-C (SIGINT), after 5 of 5 rounds",)
    subtitle = build_page(build_story(run)).subtitle
    assert " · stopped · " in subtitle and subtitle.endswith(
        "resumed after round 2 · 24.9 s since then"
    )


def test_it_says_what_nobody_saw(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_silos=4, num_rounds=2)
    assert "secure" not in build_page(build_story(read_run(folder))).subtitle
    record = json.loads((folder / "run.json").read_text())
    record["config"]["secure"] = True
    for name in list(record["silos"])[:2]:
        record["silos"][name]["private"] = True
    (folder / "run.json").write_text(json.dumps(record))
    subtitle = build_page(build_story(read_run(folder))).subtitle
    assert " · secure: no update of a silo was seen · 2 with differential privacy · " in subtitle


@pytest.mark.parametrize("content", ["", "{", '{"rounds": [', "[1, 2]", "\x00\xff", "null"])
def test_a_record_that_cannot_be_read_is_replaced_by_its_events(
    runs: Path, tmp_path: Path, content: str
) -> None:
    folder = damaged(runs, tmp_path / "run", lambda record: None)
    (folder / "run.json").write_text(content)
    run = read_run(folder)
    assert [one.round for one in run.rounds] == list(range(1, 10))
    assert run.last_errors() == pytest.approx(read_run(runs / "hcct-1").last_errors())
    assert any("run.json" in text for text in run.missing)
    assert make_pictures(build_story(run))[0]


def test_events_cut_off_in_a_line_give_the_rounds_before(runs: Path, tmp_path: Path) -> None:
    text = (runs / "hcct-1" / "events.jsonl").read_text()
    tmp_path.joinpath("events.jsonl").write_text(text[: int(len(text) * 0.6)])
    run = read_run(tmp_path)
    assert 0 < len(run.rounds) < 9
    assert "run.json is missing" in run.missing


def test_rounds_before_a_resumption_count_once(runs: Path, tmp_path: Path) -> None:
    events = [json.loads(x) for x in (runs / "hcct-1" / "events.jsonl").read_text().splitlines()]
    start, rounds = events[0], [e for e in events if e["event"] == "round"]
    lost = {**rounds[7], "groups": [["site-001"]]}
    entries = [start, *rounds[:4], lost, {"event": "resume", "after": 4, "config": start["config"]}]
    entries += rounds[4:7]
    tmp_path.joinpath("events.jsonl").write_text("\n".join(map(json.dumps, entries)))
    assert [one.round for one in read_run(tmp_path).rounds] == list(range(1, 8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups", "abc"), ("groups", [["a", "a"], ["a"], [1], 7]), ("silos", [1]),
        ("silos", {"a": 3}), ("seconds", {"train": "long"}), ("left-out", 4),
        ("evaluation-after", {"a": {"error": "x"}}), ("evaluation-after", None),
        ("similarity", [[1, 2], [3]]), ("similarity", "x"), ("compared", 5), ("norms", None),
        ("phases", {"train.x": 3}), ("planned", None), ("joined", {"a": 1}),
    ],
)  # fmt: skip
def test_a_damaged_value_costs_only_what_needs_it(
    runs: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = damaged(runs, tmp_path / "run", lambda r: r["rounds"][-1].update({key: value}))
    run = read_run(folder)
    assert len(run.rounds) == 9
    pictures, _ = make_pictures(build_story(run))
    drawn = {picture.key for picture in pictures}
    assert {"curves", "loss", "seconds", "bytes", "groups"} <= drawn


@pytest.mark.parametrize("key", ["config", "silos", "versions", "status", "started", "rounds"])
def test_a_missing_key_of_the_record_is_survived(runs: Path, tmp_path: Path, key: str) -> None:
    folder = damaged(runs, tmp_path / "run", lambda record: record.pop(key))
    assert build_page(build_story(read_run(folder))).pictures


def test_a_damaged_round_is_named(runs: Path, tmp_path: Path) -> None:
    folder = damaged(runs, tmp_path / "run", lambda r: r["rounds"].__setitem__(3, "x"))
    folder.joinpath("events.jsonl").unlink()
    missing = read_run(folder).missing
    assert "a damaged entry of a round was left out" in missing
    assert "these rounds cannot be read: 4" in missing


def test_a_folder_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="has no record of a run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(FederationError, match="damaged"):
        read_run(tmp_path)


# ---------------------------------------------------------------- many silos


def test_many_silos_are_thinned_and_the_page_says_how(tmp_path: Path) -> None:
    write_run(tmp_path / "hcct-1", num_silos=60, num_rounds=40)
    write_run(tmp_path / "independent-1", num_silos=60, num_rounds=40, strategy="independent")
    page = build_page(build_story(read_run(tmp_path / "hcct-1")))
    pictures = [*page.pictures, *(one for fold in page.folds for one in fold.pictures)]
    captions = {picture.key: picture.caption for picture in pictures}
    assert "at most 24 are drawn" in captions["groups"]
    assert "Drawn are the 40 of 60 sites that gain least" in captions["outcomes"]
    assert "10th to 90th percentile" in captions["curves"]
    assert "Drawn are the 40 of 60 sites" in captions["bytes"]
    table = next(picture.table for picture in pictures if picture.key == "bytes")
    assert table is not None and len(table.rows) == 60, "the table has all"
