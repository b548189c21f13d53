"""The coordinator's connection to the SuperLink, for the commands of operators.

``flwr run`` starts another Python and waits in whole seconds; a call on Flower's Control API takes
milliseconds. A contract test covers this module with a real SuperLink. The submitted FAB carries
configuration only: the ServerApp's process runs the coordinator's coterie.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import grpc
import tomli_w

from coterie import wire
from coterie.server.machine import signing
from coterie.server.machine.signing import Identity
from coterie.server.runs.config import RunConfig
from coterie.strategies.errors import EXIT_LINK, FederationError, refused
from coterie.system.calls import open_channel
from coterie.system.ports import split_address
from coterie.system.proxies import answer_on_the_way, through

CONNECT_DEADLINE_S, HANDSHAKE_DEADLINE_S = 10.0, 2.0
CALL_DEADLINE_S = 30.0
HEARTBEATS = 2
"""Missed heartbeats after which Flower considers a node offline."""
MANIFEST, BUNDLED_AT = "pyproject.toml", (2024, 10, 1, 0, 0, 0)
"""The file of a bundle, and the time that Flower records for it: equal content has one digest."""
ACT_DEADLINE_S = 120.0
"""Deadline of an act, which waits for another operator's act and makes its own calls."""
CONTROL, ACT = "/flwr.proto.Control/", "/coterie.Operators/Act"
OF_TIME = (9, 10)
"""OpenSSL's codes for a certificate that is not yet valid, or has expired."""
STREAMS = ("StreamLogs",)
Sign = Callable[[str, bytes], signing.Metadata]


@dataclass(frozen=True)
class RunInfo:
    """A run as the SuperLink knows it."""

    run_id: int
    status: str
    sub_status: str
    details: str
    pending_at: str
    """When it was submitted, ISO 8601."""
    bundle: str = ""
    """Digest of the submitted bundle."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration as submitted."""

    @property
    def ended(self) -> bool:
        """Whether it is over, with or without success."""
        return self.status == "finished"


@dataclass(frozen=True)
class Node:
    """A key as the SuperLink knows it.

    Attributes:
        node_id: Flower's permanent id.
        key: public, PEM.
        status: registered, online, offline, unregistered.
        connected: start of its latest connection, seconds since 1970; 0: never.
        seen: its last sign of life, to one heartbeat (half a minute); 0: never.
    """

    node_id: int
    key: str
    status: str
    connected: float = 0.0
    seen: float = 0.0


