"""Networks for tables: the linear part first, then as much of the hidden layers as helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from torch import nn

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.features.hidden_layers.coordinator import HiddenLayers, Layers
from coterie.server.report.race import explain_race
from coterie.server.runs.record import read_run
from coterie.strategies.plain import hidden
from coterie.strategies.rounds.algorithm import Compared
from coterie.strategies.rounds.result import RunResult
from coterie.tasks.base import Option, SiloData
from coterie.tasks.models import TableNetwork, named
from tests.kit import (
    CutGrid,
    answer,
    ask,
    assert_same_models,
    interrupted,
    model_in,
    restart_silos,
    run,
)
from tests.unit.strategies import test_pooling
from tests.unit.strategies.test_pooling import Levels, losses, silos

LEVELS = [-2.0, 0.0, 2.0]


class Network(Levels):
    """Silos with an own level, and a ``bend``: of the third column's effect; a network."""

    name = "network"

    def model(self) -> nn.Module:
        return named("mlp-128", shape=(3,), num_classes=1)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        draw = np.random.default_rng(int(options["silo"]))
        x = draw.normal(size=(400, 3)).astype(np.float32)
        bend = float(options["bend"])
        y = x[:, 0] + bend * np.abs(x[:, 2]) + float(options["level"]) + draw.normal(size=400) / 2
        y = y.astype(np.float32)[:, None]
        return SiloData(x[:200], y[:200], x[200:], y[200:])


class Linear(Network):
    """The same rows, with a linear model."""

    def model(self) -> nn.Module:
        return Levels().model()


TASK, LINEAR = f"{__name__}:Network", f"{__name__}:Linear"
TRAINING = {**test_pooling.TRAINING, "task": TASK, "rounds": 10, "batch-size": 32}


def nodes(levels: Sequence[float] = LEVELS, bends: Sequence[float] = ()) -> list[dict[str, Any]]:
    made = zip(silos(list(levels)), bends or [2.0] * len(levels), strict=True)
    return [{**node, "task": TASK, "data.bend": bend} for node, bend in made]


def choice(result: RunResult) -> dict[str, Any]:
    (found,) = [r.details["hidden-layers"] for r in result.rounds if "hidden-layers" in r.details]
    return dict(found)


def arrays(result: RunResult, name: str = "s0") -> dict[str, Any]:
    return {n: a.numpy() for n, a in result.models[name].items()}


Asked = list[tuple[int, str, Any, Any, Any]]


@pytest.fixture(scope="module")
def asked() -> Asked:
    return []


