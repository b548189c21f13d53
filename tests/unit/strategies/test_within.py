"""Any algorithm of one model inside the groups of FedCollab, HCCT and FedGroup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig, train_config
from coterie.strategies import (
    HCCT,
    FedAvg,
    FedCollab,
    FederationError,
    FedGroup,
    FedNova,
    GroupStrategy,
    PerFedAvg,
    PFedMe,
)
from coterie.strategies.plain.within import FedNovaInside, Within, normalised
from coterie.strategies.rounds.algorithm import Round, Update
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    plain_app,
    plain_app_without_answers,
    plain_nodes,
)
from tests.kit import Tap
from tests.unit.strategies.test_baselines import NAMES, NODES, record, run, w0

TRAINING: dict[str, Any] = {"lr": 0.1, "lr-decay": 1.0, "local-epochs": 2, "batch-size": 32}
ALIKE: dict[str, tuple[Any, type[GroupStrategy], dict[str, Any]]] = {
    "fedavg": ("fedavg", FedAvg, {}),
    "fednova": ("fednova", FedNova, {}),
    "perfedavg": (Within(algorithm="perfedavg", meta_lr=0.2), PerFedAvg, {"meta_lr": 0.2}),
    "pfedme": (Within(algorithm="pfedme", server_lr=0.25), PFedMe, {"server_lr": 0.25}),
}
"""Name → as an option, and as the strategy of one model."""


def trainings(grid: Tap) -> list[Message]:
    """Return the messages that asked for a training of any kind."""
    return [m for m in grid.sent if m.metadata.message_type.startswith("train")]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("grouping", ["hcct", "fedgroup"])
def test_one_group_is_the_strategy_of_one_model_from_where_its_silos_came_together(
    name: str, grouping: str
) -> None:
    """HCCT's silos come together at the mean of their first models, FedGroup's after one round."""
    within, alone, options = ALIKE[name]
    make: dict[str, Any] = {
        "hcct": lambda: HCCT(alpha=1e6, within=within, train_config=TRAINING),
        "fedgroup": lambda: FedGroup(num_groups=1, within=within, train_config=TRAINING),
    }
    first = run(make[grouping](), rounds=1)
    together = first.arrays if grouping == "hcct" else first.models["silo-0"]
    result = run(make[grouping](), rounds=4)
    expected = alone(train_config=TRAINING, **options).start(
        InProcessGrid(plain_app(), NODES), together, num_rounds=3
    )
    assert result.groups[4] == [NAMES]
    for silo in NAMES:
        for array, value in arrays_of(expected.models[silo]).items():
            np.testing.assert_allclose(arrays_of(result.models[silo])[array], value, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda **own: HCCT(alpha=1e6, **own),
        lambda **own: FedCollab(**own),
        lambda **own: FedGroup(num_groups=1, **own),
    ],
    ids=["hcct", "fedcollab", "fedgroup"],
)
@pytest.mark.parametrize(
    ("within", "kind"), [("perfedavg", wire.TRAIN_PER_FEDAVG), ("pfedme", wire.TRAIN_PFEDME)]
)
def test_silos_are_asked_for_the_training_of_what_runs_inside_and_told_what_it_needs(
    strategy: Any, within: str, kind: str
) -> None:
    grid = Tap(NODES, plain_app_without_answers())
    run(strategy(within=within, train_config=TRAINING), rounds=3, grid=grid)
    sent = trainings(grid)
    assert {message.metadata.message_type for message in sent[-5:]} == {kind}
    configs = [message.content["config"] for message in sent]
    assert all(config[wire.PLAIN_STEPS] and config[wire.ADAPT_STEPS] for config in configs)


def test_a_newcomer_catches_up_by_the_same_training_as_the_others() -> None:
    """Or its memory could not be compared with theirs."""
    grid = Tap(NODES[:4], plain_app_without_answers())
    come = {3: NODES[4]}
    strategy = HCCT(
        alpha=1e6,
        within="perfedavg",
        train_config=TRAINING,
        on_round=lambda report: grid.connect(come.pop(3)) if report.round == 2 else None,
    )
    run(strategy, rounds=3, grid=grid)
    assert {message.metadata.message_type for message in trainings(grid)} == {wire.TRAIN_PER_FEDAVG}
    configs = grid.asked(wire.TRAIN_PER_FEDAVG)
    assert "catch-up" in [config.get(wire.PURPOSE, "") for config in configs]


def updates(*, starts: Mapping[str, Model], sizes: Mapping[str, float]) -> list[Update]:
    moved = {name: {k: a + np.float32(1) for k, a in m.items()} for name, m in starts.items()}
    return [
        Update(Silo(name, 1), starts[name], moved[name], sizes[name], {}) for name in sorted(starts)
    ]


def test_fednova_counts_what_a_silo_was_told_in_place_of_the_runs_own() -> None:
    """A silo whose round began with a cold start makes fewer steps in what is left of it."""
    now = Round(2, (), {"local-steps": 20, "lr": 0.1})
    two = updates(starts={"a": w0(), "b": w0()}, sizes={"a": 100.0, "b": 100.0})
    model = FedNovaInside().combine(two, now, settings={"b": {"local-steps": 5}})
    # τ_eff = (20 + 5) / 2; a's step is 1/20 of its update, b's 1/5.
    step = 12.5 * (0.5 / 20 + 0.5 / 5)
    np.testing.assert_allclose(model["w"], w0()["w"] + np.float32(step), rtol=1e-5)
    plain = FedNovaInside().combine(two, now)
    np.testing.assert_allclose(plain["w"], w0()["w"] + 1, rtol=1e-5)


def test_updates_from_several_starts_count_from_their_own() -> None:
    """A group whose silos accept no mean of theirs begins from several models."""
    other = {name: array + np.float32(2) for name, array in w0().items()}
    two = updates(starts={"a": w0(), "b": other}, sizes={"a": 100.0, "b": 300.0})
    model = normalised(two, np.array([0.25, 0.75]))
    np.testing.assert_allclose(model["w"], w0()["w"] + 1.5 + 1, rtol=1e-5)


def test_a_silo_alone_in_its_group_follows_at_the_servers_rate_too() -> None:
    start, nodes = w0(), plain_nodes(0, 1, samples=[50, 60])
    within = Within(algorithm="pfedme", server_lr=0.5)
    result = HCCT(alpha=0, within=within).start(
        InProcessGrid(plain_app(), nodes), record(start), num_rounds=1
    )
    full = HCCT(alpha=0).start(InProcessGrid(plain_app(), nodes), record(start), num_rounds=1)
    for name in ("silo-0", "silo-1"):
        half = {k: (a + start[k]) / 2 for k, a in arrays_of(full.models[name]).items()}
        for array, value in half.items():
            np.testing.assert_allclose(arrays_of(result.models[name])[array], value, atol=1e-6)


REFUSED = [
    ({"within": "scaffold"}, "within must be fedavg, fednova, perfedavg or pfedme"),
    ({"meta-lr": 0.5}, "meta-lr is for within = perfedavg"),
    ({"within": "fednova", "adapt-steps": 3}, "adapt-steps is for within = perfedavg or pfedme"),
    ({"within": "fednova", "schedule": "cosine"}, "fednova counts the steps of SGD"),
    ({"within": "fednova", "proximal-mu": 20.0}, "proximal-mu must be below 1 with fednova"),
    ({"within": "pfedme", "lr": 0.2}, "lr · moreau-lambda must be below 2"),
    ({"within": "fednova", "secure": True}, "within = fednova is not available in a secure run"),
    ({"within": "fednova", "aggregate": "median"}, "aggregate"),
]


@pytest.mark.parametrize("strategy", ["hcct", "fedgroup", "fedcollab"])
@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_what_does_not_go_together_is_refused_before_the_run(
    strategy: str, keys: dict[str, Any], words: str
) -> None:
    if strategy == "fedcollab" and "secure" in keys:
        words = "secure"
    with pytest.raises(FederationError, match=words):
        RunConfig.read({"strategy": strategy, **keys})


def test_a_trial_of_alpha_and_generators_take_ordinary_training_only() -> None:
    for keys, words in (
        ({"alpha": "auto"}, "within must be fedavg"),
        ({"generators": "silos"}, "within must be fedavg or fednova"),
    ):
        with pytest.raises(FederationError, match=words):
            RunConfig.read({"strategy": "hcct", "within": "perfedavg", **keys})


def test_silos_are_told_before_they_join_what_they_may_refuse() -> None:
    """One with differential privacy does not train Per-FedAvg's way, also within groups."""
    from coterie.features.privacy.silo import objection

    config = RunConfig.read({"strategy": "hcct", "within": "perfedavg"})
    training = {
        **train_config(config, run="r"),
        **config.algorithm.entries(train_config(config, run="r")),
    }
    terms = {key: training[key] for key in wire.terms() if key in training}
    assert "Per-FedAvg's training cannot be made private" in objection(wire.DESCRIBE, terms)
    usual = RunConfig.read({"strategy": "hcct"})
    assert not objection(wire.DESCRIBE, train_config(usual, run="r"))


@pytest.mark.parametrize("strategy", ["hcct", "fedgroup", "fedcollab", "perfedavg"])
def test_silos_answer_its_training_in_runs_of_these_strategies_alone(strategy: str) -> None:
    from coterie.client.home.policy import Policy

    kind = wire.TRAIN_PER_FEDAVG
    assert not Policy().type_objection(kind, {wire.STRATEGY: strategy})
    assert "only in runs with strategy" in Policy().type_objection(kind, {wire.STRATEGY: "cfl"})


def test_a_group_of_nobody_keeps_its_models() -> None:
    from coterie.strategies.rounds.minimum_sizes import average_groups

    members = Members(w0(), {"a": w0(), "b": w0()}, {"a": 1.0, "b": 1.0}, (("a", "b"),))
    kept = average_groups(members, [], combine=lambda own: pytest.fail("of nobody"))
    assert_equal_models(kept.models["a"], w0())
