"""HCCT's state from round to round, on updates made by hand."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.strategies import HCCT, FederationError
from coterie.strategies.hcct import alpha as trials
from coterie.strategies.hcct.algorithm import CATCH_UP
from coterie.strategies.hcct.alpha import HOLDOUT as SHARE
from coterie.strategies.hcct.alpha import Candidate, Landscape, alpha_of
from coterie.strategies.hcct.starts import common_starts
from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import agglomerative, optimal
from coterie.strategies.rounds.algorithm import Order, Update
from coterie.strategies.rounds.handles import Masked
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo
from coterie.wire import (
    BATCH_SIZE,
    GROUP_SIZE,
    HOLDOUT,
    HOLDOUT_ERROR,
    HOLDOUT_EXAMPLES,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    ROUNDS,
    UPDATE_NOISE,
    Model,
)
from coterie.wire.statements import Statement
from tests.conftest import assert_equal_models
from tests.unit.strategies.by_hand import ByHand

INITIAL: Model = {"w": np.zeros(4, np.float32), "b": np.zeros((2, 2), np.float32)}

EAST, NORTH = [1.0, 0, 0, 0], [0, 1.0, 0, 0]
NEAR_EAST, NEAR_NORTH = [1.0, 0.2, 0, 0], [0.2, 1.0, 0, 0]


def silos(*names: str, alpha: Mapping[str, float] | None = None, size: int = 100) -> list[Silo]:
    own = alpha or {}
    return [
        Silo(name, i, num_examples=size, alpha=own.get(name), described=True)
        for i, name in enumerate(names, start=1)
    ]


def moved(model: Model, by: Sequence[float]) -> Model:
    step = np.array(by, np.float32)
    return {"w": model["w"] + step, "b": model["b"] + step.reshape(2, 2)}


def reply(order: Order, by: Sequence[float], size: float = 100) -> Update:
    """What a silo answers; its held-out error, if asked, is that of an untrained model."""
    metrics = {HOLDOUT_ERROR: 0.9, HOLDOUT_EXAMPLES: 20.0} if HOLDOUT in order.config else {}
    return Update(order.silo, order.model, moved(order.model, by), size, metrics, order.purpose)


def hcct(**options: Any) -> ByHand:
    return ByHand(HCCT(**options))


def auto(rounds: int = 8) -> ByHand:
    """A run that looks for two rounds and tries for three, unless more are left."""
    return hcct(alpha="auto", train_config={ROUNDS: rounds})


def play(
    strategy: ByHand,
    state: HCCTState,
    here: Sequence[Silo],
    moves: Mapping[str, Sequence[float] | None],
    *,
    round: int,
    probes: Mapping[str, Sequence[float]] | None = None,
    sizes: Mapping[str, float] | None = None,
) -> HCCTState:
    """One round: new silos are admitted, each moves as given; None does not answer."""
    state, orders = strategy.orders(state, here, round=round)
    updates = []
    for order in orders:
        by = (probes or {}).get(order.silo.name) if order.purpose else moves[order.silo.name]
        if by is not None:
            updates.append(reply(order, by, (sizes or {}).get(order.silo.name, 100)))
    return strategy.absorb(state, updates, round=round)


def rounds(
    strategy: ByHand, here: Sequence[Silo], *moves: Mapping[str, Sequence[float] | None]
) -> HCCTState:
    state = strategy.first(INITIAL)
    for number, move in enumerate(moves, start=1):
        state = play(strategy, state, here, move, round=number)
    return state


THREE = {"a": EAST, "b": NEAR_EAST, "c": NORTH}
FOUR = {"a": EAST, "b": NEAR_EAST, "c": NORTH, "d": NEAR_NORTH}
PAIRS = (("a", "b"), ("c", "d"))


# ---------------------------------------------------------------- rounds


def test_auto_measures_on_what_no_model_has_been_trained_on_since_round_one() -> None:
    strategy, here = auto(), silos("a", "b", "c")
    state = strategy.first(INITIAL)
    for number in (1, 2):
        _, orders = strategy.orders(state, here, round=number)
        assert [order.config for order in orders] == [{HOLDOUT: SHARE}] * 3
        state = play(strategy, state, here, THREE, round=number)
    assert state.trial is not None and state.untrained.keys() == set("abc")
    _, orders = strategy.orders(state, here, round=3)
    assert {order.purpose for order in orders} > {""}, "alone, and groups"
    for order in orders:
        assert order.config[HOLDOUT] == SHARE
    (together,) = {id(o.model): o.model for o in orders if o.config[GROUP_SIZE] == 3}.values()
    assert_equal_models(together, weighted_mean(list(state.members.models.values()), [100.0] * 3))


def test_in_round_one_everybody_trains_alone_from_the_initial_model() -> None:
    strategy, here = hcct(), silos("a", "b", "c", "d")
    state, orders = strategy.orders(strategy.first(INITIAL), here, round=1)
    assert [(o.silo.name, o.purpose) for o in orders] == [(n, "") for n in "abcd"]
    assert all(order.model is INITIAL for order in orders)
    assert strategy.groups(state) == (("a",), ("b",), ("c",), ("d",))


def test_after_round_one_those_who_move_alike_are_planned_together() -> None:
    state = rounds(hcct(alpha=50), silos("a", "b", "c", "d"), FOUR)
    assert state.planned == PAIRS
    assert state.members.groups == (("a",), ("b",), ("c",), ("d",))  # of the round that was
    for name, by in FOUR.items():
        assert_equal_models(state.members.models[name], moved(INITIAL, by))


def test_a_group_starts_from_the_weighted_mean_of_its_members_models() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1, sizes={"a": 300, "b": 100})
    mean = weighted_mean([moved(INITIAL, EAST), moved(INITIAL, NEAR_EAST)], [300, 100])
    _, orders = strategy.orders(state, here, round=2)
    start = {order.silo.name: order.model for order in orders}
    assert start["a"] is start["b"]
    assert_equal_models(start["a"], mean)
    assert_equal_models(dict(strategy.next_models(state)["b"]), mean)


def test_a_groups_model_is_the_weighted_mean_of_what_its_members_sent() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1)
    start = strategy.next_models(state)["a"]
    state = play(strategy, state, here, FOUR, round=2, sizes={"a": 10, "b": 30})
    expected = weighted_mean([moved(start, EAST), moved(start, NEAR_EAST)], [10, 30])
    assert_equal_models(dict(strategy.models(state)["a"]), expected)
    assert strategy.models(state)["a"] is strategy.models(state)["b"]
    assert strategy.groups(state) == PAIRS


def test_alpha_zero_leaves_everybody_alone_and_a_huge_one_puts_all_together() -> None:
    here = silos("a", "b", "c", "d")
    assert rounds(hcct(alpha=0), here, FOUR).planned == (("a",), ("b",), ("c",), ("d",))
    assert rounds(hcct(alpha=1e9), here, FOUR).planned == (("a", "b", "c", "d"),)


def test_a_silos_own_alpha_goes_before_the_runs() -> None:
    """Two silos that differ merge only where one of them is hungry."""
    moves = {"a": [1.0, 0, 0, 0], "b": [0.5, 0.8, 0, 0]}
    assert rounds(hcct(alpha=1), silos("a", "b"), moves).planned == (("a",), ("b",))
    hungry = silos("a", "b", alpha={"a": 200.0})
    assert rounds(hcct(alpha=1), hungry, moves).planned == (("a", "b"),)
    content = silos("a", "b", alpha={"a": 0.0, "b": 0.0})
    assert rounds(hcct(alpha=1e9), content, moves).planned == (("a",), ("b",))


@pytest.mark.parametrize("size", [5, 100, 40_000])
def test_the_usual_alpha_grows_with_the_silos(size: int) -> None:
    """Eq. 9 compares α / D with a cosine: the same updates give the same groups for any D."""
    strategy, here = hcct(), silos("a", "b", "c", "d", size=size)
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1)
    assert state.planned == PAIRS
    assert strategy.details(state)["alpha"] == pytest.approx(2 / 3 * size)
    if size == 40_000:
        state = play(hcct(alpha=50), strategy.first(INITIAL), here, FOUR, round=1)
        assert len(state.planned) == 4, "the paper's form"


def test_a_silo_that_states_many_samples_does_not_move_the_usual_alpha() -> None:
    strategy, here = hcct(), silos("a", "b", "c", "d")
    here[3] = replace(here[3], num_examples=10**6)
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1, sizes={"d": 1e6})
    assert strategy.details(state)["alpha"] == pytest.approx(2 / 3 * 100)
    assert ("a", "b") in state.planned


def test_the_samples_of_eq_9_are_those_stated_not_the_weights_of_the_last_training() -> None:
    strategy, stated = hcct(), {"a": 400, "b": 300, "c": 100, "d": 100}
    here = [replace(s, num_examples=stated[s.name]) for s in silos(*"abcd")]
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1)
    details = strategy.details(state)
    assert (details["sizes"], details["alpha"]) == ([400, 300, 100, 100], 2 / 3 * 200)


@pytest.mark.parametrize("alpha", [0.0, 1e6])
def test_a_run_that_alpha_alone_decides_says_from_where_on_it_would_not(alpha: float) -> None:
    here = silos("a", "b", "c", "d")
    strategy = hcct(alpha=alpha)
    state = rounds(strategy, here, FOUR)
    text = strategy.by_choice(state)
    assert ("alone" if alpha == 0 else "together") in text.split(".")[0]
    border = float(text.rpartition(" = ")[2])
    groups = {f: len(rounds(hcct(alpha=f * border), here, FOUR).planned) for f in (0.98, 1.02)}
    assert groups == ({0.98: 4, 1.02: 2} if alpha == 0 else {0.98: 2, 1.02: 1}), text


@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.0, "fixed_groups": 4}, {"alpha": 50.0}, {"alpha": "auto"}]
)
def test_nothing_is_said_of_alpha_where_it_is_not_the_reason(options: dict[str, Any]) -> None:
    strategy = hcct(**options)
    assert strategy.by_choice(rounds(strategy, silos("a", "b", "c", "d"), FOUR)) == ""
    assert strategy.by_choice(rounds(strategy, silos("a"), {"a": EAST})) == ""


def test_silos_that_their_own_conditions_keep_alone_are_not_put_down_to_alpha() -> None:
    strategy = hcct()
    here = [replace(silo, min_group_size=5) for silo in silos("a", "b", "c", "d")]
    state = rounds(strategy, here, FOUR)
    assert len(state.planned) == 4 and strategy.by_choice(state) == ""


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("memory", "expected"), [(1.0, 3.0), (0.5, 1.75), (0.0, 1.0)])
def test_own_updates_are_accumulated(memory: float, expected: float) -> None:
    state = rounds(hcct(memory=memory, alpha=0), silos("a"), *[{"a": EAST}] * 3)
    np.testing.assert_allclose(state.memory["a"]["w"], [expected, 0, 0, 0])


def test_an_update_is_what_the_silo_did_itself_not_what_its_group_became() -> None:
    state = rounds(
        hcct(alpha=1e9), silos("a", "b"), {"a": EAST, "b": NORTH}, {"a": EAST, "b": NORTH}
    )
    np.testing.assert_array_equal(state.memory["a"]["w"], [2, 0, 0, 0])
    np.testing.assert_array_equal(state.memory["b"]["w"], [0, 2, 0, 0])


def test_with_memory_one_odd_round_does_not_part_friends_and_without_it_does() -> None:
    here = silos("a", "b", "c", "d")
    odd = {"a": EAST, "b": [0, 0, 0.3, 0], "c": NORTH, "d": NEAR_NORTH}
    moves = [FOUR, FOUR, FOUR, odd]
    assert rounds(hcct(alpha=20, memory=1), here, *moves).planned == PAIRS
    assert rounds(hcct(alpha=20, memory=0), here, *moves).planned != PAIRS


def test_counters_and_running_statistics_are_not_compared_unless_asked_for() -> None:
    initial = {
        "w": np.zeros(2, np.float32),
        "bn.running_mean": np.zeros(2, np.float32),
        "x": np.zeros(2, np.float32),
        "n": np.array(0, np.int64),
    }
    silo = Silo("a", 1, num_examples=10, described=True, buffers=("bn.running_mean", "x"))
    new = {k: v + 1 for k, v in initial.items()}
    for similarity, kept in (("parameters", {"w"}), ("parameters+buffers", set(initial) - {"n"})):
        strategy = hcct(similarity=similarity)
        state, (order,) = strategy.orders(strategy.first(initial), [silo], round=1)
        state = strategy.absorb(state, [Update(silo, order.model, new, 10, {})], round=1)
        assert set(state.memory["a"]) == kept


# ---------------------------------------------------------------- who does not answer


def test_who_does_not_answer_stays_in_its_group_and_gets_its_model() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR | {"b": None})
    assert strategy.groups(state) == PAIRS
    assert state.planned == PAIRS
    assert strategy.models(state)["b"] is strategy.models(state)["a"]
    np.testing.assert_allclose(state.memory["b"]["w"], NEAR_EAST)


def test_who_never_answered_is_alone_until_it_does() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR | {"b": None})
    assert state.planned == (("a",), ("c", "d"))
    state, orders = strategy.orders(state, here, round=2)
    assert strategy.groups(state) == (("a",), ("b",), ("c", "d"))
    assert_equal_models(dict(next(o.model for o in orders if o.silo.name == "b")), INITIAL)
    state = strategy.absorb(state, [reply(o, FOUR[o.silo.name]) for o in orders], round=2)
    assert state.planned == PAIRS


def test_a_round_without_any_answer_changes_nothing() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    before = rounds(strategy, here, FOUR)
    after = play(strategy, before, here, dict.fromkeys("abcd"), round=2)
    assert after.planned == before.planned
    assert dict(after.memory) == dict(before.memory)
    assert dict(after.members.models) == dict(before.members.models)


def test_a_silo_that_leaves_keeps_its_model_and_the_others_go_on() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR)
    held = strategy.models(state)["d"]
    rest = [silo for silo in here if silo.name != "d"]
    state = play(strategy, state, rest, FOUR, round=3)
    assert strategy.groups(state) == (("a", "b"), ("c",))
    assert strategy.models(state)["d"] is held
    assert state.planned == (("a", "b"), ("c",))
    state = play(strategy, state, here, FOUR, round=4)
    assert strategy.groups(state) == (("a", "b"), ("c",), ("d",))  # it comes back alone
    assert state.planned == PAIRS
    np.testing.assert_allclose(state.memory["d"]["w"], 3 * np.array(NEAR_NORTH), rtol=1e-6)


# ---------------------------------------------------------------- newcomers


def newcomer_round(
    move: Sequence[float], *, round: int = 3, probe: Sequence[float] | None = NEAR_NORTH
) -> tuple[ByHand, HCCTState, list[Order]]:
    strategy = hcct(alpha=50, train_config={LOCAL_EPOCHS: 2})
    here = silos("a", "b", "c", "d")
    state = rounds(strategy, here, *[FOUR] * (round - 1))
    everybody = [*here, Silo("e", 9, num_examples=100, described=True)]
    _, orders = strategy.orders(state, everybody, round=round)
    probes = {} if probe is None else {"e": probe}
    state = play(strategy, state, everybody, FOUR | {"e": move}, round=round, probes=probes)
    return strategy, state, orders


def test_a_newcomer_trains_from_the_mean_of_all_models_and_from_the_initial_one() -> None:
    strategy, state, orders = newcomer_round(NORTH)
    own = [order for order in orders if order.silo.name == "e"]
    assert [order.purpose for order in own] == ["", CATCH_UP]
    before = rounds(strategy, silos("a", "b", "c", "d"), FOUR, FOUR)
    expected = weighted_mean([before.members.models[n] for n in "abcd"], [100] * 4)
    assert_equal_models(dict(own[0].model), expected)
    assert own[1].model is INITIAL
    assert strategy.groups(state) == (("a", "b"), ("c", "d"), ("e",))


@pytest.mark.parametrize(("round", "epochs"), [(2, 4), (3, 6), (9, 10)])
def test_a_newcomers_catch_up_is_as_long_as_the_rounds_it_missed_up_to_five(
    round: int, epochs: int
) -> None:
    _, _, orders = newcomer_round(NORTH, round=round)
    assert orders[-1].config == {LOCAL_EPOCHS: epochs}


@pytest.mark.parametrize(("move", "group"), [(NEAR_NORTH, 1), (NEAR_EAST, 0)])
def test_a_newcomer_is_placed_with_those_it_moves_like(move: Sequence[float], group: int) -> None:
    _, state, _ = newcomer_round(move)
    assert "e" in state.planned[group]
    assert state.newcomers == frozenset()


def test_a_newcomers_memory_is_its_catch_up_or_its_update_where_that_failed() -> None:
    _, state, _ = newcomer_round(NORTH, probe=[0, 5.0, 0, 0])
    np.testing.assert_array_equal(state.memory["e"]["w"], [0, 5, 0, 0])
    _, state, _ = newcomer_round(NORTH, probe=None)
    np.testing.assert_allclose(state.memory["e"]["w"], NORTH, rtol=1e-6)


def test_a_newcomer_that_did_not_answer_is_still_one_in_the_next_round() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR)
    everybody = [*here, Silo("e", 9, num_examples=100, described=True)]
    state = play(strategy, state, everybody, FOUR | {"e": None}, round=3)
    assert state.newcomers == {"e"}
    assert state.planned == PAIRS
    state, orders = strategy.orders(state, everybody, round=4)
    assert [o.purpose for o in orders if o.silo.name == "e"] == ["", CATCH_UP]


# ---------------------------------------------------------------- the rest


def test_a_first_update_of_zero_is_warned_about_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later one is not: a linear model that is trained alone stays at its minimum."""
    still = FOUR | {"b": [0, 0, 0, 0], "c": [0, 0, 0, 0]}
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        state = rounds(hcct(alpha=50), silos("a", "b", "c"), FOUR | {"c": [0, 0, 0, 0]}, still)
    assert caplog.text.count("sent an all-zero update, so") == 1
    assert "silo c sent" in caplog.text
    assert ("a", "b") in state.planned or state.planned == (("a", "b", "c"),)
    assert np.isfinite(np.array(state.similarity)).all()


