"""The ServerApp: read the run's configuration, run it, keep its record."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import closing
from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.engine.fast.run.pulling import fast_engine
from coterie.features.secure.sums import Enrolled
from coterie.server.paths import ENVIRONMENT
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute, run_folder
from coterie.server.site.audit import who_started
from coterie.server.site.contacts import Contacts
from coterie.server.site.enrolled import names_by_node, vouchers
from coterie.server.site.federation import load
from coterie.strategies.errors import EXIT_RUN
from coterie.system import logs
from coterie.system.memory import SERVER_BYTES, keep_freed_memory
from coterie.system.processes import end_with_parent

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation; Flower calls this once per run."""
    _log_to_stdout()
    end_with_parent(EXIT_RUN)
    keep_freed_memory(SERVER_BYTES)
    config = RunConfig.read_from_flower(context.run_config)
    federation = load() if os.environ.get(ENVIRONMENT) else None
    folder = run_folder(config, run_id=context.run_id)
    asked_by = who_started(federation, context.run_id) if federation else ""
    with closing(fast_engine(grid, hosts=federation is None, folder=folder)) as engine:
        execute(
            engine,
            config,
            run_id=context.run_id,
            folder=folder,
            asked_by=asked_by,
            enrolled=partial(names_by_node, federation.roster) if federation else None,
            vouching=Enrolled(
                federation.ca.read_bytes(), partial(vouchers, federation.roster, federation.tls)
            )
            if federation
            else None,
            known=Contacts(federation.folder) if federation else None,
        )


def _log_to_stdout() -> None:
    """Log to stdout, which Flower forwards to those who follow the run."""
    logger = logging.getLogger("coterie")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        text = "%(levelname)s %(message)s"
        handler.setFormatter(logs.formatter("run", logs.chosen(), text=text))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
