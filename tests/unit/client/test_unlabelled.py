"""A silo whose samples have no labels yet: how it is set up, and what it can do with its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.client.cli.check import check
from coterie.client.home.folder import Home, create
from coterie.client.home.settings import SettingsError, SiloSettings, Study
from coterie.client.work.session import open_session
from coterie.tasks.base import TaskError
from tests.conftest import silo
from tests.unit.tasks.test_declared import declared, table
from tests.unit.tasks.test_own_tables import HEART, plain


def digits(folder: Path, samples: np.ndarray) -> SiloSettings:
    np.save(folder / "new.npy", samples.astype(np.float32))
    return SiloSettings("new", device="cpu", unlabelled=str(folder / "new.npy"))


def test_its_samples_are_all_there_is(tmp_path: Path) -> None:
    session = open_session(digits(tmp_path, np.full((7, 1, 8, 8), 0.5)))
    assert len(session.data.train) == 7 and len(session.data.test) == 0
    assert session.data.train.targets() == ()
    described = session.describe()
    assert described.unlabelled and described.num_examples == 7


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (np.zeros((0, 1, 8, 8)), "contains no samples"),
        (np.full((2, 1, 8, 8), np.nan), "contains NaN or infinite values"),
    ],
)
def test_samples_that_nothing_can_be_done_with_are_refused(
    tmp_path: Path, samples: np.ndarray, why: str
) -> None:
    with pytest.raises(TaskError, match=why):
        open_session(digits(tmp_path, samples))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(TaskError, match="there is no file or folder /nowhere"):
        open_session(SiloSettings("new", unlabelled="/nowhere"))


def test_it_is_for_one_task() -> None:
    with pytest.raises(SettingsError, match="unlabelled needs a silo with one task, because"):
        SiloSettings("new", unlabelled="x", also=(Study("digits"),))


def test_check_says_what_would_leave_and_that_nothing_is_trained(tmp_path: Path) -> None:
    text = "\n".join(check(digits(tmp_path, np.zeros((5, 1, 8, 8)))))
    assert "5 of 1×8×8, without labels: it receives a model and trains none" in text
    assert "discriminators between its samples' features" in text and "one epoch in" not in text
    with pytest.raises(TaskError, match="do not fit the model"):
        list(check(digits(tmp_path, np.zeros((5, 3, 9, 9)))))


def test_a_table_s_rows_are_scaled_by_themselves_where_there_are_no_others(tmp_path: Path) -> None:
    task = declared(tmp_path, HEART)
    rows = [line.rpartition(",")[0] for line in plain().splitlines()]
    file = table(tmp_path, "\n".join(rows) + "\n")
    found = task.inputs(Path(file), {})
    ages = np.array([float(row.split(",")[0]) for row in rows[1:]])
    assert found.scale is not None and found.scale[0][0] == pytest.approx(ages.mean())
    assert found.x[:, 0].mean() == pytest.approx(0, abs=1e-6)


def test_its_folder_names_the_samples_and_the_command_refuses_what_does_not_go_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "e"
    create(folder, "e")
    file = folder / "silo.toml"
    file.write_text(f'unlabelled = "new.npy"\n{file.read_text()}')
    assert Home(folder).settings().unlabelled == str(folder.resolve() / "new.npy")
    line = ["--partitions", "0-1/2", "--unlabelled", "x.npy"]
    assert silo(["serve", *line]) != 0
    assert "--unlabelled applies to one silo" in capsys.readouterr().err
