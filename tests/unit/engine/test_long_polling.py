"""Calls of silos that wait are held at the SuperLink until a message comes for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import runtime_pb2_grpc
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from coterie import wire
from coterie.engine.fast.silo.link import FleetLink, connect
from coterie.engine.fast.superlink import long_polling
from coterie.engine.fast.superlink.long_polling import FullError, Room
from coterie.engine.flower import set_message_id, set_run, set_sender
from coterie.engine.port import Connection, LinkError
from tests.kit import until
from tests.unit.server.superlinks import Served, serving

AT_ONCE_S, LONG_S = 20.0, 60.0
"""Far more than the first takes here, and what the second would take."""


class Ends:
    """How calls were ended, by a name for each."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.at: dict[str, float] = {}

    def __getitem__(self, name: str) -> Callable[[str], None]:
        def go(why_not: str) -> None:
            assert name not in self.reasons, "it is called once"
            self.reasons[name], self.at[name] = why_not, time.monotonic()

        return go


@pytest.fixture
def ends() -> Ends:
    return Ends()


# ---------------------------------------------------------------- the room


def test_who_looked_in_vain_waits_until_something_comes_for_it(ends: Ends) -> None:
    room = Room()
    for node, name in ((1, "north"), (2, "south")):
        room.looks(node)(0)
        room.hold(node, ends[name])
    room.came([3])
    assert ends.reasons == {}
    room.came([2, 2])
    assert ends.reasons == {"south": ""}


def test_what_came_since_the_look_or_during_it_is_told_at_once(ends: Ends) -> None:
    room = Room()
    room.hold(1, ends["never looked"])
    got = room.looks(1)
    room.came([1])
    got(0)
    room.hold(1, ends["came"])
    assert "came" in ends.reasons
    room.looks(1)(0)
    room.hold(1, ends["waits"])
    assert ends.reasons == {"never looked": "", "came": ""}


def test_who_has_pulled_all_its_messages_waits_without_another_look(ends: Ends) -> None:
    room = Room()
    room.looks(1)(0)
    room.came([1, 2, 1])
    room.looks(1)(1)
    room.hold(1, ends["one is left"])
    assert "one is left" in ends.reasons
    room.looks(1)(1)
    room.hold(1, ends["waits"])
    assert ends.reasons == {"one is left": ""}
    room.came([1])
    assert ends.reasons == {"one is left": "", "waits": ""}


def test_who_never_looked_in_vain_may_have_messages_from_before(ends: Ends) -> None:
    room = Room()
    room.looks(1)(1)
    room.hold(1, ends["it has to look"])
    assert "it has to look" in ends.reasons
    room.looks(1)(0)
    room.hold(1, ends["waits"])
    assert ends.reasons == {"it has to look": ""}


def test_nobody_waits_while_there_is_a_message_whatever_was_pulled_or_is_gone(ends: Ends) -> None:
    """One more look in vain costs less than a message that nobody fetches."""
    room = Room()
    room.looks(1)(0)
    early = room.looks(1)
    early(1)  # pulled before it was noted that it had come
    room.came([1])
    room.hold(1, ends["look"])
    assert "look" in ends.reasons
    one, other = room.looks(1), room.looks(1)
    room.came([1])
    one(1)
    other(0)
    room.hold(1, ends["it came meanwhile"])
    assert "it came meanwhile" in ends.reasons
    room.came([1])  # and its run ended
    room.looks(1)(0)
    room.hold(1, ends["waits"])
    assert ends.reasons == {"look": "", "it came meanwhile": ""}


def test_a_call_ends_when_its_time_is_up_and_a_left_one_never(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "WAIT_S", 0.2)
    room, began = Room(), time.monotonic()
    for node in (1, 2, 3):
        room.looks(node)(0)
    room.hold(1, ends["first"])
    room.hold(2, ends["left"])()
    time.sleep(0.1)
    room.hold(3, ends["second"])
    until(lambda: len(ends.reasons) == 2, "two are ended")
    assert ends.at["first"] - began >= 0.2 and ends.at["second"] - began >= 0.3
    room.looks(2)(0)
    room.hold(2, ends["later"])  # after nobody was there for a while
    until(lambda: "later" in ends.reasons, "it is ended")
    assert ends.reasons == {"first": "", "second": "", "later": ""}


def test_a_node_has_one_call_and_all_together_so_many(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polling, "MOST", 2)
    room = Room()
    for node in (1, 2, 3):
        room.looks(node)(0)
    leave = room.hold(1, ends["old"])
    room.hold(2, ends["other"])
    room.hold(1, ends["new"])
    assert ends.reasons == {"old": ""}
    leave()  # of the one that is over
    with pytest.raises(FullError, match="silos wait here already"):
        room.hold(3, ends["third"])
    room.came([1])
    room.hold(3, ends["third"])
    assert ends.reasons == {"old": "", "new": ""}


def test_at_the_end_all_are_told_and_none_is_held(ends: Ends) -> None:
    room = Room()
    room.looks(1)(0)
    room.hold(1, ends["north"])
    room.close()
    assert ends.reasons == {"north": "the SuperLink is ending."}
    with pytest.raises(FullError, match="is ending"):
        room.hold(1, ends["late"])


def test_no_two_threads_send_to_one_node() -> None:
    """A peer that does not read keeps the one that sends to it."""
    room = Room()
    with room.answering(1), room.answering(2):
        with pytest.raises(FullError, match="not answered yet"), room.answering(1):
            pass
        with pytest.raises(FullError), room.answering(1):
            pass
    with room.answering(1):
        pass


def test_what_is_remembered_of_nodes_is_bounded(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polling, "REMEMBERED", 2)
    room = Room()
    for node in (1, 2, 3):
        room.looks(node)(0)
    for node in (1, 2, 3):
        room.hold(node, ends[str(node)])
    assert ends.reasons == {"1": ""}, "of whom nothing is known, it is asked to look"


