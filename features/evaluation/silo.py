"""What a silo says of given models: figures on its test data, differences, and subgroups.

Nothing is trained or kept. The figures that leave are those that its policy allows; every other one
is named as kept back. Models are compared on the same samples. Subgroups are those that
``silo.toml`` names; one of few samples, or persons, is hidden, together with another one from which
it could be computed (``client.work.small_cells``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import isfinite

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.home.subgroups import read_subgroup
from coterie.client.work.evaluate import members_of
from coterie.client.work.figures import Array, Figure, resampled, with_intervals
from coterie.client.work.measure import evaluate_with_evidence, leading, metrics_of
from coterie.client.work.request import Request
from coterie.client.work.session import Session
from coterie.client.work.small_cells import persons_by_cell, suppress
from coterie.client.work.weights import load_weights, travelling
from coterie.features.evaluation.answers import (
    Answer,
    Difference,
    Part,
    Value,
    encode_answer,
    names_in,
)
from coterie.features.evaluation.numbers import (
    calibration_of_classes,
    calibration_of_numbers,
    discordant_p,
    normal_p,
)
from coterie.tasks.base import Column, Persons, TaskError
from coterie.tasks.problems import Classes, Evidence, Numbers, Problem
from coterie.wire.limits import MAX_ANSWER_BYTES, MAX_NAME, MAX_WORD

log = logging.getLogger("coterie.silo")

LOW_LEVEL, HIGH_LEVEL = 2.5, 97.5


@dataclass(frozen=True)
class Measured:
    """A model's answers to the test samples, and its mean loss."""

    evidence: Evidence
    loss: float


def evaluate_given(request: Request) -> RecordDict:
    """Measure every model of the message on the test data; say what the policy allows."""
    session, policy = request.session, request.session.settings.policy
    lead = leading(session.task, request.metric())
    measured: dict[str, Measured] = {}
    try:
        models = members_of(request)
        names = names_in(request.config, len(models))
        most = policy.max_evaluations
        if most and len(models) > most:
            request.refuse_for(f"evaluates at most {most} models (max_evaluations).")
        for name, model in zip(names, models, strict=True):
            load_weights(session.model, _in_order(session, model))
            found, evidence = evaluate_with_evidence(
                session.task, session.model, session.data.test, metric=lead.name
            )
            measured[name] = Measured(evidence, found.loss)
    except (wire.WireError, ValueError) as error:
        request.refuse_for(f"cannot evaluate these models: {error}")
    everyone = np.arange(len(session.data.test))
    parts, left_out = list[Part](), dict[str, str]()
    if request.config.get(wire.STRATEGY) == wire.ONLY_EVALUATION:
        parts, left_out = _subgroups(session, measured, lead)
    answer = Answer(
        samples=len(everyone),
        models={n: _permitted(session, _figures(session, m, lead)) for n, m in measured.items()},
        kept_back=_kept_back(session, lead),
        differences=tuple(_differences(session, measured, lead)),
        parts=tuple(parts),
        left_out=left_out,
    )
    content = encode_answer(answer)
    if sum(len(str(value)) for value in content[wire.CONFIG].values()) > MAX_ANSWER_BYTES:
        request.refuse_for(
            f"has more than {MAX_ANSWER_BYTES:,} bytes of figures: evaluate fewer models at once, "
            "or name fewer subgroups in silo.toml."
        )
    return content


def _in_order(session: Session, model: wire.Model) -> wire.Model:
    """Return the arrays in the order of the silo's own; a file has another."""
    own = travelling(session.model)
    return {name: model[name] for name in own} if own.keys() == model.keys() else model


# ---------------------------------------------------------------- figures


