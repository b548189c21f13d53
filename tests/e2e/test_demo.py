"""Demos of every kind as a person runs them; one of the installed wheel is in test_wheel.py."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.study.demo import Outcome, demo


def run(folder: Path, strategy: str = "hcct", rounds: int = 9) -> tuple[Outcome, str]:
    """A short demo, and what it printed."""
    console = Console(file=io.StringIO(), width=120)
    outcome = demo(console, strategy=strategy, seed=3, rounds=rounds, folder=folder)
    assert isinstance(console.file, io.StringIO)
    return outcome, console.file.getvalue()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_demos_of_one_seed_find_the_hidden_groups_and_give_identical_models(
    tmp_path: Path,
) -> None:
    first, text = run(tmp_path / "first")
    assert first.groups == first.hidden
    assert sum(len(group) for group in first.groups) == 9, "one joined, one left"
    means = {run: sum(e.values()) / len(e) for run, e in first.errors.items()}
    assert means["grouped"] < means["alone"] and means["grouped"] < means["global"]
    assert first.peak_memory < 5e9
    assert "(+upright-late)" in text and "(-shifted-2)" in text
    assert "found exactly" in text
    assert "α is the preference for more data" in text
    second, _ = run(tmp_path / "second")
    assert second.hashes == first.hashes


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_demo_of_auto_finds_the_hidden_groups_and_says_how(tmp_path: Path) -> None:
    outcome, text = run(tmp_path, "auto", rounds=15)
    assert outcome.groups == outcome.hidden and "found exactly" in text
    said = " ".join(text.split())
    assert "Auto: a race opens between" in said and "Auto: the race is over: 3 groups" in said
    assert "Chosen: 3 groups" in said and "coterie runs explain Auto-" in said


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_demo_of_generators_takes_a_newcomer_and_a_leaver(tmp_path: Path) -> None:
    outcome, text = run(tmp_path, "fedgenp")
    assert "(+upright-late)" in text and "(-over-2)" in text
    assert "Per is each silo's personalised model" in " ".join(text.split())
    assert {"alone", "global", "grouped"} <= set(outcome.errors)
    own = sorted((tmp_path / "silos").rglob("personalised/FedGenP-*.safetensors"))
    assert len(own) == 10, "every silo that trained keeps its personalised model"
