"""What is left of a federation of processes when a person ends it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from coterie.server.machine.local import LocalFederation, follow_run
from coterie.server.machine.superlink import SuperLink
from coterie.server.runs.record import Event
from coterie.strategies.errors import FederationError
from coterie.system.processes import Program, stop_all

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(60)"
)


def stubborn(folder: Path, name: str) -> Program:
    """A program that does not end when it is asked to."""
    command = [sys.executable, "-c", STUBBORN]
    made = Program(name, command, log=folder / f"{name}.log", environment=os.environ)
    made.start()
    made.wait_until(lambda: "up" in made.last_lines(), deadline_s=30)
    return made


def test_who_follows_a_run_hears_that_the_superlink_is_away_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def runs(self, run_id: int) -> list[Any]:
            raise FederationError("UNAVAILABLE")

    folder, heard = tmp_path / "mine-7", list[Event]()
    folder.mkdir()  # of a run whose process was killed
    (folder / "events.jsonl").write_text('{"event": "start", "run_id": "7"}\n')
    monkeypatch.setattr("coterie.server.machine.local.AWAY_SAID_S", 0.0)
    monkeypatch.setattr("coterie.server.machine.local.DEAD_S", 0.2)
    monkeypatch.setattr("coterie.server.runs.record.follow.CHECK_S", 0.0)
    with pytest.raises(FederationError, match="continue with `coterie run resume mine-7`"):
        follow_run(Gone(), 7, folder, heard.append)  # type: ignore[arg-type]
    assert any("the SuperLink has not answered for" in event.text for event in heard)


def test_the_more_processes_start_beside_it_the_longer_a_superlink_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def wait(self: SuperLink, deadline_s: float) -> None:
        allowed.append(deadline_s)
        raise FederationError("it did not start")

    monkeypatch.setattr(SuperLink, "wait", wait)
    for processes in (2, 50):
        local = LocalFederation(tmp_path)
        local.programs = {str(number): Any for number in range(processes)}
        with pytest.raises(FederationError, match="did not start"):
            local.wait_for_silos(50)
    few, many = allowed
    assert many > few + 100


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_second_interrupt_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(programs: Iterable[Program], *, deadline_s: float) -> None:
        os.kill(os.getpid(), number)
        stop_all(programs, deadline_s=0.1)

    monkeypatch.setattr("coterie.server.machine.local.stop_all", interrupted)
    federation = LocalFederation(tmp_path)
    silo = federation.programs["a"] = stubborn(tmp_path, "a")
    superlink = federation.superlink.program = stubborn(tmp_path, "superlink")
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    before = signal.getsignal(number)
    federation.__exit__()
    assert silo.ended and superlink.ended
    assert signal.getsignal(number) == before


def test_the_superlink_is_stopped_whatever_becomes_of_the_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(programs: Iterable[Program], *, deadline_s: float) -> None:
        for program in programs:
            program.process.kill()
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.server.machine.local.stop_all", interrupted)
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    federation = LocalFederation(tmp_path)
    federation.programs["a"] = stubborn(tmp_path, "a")
    superlink = federation.superlink.program = stubborn(tmp_path, "superlink")
    with pytest.raises(KeyboardInterrupt):
        federation.__exit__()
    assert superlink.ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_process_ends_the_federation(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(superlink: SuperLink) -> None:
        superlink.program = stubborn(tmp_path, "superlink")

    monkeypatch.setattr(SuperLink, "start", start)
    monkeypatch.setattr("coterie.server.machine.superlink.STOP_DEADLINE_S", 0.1)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, LocalFederation(tmp_path) as federation:
        superlink = federation.superlink.program
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number
    assert superlink.ended
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SuperLink, "start", lambda superlink: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LocalFederation(tmp_path):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
