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
from scipy.stats import t as student
from scipy.stats import ttest_rel, wilcoxon

from coterie.server.runs.record import read_whole, run_of
from coterie.server.runs.record.metrics import Lead
from coterie.server.study import playing
from coterie.server.study.compare import compare, print_comparison, read
from coterie.server.study.comparison import (
    Advice,
    Measure,
    Repeat,
    advise,
    best_of,
    cells,
    columns,
    corrected,
    difference,
    markdown,
    measure,
    rows,
)
from coterie.server.study.result import load
from coterie.strategies.errors import EXIT_CONFIG, EXIT_RUN, FederationError
from coterie.system.commandline import plain
from coterie.system.files import locked
from coterie.tasks.own.declared import load_declared
from tests.commands import coterie
from tests.tables import declaration


def made(
    errors: dict[str, float], curve: list[float] | None = None, ratio: float = 0.25, **more: Any
) -> Measure:
    """A run with these errors at the end, and this mean error after rounds 1, 2, …"""
    course = tuple(enumerate(curve or [], start=1))
    counts = {"trained": dict.fromkeys(errors, 400.0)}
    counts["tested"] = {name: round(400 * ratio) for name in errors}
    return Measure(errors, course, (("a",), ("b", "c")), 2_000_000, 3.0, 2.0, **counts, **more)


S0, S1 = Repeat(0), Repeat(1)
ALONE = {S0: made({"a": 0.3, "b": 0.5, "c": 0.4}), S1: made({"a": 0.2, "b": 0.6, "c": 0.4})}
GOOD = {
    S0: made({"a": 0.1, "b": 0.2, "c": 0.3}, [0.5, 0.3, 0.2]),
    S1: made({"a": 0.2, "b": 0.3, "c": 0.1}, [0.6, 0.4, 0.35]),
}
TWO = {"alone": ALONE, "good": GOOD}
ERROR = Lead()


def over_seeds(*means: float, silos: str = "ab", **more: Any) -> dict[Repeat, Measure]:
    """Runs in which every silo has the same error."""
    return {Repeat(i): made(dict.fromkeys(silos, m), **more) for i, m in enumerate(means)}


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
    assert good.gain == pytest.approx(0.2)
    assert (good.better, good.compared) == (3, 3), "over both seeds, a is better, too"
    assert (good.rounds_to_target, good.reached, good.seeds) == (2, 1, 2)
    assert (good.num_groups, good.megabytes, good.seconds, good.silo_seconds) == (2, 2, 3, 2)
    assert math.isnan(alone.ipr) and math.isnan(alone.rounds_to_target) and alone.reached == 0


def test_the_difference_of_repeats_is_tested_by_the_corrected_resampled_t_test() -> None:
    """Bouckaert and Frank's formula, worked out by hand for five folds: n_test/n_train = 1/4."""
    worse, better = over_seeds(0.30, 0.34, 0.32, 0.36, 0.33), over_seeds(0.2, 0.2, 0.2, 0.2, 0.2)
    values = np.array([0.10, 0.14, 0.12, 0.16, 0.13])
    t = values.mean() / math.sqrt((1 / 5 + 0.25) * values.var(ddof=1))
    found = difference(worse, better)
    assert found.mean == pytest.approx(0.13)
    assert found.p == pytest.approx(2 * student.sf(t, 4))
    reach = found.mean / t * student.ppf(0.975, 4)
    assert (found.low, found.high) == pytest.approx((0.13 - reach, 0.13 + reach))
    usual = ttest_rel([m.mean for m in worse.values()], [m.mean for m in better.values()]).pvalue
    assert found.p > 2 * usual, "the usual test takes folds for independent samples"
    assert difference(better, worse).mean == -found.mean


def test_splits_of_the_same_samples_seldom_say_that_equal_strategies_differ() -> None:
    """Two rules of one quality, on ten splits of 100 samples: at most about one in twenty."""
    rng = np.random.default_rng(0)
    wrongly, usual = 0, 0
    for _ in range(300):
        wrong = rng.random((2, 100)) < 0.3  # of both rules, which samples they get wrong
        tests = [rng.choice(100, 20, replace=False) for _ in range(10)]
        one, other = (
            {Repeat(i): made({"a": own[rows].mean()}) for i, rows in enumerate(tests)}
            for own in wrong
        )
        wrongly += difference(one, other).p < 0.05
        usual += ttest_rel(*([m.mean for m in x.values()] for x in (one, other))).pvalue < 0.05
    assert wrongly <= 24 and usual > 60


