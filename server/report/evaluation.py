"""The page of a run that evaluated given models: the matrix, tests, calibration and subgroups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from coterie import wire
from coterie.features.evaluation.answers import Difference, Part, Value
from coterie.features.evaluation.coordinator import Given, Judgement
from coterie.features.evaluation.numbers import HALF_WIDTH, holm, normal_p, standard_error
from coterie.pictures.page import Page, Table
from coterie.server.report.story import NO_NUMBER
from coterie.server.runs.record.metrics import Lead, p_text

LEVEL = 0.05
MISSING = "Why a figure is missing"
"""Title of a table."""
EVERYWHERE = "all silos"


@dataclass(frozen=True)
class Test:
    """A difference of two errors with its p, adjusted within its family by Holm's method.

    ``silo`` is where both models were measured, or ``all silos``; for the same model at two silos
    ``first`` and ``second`` are the silos.
    """

    silo: str
    first: str
    second: str
    value: float
    low: float | None
    high: float | None
    p: float
    adjusted: float = 1.0

    @property
    def found(self) -> bool:
        """Whether the difference is beyond chance."""
        return self.adjusted < LEVEL


# ---------------------------------------------------------------- tests


def paired(judgement: Judgement) -> list[Test]:
    """Return the tests of every two models at every silo, on the same samples."""
    return _adjusted(
        Test(silo, one.first, one.second, one.value, one.low, one.high, one.p)
        for silo, answer in sorted(judgement.answers.items())
        for one in answer.differences
        if one.p is not None
    )


def pooled(judgement: Judgement) -> list[Test]:
    """Return the tests of every two models over the silos that measured both.

    The value is the mean of the silos' differences, each counting once; the interval and p are for
    new samples of these silos, not for other silos.
    """
    by_pair: dict[tuple[str, str], list[Difference]] = {}
    for answer in judgement.answers.values():
        for one in answer.differences:
            if one.low is not None and one.high is not None:
                by_pair.setdefault((one.first, one.second), []).append(one)
    found = []
    for (first, second), own in sorted(by_pair.items()):
        mean = sum(one.value for one in own) / len(own)
        deviation = math.sqrt(sum(standard_error(one.low, one.high) ** 2 for one in own)) / len(own)
        p = normal_p(mean, deviation)
        if p is not None:
            ends = mean - HALF_WIDTH * deviation, mean + HALF_WIDTH * deviation
            found.append(Test(EVERYWHERE, first, second, mean, *ends, p))
    return _adjusted(found)


def between(judgement: Judgement) -> dict[str, list[Test]]:
    """Return model → the tests of its errors at every two silos, which share no samples."""
    found = {}
    for model in judgement.models:
        at = {
            silo: answer.models[model.name][wire.ERROR]
            for silo, answer in sorted(judgement.answers.items())
            if wire.ERROR in answer.models.get(model.name, {})
        }
        tests = []
        for (one, here), (other, there) in combinations(at.items(), 2):
            deviation = math.hypot(
                standard_error(here.low, here.high), standard_error(there.low, there.high)
            )
            value = there.value - here.value
            if (p := normal_p(value, deviation)) is not None:
                ends = value - HALF_WIDTH * deviation, value + HALF_WIDTH * deviation
                tests.append(Test(model.name, one, other, value, *ends, p))
        found[model.name] = _adjusted(tests)
    return found


def _adjusted(tests: Iterator[Test] | Sequence[Test]) -> list[Test]:
    every = list(tests)
    return [
        Test(**(vars(one) | {"adjusted": p}))
        for one, p in zip(every, holm([one.p for one in every]), strict=True)
    ]


# ---------------------------------------------------------------- for programs


def evaluation_summary(judgement: Judgement, lead: Lead) -> dict[str, Any]:
    """Return the figures and tests, for JSON."""
    cells = [
        _cell(judgement, silo, model) for silo in _silos(judgement) for model in judgement.models
    ]
    return {
        "task": judgement.task,
        "parent": judgement.parent,
        "metric": lead.metric,
        "unit": lead.unit,
        "models": [
            {"model": one.name, "group": list(one.group), "sha256": one.sha256, "only": one.only}
            for one in judgement.models
        ],
        "cells": cells,
        "pooled": [vars(one) for one in pooled(judgement)],
        "paired": [vars(one) for one in paired(judgement)],
        "between": [vars(one) for tests in between(judgement).values() for one in tests],
        "subgroups": [
            {
                "silo": silo,
                "column": part.column,
                "value": part.value,
                "samples": part.samples,
                "model": model,
                "figures": {name: vars(one) for name, one in figures.items()},
            }
            for silo, part in _parts(judgement)
            for model, figures in (part.models or {"": {}}).items()
        ],
        "left-out": {
            silo: dict(answer.left_out) for silo, answer in sorted(judgement.answers.items())
        },
    }


def _cell(judgement: Judgement, silo: str, model: Given) -> dict[str, Any]:
    answer = judgement.answers.get(silo)
    figures = answer.models.get(model.name, {}) if answer else {}
    return {
        "silo": silo,
        "model": model.name,
        "own": silo in model.group,
        "samples": answer.samples if answer else None,
        "figures": {name: vars(one) for name, one in figures.items()},
        "kept-back": list(answer.kept_back) if answer else [],
        "why": judgement.why_empty(silo, model),
    }


def _silos(judgement: Judgement) -> list[str]:
    return sorted({*judgement.answers, *judgement.silent})


def _parts(judgement: Judgement) -> Iterator[tuple[str, Part]]:
    for silo, answer in sorted(judgement.answers.items()):
        for part in answer.parts:
            yield silo, part


# ---------------------------------------------------------------- for people


def build_evaluation_page(judgement: Judgement, lead: Lead, name: str) -> Page:
    """Return the complete page, ready to be rendered."""
    return Page(
        title=f"Models of {judgement.parent} at every silo",
        subtitle=f"run {name} · task {judgement.task} · nothing was trained",
        lead=lead_sentence(judgement),
        detail=f"Cells are the {lead.title} on each silo's test data with its 95% interval; "
        f"{lead.direction}. An asterisk marks the model of the silo's own group. "
        "A silo's own model (personalised, or mixed with λ) stays there and is not measured.",
        figures={
            "models": str(len(judgement.models)),
            "silos with figures": f"{len(judgement.answers)} of {len(_silos(judgement))}",
            "test samples": f"{sum(one.samples for one in judgement.answers.values()):,}",
        },
        tables=dict(_tables(judgement, lead)),
        notes=[
            "p values of each table are adjusted for their number by Holm's method; a difference "
            f"below {LEVEL} is called beyond chance. At one silo, two models are compared on the "
            "same samples. Intervals are for new samples of these silos, not for other silos.",
            "Calibration: an intercept of 0 and a slope of 1 are best. A positive intercept means "
            "that the outcome is more frequent, or larger, than the model says; a slope below 1 "
            "that its answers are too extreme.",
        ],
        commands={"Evaluate again": f"coterie evaluate {judgement.parent} --task {judgement.task}"},
    )


def lead_sentence(judgement: Judgement) -> str:
    """Return the most important sentence: where another model is better than a silo's own."""
    own = {silo: model.name for model in judgement.models for silo in model.group}
    better, tested = dict[str, list[str]](), set[str]()
    for one in paired(judgement):
        if own.get(one.silo) in (one.first, one.second):
            tested.add(one.silo)
        worse, best = (one.first, one.second) if one.value < 0 else (one.second, one.first)
        if one.found and own.get(one.silo) == worse:
            better.setdefault(one.silo, []).append(best)
    count = wire.counted(len(judgement.models), "model")
    text = f"{count} evaluated at {wire.counted(len(judgement.answers), 'silo')}."
    if better:
        named = "; ".join(f"{silo}: {', '.join(models)}" for silo, models in sorted(better.items()))
        return f"{text} A model of other silos is better beyond chance at {named}."
    if not tested:
        return text
    where = "" if tested >= own.keys() else " where it could be tested"
    return f"{text} At no silo{where} is another model better than its own group's beyond chance."


