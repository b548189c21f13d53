"""A ServerApp for the quickstarts, with a strategy of Flower's or of coterie's.

Run config: ``client``, the module of the ClientApp; ``strategies`` and ``strategy``, where the
class is and its name; ``rounds``; ``result``, the file for its result.
"""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

NODES = 2


def digest(arrays: ArrayRecord) -> str:
    """Of every bit of a model."""
    known = hashlib.sha256()
    for array in arrays.to_numpy_ndarrays():
        known.update(array.tobytes())
    return known.hexdigest()


def run(grid: Grid, config: dict[str, Any]) -> dict[str, Any]:
    """Run it; return the digests of the model, or of every silo's."""
    kind = getattr(import_module(config["strategies"]), config["strategy"])
    if config["strategies"].startswith("flwr"):
        names = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
        strategy = kind(**dict.fromkeys(names, NODES))
    else:
        strategy = kind(min_silos=NODES)
    result = strategy.start(
        grid=grid,
        initial_arrays=import_module(config["client"]).initial(),
        num_rounds=config["rounds"],
        train_config=ConfigRecord({"lr": 0.05}),
    )
    models = getattr(result, "models", {}).values()
    record = result.evaluate_metrics_clientapp[config["rounds"]]
    return {
        "model": digest(result.arrays),
        "models": sorted(map(digest, models)),
        "evaluation": {key: record[key] for key in sorted(record)},
        "left-out": [report.left_out for report in getattr(result, "rounds", [])],
    }


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Flower calls this once per run."""
    result = run(grid, dict(context.run_config))
    Path(str(context.run_config["result"])).write_text(json.dumps(result), encoding="utf-8")
