"""Turns of silos: pauses of one silo and of many, with a clock that the test moves."""

from __future__ import annotations

from threading import Thread

import pytest

from coterie.client.resident import schedule
from coterie.client.resident.schedule import Schedule


class Clock(Schedule[str]):
    """A schedule whose waits take no time but are noted; a look takes ``look_s``."""

    look_s = 0.002

    def __init__(self, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 0.0, 0.0
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(schedule.random, "uniform", lambda low, high: 1.0)
        super().__init__(names)
        monkeypatch.setattr(self._changed, "wait", self._wait)

    def _wait(self, timeout: float) -> None:
        self.now += timeout
        self.waited += timeout

    def next(self) -> tuple[str, float]:
        """The silo whose turn comes, and the seconds until then."""
        self.waited = 0.0
        silo = self.take()
        assert silo is not None
        return silo, self.waited

    def miss(self) -> tuple[str, float]:
        """The same; it is looked at in vain."""
        silo, waited = self.next()
        self.now += self.look_s
        self.missed(silo, seconds=self.look_s)
        return silo, waited

    def connect_all(self) -> None:
        while self._to_dial:
            self.connected(self.next()[0])


def test_one_silo_is_asked_again_after_a_short_pause_that_grows_with_its_idleness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock("a", monkeypatch)
    clock.connect_all()
    assert clock.miss() == ("a", 0.0)
    short = [clock.miss()[1] for _ in range(5)]
    assert all(0.003 <= pause <= 0.0045 for pause in short), "whatever LOOK_SHARE is"
    clock.now += 10.0
    clock.miss()
    assert clock.miss()[1] == pytest.approx(0.5, rel=0.02)
    clock.now += 1000.0
    clock.miss()
    assert clock.miss()[1] == pytest.approx(1.0, rel=0.01)


def test_work_makes_the_pauses_short_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock("a", monkeypatch)
    clock.connect_all()
    clock.now += 1000.0
    silo, _ = clock.next()
    clock.worked(silo)
    assert clock.miss() == ("a", 0.0)
    assert clock.miss()[1] < 0.005


def test_after_a_message_each_of_many_is_looked_at_once_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock("abcd", monkeypatch)
    clock.connect_all()
    for _ in range(20):
        clock.miss()
    silo, waited = clock.next()
    assert waited > 0
    clock.worked(silo)
    looks = [clock.miss() for _ in range(4)]
    assert sorted(name for name, _ in looks) == ["a", "b", "c", "d"]
    assert [waited for _, waited in looks] == [0.0] * 4
    assert clock.miss()[1] > 0


def test_looking_at_many_idle_silos_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock("abcdefghijklmnopqrstuvwxyz", monkeypatch)
    clock.connect_all()
    for _ in range(100):
        clock.miss()
    began, looks = clock.now, 500
    for _ in range(looks):
        clock.miss()
    share = looks * clock.look_s / (clock.now - began)
    assert 0.03 < share < 0.06


def test_silos_that_fail_together_wait_together_and_only_the_first_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock("abc", monkeypatch)
    clock.connect_all()
    clock.now += 7.0
    outages = [clock.failed(clock.next()[0], was_connected=True) for _ in range(2)]
    assert outages == [(0.0, True), (0.0, False)]
    assert clock.miss()[0] == "c", "the one that is connected is looked at meanwhile"
    while (silo := clock.next()[0]) == "c":
        clock.missed(silo, seconds=0.002)
    assert silo == "a" and clock.now == pytest.approx(7.25, abs=0.01)
    assert clock.failed(silo, was_connected=False)[1]


def test_an_outage_lasts_since_the_superlink_answered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock("a", monkeypatch)
    seconds = [clock.failed(clock.next()[0], was_connected=False)[0] for _ in range(4)]
    assert seconds == pytest.approx([0, 0.25, 0.75, 1.75])
    assert not clock._num_connected
    assert clock.connected(clock.next()[0])
    assert clock.failed(clock.next()[0], was_connected=True)[0] == 0
    assert clock.failed(clock.next()[0], was_connected=False)[0] == pytest.approx(0.25)


def test_a_thread_that_waits_is_told_to_stop() -> None:
    nobody: Schedule[str] = Schedule([])
    taken: list[str | None] = []
    thread = Thread(target=lambda: taken.append(nobody.take()))
    thread.start()
    nobody.stop()
    thread.join(60)
    assert taken == [None] and nobody.take() is None


# ---------------------------------------------------------------- where the SuperLink tells


def idle(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One silo that had no work for long, and has just been looked at."""
    clock = Clock("a", monkeypatch)
    clock.connect_all()
    clock.now += 1000.0
    clock.miss()
    return clock


def test_a_silo_that_is_told_looks_then_and_otherwise_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = idle(monkeypatch)
    clock.rest()
    assert clock.miss()[1] == pytest.approx(schedule.REST_S), "should no word come at all"
    for early in (False, True):
        clock.rest()
        clock.now += 3.0
        clock.word(notified=True, early=early)
        assert clock.miss()[1] == 0.0


def test_where_nobody_can_tell_it_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = idle(monkeypatch)
    for _ in range(10):
        clock.rest()
        clock.word(notified=False, early=True)
        assert clock.miss()[1] == pytest.approx(1.0)


def test_who_tells_again_and_again_of_what_is_not_there_is_not_believed_until_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = idle(monkeypatch)

    def pause() -> float:
        clock.rest()
        clock.word(notified=True, early=True)
        return clock.miss()[1]

    assert [pause() for _ in range(5)] == pytest.approx([0, 0, 0, 1, 1])
    clock.rest()
    clock.word(notified=True, early=True)
    clock.worked(clock.next()[0])
    assert pause() == 0.0
