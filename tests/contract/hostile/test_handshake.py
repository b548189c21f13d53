"""What ends a TLS handshake, and what a silo makes of it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coterie.engine.fast.silo import link, lost
from coterie.engine.fast.silo.link import connect
from coterie.engine.port import Connection, LinkError
from coterie.server.site import certificates
from tests.contract.hostile.proxy import Proxy


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BRIEF_RETRY_S", 0.3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Something with a certificate for this machine; it closes what it has shaken hands with."""
    certificates.make_ca(tmp_path, "right")
    certificates.make_server_certificate(tmp_path, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.set_alpn_protocols(["h2"])
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), context.wrap_socket(plain, server_side=True) as one:
                one.recv(1)

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def refusal(address: str, ca: Path) -> LinkError:
    with pytest.raises(LinkError) as caught, connect(Connection(address, ca)):
        pass
    return caught.value


def test_a_certificate_of_another_ca_ends_the_silo(server: str, tmp_path: Path) -> None:
    certificates.make_ca(tmp_path / "other", "other")
    error = refusal(server, tmp_path / "other" / "ca.pem")
    assert not error.retry
    assert "presents a certificate that this silo does not trust" in str(error)


def test_what_closes_a_connection_does_not(server: str, tmp_path: Path) -> None:
    """A load balancer without a backend: it accepts, and closes before a handshake is over."""
    proxy = Proxy(server)
    proxy.close_all()
    try:
        error = refusal(proxy.address, tmp_path / "ca.pem")
    finally:
        proxy.close()
    assert proxy.accepted
    assert error.retry
    assert "cannot be reached" in str(error) and "trust" not in str(error)


@pytest.mark.parametrize(
    ("details", "final"),
    [
        ("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: self signed certificate", True),
        ("Hostname Verification Check failed. Peer certificate does not name it", True),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", False),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", False),
        ("Ssl handshake failed: Socket closed", False),
        ("WRONG_VERSION_NUMBER", False),
    ],
)
def test_only_what_time_cannot_heal_is_final(details: str, final: bool) -> None:
    assert lost.distrusts(details) == final
