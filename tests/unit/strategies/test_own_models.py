"""``auto`` decides how much of its group's model a silo takes, if the model is linear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.report.race import explain_race
from coterie.server.runs.record import read_run
from coterie.strategies.auto import evidence, own_models
from coterie.strategies.auto.budget import LEAST_BYTES, Budget
from coterie.strategies.auto.candidates import Candidate, everybody_alone
from coterie.strategies.auto.state import AutoState
from coterie.strategies.partition.race import Standing
from coterie.strategies.plain.pooling import TRIED
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import Silo
from tests.kit import CutGrid, assert_same_models, interrupted, restart_silos, run
from tests.unit.strategies.test_pooling import TASK, losses, silos

LEVELS = [-3.0, -1.0, 1.0, 3.0]
ROUNDS = 8
TRAINING: dict[str, Any] = {"task": TASK, "strategy": "auto", "rounds": ROUNDS}
Asked = list[tuple[str, int, str, float]]


def verdict_of(result: RunResult) -> dict[str, Any]:
    (found,) = [r.details["verdict"] for r in result.rounds if "verdict" in r.details]
    return dict(found)


def chosen(result: RunResult) -> tuple[int, float]:
    """Return the number of groups that won, and λ."""
    found = verdict_of(result)
    winner = found["candidates"][found["winner"]]
    return len(winner["groups"]), winner.get("own-penalty", 0.0)


def listening(asked: Asked, nodes: list[dict[str, Any]]) -> InProcessGrid:
    """Note silo, round, type and λ of every message that has a round."""

    def listens(message: Message, context: Context) -> Message:
        config = message.content.config_records[wire.CONFIG]
        if wire.ROUND in config:
            number, penalty = config[wire.ROUND], config.get(wire.OWN_PENALTY, -1)
            name, kind = str(context.node_config["name"]), message.metadata.message_type
            asked.append((name, int(str(number)), kind, float(str(penalty))))
        return app(message, context)

    return InProcessGrid(listens, nodes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def asked() -> Asked:
    """What the silos of ``levels`` were asked."""
    return []


@pytest.fixture(scope="module")
def levels(folder: Path, asked: Asked) -> RunResult:
    """Common slopes, and own levels."""
    return run(folder / "auto-1", listening(asked, silos(LEVELS)), **TRAINING)


def test_common_slopes_and_own_levels_are_found(levels: RunResult, folder: Path) -> None:
    alone = run(folder / "alone", silos(LEVELS), **{**TRAINING, "strategy": "independent"})
    number, penalty = chosen(levels)
    assert number == 1 and penalty >= 30
    assert losses(levels) < losses(alone)
    assert losses(levels) < 1.1, "the noise has a variance of 1"


def test_own_models_are_asked_for_once_and_then_held(levels: RunResult, asked: Asked) -> None:
    """Two partitions at every λ, when the race is over; the chosen λ with every later message."""
    penalty, over = chosen(levels)[1], verdict_of(levels)["round"]
    of_one = [(n, kind, p) for name, n, kind, p in asked if name == "s0"]
    tried = [(n, p) for n, kind, p in of_one if kind == wire.EVALUATE_OWN]
    assert tried == [(over, p) for p in TRIED] * (len(tried) // len(TRIED))
    assert 1 <= len(tried) // len(TRIED) <= own_models.MOST_TRIED
    later = [p for n, kind, p in of_one if n >= over and kind != wire.EVALUATE_OWN]
    assert set(later) == {penalty} and len(later) == ROUNDS - over + 2
    assert {p for n, _, p in of_one if n < over} == {-1}


def test_it_is_within_the_budgets(levels: RunResult) -> None:
    details = levels.rounds[-2].details
    assert max(details["trainings"].values()) <= 2 * ROUNDS
    assert details["bytes"]["moved"] <= details["bytes"]["least"] == len(LEVELS) * LEAST_BYTES


def test_it_is_explained(levels: RunResult, folder: Path) -> None:
    penalty = chosen(levels)[1]
    text = explain_race(read_run(folder / "auto-1"))
    assert f"(λ = {penalty:g})" in " ".join(text.whole)
    assert "(budget for the whole run: 3, or 4 MB)" in " ".join(text.whole)
    assert text.rows[0][0] == "all together with own models – chosen"
    assert text.silos["s1"].startswith("takes its slopes ")
    assert (
        "from the group of s0, s2 and s3 and keeps its own level. On 12 samples"
        in (text.silos["s1"])
    )


@pytest.mark.nightly
def test_what_is_common_is_shared_and_silos_of_two_kinds_are_not_mixed(tmp_path: Path) -> None:
    alike = run(tmp_path / "1", silos([0.0] * 4), **TRAINING)
    assert chosen(alike)[0] == 1 and losses(alike) < 1.03
    mixed = run(tmp_path / "2", silos([-1.0, 1.0, -1.0, 1.0], turns="23"), **TRAINING)
    assert mixed.rounds[-1].groups != alike.rounds[-1].groups
    assert losses(mixed) < 1.12


@pytest.mark.parametrize(
    ("kind", "answered"),
    [(wire.EVALUATE_OWN, 7), pytest.param(wire.TRAIN, 2, marks=pytest.mark.nightly)],
)
def test_a_run_that_is_cut_off_while_or_after_own_models_are_measured_goes_on(
    kind: str, answered: int, levels: RunResult, tmp_path: Path
) -> None:
    at = verdict_of(levels)["round"]
    homes = [{**node, "home": str(tmp_path / str(node["name"]))} for node in silos(LEVELS)]
    keys = {**TRAINING, "runs_dir": str(tmp_path)}
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(homes, (kind, at), answered), **keys)
    resumed = run(tmp_path / "cut", InProcessGrid(app, homes), run_id=2, resume="cut", **keys)
    assert_same_models(levels, resumed)
    assert verdict_of(resumed) == verdict_of(levels)


def test_a_newcomer_is_placed_by_its_own_model(tmp_path: Path) -> None:
    """Its level is its own: the group's model as it is has a loss of about 80."""
    keys = {**TRAINING, "rounds": 12, "min_silos": 4, "churn": "s4+8"}
    late = run(tmp_path, silos([*LEVELS, 9.0]), **keys)
    (placed,) = [r.details["placed"] for r in late.rounds if "placed" in r.details]
    assert placed["s4"]["grouped"] < 2
    assert late.rounds[-1].evaluation["s4"][0] < 1.3


