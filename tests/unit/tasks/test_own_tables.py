"""A silo's table as it is: names of columns, codes, separators, what is missing or impossible."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from coterie.client.home.folder import Home, create
from coterie.client.home.settings import SiloSettings
from coterie.server.study.compare import read as read_comparison
from coterie.tasks import TaskError
from coterie.tasks.own.declared import DeclaredTask
from coterie.tasks.own.dialect import Dialect
from coterie.tasks.simulation import Simulation
from tests.conftest import silo
from tests.kit import run
from tests.tables import declaration
from tests.unit.tasks.test_declared import TABLE, declared, table

HEART = declaration("age", "bmi", name="heart", sex="fm", pain="14")
PLAIN = [
    (40 + i, 25.5 + i, "f" if i % 2 else "m", "4" if i % 3 else "1", "yes" if i % 4 else "no")
    for i in range(20)
]
OWN = {
    "separator": ";",
    "decimal": ",",
    "thousands": ".",
    "encoding": "cp1252",
    "columns": {"ALTER": "age", "Größe": "bmi", "SEX": "sex"},
    "codes": {"sex": {"1": "m", "2": "f"}, "ill": {"0": "no", "1": "yes"}},
    "missing": {"*": ["?"], "bmi": ["-9"]},
}


def plain(rows: list[tuple[Any, ...]] = PLAIN) -> str:
    return "age,bmi,sex,pain,ill\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def german(rows: list[tuple[Any, ...]] = PLAIN) -> bytes:
    """The same, as another hospital writes it."""
    said = {"f": "2,0", "m": "1", "no": "0", "yes": "1"}
    lines = [
        f"{age};{bmi:,.3f};{said[sex]};{pain},0;{said[ill]}".replace(",.", ".")
        for age, bmi, sex, pain, ill in rows
    ]
    lines = [
        ";".join(
            field.replace(",", "§").replace(".", ",").replace("§", ".") if i == 1 else field
            for i, field in enumerate(line.split(";"))
        )
        for line in lines
    ]
    return "\n".join(["ALTER;Größe;SEX;pain;ill", *lines]).encode("cp1252")


def load(task: DeclaredTask, data: str, **options: Any) -> Any:
    return task.load({"data": data, "test-share": 0.25, **options})


def both(data: Any) -> Any:
    return np.concatenate([data.x_train, data.x_test])


def test_a_table_in_another_dialect_is_the_same_table(tmp_path: Path) -> None:
    rows = [(row[0], row[1] * 1000, *row[2:]) for row in PLAIN]
    task = declared(tmp_path, HEART)
    one = load(task, table(tmp_path, plain(rows)))
    (tmp_path / "other.csv").write_bytes(german(rows))
    assert b"25.500,000" in german(rows)
    two = load(task, str(tmp_path / "other.csv"), **OWN)
    for key in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(one, key), getattr(two, key))
    assert task.notes() == [] and task.warnings() == []


def test_codes_of_parquet_columns_are_compared_as_what_they_say(tmp_path: Path) -> None:
    columns = {
        "bmi": pa.array([f" {row[1]}" for row in PLAIN], pa.large_string()),
        "age": pa.array([-9.0 if i == 2 else row[0] for i, row in enumerate(PLAIN)], pa.float64()),
        "sex": pa.array([2 if row[2] == "f" else 1 for row in PLAIN], pa.int8()),
        "pain": pa.array([float(row[3]) for row in PLAIN], pa.float32()),
        "ill": [row[4] == "yes" for row in PLAIN],
    }
    parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    codes = {"sex": {"1": "m", "2": "f"}, "ill": {"false": "no", "true": "yes"}}
    task = declared(tmp_path, HEART)
    found = load(task, str(tmp_path / "d.parquet"), codes=codes, missing={"age": -9})
    assert task.notes() == ["age: 1 missing in d.parquet, replaced by the mean"]
    assert task.warnings() == []
    rows = [("?" if i == 2 else row[0], *row[1:]) for i, row in enumerate(PLAIN)]
    same = load(task, table(tmp_path, plain(rows)), missing=["?"])
    np.testing.assert_array_equal(found.x_train, same.x_train)
    np.testing.assert_array_equal(found.y_test, same.y_test)


def test_a_code_is_missing_only_where_the_silo_says_so(tmp_path: Path) -> None:
    rows = [(-9 if i == 1 else row[0], -9 if i == 2 else row[1], *row[2:]) for i, row in
            enumerate(PLAIN)]  # fmt: skip
    task, data = declared(tmp_path, HEART), table(tmp_path, plain(rows))
    load(task, data)
    assert task.notes() == []
    load(task, data, missing={"bmi": ["-9.0"]})
    assert task.notes() == ["bmi: 1 missing in data.csv, replaced by the mean"]
    load(task, data, missing="-9")
    assert len(task.notes()) == 2


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        ("1,5", {}, r"'bmi' of .* contains '1,5' in row 3.*set the silo's option decimal = \",\""),
        ("1.5", {"decimal": ","}, r"contains '1\.5' in row 3, which is not a number"),
        ("1,50", {"thousands": ","}, r"contains '1,50' in row 3"),
        ("?", {}, r"'bmi' .*'\?' in row 3.*add it to the silo's option missing"),
        (
            "very long words of a doctor about it",
            {},
            r"contains 'very long words of a doc…' in row 3",
        ),
        ("two", {"columns": {"kg": "bmi"}}, r"'bmi' \('kg' in the file\) .* 'two' in row 3"),
    ],
)
def test_what_is_no_number_is_named_by_column_and_row(
    value: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    bmi = "kg" if "columns" in options else "bmi"
    text = f"age;{bmi};sex;pain;ill\n40;2;f;1;no\n41;3;f;1;yes\n428125;{value};f;4;no\n"
    task = declared(tmp_path, HEART)
    with pytest.raises(TaskError, match=said) as error:
        load(task, table(tmp_path, text), separator=";", **options)
    assert "428125" not in str(error.value), "nothing else of the row"


def test_a_file_with_another_separator_names_it_and_no_row(tmp_path: Path) -> None:
    text = "age;bmi;sex;pain;ill\n" + "77;1,5;f;1;no\n78;2;f;1;yes\n" * 5
    with pytest.raises(
        TaskError, match=r"separator seems to be ';': set separator = \";\""
    ) as error:
        load(declared(tmp_path, HEART), table(tmp_path, text))
    assert "77;" not in str(error.value)
    with pytest.raises(TaskError, match=r"has 6 fields in row 2, where .* has 5") as error:
        load(declared(tmp_path, HEART), table(tmp_path, plain().replace("41,", "41,5,")))
    assert "26.5" not in str(error.value)


def test_an_encoding_that_is_not_utf_8_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(plain().replace("f", "ü").encode("cp1252"))
    with pytest.raises(TaskError, match=r"is not UTF-8.*option encoding"):
        load(declared(tmp_path, HEART), str(tmp_path / "d.csv"))


def test_a_column_that_never_matches_is_refused_with_the_code(tmp_path: Path) -> None:
    wrong = plain().replace(",4,", ",typical,").replace(",1,", ",none,")
    task = declared(tmp_path, HEART)
    said = (
        r"20 of 20 values of 'pain' in data.csv match no declared category: 'none' in row 1 "
        r"and 6 more rows, 'typical' in row 2 and 12 more rows\. Declared: 1, 4"
    )
    with pytest.raises(TaskError, match=said):
        load(task, table(tmp_path, wrong))
    found = load(task, table(tmp_path, wrong), codes={"pain": {"typical": "4", "none": 1}})
    np.testing.assert_array_equal(both(found), both(load(task, table(tmp_path, plain()))))
    new = tmp_path / "one.csv"
    new.write_text("age,bmi,sex,pain\n50,25,f,none\n")
    asked = task.inputs(new, {"data": table(tmp_path, plain())})
    assert (asked.x[0, 4:] == 0).all() and "match no declared category" in asked.notes[0]


@pytest.mark.parametrize(
    ("text", "decimal", "code"),
    [
        ("4.0", ".", "4"), (" 4.00 ", ".", "4"), ("-9.0", ",", "-9"), ("4,00", ",", "4"),
        ("4.000", ",", "4.000"), ("4,0", ".", "4,0"), ("04", ".", "04"), ("4.5", ".", "4.5"),
        ("v4.0", ".", "v4.0"),
    ],
)  # fmt: skip
def test_what_counts_as_one_code(text: str, decimal: str, code: str) -> None:
    assert Dialect(decimal=decimal).code(text) == code


def test_many_values_are_not_compared_with_every_declared_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared, code = list[str](), Dialect.code

    def counted(own: Dialect, text: str) -> str:
        compared.append(text)
        return code(own, text)

    monkeypatch.setattr(Dialect, "code", counted)
    declaration = HEART.replace('["1", "4"]', str([str(i) for i in range(200)]))
    rows = [(*row[:3], f"{i} ", row[4]) for i, row in enumerate(PLAIN * 5)]
    load(declared(tmp_path, declaration), table(tmp_path, plain(rows)))
    assert len(compared) < 1_000


def test_codes_are_exact_before_they_are_numbers(tmp_path: Path) -> None:
    text = HEART.replace('["1", "4"]', '["4.0", "4"]')
    rows = [(*row[:3], "4.0" if i % 2 else "4", row[4]) for i, row in enumerate(PLAIN)]
    found = both(load(declared(tmp_path, text), table(tmp_path, plain(rows))))
    assert found[:, 4:].sum(axis=0).tolist() == [10, 10]


def test_values_beyond_declared_bounds_count_as_missing_or_are_refused(tmp_path: Path) -> None:
    text = HEART.replace("[categorical]", "[bounds]\nage = [0, 120]\n[categorical]")
    text = text.replace("[bounds]", 'indicators = ["age", "pain"]\n[bounds]')
    rows = [(6300 if i == 4 else row[0], *row[1:3], "" if i == 5 else row[3], row[4])
            for i, row in enumerate(PLAIN)]  # fmt: skip
    task = declared(tmp_path, text)
    found = both(load(task, table(tmp_path, plain(rows))))
    assert task.warnings() == [
        "1 of 20 values of 'age' in data.csv are outside the declared 0 to 120 (the first in "
        "row 5); they count as missing"
    ]
    assert found.shape == (20, 8) and found[:, 6:].sum(axis=0).tolist() == [1, 1]
    assert found[found[:, 6] == 1, 0] == 0 and np.abs(found[:, 0]).max() < 3
    months = [(row[0] * 12, *row[1:]) for row in PLAIN]
    with pytest.raises(TaskError, match=r"20 of 20 values of 'age' .* Is it in the declared unit"):
        load(task, table(tmp_path, plain(months)))


def test_columns_that_say_nothing_are_warned_of(tmp_path: Path) -> None:
    rows = [(30, "" if i > 1 else row[1], "f", "", row[4]) for i, row in enumerate(PLAIN * 3)]
    task = declared(tmp_path, HEART)
    load(task, table(tmp_path, plain(rows)), seed=1)
    assert [warning.split(" in ")[0] for warning in task.warnings()] == [
        "age is the same", "bmi is empty", "sex is the same", "pain is empty",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decimal": ";"}, r"decimal must be one of '\.', ','. Got ';'"),
        ({"decimal": ",", "thousands": ","}, "decimal and thousands must differ"),
        ({"separator": ";;"}, "separator must be one character"),
        ({"encoding": "klingon"}, "encoding must be one that Python supports,"),
        ({"columns": {"AGE": "years"}}, "option columns names 'years', which is not a column"),
        ({"columns": {"AGE": "age"}}, "has no column 'AGE'.* Correct 'AGE' under"),
        ({"columns": ["AGE"]}, "option columns must be a table of texts"),
        ({"codes": {"sex": {"1": "male"}}}, "gives 'male' for column 'sex', which is not declared"),
        ({"codes": {"ill": {"1": "maybe"}}}, "gives 'maybe' for column 'ill'"),
        ({"codes": {"1": "f"}}, "option codes must have a table per column"),
        ({"codes": {"sex": {"1": "f", "1.0": "m"}}}, "gives '1' of column 'sex' two meanings"),
        ({"codes": "{"}, "option codes is not JSON"),
        ({"missing": {"years": ["?"]}}, "option missing names 'years'"),
        ({"pass-through": [["id"]]}, "option pass-through must be a list"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said):
        load(declared(tmp_path, HEART), table(tmp_path, plain()), **options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[bounds]\nsex = [0, 1]", "bounds names 'sex', which is not a numeric column"),
        ("[bounds]\nage = [9, 1]", "lower of the bounds of 'age' must come first"),
        ('indicators = ["ill"]', "indicators names 'ill'"),
        ('metric = "auprc"', "metric must be one of error, .* or loss for a target of kind class"),
    ],
)
def test_a_wrong_declaration_is_named(change: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=said):
        declared(tmp_path, TABLE.replace("[categorical]", change + "\n[categorical]"))


def test_tables_in_silo_toml_reach_the_task_and_columns_pass_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heart.toml").write_text(HEART)
    (tmp_path / "own.csv").write_bytes(german())
    home = create(
        tmp_path / "a", "a", task=str(tmp_path / "heart.toml"), data=tmp_path / "own.csv"
    ).folder
    config = (home / "silo.toml").read_text()
    tables = """
