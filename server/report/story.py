"""A run with its comparison runs, and number formats for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.pictures import charts
from coterie.pictures.style import LIGHT
from coterie.server.report.gains import Gains
from coterie.server.report.history import History
from coterie.server.runs.record import Run
from coterie.server.runs.record.metrics import Lead

MANY = 40
"""Number of silos above which a picture no longer has a row, a name or a line for each."""
MOST_COLUMNS, MOST_COLUMNS_NARROW = 24, 7
MOST_POINTS = 160
NO_NUMBER = "–"

Row = TypeVar("Row")


@dataclass(frozen=True)
class Story:
    """A run, its comparison runs, and the history of its groups."""

    run: Run
    gains: Gains
    history: History
    alone: Run | None = None
    common: Run | None = None

    @property
    def many(self) -> bool:
        """Whether there are too many silos to draw each."""
        return len(self.run.silos) > MANY

    def place(self, silo: str) -> tuple[str, str]:
        """Return the letter and colour of a silo's current or last group."""
        return self.history.last_seen.get(silo, ("", LIGHT["alone"]))


def top_rows(rows: list[Row], key: Callable[[Row], float], which: str) -> tuple[list[Row], str]:
    """Return the rows to draw, at most ``MANY`` in order of ``key``, and a note for the caption."""
    if len(rows) <= MANY:
        return rows, ""
    note = f" Drawn are the {MANY} of {len(rows)} {which}; all are in the table."
    return sorted(rows, key=key)[:MANY], note


def thin(
    x: Sequence[float], y: Sequence[float] | NDArray[np.float64]
) -> tuple[list[float], list[float]]:
    """Return at most ``MOST_POINTS`` points, including the first and the last."""
    rows: Sequence[int] = range(len(x))
    if len(x) > MOST_POINTS:
        rows = [round(i * (len(x) - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)]
    return [float(x[i]) for i in rows], [float(y[i]) for i in rows]


def thinned(count: int) -> str:
    return f" Of {count} rounds {MOST_POINTS} are drawn." if count > MOST_POINTS else ""


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def signed_points(gain: float, lead: Lead) -> str:
    """Format a gain in the units of the primary metric."""
    return NO_NUMBER if math.isnan(gain) else charts.gain_text(gain, lead.scale)


def decimals(value: float, count: int) -> str:
    """Format a number with ``count`` decimals; ``NO_NUMBER`` if it is NaN."""
    return NO_NUMBER if math.isnan(value) else f"{value:.{count}f}"


def minute(text: str) -> str:
    """Format a recorded time to the minute, in UTC; other text is unchanged."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return text


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "duration not recorded"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def bytes_of(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 1000 else f"{count:.3g} TB"
