"""What one silo may send in a run, at Flower's own SuperLink with its state in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_object

from coterie import wire
from coterie.engine.fast import inline_objects, objects
from coterie.engine.fast.silo.lost import Way, meaning_of
from coterie.engine.fast.superlink import quota
from coterie.engine.fast.superlink.commands import replace_in
from coterie.engine.fast.superlink.quota import TIMES, Quotas
from coterie.engine.flower import set_message_id, set_run, set_sender
from coterie.engine.port import NotPassedError
from tests.unit.server.superlinks import Served, Signature, begun, serving, silo_of

RUN, SILO = 7, 3


def test_an_allowance_follows_from_what_the_silo_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "REMEMBERED", 2)
    free = quota.FREE_BYTES
    kept = Quotas()
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
    assert kept.sends(RUN, SILO, 0, num_objects=quota.FREE_OBJECTS + TIMES) == ""
    assert "4,009 objects; its limit is 4,008," in kept.sends(RUN, SILO, 0, num_objects=1)
    for run in (8, 9):  # two are remembered
        kept.was_sent(run, SILO, 1)
    assert kept.sends(RUN, SILO, 0, num_objects=1) == ""


@pytest.mark.parametrize("kind", [wire.EVALUATE_HISTOGRAMS, wire.TRAIN_SUMS])
def test_sums_may_be_larger_than_all_questions_and_what_is_unused_does_not_add_up(
    kind: str,
) -> None:
    kept, most = Quotas(), wire.most_bytes(kind, 0)
    for _ in range(5):
        kept.asked(RUN, SILO, kind, 1)
        assert kept.sends(RUN, SILO, most) == ""
    assert kept.sends(RUN, SILO, 1), "all was used"
    for _ in range(100):
        kept.asked(RUN, SILO, kind, 1)
        assert kept.sends(RUN, SILO, 10) == ""
    assert kept.sends(RUN, SILO, most - 10) == ""
    assert kept.sends(RUN, SILO, 1), "as if one had been asked"


def test_what_was_asked_before_a_restart_may_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Quotas()
    assert kept.sends(RUN, SILO, 0, num_objects=1) == ""
    assert kept.sends(RUN, SILO, wire.MAX_MODEL_BYTES) == ""
    assert kept.sends(RUN, SILO, quota.FREE_BYTES + 1)
    monkeypatch.setattr(quota, "BEFORE_S", 0.0)
    assert kept.sends(RUN, SILO + 1, 0, num_objects=1) == ""
    assert kept.sends(RUN, SILO + 1, quota.FREE_BYTES + 1)


class SuperLink:
    """A SuperLink over gRPC, and one silo's calls to it."""

    def __init__(self, made: Served, fleet: Any, node: Node, sign: Signature) -> None:
        self.state, self.store, self.run = made.state, made.store, made.run
        self.fleet, self.node, self.sign = fleet, node, sign

    def ask(self, numbers: int) -> str:
        """Send the silo a model of so many numbers, as the run's process does; returns its id."""
        arrays = ArrayRecord({"w": Array(np.zeros(numbers, np.uint8))})
        message = Message(
            RecordDict({"arrays": arrays}), dst_node_id=self.node.node_id, message_type=wire.TRAIN
        )
        set_run(message, self.run)
        set_sender(message, 1)
        return self._store(message)

    def _store(self, message: Message) -> str:
        set_message_id(message, message.object_id)
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
        answer = self.fleet.PullMessages(request)
        for one in inflatable_object.iterate_object_tree(answer.message_object_trees[0]):
            wanted = message_pb2.PullObjectRequest(
                node=self.node, run_id=self.run, object_id=one.object_id
            )
            assert self.fleet.PullObject(wanted).object_available
        return message_from_proto(answer.messages_list[0])

    def reply(self, message: Message, numbers: int, *, whole: bool = True, why: str = "") -> str:
        """The silo answers with so many numbers, or with an error; returns the reply's id."""
        arrays = ArrayRecord({"w": Array(np.ones(numbers, np.uint8))})
        content = Error(wire.UNREADABLE, why) if why else RecordDict({"arrays": arrays})
        reply = Message(content, reply_to=message)
        set_message_id(reply, reply.object_id)
        found = inflatable_object.get_all_nested_objects(reply)
        tree = inflatable_object.get_object_tree(reply)
        header = message_to_proto(remove_content_from_message(reply))
        answer = self.fleet.PushMessages(
            fleet_pb2.PushMessagesRequest(
                node=self.node, messages_list=[header], message_object_trees=[tree]
            )
        )
        for name in answer.objects_to_push if whole else ():
            request = message_pb2.PushObjectRequest(
                node=self.node,
                run_id=self.run,
                session_id=answer.session_id,
                object_id=name,
                object_content=found[name].deflate(),
            )
            self.fleet.PushObject(request)
        return reply.metadata.message_id

    def got(self, message_id: str) -> Any:
        """The header of the reply, as the run's process gets it."""
        (reply,) = self.state.get_message_res({message_id})
        return reply


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SuperLink]:
    monkeypatch.setattr(quota, "FREE_BYTES", 10_000)
    sign = Signature()
    with serving(tmp_path) as made, silo_of(made, sign) as fleet:
        yield SuperLink(made, fleet, made.enrolled(sign), sign)