def test_where_the_test_samples_stay_the_same_every_silo_counts_once() -> None:
    names = "abcdefgh"
    gains = [0.11, 0.02, 0.05, -0.01, 0.08, 0.03, 0.06, 0.04]
    one = {s: made(dict.fromkeys(names, 0.4)) for s in (S0, S1)}
    other = {s: made({n: 0.4 - g for n, g in zip(names, gains, strict=True)}) for s in (S0, S1)}
    found = difference(one, other, drawn=set())
    assert found.p == pytest.approx(wilcoxon(gains).pvalue)
    assert found.mean == pytest.approx(np.mean(gains)) and math.isnan(found.low)


def test_silos_whose_test_samples_stay_the_same_have_no_part_in_the_resampled_test() -> None:
    one = {S0: made({"a": 0.3, "b": 0.9}), S1: made({"a": 0.2, "b": 0.9})}
    other = {S0: made({"a": 0.1, "b": 0.1}), S1: made({"a": 0.1, "b": 0.1})}
    assert difference(one, other, drawn={"a"}).mean == pytest.approx(0.15)


def test_equal_runs_do_not_differ_and_unpaired_silos_play_no_part() -> None:
    assert difference(GOOD, GOOD).p == 1.0
    more = {**GOOD, S0: made({**GOOD[S0].errors, "d": 0.9}), Repeat(7): made({"a": 1.0})}
    assert difference(more, GOOD).p == 1.0
    assert math.isnan(difference({S0: GOOD[S0]}, {S1: GOOD[S1]}).p)


def test_one_run_or_the_same_difference_twice_is_no_evidence() -> None:
    """On few test samples the same difference comes twice by chance: its spread is unknown."""
    assert math.isnan(difference({S0: ALONE[S0]}, {S0: GOOD[S0]}).p)
    assert math.isnan(difference(over_seeds(0.3, 0.3), over_seeds(0.2, 0.2)).p)


def test_p_is_corrected_for_every_other_strategy() -> None:
    three = {
        "alone": over_seeds(0.3, 0.4, 0.32, 0.37),
        "x": over_seeds(0.25, 0.26, 0.22, 0.24),
        "y": over_seeds(0.2, 0.2, 0.2, 0.2),
    }
    alone, x, y = rows(three, alone="alone", target=None)
    assert math.isnan(y.p)
    assert alone.p == pytest.approx(min(1, 2 * difference(three["alone"], three["y"]).p))
    assert x.p == pytest.approx(min(1, 2 * difference(three["x"], three["y"]).p))
    assert corrected(0.7, 3) == 1.0


def test_one_seed_has_no_deviation_and_json_no_nan() -> None:
    (row,) = rows({"alone": {S0: ALONE[S0]}}, alone="alone", target=None)
    assert cells(row, ERROR)[1] == "40.0"
    assert json.loads(json.dumps(plain(row), allow_nan=False))["error-std"] is None


@pytest.mark.parametrize("secretive", ["a", "ab"])
def test_a_silo_that_tells_no_error_is_in_no_figure(secretive: str) -> None:
    def evaluations(error: float) -> dict[str, dict[str, float | None]]:
        return {name: {"error": None if name in secretive else error} for name in "ab"}

    common = {"groups": [["a", "b"]], "seconds": {}, "silos": {}, "phases": {}}
    record = {
        "rounds": [{"round": 1, "evaluation-after": evaluations(0.3), **common}],
        "final-evaluation": evaluations(0.25),
        "final-groups": [["a", "b"]],
    }
    own = measure(run_of(record))
    seen = [name for name in "ab" if name not in secretive]
    assert dict(own.errors) == dict.fromkeys(seen, 0.25)
    assert own.curve == (((1, 0.3),) if seen else ())
    measures = {"secret": {S0: own}, "open": {S0: made({"a": 0.5, "b": 0.5})}}
    lines = markdown(rows(measures, alone="open", target=None), ERROR).splitlines()
    figures = "25.0" if seen else "–"
    assert lines[2 if seen else 3].startswith(f"| secret | {figures} |")


