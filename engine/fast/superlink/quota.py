"""Limits on what one silo may send in one run, enforced at the SuperLink before storage.

The SuperLink keeps replies on its disk until the run's process has fetched them, and that process's
limits bound only memory. Here each silo has an allowance of bytes and objects, proportional to what
the run sent to it; honest silos use less than a quarter. Sums, such as histograms for trees, are
far larger than the question, so there is always room for the answer to the latest one. A silo that
exceeds its allowance gets an error as its reply at once: it is left out, and the run continues.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from threading import Lock
from typing import Any, NamedTuple

import grpc
from flwr.app import Error
from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.server.superlink.utils import check_abort
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.utils import int64_to_uint64

from coterie import wire
from coterie.engine.fast.channel import Part
from coterie.engine.fast.superlink.stores import Stores
from coterie.engine.flower import (
    inflatable_object,
    message_from,
    message_from_proto,
    message_to_proto,
    set_message_id,
)

log = logging.getLogger("flwr")

TIMES = 8
"""Multiple of the received bytes and objects that a silo may send. A reply to a model has about as
many; in a secure run a sum is requested, and answered by a model, without one."""
FREE_BYTES, FREE_OBJECTS = wire.FLOOR_BYTES, 4_000
"""Additional quota in a run, for replies to messages of few bytes."""
BEFORE_S = 12 * 3600.0
"""Time after a start for replies to messages from before it, which are not known here. It is the
longest work for one message (``max_minutes``)."""
REMEMBERED = 100_000
"""Limit on pairs of run and silo; beyond it the oldest are forgotten."""
CALL_BYTES = wire.MAX_OBJECT_BYTES + 2**20
"""Size limit of a call of a silo or an operator. gRPC rejects more before it is in memory; Flower
accepts 2 GB from anybody."""
ANNOUNCED_BYTES = 2**19
"""Most bytes of a call that announces a reply, besides the ids of its objects: a header without
content, and a small bundle. A million values take a minute to read."""
HEARTBEAT_S = 60.0
"""Longest announced time to a silo's next heartbeat; it counts as present for twice as long.
coterie's silos use 10 s, Flower's 30 s; Flower itself accepts half an hour."""


NOT_RUNNING = [Status.PENDING, Status.STARTING, Status.FINISHED]
"""States of a run whose silos may send nothing."""


class _Announced(NamedTuple):
    """A reply: the message it answers, its id, and Flower's session until it is complete."""

    asked: str
    reply: str
    session: str


@dataclass
class _Account:
    """A silo's limits and totals in one run, and its last reply."""

    most_bytes: int
    most_objects: int
    num_bytes: int = 0
    num_objects: int = 0
    last: _Announced | None = None

    @property
    def problem(self) -> str:
        """The exceeded limit; empty if there is none."""
        for count, most, what in (
            (self.num_bytes, self.most_bytes, "bytes"),
            (self.num_objects, self.most_objects, "objects"),
        ):
            if count > most:
                return (
                    f"{wire.OVER_ALLOWANCE} {count:,} {what}; its limit is "
                    f"{most:,}, {TIMES} times what it received and a margin."
                )
        return ""


class Quotas:
    """The remaining allowance of every silo in every run; thread-safe."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[tuple[int, int], _Account] = OrderedDict()
        self._lock = Lock()
        self._started = time.monotonic()

    def _account(self, run: int, node: int, *, answers: bool = False) -> _Account:
        free = FREE_BYTES
        if answers and time.monotonic() - self._started < BEFORE_S:
            free += wire.MAX_MODEL_BYTES  # where it is new: it was asked before a restart
        found = self._accounts.setdefault((run, node), _Account(free, FREE_OBJECTS))
        while len(self._accounts) > REMEMBERED:
            self._accounts.popitem(last=False)
        return found

    def asked(self, run: int, node: int, message_type: str, num_objects: int) -> None:
        """Count a message of ``num_objects`` objects handed out to a silo."""
        with self._lock:
            account = self._account(run, node)
            account.most_objects += TIMES * num_objects
            most = wire.most_bytes(message_type, 0)
            if message_type.startswith("query."):
                account.most_bytes += most
            elif wire.kind_of(message_type).summed is not None:  # unused bytes do not add up
                account.most_bytes = max(account.most_bytes, account.num_bytes + most)

    def was_sent(self, run: int, node: int, num_bytes: int) -> None:
        """Count bytes handed out to a silo."""
        with self._lock:
            self._account(run, node).most_bytes += TIMES * num_bytes

    def last(self, run: int, node: int) -> _Announced | None:
        """Return the silo's last reply."""
        with self._lock:
            return self._account(run, node).last

    def announced(self, run: int, node: int, reply: _Announced) -> None:
        """Set the silo's last reply."""
        with self._lock:
            self._account(run, node).last = reply

    def sends(self, run: int, node: int, num_bytes: int, *, num_objects: int = 0) -> str:
        """Count what was sent or announced; return why it exceeds the allowance, or nothing."""
        with self._lock:
            account = self._account(run, node, answers=True)
            account.num_bytes += num_bytes
            account.num_objects += num_objects
            return account.problem


