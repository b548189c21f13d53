"""A silo's calls on the Fleet API of a SuperLink, over gRPC.

They use only Flower's protobuf messages. A silo identifies itself in each call by its public key
and a signature of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest

from coterie import wire
from coterie.engine import flower
from coterie.engine.fast import inline_objects
from coterie.engine.fast.channel import GET, PUT, Part, calls_of, get, put
from coterie.engine.fast.silo import sharing
from coterie.system.calls import Retry
from coterie.wire.enrolment import public_pem

log = logging.getLogger("coterie.silo")

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

OBJECT_DEADLINE_S, CALL_DEADLINE_S, HEARTBEAT_DEADLINE_S = 120.0, 20.0, 5.0
"""Deadlines of a call that carries an object, of any other call, and of a heartbeat. gRPC sets
none, and a SuperLink that stops during a call would be waited for forever."""
WAIT_DEADLINE_S = wire.WAIT_S + 10.0
"""Deadline of a call that the SuperLink holds: a cut is found before the silo counts as lost."""
HEARTBEAT_INTERVAL_S = 30.0
"""Interval stated to the SuperLink: after two without a heartbeat a node is offline."""
MORE = {"PullMessages": ((wire.ALONG, "1"),)}
"""Call → what is said with it: small objects may come with the message that has them."""

Announced = tuple[Message, ObjectTree, Mapping[str, bytes]]
"""A message without content, its object tree, and objects that came along, by id."""


@contextmanager
def joined(
    address: str,
    certificates: bytes | None,
    keys: Keys | None,
    retry: Retry,
    failed: Callable[[grpc.RpcError, bool], None],
) -> Iterator[Calls]:
    """Join a SuperLink as a node with a heartbeat; sign off at the end.

    Raises ``grpc.RpcError`` if it cannot be reached, or refuses.

    Args:
        address: ``HOST:PORT``.
        certificates: PEM of the CA; None: plain text.
        keys: of a registered node; None: fresh ones for this connection, on P-256. The SuperLink
            checks a signature at every call, five times faster than with Flower's P-384.
        retry: for all calls but heartbeats.
        failed: called with every error, and whether nothing was answered in time.
    """
    own = keys is None
    private, public = keys or _fresh_keys()
    channel = sharing.shared_channel(address, certificates)
    calls = Calls(channel, private, public_pem(public), retry, failed)
    try:
        if own:
            calls.call("RegisterNode", RegisterNodeFleetRequest(public_key=calls.pem))
        request = ActivateNodeRequest(public_key=calls.pem, heartbeat_interval=HEARTBEAT_INTERVAL_S)
        calls.node = Node(node_id=calls.call("ActivateNode", request).node_id)
        heartbeat = sharing.Heartbeat(calls.beat)
        heartbeat.start()
        try:
            yield calls
        finally:
            heartbeat.stop()
            calls.retry = Retry(lambda error: True, max_s=0.0)
            with suppress(grpc.RpcError):
                asked = calls.node.node_id
                calls.call("DeactivateNode", DeactivateNodeRequest(node_id=asked))
                if own:
                    calls.call("UnregisterNode", UnregisterNodeFleetRequest(node_id=asked))
    finally:
        channel.close()


def _fresh_keys() -> Keys:
    key = ec.generate_private_key(ec.SECP256R1())
    return key, key.public_key()


class Calls:
    """A silo's calls to a SuperLink. All raise ``grpc.RpcError``."""

    def __init__(
        self,
        channel: grpc.Channel,
        key: ec.EllipticCurvePrivateKey,
        pem: bytes,
        retry: Retry,
        failed: Callable[[grpc.RpcError, bool], None],
    ) -> None:
        self.pem, self.retry, self.node = pem, retry, Node()
        own = {wire.WAIT: SendNodeHeartbeatResponse.FromString}
        self._calls, self._key, self._failed = calls_of(channel, FleetStub, own), key, failed

    def call(self, name: str, request: Any) -> Any:
        return self.retry.invoke(self._once, name, request)

    def _once(self, name: str, request: Any, deadline_s: float = 0.0) -> Any:
        usual = OBJECT_DEADLINE_S if "Object" in name or name in (PUT, GET) else CALL_DEADLINE_S
        usual = WAIT_DEADLINE_S if name == wire.WAIT else usual
        try:
            call, timeout = self._calls[name], deadline_s or usual
            more = request.head if isinstance(request, Part) else MORE.get(name, ())
            return call(request, timeout=timeout, metadata=self._signed() + more)
        except grpc.RpcError as error:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            self._failed(error, late and not deadline_s)
            raise

    def _signed(self) -> tuple[tuple[str, str | bytes], ...]:
        stamp = now().isoformat()
        signature = self._key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        return (
            ("flwr-public-key-bin", self.pem),
            ("flwr-timestamp", stamp),
            ("flwr-signature-bin", signature),
        )

    def beat(self) -> bool:
        """Send a heartbeat; return whether it arrived and the SuperLink knows this node."""
        with suppress(grpc.RpcError):
            request = self._sign_of_life()
            return bool(self._once("SendNodeHeartbeat", request, HEARTBEAT_DEADLINE_S).success)
        return False

    def _sign_of_life(self) -> SendNodeHeartbeatRequest:
        return SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_INTERVAL_S)

    def wait(self) -> None:
        """Return when this node has a message, or after ``wire.WAIT_S``."""
        self._once(wire.WAIT, self._sign_of_life())

    def receive(self) -> Announced | None:
        """Return the next message, which need not be confirmed if all its objects came along.

        One whose header cannot be read is dropped.
        """
        answer = self.call("PullMessages", PullMessagesRequest(node=self.node))
        if not answer.messages_list:
            return None
        came = inline_objects.attached(answer)
        try:
            header = flower.message_from_proto(answer.messages_list[0])
            return header, answer.message_object_trees[0], came
        except Exception as error:  # from elsewhere, of any kind: nobody can be answered
            what = wire.plain_text(error, 200)
            log.error("a message of the SuperLink was dropped, which cannot be read: %s", what)
            return None

    def send(
        self, reply: Message, tree: ObjectTree, seconds: float, along: Mapping[str, bytes]
    ) -> tuple[set[str], str]:
        """Announce a reply that took so many seconds, with small objects.

        Return the ids of the objects that are still wanted, and a session for ``push_object``.
        """
        if reply.has_content():  # which goes as objects
            reply = flower.message_from(reply, RecordDict())
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[flower.message_to_proto(reply)],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        inline_objects.attach(request, along.values())
        answer = self.call("PushMessages", request)
        return set(answer.objects_to_push), answer.session_id

    def run(self, run_id: int) -> Any:
        """Return a run, as ``flwr.proto.run_pb2.Run``."""
        return self.call("GetRun", GetRunRequest(node=self.node, run_id=run_id)).run

    def fab(self, digest: str, run_id: int) -> Any:
        """Return a run's code, as ``flwr.proto.fab_pb2.Fab``."""
        request = GetFabRequest(node=self.node, hash_str=digest, run_id=run_id)
        return self.call("GetFab", request).fab

    def pull_object(self, run_id: int, object_id: str) -> bytes:
        """Return the content of an object."""
        pull = self._calling("PullObject")
        return flower.make_pull_object_fn_protobuf(pull, self.node, run_id)(object_id)

    def push_object(self, run_id: int, session: str, object_id: str, content: bytes) -> None:
        """Send an object of a reply."""
        request = PushObjectRequest(
            node=self.node,
            run_id=run_id,
            object_id=object_id,
            session_id=session,
            object_content=content,
        )
        if not self.call("PushObject", request).stored:
            raise flower.ObjectPushError(object_id, run_id, session)

    def put(self, run_id: int, content: memoryview, upload: str) -> str:
        """Send a content, under the number of the upload; return its name."""
        return put(self._calling(PUT), self.node, run_id, content, upload)

    def get(self, run_id: int, name: str, size: int) -> Iterator[bytes]:
        """Yield the parts of a content."""
        return get(self._calling(GET), self.node, run_id, name, size)

    def confirm(self, run_id: int, message_id: str) -> None:
        """State that a message has arrived."""
        confirm = self._calling("ConfirmMessageReceived")
        flower.make_confirm_message_received_fn_protobuf(confirm, self.node, run_id)(message_id)

    def _calling(self, name: str) -> Callable[[Any], Any]:
        return lambda request: self.call(name, request)


def now() -> datetime:
    """Return the time to sign, in UTC."""
    return datetime.now(UTC)
