"""FedGroup: cold starts and rounds against literal numpy, churn, ablations, the demo's silos."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig, train_config
from coterie.server.study.demo import NEWCOMER, hidden_groups, newcomer, silos
from coterie.strategies import FedGroup
from coterie.strategies.errors import EXIT_CONFIG, EXIT_NO_SILOS, FederationError
from coterie.strategies.fedgroup.algorithm import COLD_START
from coterie.strategies.fedgroup.state import FedGroupState, global_model
from coterie.strategies.rounds.algorithm import Order, Update
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.wire import Model
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    at,
    error_reply,
    plain_app,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import Tap, first_arrays, nodes_of, start
from tests.unit.strategies.by_hand import ByHand

# Two kinds of silos, a and b; the numbers make every mean exact.
W0 = np.array([1.0, 2.0, 3.0], np.float32)
DELTAS: dict[str, list[float]] = {
    "a1": [8, 1, 0],
    "a2": [8, -1, 0],
    "a3": [8, 0, 3],
    "b1": [0, 1, 8],
    "b2": [0, 3, 8],
}
SAMPLES = {"a1": 10, "a2": 30, "a3": 20, "b1": 40, "b2": 60}


LEAST: dict[str, int] = {}
"""Silo → the smallest group that it accepts, where a test says so."""


def silo(name: str) -> Silo:
    return Silo(
        name,
        node_id=1 + sum(name.encode()),
        num_examples=SAMPLES.get(name, 10),
        min_group_size=LEAST.get(name, 1),
    )


def names_of(orders: Sequence[Order]) -> list[str]:
    return [order.silo.name for order in orders]


def fedgroup(**options: Any) -> ByHand:
    return ByHand(FedGroup(**options))


def step(
    strategy: ByHand,
    state: FedGroupState,
    names: Sequence[str],
    deltas: Mapping[str, Sequence[float]] = DELTAS,
    *,
    round: int,
    lost: Sequence[str] = (),
) -> tuple[FedGroupState, list[Order]]:
    """One round in which every silo adds its delta to what it is sent."""
    here = [silo(name) for name in sorted(names)]
    state, orders = strategy.orders(state, here, round=round)
    updates = [
        Update(
            order.silo,
            order.model,
            {"w": order.model["w"] + np.float32(deltas[order.silo.name])},  # type: ignore[operator]
            float(SAMPLES.get(order.silo.name, 10)),
            {},
            order.purpose,
        )
        for order in orders
        if order.silo.name not in lost
    ]
    return strategy.absorb(state, updates, round=round), orders


def started(strategy: ByHand, names: Sequence[str] = tuple(DELTAS)) -> FedGroupState:
    """The state after round 1."""
    return step(strategy, strategy.first({"w": W0}), names, round=1)[0]


def mean_delta(*names: str) -> np.ndarray:
    return np.mean([DELTAS[name] for name in names], axis=0)


# ---------------------------------------------------------------- group cold start, rounds


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_groups_start_at_w0_plus_the_plain_mean_of_their_members_updates(measure: Any) -> None:
    state = started(fedgroup(num_groups=2, measure=measure))
    assert state.members.groups == (("a1", "a2", "a3"), ("b1", "b2"))
    for number, group in enumerate(state.members.groups):
        expected = mean_delta(*group)
        np.testing.assert_allclose(state.group_models[number]["w"], W0 + expected, rtol=1e-6)
        np.testing.assert_allclose(state.directions[number]["w"], expected, rtol=1e-6)
        assert state.norms[number] == pytest.approx(np.linalg.norm(expected))
    assert_equal_models(state.members.models["b2"], state.group_models[1])
    assert state.separation is not None and state.separation > 0.6


def test_round_one_is_ordinary_training_of_everybody_from_w0() -> None:
    strategy = fedgroup(num_groups=2)
    _, orders = step(strategy, strategy.first({"w": W0}), list(DELTAS), round=1)
    assert names_of(orders) == sorted(DELTAS)
    assert all(order.purpose == "" and order.model["w"] is W0 for order in orders)
    assert all(wire.LOCAL_EPOCHS not in order.config for order in orders)


def test_in_a_group_the_mean_is_weighted_by_samples_and_directions_stay() -> None:
    strategy = fedgroup(num_groups=2)
    one = started(strategy)
    two, orders = step(strategy, one, list(DELTAS), round=2)
    assert all(o.model is one.group_models[one.group_of[o.silo.name]] for o in orders)
    for number, group in enumerate(two.members.groups):
        delta = np.average([DELTAS[n] for n in group], axis=0, weights=[SAMPLES[n] for n in group])
        expected = one.group_models[number]["w"] + delta  # type: ignore[operator]
        np.testing.assert_allclose(two.group_models[number]["w"], expected, rtol=1e-6)
    assert two.directions is one.directions and two.group_of == one.group_of


def test_inter_group_aggregation_is_from_the_snapshot() -> None:
    """Algorithm 2, line 18, with three groups, one of them empty; not before round 2."""
    plain, moving = fedgroup(num_groups=3), fedgroup(num_groups=3, inter_group_lr=0.5)
    names = ["a1", "a2", "b1", "c1"]
    deltas = DELTAS | {"c1": [-5, -5, 0]}
    before, state = (
        step(s, s.first({"w": W0}), names, deltas, round=1)[0] for s in (plain, moving)
    )
    for number in range(3):
        assert_equal_models(state.group_models[number], before.group_models[number])
    before, _ = step(plain, before, ["a1", "a2", "b1"], deltas, round=2)
    state, _ = step(moving, state, ["a1", "a2", "b1"], deltas, round=2)
    w = [model["w"].astype(np.float64) for model in before.group_models]
    for j in range(3):
        expected = w[j] + 0.5 * sum(w[i] / np.linalg.norm(w[i]) for i in range(3) if i != j)
        np.testing.assert_allclose(state.group_models[j]["w"], expected, rtol=1e-6)
        assert state.group_models[j]["w"].dtype == np.float32


def test_a_round_without_an_answer_moves_no_group() -> None:
    strategy = fedgroup(num_groups=2, inter_group_lr=0.5)
    one = started(strategy)
    two, _ = step(strategy, one, list(DELTAS), round=2, lost=list(DELTAS))
    assert two.group_models == one.group_models and two.members.groups == one.members.groups


def test_the_global_model_is_the_plain_mean_of_the_groups_models() -> None:
    strategy = FedGroup(num_groups=2)
    state = start(strategy, InProcessGrid(plain_app(), plain_nodes(0, 0, 0, 1))).state
    one, other = state.group_models
    expected = (one["w"] + other["w"]) / 2
    np.testing.assert_allclose(global_model(state)["w"], expected, rtol=1e-6)
    before = strategy.algorithm.first({"w": W0})
    assert global_model(before)["w"] is W0, "there are no groups yet"


def test_running_statistics_are_averaged_but_neither_compared_nor_moved() -> None:
    model: Model = {
        "w": np.zeros(2, np.float32),
        "bn.running_mean": np.zeros(2, np.float32),
        "bn.count": np.array(0, np.int64),
    }
    strategy = fedgroup(num_groups=2, inter_group_lr=1.0)
    here = [silo(name) for name in ("a", "b", "c", "d")]
    state = strategy.first(model)
    moves = {"a": [1, 0], "b": [1, 0.1], "c": [0, 1], "d": [0.1, 1]}
    for round in (1, 2):
        state, orders = strategy.orders(state, here, round=round)
        updates = [
            Update(
                o.silo,
                o.model,
                {
                    "w": o.model["w"] + np.float32(moves[o.silo.name]),  # type: ignore[operator]
                    # Statistics that would pair a with d and b with c.
                    "bn.running_mean": np.float32([100 if o.silo.name in "ad" else -60, 0]),
                    "bn.count": np.array(10 * round + i, np.int64),
                },
                10.0,
                {},
            )
            for i, o in enumerate(orders)
        ]
        state = strategy.absorb(state, updates, round=round)
    assert state.members.groups == (("a", "b"), ("c", "d"))
    assert list(state.directions[0]) == ["w"]
    assert [m["bn.running_mean"].tolist() for m in state.group_models] == [[20, 0], [20, 0]]
    assert [int(m["bn.count"]) for m in state.group_models] == [21, 23]


# ---------------------------------------------------------------- newcomers, leavers


def test_newcomers_go_where_equation_9_says_several_at_once() -> None:
    strategy = fedgroup(num_groups=2)
    one = started(strategy)
    rng = np.random.default_rng(0)
    deltas = DELTAS | {f"new{i:02}": rng.normal(size=3).tolist() for i in range(30)}
    two, _ = step(strategy, one, list(deltas), deltas, round=2)
    directions = [d["w"].astype(np.float64) for d in one.directions]
    for name in list(deltas)[5:]:
        pre = np.float64(np.float32(W0 + np.float32(deltas[name])) - W0)
        cosines = [d @ pre / np.linalg.norm(d) / np.linalg.norm(pre) for d in directions]
        assert two.group_of[name] == int(np.argmin([(1 - c) / 2 for c in cosines]))
        assert two.similarity[name] == pytest.approx(cosines, abs=1e-6)
        assert_equal_models(two.members.models[name], two.group_models[two.group_of[name]])
    assert len(set(two.group_of.values())) == 2


def test_a_newcomer_trains_once_from_w0_and_counts_in_its_group_from_the_next_round_on() -> None:
    common = {"lr": 0.1, "lr-decay": 0.9, "local-epochs": 2, "proximal-mu": 0.3}
    strategy = fedgroup(num_groups=2, cold_start_epochs=7, train_config=common)
    state, alone = started(strategy), started(strategy)
    deltas = DELTAS | {"new": [9, 1, 1]}
    state, orders = step(strategy, state, list(deltas), deltas, round=2)
    alone, _ = step(strategy, alone, list(DELTAS), round=2)
    (first,) = (order for order in orders if order.silo.name == "new")
    assert first.model["w"] is W0 and first.purpose == COLD_START
    expected = {"lr-decay": 1.0, "local-epochs": 7, "local-steps": 0, "proximal-mu": 0.0}
    assert dict(first.config) == expected
    assert_equal_models(state.group_models[0], alone.group_models[0])
    assert state.members.groups[0] == ("a1", "a2", "a3", "new")

    after, orders = step(strategy, state, list(deltas), deltas, round=3)
    (second,) = (order for order in orders if order.silo.name == "new")
    assert second.model is state.group_models[0]
    assert second.purpose == "" and dict(second.config) == {}
    group = ("a1", "a2", "a3", "new")
    delta = np.average(
        [deltas[n] for n in group], axis=0, weights=[SAMPLES.get(n, 10) for n in group]
    )
    expected_w = state.group_models[0]["w"] + delta  # type: ignore[operator]
    np.testing.assert_allclose(after.group_models[0]["w"], expected_w, rtol=1e-6)


def test_a_newcomer_lost_in_its_cold_start_is_asked_again() -> None:
    strategy = fedgroup(num_groups=2)
    deltas = DELTAS | {"new": [0, 1, 9]}
    state, _ = step(strategy, started(strategy), list(deltas), deltas, round=2, lost=["new"])
    assert strategy.details(state)["cold"] == ["new"]
    assert "new" not in strategy.models(state)
    assert "new" not in [name for group in state.members.groups for name in group]
    state, orders = step(strategy, state, list(deltas), deltas, round=3)
    (again,) = (order for order in orders if order.silo.name == "new")
    assert again.purpose == COLD_START and again.model["w"] is W0
    assert state.group_of["new"] == 1 and strategy.details(state)["cold"] == []


def test_who_is_lost_in_round_one_is_placed_later() -> None:
    strategy = fedgroup(num_groups=2)
    state, _ = step(strategy, strategy.first({"w": W0}), list(DELTAS), round=1, lost=["a2"])
    assert state.members.groups == (("a1", "a3"), ("b1", "b2"))
    np.testing.assert_allclose(state.group_models[0]["w"], W0 + mean_delta("a1", "a3"))
    state, _ = step(strategy, state, list(DELTAS), round=2)
    assert state.members.groups[0] == ("a1", "a2", "a3")


def test_a_newcomer_like_no_group_opens_one_which_the_next_may_join() -> None:
    strategy = fedgroup(num_groups=2, min_similarity=0.5)
    one = started(strategy)
    deltas = DELTAS | {"new1": [0, -9, 0], "new2": [1, -9, 0], "new3": [9, 0, 0]}
    two, _ = step(strategy, one, list(deltas), deltas, round=2)
    assert [two.group_of[name] for name in ("new1", "new2", "new3")] == [2, 2, 0]
    np.testing.assert_array_equal(two.group_models[2]["w"], W0 + np.float32([0, -9, 0]))
    np.testing.assert_array_equal(two.directions[2]["w"], [0, -9, 0])
    assert two.similarity["new2"][2] == pytest.approx(81 / (9 * np.sqrt(82)))
    details = strategy.details(two)
    assert details["opened"] == ["new1"] and details["members"][2] == ["new1", "new2"]
    assert details["placed"]["new1"] == {
        "group": 2,
        "cosines": pytest.approx(list(two.similarity["new1"]), abs=1e-6),
    }
    never = fedgroup(num_groups=2)
    two, _ = step(never, started(never), list(deltas), deltas, round=2)
    assert len(two.group_models) == 2 and never.details(two)["opened"] == []


def test_an_emptied_group_keeps_its_model_and_is_shown_as_empty() -> None:
    strategy = fedgroup(num_groups=2)
    one = started(strategy)
    two, _ = step(strategy, one, ["a1", "a2", "a3"], round=2)
    assert strategy.groups(two) == (("a1", "a2", "a3"),)
    details = strategy.details(two)
    assert details["members"] == [["a1", "a2", "a3"], []] and details["empty-groups"] == [1]
    assert two.group_models[1] is one.group_models[1]
    deltas = DELTAS | {"new": [0, 2, 8]}
    three, _ = step(strategy, two, ["a1", "new"], deltas, round=3)
    assert three.group_of["new"] == 1
    assert strategy.models(three)["new"] is one.group_models[1]
    assert strategy.details(three)["empty-groups"] == []


def test_who_left_keeps_the_model_it_had_and_comes_back_to_its_groups_of_today() -> None:
    strategy = fedgroup(num_groups=2)
    one = started(strategy)
    two, _ = step(strategy, one, ["a1", "a2", "b1", "b2"], round=2)
    assert strategy.models(two)["a3"] is one.group_models[0]
    _, orders = step(strategy, two, list(DELTAS), round=3)
    (back,) = (order for order in orders if order.silo.name == "a3")
    assert back.model is two.group_models[0] and back.purpose == ""


# ---------------------------------------------------------------- draws, ablations, number


def test_sampled_silos_are_cold_started_a_round_before_their_turn() -> None:
    names = [f"s{i:02}" for i in range(20)]
    rng = np.random.default_rng(1)
    deltas = {name: rng.normal([9, 0, 0]).tolist() for name in names}
    strategy = fedgroup(num_groups=2, sample=5, cold_start_silos=4, seed=3)
    state = strategy.first({"w": W0})
    turns, pretrained = [], []
    for round in range(1, 31):
        state, orders = step(strategy, state, names, deltas, round=round)
        warm = [o.silo.name for o in orders if not o.purpose and o.model["w"] is not W0]
        turns.append(warm)
        pretrained += [o.silo.name for o in orders if o.model["w"] is W0]
    assert turns[0] == [] and all(len(turn) == 5 for turn in turns[1:])
    assert len(set(map(tuple, turns[1:]))) > 20
    assert len(pretrained) == len(set(pretrained)) <= 20  # once each
    chosen = state.pretraining
    assert chosen is not None and len(chosen) == 4 and set(chosen) <= set(pretrained[:9])


def test_only_the_drawn_silos_form_the_groups_and_the_others_are_placed_in_the_same_round() -> None:
    strategy = fedgroup(num_groups=2, cold_start_silos=3, seed=1)
    state = started(strategy)
    assert state.pretraining is not None and len(state.pretraining) == 3
    assert set(state.group_of) == set(DELTAS)
    assert set(state.similarity) == set(DELTAS) - set(state.pretraining)
    for number in range(2):
        own = [n for n in sorted(state.pretraining) if state.group_of[n] == number]
        np.testing.assert_allclose(
            state.group_models[number]["w"], W0 + mean_delta(*own), rtol=1e-6
        )


def test_rac_keeps_the_pretraining_silos_and_draws_the_others_groups() -> None:
    deltas = DELTAS | {f"new{i:02}": [9.0, 0, 0] for i in range(40)}
    found = []
    for seed in (0, 0, 1):
        strategy = fedgroup(num_groups=2, assign="random", seed=seed)
        state, _ = step(strategy, started(strategy), list(deltas), deltas, round=2)
        assert [state.group_of[name] for name in DELTAS] == [0, 0, 0, 1, 1]
        found.append([state.group_of[name] for name in list(deltas)[5:]])
    assert found[0] == found[1] != found[2]
    assert 8 < sum(found[0]) < 32


def test_rcc_takes_single_random_silos_as_centres_and_places_the_others() -> None:
    centres = set()
    for seed in range(8):
        strategy = fedgroup(num_groups=2, centres="random", seed=seed)
        state = started(strategy)
        drawn = sorted(set(DELTAS) - set(state.similarity))
        centres.add(tuple(drawn))
        for number, name in enumerate(drawn):
            np.testing.assert_array_equal(
                state.group_models[number]["w"], W0 + np.float32(DELTAS[name])
            )
        assert set(state.group_of) == set(DELTAS) and state.separation is None
    assert len(centres) > 1


def test_the_number_of_groups_can_be_found() -> None:
    deltas = {f"{kind}{i}": DELTAS[f"{kind}{i}"] for kind in "ab" for i in (1, 2)}
    strategy = fedgroup(num_groups="auto")
    state, _ = step(strategy, strategy.first({"w": W0}), list(deltas), deltas, round=1)
    assert state.members.groups == (("a1", "a2"), ("b1", "b2"))


# ---------------------------------------------------------------- bad input


def test_more_groups_than_silos_is_refused_with_both_numbers() -> None:
    strategy = fedgroup(num_groups=4)
    with pytest.raises(FederationError, match=r"num_groups = 4\)\. Only 3 are here") as caught:
        started(strategy, ["a1", "a2", "b1"])
    assert caught.value.exit_code == EXIT_NO_SILOS


def test_fewer_answers_than_groups_end_the_run_and_as_many_are_enough() -> None:
    strategy, names = fedgroup(num_groups=3), ["a1", "a2", "b1", "b2"]
    first = strategy.first({"w": W0})
    state, _ = step(strategy, first, names, round=1, lost=["a1"])
    assert len(state.group_models) == 3
    with pytest.raises(FederationError, match=r"at least 3 silos .* Only 2 answered"):
        step(strategy, first, names, round=1, lost=["a1", "b1"])


def test_no_silos_update_is_averaged_in_a_group_smaller_than_it_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """b1 and b2 are a pair: b2 will not have it, b1 will, and b2 is placed by its direction."""
    monkeypatch.setitem(LEAST, "b2", 3)
    strategy = fedgroup(num_groups=2)
    state = started(strategy)
    np.testing.assert_array_equal(state.directions[1]["w"], DELTAS["b1"])
    np.testing.assert_array_equal(state.group_models[1]["w"], W0 + np.float32(DELTAS["b1"]))
    assert state.group_of["b2"] == 1 and set(state.similarity) == {"b2"}
    monkeypatch.setitem(LEAST, "b1", 3)  # now the pair is no group, and both join the other
    state = started(fedgroup(num_groups=2))
    assert len(state.group_models) == 1 and set(state.group_of.values()) == {0}
    for name in DELTAS:
        monkeypatch.setitem(LEAST, name, 6)
    with pytest.raises(
        FederationError, match="no group that is large enough for its silos' min_group_size"
    ):
        started(fedgroup(num_groups=2))


def test_a_silo_that_accepts_no_group_of_one_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST, "new", 2)
    strategy, deltas = fedgroup(num_groups=2, min_similarity=0.5), DELTAS | {"new": [0, -9, 0]}
    state, _ = step(strategy, started(strategy), list(deltas), deltas, round=2)
    assert len(state.group_models) == 2 and state.group_of["new"] in (0, 1)


def test_equal_updates_make_one_group_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy, deltas = fedgroup(num_groups=3), {name: [1.0, 2, 3] for name in DELTAS}
    state, _ = step(strategy, strategy.first({"w": W0}), list(DELTAS), deltas, round=1)
    assert state.members.groups == (tuple(sorted(DELTAS)),) and state.separation is None
    assert "only 1 different direction: 1 group, not 3" in caplog.text
    state, _ = step(strategy, state, list(DELTAS), deltas, round=2)
    np.testing.assert_allclose(state.group_models[0]["w"], W0 + 2 * np.float32([1, 2, 3]))


@pytest.mark.filterwarnings("error")
def test_zero_updates_are_named_and_kept_somewhere(caplog: pytest.LogCaptureFixture) -> None:
    strategy, deltas = fedgroup(num_groups=2), DELTAS | {"new": [0.0, 0, 0], "b2": [0.0, 0, 0]}
    state, _ = step(strategy, strategy.first({"w": W0}), list(DELTAS), deltas, round=1)
    assert set(state.group_of) == set(DELTAS)
    assert "silo b2 sent an all-zero update, so" in caplog.text
    state, _ = step(strategy, state, list(deltas), deltas, round=2)
    assert "silo new sent an all-zero update, so" in caplog.text
    assert state.group_of["new"] == 0
    still = fedgroup(num_groups=2)
    zeros = {name: [0.0, 0, 0] for name in DELTAS}
    state, _ = step(still, still.first({"w": W0}), list(DELTAS), zeros, round=1)
    assert state.members.groups == (tuple(sorted(DELTAS)),)


def test_badly_separated_groups_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    deltas = {f"s{i}": rng.normal(size=3).tolist() for i in range(9)}
    strategy = fedgroup(num_groups=4)
    with caplog.at_level(logging.WARNING):
        state, _ = step(strategy, strategy.first({"w": W0}), list(deltas), deltas, round=1)
    assert state.separation is not None and state.separation < 0.6
    assert "badly separated" in caplog.text
    assert strategy.details(state)["separation"] == round(state.separation, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"num_groups": 0},
            r"num_groups must be at least 1 and at most 100000, or 'auto'\. Got 0\.",
        ),
        ({"num_groups": 2.5}, r"num_groups must be .*, or 'auto'\. Got 2\.5\."),
        ({"num_groups": "many"}, "Got 'many'"),
        ({"measure": "cosine"}, "measure must be edc or madc. Got 'cosine'"),
        (
            {"cold_start_epochs": -1},
            "cold_start_epochs must be at least 0 and at most 10000. Got -1",
        ),
        (
            {"cold_start_epochs": 1, "cold_start_steps": 9},
            "cold_start_epochs or cold_start_steps, not both: .* Got 1 and 9",
        ),
        (
            {"cold_start_silos": 2},
            "cold_start_silos must be 0, for all, or at least num_groups = 3. Got 2",
        ),
        ({"min_similarity": 1.5}, "min_similarity must be at least -1 and at most 1. Got 1.5"),
        (
            {"inter_group_lr": float("nan")},
            "inter_group_lr must be at least 0 and at most 1000. Got nan",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said) as caught:
        FedGroup(**options)
    assert caught.value.exit_code == EXIT_CONFIG


# ---------------------------------------------------------------- a frozen state, a seed


def test_no_step_changes_the_state_it_is_given() -> None:
    strategy = fedgroup(num_groups=2, min_similarity=0.5, inter_group_lr=0.1)
    deltas = DELTAS | {"new1": [0, -9, 0], "new2": [9, 1, 1]}
    state, seen = strategy.first({"w": W0}), []
    for round, names in enumerate([list(DELTAS), list(deltas), ["a1", "new1"]], start=1):
        seen.append((state, copy.deepcopy(state)))
        state, _ = step(strategy, state, names, deltas, round=round)
    for kept, copied in seen:
        assert repr(kept) == repr(copied)


def test_same_seed_same_models_and_another_draws_others() -> None:
    results = []
    for seed in (5, 5, 6):
        strategy = FedGroup(num_groups=2, sample=3, cold_start_silos=4, seed=seed)
        grid = InProcessGrid(plain_app(), plain_nodes(0, 0, 0, 0, 1, 1, 1))
        results.append(start(strategy, grid, rounds=4))
    one, same, other = (
        {name: arrays_of(record) for name, record in result.models.items()} for result in results
    )
    for name, model in one.items():
        assert_equal_models(same[name], model)
    assert any((other[name]["w"] != model["w"]).any() for name, model in one.items())


# ---------------------------------------------------------------- any ClientApp of Flower's


# ---------------------------------------------------------------- the demo's silos


@pytest.mark.parametrize(
    ("seed", "measure"), [(0, "edc"), pytest.param(1, "madc", marks=pytest.mark.nightly)]
)
def test_the_demos_hidden_groups_are_found_and_its_newcomer_placed(seed: int, measure: Any) -> None:
    specs = silos(seed)
    grid = InProcessGrid(coterie_app, nodes_of([*specs, newcomer(seed)]))
    config = RunConfig.read({"seed": seed})
    roster = DescribedRoster("digits", len(specs), churn=Churn.parse(f"{NEWCOMER}+2"))
    initial = first_arrays(grid, roster, seed=seed)
    strategy = FedGroup(
        num_groups=3,
        measure=measure,
        cold_start_epochs=12,
        seed=seed,
        roster=roster,
        train_config=train_config(config, run="test"),
    )
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=2)
    names = [s.name for s in specs]
    assert result.groups[1] == hidden_groups(names)
    assert result.groups[2] == hidden_groups([*names, NEWCOMER])
    assert result.rounds[0].details["separation"] > 0.6


# ---------------------------------------------------------------- the global model, discrepancy


def test_a_silo_that_no_group_has_at_the_end_keeps_the_global_model() -> None:
    """Its cold start failed in the last round; all others keep their group's."""
    grid = Tap(plain_nodes(0, 1, 0, 1), plain_app(at(5, 3, error_reply)))
    late = {"kind": 0, "noise": 9, "samples": 50}
    come = {2: late}
    strategy = FedGroup(
        num_groups=2,
        on_round=lambda report: grid.connect(come.pop(2)) if report.round in come else None,
    )
    result = start(strategy, grid)
    assert result.rounds[2].details["cold"] == ["silo-4"]
    expected = global_model(result.state)
    assert result.global_model is not None
    assert_equal_models(result.global_model, expected)
    evaluated = {
        m.metadata.dst_node_id: arrays_of(m.content["arrays"])
        for m in grid.sent
        if m.metadata.message_type == wire.EVALUATE
    }
    assert_equal_models(evaluated[5], expected)
    assert_equal_models(evaluated[1], arrays_of(result.models["silo-0"]))
    assert "silo-4" not in result.models and "silo-4" in result.rounds[-1].evaluation


