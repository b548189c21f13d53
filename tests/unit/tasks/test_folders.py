"""Every file in an image folder is used, or counted as left out for a reason; none is lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coterie.client.cli.check import check
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.serve import _own
from coterie.client.work.card import read_card
from coterie.client.work.hold_out import split_validation
from coterie.client.work.session import open_session
from coterie.tasks import TaskError
from coterie.tasks.base import SiloData, StreamedData
from coterie.tasks.own.declared import DeclaredTask
from coterie.tasks.own.folders import is_hidden, plain
from tests.kit import run
from tests.unit.tasks.test_declared import IMAGES, declared, picture

NOBODY = 65534
TEXT = IMAGES.format(channels=1)


def fill(folder: Path, *, cats: int = 6, dogs: int = 4, ending: str = "png") -> Path:
    for name, count in (("cat", cats), ("dog", dogs)):
        for i in range(count):
            picture(folder / name / f"{i}.{ending}", 9 * i, mode="L")
    return folder


def count(task: DeclaredTask, data: Path, **options: Any) -> int:
    found = task.load({"data": str(data), **options})
    return size(found)


def size(found: SiloData | StreamedData) -> int:
    if isinstance(found, SiloData):
        return len(found.x_train) + len(found.x_test)
    return len(found.train) + len(found.test)  # type: ignore[arg-type]


def notes_of(task: DeclaredTask) -> str:
    return "\n".join(task.notes())


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every account of this machine reaches."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def ordinary_account() -> Iterator[None]:
    """Without root's right to read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# ---------------------------------------------------------------- formats


def test_files_of_other_formats_are_counted_by_ending_with_a_name(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data", dogs=2)
    for i in range(7):
        (folder / "dog" / f"scan{i}.dcm").write_bytes(b"\0" * 128 + b"DICM")
    for name in ("IM0001", "1.2.840.113"):
        (folder / "dog" / name).write_bytes(b"\0" * 128 + b"DICM")
    picture(folder / "dog" / "old.png", 0, mode="L")
    (folder / "dog" / "old.png").rename(folder / "dog" / "old.jfif")
    task = declared(tmp_path, TEXT)
    assert count(task, folder) == 9, "a JFIF is read, whatever is in it"
    assert "'data': 18 files, 9 used, 9 left out:" in notes_of(task)
    assert "7 ending in .dcm ('dog/scan0.dcm' and others)" in notes_of(task)
    assert "2 without a known extension ('dog/1.2.840.113' and others)" in notes_of(task)
    assert "convert them to 16-bit grey PNG" in notes_of(task)
    text = "\n".join(
        check(SiloSettings("a", task=str(tmp_path / "study.toml"), options={"data": str(folder)}))
    )
    assert "18 files, 9 used" in text


def test_the_log_says_at_the_start_what_was_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tmp_path / "data")
    (folder / "dog" / "2.dcm").write_bytes(b"DICM")
    (tmp_path / "study.toml").write_text(TEXT)
    caplog.set_level("INFO")
    _own([SiloSettings("a", task=str(tmp_path / "study.toml"), options={"data": str(folder)})])
    assert "silo a, data: 'data': 11 files, 10 used, 1 left out:" in caplog.text
    assert "silo a, data: 1 ending in .dcm ('dog/2.dcm')" in caplog.text


def test_a_folder_of_dicom_files_alone_says_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "cat" / "1.dcm").write_bytes(b"DICM")
    with pytest.raises(TaskError, match=r"no images in .* 1 ending in \.dcm .* 16-bit grey PNG"):
        declared(tmp_path, TEXT).load({"data": str(tmp_path / "data")})
    with pytest.raises(TaskError, match=r"no images in .* 1 ending in \.dcm"):
        declared(tmp_path, TEXT).inputs(tmp_path / "data", {})


# ---------------------------------------------------------------- what is no data

JUNK = (
    *(".ipynb_checkpoints/0-checkpoint.png", "cat/.ipynb_checkpoints/0.png", "cat/._1.png"),
    *("__MACOSX/cat/._1.png", "._cat", ".DS_Store", "cat/.DS_Store", "cat/Thumbs.db"),
    *("cat/desktop.ini", "$RECYCLE.BIN/S-1/1.png", "System Volume Information/x", "@eaDir/1.png"),
    *("cat/@eaDir/1.png/SYNOPHOTO_THUMB_M.jpg", "#recycle/1.png", "@Recycle/1.png"),
    *(".Trash-1000/files/1.png", "lost+found/#12", "cat/~$1.png", "#snapshot/d/1.png"),
    *("cat/.@__thumb/1.png", "~snapshot/hourly/1.png", ".git/objects/ab", "cat/.hidden.png"),
)