def test_the_table_has_the_smallest_error_first_and_calls_nothing_best() -> None:
    lines = markdown(rows(TWO, alone="alone", target=0.3), ERROR).splitlines()
    assert lines[2].startswith("| good | 20.0 ± 0.0 ") and lines[3].startswith("| alone |")
    assert "| 2 (1 of 2) |" in lines[2] and "| 3 of 3 | +20.0 ± 11.2 |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1
    assert "best" not in "".join(lines)


@pytest.mark.parametrize(
    ("lead", "heads", "first"),
    [
        (Lead("auroc"), ["AUROC", "gain (points)"], ["0.800 ± 0.071", "0.750", "+15.0 ± 0.0"]),
        (Lead("mae", "days"), ["MAE (days)", "gain (days)"], ["0.2 ± 0.0707", "0.25", "+0.15 ± 0"]),
        (Lead(), ["error (%)", "gain (points)"], ["20.0 ± 7.1", "25.0", "+15.0 ± 0.0"]),
    ],
)
def test_the_table_speaks_of_the_metric_that_leads(
    lead: Lead, heads: list[str], first: list[str]
) -> None:
    errors = [{"a": 0.15, "b": 0.15}, {"a": 0.25, "b": 0.25}]
    good = {Repeat(i): made(own, lead=lead) for i, own in enumerate(errors)}
    alone = {s: made({n: e + 0.15 for n, e in m.errors.items()}) for s, m in good.items()}
    table = rows({"alone": alone, "good": good}, alone="alone", target=None)
    assert set(heads) <= set(columns(lead))
    worst = cells(table[1], lead)[3]
    assert [cells(table[1], lead)[1], cells(table[1], lead)[5]] == [first[0], first[2]]
    assert worst == lead.number(0.2)
    assert not {"IPR %", "RSD %", "error %"} & set(columns(lead))


# ---------------------------------------------------------------- the advice

BASE = over_seeds(0.30, 0.32, 0.31, 0.33, 0.30)
FAR = over_seeds(0.10, 0.13, 0.10, 0.12, 0.11)
NEAR = over_seeds(0.12, 0.11, 0.11, 0.13, 0.10)
NOISE = over_seeds(0.38, 0.20, 0.35, 0.22, 0.37)


def advice(**measures: dict[Repeat, Measure]) -> Advice:
    table = rows(measures, alone="alone", target=None)
    over = difference(measures["alone"], measures[best_of(measures)])
    return advise(table, alone="alone", over_alone=over, lead=ERROR)


def test_a_strategy_that_differs_from_all_others_is_advised_with_its_evidence() -> None:
    found = advice(alone=BASE, far=FAR)
    assert (found.strategy, found.apart) == ("far", True)
    assert found.text.startswith(
        "Recommendation: far. It differs from every other strategy (p < 0.001)."
    )
    assert "gains +20.0 points over local training (95% interval +1" in found.text
    assert "better at 2 of 2 silos" in found.text


def test_strategies_that_cannot_be_told_apart_are_named() -> None:
    found = advice(alone=BASE, far=FAR, near=NEAR)
    assert (found.strategy, found.apart) == ("far", False)
    assert "It does not differ significantly from near" in found.text
    assert found.text.endswith("far transfers the fewest bytes.")


def test_noise_is_never_better_than_training_alone() -> None:
    found = advice(alone=BASE, noise=NOISE)
    assert found.text.startswith("Recommendation: alone. noise gains +0.8 points over local")
    assert (found.strategy, found.apart) == ("alone", False)
    assert "does not differ significantly from local training" in found.text


def test_training_alone_is_advised_where_it_is_better() -> None:
    found = advice(alone=FAR, base=BASE)
    assert (found.strategy, found.apart) == ("alone", True)
    assert found.text.endswith("than local training; all others are worse.")
    assert (
        "the difference from noise is not significant"
        in advice(alone=BASE, noise=over_seeds(0.38, 0.29, 0.35, 0.28, 0.37)).text
    )


