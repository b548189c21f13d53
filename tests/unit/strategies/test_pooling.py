"""Partial pooling: λ is found by held-out losses, for any strategy with groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from torch import nn

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies.plain.pooling import GRID, OWN_INTERCEPT, best_penalty
from coterie.strategies.rounds.result import RunResult
from tests.kit import record_of, run
from tests.unit.client.models import Drawn

ROWS, SLOPES = 60, np.array([1.0, -0.5, 0.25])


class Levels(Drawn):
    """Silos with the same slopes, and an own level: ``level``; or own slopes: ``turn``."""

    name = "levels"
    rows = (ROWS, 200)

    def model(self) -> nn.Module:
        model, head = nn.Sequential(), nn.Linear(3, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.add_module("head", head)
        return model

    def targets(self, x: Any, draw: np.random.Generator, options: Any) -> Any:
        slopes = SLOPES * (-1.0 if options.get("turn") else 1.0)
        return x @ slopes + float(options["level"]) + draw.normal(size=len(x))


TASK = f"{__name__}:Levels"
TRAINING: dict[str, Any] = {
    "task": TASK,
    "rounds": 8,
    "local-epochs": 4,
    "batch-size": 16,
    "lr": 0.05,
    "lr-decay": 1.0,
}


def silos(levels: list[float], turns: str = "", **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": f"s{number}",
            "task": TASK,
            "device": "cpu",
            "threads": 1,
            "data.silo": number,
            "data.level": level,
            "data.turn": str(number) in turns,
            **more,
        }
        for number, level in enumerate(levels)
    ]


def losses(result: RunResult) -> float:
    return float(np.mean([loss for loss, _, _ in result.rounds[-1].evaluation.values()]))


def choice(result: RunResult) -> dict[str, Any]:
    (found,) = [r.details["own-penalty"] for r in result.rounds if "own-penalty" in r.details]
    return dict(found)


def test_the_strength_with_the_smallest_sum_over_silos_is_chosen() -> None:
    one = {0.0: {"a": (1.0, 10.0), "b": (0.2, 10.0)}, 1.0: {"a": (0.5, 10.0), "b": (0.5, 10.0)}}
    assert best_penalty(one, {}) == 1.0
    more = {**one, 0.0: {"a": (1.0, 10.0), "b": (0.2, 90.0)}}
    more[1.0] = {"a": (0.5, 10.0), "b": (0.5, 90.0)}
    assert best_penalty(more, {}) == 0.0, "a silo with more samples counts more"
    assert best_penalty({0.0: {"a": (1.0, 5.0)}, 1.0: {"a": (1.0, 5.0)}}, {}) == 0.0, (
        "equal: as it is"
    )
    assert best_penalty({p: {"a": (1.0 + (p == 0), 5.0)} for p in (0.0, 1.0, 10.0)}, {}) == 10.0
    assert best_penalty({0.0: {}, 1.0: {}}, {}) == 0.0
    lost = {0.0: {"a": (1.0, 5.0)}, 1.0: {"a": (np.nan, 5.0)}, 10.0: {"a": (0.5, 5.0)}}
    assert best_penalty(lost, {}) == 10.0
    gone = {0.0: {"a": (1.0, 5.0), "b": (9.0, 5.0)}, 1.0: {"a": (0.5, 5.0)}}
    assert best_penalty(gone, {}) == 1.0, "who did not measure every one does not count"


def test_a_model_that_still_learns_is_credited_with_its_last_round() -> None:
    """Own models gain 0.1, by training or by being own; a round of the group's gained as much."""
    losses = {0.0: {"a": (1.0, 5.0), "b": (1.0, 5.0)}, 1.0: {"a": (0.9, 5.0), "b": (0.9, 5.0)}}
    assert best_penalty(losses, {"a": 1.05, "b": 1.05}) == 1.0
    assert best_penalty(losses, {"a": 1.15, "b": 1.15}) == 0.0
    assert best_penalty(losses, {"a": 0.5, "b": 0.5}) == 1.0, "it does not count that it got worse"
    assert best_penalty(losses, {"a": 1.5, "c": 0.5}) == 0.0, "of silos that measured both"


