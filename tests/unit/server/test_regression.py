"""Regression by sums: equal to all rows together, what a silo refuses, who is left out, a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import root

from coterie import wire
from coterie.client.home.approvals import decide, leaving
from coterie.client.home.policy import Policy
from coterie.client.ledger import read
from coterie.features.sums.contract import (
    Answer,
    FitError,
    Question,
    State,
    TooFarError,
    added,
    check_answer,
    decode_answer,
    encode_answer,
    settings_text,
)
from coterie.features.sums.coordinator import Fit, Fits
from coterie.features.sums.regression.design import design_of
from coterie.features.sums.regression.keys import RegressionKeys
from coterie.features.sums.regression.newton import Regression, unpacked
from coterie.features.sums.regression.numbers import estimate, spread
from coterie.features.sums.regression.silo import Regressing
from coterie.features.sums.rows import Rows
from coterie.server.report.command import write_report
from coterie.server.report.regression import again, build_regression_page, regression_summary
from coterie.server.report.view import picture
from coterie.server.runs.contribution import SUMS
from coterie.server.runs.fitted import Fitted, read_fitted
from coterie.server.runs.record import EVENTS, event_of
from coterie.server.runs.record.follow import Progress
from coterie.strategies.errors import FederationError
from coterie.tasks.base import Column
from tests.commands import coterie
from tests.contract.hostile.behaviours import ANYWHERE, filled, typed, with_arrays, with_config
from tests.kit import CutGrid, Node, Tap, ask, interrupted, reason, restart_silos, run
from tests.tables import declaration, table_node, written
from tests.unit.server.test_json import documented, fields_of

Arrays = Mapping[str, NDArray[Any]]
MEANS = {
    "linear": lambda eta: eta,
    "logistic": lambda eta: 1 / (1 + np.exp(-eta)),
    "poisson": np.exp,
}


def rows_of(seed: int, model: str, *, count: int = 300, unit: float = 1.0, **more: Any) -> Rows:
    """Rows of a silo: a number far from 0, one that is missing in 20 rows, a category."""
    rng = np.random.default_rng(seed)
    year, dose = rng.normal(2000 + seed, 4, count), rng.normal(0, 1 + seed, count)
    sex = rng.integers(0, 3, count).astype(np.float64)
    eta = 0.1 * (year - 2000) + 0.3 * dose - 0.5 * (sex == 1) + 0.2 * seed
    draw = {
        "linear": lambda: eta + rng.normal(0, 2, count),
        "logistic": lambda: (rng.random(count) < MEANS["logistic"](eta)).astype(np.float64),
        "poisson": lambda: rng.poisson(np.exp(eta)).astype(np.float64),
    }
    dose[:20] = np.nan
    inputs = [
        Column("year", year),
        Column("dose", dose * unit),
        Column("sex", sex, ("f", "m", "x")),
    ]
    columns = {one.name: one for one in inputs} | {k: Column(k, v) for k, v in more.items()}
    return Rows(list(columns.values()), [Column("outcome", draw[model]())])


def anyway(used: Any) -> str:
    return ""


def fit(silos: Mapping[str, Rows], model: str, *, least: int = 10, columns: Any = ()) -> State:
    family, side = Regression(), Regressing()
    settings = {"model": model, "columns": list(columns), "target": ""}
    state = State()
    while not state.done:
        question = Question("regression", settings, family.asked(settings, state))
        try:
            answers = {n: side.answer(question, rows, least, anyway) for n, rows in silos.items()}
        except TooFarError:
            half = family.halved(settings, state)
            assert half is not None, "these rows are unfit"
            state = half
            continue
        for name, one in answers.items():
            check_answer(family, question, one, len(silos[name]))
        words = answers[min(answers)].words
        state = replace(state, words=words, step=state.step + 1)
        state = family.next(settings, state, added(answers))
    return state


def pooled(silos: Mapping[str, Rows], model: str) -> tuple[Any, Any]:
    """Coefficients and covariance by a solver of equations on all rows together."""
    settings = {"model": model, "columns": [], "target": ""}
    designs = [design_of(rows, settings, 1) for rows in silos.values()]
    x, y = (np.concatenate([getattr(one, part) for one in designs]) for part in "xy")
    centre, width = x.mean(axis=0), x.std(axis=0)
    z = np.column_stack([np.ones(len(y)), (x - centre) / width])
    start = np.zeros(z.shape[1])
    found = root(lambda b: z.T @ (MEANS[model](z @ b) - y) / len(y), start, tol=1e-13)
    mean = MEANS[model](z @ found.x)
    weights = {"linear": np.ones_like(y), "logistic": mean * (1 - mean), "poisson": mean}[model]
    spread = ((y - mean) ** 2).sum() / (len(y) - z.shape[1]) if model == "linear" else 1.0
    own = np.column_stack([np.ones(len(y)), x])
    back = np.linalg.lstsq(own, z @ found.x, rcond=None)[0]
    inside = np.linalg.inv(z.T @ (z * weights[:, None])) * spread
    change = np.linalg.lstsq(own, z, rcond=None)[0]
    return back, change @ inside @ change.T


@pytest.mark.parametrize("unit", [1.0, 1e-7])
@pytest.mark.parametrize("model", MEANS)
def test_sums_give_what_all_rows_together_give_in_any_unit(model: str, unit: float) -> None:
    silos = {f"s{seed}": rows_of(seed, model, unit=unit) for seed in range(3)}
    state = fit(silos, model)
    beta, covariance = pooled(silos, model)
    assert state.words == ("(intercept)", "year", "dose", "sex = m", "sex = x", "outcome")
    assert state.step <= 10 and state.arrays["count"] == 3 * 280
    errors = np.sqrt(np.diag(covariance))
    assert state.arrays["coefficients"] == pytest.approx(beta, rel=1e-6)
    assert np.sqrt(np.diag(state.arrays["covariance"])) == pytest.approx(errors, rel=1e-6)
    assert fit({"all": _together(silos)}, model).arrays["coefficients"] == pytest.approx(beta, 1e-6)


def test_a_step_that_lets_few_rows_outweigh_others_is_halved() -> None:
    """The first step of a Poisson regression on a skewed column goes too far for every silo."""
    silos = {}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        dose = np.exp(0.5 * rng.normal(size=300))
        outcome = rng.poisson(np.exp(np.minimum(dose, 5) - 1)).astype(np.float64)
        silos[f"s{seed}"] = Rows([Column("dose", dose)], [Column("outcome", outcome)])
    dose, outcome = (getattr(_together(silos), p)[0].values for p in ("inputs", "targets"))
    constant, slope = fit(silos, "poisson").arrays["coefficients"]
    wrong = np.exp(constant + slope * dose) - outcome
    assert [wrong.sum(), dose @ wrong] == pytest.approx([0, 0], abs=1e-6 * outcome.sum())


def _together(silos: Mapping[str, Rows]) -> Rows:
    first = next(iter(silos.values()))
    whole = {}
    for part in ("inputs", "targets"):
        columns = zip(*(getattr(rows, part) for rows in silos.values()), strict=True)
        whole[part] = [
            replace(own[0], values=np.concatenate([one.values for one in own])) for own in columns
        ]
    return replace(first, **whole, kept={})


RNG = np.random.default_rng(5)
SIZE = RNG.normal(0, 1, 300)
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "twice the same": ("linear", {"again": rows_of(0, "linear").inputs[0].values}, "again depend"),
    "a few others": ("linear", {"rare": (np.arange(300) > 295) * 1.0}, "same value of rare"),
    "separation": ("logistic", {}, "coefficients of sign have no .*separation"),
    "a threshold": (
        "logistic",
        {"size": SIZE, "outcome": (SIZE > 0.5) * 1.0},
        "mostly for size: .*separation",
    ),
    "no classes": ("logistic", {"outcome": RNG.normal(0, 1, 300)}, "needs two classes"),
    "classes": ("poisson", {"outcome": None}, "a Poisson regression needs numbers"),
    "no counts": ("poisson", {"outcome": RNG.normal(0, 1, 300)}, "needs counts"),
    "one class": ("logistic", {"outcome": np.ones(300)}, "all rows have the same outcome"),
    "exact": ("linear", {"outcome": np.arange(300.0), "time": np.arange(300.0)}, "exactly"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_has_no_result_is_named_and_no_number_comes(what: str) -> None:
    model, more, why = WRONG[what]
    rows = rows_of(0, model, **{k: v for k, v in more.items() if k != "outcome"})
    outcome = more.get("outcome", rows.targets[0].values)
    if what == "separation":
        rows = rows_of(0, model, sign=outcome * 2 + RNG.random(300) * 0.5)
        rows = replace(rows, inputs=[one for one in rows.inputs if one.name != "sex"])
    classes = ("no", "yes") if outcome is None else ()
    values = np.zeros(300) if outcome is None else np.asarray(outcome, np.float64)
    rows = replace(rows, targets=[Column("outcome", values, classes)], kept={})
    with pytest.raises(FitError, match=why):
        fit({"a": rows}, model)


def refused(rows: Rows, question: Question) -> str:
    """Why the rows, or persons, are too few for an answer."""
    try:
        Regressing().answer(question, replace(rows, kept={}), 10, anyway)
    except FitError as error:
        return str(error)
    return ""


def test_few_rows_are_never_shown_by_the_coefficients_that_a_coordinator_chooses() -> None:
    rows, family = rows_of(0, "logistic"), Regression()
    settings = {"model": "logistic", "columns": ["dose"], "target": ""}
    values = np.sort(rows.inputs[1].values[20:])
    fifteen = np.argsort(np.argsort(rows.inputs[1].values)) // 20
    for width, persons, why in ((1e-4, None, "few rows would"), (0.05, fifteen, "few rows would"),
                                (0.05, None, "")):  # fmt: skip
        narrow = {  # all weight on the rows beside one value
            "centres": np.array([values[100]]),
            "widths": np.array([width]),
            "beta": np.array([0.0, 1.0]),
        }
        mine, question = replace(rows, persons=persons), Question(family.name, settings, narrow)
        found = refused(mine, question)
        assert why in found and bool(why) == bool(found), (width, persons)
    sums = {"count": np.array([300.0]), "sums": np.array([np.inf, 0.0])}
    too_large = Answer(sums, ("(intercept)", "dose", "outcome"))
    with pytest.raises(wire.WireError, match="not finite"):
        check_answer(family, Question(family.name, settings), too_large, 300)
    with pytest.raises(FitError, match="too few rows"):
        Regressing().answer(Question(family.name, settings), rows, 281, anyway)


def test_few_rows_of_any_category_are_refused() -> None:
    rows, question = rows_of(0, "linear"), Question(Regression.name, {
        "model": "linear", "columns": ["year", "sex"], "target": ""})  # fmt: skip
    for few in range(3):
        others = np.array([one for one in range(3) if one != few])
        sex = np.where(np.arange(300) < 9, few, others[np.arange(300) % 2])
        assert np.count_nonzero(sex == few) == 9
        inputs = [rows.inputs[0], Column("sex", sex.astype(np.float64), ("f", "m", "x"))]
        assert f"sex = {'fmx'[few]}" in refused(replace(rows, inputs=inputs), question)


def test_long_names_are_shortened_and_stay_distinct() -> None:
    rows = rows_of(0, "linear")
    long = ("f", "m" * 200, "m" * 201)
    inputs = [rows.inputs[0], Column("sex", rows.inputs[2].values, long)]
    question = Question(Regression.name, {"model": "linear", "columns": [], "target": ""})
    mine = replace(rows, inputs=inputs)
    answer = Regressing().answer(question, mine, 10, anyway)
    check_answer(Regression(), question, answer, 300)
    assert len(set(answer.words)) == len(answer.words) == 5


def test_an_impossible_standard_error_does_not_end_the_report() -> None:
    assert spread([1.0, 2.0], [1e-196, 0.1]) is None and spread([1.0, 2.0], [0.0, 0.1]) is None
    assert spread([1.0, 2.0], [0.2, 0.1]) is not None


# ---------------------------------------------------------------- runs

TABLE = declaration("age", "dose", name="heart", sex="fm")
NAMES = ("a", "b", "c", "d")


def sites(folder: Path, **more: Node) -> list[Node]:
    """Write the tables of four silos, and return their nodes; ``more`` are settings of a silo."""
    task = written(folder / "heart.toml", TABLE)
    nodes: list[Node] = []
    for number, name in enumerate(NAMES):
        rng, rows = np.random.default_rng(number), []
        for row in range(150):
            dose = "" if row < 15 else f"{rng.normal():.3f}"
            ill = "yes" if float(dose or 0) * (1 if number < 2 else -1) + rng.normal() > 0 else "no"
            rows.append(f"{rng.normal(60, 12):.0f},{dose},{'fm'[row % 2]},{ill}")
        own = {"home": str(folder / name), "sums": "regression,alone", **more.get(name, {})}
        nodes.append(table_node(task, name, "age,dose,sex,ill", rows, **own))
    return nodes


def regress(folder: Path, who: Any, **keys: Any) -> Fitted:
    usual = {"strategy": "regression", "task": "heart", "min-silos": 2, "wait-for-silos": 0.2}
    run(folder, who, **{**usual, **keys})
    return read_fitted(folder / SUMS)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    restart_silos()
    return sites(tmp_path / "sites")


def test_groups_and_silos_alone_are_fitted_side_by_side_and_a_crash_changes_nothing(
    nodes: list[Node], tmp_path: Path
) -> None:
    whole = regress(tmp_path / "whole", nodes, each_alone=True)
    assert [fit.name for fit in whole.fits.fits] == ["all", *(f"alone {name}" for name in NAMES)]
    assert all(fit.state.done and not fit.left_out for fit in whole.fits.fits)
    alone = [whole.alone[name].state.arrays["coefficients"][2] for name in NAMES]
    assert min(alone[:2]) > 0.8 and max(alone[2:]) < -0.8
    leaving = [one for one in read(tmp_path / "sites" / "a") if one["type"] == wire.TRAIN_SUMS]
    assert leaving[-1]["purpose"] and {t["shape"][0] for t in leaving[-1]["tensors"]} <= {1, 4, 10}
    shown = coterie("silo", "ledger", "--home", str(tmp_path / "sites" / "a")).stdout
    model = "logistic regression; target: that of the task; all columns"
    assert f"whole, {wire.TRAIN_SUMS}: {model}; group: all, alone a " in " ".join(shown.split())
    restart_silos()
    cut = CutGrid(nodes, at=(wire.TRAIN_SUMS, 4), answered=3)
    interrupted(tmp_path / "cut", cut, play=regress, each_alone=1)
    grid = Tap(nodes)
    again = regress(tmp_path / "cut", grid, resume="cut", runs_dir=str(tmp_path), run_id=2)
    first = next(m for m in grid.sent if m.metadata.message_type == wire.TRAIN_SUMS)
    assert first.metadata.group_id == "4", "it goes on, and does not begin again"
    assert (tmp_path / "cut" / SUMS).read_bytes() == (tmp_path / "whole" / SUMS).read_bytes()
    assert again.fits.exchanges == whole.fits.exchanges <= 10
    _check_page(tmp_path / "whole")
    assert [fit.samples for fit in whole.fits.fits] == [480, *[120] * 4]


def _check_page(folder: Path) -> None:
    (file,) = write_report(str(folder), kind="json")
    found = json.loads(file.read_text())
    assert fields_of(found) <= documented("regress --json")
    (group,) = found["groups"]
    dose = group["coefficients"][2]
    assert (group["rows"], group["target"], dose["name"]) == (433, "ill = yes", "dose")
    assert dose["between-silos"]["p"] < 1e-6 and dose["between-silos"]["i2"] > 0.9
    assert set(dose["alone"]) == set(NAMES) and dose["estimate"]["p"] > 0.001
    least, most = (
        min(abs(dose[kind][name]["value"]) for name in NAMES) for kind in ("partly-pooled", "alone")
    )
    assert 0.8 * most < least < most, "silos that differ this much are shrunk little"
    (page,) = write_report(str(folder))
    text = page.read_text()
    shown = (
        "one regression on all training rows",
        "odds ratio",
        "Coefficient of dose",
        "random effects",
        "Each silo, partly pooled",
    )
    assert all(one in text for one in shown)
    assert "coterie regress logistic --task heart --each-alone<" in text
    assert "The silos differ in dose: no single coefficient fits all." in text
    assert "from 0 (p &lt; 0.05)." in text
    assert "All silos (4 silos, 433 of 480 rows)" in text, "the others lack a dose"


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.7, 0.1, "2.01 (1.66 to 2.45)"),
        (0.027, 0.002, "1.027 (1.023 to 1.031)"),
        (-0.0172, 0.0086, "0.9829 (0.9665 to 0.9997)"),
        (0.0, 1e-12, "1 (1 to 1)"),
    ],
)
def test_a_ratio_has_enough_figures_to_tell_its_limits_from_it_and_from_1(
    value: float, error: float, shown: str
) -> None:
    arrays: Arrays = {
        **{"count": np.full(1, 300.0), "used": np.ones(2, np.bool_), "loss": np.ones(1)},
        **{"coefficients": np.array([0, value]), "covariance": np.eye(2) * error**2},
        **{"reference": np.zeros(1, np.bool_), "centres": np.zeros(1)},
    }
    state = State(arrays, ("(intercept)", "age", "ill = yes"), done=True)
    settings = {"model": "logistic", "columns": [], "target": ""}
    fits = Fits((Fit("all", ("a", "b"), state),))
    page = build_regression_page(Fitted("t", "regression", settings, "", fits), "r")
    (table,) = page.tables.values()
    assert table.rows[1][-1] == shown
    assert page.pictures[0].caption == "Diamonds: all rows of the group."
    assert "--each-alone" in page.notes[0] and "differences" not in page.notes[0]


def test_inference_is_that_of_the_textbook() -> None:
    found = spread([0.0, 2.0], [1.0, 1.0])
    assert found is not None and spread([1.0], [1.0]) is None
    assert (found.q, found.i2, found.tau2, found.fixed.value) == pytest.approx((2, 0.5, 1, 1))
    assert found.p == pytest.approx(0.157299, abs=1e-6)
    assert (found.fixed.error, found.random.error) == pytest.approx((0.5**0.5, 1))
    one = estimate(2.0, 1.0, freedom=10)
    assert (one.high, one.p) == pytest.approx((2 + 2.228139, 0.073388), abs=1e-6)
    assert estimate(1.959964, 1.0).p == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (("logistic",), "--task is missing"),
        (("logistic", "--groups", "hcct-1"), "--task is missing: 'hcct-1'"),
        (("logistic", "--task", "heart", "--groups", "nosuch"), "there is no run 'nosuch' in"),
        (("probit", "--task", "heart"), "model"),
    ],
)
def test_the_command_says_what_is_missing(line: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = coterie("regress", *line, "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and why in done.stderr


def test_a_column_with_a_comma_is_named_in_quotes() -> None:
    settings = RegressionKeys(columns='dose, "age, years" ,sex').settings()
    assert settings["columns"] == ["dose", "age, years", "sex"]
    assert RegressionKeys().settings()["columns"] == []
    line = again(Fitted("heart", "regression", settings, "", Fits(())))
    assert line.endswith("""--columns 'dose,"age, years",sex'""")


def test_the_groups_of_a_run_are_fitted_each_for_itself(nodes: list[Node], tmp_path: Path) -> None:
    run(tmp_path / "trained", nodes, strategy="fedgroup", num_groups=2, task="heart", rounds=1,
        lr=0.5)  # fmt: skip
    found = regress(tmp_path / "r", nodes, parent="trained")
    assert {fit.name: fit.members for fit in found.groups} == {"A": ("a", "b"), "B": ("c", "d")}
    assert [np.sign(fit.state.arrays["coefficients"][2]) for fit in found.groups] == [1, -1]
    restart_silos()
    file = tmp_path / "lung.toml"
    file.write_text(TABLE.replace("heart", "lung"))
    others = [node | {"task": str(file)} for node in sites(tmp_path / "others")]
    why = r"trained is a run of task heart, not of lung\. .* can be used only for its own task"
    with pytest.raises(FederationError, match=why):
        regress(tmp_path / "other", others, parent="trained", task="lung")
    line = ("logistic", "--task", "other", "--groups", "trained", "--runs-dir", str(tmp_path))
    done = coterie("regress", *line)
    assert done.returncode == 2 and "trained is a run of task heart, not of other" in done.stderr


def beside(**arrays: Any) -> Any:
    return with_arrays(lambda model: {**model, **{k: np.asarray(v) for k, v in arrays.items()}})


LIES = {
    "nothing in it": lambda good: RecordDict(),
    "NaN": filled(np.nan),
    "infinity": filled(np.inf),
    "complex numbers": typed("c16"),
    "single precision": typed("f4"),
    "no arrays": with_arrays(lambda model: {}),
    "other names": with_arrays(lambda model: {f"{k}x": a for k, a in model.items()}),
    "other shapes": with_arrays(lambda model: {k: a[:, None] for k, a in model.items()}),
    "more rows than it has": beside(count=[1e6]),
    "half a row": beside(count=[99.5]),
    "an impossible Hessian": beside(hessian=-np.ones(10)),
    "no words": with_config(words="[]"),
    "words that are no JSON": with_config(words="{"),
    "a word that clears the screen": with_config(words='["(intercept)", "\\u001b[2J", "x", "y"]'),
    "more columns": with_config(words='["(intercept)", "u", "v", "w", "y", "class = yes"]'),
}


@pytest.mark.parametrize("what", [*LIES, ""])
def test_a_wrong_answer_is_seen_and_a_right_one_accepted(what: str) -> None:
    family, rows = Regression(), rows_of(0, "linear")
    settings = {"model": "linear", "columns": ["year", "sex"], "target": ""}
    scale = {"centres": np.zeros(3), "widths": np.ones(3), "beta": np.zeros(4)}
    question = Question(family.name, settings, scale)
    good = encode_answer(Regressing().answer(question, rows, 10, anyway))
    assert decode_answer(family, question, good, 300).arrays["count"] == 300
    if what:
        with pytest.raises(wire.WireError) as error:
            decode_answer(family, question, LIES[what](good), 300)
        assert "\x1b" not in str(error.value)


IMPOSSIBLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a sum of counts": ("poisson", {"sums": (-1, 0.5)}, "counts cannot add up to"),
    "fewer counts than none": ("poisson", {"sums": (-1, -1e4)}, "counts cannot add up to"),
    "ones": ("logistic", {"sums": (-1, 300)}, "rows cannot have the outcome"),
    "squares": ("linear", {"squares": (0, -1e9)}, "sum of squares is negative"),
    "a loss below 0": ("linear", {"loss": (0, -1e9)}, "loss is negative"),
    "a logistic loss below 0": ("logistic", {"loss": (0, -1e9)}, "loss is negative"),
    "rows in the Hessian": ("linear", {"hessian": (0, 1)}, "begin with its number of rows, 280"),
    "a linear gradient": ("linear", {"gradient": (0, 1e3)}, "too large for its loss"),
    "another linear gradient": ("linear", {"gradient": (2, 1e4)}, "too large for its loss"),
    "a logistic Hessian": ("logistic", {"hessian": (0, 5)}, "more than a quarter of its rows"),
    "a logistic gradient": ("logistic", {"gradient": (0, 300)}, "too large for its rows"),
    "a gradient above its loss": ("logistic", {"loss": (0, -190), "gradient": (0, 50)}, "its loss"),
    "a Poisson gradient": ("poisson", {"gradient": (0, 0.5)}, "counts cannot add up to"),
    "a steep Poisson gradient": ("poisson", {"gradient": (0, 1e6)}, "counts cannot add up to"),
    "a Hessian": ("poisson", {"hessian": (5, -1e4)}, "not positive semidefinite"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_sums_that_no_rows_can_have_are_seen(what: str) -> None:
    model, changes, why = IMPOSSIBLE[what]
    rows, family = rows_of(0, model), Regression()
    settings = {"model": model, "columns": [], "target": ""}
    scale = {"centres": np.array([2000.0, 0, 0.3, 0.3]), "widths": np.array([4.0, 1, 0.5, 0.5])}
    asked = {"sums": {}, "squares": {"centres": scale["centres"]}}
    steps = {**scale, "beta": np.zeros(5)}
    question = Question(family.name, settings, asked.get(next(iter(changes)), steps))
    answer = Regressing().answer(question, rows, 10, anyway)
    check_answer(family, question, answer, 300)
    for name, (at, by) in changes.items():
        answer.arrays[name][at] += by
    with pytest.raises(wire.WireError, match=f"impossible: .*{why}"):
        check_answer(family, question, answer, 300)


def shown(folder: Path) -> list[str]:
    """What a terminal that follows the run shows after each event."""
    progress, console = Progress("regression"), Console(file=StringIO(), width=160)
    for line in (folder / EVENTS).read_text().splitlines():
        if (event := event_of(line)) is not None:
            progress.feed(event)
        console.print(picture(progress))
        console.print("\0")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().split("\0")


UNFIT = {
    "silence": ANYWHERE["silence"],
    "infinity": filled(np.inf),
    "other columns": with_config(words='["(intercept)", "u", "v", "w", "class = yes"]'),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_silent_or_wrong_silo_is_left_out_of_the_whole_fit_by_name(
    what: str, nodes: list[Node], tmp_path: Path
) -> None:
    """In the middle of the fit: what is left equals a fit that the silo was never in."""
    asked = {"count": 0}

    def change(silo: str, reply: Message) -> Message | None:
        if silo != "d" or "words" not in str(reply.content.get("config")):
            return reply
        asked["count"] += 1
        found: Any = UNFIT[what](reply.content) if asked["count"] > 3 else reply.content
        if found is not None:
            reply.content = found
        return None if found is None else reply

    found = regress(tmp_path / "r", Tap(nodes, change=change), round_timeout=0.3).groups[0]
    assert (found.members, set(found.left_out), found.state.done) == (("a", "b", "c"), {"d"}, True)
    assert asked["count"] == 4, "it was in the sums before"
    screens = shown(tmp_path / "r")
    awaited = "silos: 3 answered · 1 awaited (d)"
    assert any(awaited in one for one in screens) == (what == "silence")
    assert any("silos: 4 awaited (a, b, c, d)" in one for one in screens)
    honest = regress(tmp_path / "honest", nodes[:3]).groups[0]
    assert np.array_equal(found.state.arrays["coefficients"], honest.state.arrays["coefficients"])


@pytest.mark.parametrize(
    ("by", "why"),
    [
        (1e9, r"25 halved steps still went too far.*few rows"),
        (100.0, r"did not converge in 25 steps, mostly for age"),
    ],
)
def test_a_silo_that_sends_steps_astray_makes_nobody_be_left_out(
    by: float, why: str, nodes: list[Node], tmp_path: Path
) -> None:
    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and reply.has_content() and "words" in str(reply.content.get("config")):
            far = np.array([0.0, by, 0.0, 0.0])
            reply.content = with_arrays(
                lambda model: {n: a + far if n == "gradient" else a for n, a in model.items()}
            )(reply.content)
        return reply

    with pytest.raises(FederationError, match=why) as e:
        regress(tmp_path / "r", Tap(nodes, change=change))
    fitted = read_fitted(tmp_path / "r" / SUMS)
    (found,) = fitted.groups
    assert found.members == NAMES and not found.left_out and found.failed in str(e.value)
    page = build_regression_page(fitted, "r")
    assert page.title == "Logistic regression" and not (page.notes or page.pictures)
    assert page.lead == "There is no result." and found.failed in page.warnings[0]


def test_a_silo_that_refuses_every_step_does_not_end_the_fit(
    nodes: list[Node], tmp_path: Path
) -> None:
    answered = set[str]()

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and reply.has_content() and "gradient" in str(reply.content):
            if "once" in answered:
                reply.__dict__["_error"] = Error(wire.TOO_FAR, "few rows would outweigh")
                reply.__dict__["_content"] = None
            answered.add("once")
        return reply

    (found,) = regress(tmp_path / "r", Tap(nodes, change=change)).groups
    assert found.members == tuple("abc") and "outweigh" in found.left_out["d"]


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"sums": ""}, "sends no sums for regression"),
        ({"sums": "regression", "min-group-size": 5}, "smaller than its min_group_size"),
        ({"secure": "required"}, "only in secure runs"),
        ({"statistics-from": 76}, "same value of"),
    ],
)
def test_a_silos_policy_keeps_it_out_and_the_others_go_on(
    own: Node, why: str, tmp_path: Path
) -> None:
    restart_silos()
    found = regress(tmp_path / "r", sites(tmp_path / "sites", d=own))
    assert why in {**found.silent, **found.groups[0].left_out}["d"]
    (fit,) = found.groups
    assert fit.members == ("a", "b", "c") and fit.state.done
    whose = "Together (3 of 4 silos, " if fit.left_out else "All silos (3 silos, "
    assert whose in write_report(str(tmp_path / "r"))[0].read_text()


def test_only_cox_takes_censored_times() -> None:
    columns = [Column("time", np.arange(40.0)), Column("event", np.tile([0.0, 1], 20), ("0", "1"))]
    rows = Rows([Column("age", np.arange(40.0) % 7)], columns)
    for model, target in (
        ("linear", "time"),
        ("poisson", "time"),
        ("linear", ""),
        ("logistic", ""),
    ):
        settings = {"model": model, "columns": [], "target": target}
        with pytest.raises(FitError, match="times are censored: fit cox"):
            design_of(rows, settings, 1)
    design_of(rows, {"model": "logistic", "columns": [], "target": "event"}, 1)


def test_a_silo_that_allows_no_model_alone_is_in_its_groups_alone(tmp_path: Path) -> None:
    restart_silos()
    nodes = sites(tmp_path / "sites", d={"sums": "regression"})
    found = regress(tmp_path / "r", nodes, each_alone=True)
    assert "of this silo alone" in found.alone["d"].failed and found.groups[0].members == NAMES


def test_a_silo_that_is_left_out_of_its_group_is_shown_alone(tmp_path: Path) -> None:
    restart_silos()
    nodes = sites(tmp_path / "sites", d={"min-group-size": 5})
    found = regress(tmp_path / "r", nodes, each_alone=True)
    assert found.groups[0].left_out.keys() == {"d"}
    shown = regression_summary(found)["groups"]
    assert [one["group"] for one in shown] == ["all", "alone d"]
    page = build_regression_page(found, "r")
    assert any(title.startswith("Silo d (1 silo, ") for title in page.tables)
    table, caption = page.pictures[0].table, page.pictures[0].caption
    assert caption.startswith("Squares: each silo alone. Circles: partly pooled. Diamonds: ")
    assert table is not None and caption.endswith("random-effects mean over silos.")
    assert [row[0] for row in table.rows] == [
        *("a", "b", "c"), "Together", "random effects", "Silo d",
    ]  # fmt: skip
    assert "--each-alone" in page.commands["Fit again"]


def test_two_sets_of_rows_that_differ_by_few_never_both_leave(
    nodes: list[Node], tmp_path: Path
) -> None:
    file = Path(str(nodes[0]["data.data"]))
    nodes[0]["data.test-data"] = str(nodes[1]["data.data"])
    lines = file.read_text().splitlines()
    regress(tmp_path / "first", nodes)
    for gone, why in ((1, "fewer than 10"), (9, "fewer than 10"), (40, "")):
        restart_silos()
        file.write_text("\n".join(lines[:-gone]))
        found = regress(tmp_path / f"without {gone}", nodes).groups[0].left_out.get("a", "")
        assert why in found and bool(why) == bool(found), gone


def test_the_answers_of_several_runs_together_show_no_few_rows(
    nodes: list[Node], tmp_path: Path
) -> None:
    """Fits with either, both and none of two columns: few rows of a silo lack both."""
    file = Path(str(nodes[0]["data.data"]))
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    lacking = [
        ["" if n < 36 else age, "" if 31 <= n < 67 else dose or "5", sex, ill]
        for n, (age, dose, sex, ill) in enumerate(rows)
    ]
    file.write_text("\n".join(map(",".join, [head, *lacking])))
    fits = [
        regress(tmp_path / columns, nodes, columns=columns).groups[0]
        for columns in ("sex", "sex,age", "sex,dose", "sex,age,dose")
    ]
    assert [fit.members for fit in fits] == [NAMES] * 3 + [NAMES[1:]]
    assert "combined with its answers about others" in fits[-1].left_out["a"]
    remembered = list((tmp_path / "sites" / "a" / "answered").rglob("*.npy"))
    assert len(remembered) == 2 * 3, "not what was refused"


def test_without_any_result_the_run_fails_with_the_reasons(tmp_path: Path) -> None:
    restart_silos()
    nodes = sites(tmp_path / "sites", **{name: {"sums": ""} for name in NAMES})
    with pytest.raises(FederationError, match=r"no logistic regression could be.*sends no sums"):
        regress(tmp_path / "r", nodes)
    shown = coterie("runs", "show", "r", "--runs-dir", str(tmp_path)).stdout
    assert "regression (logistic, heart)" in shown and "why              no logistic re" in shown
    assert "–" not in shown, "no rounds, and no mean over silos"
    with pytest.raises(FederationError, match=r"a, b, c, d: cannot take part: .*'agee'"):
        regress(tmp_path / "typo", sites(tmp_path / "others"), columns="agee")
    with pytest.raises(FederationError, match=r"no survival curve could be.*sends no sums"):
        regress(tmp_path / "s", nodes, model="survival", at="9")
    nodes = sites(tmp_path / "few")
    for node, events in zip(nodes, (3, 4, 5, 0), strict=True):
        lines = [f"{row},{row % 7},f,{'yes' if row < events else 'no'}" for row in range(150)]
        Path(str(node["data.data"])).write_text("\n".join(["age,dose,sex,ill", *lines]))
    why = r"all: all rows have the same ill: .* was of d only. Left out: a, b, c: .*few"
    with pytest.raises(FederationError, match=why):
        regress(tmp_path / "t", nodes)
    with pytest.raises(FederationError, match=r"timed out .*, or raise --wait\."):
        regress(tmp_path / "one", nodes[:1])
    why = reason(ask(wire.TRAIN_SUMS, nodes[0], strategy="hcct", task="heart"))
    assert "only in runs with strategy regression" in why
    assert unpacked(np.arange(6.0), 3).tolist() == [[0, 1, 2], [1, 3, 4], [2, 4, 5]]


def test_a_person_approves_one_model_and_no_other_is_answered(tmp_path: Path) -> None:
    restart_silos()
    node = sites(tmp_path / "sites", a={"approve": "ask"})[0]
    home = Path(str(node["home"]))
    settings = {"model": "logistic", "columns": ["age"], "target": ""}
    terms = {"strategy": "regression", "task": "heart", "run": "r-1", "of-run": "r-1"}
    terms[wire.SUMS_OF] = settings_text(settings)
    ask(wire.DESCRIBE, node, **terms)
    decide(home, "r-1", "approved")
    asked = {**terms, "group-size": 2, "purpose": "all", "server-round": 9}
    assert not ask(wire.TRAIN_SUMS, node, **asked).has_error()
    asked[wire.SUMS_OF] = settings_text({**settings, "columns": ["age", "dose"]})
    assert "approved this run with sums-of" in reason(ask(wire.TRAIN_SUMS, node, **asked))
    alone = {**terms, "group-size": 1, "purpose": "alone a", "server-round": 9}
    assert "asks for one of this silo alone" in reason(ask(wire.TRAIN_SUMS, node, **alone))
    asked[wire.SUMS_OF] = settings_text({**settings, "columns": []})
    ask(wire.DESCRIBE, node, **asked, **{wire.ALSO_ALONE: True})
    names = [f"laboratory value {number}" for number in range(200)]
    wide = {**terms, "run": "wide", wire.SUMS_OF: settings_text({**settings, "columns": names})}
    assert "waits for an approver" in reason(ask(wire.DESCRIBE, node, **wide), wire.UNAPPROVED)
    policy = '[policy]\nsums = ["regression"]\napprove = "ask"'
    (home / "silo.toml").write_text(f'name = "a"\ntask = "{node["task"]}"\n{policy}')
    shown = coterie("silo", "pending", "--home", str(home)).stdout
    assert "logistic regression; target: ill; all columns: age, dose, sex\n" in shown
    assert "also a model of this silo alone" in shown and '"columns"' not in shown
    (home / "silo.toml").write_text(f'name = "a"\ntask = "gone.toml"\n{policy}')
    shown = coterie("silo", "pending", "--home", str(home)).stdout
    assert "target: that of the task; all columns\n" in shown, "its task cannot be loaded"
    many = wire.asked_sums(settings_text({**settings, "columns": [str(n) for n in range(5000)]}))
    assert "target: that of the task" in many
    assert "silo.toml allows none" in "".join(leaving(terms, Policy()))
