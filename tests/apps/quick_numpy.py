"""A ClientApp as Flower's first steps show one: a list of arrays, no torch.

Each file of this folder stands alone, so that it can be an app of Flower's by itself: it is put
into a FAB for stock SuperNodes, and installed (on the path) for resident silos.
"""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

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
    """A number, a list, and the app's configuration."""
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