class Limited(FleetServicer):
    """Flower's servicer for silos, with an allowance for each."""

    objectstore_factory: Stores

    def __init__(
        self,
        state_factory: LinkStateFactory,
        objectstore_factory: Stores,
        enable_supernode_auth: bool,
    ) -> None:
        super().__init__(state_factory, objectstore_factory, enable_supernode_auth)
        self.allowances = Quotas()

    def ActivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        _require_frequent(request.heartbeat_interval)
        return super().ActivateNode(request, context)

    def SendNodeHeartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:
        _require_frequent(request.heartbeat_interval)
        return super().SendNodeHeartbeat(request, context)

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = super().PullMessages(request, context)
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        for message, tree in pairs:
            about = message.metadata
            self.allowances.asked(
                about.run_id, request.node.node_id, about.message_type, _num_objects(tree)
            )
        return answer

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object as Flower does, or a part of a content."""
        answer = super().PullObject(request, context)
        counted = len(answer.object_content)
        content, size = self.objectstore_factory.store().read(request, answer)
        if size > counted:  # it lies in a file
            state = self.state_factory.state()
            state.store_traffic(request.run_id, bytes_sent=size - counted, bytes_recv=0)
        self.allowances.was_sent(request.run_id, request.node.node_id, size)
        return content

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Store a reply as Flower does, or an error in its place if the silo has sent too much."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise refused("one reply at a time.")
        run, node = request.messages_list[0].metadata.run_id, request.node.node_id
        why = self.allowances.sends(
            run, node, 0, num_objects=_num_objects(request.message_object_trees[0])
        )
        if not why:
            return self._push(request, context)
        header, tree, objects = _refusal(request.messages_list[0], why)
        answer = self._push(
            PushMessagesRequest(
                node=request.node, messages_list=[header], message_object_trees=[tree]
            ),
            context,
        )
        for name in answer.objects_to_push:
            pushed = PushObjectRequest(
                node=request.node,
                run_id=run,
                object_id=name,
                session_id=answer.session_id,
                object_content=objects[name],
            )
            super().PushObject(pushed, context)
        return type(answer)()  # it has nothing to send

    def _push(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Push as Flower does, but let a new reply replace an incomplete one.

        A silo sends an error if a proxy blocks its reply. Flower would wait minutes for the rest.
        """
        about, node = request.messages_list[0].metadata, request.node.node_id
        run, asked, own = about.run_id, about.reply_to_message_id, about.message_id
        if not self._is_of_its_run(about):
            log.error("a reply of node %s was dropped: it answers no message of its run", node)
            return PushMessagesResponse()
        last = self.allowances.last(run, node)
        if last is not None and last.asked == asked and last.reply != own:
            state: Any = self.state_factory.state()
            state._cleanup_push_session(last.session, cleanup_messages=True)
        answer = super().PushMessages(request, context)
        self.allowances.announced(run, node, _Announced(asked, own, answer.session_id))
        return answer

    def _is_of_its_run(self, about: Any) -> bool:
        """Return whether a reply answers a message of the run it names, or that run has ended.

        With a database, Flower fails on another one, or a time that is not finite, only when the
        run's process asks for it, and deletes the replies of other silos that it asked for as well.
        """
        state, run = self.state_factory.state(), about.run_id
        is_of_it = _run_of(state, about.reply_to_message_id) == run
        sound = is_of_it and isfinite(about.created_at + about.ttl)
        return sound or bool(check_abort(run, NOT_RUNNING, state))  # then Flower says why

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Store an object as Flower does, or a part of a content, within the silo's limits."""
        run, node = request.run_id, request.node.node_id
        is_new = isinstance(request, Part) and request.at == 0
        why = self.allowances.sends(run, node, len(request.object_content), num_objects=is_new)
        if why:  # the silo then sends an error, in whose place the one above is stored
            raise refused(why)
        state = self.state_factory.state()
        if not isinstance(request, Part) or check_abort(run, NOT_RUNNING, state):
            return super().PushObject(request, context)  # which says why not
        state.store_traffic(run, bytes_sent=0, bytes_recv=len(request.object_content))
        return self.objectstore_factory.uploads.take(request)


def _require_frequent(heartbeat_s: float) -> None:
    if heartbeat_s > HEARTBEAT_S:
        why = f"a heartbeat every {heartbeat_s:g} s; at most {HEARTBEAT_S:g} s are allowed."
        raise FlowerError(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL, why)


def _run_of(state: Any, message_id: str) -> int | None:
    """Return the run of a message to a silo; None if Flower does not have the message."""
    if isinstance(state, SqlLinkState):
        asked = state.get_valid_message_ins(message_id)
        return None if asked is None else int64_to_uint64(asked["run_id"])
    kept = state.message_ins_store.get(message_id)
    return None if kept is None else kept.metadata.run_id


def refused(why: str) -> FlowerError:
    """Return the error of a call that is refused."""
    return FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, why, public_details=why)


def _num_objects(tree: ObjectTree) -> int:
    objects = inflatable_object.iterate_object_tree(tree)
    return sum(1 for _ in islice(objects, wire.MAX_OBJECTS + 1))


def _refusal(header: Any, why: str) -> tuple[Any, ObjectTree, dict[str, bytes]]:
    """Return the header, tree and objects of an error that replaces a reply."""
    reply = message_from(message_from_proto(header), error=Error(wire.UNREADABLE, why))
    with inflatable_object.no_object_id_recompute():
        set_message_id(reply, reply.object_id)
        found = inflatable_object.get_all_nested_objects(reply)
        objects = {name: one.deflate() for name, one in found.items()}
        tree = inflatable_object.get_object_tree(reply)
        return message_to_proto(reply), tree, objects
