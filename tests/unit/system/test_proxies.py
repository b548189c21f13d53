"""Proxies that variables name, and proxies that answer in place of a SuperLink."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest

from coterie.server.site.federation import create
from coterie.system.calls import open_channel
from coterie.system.ports import free_ports
from coterie.system.proxies import answer_on_the_way, past_proxies, proxy_of, through
from tests.contract.hostile.ingress import Ingress

ELSEWHERE = "fl.example.org:9092"
VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
CAPITALS = tuple(name.upper() for name in VARIABLES)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.casefold().endswith("_proxy"):
            monkeypatch.delenv(name)


def failure(address: str, *, body: bytes = b"", certificates: bytes | None = None) -> str:
    with open_channel(address, certificates) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/flwr.proto.Fleet/PushObject")(body, timeout=30)
    return str(caught.value.details())


@pytest.mark.parametrize("name", [*VARIABLES, *CAPITALS])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_calls_within_this_machine_go_past_every_proxy(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, here = free_ports(2)
    monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
    said = failure(f"{host}:{here}")
    assert str(here) in said and str(proxy) not in said and "roxy" not in said


def test_calls_elsewhere_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    (proxy,) = free_ports(1)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
    assert str(proxy) in failure(ELSEWHERE)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"http_proxy": "http://ada:secret@proxy.example:3128/"}, "http_proxy"),
        ({"http_proxy": "http://[::1@proxy.example:3128"}, "http_proxy"),  # a bracket is missing
        ({"https_proxy": "http://proxy.example:3128"}, "https_proxy"),
        ({"grpc_proxy": "proxy.example:3128", "http_proxy": "http://x:1"}, "grpc_proxy"),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, ""),  # which gRPC does not know
        ({"https_proxy": "http://p:1", "no_proxy": "a, .example.org"}, ""),
        ({"https_proxy": "http://p:1", "no_proxy": "fl.example.org"}, ""),
        ({"https_proxy": "http://p:1", "no_proxy": "le.org"}, "https_proxy"),
        ({"https_proxy": "http://p:1", "no_grpc_proxy": "b", "no_proxy": "org"}, "https_proxy"),
    ],
)  # fmt: skip
def test_an_error_names_the_proxy_and_its_variable_and_no_secret(
    variables: Mapping[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = through(ELSEWHERE)
    assert bool(found) == bool(said)
    if found:
        where = "proxy.example:3128" if "proxy.example" in variables[found] else "p:1"
        assert f"go through the proxy {where}, which {found} names" in said
        assert "add fl.example.org to no_proxy" in said and "secret" not in said


def test_what_grpc_goes_past_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://p:1")
    monkeypatch.setenv("no_proxy", "192.0.2.0/24")
    assert proxy_of("192.0.2.7:1") is None
    assert proxy_of("192.0.3.7:1") is not None
    assert proxy_of("127.0.0.9:1") is None and proxy_of("[::1]:1") is None


class Passing(BaseHTTPRequestHandler):
    """A server, and a proxy that says so."""

    def do_GET(self) -> None:
        self.send_response_only(502 if self.path.startswith("http://") else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_http(tls: Path | None = None) -> Iterator[int]:
    """The port of such a server, with a federation's certificate where it has TLS."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
        served.socket = context.wrap_socket(served.socket, server_side=True)
    Thread(target=served.serve_forever, daemon=True).start()
    yield served.server_port
    served.shutdown()
    served.server_close()


@pytest.fixture
def server() -> Iterator[int]:
    with serving_http() as port:
        yield port


@pytest.mark.parametrize(
    "before", [{}, {"no_proxy": "x.example"}, {"NO_PROXY": "x.example"}, {"no_proxy": "*"}]
)
def test_programs_that_are_not_ours_go_past_it_as_well(
    before: Mapping[str, str], server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gRPC and over HTTP."""
    import httpx

    own = {"ALL_PROXY": f"http://127.0.0.1:{server}", "grpc_proxy": "http://127.0.0.1:9", **before}
    own |= past_proxies(own)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert httpx.get(f"http://127.0.0.1:{server}/").status_code == http.client.OK
    if before.get("no_proxy") != "*":
        assert httpx.get("http://fl.example.org/").status_code == http.client.BAD_GATEWAY
    (here,) = free_ports(1)
    with grpc.insecure_channel(f"127.0.0.1:{here}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/a/b")(b"", timeout=30)
        assert str(here) in str(caught.value.details())
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        assert own[name].startswith(next(iter(before.values()), "0.0.0.0"))


def test_a_program_without_a_proxy_is_told_nothing() -> None:
    assert past_proxies({"PATH": "/bin"}) == {}


@pytest.mark.parametrize(
    ("status", "what"),
    [
        (413, "refuses messages of this size; raise its limit, e.g. client_max_body_size (413)."),
        (404, "knows no such path"),
        (403, "refuses connections"),
        (400, "does not understand gRPC"),
        (421, "does not serve this name"),
        (502, "does not reach the SuperLink (502)"),
        (503, "does not reach the SuperLink (503)"),
        (504, "raise its timeouts, e.g. grpc_read_timeout"),
        (418, "answers in place of the SuperLink (418)"),
    ],
)
def test_what_a_proxy_in_front_of_the_superlink_answers_is_said_in_words(
    status: int, what: str
) -> None:
    with Ingress(status) as ingress:
        details = failure(ingress.address, body=b"x" * 2_000_000)
    found, said = answer_on_the_way(details)
    assert found == status and said.startswith("a proxy on the way ") and what in said


@pytest.mark.parametrize("tls", [False, True])
def test_what_speaks_no_http_2_is_said_to_be_none(tls: bool, tmp_path: Path) -> None:
    """Such as a SuperLink of a later Flower."""
    made = create(tmp_path / "study", ["127.0.0.1"])
    with serving_http(made.tls if tls else None) as port:
        details = failure(f"127.0.0.1:{port}", certificates=made.ca.read_bytes() if tls else None)
    found, said = answer_on_the_way(details)
    assert (found, "does not speak HTTP/2" in said) == (0, True)
    assert "a SuperLink must run Flower 1.34." in said


@pytest.mark.parametrize("details", ["Connection refused", "the status 413", ""])
def test_other_errors_are_no_answer_of_a_proxy(details: str) -> None:
    assert answer_on_the_way(details) == (0, "")
