"""Silos beside their group: partial pooling as in the joint model, and categories they lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.features.sums.contract import State
from coterie.features.sums.coordinator import Fit, Fits
from coterie.features.sums.regression.newton import references_of
from coterie.features.sums.regression.numbers import spread
from coterie.features.sums.regression.pooling import partly_pooled
from coterie.features.sums.rows import Rows
from coterie.server.report.regression import build_regression_page, regression_summary
from coterie.server.runs.fitted import Fitted
from coterie.tasks.base import Column
from tests.unit.server import test_cox, test_regression
from tests.unit.server.test_regression import fit

Array = NDArray[np.float64]


def without_a_category(rows: Rows) -> Rows:
    found = [
        replace(one, values=np.minimum(one.values, 1)) if one.categories else one
        for one in rows.inputs
    ]
    return replace(rows, inputs=found, kept={})


def jointly(whole: State, alone: list[State]) -> list[tuple[Array, Array]]:
    """Return all θᵢ by one least-squares problem in them and μ, weighted by T⁻¹ and S⁻¹."""
    size = len(whole.arrays["coefficients"])
    centre = np.eye(size)
    if size > len(whole.arrays["centres"]):
        centre[0, 1:] = whole.arrays["centres"]
    tau2 = []
    for i in range(size):
        own = [one.arrays for one in alone if one.arrays["used"][i]]
        values = [float((centre @ one["coefficients"])[i]) for one in own]
        errors = [float((centre @ one["covariance"] @ centre.T)[i, i] ** 0.5) for one in own]
        found = spread(values, errors)
        tau2.append(found.tau2 if found else 0.0)
    count = len(alone)
    scale = np.sqrt(np.diag(whole.arrays["covariance"]))
    prior = np.diag(1 / np.maximum(tau2, 1e-9 * scale**2))  # almost 0 where τ² is 0
    precision, right = np.zeros(((count + 1) * size,) * 2), np.zeros((count + 1) * size)
    for n, one in enumerate(alone):
        used = np.flatnonzero(one.arrays["used"])
        inside = np.linalg.inv(one.arrays["covariance"][np.ix_(used, used)])
        at = (n + 1) * size + used
        precision[np.ix_(at, at)] += inside
        right[at] += inside @ one.arrays["coefficients"][used]
        pair = np.zeros((size, (count + 1) * size))
        pair[:, :size], pair[:, (n + 1) * size : (n + 2) * size] = centre, -centre
        precision += pair.T @ prior @ pair
    unit = np.tile(scale, count + 1)
    covariance = np.linalg.inv(precision * np.outer(unit, unit)) * np.outer(unit, unit)
    theta = covariance @ right
    parts = [slice((n + 1) * size, (n + 2) * size) for n in range(count)]
    return [(theta[own], np.sqrt(np.diag(covariance)[own])) for own in parts]


Draw = Callable[..., Rows]
KINDS: Mapping[str, tuple[Draw, dict[str, Any]]] = {
    **{one: (test_regression.rows_of, {"model": one}) for one in test_regression.MEANS},
    "cox": (test_cox.rows_of, {}),
}


@pytest.mark.parametrize("model", KINDS)
def test_shrunk_coefficients_are_those_of_the_joint_model(model: str) -> None:
    draw, more = KINDS[model]
    rows = {f"s{seed}": draw(seed, unit=1e-4, **more) for seed in range(4)}
    rows["s3"] = without_a_category(rows["s3"])
    whole = fit(rows, model)
    alone = [fit({name: one}, model) for name, one in rows.items()]
    found = partly_pooled(whole.arrays, [one.arrays for one in alone])
    moved = 0.0
    for one, mine, expected in zip(alone, found, jointly(whole, alone), strict=True):
        used, own = one.arrays["used"], one.arrays["coefficients"]
        assert np.isnan(mine[0][~used]).all() and np.isnan(mine[1][~used]).all()
        errors = np.sqrt(np.diag(one.arrays["covariance"]))[used]
        assert np.abs((mine[0] - expected[0])[used] / errors).max() < 1e-3
        assert mine[1][used] == pytest.approx(expected[1][used], rel=1e-3)
        moved = max(moved, float(np.abs((mine[0] - own)[used] / errors).max()))
    assert moved > 0.3, "it shrinks"


def test_one_coefficient_is_shrunk_by_the_textbooks_factor() -> None:
    """Q = 18 with two degrees of freedom: τ² = 8, and σ² / (σ² + τ²) = 1 / 9."""
    base = {"used": np.array([True]), "centres": np.zeros(1), "covariance": np.ones((1, 1))}
    silos = [{**base, "coefficients": np.array([value])} for value in (0.0, 3.0, 6.0)]
    (first, error), (middle, _), _ = partly_pooled({**base, "coefficients": np.ones(1)}, silos)
    assert (first[0], middle[0]) == pytest.approx((3 / 9, 3.0))
    assert error[0] ** 2 == pytest.approx(8 / 9 + 9 / 3 / 9**2)


def with_kinds(rows: Rows, kinds: str, declared: str = "fmx") -> Rows:
    """The rows, in turn of each of these categories of sex."""
    which = np.array([declared.index(kind) for kind in kinds])[np.arange(len(rows)) % len(kinds)]
    return replace(
        rows, kept={}, inputs=[*rows.inputs[:2], Column("sex", which * 1.0, (*declared,))]
    )


def fitted_of(silos: Mapping[str, Rows], model: str, *more: Fit) -> Fitted:
    """A run in which all silos together, and each of them alone, were fitted."""
    fits = [Fit("all", tuple(silos), fit(silos, model)), *more]
    fits += [Fit(f"alone {n}", (n,), fit({n: one}, model)) for n, one in silos.items()]
    settings = {"model": model, "columns": [], "target": ""}
    return Fitted("heart", "regression", settings, "", Fits(tuple(fits)))


@pytest.mark.parametrize("model", ["linear", "logistic", "cox"])
def test_if_no_row_has_the_first_category_others_are_compared_with_the_next(model: str) -> None:
    of = test_cox.rows_of if model == "cox" else partial(test_regression.rows_of, model=model)
    silos = {f"s{seed}": of(seed) for seed in range(3)}
    found, usual = (
        fit({name: with_kinds(one, "xm", declared) for name, one in silos.items()}, model)
        for declared in ("fmx", "mx")
    )
    assert references_of(found) == ["sex = m"] and references_of(usual) == []
    keep = np.array([word != "sex = m" for word in found.words[:-1]])
    own, whole = found.arrays["coefficients"][keep], found.arrays["covariance"][keep][:, keep]
    assert own == pytest.approx(usual.arrays["coefficients"], rel=1e-6)
    assert whole == pytest.approx(usual.arrays["covariance"], rel=1e-6)
    silos = {name: with_kinds(one, "xmf" if name == "s0" else "xm") for name, one in silos.items()}
    fitted = fitted_of(silos, model, Fit("A", ("s1", "s2"), found))
    groups = regression_summary(fitted)["groups"]
    assert [one["references"] for one in groups] == [[], ["sex = m"]]
    last = [one["coefficients"][-1] for one in groups]
    assert [one["name"] for one in last] == ["sex = x"] * 2
    assert [set(one["alone"]) for one in last] == [{"s0"}, {"s1", "s2"}]
    assert [set(one["partly-pooled"]) for one in last] == [{"s0"}, {"s1", "s2"}]
    page = build_regression_page(fitted, "r")
    assert any("compared with sex = m" in note for note in page.notes)


@pytest.mark.parametrize("model", ["poisson", "cox"])
@pytest.mark.parametrize(
    ("name", "kinds", "ward", "in_intercept"),
    [("sex = m", "m", None, True), ("ward", "mf", 7.0, True), ("ward", "mf", 0.0, False)],
)
def test_a_column_with_one_value_at_a_silo_is_left_out_there_and_in_an_intercept_if_not_0(
    model: str, name: str, kinds: str, ward: float | None, in_intercept: bool
) -> None:
    of = test_cox.rows_of if model == "cox" else partial(test_regression.rows_of, model=model)
    silos = {f"s{seed}": with_kinds(of(seed), "mf", "fm") for seed in range(3)}
    silos["s2"] = with_kinds(silos["s2"], kinds, "fm")
    for seed, rows in enumerate(silos.values()):
        values = np.random.default_rng(9 + seed).normal(size=len(rows))
        if seed == 2 and ward is not None:
            values = np.full(len(rows), ward)
        rows.inputs.append(Column("ward", values))
    fitted = fitted_of(silos, model)
    (group,) = regression_summary(fitted)["groups"]
    compared = {one["name"]: one for one in group["coefficients"]}
    expected = {"dose": {*silos}, name: {"s0", "s1"}}
    if model != "cox":
        expected["(intercept)"] = {"s0", "s1"} if in_intercept else {*silos}
    for what, where in expected.items():
        found = [set(compared[what][kind]) for kind in ("alone", "partly-pooled")]
        assert found == [where] * 2, what
    assert any(f"alone s2: {name}" in note for note in build_regression_page(fitted, "r").notes)
