"""Silos and runs as the tests of real processes have them, and waiting for what happens."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import Ports
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute
from tests import kit
from tests.e2e.gated import TASK
from tests.kit import record_of

ROOT = Path(__file__).parents[2]
COTERIE = [sys.executable, "-m", "coterie.server.cli"]
COMMAND_S = 150.0
"""A command starts a Python that imports Flower: seconds, and more on a machine that is busy."""
NAMES = ("a", "b", "c")
KEYS: dict[str, Any] = {"task": TASK, "seed": 5, "min-silos": 3, "rounds": 4}
HCCT: dict[str, Any] = {**KEYS, "strategy": "hcct", "alpha": 20.0}


def found(**what: Any) -> None:
    """Print what a long form found, and keep it in the file that ``COTERIE_FOUND`` names."""
    line = json.dumps(what)
    print(f"\n{line}", flush=True)
    if kept := os.environ.get("COTERIE_FOUND"):
        with Path(kept).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def spec(name: str, index: int, **options: Any) -> SiloSpec:
    """A small silo; silos of different indices share no sample."""
    cut = {"train": 40, "test": 30, "skip": index * 70}
    return SiloSpec(name, TASK, options={**cut, **options})


def supernode(federation: LocalFederation, settings: str) -> list[str]:
    """The command line of a stock SuperNode with these settings of its node."""
    address, own = federation.superlink.fleet_address, f"127.0.0.1:{Ports.free().fleet}"
    line = ["flower-supernode", "--insecure", "--superlink", address]
    return [*line, "--clientappio-api-address", own, "--node-config", settings]


def hashes_of(folder: Path) -> dict[str, str]:
    """Hashes of the models of a run, which has to be complete."""
    record = record_of(folder)
    assert record["status"] == "completed", record.get("error")
    hashes: dict[str, str] = record["model-hashes"]
    return hashes


def in_process(folder: Path, *names: str, **keys: Any) -> dict[str, Any]:
    """The record of a run without processes, of silos as the federations here have them."""
    configs = [spec(name, index).node_config() for index, name in enumerate(names or NAMES)]
    execute(InProcessGrid(app, configs), RunConfig.read(keys), run_id=1, folder=folder)
    return record_of(folder)


until = partial(kit.until, every_s=0.05)


def happened(folder: Path, event: str, number: int = 0) -> bool:
    """Whether a run's record has such an event already, of this round or a later one."""
    file = folder / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    events = [json.loads(line) for line in lines]
    return any(one["event"] == event and one.get("round", 0) >= number for one in events)


def until_happened(folder: Path, event: str, number: int = 0, *, deadline_s: float = 150.0) -> None:
    """Wait for an event of a run."""
    what = f"{event!r} of round {number} in {folder.name}"
    until(lambda: happened(folder, event, number), what, deadline_s=deadline_s)


def finished(folder: Path) -> dict[str, str]:
    """Wait until a run is over; return the hashes of its models."""
    until_happened(folder, "end")
    return hashes_of(folder)