@pytest.mark.nightly
def test_who_does_not_measure_own_models_has_no_vote_and_few_do_not_decide(tmp_path: Path) -> None:
    for number, quiet in enumerate(("3", "123")):
        grid = refusing(quiet, silos(LEVELS))
        result = run(tmp_path / str(number), grid, **TRAINING)
        own = [c for c in verdict_of(result)["candidates"] if "own-penalty" in c]
        assert bool(own) == (quiet == "3")
        if own:
            assert verdict_of(result)["judges"] == ["s0", "s1", "s2"]


def refusing(quiet: str, nodes: list[dict[str, Any]]) -> InProcessGrid:
    """Silos that fail to make own models."""

    def says(message: Message, context: Context) -> Message:
        name = str(context.node_config["name"])
        if message.metadata.message_type == wire.EVALUATE_OWN and name[1] in quiet:
            raise ValueError("no")
        return app(message, context)

    return InProcessGrid(says, nodes)


@pytest.mark.parametrize(
    ("config", "secure", "shapes", "offered"),
    [
        ({}, False, ((1, 3), (1,)), True),
        ({wire.OPTIMISER: "auto"}, False, ((1, 3),), True),
        ({wire.OPTIMISER: "sgd"}, False, ((1, 3), (1,)), False),
        ({wire.PERSONALISE: wire.DITTO}, False, ((1, 3), (1,)), False),
        ({}, True, ((1, 3), (1,)), False),
        ({}, False, ((4, 3), (4,), (1, 4), (1,)), False),
    ],
)
def test_only_linear_models_that_are_trained_exactly_have_own_models(
    config: dict[str, Any], secure: bool, shapes: tuple[tuple[int, ...], ...], offered: bool
) -> None:
    model = {str(n): np.zeros(shape, np.float32) for n, shape in enumerate(shapes)}
    now = Round(5, (), config, unseen=secure)
    assert own_models.offers(AutoState(Members(model)), now) == offered


@pytest.mark.parametrize(
    ("behind", "wanted"),
    [
        ((0.0, 0.01, 0.02, 0.03), "TPAO"),
        ((0.0, 0.01, 0.2, 0.03), "PAO"),
        ((0.0, 0.2, 0.02, 0.03), "TAO"),
        ((0.02, 0.2, 0.2, 0.0), "OA"),
    ],
)
def test_converged_models_are_held_by_their_losses_but_for_two_ties(
    behind: tuple[float, ...], wanted: str
) -> None:
    """Alone, Proposed by discriminators, all Together, and Other groups; 0.1 is one error."""
    raced = (
        everybody_alone("abc"),
        Candidate((("a", "b"), ("c",)), "P", supported=True),
        Candidate((("a", "b", "c"),), "all together"),
        Candidate((("a",), ("b", "c")), "O"),
    )
    found = [Standing(0.5 + b, b, 0.1, False) for b in behind]
    order = evidence.by_preference(raced, found, {}, converged=True)
    assert "".join("APTO"[number] for number in order) == wanted


@pytest.mark.parametrize(("shapes", "least"), [(((1, 3), (1,)), True), (((4, 3), (1, 4)), False)])
def test_bytes_have_a_floor_for_linear_models(
    shapes: tuple[tuple[int, ...], ...], least: bool
) -> None:
    model = {str(n): np.zeros(shape, np.float32) for n, shape in enumerate(shapes)}
    state, limits = AutoState(Members(model)), Budget(2.0, 3.0)
    now = Round(1, (Silo("a", 1), Silo("b", 2)), {wire.ROUNDS: 10})
    own = 3 * 10 * 2 * 2 * 4 * sum(array.size for array in model.values())
    assert limits.most_bytes(state, now) == (2 * LEAST_BYTES if least else own)
    large = replace(state, usual=10**7)
    assert limits.most_bytes(large, now) == 3 * 10**7 + own


@pytest.mark.nightly
def test_a_race_that_is_run_again_measures_own_models_again(tmp_path: Path) -> None:
    """Two silos more, of other levels, are half of the silos before; nobody loses its level."""
    more: dict[str, Any] = {"budget": 4.0, "discriminators": False, "churn": "s4+6,s5+6"}
    keys = {**TRAINING, "rounds": 15, "min_silos": 4, **more}
    result = run(tmp_path, silos([*LEVELS, 9.0, 6.0]), **keys)
    first, again = [r.details["verdict"] for r in result.rounds if "verdict" in r.details]
    assert again["began"] > first["round"] and len(again["judges"]) == 6
    winner = again["candidates"][again["winner"]]
    assert max(map(len, winner["groups"])) > 4 and winner["own-penalty"] >= 30
    assert max(loss for loss, _, _ in result.rounds[-1].evaluation.values()) < 1.6