def test_one_run_of_each_is_no_ground_for_advice() -> None:
    found = advice(alone={S0: BASE[S0]}, far={S0: FAR[S0]})
    assert found.strategy == "" and "add seeds or folds" in found.text


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
    assert list(comparison.runs) == ["local", "fedavg", "IFCA, K 2"]
    keys = comparison.keys("IFCA, K 2", Repeat(3))
    assert (keys["strategy"], keys["seed"], keys["num-groups"], keys["rounds"]) == ("ifca", 3, 2, 2)
    assert keys["min-silos"] == 2
    assert comparison.silos(Repeat(3))[1].options == {
        "split-seed": 3,
        "train": 30,
        "test": 20,
        "skip": 40,
    }


def test_silos_can_be_cut_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    text = 'task = "mnist"\ndata = "d"\nsilos = 12\nseeds = [5]\n'
    text += '[split]\nkind = "dirichlet"\ndirichlet-alpha = 0.5\ntest-share = 0.1\n'
    text += "[options]\ntrain = 9\n"
    file = written(tmp_path, text + FEDAVG)
    (first, *_, last) = read(file).silos(Repeat(5))
    assert (first.name, last.name) == ("silo-00", "silo-11")
    assert last.options == {
        "split-seed": 5,
        "data": str(tmp_path / "d"),
        "train": 9,
        "split": "dirichlet",
        "split-dirichlet-alpha": 0.5,
        "test-share": 0.1,
        "silos": 12,
        "silo": 11,
    }
    monkeypatch.setenv("COTERIE_DATA", "/elsewhere")
    assert read(file).silos(Repeat(5))[0].options["data"] == "/elsewhere"
    assert read(file, data=tmp_path / "x").silos(Repeat(5))[0].options["data"] == str(
        tmp_path / "x"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seeds = [0\n", "is not TOML"),
        (WHOLE.replace("seeds = [0, 3]", "seeds = []"), "seeds"),
        (WHOLE.replace("seeds = [0, 3]", "seeds = [3, 3]"), "seeds must differ"),
        (WHOLE.replace("seeds = [0, 3]", ""), "key 'seeds' is missing"),
        (WHOLE.replace("target", "tarjet"), "unknown key 'tarjet': the nearest is target"),
        (WHOLE.replace("0.99", "7"), "target: the metric is error, so it must be between 0 and 1"),
        (WHOLE.replace('name = "b"', 'name = "a"'), "two silos are called 'a'"),
        (WHOLE.replace('name = "b"', 'name = "b b"'), "a silo's name may have only letters"),
        (WHOLE + '[split]\nkind = "iid"\n', "needs silos as a number"),
        ("silos = 3\nseeds = [0]\n" + FEDAVG, r"needs a \[split\] with its kind"),
        (
            'silos = 3\nseeds = [0]\n[split]\nkind = "iid"\nalfa = 1\n' + FEDAVG,
            r"\[split\] has no key 'alfa'. It has kind, base",
        ),
        (WHOLE + FEDAVG, "two strategies are called 'fedavg'"),
        (WHOLE + "[[strategies]]\nname = 'x'\n", "every strategy needs a 'strategy'"),
        (WHOLE.replace('"ifca"', '"ifka"'), "strategy 'IFCA, K 2': the run's configuration"),
        (WHOLE.replace("num-groups = 2", "num-grups = 2"), "unknown key 'num-grups'"),
        (WHOLE.replace("num-groups = 2", "seed = 2"), "key 'seed';"),
        (WHOLE.replace("rounds = 2", 'rounds = 2\nstrategy = "hcct"'), "key 'strategy';"),
        (WHOLE.replace("rounds = 2", 'rounds = 2\nbaseline-run = "x"'), "key 'baseline-run';"),
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
    with pytest.raises(FederationError, match="has no key 'data', so --data has no effect"):
        read(written(tmp_path, WHOLE), data=tmp_path)


# ---------------------------------------------------------------- running


def go(file: Path, folder: Path, **more: Any) -> tuple[str, list[Any]]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    result = compare(file, folder=folder, progress=console, **more)
    print_comparison(console, result)
    return out.getvalue(), result.rows


def test_from_file_to_table_and_only_what_is_missing_the_second_time(tmp_path: Path) -> None:
    file, folder = written(tmp_path, WHOLE), tmp_path / "out"
    said, table = go(file, folder)
    assert [row.name for row in table] == ["local", "fedavg", "IFCA, K 2"]
    assert said.count("mean error") >= 6 and "A try: 3 strategies, 2 silos in this process" in said
    page = (folder / "comparison.md").read_text(encoding="utf-8")
    assert page.startswith("# A try\n") and "| IFCA, K 2 |" in page
    content = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["table"]] == ["local", "fedavg", "IFCA, K 2"]
    assert {(run["name"], run["seed"]) for run in content["runs"]} == {
        (name, seed) for name in ("local", "fedavg", "IFCA, K 2") for seed in (0, 3)
    }
    for row in content["table"]:
        means = [
            np.mean(list(run["errors"].values()))
            for run in content["runs"]
            if run["name"] == row["name"]
        ]
        assert row["error"] == pytest.approx(np.mean(means))
    with locked(folder), pytest.raises(FederationError, match=f"process {os.getpid()} compares"):
        go(file, folder)
    again, second = go(file, folder)
    assert "seed 0," not in again
    assert [row.error for row in second] == [row.error for row in table]
    changed = written(tmp_path, WHOLE.replace("num-groups = 2", "num-groups = 3"))
    third, _ = go(changed, folder)
    assert third.count("  seed ") == 2 and "IFCA, K 2" in third
    other = written(tmp_path, WHOLE.replace("train = 30", "train = 31"))
    with pytest.raises(FederationError, match="has a comparison over other silos"):
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
            assert Path(record["config"]["baseline-run"]).name.endswith(f"-seed{seed}")
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
    assert {row.name for row in table} == {"local", "fedgen"}
    (spec, _) = read(written(tmp_path, "label-counts = true\n" + text)).silos(Repeat(0))
    assert "--share-label-counts" in spec.arguments("x:1", tmp_path)


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


TREES = declaration("p", "q", "r", network="trees-4x2")
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
    assert {row.name for row in table} == {"local", "fedavg"}
    assert all(0 <= row.error < 0.5 for row in table)
    cut = 'task = "study.toml"\nseeds = [0]\nsilos = 3\n[split]\nkind = "iid"\n' + RUN + FEDAVG
    with pytest.raises(FederationError, match=r"cannot be split into silos. List them"):
        read(written(tmp_path, cut))
    (tmp_path / "study.toml").unlink()
    with pytest.raises(FederationError, match=r"try.toml: .*study.toml"):
        read(written(tmp_path, text))


def test_local_training_of_trees_is_trees_of_every_silo_alone(tmp_path: Path) -> None:
    declared(tmp_path)
    (tmp_path / "study.toml").write_text(TREES)
    for name in "ab":
        with np.load(tmp_path / f"{name}.npz") as file:
            rows_of = np.column_stack([file["x"], file["y"]])
        lines = ["p,q,r,ill", *(f"{p},{q},{r},{'yes' if y else 'no'}" for p, q, r, y in rows_of)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    text = DECLARED.replace(".npz", ".csv") + "[run]\nrounds = 2\nleaf-rows = 5\n"
    file = written(tmp_path, text + '[[strategies]]\nstrategy = "trees"\n')
    _, table = go(file, tmp_path / "out")
    assert {row.name for row in table} == {"local", "trees"}
    groups = {}
    for record in (tmp_path / "out" / "records").iterdir():
        run = read_whole(record)
        groups[run.strategy, run.config.get("given-groups")] = run.rounds[-1].groups
        assert bool(run.initial) is (run.config.get("given-groups") == "")
    assert groups == {("trees", "each"): (("a",), ("b",)), ("trees", ""): (("a", "b"),)}


@pytest.mark.parametrize(
    "keys, family, strategy",
    [
        ('strategy = "auto"', "network", "independent"),
        ('strategy = "trees"\ntask.family = "trees"', "trees", "trees"),
    ],
)
def test_local_training_of_a_task_with_both_families_names_the_one_that_is_compared(
    keys: str, family: str, strategy: str, tmp_path: Path
) -> None:
    declared(tmp_path)
    (tmp_path / "study.toml").write_text(TREES.replace("trees-", "any-"))
    comparison = read(written(tmp_path, f"{DECLARED}[[strategies]]\n{keys}\n"))
    alone = comparison.runs["local"]
    assert (alone["task.family"], alone["strategy"]) == (family, strategy)


def test_a_changed_declaration_or_changed_data_is_another_comparison(tmp_path: Path) -> None:
    """Otherwise one table would hold results of two problems."""
    declared(tmp_path)
    file = written(tmp_path, DECLARED + RUN + FEDAVG)
    go(file, tmp_path / "out")
    (tmp_path / "study.toml").write_text(STUDY.replace("mclr", "mlp"))
    with pytest.raises(FederationError, match="the task's declaration or data files"):
        go(file, tmp_path / "out")
    (tmp_path / "study.toml").write_text(STUDY)
    assert "  seed" not in go(file, tmp_path / "out")[0]
    os.utime(tmp_path / "b.npz", (0, 0))
    with pytest.raises(FederationError, match="the task's declaration or data files"):
        go(file, tmp_path / "out")


def counts_of(folder: Path, name: str = "fedavg") -> dict[str, list[int]]:
    """Run → how many test samples each silo had."""
    found = {}
    for path in sorted((folder / "records").glob(f"{name}-*/run.json")):
        run = read_whole(path.parent)
        found[path.parent.name.split("-", 2)[2]] = list(run.test_counts().values())
    return found


def test_folds_test_every_sample_of_a_declared_task_once(tmp_path: Path) -> None:
    declared(tmp_path)
    file = written(tmp_path, "folds = 4\n" + DECLARED + RUN + FEDAVG)
    task = load_declared(tmp_path / "study.toml")
    for number in (0, 1):
        held = [
            task.load(read(file).silos(repeat)[number].options) for repeat in read(file).repeats
        ]
        whole = np.load(tmp_path / f"{'ab'[number]}.npz")["x"]
        tested = np.concatenate([data.x_test for data in held])
        assert sorted(map(tuple, tested)) == sorted(map(tuple, whole)), "each once"
        for data in held:
            assert not set(map(tuple, data.x_train)) & set(map(tuple, data.x_test))
            assert abs(data.y_test.mean() - np.concatenate([d.y_test for d in held]).mean()) < 0.2
    said, table = go(file, tmp_path / "out")
    assert table[0].seeds == 4 and "seed 0, fold 4, fedavg: mean error" in said
    assert {len(counts) for counts in counts_of(tmp_path / "out").values()} == {2}
    assert sum(map(sum, counts_of(tmp_path / "out").values())) == 120
    assert "4 folds, so that every sample is tested once" in said
    assert "corrected resampled t-test" in said
    content = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert [run["fold"] for run in content["runs"] if run["name"] == "fedavg"] == list(range(1, 5))
    assert content["advice"]["text"] in said
    rows = load(tmp_path / "out").metrics()
    keys = ("strategy", "seed", "fold", "silo")
    assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows) == 2 * 4 * 2


def test_every_seed_tests_a_declared_task_on_other_samples(tmp_path: Path) -> None:
    declared(tmp_path)
    comparison = read(written(tmp_path, DECLARED + RUN + FEDAVG))
    task = load_declared(tmp_path / "study.toml")
    first, other = (task.load(comparison.silos(r)[0].options).x_test for r in (S0, S1))
    assert not np.array_equal(np.sort(first, axis=0), np.sort(other, axis=0))
    assert comparison.drawn() == {"a", "b"}


def test_test_data_that_a_silo_gives_stays_and_the_legend_says_so(tmp_path: Path) -> None:
    declared(tmp_path)
    two = DECLARED.replace("[0]", "[0, 1]")
    mixed = two.replace('"a.npz" }', '"a.npz", test-data = "b.npz" }')
    comparison = read(written(tmp_path, mixed + RUN + FEDAVG))
    assert comparison.drawn() == {"b"}
    parted = dict(np.load(tmp_path / "a.npz"))
    np.savez(
        tmp_path / "b.npz",
        **{f"{k}_train": v[:40] for k, v in parted.items()},
        **{f"{k}_test": v[40:] for k, v in parted.items()},
    )
    file = written(tmp_path, two.replace("a.npz", "b.npz") + RUN + FEDAVG)
    said, _ = go(file, tmp_path / "out")
    assert (
        "The test samples were the same in all, so it does not cover the choice of test samples."
        in said
    )
    assert "Wilcoxon's signed-rank test over the silos' means" in said
    folds = written(tmp_path, "folds = 2\n" + two.replace("a.npz", "b.npz") + RUN + FEDAVG)
    with pytest.raises(FederationError, match="folds cannot be used here"):
        go(folds, tmp_path / "folds")


def test_folds_of_a_task_that_is_not_declared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"folds need a task declared in a .toml file."):
        read(written(tmp_path, "folds = 5\n" + WHOLE))


