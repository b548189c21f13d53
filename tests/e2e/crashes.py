"""Killing parts of a federation and going on: shared by the tests of crashes and the campaign."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.server.runs.record import Event
from coterie.server.runs.record.follow import events
from coterie.system.files import held_by
from tests.e2e.runs import HCCT, NAMES, record_of, until
from tests.e2e.trio import Trio

KEYS: dict[str, Any] = {**HCCT, "personal": "head", "seed": 1, "label": "crash"}


def until_event(folder: Path, wanted: Callable[[Event], bool]) -> Event:
    """Wait for an event of a run; fails if the run ends before."""
    for event in events(folder, start_deadline_s=150, ended=lambda: None):
        if wanted(event):
            return event
    raise AssertionError("the run ended before that")


def committed(folder: Path, number: int) -> None:
    """Wait until a round is committed."""
    until_event(folder, lambda e: e.kind == "commit" and e.number >= number)


def kill_server_app(folder: Path) -> None:
    """SIGKILL to the process that drives the run."""
    pid = held_by(folder)
    assert pid, f"nobody drives the run in {folder}"
    os.kill(pid, signal.SIGKILL)
    until(lambda: held_by(folder) is None, "the ServerApp's end")


def restart_superlink(trio: Trio, folder: Path) -> None:
    """A new SuperLink at the old address, once the old one's ServerApp has gone."""
    until(lambda: held_by(folder) is None, "the orphaned ServerApp's end")
    deadline = time.monotonic() + 90
    while True:
        try:
            trio.superlink.start()
            break
        except Exception:  # the port is not free yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    trio.wait_for_silos(len(NAMES))


def resume(trio: Trio, folder: Path) -> None:
    """``coterie run --resume``, as an operator types it, until the run is complete."""
    done = trio.operator("run", "--resume", folder.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert record_of(folder)["status"] == "completed"
    rounds = record_of(folder)["config"]["rounds"]
    assert f"round {rounds}/{rounds}" in done.stdout


def assert_same_outcome(folder: Path, undisturbed: Path) -> None:
    """Bit-identical models, the same groups and the same errors in every round."""
    got, expected = record_of(folder), record_of(undisturbed)
    assert got["model-hashes"] == expected["model-hashes"]
    assert got["final-evaluation"] == expected["final-evaluation"]
    for key in ("round", "groups", "left-out", "evaluation", "details"):
        assert [e.get(key) for e in got["rounds"]] == [e.get(key) for e in expected["rounds"]]
