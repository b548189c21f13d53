"""Differences between silos' data, and probable errors in them, from their counts alone.

Samples in hidden cells are assumed to be spread evenly over them, so medians and shares are
approximate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.features.statistics.cells import ROUNDING, SAMPLES
from coterie.features.statistics.counts import ColumnCounts, Statistics
from coterie.features.statistics.survey import Survey
from coterie.features.watching.answer import Watched, watched_of

FEW = 20
"""Number of training samples below which hardly anything can be concluded."""
EMPTY, MUCH, LITTLE = 0.9, 0.5, 0.1
"""Shares of missing values: almost all, many, hardly any."""
MOST_ODD = 0.05
"""Share of a column's values not as declared above which there is a warning."""
OTHER_UNIT = 1.8
"""Ratio of medians that suggests another unit, if hardly any values are in another silo's range."""
OTHER_BALANCE = 0.3
"""Difference of a class's share between a silo and the others that causes a warning."""
BEYOND = 3.0
"""Standard errors above which a difference is not by chance."""
LACKED = BEYOND**2
"""A silo lacks a category beyond chance if it has none where so many samples are expected."""
SAME_FACTOR = 0.2
"""Largest deviation of a factor from a known one, as a difference of logarithms."""
KNOWN_FACTORS = {
    10.0: "a decimal point", 100.0: "shares and per cent, m and cm", 1000.0: "g and mg, m and mm",
    2.205: "kg and pounds", 2.54: "inches and cm", 12.0: "years and months",
    365.25: "years and days", 7.0: "weeks and days", 60.0: "hours and minutes",
    88.4: "creatinine in mg/dL and µmol/L", 18.02: "glucose in mg/dL and mmol/L",
    38.67: "cholesterol in mg/dL and mmol/L", 17.1: "bilirubin in mg/dL and µmol/L",
    7.5: "kPa and mmHg", 4.184: "kcal and kJ",
}  # fmt: skip
TINY = 1e-300
TENTHS = tuple(i / 10 for i in range(1, 10))


@dataclass(frozen=True)
class Difference:
    """A column and how much it differs between silos.

    Attributes:
        columns: silo → its counts.
        score: 0 if no silo differs beyond chance, or silos declare other categories. For
            categories, the share of samples that would have to change; for numbers, d / (d + w)
            for a distance d between quantiles and the range w of half the samples.
        silo: the silo that differs most from the others.
        target: whether the column is a target.
    """

    name: str
    columns: Mapping[str, ColumnCounts]
    score: float
    silo: str
    target: bool = False


def shares(column: ColumnCounts, samples: int) -> NDArray[np.float64]:
    """Return the (cells + 2,) shares of the samples; hidden cells share the remainder equally.

    The last two are samples without a value, and samples whose value is not as declared.
    """
    cells = column.all_cells
    left = samples - sum(cell for cell in cells if cell is not None)
    each = left / max(sum(cell is None for cell in cells), 1)
    return np.array([each if cell is None else cell for cell in cells]) / max(samples, 1)


def quantiles(column: ColumnCounts, samples: int, at: Sequence[float]) -> NDArray[np.float64]:
    """Return the (len(at),) approximate quantiles of the present values; NaN if unknown."""
    own = shares(column, samples)[:-2]
    if not column.step or not own.sum():
        return np.full(len(at), math.nan)
    ends = (column.first + np.arange(len(own) + 1)) * column.step
    reached = np.concatenate([[0.0], np.cumsum(own)]) / own.sum()
    found: NDArray[np.float64] = np.interp(at, reached, ends)
    return found


def columns_of(survey: Survey, *, target: bool) -> dict[str, dict[str, ColumnCounts]]:
    """Return column → silo → its counts, in the order of the silos' columns."""
    found: dict[str, dict[str, ColumnCounts]] = {}
    for silo, own in sorted(survey.reported.items()):
        for column in own.targets if target else own.inputs:
            found.setdefault(column.name, {})[silo] = column
    return found