separator = ";"
decimal = ","
thousands = "."
encoding = "cp1252"
pass-through = ["Patient, Nr.", "ALTER"]
[data.columns]
ALTER = "age"
"Größe" = "bmi"
SEX = "sex"
[data.codes.sex]
1 = "m"
2 = "f"
[data.codes.ill]
0 = "no"
1 = "yes"
[data.missing]
"*" = ["?"]
[policy]"""
    (home / "silo.toml").write_text(config.replace("[policy]", tables))
    settings = Home(home).settings()
    assert SiloSettings.from_node_config(settings.to_node_config(), node_id=0) == settings
    assert json.loads(str(settings.options["codes"]))["sex"] == {"1": "m", "2": "f"}
    assert silo(["check", "--home", str(home)]) == 0
    out = capsys.readouterr().out
    assert re.findall("^warning .*", out, re.MULTILINE)[1:] == [
        "warning   only 16 training samples: a model learns little from so few samples",
        "warning   only 4 test samples: measurements on so few samples are uncertain",
    ]


def test_columns_to_copy_come_as_they_are(tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text('age,bmi,sex,pain,"Patient, Nr."\n?,25,f,1,007\n50,,m,4,"a ""b"""\n')
    task = declared(tmp_path, HEART)
    options = {"data": table(tmp_path, plain()), "missing": "?", "pass-through": "Patient, Nr."}
    assert task.inputs(new, options).passed == {"Patient, Nr.": ["007", 'a "b"']}
    with pytest.raises(TaskError, match="has no column 'id'"):
        task.inputs(new, {**options, "pass-through": ["id"]})
    # Of the silo's own test data too: of each test row what stands in that row of the file.
    own = {**options, "pass-through": ["id", "age"], "test-share": 0.3}
    (tmp_path / "rows.csv").write_text(
        "id,age,bmi,sex,pain,ill\n"
        + "".join(f"p{i},{20 + i},25,f,1,{'yes' if i % 2 else 'no'}\n" for i in range(20))
    )
    own |= {"data": str(tmp_path / "rows.csv")}
    passed = task.passed_through(own)
    assert len(passed["id"]) == 6 == len(task.load(own).x_test)
    assert [f"p{int(age) - 20}" for age in passed["age"]] == passed["id"]
    raw = task.load(own).x_test[:, 0]
    assert np.argsort(raw).tolist() == np.argsort([int(age) for age in passed["age"]]).tolist()
    assert task.passed_through({**own, "test-data": str(tmp_path / "rows.csv")})["id"][0] == "p0"
    assert list(csv.reader(new.open()))[1][4] == "007"


