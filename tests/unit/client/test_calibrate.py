"""Temperature and thresholds of a kept model, from the silo's own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from coterie.client.cli.predict import halves, predict
from coterie.client.home.settings import SiloSettings
from coterie.client.work.card import Calibration, read_card, write_card
from coterie.client.work.hold_out import split_validation
from coterie.client.work.session import open_session
from coterie.tasks.base import SiloData, Task
from coterie.wire import model_hash
from tests.conftest import silo
from tests.unit.client import asked

MANY = ("--set", "rows=3000")


def calibrated(
    home: Path, kind: type[Task], *more: str, validation: float = 0.0, rows: int = 3000
) -> Calibration:
    file = asked.keep(home, kind, validation=validation, rows=rows)
    assert silo(["calibrate", "--home", str(home), "--set", f"rows={rows}", *more]) == 0
    found = read_card(file).calibration
    assert found is not None
    return found


def model_of(home: Path) -> Path:
    (file,) = home.glob("models/*.safetensors")
    return file


def fitted_on(kind: type[asked.Known], rows: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """The model's outputs and the targets of the half of the test data that it is fitted on."""
    task = kind()
    data = task.load({"rows": rows})
    assert isinstance(data, SiloData)
    half, _ = halves(rows)
    return data.x_test[half] @ task.weight().T, data.y_test[half]


def rates(positive: np.ndarray, answers: np.ndarray) -> tuple[float, float]:
    """Sensitivity and specificity."""
    return float(answers[positive].mean()), float((~answers[~positive]).mean())