def differences(survey: Survey) -> list[Difference]:
    """Return all columns, targets before inputs, each by decreasing difference."""
    found = []
    for target in (True, False):
        of_kind = [
            _difference(name, own, survey, target)
            for name, own in columns_of(survey, target=target).items()
        ]
        found += sorted(of_kind, key=lambda one: -one.score)
    return found


def _difference(
    name: str, own: Mapping[str, ColumnCounts], survey: Survey, target: bool
) -> Difference:
    counted = {silo: survey.reported[silo].samples for silo in own}
    seen = {
        silo: _Seen(shares(c, counted[silo]), quantiles(c, counted[silo], TENTHS))
        for silo, c in own.items()
    }
    categories = {column.categories for column in own.values()}
    apart = _categories_apart if categories != {()} and len(categories) == 1 else _numbers_apart
    beyond = _beyond(own, survey) if len(own) > 1 and len(categories) == 1 else set()
    scores = {silo: apart(silo, own, seen) if silo in beyond else 0.0 for silo in own}
    worst = max(scores, key=lambda silo: scores[silo], default=next(iter(own)))
    return Difference(name, own, scores.get(worst, 0.0), worst, target)


@dataclass(frozen=True)
class _Seen:
    """One silo's shares of a column, and the ends of its tenths."""

    shares: NDArray[np.float64]
    tenths: NDArray[np.float64]

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.tenths).all())


def _beyond(own: Mapping[str, ColumnCounts], survey: Survey) -> set[str]:
    """Return the silos of which a share of samples differs from the others' mean beyond chance.

    The shares are those of each cell, or those below each end of an interval. Shares that hidden
    cells leave open differ only as far as they must.
    """
    ends = {(c.first + i) * c.step for c in own.values() for i in range(1, len(c.cells)) if c.step}
    at, beside = np.array(sorted(ends)), len(own) - 1
    counts = np.array([max(survey.reported[name].samples, 1) for name in own], np.float64)
    bounds = [_bounds(column, int(n), at) for column, n in zip(own.values(), counts, strict=True)]
    low, high = np.array(bounds).swapaxes(0, 1)
    lows, highs = ((one.sum(axis=0) - one) / beside for one in (low, high))
    gap = np.maximum(low - highs, lows - high)
    mean = np.average((low + high) / 2, axis=0, weights=counts)
    per_sample = 1 / counts + ((1 / counts).sum() - 1 / counts) / beside**2
    far = gap > BEYOND * np.sqrt(mean * (1 - mean) * per_sample[:, None]) + TINY
    return {name for name, one in zip(own, far.any(axis=1), strict=True) if one}


