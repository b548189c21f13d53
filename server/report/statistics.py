"""The page of a statistics-only run: each silo's data, and the differences between silos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from coterie import wire
from coterie.features.statistics.counts import Cell, ColumnCounts
from coterie.features.statistics.survey import Survey
from coterie.pictures import charts
from coterie.pictures.page import Page, Picture, Table
from coterie.pictures.style import GROUPS, LIGHT
from coterie.server.report.story import NO_NUMBER
from coterie.server.report.survey import (
    Difference,
    differences,
    kinds_of,
    model_text,
    models_of,
    quantiles,
    shares,
    warnings,
)

TITLES = SHARED, SILENT = "Silos", "Silos that shared nothing"
"""Titles of the tables of silos that answered, and of the others."""
MOST_DRAWN, MOST_ROWS = 12, 20
"""Most columns, and most silos per column, that are drawn; the tables show all."""
MOST_BARS = 24
"""Largest number of categories drawn per column."""
FAR = 20.0
"""Ratio of the silos' numbers above which the axis is logarithmic."""


def build_statistics_page(survey: Survey, name: str) -> Page:
    """Return the complete page, ready to be rendered."""
    found = differences(survey)
    return Page(
        title=f"Data of the silos of {survey.task}",
        subtitle=f"run {name} · counts of training samples; nothing was trained",
        lead=_lead(survey, found),
        figures=_figures(survey),
        warnings=warnings(survey),
        pictures=[_picture(one, survey, i) for i, one in enumerate(found[:MOST_DRAWN])],
        tables=_tables(survey, found),
        commands={"Ask again": f"coterie stats --task {survey.task}"},
    )


def statistics_summary(survey: Survey) -> dict[str, Any]:
    """Return the page's figures, for JSON."""
    return {
        "task": survey.task,
        "warnings": warnings(survey),
        "differences": {
            one.name: {"score": round(one.score, 4), "most unlike": one.silo}
            for one in differences(survey)
        },
        "silos": {name: asdict(one) for name, one in survey.reported.items()},
        "silent": dict(survey.silent),
        "models in use": dict(survey.models),
    }


def _lead(survey: Survey, found: list[Difference]) -> str:
    num_reported, here = len(survey.reported), len({*survey.reported, *survey.silent})
    text = f"{num_reported} of {here} silos shared statistics."
    unlike = [one for one in found if one.score >= 0.1][:3]
    if num_reported > 1 and unlike:
        named = ", ".join(f"{one.name} ({one.silo})" for one in unlike)
        text += f" They differ most in {named}."
    elif num_reported > 1:
        text += " They are similar."
    count = len(warnings(survey))
    return text + (f" {wire.counted(count, 'warning')}." if count else "")


def _figures(survey: Survey) -> dict[str, str]:
    samples = sum(one.samples for one in survey.reported.values())
    columns = {column.name for one in survey.reported.values() for column in one.inputs}
    figures = {"training samples": f"{samples:,}", "silos that shared": str(len(survey.reported))}
    figures |= {"silos that did not": str(len(survey.silent))} if survey.silent else {}
    return figures | ({"columns": f"{len(columns):,}"} if columns else {})


# ---------------------------------------------------------------- pictures


def _picture(one: Difference, survey: Survey, number: int) -> Picture:
    names = sorted(one.columns)[:MOST_ROWS]
    columns = [one.columns[name] for name in names]
    title = f"{one.name} (target)" if one.target else one.name
    alike = {column.categories for column in columns}
    categories = alike.pop()[:MOST_BARS] if len(alike) == 1 else ()
    rows = [
        _strip(name, column, survey, i)
        for i, (name, column) in enumerate(zip(names, columns, strict=True))
    ]
    bars = [bar for row in rows for bar in row.bars]
    positive = bool(bars) and min(low for low, _, _ in bars) > 0
    far = positive and max(high for _, high, _ in bars) > FAR * min(high for _, high, _ in bars)
    draw = partial(
        charts.strips, rows, title=title, unit=one.name, categories=categories,
        spread_out=far and not categories,
    )  # fmt: skip
    return Picture(f"column-{number}", title, _caption(one, survey, names), draw, _table(one))


