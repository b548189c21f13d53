"""Several rows of one person: they lie on one side of every split, whatever kind of data it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from coterie.client.work.data import Held, to_device
from coterie.tasks import SiloData, TaskError
from coterie.tasks.base import StreamedData
from coterie.tasks.draws import fewest_persons, number_persons, split_by_class, split_by_fold
from coterie.tasks.own import files
from coterie.tasks.own.declared import DeclaredTask, load_declared
from tests.tables import declaration

KEYS = [f"P{i:03}" for i in range(1, 31)]
TABLE = declaration("age", "dose")
IMAGES = """
kind = "image-folder"
name = "study"
classes = ["cat", "dog"]
shape = [1, 4, 4]
network = "mclr"
"""
MASKS = IMAGES + '[target]\nkind = "mask"\n'
ARRAYS = """
kind = "npz"
name = "study"
classes = ["a", "b"]
shape = [2]
network = "mclr"
"""


def declared(folder: Path, text: str) -> DeclaredTask:
    (folder / "study.toml").write_text(text)
    return load_declared(folder / "study.toml")


def rows_of(key: str) -> int:
    return 2 + KEYS.index(key) % 4


def ill(key: str) -> bool:
    return KEYS.index(key) % 3 == 0


def whose(x: Any) -> set[int]:
    """The first number of a sample says whose it is, in the data of these tests."""
    return set(np.asarray(x).reshape(len(x), -1)[:, 0].round(4).tolist())


# ---------------------------------------------------------------- data of every kind


def a_table(folder: Path, group: str = "patient") -> tuple[DeclaredTask, dict[str, Any]]:
    lines = [
        f"{key},{KEYS.index(key)},{row},{'yes' if ill(key) else 'no'}"
        for row in range(5)
        for key in KEYS
        if row < rows_of(key)
    ]
    (folder / "t.csv").write_text("\n".join([f"{group},age,dose,ill", *lines]))
    return declared(folder, TABLE), {"data": str(folder / "t.csv"), "group": group}


def a_parquet_file(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    keys = [key for key in KEYS for _ in range(rows_of(key))]
    columns = {
        "patient": pa.array([int(key[1:]) for key in keys]),
        "age": pa.array([float(KEYS.index(key)) for key in keys]),
        "dose": pa.array(np.arange(len(keys), dtype=float)),
        "ill": pa.array(["yes" if ill(key) else "no" for key in keys]),
    }
    parquet.write_table(pa.table(columns), folder / "t.parquet")
    return declared(folder, TABLE), {"data": str(folder / "t.parquet"), "group": "patient"}


def pictures(folder: Path, name: Callable[[str, int], str], kind: Callable[[str], str]) -> None:
    for key in KEYS:
        for row in range(rows_of(key)):
            file = folder / "img" / kind(key) / name(key, row)
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), 8 * KEYS.index(key)).save(file)


def images(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    """Of every person in both classes."""
    for kind in ("cat", "dog"):
        pictures(folder, lambda key, row: f"{key}_{row}.png", lambda key, kind=kind: kind)  # type: ignore[misc]
    options = {"data": str(folder / "img"), "group": r"^(P\d+)_"}
    return declared(folder, IMAGES), options


def streamed_images(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    task, options = images(folder)
    return task, {**options, "stream": True}


def images_in_folders(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    pictures(
        folder,
        lambda key, row: f"ward{KEYS.index(key) % 2}/{key}/{row}.png",
        lambda key: "dog" if ill(key) else "cat",
    )
    options = {"data": str(folder / "img"), "group": r"(P\d+)/"}
    return declared(folder, IMAGES), options


def images_by_the_whole_path(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    task, options = images_in_folders(folder)
    return task, {**options, "group": r"^[a-z]+/ward\d/([^/]+)/"}


def masked_images(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    for kind in ("images", "masks"):
        pictures(folder, lambda key, row: f"{key}-{row}.png", lambda key, kind=kind: kind)  # type: ignore[misc]
    for mask in (folder / "img" / "masks").iterdir():
        Image.new("L", (4, 4), 1).save(mask)
    return declared(folder, MASKS), {"data": str(folder / "img"), "group": r"P\d+"}


def arrays(folder: Path) -> tuple[DeclaredTask, dict[str, Any]]:
    keys = [key for key in KEYS for _ in range(rows_of(key))]
    x = np.array([[KEYS.index(key), 0] for key in keys], np.float32)
    y = np.array([int(ill(key)) for key in keys])
    np.savez(folder / "a.npz", x=x, y=y, patient=np.array(keys))
    return declared(folder, ARRAYS), {"data": str(folder / "a.npz"), "group": "patient"}


EVERY = pytest.mark.parametrize(
    "kind",
    [
        a_table, a_parquet_file, images, streamed_images, images_in_folders,
        images_by_the_whole_path, masked_images, arrays,
    ],
)  # fmt: skip


def loaded(task: DeclaredTask, options: dict[str, Any]) -> tuple[Any, Any, SiloData | StreamedData]:
    found = task.load(options)
    if isinstance(found, StreamedData):
        return *(np.stack([x for x, _ in part]) for part in (found.train, found.test)), found  # type: ignore[attr-defined, return-value]
    return found.x_train, found.x_test, found


@pytest.mark.parametrize(("in_val", "warned"), [("P001", True), ("P099", False)])
@pytest.mark.parametrize("stream", [False, True])
def test_who_has_images_for_training_and_for_validation_is_pointed_out(
    in_val: str, warned: bool, stream: bool, tmp_path: Path
) -> None:
    for part, keys in (("train", KEYS[:8]), ("test", KEYS[8:12]), ("val", [in_val])):
        for kind in ("cat", "dog"):
            (folder := tmp_path / "img" / part / kind).mkdir(parents=True)
            for key in keys:
                Image.new("L", (4, 4)).save(folder / f"{key}_1.png")
    task = declared(tmp_path, IMAGES)
    task.load({"data": str(tmp_path / "img"), "group": r"^(P\d+)_", "stream": stream})
    said = [line for line in task.warnings() if "for both training and validation" in line]
    assert bool(said) == warned and not any("P0" in line for line in said)


@EVERY
def test_nobody_is_in_training_and_in_test_data_and_the_numbers_say_who_is_who(
    kind: Callable[[Path], tuple[DeclaredTask, dict[str, Any]]], tmp_path: Path
) -> None:
    task, options = kind(tmp_path)
    train, test, data = loaded(task, options)
    assert data.persons is not None
    assert whose(train) & whose(test) == set() and len(whose(test)) >= 3
    assert len(whose(train) | whose(test)) == len(KEYS)
    for x, persons in zip((train, test), data.persons, strict=True):
        assert len(persons) == len(x) and len(set(persons.tolist())) == len(whose(x))
    assert not set(data.persons[0].tolist()) & set(data.persons[1].tolist())
    assert abs(len(test) / (len(train) + len(test)) - 0.2) < 0.05
    mixed, _, _ = loaded(task, {k: v for k, v in options.items() if k != "group"})
    assert len(whose(mixed)) > len(whose(train)), "without a group, rows are drawn"


@EVERY
def test_every_person_is_tested_in_one_fold(
    kind: Callable[[Path], tuple[DeclaredTask, dict[str, Any]]], tmp_path: Path
) -> None:
    task, options = kind(tmp_path)
    tested: list[float] = []
    for number in range(1, 6):
        train, test, _ = loaded(task, {**options, "fold": f"{number}/5"})
        assert whose(train) & whose(test) == set()
        tested += whose(test)
    assert len(tested) == len(set(tested)) == len(KEYS)
    with pytest.raises(
        TaskError, match=r"31 folds need at least 31 persons or blocks\. There are 30"
    ):
        task.load({**options, "fold": "1/31"})


def test_rows_of_a_block_are_on_one_side_of_every_split_and_count_one_by_one(
    tmp_path: Path,
) -> None:
    task, options = a_table(tmp_path)
    options["blocks"] = options.pop("group")
    for option in ({}, {"fold": "2/5"}):
        train, test, data = loaded(task, {**options, **option})
        assert data.persons is None and len(test) and whose(train) & whose(test) == set()
        assert data.blocks is not None and len(set(data.blocks.tolist())) == len(whose(train))
        split = to_device(data, torch.device("cpu")).hold_out(0.2, seed=1)
        assert isinstance(split.train, Held) and isinstance(split.test, Held)
        assert split.train.persons is None and len(split.test)
        assert whose(split.train.x) & whose(split.test.x) == set()
    with pytest.raises(TaskError, match=r"no column 'month', which blocks names in silo\.toml"):
        task.load({**options, "blocks": "month"})
    with pytest.raises(TaskError, match="group and blocks are both set"):
        task.load({**options, "group": "patient"})
    apart = tmp_path / "test.csv"
    apart.write_text("age,dose,ill\n1,2,no\n3,4,yes")
    assert task.load({**options, "test-data": str(apart)}).blocks is not None
    three, one = (np.zeros((3, 1)), np.zeros(3, int)), (np.zeros((1, 1)), np.zeros(1, int))
    with pytest.raises(TaskError, match="blocks must be arrays of whole numbers, 3 for the train"):
        SiloData(*three, *one, 2, blocks=np.ones(1, int))


def test_without_a_group_the_data_says_of_nobody_whose_it_is(tmp_path: Path) -> None:
    task, options = a_table(tmp_path)
    assert task.load({"data": options["data"]}).persons is None


# ---------------------------------------------------------------- the draws themselves


@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=40),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 5),
    mixed=st.booleans(),
    data=st.data(),
)
def test_any_persons_and_classes_are_divided_near_what_was_asked(
    sizes: list[int], share: float, seed: int, mixed: bool, data: st.DataObject
) -> None:
    persons = np.repeat(np.arange(len(sizes)) * 7, sizes)
    one = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes))))
    y = np.repeat(one, sizes)
    if mixed:
        y = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(y), max_size=len(y))))
    shuffled = np.random.default_rng(seed).permutation(len(y))
    y, persons = y[shuffled], persons[shuffled]

    train, test = split_by_class(y, share, seed=seed, persons=persons)
    assert sorted([*train, *test]) == list(range(len(y)))
    assert not set(persons[train]) & set(persons[test])
    assert abs(len(test) - share * len(y)) <= 3 * max(sizes)
    for label in set(y.tolist()):
        having = len(set(persons[y == label]))
        assert (y[train] == label).any(), "every class is trained on"
        if having > 1 and not mixed:
            assert (y[test] == label).any(), "and tested on, if two persons have it"
    again = split_by_class(y, share, seed=seed, persons=persons)
    assert (again[0] == train).all()

    count = min(4, len(sizes))
    folds = [split_by_fold(y, k, count, seed=seed, persons=persons) for k in range(1, count + 1)]
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(len(y)))
    for train, test in folds:
        assert len(test) and sorted([*train, *test]) == list(range(len(y)))
        assert not set(persons[train]) & set(persons[test])
        assert abs(len(test) - len(y) / count) <= 3 * max(sizes)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.integers(0, 3))
@settings(max_examples=30)
def test_folds_of_persons_with_equally_many_rows_are_alike(labels: list[int], seed: int) -> None:
    y, persons = np.repeat(labels, 3), np.repeat(np.arange(len(labels)), 3)
    parts = [split_by_fold(y, k, 4, seed=seed, persons=persons)[1] for k in range(1, 5)]
    for label in {*labels}:
        sizes = [int((y[part] == label).sum()) for part in parts]
        assert max(sizes) - min(sizes) <= 2 * 3


def test_another_seed_draws_other_persons() -> None:
    persons = np.repeat(np.arange(40), 3)
    y = np.zeros(120, np.int64)
    drawn = {tuple(split_by_class(y, 0.2, seed=s, persons=persons)[1]) for s in range(10)}
    assert len(drawn) > 5
    ever = {int(persons[row]) for rows in drawn for row in rows}
    assert len(ever) > 25, "everybody may be drawn"


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_drawn_as_ever_where_nobody_has_two(seed: int) -> None:
    """What earlier versions drew, by their formula."""
    y = np.random.default_rng(9).integers(0, 3, 50)
    rng = np.random.default_rng([seed, 50])
    test = np.zeros(50, bool)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        test[rng.permutation(rows)[: min(max(1, round(0.3 * len(rows))), len(rows) - 1)]] = True
    assert (split_by_class(y, 0.3, seed=seed)[1] == np.flatnonzero(test)).all()
    rng = np.random.default_rng([seed, 50, 4])
    dealt = np.concatenate([rng.permutation(np.flatnonzero(y == own)) for own in np.unique(y)])
    assert (split_by_fold(y, 2, 4, seed=seed)[1] == np.sort(dealt[1::4])).all()


def test_keys_become_the_same_numbers_in_all_parts() -> None:
    one, other = number_persons(["x", "y", "x"], ["z", "y"])
    assert one.tolist() == [0, 1, 0] and other.tolist() == [2, 1]
    persons = np.array([0, 0, 0, 1, 1, 2])
    assert [fewest_persons(persons, n) for n in (0, 1, 3, 4, 5, 6, 99)] == [0, 1, 1, 2, 2, 3, 3]


# ---------------------------------------------------------------- how it is said


@pytest.mark.parametrize(
    "spelled", [["7", "7.0", " 7", "7 "], ["e\u0301va", "\u00e9va", "\u00e9va ", "\u00e9va"]]
)
def test_one_key_may_be_spelled_in_several_ways(spelled: list[str], tmp_path: Path) -> None:
    lines = [
        f"{key},{i},1,{'yes' if i % 2 else 'no'}" for i, key in enumerate([*spelled, "9", "8"])
    ]
    (tmp_path / "t.csv").write_text("\n".join(["patient,age,dose,ill", *lines]))
    options = {"data": str(tmp_path / "t.csv"), "group": "patient", "test-share": 0.4}
    persons = declared(tmp_path, TABLE).load(options).persons
    assert persons is not None
    assert len({*persons[0].tolist(), *persons[1].tolist()}) == 3


def test_a_column_may_go_by_its_declared_name_and_its_own(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "NR ,a,dose,ill\n"
        + "".join(f"{i // 2},{i},1,{'yes' if i % 4 else 'no'}\n" for i in range(20))
    )
    text = TABLE.replace('"age"', '"age", "visit"')
    options = {"data": str(tmp_path / "t.csv"), "columns": '{"NR": "visit", "a": "age"}'}
    one, other = (
        declared(tmp_path, text).load({**options, "group": name}).persons
        for name in ("NR", "visit")
    )
    assert one is not None and other is not None
    assert [p.tolist() for p in one] == [p.tolist() for p in other]


def test_a_person_is_held_out_also_where_all_have_many_rows() -> None:
    of_each = [(27, 21), (19, 9), (13, 10), (31, 27), (10, 16), (14, 15), (6, 15)]
    y = np.concatenate([np.repeat([0, 1], both) for both in of_each])
    persons = np.repeat(np.arange(7), [sum(both) for both in of_each])
    for seed in range(200):
        assert len(split_by_class(y, 0.05, seed=seed, persons=persons)[1])


@pytest.mark.parametrize("blank", ["", " ", "NA", "?", "null"])
def test_a_row_of_nobody_is_refused_by_its_number(blank: str, tmp_path: Path) -> None:
    lines = [f"{'SECRET' if i != 4 else blank},{i},1,{'yes' if i % 2 else 'no'}" for i in range(9)]
    (tmp_path / "t.csv").write_text("\n".join(["patient,age,dose,ill", *lines]))
    options = {"data": str(tmp_path / "t.csv"), "group": "patient", "missing": '["?"]'}
    with pytest.raises(TaskError, match="no value in 1 of 9 rows; the first is row 5") as error:
        declared(tmp_path, TABLE).load(options)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("pat", r"has no column 'pat', which group names in silo\.toml\. Its columns: 'patient', "),
        ("ill", "they belong to 2 persons, and training needs all"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_serve_is_refused(group: str, says: str, tmp_path: Path) -> None:
    task, options = a_table(tmp_path)
    with pytest.raises(TaskError, match=says):
        task.load({**options, "group": group})


def test_patterns_that_find_nobody_are_refused_without_a_name_of_a_file(tmp_path: Path) -> None:
    task, options = images_in_folders(tmp_path)
    for pattern, says in (("(", "must be a regular expression"), ("P00", "paths of")):
        with pytest.raises(TaskError, match=says) as error:
            task.load({**options, "group": pattern})
        assert not any(key in str(error.value) for key in KEYS)
    with pytest.raises(TaskError, match=r"in the paths of \d+ of 103 images"):
        task.load({**options, "group": "P00"})


@pytest.mark.parametrize(
    "patient", [None, np.arange(3), np.zeros((103, 2), int), np.linspace(0, 1, 103)]
)
def test_arrays_without_a_key_per_sample_are_refused(patient: Any, tmp_path: Path) -> None:
    task, options = arrays(tmp_path)
    with np.load(options["data"]) as held:
        known = {"x": held["x"], "y": held["y"]}
    np.savez(options["data"], **known, **({} if patient is None else {"patient": patient}))
    with pytest.raises(TaskError, match="must have an array 'patient' of 103 whole numbers"):
        task.load(options)


def test_persons_of_parts_that_are_given_apart_have_the_same_numbers(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    np.savez(
        tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y,
        patient_train=[5, 6, 7, 8], patient_test=[8, 9, 9, 1],
    )  # fmt: skip
    options = {"data": str(tmp_path / "a.npz"), "group": "patient"}
    persons = declared(tmp_path, ARRAYS).load(options).persons
    assert persons is not None and len(np.intersect1d(*persons)) == 1

    task, options = a_table(tmp_path)
    persons = task.load({**options, "test-data": options["data"]}).persons
    assert persons is not None and len(np.intersect1d(*persons)) == len(KEYS)

    for part, keys in (("train", KEYS[:20]), ("test", KEYS[18:])):
        for i, key in enumerate(keys):
            file = tmp_path / "img" / part / ("cat" if i % 2 else "dog") / f"{key}_1.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), 9).save(file)
    options = {"data": str(tmp_path / "img"), "group": r"^(P\d+)_"}
    persons = declared(tmp_path, IMAGES).load(options).persons
    assert persons is not None and len(np.intersect1d(*persons)) == 2


def test_a_key_is_the_same_in_a_column_of_whole_numbers_and_of_floats(tmp_path: Path) -> None:
    task, options = a_parquet_file(tmp_path)
    table = parquet.read_table(options["data"])
    ids = np.asarray(table["patient"]) + 12_345_678_900
    for name, kind in (("t", np.int64), ("test", np.float64)):
        own = table.set_column(0, "patient", pa.array(ids.astype(kind)))
        parquet.write_table(own, tmp_path / f"{name}.parquet")
    persons = task.load({**options, "test-data": str(tmp_path / "test.parquet")}).persons
    assert persons is not None and len(np.intersect1d(*persons)) == len(KEYS)


@pytest.mark.parametrize("wrong", [np.zeros(2, int), (np.zeros(3, int), np.zeros(1)), ((), ())])
def test_a_task_of_ones_own_gives_a_number_per_sample(wrong: Any) -> None:
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, np.int64)
    assert SiloData(x, y, x[:1], y[:1], 2, persons=(np.array([1, 1, 2]), np.array([3]))).persons
    with pytest.raises(TaskError, match="3 for the training and 1 for the test samples"):
        SiloData(x, y, x[:1], y[:1], 2, persons=wrong)


# ---------------------------------------------------------------- what looks like keys


def columns(name: str, values: list[Any], folder: Path, **more: str) -> list[str]:
    rng = np.random.default_rng(3)
    lines = [
        f"{value},{rng.normal():.3f},{rng.normal():.3f},{'yes' if rng.random() < 0.5 else 'no'}"
        for value in values
    ]
    (folder / "t.csv").write_text("\n".join([f"{name},age,dose,ill", *lines]))
    task = declared(folder, more.pop("text", TABLE))
    return task.look_for_persons({"data": str(folder / "t.csv"), **more})


FIVE_EACH = [i // 5 for i in range(300)]


@pytest.mark.parametrize(
    "name",
    ["patient", "patient_id", "PatNr", "PATIENTENNR", "Pat-ID", "subject", "mrn", "case_id",
     "Fallnummer", "kunde", "KundenNr", "customerId", "client", "machine", "maschine_nr",
     "id_paciente", "numero_patient", "Proband", "患者ID", "person", "device_id"],
)  # fmt: skip
def test_a_column_that_is_called_like_a_key_and_repeats_is_pointed_out(
    name: str, tmp_path: Path
) -> None:
    shuffled = np.random.default_rng(0).permutation([f"{i // 4} x" for i in range(60)]).tolist()
    (said,) = columns(name, shuffled, tmp_path)
    assert said.startswith(f"column {name!r} has 15 different values in 60 rows")
    assert f'group = "{name}"' in said and "14 x" not in said
    assert columns(name, list(range(60)), tmp_path) == [], "one row each"
    assert columns(name, ["yes", "no"] * 30, tmp_path) == [], "a flag"
    assert columns(name, shuffled, tmp_path, group=name) == [], "it is said"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("nr", FIVE_EACH),
        ("studyid", np.random.default_rng(0).integers(1000, 1060, 300).tolist()),
        ("x", [f"P{i // 3:03}" for i in range(90)]),
        ("pseudonym", [f"{i // 3 * 7919:010x}" for i in range(300)]),
        ("row_key", np.random.default_rng(0).permutation(FIVE_EACH).tolist()),
    ],
)
def test_so_is_one_whose_values_look_like_it(name: str, values: list[Any], tmp_path: Path) -> None:
    assert len(columns(name, values, tmp_path)) == 1


DRAW = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patient_age", DRAW.integers(18, 95, 300).tolist()),
        ("years", DRAW.integers(18, 95, 300).tolist()),
        ("stay", DRAW.poisson(6, 300).tolist()),
        ("icd", [f"I{i:02}" for i in DRAW.integers(10, 60, 300)]),
        ("diagnosis", [f"J{i}.{i % 10}" for i in DRAW.integers(10, 60, 300)]),
        ("visit", [f"2024-0{1 + i // 28}-{1 + i % 28:02}" for i in DRAW.integers(0, 200, 300)]),
        ("zip", DRAW.integers(10000, 10080, 300).tolist()),
        ("remark", [f"see letter {i}" for i in DRAW.integers(0, 90, 300)]),
        ("weight", [f"{v:.1f}" for v in DRAW.normal(70, 3, 300)]),
        ("person_type", [f"type {i}" for i in DRAW.integers(0, 9, 300)]),
        ("ward", [f"W{i}" for i in DRAW.integers(0, 6, 300)]),
        ("admitted", [2000 + i // 15 for i in range(300)]),
    ],
)  # fmt: skip
def test_ordinary_columns_are_not(name: str, values: list[Any], tmp_path: Path) -> None:
    assert columns(name, values, tmp_path) == []


def test_columns_that_cannot_be_keys_are_not_read_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task, options = a_parquet_file(tmp_path)
    whole, read = list[str](), files.read_columns

    def noted(place: Path, columns: Any, *rest: Any) -> Any:
        whole.extend(columns)
        return read(place, columns, *rest)

    monkeypatch.setattr(files, "read_columns", noted)
    table = parquet.read_table(options["data"])
    for name, value in (("lab", 0.5), ("seen", "2020-01-01 10:00"), ("codes", ["I10"])):
        table = table.append_column(name, pa.array([value] * len(table)))
    parquet.write_table(table, options["data"])
    assert len(task.look_for_persons({"data": options["data"]})) == 1
    assert whole == ["patient"]


def test_of_declared_columns_only_numbers_that_are_called_like_a_key_are(tmp_path: Path) -> None:
    category = TABLE + '[categorical]\ncase_id = ["a", "b", "c"]\n'
    assert columns("case_id", ["a", "b", "c"] * 30, tmp_path, text=category) == []
    number = TABLE.replace('"age"', '"age", "patient"')
    assert len(columns("patient", FIVE_EACH, tmp_path, text=number)) == 1
    number = TABLE.replace('"age"', '"age", "score"')
    assert columns("score", FIVE_EACH, tmp_path, text=number) == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (lambda i: f"P{i // 4:03}_{i % 4}.png", r"'^([^\W_]+)[\W_]'"),
        (lambda i: f"{i // 3:04}-{i % 3}.jpg", r"'^([^\W_]+)[\W_]'"),
        (lambda i: f"ward7/P{i // 4:03}/{i % 4}.png", "'([^/]+)/[^/]+$'"),
        (lambda i: f"img_{i:03}.png", ""),
        (lambda i: f"{i}.png", ""),
        (lambda i: f"cat{i % 2}_{i}.png", ""),
        (lambda i: f"20240{1 + i % 9}05_{i}.png", ""),
        (lambda i: f"site{i % 2}/{i}.png", ""),
    ],
)
def test_images_whose_names_or_folders_repeat_are_pointed_out(
    name: Callable[[int], str], pattern: str, tmp_path: Path
) -> None:
    for i in range(40):
        file = tmp_path / "img" / ("cat" if i % 8 < 4 else "dog") / name(i)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(file)
    task, options = declared(tmp_path, IMAGES), {"data": str(tmp_path / "img")}
    said = task.look_for_persons(options)
    assert len(said) == bool(pattern) and all(pattern in one for one in said)
    if pattern:
        assert "P001" not in said[0] and "0001" not in said[0]
        train, test, _ = loaded(task, {**options, "group": pattern.strip("'")})
        assert len(train) + len(test) == 40