def _tables(judgement: Judgement, lead: Lead) -> Iterator[tuple[str, Table]]:
    yield "Every model at every silo", _matrix(judgement, lead)
    yield MISSING, Table(("silo", "model", "why"), list(_missing(judgement)))
    shown = [*pooled(judgement), *paired(judgement)]
    head = (f"difference ({lead.points})", "95%", "p", "p (Holm)")
    yield (
        "Two models on the same samples",
        Table(
            ("where", "model", "less the error of", *head),
            [(one.silo, one.second, one.first, *_tested(lead, one)) for one in shown],
        ),
    )
    apart = [one for tests in between(judgement).values() for one in tests if one.found]
    yield (
        "One model at two silos, where the difference is beyond chance",
        Table(
            ("model", "silo", "less the error at", *head),
            [(one.silo, one.second, one.first, *_tested(lead, one)) for one in apart],
        ),
    )
    yield (
        "Calibration",
        Table(
            ("silo", "model", "intercept", "slope", "calibration error"),
            [row for silo in _silos(judgement) for row in _calibration(judgement, silo)],
        ),
    )
    yield "Subgroups", _subgroups(judgement, lead)
    left_out = [
        (silo, column, why)
        for silo, answer in sorted(judgement.answers.items())
        for column, why in sorted(answer.left_out.items())
    ]
    yield "Subgroups that are missing", Table(("silo", "column", "why"), left_out)