def test_there_is_no_global_model_before_there_are_groups() -> None:
    strategy = FedGroup(num_groups=2).algorithm
    assert strategy.global_model(strategy.first({"w": W0})) is None


def test_discrepancy_is_the_distance_to_the_groups_model_after_the_round() -> None:
    """Eq. 4, with the group's model; who trains alone has none."""
    nodes = plain_nodes(0, 1, 0, samples=[50, 60, 150])
    result = start(FedGroup(num_groups=2), InProcessGrid(plain_app(), nodes), rounds=2)
    first = {k: v + 0 for k, v in plain_model().items()}
    mean = {
        k: (plain_trained(first, nodes[0])[k] + plain_trained(first, nodes[2])[k]) / 2
        for k in first
    }
    trained = {f"silo-{i - 1}": plain_trained(mean, nodes[i - 1]) for i in (1, 3)}
    group = {k: (trained["silo-0"][k] * 50 + trained["silo-2"][k] * 150) / 200 for k in mean}
    distances = {name: own.discrepancy for name, own in result.rounds[1].silos.items()}
    for name, model in trained.items():
        expected = np.sqrt(sum(float(((model[k] - group[k]) ** 2).sum()) for k in group))
        assert distances[name] == pytest.approx(expected, rel=1e-4)
    assert np.isnan(distances["silo-1"])
    assert distances["silo-0"] == pytest.approx(3 * distances["silo-2"], rel=1e-4), (
        "by their samples"
    )
