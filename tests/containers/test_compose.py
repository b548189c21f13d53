"""compose.yaml on a real Docker engine: a run with a newcomer, what fails, who reaches whom.

The tests share one federation and run in the order in which they stand; at the end everything is
taken down. ``COTERIE_BASE`` names the base image; ``docker/base.sh`` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.compose import (
    RUN_DEADLINE_S,
    Federation,
    docker,
    newcomer_joins_and_models_are_the_simulations,
    until,
    up,
)

pytestmark = pytest.mark.timeout(4500)


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with up("compose.yaml") as own:
        yield own


def test_a_newcomer_joins_in_the_middle_and_the_run_is_the_simulations(
    federation: Federation, tmp_path: Path
) -> None:
    newcomer_joins_and_models_are_the_simulations(federation, tmp_path)


def test_a_silo_keeps_its_own_model_on_its_own_volume(
    federation: Federation, tmp_path: Path
) -> None:
    docker("cp", f"{federation.container('silo-4')}:/silo", str(tmp_path / "silo"))
    assert list((tmp_path / "silo").rglob("*.safetensors"))


def test_nobody_runs_as_root_and_silos_alone_have_pytorch(federation: Federation) -> None:
    images = {}
    for service in ("superlink", "executor", "silo-1", "silo-7"):
        who = federation.inside(service, "import os; print(os.getuid())")
        assert who.stdout.strip() == "10001", who
        name = docker("inspect", "--format", "{{.Config.Image}}", federation.container(service))
        images[service] = name.partition(":")[0]
    assert images == {
        "superlink": "coterie-coordinator",
        "executor": "coterie-coordinator",
        "silo-1": "coterie-silo",
        "silo-7": "coterie-silo",
    }


CONNECT = "import socket; socket.create_connection(({host!r}, {port}), 5); print('reached')"
LISTEN = (
    "import socket, time; s = socket.create_server(('0.0.0.0', 8000)); s.settimeout(100);"
    "[s.accept() for _ in range(9)]"
)


def address_of(federation: Federation, service: str) -> str:
    text = docker(
        "inspect", "--format", "{{json .NetworkSettings.Networks}}", federation.container(service)
    )
    (network,) = json.loads(text).values()
    return str(network["IPAddress"])


def test_a_silo_reaches_the_superlink_for_silos_and_nothing_else(federation: Federation) -> None:
    def reaches(service: str, host: str, port: int) -> bool:
        return "reached" in federation.inside(service, CONNECT.format(host=host, port=port)).stdout

    docker("exec", "--detach", federation.container("silo-2"), "python", "-c", LISTEN)
    other = address_of(federation, "silo-2")
    until(lambda: reaches("silo-2", other, 8000), "silo-2 to listen", 30, federation)
    assert not reaches("silo-1", other, 8000)
    assert not reaches("silo-1", "silo-2", 8000)
    assert reaches("silo-1", "superlink", 9092)
    assert not reaches("silo-1", "superlink", 9093), "operators' API"
    assert not reaches("silo-1", "superlink", 9091), "the ServerApp's API"
    inner = federation.inside(
        "executor", "import socket; print(socket.gethostbyname('coordinator'))"
    )
    assert not reaches("silo-1", inner.stdout.strip(), 9093)


def test_a_run_goes_on_through_a_dead_silo_and_a_restarted_superlink(
    federation: Federation, tmp_path: Path
) -> None:
    federation.compose(
        "up", "-d", "--no-deps", "run", COTERIE_CHURN="", COTERIE_ROUNDS="14", COTERIE_SEED="1"
    )
    until(lambda: "round 2/" in federation.log("run"), "round 2", RUN_DEADLINE_S, federation)
    started = federation.state("silo-2")["StartedAt"]
    kill = "kill -9 $(cat /proc/1/task/1/children)"  # as a crash: the engine starts it again
    docker("exec", federation.container("silo-2"), "sh", "-c", kill)
    until(
        lambda: federation.state("silo-2")["StartedAt"] != started,
        "silo-2's return",
        60,
        federation,
    )
    until(lambda: "round 6/" in federation.log("run"), "round 6", RUN_DEADLINE_S, federation)
    docker("restart", federation.container("superlink"))
    log = federation.end_of_run()
    print(log)
    record = federation.record(tmp_path / "runs")
    assert record["status"] == "completed" and len(record["rounds"]) == 14
    others = {"silo-1", "silo-3", "silo-4", "silo-5", "silo-6", "silo-7"}
    assert others <= set(record["final-evaluation"])