@pytest.mark.parametrize("kind", [asked.TwoClasses, asked.ThreeClasses, asked.TwoLabels])
def test_the_temperature_undoes_how_much_too_sure_a_model_is(
    kind: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(tmp_path, kind)
    assert found.temperature == pytest.approx(asked.TRUE_TEMPERATURE, rel=0.15)
    assert (found.part, found.part_examples, found.examples, found.measured) == (
        *("test", 3000, 1500, 1500),
    )
    assert len(found.thresholds) == {"TwoClasses": 1, "ThreeClasses": 0}.get(kind.__name__, 2)
    before, after = capsys.readouterr().out.split("after:")
    assert "fitted on 1500 of the 3000 test samples of this silo" in before

    def shown(text: str) -> float:
        return float(text.split("Brier score")[1].split()[0])

    assert shown(after) < shown(before) - 0.01


def test_the_threshold_is_the_best_by_youden_s_index(tmp_path: Path) -> None:
    found = calibrated(tmp_path, asked.TwoClasses)
    outputs, y = fitted_on(asked.TwoClasses)
    odds = (outputs[:, 1] - outputs[:, 0]) / found.temperature
    chances = 1 / (1 + np.exp(-odds))
    best = max(sum(rates(y == 1, chances > level)) for level in np.unique(chances))
    assert sum(rates(y == 1, chances > found.thresholds[0])) == pytest.approx(best)
    assert np.abs(chances - found.thresholds[0]).min() > 0, "no sample's own probability"
    assert found.positive == "ill"


@pytest.mark.parametrize("wanted", [0.5, 0.9, 1.0])
def test_the_threshold_is_the_highest_that_has_the_sensitivity(
    wanted: float, tmp_path: Path
) -> None:
    found = calibrated(tmp_path, asked.TwoClasses, "--sensitivity", str(wanted), rows=400)
    outputs, y = fitted_on(asked.TwoClasses, 400)
    odds = (outputs[:, 1] - outputs[:, 0]) / found.temperature
    chances = 1 / (1 + np.exp(-odds))
    assert rates(y == 1, chances > found.thresholds[0])[0] >= wanted
    higher = np.sort(chances[chances > found.thresholds[0]])
    assert rates(y == 1, chances > higher[0])[0] < wanted, "one sample fewer is too few"
    assert found.rule == f"sensitivity at least {wanted:g}"


def test_every_label_has_a_threshold(tmp_path: Path) -> None:
    found = calibrated(tmp_path, asked.TwoLabels, "--sensitivity", "0.8")
    outputs, y = fitted_on(asked.TwoLabels)
    chances = 1 / (1 + np.exp(-outputs / found.temperature))
    for label, threshold in enumerate(found.thresholds):
        assert 0.8 <= rates(y[:, label] == 1, chances[:, label] > threshold)[0] < 0.81


def test_predict_answers_as_calibrated_and_measures_on_the_other_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(tmp_path, asked.TwoClasses, "--sensitivity", "0.9")
    file, out = model_of(tmp_path), tmp_path / "out.csv"
    assert model_hash(load_file(file)) == read_card(file).sha256
    assert silo(["predict", "--home", str(tmp_path), *MANY, "--output", str(out)]) == 0
    said = capsys.readouterr().err
    assert "the 1500 samples not used for calibration)" in said
    assert f"calibrated: temperature {found.temperature:.4g}, 'ill' above" in said
    data = asked.TwoClasses().load({"rows": 3000})
    assert isinstance(data, SiloData)
    outputs = data.x_test @ asked.WEIGHT.T
    chances = 1 / (1 + np.exp((outputs[:, 0] - outputs[:, 1]) / found.temperature))
    _, other = halves(3000)
    rows = [line.split(",") for line in out.read_text().splitlines()[1:]]
    np.testing.assert_allclose([float(row[3]) for row in rows], chances, atol=1e-5)
    ill = np.array([row[1] == "ill" for row in rows])
    np.testing.assert_array_equal(ill, chances > found.thresholds[0])
    answers = predict(file, None, options={"rows": 3000})
    sensitivity, specificity = rates(data.y_test[other] == 1, ill[other])
    assert answers.figures["sensitivity"].value == pytest.approx(sensitivity)
    assert answers.figures["specificity"].value == pytest.approx(specificity)
    assert found.figures["sensitivity"][0] == pytest.approx(sensitivity)
    assert f"| sensitivity | {100 * sensitivity:.1f}% |" in file.with_suffix(".md").read_text()


def test_labels_say_yes_as_calibrated(tmp_path: Path) -> None:
    found = calibrated(tmp_path, asked.TwoLabels)
    out = tmp_path / "out.csv"
    assert silo(["predict", "--home", str(tmp_path), *MANY, "--output", str(out)]) == 0
    head, *rows = [line.split(",") for line in out.read_text().splitlines()]
    assert head[:5] == ["sample", "yes_cough", "yes_fever", "p_cough", "p_fever"]
    for row in rows:
        for label, threshold in enumerate(found.thresholds):
            assert (row[1 + label] == "1") == (float(row[3 + label]) > threshold)


def test_calibrating_again_starts_from_the_model_itself(tmp_path: Path) -> None:
    found = calibrated(tmp_path, asked.TwoClasses)
    assert silo(["calibrate", "--home", str(tmp_path), *MANY]) == 0
    assert read_card(model_of(tmp_path)).calibration == found


def test_with_validation_data_it_is_fitted_on_what_no_training_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(tmp_path, asked.TwoClasses, validation=0.25)
    assert (found.part, found.examples, found.measured) == ("validation", 750, 3000)
    assert "all 750 samples of the validation data" in capsys.readouterr().out
    task = f"{asked.__name__}:TwoClasses"
    session = open_session(SiloSettings("a", task, options={"rows": 3000}))
    part = split_validation(session, 0.25, run_seed=3).test
    x, y = (leaf.cpu() for leaf in part.at(torch.arange(750)))
    outputs = x.numpy() @ asked.WEIGHT.T
    chances = 1 / (1 + np.exp((outputs[:, 0] - outputs[:, 1]) / found.temperature))
    best = max(sum(rates(y.numpy() == 1, chances > level)) for level in np.unique(chances))
    assert sum(rates(y.numpy() == 1, chances > found.thresholds[0])) == pytest.approx(best)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (asked.TwoNumbers, [], "has a target of kind 'number'"),
        (asked.ThreeClasses, ["--sensitivity", "0.9"], "needs two classes, or labels"),
        (asked.TwoClasses, ["--sensitivity", "0"], "above 0 and at most 1. Got 0"),
        (asked.TwoClasses, ["--sensitivity", "1.5"], "above 0 and at most 1. Got 1.5"),
        (asked.TwoClasses, ["--set", "seed=1"], "is not what the model was trained on"),
        (asked.TwoClasses, ["--set", "rows=12"], "is not what the model was trained on"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    kind: type[Task],
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = asked.keep(tmp_path, kind)
    assert silo(["calibrate", "--home", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
    assert read_card(file).calibration is None


def test_few_samples_and_samples_of_one_class_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.keep(tmp_path, asked.TwoClasses, rows=18)
    assert silo(["calibrate", "--home", str(tmp_path), "--set", "rows=18"]) == 2
    assert "there are 9 samples to calibrate on (of the silo's test data)" in (
        capsys.readouterr().err
    )
    asked.keep(tmp_path, asked.TwoClasses, rows=20)
    assert silo(["calibrate", "--home", str(tmp_path), "--set", "rows=20"]) == 0
    said = capsys.readouterr().out
    assert "Note: 10 samples are few for a calibration. With other samples, its numbers" in said
    monkeypatch.setattr(asked.TwoClasses, "targets", lambda _, x, __: np.zeros(len(x), np.int64))
    asked.keep(tmp_path, asked.TwoClasses)
    assert silo(["calibrate", "--home", str(tmp_path)]) == 2
    assert "all have one class" in capsys.readouterr().err


def test_a_label_that_nobody_has_keeps_its_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = asked.TwoLabels.targets
    monkeypatch.setattr(
        asked.TwoLabels, "targets", lambda *how: draw(*how) * np.array([1, 0], np.float32)
    )
    found = calibrated(tmp_path, asked.TwoLabels)
    assert found.thresholds[1] == 0.5 != found.thresholds[0]
    assert "label fever keeps the threshold 0.5" in capsys.readouterr().out


def test_test_data_that_has_changed_since_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(tmp_path, asked.TwoClasses)
    file = model_of(tmp_path)
    other = replace(read_card(file), calibration=replace(found, part_examples=2000))
    write_card(file, other, load_file(file))
    assert silo(["predict", "--home", str(tmp_path), *MANY]) == 0
    assert "test data has changed since the model was calibrated" in capsys.readouterr().err
