"""``min_group_size``: updates are averaged in groups as large as that, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from coterie.engine.inprocess import InProcessGrid
from coterie.features.smallest_groups.coordinator import SmallestGroups
from coterie.strategies import (
    APFL,
    CFL,
    FLHC,
    FLSC,
    IFCA,
    FedAvg,
    FedEnsemble,
    FedFA,
    FedGroup,
    FedNova,
    FeSEM,
    KMeans,
)
from coterie.strategies.rounds.algorithm import Round, Update
from coterie.strategies.rounds.members import Members, Plain, mean_of_all
from coterie.strategies.rounds.minimum_sizes import accepted, form, withdraw
from coterie.strategies.rounds.replies import Checked
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Came, Room, Scene
from coterie.wire import Model
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
)
from tests.kit import digits, run
from tests.unit.strategies.by_hand import ByHand
from tests.unit.strategies.test_engine import Script

MINIMUMS = st.lists(st.integers(1, 7), min_size=1, max_size=7)


def model(value: float) -> Model:
    return {"w": np.full(2, value, np.float32)}


def update(name: str, value: float, minimum: int = 1) -> Update:
    silo = Silo(name, 1, min_group_size=minimum)
    return Update(silo, model(0), model(value), 1.0, {})


@given(MINIMUMS)
def test_what_remains_holds_for_everybody_and_nobody_leaves_without_need(
    minimums: list[int],
) -> None:
    names = tuple(str(i) for i in range(len(minimums)))
    stated = dict(zip(names, minimums, strict=True))
    groups = form([names], stated)
    assert sorted(name for group in groups for name in group) == list(names)
    together = max(groups, key=len)
    largest = max(  # of all sizes, the largest for which enough silos accept it
        (k for k in range(1, len(names) + 1) if sum(m <= k for m in minimums) >= k), default=0
    )
    if largest > 1:
        assert len(together) == sum(m <= len(together) for m in minimums)
        assert all(stated[name] <= len(together) for name in together)
        assert len(together) >= largest
    assert all(len(group) == 1 for group in groups if group != together)


def test_without_minimums_nothing_changes() -> None:
    groups = (("a", "b"), ("c",))
    assert form(groups, {}) == groups


def test_a_newcomer_is_not_given_a_mean_that_is_too_small() -> None:
    members = Members(
        model(0),
        {"a": model(1), "b": model(3)},
        sizes={"a": 1.0, "b": 1.0},
        groups=(("a",), ("b",)),
        minimums={"a": 3},
    )
    np.testing.assert_array_equal(mean_of_all(members)["w"], model(3)["w"])


def test_those_accepted_keep_their_order() -> None:
    updates = [update("a", 1), update("b", 2, 9), update("c", 3, 2)]
    assert [u.silo.name for u in accepted(updates)] == ["a", "c"]


def play(minimums: Mapping[str, int], folder: Path, **keys: Any) -> RunResult:
    """Play a run of silos with these conditions."""
    nodes = [
        {**node, "min-group-size": minimum}
        for node, minimum in zip(digits(minimums), minimums.values(), strict=True)
    ]
    return run(folder, nodes, local_epochs=1, **keys)


def test_hcct_leaves_a_silo_alone_whose_condition_is_not_met(tmp_path: Path) -> None:
    keys = {"strategy": "hcct", "alpha": 1000.0}
    result = play({"a": 4, "b": 1, "c": 1}, tmp_path / "run", **keys)
    assert sorted(result.groups[3]) == [["a"], ["b", "c"]]
    assert all(report.left_out == {} for report in result.rounds)
    alone = play({"a": 4}, tmp_path / "alone", strategy="independent")
    for name, array in arrays_of(alone.models["a"]).items():
        np.testing.assert_array_equal(arrays_of(result.models["a"])[name], array)


@pytest.mark.parametrize("strategy", ["fedavg", "fedgroup"])
def test_other_strategies_leave_it_out_and_its_update_changes_nothing(
    strategy: str, tmp_path: Path
) -> None:
    """The silo itself refuses; the models of the others are those of a run without it."""
    keys = {"strategy": strategy, **({"num-groups": 1} if strategy == "fedgroup" else {})}
    result = play({"a": 1, "b": 1, "c": 4}, tmp_path / "run", **keys)
    reason = result.rounds[-2].left_out["c"]
    assert "needs groups of at least 4 silos; its group in this round has 3" in reason
    others = play({"a": 1, "b": 1}, tmp_path / "others", **keys)
    for name, array in arrays_of(others.models["a"]).items():
        np.testing.assert_array_equal(arrays_of(result.models["a"])[name], array)


ALONE_IN: list[tuple[Callable[..., Any], list[int]]] = [
    (partial(KMeans, num_groups=2), [1, 2, 3]),
    (partial(FLHC, rounds_before=1, max_distance=0.4), [2, 3]),
    (partial(FeSEM, num_groups=2), [1, 2, 3]),
    (partial(CFL, eps_mean=0.9, eps_largest=0.1, first_split=2), [2, 3]),
    # Here its model stays as it was, and c finds the others' better from the next round on.
    (partial(IFCA, num_groups=2, seed=1), [1]),
    (partial(FLSC, num_groups=2, soft_groups=1, seed=1), [1]),
]


@pytest.mark.parametrize(("make", "rounds"), ALONE_IN)
def test_the_record_says_that_a_silo_alone_in_its_group_trains_for_nothing(
    make: Callable[..., Any], rounds: list[int]
) -> None:
    """c resembles nobody. Its group's model could go to a newcomer, so c's update is not in it."""
    rng = np.random.default_rng(0)
    initial = {k: rng.normal(size=a.shape).astype(np.float32) for k, a in plain_model().items()}
    arrays = ArrayRecord({name: Array(array) for name, array in initial.items()})
    grid = InProcessGrid(plain_app(), plain_nodes(0, 0, 1))
    roster = Script("abc", "abc", "abc", minimums={"c": 3})
    result = make(roster=roster).start(grid, arrays, num_rounds=3, timeout=1)
    for report in result.rounds[:3]:
        alone = report.round in rounds
        assert (("c",) in report.groups) == alone
        assert list(report.left_out) == (["c"] if alone else [])
        assert set(report.silos) == {"a", "b", "c"}, "it has trained, and answered for its error"
    assert result.rounds[rounds[0] - 1].left_out["c"] == (
        "it accepts groups of at least 3 silos, but only 1 of its group answered."
    )
    if make.func is KMeans:
        assert_equal_models(arrays_of(result.models["c"]), initial)


GROUPED_BY_ONE = (partial(FedGroup, num_groups=1), FedAvg, FedFA, FedNova, APFL, FedEnsemble)


@pytest.mark.parametrize("make", [*GROUPED_BY_ONE, partial(FLHC, rounds_before=9)])
def test_a_silo_whose_group_has_left_changes_no_model_that_others_may_get(make: Any) -> None:
    roster = Script("abc", "c", "c", minimums={"c": 3})
    grid = InProcessGrid(plain_app(), plain_nodes(0, 0, 0))
    result = make(roster=roster).start(grid, plain_initial(), num_rounds=3, timeout=1)
    assert [list(report.left_out) for report in result.rounds] == [[], ["c"], ["c"], []]
    assert_equal_models(arrays_of(result.models["c"]), arrays_of(result.models["a"]))


def test_with_flsc_an_update_counts_where_enough_chose_one_of_its_models() -> None:
    """a, b chose models 0 and 1, c 1 and 2: of the last model c is the only one."""
    strategy = ByHand(FLSC(num_groups=3, soft_groups=2))
    silos = {n: Silo(n, 1, min_group_size=m) for n, m in {"a": 1, "b": 4, "c": 3}.items()}
    state = strategy.admit(strategy.first(model(0)), list(silos.values()), round=1)
    state = replace(state, chosen={"a": (0, 1), "b": (0, 1), "c": (1, 2)})
    updates = [Update(silo, model(0), model(1), 1.0, {}) for silo in silos.values()]
    assert list(withdraw(strategy.sharing(state), updates)) == ["b", "c"]
    silos["b"] = replace(silos["b"], min_group_size=3)
    updates = [Update(silo, model(0), model(1), 1.0, {}) for silo in silos.values()]
    assert not withdraw(strategy.sharing(state), updates)


@pytest.mark.parametrize("strategy", ["fedavg", "hcct"])
def test_a_condition_that_is_met_changes_nothing(strategy: str, tmp_path: Path) -> None:
    keys = {"strategy": strategy, **({"alpha": 1000.0} if strategy == "hcct" else {})}
    asked = play({"a": 3, "b": 2, "c": 1}, tmp_path / "asked", **keys)
    plain = play({"a": 1, "b": 1, "c": 1}, tmp_path / "plain", **keys)
    assert asked.groups == plain.groups and asked.groups[3] == [["a", "b", "c"]]
    for name, record in plain.models.items():
        for array, got in zip(
            arrays_of(record).values(), arrays_of(asked.models[name]).values(), strict=True
        ):
            np.testing.assert_array_equal(got, array)


def test_a_trial_of_alpha_keeps_to_the_condition(tmp_path: Path) -> None:
    result = play({"a": 3, "b": 1}, tmp_path, strategy="hcct", alpha="auto", rounds=9)
    assert all(groups == [["a"], ["b"]] for groups in result.groups.values())


def test_the_algorithm_is_given_no_update_of_a_silo_whose_group_is_too_small() -> None:
    silos = [Silo("a", 1, 10, min_group_size=3), Silo("b", 2, 10)]
    updates = [Update(silo, {}, {}, 10, {}) for silo in silos]
    algorithm = FedAvg().algorithm
    state = Plain(Members({}).grouped([("a", "b", "c")]))
    now = Round(1, tuple(silos))
    scene = Scene(now, Room(1, now.silos, algorithm, state), algorithm, state, training=True)
    came = Came((), Checked(updates, []), state, updates, {}, {})
    _, came = SmallestGroups().incoming({}, scene, came)
    assert [update.silo.name for update in came.updates] == ["b"]
    assert came.left_out == {
        "a": "it accepts groups of at least 3 silos, but only 2 of its group answered."
    }
