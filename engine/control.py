"""A SuperLink's Control API: what operators do, in Flower's protobuf messages.

``flwr run`` starts another Python and waits in whole seconds; a call takes milliseconds. A contract
test covers this module with a real SuperLink.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from io import BytesIO
from typing import Any
from zipfile import ZipFile, ZipInfo

import grpc
import tomli_w
from flwr.proto import control_pb2
from flwr.proto.fab_pb2 import Fab

from coterie.engine.flower import user_config_from_proto, user_config_to_proto

CALL_DEADLINE_S = 30.0
HEARTBEATS = 2
"""Missed heartbeats after which Flower considers a node offline."""
MANIFEST, BUNDLED_AT = "pyproject.toml", (2024, 10, 1, 0, 0, 0)
"""The file of a bundle, and the time that Flower records for it: equal content has one digest."""
ACT_DEADLINE_S = 120.0
"""Deadline of an act, which waits for another operator's act and makes its own calls."""
CONTROL, ACT = "/flwr.proto.Control/", "/coterie.Operators/Act"
STREAMS = ("StreamLogs",)
Sign = Callable[[str, bytes], Sequence[tuple[str, str | bytes]]]
Failure = Callable[[grpc.RpcError], Exception]


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

    @property
    def why(self) -> str:
        """Why it ended, without how Flower begins it."""
        return self.details.removeprefix("ServerApp failed with exception: ")


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


class ControlCalls:
    """An operator's calls on a SuperLink's Control API, in Flower's protobuf messages.

    Args:
        sign: makes metadata for a method and the bytes of its request, which prove who calls.
        failure: an error of gRPC → what is raised in its place.
    """

    def __init__(self, channel: grpc.Channel, sign: Sign, failure: Failure) -> None:
        self._channel, self._sign, self._failure = channel, sign, failure

    def start(self, bundle: bytes, keys: Mapping[str, Any]) -> int | None:
        """Start a run; return its id, None if the SuperLink did not start it."""
        fab = Fab(hash_str=digest_of(bundle), content=bundle)
        reply = self._call("StartRun", fab=fab, override_config=user_config_to_proto(dict(keys)))
        return int(reply.run_id) if reply.HasField("run_id") else None

    def runs(self, run_id: int | None = None) -> list[RunInfo]:
        """Return all runs that the SuperLink remembers, or one."""
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
            raise self._failure(error) from error
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
            raise self._failure(error) from error

    def log_lines(self, run_id: int, *, deadline_s: float) -> Iterator[str]:
        """Yield the ServerApp's output as it arrives, until the run ends or the deadline passes."""
        stream = self._method("StreamLogs", run_id=run_id, after_timestamp=0.0)
        try:
            for part in stream(timeout=deadline_s):
                yield from part.log_output.splitlines()
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._failure(error) from error

    def _call(self, method: str, **fields: Any) -> Any:
        try:
            return self._method(method, **fields)(timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _method(self, method: str, **fields: Any) -> Callable[..., Any]:
        """Prepare a signed call; it signs the bytes sent, which a stub would encode again."""
        body = getattr(control_pb2, f"{method}Request")(**fields).SerializeToString()
        name, read = CONTROL + method, getattr(control_pb2, f"{method}Response").FromString
        kind = self._channel.unary_stream if method in STREAMS else self._channel.unary_unary
        return partial(
            kind(name, response_deserializer=read), body, metadata=self._sign(name, body)
        )


def settings_of(request: Any) -> dict[str, Any]:
    """Return the keys of a run in a request to start it."""
    return dict(user_config_from_proto(request.override_config))


def digest_in(request: Any) -> str:
    """Return the digest of the bundle in a request to start a run."""
    return str(request.fab.hash_str)


def started(answer: Any) -> int | None:
    """Return the id of the run that an answer of the Control API says was started, if it does."""
    if isinstance(answer, control_pb2.StartRunResponse) and answer.HasField("run_id"):
        return int(answer.run_id)
    return None


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


def pack(manifest: Mapping[str, Any]) -> bytes:
    """Return a bundle that submits a run: a zip file with its manifest and no code.

    It looks like ``flwr build``'s, which would first load a web framework for longer than the rest
    of a submission takes.
    """
    text = tomli_w.dumps(manifest).encode()
    listed = f"{MANIFEST},{hashlib.sha256(text).hexdigest()},{8 * len(text)}"
    made = BytesIO()
    with ZipFile(made, "w") as bundle:
        for name, content in ((MANIFEST, text), (".info/CONTENT", listed.encode())):
            bundle.writestr(ZipInfo(name, BUNDLED_AT), content)
    return made.getvalue()


def digest_of(bundle: bytes) -> str:
    """Return the digest by which the SuperLink names a bundle (``RunInfo.bundle``)."""
    return hashlib.sha256(bundle).hexdigest()
