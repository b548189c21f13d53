"""Flower's examples of trees and of scikit-learn, with a strategy of Flower's in each group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedXgbCyclic
from sklearn.linear_model import LogisticRegression

from benchmarks.engine import trees
from coterie.strategies import PerGroup
from tests.kit import Tap

KINDS = [["silo-0", "silo-2", "silo-4"], ["silo-1", "silo-3", "silo-5"]]
EVERYBODY = [name for kind in KINDS for name in kind]


def test_groups_of_a_first_stage_boost_their_own_trees() -> None:
    pytest.importorskip("xgboost")
    result = trees.boosted(trees.first_stage(), 0, rounds=6)
    assert result.groups[6] == KINDS
    assert min(trees.aucs(result).values()) > 0.9
    everybody = trees.boosted([EVERYBODY], 0, rounds=6)
    assert max(trees.aucs(everybody).values()) < 0.75, "labels mean the opposite"
    saved = trees.boosting().Booster()
    saved.load_model(bytearray(result.arrays["0"].numpy().tobytes()))  # as Flower's example ends
    assert saved.num_boosted_rounds() == 6 * 3


def test_trees_travel_from_silo_to_silo_within_their_group() -> None:
    pytest.importorskip("xgboost")

    grid = Tap([{"partition-id": n, "seed": 0} for n in range(6)], trees.app)
    strategy = PerGroup(KINDS, lambda group: FedXgbCyclic(), metric_names={"auc": "accuracy"})
    strategy.start(grid, trees.NO_TREES, num_rounds=3)
    asked = [
        (int(m.metadata.group_id), m.metadata.dst_node_id)
        for m in grid.sent
        if m.metadata.message_type == "train"
    ]
    assert [number for number, _ in asked] == [1, 1, 2, 2, 3, 3], "one silo of each group a round"
    assert sorted(node for _, node in asked) == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------- scikit-learn

learners = ClientApp()


def _model(message: Message, context: Context) -> tuple[LogisticRegression, Any, Any]:
    x, y = trees.rows_of(int(context.node_config["partition-id"]), 0)
    model = LogisticRegression(max_iter=1, warm_start=True, solver="saga", random_state=0)
    model.classes_ = np.array([0, 1])
    model.coef_, model.intercept_ = (a.numpy() for a in message.content["arrays"].values())
    return model, x, y


@learners.train()
def fit(message: Message, context: Context) -> Message:
    """One pass of scikit-learn, as in Flower's example."""
    model, x, y = _model(message, context)
    model.fit(x, y)
    arrays = ArrayRecord([model.coef_, model.intercept_])
    metrics = MetricRecord({"num-examples": len(y), "train_logloss": 0.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@learners.evaluate()
def score(message: Message, context: Context) -> Message:
    """Accuracy on the silo's own rows."""
    model, x, y = _model(message, context)
    metrics = MetricRecord({"num-examples": len(y), "accuracy": float(model.score(x, y))})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_scikit_learn_in_groups() -> None:
    grid = Tap([{"partition-id": n} for n in range(6)], learners)
    zero = ArrayRecord({"0": Array(np.zeros((1, trees.COLUMNS))), "1": Array(np.zeros(1))})
    grouped = PerGroup(KINDS, lambda group: FedAvg()).start(grid, zero, num_rounds=2)
    over_all = PerGroup([EVERYBODY], lambda group: FedAvg()).start(grid, zero, num_rounds=2)
    errors = [
        np.mean([error for _, error, _ in result.rounds[-1].evaluation.values()])
        for result in (grouped, over_all)
    ]
    assert errors[0] < 0.2 < 0.4 < errors[1]
