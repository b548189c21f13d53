"""The app at every node, and a ServerApp that lends its engine to a test."""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie import wire
from coterie.engine.fast.run.pulling import fast_engine
from coterie.engine.plain import Plain

app, server = ClientApp(), ServerApp()

DEADLINE_S = 120.0
"""Of a call between the test and the ServerApp that lends its engine."""


def question(node: int, arrays: ArrayRecord, **config: Any) -> Message:
    """A message to a node; ``config`` says what the app does with it."""
    content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord(config)})
    return Message(content, dst_node_id=node, message_type=wire.TRAIN, group_id="1")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Halve and add one: ``seconds`` later, or not at all if ``fails``."""
    config: Any = message.content[wire.CONFIG]
    time.sleep(float(config.get("seconds", 0.0)))
    if config.get("fails"):
        raise ValueError("the app fails, as it was told to")
    sent: Any = message.content[wire.ARRAYS]
    arrays = {name: Array(one.numpy() / 2 + 1) for name, one in sent.items()}
    content = {wire.ARRAYS: ArrayRecord(arrays), wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 1})}
    return Message(RecordDict(content), reply_to=message)


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Nothing is described; resident silos see by this message that bundles are read."""
    return Message(RecordDict(), reply_to=message)


def halved(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """What the app answers."""
    return {name: one.numpy() / 2 + 1 for name, one in arrays.items()}


@server.main()
def lend(grid: Grid, context: Context) -> None:
    """Call the engine as a test says, by a socket, until it closes."""
    config = context.run_config
    engine = Plain(grid) if config["engine"] == "plain" else fast_engine(grid)
    ready = Path(str(config["socket"]))
    bound = ready.with_name("bound")  # a socket has its name before it listens
    with Listener(str(bound)) as listener:
        ready.hardlink_to(bound)
        asked = listener.accept()
    with asked:
        while asked.poll(DEADLINE_S):  # the test is gone if it asks for nothing
            name, arguments = asked.recv()
            asked.send(getattr(engine, name)(*arguments))
            if name == "close":
                return


class Lent:
    """The engine of a ServerApp that runs ``lend``, called from here."""

    def __init__(self, socket: str) -> None:
        self._calls = Client(socket)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._calls.send((name, arguments))
        assert self._calls.poll(DEADLINE_S), f"no answer of the engine to {name}"
        return self._calls.recv()

    def nodes(self) -> list[int]:
        return list(self._call("nodes"))

    def push(self, messages: Any) -> list[str]:
        return list(self._call("push", messages))

    def pull(self, ids: Any, wait_s: float) -> list[Message]:
        return list(self._call("pull", ids, wait_s))

    def close(self) -> None:
        self._call("close")
        self._calls.close()
