"""A ClientApp whose models grow, and whose silos coterie's discriminators tell apart.

A model is the kinds of all silos that trained it, a byte each.
"""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from coterie.client.app import app as coterie_app

app = ClientApp()
ROWS = 100
NOTHING = ArrayRecord([np.array([], np.uint8)])
NODES = {
    name: {"number": number, "turned": bool(number % 2), "site": str(number)}
    for number, name in enumerate(["north", "east", "south"])
}
SITES = {own["site"]: name for name, own in NODES.items()}


def kind(context: Context) -> int:
    """What a silo's data are."""
    return 1 if context.node_config["turned"] is True else 0


def answer(message: Message, **content: ArrayRecord) -> Message:
    """Return a reply to a training message."""
    metrics = MetricRecord({"num-examples": ROWS})
    return Message(RecordDict({"metrics": metrics, **content}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add this silo's kind to the model."""
    grown = np.append(message.content["arrays"]["0"].numpy(), np.uint8(kind(context)))
    return answer(message, arrays=ArrayRecord([grown]))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return the share of other kinds in a model."""
    model = message.content["arrays"]["0"].numpy()
    loss = float(np.mean(model != kind(context))) if len(model) else 1.0
    size = context.run_config["scale"] * len(model)
    metrics = {"num-examples": 10, "loss": loss, "size": size}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@app.train("groups")
def keep(message: Message, context: Context) -> Message:
    """Train nothing: the groups come from discriminators."""
    return answer(message, arrays=message.content["arrays"])


@app.train("discriminator")
@app.evaluate("discriminator")
def discriminate(message: Message, context: Context) -> Message:
    """Let coterie train its discriminators on a task's data: digits, half of the silos turned."""
    own = {"name": SITES[context.node_config["site"]], "task": "digits", "data.train": ROWS}
    own |= {"data.skip": 200 * context.node_config["number"], "data.rotation": 90 * kind(context)}
    return coterie_app(
        message, Context(context.run_id, context.node_id, own, context.state, context.run_config)
    )
