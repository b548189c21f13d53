"""The holder of a run, as far as another account can tell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import coterie.server.cli.commands
from coterie.server.cli.commands import print_runs
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import locked_run
from coterie.strategies.errors import FederationError
from coterie.system.files import UNKNOWN, held_by, locked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is going on, says its record."""
    made = tmp_path / "fedavg-1"
    made.mkdir()
    record = {
        "status": "running",
        "run-id": "1",
        "started": "2026-01-01T00:00:00",
        "config": {"strategy": "fedavg", "rounds": 5},
        "silos": {},
        "rounds": [],
    }
    (made / "run.json").write_text(json.dumps(record))
    return made


def allow(monkeypatch: pytest.MonkeyPatch, *modes: str) -> None:
    """Have an account that may open a lock in these ways only; permissions do not bind root."""
    opened = Path.open

    def open_as_other(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if path.name == "lock" and mode not in modes:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *args, **more)

    monkeypatch.setattr(Path, "open", open_as_other)


def test_who_may_only_read_sees_who_holds_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held_by(folder) is None
    with locked(folder):
        allow(monkeypatch, "r")
        assert held_by(folder) == os.getpid()
    assert held_by(folder) is None


def test_a_run_that_another_process_holds_is_refused_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.runs.run.LOCK_DEADLINE_S", 0.2)
    said = f"is still active, in process {os.getpid()}. Stop it first."
    with locked_run(folder), pytest.raises(FederationError, match=said), locked_run(folder):
        pass
    with locked_run(folder):
        pass


def test_a_lock_that_cannot_be_read_may_be_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(folder):
        allow(monkeypatch)
        assert held_by(folder) == UNKNOWN
        print_runs(folder.parent)
    assert "running (lock unreadable)" in capsys.readouterr().out


class Calls:
    """A SuperLink that believes that run 1 goes on."""

    def runs(self) -> list[Any]:
        class Info:
            run_id, ended = 1, False

        return [Info()]

    def stop(self, run_id: int) -> None:
        raise AssertionError(f"run {run_id} was stopped")


@pytest.mark.parametrize(
    ("modes", "why"), [(["r"], "still running."), ([], "cannot be determined")]
)
def test_a_run_of_another_account_is_not_stopped_to_be_resumed(
    modes: list[str], why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.read({"resume": folder.name, "runs-dir": str(folder.parent)})
    with locked(folder):
        allow(monkeypatch, *modes)
        with pytest.raises(FederationError, match=why):
            coterie.server.cli.commands.resumable(Calls(), config)  # type: ignore[arg-type]
