"""Tables as programs write them: titles, footers, stray quotes, odd numbers, kinds of file."""

from __future__ import annotations

import bz2
import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from coterie.client.home.folder import create
from coterie.tasks import TaskError
from coterie.tasks.own import files
from coterie.tasks.own.dialect import Dialect
from coterie.tasks.own.values import Numbers
from tests.conftest import silo
from tests.tables import declaration
from tests.unit.tasks.test_declared import declared

TASK = declaration("age", sex="fm")
ROWS = [(f"note {i}", str(20 + i), "fm"[i % 2], ("no", "yes")[i % 2]) for i in range(40)]
NAMES = "note,age,sex,ill"


def text(rows: list[Any] = ROWS, separator: str = ",") -> str:
    lines = [separator.join(map(str, row)) + "\n" for row in rows]
    return NAMES.replace(",", separator) + "\n" + "".join(lines)


def load(folder: Path, content: str | bytes, name: str = "data.csv", **options: Any) -> Any:
    """What is read, with all notes and warnings of it."""
    raw = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(raw)
    task = declared(folder, TASK)
    data = task.load({"data": str(folder / name), **options})
    return data, task.notes() + task.warnings()


def arrays(data: Any) -> list[Any]:
    return [data.x_train, data.y_train, data.x_test, data.y_test]


def assert_same(data: Any, folder: Path) -> None:
    """It is what the plain file holds."""
    for found, plain in zip(arrays(data), arrays(load(folder, text())[0]), strict=True):
        np.testing.assert_array_equal(found, plain)


def with_notes(notes: dict[int, str], *, ages: dict[int, str] | None = None) -> list[Any]:
    ages = ages or {}
    return [(notes.get(i, row[0]), ages.get(i, row[1]), *row[2:]) for i, row in enumerate(ROWS)]


