"""``coterie simulate``: what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.server.report.command import build_story
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.server.study.given import Given, of_file
from coterie.server.study.simulate import configured, simulate
from coterie.strategies import FederationError
from coterie.strategies.errors import EXIT_CONFIG

TEXT = """
silos = 3
names = ["a", "b", "c"]
[split]
kind = "iid"
[run]
strategy = "hcct"
rounds = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A simulation of three silos."""
    path = tmp_path / "three.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def read(file: Path, changes: dict[str, Any]) -> tuple[Given, RunConfig]:
    """The silos of a file, and the configuration of a run over them."""
    return (found := of_file(file)), configured(found, changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "flhc", "linkage": "ward"}, "ward needs metric = euclidean"),
        ({"strategy": "fedgen"}, "the file needs `label-counts = true`"),
        ({"strategy": "fedgroup", "num-groups": 4}, "num-groups must be at most 3"),
        ({"min-silos": 4}, "min-silos must be at most 3, the silos of round 1. Got 4"),
        ({"churn": "c+2"}, "min-silos must be at most 2, .*churn"),
        ({"task": "mnist"}, "task must be digits, the task of the silos in .*three.toml"),
        ({"churn": "c-2"}, "churn waits for c to leave, but here silos stay"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], said: str, file: Path) -> None:
    with pytest.raises(FederationError, match=said) as caught:
        read(file, changes)
    assert caught.value.exit_code == EXIT_CONFIG


def test_a_newcomer_and_consent_to_label_counts_are_taken(file: Path) -> None:
    _, config = read(file, {"churn": "c+2", "min-silos": 2})
    assert (config.min_silos, config.rounds) == (2, 4)
    file.write_text("label-counts = true" + TEXT, encoding="utf-8")
    simulation, config = read(file, {"strategy": "fedgen"})
    assert simulation.label_counts and config.strategy == "fedgen"


def test_runs_of_other_silos_are_not_compared_though_they_have_the_same_names(
    file: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"rounds": 1, "local_epochs": 1, "progress": False}
    how |= {"runs_dir": tmp_path / "runs"}
    simulate(file, strategy="independent", **how)
    alike = simulate(file, strategy="fedavg", **how)
    file.write_text("seed = 5" + TEXT + "seed = 0\n", encoding="utf-8")  # of the split alone
    other = simulate(file, strategy="fedavg", **how)
    assert build_story(read_run(alike.folder)).gains.alone_run
    assert not build_story(read_run(other.folder)).gains.alone_run
