"""The compose federation under test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STRATEGY, ROUNDS, JOINS = "hcct", 10, 5
BUILD_DEADLINE_S, RUN_DEADLINE_S = 3600.0, 900.0


def compose_command() -> list[str]:
    """Compose v2 where it is installed, else 1.29."""
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if found.returncode == 0 else ["docker-compose"]


class Federation:
    """The compose project under test."""

    def __init__(self, *files: str, records: str = "executor:/runs") -> None:
        self.project = f"coterie-e2e-{os.getpid()}"
        named = [part for file in files for part in ("--file", file)]
        self.command = [*compose_command(), "--project-name", self.project, *named]
        self.records = records.split(":")
        self.environment = {
            **os.environ,
            "COTERIE_STRATEGY": STRATEGY,
            "COTERIE_ROUNDS": str(ROUNDS),
            "COTERIE_CONTROL_PORT": "0",
        }

    def compose(self, *arguments: str, deadline_s: float = 300.0, **changes: str) -> str:
        """Run compose; return its output.

        Args:
            arguments: of compose.
            deadline_s: seconds after which it is given up.
            changes: of the environment, for this call and those after it.
        """
        self.environment |= changes
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=ROOT, env=self.environment, timeout=deadline_s, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def container(self, service: str) -> str:
        """Id of a service's container."""
        return docker(
            "ps", "--all", "--quiet", "--latest",
            "--filter", f"label=com.docker.compose.project={self.project}",
            "--filter", f"label=com.docker.compose.service={service}",
        ).strip()  # fmt: skip

    def state(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's container."""
        found: dict[str, Any] = json.loads(
            docker("inspect", "--format", "{{json .State}}", self.container(service))
        )
        return found

    def inside(self, service: str, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a service's container."""
        return subprocess.run(
            ["docker", "exec", self.container(service), "python", "-c", code],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def log(self, service: str) -> str:
        """What a service has printed."""
        done = subprocess.run(
            ["docker", "logs", self.container(service)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout

    def end_of_run(self) -> str:
        """Wait for ``run`` to end well; return its log."""
        until(lambda: not self.state("run")["Running"], "the run to end", RUN_DEADLINE_S, self)
        assert self.state("run")["ExitCode"] == 0, self.log("run")
        return self.log("run")

    def record(self, folder: Path) -> dict[str, Any]:
        """The newest run's record, copied from the volume."""
        shutil.rmtree(folder, ignore_errors=True)
        service, path = self.records
        docker("cp", f"{self.container(service)}:{path}", str(folder))
        newest = max(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        found: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))
        return found


def docker(*arguments: str) -> str:
    """Run docker; return its output."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(
    condition: Callable[[], bool], what: str, deadline_s: float, federation: Federation
) -> None:
    """Wait for a condition; say what was waited for, and what the services said."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            words = {name: federation.log(name)[-1500:] for name in ("run", "superlink", "silo-1")}
            pytest.fail(f"waited {deadline_s:.0f} s for {what}:\n{words}")
        time.sleep(1.0)


@contextmanager
def up(*files: str, records: str = "executor:/runs") -> Iterator[Federation]:
    """The federation of these files, up; afterwards nothing of it is left.

    Args:
        files: of compose.
        records: service and folder of the runs' records.
    """
    own = Federation(*files, records=records)
    try:
        own.compose("build", "superlink", "silo-1", deadline_s=BUILD_DEADLINE_S)
        own.compose("up", "-d", COTERIE_CHURN=f"silo-7+{JOINS}")
        yield own
    finally:
        own.compose("--profile", "newcomer", "down", "--volumes", "--remove-orphans")
        for listed in (["ps", "-aq"], ["volume", "ls", "-q"], ["network", "ls", "-q"]):
            assert not docker(*listed, "--filter", f"name={own.project}").strip()


def newcomer_joins_and_models_are_the_simulations(federation: Federation, folder: Path) -> None:
    """The run that ``up`` started, to its end: groups, newcomer, and the models bit for bit."""
    until(lambda: "round 2/" in federation.log("run"), "round 2", RUN_DEADLINE_S, federation)
    federation.compose("--profile", "newcomer", "up", "-d", "silo-7")
    log = federation.end_of_run()
    print(log)
    assert "silo-7 joined" in log and "models and record: /" in log
    record = federation.record(folder / "runs")
    assert record["status"] == "completed"
    assert record["rounds"][JOINS - 1]["joined"] == ["silo-7"]
    assert sorted(map(sorted, record["final-groups"])) == [
        ["silo-1", "silo-2", "silo-3"], ["silo-4", "silo-5"], ["silo-6", "silo-7"],
    ]  # fmt: skip
    simulated = subprocess.run(
        ["docker", "run", "--rm", "--volume", f"{ROOT}/docker/federation.toml:/federation.toml:ro",
         docker("inspect", "--format", "{{.Image}}", federation.container("silo-1")).strip(),
         "simulate", "/federation.toml", "--runs-dir", "/tmp/runs",
         "--set", f"churn=silo-7+{JOINS}", "--set", f"rounds={ROUNDS}",
         "--set", f"strategy={STRATEGY}", "--json"],
        capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False,
    )  # fmt: skip
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["model-hashes"] == record["model-hashes"]
