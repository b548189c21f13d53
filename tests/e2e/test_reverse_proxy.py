"""A reverse proxy in front of the SuperLink: limits before anybody has shown a key."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.server.machine.superlink import Ports
from tests.e2e.organisations import NAMES, Organisations
from tests.e2e.runs import ROOT, finished, in_process, until
from tests.e2e.test_organisations import KEYS, RUN

CONFIG = ROOT / "docker" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy")
ELSEWHERE = "127.0.0.2"
"""An address of this machine that no silo comes from."""
MOST, INSPECTED_S = 20, 5.0
"""Connections from one address, and seconds to begin TLS, as the configuration has them."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(HAPROXY is None, reason="no haproxy: apt-get install haproxy"),
]


@pytest.fixture
def proxied(pair: Organisations) -> Iterator[int]:
    """The port of a proxy through which both silos come."""
    port = Ports.free().fleet
    settings = {
        "COTERIE_LISTEN": f"127.0.0.1:{port},{ELSEWHERE}:{port}",
        "COTERIE_SUPERLINK": f"127.0.0.1:{pair.ports.fleet}",
    }
    assert HAPROXY is not None
    process = subprocess.Popen([HAPROXY, "-f", str(CONFIG)], env={**os.environ, **settings})
    files = [pair.home_of(name) / "coordinator.json" for name in NAMES]
    before = [file.read_text() for file in files]
    try:
        until(lambda: reaches(port), "the proxy to listen")
        for name, file in zip(NAMES, files, strict=True):
            file.write_text(file.read_text().replace(str(pair.ports.fleet), str(port)))
            pair.end(name)
            pair.start_silo(name)
        pair.wait_for(2)
        yield port
    finally:
        for name, file, text in zip(NAMES, files, before, strict=True):
            file.write_text(text)
            pair.end(name)
        process.terminate()
        process.wait(10)
        for name in NAMES:
            pair.start_silo(name)
        pair.wait_for(2)


def reaches(port: int) -> bool:
    """Whether anybody listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def connections(port: int, count: int) -> list[socket.socket]:
    """Connections from elsewhere that say nothing; those that are not refused at once."""
    found = []
    for _ in range(count):
        connection = socket.socket()
        connection.settimeout(10)
        connection.bind((ELSEWHERE, 0))
        try:
            connection.connect((ELSEWHERE, port))
            found.append(connection)
        except ConnectionError:
            connection.close()
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_run_goes_on_while_somebody_without_a_key_opens_connections(
    pair: Organisations, proxied: int, tmp_path: Path
) -> None:
    folder = pair.submit(*RUN)
    silent = connections(proxied, 3 * MOST)
    time.sleep(1.0)
    assert not all(map(closed, silent)), "they have some seconds to begin TLS"
    assert sum(not closed(one) for one in silent) <= MOST, "the others are refused at once"
    hashes = finished(folder)
    until(lambda: all(map(closed, silent)), "those that begin no TLS to be cut off", deadline_s=15)
    assert hashes == in_process(tmp_path / "run", *NAMES, **KEYS)["model-hashes"]
    for connection in silent:
        connection.close()
