"""The coordinator's connection to the SuperLink, for the commands of operators.

The submitted bundle carries configuration only: the ServerApp's process runs the coordinator's
coterie.
"""

from __future__ import annotations

import json
import shlex
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from coterie import wire
from coterie.engine.control import ControlCalls, Sign, pack
from coterie.server.machine import signing
from coterie.server.machine.signing import Identity
from coterie.server.runs.config import RunConfig
from coterie.strategies.errors import EXIT_LINK, FederationError, refused
from coterie.system.calls import open_channel
from coterie.system.ports import split_address
from coterie.system.proxies import answer_on_the_way, through

CONNECT_DEADLINE_S, HANDSHAKE_DEADLINE_S = 10.0, 2.0
MOST_SHOWN = 100_000
"""Most characters that are shown of a text from a SuperLink."""
OF_TIME = (9, 10)
"""OpenSSL's codes for a certificate that is not yet valid, or has expired."""


class Control(ControlCalls):
    """Calls on the Control API that raise ``FederationError``; made by ``control``."""

    def __init__(self, channel: grpc.Channel, address: str, sign: Sign) -> None:
        super().__init__(channel, sign, self._translated)
        self._address = address

    def submit(self, config: RunConfig, bundle: bytes = b"") -> int:
        """Start a run; return its id. ``bundle`` is made by ``bundle_of``."""
        run_id = self.start(bundle or bundle_of(config), config.plain())
        if run_id is None:
            raise FederationError(f"the SuperLink at {self._address} did not start the run.")
        return run_id

    def _translated(self, error: grpc.RpcError) -> FederationError:
        """Translate an error; since 1.34 the details are mostly JSON with one public entry."""
        details = str(error.details())
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            details = str(json.loads(details)["public_message"])
        details = wire.plain_text(details, MOST_SHOWN)
        where = f"the SuperLink at {self._address}"
        if answered := answer_on_the_way(str(error.details()))[1]:
            return FederationError(f"{where} cannot be reached: {answered}", exit_code=EXIT_LINK)
        text = f"{where} refuses: {error.code().name}: {details}"
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            proxy = through(self._address)
            text = f"{wire.sentence(text)} {proxy}" if proxy else text
            return FederationError(text, exit_code=EXIT_LINK)
        return FederationError(text)


@contextmanager
def control(
    address: str, *, root_certificates: Path | None = None, identity: Identity | None = None
) -> Iterator[Control]:
    """Connect to a SuperLink's Control API.

    Args:
        address: ``HOST:PORT``.
        root_certificates: PEM file of the CA; without it the connection is plain text.
        identity: of the operator who signs calls; a federation requires one.

    Raises:
        FederationError: it is unreachable, rejects the call or has another CA, or the file is
            unreadable.
    """
    if root_certificates:
        _require_trusted(address, root_certificates)
    channel = open_channel(
        address, _read_certificates(root_certificates) if root_certificates else None
    )
    try:
        grpc.channel_ready_future(channel).result(timeout=CONNECT_DEADLINE_S)
        ca = _read_certificates(root_certificates) if root_certificates else b""
        sign = partial(signing.metadata, identity, ca)
        yield Control(channel, address, sign)
    except grpc.FutureTimeoutError as error:
        raise FederationError(
            f"no SuperLink answers at {address} (Control API) within {CONNECT_DEADLINE_S:.0f} s. "
            + _what_to_do(address, root_certificates),
            exit_code=EXIT_LINK,
        ) from error
    finally:
        channel.close()


def _require_trusted(address: str, root_certificates: Path) -> None:
    """Reject a server whose certificate the CA did not sign, but not one that stays silent.

    gRPC would retry until its deadline and could not report this reason. Raises ``FederationError``
    if another server listens there, or the CA's file holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC has it
    try:
        context.load_verify_locations(
            cadata=_read_certificates(root_certificates).decode("ascii", errors="ignore")
        )
    except (ssl.SSLError, ValueError):
        raise refused(
            f"{str(root_certificates)!r} contains no certificate. Name the federation's "
            "tls/ca.pem with --root-certificates, or its folder with --federation."
        ) from None
    try:
        with (
            closing(_connected(address)) as plain,
            closing(context.wrap_socket(plain, server_hostname=split_address(address)[0])),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OF_TIME:
            raise FederationError(
                f"the SuperLink at {address} presents a certificate that is not valid by the "
                f"clock of this machine, which says {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: "
                f"{error.verify_message}. Set the clock by NTP. If it is right, renew the "
                "certificate with `coterie federation init FOLDER --renew`, and restart the "
                "SuperLink.",
                exit_code=EXIT_LINK,
            ) from None
        raise FederationError(
            f"the server at {address} presents a certificate that the CA in {root_certificates} "
            f"did not sign ({error.verify_message}). Is it another federation's SuperLink? Stop "
            "it, or change the ports of one of them under [listen] in its coterie.toml.",
            exit_code=EXIT_LINK,
        ) from None
    except (OSError, ValueError, OverflowError):
        pass  # gRPC tells


def _what_to_do(address: str, root_certificates: Path | None) -> str:
    if proxy := through(address):
        return proxy
    try:
        _connected(address).close()
    except (OSError, ValueError, OverflowError):
        folder = root_certificates.parent.parent if root_certificates else Path()
        own = (folder / "coterie.toml").exists()  # where commands find it without its name
        name = "" if folder.resolve() == Path.cwd() else f" --federation {shlex.quote(str(folder))}"
        return (
            f"Start {'it' if own else 'one'} with `coterie superlink{name if own else ''}`, or "
            "name another with --superlink."
        )
    if root_certificates:
        return "The server there does not speak TLS, or is busy. Is it a SuperLink without TLS?"
    return (
        "The server there may require TLS: name the federation's folder with --federation, or "
        "its CA with --root-certificates."
    )


def _connected(address: str) -> socket.socket:
    """Open a connection. Raises ``OSError``, ``ValueError`` or ``OverflowError``."""
    return socket.create_connection(split_address(address), timeout=HANDSHAKE_DEADLINE_S)


def _read_certificates(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise refused(
            f"the CA's certificate {str(file)!r} cannot be read: {error.strerror}. Name the "
            "federation's tls/ca.pem with --root-certificates, or its folder with --federation."
        ) from None


def bundle_of(config: RunConfig, note: str = "") -> bytes:
    """Return the bundle that submits a run: its configuration and no code.

    A ``note`` makes the digest unique for the same configuration.
    """
    return pack(_manifest(config.plain(), note))


def bundle_of_app(run_config: Mapping[str, Any]) -> bytes:
    """Return the bundle that submits a run of another ClientApp, which its silos have already."""
    return pack(_manifest(run_config, "of another app"))


def _manifest(config: Mapping[str, Any], note: str) -> dict[str, Any]:
    app = {
        "publisher": "coterie",
        "components": {
            "serverapp": "coterie.server.app:app",
            "clientapp": "coterie.client.app:app",
        },
        "config": dict(config),
    }
    project = {
        "name": "coterie",
        "version": version("coterie"),
        "description": f"Configuration of a run {note}".rstrip(),
        "license": "Apache-2.0",
        "dependencies": ["flwr>=1.34"],
    }
    return {"project": project, "tool": {"flwr": {"app": app}}}