def test_states_are_never_changed_in_place() -> None:
    strategy, here = hcct(alpha=50), silos("a", "b", "c", "d")
    states, copies = [strategy.first(INITIAL)], []
    for number in range(1, 4):
        copies.append(copy.deepcopy(states[-1]))
        states.append(play(strategy, states[-1], here, FOUR, round=number))

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Mapping):
            return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        if hasattr(one, "__dataclass_fields__"):
            return all(same(getattr(one, f), getattr(other, f)) for f in one.__dataclass_fields__)
        return bool(one == other)

    assert all(same(a, b) for a, b in zip(states, copies, strict=False))


def test_the_papers_solver_gives_the_partition_of_algorithm_2() -> None:
    differed = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        names = "abcdefg"
        moves = {n: rng.normal(size=4).tolist() for n in names}
        alphas = {n: float(rng.uniform(0, 100)) for n in names[:3]}
        here = silos(*names, alpha=alphas)
        state = rounds(hcct(alpha=30, solver="agglomerative"), here, moves)
        vectors = [list(state.memory[n].values()) for n in names]
        own = [alphas.get(n, 30.0) for n in names]
        utility = HCCTUtility.from_gram(gram(vectors), [100] * 7, alpha=own)
        expected = agglomerative(utility).groups
        assert [[names[i] for i in g] for g in expected] == [list(g) for g in state.planned]
        best = rounds(hcct(alpha=30), here, moves)
        differed += best.planned != state.planned
    assert differed > 0  # and the better solver is another one


