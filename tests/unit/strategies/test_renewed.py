"""A silo that comes back with other data is measured again, or the log says that it is not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import build_strategy
from coterie.strategies import FLHC, HCCT, MAXFL, FedAvg, FedCollab, FedGroup, KMeans
from coterie.strategies.fedcollab.algorithm import FedCollabState
from coterie.strategies.partition.distance import Distance
from coterie.strategies.registry import STRATEGIES
from coterie.strategies.rounds.algorithm import Algorithm, Update
from coterie.strategies.rounds.members import renewed, with_data
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from tests.kit import digits, first_arrays
from tests.unit.strategies.by_hand import ByHand
from tests.unit.strategies.test_hcct import FOUR, INITIAL, NORTH, PAIRS, play


def here(sizes: Mapping[str, int], **marks: str) -> list[Silo]:
    return [
        Silo(n, 1 + i, sizes[n], described=True, mark=marks.get(n, ""))
        for i, n in enumerate(sorted(sizes))
    ]


SAME = dict.fromkeys("abcd", 100)


def hcct_rounds(back: Sequence[Silo], **options: Any) -> Any:
    """Three rounds of two pairs; then a is back and moves as c and d do."""
    strategy = ByHand(HCCT(alpha=20, **options))
    state = strategy.first(INITIAL)
    for number in (1, 2, 3):
        state = play(strategy, state, here(SAME), FOUR, round=number)
    assert state.planned == PAIRS
    moves = {**FOUR, "a": NORTH}
    return play(strategy, state, back, moves, round=4, probes={"a": [4 * x for x in NORTH]})


@pytest.mark.parametrize("keys", [{}, {"settle_after": 1}, {"regroup_every": 9}])
@pytest.mark.parametrize("back", [here({**SAME, "a": 150}), here(SAME, a="other")])
def test_hcct_places_a_silo_with_other_data_like_a_newcomer(
    back: Sequence[Silo], keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "coterie.run"):
        state = hcct_rounds(back, **keys)
    assert state.planned == (("a", "c", "d"), ("b",))
    assert "silo a returned with different training data: nothing known" in caplog.text


def test_a_silo_with_the_same_data_keeps_its_history() -> None:
    assert hcct_rounds(here(SAME)).planned == PAIRS


def test_fedgroup_places_a_silo_with_other_data_by_a_cold_start_again() -> None:
    strategy = ByHand(FedGroup(num_groups=2))
    state = strategy.first(INITIAL)
    state = play(strategy, state, here(SAME), FOUR, round=1)
    assert state.group_of["a"] == state.group_of["b"]
    back = here({**SAME, "a": 150})
    state, orders = strategy.orders(state, back, round=2)
    (order,) = [o for o in orders if o.silo.name == "a"]
    assert order.model is INITIAL
    moved = {k: v + np.float32(0.0) for k, v in order.model.items()}
    moved["w"] = order.model["w"] + np.float32(NORTH)  # type: ignore[operator]
    update = Update(order.silo, order.model, moved, 150.0, {}, order.purpose)
    state = strategy.absorb(state, [update], round=2)
    assert state.group_of["a"] == state.group_of["c"] != state.group_of["b"]


def test_fedcollab_measures_a_silo_with_other_data_with_everybody_again() -> None:
    strategy = ByHand(FedCollab())
    silos = here(SAME)
    state: FedCollabState = strategy.admit(strategy.first(INITIAL), silos, round=1)
    pairs = [(x, y) for i, x in enumerate("abcd") for y in "abcd"[i + 1 :]]
    measured = Distance(0.5, 0.1, 3)
    state = replace(
        state,
        distances=dict.fromkeys(pairs, measured),
        attempts=dict.fromkeys(pairs, 2),
        held_out=dict.fromkeys("abcd", 40),
    )
    same = strategy.admit(state, silos, round=2)
    assert len(same.distances) == 6
    other = strategy.admit(state, here({**SAME, "a": 150}), round=2)
    assert set(other.distances) == {("b", "c"), ("b", "d"), ("c", "d")} == set(other.attempts)
    assert set(other.held_out) == {"b", "c", "d"}
    asked = next(strategy.algorithm.prepare(other, strategy.now(here({**SAME, "a": 150}), 2)))
    assert [order.silo.name for order in asked] == list("abcd")
    planned = replace(same, planned=(("a", "b"), ("c", "d")), minimums={})
    with pytest.raises(StopIteration):  # nothing is asked of those whose data are the same
        next(strategy.algorithm.prepare(planned, strategy.now(silos, 2)))


@pytest.mark.parametrize("make", [lambda: KMeans(num_groups=2), lambda: FLHC(rounds_before=0)])
def test_groups_that_are_formed_once_place_it_again(make: Any) -> None:
    strategy = ByHand(make())
    state = play(strategy, strategy.first(INITIAL), here(SAME), FOUR, round=1)
    assert set(state.group_of) == set("abcd")
    state = strategy.admit(state, here({**SAME, "a": 150}), round=2)
    assert set(state.group_of) == set("bcd")


def test_who_remembers_and_does_not_measure_again_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = ByHand(MAXFL())
    state = play(strategy, strategy.first(INITIAL), here(SAME), FOUR, round=1)
    with caplog.at_level(logging.WARNING, "coterie.run"):
        strategy.admit(state, here({**SAME, "b": 20}), round=2)
    assert (
        "silo b returned with different training data: its own model refers to the previous data"
        in (caplog.text)
    )


def test_every_strategy_that_remembers_a_silo_measures_it_again_or_says_so() -> None:
    """What they keep of a silo beside its model and size; the others keep nothing."""
    asks_every_round = {"flsc", "ifca", "fesem", "fedfa", "fedensemble", "fedgenp", "pfedgraph"}
    for name, row in STRATEGIES.items():
        kind = row.load()
        keeps = kind.remembers.__name__ != "Plain"
        renews = kind.renew is not Algorithm.renew or bool(kind.outdated)
        assert renews or not keeps or name in asks_every_round, name


def test_a_silo_of_coterie_is_known_to_have_other_labels_by_its_mark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many samples as before; one that comes back with the same says nothing."""
    nodes = digits("abc", tmp_path)
    grid = InProcessGrid(app, nodes)

    def come_back(report: RoundReport) -> None:
        if report.round == 2:
            for node in (1, 2):
                grid.disconnect(node)
            grid.connect({**nodes[0], "data.label-shift": 5})
            grid.connect(nodes[1])

    config = RunConfig.read({"strategy": "hcct", "rounds": 4, "local-epochs": 1, "batch-size": 10})
    roster = DescribedRoster("digits", 3)
    strategy = build_strategy(config, run="r", roster=roster, on_round=come_back)
    with caplog.at_level(logging.WARNING, "coterie.run"):
        result = strategy.start(grid, first_arrays(grid, roster), num_rounds=4)
    said = [line for line in caplog.text.splitlines() if "different training data:" in line]
    assert len(said) == 1 and "silo a returned with" in said[0]
    assert "catch-up" in result.rounds[2].phases, "it is placed like a newcomer"


def test_only_a_change_of_what_a_silo_said_itself_counts() -> None:
    strategy = ByHand(FedAvg())
    state = strategy.admit(strategy.first(INITIAL), here(SAME), round=1)
    members = with_data(state.members, here(SAME))
    assert not renewed(members, here(SAME))
    assert renewed(members, here({**SAME, "c": 99})) == {"c"}
    assert not renewed(members, here({"new": 5})), "a newcomer has said nothing before"
    assert not renewed(members, [Silo("a", 1, 7)]), "any other ClientApp says nothing"
