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
import torch

from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import Ports, SuperLink
from coterie.system.ports import join_address
from tests.contract.hostile.limiting import Limiting
from tests.e2e.gated import Gate, Gated
from tests.e2e.planted import KEYS, Towards
from tests.e2e.runs import COTERIE, ROOT, record_of, until

PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"),
    "http://127.0.0.1:9",
)
RUN = ("--rounds", "1", "--min-silos", "1", "--set", "local-epochs=1", "--set", "wait-for-silos=90")


class Large(Towards, Gated):
    """The gated digits with 6 MB in the model: more than an ingress passes by default."""

    begin = torch.linspace(0.0, 1.0, 1_500_000)


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("host", "proxies"),
    [
        pytest.param("127.0.0.1", PROXIES),
        pytest.param("::1", PROXIES, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")),
    ],
    ids=["IPv4", "IPv6"],
)
def test_a_run_within_this_machine_completes_and_its_log_is_clean(
    host: str, proxies: Mapping[str, str], tmp_path: Path
) -> None:
    ports, own, runs = Ports.free(), environment(tmp_path, proxies), tmp_path / "runs"
    line = ["superlink", "--host", host, "--runs-dir", str(runs)]
    line += ["--fleet-port", str(ports.fleet), "--control-port", str(ports.control)]
    line += ["--runtime-port", str(ports.runtime)]
    silo = ["silo", "serve", "--name", "a", "--set", "train=20", "--set", "test=10", "--superlink"]
    fleet, control = join_address(host, ports.fleet), join_address(host, ports.control)
    with (
        program(
            tmp_path / "superlink.log", own, *line, "--runtime-port", str(ports.runtime)
        ) as log,
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


@pytest.mark.nightly
def test_a_federation_starts_behind_a_proxy(tmp_path: Path) -> None:
    """Its parts call each other with TLS; an operator is warned of the proxy elsewhere."""
    ports, own = Ports.free(), environment(tmp_path, PROXIES)
    folder = tmp_path / "study"
    line = [*COTERIE, "federation", "init", str(folder), "--address", f"127.0.0.1:{ports.fleet}"]
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


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["in memory", "in a database"])
def test_a_reply_that_an_ingress_does_not_pass_costs_its_silo_the_round_alone(
    state: str, tmp_path: Path
) -> None:
    local, gate = LocalFederation(tmp_path / "federation"), Gate(tmp_path / "gate")
    if state == "in a database":
        home = tmp_path / "federation" / "superlink"
        home.mkdir(parents=True)
        local.superlink = SuperLink(home, options=["--database", str(home / "state.db")])
    with local:
        whole = local.superlink
        whole.wait()
        with Limiting(whole.fleet_address) as ingress:
            for index, name in enumerate("ab"):
                own = SiloSpec(name, "tests.e2e.test_network:Large",
                               options={"train": 40, "test": 30, "skip": 70 * index})  # fmt: skip
                local.superlink = ingress if name == "b" else whole  # type: ignore[assignment]
                local.start_silo(own, environment={**gate.environment, "PYTHONPATH": path()})
            local.superlink = whole
            local.wait_for_silos(2)
            gate.close()
            keys = {"task": "tests.e2e.test_network:Large", "strategy": "fedavg", "min-silos": 2}
            run_id, folder = local.submit(**keys, **{**KEYS, "rounds": 3, "lr": 0.1})
            gate.hold(2, rounds=1)
            ingress.most = 1_000_000
            gate.open()
            assert local.follow(run_id, folder, lambda event: None).status == "completed"
        said = local.log_of("b").read_text()
    why = (  # the second where the run's process has heard of the reply before it was given up
        "its reply could not be sent: a proxy on the way refuses messages of this size",
        "its reply cannot be read: the rest of it could not be found: the silo has given it up",
    )
    first, *rest = record_of(folder)["rounds"]
    assert first["left-out"] == {}
    for entry in rest:
        assert set(entry["left-out"]) == {"b"} and entry["left-out"]["b"].startswith(why)
        assert set(entry["silos"]) == {"a"}
    assert set(ingress.refused) == {"Put"}
    assert "a reply was given up: a proxy on the way" in said and "client_max_body_size" in said


def path() -> str:
    """Where the silos find this task."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
