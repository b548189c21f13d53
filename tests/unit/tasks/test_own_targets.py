"""Declared targets other than one of several classes: numbers, labels, survival, masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.client.cli.check import check
from coterie.client.home.settings import SiloSettings
from coterie.tasks import TaskError
from coterie.tasks.problems import Labels, Masks, Numbers, Survival
from tests.unit.tasks.test_declared import ARRAYS, IMAGES, TABLE, WORDS, declared, table

BARE = """
kind = "table"
name = "study"
numeric = ["age"]
network = "mlp-64"
"""
NUMBER = BARE + 'target = {kind = "number", columns = ["days", "cost"], unit = "days"}\n'
LABELS = BARE + 'target = {kind = "labels", columns = ["fever", "pain"]}\n'
SURVIVAL = BARE + 'target = {kind = "survival", time = "days", event = "died"}\n'
ROWS = "age,days,cost,fever,pain,died\n" + "".join(
    f"{20 + i},{i}.5,{i * i},{i % 2},{int(i > 5)},{int(i % 5 == 0)}\n" for i in range(40)
)
ARRAY = ARRAYS.replace('classes = ["a", "b"]\n', "")


def test_a_declarations_content_is_its_fingerprint(tmp_path: Path) -> None:
    """It is part of every silo's schema and of the card of every kept model."""
    texts = (TABLE, ARRAYS, IMAGES.format(channels=1), WORDS)
    first, *_ = found = [declared(tmp_path, text).fingerprint for text in texts]
    assert len(set(found)) == 4 and declared(tmp_path, f"# x\n{TABLE}").fingerprint == first
    led = declared(tmp_path, TABLE.replace("network", 'metric = "auroc"\nnetwork'))
    assert led.metric == "auroc" and led.fingerprint != first


@pytest.mark.parametrize(
    ("text", "problem", "width", "targets", "shown"),
    [
        (NUMBER, Numbers(2, "days"), 2, [20.5, 400], " days, mean "),
        (LABELS, Labels(2), 2, [0, 1], "(fever: 16, pain: "),
        (SURVIVAL, Survival(), 1, [20.5, 1], "(6 events)"),
    ],
)
def test_targets_of_a_table_are_read_and_learned(
    text: str, problem: Any, width: int, targets: list[float], shown: str, tmp_path: Path
) -> None:
    task = declared(tmp_path, text)
    assert task.problem == problem
    data = task.load({"data": table(tmp_path, ROWS), "test-share": 0.25})
    assert data.y_train.dtype == np.float32 and len(data.x_test) in (10, 11)
    y = np.concatenate([data.y_train, data.y_test])
    assert targets in y.tolist() and y.shape == (40, 2)
    task.problem.check(data.y_train, "training")
    *_, last = task.model().parameters()
    assert last.shape == (width,)
    options = {"data": table(tmp_path, ROWS)}
    said = "\n".join(check(SiloSettings("a", task=str(tmp_path / "study.toml"), options=options)))
    assert shown in said and "one epoch in" in said


def test_the_test_part_has_its_share_of_events(tmp_path: Path) -> None:
    for seed in range(5):
        options = {"data": table(tmp_path, ROWS), "test-share": 0.25, "seed": seed}
        data = declared(tmp_path, SURVIVAL).load(options)
        assert data.y_test[:, 1].sum() == 2 and data.y_train[:, 1].sum() == 6


@pytest.mark.parametrize(
    ("text", "change", "said"),
    [
        (NUMBER, (",3.5,", ",,"), "no value in target column 'days' in row 4"),
        (NUMBER, (",3.5,", ",long,"), "column 'days' .* 'long' in row 4"),
        (SURVIVAL, (",3.5,", ",-3.5,"), "'days' .* contains a time below 0 in row 4"),
        (
            SURVIVAL,
            (",0,1\n", ",0,dead\n"),
            "'died' .* 0 or 1. It contains 'dead' in row 1.*: .*codes.died",
        ),
        (LABELS, ("20,0.5,0,0,", "20,0.5,0,,"), "'fever' .* Row 1 is empty:"),
    ],
)
def test_targets_that_cannot_be_read_are_named_by_column_and_row(
    text: str, change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, text).load({"data": table(tmp_path, ROWS.replace(*change))})


def test_events_of_1_and_2_are_not_read_as_events_all(tmp_path: Path) -> None:
    task = declared(tmp_path, SURVIVAL)
    text = ROWS.replace(",1\n", ",2\n").replace(",0\n", ",1\n")
    with pytest.raises(TaskError, match=r"Other \d+ rows are read as '1' .* define both\."):
        task.load({"data": table(tmp_path, text)})
    data = {"data": table(tmp_path, text), "codes": {"died": {"2": "1"}}}
    said = "\n".join(check(SiloSettings("a", task=str(tmp_path / "study.toml"), options=data)))
    assert "every training sample has the event: no time is censored" in said


