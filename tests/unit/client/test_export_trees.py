"""Boosted trees in XGBoost's JSON give in XGBoost the model's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from numpy.typing import NDArray

from coterie.client.cli import export as exporting
from coterie.client.cli.export_trees import xgboost_json
from coterie.client.cli.predict import answer_of, predict
from coterie.client.work.card import read_card
from coterie.tasks.base import SiloData
from coterie.tasks.problems import Classes, Labels, Numbers, Survival
from coterie.tasks.trees import importance
from tests.conftest import silo
from tests.unit.client import asked
from tests.unit.client.test_export import exported

Array = NDArray[Any]
PROBLEMS = {
    "two classes": Classes(2),
    "three classes": Classes(3),
    "labels": Labels(2),
    "numbers in a unit": Numbers(2, "days", scale=((100.0, 7.0), (-3.0, 0.1))),
    "survival": Survival(),
}


def some_rows() -> Array:
    draw = np.random.default_rng(0)
    x = draw.integers(-2, 3, (200, 4)).astype(np.float32)  # many values are thresholds
    x[draw.random(x.shape) < 0.2] = np.nan
    return x


@pytest.mark.parametrize("what", PROBLEMS)
def test_xgboost_gives_the_model_s_answers(what: str) -> None:
    problem, rows = PROBLEMS[what], some_rows()
    temperature = 1.0 if isinstance(problem, Numbers | Survival) else 2.5
    model = asked.trees_of(problem, 4)
    with torch.no_grad():
        answers = answer_of(problem, model(torch.from_numpy(rows)), temperature).numpy()
    booster = xgboost.Booster()
    booster.load_model(bytearray(xgboost_json(model, problem, temperature)))
    found = booster.predict(xgboost.DMatrix(rows))
    if problem in (Classes(2), Survival()):
        answers = answers[:, -1]
    assert found == pytest.approx(answers, rel=1e-5)


def test_the_command_writes_calibrated_trees_and_checks_them_if_xgboost_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = asked.keep(tmp_path, asked.Grown)
    assert silo(["calibrate", "--home", str(tmp_path)]) == 0
    calibration = read_card(file).calibration
    assert calibration is not None and calibration.temperature != 1
    card = exported(tmp_path, tmp_path / "m.json")
    assert "checked on 8 samples from this silo's test data" in capsys.readouterr().err
    assert card["format"] == "JSON of XGBoost" and card["output"]["shape"] == ["batch"]
    assert card["output"]["means"] == "probability of 'ill'"
    assert card["importance"] == pytest.approx({"input 3": 2 / 3, "input 2": 1 / 3})
    assert "| input 3 | 0.667 |" in file.with_suffix(".md").read_text()
    data, booster = asked.Grown().load({}), xgboost.Booster(model_file=tmp_path / "m.json")
    assert isinstance(data, SiloData)
    found = booster.predict(xgboost.DMatrix(np.asarray(data.x_test)))
    assert found == pytest.approx(predict(file, None, options={}).values[:, 1], rel=1e-5)
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    exported(tmp_path, tmp_path / "m.json")
    assert "not checked, because xgboost is not installed" in capsys.readouterr().err


def test_inputs_are_called_as_the_task_prepares_them() -> None:
    of = [{"column": "age"}, {"column": "sex", "category": "f"}, {"column": "age", "missing": True}]
    found = importance(np.array([1.0, 3, 4, 0], np.float32), of)
    assert list(found.items()) == [("age is missing", 0.5), ("sex = f", 0.375), ("age", 0.125)]