def test_silos_with_own_levels_keep_these_and_the_common_slopes(tmp_path: Path) -> None:
    levels = [-3.0, -1.0, 1.0, 3.0]
    plain = run(tmp_path / "1", silos(levels), **TRAINING)
    alone = run(tmp_path / "2", silos(levels), **TRAINING, strategy="independent")
    pooled = run(
        tmp_path / "3", silos(levels), **TRAINING, personalise="partial", personal_epochs=20
    )
    found = choice(pooled)
    assert found["penalty"] >= 30, "the slopes are common"
    assert set(found["losses"]) == {"0", *(f"{penalty:g}" for penalty in GRID)}
    assert losses(pooled) < losses(alone) < losses(plain)
    assert losses(pooled) < 1.1, "the noise has a variance of 1"
    assert record_of(tmp_path / "3")["rounds"][4]["own-penalty"] == found


def test_silos_with_other_slopes_leave_the_common_ones_further_behind(tmp_path: Path) -> None:
    pooled = run(
        tmp_path,
        silos([0.0] * 4, turns="23"),
        **TRAINING,
        personalise="partial",
        personal_epochs=20,
    )
    assert 0 < choice(pooled)["penalty"] <= 10
    assert losses(pooled) < 1.3


def test_samples_are_held_out_until_the_strength_is_chosen_and_no_longer(tmp_path: Path) -> None:
    asked: list[tuple[int, str, float, float]] = []

    def listens(message: Message, context: Context) -> Message:
        config = message.content.config_records[wire.CONFIG]
        if context.node_config["name"] == "s0" and wire.ROUND in config:
            keys = (wire.HOLDOUT, wire.OWN_PENALTY)
            asked.append(
                (
                    int(str(config[wire.ROUND])),
                    message.metadata.message_type,
                    *(float(str(config.get(key, 0))) for key in keys),
                )
            )
        return app(message, context)

    grid = InProcessGrid(listens, silos([-2.0, 2.0]))
    result = run(tmp_path, grid, **TRAINING, personalise="partial", personal_epochs=20)
    chosen = choice(result)["penalty"]
    trained = [(n, h, p) for n, kind, h, p in asked if kind == wire.TRAIN]
    assert trained == [(n, 0.2, 0) if n <= 4 else (n, 0.0, chosen) for n in range(1, 9)]
    tried = [(n, h, p) for n, kind, h, p in asked if kind == wire.EVALUATE_OWN]
    assert tried == [(5, 0.2, penalty) for penalty in (0.0, *GRID)]
    assert asked[-1] == (8, wire.EVALUATE, 0.0, chosen)


def test_a_strength_that_the_run_names_is_taken(tmp_path: Path) -> None:
    keys = {**TRAINING, "personalise": "partial", "own_penalty": OWN_INTERCEPT}
    result = run(tmp_path, silos([-2.0, 2.0]), **keys, personal_epochs=20)
    assert not any("own-penalty" in r.details for r in result.rounds)
    assert losses(result) < 1.2


def test_a_silo_that_tells_no_loss_leaves_the_group_s_model_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = silos([-2.0, 2.0], **{"share-metrics": "error"})
    with caplog.at_level("WARNING"):
        pooled = run(tmp_path / "1", quiet, **TRAINING, personalise="partial")
    assert "no silo sent its loss on held-out data" in caplog.text
    assert not any("own-penalty" in r.details for r in pooled.rounds)


def test_a_secure_run_chooses_the_same_strength_and_makes_the_same_models(tmp_path: Path) -> None:
    """Up to the rounding of a sum: λ is of losses, and own models never leave."""
    keys = {**TRAINING, "personalise": "partial", "personal_epochs": 20}
    plain = run(tmp_path / "1", silos([-2.0, 0.0, 2.0]), **keys)
    secure = run(tmp_path / "2", silos([-2.0, 0.0, 2.0]), **keys, secure=True)
    assert choice(plain)["penalty"] == choice(secure)["penalty"] > 0
    for name, (loss, _, _) in plain.rounds[-1].evaluation.items():
        assert secure.rounds[-1].evaluation[name][0] == pytest.approx(loss, abs=0.01)


def test_silos_with_differential_privacy_say_why_they_measure_no_own_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = {"privacy-epsilon": 100.0}
    nodes = silos([-2.0, 2.0], **private)
    for number, node in enumerate(nodes):
        node["home"] = str(tmp_path / f"home-{number}")
    with caplog.at_level("WARNING"):
        run(tmp_path / "run", nodes, **TRAINING, personalise="partial")
    assert "no silo sent its loss on held-out data" in caplog.text
