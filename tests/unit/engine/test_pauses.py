"""How long a run rests between looks for replies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from coterie.engine import pauses
from coterie.engine.pauses import MIN_S, Pauses


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, in seconds, by a clock that nothing else moves."""
    found: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(found), sleep=found.append)
    monkeypatch.setattr(pauses, "time", clock)
    return found


def test_a_look_that_waits_itself_is_repeated_at_once(slept: list[float]) -> None:
    rests = Pauses()
    rests.rest(60.0, held=True)
    for seconds, found in ((2.0, False), (0.0, True), (0.0, True)):
        rests.looked(seconds, found=found)
        rests.rest(60.0, held=True)
    assert sum(slept) == 0


def test_one_that_did_not_wait_is_not_repeated_at_once(slept: list[float]) -> None:
    rests = Pauses()
    rests.rest(60.0, held=True)
    rests.looked(MIN_S / 2, found=False)
    rests.rest(60.0, held=True)
    assert sum(slept) == MIN_S


def test_looks_that_do_not_wait_become_rare(slept: list[float]) -> None:
    rests = Pauses()
    for _ in range(300):
        rests.rest(60.0)
        rests.looked(0.001, found=False)
    assert slept[0] == MIN_S
    assert slept == sorted(slept) and slept[-1] == pytest.approx(pauses.SHARE * sum(slept[:-1]))
    rests.begin()
    rests.rest(60.0)
    assert len(slept) == 299, "there is no pause before the first look"
