"""More rounds, an older model, a site that only tests: as docs/how-to says, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from coterie.server.runs.record import read_run
from tests.commands import coterie
from tests.kit import run
from tests.tables import declaration, table_node

KEYS = {"local-epochs": 2, "lr": 0.1, "wait-for-silos": 5}
NAMES = ("a", "b", "c")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a declaration."""
    (tmp_path / "ill.toml").write_text(declaration("age", "dose", name="ill", network="mlp-64"))
    return tmp_path


def play(folder: Path, task: str, label: str, rounds: int) -> Path:
    """Train three silos; they have the same tables in every run."""
    rng, nodes = np.random.default_rng(0), []
    for name in NAMES:
        age, dose = rng.normal(60, 10, 80), rng.normal(5, 2, 80)
        ill = np.where(age + 5 * dose + rng.normal(0, 4, 80) > 85, "yes", "no")
        rows = [f"{a:.2f},{d:.2f},{i}" for a, d, i in zip(age, dose, ill, strict=True)]
        file, home = folder / f"{task}.toml", str(folder / name)
        nodes.append(table_node(file, name, "age,dose,ill", rows, home=home))
    run(folder / "runs" / label, nodes, run_id=42, task=task, rounds=rounds, **KEYS)
    return folder / "runs" / label


@pytest.mark.parametrize("kept", ["a/models/first.safetensors", "runs/first/models/c.safetensors"])
def test_a_new_run_begins_with_the_model_that_an_older_one_ended_with(
    kept: str, folder: Path
) -> None:
    first = play(folder, "ill", "first", 3)
    shutil.copy(folder / kept, folder / "ill-2026.safetensors")
    again = declaration("age", "dose", name="ill-2", network="mlp-64")
    again += 'weights = "ill-2026.safetensors"\n'
    (folder / "ill-2.toml").write_text(again)
    second = play(folder, "ill-2", "second", 2)
    ended, begun = read_run(first).final, read_run(second).rounds[0]
    assert ended is not None and ended.evaluation
    assert begun.evaluation == ended.evaluation
    assert read_run(second).rounds[-1].round == 2


def test_a_site_that_took_no_part_tests_a_model_on_all_its_rows(folder: Path) -> None:
    done = play(folder, "ill", "first", 1)
    rows = (folder / "a.csv").read_text().splitlines()
    (folder / "ours.csv").write_text("\n".join(rows[:51]))
    data = ["--set", f"data={folder / 'ours.csv'}", "--set", f"test-data={folder / 'ours.csv'}"]
    model = ["--model", str(folder / "b" / "models" / "first.safetensors")]
    model += ["--task", str(folder / "ill.toml")]
    answers = folder / "answers.csv"
    tested = coterie("silo", "predict", *model, *data, "--output", str(answers))
    assert tested.returncode == 0, tested.stderr
    assert "50 samples" in tested.stderr and "AUROC" in tested.stderr and "95%" in tested.stderr
    assert len(answers.read_text().splitlines()) == 51
    model[1] = str(done / "models" / "b.safetensors")
    without_card = coterie("silo", "predict", *model, *data)
    assert without_card.returncode == 2
    assert "has no model card. Take the file from models/ in a silo's folder" in without_card.stderr


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--rounds", "6"], "leave out rounds."),
        (["hcct", "--set", "lr=0.1", "--seed", "2"], "leave out hcct, lr, seed."),
    ],
)
def test_a_run_is_resumed_with_the_keys_that_it_had(more: list[str], named: str) -> None:
    done = coterie("run", "--resume", "first", *more)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("coterie: --resume continues first with the strategy and the keys that")
    assert named in line and "'Stop and resume a run'" in line
