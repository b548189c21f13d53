"""The same two nodes, a and b, with each engine before them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.engine.control import pack
from coterie.engine.inprocess import InProcessGrid
from coterie.engine.port import Engine
from coterie.server.machine.link import Control, control
from coterie.server.machine.superlink import HOST, Ports, SuperLink
from coterie.system.ports import listens
from coterie.system.processes import Program
from tests.contract.engine import apps
from tests.e2e.runs import ROOT, until
from tests.e2e.warm import Silo


@dataclass
class Federation:
    """An engine, and who can make its nodes come and go.

    Attributes:
        come: starts a node; it is connected a little later.
        go: ends node a.
        ended: how the run ended, after its engine was closed; "" if there is no run.
    """

    engine: Engine
    come: Callable[[], object]
    go: Callable[[], object]
    ended: Callable[[], str] = lambda: ""


@contextmanager
def in_process(folder: Path) -> Iterator[Federation]:
    grid = InProcessGrid(apps.app, [{"name": "a"}, {"name": "b"}])
    yield Federation(grid, lambda: grid.connect({"name": "c"}), lambda: grid.disconnect(1))


@contextmanager
def fast(folder: Path) -> Iterator[Federation]:
    """coterie's SuperLink, resident silos."""
    with SuperLink(folder / "superlink") as link:
        line = [sys.executable, "-m", "coterie.client", "serve", "--app", f"{apps.__name__}:app"]
        line += ["--superlink", link.fleet_address]

        def silo(name: str) -> list[str]:
            return [*line, "--name", name, "--set", f"name={name}", "--home", str(folder / name)]

        with control(link.control_address) as calls, _lent("fast", calls, silo, folder) as made:
            yield made


@contextmanager
def plain(folder: Path) -> Iterator[Federation]:
    """Flower's SuperLink and SuperNodes, as they are."""
    ports = Ports.free()
    silos, operators, runtime = ports.at(HOST)
    line = [_flower("superlink"), "--insecure", "--disable-runtime-dependency-installation"]
    line += ["--fleet-api-address", silos, "--control-api-address", operators]
    line += ["--serverappio-api-address", runtime]

    def node(name: str) -> list[str]:
        own = [_flower("supernode"), "--insecure", "--superlink", silos]
        return [*own, "--clientappio-api-address", f"{HOST}:{Ports.free().fleet}"]

    superlink = _program("superlink", line, folder)
    superlink.start()
    try:
        superlink.wait_until(lambda: all(map(listens, (silos, operators))), deadline_s=60)
        with control(operators) as calls, _lent("plain", calls, node, folder) as made:
            yield made
    finally:
        stopped(superlink)


FEDERATIONS: dict[str, Any] = {"in process": in_process, "plain": plain, "fast": fast}


def _flower(what: str) -> str:
    return str(Path(sys.executable).parent / f"flower-{what}")


def stopped(program: Program) -> None:
    program.stop(deadline_s=20, rest=signal.SIGKILL)


def _program(name: str, line: list[str], folder: Path, kind: type[Program] = Program) -> Program:
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return kind(name, line, log=folder / f"{name}.log", environment=environment)


@contextmanager
def _lent(
    engine: str, calls: Control, line_of: Callable[[str], list[str]], folder: Path
) -> Iterator[Federation]:
    """Nodes a and b, and the engine of a run of ``apps.server``."""
    nodes: list[Program] = []

    def come() -> None:
        name = "abc"[len(nodes)]
        nodes.append(_program(name, line_of(name), folder, Silo if engine == "fast" else Program))
        nodes[-1].start()

    with tempfile.TemporaryDirectory() as place:  # a socket's path may not be long
        socket = f"{place}/engine"
        try:
            come()
            come()
            until(lambda: calls.num_online() == 2, "two nodes", deadline_s=90)
            run_id = calls.start(_bundle(), {"engine": engine, "socket": socket})
            assert run_id is not None
            until(lambda: Path(socket).exists(), "the ServerApp", deadline_s=90)

            def ended() -> str:
                until(lambda: calls.runs(run_id)[0].ended, "the run's end", deadline_s=60)
                return calls.runs(run_id)[0].sub_status

            yield Federation(apps.Lent(socket), come, lambda: stopped(nodes[0]), ended)
        finally:
            for node in nodes:
                stopped(node)


def _bundle() -> bytes:
    parts = {"serverapp": f"{apps.__name__}:server", "clientapp": f"{apps.__name__}:app"}
    own = {"publisher": "tests", "components": parts, "config": {"engine": "", "socket": ""}}
    about: dict[str, object] = {"name": "engine", "version": "1.0.0", "license": "Apache-2.0"}
    about |= {"description": "of the contract suite", "dependencies": ["flwr>=1.34"]}
    return pack({"project": about, "tool": {"flwr": {"app": own}}})
