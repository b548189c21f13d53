"""HCCT-E, HCCT-P, regrouping on a schedule, α found in a trial, on the digits in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from coterie.client.app import app
from coterie.server.runs.config import RunConfig
from coterie.server.runs.initial import initial_arrays
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import build_strategy
from coterie.server.study.demo import hidden_groups, silos
from coterie.strategies import HCCT
from coterie.strategies.errors import FederationError
from coterie.strategies.hcct.alpha import (
    Found,
    Landscape,
    difference,
)
from coterie.strategies.partition.coalition import optimal
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import DescribedRoster
from tests.conftest import digits_config


def run(seed: int = 0, home: str = "", **keys: Any) -> RunResult:
    """HCCT on the demo's nine silos."""
    configs = []
    for s in silos(seed):
        data = {f"data.{k}": v for k, v in s.options.items()}
        own = {"home": f"{home}/{s.name}"} if home else {}
        configs.append({"name": s.name, "threads": 1, **data, **own})
    config = RunConfig.read({"seed": seed, "min-silos": 9, "rounds": 6, **keys})
    grid = InProcessGrid(app, configs)
    roster = DescribedRoster("digits", 9)
    label = f"family-{sorted(keys.items())}"
    strategy = build_strategy(config, run=label, roster=roster, on_round=lambda report: None)
    initial = initial_arrays(grid, roster.present(grid, number=1), config)
    return strategy.start(grid=grid, initial_arrays=initial, num_rounds=config.rounds)


def mean_error(result: RunResult) -> float:
    return float(np.mean([error for _, error, _ in result.rounds[-1].evaluation.values()]))


HIDDEN = hidden_groups([s.name for s in silos(0)])


def test_hcct_e_compares_one_layer_and_says_which() -> None:
    result = run(layers="auto", rounds=3)
    layers = {r.details["layer"] for r in result.rounds}
    assert len(layers) == 1
    assert layers.pop() in ("head.", "representation.0.", "representation.3.")


def test_personal_layers_are_never_on_the_wire_and_differ_between_silos() -> None:
    result = run(personal="head", rounds=4)
    for arrays in result.models.values():
        assert all(not name.startswith("head.") for name in arrays)
    assert mean_error(result) < mean_error(run(strategy="fedavg", rounds=4))


def test_layers_that_name_nothing_or_everything_cannot_be_personal() -> None:
    from coterie.client.home.settings import SiloSettings
    from coterie.client.work.personal import PersonalError, personal_names
    from coterie.client.work.workbench import open_workbench

    with pytest.raises(FederationError, match="no array is named"):
        run(personal="tail", rounds=1)
    bench = open_workbench(SiloSettings("x", options=silos(0)[0].options))
    bench.task.head = ""  # every name starts with it
    with pytest.raises(PersonalError, match="nothing would be shared"):
        personal_names(bench, "head")


@pytest.mark.nightly
def test_auto_finds_an_alpha_that_gives_the_hidden_groups() -> None:
    result = run(alpha="auto", rounds=9)
    assert result.groups[8] == result.groups[9] == HIDDEN
    alpha = result.rounds[-1].details["alpha"]
    assert 20 < alpha < 80
    (over,) = [r for r in result.rounds if "trial" in r.details]
    assert over.round == 6 and over.details["trial"]["judges"] == sorted(s.name for s in silos(0))
    assert all(len(result.groups[t]) == 9 for t in range(1, 6)), "alone until the trial ends"


def test_auto_knows_the_rounds_of_start() -> None:
    """From Python the number of rounds is known at the start alone."""
    strategy = HCCT(alpha="auto")
    with pytest.raises(FederationError, match=r"rounds must be at least 6\. Got 5"):
        strategy.start(grid=InProcessGrid(app, []), initial_arrays=ArrayRecord(), num_rounds=5)
    nodes = [digits_config(name, i, **{"data.train": 60}) for i, name in enumerate("abc")]
    grid = InProcessGrid(app, nodes)
    roster = DescribedRoster("digits", 3)
    config = RunConfig.read({"strategy": "independent"})
    initial = initial_arrays(grid, roster.present(grid, number=1), config)
    strategy = HCCT(alpha="auto", roster=roster, train_config={"lr": 0.1})
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=6)
    assert [r.round for r in result.rounds if "trial" in r.details] == [5]


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"rounds": 5}, "rounds must be at least 6. Got 5"), ({"personal": "head"}, "one version")],
)
def test_auto_is_refused_where_it_cannot_work(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        RunConfig.read({"strategy": "hcct", "alpha": "auto", **keys})


@dataclass
class Case:
    """Two alike silos and an odd one."""

    names = ("a", "b", "c")
    landscape = Landscape(
        names,
        np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        np.array([100.0, 100.0, 100.0]),
        {},
        lambda objective: optimal(objective).groups,
    )


def test_the_standard_error_of_a_difference_is_of_pairs() -> None:
    def found(*errors: float) -> dict[str, Found]:
        return {name: Found(error, 20) for name, error in zip("abcd", errors, strict=False)}

    hard = found(0.1, 0.3, 0.5, 0.7)
    mean, error = difference(hard, found(0.2, 0.4, 0.6, 0.85))
    assert mean == pytest.approx(-0.1125)
    assert error < 0.05 < np.std([0.1, 0.3, 0.5, 0.7]) / 2, "what is hard for both cancels"
    assert difference(hard, hard) == (0.0, 0.0)
    _, of_two = difference(found(0.1, 0.3), found(0.2, 0.4))
    assert of_two == pytest.approx(np.sqrt(2 * 0.09 / 20) / 2), "two that agree are still few"
