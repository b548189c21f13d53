"""A silo's working hours: hours of the day and days of the week, by its machine's clock.

Outside of them it joins no run and begins no training. It finishes what it began, and answers at
any hour what completes a round that it trained in (a masked sum, a test, a model to save), as the
other silos would otherwise lose theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, time, timedelta

from coterie import wire

WEEK = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
HOURS_FORM = "HH:MM-HH:MM, for example 20:00-06:00; the end may be past midnight"
DAYS_FORM = f"days separated by commas or a dash, for example Mon-Fri: {', '.join(WEEK)}"


def now() -> datetime:
    """Return the local time of this machine."""
    return datetime.now()


def read_hours(text: object) -> str:
    """Return the text if it has ``HOURS_FORM`` or is empty, or raise ``ValueError``."""
    return _read(text, _hours, HOURS_FORM)


def read_days(text: object) -> str:
    """Return the text if it has ``DAYS_FORM`` or is empty, or raise ``ValueError``."""
    return _read(text, _days, DAYS_FORM)


def _read(text: object, parse: Callable[[str], object], form: str) -> str:
    try:
        if text:
            parse(str(text))
    except ValueError:
        raise ValueError(f"must be {form}. Got {text!r}") from None
    return str(text)


def works_at(at: datetime, hours: str, days: str) -> bool:
    """Return whether a silo with these hours and days works at this local time.

    Hours that go past midnight belong to the day on which they begin.
    """
    begin, end = _hours(hours) if hours else (time(), time())
    on = _days(days) if days else frozenset(range(7))
    clock, today = at.time(), at.weekday()
    if begin < end:
        return begin <= clock < end and today in on
    yesterday = (at - timedelta(days=1)).weekday()
    return (clock >= begin and today in on) or (clock < end and yesterday in on)


def words(hours: str, days: str) -> str:
    """Return a text for people, ``works 20:00–06:00, Mon–Fri``; empty if a silo always works."""
    when = ", ".join(filter(None, (hours, days))).replace("-", "–")
    return f"works {when}" if when else ""


def objection(kind: str, hours: str, days: str, *, begun: bool = False) -> str:
    """Return why a message of this type is not answered at this hour; empty if it is answered.

    ``begun``: the silo has answered questions of this round, which trees grow by.
    """
    trains = kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM
    begins = kind == wire.DESCRIBE or trains or (kind == wire.EVALUATE_HISTOGRAMS and not begun)
    if not begins or not (hours or days) or works_at(now(), hours, days):
        return ""
    return f"{words(hours, days)}, by its own clock."


def _hours(text: str) -> tuple[time, time]:
    if not re.fullmatch(r"\d\d:\d\d-\d\d:\d\d", text):
        raise ValueError(text)
    begin, end = (time.fromisoformat(part) for part in text.split("-"))
    if begin == end:
        raise ValueError(text)
    return begin, end


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = WEEK.index(first)
        span = (WEEK.index(last) - begin) % 7 if dash else 0
        found |= {(begin + i) % 7 for i in range(span + 1)}
    return frozenset(found)
