"""TCP ports of this machine: which are free, and what listens."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

ANSWER_DEADLINE_S = 2.0


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Try to listen.

    Raises:
        OSError: that is not possible; it says why.
    """
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def listens(address: str) -> bool:
    """Whether something takes connections there."""
    with (
        suppress(OSError),
        socket.create_connection(split_address(address), timeout=ANSWER_DEADLINE_S),
    ):
        return True
    return False