def test_a_target_is_a_value_of_the_metric_that_leads(tmp_path: Path) -> None:
    declared(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY + 'metric = "auroc"\n')
    file = written(tmp_path, "target = 0.55\n" + DECLARED + RUN + FEDAVG)
    said, table = go(file, tmp_path / "out")
    assert "the first with a mean AUROC of 0.550 or better" in said
    assert "AUROC: higher is better" in said and "seed 0, fedavg: mean AUROC 1.000" in said
    heads = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8").splitlines()[2]
    assert heads.startswith("| strategy | AUROC |") and "error" not in heads
    (fedavg,) = [row for row in table if row.name == "fedavg"]
    assert fedavg.reached == 1 and fedavg.error < 0.45
    with pytest.raises(FederationError, match=r"target: the metric is AUROC, so .* Got 12"):
        read(written(tmp_path, "target = 12\n" + DECLARED + RUN + FEDAVG))
    mixed = RUN + FEDAVG + 'primary-metric = "error"\n'
    with pytest.raises(FederationError, match="primary-metric must be the same for all"):
        read(written(tmp_path, DECLARED + mixed))


def test_generators_for_a_model_without_layers_for_them_are_refused_in_the_file_s_words(
    tmp_path: Path,
) -> None:
    declared(tmp_path)
    file = written(tmp_path, DECLARED + RUN + FEDAVG + '[[strategies]]\nstrategy = "fedgenp"\n')
    with pytest.raises(FederationError) as caught:
        go(file, tmp_path / "out")
    assert 'network = "mclr"; with network = "mlp-64" it works' in str(caught.value)
    assert "SplitModel" not in str(caught.value) and not (tmp_path / "out").exists()
    (tmp_path / "study.toml").write_text(STUDY.replace("mclr", "mlp-64"))
    _, table = go(file, tmp_path / "out")
    assert {row.name for row in table} == {"local", "fedavg", "fedgenp"}


