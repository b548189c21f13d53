"""``coterie silo check``: what it says is so."""

from __future__ import annotations

import io
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from coterie.client.cli.check import check
from coterie.client.home.disclosure import About, learned_lines
from coterie.client.home.folder import Home, create
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.prepare import prepare
from coterie.client.resident.serve import _own
from tests.conftest import silo
from tests.tables import declaration

DIGITS = {"train": 40, "test": 30}


def said(**policy: object) -> str:
    settings = SiloSettings("a", options=DIGITS, device="cpu", policy=Policy(**policy))  # type: ignore[arg-type]
    return "\n".join(check(settings))


def test_it_shows_counts_schema_device_a_training_step_and_what_would_leave() -> None:
    text = said()
    assert "40 samples of 1×8×8" in text and "30 samples of 1×8×8" in text
    assert "task      digits, 10 classes, schema " in text and "device    cpu" in text
    assert "one epoch in" in text and "% before" in text
    assert "6 arrays of the model, 24,360 bytes" in text and "head.weight 10×128 float32" in text
    assert "train-loss, loss, error, seconds" in text
    assert "samples, labels:    never leave" in text


def test_it_says_who_learns_of_label_counts() -> None:
    text = said(label_counts=True)
    assert "the coordinator learns them, and every silo the labels' shares over" in text


def test_it_names_discriminators_where_they_would_leave() -> None:
    assert "also a discriminator per other silo, and its accuracy" in said(min_group_size=2)
    assert "discriminator per" not in said(min_group_size=3), "they are averaged in pairs"


def test_it_follows_the_policy() -> None:
    text = said(
        strategies=("hcct",),
        min_group_size=3,
        keep_layers="head",
        share_metrics=(),
        auxiliary=False,
        max_local_epochs=5,
        max_rounds=7,
    )
    assert "4 arrays of the model" in text and "head.weight 10" not in text
    assert "Never sent, in any run: head.weight, head.bias" in text
    assert "discriminator per" not in text and "numbers of samples\n" in text
    assert "only in: hcct" in text and "at least 3 silos" in text
    assert "more than 5 epochs" in text and "of at most 7 rounds" in text
    assert "  device cpu,\n  min_group_size 3,\n  max_local_epochs 5, versions" in text


ABOUT = About(samples=100, tests=30, metrics=("loss", "error"), columns=3)


@pytest.mark.parametrize(
    ("changed", "item", "says"),
    [
        ({"strategies": ("hcct",)}, "your own model", "is sent to no other silo"),
        ({"strategies": ("fedavg",)}, "discriminators", "only with unlabelled silos:"),
        ({"min_group_size": 3}, "your group", "the mean of at least 3 silos' updates"),
        ({"min_group_size": 3}, "discriminators", "none leave: they are averaged in pairs"),
        (
            {"secure": "required"},
            "your updates",
            "the coordinator sees no update, but a sketch of each",
        ),
        ({"secure": "required"}, "your own model", "is sent to no other silo"),
        ({"secure": "required"}, "discriminators", "none leave"),
        ({"secure": "required"}, "label counts", "from sums over groups of the last layer"),
        ({"peers": ("b 1-2", "c 3-4")}, "sums", "only with b, c, whose keys you have compared"),
        ({"keep_layers": "head"}, "your updates", "less the layers 'head'"),
        ({"auxiliary": False}, "discriminators", "none leave"),
        ({"keep_layers": "head", "auxiliary": False}, "label counts", "not shared"),
        ({"label_counts": True}, "label counts", "the coordinator learns them,"),
        ({"column_sums": True}, "sums of columns", "of each of 3 with at least 20 numbers"),
        ({"column_sums": True, "column_sums_from": 50}, "sums of columns", "at least 50"),
        ({"statistics": ("inputs",)}, "statistics", "in each interval or category of inputs"),
        (
            {"statistics": ("targets",), "statistics_from": 25},
            "statistics",
            "but no number below 25",
        ),
        ({"sums": ("trees",)}, "sums for models", "your training rows, for trees; no sum"),
        ({"sums": ("trees", "alone")}, "sums for models", "for trees, also of you alone;"),
        ({"subgroups": ("sex",)}, "metrics", "only evaluates also by sex, for no fewer than 10"),
        ({"min_samples": 90}, "behind an update", "at least 90 different samples"),
        ({"min_samples": 101}, "behind an update", "all 100 of yours, fewer than min_samples"),
        ({"min_batch": 4}, "behind an update", "of 4 in each step"),
        ({"max_rounds": 7}, "a run gets", "updates of at most 7 rounds"),
        ({"max_rounds": 0}, "a run gets", "updates of any number of rounds"),
        ({"max_evaluations": 3}, "a run gets", "at most 3 evaluations in each"),
    ],
)
def test_a_part_of_the_policy_that_bounds_what_leaves_changes_what_is_said(
    changed: dict[str, Any], item: str, says: str
) -> None:
    by_default, found = (
        dict(line.strip().split(": ", 1) for line in learned_lines(policy, ABOUT))
        for policy in (Policy(), Policy(**changed))
    )
    assert says in found[item] and says not in by_default[item]


