"""A silo's side of a regression."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.features.sums.contract import (
    Answer,
    Array,
    Family,
    FitError,
    May,
    Question,
    settings_text,
)
from coterie.features.sums.regression.design import (
    Design,
    count_of,
    design_of,
    sums_of,
    times_and_events,
)
from coterie.features.sums.regression.newton import COUNT, MODELS
from coterie.features.sums.regression.survival import (
    ENDED,
    EVENTS,
    SURVIVAL,
    WORDS,
    family_of,
    times_of,
)
from coterie.features.sums.rows import Rows
from coterie.tasks.base import Persons

log = logging.getLogger("coterie.silo")

MOST_REFUSED = 5
"""Sets of times with few rows between them that a silo refuses before it answers no other."""


class Regressing:
    """Answers questions of regressions and survival curves from the silo's rows."""

    def family(self, settings: Mapping[str, Any]) -> Family:
        return family_of(settings)

    def answer(self, question: Question, rows: Rows, least: int, may: May) -> Answer:
        """Return the sums over the rows that have a value in all columns."""
        settings = question.settings
        if settings.get("model") == SURVIVAL:
            return _survival(question, rows, least, may)
        model, columns = settings.get("model"), settings.get("columns")
        texts = (
            isinstance(columns, list)
            and all(isinstance(one, str) for one in columns)
            and len({*columns}) == len(columns)
        )
        if model not in MODELS or not texts or not isinstance(settings.get("target"), str):
            raise FitError(
                f"a regression is one of {', '.join(MODELS)}, of columns that are named once"
            )
        known = settings_text(settings), least
        if rows.kept.get("design", (None,))[0] != known:
            rows.kept["design"] = known, design_of(rows, settings, least)
        design: Design = rows.kept["design"][1]
        try:  # before the sums: arrays of other sizes cannot be used
            self.family(settings).layout(question, design.words)
        except ValueError as error:
            raise FitError(str(error)) from None
        sums = sums_of(design, model, question.arrays, least)
        if why := may(design.used):
            raise FitError(why)
        return Answer(sums, design.words)


def _survival(question: Question, rows: Rows, least: int, may: May) -> Answer:
    time, event = (one.values for one in times_and_events(rows.targets))
    try:
        times = times_of(question.settings)
    except ValueError as error:
        raise FitError(str(error)) from None
    if why := may(np.ones(len(rows), np.bool_)):
        raise FitError(why)
    # A refusal says something about when events happened. By halving intervals again and again, a
    # coordinator would find each of them.
    asked, tried = tuple(times), rows.kept.setdefault("times", {})
    refused = [own for own, answered in tried.items() if not answered]
    if asked not in tried and len(refused) >= MOST_REFUSED:
        raise FitError(
            f"it has refused {MOST_REFUSED} sets of times, and answers no other until it restarts"
        )
    tried.setdefault(asked, False)
    counts = counts_until(time, event, rows.persons, times, least, may)
    tried[asked] = True
    return Answer(counts, WORDS)


def counts_until(
    time: Array, event: Array, persons: Persons | None, times: Sequence[float], least: int, may: May
) -> dict[str, Array]:
    """Return a silo's answer: events (times,), and rows (times,) whose observation ended.

    Raises:
        FitError: since the time before, 1 to ``least`` − 1 rows (persons) had the event, or were
            censored; or as many follow after the last time; or ``may`` objects.
    """
    happened, last = event > 0, np.zeros(len(time), np.bool_)
    sets = []
    for end in times:
        ended = time.astype(np.float32) <= np.float32(end)  # as targets are kept
        cells = ended & ~last & happened, ended & ~last & ~happened, ~ended
        if any(0 < count_of(cell, persons) < least for cell in cells):
            log.info("survival: few rows until %.12g since the time before, or after it", end)
            raise FitError(
                "between two of the times, or after the last, it has few events or few censored "
                "rows (statistics_from). Name fewer times, or others"
            )
        sets += [ended & happened, ended & ~happened, ended]
        last = ended
    for rows in sets:
        if rows.any() and (why := may(rows)):
            raise FitError(why)
    counts = np.array([rows.sum() for rows in sets], np.float64)
    return {COUNT: np.array([float(len(time))]), EVENTS: counts[::3], ENDED: counts[2::3]}
