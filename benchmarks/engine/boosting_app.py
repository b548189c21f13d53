"""Rows that ``benchmarks.engine.boosting`` grows trees of, and Flower's bagging of XGBoost trees.

This file is shipped to stock SuperNodes as the whole of a Flower app. Needs XGBoost.
"""

from __future__ import annotations

import json
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging
from numpy.typing import NDArray

COLUMNS = 30
TEST_ROWS = 2000
DEPTH, RATE, BINS, PENALTY = 6, 0.1, 64, 1.0
"""Of the trees, here and in ``boosting``."""
PARAMS = {
    "objective": "binary:logistic",
    "eta": RATE,
    "max_depth": DEPTH,
    "max_bin": BINS,
    "reg_lambda": PENALTY,
    "nthread": 1,
    "tree_method": "hist",
}


@cache
def rows_of(silo: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return x (rows, 30) and y (rows,) of a silo; of silo −1, those that all are tested with."""
    rng = np.random.default_rng([7, silo + 1])
    x = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
    z = 2 * x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + x[:, 3] * (x[:, 4] > 0) + x[:, 5:10].sum(1)
    return x, (rng.random(rows) < 1 / (1 + np.exp(-z))).astype(np.int64)


def boosting() -> Any:
    """Return xgboost, which only benchmarks need."""
    return import_module("xgboost")


client_app = ClientApp()


@client_app.train()
def boost(message: Message, context: Context) -> Message:
    """Add one tree to the model, and send that tree; begin with one."""
    config = message.content.config_records["config"]
    x, y = rows_of(int(context.node_config["silo"]), int(config["rows"]))  # type: ignore[arg-type]
    data = boosting().DMatrix(x, y)
    if config["server-round"] == 1:
        trees = boosting().train(PARAMS, data, num_boost_round=1)
    else:
        came = message.content.array_records["arrays"]["0"].numpy().tobytes()
        trees = boosting().Booster(params=PARAMS)
        trees.load_model(bytearray(came))
        trees.update(data, trees.num_boosted_rounds())
        trees = trees[trees.num_boosted_rounds() - 1 :]
    sent = ArrayRecord([np.frombuffer(trees.save_raw("json"), np.uint8)])
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def bag(grid: Grid, context: Context) -> None:
    """Run ``FedXgbBagging``; write seconds, loss and area under the curve to a file."""
    config = context.run_config
    nodes, rounds = int(config["nodes"]), int(config["rounds"])
    strategy = FedXgbBagging(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    started = time.perf_counter()
    result = strategy.start(
        grid,
        ArrayRecord([np.array([], np.uint8)]),
        num_rounds=rounds,
        train_config=ConfigRecord({"rows": int(config["rows"])}),
    )
    seconds = time.perf_counter() - started
    from sklearn.metrics import log_loss, roc_auc_score

    trees = boosting().Booster(params=PARAMS)
    trees.load_model(bytearray(result.arrays["0"].numpy().tobytes()))
    x, y = rows_of(-1, TEST_ROWS)
    chances = trees.predict(boosting().DMatrix(x))
    scores = [seconds, float(log_loss(y, chances)), float(roc_auc_score(y, chances))]
    Path(str(config["out"])).write_text(json.dumps(scores))
