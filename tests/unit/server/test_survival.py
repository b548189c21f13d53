"""Survival curves by sums: equal to all rows together, few rows are never shown, a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from rich.console import Console
from scipy.stats import CensoredData, ecdf, logrank

from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.features.sums.contract import FitError, Question, State, added
from coterie.features.sums.coordinator import Fit, Fits
from coterie.features.sums.regression.silo import Regressing, counts_until
from coterie.features.sums.regression.survival import Survival, curve, log_rank
from coterie.pictures.style import WIDE
from coterie.server.report.command import write_report
from coterie.server.report.final import print_final
from coterie.server.report.survival import page_of_fits
from coterie.server.runs.config import RunConfig
from coterie.server.runs.fitted import Fitted
from coterie.server.runs.run import execute
from tests.commands import coterie
from tests.kit import Tap, restart_silos
from tests.unit.server.test_cox import Array, rows_of, sites
from tests.unit.server.test_json import documented, fields_of
from tests.unit.server.test_regression import NAMES, anyway, beside, regress

TIMES = [4.0, 9.0, 25.0]
SETTINGS = {"model": "survival", "columns": [], "target": "", "at": TIMES}


def fitted(*seeds: int) -> tuple[State, Array, Array]:
    """The fit of silos, and the times and events of all their rows."""
    side, question = Regressing(), Question("regression", SETTINGS)
    silos = {f"s{seed}": rows_of(seed) for seed in seeds}
    answers = {name: side.answer(question, rows, 5, anyway) for name, rows in silos.items()}
    state = Survival().next(SETTINGS, State(), added(answers))
    time, event = (
        np.concatenate([rows.targets[i].values for rows in silos.values()]) for i in (0, 1)
    )
    return state, time, event


def row_by_row(time: Array, event: Array) -> CensoredData:
    """Rows with times rounded up to the agreed ones; later ones are censored."""
    ends = np.array([*TIMES, 1e9])
    rounded, event = ends[np.searchsorted(ends, time)], event * (time <= TIMES[-1])
    return CensoredData(uncensored=rounded[event > 0], right=rounded[event == 0])


def test_sums_give_the_estimate_and_the_test_of_all_rows_together() -> None:
    groups = [fitted(0, 1), fitted(2, 3), fitted(4)]
    for state, *rows in groups:
        found = ecdf(row_by_row(*rows)).sf
        ends = found.confidence_interval(method="log-log")
        for name, of in (("survival", found), ("low", ends.low), ("high", ends.high)):
            own = [getattr(one, name) for one in curve(SETTINGS, state.arrays)]
            assert own == pytest.approx(of.evaluate(TIMES), rel=1e-6)
        time, event = rows
        exact = ecdf(CensoredData(uncensored=time[event > 0], right=time[event == 0])).sf
        assert (found.evaluate(TIMES) > exact.evaluate(TIMES)).all(), "as the page says"
    one, two, three = (state.arrays for state, *_ in groups)
    expected = logrank(*(row_by_row(*rows) for _, *rows in groups[:2]))
    assert log_rank([one, two]) == pytest.approx((expected.statistic**2, expected.pvalue), rel=1e-6)
    assert log_rank([one, two, three]) == pytest.approx(log_rank([three, one, two]), rel=1e-6)
    assert log_rank([one]) is None


def test_curves_join_the_estimates_at_the_agreed_times() -> None:
    states = fitted(0, 1)[0], fitted(2)[0]
    fits = Fit("A", ("a", "b"), states[0]), Fit("alone a", ("a",), states[1])
    page = page_of_fits(Fitted("relapse", "regression", SETTINGS, "", Fits(fits)), "r")
    (axes,) = page.pictures[0].draw(WIDE).figure.axes
    assert len(axes.lines) == 2 and len(axes.collections) == 1, "one has a band"
    for line, state in zip(axes.lines, states, strict=True):
        values = [1.0, *(one.survival for one in curve(SETTINGS, state.arrays))]
        assert [list(part) for part in line.get_data()] == [[0.0, *TIMES], values]
        assert line.get_marker() == "o"
    ends = axes.collections[0].get_paths()[0].vertices
    last = curve(SETTINGS, states[0].arrays)[-1]
    assert {last.low, last.high} <= {y for x, y in ends if x == TIMES[-1]}


def test_long_times_are_named_in_full_and_can_be_asked_for_again() -> None:
    settings = {**SETTINGS, "at": [20240101.0, 20240131.0, 0.5e9]}
    fit = Fit("all", ("a", "b"), fitted(0, 1)[0])
    page = page_of_fits(Fitted("relapse", "regression", settings, "", Fits((fit,))), "r")
    assert "--at 20240101,20240131,500000000" in page.commands["Count again"]
    (table,) = page.tables.values()
    assert [row[0] for row in table.rows] == ["20240101", "20240131", "500000000"]


def test_groups_without_events_are_not_called_too_few() -> None:
    state = fitted(0, 1)[0]
    none = replace(state, arrays={**state.arrays, "events": np.zeros(len(TIMES))})
    fits = Fit("A", ("a", "b"), none), Fit("B", ("c", "d"), none)
    page = page_of_fits(Fitted("relapse", "regression", SETTINGS, "hcct-1", Fits(fits)), "r")
    assert page.lead == "There are no events, so survival cannot be compared."
    page = page_of_fits(Fitted("relapse", "regression", SETTINGS, "", Fits(fits[:1])), "r")
    assert page.lead == "There is no second group or silo to compare."
    failed = Fits((Fit("all", ("a",), failed="it is lost"),))
    page = page_of_fits(Fitted("relapse", "regression", SETTINGS, "", failed), "r")
    assert page.lead == "There is no result." and not (page.pictures or page.notes)


def test_silos_are_compared_though_one_is_left_out_of_their_group() -> None:
    states = [fitted(number)[0] for number in range(3)]
    alone = [Fit(f"alone {n}", (n,), one) for n, one in zip("abc", states, strict=True)]
    fits = Fit("all", ("b", "c"), fitted(1, 2)[0], {"a": "it is lost"}), *alone
    page = page_of_fits(Fitted("relapse", "regression", SETTINGS, "", Fits(fits)), "r")
    assert "between the 3 silos" in page.lead
    assert [line[0] for line in page.tables["Log-rank test"].rows] == ["Silo a, Silo b and Silo c"]


def test_no_interval_shows_few_events_or_few_censored_rows_or_few_persons() -> None:
    time, event = np.arange(100.0), np.ones(100)
    event[::4] = 0.0
    event[37:45] = 1.0

    def refused(times: list[float], *, persons: Any = None) -> bool:
        try:
            counts_until(time, event, persons, times, 10, anyway)
        except FitError as error:
            assert not re.search(r"\d", str(error)), "nor does it say where they are"
            return True
        return False

    assert [refused([end]) for end in (35, 36, 90)] == [True, False, True]
    assert [refused([36, end]) for end in (44, 88)] == [True, False]
    tenth = np.full(20, np.float32(0.1), np.float64)  # a little more than 0.1
    assert counts_until(tenth, np.ones(20), None, [0.1], 10, anyway)["ended"] == [20]
    five = np.arange(100) // 5
    assert [refused([end], persons=five) for end in (36, 52)] == [True, False]


def test_single_events_are_not_found_by_halving_intervals() -> None:
    rows = rows_of(0)
    first, middle = np.quantile(rows.targets[0].values, [0, 0.5]).tolist()

    def ask(end: float) -> str:
        question = Question("regression", {**SETTINGS, "at": [end]})
        try:
            Regressing().answer(question, rows, 10, anyway)
        except FitError as error:
            return str(error)
        return ""

    assert not ask(middle)
    assert all("few events" in ask(first + i / 8) for i in (0, 1, 2, 3, 4, 0))
    assert "answers no other" in ask(first + 5 / 8) and "answers no other" in ask(middle + 1)
    assert not ask(middle)


def test_other_times_in_a_later_run_show_no_few_rows(tmp_path: Path) -> None:
    """Counts until 10 and until 11 may each leave, but not both: they differ by few rows."""
    first, second = tmp_path / "first", tmp_path / "second"
    keys = {"task": "relapse", "model": "survival"}
    for folder, at in ((first, "10"), (second, "11")):
        folder.mkdir()
        restart_silos()
        found = regress(folder / at, sites(folder), at=at, **keys).groups[0]
        assert found.members == NAMES
    restart_silos()
    later = regress(first / "later", sites(first), at="11", **keys).groups[0].left_out
    assert set(later) == {"a", "b", "c"}, "d has the same counts until both"
    assert all("by fewer than 10" in why for why in later.values())
    assert regress(first / "again", sites(first), at="10", **keys).groups[0].members == NAMES


LIES: dict[str, dict[str, Array]] = {
    "more rows than it has": {"count": np.array([1e6])},
    "half an event": {"events": np.array([5.5, 50, 60])},
    "falling counts": {"ended": np.array([100.0, 90, 110])},
    "more ends than rows": {"events": np.zeros(3), "ended": np.array([121.0, 121, 121])},
    "more events than ends": {"events": np.array([120.0, 120, 120])},
}


@pytest.mark.parametrize("what", LIES)
def test_an_impossible_answer_is_seen(what: str) -> None:
    question = Question("regression", SETTINGS)
    good = Regressing().answer(question, rows_of(0), 5, anyway).arrays
    assert not Survival().objection(question, good, 120)
    assert Survival().objection(question, {**good, **LIES[what]}, 120)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (("survival",), "for example --at 30,90,365"),
        (("survival", "--at", "9,5"), "must be positive, and rise"),
        (("survival", "--at", "9", "--columns", "age"), "leave columns out"),
        (
            ("survival", "--at", "90,,180"),
            "at must be times with a comma between two, not '90,,180': for example",
        ),
        (("cox", "--columns", "age,dose, age"), "columns names 'age' 2 times: name it once"),
        (("cox", "--at", "9"), "leave it out"),
        (("cox", "--target", "time"), "leave target out"),
    ],
)
def test_keys_that_do_not_fit_are_named(line: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = coterie("regress", *line, "--task", "relapse", "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and why in " ".join(done.stderr.split())


def test_a_run_shows_curves_and_leaves_out_a_silo_that_lies(tmp_path: Path) -> None:
    restart_silos()

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and "words" in str(reply.content.get("config")):
            reply.content = beside(count=[1e6])(reply.content)
        return reply

    found = regress(tmp_path / "r", Tap(sites(tmp_path), change=change), task="relapse",
        model="survival", at="10", each_alone=True)  # fmt: skip
    assert "number of rows" in found.groups[0].left_out["d"]
    assert found.groups[0].members == ("a", "b", "c")
    (file,) = write_report(str(tmp_path / "r"), kind="json")
    written = json.loads(file.read_text())
    assert fields_of(written) <= documented("regress --json")
    assert written["groups"][0]["curve"][0]["at-risk"] == written["groups"][0]["rows"]
    assert written["log-rank"]["p"] > 0.05 and len(written["log-rank"]["groups"]) == 3
    text = write_report(str(tmp_path / "r"))[0].read_text()
    assert "Survival does not differ between the 3 silos (p ≥ 0.05)" in text
    assert "coterie regress survival --task relapse --at 10 --each-alone<" in text
    assert "1 of 4 silos is not in the fit: d: its answer is impossible: " in text
    assert "Log-rank test" in text and "Silo a, Silo b and Silo c" in text


def test_of_a_single_silo_that_is_left_the_curve_is_shown_once_and_the_others_are_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restart_silos()
    silos = [{**one, "sums": "regression,alone" * (one["name"] == "a")} for one in sites(tmp_path)]
    keys = {"strategy": "regression", "task": "relapse", "min-silos": 2, "wait-for-silos": 0.2}
    keys |= {"model": "survival", "at": "10", "each-alone": True, "runs-dir": str(tmp_path)}
    grid = InProcessGrid(app, silos)
    names = {**dict(zip(grid.nodes(), NAMES, strict=True)), 99: "west"}
    folder = tmp_path / "r"
    execute(grid, RunConfig.read(keys), run_id=1, folder=folder, enrolled=lambda: names)
    print_final(Console(), folder)
    shown = capsys.readouterr()
    first = " ".join(shown.err.split())
    assert first.startswith("warning: 4 of 5 silos are not in the fit: b, c, d: ")
    assert "silo.toml or `--share-sums` allows it; west: it is enrolled, but is not" in first
    assert "Together (1 of 4 silos, " in shown.out and "Silo a" not in shown.out