def test_a_silo_predicts_in_its_own_dialect_with_its_patients_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heart.toml").write_text(HEART)
    made = {}
    for name, content in (("plain", plain().encode()), ("german", german())):
        (tmp_path / f"{name}.csv").write_bytes(content)
        home = create(
            tmp_path / name, "a", task=str(tmp_path / "heart.toml"), data=tmp_path / f"{name}.csv"
        )
        config = tmp_path / name / "silo.toml"
        if name == "german":
            settings = "".join(f"{key} = {_toml(value)}\n" for key, value in OWN.items())
            settings += 'pass-through = ["Nr", "SEX"]\n[policy]'
            config.write_text(config.read_text().replace("[policy]", settings))
        made[name] = Home(home.folder).settings().to_node_config()
        run(tmp_path / f"runs-{name}" / "run-1", [made[name]], task="heart", local_epochs=2)
    new = tmp_path / "new.csv"
    new.write_bytes(
        "Nr;SEX;ALTER;Größe;pain\n0012;2;61;?;4,0\n0013;1,0;70;31,5;1\n".encode("cp1252")
    )
    assert silo(["predict", "--home", str(tmp_path / "german"), "--input", str(new)]) == 0
    german_rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert german_rows[0] == ["sample", "Nr", "SEX", "class", "p_no", "p_yes"]
    assert [row[1:3] for row in german_rows[1:]] == [["0012", "2"], ["0013", "1,0"]]
    new.write_text("age,bmi,sex,pain\n61,,f,4\n70,31.5,m,1\n")
    assert silo(["predict", "--home", str(tmp_path / "plain"), "--input", str(new)]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert [row[1:] for row in rows[1:]] == [row[3:] for row in german_rows[1:]]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def test_tables_of_options_may_stand_in_the_files_of_simulations_and_comparisons(
    tmp_path: Path,
) -> None:
    (tmp_path / "heart.toml").write_text(HEART)
    (tmp_path / "own.csv").write_bytes(german())
    own = "options = " + _toml({"data": "own.csv", **OWN})
    file = tmp_path / "compare.toml"
    file.write_text(
        'task = "heart.toml"\nseeds = [0]\n[[strategies]]\nstrategy = "fedavg"\n'
        + "".join(f'[[silos]]\nname = "{name}"\n{own}\n' for name in "ab")
    )
    silos = read_comparison(file).file.silos
    assert not isinstance(silos, int)
    data: Any = declared(tmp_path, HEART).load(silos[0].options)
    assert len(both(data)) == 20
    file.write_text(f"silos = 2\n{own}\n")
    assert Simulation.read(file).options["codes"] == silos[1].options["codes"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {5: -9, 9: -9},
            "age has only one value below 0, in 2 training rows (the first is row 6). If",
        ),
        (
            {5: -0.25, 9: -0.25},
            "age has only one value below 0, in 2 training rows (the first is row 6)",
        ),
        ({5: -999}, "age has only one value below 0, in row 6."),
        ({5: -88}, "age has only one value below 0, in row 6."),
        ({5: -1}, "age has only one value below 0, in row 6."),
        ({5: -0.37}, ""),
        ({5: -2}, ""),
        ({5: -12}, ""),
        ({5: 6300}, "age is very far from all other values in row 6. If"),
        ({5: 130}, ""),
        ({i: -i for i in range(20)}, ""),
    ],
)
def test_numbers_that_are_probably_codes_or_slips_are_told_by_row(
    change: dict[int, float], said: str, tmp_path: Path
) -> None:
    ages = {i: 40 + i % 20 for i in range(80)} | change
    rows = [(ages[i], *PLAIN[i % 20][1:]) for i in range(80)]
    task, test = declared(tmp_path, HEART), table(tmp_path, plain(), name="test.csv")
    task.load({"data": table(tmp_path, plain(rows)), "test-data": test})
    assert [line for line in task.warnings() if said and said in line] or not said
    assert bool(said) == bool(task.warnings()) and "6300" not in str(task.warnings())