class Control:
    """Calls on the Control API; made by ``control``.

    ``sign`` makes metadata that proves that a call is an operator's.
    """

    def __init__(self, channel: grpc.Channel, address: str, sign: Sign) -> None:
        self._channel, self._address, self._sign = channel, address, sign

    def submit(self, config: RunConfig, bundle: bytes = b"") -> int:
        """Start a run; return its id. ``bundle`` is made by ``bundle_of``."""
        from flwr.proto.fab_pb2 import Fab

        from coterie.engine.flower import user_config_to_proto

        content = bundle or bundle_of(config)
        reply = self._call(
            "StartRun",
            fab=Fab(hash_str=digest_of(content), content=content),
            override_config=user_config_to_proto(config.plain()),
        )
        if not reply.HasField("run_id"):
            raise FederationError(f"the SuperLink at {self._address} did not start the run.")
        return int(reply.run_id)

    def runs(self, run_id: int | None = None) -> list[RunInfo]:
        """Return all runs that the SuperLink remembers, or one."""
        from coterie.engine.flower import user_config_from_proto

        found = self._call("ListRuns", run_id=run_id).run_dict.values()
        return [
            RunInfo(
                run.run_id,
                run.status.status,
                run.status.sub_status,
                run.status.details,
                run.pending_at,
                run.fab_hash,
                user_config_from_proto(run.override_config),
            )
            for run in sorted(found, key=lambda run: str(run.pending_at))
        ]

    def stop(self, run_id: int) -> bool:
        """Stop a run; return False if it had already ended."""
        try:
            self._method("StopRun", run_id=run_id)(timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            refused = error.code() == grpc.StatusCode.FAILED_PRECONDITION
            if refused and all(run.ended for run in self.runs(run_id)):
                return False
            raise self._translated(error) from error
        return True

    def num_online(self) -> int:
        """Return the number of connected nodes."""
        return sum(node.status == "online" for node in self.nodes())

    def nodes(self) -> list[Node]:
        """Return every key that the SuperLink knows, also of offline or removed silos."""
        found = self._call("ListNodes").nodes_info
        return [_node(info) for info in found]

    def register(self, key: bytes) -> int:
        """Allow the owner of a public key (PEM) to connect; return its permanent node id."""
        return int(self._call("RegisterNode", public_key=key).node_id)

    def unregister(self, node_id: int) -> None:
        """Block a node's key permanently."""
        self._call("UnregisterNode", node_id=node_id)

    def act(self, what: str, **fields: str) -> dict[str, Any]:
        """Have the coordinator do work beyond Flower's calls; return its answer."""
        body = json.dumps({"act": what, **fields}).encode()
        call = self._channel.unary_unary(ACT)
        try:
            return dict(
                json.loads(call(body, timeout=ACT_DEADLINE_S, metadata=self._sign(ACT, body)))
            )
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def log_lines(self, run_id: int, *, deadline_s: float) -> Iterator[str]:
        """Yield the ServerApp's output as it arrives, until the run ends or the deadline passes."""
        stream = self._method("StreamLogs", run_id=run_id, after_timestamp=0.0)
        try:
            for part in stream(timeout=deadline_s):
                yield from part.log_output.splitlines()
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._translated(error) from error

    def _call(self, method: str, **fields: Any) -> Any:
        try:
            return self._method(method, **fields)(timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def _method(self, method: str, **fields: Any) -> Callable[..., Any]:
        """Prepare a signed call; it signs the bytes sent, which a stub would encode again."""
        from flwr.proto import control_pb2

        body = getattr(control_pb2, f"{method}Request")(**fields).SerializeToString()
        name, read = CONTROL + method, getattr(control_pb2, f"{method}Response").FromString
        kind = self._channel.unary_stream if method in STREAMS else self._channel.unary_unary
        return partial(
            kind(name, response_deserializer=read), body, metadata=self._sign(name, body)
        )

    def _translated(self, error: grpc.RpcError) -> FederationError:
        """Translate an error; since 1.34 the details are mostly JSON with one public entry."""
        details = str(error.details())
        with suppress(ValueError, KeyError, TypeError):
            details = str(json.loads(details)["public_message"])
        where = f"the SuperLink at {self._address}"
        if answered := answer_on_the_way(str(error.details()))[1]:
            return FederationError(f"{where} cannot be reached: {answered}", exit_code=EXIT_LINK)
        text = f"{where} refuses: {error.code().name}: {details}"
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            proxy = through(self._address)
            text = f"{wire.sentence(text)} {proxy}" if proxy else text
            return FederationError(text, exit_code=EXIT_LINK)
        return FederationError(text)


def _node(info: Any) -> Node:
    connected = _seconds(info.last_activated_at)
    seen = info.online_until if connected else 0.0
    if info.status == "online":  # the SuperLink waits for so many heartbeats
        seen -= HEARTBEATS * info.heartbeat_interval
    key = info.public_key.decode()
    return Node(info.node_id, key, info.status, connected, max(seen, connected))


def _seconds(text: str) -> float:
    """Convert ISO 8601 to seconds since 1970; 0 for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0


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
            cadata=_read_certificates(root_certificates).decode(errors="replace")
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
    """Return the bundle that submits a run: a zip file with its configuration and no code.

    It looks like ``flwr build``'s, which would first load a web framework for longer than the rest
    of a submission takes. A ``note`` makes the digest unique for the same configuration.
    """
    manifest = tomli_w.dumps(_manifest(config, note)).encode()
    listed = f"{MANIFEST},{hashlib.sha256(manifest).hexdigest()},{8 * len(manifest)}"
    made = BytesIO()
    with ZipFile(made, "w") as bundle:
        for name, content in ((MANIFEST, manifest), (".info/CONTENT", listed.encode())):
            bundle.writestr(ZipInfo(name, BUNDLED_AT), content)
    return made.getvalue()


def digest_of(bundle: bytes) -> str:
    """Return the digest by which the SuperLink names a bundle (``RunInfo.bundle``)."""
    return hashlib.sha256(bundle).hexdigest()


def _manifest(config: RunConfig, note: str) -> dict[str, Any]:
    app = {
        "publisher": "coterie",
        "components": {
            "serverapp": "coterie.server.app:app",
            "clientapp": "coterie.client.app:app",
        },
        "config": config.plain(),
    }
    project = {
        "name": "coterie",
        "version": version("coterie"),
        "description": f"Configuration of a run {note}".rstrip(),
        "license": "Apache-2.0",
        "dependencies": ["flwr>=1.34"],
    }
    return {"project": project, "tool": {"flwr": {"app": app}}}
