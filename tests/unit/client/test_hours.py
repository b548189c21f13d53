"""When a silo works, by a clock that is passed in."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from coterie import wire
from coterie.client.cli.check import _condition_lines
from coterie.client.home import hours
from coterie.client.home.hours import read_days, read_hours, words, works_at
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from tests.conftest import digits_config
from tests.kit import ask, initial, train

MONDAY = {"Mon": 23, "Tue": 24, "Fri": 27, "Sat": 28, "Sun": 29}


def at(day: str, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return datetime(2026, 11, MONDAY[day], hour, minute)


@pytest.mark.parametrize(
    ("day", "clock", "asked", "days", "works"),
    [
        ("Mon", "20:00", "20:00-06:00", "", True),
        ("Mon", "05:59", "20:00-06:00", "", True),
        ("Mon", "06:00", "20:00-06:00", "", False),
        ("Mon", "19:59", "20:00-06:00", "", False),
        ("Sat", "05:00", "20:00-06:00", "Mon-Fri", True),  # Friday's night
        ("Mon", "05:00", "20:00-06:00", "Mon-Fri", False),  # Sunday's
        ("Sat", "21:00", "20:00-06:00", "Mon-Fri", False),
        ("Tue", "12:00", "08:00-18:00", "Mon,Wed-Fri", False),
        ("Fri", "12:00", "08:00-18:00", "Mon,Wed-Fri", True),
        ("Sun", "12:00", "", "Sat-Mon", True),
        ("Tue", "00:00", "", "Sat-Mon", False),
    ],
)
def test_hours_past_midnight_belong_to_the_day_on_which_they_begin(
    day: str, clock: str, asked: str, days: str, works: bool
) -> None:
    assert works_at(at(day, clock), asked, days) is works


@pytest.mark.parametrize("text", ["20-6", "20:00-20:00", "25:00-06:00", "20:00–06:00"])
def test_other_texts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be HH:MM-HH:MM, for example 20:00-06:00"):
        read_hours(text)
    with pytest.raises(ValueError, match="must be days separated by commas or a dash"):
        read_days(text)
    with pytest.raises(SettingsError, match="hours must be HH:MM-HH:MM"):
        SiloSettings.from_node_config({"hours": text}, node_id=1)


def test_outside_its_hours_a_silo_begins_nothing_and_finishes_what_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silo: dict[str, Any] = digits_config("a", hours="20:00-06:00", days="Mon-Fri")
    monkeypatch.setattr(hours, "now", lambda: at("Mon", "12:00"))
    for refused in (ask(wire.DESCRIBE, silo), train(initial(), silo)):
        assert refused.has_error() and refused.error.code == wire.CLOSED
        assert refused.error.reason == ("silo 'a' works 20:00–06:00, Mon–Fri, by its own clock.")
    assert not ask(wire.EVALUATE, silo, model=initial()).has_error(), "the end of a round"
    assert not hours.objection(wire.MASKED_SUM, "20:00-06:00", "")
    grows = ask(wire.EVALUATE_HISTOGRAMS, silo, model=initial(), strategy="trees")
    assert grows.error.code == wire.CLOSED
    assert not hours.objection(wire.EVALUATE_HISTOGRAMS, "20:00-06:00", "", begun=True)
    monkeypatch.setattr(hours, "now", lambda: at("Mon", "21:00"))
    assert not train(initial(), silo).has_error()
    assert words("", "Mon-Fri") == "works Mon–Fri"
    shown = list(_condition_lines(Policy(approve="ask", hours="20:00-06:00")))
    assert shown[:2] == [
        "Takes part in a run only after approval here: coterie silo approve RUN",
        "Joins runs and trains only when it works 20:00–06:00",
    ]
    assert words("", "") == ""
