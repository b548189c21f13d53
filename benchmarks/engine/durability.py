"""What durability costs: rounds with and without ``--database``, and committing a checkpoint.

    python -m benchmarks.engine.durability                  # 0.4, 50 and 500 MB, four silos
    python -m benchmarks.engine.durability --sizes 0.4 50
    python -m benchmarks.engine.durability --sizes          # what a checkpoint writes, alone

Two SuperLinks, one with SQLite and one without, run the same rounds in turn. The training step is
empty, but every silo's answer differs in every byte of its arrays, as after real training.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.engine.overhead import processes, round_times, serve, wait_online
from benchmarks.engine.overhead_app import NUM_LAYERS, arrays_of, describe
from benchmarks.kit import Entry, Store, columns, page, read, select
from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.superlink import SuperLink
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.codec import encode
from coterie.strategies import HCCT, FedAvg
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.strategies.strategy import GroupStrategy

NODES = 4
RESNET_18 = 44.7
"""Megabytes."""
FEW = 3
WRITTEN: dict[str, tuple[type[GroupStrategy], dict[str, Any], int]] = {
    "FedAvg": (FedAvg, {}, FEW),
    "HCCT, one group": (HCCT, {}, FEW),
    "HCCT, three groups": (HCCT, {"alpha": 0.0}, FEW),
    "HCCT, three groups, one silo left": (HCCT, {"alpha": 0.0}, 1),
}
"""A run → its strategy, and how many silos are there after half of it."""
WRITTEN_ROUNDS = 6
ROUNDS = {0.4: 20, 50.0: 6, 500.0: 2}

app = ClientApp()
app.query("describe")(describe)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The model received, every value moved by the silo's own step."""
    step = np.float32(zlib.crc32(str(context.node_config["name"]).encode()) % 997 + 1)
    received = wire.decode_arrays(message.content.array_records["arrays"])
    moved = {name: array + step for name, array in received.items()}  # type: ignore[operator]
    arrays = wire.encode_arrays(moved, packed=True)
    metrics = MetricRecord({"num-examples": 1, "seconds": 0.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def rounds(megabytes: float, count: int, folder: Path, *, database: bool) -> list[float]:
    """Round times, without the first, in which the silos are met."""
    options = ["--database", str(folder / "state.db")] if database else []
    own = [sys.executable, "-m", "benchmarks.engine.durability", "--silo"]
    with SuperLink(folder / "superlink", options=options) as superlink:
        address = superlink.fleet_address
        with processes([[*own, address, f"silo-{i}"] for i in range(NODES)], folder):
            wait_online(superlink, NODES)
            keys: dict[str, Any] = {"nodes": NODES, "megabytes": megabytes, "rounds": count + 1}
            return round_times(superlink, "resident_app", deadline_s=1800, **keys)[1:]


def commits(megabytes: float, folder: Path) -> list[float]:
    """Seconds to commit a checkpoint in which each of the silos holds a model of its own."""
    per_layer = int(megabytes * 1e6 / 4 / NUM_LAYERS)
    rng = np.random.default_rng(0)
    state = {
        f"silo-{i}": {
            str(k): rng.standard_normal(per_layer, dtype=np.float32) for k in range(NUM_LAYERS)
        }
        for i in range(NODES)
    }
    store, seconds = Checkpoints(folder), []
    for number in range(1, 6):
        started = time.perf_counter()
        store.save(number, state)
        seconds.append(time.perf_counter() - started)
    return seconds


def trained(message: Message, context: Context) -> Message:
    """The silos' ClientApp, but every number of an update is another one."""
    if message.metadata.message_type != wire.TRAIN:
        return app(message, context)
    silo = zlib.crc32(str(context.node_config["name"]).encode())
    rng = np.random.default_rng([silo, int(message.metadata.group_id)])
    received = wire.decode_arrays(message.content.array_records["arrays"])
    moved = {
        name: array + rng.standard_normal(array.shape, np.float32)  # type: ignore[operator]
        for name, array in received.items()
    }
    content = {"arrays": wire.encode_arrays(moved, packed=True)}
    metrics = MetricRecord({"num-examples": 1, "seconds": 0.0})
    return Message(RecordDict({**content, "metrics": metrics}), reply_to=message)


def written(megabytes: float, run: str) -> Entry:
    """Bytes of arrays in the state after the last round, and what its checkpoint wrote."""
    kind, options, left = WRITTEN[run]
    grid = InProcessGrid(trained, [{"name": f"silo-{i}"} for i in range(FEW)])
    roster = DescribedRoster("echo", 1)
    strategy = kind(roster=roster, evaluate=False, on_round=lambda report: None, **options)
    sizes: list[tuple[int, int]] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder))

        def commit(checkpoint: Checkpoint[Any]) -> None:
            whole = sum(array.nbytes for array in encode(checkpoint)[1].values())
            started = time.perf_counter()
            sizes.append((whole, store.save(checkpoint.round, checkpoint)))
            seconds.append(time.perf_counter() - started)
            for node in range(left, FEW) if checkpoint.round == WRITTEN_ROUNDS // 2 else ():
                grid.disconnect(node + 1)

        strategy.start(grid, arrays_of(megabytes), num_rounds=WRITTEN_ROUNDS, commit=commit)
        on_disk = sum(file.stat().st_size for file in Path(folder).iterdir())
    whole, last = sizes[-1]
    return {"whole": whole, "written": last, "seconds": seconds[-1], "disk": on_disk}


