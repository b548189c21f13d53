"""Server optimisers: Flower's steps, in groups that change, after a crash, in secure runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp import strategy as flower

from coterie.features.server_optimiser.coordinator import Memory, ServerOptimisation, mean_moments
from coterie.features.server_optimiser.keys import ServerOptimiser
from coterie.features.server_optimiser.steps import Moments, step
from coterie.server.runs.config import RunConfig
from coterie.strategies import HCCT, FedAvg, FederationError, FedGroup, Influence
from coterie.strategies.rounds.members import Members, Plain
from tests.conftest import arrays_of, plain_app, plain_initial, plain_nodes
from tests.kit import (
    CutGrid,
    Tap,
    assert_same_models,
    digits,
    interrupted,
    record_of,
    run,
    start,
)

FLOWERS: Mapping[str, Any] = {
    "fedavgm": flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
    "fedadam": flower.FedAdam(eta=0.05, beta_1=0.9, beta_2=0.99, tau=1e-2),
    "fedyogi": flower.FedYogi(eta=0.05, beta_1=0.9, beta_2=0.99, tau=1e-2),
}
UNBOUND = Influence(max_share=1.0, clip_updates=0.0, quarantine_after=0)
LR = {"fedavgm": 0.5, "fedadam": 0.05, "fedyogi": 0.05}


def settings(name: str) -> ServerOptimiser:
    tau = {} if name == "fedavgm" else {"tau": 1e-2}
    return ServerOptimiser(name=name, lr=LR[name], **tau)


@pytest.mark.parametrize("name", FLOWERS)
def test_one_group_takes_flowers_steps(name: str) -> None:
    """Four rounds of Flower's strategy, and of ours, over the same ClientApp and nodes."""
    nodes = plain_nodes(0, 1, 0)
    theirs = FLOWERS[name].start(
        grid=Tap(nodes, plain_app()), initial_arrays=plain_initial(), num_rounds=4
    )
    ours = start(
        FedAvg(server_optimiser=settings(name), influence=UNBOUND), Tap(nodes, plain_app()), 4
    )
    plain = start(FedAvg(influence=UNBOUND), Tap(nodes, plain_app()), 4)
    expected = {key: array.numpy() for key, array in theirs.arrays.items()}
    assert not np.allclose(arrays_of(plain.arrays)["w"], expected["w"], rtol=1e-3)
    for key, array in arrays_of(ours.models["silo-1"]).items():
        np.testing.assert_allclose(array, expected[key], rtol=1e-5, atol=1e-6)


def test_a_silo_alone_is_not_moved_and_a_group_is() -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    chosen = ServerOptimiser(name="fedadam", lr=0.3)
    alone = start(HCCT(alpha=0.0, server_optimiser=chosen), Tap(nodes, plain_app()))
    usual = start(HCCT(alpha=0.0), Tap(nodes, plain_app()))
    for name, model in usual.models.items():
        np.testing.assert_array_equal(arrays_of(alone.models[name])["w"], arrays_of(model)["w"])
    together = start(HCCT(alpha=1e9, server_optimiser=chosen), Tap(nodes, plain_app()))
    meant = start(HCCT(alpha=1e9), Tap(nodes, plain_app()))
    assert not np.allclose(
        arrays_of(together.models["silo-0"])["w"], arrays_of(meant.models["silo-0"])["w"]
    )


def test_groups_that_form_begin_from_their_mean() -> None:
    """The trainings that form FedGroup's groups are each silo's; its steps begin a round later."""
    nodes, chosen = plain_nodes(0, 1, 0, 1), ServerOptimiser(name="fedadam", lr=0.3)
    for rounds, same in ((1, True), (2, False)):
        own, usual = (
            start(FedGroup(num_groups=2, **more), Tap(nodes, plain_app()), rounds)
            for more in ({"server_optimiser": chosen}, {})
        )
        one, other = (arrays_of(result.models["silo-0"])["w"] for result in (own, usual))
        assert np.array_equal(one, other) is same


# ---------------------------------------------------------------- groups that change


def moved(
    stage: ServerOptimisation, mine: Memory, models: Any, algorithm: Any, **sizes: float
) -> Any:
    """Let the stage act after a training, on a state with these models of the silos."""
    members = Members({}, models=models, sizes=sizes)
    scene = type("Scene", (), {"algorithm": algorithm, "now": type("Now", (), {"silos": ()})})
    return stage.settle(mine, scene, Plain(members))  # type: ignore[arg-type]


def model(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(3, value, np.float32), "n": np.array(3)}


def test_moments_follow_the_silos_into_new_groups() -> None:
    stage = ServerOptimisation(ServerOptimiser(name="fedavgm", lr=1.0, momentum=0.5))
    algorithm = FedAvg().algorithm
    old, other = model(0.0), model(10.0)
    one, two = model(1.0), model(14.0)  # Δ is 1 in the group of a and b, 4 in that of c and d
    mine = Memory(starts={"a": old, "b": old, "c": other, "d": other})
    done = moved(
        stage, mine, {"a": one, "b": one, "c": two, "d": two}, algorithm, a=1, b=3, c=2, d=2
    )
    assert [float(done.mine.moments[n].first["w"][0]) for n in "abcd"] == [1, 1, 4, 4]
    assert done.mine.starts == {}
    # b and c form a group: 3 parts of b's moments and 2 of c's.
    mixed = mean_moments({n: done.mine.moments[n] for n in "bc"}, {"b": 0.6, "c": 0.4})
    assert float(mixed.first["w"][0]) == pytest.approx(0.6 * 1 + 0.4 * 4)
    # Their next step has half of that as momentum.
    after, _ = step(
        "fedavgm", model(5.0), model(6.0), mixed, lr=1.0, momentum=0.5, tau=1.0, moves="w".__eq__
    )
    np.testing.assert_allclose(after["w"], 5.0 + 1.0 + 0.5 * 2.2, rtol=1e-6)
    assert after["n"] == 3


