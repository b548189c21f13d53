"""The page of a regression: coefficients of every group, and how far its silos differ."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.features.sums.coordinator import Fit
from coterie.features.sums.regression.keys import listing
from coterie.features.sums.regression.newton import (
    COX,
    EVENTS,
    INTERCEPT,
    column_of,
    in_intercept,
    references_of,
)
from coterie.features.sums.regression.numbers import Estimate, Spread, estimate, spread
from coterie.features.sums.regression.pooling import partly_pooled
from coterie.features.sums.regression.survival import SURVIVAL, times_of
from coterie.pictures import estimates
from coterie.pictures.page import Fold, Page, Picture, Table
from coterie.pictures.style import ALONE, GROUPS, INK, LIGHT
from coterie.server.report.race_words import listed
from coterie.server.report.story import NO_NUMBER
from coterie.server.runs.fitted import Fitted
from coterie.server.runs.record.metrics import p_text

MOST_DRAWN = 12
"""Most coefficients that are drawn; the tables show all."""
RATIOS = {"logistic": "odds ratio", "poisson": "rate ratio", "cox": "hazard ratio"}
"""What exp(coefficient) is."""
OF_COX = (
    "Each silo has its own baseline hazard: rows are compared with those of the same silo. Ties "
    "are treated by Efron's method. Hazard ratios are assumed to stay the same over time. The rows "
    "with an event include those that do not count in the fit: at their time, fewer rows of their "
    "silo than its smallest count (statistics_from) are under observation. Silos do not send how "
    "many."
)
PARTLY = (
    "Each silo's coefficients are moved towards the mean of its group's silos (empirical Bayes): "
    "the larger their errors are compared with τ², the more. The intervals contain the error of "
    "the mean, but not that of τ²: with few silos they are too narrow."
)
MOST_FIGURES = 8
"""Most figures of a ratio."""
NO_RESULT = "There is no result."
DIFFERENT = 0.05
"""Level of the tests whether coefficients differ from 0, and whether silos differ in any."""
HEAD = ("coefficient", "value", "standard error", "95%", "p")


@dataclass(frozen=True)
class Group:
    """The regression of a group of silos.

    Attributes:
        coefficients: name → estimate; None where the column has one value only in these rows.
        alone: coefficient → silo → its estimate alone.
        partly: the same, partly pooled; empty unless at least two silos have estimates alone.
    """

    fit: Fit
    rows: int
    coefficients: Mapping[str, Estimate | None]
    alone: Mapping[str, Mapping[str, Estimate]]
    partly: Mapping[str, Mapping[str, Estimate]]

    @property
    def events(self) -> int | None:
        """The number of rows with an event; None except in a Cox regression."""
        found = self.fit.state.arrays.get(EVENTS)
        return None if found is None else int(found[0])

    def spread_of(self, name: str) -> Spread | None:
        """Return how the silos' own coefficients differ; None of fewer than two silos."""
        found = self.alone.get(name, {}).values()
        return spread([one.value for one in found], [one.error for one in found])


def groups_of(fitted: Fitted) -> list[Group]:
    """Return the groups whose fit has a result, and silos alone that are in no group."""
    model = fitted.settings["model"]
    alone = {name: _estimates(fit, model) for name, fit in fitted.alone.items() if fit.state.done}
    return [
        Group(
            fit,
            int(fit.state.arrays["count"][0]),
            (own := _estimates(fit, model)),
            {
                name: {
                    silo: one
                    for silo in fit.members
                    if (one := alone.get(silo, {}).get(name)) is not None
                    and name not in _apart(fit, fitted.alone[silo])
                }
                for name in own
            },
            _partly(fit, fitted.alone),
        )
        for fit in fits_to_show(fitted)
    ]


def _partly(fit: Fit, alone: Mapping[str, Fit]) -> dict[str, dict[str, Estimate]]:
    """Return coefficient → silo → its estimate, shrunk towards the mean of the group's silos."""
    names = fit.state.words[:-1]
    own = {name: alone[name] for name in fit.members if name in alone and alone[name].state.done}
    own = {name: one for name, one in own.items() if one.state.words == fit.state.words}
    if len(own) < 2:
        return {name: {} for name in names}
    found = partly_pooled(fit.state.arrays, [_comparable(fit, one) for one in own.values()])
    by_silo = dict(zip(own, found, strict=True))
    return {
        name: {
            silo: estimate(float(values[i]), float(errors[i]))
            for silo, (values, errors) in by_silo.items()
            if math.isfinite(values[i])
        }
        for i, name in enumerate(names)
    }


def _comparable(fit: Fit, one: Fit) -> dict[str, NDArray[Any]]:
    """Return the arrays of a silo's fit, in which only coefficients that can be compared count."""
    apart = _apart(fit, one)
    kept = np.array([name not in apart for name in one.state.words[:-1]])
    return {**one.state.arrays, "used": one.state.arrays["used"] & kept}