def test_who_sends_too_much_is_answered_for_in_words_and_the_disk_gets_no_more(
    superlink: SuperLink,
) -> None:
    for _ in range(3):  # as much as it was sent
        asked = superlink.ask(50_000)
        superlink.reply(superlink.receive(), 50_000)
        assert superlink.got(asked).has_content()
    asked = superlink.ask(1000)
    message = superlink.receive()
    with pytest.raises(grpc.RpcError, match="in this run it has sent or announced") as stopped:
        superlink.reply(message, 4_000_000)
    assert type(meaning_of(stopped.value, Way("fl.example.org:9092", tls=True))) is NotPassedError
    superlink.reply(message, 0, why="it did not get through")
    assert "in this run it has sent or announced 4,0" in superlink.got(asked).error.reason
    held: Any = superlink.state
    assert sum(len(one.content) for one in held.object_store.store.values()) < 1_000_000
    asked = superlink.ask(1000)
    superlink.reply(superlink.receive(), 10)
    refused = superlink.got(asked)
    assert refused.error.code == wire.UNREADABLE
    assert "in this run it has sent or announced 4,0" in refused.error.reason
    content = superlink.state.get_object(superlink.run, refused.metadata.message_id)
    answer = objects.put_together(
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


@pytest.mark.parametrize("what", ["another run", "no time"])
def test_a_reply_on_which_flower_would_fail_later_is_dropped(tmp_path: Path, what: str) -> None:
    """With those that other silos sent meanwhile."""
    sign = Signature()
    with serving(tmp_path, str(tmp_path / "state.db")) as made, silo_of(made, sign) as fleet:
        superlink = SuperLink(made, fleet, made.enrolled(sign), sign)
        asked = superlink.ask(10)
        message, right = superlink.receive(), superlink.run
        if what == "another run":
            set_run(message, begun(made.state)[0])
        else:
            message.metadata.ttl = float("nan")
        superlink.reply(message, 10)
        assert made.state.get_message_res({asked}) == []
        set_run(message, right)
        message.metadata.ttl = 1000.0
        superlink.reply(message, 10)
        assert superlink.got(asked).has_content()


@pytest.mark.parametrize("place", ["group", "content", "beside"])
def test_a_header_that_takes_long_to_read_is_refused_unread(
    superlink: SuperLink, place: str
) -> None:
    request = fleet_pb2.PushMessagesRequest(node=superlink.node)
    header = request.messages_list.add()
    if place == "group":
        header.metadata.group_id = "1" * quota.ANNOUNCED_BYTES
    elif place == "content":
        header.content.items.add().metric_record.items.add().key = "1" * quota.ANNOUNCED_BYTES
    else:
        inline_objects.attach(request, [b"1"] * (quota.ANNOUNCED_BYTES // 5))
    with pytest.raises(grpc.RpcError, match="at most 524,288 bytes"):
        superlink.fleet.PushMessages(request)


def test_one_reply_at_a_time(superlink: SuperLink) -> None:
    with pytest.raises(grpc.RpcError, match="one reply at a time"):
        superlink.fleet.PushMessages(fleet_pb2.PushMessagesRequest(node=superlink.node))


@pytest.mark.parametrize("call", ["ActivateNode", "SendNodeHeartbeat"])
def test_a_silo_does_not_count_as_present_for_longer_than_it_should(
    superlink: SuperLink, call: str
) -> None:
    longest = quota.HEARTBEAT_S

    def beat(interval_s: float) -> Any:
        key = superlink.state.get_node_info(node_ids=[superlink.node.node_id])[0].public_key
        request = {
            "ActivateNode": ActivateNodeRequest(public_key=key, heartbeat_interval=interval_s),
            "SendNodeHeartbeat": SendNodeHeartbeatRequest(
                node=superlink.node, heartbeat_interval=interval_s
            ),
        }[call]
        return getattr(superlink.fleet, call)(request)

    superlink.state.deactivate_node(superlink.node.node_id)
    assert beat(longest)
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        beat(longest + 1)


def test_a_call_is_not_larger_than_the_largest_object(superlink: SuperLink) -> None:
    def push(num_bytes: int) -> Any:
        return superlink.fleet.PushObject(
            message_pb2.PushObjectRequest(
                node=superlink.node, run_id=superlink.run, object_content=bytes(num_bytes)
            )
        )

    assert quota.CALL_BYTES == 33 * 2**20
    assert not push(quota.CALL_BYTES - 1000).stored, "nobody has announced it"
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        push(quota.CALL_BYTES)


def test_a_silo_whose_clock_is_wrong_is_told_the_time_here(superlink: SuperLink) -> None:
    superlink.sign.off_s = -1000.0
    with pytest.raises(grpc.RpcError, match="Invalid timestamp; here it is 20"):
        superlink.receive()


def test_another_flower_without_a_name_that_is_replaced_is_noticed() -> None:
    with pytest.raises(AssertionError, match="another Flower"):
        replace_in(json, LONGEST=1.0)