def _figures(
    session: Session, model: Measured, lead: wire.Metric, rows: NDArray[np.intp] | None = None
) -> dict[str, Figure]:
    """Return all figures, of all test samples or of some rows, by name on the wire."""
    problem, persons = session.task.problem, session.data.test.persons
    evidence = model.evidence
    if rows is not None:
        evidence = tuple(part[rows] for part in evidence)
        persons = None if persons is None else persons[rows]

    def metrics(weights: Array) -> Mapping[str, Array]:
        found = metrics_of(problem, evidence)(weights)
        return {**found, **_calibration(problem, evidence, weights)}

    found = with_intervals(metrics, len(evidence[0]), persons=persons)
    figures = {wire.LOSS: Figure(model.loss)} if rows is None else {}
    for name, one in found.items():
        if name == lead.name:
            figures[wire.ERROR] = _as_error(lead, one)
        if name != wire.ERROR:
            figures[name] = one
    if lead.name == wire.LOSS and rows is None:
        figures[wire.ERROR] = Figure(model.loss)
    return {name: one for name, one in figures.items() if isfinite(one.value)}


def _as_error(lead: wire.Metric, one: Figure) -> Figure:
    ends = sorted((lead.shortfall(one.low), lead.shortfall(one.high)))
    return Figure(lead.shortfall(one.value), *ends)


def _calibration(problem: Problem, evidence: Evidence, weights: Array) -> Mapping[str, Array]:
    """Return intercept and slope (b,) by name; empty where they are not defined."""
    if not _has_calibration(problem):
        return {}
    answers, y = evidence
    if isinstance(problem, Classes):
        found = calibration_of_classes(answers[:, 1], y, weights)
    else:
        found = calibration_of_numbers(answers[:, 0], y[:, 0], weights)
    return dict(zip(wire.CALIBRATION, found, strict=True))


def _has_calibration(problem: Problem) -> bool:
    if isinstance(problem, Classes):
        return problem.num_classes == 2
    return isinstance(problem, Numbers) and problem.num_targets == 1


def _permitted(session: Session, figures: Mapping[str, Figure]) -> dict[str, Value]:
    """Return what the silo's policy lets leave."""
    allowed = session.permitted({name: one.value for name, one in figures.items()})
    return {name: _value(figures[name]) for name in figures if name in allowed}


def _kept_back(session: Session, lead: wire.Metric) -> tuple[str, ...]:
    """Return the names of the metrics of this task that the policy keeps here."""
    problem = session.task.problem
    names = [wire.LOSS, wire.ERROR, *(n for n in problem.metrics if n != wire.ERROR)]
    names += wire.CALIBRATION if _has_calibration(problem) else ()
    allowed = session.permitted(dict.fromkeys(names, 0.0))
    return tuple(name for name in dict.fromkeys(names) if name not in allowed)


def _value(one: Figure) -> Value:
    return Value(float(f"{one.value:.9g}"), _short(one.low), _short(one.high))


def _short(number: float) -> float | None:
    """Return nine figures of a number; None if it is not finite."""
    return float(f"{number:.9g}") if isfinite(number) else None


# ---------------------------------------------------------------- differences


def _differences(
    session: Session, models: Mapping[str, Measured], lead: wire.Metric
) -> Iterator[Difference]:
    """Yield the difference of every pair's errors, paired by sample, if the error may leave.

    The interval is that of the bootstrap, and p that of a normal distribution with the bootstrap's
    standard error; for the share of wrong answers p is McNemar's, unless persons have several
    samples.
    """
    problem, part = session.task.problem, session.data.test
    if wire.ERROR in _kept_back(session, lead) or lead.name == wire.LOSS or len(models) < 2:
        return
    everyone = np.ones((1, len(part)))
    drawn = resampled(len(part), persons=part.persons)
    sign = -1.0 if lead.higher else 1.0
    values: dict[str, tuple[float, Array]] = {}
    for name, one in models.items():
        metrics = metrics_of(problem, one.evidence)
        whole = float(metrics(everyone)[lead.name][0])
        values[name] = sign * whole, sign * metrics(drawn)[lead.name]
    for first, second in combinations(models, 2):
        value = values[second][0] - values[first][0]
        again = values[second][1] - values[first][1]
        again = again[np.isfinite(again)]
        if not isfinite(value):
            continue
        few = len(again) < len(drawn) // 2
        low, high = (np.nan, np.nan) if few else np.percentile(again, (LOW_LEVEL, HIGH_LEVEL))
        p = None if few else normal_p(value, float(again.std()))
        if lead.name == wire.ERROR and isinstance(problem, Classes) and part.persons is None:
            p = _exact_p(models[first].evidence, models[second].evidence)
        yield Difference(
            *(first, second, float(f"{value:.9g}")),
            *(_short(float(low)), _short(float(high))),
            p=None if p is None else _short(p),
        )