@pytest.mark.parametrize("file", JUNK)
@pytest.mark.parametrize("part", ["", "train/"])
def test_what_systems_leave_behind_is_no_data_and_no_class(
    part: str, file: str, tmp_path: Path
) -> None:
    fill(tmp_path / "data" / part)
    if part:
        fill(tmp_path / "data" / "test", cats=1, dogs=1)
    (tmp_path / "data" / part / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "data" / part / file).write_bytes(b"rubbish")
    task = declared(tmp_path, TEXT)
    used = 12 if part else 10
    assert count(task, tmp_path / "data") == used
    assert f"{used + 1} files, {used} used, 1 left out" in notes_of(task)
    assert "1 hidden, or left behind by a system or program" in notes_of(task)
    assert len(task.inputs(tmp_path / "data", {}).names) == used


@pytest.mark.parametrize(
    "names", [(".5", "1.0"), ("train", "test")], ids=["begins as hidden files do", "as parts have"]
)
def test_a_declared_class_is_data_whatever_its_name(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        for i in range(4):
            picture(tmp_path / "data" / name / f"{i}.png", 0, mode="L")
    task = declared(tmp_path, TEXT.replace('"cat", "dog"', '"{}", "{}"'.format(*names)))
    assert is_hidden(".5") and count(task, tmp_path / "data") == 8


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize("closed", ["cat/ward7", "dog", ".", "cat/0.png"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_account_cannot_read_is_refused_by_name_or_counted(
    stream: bool, closed: str, place: Path
) -> None:
    folder = fill(place / "data")
    picture(folder / "cat" / "ward7" / "1.png", 0, mode="L")
    task = declared(place, TEXT)
    task.load({"data": str(folder)})  # with all modules that reading needs
    (folder / closed).chmod(0)
    options = {"stream": stream, "skip-unreadable": True}
    with ordinary_account():
        with pytest.raises(
            TaskError, match=rf"{(folder / closed).name}' cannot be read.*ermission"
        ):
            task.load({"data": str(folder), "stream": stream})
        if closed == ".":
            with pytest.raises(TaskError, match=r"no images .* 1 unreadable"):
                count(task, folder, **options)
            return
        used = count(task, folder, **options)
    assert used == {"cat/ward7": 10, "dog": 7, "cat/0.png": 10}[closed]
    assert f"{used + 1} files, {used} used, 1 left out" in notes_of(task)
    assert f"1 unreadable ('{closed}')" in notes_of(task)


def test_data_below_a_folder_that_is_closed_are_refused_in_a_sentence(place: Path) -> None:
    folder = fill(place / "closed" / "data")
    task = declared(place, TEXT)
    task.load({"data": str(folder)})
    (place / "closed").chmod(0)
    with ordinary_account(), pytest.raises(TaskError, match=r"data' cannot be reached: Permission"):
        task.load({"data": str(folder)})


@pytest.mark.parametrize("name", ["cat/1b.png", "cat/ward7", "bird", "cat/round"])
def test_a_link_that_leads_nowhere_is_refused_by_name_or_counted(name: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    (folder / name).symlink_to(folder / name if name == "cat/round" else tmp_path / "gone")
    task = declared(tmp_path, TEXT)
    with pytest.raises(TaskError, match=rf"link '.*{name}' cannot be read.*skip-unreadable"):
        task.load({"data": str(folder)})
    assert count(task, folder, **{"skip-unreadable": True}) == 10
    assert "11 files, 10 used, 1 left out" in notes_of(task) and name in notes_of(task)


def test_a_pipe_that_is_called_as_an_image_does_not_stop_the_silo(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    os.mkfifo(folder / "cat" / "pipe.png")
    task = declared(tmp_path, TEXT)
    assert count(task, folder) == 10
    assert "1 neither files nor folders ('cat/pipe.png')" in notes_of(task)


def test_images_to_predict_from_may_be_skipped_too(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    (folder / "cat" / "3.png").write_bytes(b"no picture")
    task = declared(tmp_path, TEXT)
    with pytest.raises(TaskError, match=r"3\.png' cannot be read"):
        task.inputs(folder, {})
    found = task.inputs(folder, {"skip-unreadable": True})
    assert len(found.names) == len(found.x) == 9
    assert "'data': 10 files, 9 used, 1 left out:" in found.notes


def test_names_that_are_not_utf_8_can_be_written(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    odd = os.fsdecode(b"R\xf6ntgen.png")
    (folder / "cat" / "0.png").rename(folder / "cat" / odd)
    (folder / "cat" / os.fsdecode(b"\xfc.d\xfc")).write_text("")
    task = declared(tmp_path, TEXT)
    assert count(task, folder) == 10
    found = task.inputs(folder, {})
    alone = task.inputs(folder / "cat" / odd, {})
    for text in (*found.names, *alone.names, *found.notes, *task.notes()):
        text.encode()
    assert "cat/R\\xf6ntgen.png" in found.names and alone.names == ["R\\xf6ntgen.png"]
    (folder / os.fsdecode(b"d\xfcg")).mkdir()
    picture(folder / os.fsdecode(b"d\xfcg") / "1.png", 0, mode="L")
    with pytest.raises(TaskError, match=r"class 'd\\\\xfcg'") as refused:
        task.load({"data": str(folder)})
    str(refused.value).encode()


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "Test"), ("TRAINING", "testing")])
def test_parts_are_known_in_any_capitals(names: tuple[str, str], tmp_path: Path) -> None:
    fill(tmp_path / "data" / names[0], cats=4, dogs=3)
    fill(tmp_path / "data" / names[1], cats=1, dogs=1)
    data = declared(tmp_path, TEXT).load({"data": str(tmp_path / "data")})
    assert isinstance(data, SiloData) and (len(data.x_train), len(data.x_test)) == (7, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["val", "Valid", "validation"])
def test_the_folder_val_is_what_runs_hold_out_and_nothing_trains_on_it(
    name: str, stream: bool, tmp_path: Path
) -> None:
    fill(tmp_path / "data" / "train", cats=8, dogs=8)
    fill(tmp_path / "data" / "test", cats=2, dogs=2)
    for i in range(3):
        picture(tmp_path / "data" / name / "cat" / f"{i}.png", 251 + i, mode="L")
    (tmp_path / "study.toml").write_text(TEXT)
    options = {"data": str(tmp_path / "data"), "stream": stream}
    session = open_session(SiloSettings("a", task=str(tmp_path / "study.toml"), options=options))
    kept = split_validation(session, 0.25, run_seed=0)
    assert (len(session.data.train), len(session.data.test)) == (16, 4)
    assert (len(kept.train), len(kept.test)) == (16, 3)
    held: Any = next(x for x, _ in kept.test.batches(None, 8))
    assert (held > 0.9).all()
    notes = "\n".join(session.task.notes())  # type: ignore[attr-defined]
    assert "23 files, 23 used" in notes and "3 images in the validation folder:" in notes


def test_a_run_with_validation_chooses_by_the_folder_val(tmp_path: Path) -> None:
    fill(tmp_path / "data" / "train", cats=8, dogs=8)
    for part, number in (("test", 2), ("val", 5)):
        fill(tmp_path / "data" / part, cats=number, dogs=number)
    (tmp_path / "study.toml").write_text(TEXT)
    config = SiloSettings(
        "a",
        task=str(tmp_path / "study.toml"),
        options={"data": str(tmp_path / "data")},
        device="cpu",
        home=str(tmp_path),
    ).to_node_config()
    keys = {"task": "study", "local_epochs": 2, "validation": 0.25, "keep": "best"}
    run(tmp_path / "run-1", [config], **keys)
    card = read_card(tmp_path / "models" / "run-1.safetensors")
    assert (card.validation_examples, card.num_examples, card.test_examples) == (10, 16, 4)
    assert card.counted == "30 of 30 files used, 0 left out"


def test_parts_that_are_not_all_there_are_named_with_what_they_mean(tmp_path: Path) -> None:
    for part in ("train", "Val"):
        fill(tmp_path / "data" / part)
    said = (
        r"class 'Val', which is not declared. So are 'train'.*both a folder train and a folder test"
    )
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, TEXT).load({"data": str(tmp_path / "data")})
    fill(tmp_path / "data" / "test")
    fill(tmp_path / "data" / "TRAIN")
    with pytest.raises(TaskError, match="two folders for the same part of the data: 'TRAIN' and"):
        declared(tmp_path, TEXT).load({"data": str(tmp_path / "data")})


def test_files_beside_the_folders_that_are_read_are_counted(tmp_path: Path) -> None:
    fill(tmp_path / "data" / "train")
    fill(tmp_path / "data" / "test")
    fill(tmp_path / "data" / "new")
    (tmp_path / "data" / "readme.txt").write_text("")
    picture(tmp_path / "data" / "train" / "loose.png", 0, mode="L")
    task = declared(tmp_path, TEXT)
    assert count(task, tmp_path / "data") == 20
    assert "32 files, 20 used, 12 left out" in notes_of(task)
    assert "12 in folders that are not read ('readme.txt' and others)" in notes_of(task)


# ---------------------------------------------------------------- names of classes


def test_folders_may_have_other_names_than_the_classes(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    (folder / "dog").rename(folder / "Hund")
    task = declared(tmp_path, TEXT)
    said = r"class 'Hund', which is not declared.*\[data.codes.class\] .*\"Hund\" = \"cat\""
    with pytest.raises(TaskError, match=said):
        task.load({"data": str(folder)})
    own = {"data": str(folder), "codes": '{"class": {"Hund": "dog"}}'}
    data = task.load(own)
    assert isinstance(data, SiloData) and sorted([*data.y_train, *data.y_test]) == 6 * [0] + 4 * [1]
    fill(folder, cats=0, dogs=2)
    assert size(task.load(own)) == 12, "both names"
    with pytest.raises(TaskError, match=r"gives 'fox' for .*'class', which is not declared"):
        task.load({**own, "codes": '{"class": {"Hund": "fox"}}'})
    with pytest.raises(TaskError, match=r"option codes names 'klass'"):
        task.load({**own, "codes": '{"klass": {"Hund": "dog"}}'})


def test_a_folder_in_other_capitals_is_the_class_if_it_can_be_no_other(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data")
    (folder / "cat").rename(folder / "CAT")
    task = declared(tmp_path, TEXT)
    assert count(task, folder) == 10 and "folder 'CAT' is read as class 'cat'" in notes_of(task)
    task = declared(tmp_path, TEXT.replace('"cat", "dog"', '"cat", "Cat", "dog"'))
    with pytest.raises(TaskError, match="class 'CAT', which is not declared"):
        task.load({"data": str(folder)})


# ---------------------------------------------------------------- the sum is always right

KINDS = ("png", "jpg", "PNG", "tif", "damaged", "dcm", "txt", "bare", "closed", "link", "lost")
PLACES = ("cat", "cat/deep/er", "dog", ".hidden", "cat/@eaDir", "dog/__MACOSX/x", "", "dog/shut")
entries = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(KINDS)), max_size=12)


def write(file: Path, kind: str, outside: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("png", "jpg", "PNG", "tif", "closed"):
        Image.new("L", (5, 4), 7).save(file, "PNG" if kind == "closed" else None)
        file.chmod(0 if kind == "closed" else 0o644)
    elif kind in ("link", "lost"):
        file.symlink_to(outside / ("picture.png" if kind == "link" else "gone.png"))
    else:
        file.write_bytes(b"neither image nor text")


def files_there(folder: Path) -> int:
    """Counted without the code under test; a folder that cannot be read counts as one."""
    try:
        inside = list(folder.iterdir())
    except PermissionError:
        return 1
    return sum(files_there(one) if one.is_dir() and not one.is_symlink() else 1 for one in inside)


@settings(max_examples=60)
@given(entries=entries, parted=st.booleans(), stream=st.booleans(), shut=st.booleans())
def test_used_and_left_out_are_the_files_that_are_there(
    entries: list[tuple[str, str]], parted: bool, stream: bool, shut: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        picture(place / "picture.png", 3, mode="L")
        data = place / "data"
        for part in ("Train", "test") if parted else ("",):
            fill(data / part, cats=2, dogs=2)
        root = data / "Train" if parted else data
        for i, (where, kind) in enumerate(entries):
            ending = {"bare": "", "damaged": ".png", "closed": ".png", "link": ".png"}.get(
                kind, ".png" if kind == "lost" else f".{kind}"
            )
            write(root / where / f"f{i}{ending}", kind, place)
        if shut and (root / "dog" / "shut").exists():
            (root / "dog" / "shut").chmod(0)
        task = declared(place, TEXT)
        with ordinary_account():
            used = count(task, data, **{"stream": stream, "skip-unreadable": True})
            there = files_there(data)
        if (root / "dog" / "shut").exists():
            (root / "dog" / "shut").chmod(0o755)
        (line,) = task.counted()
        left = there - used
        assert line.startswith(f"{used} of {there} files used, {left} left out")
        assert f"'data': {there} files, {used} used, {left} left out" in task.notes()[0]
        assert plain(str(data)) not in line