def test_a_strategy_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = playing.execute

    def execute(grid: Any, config: Any, **more: Any) -> Any:
        if config.strategy == "fedavg":
            raise FederationError("silo a has no such layer")
        return real(grid, config, **more)

    monkeypatch.setattr(playing, "execute", execute)
    file = written(tmp_path, WHOLE.replace("[0, 3]", "[0]"))
    done = coterie("compare", str(file), "--workdir", str(tmp_path / "out"))
    assert done.returncode == EXIT_RUN and "1 of 3 strategies could not" in done.stderr
    assert done.stdout.count("fedavg: could not be run: silo a has no such layer") == 1
    page = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    assert "| IFCA, K 2 |" in page and "fedavg could not be run: silo a has no such" in page
    monkeypatch.setattr(playing, "execute", real)
    said, table = go(file, tmp_path / "out")
    assert {row.name for row in table} == {"local", "fedavg", "IFCA, K 2"}
    assert said.count("  seed ") == 1, "only what was missing"


@pytest.mark.parametrize("place", ['data = "~typo/d"', 'task = "~typo/study.toml"'])
def test_a_place_in_a_home_that_nobody_has_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"try.toml: '~typo/.* does not exist: there is no"):
        read(written(tmp_path, f"{place}\n{WHOLE}"))


def test_a_title_and_a_folder_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    title = "Our [b] x [/docs] y"
    file = written(tmp_path, WHOLE.replace("A try", title).replace("[0, 3]", "[0]"))
    said, _ = go(file, tmp_path / "out [test]")
    assert said.startswith(f"{title}: 3 strategies") and "out [test]/" in said
