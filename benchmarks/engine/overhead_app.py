"""The apps that ``benchmarks.engine.overhead`` measures: an empty step, and two round loops.

This file is shipped to the ServerApp's process as the whole of a Flower app, and imported by the
silos. Both loops send the same arrays to the same nodes and write their round times to a file.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from numpy.typing import NDArray

NUM_LAYERS = 8
CHANGED = 2**14
"""Numbers of which one is changed."""

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Send the model back with some bits changed: objects that the SuperLink has are not sent. A
    training step needs torch, so it is imported: a resident silo does that once, a stock SuperNode
    in the new process of every message."""
    import torch

    from coterie import wire

    torch.set_num_threads(1)
    metrics = MetricRecord({"num-examples": 1, "seconds": 0.0})
    record = wire.array_records(message.content)["arrays"]
    came = wire.decode_arrays(record)
    sent = wire.restore_model(came, {name: (a.shape, "float32") for name, a in came.items()})
    own = {name: _changed(array, context.node_id) for name, array in sent.items()}
    config = wire.config_records(message.content).get(wire.CONFIG, ConfigRecord())
    wire_format = str(config.get(wire.WIRE_FORMAT, wire.FLOAT32))
    if wire_format != wire.FLOAT32:
        update = wire.round_update(own, sent, wire_format)
        assert update is not None
        own = update.arrays
        metrics[wire.UPDATE_NORM], metrics[wire.UPDATE_LOST] = update.norm, update.share
    arrays = wire.encode_arrays(own, packed=wire.is_packed(record))
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    return Message(content, reply_to=message)


def _changed(array: NDArray[Any], node_id: int) -> NDArray[Any]:
    """Other low bits, in every piece of it that could be an object."""
    made = array.copy()
    low = made.reshape(-1).view(np.uint8)[:: CHANGED * made.itemsize]
    low ^= np.resize(np.frombuffer(node_id.to_bytes(8, "little"), np.uint8), low.shape)
    return made


@client_app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """A coterie silo that understands packed models."""
    from coterie import wire

    name = str(context.node_config.get("name", context.node_id))
    description = wire.Description(name=name, num_examples=1, task="echo", schema="echo")
    return Message(wire.encode_description(description), reply_to=message)


def arrays_of(megabytes: float, kind: str = "float32") -> ArrayRecord:
    """A model of eight layers, of so many megabytes in float32."""
    per_layer = int(megabytes * 1e6 / 4 / NUM_LAYERS)
    rng = np.random.default_rng(0)
    layers = (rng.standard_normal(per_layer, dtype=np.float32) for _ in range(NUM_LAYERS))
    return ArrayRecord([layer.astype(kind) for layer in layers])


stock_app = ServerApp()


@stock_app.main()
def stock(grid: Grid, context: Context) -> None:
    """Flower's FedAvg with Flower's grid loop."""
    config = context.run_config
    num_nodes, rounds = int(config["nodes"]), int(config["rounds"])
    starts: list[float] = []

    class Timed(FlowerFedAvg):
        """Notes when a round begins."""

        def configure_train(  # type: ignore[no-untyped-def]
            self, server_round, arrays, config, grid
        ):
            starts.append(time.perf_counter())
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Timed(
        fraction_evaluate=0.0, min_train_nodes=num_nodes, min_available_nodes=num_nodes
    )
    strategy.start(grid, arrays_of(float(config["megabytes"])), num_rounds=rounds)
    starts.append(time.perf_counter())
    _write(config, [b - a for a, b in itertools.pairwise(starts)])


resident_app = ServerApp()


@resident_app.main()
def resident(grid: Grid, context: Context) -> None:
    """coterie's FedAvg with coterie's loop."""
    from coterie import wire
    from coterie.engine.fast.run.pulling import fast_engine
    from coterie.strategies import FedAvg
    from coterie.strategies.rounds.roster import DescribedRoster

    config = context.run_config
    ends = [time.perf_counter()]

    def on_round(report) -> None:  # type: ignore[no-untyped-def]
        if not report.final:
            ends.append(time.perf_counter())  # so a round is all that passes between two of them

    strategy = FedAvg(
        roster=DescribedRoster("echo", int(config["nodes"])), on_round=on_round, evaluate=False
    )
    strategy.start(
        fast_engine(grid),
        arrays_of(float(config["megabytes"]), str(config.get("kind", "float32"))),
        num_rounds=int(config["rounds"]),
        train_config=ConfigRecord(
            {wire.WIRE_FORMAT: str(config["format"])} if "format" in config else {}
        ),
    )
    _write(config, [b - a for a, b in itertools.pairwise(ends)])


def _write(config: object, seconds: list[float]) -> None:
    Path(str(config["out"])).write_text(json.dumps(seconds))  # type: ignore[index]