def measure(megabytes: float) -> Entry:
    """Both kinds of round and a commit, for one size of model."""
    count = ROUNDS.get(megabytes, 3)
    half = max(1, count // 2)
    plain: list[float] = []
    stored: list[float] = []
    for _ in range(2):  # in turn, so that what else the machine does hits both
        for seconds, database in ((plain, False), (stored, True)):
            with tempfile.TemporaryDirectory() as folder:
                seconds += rounds(megabytes, half, Path(folder), database=database)
                print(f"{megabytes} MB, database {database}: {seconds[-half:]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        committed = commits(megabytes, Path(folder))
    times = {"memory": plain, "database": stored, "commit": committed}
    return {"rounds": 2 * half, **{what: statistics.median(each) for what, each in times.items()}}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# What durability costs",
        "Medians; `python -m benchmarks.engine.durability`; 2 busy cores, loopback, 4 silos whose "
        "training step is empty.",
        columns(
            sorted(select(entries, run=None), key=lambda run: run["megabytes"]),
            {
                "model": "{megabytes:g} MB",
                "rounds": "{rounds}",
                "round in memory": "{memory:.2f} s",
                "round with `--database`": "{database:.2f} s",
                "ratio": lambda run: f"{run['database'] / run['memory']:.2f}",
                f"commit of {NODES} models": "{commit:.3f} s",
                "of a round": lambda run: f"{100 * run['commit'] / run['memory']:.0f} %",
            },
        ),
        f"What a checkpoint writes, of a model of {RESNET_18:g} MB (a ResNet-18) and three silos: "
        "the whole state, as every round was written before, and what changed.",
        columns(
            [entry for entry in entries if entry.get("run")],
            {
                "run": "{run}",
                "state": lambda run: f"{run['whole'] / 1e6:.0f} MB",
                "written a round": lambda run: f"{run['written'] / 1e6:.0f} MB",
                "of the state": lambda run: f"{100 * run['written'] / run['whole']:.0f} %",
                "commit": "{seconds:.2f} s",
                "on the disk, three checkpoints": lambda run: f"{run['disk'] / 1e6:.0f} MB",
            },
        ),
    )


STORE = Store("durability", document, keys=("megabytes", "run"))


def main() -> None:
    """Measure and write after every size."""
    if sys.argv[1:2] == ["--silo"]:
        serve(app, *sys.argv[2:])
        return
    sizes = {"nargs": "*", "type": float, "default": list(ROUNDS), "metavar": "MB"}
    given = read(STORE, __doc__, sizes=sizes)
    for megabytes in given.sizes:
        given.store.put({"megabytes": megabytes, **measure(megabytes)})
    given.store.fill(({"megabytes": RESNET_18, "run": run} for run in WRITTEN), written)
    print(given.store.text())


if __name__ == "__main__":
    main()
