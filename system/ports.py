"""TCP ports and addresses of this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from contextlib import suppress
from functools import cache
from socket import AF_INET, AF_INET6

ANSWER_DEADLINE_S = 2.0
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses for listening on all interfaces → the address for connecting from this machine."""
_NAME, _V6 = re.compile(r"[A-Za-z0-9._-]+"), re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
MAX_PORT = 65535


_kept: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nothing listens.

    Linux gives them to nobody else while this process lives: it keeps a socket at each, which does
    not listen. Programs that set SO_REUSEADDR, as gRPC and Python's servers do, can listen there.
    """
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    if sys.platform == "linux":
        _kept.extend(probes)
    else:  # nobody could listen there
        for probe in probes:
            probe.close()
    return ports


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in brackets, which it may already have."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def address_of(text: str, port: int | None = None) -> str:
    """Return ``HOST:PORT`` from a person's text: a name, an IPv4 or an IPv6 address, in any form.

    An IPv6 address may have brackets or a zone. ``port`` is the default; None requires one in the
    text.

    Raises:
        ValueError: it is neither, or ambiguous.
    """
    host, _, last = text.rpartition(":")
    has_port = last.isdecimal() and _is_host(host)
    if has_port and port is not None and _is_host(text):  # ::1:9092 is an IPv6 address as well
        raise ValueError(f"{text!r} is ambiguous: write [{host}]:{last}, or [{text}]")
    if has_port and not 1 <= int(last) <= MAX_PORT:
        raise ValueError(f"the port must be 1 to {MAX_PORT}. Got {text!r}")
    if has_port:
        return join_address(host, int(last))
    if port is None or not _is_host(text):
        raise ValueError(
            f"must be HOST:PORT, such as fl.example.org:9092 or [::1]:9092. Got {text!r}"
        )
    return join_address(text, port)


def host_of(text: str) -> str:
    """Return a name or an IP address, without brackets.

    Raises:
        ValueError: it is neither.
    """
    if not _is_host(text):
        raise ValueError(f"must be a name or an IP address. Got {text!r}")
    return text.strip("[]")


def listen_address(text: str) -> str:
    """Return ``HOST:PORT`` from ``[HOST:]PORT``; the default host is 127.0.0.1.

    Raises:
        ValueError: it is neither.
    """
    try:
        return address_of(f"127.0.0.1:{text}" if text.isdecimal() else text)
    except ValueError:
        raise ValueError(f"must be PORT or HOST:PORT. Got {text!r}") from None


def from_here(address: str) -> str:
    """Return the address at which this machine itself reaches a listener."""
    host, port = split_address(address)
    return join_address(EVERYWHERE.get(host, host), port)


def is_loopback(host: str) -> bool:
    """Return whether a listener there is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_own(host: str) -> bool:
    """Return whether the host is this machine, as far as is known without a name server."""
    return is_loopback(host) or host.strip("[]").casefold() in own_names()


@cache
def own_names() -> frozenset[str]:
    """Return the names and addresses of this machine, in lower case."""
    import psutil  # which takes longer to load than all else here

    name = socket.gethostname().casefold()
    nets = psutil.net_if_addrs().values()
    found = {one.address for net in nets for one in net if one.family in (AF_INET, AF_INET6)}
    bare = {address.partition("%")[0] for address in found}
    return LOOPBACK_NAMES | found | bare | set(EVERYWHERE) | {name, name.partition(".")[0]}


def _is_host(text: str) -> bool:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" not in bare:
        return _NAME.fullmatch(text) is not None
    with suppress(ValueError):
        return _V6.fullmatch(bare) is not None and bool(ipaddress.IPv6Address(bare))
    return False


def names_loopback(host: str) -> bool:
    """Return whether a request's ``Host`` is a loopback name; others may indicate DNS rebinding."""
    parts = host.rpartition(":")
    name = (parts[0] if parts[1] and parts[2].isdigit() else "".join(parts)).strip("[]")
    return name in LOOPBACK_NAMES


def check_free(address: str) -> None:
    """Try to listen on an address.

    Raises:
        OSError: that is not possible, with the reason.
    """
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def listens(address: str) -> bool:
    """Return whether a connection to the address succeeds."""
    with (
        suppress(OSError),
        socket.create_connection(split_address(address), timeout=ANSWER_DEADLINE_S),
    ):
        return True
    return False
