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
from coterie.client.work.answered import (
    Marks,
    answer_once,
    answered_of,
    marks_of_columns,
    marks_of_samples,
)
from coterie.client.work.columns import targets_of
from coterie.client.work.evaluate import members_of
from coterie.client.work.figures import LEVELS, Array, Figure, resampled, with_intervals
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
from coterie.tasks.base import Column, TaskError
from coterie.tasks.problems import Classes, Evidence, Numbers, Problem
from coterie.wire.limits import MAX_ANSWER_BYTES, MAX_NAME

log = logging.getLogger("coterie.silo")


@dataclass(frozen=True)
class Measured:
    """A model's answers to the test samples, and its mean loss."""

    evidence: Evidence
    loss: float


def evaluate_given(request: Request) -> RecordDict:
    """Measure every model of the message on the test data; say what the policy allows.

    The answer to a repeated question is the stored one until enough test samples have changed; see
    ``coterie.client.work.answered``.
    """
    session, policy = request.session, request.session.settings.policy
    lead = leading(session.task, request.metric())
    try:
        models = members_of(request)
        names = names_in(request.config, len(models))
    except wire.WireError as error:
        request.refuse_for(f"cannot evaluate these models: {error}")
    most = policy.max_evaluations
    if most and len(models) > most:
        request.refuse_for(f"evaluates at most {most} models (max_evaluations).")
    by_name = dict(zip(names, models, strict=True))
    hashes = {name: wire.model_hash(model) for name, model in by_name.items()}
    if _alone(request):  # models of other runs are not known when a person approves
        for name, found in hashes.items():
            if request.config.get(f"{wire.GIVEN_HASH}{name}") != found:
                request.refuse_for(f"was not announced the model {wire.plain_text(name, 100)!r}.")
    allowed: list[object] = [policy.share_metrics, policy.subgroups, policy.statistics_from]
    allowed += sorted({*policy.withheld, *session.loop.staying})
    asked = [*map(str, (session.schema, session.scale, lead.name, _alone(request), allowed))]
    asked += [f"{name} {found}" for name, found in hashes.items()]
    columns = _test_columns(request)
    rows = _marks(session, columns)
    return answer_once(
        *(request, "\n".join(asked), rows, policy.statistics_from),
        lambda: _answered(request, by_name, lead, columns, rows),
    )


def _alone(request: Request) -> bool:
    """Return whether the run asks for nothing else, so that subgroups are measured too."""
    return request.config.get(wire.STRATEGY) == wire.ONLY_EVALUATION


def _test_columns(request: Request) -> list[Column]:
    """Return the inputs of the test samples before scaling; empty without a table."""
    session = request.session
    try:
        columns = [*session.task.test_columns(session.settings.options)]
    except TaskError as error:  # its text may quote the data
        log.error("the test data cannot be read: %s", error)
        request.refuse_for("can no longer read its test data; see the silo's log.")
    if any(len(column.values) != len(session.data.test) for column in columns):
        request.refuse_for("has different data than when it was started. Restart it.")
    return columns


def _marks(session: Session, columns: Sequence[Column]) -> Marks:
    """Return the marks of the test samples in no scale, which a run might choose."""
    part = session.data.test
    if not columns:
        return marks_of_samples(part)
    return marks_of_columns([*columns, *targets_of(session.task, part)], part.persons)


def _answered(
    request: Request,
    models: Mapping[str, wire.Model],
    lead: wire.Metric,
    columns: Sequence[Column],
    rows: Marks,
) -> RecordDict:
    session = request.session
    measured: dict[str, Measured] = {}
    try:
        for name, model in models.items():
            own = _of_family(session, model)
            load_weights(own.model, _in_order(own, model))
            found, evidence = evaluate_with_evidence(
                own.task, own.model, own.data.test, metric=lead.name
            )
            measured[name] = Measured(evidence, found.loss)
    except ValueError as error:
        request.refuse_for(f"cannot evaluate these models: {error}")
    parts, left_out = list[Part](), dict[str, str]()
    if _alone(request):
        parts, left_out = _subgroups(request, measured, lead, columns, rows)
    answer = Answer(
        samples=len(rows),
        models={n: _permitted(session, _figures(session, m, lead)) for n, m in measured.items()},
        kept_back=_kept_back(session),
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


def _of_family(session: Session, model: wire.Model) -> Session:
    fits = (own for own in session.whole if travelling(own.model).keys() == model.keys())
    return next(fits, session.whole[0])


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


def _kept_back(session: Session) -> tuple[str, ...]:
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
    if wire.ERROR in _kept_back(session) or lead.name == wire.LOSS or len(models) < 2:
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
        low, high = (np.nan, np.nan) if few else np.percentile(again, LEVELS)
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
    request: Request,
    models: Mapping[str, Measured],
    lead: wire.Metric,
    columns: Sequence[Column],
    rows: Marks,
) -> tuple[list[Part], dict[str, str]]:
    """Return the parts of the test data by each allowed column, and why a column is missing.

    It is missing if a part of it differs by few samples from others that were answered about, such
    as a part by another column.
    """
    session, policy = request.session, request.session.settings.policy
    known = answered_of(session, request.message.metadata.message_type)
    by_name = {one.name: one for one in columns}
    parts: list[Part] = []
    left_out: dict[str, str] = {}
    for text in policy.subgroups:
        name, limits = read_subgroup(text)
        shown = wire.plain_text(name, MAX_NAME)
        column = by_name.get(name)
        if column is None:
            left_out[shown] = "the silo cannot read such a column; see its log"
            continue
        if not column.categories and not limits:
            left_out[shown] = f'it has numbers: give limits, such as "{shown} < 50"'
            continue
        found = _rows_of_parts(session, column, limits)
        told = [known.objection(rows[own], policy.statistics_from) for _, own, n in found if n]
        if why := next(filter(None, told), ""):
            left_out[shown] = f"the silo {why}"
            continue
        for value, own, samples in found:
            figures = {
                name: _permitted(session, _figures(session, one, lead, own))
                for name, one in models.items()
                if samples is not None
            }
            parts.append(Part(shown, value, samples, figures))
    return parts, left_out


def _rows_of_parts(
    session: Session, column: Column, limits: Sequence[float]
) -> list[tuple[str, NDArray[np.intp], int | None]]:
    """Return name, rows and number of samples of every subgroup with samples; None: hidden."""
    named = [*column.categories] or _intervals(limits)
    places = _places(column, limits, len(named))
    cells = np.bincount(places, minlength=len(named) + 1).tolist()
    members = persons_by_cell(places, len(cells), session.data.test.persons)
    shown = suppress(cells, session.settings.policy.statistics_from, members)
    assert shown is not None, "every cell may be hidden"
    found = zip([*named, "no value"], shown, strict=True)
    return [(n, np.flatnonzero(places == i), s) for i, (n, s) in enumerate(found) if s != 0]


def _places(column: Column, limits: Sequence[float], size: int) -> NDArray[np.intp]:
    """Return each sample's subgroup (n,); the one behind the last for a sample without a value."""
    values = column.values
    places = values if column.categories else np.searchsorted(limits, values, side="right")
    return np.where(column.present, places, size).astype(np.intp)


def _intervals(limits: Sequence[float]) -> list[str]:
    ends = [f"{one:.12g}" for one in limits]
    between = [f"{low} to {high}" for low, high in pairwise(ends)]
    return [f"below {ends[0]}", *between, f"{ends[-1]} or more"]