def test_differential_privacy_changes_what_is_said() -> None:
    policy = Policy(label_counts=True, column_sums=True, statistics=("inputs",))
    lines = "\n".join(learned_lines(policy, replace(ABOUT, epsilon=8.0)))
    assert lines.count("ε = 8 allows") == 2
    assert "the coordinator learns them," not in lines
    assert "not shared (statistics)" in lines
    assert "not shared (column_sums)" in lines and "none leave" in lines


def test_every_part_of_the_policy_that_bounds_what_leaves_has_its_words() -> None:
    """One that is added must be there too, or be named here as one that bounds something else."""
    cases = test_a_part_of_the_policy_that_bounds_what_leaves_changes_what_is_said.pytestmark[0]
    covered = {key for changed, _, _ in cases.args[1] for key in changed}
    of_work = {"max_local_epochs", "max_minutes", "max_message_mb", "max_kept_runs"} | {
        "approve",
        "hours",
        "days",
    }
    assert {field.name for field in fields(Policy)} == covered | of_work | {"share_metrics"}


@pytest.mark.parametrize(
    ("metrics", "words", "labels"),
    [
        ((), "the coordinator learns none", "partly, from discriminators"),
        (
            ("f1", "error"),
            "the coordinator learns: f1, error",
            "the coordinator can compute them from f1;",
        ),
    ],
)
def test_it_says_what_metrics_tell(metrics: tuple[str, ...], words: str, labels: str) -> None:
    about = About(samples=100, tests=30, metrics=metrics)
    lines = dict(line.strip().split(": ", 1) for line in learned_lines(Policy(), about))
    assert lines["metrics"].strip() == words and lines["label counts"].strip().startswith(labels)


