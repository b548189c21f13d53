"""What a silo makes of its group's trees: own leaf values, and some trees from its rows alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from coterie.client.work.measure import evaluate
from coterie.client.work.session import Session, session_of
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.features.sums.trees.ensemble import NONE, Ensemble
from coterie.features.sums.trees.growth import Settings
from coterie.features.sums.trees.histograms import Rows, of_numbers
from coterie.features.sums.trees.leaves import train_leaves
from coterie.features.sums.trees.own import OwnOfGroup
from coterie.features.sums.trees.together import grown
from coterie.tasks.trees import Trees, named
from tests.kit import context
from tests.unit.client.models import Drawn

ROWS, TREES, OWN = 400, 40, 4
"""Rows of a silo to train on and to test; trees of the model, and of these most own ones."""


class Bends(Drawn):
    """Real numbers that follow one column; at some silos, by ``own``, also another one."""

    name = "bends"
    rows, width = (ROWS, ROWS), 4

    def model(self) -> Trees:
        return named(f"trees-{TREES}x3", shape=(4,), problem=self.problem)

    def targets(self, x: Any, draw: np.random.Generator, options: Any) -> Any:
        y = np.sin(2 * x[:, 0]) + float(options["own"]) * (x[:, 3] > 0)
        return y + 0.3 * draw.normal(size=len(x))


def silo(own: float, number: int = 1) -> Session:
    node = {"name": "s", "device": "cpu", "threads": 1, "sums": "trees"}
    node |= {"task": f"{__name__}:Bends", "data.silo": number, "data.own": own}
    return session_of(context(node))


def of_group(most: int) -> dict[str, Any]:
    """Return so many trees of another silo's rows, as the model's arrays."""
    rows = Bends().load({"silo": 0, "own": 0.0})
    group = Rows(np.asarray(rows.x_train), np.asarray(rows.y_train, float), of_numbers)
    empty = Ensemble.empty(TREES, 1, 3, 4)
    trees = grown([group], empty, Settings(0.2), bins=32, most=most).arrays()
    return {name: trees[name] for name in travelling(Bends().model())}


def loss(session: Session) -> float:
    return evaluate(session.task, session.model, session.data.test).loss


def made(session: Session, group: dict[str, Any], penalty: float = 1.0) -> Ensemble:
    load_weights(session.model, group)
    OwnOfGroup(penalty).put(session)
    return Ensemble.of(read_weights(session.model))


@pytest.mark.parametrize("most", [20, TREES])
def test_own_trees_follow_what_is_only_at_the_silo(most: int) -> None:
    """They come behind the group's, of which the last make room, if they must."""
    session, group = silo(1.5), of_group(most)
    load_weights(session.model, group)
    assert isinstance(session.model, Trees)
    train_leaves(session.task, session.model, session.data.train, 1.0)
    with_leaves = loss(session)
    found = made(session, group)
    assert loss(session) < 0.95 * with_leaves
    first = min(most, TREES - OWN)
    assert (found.feature[:first] == group["feature"][:first]).all()
    own = found.feature[first : first + OWN, 0]
    assert (own == 3).any(axis=1).all(), "every own tree splits by the column that the group lacks"
    assert (found.feature[first + OWN :] == NONE).all() and not found.leaf[first + OWN :].any()
    assert made(session, group).equals(found)
    assert not made(session, of_group(10)).equals(found), "of what it receives now"


def test_a_silo_like_its_group_and_a_large_penalty_leave_the_groups_trees() -> None:
    group = of_group(TREES)
    session = silo(0.0)
    load_weights(session.model, group)
    as_it_is = loss(session)
    found = made(session, group)
    assert (found.feature == group["feature"]).all(), "held-out rows say that no own tree helps"
    freer = made(session, group, penalty=0.1)
    assert (freer.leaf != found.leaf).any(), "what it made last is not used for another penalty"
    made(session, group, penalty=30.0)
    assert loss(session) < 1.03 * as_it_is
    session = silo(1.5)
    x = session.data.test.at(torch.arange(ROWS))[0]
    load_weights(session.model, group)
    before = session.model(x)
    made(session, group, penalty=1e7)
    assert torch.allclose(session.model(x), before, atol=2e-3)


def test_own_trees_replace_none_of_the_groups_that_help_more() -> None:
    """The group's last trees have learned all; those before them split by a column of noise."""
    group = of_group(OWN)
    for array in group.values():
        if array.ndim > 1:
            array[-OWN:], array[:-OWN] = array[:OWN], 0
    group["feature"][:-OWN] = 1
    session = silo(0.0)
    load_weights(session.model, group)
    as_it_is = loss(session)
    assert (made(session, group).feature == group["feature"]).all()
    assert loss(session) < 1.05 * as_it_is


@pytest.mark.parametrize("rows", [0, 1, 2, 30])
def test_a_silo_with_few_rows_has_no_own_trees(rows: int) -> None:
    session, group = silo(1.5), of_group(TREES)
    few = session.data.train.take(torch.arange(rows))
    session = replace(session, data=replace(session.data, train=few))
    found = made(session, group)
    assert (found.feature == group["feature"]).all()
    assert bool((found.leaf != group["leaf"]).any()) == bool(rows)
