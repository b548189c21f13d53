"""A ClientApp and a ServerApp as Flower's first steps show them: a list of arrays, no torch.

Each file of this folder stands alone, so that it can be an app of Flower's by itself: it is put
into a FAB for stock SuperNodes, and installed (on the path) for resident silos.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Move towards the node's own target; count the trainings in the state."""
    arrays = msg.content["arrays"].to_numpy_ndarrays()
    number = context.node_config["partition-id"]
    counter = context.state.config_records.setdefault("counter", ConfigRecord({"trainings": 0}))
    counter["trainings"] += 1
    rng = np.random.default_rng([number, counter["trainings"]])
    trained = [a + context.run_config["step"] * rng.standard_normal(a.shape) for a in arrays]
    metrics = {"random_metric": rng.random(), "num-examples": 10 * (number + 1)}
    content = RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """A number, a list, and what the app was told."""
    arrays = msg.content["arrays"].to_numpy_ndarrays()
    metrics = {
        "random_metric": [float(a.sum()) for a in arrays],
        "partitions": context.node_config["num-partitions"],
        "num-examples": 1,
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def initial() -> ArrayRecord:
    """The model to start from."""
    return ArrayRecord([np.ones((3, 2)), np.zeros(2)])


def digest(arrays: ArrayRecord) -> str:
    """Of every bit of a model."""
    known = hashlib.sha256()
    for array in arrays.to_numpy_ndarrays():
        known.update(array.tobytes())
    return known.hexdigest()


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's own FedAvg; what came of it goes to a file of the test."""
    strategy = FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2)
    result = strategy.start(grid=grid, initial_arrays=initial(), num_rounds=3)
    told = {"model": digest(result.arrays), "rounds": len(result.train_metrics_clientapp)}
    told["partitions"] = result.evaluate_metrics_clientapp[3]["partitions"]
    Path(os.environ["TOLD"]).write_text(json.dumps(told), encoding="utf-8")
