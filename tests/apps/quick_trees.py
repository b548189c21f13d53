"""A ServerApp that boosts trees in the groups of a first stage, for the ClientApp of the benchmark.

Run config: ``silos`` and ``rounds``; ``timeout`` of a round; ``gate``, a folder: after round N the
run waits for its file ``N``. Empty: it does not wait.
"""

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging

from benchmarks.engine import trees
from coterie.strategies import PerGroup
from coterie.strategies.rounds.reports import RoundReport

DEADLINE_S = 200.0

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Flower calls this once per run."""
    gate = str(context.run_config["gate"])

    def wait(report: RoundReport) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while gate and not report.final and not Path(gate, str(report.round)).exists():
            assert time.monotonic() < deadline, f"nobody opened round {report.round + 1}"
            time.sleep(0.05)

    strategy = PerGroup(
        trees.first_stage(),
        lambda group: FedXgbBagging(min_train_nodes=1, min_available_nodes=1),
        metric_names={"auc": "accuracy"},
        ask_names=True,
        min_silos=int(context.run_config["silos"]),
        round_timeout=float(context.run_config["timeout"]),
        on_round=wait,
    )
    strategy.start(grid, trees.NO_TREES, num_rounds=int(context.run_config["rounds"]))
