"""Real processes: a SuperLink, silos, gRPC. Everything is ended when a test is over."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.server.machine.local import LocalFederation, SiloSpec

COTERIE = [sys.executable, "-m", "coterie.server.cli"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an e2e test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def spec(name: str, index: int, **options: Any) -> SiloSpec:
    """A small digits silo; silos of different indices share no sample."""
    cut = {"train": 40, "test": 30, "skip": index * 70}
    return SiloSpec(name, options={**cut, **options})


def record_of(folder: Path) -> dict[str, Any]:
    """A run's record."""
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return record


def until(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0) -> None:
    """Wait for a condition, with a deadline that says what was waited for."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.1)


def coterie(*arguments: str, deadline_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the command and return what it said."""
    return subprocess.run(
        [*COTERIE, *arguments], capture_output=True, text=True, timeout=deadline_s, check=False
    )


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LocalFederation]:
    """A SuperLink of its own; the test starts the silos."""
    with LocalFederation(tmp_path / "federation") as local:
        yield local


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """A SuperLink and three silos that the tests of a module share and leave alone."""
    with LocalFederation(tmp_path_factory.mktemp("trio")) as local:
        for index, name in enumerate(("a", "b", "c")):
            local.start_silo(spec(name, index))
        local.wait_for_silos(3)
        yield local