def _exact_p(first: Evidence, second: Evidence) -> float:
    wrong = [chances.argmax(axis=1) != y for chances, y in (first, second)]
    return discordant_p(int((wrong[0] & ~wrong[1]).sum()), int((wrong[1] & ~wrong[0]).sum()))


# ---------------------------------------------------------------- subgroups


def _subgroups(
    session: Session, models: Mapping[str, Measured], lead: wire.Metric
) -> tuple[list[Part], dict[str, str]]:
    """Return the parts of the test data by each allowed column, and why a column is missing."""
    policy, part = session.settings.policy, session.data.test
    parts: list[Part] = []
    left_out: dict[str, str] = {}
    if not policy.subgroups:
        return parts, left_out
    try:
        columns = {one.name: one for one in session.task.test_columns(session.settings.options)}
    except TaskError as error:  # its text may quote the data
        log.error("the columns of subgroups cannot be read: %s", error)
        columns = {}
    for text in policy.subgroups:
        name, limits = read_subgroup(text)
        shown = wire.plain_text(name, MAX_NAME)
        column = columns.get(name)
        if column is None or len(column.values) != len(part):
            left_out[shown] = "the silo cannot read such a column; see its log"
        elif not column.categories and not limits:
            left_out[shown] = f'it has numbers: give limits, such as "{shown} < 50"'
        else:
            parts += _parts_of(session, column, limits, models, lead)
    return parts, left_out


def _parts_of(
    session: Session,
    column: Column,
    limits: Sequence[float],
    models: Mapping[str, Measured],
    lead: wire.Metric,
) -> Iterator[Part]:
    named = [*column.categories] or _intervals(limits)
    places = _places(column, limits, len(named))
    cells = np.bincount(places, minlength=len(named) + 1).tolist()
    persons: Persons | None = session.data.test.persons
    members = persons_by_cell(places, len(cells), persons)
    shown = suppress(cells, session.settings.policy.statistics_from, members)
    assert shown is not None, "every cell may be hidden"
    for cell, (value, samples) in enumerate(zip([*named, "no value"], shown, strict=True)):
        if samples == 0:
            continue
        rows = np.flatnonzero(places == cell)
        figures = {
            name: _permitted(session, _figures(session, one, lead, rows))
            for name, one in models.items()
            if samples is not None
        }
        name = wire.plain_text(column.name, MAX_NAME)
        yield Part(name, wire.plain_text(value, MAX_WORD), samples, figures)


def _places(column: Column, limits: Sequence[float], size: int) -> NDArray[np.intp]:
    """Return each sample's subgroup (n,); the one behind the last for a sample without a value."""
    values = column.values
    there = values >= 0 if column.categories else np.isfinite(values)
    there &= True if column.odd is None else ~column.odd
    places = values if column.categories else np.searchsorted(limits, values, side="right")
    return np.where(there, places, size).astype(np.intp)


def _intervals(limits: Sequence[float]) -> list[str]:
    ends = [f"{one:g}" for one in limits]
    between = [f"{low} to {high}" for low, high in pairwise(ends)]
    return [f"below {ends[0]}", *between, f"{ends[-1]} or more"]
