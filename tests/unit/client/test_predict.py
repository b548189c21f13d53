"""What ``coterie silo predict`` answers, for every kind of problem and of data."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.client.cli.answers import Answers
from coterie.client.cli.predict import predict
from coterie.client.home.settings import SiloSettings
from coterie.client.work.measure import evaluate_in_full
from coterie.client.work.session import open_session
from coterie.tasks.base import Samples, SiloData, Task, TaskError
from coterie.wire import KNOWN_METRICS
from tests.conftest import silo
from tests.unit.client import asked


def table(file: Path) -> tuple[list[str], list[list[str]]]:
    head, *rows = csv.reader(file.open(encoding="utf-8"))
    return head, rows


def written(tmp_path: Path, kind: type[Task], *more: str) -> tuple[list[str], list[list[str]]]:
    """The table that the command writes for a kept model."""
    asked.keep(tmp_path, kind)
    out = tmp_path / "out.csv"
    assert silo(["predict", "--home", str(tmp_path), "--output", str(out), *more]) == 0
    return table(out)


def known(kind: type[asked.Known]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Test inputs, what the model's outputs for them must be, and targets."""
    task = kind()
    data = task.load({})
    assert isinstance(data, SiloData)
    return data.x_test, data.x_test @ task.weight().T, data.y_test


def numbers(rows: list[list[str]], columns: slice) -> np.ndarray:
    return np.array([[float(field) for field in row[columns]] for row in rows])


@pytest.mark.parametrize("kind", [asked.TwoLabels, asked.Streaming])
def test_labels_have_a_column_each(kind: type[Task], tmp_path: Path) -> None:
    head, rows = written(tmp_path, kind)
    _, outputs, targets = known(asked.TwoLabels)
    assert head == ["sample", "p_cough", "p_fever", "label_cough", "label_fever"]
    np.testing.assert_allclose(numbers(rows, slice(1, 3)), 1 / (1 + np.exp(-outputs)), atol=1e-5)
    np.testing.assert_array_equal(numbers(rows, slice(3, 5)), targets)


def test_numbers_have_a_column_each(tmp_path: Path) -> None:
    head, rows = written(tmp_path, asked.TwoNumbers)
    _, outputs, targets = known(asked.TwoNumbers)
    assert head == ["sample", "value_0", "value_1", "label_value_0", "label_value_1"]
    assert [row[3] for row in rows] == [str(target) for target in targets[:, 0]], "all digits"
    np.testing.assert_allclose(numbers(rows, slice(1, 5)), np.hstack([outputs, targets]), rtol=1e-5)


def test_survival_has_the_log_risk(tmp_path: Path) -> None:
    head, rows = written(tmp_path, asked.Lives)
    _, outputs, targets = known(asked.Lives)
    assert head == ["sample", "log_risk", "time", "event"]
    np.testing.assert_allclose(numbers(rows, slice(1, 4)), np.hstack([outputs, targets]), rtol=1e-5)


def test_nested_inputs_are_asked_from_the_silo_s_data_and_from_a_file(tmp_path: Path) -> None:
    head, rows = written(tmp_path, asked.Nested)
    _, outputs, _ = known(asked.TwoNumbers)
    category = np.arange(60)[::-1] % 4
    expected = outputs + np.stack([2 * category, 2 * category + 1], axis=1)
    np.testing.assert_allclose(numbers(rows, slice(1, 3)), expected, rtol=1e-4, atol=1e-5)
    (tmp_path / "new").touch()
    head, again = written(tmp_path, asked.Nested, "--input", str(tmp_path / "new"))
    assert head == ["sample", "value_0", "value_1"]
    assert [row[:3] for row in rows] == again


def test_texts_of_samples_are_passed_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.zeros((2, 3), np.float32)
    given = Samples(x, passed={"patient": ["p-7", "p-9"], "ward": ["a", "b"]})
    monkeypatch.setattr(asked.TwoNumbers, "inputs", lambda *_: given)
    (tmp_path / "new").touch()
    head, rows = written(tmp_path, asked.TwoNumbers, "--input", str(tmp_path / "new"))
    assert head == ["sample", "patient", "ward", "value_0", "value_1"]
    assert rows == [["0", "p-7", "a", "0", "0"], ["1", "p-9", "b", "0", "0"]]


ODD = os.fsdecode(b"R\xf6ntgen.png")


def test_names_that_are_not_utf_8_are_written_with_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = Samples(np.zeros((2, 3), np.float32), ["a.png", ODD])
    monkeypatch.setattr(asked.TwoNumbers, "inputs", lambda *_: given)
    (tmp_path / "new").touch()
    _, rows = written(tmp_path, asked.TwoNumbers, "--input", str(tmp_path / "new"))
    assert [row[0] for row in rows] == ["a.png", "R\\xf6ntgen.png"]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert silo(["predict", "--home", str(tmp_path), "--input", str(tmp_path / "new")]) == 0
    assert out.buffer.getvalue().splitlines()[-1].startswith(b"R\\xf6ntgen.png,")  # type: ignore[attr-defined]


