"""``coterie silo check``: what it says is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.client.cli.check import check
from coterie.client.home.folder import Home, create
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.work.prepare import prepare
from tests.conftest import silo

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
    assert "Labels, samples and counts per label do not leave." in text


def test_it_says_who_learns_of_label_counts() -> None:
    text = said(label_counts=True)
    assert "In runs of fedgen also the number of training samples of each label" in text
    assert "Every silo is told the labels' shares over all silos" in text


def test_it_names_discriminators_where_they_would_leave() -> None:
    assert "also a discriminator per other silo, and how often" in said(min_group_size=2)
    assert "discriminator" not in said(min_group_size=3), "they are averaged in pairs"


def test_it_follows_the_policy() -> None:
    text = said(
        strategies=("hcct",),
        min_group_size=3,
        keep_layers="head",
        metrics=(),
        auxiliary=False,
        max_local_epochs=5,
        max_rounds=7,
    )
    assert "4 arrays of the model" in text and "head.weight 10" not in text
    assert "Kept here, whatever a run asks for: head.weight, head.bias" in text
    assert "discriminator" not in text and "numbers of samples\n" in text
    assert "only in: hcct" in text and "at least 3 silos" in text
    assert "more than 5 epochs" in text and "more than 7 rounds" in text
    assert "min_group_size 3,\n  max_local_epochs 5, versions" in text


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
    told = capsys.readouterr().err
    assert told.startswith("coterie silo: ") and "train must be at least 1" in told