def _caption(one: Difference, survey: Survey, names: list[str]) -> str:
    numbers = not any(one.columns[name].categories for name in names)
    text = (
        "Distribution of each silo's values; every row has its own vertical scale. The outermost "
        "bars include all values beyond."
        if numbers
        else "Share of each silo's training samples."
    )
    if any(None in one.columns[name].all_cells for name in names):
        least = min(survey.reported[name].least for name in names)
        text += f" Hatched: hidden, because it would reveal a count below {least}."
    if one.score >= 0.1:
        text += f" Differs most: {one.silo}."
    if len(names) < len(one.columns):
        text += f" Drawn are {len(names)} of {len(one.columns)} silos."
    return text


def _strip(name: str, column: ColumnCounts, survey: Survey, number: int) -> charts.Strip:
    samples = survey.reported[name].samples
    own = shares(column, samples)[: len(column.cells)]
    step = 1.0 if column.categories else column.step
    first = 0 if column.categories else column.first
    bars = [
        ((first + i) * step, (first + i + 1) * step, None if cell is None else float(own[i]))
        for i, cell in enumerate(column.cells[:MOST_BARS] if column.categories else column.cells)
        if step
    ]
    colour = LIGHT[GROUPS[number % len(GROUPS)]]
    return charts.Strip(name, colour, bars, _note(column, samples))


def _note(column: ColumnCounts, samples: int) -> str:
    parts = []
    for cell, what in ((column.missing, "missing"), (column.odd, "undeclared")):
        if cell:
            parts.append(f"{100 * cell / max(samples, 1):.0f}% {what}")
    return ", ".join(parts)


# ---------------------------------------------------------------- tables


def _tables(survey: Survey, found: list[Difference]) -> Mapping[str, Table]:
    return {
        SHARED: Table(
            ("silo", "training samples", "test samples", "shape of a sample", "shares",
             "hides fewer than"),
            [
                (
                    name, f"{one.samples:,}", f"{one.tests:,}",
                    " and ".join("×".join(map(str, shape)) or "one number" for shape in one.shapes),
                    kinds_of(one), str(one.least),
                )
                for name, one in sorted(survey.reported.items())
            ],
        ),
        "Models in use": Table(
            ("silo", "looked at", "new samples", "drifted", "largest PSI", "metric"),
            [
                (
                    name, model.at[:10], f"{model.samples:,}" if model.samples else "too few",
                    ", ".join(model.drifted), f"{max(model.psi.values(), default=0):.2f}",
                    model_text(model) if model.metric else "",
                )
                for name, model in sorted(models_of(survey).items())
            ],
        ),
        SILENT: Table(
            ("silo", "training samples", "why"),
            [
                (name, str(survey.samples.get(name, NO_NUMBER)), why)
                for name, why in sorted(survey.silent.items())
            ],
        ),
        "Columns": Table(
            ("column", "silo", "missing", "not as declared", "a tenth is below", "median, about",
             "a tenth is above", "unlike the others"),
            [row for one in found for row in _rows(one, survey)],
        ),
    }  # fmt: skip


def _rows(one: Difference, survey: Survey) -> list[tuple[str, ...]]:
    rows = []
    for silo, column in sorted(one.columns.items()):
        at = quantiles(column, survey.reported[silo].samples, (0.1, 0.5, 0.9))
        places = [NO_NUMBER if np.isnan(value) else wire.readable(value) for value in at]
        if column.categories and None not in column.cells:
            own = shares(column, survey.reported[silo].samples)[: len(column.cells)]
            most = int(own.argmax())
            places[1] = f"mostly {column.categories[most]} ({100 * own[most]:.0f}%)"
        unlike = f"{one.score:.2f}" if silo == one.silo else ""
        rows.append((one.name, silo, _text(column.missing), _text(column.odd), *places, unlike))
    return rows


def _table(one: Difference) -> Table:
    rows = []
    for silo, column in sorted(one.columns.items()):
        named = column.categories or [_interval(column, i) for i in range(len(column.cells))]
        rows += [(silo, name, _text(n)) for name, n in zip(named, column.cells, strict=True)]
        rows += [(silo, "missing", _text(column.missing))] if column.missing != 0 else []
        rows += [(silo, "not as declared", _text(column.odd))] if column.odd != 0 else []
    return Table(("silo", one.name, "training samples"), rows)


def _interval(column: ColumnCounts, number: int) -> str:
    if not column.step:
        return "any value"
    low = (column.first + number) * column.step
    high = low + column.step
    last = len(column.cells) - 1
    if last == 0:
        return f"about {low:.12g} to {high:.12g}"
    if number == 0:
        return f"below {high:.12g}"
    return f"{low:.12g} or more" if number == last else f"{low:.12g} to {high:.12g}"


def _text(cell: Cell) -> str:
    return "hidden" if cell is None else f"{cell:,}"
