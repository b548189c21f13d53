"""Apps in the shape of Flower's quickstarts under resident silos: a SuperLink, gRPC, a FAB."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from flwr.app import ArrayRecord

import coterie
from coterie.client.ledger import read
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.link import Control, control
from coterie.server.machine.local import LocalFederation
from coterie.server.study.result import Result
from coterie.strategies import FedCollab, FirstStage, PerGroup
from tests.apps import quick_pairs, quick_server
from tests.e2e import warm
from tests.e2e.organisations import Organisations
from tests.e2e.runs import ROOT, supernode, until
from tests.unit.strategies.test_per_group import Bagging

APPS = ROOT / "tests" / "apps"
FILES = ("quick_numpy.py", "quick_server.py", "quick_torch.py")
FLOWER, OURS = "flwr.serverapp.strategy", "coterie.strategies"
CONFIGS = {"quick_numpy": {"step": 0.5}, "quick_torch": {"batch-size": 16, "local-epochs": 2}}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{APPS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "FLWR_TELEMETRY_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
}


def submit(calls: Control, client: str, config: dict[str, Any]) -> int:
    """Start a run of a quickstart; return its id."""
    components = {"serverapp": "quick_server:server", "clientapp": f"{client}:app"}
    manifest = {
        "project": {
            "name": "quickstart", "version": "1.0.0", "description": "", "license": "Apache-2.0",
            "dependencies": ["flwr>=1.34,<1.35"],
        },
        "tool": {"flwr": {"app": {
            "publisher": "tests", "components": components, "config": config,
        }}},
    }  # fmt: skip
    return start_app(calls, manifest, {name: (APPS / name).read_bytes() for name in FILES})


def start_app(calls: Control, manifest: dict[str, Any], files: dict[str, bytes]) -> int:
    """Start a run of an app, code and all, as ``flwr run`` does; return its id."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.supercore.fab import Fab

    content, _ = build_fab_from_files({"pyproject.toml": tomli_w.dumps(manifest).encode(), **files})
    made = Fab(hashlib.sha256(content).hexdigest(), content, {})
    return int(calls._call("StartRun", fab=fab_to_proto(made)).run_id)


def result_of(calls: Control, client: str, strategies: str, strategy: str, file: Path) -> Any:
    """What a run of three rounds comes to."""
    config = {**CONFIGS[client], "client": client, "strategies": strategies, "strategy": strategy}
    run_id = submit(calls, client, {**config, "rounds": 3, "result": str(file)})
    until(lambda: calls.runs(run_id)[0].ended, "the run to end", deadline_s=200)
    assert file.exists(), calls.runs(run_id)[0]
    return json.loads(file.read_text())


def in_process(client: str, strategies: str, strategy: str) -> Any:
    """The same without any process, called as a SuperNode calls an app."""
    from flwr.app import Context, Message, RecordDict

    app = __import__(f"tests.apps.{client}", fromlist=["app"]).app
    own: dict[int, RecordDict] = {}

    def call(message: Message, context: Context) -> Message:
        state = own.setdefault(context.node_id, RecordDict())
        node = dict(context.node_config)
        reply: Message = app(message, Context(1, context.node_id, node, state, CONFIGS[client]))
        return reply

    config = {"client": f"tests.apps.{client}", "strategies": strategies, "strategy": strategy}
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    result = quick_server.run(InProcessGrid(call, nodes), {**config, "rounds": 3})
    return json.loads(json.dumps(result))