def test_layers_to_keep_that_the_model_does_not_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path, "a")
    file = tmp_path / "silo.toml"
    file.write_text(file.read_text().replace('keep_layers = ""', 'keep_layers = "haed"'))
    assert silo(["check", "--home", str(tmp_path)]) == 2
    said = "keep_layers = 'haed' cannot be kept: no array is named haed"
    assert said in capsys.readouterr().err
    with pytest.raises(SettingsError, match=said):
        prepare([Home(tmp_path).settings()])


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_its_lines_are_as_wide_as_the_terminal_and_no_word_is_cut(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = create(tmp_path / "a", "a").folder
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    if columns != 100:  # else there is no terminal
        monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert silo(["check", "--home", str(home)]) == 0
    plain = list(check(Home(home).settings()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    words, whole = (set(" ".join(some).split()) for some in (lines, plain))
    assert {word for word in words ^ whole if "." not in word} == set(), "but for measured times"
    if columns < 200:
        assert len(lines) > len(plain)
        learned = [line for line in lines if line.startswith("  label counts:")]
        assert lines[lines.index(learned[0]) + 1].startswith(" " * 22)


BLOOD = declaration("age", "iron", name="blood")


@pytest.mark.parametrize(
    ("rows", "warnings"),
    [
        ([(20 + i, i % 9, "yes" if i % 3 else "no") for i in range(200)], []),
        (
            [(20 + i, i % 9, "no") for i in range(120)],
            [
                "all training samples have the same class: there is nothing to distinguish",
                "all test samples have the same class: only some metrics are defined",
            ],
        ),
        (
            [(1, 7, "yes"), (2, 7, "no"), (3, 7, "yes"), (4, 7, "no"), (5, 8, "no")],
            [
                "every round sends an update made from only 3 samples, fewer than min_samples",
                "only 3 training samples",
                "only 2 test samples",
            ],
        ),
        (
            [(1, 7, "yes"), (2, 8, "yes")],
            [
                "every round sends an update made from only 1 sample, fewer than min_samples",
                "only 1 training sample: a model learns little",
                "only 1 test sample: measurements on",
            ],
        ),
        (
            [(1, 7, "yes"), (1, 7, "yes"), *((20 + i, i % 9, "no") for i in range(198))],
            ["1 of 41 test samples is equal to a training sample"],
        ),
        (
            [(20 + i % 40, i % 40, "yes" if i % 2 else "no") for i in range(200)],
            ["40 of 40 test samples are equal to a training sample, including the target."],
        ),
        (
            [(20 + i, 7, "yes" if i % 3 else "no") for i in range(200)],
            ["iron is the same in all training rows"],
        ),
    ],
)
def test_it_warns_of_data_that_is_probably_wrong(
    rows: list[tuple[int, int, str]],
    warnings: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "blood.toml").write_text(BLOOD)
    lines = "".join(f"{age},{iron},{ill}\n" for age, iron, ill in rows)
    (tmp_path / "blood.csv").write_text("age,iron,ill\n" + lines)
    options = {"data": str(tmp_path / "blood.csv")}
    settings = SiloSettings("a", task=str(tmp_path / "blood.toml"), options=options, device="cpu")
    said = [line for line in check(settings) if line.startswith("warning")]
    for line, warning in zip(said, warnings, strict=True):
        assert line.startswith(f"warning   {warning}")
    with caplog.at_level("WARNING"):
        _own([settings])
    logged = [r.getMessage() for r in caplog.records if ", data: " in r.getMessage()]
    assert logged == [line.replace("warning   ", "silo a, data: ") for line in said]


def said_of_blood(folder: Path, network: str, **changes: Any) -> str:
    (folder / "blood.toml").write_text(BLOOD.replace("mclr", network))
    rows = [f"{20 + i},{i % 9 or ''},{'yes' if i % 3 else 'no'}\n" for i in range(100)]
    (folder / "blood.csv").write_text("".join(["age,iron,ill\n", *rows]))
    options, task = {"data": str(folder / "blood.csv")}, str(folder / "blood.toml")
    return "\n".join(check(SiloSettings("a", task=task, options=options, device="cpu", **changes)))


FOLLOW = "label counts:       their totals follow exactly from the sums"


@pytest.mark.parametrize(("network", "learns"), [("trees-4x3", False), ("any-4x3", True)])
def test_it_names_the_sums_by_which_trees_grow(network: str, learns: bool, tmp_path: Path) -> None:
    text = said_of_blood(tmp_path, network, policy=Policy(sums=("trees",)))
    few = said_of_blood(tmp_path, network, policy=Policy(sums=("trees",), min_samples=101))
    assert ("an update made from only 80 samples" in few) is learns
    size = 2 * 65 * 7 * 3 * 8  # columns · bins · nodes · sums · bytes
    assert f"at most {size:,} bytes per tree with 64 bins" in text
    assert f"{FOLLOW} for trees" in text and "warning " not in text
    assert ("one epoch in" in text) is ("of the last layer" in text) is learns
    secure = said_of_blood(tmp_path, network, policy=Policy(sums=("trees",), secure="required"))
    assert f"{FOLLOW} of groups for trees" in secure


@pytest.mark.parametrize("network", ["trees-4x3", "any-4x3"])
def test_it_warns_of_a_task_with_trees_whose_sums_the_policy_does_not_allow(
    network: str, tmp_path: Path
) -> None:
    text = said_of_blood(tmp_path, network)
    (line,) = (line for line in text.splitlines() if line.startswith("warning "))
    assert 'until sums = ["trees"] in silo.toml' in line
    assert ("task.family = network" in line) is network.startswith("any")
    assert "bytes per tree" not in text and FOLLOW not in text
    tests = {"role": "evaluate", "policy": Policy(min_samples=101)}
    assert "warning " not in said_of_blood(tmp_path, network, **tests)


def test_values_that_are_missing_do_not_hide_the_range_of_the_others(tmp_path: Path) -> None:
    assert "training  80 samples of 2, from 1 to 119 (" in said_of_blood(tmp_path, "trees-4x3")


def test_a_task_and_data_that_are_not_there_are_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "a"
    for more, problem in (
        (["--task", str(tmp_path / "none.toml")], "there is no file"),
        (["--task", "digts"], "no task is called 'digts'"),
        (["--data", str(tmp_path / "none.csv")], "there is no '"),
    ):
        assert silo(["init", "--name", "a", "--home", str(made), *more]) == 2
        assert problem in capsys.readouterr().err and not made.exists()


def test_the_command_reads_the_folder_and_needs_no_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path, "a")
    file = tmp_path / "silo.toml"
    file.write_text(file.read_text().replace('# data = "/data/a"', "train = 12"))
    assert silo(["check", "--home", str(tmp_path)]) == 0
    assert "12 samples" in capsys.readouterr().out
    file.write_text(file.read_text().replace("train = 12", "train = 0"))
    assert silo(["check", "--home", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("coterie: ") and "train must be at least 1" in err


@pytest.mark.parametrize("command", ["check", "models", "ledger"])
def test_a_folder_without_its_option_is_refused_with_the_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert silo([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("To name a silo's folder, use --home FOLDER") == 1 and str(tmp_path) in said


@pytest.mark.parametrize(("train", "said"), [(1, "1 sample,"), (63, "63 samples,"), (64, "")])
def test_a_silo_is_told_that_an_update_of_few_samples_leaves(train: int, said: str) -> None:
    """As one may set it up that only wants to test."""
    settings = SiloSettings("a", options={"train": train, "test": 30}, device="cpu")
    warned = [line for line in check(settings) if "made from" in line]
    if not said:
        assert not warned
        return
    (line,) = warned
    assert line.startswith("warning   every round sends an update made from only " + said)
    assert "'Test a model without training'" in line.replace("\n          ", " ")
