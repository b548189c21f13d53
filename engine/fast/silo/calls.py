"""A silo's calls on the Fleet API of a SuperLink, over gRPC.

They use only Flower's protobuf messages. A silo identifies itself in each call by its public key
and a signature of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
    RegisterNodeFleetResponse,
    UnregisterNodeFleetRequest,
    UnregisterNodeFleetResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse

from coterie import wire
from coterie.engine import flower
from coterie.engine.fast import inline_objects
from coterie.engine.fast.channel import GET, PUT, Part, get, put
from coterie.engine.fast.silo import sharing
from coterie.system.calls import Retry, calls_of
from coterie.wire.enrolment import public_pem

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

OBJECT_DEADLINE_S, CALL_DEADLINE_S, HEARTBEAT_DEADLINE_S = 120.0, 20.0, 5.0
"""Deadlines of a call that carries an object, of any other call, and of a heartbeat. gRPC sets
none, and a SuperLink that stops during a call would be waited for forever."""
WAIT_DEADLINE_S = wire.WAIT_S + 10.0
"""Deadline of a call that the SuperLink holds: a cut is found before the silo counts as lost."""
HEARTBEAT_INTERVAL_S = 30.0
"""Interval stated to the SuperLink: after two without a heartbeat a node is offline."""


ANSWERS: dict[str, Callable[[bytes], Any]] = {
    "RegisterNode": RegisterNodeFleetResponse.FromString,
    "ActivateNode": ActivateNodeResponse.FromString,
    "DeactivateNode": DeactivateNodeResponse.FromString,
    "UnregisterNode": UnregisterNodeFleetResponse.FromString,
    "SendNodeHeartbeat": SendNodeHeartbeatResponse.FromString,
    wire.WAIT: SendNodeHeartbeatResponse.FromString,
    "PullMessages": PullMessagesResponse.FromString,
    "PushMessages": PushMessagesResponse.FromString,
    "GetRun": GetRunResponse.FromString,
    "GetFab": GetFabResponse.FromString,
    "PullObject": PullObjectResponse.FromString,
    "PushObject": PushObjectResponse.FromString,
    "ConfirmMessageReceived": ConfirmMessageReceivedResponse.FromString,
    PUT: bytes,
    GET: bytes,
}
"""Call → parser of its answer."""


MORE = {"PullMessages": ((wire.ALONG, "1"),)}
"""Call → what is said with it: small objects may come with the message that has them."""

Announced = tuple[Message, ObjectTree, Mapping[str, bytes]]


class Calls(NamedTuple):
    """A silo's calls to a SuperLink. All raise ``grpc.RpcError``.

    Attributes:
        receive: the next message, its object tree, and objects that came along, by id; or None. If
            all objects came along, the message need not be confirmed.
        send: reply, object tree, seconds it took, small objects to attach → ids of the objects
            still wanted, and a session for ``push_object``.
        run: run → ``flwr.proto.run_pb2.Run``.
        fab: digest, run → ``flwr.proto.fab_pb2.Fab``.
        pull_object: run, id → content.
        push_object: run, session from ``send``, id, content.
        put: run, content, number of the upload → its name.
        get: run, name, size → the parts of a content.
        confirm: run, message: it has arrived.
        wait: returns when this node has a message, or after ``wire.WAIT_S``.
    """

    receive: Callable[[], Announced | None]
    send: Callable[[Message, ObjectTree, float, Mapping[str, bytes]], tuple[set[str], str]]
    run: Callable[[int], Any]
    fab: Callable[[str, int], Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    put: Callable[[int, memoryview, str], str]
    get: Callable[[int, str, int], Iterator[bytes]]
    confirm: Callable[[int, str], None]
    wait: Callable[[], None]


@contextmanager
def joined(
    address: str,
    certificates: bytes | None,
    keys: Keys | None,
    retry: Retry,
    failed: Callable[[grpc.RpcError, bool], None],
) -> Iterator[tuple[int, Calls]]:
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
    node = _Node(channel, private, public_pem(public), retry, failed)
    try:
        if own:
            node.call("RegisterNode", RegisterNodeFleetRequest(public_key=node.pem))
        request = ActivateNodeRequest(public_key=node.pem, heartbeat_interval=HEARTBEAT_INTERVAL_S)
        node.node = Node(node_id=node.call("ActivateNode", request).node_id)
        heartbeat = sharing.Heartbeat(node.beat)
        heartbeat.start()
        try:
            yield node.node.node_id, node.calls()
        finally:
            heartbeat.stop()
            node.retry = Retry(lambda error: True, max_s=0.0)
            with suppress(grpc.RpcError):
                asked = node.node.node_id
                node.call("DeactivateNode", DeactivateNodeRequest(node_id=asked))
                if own:
                    node.call("UnregisterNode", UnregisterNodeFleetRequest(node_id=asked))
    finally:
        channel.close()


def _fresh_keys() -> Keys:
    key = ec.generate_private_key(ec.SECP256R1())
    return key, key.public_key()


class _Node:
    def __init__(
        self,
        channel: grpc.Channel,
        key: ec.EllipticCurvePrivateKey,
        pem: bytes,
        retry: Retry,
        failed: Callable[[grpc.RpcError, bool], None],
    ) -> None:
        self.pem, self.retry, self.node = pem, retry, Node()
        self._calls, self._key, self._failed = calls_of(channel, "Fleet", ANSWERS), key, failed

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
        """Send a heartbeat and return whether it arrived; ``RuntimeError`` for an unknown node."""
        try:
            answer = self._once("SendNodeHeartbeat", self._sign_of_life(), HEARTBEAT_DEADLINE_S)
        except grpc.RpcError as error:
            if error.code() in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ):
                return False
            raise
        if not answer.success:
            raise RuntimeError("the SuperLink does not know this node")
        return True

    def _sign_of_life(self) -> SendNodeHeartbeatRequest:
        return SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_INTERVAL_S)

    def calls(self) -> Calls:
        return Calls(
            self._receive,
            self._send,
            lambda run: self.call("GetRun", GetRunRequest(node=self.node, run_id=run)).run,
            self._fab,
            self._pull_object,
            self._push_object,
            partial(put, self._calling(PUT), self.node),
            partial(get, self._calling(GET), self.node),
            self._confirm,
            self._wait,
        )

    def _wait(self) -> None:
        self._once(wire.WAIT, self._sign_of_life())

    def _receive(self) -> Announced | None:
        answer = self.call("PullMessages", PullMessagesRequest(node=self.node))
        if not answer.messages_list:
            return None
        came = inline_objects.attached(answer)
        return (
            flower.message_from_proto(answer.messages_list[0]),
            answer.message_object_trees[0],
            came,
        )

    def _send(
        self, reply: Message, tree: ObjectTree, seconds: float, along: Mapping[str, bytes]
    ) -> tuple[set[str], str]:
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

    def _fab(self, digest: str, run_id: int) -> Any:
        request = GetFabRequest(node=self.node, hash_str=digest, run_id=run_id)
        return self.call("GetFab", request).fab

    def _pull_object(self, run_id: int, object_id: str) -> bytes:
        pull = self._calling("PullObject")
        return flower.make_pull_object_fn_protobuf(pull, self.node, run_id)(object_id)

    def _push_object(self, run_id: int, session: str, object_id: str, content: bytes) -> None:
        request = PushObjectRequest(
            node=self.node,
            run_id=run_id,
            object_id=object_id,
            session_id=session,
            object_content=content,
        )
        if not self.call("PushObject", request).stored:
            raise flower.ObjectPushError(object_id, run_id, session)

    def _confirm(self, run_id: int, message_id: str) -> None:
        confirm = self._calling("ConfirmMessageReceived")
        flower.make_confirm_message_received_fn_protobuf(confirm, self.node, run_id)(message_id)

    def _calling(self, name: str) -> Callable[[Any], Any]:
        return lambda request: self.call(name, request)


def now() -> datetime:
    """Return the time to sign, in UTC."""
    return datetime.now(UTC)
