"""The mark of a silo's training data: it changes when they do, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.client.home.fingerprints import FILE, mark_of
from coterie.client.home.settings import SiloSettings
from coterie.client.work.session import open_session

DATA = {"train": 20, "test": 20}


def mark(home: Path | str, **options: Any) -> str:
    settings = SiloSettings("a", home=str(home), options={**DATA, **options})
    return open_session(settings).describe().mark


def test_it_is_the_same_after_a_restart_and_another_for_other_samples_or_labels(
    tmp_path: Path,
) -> None:
    first = mark(tmp_path / "a")
    assert len(first) == 16 and mark(tmp_path / "a") == first
    others = [mark(tmp_path / "a", **{key: 1}) for key in ("skip", "label-shift")]
    assert len({first, *others}) == 3, "as many samples each time"


def test_two_silos_with_the_same_data_have_other_marks(tmp_path: Path) -> None:
    """Otherwise a person who has the data, or guesses them, could tell who else does."""
    assert mark(tmp_path / "a") != mark(tmp_path / "b")


def test_a_silo_without_a_folder_gives_none(tmp_path: Path) -> None:
    assert mark("") == ""
    assert mark_of(str(tmp_path), "") == ""
    assert not (tmp_path / FILE).exists()


def test_its_key_is_its_owners_alone_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    first = mark_of(str(tmp_path), "data")
    file = tmp_path / FILE
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(b"cut")
    again = mark_of(str(tmp_path), "data")
    assert again != first and mark_of(str(tmp_path), "data") == again


def test_a_folder_that_cannot_be_written_gives_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("coterie.client.home.fingerprints.write_atomically", full)
    assert mark_of(str(tmp_path), "data") == ""
