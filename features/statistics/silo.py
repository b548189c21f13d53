"""A silo's data summary before any training: cells of a histogram, none of them small.

Every column divides the training samples into cells, one of them for missing values. A cell of
fewer than ``statistics_from`` samples, or of samples of fewer persons, is hidden. The server knows
the sum of all cells, so a second cell is hidden with it (complementary suppression; Hundepool et
al., "Statistical Disclosure Control", Wiley 2012, chapter 5). Which one does not depend on its
count, so knowing the rule does not help. The intervals are this silo's own, round numbers, and the
same at every request: anyone who could choose them could shift one past a single patient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.home.policy import STATISTICS
from coterie.client.work.data import Part
from coterie.client.work.measure import batch_size
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.stage import Stage
from coterie.features.statistics.columns import column_sums, in_scale
from coterie.features.statistics.counts import (
    MAX_CELLS,
    MAX_COLUMNS,
    ColumnCounts,
    Statistics,
    encode_statistics,
)
from coterie.tasks.base import Column, Persons, Task, TaskError, leaves
from coterie.tasks.draws import num_persons
from coterie.tasks.problems import Labels, Masks, Numbers, Survival
from coterie.wire.limits import MAX_NAME, MAX_WORD

log = logging.getLogger("coterie.silo")

INTERVALS = 16
"""Approximate number of intervals between a low and a high value, with many samples beyond."""
WIDTHS = 5
"""Number of interval widths that are tried, each about twice the one before."""
MOST_FEATURES = 64
"""Largest sample with a column per number; larger ones and images give statistics per channel."""
ROUNDING = 1e-9
"""Tolerance of a division by the step: 0.3 is not below 3 · 0.1."""
INPUTS, TARGETS = STATISTICS
YES_NO = ("no", "yes")


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
    request.refuse_for(request.session.settings.policy.column_sums_objection())
    if not request.session.task.pooled_columns:
        request.refuse_for("has no columns scaled by the federation.")
    return column_sums(request.session)


def report_statistics(request: Request) -> RecordDict:
    """Return counts of the training samples by column, if this silo's policy allows it."""
    request.refuse_for(request.session.settings.policy.statistics_objection())
    try:
        return _statistics(request.session)
    except TaskError as error:
        # Its text may name a file, or quote what stands in it.
        log.error("statistics cannot be computed: %s", error)
        raise RefusedError(
            f"silo {request.session.settings.name!r} can no longer read its data, or the data "
            "changed after the silo started; see the silo's log."
        ) from None


def _statistics(session: Session) -> RecordDict:
    """Return the counts that the silo's policy allows to leave.

    Raises ``TaskError`` if the data cannot be read again, or have changed since the silo started.
    """
    policy, data = session.settings.policy, session.data
    inputs = list(_inputs(session)) if INPUTS in policy.statistics else []
    targets = list(_targets(session.task, data.train)) if TARGETS in policy.statistics else []
    if any(len(column.values) != len(data.train) for column in (*inputs, *targets)):
        raise TaskError("the data changed after the silo started. Restart it.")
    kept = inputs[: MAX_COLUMNS - min(len(targets), MAX_COLUMNS)], targets[:MAX_COLUMNS]
    least, persons = policy.statistics_from, data.train.persons
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
    there = _present(column)
    odd = np.zeros_like(there) if column.odd is None else column.odd
    present, of = column.values[there], None if persons is None else persons[there]
    name = wire.plain_text(column.name, MAX_NAME)
    categories = tuple(wire.plain_text(one, MAX_WORD) for one in column.categories)
    first, step, places, size = 0, 0.0, np.zeros(len(present), np.intp), 1
    if 0 < len(categories) <= MAX_CELLS:
        places, size = present.astype(np.intp), len(categories)
    else:
        categories = ()
        if not column.categories and _many(present, of) >= least:
            first, step, cells = intervals(present, least, of)
            places, size = _places(present, step, first, first + len(cells) - 1), len(cells)
    every = np.full(len(there), size)  # those without a value, behind the cells of the others
    every[there], every[odd] = places, size + 1
    cells = np.bincount(every, minlength=size + 2).tolist()
    *shown, missed, others = suppress(cells, least, _members(every, size + 2, persons))
    return ColumnCounts(name, tuple(shown), missed, others, categories, first, step)