def test_more_silos_than_the_exact_solver_takes_are_grouped_too() -> None:
    names = [f"s{i:02d}" for i in range(15)]
    rng = np.random.default_rng(0)
    centres = 3 * np.eye(4)
    moves = {n: (centres[i % 3] + 0.2 * rng.normal(size=4)).tolist() for i, n in enumerate(names)}
    states = [rounds(hcct(alpha=50, seed=4), silos(*names), moves) for _ in range(2)]
    assert states[0].planned == states[1].planned == tuple(tuple(names[i::3]) for i in range(3))


def test_details_name_the_planned_groups_and_the_cosines() -> None:
    strategy = hcct(alpha=50)
    details = strategy.details(rounds(strategy, silos("a", "b", "c", "d"), FOUR))
    assert details["planned"] == [["a", "b"], ["c", "d"]]
    assert details["compared"] == ["a", "b", "c", "d"]
    cosines = np.array(details["similarity"])
    np.testing.assert_allclose(np.diag(cosines), 1)
    assert cosines[0, 1] == pytest.approx(1 / math.hypot(1, 0.2), abs=1e-6)


# ---------------------------------------------------------------- HCCT-E, schedule


def test_with_a_prefix_only_those_arrays_are_compared() -> None:
    state = rounds(hcct(layers="b"), silos("a", "b"), {"a": EAST, "b": NORTH})
    assert set(state.memory["a"]) == {"b"}
    with pytest.raises(FederationError, match="'nothing' names no array that can be compared"):
        rounds(hcct(layers="nothing"), silos("a"), {"a": EAST})


