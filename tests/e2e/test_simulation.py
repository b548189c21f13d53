"""The same ClientApp under Flower's simulation engine. Needs the ``simulation`` extra (Ray)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.runs import record_of

KEYS = {"strategy": "hcct", "rounds": 2, "min-silos": 3, "local-epochs": 1, "seed": 2}


@pytest.mark.nightly
@pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is missing: pip install 'coterie[simulation]'"
)
def test_the_client_app_runs_under_the_simulation_engine_and_gives_the_same_models(
    tmp_path: Path,
) -> None:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from coterie.client.app import app
    from coterie.engine.inprocess import InProcessGrid
    from coterie.server.runs.config import RunConfig
    from coterie.server.runs.run import execute

    config = RunConfig.read(KEYS)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        execute(grid, config, run_id=1, folder=tmp_path / "simulated")

    run_simulation(
        server_app,
        app,
        num_supernodes=3,
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}},
    )
    configs = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "in-process")
    simulated = record_of(tmp_path / "simulated")
    assert simulated["status"] == "completed"
    assert set(simulated["silos"]) == {"silo-0", "silo-1", "silo-2"}
    assert simulated["model-hashes"] == record_of(tmp_path / "in-process")["model-hashes"]