def _apart(one: Fit, other: Fit) -> set[str]:
    """Return the coefficients that do not mean the same in two fits.

    They are compared with another category, or are an intercept that contains other columns.
    """
    differ = in_intercept(one.state) ^ in_intercept(other.state)
    columns = {column_of(name) for name in differ}
    apart = {name for name in one.state.words[:-1] if column_of(name) in columns}
    return apart | {INTERCEPT} if apart else apart


def fits_to_show(fitted: Fitted) -> list[Fit]:
    """Return the fits that have a result: of groups, and of silos that are in none of these."""
    grouped = {name for fit in fitted.groups if fit.state.done for name in fit.members}
    single = [fit for name, fit in fitted.alone.items() if name not in grouped]
    return [fit for fit in (*fitted.groups, *single) if fit.state.done]


def _estimates(fit: Fit, model: str) -> dict[str, Estimate | None]:
    arrays = fit.state.arrays
    used = arrays["used"]
    freedom = float(arrays["count"][0] - used.sum()) if model == "linear" else math.inf
    return {
        name: estimate(
            float(arrays["coefficients"][i]),
            math.sqrt(float(arrays["covariance"][i, i])),
            freedom=freedom,
        )
        if used[i]
        else None
        for i, name in enumerate(fit.state.words[:-1])
    }


def regression_summary(fitted: Fitted) -> dict[str, Any]:
    """Return the figures, for JSON."""
    return around_groups(fitted, [_plain_group(one) for one in groups_of(fitted)])


