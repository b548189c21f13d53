"""Cox regression by sums: equal to all rows stratified by silo, what a silo refuses, a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from numpy.typing import NDArray
from scipy.optimize import root

from coterie.features.sums.contract import FitError, Question
from coterie.features.sums.regression.design import design_of, sums_of
from coterie.features.sums.rows import Rows
from coterie.server.report.command import write_report
from coterie.tasks.base import Column
from tests.kit import Node, Tap, restart_silos
from tests.tables import table_node, written
from tests.unit.server.test_json import documented, fields_of
from tests.unit.server.test_regression import NAMES, beside, fit, refused, regress

Array = NDArray[np.float64]
SETTINGS = {"model": "cox", "columns": [], "target": ""}


def rows_of(seed: int, *, count: int = 120, unit: float = 1.0, **more: Array) -> Rows:
    """Rows of a silo with many equal times; each silo has another baseline hazard."""
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(60 + 5 * seed, 8, count), rng.normal(0, 1, count)
    sex = rng.integers(0, 2, count).astype(np.float64)
    hazard = np.exp(0.05 * (age - 60) - 0.6 * dose + 0.4 * sex)
    until, censored = rng.exponential(1, count) * (seed + 1) / hazard, rng.exponential(2, count)
    time = np.ceil(20 * np.minimum(until, censored))
    columns = {
        **{"age": Column("age", age), "dose": Column("dose", dose * unit)},
        **{"sex": Column("sex", sex, ("f", "m"))},
        **{name: Column(name, values) for name, values in more.items()},
    }
    event = Column("event", (until <= censored).astype(np.float64), ("no", "yes"))
    return Rows(list(columns.values()), [Column("time", time), event])


def outcome(rows: Rows, **targets: Array) -> Rows:
    found = [replace(one, values=targets.get(one.name, one.values)) for one in rows.targets]
    return replace(rows, targets=found, kept={})


def textbook(silos: Mapping[str, Rows], least: int) -> tuple[Array, Array]:
    """Return coefficients and errors: event by event, by a solver and differences of the score."""
    parts = []
    for rows in silos.values():
        x = design_of(rows, SETTINGS, 1).x
        time, event = (one.values for one in rows.targets)
        for now in np.unique(time[event == 1]):
            at_risk, tied = time >= now, (time == now) & (event == 1)
            if at_risk.sum() >= least:
                parts.append((x[at_risk], x[tied]))
    scale = np.concatenate([x for x, _ in parts]).std(axis=0)

    def score(beta: Array) -> Array:
        total = np.zeros(len(beta))
        for x, tied in parts:
            w, v = np.exp((x - x[0]) / scale @ beta), np.exp((tied - x[0]) / scale @ beta)
            for number, own in enumerate(tied):
                share = number / len(tied)
                mean = (w @ x - share * v @ tied) / (w.sum() - share * v.sum())
                total += (own - mean) / scale
        return total

    found = root(score, np.zeros(len(scale)), tol=1e-13).x
    steps = 1e-4 * np.eye(len(scale))
    slopes = np.array([(score(found + h) - score(found - h)) / 2e-4 for h in steps])
    return found / scale, np.sqrt(np.diag(np.linalg.inv(-slopes))) / scale


@pytest.mark.parametrize(("unit", "least"), [(1.0, 10), (1e-7, 25)])
def test_sums_give_what_all_rows_stratified_by_silo_give(unit: float, least: int) -> None:
    silos = {f"s{seed}": rows_of(seed, unit=unit) for seed in range(3)}
    silos["s2"] = outcome(silos["s2"], event=np.zeros(120))
    state = fit(silos, "cox", least=least)
    beta, errors = textbook(silos, least)
    assert state.words == ("age", "dose", "sex = m", "time to event") and state.step <= 10
    assert state.arrays["coefficients"] == pytest.approx(beta, rel=1e-6)
    assert np.sqrt(np.diag(state.arrays["covariance"])) == pytest.approx(errors, rel=1e-6)
    events = sum(one.targets[1].values.sum() for one in silos.values())
    assert (state.arrays["count"], state.arrays["events"]) == (360, events)
    silos["s0"] = outcome(silos["s0"], time=9 * silos["s0"].targets[0].values)
    others = fit(silos, "cox", least=least)
    assert np.array_equal(others.arrays["coefficients"], state.arrays["coefficients"])


ONE = rows_of(0)
TIME, EVENT = (one.values for one in ONE.targets)
LATE = np.argsort(np.argsort(-TIME, kind="stable")) < 9
WRONG: dict[str, tuple[Rows, int, str]] = {
    "no events": (outcome(ONE, event=np.zeros(120)), 10, "no row has an event"),
    "few events": (outcome(ONE, event=(np.arange(120) < 9) * 1.0), 10,
        r"nearly all .* the target: .*_from\)$"),
    "late events": (outcome(ONE, event=np.maximum(LATE, EVENT * (np.cumsum(EVENT) < 9))), 10,
        "too few events"),
    "classes": (replace(ONE, targets=ONE.targets[1:]), 10, "target has kind survival"),
    "an order": (rows_of(0, rank=-TIME), 10, "coefficients of rank have no .*monotone"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_has_no_result_is_named(what: str) -> None:
    rows, least, why = WRONG[what]
    with pytest.raises(FitError, match=why):
        fit({"a": rows}, "cox", least=least)


def test_a_column_that_differs_between_silos_alone_is_named() -> None:
    silos = {f"s{seed}": rows_of(seed, ward=np.full(120, float(seed))) for seed in range(2)}
    with pytest.raises(FitError, match="ward has one value in each silo"):
        fit(silos, "cox")


def test_coefficients_that_a_coordinator_chooses_show_no_few_rows() -> None:
    scale = {"centres": np.zeros(3), "widths": np.ones(3)}
    dose = ONE.inputs[1].values
    fifteen = np.argsort(np.argsort(dose)) // 8
    few = "few rows would outweigh"
    for size, persons, why in (
        *((0.01, None, ""), (30.0, None, few), (1e5, None, few)),
        *((1.0, None, ""), (1.0, fifteen, few)),
    ):
        question = Question("regression", SETTINGS, {**scale, "beta": np.array([0.0, size, 0.0])})
        found = refused(replace(ONE, persons=persons), question)
        assert why in found and bool(why) == bool(found), (size, persons)


def test_persons_under_observation_are_counted_instead_of_rows() -> None:
    """If the last nine rows belong to one person instead of nine, their events do not count."""
    rows = outcome(ONE, time=np.arange(120.0), event=(np.arange(120) % 2) * 1.0)
    many = np.concatenate([np.arange(100), np.repeat(100, 20)])
    for persons, expected in ((None, 55), (np.arange(120), 55), (many, 46)):
        design = design_of(replace(rows, persons=persons, kept={}), SETTINGS, 10)
        assert design.spells is not None and design.spells.event.sum() == expected
        assert sums_of(design, "cox", {}, 10)["sums"][-1] == 60, "all events are known"


TABLE = """
kind = "table"
name = "relapse"
target = {kind = "survival", time = "days", event = "died"}
numeric = ["age", "dose"]
network = "mclr"
[categorical]
sex = ["f", "m"]
"""


def sites(folder: Path) -> list[Node]:
    task = written(folder / "relapse.toml", TABLE)
    nodes: list[Node] = []
    for number, name in enumerate(NAMES):
        rows = rows_of(number)
        columns = [one.values for one in (*rows.inputs, *rows.targets)]
        lines = [
            f"{age:.3f},{dose:.3f},{'fm'[int(sex)]},{days},{died:.0f}"
            for age, dose, sex, days, died in zip(*columns, strict=True)
        ]
        own = {"home": str(folder / name), "sums": "regression,alone"}
        nodes.append(table_node(task, name, "age,dose,sex,days,died", lines, **own))
    return nodes


def test_a_run_shows_hazard_ratios_and_leaves_out_a_silo_that_lies(tmp_path: Path) -> None:
    restart_silos()

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and "words" in str(reply.content.get("config")):
            reply.content = beside(sums=[1.0, 1.0, 1.0, 1e4])(reply.content)
        return reply

    found: Any = regress(tmp_path / "r", Tap(sites(tmp_path), change=change), task="relapse",
        model="cox", each_alone=True)  # fmt: skip
    assert "cannot have the outcome" in found.groups[0].left_out["d"]
    assert found.groups[0].members == ("a", "b", "c") and found.groups[0].state.done
    (file,) = write_report(str(tmp_path / "r"), kind="json")
    written = json.loads(file.read_text())
    (group,) = written["groups"]
    assert fields_of(written) <= documented("regress --json")
    dose = group["coefficients"][1]
    assert (dose["name"], set(dose["alone"]), dose["estimate"]["high"] < 0) == (
        "dose",
        {*"abc"},
        True,
    )
    assert 100 < group["events"] < group["rows"] and dose["between-silos"]["silos"] == 3
    text = write_report(str(tmp_path / "r"))[0].read_text()
    shown = "hazard ratio", "own baseline hazard", "Coefficient of dose", "do not count in the fit"
    assert all(one in text for one in shown)
