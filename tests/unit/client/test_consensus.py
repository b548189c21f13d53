"""A group's linear model reaches the minimum over all rows, in whole and in interrupted runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from scipy.optimize import minimize
from sklearn.linear_model import Ridge
from torch import nn

from coterie import wire
from coterie.client.work.data import Held
from coterie.client.work.linear import PRIOR, tuned_penalty
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies.rounds.result import RunResult
from coterie.tasks.base import Option, SiloData, Task
from coterie.tasks.problems import Numbers
from tests.kit import CutGrid, Node, Tap, assert_same_models, interrupted, restart_silos, run

SIZES = {"a": 30, "b": 45, "c": 60}
KEYS: dict[str, Any] = {
    "task": f"{__name__}:Rows",
    "rounds": 20,
    "seed": 1,
    "batch-size": 15,
    "local-epochs": 2,
}


class Rows(Task):
    """Real targets whose slopes and columns differ from silo to silo."""

    name = "rows"
    metric = "rmse"
    problem = Numbers()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        x, y = rows(str(options["silo"]))
        return SiloData(x, y, x[:9], y[:9], None)


def rows(silo: str) -> tuple[Any, Any]:
    """Return (n, 3) and (n, 1) numbers of float32."""
    place = "abc".index(silo)
    draw = np.random.default_rng(place)
    x = draw.standard_normal((SIZES[silo], 3)) * np.roll([3.0, 1.0, 0.3], place) + place
    slopes = np.array([1.0, -1.0, 0.5]) + draw.standard_normal(3)
    y = x @ slopes + 2 * place + draw.standard_normal(SIZES[silo])
    return x.astype(np.float32), y[:, None].astype(np.float32)


def objective(flat: Any, silos: str) -> float:
    """Return the mean over rows of squares and of each silo's prior; ``flat``: (4,) weights, bias.

    As ``train_linear`` has it, over all rows of these silos.
    """
    total = 0.0
    for silo in silos:
        x, y = (array.astype(float) for array in rows(silo))
        squares = ((x @ flat[:3] + flat[3] - y[:, 0]) ** 2).sum()
        total += squares + PRIOR / 2 * (flat[:3] ** 2).sum()
    return total / sum(SIZES[silo] for silo in silos)


def least(silos: str) -> float:
    return float(minimize(objective, np.zeros(4), args=(silos,), tol=1e-10).fun)


def flat(model: ArrayRecord) -> Any:
    arrays = [array.numpy().ravel() for array in model.values()]
    return np.concatenate(arrays).astype(float)


def nodes(home: Path | None = None) -> list[Node]:
    return [
        {"name": n, "task": f"{__name__}:Rows", "device": "cpu", "threads": 1, "data.silo": n}
        | ({} if home is None else {"home": str(home / n)})
        for n in SIZES
    ]


def go(folder: Path, who: InProcessGrid | list[Node] | None = None, **keys: Any) -> RunResult:
    # Without bounds on influence, which would change the mean.
    loose = {"clip-updates": 0, "max-share": 1.0, "quarantine-after": 0}
    return run(folder, nodes() if who is None else who, **{**KEYS, **loose, **keys})


def test_the_mean_is_the_minimum_over_all_rows(tmp_path: Path) -> None:
    grid = Tap(nodes(tmp_path / "homes"))
    best = least("abc")
    assert objective(flat(go(tmp_path / "run", grid).models["a"]), "abc") < 1.001 * best
    sent = [m for m in grid.got if m.metadata.message_type == wire.TRAIN][-3:]
    models = [wire.decode_arrays(m.content[wire.ARRAYS]) for m in sent]
    assert np.ptp([model["0.weight"] for model in models], axis=0).max() > 0.1
    kept = list((tmp_path / "homes").glob("*/consensus/*/*"))
    assert len(kept) == 3  # each silo's last round, from which the run may continue


@pytest.mark.parametrize("keys", [{"secure": True}, {"aggregate": "median"}])
def test_other_means_do_not_ask_for_it(tmp_path: Path, keys: dict[str, Any]) -> None:
    grid = Tap(nodes())
    go(tmp_path, grid, rounds=3, **keys)
    asked = [m.content[wire.CONFIG] for m in grid.sent if m.metadata.message_type == wire.TRAIN]
    assert asked and not any(wire.CONSENSUS in config for config in asked)


def test_a_silo_alone_reaches_its_own_minimum(tmp_path: Path) -> None:
    """With a strategy that bounds influence, too: a silo at its minimum has an update of zero."""
    result = go(tmp_path, strategy="hcct", alpha=1e-9, rounds=5)
    assert [report.left_out for report in result.rounds] == [{}] * len(result.rounds)
    models = result.models
    for silo in SIZES:
        x, y = rows(silo)
        part = Held(torch.from_numpy(x), torch.from_numpy(y))
        model = Rows().model()
        penalty = tuned_penalty(Rows(), model, model[0], part) * SIZES[silo]
        theirs = Ridge(alpha=penalty / 2).fit(x, y[:, 0])
        ours = flat(models[silo])
        np.testing.assert_allclose(ours[:3], theirs.coef_, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [*(pytest.param(wrong, marks=pytest.mark.nightly) for wrong in (0.0, 1e-9)), 1e9, float("nan")],
)
def test_one_silo_does_not_move_the_length(tmp_path: Path, wrong: float) -> None:
    def change(silo: str, reply: Any) -> Any:
        if silo == "c" and wire.CONSENSUS_BALANCE in reply.content.get(wire.METRICS, {}):
            reply.content[wire.METRICS][wire.CONSENSUS_BALANCE] = wrong
        return reply

    model = go(tmp_path, Tap(nodes(), change=change), rounds=12).models["a"]
    assert objective(flat(model), "abc") < 1.01 * least("abc")


def test_rounds_that_do_not_count_only_delay_it(tmp_path: Path) -> None:
    def change(silo: str, reply: Any) -> Any:
        if silo == "c" and reply.metadata.group_id in ("3", "5") and wire.ARRAYS in reply.content:
            odd = {n: a * np.nan for n, a in wire.decode_arrays(reply.content[wire.ARRAYS]).items()}
            reply.content[wire.ARRAYS] = wire.encode_arrays(odd, packed=True)
        return reply

    model = go(tmp_path, Tap(nodes(), change=change), rounds=16).models["a"]
    assert objective(flat(model), "abc") == pytest.approx(least("abc"), rel=1e-2)


@pytest.mark.parametrize("answered", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_resumed_run_ends_with_the_same_models(tmp_path: Path, answered: int) -> None:
    whole = go(tmp_path / "whole", nodes(tmp_path / "one"), rounds=6)
    restart_silos()
    keys = {"rounds": 6, "runs-dir": str(tmp_path)}
    cut = CutGrid(nodes(tmp_path / "two"), (wire.TRAIN, 4), answered)
    interrupted(tmp_path / "cut", cut, play=go, **keys)
    resumed = go(tmp_path / "cut", nodes(tmp_path / "two"), run_id=2, resume="cut", **keys)
    assert_same_models(whole, resumed, SIZES)