def test_a_file_of_answers_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(answers: Answers, file: TextIO) -> None:
        file.write("sample,value\n0,1\n")
        raise OSError(28, "No space left on device")

    asked.keep(tmp_path, asked.TwoNumbers)
    out = tmp_path / "out.csv"
    asking = ["predict", "--home", str(tmp_path), "--output", str(out)]
    before = {file.name for file in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr("coterie.client.cli.answers.write_csv", stop)
        assert silo(asking) == 2
        assert {file.name for file in tmp_path.iterdir()} == before
        out.write_text("mine")
        assert silo(asking) == 2
    assert out.read_text() == "mine"
    assert silo(asking) == 0 and len(table(out)[1]) == 60


def test_a_mask_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, left = Image.Image.save, [3]

    def full(self: Image.Image, file: Any, *more: Any) -> None:
        left[0] -= 1
        if not left[0]:
            file.write(b"\x89PNG")
            raise OSError(28, "No space left on device")
        save(self, file, *more)

    asked.keep(tmp_path, asked.Pixels)
    names = ["a.png", ODD, "c.png"]
    given = Samples(asked.Pixels().load({}).x_test[:3], names)
    monkeypatch.setattr(asked.Pixels, "inputs", lambda *_: given)
    (tmp_path / "new").touch()
    out = tmp_path / "masks"
    asking = ["predict", "--home", str(tmp_path), "--input", str(tmp_path / "new")]
    with monkeypatch.context() as patched:
        patched.setattr(Image.Image, "save", full)
        assert silo([*asking, "--output", str(out)]) == 2
    said = capsys.readouterr().err
    assert "c.png: No space left on device. Free space" in said and "2 of 3 were written." in said
    assert sorted(file.name for file in out.iterdir()) == sorted(names[:2])
    assert silo([*asking, "--output", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == sorted(names)


def test_masks_are_files_with_the_class_of_every_pixel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.keep(tmp_path, asked.Pixels)
    assert silo(["predict", "--home", str(tmp_path)]) == 2
    assert "Name a folder with --output" in capsys.readouterr().err
    out = tmp_path / "masks"
    assert silo(["predict", "--home", str(tmp_path), "--output", str(out)]) == 0
    expected = asked.Pixels().load({}).x_test[:, 0] > 0.25
    assert sorted(file.name for file in out.iterdir()) == [f"{i:02}.png" for i in range(12)]
    for i, mask in enumerate(expected):
        np.testing.assert_array_equal(np.asarray(Image.open(out / f"{i:02}.png")), mask)
    said = capsys.readouterr().err
    assert "Dice on this silo's own test data 0." in said and "IoU" in said
    (tmp_path / "file").touch()
    assert silo(["predict", "--home", str(tmp_path), "--output", str(tmp_path / "file")]) == 2
    assert "masks cannot be written into" in capsys.readouterr().err


def test_masks_are_called_as_their_samples_and_volumes_are_arrays(tmp_path: Path) -> None:
    asked.keep(tmp_path, asked.Voxels)
    names = ["b/one.png", "b/one.tif", "two.png"]
    (tmp_path / "new").write_text(json.dumps(names))
    out = tmp_path / "masks"
    asking = ["predict", "--home", str(tmp_path), "--input", str(tmp_path / "new")]
    assert silo([*asking, "--output", str(out)]) == 0
    expected = asked.Voxels().load({}).x_test[:, 0] > 0.25
    for name, mask in zip(names, expected, strict=False):
        np.testing.assert_array_equal(np.load(out / f"{name}.npz")["mask"], mask)


@pytest.mark.parametrize(
    "kind",
    [asked.ThreeClasses, asked.TwoLabels, asked.Streaming, asked.TwoNumbers, asked.Lives,
     asked.Pixels],
)  # fmt: skip
def test_the_metrics_are_those_that_the_silo_measures(
    kind: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = asked.keep(tmp_path, kind)
    session = open_session(SiloSettings("a", f"{asked.__name__}:{kind.__name__}"))
    expected = evaluate_in_full(session.task, session.model, session.data).figures
    answers = predict(file, None, options={})
    assert set(answers.figures) == set(expected) and expected
    for name, figure in expected.items():
        got = answers.figures[name]
        assert (got.value, got.low, got.high) == pytest.approx(
            (figure.value, figure.low, figure.high), nan_ok=True
        )
    assert silo(["predict", "--home", str(tmp_path), "--output", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().err
    for name in expected:
        unit = "days" if name in ("mae", "rmse") else ""
        metric = KNOWN_METRICS[name]
        assert f"{metric.title:<20} {metric.text(expected[name].value, unit)}" in said


def test_samples_that_no_model_can_be_asked_about_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = asked.keep(tmp_path, asked.Streaming)
    spoiled = asked.Streaming().load({})
    spoiled.test.x[7, 1] = np.nan  # type: ignore[attr-defined]
    monkeypatch.setattr(asked.Streaming, "load", lambda *_: spoiled)
    with pytest.raises(TaskError, match=r"sample 7 \(the first is 0\) cannot be predicted: values"):
        predict(file, None, options={})
    np.save(tmp_path / "wide.npy", np.zeros((3, 5), np.float32))
    with pytest.raises(TaskError, match=r"do not fit the model: they have shape \(3, 5\)"):
        predict(file, tmp_path / "wide.npy", options={})
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    with pytest.raises(TaskError, match="contains no samples"):
        predict(file, tmp_path / "none.npy", options={})


def test_large_samples_are_asked_about_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.client.work.measure.BATCH_BYTES", 16 * 12 * 4)
    seen: list[int] = []
    forward = torch.nn.Linear.forward

    def listening(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return forward(self, x)

    file = asked.keep(tmp_path, asked.TwoNumbers)
    monkeypatch.setattr(torch.nn.Linear, "forward", listening)
    answers = predict(file, None, options={})
    assert max(seen) == 4 and sum(seen) == len(answers.values) == 60
