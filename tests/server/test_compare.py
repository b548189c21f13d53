"""``coterie compare``: its figures by hand, what it refuses, and from file to table."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import wilcoxon

from coterie.server.runs.record import run_of
from coterie.server.study.compare import compare, read
from coterie.server.study.comparison import (
    Measure,
    cells,
    holm,
    markdown,
    measure,
    paired_p,
    plain,
    rows,
)
from coterie.strategies.errors import EXIT_CONFIG, FederationError


def made(errors: dict[str, float], curve: list[float] | None = None) -> Measure:
    """A run with these errors at the end, and this mean error after rounds 1, 2, …"""
    course = tuple(enumerate(curve or [], start=1))
    return Measure(errors, course, (("a",), ("b", "c")), 2_000_000, 3.0, 2.0)


ALONE = {0: made({"a": 0.3, "b": 0.5, "c": 0.4}), 1: made({"a": 0.2, "b": 0.6, "c": 0.4})}
GOOD = {
    0: made({"a": 0.1, "b": 0.2, "c": 0.3}, [0.5, 0.3, 0.2]),
    1: made({"a": 0.2, "b": 0.3, "c": 0.1}, [0.6, 0.4, 0.35]),
}
TWO = {"alone": ALONE, "good": GOOD}


# ---------------------------------------------------------------- figures


def test_a_row_is_the_figures_by_hand() -> None:
    alone, good = rows(TWO, alone="alone", target=0.3)
    assert good.error == pytest.approx(0.2) and good.error_std == pytest.approx(0.0)
    assert alone.error == pytest.approx(0.4) and alone.error_std == pytest.approx(0.0)
    assert good.silo_std == pytest.approx(np.std([1, 2, 3]) / 10)
    assert good.worst == pytest.approx(0.3) and alone.worst == pytest.approx(0.55)
    assert good.ipr == pytest.approx((1 + 2 / 3) / 2)  # seed 1: a is not better
    gains = [[0.2, 0.3, 0.1], [0.0, 0.3, 0.3]]
    assert good.rsd == pytest.approx(np.mean([np.std(g) for g in gains]))
    assert (good.rounds_to_target, good.reached, good.seeds) == (2, 1, 2)
    assert (good.num_groups, good.megabytes, good.seconds, good.silo_seconds) == (2, 2, 3, 2)
    assert math.isnan(alone.ipr) and math.isnan(alone.rounds_to_target) and alone.reached == 0


def test_the_best_row_has_no_p_and_the_others_have_wilcoxons() -> None:
    alone, good = rows(TWO, alone="alone", target=None)
    assert math.isnan(good.p) and good.reached is None
    differences = [0.2, 0.3, 0.1, 0.0, 0.3, 0.3]
    assert alone.p == pytest.approx(wilcoxon(differences, zero_method="pratt").pvalue)
    assert cells(good)[-1] == "best" and cells(alone)[-1] == f"{alone.p:.3f}"


def test_equal_runs_do_not_differ_and_unpaired_silos_play_no_part() -> None:
    assert paired_p(GOOD, GOOD) == 1.0
    more = {**GOOD, 0: made({**GOOD[0].errors, "d": 0.9}), 7: made({"a": 1.0})}
    assert paired_p(more, GOOD) == 1.0
    assert paired_p({0: GOOD[0]}, {1: GOOD[1]}) == 1.0


def test_equal_differences_count_as_equal_whatever_their_last_bits() -> None:
    """Shares of ten test samples: the differences are ±0.1 and 0.2, and nothing else."""
    one, other = [3, 2, 9, 7, 4, 8, 6], [2, 1, 7, 8, 3, 9, 4]
    assert len({(a / 10) - (b / 10) for a, b in zip(one, other, strict=True)}) > 3
    first = {0: made({str(i): n / 10 for i, n in enumerate(one)})}
    second = {0: made({str(i): n / 10 for i, n in enumerate(other)})}
    tenths = [(a - b) for a, b in zip(one, other, strict=True)]
    assert paired_p(first, second) == wilcoxon(tenths, zero_method="pratt").pvalue


def test_holm_is_the_textbook_s() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_one_seed_has_no_deviation_and_json_no_nan() -> None:
    (row,) = rows({"alone": {0: ALONE[0]}}, alone="alone", target=None)
    assert cells(row)[1] == "40.0"
    assert json.loads(json.dumps(plain(row), allow_nan=False))["error-std"] is None


@pytest.mark.parametrize("secretive", ["a", "ab"])
def test_a_silo_that_tells_no_error_is_in_no_figure(secretive: str) -> None:
    def told(error: float) -> dict[str, dict[str, float | None]]:
        return {name: {"error": None if name in secretive else error} for name in "ab"}

    common = {"groups": [["a", "b"]], "seconds": {}, "silos": {}, "phases": {}}
    record = {
        "rounds": [{"round": 1, "evaluation-after": told(0.3), **common}],
        "final-evaluation": told(0.25),
        "final-groups": [["a", "b"]],
    }
    own = measure(run_of(record))
    seen = [name for name in "ab" if name not in secretive]
    assert dict(own.errors) == dict.fromkeys(seen, 0.25)
    assert own.curve == (((1, 0.3),) if seen else ())
    measures = {"secret": {0: own}, "open": {0: made({"a": 0.5, "b": 0.5})}}
    lines = markdown(rows(measures, alone="open", target=None)).splitlines()
    figures = "25.0" if seen else "–"
    assert lines[2 if seen else 3].startswith(f"| secret | {figures} |")


def test_the_table_has_the_best_first() -> None:
    lines = markdown(rows(TWO, alone="alone", target=0.3)).splitlines()
    assert lines[2].startswith("| good | 20.0 ± 0.0 ") and lines[3].startswith("| alone |")
    assert "| 2 (1 of 2) |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1


def test_a_record_is_read_with_the_bytes_of_every_exchange() -> None:
    silo = {"bytes-sent": 10, "bytes-received": 5, "seconds": 0.5}
    entry = {
        "round": 1,
        "silos": {"a": silo, "b": {**silo, "seconds": None}},
        "phases": {"evaluate.training": {"bytes-sent": 7, "bytes-received": 0}},
        "seconds": {"train": 1.0, "aggregate": 0.25},
        "evaluation-after": {"a": {"error": 0.5}, "b": {"error": 0.25}},
    }
    found = measure(
        run_of(
            {
                "rounds": [entry],
                "final-evaluation": {"a": {"error": 0.5}, "b": {"error": 0.0}},
                "final-groups": [["a", "b"]],
            }
        )
    )
    assert found.num_bytes == 37 and found.seconds == 1.25 and found.silo_seconds == 0.5
    assert found.mean == 0.25 and found.curve == ((1, 0.375),)
    assert found.rounds_to(0.4) == 1 and found.rounds_to(0.1) is None


def test_work_beside_the_training_costs_bytes_and_the_silos_seconds() -> None:
    silo = {"bytes-sent": 10, "bytes-received": 5, "seconds": 0.5}
    trial = {"bytes-sent": 40, "bytes-received": 20, "silo-seconds": 2.0}
    after = {"bytes-sent": 100, "bytes-received": 0, "silo-seconds": 0.0}
    entry = {"round": 1, "silos": {"a": silo}, "phases": {"trial": trial}, "seconds": {}}
    found = measure(
        run_of(
            {
                "rounds": [entry],
                "final-phases": {"train.ensemble": after},
                "final-evaluation": {"a": {"error": 0.5}},
                "final-groups": [["a"]],
            }
        )
    )
    assert found.num_bytes == 175 and found.silo_seconds == 2.5


# ---------------------------------------------------------------- the file

SILOS = """
[[silos]]
name = "a"
options = { train = 20, test = 20 }
[[silos]]
name = "b"
options = { train = 30, test = 20, skip = 40 }
"""
RUN = """
[run]
rounds = 2
local-epochs = 1
"""
FEDAVG = """
[[strategies]]
strategy = "fedavg"
"""
IFCA = """
[[strategies]]
name = "IFCA, K 2"
strategy = "ifca"
num-groups = 2
"""
WHOLE = 'title = "A try"\nseeds = [0, 3]\ntarget = 0.99\n' + SILOS + RUN + FEDAVG + IFCA


def written(folder: Path, text: str) -> Path:
    file = folder / "try.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_becomes_runs_with_training_alone_added(tmp_path: Path) -> None:
    comparison = read(written(tmp_path, WHOLE))
    assert list(comparison.runs) == ["alone", "fedavg", "IFCA, K 2"]
    keys = comparison.keys("IFCA, K 2", 3)
    assert (keys["strategy"], keys["seed"], keys["num-groups"], keys["rounds"]) == ("ifca", 3, 2, 2)
    assert keys["min-silos"] == 2
    assert comparison.silos(3)[1].options == {"split-seed": 3, "train": 30, "test": 20, "skip": 40}


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert read(written(tmp_path, "\ufeff" + WHOLE)).file.title == "A try"


def test_silos_can_be_cut_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    text = 'task = "mnist"\ndata = "d"\nsilos = 12\nseeds = [5]\n'
    text += '[split]\nkind = "dirichlet"\nalpha = 0.5\ntest-share = 0.1\n[options]\ntrain = 9\n'
    file = written(tmp_path, text + FEDAVG)
    (first, *_, last) = read(file).silos(5)
    assert (first.name, last.name) == ("silo-00", "silo-11")
    assert last.options == {
        "split-seed": 5,
        "data": str(tmp_path / "d"),
        "train": 9,
        "split": "dirichlet",
        "split-alpha": 0.5,
        "test-share": 0.1,
        "silos": 12,
        "silo": 11,
    }
    monkeypatch.setenv("COTERIE_DATA", "/elsewhere")
    assert read(file).silos(5)[0].options["data"] == "/elsewhere"
    assert read(file, data=tmp_path / "x").silos(5)[0].options["data"] == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seeds = [0\n", "is not TOML"),
        (WHOLE.replace("seeds = [0, 3]", "seeds = []"), "seeds"),
        (WHOLE.replace("seeds = [0, 3]", "seeds = [3, 3]"), "seeds must differ"),
        (WHOLE.replace("seeds = [0, 3]", ""), "key 'seeds' is missing"),
        (
            WHOLE.replace("target", "tarjet"),
            r"unknown key 'tarjet' \(known: data, label-counts, options",
        ),
        (WHOLE.replace("0.99", "7"), "target"),
        (WHOLE.replace('name = "b"', 'name = "a"'), "two silos are called 'a'"),
        (WHOLE.replace('name = "b"', 'name = "b b"'), "a silo's name has letters"),
        (WHOLE + '[split]\nkind = "iid"\n', "goes with silos as a number"),
        ("silos = 3\nseeds = [0]\n" + FEDAVG, r"need a \[split\] with its kind"),
        (
            'silos = 3\nseeds = [0]\n[split]\nkind = "iid"\nalfa = 1\n' + FEDAVG,
            r"\[split\] has no key 'alfa'. It has kind, alpha",
        ),
        (WHOLE + FEDAVG, "two strategies are called 'fedavg'"),
        (WHOLE + "[[strategies]]\nname = 'x'\n", "needs a 'strategy'"),
        (WHOLE.replace('"ifca"', '"ifka"'), "strategy 'IFCA, K 2': the run's configuration"),
        (WHOLE.replace("num-groups = 2", "num-grups = 2"), "unknown key 'num-grups'"),
        (WHOLE.replace("num-groups = 2", "seed = 2"), "key 'seed' is the comparison's own"),
        (WHOLE.replace("rounds = 2", 'rounds = 2\nstrategy = "hcct"'), "key 'strategy' is the"),
        (WHOLE.replace("rounds = 2", 'rounds = 2\nalone = "x"'), "key 'alone' is the comparison's"),
        (
            WHOLE.replace('"ifca"', '"flsc"').replace("num-groups = 2", "num-groups = 1"),
            "soft-groups must be at most num-groups = 1. Got 2",
        ),
        (
            WHOLE.replace('"ifca"', '"fedgroup"').replace("num-groups = 2", "num-groups = 3"),
            "num-groups must be at most 2, the silos of round 1. Got 3",
        ),
        (
            WHOLE.replace('"ifca"', '"fedgen"').replace("num-groups = 2\n", ""),
            "fedgen needs the label counts of every silo, so the file needs `label-counts = true`",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said_before_anything_runs(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(FederationError, match=reason) as caught:
        read(written(tmp_path, text))
    assert caught.value.exit_code == EXIT_CONFIG
    assert "try.toml" in str(caught.value)


def test_a_file_that_is_not_there_and_data_for_a_file_without(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="cannot be read"):
        read(tmp_path / "none.toml")
    with pytest.raises(FederationError, match="has no key 'data', so --data has no use"):
        read(written(tmp_path, WHOLE), data=tmp_path)


# ---------------------------------------------------------------- running


def go(file: Path, folder: Path, **more: Any) -> tuple[str, list[Any]]:
    out = io.StringIO()
    table = compare(Console(file=out, width=200), file, folder=folder, **more)
    return out.getvalue(), table


def test_from_file_to_table_and_only_what_is_missing_the_second_time(tmp_path: Path) -> None:
    file, folder = written(tmp_path, WHOLE), tmp_path / "out"
    said, table = go(file, folder)
    assert [row.name for row in table] == ["alone", "fedavg", "IFCA, K 2"]
    assert said.count("mean error") >= 6 and "A try: 3 strategies, 2 silos in this process" in said
    page = (folder / "comparison.md").read_text(encoding="utf-8")
    assert page.startswith("# A try\n") and "| IFCA, K 2 |" in page
    content = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["table"]] == ["alone", "fedavg", "IFCA, K 2"]
    assert {(run["name"], run["seed"]) for run in content["runs"]} == {
        (name, seed) for name in ("alone", "fedavg", "IFCA, K 2") for seed in (0, 3)
    }
    for row in content["table"]:
        means = [
            np.mean(list(run["errors"].values()))
            for run in content["runs"]
            if run["name"] == row["name"]
        ]
        assert row["error"] == pytest.approx(np.mean(means))
    again, second = go(file, folder)
    assert "seed 0," not in again
    assert [row.error for row in second] == [row.error for row in table]
    changed = written(tmp_path, WHOLE.replace("num-groups = 2", "num-groups = 3"))
    third, _ = go(changed, folder)
    assert third.count("  seed ") == 2 and "IFCA, K 2" in third
    other = written(tmp_path, WHOLE.replace("train = 30", "train = 31"))
    with pytest.raises(FederationError, match="holds a comparison over other silos"):
        go(other, folder)


def test_every_record_is_compared_with_the_run_alone_of_its_seed(tmp_path: Path) -> None:
    """Also where the file lists that run last."""
    alone = '[[strategies]]\nname = "own"\nstrategy = "independent"\n'
    file, folder = written(tmp_path, WHOLE + alone), tmp_path / "out"
    said, table = go(file, folder)
    assert said.index("seed 0, own") < said.index("seed 0, fedavg")
    by_name = {row.name: row for row in table}
    for label, name in (("fedavg", "fedavg"), ("IFCA-K-2", "IFCA, K 2")):
        figures = []
        for seed in (0, 3):
            (path,) = (folder / "records").glob(f"{label}-*-seed{seed}/run.json")
            record = json.loads(path.read_text(encoding="utf-8"))
            assert Path(record["config"]["alone"]).name.endswith(f"-seed{seed}")
            figures.append(record["collaboration"])
        assert np.mean([f["ipr"] for f in figures]) == pytest.approx(by_name[name].ipr)
        assert np.mean([f["rsd"] for f in figures]) == pytest.approx(by_name[name].rsd)
    (path,) = (folder / "records").glob("own-*-seed0/run.json")
    assert "collaboration" not in json.loads(path.read_text(encoding="utf-8"))


def test_fedgen_is_compared_where_the_file_lets_silos_tell_their_label_counts(
    tmp_path: Path,
) -> None:
    fedgen = '[[strategies]]\nstrategy = "fedgen"\ngenerator-steps = 2\n'
    text = "seeds = [0]\n" + SILOS + RUN + fedgen
    _, table = go(written(tmp_path, "label-counts = true\n" + text), tmp_path / "with")
    assert {row.name for row in table} == {"alone", "fedgen"}
    (spec, _) = read(written(tmp_path, "label-counts = true\n" + text)).silos(0)
    assert "--share-label-counts" in spec.arguments("x:1", tmp_path)


def test_the_same_seed_gives_the_same_errors_in_another_folder(tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE.replace("[0, 3]", "[1]"))
    _, one = go(file, tmp_path / "one")
    _, other = go(file, tmp_path / "other")
    assert [(r.error, r.worst, r.ipr) for r in one[1:]] == [
        (r.error, r.worst, r.ipr) for r in other[1:]
    ]


def test_silos_that_cannot_open_their_data_say_why(tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE.replace("skip = 40", "skip = 4000"))
    with pytest.raises(FederationError, match=r"silo .b.: skip \+ train \+ test must be in"):
        go(file, tmp_path / "out")


DECLARED = """
task = "study.toml"
seeds = [0]
[[silos]]
name = "a"
options = { data = "a.npz" }
[[silos]]
name = "b"
options = { data = "b.npz" }
"""


STUDY = 'kind = "npz"\nname = "study"\nclasses = ["no", "yes"]\nshape = [3]\nnetwork = "mclr"\n'


def declared(folder: Path) -> None:
    """The declaration, and data of two silos."""
    (folder / "study.toml").write_text(STUDY)
    rng = np.random.default_rng(0)
    for name in "ab":
        x = rng.normal(size=(60, 3)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(int))


def test_silos_of_a_declared_task_are_compared(tmp_path: Path) -> None:
    declared(tmp_path)
    text = DECLARED + RUN + FEDAVG
    _, table = go(written(tmp_path, text), tmp_path / "out")
    assert {row.name for row in table} == {"alone", "fedavg"}
    assert all(0 <= row.error < 0.5 for row in table)
    cut = 'task = "study.toml"\nseeds = [0]\nsilos = 3\n[split]\nkind = "iid"\n' + RUN + FEDAVG
    with pytest.raises(FederationError, match=r"cannot be cut into silos. List them"):
        read(written(tmp_path, cut))
    (tmp_path / "study.toml").unlink()
    with pytest.raises(FederationError, match=r"try.toml: .*study.toml"):
        read(written(tmp_path, text))


def test_a_changed_declaration_or_changed_data_is_another_comparison(tmp_path: Path) -> None:
    """Otherwise one table would hold results of two problems."""
    declared(tmp_path)
    file = written(tmp_path, DECLARED + RUN + FEDAVG)
    go(file, tmp_path / "out")
    (tmp_path / "study.toml").write_text(STUDY.replace("mclr", "mlp"))
    with pytest.raises(FederationError, match="the task's declaration or files of the data"):
        go(file, tmp_path / "out")
    (tmp_path / "study.toml").write_text(STUDY)
    assert "  seed" not in go(file, tmp_path / "out")[0]
    os.utime(tmp_path / "b.npz", (0, 0))
    with pytest.raises(FederationError, match="the task's declaration or files of the data"):
        go(file, tmp_path / "out")


@pytest.mark.parametrize("place", ['data = "~typo/d"', 'task = "~typo/study.toml"'])
def test_a_place_in_a_home_that_nobody_has_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"try.toml: '~typo/.* names no place"):
        read(written(tmp_path, f"{place}\n{WHOLE}"))


@pytest.mark.parametrize("title", ["x [/docs] y", "Our [b] study"])
def test_a_title_and_a_folder_are_text_whatever_is_in_them(title: str, tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE.replace("A try", title).replace("[0, 3]", "[0]"))
    said, _ = go(file, tmp_path / "out [test]")
    assert said.startswith(f"{title}: 3 strategies") and "out [test]/" in said