# ---------------------------------------------------------------- a SuperLink over gRPC


class SuperLink:
    """A SuperLink over gRPC in this process, and what a run's process sends through it."""

    def __init__(self, made: Served) -> None:
        self.address, self.room, self._made = made.fleet_address, made.room, made
        self.stop = made.lifespan.shutdown

    def push(self, *nodes: int) -> None:
        """Messages of a run's process to these nodes."""
        headers, trees = [], []
        for node in nodes:
            content = RecordDict({"config": ConfigRecord({"node": node, "number": len(headers)})})
            message = Message(content, node, "train", ttl=60.0)
            set_run(message, self._made.run)
            set_sender(message, 1)
            set_message_id(message, message.object_id)
            headers.append(message_to_proto(remove_content_from_message(message)))
            trees.append(inflatable_object.get_object_tree(message))
        request = PushAppMessagesRequest(messages_list=headers, message_object_trees=trees)
        with grpc.insecure_channel(self._made.address) as channel:
            stub = runtime_pb2_grpc.RuntimeStub(channel)
            token = (("flwr-task-token", self._made.token),)
            assert all(stub.PushMessages(request, metadata=token).message_ids)


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    with serving(tmp_path) as made:
        yield SuperLink(made)


@pytest.fixture
def room(superlink: SuperLink) -> Room:
    return superlink.room


@pytest.fixture
def links(superlink: SuperLink) -> Iterator[list[FleetLink]]:
    """Two silos that have looked, and found nothing."""
    with ExitStack() as stack:
        found = [stack.enter_context(connect(Connection(superlink.address))) for _ in range(2)]
        for link in found:
            assert link.receive() is None
        yield found


@pytest.fixture
def waiting() -> Iterator[Callable[[FleetLink], Future[bool]]]:
    with ThreadPoolExecutor() as threads:
        yield lambda link: threads.submit(link.wait)


Waiting = Callable[[FleetLink], "Future[bool]"]


def test_a_silo_is_told_of_its_message_when_it_comes_and_of_no_others(
    superlink: SuperLink, links: list[FleetLink], room: Room, waiting: Waiting
) -> None:
    north, south = map(waiting, links)
    until(lambda: len(room._held) == 2, "both wait")
    superlink.push(links[1].node_id, links[1].node_id)
    assert south.result(AT_ONCE_S) is True
    time.sleep(0.1)
    assert not north.done()
    for last in (False, True):
        claimed = links[1]._calls.receive()  # of which the objects are still to come
        assert claimed is not None and claimed[0].metadata.dst_node_id == links[1].node_id
        if not last:
            assert links[1].wait() is True, "there is one more"
    again = waiting(links[1])
    until(lambda: len(room._held) == 2, "both wait again")
    superlink.push(*(link.node_id for link in links))
    assert north.result(AT_ONCE_S) is again.result(AT_ONCE_S) is True


def test_a_message_that_came_between_the_look_and_the_call_is_told_at_once(
    superlink: SuperLink, links: list[FleetLink], waiting: Waiting
) -> None:
    superlink.push(links[0].node_id)
    assert waiting(links[0]).result(AT_ONCE_S) is True


def test_held_calls_take_no_threads_and_end_in_words_with_the_superlink(
    superlink: SuperLink, room: Room
) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(30, thread_name_prefix="silo") as threads:
        calls = []
        before = serving_threads()
        for _ in range(30):
            link = stack.enter_context(connect(Connection(superlink.address)))
            assert link.receive() is None
            calls.append(threads.submit(link.wait))
            until(lambda: len(room._held) == len(calls), "it waits")
        assert serving_threads() - before < 10
        superlink.stop()
        for call in calls:
            with pytest.raises(LinkError, match="UNAVAILABLE: the SuperLink is ending"):
                call.result(AT_ONCE_S)


def serving_threads() -> int:
    return sum(one.name.startswith("ThreadPoolExecutor") for one in threading.enumerate())


def test_a_call_that_nobody_waits_for_any_more_is_let_go(
    superlink: SuperLink, room: Room, waiting: Waiting
) -> None:
    with connect(Connection(superlink.address)) as link:
        assert link.receive() is None
        call = waiting(link)
        until(lambda: room._held, "it waits")
    with pytest.raises(LinkError):
        call.result(AT_ONCE_S)
    until(lambda: not room._held, "it is let go")


def test_only_the_node_itself_waits_and_is_seen_by_that(
    superlink: SuperLink, links: list[FleetLink], room: Room
) -> None:
    with grpc.insecure_channel(superlink.address) as channel:
        call = channel.unary_unary(
            wire.WAIT, request_serializer=lambda request: request.SerializeToString()
        )
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=links[0].node_id), heartbeat_interval=30.0
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=AT_ONCE_S)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not room._held


def test_where_no_call_can_be_held_the_silo_is_told_why(
    links: list[FleetLink], room: Room, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polling, "MOST", 0)
    with pytest.raises(LinkError, match="silos wait here already"):
        links[0].wait()
    assert links[0].notifies, "there may be room later"


def test_a_stock_superlink_does_not_know_the_call() -> None:
    objects = ObjectStoreFactory()
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    server = command._run_fleet_api_grpc_rere(
        address="127.0.0.1:0",
        state_factory=factory,
        objectstore_factory=objects,
        enable_supernode_auth=False,
        certificates=None,
        interceptors=[NodeAuthServerInterceptor(factory)],
    )
    try:
        with connect(Connection(server.bound_address)) as link:
            assert link.notifies and link.wait() is False and not link.notifies
    finally:
        server.stop(None)