@contextmanager
def programs(
    *lines: list[str], env: dict[str, str] = ENVIRONMENT
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run programs until the block ends."""
    with Path(os.devnull).open("wb") as nowhere:
        own = {"env": env, "stdout": nowhere, "stderr": nowhere}
        running: list[Any] = [
            (warm.popen if line[0] == sys.executable else subprocess.Popen)(line, **own)
            for line in lines
        ]
    try:
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)


def wait_for_two(calls: Control, running: list[subprocess.Popen[bytes]]) -> None:
    until(
        lambda: calls.num_online() == 2 or any(one.poll() is not None for one in running),
        "two nodes",
    )
    assert all(one.poll() is None for one in running)


def test_an_app_from_python_has_the_same_results_in_processes_as_in_one(tmp_path: Path) -> None:
    """Its groups come from coterie's discriminators, which the app calls."""
    weights = ArrayRecord([np.zeros(1)])
    first = FirstStage(FedCollab(), weights, num_rounds=1, action="groups")
    one = {"min_available_nodes": 1, "min_train_nodes": 1}
    strategy = PerGroup(first, lambda group: Bagging(**one))

    def played(**how: Any) -> Result:
        return coterie.simulate(
            quick_pairs.app, quick_pairs.NODES, strategy=strategy, rounds=2, progress=False,
            initial_arrays=quick_pairs.NOTHING, run_config={"scale": 2}, runs_dir=tmp_path, **how,
        )  # fmt: skip

    here, there = played(), played(processes=3, folder=tmp_path / "federation")
    assert here.groups == there.groups == [["east"], ["north", "south"]]
    assert here.run.model_hashes == there.run.model_hashes and len(here.run.model_hashes) == 3
    assert here.metric_rows == there.metric_rows
    sizes = {row["silo"]: (row["loss"], row["size"]) for row in here.metric_rows}
    assert sizes == {"north": (0.0, 8.0), "east": (0.0, 4.0), "south": (0.0, 8.0)}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_quickstarts_under_resident_silos_are_the_quickstarts_bit_for_bit(
    federation: LocalFederation, tmp_path: Path
) -> None:
    federation.superlink.wait()
    address, homes = federation.superlink.fleet_address, tmp_path / "silos"
    runs = [("quick_numpy", FLOWER, "FedAvg"), ("quick_torch", OURS, "HCCT")]
    with control(federation.superlink.control_address) as calls:
        for client, strategies, strategy in runs:
            line = [sys.executable, "-m", "coterie.client", "serve", "--app", f"{client}:app"]
            line += ["--partitions", "0-1/2", "--superlink", address, "--home", str(homes)]
            with programs(line) as running:
                wait_for_two(calls, running)
                result = result_of(calls, client, strategies, strategy, tmp_path / f"{client}.json")
            until(lambda: calls.num_online() == 0, "the silos to be gone")
            assert result == in_process(client, strategies, strategy)
            assert result["left-out"] == [{}] * len(result["left-out"])
    for name in ("silo-0", "silo-1"):
        kinds = [entry["type"] for entry in read(homes / name)]
        # HCCT evaluates after the rounds but the last, and at the end; Flower after every round.
        assert kinds.count("train") == kinds.count("evaluate") == 6


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_stock_supernodes_give_the_same_models(federation: LocalFederation, tmp_path: Path) -> None:
    """A SuperNode starts a process per message: that is slow."""
    federation.superlink.wait()
    lines = [supernode(federation, f"partition-id={number} num-partitions=2") for number in (0, 1)]
    with control(federation.superlink.control_address) as calls, programs(*lines) as running:
        wait_for_two(calls, running)
        for client, strategies, strategy in (
            ("quick_numpy", FLOWER, "FedAvg"),
            ("quick_torch", OURS, "HCCT"),
        ):
            result = result_of(calls, client, strategies, strategy, tmp_path / f"{client}.json")
            assert result == in_process(client, strategies, strategy)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_app_serves_an_organisation_with_its_key_tls_and_policy(
    pair: Organisations, tmp_path: Path
) -> None:
    """``coterie silo serve --app``, in place of the task that the silo served before."""
    for number, name in enumerate(("a", "b")):
        pair.end(name)
        file = pair.home_of(name) / "silo.toml"
        kept = file.read_text()
        (tmp_path / name).write_text(kept)
        file.write_text(
            f'name = "{name}"\ntask = "digits"\n'
            f"[data]\npartition-id = {number}\nnum-partitions = 2\n"
            '[policy]\nstrategies = ["hcct"]\nshare_metrics = ["loss"]\n'
        )
        # Another number of threads rounds differently, in the app as anywhere.
        line = ["env", *(f"{key}={ENVIRONMENT[key]}" for key in ("PYTHONPATH", "OMP_NUM_THREADS"))]
        line += [sys.executable, "-m", "coterie.client", "serve", "--app", "quick_torch:app"]
        pair.start_program(name, *line, "--home", str(pair.home_of(name)))
    try:
        pair.wait_for(2)
        with pair.control() as calls:
            result = result_of(calls, "quick_torch", OURS, "HCCT", tmp_path / "result.json")
            refused = submit(
                calls, "quick_torch",
                {
                    **CONFIGS["quick_torch"], "client": "quick_torch", "strategies": OURS,
                    "strategy": "FedAvg", "rounds": 1, "result": str(tmp_path / "never.json"),
                },
            )  # fmt: skip
            until(lambda: calls.runs(refused)[0].ended, "the run to end", deadline_s=100)
        expected = in_process("quick_torch", OURS, "HCCT")
        assert (result["model"], result["models"]) == (expected["model"], expected["models"])
        assert result["evaluation"].keys() == {"eval_loss", "loss", "num-examples"}
        said = pair.said("a")
        assert "serves the app quick_torch:app, not its task" in said
        assert "Only these metrics leave: numbers of samples, loss." in said
        assert "takes part in hcct; this run's strategy is fedavg" in said
        entries = [e for e in read(pair.home_of("a")) if e["type"] == "evaluate"]
        assert "eval_acc" not in json.dumps(entries[-1])
    finally:
        for name in ("a", "b"):
            pair.end(name)
            (pair.home_of(name) / "silo.toml").write_text((tmp_path / name).read_text())
