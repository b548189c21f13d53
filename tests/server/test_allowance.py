"""What one silo may send in a run, at Flower's own SuperLink with its state in memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from coterie import wire
from coterie.server.machine import allowance
from coterie.server.machine.allowance import TIMES, Allowances, Limited, handlers
from coterie.server.machine.superlink import replace_in

RUN, SILO = 7, 3


def test_an_allowance_follows_from_what_the_silo_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "REMEMBERED", 2)
    free = allowance.FREE_BYTES
    kept = Allowances()
    for silo in (SILO, SILO + 1):
        kept.asked(RUN, silo, wire.TRAIN, 0)
    assert kept.sends(RUN, SILO, free) == kept.sends(RUN, SILO + 1, 1) == ""
    assert kept.sends(RUN, SILO, 1).startswith(
        f"in this run it has sent or announced {free + 1:,} bytes; its limit is {free:,}, "
    )
    kept.was_sent(RUN, SILO, 10)
    assert kept.sends(RUN, SILO, 10 * TIMES - 1) == ""
    assert kept.sends(RUN, SILO, 1)
    kept.asked(RUN, SILO, wire.INITIAL, 1)
    assert kept.sends(RUN, SILO, wire.most_bytes(wire.INITIAL, 0) - 1) == ""
    assert kept.announces(RUN, SILO, allowance.FREE_OBJECTS + TIMES) == ""
    assert "4,009 objects; its limit is 4,008," in kept.announces(RUN, SILO, 1)
    for run in (8, 9):  # two are remembered
        kept.was_sent(run, SILO, 1)
    assert kept.announces(RUN, SILO, 1) == ""


def test_what_was_asked_before_a_restart_may_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Allowances()
    assert kept.announces(RUN, SILO, 1) == ""
    assert kept.sends(RUN, SILO, wire.MAX_MODEL_BYTES) == ""
    assert kept.sends(RUN, SILO, allowance.FREE_BYTES + 1)
    monkeypatch.setattr(allowance, "BEFORE_S", 0.0)
    assert kept.announces(RUN, SILO + 1, 1) == ""
    assert kept.sends(RUN, SILO + 1, allowance.FREE_BYTES + 1)


class SuperLink:
    """Flower's state, and one silo's calls to it."""

    def __init__(self) -> None:
        objects = ObjectStoreFactory()
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
        self.state, self.store = factory.state(), objects.store()
        self.fleet = Limited(handlers())
        node = self.state.create_node("me", "me", b"key", 30.0)
        self.state.activate_node(node, 30.0)
        self.node = Node(node_id=node)
        self.run = self.state.create_run("", "", "", {}, "@none/default", None, "me", "serverapp")

    def ask(self, numbers: int) -> str:
        """Send the silo a model of so many numbers, as the run's process does; returns its id."""
        arrays = ArrayRecord({"w": Array(np.zeros(numbers, np.uint8))})
        message = Message(
            RecordDict({"arrays": arrays}), dst_node_id=self.node.node_id, message_type=wire.TRAIN
        )
        message.metadata.__dict__.update(_run_id=self.run, _src_node_id=1)
        return self._store(message)

    def _store(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        header = remove_content_from_message(message)
        session = self.state.start_session(self.run)
        tree = inflatable_object.get_object_tree(message)
        _, wanted = self.state.store_message_and_object_tree(header, tree, session)
        found = inflatable_object.get_all_nested_objects(message)
        for name in wanted:
            self.state.store_object(self.run, session, name, found[name].deflate())
        return message.metadata.message_id

    def receive(self) -> Message:
        """What the silo is sent."""
        request = fleet_pb2.PullMessagesRequest(node=self.node)
        answer = self.fleet.pull_messages(request, self.state, self.store)
        for one in inflatable_object.iterate_object_tree(answer.message_object_trees[0]):
            wanted = message_pb2.PullObjectRequest(
                node=self.node, run_id=self.run, object_id=one.object_id
            )
            assert self.fleet.pull_object(wanted, self.state).object_available
        return message_from_proto(answer.messages_list[0])

    def reply(self, message: Message, numbers: int, *, whole: bool = True, why: str = "") -> str:
        """The silo answers with so many numbers, or with an error; returns the reply's id."""
        arrays = ArrayRecord({"w": Array(np.ones(numbers, np.uint8))})
        content = Error(wire.UNREADABLE, why) if why else RecordDict({"arrays": arrays})
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        found = inflatable_object.get_all_nested_objects(reply)
        tree = inflatable_object.get_object_tree(reply)
        header = message_to_proto(remove_content_from_message(reply))
        answer = self.fleet.push_messages(
            fleet_pb2.PushMessagesRequest(
                node=self.node, messages_list=[header], message_object_trees=[tree]
            ),
            self.state,
        )
        for name in answer.objects_to_push if whole else ():
            request = message_pb2.PushObjectRequest(
                node=self.node,
                run_id=self.run,
                session_id=answer.session_id,
                object_id=name,
                object_content=found[name].deflate(),
            )
            self.fleet.push_object(request, self.state)
        return reply.metadata.message_id

    def got(self, message_id: str) -> Any:
        """The header of the reply, as the run's process gets it."""
        (reply,) = self.state.get_message_res({message_id})
        return reply


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    monkeypatch.setattr(handlers(), "check_abort", lambda *_: None)  # the run goes on
    monkeypatch.setattr(allowance, "FREE_BYTES", 10_000)
    return SuperLink()


def test_who_sends_too_much_is_answered_for_in_words_and_the_disk_gets_no_more(
    superlink: SuperLink,
) -> None:
    for _ in range(3):  # as much as it was sent
        asked = superlink.ask(50_000)
        superlink.reply(superlink.receive(), 50_000)
        assert superlink.got(asked).has_content()
    superlink.ask(1000)
    message = superlink.receive()
    with pytest.raises(FlowerError, match="in this run it has sent or announced"):
        superlink.reply(message, 4_000_000)
    held: Any = superlink.state
    assert sum(len(one.content) for one in held.object_store.store.values()) < 1_000_000
    asked = superlink.ask(1000)
    superlink.reply(superlink.receive(), 10)
    refused = superlink.got(asked)
    assert refused.error.code == wire.UNREADABLE
    assert "in this run it has sent or announced 4,0" in refused.error.reason
    content = superlink.state.get_object(superlink.run, refused.metadata.message_id)
    answer = wire.put_together(
        refused.metadata.message_id, {refused.metadata.message_id: content}, max_bytes=0
    )
    assert answer.error.reason == refused.error.reason


def test_an_error_takes_the_place_of_a_reply_of_which_the_rest_does_not_come(
    superlink: SuperLink,
) -> None:
    asked = superlink.ask(1000)
    message = superlink.receive()
    first = superlink.reply(message, 1000, whole=False)
    assert superlink.got(asked).metadata.message_id == first
    superlink.reply(message, 0, why="it did not get through")
    second = superlink.got(asked)
    assert second.error.reason == "it did not get through"
    assert superlink.state.get_object(superlink.run, first) is None


def test_a_reply_that_is_whole_stays(superlink: SuperLink) -> None:
    asked = superlink.ask(1000)
    message = superlink.receive()
    first = superlink.reply(message, 1000)
    superlink.reply(message, 0, why="another")
    assert superlink.got(asked).metadata.message_id == first
    assert superlink.state.get_object(superlink.run, first)


def test_one_reply_at_a_time(superlink: SuperLink) -> None:
    with pytest.raises(FlowerError, match="one reply at a time"):
        superlink.fleet.push_messages(
            fleet_pb2.PushMessagesRequest(node=superlink.node), superlink.state
        )


def test_flower_calls_these_with_the_limits_and_with_another_name_for_one_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = import_module("flwr.superlink.cli.flower_superlink")
    for module in (command, handlers()):  # put back after the test
        for name, value in list(vars(module).items()):
            monkeypatch.setitem(vars(module), name, value)
    allowance.limit_silos()
    assert vars(command)["GRPC_MAX_MESSAGE_LENGTH"] == 33 * 2**20
    for name in allowance.HANDLERS:
        assert isinstance(vars(handlers())[name].__self__, Limited)
    with pytest.raises(AssertionError, match="another Flower"):
        replace_in(handlers(), HEARTBEAT_LONGEST=1.0)
