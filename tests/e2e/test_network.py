"""Proxies, IPv6 and logs of real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from coterie.server.machine.superlink import Ports
from coterie.system.ports import join_address
from tests.e2e.runs import COTERIE, until

PROXIES = {
    name: "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY")
}
RUN = ("--rounds", "1", "--min-silos", "1", "--set", "local-epochs=1", "--set", "wait-for-silos=90")


def environment(folder: Path, proxies: Mapping[str, str]) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return {**own, **proxies, "COTERIE_HOME": str(folder / "home")}


@contextmanager
def program(log: Path, own: Mapping[str, str], *line: str) -> Iterator[Path]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COTERIE, *line], env=own, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "proxies"),
    [
        ("127.0.0.1", PROXIES),
        pytest.param("::1", {}, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")),
    ],
    ids=["proxies", "IPv6"],
)
def test_a_run_within_this_machine_completes_and_its_log_is_clean(
    host: str, proxies: Mapping[str, str], tmp_path: Path
) -> None:
    ports, own, runs = Ports.free(), environment(tmp_path, proxies), tmp_path / "runs"
    line = ["superlink", "--host", host, "--runs-dir", str(runs)]
    line += ["--fleet-port", str(ports.fleet), "--control-port", str(ports.control)]
    silo = ["silo", "--name", "a", "--set", "train=20", "--set", "test=10", "--superlink"]
    fleet, control = join_address(host, ports.fleet), join_address(host, ports.control)
    with (
        program(tmp_path / "superlink.log", own, *line, "--runtime-port", str(ports.runtime)) as log,
        program(tmp_path / "silo.log", own, *silo, fleet) as other,
    ):
        until(lambda: "is connected" in other.read_text(), "the silo to connect", deadline_s=150)
        done = subprocess.run(
            [*COTERIE, "run", "fedavg", *RUN, "--superlink", control, "--runs-dir", str(runs)],
            env=own, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        said = log.read_text()
        assert done.returncode == 0, done.stdout + done.stderr + said
    (record,) = runs.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "completed"
    assert f"silos connect to {fleet}, operators to {control}" in said
    assert "\x1b" not in said + other.read_text() and "WARNING" not in said, said


def test_a_federation_starts_behind_a_proxy(tmp_path: Path) -> None:
    """Its parts call each other with TLS; an operator is told of the proxy elsewhere."""
    ports, own = Ports.free(), environment(tmp_path, PROXIES)
    folder = tmp_path / "study"
    line = [*COTERIE, "init", str(folder), "--address", f"127.0.0.1:{ports.fleet}"]
    line += ["--control-port", str(ports.control), "--runtime-port", str(ports.runtime)]
    subprocess.run(line, env=own, check=True, capture_output=True, timeout=120)
    started = ("superlink", "--federation", str(folder))
    with program(tmp_path / "superlink.log", own, *started) as log:
        until(lambda: "operators to" in log.read_text(), "the SuperLink", deadline_s=150)
    elsewhere = [*COTERIE, "status", "--superlink", "192.0.2.1:9093"]
    done = subprocess.run(elsewhere, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "go through the proxy 127.0.0.1:9, which grpc_proxy names" in done.stderr
    assert "add 192.0.2.1 to no_proxy" in done.stderr