def test_hcct_e_compares_one_layer_also_where_names_have_no_dots() -> None:
    """Plain Flower models often call their arrays 0, 1, 2 …"""
    state = rounds(hcct(layers="auto", alpha=50), silos("a", "b", "c", "d"), FOUR, FOUR)
    assert len(state.memory["a"]) == 1
    assert state.planned == PAIRS


SWAPPED = {"a": EAST, "c": NEAR_EAST, "b": NORTH, "d": NEAR_NORTH}
OTHER_PAIRS = (("a", "c"), ("b", "d"))


@pytest.mark.parametrize(("every", "rounds_until"), [(1, 2), (2, 3), (3, 4)])
def test_silos_are_regrouped_every_so_many_rounds(every: int, rounds_until: int) -> None:
    """From round 2 on they move otherwise; without memory the next partition shows it."""
    strategy, here = hcct(alpha=20, memory=0, regroup_every=every), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR)
    for number in range(2, rounds_until):
        state = play(strategy, state, here, SWAPPED, round=number)
        assert state.planned == PAIRS
    state = play(strategy, state, here, SWAPPED, round=rounds_until)
    assert state.planned == OTHER_PAIRS


def test_a_partition_that_was_the_same_often_enough_is_kept() -> None:
    here = silos("a", "b", "c", "d")
    moves = [FOUR] * 3 + [SWAPPED] * 2
    assert rounds(hcct(alpha=20, memory=0, settle_after=2), here, *moves).planned == PAIRS
    assert rounds(hcct(alpha=20, memory=0, settle_after=3), here, *moves).planned == OTHER_PAIRS


def test_rounds_without_a_partition_do_not_confirm_one() -> None:
    """Every third round is partitioned again; one partition is not a reason to settle."""
    strategy = hcct(alpha=20, memory=0, regroup_every=3, settle_after=2)
    state = rounds(strategy, silos("a", "b", "c", "d"), FOUR, *[SWAPPED] * 3)
    assert state.planned == OTHER_PAIRS


def test_being_alone_before_the_first_partition_confirms_none() -> None:
    """At first all differ; the first partition leaves them alone, and is not the same "again"."""
    apart = {"a": EAST, "b": [0, 0, 1.0, 0], "c": NORTH, "d": [0, 0, 0, 1.0]}
    strategy = hcct(alpha=20, memory=0, settle_after=1)
    state = rounds(strategy, silos("a", "b", "c", "d"), apart, FOUR)
    assert state.planned == PAIRS
    state = rounds(strategy, silos("a", "b", "c", "d"), apart, apart, FOUR)
    assert state.planned == tuple((name,) for name in "abcd"), "confirmed by the second"


@pytest.mark.parametrize("keys", [{}, {"settle_after": 1}, {"regroup_every": 9}])
def test_newcomers_that_are_alike_and_unlike_every_group_form_one(keys: dict[str, int]) -> None:
    strategy, here = hcct(alpha=20, **keys), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR, FOUR)
    assert state.planned == PAIRS
    more, other = silos("a", "b", "c", "d", "e", "f", "g"), [0, 0, 1.0, 0]
    moves = {**FOUR, "e": other, "f": other, "g": [0, 0, 0, 1.0]}
    state = play(strategy, state, more, moves, round=4, probes=moves)
    assert state.planned == (*PAIRS, ("e", "f"), ("g",))


# ---------------------------------------------------------------- alpha = auto


def held_out(errors: Mapping[str, Mapping[Group, float]]) -> Any:
    """Replies to a trial's orders with these held-out errors: silo → group → error."""

    def answer(strategy: ByHand, state: HCCTState, order: Order) -> Update:
        assert state.trial is not None
        groups = [g for g in state.trial.groups if order.silo.name in g]
        (group,) = [
            g
            for number, g in enumerate(state.trial.groups)
            if g in groups and order.purpose == ("" if len(g) == 1 else f"trial-{number}")
        ]
        update = reply(order, FOUR[order.silo.name])
        error = errors.get(order.silo.name, {}).get(group, 0.5)
        return replace(update, metrics={HOLDOUT_ERROR: error, HOLDOUT_EXAMPLES: 20.0})

    return answer


def test_held_out_samples_count_up_to_the_share_asked_for() -> None:
    said = {HOLDOUT_ERROR: 0.5, HOLDOUT_EXAMPLES: 1e6}
    update = Update(Silo("a", 1, num_examples=50), {}, {}, 40.0, said)
    assert trials.held_out([update])["a"].num_examples == 10


def tried(
    strategy: ByHand, state: HCCTState, here: Sequence[Silo], answer: Any, *, first: int, last: int
) -> HCCTState:
    """These rounds of a trial."""
    for number in range(first, last + 1):
        state, orders = strategy.orders(state, here, round=number)
        updates = [answer(strategy, state, order) for order in orders]
        state = strategy.absorb(state, [u for u in updates if u is not None], round=number)
    return state


def test_auto_trains_a_silo_alone_that_accepts_no_small_group() -> None:
    """Its only candidate is itself: it must not end the trial where it began."""
    here = [replace(s, min_group_size=5) if s.name == "c" else s for s in silos("a", "b", "c")]
    strategy = auto()
    state = rounds(strategy, here, THREE, THREE)
    state = tried(strategy, state, here, held_out({}), first=3, last=5)
    assert state.trial is None and ("c",) in state.planned
    assert float(state.members.models["c"]["w"][1]) == 5  # it never began again


def test_autos_verdict_is_of_silos_that_measured_every_candidate_in_the_last_round() -> None:
    together, pair = ("a", "b", "c"), ("a", "b")
    measured = {
        "a": {("a",): 0.2, pair: 0.3, together: 0.4},
        "b": {("b",): 0.2, pair: 0.3, together: 0.4},
        "c": {("c",): 0.9, together: 0.1},
    }
    answer = held_out(measured)

    def without_c(strategy: ByHand, state: HCCTState, order: Order) -> Update | None:
        return None if order.silo.name == "c" else answer(strategy, state, order)

    strategy, here = auto(), silos("a", "b", "c")
    begun = rounds(strategy, here, THREE, THREE)
    state = tried(strategy, begun, here, answer, first=3, last=5)
    assert state.members.groups != (("a",), ("b",), ("c",)), "c's gain outweighs"
    state = tried(strategy, begun, here, answer, first=3, last=4)
    state = tried(strategy, state, here, without_c, first=5, last=5)
    assert state.alpha == 0 and state.members.groups == (("a",), ("b",), ("c",))
    assert state.verdict["judges"] == ["a", "b"]


