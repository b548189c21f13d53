"""The demo's nine silos without processes: what it shows must hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.server.runs.record import read_run
from coterie.server.study.demo import KINDS, NEWCOMER, SIZES, demo, hidden_groups, newcomer, silos
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.result import RunResult
from coterie.tasks import load_task
from tests.commands import coterie
from tests.kit import mean_error, nodes_of, record_of, run

ROUNDS = 5
FOUND_BY = 4


def play(strategy: str, seed: int, folder: Path, *, count: int = 9, **more: Any) -> RunResult:
    keys = {"strategy": strategy, "rounds": ROUNDS, "seed": seed, "local-epochs": 5, **more}
    keys |= {"alpha": 50.0} if strategy == "hcct" else {}
    return run(folder / strategy, nodes_of(silos(seed)[:count]), **keys)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_hcct_finds_the_three_hidden_groups_and_everybody_gains(seed: int, tmp_path: Path) -> None:
    results = {name: play(name, seed, tmp_path) for name in ("independent", "fedavg", "hcct")}
    hidden = hidden_groups([spec.name for spec in silos(seed)])
    groups = results["hcct"].groups
    assert all(sorted(groups[t]) == hidden for t in range(FOUND_BY, ROUNDS + 1)), groups
    assert all(len(result.rounds[-1].evaluation) == 9 for result in results.values())
    alone, together, hcct = (mean_error(results[n]) for n in ("independent", "fedavg", "hcct"))
    assert hcct < alone - 0.03
    assert hcct < together - 0.1


@pytest.mark.nightly
def test_fedcollab_finds_the_three_hidden_groups_before_any_training(tmp_path: Path) -> None:
    result = play("fedcollab", 0, tmp_path, rounds=1)
    assert sorted(result.groups[1]) == hidden_groups([spec.name for spec in silos(0)])
    structure = result.rounds[0].details["structure"]
    low, high = structure["c-interval"]
    assert low < 3.4142 < 10 < high, "c = auto would find them too"
    record = record_of(tmp_path / "fedcollab")
    assert record["rounds"][0]["structure"]["bound"] == structure["bound"]
    phases = record["rounds"][0]["phases"]
    assert phases["train.discriminator"]["exchanges"] <= 10


def test_a_run_is_compared_with_an_independent_one(tmp_path: Path) -> None:
    play("independent", 0, tmp_path, rounds=1, count=2)
    play("fedavg", 0, tmp_path, rounds=1, count=2, **{"baseline-run": "independent"})
    record = record_of(tmp_path / "fedavg")
    figures = record["collaboration"]
    assert figures["silos"] == 2
    assert 0 <= figures["ipr"] <= 1 and figures["rsd"] >= 0
    assert figures["mean-accuracy"] == pytest.approx(record["mean-accuracy"])
    made = read_run(tmp_path / "fedavg")
    assert made.mean_error == pytest.approx(sum(made.final_errors.values()) / 2)
    assert made.collaboration is not None
    fewer = replace(made.collaboration, silos=1, mean_accuracy=0.75)
    assert replace(made, collaboration=fewer).mean_error == 0.25, "of silos with a baseline"
    with pytest.raises(FederationError, match="completed run of independent, or of trees"):
        play("fedavg", 0, tmp_path, rounds=1, count=2, **{"baseline-run": "fedavg"})
    with pytest.raises(FederationError, match="there is no run"):
        play("fedavg", 0, tmp_path, rounds=1, count=2, **{"baseline-run": "nothing"})
    play("fedavg", 1, tmp_path, rounds=1, count=2, **{"baseline-run": "independent"})
    said = (tmp_path / "fedavg" / "run.log").read_text(encoding="utf-8")
    assert "baseline-run: run independent has seed 0, this one 1" in said
    other = {"baseline-run": "independent", "primary-metric": "auroc"}
    with pytest.raises(FederationError, match=r"same primary metric. That of independent is error"):
        play("fedavg", 0, tmp_path, rounds=1, count=2, **other)
    record = record_of(tmp_path / "independent")
    record["config"]["task"] = "mnist"
    (tmp_path / "independent" / "run.json").write_text(json.dumps(record))
    with pytest.raises(FederationError, match=r"same task, digits\. independent is a run of mnist"):
        play("fedavg", 0, tmp_path, rounds=1, count=2, **{"baseline-run": "independent"})


def test_the_demos_silos_share_no_sample_and_have_the_sizes_that_it_says() -> None:
    specs = [*silos(3), newcomer(3)]
    used: set[int] = set()
    for spec in specs:
        first, size = int(spec.options["skip"]), int(spec.options["train"] + spec.options["test"])
        mine = set(range(first, first + size))
        assert not used & mine
        used |= mine
        load_task("digits").load(spec.options)
    assert sorted(int(spec.options["train"]) for spec in specs) == sorted([*SIZES * 3, 30])


def test_the_hidden_groups_are_those_of_the_kinds() -> None:
    names = [spec.name for spec in silos(0)]
    groups = hidden_groups([*names, NEWCOMER])
    assert len(groups) == len(KINDS) == 3
    assert sorted(map(len, groups)) == [3, 3, 4]
    assert next(group for group in groups if NEWCOMER in group)[0].startswith("upright")
    assert hidden_groups(["turned-1"]) == [["turned-1"]]


def test_alpha_is_hcct_s_so_other_demos_are_not_refused_for_its_default() -> None:
    """The seed is refused, which comes after the strategy's own keys."""
    for strategy in ("auto", "fedgroup"):
        done = coterie("demo", "--strategy", strategy, "--seed", "99999999999")
        assert "seed must be" in done.stderr and "alpha" not in done.stderr
    assert "alpha belongs to hcct" in coterie("demo", "--strategy", "auto", "--alpha", "3").stderr


@pytest.mark.parametrize(
    ("argument", "said"),
    [({"alpha": float("nan")}, "alpha must be"), ({"seed": 99999999999}, "seed must be")],
)
def test_a_demo_that_cannot_be_run_is_refused_before_any_silo_starts(
    argument: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(FederationError, match=said):
        demo(Console(quiet=True), folder=tmp_path / "demo", **argument)
    assert not (tmp_path / "demo").exists()
