"""What the engine does around any algorithm: a toy that says nothing of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coterie import strategies
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import HCCT, FedAvg, FederationError, FedGenP, GroupStrategy, RunResult
from coterie.strategies.fedgenp.latent import GeneratorPlan
from coterie.strategies.plain.fedavg import Independent
from coterie.strategies.registry import ROWS
from coterie.strategies.rounds.algorithm import Algorithm, Order, Round, Update, orders_from
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.conversation import stated_sizes
from coterie.strategies.rounds.members import Plain
from coterie.strategies.rounds.minimum_sizes import average_groups
from coterie.strategies.rounds.models import holders, same_model, weighted_mean
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.result import mean_model
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model
from tests.conftest import (
    LossyGrid,
    arrays_of,
    assert_equal_models,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import assert_same_models

NODES = plain_nodes(0, 1, 2, samples=[10, 70, 75])
BY_NAME = dict(zip("abc", NODES, strict=True))


class Toy(Algorithm[Plain]):
    """All who are here train as one group, each from its own model."""

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        members = state.members.grouped([now.names])
        return Plain(members), orders_from(members.models, now.silos)

    def absorb(self, state: Plain, updates: Sequence[Update], now: Round) -> Plain:
        return Plain(average_groups(state.members, updates))


class Script:
    """A roster by a script: who is here in each round, with the smallest group that it accepts."""

    def __init__(self, *rounds: str, minimums: Mapping[str, int] | None = None) -> None:
        self.rounds, self.minimums = rounds, minimums or {}

    def present(self, grid: Any, *, number: int) -> list[Silo]:
        return [
            Silo(n, "abc".index(n) + 1, 100, min_group_size=self.minimums.get(n, 1))
            for n in self.rounds[number - 1]
        ]


def play(
    *rounds: str,
    minimums: Mapping[str, int] | None = None,
    lost: Sequence[tuple[int, int]] = (),
    **more: Any,
) -> RunResult:
    grid = LossyGrid(plain_app(), NODES, lost=lost)
    strategy = GroupStrategy(Toy(), roster=Script(*rounds, minimums=minimums))
    return strategy.start(grid, plain_initial(), num_rounds=len(rounds), timeout=0.05, **more)


def trained(models: Mapping[str, Model], names: str) -> Model:
    """The mean after one round of these silos, each from its own model."""
    updates = [plain_trained(models[n], BY_NAME[n]) for n in names]
    return weighted_mean(updates, [BY_NAME[n]["samples"] for n in names])


# ---------------------------------------------------------------- joining, leaving, returning


def test_who_joins_starts_from_w0_and_shares_in_the_groups_model_afterwards() -> None:
    result = play("ab", "abc")
    first = trained(dict.fromkeys("ab", plain_model()), "ab")
    both = trained({"a": first, "b": first, "c": plain_model()}, "abc")
    for name in "abc":
        assert_equal_models(arrays_of(result.models[name]), both)
    assert [r.joined for r in result.rounds] == [("a", "b"), ("c",), ()]


def test_who_leaves_keeps_its_model_and_goes_on_from_it_when_it_is_back() -> None:
    away, back = play("abc", "bc"), play("abc", "bc", "abc")
    first = trained(dict.fromkeys("abc", plain_model()), "abc")
    rest = trained({"b": first, "c": first}, "bc")
    assert_equal_models(arrays_of(away.models["a"]), first)
    assert_equal_models(arrays_of(away.models["b"]), rest)
    assert away.rounds[1].left == ("a",) and "a" not in away.rounds[-1].evaluation
    expected = trained({"a": first, "b": rest, "c": rest}, "abc")
    assert_equal_models(arrays_of(back.models["a"]), expected)
    assert back.rounds[2].joined == ("a",)


def test_a_silo_counts_with_the_samples_that_its_reply_states() -> None:
    result = play("ab", "c")
    assert result.members is not None
    assert result.members.sizes == {"a": 10, "b": 70, "c": 75}, "the roster said 100 of all"


def test_its_own_training_counts_before_those_beside_it() -> None:
    own, beside = (Update(Silo("a", 1), {}, {}, n, {}, p) for n, p in ((40, ""), (7, "trial-3")))
    assert stated_sizes([own, beside]) == {"a": 40}
    assert stated_sizes([beside]) == {"a": 7}


# ---------------------------------------------------------------- the smallest groups


def test_a_silo_whose_group_is_too_small_trains_for_nobody() -> None:
    result = play("ab", "ab", minimums={"a": 3})
    alone = trained(dict.fromkeys("ab", plain_model()), "b")
    assert_equal_models(arrays_of(result.models["b"]), trained({"b": alone}, "b"))
    for report in result.rounds[:2]:
        assert list(report.left_out) == ["a"]
        assert (
            "accepts groups of at least 3 silos, but only 2 of its group answered"
            in report.left_out["a"]
        )


def test_a_lost_answer_may_make_a_group_too_small_for_one_round() -> None:
    result = play("abc", "abc", minimums={"a": 3}, lost=[(3, 1)])
    assert set(result.rounds[0].left_out) == {"a", "c"} and result.rounds[1].left_out == {}
    first = trained(dict.fromkeys("abc", plain_model()), "b")
    expected = trained(dict.fromkeys("abc", first), "abc")
    assert_equal_models(arrays_of(result.models["a"]), expected)


def test_a_minimum_is_that_of_today() -> None:
    """a asks for two more than there are, leaves, and is back with less to ask."""

    class Milder(Script):
        def present(self, grid: Any, *, number: int) -> list[Silo]:
            self.minimums = {"a": 3} if number < 3 else {"a": 2}
            return super().present(grid, number=number)

    strategy = GroupStrategy(Toy(), roster=Milder("ab", "b", "ab"))
    states: list[Checkpoint[Plain]] = []
    result = strategy.start(
        InProcessGrid(plain_app(), NODES), plain_initial(), num_rounds=3, commit=states.append
    )
    assert [list(report.left_out) for report in result.rounds[:3]] == [["a"], [], []]
    assert [dict(c.state.members.minimums) for c in states] == [{"a": 3}, {"a": 3}, {"a": 2}]


# ---------------------------------------------------------------- states, and a mean on demand


def test_what_is_committed_is_where_the_result_stands() -> None:
    states: list[Checkpoint[Plain]] = []
    result = play("ab", "abc", commit=states.append)
    assert [c.round for c in states] == [1, 2]
    assert result.state is states[-1].state and result.members is result.state.members
    assert [silo.name for silo in states[0].silos] == ["a", "b"]


@pytest.mark.parametrize("make", [FedAvg, HCCT, lambda: GroupStrategy(Toy())])
def test_the_mean_of_all_models_is_made_only_when_it_is_asked_for(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def fail(*_: Any) -> Model:
        made.append(1)
        raise AssertionError("nobody asked for the mean")

    monkeypatch.setattr("coterie.strategies.rounds.result.mean_model", fail)
    result = make().start(InProcessGrid(plain_app(), NODES), plain_initial(), num_rounds=3)
    assert len(result.rounds) == 4 and len(result.models) == 3 and not made
    with pytest.raises(AssertionError, match="nobody asked"):
        assert result.arrays is None
    assert made == [1]


# ---------------------------------------------------------------- equal models are one model


def copied(model: Model) -> Model:
    return {name: array.copy() for name, array in model.items()}


def test_models_of_equal_values_are_one_model_whatever_object_holds_them() -> None:
    one, other = plain_model(), plain_trained(plain_model(), NODES[0])
    assert same_model(one, copied(one)) and not same_model(one, other)
    held = holders({"d": copied(other), "c": other, "b": copied(one), "a": one})
    assert [names for _, names in held] == [["a", "b"], ["c", "d"]]
    assert held[0][0] is one
    models, sizes = {"a": one, "b": copied(one), "c": other}, {"a": 1.0, "b": 2.0, "c": 3.0}
    mean = mean_model(models, sizes)
    assert mean is not None
    assert_equal_models(mean, weighted_mean([one, other], [3.0, 3.0]))


def test_silos_with_equal_models_share_a_generator_also_where_each_has_its_own_copy() -> None:
    class Pairs(Independent):
        def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
            state, orders = super().orders(state, now)
            shared = {k: a + np.float32(now.number) for k, a in orders[0].model.items()}
            models = [shared if o.silo.name != "silo-2" else o.model for o in orders]
            return state, [
                Order(o.silo, copied(model)) for o, model in zip(orders, models, strict=True)
            ]

    strategy = FedGenP(
        base=Pairs(), receivers="groups", head="w", plan=GeneratorPlan(steps=2, hidden=4)
    )
    result = strategy.start(InProcessGrid(plain_app(), NODES), plain_initial(), num_rounds=2)
    receivers = result.rounds[1].details["generators"]["receivers"]
    assert sorted(receivers) == ["silo-0+silo-1", "silo-2"]


def test_an_algorithm_that_hands_out_copies_gets_the_same_run() -> None:
    class Copying(Toy):
        def absorb(self, state: Plain, updates: Sequence[Update], now: Round) -> Plain:
            members = super().absorb(state, updates, now).members
            return Plain(members.holding({n: copied(m) for n, m in members.models.items()}))

    results = [
        GroupStrategy(algorithm).start(
            InProcessGrid(plain_app(), NODES), plain_initial(), num_rounds=3
        )
        for algorithm in (Toy(), Copying())
    ]
    one, other = results
    assert one.groups == other.groups
    assert_equal_models(arrays_of(one.arrays), arrays_of(other.arrays))
    assert_same_models(one, other)


# ---------------------------------------------------------------- an algorithm is a value


def test_algorithms_are_frozen_values() -> None:
    assert Toy() == Toy() and HCCT(alpha=5).algorithm == HCCT(alpha=5.0).algorithm
    assert HCCT(alpha=5).algorithm != HCCT(alpha=6).algorithm
    with pytest.raises(ValueError, match="frozen"):
        HCCT().algorithm.alpha = 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_strategy_has_its_algorithms_options_as_arguments_and_the_engines(row: Any) -> None:
    made = getattr(strategies, row.public)
    arguments = inspect.signature(made).parameters
    engine = inspect.signature(GroupStrategy).parameters
    assert set(row.load().model_fields) - set(row.fixed) <= set(arguments)
    assert set(engine) - {"algorithm", "options"} <= set(arguments)
    assert made.__name__ == row.public and made.__doc__ == row.load().__doc__
    assert issubclass(made, GroupStrategy) and made is getattr(strategies, row.public)
    with pytest.raises(FederationError, match=r"unknown key 'alhpa' \(known: "):
        made(alhpa=3)


def test_an_algorithm_that_is_made_already_takes_no_options() -> None:
    with pytest.raises(TypeError, match="unknown arguments: alpha"):
        GroupStrategy(Toy(), alpha=3)


def test_groups_are_the_last_rounds() -> None:
    groups: list[tuple[Group, ...]] = []
    play("ab", "abc", commit=lambda c: groups.append(c.state.members.groups))
    assert groups == [(("a", "b"),), (("a", "b", "c"),)]
