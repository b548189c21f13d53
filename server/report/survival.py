"""The page of survival curves: survival of every group until agreed times, and their comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from coterie.features.sums.coordinator import Fit
from coterie.features.sums.regression.survival import EVENTS, SURVIVAL, Step, curve, log_rank
from coterie.pictures import charts
from coterie.pictures.page import Page, Picture, Table
from coterie.pictures.style import ALONE
from coterie.server.report.race_words import listed
from coterie.server.report.regression import (
    DIFFERENT,
    NO_RESULT,
    again,
    around_groups,
    build_regression_page,
    colours,
    fits_to_show,
    interval,
    left_out,
    regression_summary,
    title_of,
    warnings_of,
)
from coterie.server.runs.fitted import Fitted
from coterie.server.runs.record.metrics import p_text

MOST_NAMED = 12
"""Most curves of which those of silos have a name in the picture."""
NOTE = (
    "The estimate is Kaplan's and Meier's, with Greenwood's variance, of times rounded up to the "
    "agreed ones: a row that is censored between two of them counts as at risk until the later "
    "one. Survival is therefore overestimated: slightly if few rows are censored between two "
    "times, and more times make the error smaller. A silo is left out if it has few events or "
    "censored rows in an interval, or few rows after the last (statistics_from). If groups were "
    "found by training on the same rows, p of a test between them is too small."
)


def page_of_fits(fitted: Fitted, name: str) -> Page:
    """Return the page of regressions or survival curves."""
    survival = fitted.settings["model"] == SURVIVAL
    return (_build_page if survival else build_regression_page)(fitted, name)


def summary_of_fits(fitted: Fitted) -> dict[str, Any]:
    """Return the figures of regressions or survival curves, for JSON."""
    survival = fitted.settings["model"] == SURVIVAL
    return (_summary if survival else regression_summary)(fitted)


def _compared(fitted: Fitted) -> tuple[Sequence[Fit], tuple[float, float] | None]:
    """Return the groups, or the silos of a single one, and the log-rank test between them."""
    fits = fits_to_show(fitted)
    if len(fits) == 1 or not fitted.parent:
        fits = [fit for fit in fitted.alone.values() if fit.state.done]
    return fits, log_rank([fit.state.arrays for fit in fits])


def _all_fits(fitted: Fitted) -> list[Fit]:
    shown = fits_to_show(fitted)
    whole = {fit.members for fit in shown}  # where only one silo is left, its group is it alone
    return [*shown, *(f for f in fitted.alone.values() if f.state.done and f.members not in whole)]


def _summary(fitted: Fitted) -> dict[str, Any]:
    fits, test = _compared(fitted)
    curves = [
        {
            "group": fit.name,
            "members": list(fit.members),
            "rows": int(fit.state.arrays["count"][0]),
            "curve": [_plain(one) for one in curve(fitted.settings, fit.state.arrays)],
        }
        for fit in _all_fits(fitted)
    ]
    between = None
    if test is not None:
        between = {"groups": [fit.name for fit in fits], "statistic": test[0], "p": test[1]}
    return around_groups(fitted, curves) | {"log-rank": between}


def _plain(step: Step) -> dict[str, float]:
    return {name.replace("_", "-"): value for name, value in asdict(step).items()}


def _build_page(fitted: Fitted, name: str) -> Page:
    fits, test = _compared(fitted)
    shown = _all_fits(fitted)
    curves = {fit.name: curve(fitted.settings, fit.state.arrays) for fit in shown}
    lead, tests = "There is no second group or silo to compare.", dict[str, Table]()
    lead = lead if shown else NO_RESULT
    if test is None and len(fits) > 1:
        events = any(fit.state.arrays[EVENTS].any() for fit in fits)
        lead = "Survival cannot be compared."
        lead = lead if events else "There are no events, so survival cannot be compared."
    if test is not None:
        differ, sign = ("differs", "<") if test[1] < DIFFERENT else ("does not differ", "≥")
        of = "groups" if any(fit in fitted.groups for fit in fits) else "silos"
        lead = f"Survival {differ} between the {len(fits)} {of} (p {sign} {DIFFERENT:g})."
        names = listed([_title(fit).partition(" (")[0] for fit in fits])
        row = names, f"{test[0]:.2f}", p_text(test[1])
        tests = {"Log-rank test": Table(("between", "χ²", "p"), [row], cards=True)}
    return Page(
        title="Survival",
        subtitle=f"run {name} · task {fitted.task} · counted by sums over silos",
        lead=lead,
        warnings=warnings_of(fitted),
        pictures=list(_pictures(fitted, curves)) if shown else [],
        tables={
            **{_title(fit): _table(curves[fit.name]) for fit in shown},
            **tests,
            "Silos left out": left_out(fitted),
        },
        commands={"Count again": again(fitted)},
        notes=[NOTE] if shown else [],
    )


def _title(fit: Fit) -> str:
    return title_of(fit, int(fit.state.arrays["count"][0]))


def _table(steps: Sequence[Step]) -> Table:
    head = ("until", "at risk", "events", "survival", "95%")
    rows = [
        (f"{s.time:.12g}", f"{s.at_risk:,}", f"{s.events:,}", f"{s.survival:.3f}",
            interval(s.low, s.high))
        for s in steps
    ]  # fmt: skip
    return Table(head, rows, cards=True)


def _pictures(fitted: Fitted, curves: dict[str, list[Step]]) -> Iterator[Picture]:
    """Yield the curves, those of silos of a group thin and without their band.

    Lines are straight between the agreed times, because the steps there are unknown.
    """
    grouped, shown = fits_to_show(fitted), _all_fits(fitted)
    found = dict(zip((fit.name for fit in grouped), colours(len(grouped)), strict=True))
    lines = []
    for fit in shown:
        steps, whole = curves[fit.name], fit.name in found
        label = _title(fit).partition(" (")[0]
        named = label if whole or len(shown) <= MOST_NAMED else ""
        times = [0.0, *(one.time for one in steps)]
        middle, low, high = (
            [1.0, *(getattr(one, part) for one in steps)] for part in ("survival", "low", "high")
        )
        band = (low, high) if whole else None
        colour = found.get(fit.name, ALONE)
        line = charts.Curve(
            times, middle, colour, named, label, band=band, thin=not whole, dots=True
        )
        lines.append(line)
    caption = "Kaplan-Meier estimates at the agreed times, joined by straight lines, and their 95% "
    caption += "intervals as bands."
    caption += " Thin lines: silos." if len(shown) > len(grouped) else ""
    unit, title = "share without an event", "Survival"
    draw = partial(charts.curves, lines, title=title, unit=unit, x="time")
    yield Picture("survival", title, caption, draw)