def _many(values: NDArray[Any], persons: Persons | None) -> int:
    return len(values) if persons is None else num_persons(persons)


def _members(
    places: NDArray[np.intp], size: int, persons: Persons | None
) -> list[frozenset[int]] | None:
    """Return the persons in each cell; None if every sample is from a different person."""
    if persons is None:
        return None
    return [frozenset(persons[places == cell].tolist()) for cell in range(size)]


def _present(column: Column) -> NDArray[np.bool_]:
    there = column.values >= 0 if column.categories else np.isfinite(column.values)
    return there if column.odd is None else there & ~column.odd


def intervals(
    values: NDArray[np.float64], least: int, persons: Persons | None = None
) -> tuple[int, float, list[int]]:
    """Return round intervals of numbers, of which the first and the last hold ``least`` or more.

    From several widths, the one that shows most intervals and hides few is chosen.

    Args:
        values: (n,) finite, from at least ``least`` samples or persons.
        least: smallest cell that is not hidden.
        persons: (n,) person of each sample, where one may have several.

    Returns:
        The first interval's number, the step, and the count of each interval. Interval i starts at
        i · step.
    """
    ordered = np.sort(values.astype(np.float64))
    lowest, highest = _ends(values, persons)
    low, high = lowest[least - 1], highest[len(highest) - least]
    if low > high:
        low = high = ordered[(len(ordered) - 1) // 2]
    width = high - low if high > low else abs(low) / 10
    step = round_step(width / INTERVALS) if width else 1.0
    if np.array_equal(ordered, np.round(ordered)):
        step = max(step, 1.0)
    found = []
    for _ in range(WIDTHS):
        first, last = (math.floor(end / step + ROUNDING) for end in (low, high))
        places, size = _places(values, step, first, last), last - first + 1
        cells = np.bincount(places, minlength=size).tolist()
        shown = suppress(cells, least, _members(places, size, persons))
        found.append((_num_shown(shown), (first, step, cells)))
        step = round_step(step * 1.5)
    return max(found, key=lambda one: one[0])[1]


def _ends(values: NDArray[np.float64], persons: Persons | None) -> tuple[NDArray[np.float64], ...]:
    """Return the lowest value of each person, sorted, and the highest, sorted."""
    if persons is None:
        return np.sort(values), np.sort(values)
    by_person = np.lexsort((values, persons))
    changes = np.flatnonzero(np.diff(persons[by_person])) + 1
    firsts, lasts = np.append(0, changes), np.append(changes, len(values)) - 1
    return np.sort(values[by_person[firsts]]), np.sort(values[by_person[lasts]])


def _places(values: NDArray[np.float64], step: float, first: int, last: int) -> NDArray[np.intp]:
    """Return each value's interval, counted from ``first``; values outside go to the ends."""
    numbers = np.clip(np.floor(values / step + ROUNDING), first, last) - first
    return numbers.astype(np.intp)


def _num_shown(cells: Sequence[int | None]) -> int:
    return sum(map(bool, cells)) - sum(cell is None for cell in cells)


def round_step(width: float) -> float:
    """Round a width up to 1, 2, 5 or 10 times a power of ten."""
    power = math.floor(math.log10(width))
    step = next(m for m in (1, 2, 5, 10) if m >= width / 10**power - ROUNDING)
    return float(f"{step}e{power}")


def suppress(
    cells: Sequence[int], least: int, members: Sequence[frozenset[int]] | None = None
) -> list[int | None]:
    """Hide small cells, and enough others that none can be derived, even knowing the rule.

    Args:
        cells: sample counts, whose sum is public.
        least: smallest count that is shown. Empty cells are shown too: nobody is in them.
        members: persons in each cell, where one may have several samples; a cell, or several
            together, is then small if few persons are in it.

    Returns:
        The counts, with None for hidden ones: none of them, at least two, or all.
    """

    def many(*places: int) -> int:
        if members is None:
            return sum(cells[i] for i in places)
        return len(frozenset[int]().union(*(members[i] for i in places)))

    each = [many(i) for i in range(len(cells))]
    hidden = {i for i, number in enumerate(each) if 0 < number < least}
    if not hidden:
        return list(cells)
    if sum(each) <= len(cells) * (least - 1):  # all of them could be small
        return [None] * len(cells)
    # The next ones in order, not the smallest: how many are in them is then no hint.
    first = min(hidden)
    following = [(first + i) % len(cells) for i in range(1, len(cells))]
    others = iter([i for i in following if each[i] >= least])
    while not all(
        _is_open(total, len(hidden), least)
        for total in (many(*hidden), sum(cells[i] for i in hidden))
    ):
        other = next(others, None)
        if other is None:
            return [None] * len(cells)
        hidden.add(other)
    return [None if i in hidden else cell for i, cell in enumerate(cells)]


def _is_open(total: int, number: int, least: int) -> bool:
    """Return whether hidden cells with this sum stay ambiguous.

    If each were as small or as large as a small cell can be, the sum would reveal them.
    """
    return number > 1 and total >= least and total not in (number, number * (least - 1))


# ---------------------------------------------------------------- columns of what is no table


def _inputs(session: Session) -> Iterator[Column]:
    own = session.task.columns(session.settings.options)
    if own:
        yield from own
        return
    parts = [leaves(x) for x, _ in session.data.train.batches(None, batch_size(session.data.train))]
    for number, batches in enumerate(zip(*parts, strict=True), start=1):
        of = f" of input {number}" if len(parts[0]) > 1 else ""
        yield from _columns_of([batch.cpu() for batch in batches], of)


def _columns_of(batches: Sequence[torch.Tensor], of: str) -> Iterator[Column]:
    shape = batches[0].shape[1:]
    if len(shape) <= 1 and math.prod(shape) <= MOST_FEATURES:
        table = torch.cat([batch.reshape(len(batch), -1).double() for batch in batches]).numpy()
        for i, values in enumerate(table.T, start=1):
            yield Column(f"number {i}{of}" if table.shape[1] > 1 else f"number{of}", values)
        return
    channels = shape[0] if len(shape) > 1 else 1
    if channels > MOST_FEATURES:
        channels = 1
    flat = [batch.reshape(len(batch), channels, -1).double() for batch in batches]
    means = torch.cat([batch.mean(dim=2) for batch in flat]).numpy()
    spreads = torch.cat([batch.std(dim=2, correction=0) for batch in flat]).numpy()
    for i in range(channels):
        which = f" of channel {i + 1}" if channels > 1 else ""
        yield Column(f"mean of a sample{which}{of}", means[:, i])
        yield Column(f"deviation within a sample{which}{of}", spreads[:, i])


def _targets(task: Task, part: Part) -> Iterator[Column]:
    problem, names = task.problem, [str(name) for name in task.classes]
    if isinstance(problem, Masks):
        yield from _masks(names or list(map(str, range(problem.num_classes))), part)
        return
    y = part.targets()
    if not isinstance(y, torch.Tensor):
        return
    found = y.cpu().double().numpy().reshape(len(part), -1)
    if isinstance(problem, Survival):
        yield Column("time", found[:, 0])
        yield Column("event", found[:, 1], YES_NO)
    elif isinstance(problem, Labels | Numbers):
        kinds = YES_NO if isinstance(problem, Labels) else ()
        for i, values in enumerate(found.T):
            yield Column(names[i] if i < len(names) else f"target {i + 1}", values, kinds)
    else:
        yield Column("class", found[:, 0], names or list(map(str, range(task.num_classes))))


def _masks(names: Sequence[str], part: Part) -> Iterator[Column]:
    """Yield, for each class, whether it is in a sample's mask."""
    found = [
        torch.stack([(y == i).flatten(1).any(dim=1) for i in range(len(names))], dim=1).cpu()
        for _, y in part.batches(None, batch_size(part))
    ]
    for name, values in zip(names, torch.cat(found).numpy().T, strict=True):
        yield Column(f"{name} in a mask", values.astype(np.float64), YES_NO)
