"""HCCT-E, HCCT-P, regrouping on a schedule, α found in a trial, on the digits in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig
from coterie.server.study.demo import hidden_groups, silos
from coterie.strategies import HCCT
from coterie.strategies.errors import FederationError
from coterie.strategies.hcct.alpha import Found, Landscape, difference
from coterie.strategies.partition.solvers import optimal
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import DescribedRoster
from tests.kit import digits, first_arrays, mean_error, nodes_of, run


def play(folder: Path, **keys: Any) -> RunResult:
    """Play six rounds of HCCT on the demo's nine silos."""
    return run(folder, nodes_of(silos(0)), **({"strategy": "hcct", "rounds": 6} | keys))


HIDDEN = hidden_groups([s.name for s in silos(0)])


def test_hcct_e_compares_one_layer_and_says_which(tmp_path: Path) -> None:
    result = play(tmp_path, layers="auto", rounds=3)
    layers = {r.details["layer"] for r in result.rounds}
    assert len(layers) == 1
    assert layers.pop() in ("head.", "representation.0.", "representation.3.")


def test_personal_layers_are_never_on_the_wire_and_differ_between_silos(tmp_path: Path) -> None:
    keys = {"rounds": 2, "local-epochs": 3}
    result = play(tmp_path / "personal", personal="head", **keys)
    for arrays in result.models.values():
        assert all(not name.startswith("head.") for name in arrays)
    assert mean_error(result) < mean_error(play(tmp_path / "fedavg", strategy="fedavg", **keys))


def test_layers_that_name_nothing_or_everything_cannot_be_personal(tmp_path: Path) -> None:
    from coterie.client.home.settings import SiloSettings
    from coterie.client.work.personal import PersonalError, personal_names
    from coterie.client.work.session import open_session

    with pytest.raises(FederationError, match="no array is named"):
        play(tmp_path, personal="tail", rounds=1)
    session = open_session(SiloSettings("x", options=silos(0)[0].options))
    session.task.head = ""  # every name starts with it
    with pytest.raises(PersonalError, match="nothing would be shared"):
        personal_names(session, "head")


@pytest.mark.nightly
def test_auto_finds_an_alpha_that_gives_the_hidden_groups(tmp_path: Path) -> None:
    result = play(tmp_path, alpha="auto", rounds=9, **{"local-epochs": 5})
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
    grid = InProcessGrid(app, digits(**{"data.train": 60}))
    roster = DescribedRoster("digits", 3)
    initial = first_arrays(grid, roster)
    strategy = HCCT(alpha="auto", roster=roster, train_config={"lr": 0.1})
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=6)
    assert [r.round for r in result.rounds if "trial" in r.details] == [5]


def test_auto_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(FederationError, match="one version"):
        RunConfig.read({"strategy": "hcct", "alpha": "auto", "personal": "head"})


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
