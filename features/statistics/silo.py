"""A silo's data summary before any training: cells of a histogram, none of them small.

Every column divides the training samples into cells, one of them for missing values. A cell of
fewer than ``statistics_from`` samples, or of samples of fewer persons, is hidden. The server knows
the sum of all cells, so a second cell is hidden with it (complementary suppression; Hundepool et
al., "Statistical Disclosure Control", Wiley 2012, chapter 5). Which one does not depend on its
count, so knowing the rule does not help; it is never one that must be large by the rule. The
intervals are this silo's own, round numbers: anyone who could choose them could shift one past a
single patient. The same question gets the same answer until enough rows have changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.home.policy import STATISTICS
from coterie.client.work.answered import answer_once, marks_of_columns, marks_of_samples
from coterie.client.work.columns import inputs_of, targets_of
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.small_cells import persons_by_cell, suppress
from coterie.client.work.stage import Stage
from coterie.features.statistics.cells import ends, intervals, number_of, places_of
from coterie.features.statistics.columns import column_sums, in_scale
from coterie.features.statistics.counts import (
    MAX_CELLS,
    MAX_COLUMNS,
    ColumnCounts,
    Statistics,
    encode_statistics,
)
from coterie.tasks.base import Column, Persons, TaskError
from coterie.wire.limits import MAX_NAME, MAX_WORD

log = logging.getLogger("coterie.silo")

INPUTS, TARGETS, _ = STATISTICS


class Scaled(Stage):
    """The stage for data in the scale that a run takes from all silos."""

    name = "statistics"

    def admit(self, request: Request) -> Request:
        """Return the request with the silo's data in the run's scale, if its task needs one."""
        session, kind = request.session, request.message.metadata.message_type
        if not session.task.pooled_columns or wire.kind_of(kind).before_scale:
            return request
        try:
            return replace(request, session=in_scale(session, request.config.get(wire.SCALE)))
        except ValueError as error:
            if error.__cause__ is not None:
                log.error("the data can no longer be read: %s", error.__cause__)
            raise RefusedError(f"silo {session.settings.name!r} {error}") from None


def report_column_sums(request: Request) -> RecordDict:
    """Return count, mean and deviation of each numeric column, if this silo's policy allows it."""
    session = request.session
    policy = session.settings.policy
    request.refuse_for(policy.unshared("column_sums"))
    if not session.task.pooled_columns:
        request.refuse_for("has no columns scaled by the federation.")
    # Their differences are sums over the rows between, so also few numbers would be too many.
    found = _once(request, policy.column_sums_from, lambda: column_sums(session))
    own, most = wire.metric_records(found)[wire.METRICS], len(session.data.train)
    counts = own[wire.COLUMN_COUNTS]
    assert isinstance(counts, list)
    # An older answer may count a few more rows than there are now.
    own[wire.COLUMN_COUNTS] = [min(int(number), most) for number in counts]
    return found


def report_statistics(request: Request) -> RecordDict:
    """Return counts of the training samples by column, if this silo's policy allows it."""
    policy = request.session.settings.policy
    request.refuse_for(policy.unshared("statistics"))
    try:
        return _statistics(request)
    except TaskError as error:
        # Its text may name a file, or quote what stands in it.
        log.error("statistics cannot be computed: %s", error)
        raise RefusedError(
            f"silo {request.session.settings.name!r} can no longer read its data, or the data "
            "changed after the silo started; see the silo's log."
        ) from None


def _once(request: Request, least: int, make: Callable[[], RecordDict]) -> RecordDict:
    """Return the answer about the training samples, unless only few of them have changed."""
    session, policy = request.session, request.session.settings.policy
    asked = [session.parts, policy.statistics, policy.statistics_from, policy.column_sums_from]
    train = session.data.train
    own = list(session.task.columns(session.settings.options))
    own += targets_of(session.task, train) if own else ()
    if any(len(column.values) != len(train) for column in own):
        request.refuse_for("has different data than when it was started. Restart it.")
    marks = marks_of_columns(own, train.persons) if own else marks_of_samples(train)
    return answer_once(request, json.dumps(asked, sort_keys=True), marks, least, make)


def _statistics(request: Request) -> RecordDict:
    """Return the counts that the silo's policy allows to leave.

    Raises ``TaskError`` if the data cannot be read again, or have changed since the silo started.
    """
    session = request.session
    policy, data = session.settings.policy, session.data
    own = inputs_of(session.task, session.settings.options, data.train)
    inputs = list(own) if INPUTS in policy.statistics else []
    targets = list(targets_of(session.task, data.train)) if TARGETS in policy.statistics else []
    if any(len(column.values) != len(data.train) for column in (*inputs, *targets)):
        raise TaskError("the data changed after the silo started. Restart it.")
    least, persons = policy.statistics_from, data.train.persons
    return _once(request, least, lambda: _counted(session, inputs, targets, least, persons))


def _counted(
    session: Session,
    inputs: Sequence[Column],
    targets: Sequence[Column],
    least: int,
    persons: Persons | None,
) -> RecordDict:
    data = session.data
    kept = inputs[: MAX_COLUMNS - min(len(targets), MAX_COLUMNS)], targets[:MAX_COLUMNS]
    return encode_statistics(
        Statistics(
            samples=len(data.train),
            tests=len(data.test),
            least=least,
            shapes=session.shapes[:MAX_CELLS],
            inputs=tuple(count(column, least, persons) for column in kept[0]),
            targets=tuple(count(column, least, persons) for column in kept[1]),
            left_out=len(inputs) + len(targets) - len(kept[0]) - len(kept[1]),
        )
    )


def count(column: Column, least: int, persons: Persons | None = None) -> ColumnCounts:
    """Divide a column's samples into cells, and hide those of fewer than ``least`` samples.

    ``persons`` (n,) is each sample's person, where one may have several: persons then count.
    """
    there = column.present
    odd = np.zeros_like(there) if column.odd is None else column.odd
    present, of = column.values[there], None if persons is None else persons[there]
    name = wire.plain_text(column.name, MAX_NAME)
    categories = tuple(wire.plain_text(one, MAX_WORD) for one in column.categories)

    def hide(places: NDArray[np.intp], size: int, large: frozenset[int]) -> list[int | None] | None:
        every = np.full(len(there), size)  # those without a value, behind the cells of the others
        every[there], every[odd] = places, size + 1
        cells = np.bincount(every, minlength=size + 2).tolist()
        return suppress(cells, least, persons_by_cell(every, size + 2, persons), large)

    first, step, shown = 0, 0.0, None
    if 0 < len(categories) <= MAX_CELLS:
        shown = hide(present.astype(np.intp), len(categories), frozenset())
    else:
        categories = ()
        if not column.categories and number_of(present, of) >= least:
            first, step, cells = intervals(present, least, of, samples=len(there))
            places = places_of(present, step, first, first + len(cells) - 1)
            shown = hide(places, len(cells), ends(len(cells)))
    if shown is None:  # all values in one cell: nobody knows whether it is large
        first, step = 0, 0.0
        shown = hide(np.zeros(len(present), np.intp), 1, frozenset())
    assert shown is not None
    *told, missed, others = shown
    return ColumnCounts(name, tuple(told), missed, others, categories, first, step)