@pytest.mark.parametrize("known", [{}, {"a": Moments(1, {"w": np.full(3, 9.0)}, {})}])
def test_a_group_keeps_its_moments_when_a_silo_joins_or_returns(known: dict[str, Any]) -> None:
    """Also if that silo is the first by name."""
    stage = ServerOptimisation(ServerOptimiser(name="fedavgm", lr=1.0, momentum=0.5))
    group = Moments(2, {"w": np.full(3, 4.0)}, {})
    mine = Memory({**known, "b": group, "c": group}, dict.fromkeys("abc", model(0.0)))
    done = moved(stage, mine, dict.fromkeys("abc", model(1.0)), FedAvg().algorithm, a=1, b=1, c=1)
    np.testing.assert_allclose(done.state.members.models["a"]["w"], 1.0 + 0.5 * 4.0)


def test_a_new_group_starts_from_the_mean_of_what_its_members_stepped_to() -> None:
    class Regrouping(type(FedAvg().algorithm)):  # type: ignore[misc]
        def next_models(self, state: Any) -> Any:
            return {"a": mean, "b": mean, "c": mean}

        def with_models(self, state: Any, change: Any) -> Any:
            given.update({name: change(m) for name, m in self.next_models(state).items()})
            return super().with_models(state, change)

    given: dict[str, Any] = {}
    start_of, group, alone = model(0.0), model(1.0), model(7.0)
    mean = model(0.25 * 1 + 0.25 * 1 + 0.5 * 7)
    stage = ServerOptimisation(ServerOptimiser(name="fedavgm", lr=3.0, momentum=0.0))
    mine = Memory(starts={"a": start_of, "b": start_of})
    moved(stage, mine, {"a": group, "b": group, "c": alone}, Regrouping(), a=1, b=1, c=2)
    # a and b stepped from 0 to 3, three times as far as their mean; c trained alone.
    np.testing.assert_allclose(given["a"]["w"], 0.25 * 3 + 0.25 * 3 + 0.5 * 7)
    assert given["c"] is given["a"]


def test_a_group_whose_silos_sent_nothing_keeps_its_model() -> None:
    stage = ServerOptimisation(ServerOptimiser(name="fedadam"))
    same = model(2.0)
    done = moved(stage, Memory(starts={"a": same}), {"a": same, "b": same}, FedAvg().algorithm, a=1)
    assert done.state.members.models["a"] is same and not done.mine.moments


# ---------------------------------------------------------------- resumed, secure, refused


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    keys = {
        "strategy": "hcct",
        "alpha": 1e6,
        "rounds": 5,
        "server-optimiser": "fedyogi",
        "local-epochs": 1,
    }
    whole = run(tmp_path / "whole", digits(), **keys)
    interrupted(tmp_path / "cut", CutGrid(digits(), at=("train", 4)), **keys)
    again = run(tmp_path / "cut", digits(), resume="cut")
    assert whole.state.members.groups == again.state.members.groups
    assert_same_models(whole, again)
    hashes = [record_of(tmp_path / folder)["model-hashes"] for folder in ("whole", "cut")]
    assert hashes[0] == hashes[1]


def test_a_secure_run_takes_the_same_steps(tmp_path: Path) -> None:
    """The sum is known, so the optimiser acts on it: equal to a plain run but for its rounding."""
    keys = {"strategy": "fedavg", "server-optimiser": "fedadam", "local-epochs": 1, "rounds": 3}
    seen = run(tmp_path / "plain", digits(), **keys, **{"clip-updates": 0.0})
    unseen = run(tmp_path / "secure", digits(), secure=True, **keys)
    usual = run(tmp_path / "mean", digits(), **{**keys, "server-optimiser": "none"})
    (key, array), *_ = seen.held["a"].items()
    near = np.abs(unseen.held["a"][key] - array).max()
    far = np.abs(usual.held["a"][key] - array).max()
    assert far > 0.05 and near < far / 20


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"strategy": "ifca"}, "use fedavg, hcct, fedgroup or fedcollab"),
        ({"strategy": "independent"}, "use fedavg, hcct, fedgroup or fedcollab"),
        ({"strategy": "hcct", "alpha": "auto", "rounds": 8}, "alpha = auto compares"),
        ({"strategy": "fedavg", "generators": "silos"}, "makes its models in another way"),
    ],
)
def test_strategies_without_one_mean_per_group_refuse_it(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        RunConfig.read({"server-optimiser": "fedadam", **keys})


def test_settings_without_an_optimiser_are_refused() -> None:
    with pytest.raises(
        FederationError, match="server-tau has no effect with server-optimiser = fe"
    ):
        RunConfig.read({"strategy": "hcct", "server-optimiser": "fedavgm", "server-tau": 0.1})
    with pytest.raises(FederationError, match="server-optimiser-lr has no effect"):
        RunConfig.read({"strategy": "hcct", "server-optimiser-lr": 0.1})
    with pytest.raises(FederationError, match=r"fedadam or fedyogi\. Got 'adam'"):
        FedGroup(num_groups=2, server_optimiser="adam")
