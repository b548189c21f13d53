"""Any question and any answer about models by sums is refused with a reason, or within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import wire
from coterie.features.sums.contract import (
    Answer,
    FitError,
    Question,
    check_answer,
    decode_answer,
    encode_answer,
    read_settings,
)
from coterie.features.sums.regression.silo import Regressing
from coterie.features.sums.regression.survival import family_of
from coterie.features.sums.trees import questions
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Level
from coterie.features.sums.trees.histograms import Rows, of_labels
from tests.unit.server import test_cox, test_regression
from tests.unit.server.test_regression import anyway
from tests.unit.strategies.test_grown_trees import fewest_summed

CASES = 150
LEAST, LEAST_GROWING = 5, 10
RNG = np.random.default_rng(0)
GROWING = Rows(
    RNG.choice(np.array([-1, 0, 1, np.nan], np.float32), (40, 3)),
    RNG.integers(0, 2, (40, 1)).astype(np.float64),
    of_labels,
    LEAST_GROWING,
)
EDGES = tuple(np.array(own, np.float32) for own in ([-0.5, 0.5], [0.0], []))
CELLS = [np.array([-(2**31), 0, 2**20])] * 3
TREES = Ensemble.empty(2, 1, 2, 3)
TREES.feature[0, 0, 0] = TREES.feature[1, 0, 0] = 1
ASKED = {
    "base": questions.base(np.zeros(1, np.float32)),
    "cells": questions.cells(CELLS),
    "level": questions.levels(Level(TREES, 1, 1, np.array([[0, 1], [0, 2]])), EDGES)[0],
}

numbers = st.sampled_from([0, 1, -1, 2, 3, 0.5, 1e15, -1e15, 1e300, np.nan, np.inf, -np.inf, 2**62])
kinds = st.sampled_from(["f4", "f8", "i4", "i8", "u1", "?", "c16", "U3"])
shapes = st.sampled_from([(), (0,), (1,), (2,), (3,), (2, 2), (1, 1, 3), (2, 1, 4), (2, 0, 3)])


@st.composite
def changed(draw: st.DrawFn, arrays: dict[str, Any]) -> dict[str, Any]:
    """The same arrays, but for a value, an array, or one that is missing or too many."""
    found = {name: array.copy() for name, array in arrays.items()}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*sorted(arrays), "odd"]))
        what = draw(st.sampled_from(["value", "array", "gone"]))
        with np.errstate(all="ignore"):
            if what == "value" and name in found and found[name].size:
                array = found[name]
                if array.dtype.kind in "fiu":
                    value = np.array(draw(numbers)).astype(array.dtype)
                    array.reshape(-1)[draw(st.integers(0, array.size - 1))] = value
            elif what == "array":
                filling = draw(numbers)
                found[name] = np.full(draw(shapes), filling).astype(draw(kinds))
            elif what == "gone":
                found.pop(name, None)
    return found


@settings(max_examples=CASES, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(ASKED)))
def test_any_question_about_trees_is_refused_or_answered_without_few_rows(
    data: st.DataObject, kind: str
) -> None:
    asked = data.draw(changed(ASKED[kind].arrays))
    try:
        found = questions.answer(asked, GROWING)
    except questions.AnswerError:
        return
    assert np.isfinite(found).all()
    if found.ndim == 3:  # histograms
        columns = np.split(found, np.cumsum(asked["sizes"] + 2)[:-1], axis=1)
        assert min(map(fewest_summed, columns)) > LEAST_GROWING - 1e-9
    else:
        counts = found[..., 2] if found.ndim > 1 else found
        assert not ((counts > 0) & (counts < LEAST_GROWING)).any()


@settings(max_examples=CASES, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(ASKED)))
def test_any_answer_about_trees_is_refused_or_sums_over_the_rows_of_a_silo(
    data: st.DataObject, kind: str
) -> None:
    question = ASKED[kind]
    good = {questions.RECORD: questions.answer(question.arrays, GROWING)}
    try:
        found = questions.read_answer(question, data.draw(changed(good)), 40)
    except questions.AnswerError:
        return
    counts = found[..., 2] if found.ndim > 1 else found
    assert found.shape == question.shape and np.isfinite(found).all()
    assert (counts >= 0).all() and counts.sum() <= 40 * 3 * max(len(found), 1)


FITS = {
    "linear": (test_regression.rows_of(0, "linear"), {"columns": ["year", "sex"]}),
    "logistic": (test_regression.rows_of(0, "logistic"), {"columns": ["year", "sex"]}),
    "poisson": (test_regression.rows_of(0, "poisson"), {"columns": ["year", "sex"]}),
    "cox": (test_cox.rows_of(0), {"columns": ["age", "dose", "sex"]}),
    "survival": (test_cox.rows_of(0), {"columns": [], "at": [4.0, 9.0, 25.0]}),
}


def question_of(model: str, arrays: dict[str, Any] | None = None) -> Question:
    scale = {"centres": np.zeros(3), "widths": np.ones(3), "beta": np.zeros(3 + (model != "cox"))}
    given = ({} if model == "survival" else scale) if arrays is None else arrays
    return Question("regression", {"model": model, "target": "", **FITS[model][1]}, given)


@settings(max_examples=CASES, deadline=None)
@given(data=st.data(), model=st.sampled_from(sorted(FITS)))
def test_any_question_of_a_regression_is_refused_or_answered_within_bounds(
    data: st.DataObject, model: str
) -> None:
    drawn = data.draw(changed(dict(question_of(model).arrays)))
    arrays = {name: array for name, array in drawn.items() if array.dtype == np.float64}
    arrays = {name: a for name, a in arrays.items() if not a.size or np.abs(a).max() <= 1e100}
    asked = question_of(model, arrays)
    junk = st.sampled_from([None, 3, "", [], ["year"], [3], {}, "logistic", [1.0, 0.5], "x" * 99])
    more = data.draw(st.dictionaries(st.sampled_from(["model", "columns", "target", "at"]), junk))
    asked = Question(asked.family, {**asked.settings, **more}, arrays)
    rows, side = FITS[model][0], Regressing()
    try:
        with np.errstate(all="ignore"):
            answer = side.answer(asked, rows, LEAST, anyway)
        check_answer(side.family(asked.settings), asked, answer, len(rows))
    except (FitError, wire.WireError):
        return
    assert answer.arrays["count"] >= LEAST


@settings(max_examples=CASES, deadline=None)
@given(data=st.data(), model=st.sampled_from(sorted(FITS)))
def test_any_answer_of_a_regression_is_refused_or_possible(data: st.DataObject, model: str) -> None:
    rows, asked = FITS[model][0], question_of(model)
    good = Regressing().answer(asked, rows, LEAST, anyway)
    arrays = data.draw(changed(dict(good.arrays)))
    words = data.draw(st.sampled_from([good.words, (), good.words[:-1], (*good.words, "odd")]))
    try:
        content = encode_answer(Answer(arrays, words))
        found = decode_answer(family_of(asked.settings), asked, content, len(rows))
    except wire.WireError:
        return
    assert all(np.isfinite(array).all() for array in found.arrays.values())
    assert 1 <= found.arrays["count"][0] <= len(rows)


@settings(max_examples=20, deadline=None)
@given(text=st.one_of(st.none(), st.integers(), st.text(), st.just("[" * 99_000), st.just("[1]")))
def test_any_text_of_settings_is_refused_or_an_object(text: object) -> None:
    try:
        assert isinstance(read_settings(text), dict)
    except wire.WireError as error:
        assert wire.SUMS_OF in str(error)
