"""Proxies between two machines: those named by variables, and those in front of the other end.

gRPC takes ``grpc_proxy``, ``https_proxy`` or ``http_proxy``, with or without TLS. Our calls within
this machine bypass both (``coterie.system.calls``); for other programs, ``no_proxy`` gets this
machine's names.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from coterie.system.ports import is_own, own_names, split_address

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
STATUS = re.compile(r"http2 header with status: (\d{3})\b")
"""Matches the details of a call that was not answered by a SuperLink."""
SIZE, NO_HTTP_2 = 413, ("http1.x server", "Expected SETTINGS frame", "missing selected ALPN")
ANSWERS = {
    400: "does not understand gRPC; it must pass HTTP/2 on, e.g. with grpc_pass",
    403: "refuses connections from here",
    404: "knows no such path; it must pass all of them on to the SuperLink",
    408: "timed out before the end of the message; raise its timeouts, e.g. client_body_timeout",
    SIZE: "refuses messages of this size; raise its limit, e.g. client_max_body_size",
    421: "does not serve this name; it must pass the connection on to the SuperLink",
    502: "does not reach the SuperLink",
    503: "does not reach the SuperLink",
    504: "timed out while waiting for the SuperLink; raise its timeouts, e.g. grpc_read_timeout",
}
"""HTTP status → its meaning if it comes from a proxy on the way."""

OTHER = (
    "the server there does not speak HTTP/2, which gRPC needs. A proxy on the way must pass "
    "HTTP/2 on, e.g. with grpc_pass; a SuperLink must run Flower 1.34."
)


class Proxy(NamedTuple):
    """A proxy that calls go through: ``HOST:PORT``, without credentials, and its variable."""

    variable: str
    address: str


def proxy_of(address: str) -> Proxy | None:
    """Return the proxy for calls to an address, ``HOST:PORT``, or None."""
    host = split_address(address)[0]
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    if not variable or is_own(host) or _is_excepted(host):
        return None
    place = os.environ[variable].rpartition("//")[2].partition("/")[0]  # it need not be a URL
    return Proxy(variable, place.rpartition("@")[2])


def through(address: str) -> str:
    """Return a sentence for errors of a call that goes through a proxy; else an empty text."""
    proxy = proxy_of(address)
    if proxy is None:
        return ""
    host = split_address(address)[0]
    return (
        f"Calls to {host} go through the proxy {proxy.address}, which {proxy.variable} names. If "
        f"they should not, add {host} to no_proxy."
    )


def answer_on_the_way(details: str) -> tuple[int, str]:
    """Return the HTTP status of a proxy that answered a call, and its meaning, from error details.

    The meaning is empty if a SuperLink answered, or nobody.
    """
    found = STATUS.search(details)
    if found is None:
        other = any(said in details for said in NO_HTTP_2)
        return 0, OTHER if other else ""
    status = int(found[1])
    what = ANSWERS.get(status, "answers in place of the SuperLink")
    return status, f"a proxy on the way {what} ({status})."


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a program's calls within this machine bypass its proxies."""
    if not any(name.casefold().endswith("_proxy") for name in environment):
        return {}
    # A zone is more than some programs can read.
    own = sorted(name for name in own_names() | {"127.0.0.0/8"} if "%" not in name)
    known = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    extended = known if known.strip() == "*" else ",".join(filter(None, [known, *own]))
    # gRPC does not know "*".
    for_grpc = ",".join(filter(None, [environment.get("no_grpc_proxy") or known, *own]))
    return {"no_proxy": extended, "NO_PROXY": extended, "no_grpc_proxy": for_grpc}


def _is_excepted(host: str) -> bool:
    listed = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy"))), "")
    return any(_covers(entry.strip(), host) for entry in listed.split(",") if entry.strip())


def _covers(entry: str, host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    return f".{host}".casefold().endswith(f".{entry.removeprefix('.')}".casefold())
