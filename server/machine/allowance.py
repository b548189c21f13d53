"""Limits on what one silo may send in one run, enforced at the SuperLink before storage.

The SuperLink keeps replies on its disk until the run's process has fetched them, and that process's
limits bound only memory. Here each silo has an allowance of bytes and objects, proportional to what
the run sent to it; honest silos use less than a quarter. A silo that exceeds it gets an error as
its reply at once: it is left out, and the run continues. Flower has one function per call of a
silo; these are replaced.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from flwr.app import Error, Message
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest

from coterie import wire
from coterie.server.machine.superlink import replace_in
from coterie.wire.flower import inflatable_object, message_from_proto, message_to_proto

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
HEARTBEAT_S = 60.0
"""Longest announced time to a silo's next heartbeat; it counts as present for twice as long.
coterie's silos use 10 s, Flower's 30 s; Flower itself accepts half an hour."""
HANDLERS = ("pull_messages", "pull_object", "push_messages", "push_object")


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
                    f"in this run it has sent or announced {count:,} {what}; its limit is "
                    f"{most:,}, {TIMES} times what it received and a margin."
                )
        return ""


class Allowances:
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
            if message_type.startswith("query."):
                account.most_bytes += wire.most_bytes(message_type, 0)

    def was_sent(self, run: int, node: int, num_bytes: int) -> None:
        """Count bytes handed out to a silo."""
        with self._lock:
            self._account(run, node).most_bytes += TIMES * num_bytes

    def announces(self, run: int, node: int, num_objects: int) -> str:
        """Count an announced reply; return why it exceeds the allowance, or an empty text."""
        with self._lock:
            account = self._account(run, node, answers=True)
            account.num_objects += num_objects
            return account.problem

    def last(self, run: int, node: int) -> _Announced | None:
        """Return the silo's last reply."""
        with self._lock:
            return self._account(run, node).last

    def announced(self, run: int, node: int, reply: _Announced) -> None:
        """Set the silo's last reply."""
        with self._lock:
            self._account(run, node).last = reply

    def sends(self, run: int, node: int, num_bytes: int) -> str:
        """Count sent bytes; return why they exceed the allowance, or an empty text."""
        with self._lock:
            account = self._account(run, node, answers=True)
            account.num_bytes += num_bytes
            return account.problem


class Limited:
    """Flower's handlers of silos' calls, with an allowance for each silo."""

    def __init__(self, flower: ModuleType) -> None:
        self.allowances = Allowances()
        self._flower = SimpleNamespace(**{name: vars(flower)[name] for name in HANDLERS})

    def pull_messages(self, request: Any, state: Any, store: Any) -> Any:
        answer = self._flower.pull_messages(request=request, state=state, store=store)
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        for message, tree in pairs:
            about = message.metadata
            self.allowances.asked(
                about.run_id, request.node.node_id, about.message_type, _num_objects(tree)
            )
        return answer

    def pull_object(self, request: Any, state: Any) -> Any:
        answer = self._flower.pull_object(request=request, state=state)
        size = len(answer.object_content)
        self.allowances.was_sent(request.run_id, request.node.node_id, size)
        return answer

    def push_messages(self, request: Any, state: Any) -> Any:
        """Store a reply as Flower does, or an error in its place if the silo has sent too much."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise _refused("one reply at a time.")
        run, node = request.messages_list[0].metadata.run_id, request.node.node_id
        why = self.allowances.announces(run, node, _num_objects(request.message_object_trees[0]))
        if not why:
            return self._push(request, state)
        header, tree, objects = _refusal(request.messages_list[0], why)
        answer = self._flower.push_messages(
            request=PushMessagesRequest(
                node=request.node, messages_list=[header], message_object_trees=[tree]
            ),
            state=state,
        )
        for name in answer.objects_to_push:
            self._flower.push_object(
                request=PushObjectRequest(
                    node=request.node,
                    run_id=run,
                    session_id=answer.session_id,
                    object_id=name,
                    object_content=objects[name],
                ),
                state=state,
            )
        return type(answer)()  # it has nothing to send

    def _push(self, request: Any, state: Any) -> Any:
        """Push as Flower does, but let a new reply replace an incomplete one.

        A silo sends an error if a proxy blocks its reply. Flower would wait minutes for the rest.
        """
        about, node = request.messages_list[0].metadata, request.node.node_id
        run, asked, own = about.run_id, about.reply_to_message_id, about.message_id
        last = self.allowances.last(run, node)
        if last is not None and last.asked == asked and last.reply != own:
            state._cleanup_push_session(last.session, cleanup_messages=True)
        answer = self._flower.push_messages(request=request, state=state)
        self.allowances.announced(run, node, _Announced(asked, own, answer.session_id))
        return answer

    def push_object(self, request: Any, state: Any) -> Any:
        """Store an object as Flower does, unless the silo has sent too much."""
        run, node = request.run_id, request.node.node_id
        why = self.allowances.sends(run, node, len(request.object_content))
        if why:  # for the silo that is the end of this run
            raise _refused(why)
        return self._flower.push_object(request=request, state=state)


def _refused(why: str) -> Exception:
    """Return the error that a silo takes for the end of the run."""
    error = import_module("flwr.supercore.error")
    code = error.ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED
    made: Exception = error.FlowerError(code, why, public_details=why)
    return made


def _num_objects(tree: ObjectTree) -> int:
    objects = inflatable_object.iterate_object_tree(tree)
    return sum(1 for _ in islice(objects, wire.MAX_OBJECTS + 1))


def _refusal(header: Any, why: str) -> tuple[Any, ObjectTree, dict[str, bytes]]:
    """Return the header, tree and objects of an error that replaces a reply."""
    metadata = message_from_proto(header).metadata
    reply: Message = make_message(metadata=metadata, error=Error(wire.UNREADABLE, why))
    with inflatable_object.no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        found = inflatable_object.get_all_nested_objects(reply)
        objects = {name: one.deflate() for name, one in found.items()}
        tree = inflatable_object.get_object_tree(reply)
        return message_to_proto(remove_content_from_message(reply)), tree, objects


# ---------------------------------------------------------------- at the SuperLink


def handlers() -> ModuleType:
    """Return the module of Flower's functions for silos' calls."""
    return import_module("flwr.server.superlink.fleet.message_handler.message_handler")


def limit_silos() -> None:
    """Limit silos in this process: bytes per call and run, and the time between heartbeats."""
    flower = handlers()
    limited = Limited(flower)
    own = {name: getattr(limited, name) for name in HANDLERS}
    replace_in(flower, HEARTBEAT_MAX_INTERVAL=HEARTBEAT_S, **own)
    command = import_module("flwr.superlink.cli.flower_superlink")
    replace_in(command, GRPC_MAX_MESSAGE_LENGTH=CALL_BYTES)
