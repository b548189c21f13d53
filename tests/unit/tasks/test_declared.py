"""Own data by declaration: folders of images, tables, arrays. What is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from coterie.client.home.settings import SiloSettings
from coterie.client.work.session import open_session
from coterie.tasks import TaskError, load_task
from coterie.tasks.own.declared import (
    DeclaredTask,
    load_declared,
    split_by_class,
    split_by_fold,
)
from coterie.tasks.own.pictures import _from_0_to_255
from tests.tables import declaration

IMAGES = """
kind = "image-folder"
name = "study"
classes = ["cat", "dog"]
shape = [{channels}, 8, 6]
network = "mclr"
"""
TABLE = declaration("age", "bmi", network="mlp-64", sex="fm")
ARRAYS = """
kind = "npz"
name = "study"
classes = ["a", "b"]
shape = [3]
network = "mclr"
"""
ROWS = "id,age,bmi,sex,ill\n" + "".join(
    f"{i},{20 + i},{'' if i == 3 else 25},{'f' if i % 3 else 'x'},{'yes' if i % 2 else 'no'}\n"
    for i in range(20)
)


def declared(folder: Path, text: str) -> DeclaredTask:
    (folder / "study.toml").write_text(text)
    return load_declared(folder / "study.toml")


def picture(file: Path, colour: Any, *, mode: str = "RGB", size: tuple[int, int] = (6, 8)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_read_by_class_resized_and_scaled(channels: int, tmp_path: Path) -> None:
    for i in range(5):
        picture(tmp_path / "data" / "cat" / f"{i}.png", (255, 255, 255))
        picture(tmp_path / "data" / "dog" / "deep" / f"{i}.JPG", (0, 0, 0), size=(30, 50))
    (tmp_path / "data" / "dog" / "notes.txt").write_text("not an image")
    task = declared(tmp_path, IMAGES.format(channels=channels))
    data = task.load({"data": str(tmp_path / "data")})
    assert data.x_train.shape == (8, channels, 8, 6) and data.x_test.shape == (2, channels, 8, 6)
    assert data.x_train.dtype == np.float32
    np.testing.assert_allclose(data.x_train[data.y_train == 0], 1)
    np.testing.assert_allclose(data.x_train[data.y_train == 1], -1)


def test_colours_are_scaled_by_the_numbers_of_the_declaration(tmp_path: Path) -> None:
    text = IMAGES.format(channels=3) + 'normalise = "0.5,0.4,0.3/0.1,0.2,0.25"'
    picture(tmp_path / "one.png", (255, 0, 51))
    x = declared(tmp_path, text).inputs(tmp_path / "one.png", {}).x
    np.testing.assert_allclose(x[0, :, 0, 0], [5, -2, -0.4], rtol=1e-5)


def test_folders_that_are_links_are_followed_once(tmp_path: Path) -> None:
    for i in range(4):
        picture(tmp_path / "archive" / "deep" / f"{i}.png", 255, mode="L")
        picture(tmp_path / "data" / "dog" / f"{i}.png", 0, mode="L")
    (tmp_path / "data" / "cat").mkdir()
    (tmp_path / "data" / "cat" / "old").symlink_to(tmp_path / "archive")
    (tmp_path / "archive" / "deep" / "back").symlink_to(tmp_path / "archive")
    task = declared(tmp_path, IMAGES.format(channels=1))
    data = task.load({"data": str(tmp_path / "data")})
    assert np.bincount(np.concatenate([data.y_train, data.y_test])).tolist() == [4, 4]


@pytest.mark.parametrize(("theirs", "ours"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_names_are_the_same_however_their_characters_are_spelled(
    theirs: Literal["NFC", "NFD"], ours: Literal["NFC", "NFD"], tmp_path: Path
) -> None:
    """A Mac writes names of files decomposed; a keyboard does not."""
    for name in ("gesund", "Gefäß"):
        for i in range(2):
            picture(tmp_path / "data" / normalize(theirs, name) / f"{i}.png", 0, mode="L")
    text = IMAGES.format(channels=1).replace('"cat", "dog"', '"gesund", "Gefäß"')
    found = declared(tmp_path, normalize(ours, text)).load({"data": str(tmp_path / "data")})
    assert set(found.y_train) == {0, 1}

    text = TABLE.replace('"no"', '"schön"').replace('"age"', '"Größe"').replace('"m"', '"männlich"')
    rows = "".join(f"{i},25,männlich,{'yes' if i % 2 else 'schön'}\n" for i in range(10))
    file = table(tmp_path, normalize(theirs, "Größe,bmi,sex,ill\n" + rows))
    found = declared(tmp_path, normalize(ours, text)).load({"data": file})
    assert set(found.y_train) == {0, 1} and (found.x_train[:, 3] == 1).all()
    assert found.x_train[:, 0].std() > 0


def test_a_declaration_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(TABLE.encode("utf-8-sig"))
    assert load_task(str(tmp_path / "study.toml")).name == "study"


def test_train_and_test_folders_are_kept_apart(tmp_path: Path) -> None:
    for part, colour in (("train", 0), ("test", 255)):
        for name in ("cat", "dog"):
            picture(tmp_path / "data" / part / name / "1.png", colour, mode="L")
    data = declared(tmp_path, IMAGES.format(channels=1)).load({"data": str(tmp_path / "data")})
    assert (data.x_train == -1).all() and (data.x_test == 1).all()


def test_wrong_folders_of_images_are_named(tmp_path: Path) -> None:
    task = declared(tmp_path, IMAGES.format(channels=1))
    with pytest.raises(TaskError, match="needs option data"):
        task.load({})
    with pytest.raises(TaskError, match=r"there is no '.*nowhere'"):
        task.load({"data": str(tmp_path / "nowhere")})
    (tmp_path / "data").mkdir()
    with pytest.raises(TaskError, match="there are no images"):
        task.load({"data": str(tmp_path / "data")})
    picture(tmp_path / "data" / "bird" / "1.png", 0, mode="L")
    with pytest.raises(TaskError, match="class 'bird', which is not declared"):
        task.load({"data": str(tmp_path / "data")})
    (tmp_path / "data" / "bird").rename(tmp_path / "data" / "cat")
    (tmp_path / "data" / "cat" / "2.png").write_bytes(b"not a picture")
    with pytest.raises(TaskError, match=r"2\.png' cannot be read"):
        task.load({"data": str(tmp_path / "data")})
    with pytest.raises(TaskError, match="has no option 'colour'"):
        task.load({"colour": "red"})


def test_images_to_ask_about_are_prepared_as_those_that_were_learnt_from(tmp_path: Path) -> None:
    picture(tmp_path / "data" / "cat" / "1.png", (255, 0, 0), size=(30, 50))
    picture(tmp_path / "data" / "dog" / "2.png", (0, 0, 255))
    picture(tmp_path / "data" / "cat" / "3.png", (255, 0, 0))
    task = declared(tmp_path, IMAGES.format(channels=3))
    data = task.load({"data": str(tmp_path / "data")})
    found = task.inputs(tmp_path / "data", {"data": "/gone/since"})
    assert found.names == ["cat/1.png", "cat/3.png", "dog/2.png"]
    np.testing.assert_array_equal(found.x[0], data.x_train[0])
    np.testing.assert_array_equal(found.x[2], data.x_train[-1])
    one = task.inputs(tmp_path / "data" / "dog" / "2.png", {})
    assert one.names == ["2.png"] and (one.x == found.x[2:]).all()
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="there are no images in"):
        task.inputs(tmp_path / "empty", {})
    with pytest.raises(TaskError, match=r"study\.toml' cannot be read"):
        task.inputs(tmp_path / "study.toml", {})


GREYS = np.linspace(0, 65535, 48).astype(np.uint16).reshape(8, 6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("suffix", "values"),
    [("png", GREYS), ("pgm", GREYS), ("tif", GREYS), ("tiff", GREYS.astype(">u2"))],
    ids=["png", "pgm", "tif", "big-endian tiff"],
)
def test_16_bit_grey_images_keep_their_greys(
    suffix: str, values: Any, channels: int, tmp_path: Path
) -> None:
    for name in ("cat", "dog"):
        for i in range(2):
            file = tmp_path / "data" / name / f"{i}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(file)
    task = declared(tmp_path, IMAGES.format(channels=channels))
    data = task.load({"data": str(tmp_path / "data")})
    asked = task.inputs(tmp_path / "data", {})
    for pictures in (data.x_train, data.x_test, asked.x):
        for channel in pictures.reshape(-1, 8, 6):
            np.testing.assert_allclose(channel, GREYS / 32767.5 - 1, atol=1e-6)


def test_a_16_bit_image_is_its_8_bit_copy_also_when_it_is_resized(tmp_path: Path) -> None:
    small = np.random.default_rng(0).integers(0, 256, (30, 50), np.uint8)
    files = [tmp_path / "8.png", tmp_path / "16.png"]
    Image.fromarray(small).save(files[0])
    Image.fromarray(small.astype(np.uint16) * 257).save(files[1])
    task = declared(tmp_path, IMAGES.format(channels=1) + 'normalise = "unit"\n')
    one, other = (task.inputs(file, {}).x for file in files)
    np.testing.assert_allclose(one, other, atol=1.01 / 255)  # 8 bits are rounded twice


def test_16_bit_images_are_known_in_either_of_pillow_s_modes() -> None:
    """Older versions open 16-bit grey PNGs in mode I."""
    old = Image.fromarray(GREYS.astype(np.int32))
    old.format = "PNG"
    assert old.mode == "I"
    np.testing.assert_allclose(np.asarray(_from_0_to_255(old, "L")), GREYS / 257, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_images_without_a_known_white_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "data" / "cat" / "scan.tif"
    file.parent.mkdir(parents=True)
    Image.fromarray(np.linspace(0, 1, 48).reshape(8, 6).astype(kind)).save(file)
    task = declared(tmp_path, IMAGES.format(channels=1))
    said = rf"scan\.tif' cannot be read: image mode '{kind[0].upper()}'.* Save it with 8 bits"
    for ask in (lambda: task.load({"data": str(tmp_path / "data")}), lambda: task.inputs(file, {})):
        with pytest.raises(TaskError, match=said):
            ask()


def test_an_image_too_large_to_open_is_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "data" / "cat" / "1.png", 0, mode="L", size=(30, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    said = (
        r"1\.png' is too large: .*900 pixels.* limit of 400 pixels.* Make it smaller.* 6x8 pixels"
    )
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, IMAGES.format(channels=1)).inputs(tmp_path / "data", {})


# ---------------------------------------------------------------- tables


def table(folder: Path, text: str = ROWS, *, name: str = "data.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_table_is_standardised_by_its_own_training_rows(tmp_path: Path) -> None:
    task = declared(tmp_path, TABLE)
    data = task.load({"data": table(tmp_path), "test-share": 0.3})
    assert data.x_train.shape == (14, 4) and data.x_test.shape == (6, 4)
    ages = data.x_train[:, 0]
    assert abs(ages.mean()) < 1e-6 and abs(ages.std() - 1) < 1e-6
    assert (data.x_train[:, 1] == 0).all(), "a column that never changes, and a missing value"
    both = np.concatenate([data.x_train, data.x_test])
    assert set(map(tuple, both[:, 2:])) == {(1.0, 0.0), (0.0, 0.0)}, "x is none of f and m"
    assert (both[:, 2:].sum(axis=1) == 0).sum() == 7
    assert task.notes() == ["bmi: 1 missing in data.csv, replaced by the mean"]
    assert task.warnings()[0] == (
        "7 of 20 values of 'sex' in data.csv match no declared category: 'x' in row 1 and 6 more "
        "rows; they count as no category"
    )


@pytest.mark.parametrize("dose", ["0.7", "0.1", "36.6", "1e-20", "-4e15"])
def test_a_column_that_never_changes_is_not_blown_up(dose: str, tmp_path: Path) -> None:
    text = "age,bmi,sex,ill\n" + "".join(
        f"{i},{dose},f,{'yes' if i % 2 else 'no'}\n" for i in range(100)
    )
    task, options = declared(tmp_path, TABLE), {"data": table(tmp_path, text)}
    data = task.load(options)
    np.testing.assert_allclose(data.x_train[:, 1], 0, atol=1e-6 * max(1.0, abs(float(dose))))
    new = f"age,bmi,sex\n5,{dose},f\n5,{float(dose) + 0.5},f\n"
    asked = task.inputs(Path(table(tmp_path, new, name="new.csv")), options).x[:, 1]
    assert abs(asked[1] - asked[0]) <= 0.5


def test_rows_to_ask_about_are_scaled_as_those_that_were_learnt_from(tmp_path: Path) -> None:
    task = declared(tmp_path, TABLE)
    options = {"data": table(tmp_path), "test-share": 0.3}
    data = task.load(options)
    ages = np.arange(20, 40)
    unlabelled = "sex,bmi,age\n" + "".join(f"f,25,{age}\n" for age in ages)
    found = task.inputs(Path(table(tmp_path, unlabelled, name="new.csv")), options)
    assert found.x.shape == (20, 4) and not found.notes
    known = {tuple(row) for row in np.concatenate([data.x_train, data.x_test])[:, :1].tolist()}
    assert {tuple(row) for row in found.x[:, :1].tolist()} == known
    assert (found.x[:, 2:] == [1, 0]).all()
    odd = task.inputs(Path(table(tmp_path, "sex,bmi,age\nz,,30\n", name="odd.csv")), options)
    assert (odd.x[0, 1:] == 0).all() and len(odd.notes) == 2
    with pytest.raises(TaskError, match="bmi"):
        task.inputs(Path(table(tmp_path, "sex,age\nf,30\n", name="less.csv")), options)
    with pytest.raises(TaskError, match="has no rows"):
        task.inputs(Path(table(tmp_path, "sex,bmi,age\n", name="none.csv")), options)


def test_csv_and_parquet_give_the_same(tmp_path: Path) -> None:
    rows = [line.split(",") for line in ROWS.splitlines()[1:]]
    columns = {
        "ill": [row[4] for row in rows],
        "sex": [row[3] for row in rows],
        "bmi": [float(row[2]) if row[2] else None for row in rows],
        "age": pa.array([int(row[1]) for row in rows], pa.int16()),
        "other": [row[0] for row in rows],
    }
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet")
    task = declared(tmp_path, TABLE)
    one = task.load({"data": table(tmp_path)})
    two = task.load({"data": str(tmp_path / "data.parquet")})
    three = task.load({"data": table(tmp_path, ROWS.replace(",", ";")), "separator": ";"})
    for other in (two, three):
        np.testing.assert_array_equal(other.x_train, one.x_train)
        np.testing.assert_array_equal(other.y_test, one.y_test)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("ill", "sick"), "has no column 'ill'.*'id', 'age', 'bmi', 'sex', 'sick'"),
        (
            (",yes", ",perhaps"),
            "values that are not declared: 'perhaps' in row 2 and 9 more rows. Declared: no",
        ),
        ((",21,", ",old,"), "old"),
        ((",yes", ","), "no value in target column 'ill' in row 2"),
        ((",21,", ",inf,"), "column 'age' .* contains infinite values"),
        ((",21,", ",-1e300,"), "column 'age' .* beyond 1e\\+100, in row 2"),
    ],
)
def test_a_wrong_table_is_named(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    task = declared(tmp_path, TABLE)
    with pytest.raises(TaskError, match=said):
        task.load({"data": table(tmp_path, ROWS.replace(*change))})


def test_another_separator_is_named_and_can_be_set(tmp_path: Path) -> None:
    task, data = declared(tmp_path, TABLE), table(tmp_path, ROWS.replace(",", ";"))
    with pytest.raises(TaskError, match=r"separated by ',' \(.* option separator\): 'id;age"):
        task.load({"data": data})
    assert len(task.load({"data": data, "separator": ";"}).x_train) == 16


WORDS = """
kind = "table"
name = "study"
target = "ill"
classes = ["NA", "null"]
numeric = ["age"]
network = "mclr"
[categorical]
kind = ["nan", "N/A"]
"""


def test_large_whole_numbers_are_the_same_in_csv_and_parquet(tmp_path: Path) -> None:
    task, ages = declared(tmp_path, WORDS), [2**60 + 1000 * i for i in range(20)]
    parquet.write_table(
        pa.table({"age": ages, "kind": ["nan"] * 20, "ill": ["NA", "null"] * 10}),
        tmp_path / "d.parquet",
    )
    rows = "".join(f"{age},nan,{('NA', 'null')[i % 2]}\n" for i, age in enumerate(ages))
    one = task.load({"data": table(tmp_path, "age,kind,ill\n" + rows)})
    two = task.load({"data": str(tmp_path / "d.parquet")})
    np.testing.assert_array_equal(one.x_train, two.x_train)


def test_words_for_nothing_are_missing_as_numbers_but_not_as_classes(tmp_path: Path) -> None:
    task = declared(tmp_path, WORDS)
    ages = ["NA", "null", "", "nan", " 7", *map(str, range(15))]
    kinds, ills = ["nan", "N/A", "", "  "] * 5, ["NA", "null"] * 10
    text = "age,kind,ill\n" + "".join(
        f"{a},{k},{i}\n" for a, k, i in zip(ages, kinds, ills, strict=True)
    )
    parquet.write_table(pa.table({"age": ages, "kind": kinds, "ill": ills}), tmp_path / "d.parquet")
    one = task.load({"data": table(tmp_path, text)})
    assert sorted(np.concatenate([one.y_train, one.y_test])) == [0] * 10 + [1] * 10
    assert np.concatenate([one.x_train, one.x_test])[:, 1:].sum(axis=0).tolist() == [5, 5]
    notes = " ".join(task.notes())
    assert "age: 4 missing" in notes and "kind: 10 missing in data.csv" in notes
    two = task.load({"data": str(tmp_path / "d.parquet")})
    assert notes.replace("data.csv", "d.parquet") == " ".join(task.notes())
    np.testing.assert_array_equal(one.x_train, two.x_train)
    np.testing.assert_array_equal(one.y_test, two.y_test)


@pytest.mark.parametrize("column", ["age", "sex", "ill"])
def test_a_declared_column_that_occurs_twice_is_refused(column: str, tmp_path: Path) -> None:
    text = ROWS.replace("id,", f"{column},")
    names = text.splitlines()[0].split(",")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    whole = pa.Table.from_arrays([pa.array(c) for c in zip(*rows, strict=True)], names=names)
    parquet.write_table(whole, tmp_path / "data.parquet")
    task = declared(tmp_path, TABLE)
    for data in (table(tmp_path, text), str(tmp_path / "data.parquet")):
        with pytest.raises(TaskError, match=rf"data\..*' has 2 columns named '{column}'"):
            task.load({"data": data})
    assert task.load({"data": table(tmp_path, ROWS.replace("id,", ","))}), "others may"


def test_a_target_of_lists_is_refused_by_name(tmp_path: Path) -> None:
    columns = {"ill": [["no"]] * 4, "sex": ["f"] * 4, "bmi": [1.0] * 4, "age": [2] * 4}
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet")
    with pytest.raises(TaskError, match=r"column 'ill' of '.*data\.parquet' must contain one text"):
        declared(tmp_path, TABLE).load({"data": str(tmp_path / "data.parquet")})


def test_other_files_than_tables_are_refused(tmp_path: Path) -> None:
    task = declared(tmp_path, TABLE)
    with pytest.raises(TaskError, match=r"is a spreadsheet.* save it as CSV"):
        task.load({"data": table(tmp_path, name="data.xlsx")})
    known = r"'\.sav'\. A table is a \.csv, \.tsv or \.txt file .*\.csv\.gz.*\.parquet.* folder"
    with pytest.raises(TaskError, match=known):
        task.load({"data": table(tmp_path, name="data.sav")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"no \.parquet files in .*empty'\. A table is a \.csv"):
        task.load({"data": str(tmp_path / "empty")})
    with pytest.raises(TaskError, match="cannot be read"):
        task.load({"data": table(tmp_path, name="data.parquet")})
    with pytest.raises(TaskError, match="has no rows"):
        task.load({"data": table(tmp_path, ROWS.splitlines()[0] + "\n")})


# ---------------------------------------------------------------- arrays


def test_arrays_are_read_with_numbers_or_names_as_labels(tmp_path: Path) -> None:
    x = np.arange(60).reshape(20, 3)
    task = declared(tmp_path, ARRAYS + "scale = 0.5\n")
    for labels in (np.arange(20) % 2, np.array(["a", "b"] * 10)):
        np.savez(tmp_path / "data.npz", x=x, y=labels)
        data = task.load({"data": str(tmp_path / "data.npz"), "test-share": 0.5})
        both = np.concatenate([data.x_train, data.x_test])
        assert sorted(both.ravel()) == sorted((x / 2).ravel())
    np.savez(tmp_path / "data.npz", x_train=x, y_train=labels, x_test=x[:2], y_test=labels[:2])
    assert len(task.load({"data": str(tmp_path / "data.npz")}).x_test) == 2


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"z": np.zeros(3)}, "has the arrays z"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int)}, r"must be of shape \(3,\). Got \(2,\)"),
        ({"x": np.zeros((4, 3)), "y": np.array(["a", "c", "a", "a"])}, "class 'c'"),
        ({"x": np.zeros((4, 3)), "y": np.array([0, 1, 2, 0])}, r"labels must be in \[0, 1\]"),
        ({"x": np.full((4, 3), np.nan), "y": np.array([0, 1, 0, 1])}, "NaN"),
        ({"x": np.array([[None] * 3] * 4), "y": np.zeros(4, int)}, "cannot be read"),
        ({"x": np.zeros((6, 3)), "y": np.zeros(4, int)}, "Got 6 samples and 4 labels"),
        ({"x": np.zeros((4, 3)), "y": np.array(list("abab" * 2))}, "Got 4 samples and 8 labels"),
        ({"x": np.zeros((4, 3)), "y": np.array([["a"]] * 4)}, r"one per sample. Got <U1 of .*4, 1"),
        ({"x": np.zeros((4, 3)), "y": np.array("a")}, r"one per sample. Got <U1 of shape \(\)"),
        (
            {"x_train": np.zeros((4, 3)), "y_train": np.arange(4) % 2}
            | {"x_test": np.zeros((4, 3)), "y_test": np.arange(3) % 2},
            r"data\.npz' must have one label per sample. Got 4 samples and 3 labels",
        ),
    ],
)
def test_wrong_arrays_are_named(arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, ARRAYS).load({"data": str(tmp_path / "data.npz")})


def test_damaged_and_other_files_of_arrays_are_refused(tmp_path: Path) -> None:
    task = declared(tmp_path, ARRAYS)
    x = np.zeros((9000, 3))  # larger than what is read, and checked, with the header
    np.savez(tmp_path / "whole.npz", x=x, y=np.arange(9000) % 2)
    np.save(tmp_path / "x.npy", x)
    whole = (tmp_path / "whole.npz").read_bytes()
    header = whole.replace(b"False,", b"((((((")
    with ZipFile(tmp_path / "other.npz", "w", ZIP_DEFLATED) as packed:
        packed.writestr("x.npy", bytes(100_000))
        packed.writestr("y.npy", "hello")
    for name, content in (
        ("other.npz", (tmp_path / "other.npz").read_bytes()),
        ("header.npz", header),
        ("cut.npz", whole[:-300]),
        ("empty.npz", b""),
        ("text.npz", b"hello"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TaskError, match=f"{name}' cannot be read: .* Expected a .npz file"):
            task.load({"data": str(tmp_path / name)})
        with pytest.raises(TaskError, match=rf"{name} must be an \.npy file of samples, or an"):
            task.inputs(tmp_path / name, {})
    with pytest.raises(TaskError, match=r"x\.npy' cannot be read: it is an \.npy file"):
        task.load({"data": str(tmp_path / "x.npy")})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": -1}, "seed must be at least 0. Got -1"),
        ({"seed": 2.5}, "'seed' of task 'study' must be of type int. Got 2.5"),
        ({"seed": float("inf")}, "'seed' of task 'study' must be of type int. Got inf"),
        ({"data": "~nobody-here/x.npz"}, "there is no home folder ~nobody-here"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3)), y=np.arange(4) % 2)
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, ARRAYS).load({"data": str(tmp_path / "data.npz"), **options})


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind = 'video'", "kind in study.toml must be one of image-folder, table, npz"),
        ("kind =", "is not TOML"),
        ("kind = ['npz']", r"kind in study.toml must be one of .* Got \['npz'\]"),
        (TABLE.replace("numeric", "numerik"), "unknown key 'numerik': the nearest is numeric"),
        (TABLE.replace('"age"', '"ill"'), "a column is named twice"),
        (ARRAYS.replace('"b"', '"a"'), "classes must differ"),
        (ARRAYS.replace('"study"', '"../x"'), "name"),
        (IMAGES.format(channels=1) + 'normalise = "hard"', "normalise must be symmetric, unit, or"),
        (IMAGES.format(channels=1) + 'normalise = "0,0,0/1"', "has 3 means and 1 deviations"),
    ],
)
def test_a_wrong_declaration_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, text)


def test_a_network_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"mlp-64, [mlp0-9, -]+, trees or any\. Got 'resnet'"):
        declared(tmp_path, ARRAYS.replace("mclr", "resnet")).model()
    with pytest.raises(TaskError, match=r"cannot be made for samples of shape \(3,\)"):
        declared(tmp_path, ARRAYS.replace("mclr", "cnn-hcct")).model()


def test_declarations_that_differ_have_another_schema(tmp_path: Path) -> None:
    """Two columns in another order give models of the same shape that mean different things."""
    schemas = []
    for text in (TABLE, TABLE, TABLE.replace('"age", "bmi"', '"bmi", "age"')):
        declared(tmp_path, text)
        task, data = str(tmp_path / "study.toml"), table(tmp_path)
        settings = SiloSettings("a", task=task, options={"data": data}, device="cpu")
        schemas.append(open_session(settings).describe().schema)
    assert schemas[0] == schemas[1] != schemas[2]


@given(
    y=st.lists(st.integers(0, 3), min_size=9, max_size=60),
    count=st.integers(2, 9),
    seed=st.integers(0, 5),
)
def test_folds_are_parts_of_like_size_and_like_classes(y: list[int], count: int, seed: int) -> None:
    labels = np.array(y)
    parts = [split_by_fold(labels, number, count, seed=seed) for number in range(1, count + 1)]
    tested = np.concatenate([test for _, test in parts])
    assert sorted(tested) == list(range(len(y)))
    for train, test in parts:
        assert sorted([*train, *test]) == list(range(len(y)))
    for rows in (np.arange(len(y)), *(np.flatnonzero(labels == own) for own in range(4))):
        sizes = [len(np.intersect1d(test, rows)) for _, test in parts]
        assert max(sizes) - min(sizes) <= 1
    if count < 9:
        other = [split_by_fold(labels, 1, count, seed=s)[1].tolist() for s in range(20)]
        assert len(set(map(tuple, other))) > 1, "another seed, other parts"


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "a/b", "-1/5", "1/999"])
def test_a_fold_that_cannot_be_is_refused(fold: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    with pytest.raises(TaskError, match=r"fold must be one of|999 folds need at least 999"):
        declared(tmp_path, TABLE).load({"data": str(tmp_path / "rows.csv"), "fold": fold})


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_a_split_by_class_is_a_partition_with_every_class_in_training(
    labels: list[int], share: float, seed: int
) -> None:
    y = np.array(labels)
    train, test = split_by_class(y, share, seed=seed)
    assert sorted([*train, *test]) == list(range(len(y)))
    assert set(y[train]) == set(labels)
    for label in set(labels):
        count = labels.count(label)
        tested = int((y[test] == label).sum())
        assert tested == (0 if count == 1 else min(max(1, round(share * count)), count - 1))
    again = split_by_class(y, share, seed=seed)
    assert (again[0] == train).all() and (again[1] == test).all()
