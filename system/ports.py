"""TCP ports of this machine: which are free, and what listens."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import ExitStack, suppress

ANSWER_DEADLINE_S = 2.0
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


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


def listen_address(text: str) -> str:
    """``HOST:PORT`` of ``[HOST:]PORT``; without a host, this machine alone.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    known = re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*", host)
    if not known or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ValueError(f"must be PORT or HOST:PORT. Got {text!r}")
    return f"{host or '127.0.0.1'}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(host: str) -> bool:
    """Whether a request's ``Host`` is a name of this machine: else a page elsewhere asks by DNS."""
    parts = host.rpartition(":")
    name = (parts[0] if parts[1] and parts[2].isdigit() else "".join(parts)).strip("[]")
    return name in LOOPBACK_NAMES


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
