"""What the ways to form groups of a small model would reveal, and that a secure run refuses them.

The model is a logistic regression of a table with twelve columns, 26 parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import wire
from coterie.features.secure.sketches import Sketch, measure
from coterie.strategies import FederationError
from tests.contract.hostile.test_sketches import correlation, filled, flat_of
from tests.kit import TRAINING, answer, ask, initial, model_in, run, train
from tests.tables import declaration, site, written

COLUMNS, ROWS = 12, 200
STUDY = declaration(*(f"x{i}" for i in range(COLUMNS)))


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Return three silos of two kinds of patients."""
    task = written(tmp_path / "study.toml", STUDY)
    found = []
    for seed, name in enumerate("abc"):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(ROWS, COLUMNS))
        ill = (x @ rng.normal(size=COLUMNS) + 0.5 * rng.normal(size=ROWS)) > 0
        found.append(site(task, name, x, ill=np.where(ill, "yes", "no")))
    return found


def asked_about(**entries: Any) -> dict[str, Any]:
    return {**TRAINING, "task": "study", "run": "r", **entries}


@pytest.mark.parametrize(("digits", "least"), [(16, 0.999), (3, 0.99)])
def test_scores_of_as_many_models_as_parameters_are_the_update(
    nodes: list[dict[str, Any]], digits: int, least: float
) -> None:
    """So candidates cannot be raced by scores, of which silos state many, and hide updates."""
    node = nodes[0]
    model = initial(1, node, task="study")
    flat = flat_of(model)
    scores, step = [], 0.5
    for change in (*np.eye(flat.size), *-np.eye(flat.size)):
        moved = filled(model, flat + step * change)
        reply = answer(wire.EVALUATE_TRAINING, node, model=moved, **asked_about(strategy="ifca"))
        scores.append(float(f"{wire.read_metrics(reply.content)[wire.LOSS]:.{digits}g}"))
    up, down = np.split(np.array(scores), 2)
    gradient = (up - down) / (2 * step)
    reply = train(
        model, node, **asked_about(local_steps=1, batch_size=ROWS, lr=0.1, optimiser="sgd")
    )
    update = flat_of(model_in(reply)) - flat
    assert correlation(-gradient, update) > least
    error = np.linalg.norm(-0.1 * gradient - update) / np.linalg.norm(update)
    assert error < 0.1, error
    strict = {**node, "secure": "required"}
    refused = ask(
        wire.EVALUATE_TRAINING, strict, model=model, **asked_about(strategy="ifca", secure=True)
    )
    assert refused.has_error() and "does not measure models on its training" in refused.error.reason


def test_sketches_of_few_numbers_do_not_tell_alike_updates_from_others() -> None:
    """With a tenth of 260 parameters, cosines of 0.6 and 0 are hard to distinguish."""
    rng, size = np.random.default_rng(0), 260
    alike, others = [], []
    for number in range(200):
        common = rng.normal(size=size)
        pair = [common + np.sqrt(2 / 3) * rng.normal(size=size) for _ in range(2)]
        sketches = []
        for update in (*pair, rng.normal(size=size)):
            sketch = Sketch(str(number).encode(), size // 10)
            measure({"w": np.zeros(size)}, {"w": update}, {"": sketch})
            sketches.append(sketch.noisy(b"silo"))
        one, two, other = (s / np.linalg.norm(s) * np.sqrt(2) for s in sketches)
        alike.append(one @ two)
        others.append(one @ other)
    wrong = np.mean(np.subtract.outer(alike, others) <= 0)
    assert 0.05 < wrong < 0.3, "share of pairs that are in the wrong order"


def test_a_secure_run_that_would_compare_small_updates_says_what_they_would_reveal(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    keys = {"task": "study", "rounds": 6, "local-epochs": 1, "secure": True, "min-silos": 3}
    for strategy in ("hcct", "fedgroup", "auto"):
        with pytest.raises(FederationError, match="26 parameters is too small") as raised:
            run(tmp_path / strategy, nodes, strategy=strategy, **keys)
        assert "Scores of candidate models would reveal the update" in str(raised.value)
    result = run(tmp_path / "fedavg", nodes, strategy="fedavg", **{**keys, "rounds": 1})
    assert result.rounds[0].left_out == {}
