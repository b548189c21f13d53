"""What the command line makes of its arguments before anything is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import server.commands
import server.simulate
from server.cli import app


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keys of runs that would have been submitted or simulated."""
    seen: list[dict[str, Any]] = []

    def submit(keys: dict[str, Any], *_: Any, **__: Any) -> int:
        seen.append(keys)
        return 0

    def simulate(console: Any, file: Path, *, changes: dict[str, Any], **_: Any) -> Path:
        seen.append(changes)
        return file

    monkeypatch.setattr(server.commands, "submit_and_follow", submit)
    monkeypatch.setattr(server.simulate, "simulate", simulate)
    return seen


@pytest.mark.parametrize(
    "line",
    [
        ["run", "fedcollab", "--alone", "runs/independent-1"],
        ["run", "fedcollab", "--set", "alone=runs/independent-1"],
        ["simulate", "sim.toml", "--set", "alone=runs/independent-1"],
    ],
)
def test_a_folder_of_a_run_alone_that_is_here_is_made_absolute(
    line: list[str],
    submitted: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "independent-1"
    folder.mkdir(parents=True)
    CliRunner().invoke(app, line)
    assert submitted[-1]["alone"] == "runs/independent-1", "no run is there: a name, perhaps"
    (folder / "run.json").write_text("{}")
    CliRunner().invoke(app, line)
    assert submitted[-1]["alone"] == str(folder.resolve())