def _matrix(judgement: Judgement, lead: Lead) -> Table:
    rows = [
        (
            *(silo, _samples(judgement, silo)),
            *(_text(judgement, lead, silo, model) for model in judgement.models),
        )
        for silo in _silos(judgement)
    ]
    return Table(("silo", "test samples", *_names(judgement)), rows, cards=True)


def _subgroups(judgement: Judgement, lead: Lead) -> Table:
    rows = [
        (
            *(silo, part.column, part.value),
            "hidden" if part.samples is None else f"{part.samples:,}",
            *(
                _value(lead, part.models.get(name, {}).get(wire.ERROR))
                for name in _names(judgement)
            ),
        )
        for silo, part in _parts(judgement)
    ]
    return Table(("silo", "column", "subgroup", "test samples", *_names(judgement)), rows)


def _names(judgement: Judgement) -> list[str]:
    return [one.name for one in judgement.models]


def _samples(judgement: Judgement, silo: str) -> str:
    answer = judgement.answers.get(silo)
    return NO_NUMBER if answer is None else f"{answer.samples:,}"


def _text(judgement: Judgement, lead: Lead, silo: str, model: Given) -> str:
    answer = judgement.answers.get(silo)
    figure = answer.models.get(model.name, {}).get(wire.ERROR) if answer else None
    if figure is None:
        return _short(judgement.why_empty(silo, model))
    return _value(lead, figure) + (" *" if silo in model.group else "")


def _short(why: str) -> str:
    """Return the beginning of a reason; the whole one is in the next table."""
    for known in ("not sent", "kept back", "not defined"):
        if why.startswith(known):
            return known
    return "refused or silent"


def _value(lead: Lead, one: Value | None) -> str:
    if one is None:
        return NO_NUMBER
    text = lead.text(one.value)
    if one.low is None or one.high is None:
        return text
    ends = sorted((lead.value(one.low), lead.value(one.high)))
    return f"{text} ({lead.interval(*ends)})"


def _missing(judgement: Judgement) -> Iterator[tuple[str, str, str]]:
    for silo in _silos(judgement):
        if silo in judgement.silent:
            yield silo, "all", judgement.silent[silo]
            continue
        for model in judgement.models:
            if why := judgement.why_empty(silo, model):
                yield silo, model.name, why
        kept = [name for name in judgement.answers[silo].kept_back if name != wire.ERROR]
        if kept:
            yield silo, "all", f"kept back by the silo (share_metrics): {', '.join(kept)}"


def _tested(lead: Lead, one: Test) -> tuple[str, str, str, str]:
    ends = (
        NO_NUMBER
        if one.low is None or one.high is None
        else f"{lead.gain(one.low)} to {lead.gain(one.high)}"
    )
    return lead.gain(one.value), ends, p_text(one.p), p_text(one.adjusted)


def _calibration(judgement: Judgement, silo: str) -> Iterator[tuple[str, ...]]:
    answer = judgement.answers.get(silo)
    for model, figures in (answer.models if answer else {}).items():
        found = [figures.get(name) for name in (*wire.CALIBRATION, "calibration-error")]
        if any(found):
            yield silo, model, *(_number(one) for one in found)


def _number(one: Value | None) -> str:
    if one is None:
        return NO_NUMBER
    ends = "" if one.low is None or one.high is None else f" ({one.low:.3g} to {one.high:.3g})"
    return f"{one.value:.3g}{ends}"