def around_groups(fitted: Fitted, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document of a run with these figures of its groups."""
    return {
        "task": fitted.task,
        "parent": fitted.parent,
        **{key: fitted.settings[key] for key in ("model", "columns")},
        "exchanges": fitted.fits.exchanges,
        "groups": groups,
        "failed": {fit.name: fit.failed for fit in fitted.fits.fits if fit.failed},
        "left-out": {fit.name: dict(fit.left_out) for fit in fitted.fits.fits if fit.left_out},
        "silent": dict(fitted.silent),
    }


def again(fitted: Fitted) -> str:
    """Return the command that fits the same once more."""
    settings = fitted.settings
    line = ["coterie", "regress", settings["model"], "--task", fitted.task]
    columns, target = listing(settings["columns"]), settings["target"]
    agreed = times_of(settings) if settings["model"] == SURVIVAL else ()
    times = ",".join(np.format_float_positional(time, trim="-") for time in agreed)
    options = {"columns": columns, "target": target, "at": times, "groups": fitted.parent}
    for key, value in options.items():
        line += [f"--{key}", value] if value else []
    grouped = {name for fit in fitted.groups for name in (*fit.members, *fit.left_out)}
    line += ["--each-alone"] if grouped & fitted.alone.keys() else []
    return shlex.join(line) + " --secure" * fitted.masked


def left_out(fitted: Fitted) -> Table:
    """Return each silo that is not, or no longer, in a fit, the fit, and why."""
    left = [
        (silo, fit.name, why)
        for fit in fitted.fits.fits
        for silo, why in sorted(fit.left_out.items())
    ]
    left += [(silo, NO_NUMBER, why) for silo, why in sorted(fitted.silent.items())]
    return Table(("silo", "fit", "why"), left)


def warnings_of(fitted: Fitted) -> list[str]:
    """Return what to look at first: how many silos are in no fit, and fits without a result."""
    left = {n: why for fit in fitted.groups if not fit.failed for n, why in fit.left_out.items()}
    left |= {name: why for name, why in fitted.silent.items() if wire.OTHER_TASK not in why}
    of = len(left.keys() | {name for fit in fitted.fits.fits for name in fit.members})
    why = {name: text.removeprefix(f"silo {name!r} ") for name, text in sorted(left.items())}
    are = "is" if len(left) == 1 else "are"
    lost = f"{len(left)} of {wire.counted(of, 'silo')} {are} not in the fit: {wire.reasons(why)}"
    failed = [f"{fit.name}: no result. {fit.failed}" for fit in fitted.fits.fits if fit.failed]
    return [lost] * bool(left) + failed


def _plain_group(group: Group) -> dict[str, Any]:
    coefficients = []
    for name, one in group.coefficients.items():
        differ = group.spread_of(name)
        coefficients.append(
            {
                "name": name,
                "estimate": None if one is None else asdict(one),
                "alone": {silo: asdict(own) for silo, own in group.alone[name].items()},
                "partly-pooled": {silo: asdict(own) for silo, own in group.partly[name].items()},
                "between-silos": None if differ is None else asdict(differ),
            }
        )
    return {
        "group": group.fit.name,
        "members": list(group.fit.members),
        "rows": group.rows,
        "events": group.events,
        "target": group.fit.state.words[-1],
        "loss": float(group.fit.state.arrays["loss"][0]),
        "references": references_of(group.fit.state),
        "coefficients": coefficients,
        "covariance": group.fit.state.arrays["covariance"].tolist(),
    }


def build_regression_page(fitted: Fitted, name: str) -> Page:
    """Return the complete page, ready to be rendered."""
    groups, model = groups_of(fitted), fitted.settings["model"]
    events = sum(one.events or 0 for one in groups)
    of = f" of {groups[0].fit.state.words[-1]}" if groups else ""
    between = {title: table for title, table in _between(groups).items() if table.rows}
    return Page(
        title=f"{model.capitalize()} regression{of}",
        subtitle=f"run {name} · task {fitted.task} · fitted by sums over silos "
        f"in {fitted.fits.exchanges} exchanges",
        lead=_lead(groups) or NO_RESULT,
        figures={
            "silos": str(len({name for one in groups for name in one.fit.members})),
            "rows": f"{sum(one.rows for one in groups):,}",
            **({"rows with an event": f"{events:,}"} if model == COX else {}),
            "groups": str(len(groups)),
        },
        warnings=warnings_of(fitted),
        pictures=list(_pictures(groups)),
        tables={
            **{_title(one): _coefficients(one, model) for one in groups},
            **between,
            "Silos left out": left_out(fitted),
        },
        folds=list(_folds(groups, model)),
        commands={"Fit again": again(fitted)},
        notes=[*_notes(fitted, groups, compared=bool(between))] if groups else [],
    )


def _notes(fitted: Fitted, groups: Sequence[Group], *, compared: bool) -> Iterator[str]:
    tested = (
        "the tables of differences between silos test the latter"
        if compared
        else "only --each-alone tests the latter"
    )
    corrected = ", but silos are said to differ only if they do after Bonferroni's correction"
    yield (
        "The coefficients are those of one regression on all training rows of the group together; "
        "each silo keeps its test rows out of the sums. Intervals and p-values assume that rows "
        "are independent and that all silos of the group have the same coefficients; "
        f"{tested}. p-values are not adjusted for the number of coefficients"
        f"{corrected * compared}."
    )
    for one in groups:
        for name in references_of(one.fit.state):
            yield (
                f"{_title(one)}: others of its column are compared with {name}, as no row has the "
                "first category."
            )
    yield from _without(fitted)
    if fitted.settings["model"] == COX:
        yield OF_COX


def _without(fitted: Fitted) -> Iterator[str]:
    """Yield which columns have no coefficient, as all rows of a fit have the same value."""
    found = dict[str, str]()
    for fit in fitted.fits.fits:
        if fit.state.done:
            kept = zip(fit.state.words[:-1], fit.state.arrays["used"], strict=True)
            referred = references_of(fit.state)
            names = [name for name, used in kept if not used and name not in referred]
            found |= {fit.name: listed(names)} if names else {}
    effect = (
        " If this value is not 0, the intercept contains its effect, and is compared only with "
        "intercepts that contain it too."
    )
    if found:
        text = "A column with the same value in all rows of a fit has no coefficient there: "
        yield text + wire.reasons(found) + effect * (fitted.settings["model"] != COX)


def _lead(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        found = [
            name
            for name, one in group.coefficients.items()
            if one is not None and name != INTERCEPT and (one.low > 0 or one.high < 0)
        ]
        which = f"the {'coefficients' if len(found) > 1 else 'coefficient'} of {listed(found)}"
        which += f" {'differ' if len(found) > 1 else 'differs'}"
        which = which if found else "no coefficient differs"
        parts.append(f"{_title(group)}: {which} from 0 (p < {DIFFERENT:g}).")
        slopes = [name for name in group.coefficients if name != INTERCEPT]
        level = DIFFERENT / max(len(slopes), 1)  # Bonferroni
        apart = [n for n in slopes if (own := group.spread_of(n)) and own.p < level]
        if apart:
            parts.append(f"The silos differ in {listed(apart)}: no single coefficient fits all.")
    return " ".join(parts)


def _title(group: Group) -> str:
    return title_of(group.fit, group.rows)


def title_of(fit: Fit, rows: int) -> str:
    """Return the name of a fit for people, with its numbers of silos and rows.

    Rows that lack a value are left out, and may be most.
    """
    name, here, left = fit.name, len(fit.members), len(fit.left_out)
    whole = "Together" if left else "All silos"
    of = whole if name == "all" else f"Silo {name}" if " " in name else f"Group {name}"
    members = f"{here} of " * bool(left) + wire.counted(here + left, "silo")
    used = f"{rows:,} of {fit.samples:,} rows" if fit.samples > rows else f"{rows:,} rows"
    return f"{of.replace('Silo alone ', 'Silo ')} ({members}, {used})"


def _coefficients(group: Group, model: str) -> Table:
    ratio = RATIOS.get(model)
    rows = []
    for name, one in group.coefficients.items():
        if one is None:
            shown = "compared with" if name in references_of(group.fit.state) else NO_NUMBER
            rows.append((name, shown, *[NO_NUMBER] * (3 + bool(ratio))))
            continue
        ends = one.low, one.high
        own = [wire.readable(one.value), wire.readable(one.error), interval(*ends), p_text(one.p)]
        if ratio:
            own.append(_ratio(one))
        rows.append((name, *own))
    return Table((*HEAD, *([ratio] if ratio else [])), rows, cards=True)


def _between(groups: Sequence[Group]) -> dict[str, Table]:
    head = ("coefficient", "silos", "Q", "p", "I²", "τ²", "fixed effect", "random effects")
    return {
        f"Differences between silos: {_title(group)}": Table(
            head,
            [
                (
                    *(name, str(one.silos), wire.readable(one.q), p_text(one.p)),
                    *(f"{100 * one.i2:.0f}%", wire.readable(one.tau2)),
                    *(_with_interval(one.fixed), _with_interval(one.random)),
                )
                for name in group.coefficients
                if (one := group.spread_of(name)) is not None
            ],
            cards=True,
        )
        for group in groups
    }


def _folds(groups: Sequence[Group], model: str) -> Iterator[Fold]:
    """Yield, for each group, the partly pooled coefficients of its silos."""
    ratio = RATIOS.get(model)
    head = ("coefficient", "silo", "alone", "partly pooled", *([f"its {ratio}"] if ratio else []))
    for number, group in enumerate(groups):
        rows = [
            (
                *(name, silo, _with_interval(group.alone[name][silo]), _with_interval(one)),
                *([_ratio(one)] if ratio else []),
            )
            for name, own in group.partly.items()
            for silo, one in sorted(own.items())
            if silo in group.alone[name]
        ]
        if rows:
            title = f"Each silo, partly pooled: {_title(group)}"
            table = Table(head, rows, cards=True)
            yield Fold(f"partly-{number}", title, PARTLY, (), {"Coefficients": table})


def _pictures(groups: Sequence[Group]) -> Iterator[Picture]:
    """Yield a forest plot for each coefficient but the intercept: silos, and means of groups."""
    names = list(dict.fromkeys(name for one in groups for name in one.coefficients))
    for number, name in enumerate([one for one in names if one != INTERCEPT][:MOST_DRAWN]):
        rows = []
        for group, colour in zip(groups, colours(len(groups)), strict=True):
            for silo, one in sorted(group.alone.get(name, {}).items()):
                if len(group.fit.members) > 1:
                    more = group.partly[name].get(silo)
                    partly = None if more is None else (more.value, more.low, more.high)
                    ends = one.value, one.low, one.high
                    rows.append(estimates.Range(silo, *ends, ALONE, partly=partly))
            if (own := group.coefficients.get(name)) is not None:
                label = _title(group).partition(" (")[0]
                rows.append(
                    estimates.Range(label, own.value, own.low, own.high, colour, whole=True)
                )
            if (differ := group.spread_of(name)) is not None:
                mean = differ.random
                rows.append(
                    estimates.Range(
                        "random effects", mean.value, mean.low, mean.high, INK, whole=True
                    )
                )
        if rows:
            title = f"Coefficient of {name}"
            draw = partial(estimates.ranges, rows, title=title, unit="value with its 95% interval")
            caption = "Squares: each silo alone. " * any(not one.whole for one in rows)
            caption += "Circles: partly pooled. " * any(one.partly is not None for one in rows)
            caption += "Diamonds: all rows of the group"
            random = any(group.spread_of(name) is not None for group in groups)
            caption += ", and the random-effects mean over silos." if random else "."
            table = Table(
                ("estimate", "value", "95%"),
                [
                    (one.label, wire.readable(one.value), interval(one.low, one.high))
                    for one in rows
                ],
            )
            yield Picture(f"coefficient-{number}", title, caption, draw, table)


def colours(count: int) -> list[str]:
    return [LIGHT[GROUPS[i % len(GROUPS)]] for i in range(count)]


def _with_interval(one: Estimate) -> str:
    return f"{wire.readable(one.value)} ({interval(one.low, one.high)})"


def _ratio(one: Estimate) -> str:
    """Return exp of a coefficient in enough figures that its limits differ from it and from 1."""
    ratios = [_exp(x) for x in (one.value, one.low, one.high)]
    for figures in range(3, MOST_FIGURES + 1):
        texts = [wire.readable(ratio, figures=figures) for ratio in ratios]
        if not {"1", texts[0]} & {*texts[1:]}:
            break
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def interval(low: float, high: float) -> str:
    return f"{wire.readable(low)} to {wire.readable(high)}"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