def series(length: int, *, classes: bool) -> list[Any]:
    slow = np.sin(np.arange(length) / 6) + np.random.default_rng(0).normal(0, 0.2, length)
    return np.where(slow > 0, "yes", "no").tolist() if classes else slow.round(3).tolist()


@pytest.mark.parametrize("classes", [True, False])
def test_rows_in_the_order_of_time_are_noticed_unless_blocks_say_so(
    classes: bool, tmp_path: Path
) -> None:
    target = 'target = "y"\nclasses = ["no", "yes"]' if classes else (
        'target = {kind = "number", columns = ["y"]}'
    )  # fmt: skip
    task = declared(
        tmp_path, f'kind = "table"\nname = "load"\n{target}\nnumeric = ["x"]\nnetwork = "mclr"'
    )
    over_time = series(400, classes=classes)
    shuffled = np.random.default_rng(1).permutation(over_time).tolist()

    def warnings(values: list[Any], **options: Any) -> list[str]:
        rows = [f"{i * 7 % 31},{y},{i // 40}" for i, y in enumerate(values)]
        load(task, table(tmp_path, "\n".join(["x,y,month", *rows])), **options)
        return task.warnings()

    (said,) = warnings(over_time)
    assert said.startswith("neighbouring rows of the file have similar targets (correlation 0.")
    assert "Set blocks under [data] in silo.toml" in said
    for quiet in (shuffled, sorted(over_time), sorted(over_time)[::-1]):
        assert warnings(quiet) == []
    assert warnings(over_time, blocks="month") == warnings(over_time, group="month") == []