def _bounds(column: ColumnCounts, samples: int, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lowest and highest possible shares of a silo's samples, (2, k).

    They are of its categories, or of numbers below ``at`` (k − 1,); last, of those without a value.
    """
    known = np.array([cell or 0 for cell in column.all_cells], np.float64)
    hidden = np.array([cell is None for cell in column.all_cells])
    rest = samples - known.sum()
    missing = np.array([[known[-2]], [known[-2] + rest * hidden[-2]]])
    found = np.array([known[:-2], (known + rest * hidden)[:-2]])
    if not column.categories:
        found = np.tile([[0.0], [samples]], len(at))
    if column.step:
        before = np.concatenate([[0.0], np.cumsum(known[:-2])])
        passed = np.concatenate([[0], np.cumsum(hidden[:-2])])
        place, last = at / column.step - column.first, len(column.cells)
        first = np.clip(np.floor(place + ROUNDING), 0, last - 1).astype(int)
        end = np.clip(np.ceil(place - ROUNDING), 1, last).astype(int)
        least = before + rest * (passed == hidden.sum())
        found = np.array([least[first], (before + rest * (passed > 0))[end]])
    return np.concatenate([found, missing], axis=1) / samples


def _categories_apart(
    silo: str, own: Mapping[str, ColumnCounts], seen: Mapping[str, _Seen]
) -> float:
    """Return the total variation between a silo's visible cells and the mean of the others'."""
    others = np.mean([one.shares for name, one in seen.items() if name != silo], axis=0)
    shown = [cell is not None for cell in own[silo].all_cells]
    return float(np.abs(seen[silo].shares - others)[shown].sum()) / 2


def _numbers_apart(silo: str, own: Mapping[str, ColumnCounts], seen: Mapping[str, _Seen]) -> float:
    """Return the relative distance of a silo's tenths or of its missing share, if larger."""
    beside = [one for name, one in seen.items() if name != silo]
    missing = abs(float(seen[silo].shares[-2]) - fmean(float(one.shares[-2]) for one in beside))
    known = [one.tenths for one in beside if one.known]
    if not known or not seen[silo].known:
        return missing
    distance = float(np.abs(seen[silo].tenths - np.median(known, axis=0)).mean())
    width = median(float(tenths[6] - tenths[2]) for tenths in (*known, seen[silo].tenths))
    return max(missing, distance / (distance + width + TINY))


# ---------------------------------------------------------------- what is probably wrong


def warnings(survey: Survey) -> list[str]:
    """Return what to check before training, one sentence each."""
    found = [*_models(survey), *_few(survey)]
    for target in (True, False):
        for name, own in columns_of(survey, target=target).items():
            found += _absent(name, own, survey)
            found += _classes(name, own, survey) if target else []
            found += _of_column(name, own, survey)
    return found


def _models(survey: Survey) -> Iterator[str]:
    """Warn about models in use that the silos warn about."""
    for silo, model in sorted(models_of(survey).items()):
        if model.drifted:
            named = [f"{name} (PSI {model.psi[name]:.2f})" for name in model.drifted]
            yield f"{silo}: inputs of its model in use have drifted: {wire.some(named)}."
        if model.worse:
            figures = f": {model_text(model)}" if model.metric else ""
            yield f"{silo}: its model in use has become worse{figures}."


def models_of(survey: Survey) -> dict[str, Watched]:
    """Return silo → what it reports about its model in use."""
    return {silo: watched_of(plain) for silo, plain in survey.models.items()}


def model_text(model: Watched) -> str:
    """Return the deciding metric of a model in use, now and before."""
    metric = wire.KNOWN_METRICS[model.metric]
    now, before = (
        metric.text(math.nan if value is None else value) for value in (model.value, model.before)
    )
    return f"{metric.title} {now}, {before} before"


def _few(survey: Survey) -> Iterator[str]:
    for silo, own in sorted(survey.reported.items()):
        if own.samples < FEW:
            yield f"{silo} has only {own.samples} training samples: little can be learned there."
        if own.left_out:
            yield f"{silo} has {own.left_out} more columns, about which it shares nothing."


def _absent(name: str, own: Mapping[str, ColumnCounts], survey: Survey) -> Iterator[str]:
    """Warn about columns that some silos have and others, which list their columns, do not."""
    target = any(name == column.name for t in survey.reported.values() for column in t.targets)
    reporting = [s for s, t in survey.reported.items() if (t.targets if target else t.inputs)]
    if lacking := sorted(set(reporting) - set(own)):
        have, has = wire.some(sorted(own)), "has" if len(lacking) == 1 else "have"
        yield f"{name}: {wire.some(lacking)} {has} no such column, {have} do."


def _classes(name: str, own: Mapping[str, ColumnCounts], survey: Survey) -> Iterator[str]:
    for silo, column in own.items():
        if not column.categories:
            continue
        present = [i for i, cell in enumerate(column.cells) if cell != 0]
        if len(present) == 1:
            yield (
                f"{name}: all training samples of {silo} are {column.categories[present[0]]!r}. "
                "A model that always gives this answer makes no error there."
            )
        elif lacking := [column.categories[i] for i, c in enumerate(column.cells) if c == 0]:
            yield f"{name}: {silo} has no training sample of {wire.some(lacking)}."
        if None in column.cells and len(column.cells) == 2:
            least = survey.reported[silo].least
            yield (
                f"{name}: {silo} has fewer than {least} training samples of one of "
                f"{wire.some(column.categories)}; it does not reveal which, or how many."
            )
        elif len(present) > 1 and None not in column.cells:
            yield from _balance(name, silo, own, survey)


def _balance(
    name: str, silo: str, own: Mapping[str, ColumnCounts], survey: Survey
) -> Iterator[str]:
    column = own[silo]
    alike = [
        other
        for other, its in own.items()
        if other != silo and its.categories == column.categories and None not in its.cells
    ]
    if not alike:
        return
    mine = shares(column, survey.reported[silo].samples)
    others = np.mean([shares(own[n], survey.reported[n].samples) for n in alike], axis=0)
    worst = int(np.argmax(np.abs(mine - others)))
    if worst < len(column.categories) and abs(mine[worst] - others[worst]) >= OTHER_BALANCE:
        yield (
            f"{name}: {_about(mine[worst])} of the samples of {silo} are "
            f"{column.categories[worst]!r}, {_about(others[worst])} elsewhere."
        )


def _of_column(name: str, own: Mapping[str, ColumnCounts], survey: Survey) -> Iterator[str]:
    counted = {silo: max(survey.reported[silo].samples, 1) for silo in own}
    yield from _missing(name, {n: (c.missing or 0) / counted[n] for n, c in own.items()})
    for silo, column in own.items():
        odd = (column.odd or 0) / counted[silo]
        if odd > MOST_ODD:
            what = "of no declared category" if column.categories else "not within declared bounds"
            yield (
                f"{name}: {_about(odd)} of the samples of {silo} are {what}, so count as "
                "missing. Is it another code or unit? `coterie silo check` there names the first."
            )
        target = column in survey.reported[silo].targets
        if (
            not target
            and _varies(column) is False
            and _shows_variation(column, survey.reported[silo])
            and any(_varies(c) for n, c in own.items() if n != silo)
        ):
            yield f"{name}: all samples of {silo} are in one {_cell(column)}; elsewhere it varies."
    if not any(column in survey.reported[silo].targets for silo, column in own.items()):
        yield from _lacking(name, own, survey)
        if _is_constant(own, survey):
            cell = _cell(next(iter(own.values())))
            yield (
                f"{name}: all values of every silo are in one {cell}: nothing can be learned from "
                "it."
            )
    yield from _units(name, own, survey)


def _lacking(name: str, own: Mapping[str, ColumnCounts], survey: Survey) -> Iterator[str]:
    """Warn about categories that a silo lacks, although the others have many samples of them."""
    for silo, column in own.items():
        beside = [n for n, c in own.items() if n != silo and c.categories == column.categories]
        if not beside or not column.categories or not _varies(column):
            continue
        samples = sum(survey.reported[other].samples for other in beside)
        for number, category in enumerate(column.categories):
            others = sum(own[other].cells[number] or 0 for other in beside)
            expected = others / max(samples, 1) * survey.reported[silo].samples
            if column.cells[number] == 0 and expected >= LACKED:
                yield (
                    f"{name}: {silo} has no training sample of {category!r}, the other silos "
                    f"have {others:,}."
                )


def _is_constant(own: Mapping[str, ColumnCounts], survey: Survey) -> bool:
    """Return whether all values of all silos are in the same category, or about the same number."""
    kinds = {bool(one.categories) for one in own.values()}
    if len(kinds) > 1 or any(_varies(one) is not False for one in own.values()):
        return False
    filled = {silo: next(i for i, cell in enumerate(c.cells) if cell) for silo, c in own.items()}
    if any(one.categories for one in own.values()):
        return len({one.categories[filled[silo]] for silo, one in own.items()}) == 1
    low = {silo: (one.first + filled[silo]) * one.step for silo, one in own.items()}
    same = max(low.values()) < min(low[silo] + one.step for silo, one in own.items())
    return same and any(_shows_variation(one, survey.reported[silo]) for silo, one in own.items())


def _shows_variation(column: ColumnCounts, of: Statistics) -> bool:
    """Return whether different values must be in several cells (``cells.intervals``)."""
    return bool(column.categories) or of.samples >= 3 * SAMPLES * of.least


def _missing(name: str, absent: Mapping[str, float]) -> Iterator[str]:
    for silo, share in absent.items():
        others = [own for other, own in absent.items() if other != silo]
        if share >= 1:
            yield f"{name}: {silo} has no value of it at all."
        elif share > EMPTY or (share > MUCH and others and median(others) < LITTLE):
            beside = f", {_about(median(others))} elsewhere" if others else ""
            yield f"{name}: {_about(share)} of the samples of {silo} have no value{beside}."


def _varies(column: ColumnCounts) -> bool | None:
    """Return whether present values are in several cells; None if hidden cells leave that open.

    A hidden cell is not empty, unless all are hidden; a single one may have few values.
    """
    filled = sum(cell != 0 for cell in column.cells)
    if filled > 1:
        return None if set(column.all_cells) == {None} else True
    known = filled == 1 and None not in column.cells and (column.categories or column.step)
    return False if known else None


def _cell(column: ColumnCounts) -> str:
    return "category" if column.categories else "interval"


def _units(name: str, own: Mapping[str, ColumnCounts], survey: Survey) -> Iterator[str]:
    """Warn about silos whose numbers lie outside the others' range, and about codes below 0."""
    numbers = {silo: column for silo, column in own.items() if column.step}
    places = {
        silo: quantiles(column, survey.reported[silo].samples, (0.1, 0.5, 0.9))
        for silo, column in numbers.items()
    }
    places = {silo: place for silo, place in places.items() if np.isfinite(place).all()}
    lowest = {silo: numbers[silo].first for silo in places}
    negative = [silo for silo, first in lowest.items() if first < 0]
    if len(negative) == 1 and len(lowest) > 1 and places[negative[0]][1] >= 0:
        yield f"{name}: only {negative[0]} has values below 0. Is that a code for missing?"
    for silo, place in sorted(places.items()):
        others = [own for other, own in places.items() if other != silo]
        if not others or (len(places) == 2 and silo != min(places)):
            continue
        middle = float(np.median([own[1] for own in others]))
        apart = all(place[0] > own[2] or place[2] < own[0] for own in others)
        if not apart or place[1] * middle <= 0:
            continue
        factor = max(place[1] / middle, middle / place[1])
        if factor >= OTHER_UNIT:
            beside = max(places) if len(places) == 2 else "the others"
            low, high, by = map(wire.readable, (place[1], middle, factor))
            yield (
                f"{name}: the median is about {low} at {silo}, and {high} at {beside}: a factor of "
                f"{by}. Is it another unit?{_hint(factor)}"
            )


def _hint(factor: float) -> str:
    near = min(KNOWN_FACTORS, key=lambda known: abs(math.log(factor / known)))
    if abs(math.log(factor / near)) > SAME_FACTOR:
        return ""
    units = KNOWN_FACTORS[near]
    return f" {units[:1].upper()}{units[1:]} differ by a factor of {near:g}."


def _about(share: float) -> str:
    return f"{100 * share:.0f}%"


def kinds_of(statistics: Statistics) -> str:
    """Describe the kinds of statistics that a silo shared."""
    parts = [
        word
        for word, own in (("inputs", statistics.inputs), ("targets", statistics.targets))
        if own
    ]
    return " and ".join(parts) or "numbers of samples"