def nobody(strategy: ByHand, state: HCCTState, order: Order) -> Update:
    """Keeps its error to itself."""
    return replace(reply(order, FOUR[order.silo.name]), metrics={})


def test_a_run_whose_silos_keep_their_errors_to_themselves_ends_in_its_first_round() -> None:
    strategy, here = auto(), silos("a", "b", "c")
    with pytest.raises(FederationError, match=r"metrics in silo\.toml.*Give alpha as a number"):
        tried(strategy, strategy.first(INITIAL), here, nobody, first=1, last=1)


def test_a_trial_that_nobody_can_judge_leaves_everybody_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, here = auto(), silos("a", "b", "c")
    state = rounds(strategy, here, THREE, THREE)
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        state = tried(strategy, state, here, nobody, first=3, last=5)
    assert state.trial is None and state.planned == (("a",), ("b",), ("c",))
    assert "alone, because no silo measured all partitions" in caplog.text
    for name in "abc":
        assert_equal_models(state.starts[name], moved(INITIAL, 5 * np.array(FOUR[name])))


def test_a_trial_that_the_run_ends_falls_back_to_the_best_so_far(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three of its rounds are played, and the run would have let it have six."""
    strategy, here = auto(100), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR)
    state = tried(strategy, state, here, held_out(pairs_are_better(by=0.02)), first=3, last=4)
    strategy.config[ROUNDS] = 5
    assert state.trial is not None and state.trial.leader
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        state = tried(strategy, state, here, nobody, first=5, last=5)
    assert state.trial is None and state.members.groups == PAIRS
    assert_equal_models(state.members.models["a"], state.members.models["b"])
    assert "the run ended before the trial" in caplog.text
    assert strategy.details(state)["trial"]["how"].endswith("the run ended before the trial")


def test_models_that_have_learnt_nothing_are_never_chosen() -> None:
    """Best of all, but no better than w⁰ beyond chance: 78% against 90% of 20 samples."""
    strategy, here = auto(), silos("a", "b", "c", "d")
    begun = rounds(strategy, here, FOUR, FOUR)
    at_chance = {n: {(n,): 0.9} | {pair: 0.85 for pair in PAIRS if n in pair} for n in "abcd"}
    for found in at_chance.values():
        found[("a", "b", "c", "d")] = 0.9
    state = tried(strategy, begun, here, held_out(at_chance), first=3, last=5)
    assert state.planned == tuple((n,) for n in "abcd")
    assert "no model is better than untrained ones" in state.verdict["how"]
    learnt = {n: {g: error - 0.5 for g, error in found.items()} for n, found in at_chance.items()}
    state = tried(strategy, begun, here, held_out(learnt), first=3, last=5)
    assert state.planned == PAIRS


def test_an_undecided_trial_goes_on_within_its_budget() -> None:
    strategy, here = auto(100), silos("a", "b", "c", "d")
    begun = rounds(strategy, here, FOUR, FOUR)
    close, clear = pairs_are_better(by=0.02), pairs_are_better(by=0.4)
    assert tried(strategy, begun, here, held_out(clear), first=3, last=5).trial is None
    state = tried(strategy, begun, here, held_out(close), first=3, last=7)
    assert state.trial is not None
    state = tried(strategy, state, here, held_out(close), first=8, last=8)
    assert state.planned == PAIRS and state.verdict["how"].startswith("undecided")


def test_auto_looks_until_groups_show() -> None:
    """At first c and d move like nobody; nothing is tried before they move alike."""
    strategy, here = auto(100), silos("a", "b", "c", "d")
    unlike = {"a": EAST, "b": NORTH, "c": [0, 0, 1.0, 0], "d": [0, 0, 0, 1.0]}
    state = rounds(strategy, here, unlike, unlike)
    assert state.trial is None
    clear = {"a": [20.0, 0, 0, 0], "b": [20.0, 0, 0, 0], "c": [0, 20.0, 0, 0], "d": [0, 20.0, 0, 0]}
    assert play(strategy, state, here, clear, round=3).trial is not None
    for number in (3, 4, 5):
        state = play(strategy, state, here, unlike, round=number)
    assert state.trial is None
    assert play(strategy, state, here, unlike, round=6).trial is not None, "for ever it does not"


def test_the_winner_is_held_until_many_come_or_leave() -> None:
    """Later updates would give other pairs; newcomers are placed in the pairs that won."""
    strategy, here = auto(), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR)
    state = tried(strategy, state, here, held_out(pairs_are_better(by=0.4)), first=3, last=5)
    assert state.planned == PAIRS
    other = {n: [20 * x for x in by] for n, by in SWAPPED.items()}
    for number in (6, 7, 8):
        state = play(strategy, state, here, other, round=number)
        assert state.planned == PAIRS
    five = {**other, "e": [1.0, 1.0, 0, 0]}
    state = play(strategy, state, silos(*"abcde"), five, round=9, probes=five)
    assert state.planned in ((("a", "b"), ("c", "d", "e")), (("a", "b", "e"), ("c", "d")))
    state = play(strategy, state, here[:2], other, round=10)
    assert {name for group in state.planned for name in group} == {"a", "b"}
    assert state.held == ("a", "b"), "three of four left or came"


def test_auto_waits_until_there_is_something_to_choose_from() -> None:
    strategy = auto()
    state = rounds(strategy, silos("a"), FOUR, FOUR)
    assert state.trial is None and state.alpha is None
    here = silos("a", "b", "c")
    state = play(strategy, state, here, THREE, round=3, probes=THREE)
    assert state.trial is not None and not state.newcomers
    assert max(len(c.groups) for c in state.trial.candidates) == 3


def test_auto_waits_for_a_first_answer_but_not_for_ever() -> None:
    strategy, here = auto(), silos("a", "b", "c")
    without = {**THREE, "c": None}
    state = rounds(strategy, here, without, without)
    assert state.trial is None
    heard = play(strategy, state, here, THREE, round=3)
    assert heard.trial is not None and ("c",) in heard.trial.groups
    for number in (3, 4):
        state = play(strategy, state, here, without, round=number)
    assert state.trial is not None and ("c",) not in state.trial.groups


def test_autos_alpha_gives_the_winners_groups_on_what_is_compared_by_then() -> None:
    """Round 1's updates are noise beside what they have in common; five rounds' sum is not."""
    rng = np.random.default_rng(0)
    names = tuple("abcdefghi")
    kinds = [rng.normal(size=400) for _ in range(3)]
    drift = {n: 0.3 * kinds[i % 3] for i, n in enumerate(names)}
    hidden = tuple(tuple(sorted(names[i] for i in range(9) if i % 3 == k)) for k in range(3))

    def vectors(rounds: int) -> np.ndarray:
        noise = rng.normal(size=(9, 400)) * np.sqrt(rounds)
        return np.array([rounds * drift[n] for n in names]) + noise

    def landscape(x: np.ndarray) -> Landscape:
        def search(objective: Any) -> list[list[int]]:
            return optimal(objective).groups

        return Landscape(names, x @ x.T, np.full(9, 100.0), {}, search)

    first, later = landscape(vectors(1)), landscape(vectors(30))
    early = [c for c in first.path() if c.groups == hidden]
    winner = early[0] if early else Candidate(hidden, 25.0, 1.0)
    alpha = alpha_of(winner, later)
    found = optimal(HCCTUtility.from_gram(later.gram, later.sizes, alpha=alpha)).groups
    assert sorted(tuple(names[i] for i in group) for group in found) == sorted(hidden)
    missing = Candidate((*hidden[:2], hidden[2][:2], hidden[2][2:]), 25.0, 1.0)
    assert alpha_of(missing, later) == pytest.approx(alpha), "the nearest partition's"


def pairs_are_better(*, by: float) -> dict[str, dict[Group, float]]:
    """Held-out errors of a and b, c and d: apart and together 0.5, in pairs less."""
    apart = {n: {(n,): 0.5, ("a", "b", "c", "d"): 0.5} for n in "abcd"}
    return {n: apart[n] | {pair: 0.5 - by for pair in PAIRS if n in pair} for n in "abcd"}


def test_auto_opens_no_trial_that_the_run_cannot_finish(caplog: pytest.LogCaptureFixture) -> None:
    strategy, here = auto(), silos("a", "b", "c")
    state = rounds(strategy, silos("a"), THREE, THREE, THREE, THREE)
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        state = play(strategy, state, here, THREE, round=5, probes=THREE)
    assert state.trial is None and state.planned == (("a",), ("b",), ("c",))
    assert "alpha = auto needs 1 more rounds than remain" in caplog.text
    in_time = rounds(strategy, silos("a"), THREE, THREE)
    assert play(strategy, in_time, here, THREE, round=3, probes=THREE).trial is not None


def test_autos_alpha_is_that_of_all_who_were_tried_whoever_is_here_at_the_end() -> None:
    strategy, here = auto(), silos("a", "b", "c", "d")
    answer = held_out(pairs_are_better(by=0.4))
    state = tried(strategy, rounds(strategy, here, FOUR, FOUR), here, answer, first=3, last=4)
    one_of_each = [silo for silo in here if silo.name in "ac"]
    state = tried(strategy, state, one_of_each, answer, first=5, last=5)
    assert state.planned == PAIRS and state.alpha
    for number in (6, 7):
        state = play(strategy, state, here, FOUR, round=number)
        assert state.planned == PAIRS


def test_auto_leaves_out_who_states_its_own_alpha_until_the_trial_is_over() -> None:
    strategy, here = auto(), silos("a", "b", "c", "d", "e", alpha={"e": 5000.0})
    away = [0, 0, 1.0, 0]
    five = {**FOUR, "e": away}
    state = rounds(strategy, here, five, five)
    assert state.trial is not None
    assert {n for c in state.trial.candidates for g in c.groups for n in g} == set("abcd")
    answer = held_out(pairs_are_better(by=0.4))

    def with_e(strategy: ByHand, state: HCCTState, order: Order) -> Update | None:
        return reply(order, away) if order.silo.name == "e" else answer(strategy, state, order)

    state = tried(strategy, state, here, with_e, first=3, last=5)
    state = play(strategy, state, here, five, round=6)
    assert float(state.members.models["e"]["w"][2]) == 6, "it never began again"
    assert ("e",) not in state.planned, "its hunger goes before the α that was found"


def test_auto_tries_nothing_where_everybody_or_all_but_one_state_an_alpha() -> None:
    for own in ({"a": 20.0, "b": 20.0, "c": 20.0, "d": 20.0}, {"a": 20.0, "b": 20.0, "c": 20.0}):
        state = rounds(auto(), silos("a", "b", "c", "d", alpha=own), FOUR, FOUR)
        assert state.trial is None and state.planned == PAIRS


def test_groups_by_stated_alphas_are_not_broken_up_for_who_states_none() -> None:
    own = {"a": 20.0, "b": 20.0}
    strategy, here = auto(), silos("a", "b", "c", "d", alpha=own)
    three = [silo for silo in here if silo.name != "d"]
    state = rounds(strategy, three, THREE, THREE, THREE)
    assert state.planned == (("a", "b"), ("c",))
    for number in (4, 5):
        state = play(strategy, state, here, FOUR, round=number, probes=FOUR)
        assert state.trial is None and state.planned[0] == ("a", "b")
    assert state.planned == PAIRS


def test_a_trial_whose_silos_left_ends_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, here = auto(), silos("a", "b", "c", "d", alpha={"c": 50.0, "d": 50.0})
    state = rounds(strategy, here, FOUR, FOUR)
    assert state.trial is not None

    def answer(strategy: ByHand, state: HCCTState, order: Order) -> Update:
        return reply(order, FOUR[order.silo.name])

    state = tried(strategy, state, here, answer, first=3, last=3)
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        state = tried(strategy, state, here[2:], answer, first=4, last=5)
    assert state.trial is None and "a, b left, and no silo could compare" in caplog.text
    for number in (6, 7):
        state = play(strategy, state, here[2:], FOUR, round=number)
    assert state.planned == (("c", "d"),)


@pytest.mark.parametrize(("rounds_given", "more"), [(3, 3), (4, 2), (5, 1)])
def test_auto_says_how_many_rounds_are_missing(
    rounds_given: int, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FederationError, match=rf"rounds must be at least 6\. Got {rounds_given}\."):
        HCCT(alpha="auto", train_config={ROUNDS: rounds_given})
    strategy = hcct(alpha="auto")
    strategy.config = {ROUNDS: rounds_given}  # a run whose length is stated later, to its start
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        rounds(strategy, silos("a", "b", "c"), *[THREE] * rounds_given)
    assert caplog.text.count("every silo stays alone") == 1
    assert f"needs {more} more rounds than remain" in caplog.text


def test_a_trial_counts_who_is_here_in_the_group_size_that_silos_are_told() -> None:
    here = [replace(s, min_group_size=3) if s.name == "a" else s for s in silos("a", "b", "c")]
    strategy = auto()
    state = rounds(strategy, here, THREE, THREE)
    _, orders = strategy.orders(state, here, round=3)
    assert {o.config[GROUP_SIZE] for o in orders if o.purpose} == {3}
    _, orders = strategy.orders(state, here[:2], round=3)
    sizes = {(o.silo.name, bool(o.purpose)): o.config[GROUP_SIZE] for o in orders}
    assert sizes == {("a", False): 1, ("b", False): 1, ("b", True): 1}


def test_who_comes_during_a_trial_is_placed_from_the_mean_of_all() -> None:
    strategy, here = auto(), silos("a", "b", "c", "d")
    answer = held_out(pairs_are_better(by=0.4))

    def with_e(strategy: ByHand, state: HCCTState, order: Order) -> Update | None:
        return (
            reply(order, [0, 0, 1, 0]) if order.silo.name == "e" else answer(strategy, state, order)
        )

    state = tried(strategy, rounds(strategy, here, FOUR, FOUR), here, answer, first=3, last=3)
    five = silos("a", "b", "c", "d", "e")
    state = tried(strategy, state, five, with_e, first=4, last=5)
    assert state.trial is None and state.newcomers == {"e"}
    mean = weighted_mean([state.members.models[n] for n in "abcd"], [100.0] * 4)
    _, orders = strategy.orders(state, five, round=6)
    (start,) = [o.model for o in orders if o.silo.name == "e" and not o.purpose]
    assert_equal_models(start, mean)


def test_auto_tries_equal_silos_together_and_everybody_alone() -> None:
    strategy, here = auto(), silos("a", "b")
    state = rounds(strategy, here, {"a": EAST, "b": EAST}, {"a": EAST, "b": EAST})
    assert state.trial is not None
    assert [c.groups for c in state.trial.candidates] == [(("a",), ("b",)), (("a", "b"),)]
    equal = {n: {(n,): 0.3, ("a", "b"): 0.3} for n in "ab"}
    state = tried(strategy, state, here, held_out(equal), first=3, last=5)
    assert state.planned == (("a", "b"),) and state.alpha, "of equals, together"
    three = silos("a", "b", "c")
    pair = {"a": EAST, "b": EAST, "c": NORTH}
    state = rounds(strategy, three, pair, pair)
    _, orders = strategy.orders(state, three, round=3)
    assert {o.silo.name for o in orders if not o.purpose} == {"a", "b", "c"}


# ---------------------------------------------------------------- absence, and other terms


@pytest.mark.parametrize("keys", [{"settle_after": 2}, {"regroup_every": 5}])
def test_who_is_away_keeps_its_place_in_groups_that_stand(keys: dict[str, int]) -> None:
    strategy, here = hcct(alpha=20, **keys), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR, FOUR)
    assert state.planned == PAIRS
    three = [s for s in here if s.name != "c"]
    state = play(strategy, state, three, FOUR, round=4)
    state = play(strategy, state, here, FOUR, round=5)
    assert state.members.groups == PAIRS == state.planned


@pytest.mark.parametrize("keys", [{"settle_after": 2}, {"regroup_every": 5}])
def test_who_comes_back_to_groups_that_stand_starts_from_its_groups_model(
    keys: dict[str, int],
) -> None:
    strategy, here = hcct(alpha=20, **keys), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR, FOUR, FOUR)
    three = [s for s in here if s.name != "c"]
    state = play(strategy, state, three, FOUR, round=4)
    group = state.members.models["d"]
    back, orders = strategy.orders(state, here, round=5)
    starts = {order.silo.name: order.model for order in orders}
    assert starts["c"] is starts["d"] is strategy.next_models(back)["c"]
    assert_equal_models(starts["c"], group)
    state = play(strategy, state, [], FOUR, round=5)  # nobody is here, then all come back
    _, orders = strategy.orders(state, here, round=6)
    starts = {order.silo.name: order.model for order in orders}
    assert starts["a"] is starts["b"] and starts["c"] is starts["d"]


def test_hcct_e_waits_for_a_second_answer_before_it_chooses_the_layer() -> None:
    """Of a silo that does not answer then, the earlier update is compared in that layer."""
    strategy, here = hcct(alpha=20, layers="auto"), silos("a", "b", "c")
    state = rounds(strategy, here, {"a": EAST, "b": None, "c": None})
    assert not state.layer
    state = play(strategy, state, here, {"a": None, "b": NORTH, "c": NEAR_EAST}, round=2)
    assert state.layer and state.planned == (("a", "c"), ("b",))


def test_who_was_away_when_the_groups_settled_is_placed_when_it_is_back() -> None:
    strategy, here = hcct(alpha=20, settle_after=2), silos("a", "b", "c", "d")
    three = [s for s in here if s.name != "c"]
    state = play(strategy, strategy.first(INITIAL), here, FOUR, round=1)
    for number in (2, 3, 4):
        state = play(strategy, state, three, FOUR, round=number)
    assert ("d",) in state.planned
    state = play(strategy, state, here, FOUR, round=5)
    assert state.planned == PAIRS


def test_groups_settle_although_somebody_accepts_no_group_so_small() -> None:
    here = [replace(s, min_group_size=3) if s.name == "d" else s for s in silos(*"abcd")]
    state = rounds(hcct(alpha=20, settle_after=2), here, FOUR, FOUR, FOUR, FOUR)
    assert state.planned == (("a", "b"), ("c",), ("d",)) and state.unchanged >= 2


def test_a_silo_that_returns_with_other_terms_has_them_kept() -> None:
    strategy, here = hcct(alpha=20), silos("a", "b", "c", "d")
    state = rounds(strategy, here, FOUR)
    assert state.planned == PAIRS
    own = {n: state.members.models[n] for n in "ab"}
    back = [replace(s, min_group_size=5, alpha=0.0) if s.name == "b" else s for s in here]
    _, orders = strategy.orders(state, back, round=2)
    for order in orders:
        if order.silo.name in own:
            assert_equal_models(order.model, own[order.silo.name])
    state = play(strategy, state, back, FOUR, round=2)
    assert state.planned == (("a",), ("b",), ("c", "d"))
    assert state.alphas == {"b": 0.0} and state.members.minimums == {"b": 5}
    state = play(strategy, state, here, FOUR, round=3)
    assert state.planned == PAIRS and not state.alphas


def test_a_newcomers_catch_up_counts_steps_where_the_run_does() -> None:
    strategy = hcct(train_config={LOCAL_EPOCHS: 5, LOCAL_STEPS: 20})
    state = rounds(strategy, silos("a", "b"), *[FOUR] * 2)
    late = silos("a", "b", "c")
    _, orders = strategy.orders(state, late, round=3)
    (catch_up,) = [order for order in orders if order.purpose == CATCH_UP]
    assert catch_up.config[LOCAL_STEPS] == 60


@pytest.mark.parametrize(
    ("config", "most", "asked"),
    [
        ({LOCAL_EPOCHS: 2}, 0, {LOCAL_EPOCHS: 8}),
        ({LOCAL_EPOCHS: 2}, 7, {LOCAL_EPOCHS: 6}),
        ({LOCAL_EPOCHS: 2}, 2, {LOCAL_EPOCHS: 2}),
        ({LOCAL_EPOCHS: 2}, 100, {LOCAL_EPOCHS: 8}),
        ({}, 3, {LOCAL_EPOCHS: 3}),
        # 100 samples in batches of 16: an epoch has 7 steps, so 3 are 21.
        ({LOCAL_STEPS: 6, BATCH_SIZE: 16}, 3, {LOCAL_EPOCHS: 3, LOCAL_STEPS: 18}),
        ({LOCAL_STEPS: 6, BATCH_SIZE: 16}, 1, {LOCAL_EPOCHS: 1, LOCAL_STEPS: 6}),
    ],
)
def test_a_newcomers_catch_up_is_no_longer_than_the_silo_allows(
    config: dict[str, Any], most: int, asked: dict[str, Any]
) -> None:
    strategy = hcct(train_config=config)
    state = rounds(strategy, silos("a", "b"), *[FOUR] * 3)
    late = Silo("e", 9, num_examples=100, described=True, max_local_epochs=most)
    _, orders = strategy.orders(state, [*silos("a", "b"), late], round=4)
    (catch_up,) = [order for order in orders if order.purpose == CATCH_UP]
    assert catch_up.config == asked


def test_who_comes_back_is_not_shown_a_model_of_fewer_silos_than_these_accept() -> None:
    """a accepts three, b two, and both trained alone while c was away; d accepts anything."""
    a, b, c, d = ({"w": np.full(2, value, np.float32)} for value in (1.0, 2.0, 4.0, 8.0))
    own = dict(zip("abcd", (a, b, c, d), strict=True))

    def starts(group: Group, here: str) -> dict[str, Any]:
        before = Members(
            {"w": np.zeros(2, np.float32)},
            models=own,
            sizes=dict.fromkeys("abcd", 1.0),
            groups=tuple((name,) for name in here),
            minimums={"a": 3, "b": 2},
        )
        return own | common_starts(own, [group], before=before)

    alone = starts(("b", "c"), here="b")
    assert alone["b"] is b and alone["c"] is c, "b's model is nobody's mean"
    two = starts(("a", "b", "c"), here="ab")
    assert two["a"] is a and two["b"] is b and two["c"] is c, "without a, b's is alone as well"
    back = starts(("a", "d", "c"), here="ad")
    assert all(model is d for name, model in back.items() if name != "b"), "d's can be shown"
    three = starts(("a", "b", "d", "c"), here="abd")
    np.testing.assert_allclose(three["c"]["w"], (1 + 2 + 8) / 3)


# ---------------------------------------------------------------- silos with noise of their own

LARGE: Model = {"w": np.zeros(60_000, np.float32), "b": np.zeros(20_000, np.float32)}
NOISE = 4.0
"""Squared norm of the noise in an update of length 1."""


def noisy_rounds(count: int, *, stated: bool, **options: Any) -> tuple[ByHand, HCCTState]:
    """Two kinds, c and d of the second; every update is a direction, and new noise."""
    draw = np.random.default_rng(0)
    strategy, here = hcct(alpha=20.0, **options), silos("a", "b", "c", "d")
    state = strategy.first(LARGE)
    directions = {name: np.zeros(80_000) for name in "abcd"}
    for name, place in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        directions[name][place] = 1.0
    for number in range(1, count + 1):
        state, orders = strategy.orders(state, here, round=number)
        updates = []
        for order in orders:
            step = directions[order.silo.name] + draw.normal(size=80_000) * np.sqrt(NOISE / 80_000)
            model = {
                "w": (order.model["w"] + step[:60_000]).astype(np.float32),
                "b": (order.model["b"] + step[60_000:]).astype(np.float32),
            }
            metrics = {UPDATE_NOISE: NOISE} if stated else {}
            updates.append(Update(order.silo, order.model, model, 100, metrics))
        state = strategy.absorb(state, updates, round=number)
    return strategy, state


def test_two_noisy_kinds_are_grouped_where_silos_say_how_much_noise_there_is() -> None:
    _, plain = noisy_rounds(1, stated=False)
    assert plain.planned == (("a",), ("b",), ("c",), ("d",)), "cosines shrink to a fifth"
    assert not plain.noise
    _, state = noisy_rounds(1, stated=True)
    assert state.planned == PAIRS
    assert state.similarity[0][1] > 0.9 and abs(state.similarity[0][2]) < 0.2
    assert state.norms[0] == pytest.approx(1, rel=0.1)


def test_noise_adds_up_in_what_is_remembered() -> None:
    _, whole = noisy_rounds(3, stated=True)
    assert whole.noise == dict.fromkeys("abcd", 3 * NOISE) and whole.planned == PAIRS
    _, fading = noisy_rounds(3, stated=True, memory=0.5)
    assert fading.noise["a"] == pytest.approx(NOISE * (1 + 0.25 + 0.0625))
    _, papers = noisy_rounds(3, stated=True, memory=0.0)
    assert papers.noise["a"] == NOISE


def test_a_layer_has_its_share_of_the_noise() -> None:
    _, state = noisy_rounds(1, stated=True, layers="w")
    assert state.noise["a"] == pytest.approx(NOISE * 0.75)


@pytest.mark.parametrize("stated", [-1.0, 0.0, math.nan, math.inf])
def test_what_is_no_amount_of_noise_is_none(stated: float) -> None:
    (silo,) = silos("a")
    update = Update(silo, INITIAL, INITIAL, 100, {UPDATE_NOISE: stated})
    assert update.noise_in(INITIAL) == 0


def test_a_sketch_has_the_noise_of_what_it_is_of() -> None:
    (silo,) = silos("a")
    sketch = np.zeros(3, np.float32)
    model = {"one.w": np.zeros(6, np.float32), "two.w": np.zeros(2, np.float32)}
    stated = Statement("0" * 64, "0" * 32, 100, 1.0, 1.0)
    unseen: Any = Masked("a", 1, "", 100.0, model, {"sketch": sketch}, 1.0, stated)
    update = Update(silo, model, unseen, 100, {UPDATE_NOISE: 2.0})
    assert update.noise_in({"sketch": sketch}) == 2.0
    assert update.noise_in({"one.sketch": sketch}) == 1.5
    assert update.noise_in({"one.sketch": sketch + 2}) == 1.5 + 6, "and half of its own square"


# ---------------------------------------------------------------- K groups


@pytest.mark.parametrize("solver", ["best", "agglomerative"])
def test_as_many_groups_as_are_fixed(solver: Any) -> None:
    here = silos("a", "b", "c", "d")
    for count, expected in ((1, (tuple("abcd"),)), (2, PAIRS), (9, tuple((n,) for n in "abcd"))):
        for alpha in (0.0, 1e6):
            strategy = hcct(alpha=alpha, fixed_groups=count, solver=solver)
            assert rounds(strategy, here, FOUR, FOUR).planned == expected


def test_auto_finds_the_number_of_groups_itself() -> None:
    with pytest.raises(FederationError, match="fixed_groups must be 0"):
        HCCT(alpha="auto", fixed_groups=2)