@pytest.fixture(scope="module")
def bent(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What no linear model can do; FedAvg."""

    def listens(message: Message, context: Context) -> Message:
        config = message.content.config_records[wire.CONFIG]
        if context.node_config["name"] == "s0" and wire.ROUND in config:
            keys = (wire.PART, wire.HOLDOUT, wire.HIDDEN_SHARE)
            own = [config.get(key) for key in keys]
            asked.append((int(str(config[wire.ROUND])), message.metadata.message_type, *own))
        return app(message, context)

    grid = InProcessGrid(listens, nodes([0.0] * 3))
    return run(tmp_path_factory.mktemp("bent"), grid, **TRAINING)


def test_a_network_is_a_linear_model_until_its_hidden_layers_are_trained() -> None:
    network = named("mlp-64", shape=(3,), num_classes=2)
    assert isinstance(network, TableNetwork)
    assert list(dict(network.named_parameters()))[-1] == "linear_part.bias"
    for name in ("head.weight", "linear_part.weight", "linear_part.bias"):
        assert not network.get_parameter(name).any()
    for other in (
        named("mclr", shape=(3,), num_classes=2),
        named("mlp-64", shape=(1, 2, 2), num_classes=2),
    ):
        assert not isinstance(other, TableNetwork)


def test_both_parts_are_trained_one_after_the_other_and_samples_held_out(
    bent: RunResult, asked: Asked
) -> None:
    trained = [one for one in asked if one[1] == wire.TRAIN]
    linear = [(n, wire.TRAIN, "linear", 0.2, None) for n in range(1, 6)]
    rest = [(n, wire.TRAIN, "hidden", 0.2, None) for n in (6, 7, 8)]
    assert trained == [*linear, *rest, *[(n, wire.TRAIN, "both", None, None) for n in (9, 10)]]
    tried = [one for one in asked if one[1] == wire.EVALUATE_OWN]
    assert tried == [(9, wire.EVALUATE_OWN, None, 0.2, share) for share in hidden.SHARES]


def test_hidden_layers_that_help_are_kept(bent: RunResult) -> None:
    found = choice(bent)
    assert found["share"] == 1 and found["losses"]["1"] < 0.8 * found["losses"]["0"]
    assert losses(bent) < 0.75 * found["losses"]["0"]


def test_hidden_layers_that_do_not_help_are_taken_away(tmp_path: Path) -> None:
    """The run ends with the linear model that a run of a linear model ends with."""
    straight = nodes([0.0] * 3, [0.0] * 3)
    network = run(tmp_path / "1", straight, **TRAINING)
    assert choice(network)["share"] == 0
    assert not arrays(network)["head.weight"].any()
    rest = run(
        tmp_path / "2",
        [{**node, "task": LINEAR} for node in straight],
        **{**TRAINING, "task": LINEAR},
    )
    own, plain = arrays(network), arrays(rest)
    for name, array in plain.items():
        np.testing.assert_allclose(own[name.replace("head", "linear_part")], array, atol=5e-3)


@pytest.mark.parametrize("sign", [-1, pytest.param(1, marks=pytest.mark.nightly)])
def test_auto_decides_whether_hidden_layers_are_shared(sign: int, tmp_path: Path) -> None:
    """Levels and slopes are alike; the bends are, or are opposed."""
    four = nodes([-3.0, -1.0, 1.0, 3.0], [2.0, 2.0 * sign] * 2)
    keys = {**TRAINING, "strategy": "auto", "rounds": 12, "budget": 4.0}
    result = run(tmp_path, four, **keys)
    (verdict,) = [r.details["verdict"] for r in result.rounds if "verdict" in r.details]
    winner = verdict["candidates"][verdict["winner"]]
    assert len(winner["groups"]) < 4 and winner["own-penalty"] >= 30
    found = choice(result)
    assert set(found["losses"]) == set(found["alone"]) == {"0", "0.25", "0.5", "1"}
    assert len(result.rounds[-1].groups) == (len(winner["groups"]) if sign > 0 else 4)
    assert found["leave"] == (sign < 0)
    said = "hidden layers help" if sign > 0 else "From then on every silo trains alone"
    assert said in " ".join(explain_race(read_run(tmp_path)).whole)
    assert losses(result) < 0.8 * found["losses"]["0"]


@pytest.mark.parametrize("kind", [wire.FINETUNE, wire.DITTO])
def test_own_models_have_the_group_s_hidden_layers_beside_an_exact_linear_part(
    kind: str, bent: RunResult, tmp_path: Path
) -> None:
    """Gradient steps of such a length diverge; without hidden layers the loss is four times it."""
    result = run(tmp_path, nodes(), **TRAINING, personalise=kind, personal_lr=100.0)
    assert choice(result)["share"] == 1
    assert losses(result) < 2 * losses(bent)


@pytest.mark.parametrize("kind", [wire.EVALUATE_OWN, wire.TRAIN])
def test_a_run_that_is_cut_off_around_the_choice_goes_on(
    kind: str, bent: RunResult, tmp_path: Path
) -> None:
    homes = [{**node, "home": str(tmp_path / str(node["name"]))} for node in nodes([0.0] * 3)]
    keys = {**TRAINING, "runs_dir": str(tmp_path)}
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(homes, (kind, 9), 2), **keys)
    resumed = run(tmp_path / "cut", InProcessGrid(app, homes), run_id=2, resume="cut", **keys)
    assert_same_models(bent, resumed)


@pytest.mark.parametrize(
    ("changed", "names", "first"),
    [
        ({}, ("head.weight", "linear_part.weight"), True),
        ({wire.OPTIMISER: "adamw"}, ("head.weight", "linear_part.weight"), False),
        ({wire.MOMENTUM: 0.9}, ("head.weight", "linear_part.weight"), False),
        ({wire.ROUNDS: 4}, ("head.weight", "linear_part.weight"), False),
        ({}, ("head.weight", "head.bias"), False),
        ({}, ("linear_part.weight",), False),  # personal = head
    ],
)
def test_which_runs_train_the_linear_part_first(
    changed: dict[str, Any], names: tuple[str, ...], first: bool
) -> None:
    initial = {name: np.zeros((1, 3), np.float32) for name in names}
    assert hidden.linear_first(initial, {wire.ROUNDS: 10, **changed}) == first


def test_a_secure_run_that_compares_nothing_trains_them_in_turn(tmp_path: Path) -> None:
    result = run(tmp_path, nodes([0.0] * 3), **TRAINING, secure=True)
    found = choice(result)
    assert found["share"] == 1 and losses(result) < 0.75 * found["losses"]["0"]


@pytest.mark.parametrize("keys", [{"strategy": "fednova"}, {"optimiser": "sgd"}])
def test_other_runs_train_the_whole_network(keys: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, nodes(), **{**TRAINING, "rounds": 5, **keys})
    assert not any("hidden-layers" in r.details for r in result.rounds)
    assert arrays(result)["head.weight"].any() and arrays(result)["linear_part.weight"].any()


def test_the_share_is_better_than_none_beyond_a_standard_error() -> None:
    none = {"a": (1.0, 10.0), "b": (1.0, 10.0), "c": (1.0, 10.0)}

    def best(*half: float) -> float:
        some = {n: (loss, 10.0) for n, loss in zip("abc", half, strict=False)}
        return hidden.best_share({0.0: none, 0.5: some, 1.0: dict.fromkeys("abc", (2.0, 10.0))})

    assert best(0.9, 0.9, 0.8) == 0.5
    assert best(0.9, 0.9, 1.15) == 0.0, "the mean gain, 0.017, is less than its error, 0.08"
    assert best(float("nan"), 0.1, 0.1) == 0.0
    assert best(0.9, 0.9) == 0.5, "who did not measure every share does not count"
    assert hidden.best_share({0.0: {}, 1.0: {}}) == 0.0
    assert hidden.best_share({0.0: {"a": (1.0, 9.0)}, 1.0: {"a": (0.5, 9.0)}}) == 0.0, "one silo"


def test_the_silo_s_own_linear_part_stays_and_hidden_layers_learn_beside_it() -> None:
    """Its level is far away: without its own, hidden layers would learn the level."""
    (node,) = nodes([6.0])
    start = {n: p.detach().numpy().copy() for n, p in Network().model().named_parameters()}
    keys = {"task": TASK, "local_epochs": 2, "server_round": 3, "part": "hidden", "group_size": 2}
    plain = model_in(answer(wire.TRAIN, node, model=start, **keys))
    own = {"personalise": "partial", "own_penalty": 1e6}
    beside = model_in(answer(wire.TRAIN, node, model=start, **keys, **own))
    for trained in (plain, beside):
        for name in ("linear_part.weight", "linear_part.bias"):
            np.testing.assert_array_equal(trained[name], start[name])
    moved = [float(np.abs(trained["head.weight"]).sum()) for trained in (plain, beside)]
    assert 0 < moved[1] < 0.75 * moved[0]
    refused = ask(
        wire.TRAIN, silos([0.0])[0], server_round=3, part="hidden", task=test_pooling.TASK
    )
    assert "has no such parts" in refused.error.reason


def test_which_part_is_trained_where_nothing_was_measured() -> None:
    """As when a race, in which linear parts are compared, lasts longer than usual."""
    config = {wire.ROUNDS: 10}
    initial = {hidden.HEAD: np.zeros(1), f"{wire.LINEAR_LAYER}weight": np.zeros(1)}
    algorithm = SimpleNamespace(
        members=lambda state: SimpleNamespace(initial=initial), comparing=lambda state, now: False
    )
    algorithm.compared = lambda state: None
    scenes = [
        SimpleNamespace(algorithm=algorithm, state=None, now=SimpleNamespace(number=number))
        for number in range(1, 11)
    ]
    parts = [HiddenLayers(config)._part(Layers(), scene) for scene in scenes]  # type: ignore[arg-type]
    assert parts == [wire.LINEAR_PART] * 5 + [wire.HIDDEN_PART] * 3 + [wire.LINEAR_PART] * 2
    algorithm.compared = lambda state: Compared()  # sketches of linear parts would reveal them
    secure = HiddenLayers(config, unseen=True)
    assert not any(secure._part(Layers(), scene) for scene in scenes)  # type: ignore[arg-type]
