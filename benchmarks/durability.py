"""What durability costs: rounds with and without ``--database``, and committing a checkpoint.

    python -m benchmarks.durability                  # 0.4, 50 and 500 MB, four silos
    python -m benchmarks.durability --sizes 0.4 50

Two SuperLinks, one with SQLite and one without, run the same rounds in turn. The training step is
empty, but every silo's answer differs in every byte of its arrays, as after real training. Writes
``results/durability.json`` and ``results/durability.md`` after every size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.overhead import RESULTS, processes, round_times
from benchmarks.overhead_app import NUM_LAYERS, describe
from coterie import wire
from coterie.server.machine.link import control
from coterie.server.machine.superlink import SuperLink
from coterie.server.runs.checkpoint import Checkpoints

NODES = 4
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


def serve(address: str, name: str) -> None:
    """One resident silo."""
    from coterie.client.home.settings import SiloSettings
    from coterie.client.resident.host import Connection, Host

    host = Host(app, [SiloSettings(name=name)], Connection(address))
    host.stop_on_signals()
    host.run()


def rounds(megabytes: float, count: int, folder: Path, *, database: bool) -> list[float]:
    """Round times, without the first, in which the silos are met."""
    options = ["--database", str(folder / "state.db")] if database else []
    own = [sys.executable, "-m", "benchmarks.durability", "--silo"]
    with SuperLink(folder / "superlink", options=options) as superlink:
        address = superlink.fleet_address
        with processes([[*own, address, f"silo-{i}"] for i in range(NODES)], folder):
            _wait_online(superlink)
            keys = {"nodes": NODES, "megabytes": megabytes, "rounds": count + 1}
            return round_times(superlink, "resident_app", deadline_s=1800, **keys)[1:]


def _wait_online(superlink: SuperLink) -> None:
    deadline = time.monotonic() + 240
    with control(superlink.control_address) as calls:
        while (online := calls.num_online()) < NODES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{online} of {NODES} silos connected in 240 s")
            time.sleep(0.1)


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


def measure(megabytes: float) -> dict[str, Any]:
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
    return {"rounds": 2 * half, "memory": plain, "database": stored, "commit": committed}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Medians, and ratios of them."""
    lines = [
        "| model | rounds | round in memory | round with `--database` | ratio | commit of "
        f"{NODES} models | of a round |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, entry in results.items():
        memory, database, commit = (
            statistics.median(entry[key]) for key in ("memory", "database", "commit")
        )
        lines.append(
            f"| {float(size):g} MB | {entry['rounds']} | {memory:.2f} s | {database:.2f} s | "
            f"{database / memory:.2f} | {commit:.3f} s | {100 * commit / memory:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write after every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", type=float, default=list(ROUNDS), metavar="MB")
    parser.add_argument("--silo", nargs=2, metavar=("ADDRESS", "NAME"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.silo:
        serve(*given.silo)
        return
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "durability.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for megabytes in given.sizes:
        results[str(megabytes)] = measure(megabytes)
        results = dict(sorted(results.items(), key=lambda item: float(item[0])))
        file.write_text(json.dumps(results, indent=1))
        text = (
            "# What durability costs\n\nMedians; `python -m benchmarks.durability`; 2 busy cores, "
        )
        text += "loopback, 4 silos whose training step is empty.\n\n"
        (RESULTS / "durability.md").write_text(text + table(results))
        print(table(results))


if __name__ == "__main__":
    main()