def test_events_may_be_coded(tmp_path: Path) -> None:
    task = declared(tmp_path, SURVIVAL)
    one = task.load({"data": table(tmp_path, ROWS)})
    text = ROWS.replace(",1\n", ",dead\n").replace(",0\n", ",alive\n")
    codes = {"died": {"dead": "1", "alive": "0"}}
    two = task.load({"data": table(tmp_path, text), "codes": codes})
    np.testing.assert_array_equal(one.y_train, two.y_train)
    with pytest.raises(TaskError, match=r"Row \d+ is empty: leave such rows out"):
        task.load({"data": table(tmp_path, text), "codes": {"died": {"dead": "1", "alive": ""}}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BARE + 'target = {kind = "age"}', "target must be the name of a column, or a table whose"),
        (BARE + "target = 3", "target must be the name of a column"),
        (BARE + 'target = {kind = "number"}', r"target.number.columns. is missing"),
        (NUMBER.replace('"cost"', '"age"'), "a column is named twice"),
        (NUMBER + 'classes = ["a", "b"]', "target of kind number has no classes"),
        (BARE + 'target = "ill"', "classes must name at least two"),
        (SURVIVAL + 'metric = "auroc"', "one of concordance or loss .* survival. Got 'auroc'"),
        (ARRAY + 'target = {kind = "mask"}\nclasses = ["a", "b"]', "masks need samples with"),
        (ARRAY + 'target = {kind = "labels"}', "target.labels.names. is missing"),
    ],
)
def test_a_wrong_target_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, text)


@pytest.mark.parametrize(
    ("target", "y", "kept"),
    [
        ('{kind = "number", unit = "kg"}', np.arange(12), (1,)),
        ('{kind = "number", count = 2}', np.ones((12, 2)), (2,)),
        ('{kind = "labels", names = ["a", "b", "c"]}', np.eye(12)[:, :3].astype(bool), (3,)),
        ('{kind = "survival"}', np.stack([np.arange(12), np.arange(12) % 2], axis=1), (2,)),
    ],
)
def test_targets_of_arrays(target: str, y: Any, kept: tuple[int, ...], tmp_path: Path) -> None:
    task = declared(tmp_path, ARRAY + f"target = {target}\n")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(12, 3)), y=y)
    data = task.load({"data": str(tmp_path / "d.npz"), "test-share": 0.25})
    assert data.y_train.dtype == np.float32 and data.y_train.shape[1:] == kept
    assert sorted(np.concatenate([data.y_train, data.y_test]).sum(axis=1)) == sorted(
        y.reshape(12, -1).sum(axis=1)
    )


@pytest.mark.parametrize(
    ("target", "y", "said"),
    [
        ('{kind = "number"}', np.ones((12, 2)), "y in .* does not fit: .* 1 per sample"),
        ('{kind = "number"}', np.full(12, np.nan), "NaN or infinite values, in sample 1"),
        ('{kind = "number"}', np.array(["a"] * 12), "y in .* must contain numbers. Got <U1"),
        ('{kind = "labels", names = ["a", "b"]}', np.full((12, 2), 2), "must be 0 or 1"),
        ('{kind = "survival"}', np.full((12, 2), 0.5), "events 0 or 1"),
        ('{kind = "number"}', np.array(3.0), r"does not fit: .* of shape \(\)"),
        ('{kind = "survival"}', np.zeros((0, 2)), "has no samples"),
    ],
)
def test_wrong_targets_of_arrays_are_named(target: str, y: Any, said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((12 if y.size else 0, 3)), y=y)
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, ARRAY + f"target = {target}\n").load({"data": str(tmp_path / "d.npz")})


MASKS = """
kind = "npz"
name = "study"
classes = ["background", "lesion", "organ"]
shape = [1, 8, 9]
network = "unet"
target = {kind = "mask"}
"""


def test_masks_of_arrays(tmp_path: Path) -> None:
    task = declared(tmp_path, MASKS)
    assert task.problem == Masks(3)
    x, y = np.zeros((10, 1, 8, 9)), np.arange(720).reshape(10, 8, 9) % 3
    np.savez(tmp_path / "d.npz", x=x, y=y.astype(np.uint8))
    options = {"data": str(tmp_path / "d.npz")}
    data = task.load(options)
    assert data.y_train.shape == (8, 8, 9) and data.y_train.dtype == np.int64
    text = "\n".join(check(SiloSettings("a", task=str(tmp_path / "study.toml"), options=options)))
    assert "masks of 3 classes" in text and "Dice on own test data" in text
    for wrong, said in ((y[:, :5], r"masks .* of shape \(8, 9\). Got \(5, 9\)"), (y + 1, "0, 2")):
        np.savez(tmp_path / "d.npz", x=x, y=wrong)
        with pytest.raises(TaskError, match=said):
            task.load(options)
    with pytest.raises(TaskError, match="'mclr' gives one answer per sample; for masks use unet"):
        declared(tmp_path, MASKS.replace("unet", "mclr")).model()
    with pytest.raises(TaskError, match="'unet' gives an answer per pixel; use it only for masks"):
        declared(
            tmp_path, IMAGES.format(channels=1).replace("mclr", "unet").replace("8, 6", "8, 9")
        ).model()


@pytest.mark.parametrize("change", [lambda i: 1.7e9 + i, lambda i: i * 1e38, lambda i: i * 1e39])
def test_targets_that_32_bits_blur_are_refused(change: Any, tmp_path: Path) -> None:
    head, *lines = ROWS.splitlines()
    lines = [f"{20 + i},{change(i)},{i},0,0,0" for i in range(len(lines))]
    with pytest.raises(TaskError, match=r"'days' .* 32 bits cannot hold: subtract a number"):
        declared(tmp_path, NUMBER).load({"data": table(tmp_path, "\n".join([head, *lines]))})
    y = np.array([change(i) for i in range(len(lines))])
    np.savez(tmp_path / "d.npz", x=np.zeros((len(y), 3)), y=y)
    task = declared(tmp_path, ARRAY + 'target = { kind = "number" }\n')
    with pytest.raises(TaskError, match=r"y of .* 32 bits cannot hold: subtract a number"):
        task.load({"data": str(tmp_path / "d.npz")})
