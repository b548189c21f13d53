"""Flower's quickstarts with our strategies: in process, on resident silos, on stock SuperNodes.

Only the strategy's line is another, and the data are made up; see ``tests/apps/examples.py``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.link import Control, control
from coterie.server.machine.local import LocalFederation
from coterie.server.machine.superlink import Ports
from coterie.server.study.result import Result
from tests.apps import examples
from tests.apps.examples import KINDS, PYTORCH, SILOS, SKLEARN, STRATEGIES, XGBOOST, Example
from tests.e2e.test_foreign_app import ENVIRONMENT, programs, start_app
from tests.kit import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not examples.FOLDER, reason="COTERIE_FLOWER_EXAMPLES is not set"),
]
TABLES = [(SKLEARN, name) for name in STRATEGIES] + [(XGBOOST, "pergroup")]
PICTURES = [(PYTORCH, name) for name in STRATEGIES]


class FlowersRun(InProcessGrid):
    """A grid of ``flwr run``, which has started run 7."""

    run = SimpleNamespace(run_id=7)  # type: ignore[assignment]


def check(result: Result, example: Example, strategy: str) -> None:
    """Every silo is with its kind and has its app's metrics; ``auto`` has no evidence here.

    The number of training rows tells which partition a silo has.
    """
    assert result.run.status == "completed", result.run.error
    expected = [[n] for n in range(SILOS)] if strategy == "auto" else KINDS
    sizes = {name: facts.num_examples for name, facts in result.run.silos.items()}
    partition = {name: (round(size / 0.8) - 100) // 10 for name, size in sizes.items()}
    groups = sorted(sorted(partition[name] for name in group) for group in result.groups)
    assert groups == expected, (example.name, strategy)
    for row in result.metric_rows:
        assert set(example.metrics) <= row.keys(), (example.name, strategy, row)


def line_of(example: Example, strategy: str, groups: Any, more: str = "") -> str:
    """The strategy's line; trees get the groups of an earlier run, or by hand."""
    if example is not XGBOOST:
        return STRATEGIES[strategy]
    inner = "lambda group: FedXgbBagging(min_train_nodes=1, min_available_nodes=1)"
    return f"PerGroup({groups!r}, {inner}, min_silos={SILOS}{more})"


BY_HAND = [[f"silo-{n}" for n in kind] for kind in KINDS]


@pytest.mark.parametrize(
    ("example", "strategy"), TABLES + PICTURES, ids=lambda one: getattr(one, "name", one)
)
def test_in_process(
    example: Example, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(examples.STANDIN)
    monkeypatch.syspath_prepend(tmp_path)
    example.write(tmp_path, line_of(example, strategy, BY_HAND))
    app = example.manifest(strategy)["tool"]["flwr"]["app"]
    for name in [*sys.modules]:
        if name.split(".")[0] in (app["components"]["serverapp"].split(".")[0], "datasets"):
            monkeypatch.delitem(sys.modules, name)
    server, client = (
        getattr(importlib.import_module(module), name)
        for module, name in (
            app["components"][one].split(":") for one in ("serverapp", "clientapp")
        )
    )
    nodes = [{"partition-id": n, "num-partitions": SILOS} for n in range(SILOS)]
    grid = FlowersRun(client, nodes, run_config=app["config"])
    server(grid, Context(7, 0, {}, RecordDict(), app["config"]))
    (folder,) = (tmp_path / "runs").iterdir()
    check(Result(folder), example, strategy)


def played(
    calls: Control, federation: LocalFederation, example: Example, strategy: str, line: str
) -> Result:
    """Run an example in a federation."""
    run_id = start_app(calls, example.manifest(strategy), example.files(line))
    until(lambda: calls.runs(run_id)[0].ended, f"{example.name}, {strategy}", deadline_s=1800)
    (folder,) = (federation.folder / "superlink" / "runs").glob(f"*-{run_id}")
    result = Result(folder)
    check(result, example, strategy)
    return result


def path_with(*folders: Path) -> str:
    """``PYTHONPATH`` with more folders."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A SuperLink whose ServerApps find the data; they leave their files here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path_with(examples.STANDIN))
    with LocalFederation(tmp_path / "federation") as local:
        local.superlink.wait()
        yield local


@pytest.mark.parametrize("cases", [TABLES, PICTURES], ids=["tables", "pictures"])
def test_on_resident_silos(
    cases: list[tuple[Example, str]], superlink: LocalFederation, tmp_path: Path
) -> None:
    address = superlink.superlink.fleet_address
    with control(superlink.superlink.control_address) as calls:
        for example in dict.fromkeys(example for example, _ in cases):
            own = tmp_path / example.name
            example.write(own, "None")
            app = example.manifest("")["tool"]["flwr"]["app"]["components"]["clientapp"]
            line = [sys.executable, "-m", "coterie.client", "serve", "--app", app]
            line += ["--partitions", f"0-{SILOS - 1}/{SILOS}", "--superlink", address]
            path = {"PYTHONPATH": path_with(own)}
            with programs([*line, "--home", str(own / "homes")], env={**ENVIRONMENT, **path}):
                until(lambda: calls.num_online() == SILOS, "the silos", deadline_s=120)
                for one, strategy in cases:
                    if one is example:
                        chosen = line_of(one, strategy, BY_HAND, ", ask_names=True")
                        played(calls, superlink, one, strategy, chosen)
            until(lambda: calls.num_online() == 0, "the silos to be gone", deadline_s=120)


@pytest.mark.parametrize("cases", [TABLES, PICTURES], ids=["tables", "pictures"])
def test_on_stock_supernodes(cases: list[tuple[Example, str]], superlink: LocalFederation) -> None:
    """A SuperNode starts a process for each message: that is slow."""
    lines = [
        [
            "flower-supernode", "--insecure",
            "--superlink", superlink.superlink.fleet_address,
            "--clientappio-api-address", f"127.0.0.1:{Ports.free().fleet}",
            "--node-config", f"partition-id={number} num-partitions={SILOS}",
        ]
        for number in range(SILOS)
    ]  # fmt: skip
    path = {"PYTHONPATH": path_with()}
    groups: Any = []
    with (
        control(superlink.superlink.control_address) as calls,
        programs(*lines, env={**ENVIRONMENT, **path}),
    ):
        until(lambda: calls.num_online() == SILOS, "the SuperNodes", deadline_s=120)
        for example, strategy in cases:
            line = line_of(example, strategy, groups)
            result = played(calls, superlink, example, strategy, line)
            groups = result.groups if strategy == "hcct" else groups