# ---------------------------------------------------------------- quotes


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({1: '"5 inch', 3: '6" pipe'}, "in line 3 of the file that ends in the middle of a value"),
        ({1: '"5 inch', 3: '"6 inch'}, "in line 3 of the file that ends in the middle of a value"),
        ({0: 'a 5" pipe', 38: '"5 inch'}, "in line 40 of the file that is never closed"),
        ({4: '""" inch', 9: '""" x"y'}, "in line 6 of the file that ends in the middle"),
    ],
)
def test_a_stray_quote_that_swallows_rows_is_refused_with_its_line(
    notes: dict[int, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said) as error:
        load(tmp_path, text(with_notes(notes)))
    assert "inch" not in str(error.value)
    data, _ = load(tmp_path, text(with_notes(notes)), quote="")
    assert_same(data, tmp_path)


def test_rows_that_two_quotes_join_without_an_error_are_warned_of(tmp_path: Path) -> None:
    data, said = load(tmp_path, text(with_notes({1: '"5', 3: '6"', 9: '"7', 10: '8"'})))
    assert len(data.x_train) + len(data.x_test) == 37
    assert said[0] == "data.csv: line breaks in quotes in 2 rows, the first from line 3 of the file"
    assert said[1].startswith("data.csv: 2 quoted values with line breaks may be several rows")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_letters_with_line_breaks_are_counted_and_lose_nothing(
    separator: str, tmp_path: Path
) -> None:
    letters = {3: '"Dear all,\n\nshe said ""hi"".\n"', 7: '"one\r\ntwo, three"', 8: 'a "b" c'}
    written = text(with_notes(letters), separator)
    data, said = load(tmp_path, written, separator=separator)
    assert_same(data, tmp_path)
    assert said == ["data.csv: line breaks in quotes in 2 rows, the first from line 5 of the file"]
    assert load(tmp_path, text(with_notes({8: 'a "b" c', 9: '"x ""y"""'})))[1] == []


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
@pytest.mark.parametrize(
    ("row", "value"),
    [(39, "x" * 5_000_000), (20, '"' + "line\n" * 700_000 + '"'), (0, "x" * 9_000_000)],
)
def test_very_long_texts_that_are_not_declared_do_no_harm(
    row: int, value: str, name: str, tmp_path: Path
) -> None:
    written = text(with_notes({row: value, row // 2: value})).encode()
    packed = gzip.compress(written, 1) if name.endswith("gz") else written
    assert_same(load(tmp_path, packed, name)[0], tmp_path)


# ---------------------------------------------------------------- above, below and behind the rows


@pytest.mark.parametrize(
    ("above", "skip"),
    [
        ("sep=;\n", 0),
        ('"sep=;"\r\n', 0),
        ("SEP=;\n", 1),
        ("sep=;\nExport of today\n", 2),
        ("\n", 0),
    ],
)
def test_a_first_line_that_names_the_separator_is_understood(
    above: str, skip: int, tmp_path: Path
) -> None:
    own = {} if "=" in above else {"separator": ";"}
    data, said = load(tmp_path, above + text(separator=";"), skip=skip, **own)
    assert_same(data, tmp_path)
    assert said == []


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("above", "separator", "setting"),
    [
        ("Export of 2026-11-01\n", ",", r"Line 2 of the file has these names: set skip = 1\."),
        ("Ward 3\n\nby: x, y\n", ",", r"Line 4 of the file .* skip = 3\."),
        ("Title; of it\n", ";", r'Line 2 of the file .* skip = 1 and separator = ";"\.'),
    ],
)
def test_a_title_is_pointed_out_and_can_be_skipped(
    above: str, separator: str, setting: str, ends: str, tmp_path: Path
) -> None:
    written = (above + text(separator=separator)).replace("\n", ends)
    with pytest.raises(TaskError, match=setting):
        load(tmp_path, written)
    data, said = load(tmp_path, written, skip=above.count("\n"), separator=separator)
    assert_same(data, tmp_path)
    assert said == []


@pytest.mark.parametrize(
    ("footer", "said", "lines"),
    [
        ("Total,300\n", r"has 2 fields in row 41, where .* has 4.*footer, set skip-last = 1", 1),
        ("Total,300,,\n", r"no value in target column 'ill' in row 41.* set skip-last = 1\.", 1),
        ("\nSum,1\nEnd,2\n\n\n", r"in row 41, .*; 1 more row with .*footer, set skip-last = 2", 2),
        ("a,Total,f,no\n", r"'Total' in row 41.*If the file ends with a footer, set skip-last", 1),
        ("end", r"has 1 field in row 41, .*footer, set skip-last = 1\.", 1),
    ],
)
def test_a_footer_is_pointed_out_and_can_be_left_out(
    footer: str, said: str, lines: int, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said):
        load(tmp_path, text() + footer)
    data, notes = load(tmp_path, text() + footer, **{"skip-last": lines})
    assert_same(data, tmp_path)
    assert notes == []


def test_a_row_with_a_field_too_many_is_named_without_a_count_of_none(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"has 5 fields in row 3, where .* has 4.* in \"quotes\""):
        load(tmp_path, text(with_notes({2: "a,b"})))
    with pytest.raises(TaskError, match=r"All rows differ from the header line:"):
        load(tmp_path, text().replace("note,age", "age"))


@pytest.mark.parametrize(
    "written",
    [
        text().replace("no\n", "no,\n").replace("yes\n", "yes,\n"),
        text().replace("ill\n", "ill,\n"),
        text().replace("\n", ",\n"),
    ],
)
def test_separators_at_the_end_of_lines_are_no_column(written: str, tmp_path: Path) -> None:
    data, said = load(tmp_path, written)
    assert_same(data, tmp_path)
    assert said == []


def test_a_value_behind_the_last_column_is_refused(tmp_path: Path) -> None:
    written = text().replace("no\n", "no,\n").replace("yes\n", "yes,\n")
    with pytest.raises(TaskError, match="a value behind its last column in row 3"):
        load(tmp_path, written.replace("22,f,no,", "22,f,no,x"))


def test_a_name_in_another_encoding_is_not_called_missing(tmp_path: Path) -> None:
    written = text().replace("age", "größe").encode("cp1252")
    with pytest.raises(TaskError, match=r'is not UTF-8.*"cp1252"'):
        load(tmp_path, written, columns={"größe": "age"})


def test_names_may_take_megabytes(tmp_path: Path) -> None:
    genes = [f"gene {i} of a long list" for i in range(60_000)]
    written = text([(*row, *["0"] * len(genes)) for row in ROWS[:30]], "\t")
    written = written.replace("ill\n", "\t".join(["ill", *genes]) + "\n", 1)
    with pytest.raises(TaskError, match="separator seems to be"):
        load(tmp_path, written)
    data, _ = load(tmp_path, written, separator="\t")
    assert len(data.x_train) + len(data.x_test) == 30


def test_an_open_quote_among_the_names_swallows_no_rows(tmp_path: Path) -> None:
    written = text(ROWS * 2000).replace("ill\n", 'ill,"no\n', 1).replace("note 39", 'note 39"')
    with pytest.raises(TaskError, match="in line 1 of the file that is never closed"):
        load(tmp_path, written)


def test_spaces_around_names_do_no_harm_unless_they_are_ambiguous(tmp_path: Path) -> None:
    assert_same(load(tmp_path, text().replace(NAMES, "note, age,\u00a0sex , ill"))[0], tmp_path)
    with pytest.raises(TaskError, match="has 2 columns named 'age'"):
        load(tmp_path, text().replace(NAMES, " age, age ,sex,ill"))
    assert_same(load(tmp_path, text().replace(NAMES, " age,age,sex,ill"))[0], tmp_path)


def test_empty_lines_of_a_file_of_one_column_are_told(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age\n1\n\n3\n\n\n4\n")
    one = TASK.replace('sex = ["f", "m"]', "")
    task = declared(tmp_path, one)
    found = task.inputs(tmp_path / "new.csv", {})
    assert len(found.x) == 3 and found.notes == ("new.csv: left out 3 empty lines",)


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
@pytest.mark.parametrize("named", ["utf-8", "cp1252"])
def test_the_mark_at_the_beginning_tells_the_encoding(
    encoding: str, named: str, tmp_path: Path
) -> None:
    rows = with_notes(dict.fromkeys(range(40), "Übelkeit 😀"))
    assert_same(load(tmp_path, text(rows).encode(encoding), encoding=named)[0], tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "cp1252"])
@pytest.mark.parametrize("note", ["plain", "Übelkeit"])
def test_the_encoding_that_an_error_recommends_is_the_right_one(
    encoding: str, note: str, tmp_path: Path
) -> None:
    written = text(with_notes({2: note})).replace("note,", f"{note},").encode(encoding)
    if (encoding, note) == ("cp1252", "plain"):
        return
    if encoding == "cp1252":  # of a column that is not declared, the encoding does not matter
        written = written.replace(b",f,", b",\xfc,")
    with pytest.raises(TaskError, match=rf'"{encoding}"'):
        load(tmp_path, written)
    if encoding != "cp1252":
        assert_same(load(tmp_path, written, encoding=encoding)[0], tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_a_declaration_may_have_the_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(TASK.replace("\n", "\r\n").encode(encoding))
    from coterie.tasks.own.declared import load_declared

    assert (
        load_declared(tmp_path / "study.toml").fingerprint == declared(tmp_path, TASK).fingerprint
    )
    (tmp_path / "study.toml").write_bytes(TASK.replace("study", "stüdy").encode("cp1252"))
    with pytest.raises(TaskError, match=r"study\.toml is not UTF-8: .* Save it as UTF-8"):
        load_declared(tmp_path / "study.toml")


# ---------------------------------------------------------------- numbers

FRENCH = {"decimal": ",", "thousands": " ", "separator": ";"}


@pytest.mark.parametrize(
    ("written", "options", "number"),
    [
        ("1\u00a0234,5", FRENCH, 1234.5),
        ("1\u202f234\u202f567,5", FRENCH, 1234567.5),
        ("1\u2009234", {"thousands": "\u00a0"}, 1234),
        ("1\u2019234.5", {"thousands": "'"}, 1234.5),
        ("1'234.5", {"thousands": "\u2019"}, 1234.5),
        ("\u22125", {}, -5),
        ("\u22121\u00a0234,5", FRENCH, -1234.5),
        ("\u00a07\u202f", {}, 7),
        ("<0.5", {"censored": "limit"}, 0.5),
        (">= 1 000,5", {**FRENCH, "censored": {"age": "limit"}}, 1000.5),
        ("≤0.5", {"censored": "missing"}, None),
        ("12 %", {"ignore-marks": ["%"]}, 12),
        ("1.2*", {"ignore-marks": {"age": "*"}}, 1.2),
        ("< 1.2 mg/l *", {"ignore-marks": ["*", "mg/l", "mg"], "censored": "limit"}, 1.2),
        ("€5", {"ignore-marks": "€"}, 5),
        ("1.234,5 %", {"ignore-marks": "%", "decimal": ",", "thousands": ".", "separator": ";"},
         1234.5),
        ("\u22129", {"missing": ["-9"]}, None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_programs_write_them(
    written: str, options: dict[str, Any], number: float | None, tmp_path: Path
) -> None:
    separator = options.get("separator", ",")
    rows = with_notes({}, ages={2: written})
    data, said = load(tmp_path, text(rows, separator), **options)
    rows = with_notes({}, ages={2: "" if number is None else str(number)})
    plain, _ = load(tmp_path, text(rows))
    for found, expected in zip(arrays(data), arrays(plain), strict=True):
        np.testing.assert_array_equal(found, expected)
    done = {"censored", "ignore-marks"} & set(options)
    assert bool(done) == any(line.startswith("age: 1 value of data.csv ") for line in said)


def test_all_odd_forms_of_a_column_are_listed_with_a_setting_for_each(tmp_path: Path) -> None:
    odd = dict(enumerate(["<0.5", "<0.1", ">20", "12 %", "40.7 %", "1.2*", "n.d."]))
    rows = [("secret", *row[1:]) for row in with_notes({}, ages=odd)]
    with pytest.raises(TaskError) as error:
        load(tmp_path, text(rows))
    said = str(error.value)
    assert (
        "contains '<0.5' in row 1 and 1 more row, '>20' in row 3, '12 %' in row 4 and 1 more row, "
        "'1.2*' in row 6, 'n.d.' in row 7, which are not numbers. " in said
    )
    assert 'censored = "limit"' in said and 'ignore-marks = ["%", "*"]' in said
    assert "option missing" in said and "secret" not in said
    options = {"censored": "limit", "ignore-marks": ["%", "*"], "missing": ["n.d."]}
    _, notes = load(tmp_path, text(rows), **options)
    assert notes[:3] == [
        "age: 3 values of data.csv read as the limit",
        "age: 2 values of data.csv read without '%'",
        "age: 1 value of data.csv read without '*'",
    ]


@pytest.mark.parametrize("date", ["2023-02-14", "12/01/2023 08:30", "1.4.23", "03-Mar-2021"])
def test_dates_are_called_dates_and_no_part_of_them_is_taken_for_the_number(
    date: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="look like dates: write numbers instead") as error:
        load(tmp_path, text(with_notes({}, ages=dict.fromkeys(range(3), date))))
    assert "ignore-marks" not in str(error.value)


def test_no_mark_with_digits_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"data\.codes\.age") as error:
        load(tmp_path, text(with_notes({}, ages={1: "12A3"})))
    assert "ignore-marks" not in str(error.value)


@pytest.mark.parametrize("written", ["5-", "(5)", "5.5 \u2212"])
def test_a_minus_behind_a_number_is_not_advised_to_be_ignored(written: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="write the minus in front of the number") as error:
        load(tmp_path, text(with_notes({}, ages={1: written})))
    assert "ignore-marks" not in str(error.value)


def test_of_very_many_odd_forms_some_are_listed(tmp_path: Path) -> None:
    ages = {i: f"{chr(97 + i % 26) * (1 + i // 26)}" for i in range(40)}
    with pytest.raises(TaskError, match=r"and 20 more forms, which are not numbers"):
        load(tmp_path, text(with_notes({}, ages=ages)))


def test_many_odd_values_are_not_compared_with_each_other() -> None:
    compared = 0

    class Text(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    numbers = Numbers("age", Dialect(), 0)
    numbers._odd([Text(f"2020-01-{i}") for i in range(500)], np.arange(500))
    assert [form.row for form in numbers.odd.values()] == list(range(1, 501))
    assert compared < 5_000


@pytest.mark.parametrize(
    ("ages", "setting"),
    [
        (["1,5"], 'option decimal = ","'),
        (["1\u00a0234,5", "7,25"], r'option decimal = "," and thousands = " "\.'),
        (["1,234", "2,000"], r'option decimal = ",", or thousands = ","\.'),
        (["1\u2019234.5"], 'option thousands = "\'"'),
        (["\u22121,5"], 'option decimal = ","'),
        (["1.234,5 %"], r'ignore-marks = \["%"\].*option decimal = "," and thousands = "\."'),
        (["1.2.3 x"], r'ignore-marks = \["x"\].*option missing; if a number'),
        (["1.234,5", "3"], r'option decimal = "," and thousands = "\."'),
    ],
)
def test_the_marks_that_would_read_a_column_are_recommended(
    ages: list[str], setting: str, tmp_path: Path
) -> None:
    rows = with_notes({}, ages=dict(enumerate(ages)))
    with pytest.raises(TaskError, match=setting):
        load(tmp_path, text(rows, ";"), separator=";")


def test_all_codes_that_are_not_declared_are_listed_at_once(tmp_path: Path) -> None:
    rows = [(*row[:3], {3: "2", 5: "1", 9: "2"}.get(i, row[3])) for i, row in enumerate(ROWS)]
    with pytest.raises(TaskError, match=r"'2' in row 4 and 1 more row, '1' in row 6\. Declared"):
        load(tmp_path, text(rows))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"censored": "maybe"}, "censored must be limit or missing. Got 'maybe'"),
        ({"censored": {"bmi": "limit"}}, "option censored names 'bmi'"),
        ({"ignore-marks": {"bmi": "%"}}, "option ignore-marks names 'bmi'"),
        ({"skip": -1}, "skip must be at least 0"),
        ({"skip": 99}, "has no column 'ill'"),
        ({"quote": "x"}, "quote must be one of"),
        ({"encoding": "hex"}, "encoding must be one that Python supports,"),
    ],
)
def test_options_of_a_file_that_cannot_be_used_are_named(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said):
        load(tmp_path, text(), **options)


# ---------------------------------------------------------------- other kinds of file


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("data.csv.gz", gzip.compress), ("data.CSV.GZ", gzip.compress), ("d.tsv.bz2", bz2.compress),
        ("data.csv.zst", lambda raw: bytes(pa.compress(raw, "zstd", asbytes=True))),
    ],
)  # fmt: skip
def test_compressed_files_are_read_and_a_cut_one_is_refused(
    name: str, pack: Any, tmp_path: Path
) -> None:
    written = text() if "csv" in name.lower() else text(separator="\t")
    own = {"separator": "\t"} if "tsv" in name else {}
    packed = pack(written.encode())
    assert_same(load(tmp_path, packed, name, **own)[0], tmp_path)
    with pytest.raises(TaskError, match="cannot be read"):
        load(tmp_path, packed[: len(packed) // 2], name, **own)


def columns(rows: list[Any]) -> pa.Table:
    return pa.table(dict(zip(NAMES.split(","), map(list, zip(*rows, strict=True)), strict=True)))


def test_folders_of_parquet_and_feather_files_are_read_as_one_table(tmp_path: Path) -> None:
    task, folder = declared(tmp_path, TASK), tmp_path / "parts"
    (folder / "deep").mkdir(parents=True)
    parquet.write_table(columns(ROWS[:25]), folder / "a.parquet")
    parquet.write_table(columns(ROWS[25:]), folder / "deep" / "b.parquet")
    (folder / "_SUCCESS").touch()
    (folder / "README.txt").touch()
    assert_same(task.load({"data": str(folder)}), tmp_path)
    assert task.notes() == [
        "parts: without 1 file with an extension other than .parquet, such as 'README.txt'"
    ]
    feather.write_feather(columns(ROWS), tmp_path / "t.feather")
    assert_same(task.load({"data": str(tmp_path / "t.feather")}), tmp_path)
    for sex, rows in (("f", ROWS[::2]), ("m", ROWS[1::2])):  # as Spark parts a table
        (tmp_path / "hive.parquet" / f"sex={sex}").mkdir(parents=True)
        part = columns(rows).drop_columns(["sex"])
        parquet.write_table(part, tmp_path / "hive.parquet" / f"sex={sex}" / "p.parquet")
    found = task.load({"data": str(tmp_path / "hive.parquet")})
    assert sorted(map(tuple, found.x_train[:, 1:])) == [(0, 1)] * 16 + [(1, 0)] * 16
    parquet.write_table(columns(ROWS).drop_columns(["sex"]), folder / "c.parquet")
    with pytest.raises(TaskError, match=r"c\.parquet' has no column 'sex'"):
        task.load({"data": str(folder)})


@pytest.mark.parametrize("ages", [pa.array([20, 21]), pa.nulls(2), pa.array([True, False])])
def test_each_file_of_a_folder_has_its_own_types(ages: Any, tmp_path: Path) -> None:
    task, folder = declared(tmp_path, TASK), tmp_path / "parts"
    folder.mkdir()
    fractions = columns(ROWS).set_column(1, "age", pa.array([i / 2 for i in range(40)]))
    parquet.write_table(fractions, folder / "b.parquet")
    parquet.write_table(columns(ROWS[:2]).set_column(1, "age", ages), folder / "a.parquet")
    task.load({"data": str(folder)})
    own = {"data": str(folder)}
    found = np.concatenate([part(own)[0].values for part in (task.columns, task.test_columns)])
    expected = [*map(float, ages.cast(pa.float64()).to_pylist() if ages.null_count == 0 else []),
                *(i / 2 for i in range(40))]  # fmt: skip
    np.testing.assert_array_equal(np.sort(found)[: len(expected)], sorted(expected))


def test_a_long_reading_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PAUSE_S", -1.0)
    with caplog.at_level(logging.INFO):
        load(tmp_path, text())
    assert caplog.messages == ["reading data.csv: 40 rows so far"]
    home = create(
        tmp_path / "a", "a", task=str(tmp_path / "study.toml"), data=tmp_path / "data.csv"
    )
    logging.getLogger("coterie.tasks").setLevel(logging.NOTSET)
    caplog.clear()
    assert silo(["check", "--home", str(home.folder)]) == 0
    assert "reading data.csv: 40 rows so far" in caplog.messages


def test_three_decimals_are_not_read_as_thousands(tmp_path: Path) -> None:
    own = {"decimal": ",", "thousands": ".", "separator": ";"}
    with pytest.raises(TaskError, match=r"'0\.873' in row 2"):
        load(tmp_path, text(with_notes({}, ages={1: "0.873", 2: "1.002"}), ";"), **own)
    data, _ = load(tmp_path, text(with_notes({}, ages={1: "1.002"}), ";"), **own)
    plain, _ = load(tmp_path, text(with_notes({}, ages={1: "1002"})))
    np.testing.assert_array_equal(arrays(data)[0], arrays(plain)[0])


def test_marks_of_texts_are_not_looked_for_in_numbers_of_parquet(tmp_path: Path) -> None:
    ages = [1.125, -999.0, *map(float, range(20, 58))]
    table = columns(ROWS).set_column(1, "age", pa.array(ages))
    parquet.write_table(table, tmp_path / "t.parquet")
    task = declared(tmp_path, TASK)
    own = {"missing": ["-999"], "decimal": ",", "thousands": "."}
    options = {"data": str(tmp_path / "t.parquet"), **own}
    found = [part(options)[0].values for part in (task.columns, task.test_columns)]
    assert np.isnan(np.concatenate(found)).sum() == 1 and np.nanmin(np.concatenate(found)) == 1.125


def test_no_two_columns_of_a_file_have_one_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="gives two columns of the file the same name"):
        load(tmp_path, text(), columns={"AGE": "age", "Alter": "age"})


def test_rows_in_another_order_than_in_memory_are_not_read_again(tmp_path: Path) -> None:
    task, file = declared(tmp_path, TASK), tmp_path / "data.csv"
    file.write_text(text())
    task.load({"data": str(file)})
    task.columns({"data": str(file)})
    file.write_text(text(ROWS[::-1]))
    for again in (task.columns, task.test_columns):
        with pytest.raises(TaskError, match="data changed after the silo started"):
            again({"data": str(file)})
