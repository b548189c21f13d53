"""Which errors of a call are worth another try; the rest of the link is tested against Flower."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError

import coterie.engine.fast.silo.link
from coterie.engine.fast import bundles
from coterie.engine.fast.silo.calls import Calls
from coterie.engine.fast.silo.link import FleetLink, _retry
from coterie.engine.fast.silo.lost import Way, meaning_of, refusal_of
from coterie.engine.fast.silo.sharing import ObjectCache
from coterie.engine.fast.superlink.fleet import with_the_time
from coterie.engine.flower import message_to_proto
from coterie.engine.port import LinkError, NotPassedError, UnreadableError, Unsent

WAY = Way("fl.example.org:9092", tls=True)


class CallError(grpc.RpcError):
    """An answer of the SuperLink."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._answer = code, details

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]


def calls_until(code: grpc.StatusCode, details: str, *, failures: int) -> tuple[int, str]:
    """How often a call is made that fails so many times, and what comes of it."""
    made = 0

    def call() -> str:
        nonlocal made
        made += 1
        if made <= failures:
            raise CallError(code, details)
        return "done"

    try:
        return made, str(_retry().invoke(call)) + str(made)
    except CallError:
        return made, "failed"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)  # no pauses between tries


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused"),
        (grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: Socket closed"),
        (grpc.StatusCode.INTERNAL, "Internal server error."),  # e.g. a locked database
    ],
)
def test_what_a_moment_may_heal_is_asked_again(code: Any, details: str) -> None:
    assert calls_until(code, details, failures=2)[1] == "done3"


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"),
        (grpc.StatusCode.FAILED_PRECONDITION, "the key is not registered"),
        (grpc.StatusCode.UNAUTHENTICATED, "invalid signature"),
        (grpc.StatusCode.PERMISSION_DENIED, "the run has ended"),
    ],
)
def test_what_stays_wrong_is_asked_once(code: Any, details: str) -> None:
    assert calls_until(code, details, failures=1) == (1, "failed")


@pytest.mark.parametrize(
    ("details", "holds"), [("Timestamp is too old", True), ("invalid signature", False)]
)
def test_a_clock_that_jumped_is_no_loss_of_the_connection(details: str, holds: bool) -> None:
    lost = meaning_of(CallError(grpc.StatusCode.UNAUTHENTICATED, details), WAY)
    assert isinstance(lost, LinkError) and lost.holds is holds


@pytest.mark.parametrize(("kind", "trees"), [("train\n\x1b[2J", 1), ("train", 0)])
def test_a_message_without_a_readable_header_is_dropped(
    kind: str, trees: int, caplog: pytest.LogCaptureFixture
) -> None:
    answer = PullMessagesResponse(message_object_trees=[ObjectTree(object_id="x")] * trees)
    proto = message_to_proto(Message(RecordDict(), dst_node_id=1, message_type="train"))
    proto.metadata.message_type = kind
    answer.messages_list.append(proto)
    calls: Any = SimpleNamespace(node=Node(node_id=1), call=lambda *_: answer)
    assert Calls.receive(calls) is None
    assert "cannot be read" in caplog.text and "\x1b" not in caplog.text


def test_a_call_that_is_repeated_is_given_up_when_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coterie.engine.fast.silo.link, "BRIEF_RETRY_S", 0.0)
    retry, tries = _retry(), 0
    retry.max_s = None

    def fails() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            link.hurry()
        assert tries < 100, "the call is still repeated"
        raise CallError(grpc.StatusCode.UNAVAILABLE, "connection refused")

    calls: Any = SimpleNamespace(node=Node(node_id=1), retry=retry)
    calls.receive = lambda: retry.invoke(fails)
    link = FleetLink(calls)
    with pytest.raises(LinkError, match="connection refused"):
        link.receive()
    assert tries == 3


@pytest.mark.parametrize("cache", [None, ObjectCache()])
def test_a_message_is_fetched_and_its_reply_sent_object_by_object(cache: Any) -> None:
    """Calls as Flower's connection gives them, without a SuperLink."""
    asked = Message(RecordDict({"arrays": ArrayRecord([np.arange(3.0)])}), 5, "train")
    asked.metadata.__dict__["_message_id"] = asked.object_id
    tree, contents = get_object_tree(asked), objects_of(asked)
    pushed: dict[str, bytes] = {}
    confirmed: list[tuple[int, str]] = []

    def send(reply: Message, pushed: Any, seconds: float, along: Any) -> tuple[set[str], str]:
        assert (pushed.object_id, seconds) == (reply.object_id, 1.5)
        return set(get_all_nested_objects(reply)), "session"

    def push(run_id: int, session: str, object_id: str, content: bytes) -> None:
        assert (run_id, session) == (asked.metadata.run_id, "session")
        pushed[object_id] = content

    calls = calls_with(
        receive=lambda: (asked, tree, {}),
        send=send,
        pull_object=lambda run_id, object_id: contents[object_id],
        push_object=push,
        confirm=lambda *which: confirmed.append(which),
    )
    link = FleetLink(calls, cache)
    came = link.receive()
    assert came is not None and not came.bundled
    (received,) = came.messages
    assert received.metadata.message_type == "train"
    assert received.content.array_records["arrays"].to_numpy_ndarrays()[0].tolist() == [0, 1, 2]
    assert confirmed == [(asked.metadata.run_id, asked.metadata.message_id)]
    reply = Message(RecordDict(), reply_to=received)
    link.send(Unsent((reply,), 1.5, 1))
    assert set(pushed) == set(get_all_nested_objects(reply))


@pytest.mark.parametrize("all_of_it", [True, False])
def test_objects_that_came_along_are_not_asked_for(all_of_it: bool) -> None:
    asked = Message(RecordDict({"config": ConfigRecord({"n": 3})}), 5, "train")
    asked.metadata.__dict__["_message_id"] = asked.object_id
    contents = objects_of(asked)
    came = dict(list(contents.items())[: None if all_of_it else 1]) | {"of nobody": b"Message 0\0"}
    pulled, confirmed, along = list[str](), list[str](), dict[str, bytes]()

    def pull(run_id: int, object_id: str) -> bytes:
        pulled.append(object_id)
        return contents[object_id]

    def send(reply: Message, pushed: Any, seconds: float, own: Any) -> tuple[set[str], str]:
        along.update(own)
        return set(), "session"

    calls = calls_with(
        receive=lambda: (asked, get_object_tree(asked), came),
        send=send,
        pull_object=pull,
        confirm=lambda run_id, name: confirmed.append(name),
    )
    link = FleetLink(calls)
    received = link.receive()
    assert received is not None and received.messages[0].content["config"]["n"] == 3
    assert set(pulled) == set(contents) - set(came)
    assert confirmed == ([] if all_of_it else [asked.object_id]), "the SuperLink knows of it all"
    reply = Message(RecordDict(), reply_to=received.messages[0])
    link.send(Unsent((reply,), 1.5, 1, bundled=True))
    (sent,) = along.values()
    assert bundles.is_bundle(sent)


def calls_with(**own: Callable[..., Any]) -> Any:
    return SimpleNamespace(node=Node(node_id=1), **own)


def objects_of(message: Message) -> dict[str, bytes]:
    return {name: one.deflate() for name, one in get_all_nested_objects(message).items()}


def often(content: bytes) -> bytes:
    """An array that names its one piece a thousand times."""
    head, _, body = content.partition(b"\0")
    body = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": ' + str([0] * 1000).encode())
    kind, children, _ = head.split(b" ")
    return b" ".join((kind, children, str(len(body)).encode())) + b"\0" + body


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        (b"Array ", often, "its arrays have"),
        (b"RecordDict ", lambda content: b"RecordDict  1\0{", "JSON"),
        (b"Message ", lambda content: b"Message  0\0", "Error"),
        (b"ConfigRecord ", lambda content: b"\xff", "Error"),
        (
            b"RecordDict ",
            lambda content: content.replace(b'"config"', b'"c\\u001b"'),
            "invalid name",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_no_loss_of_the_connection(
    kind: bytes, changed: Callable[[bytes], bytes], said: str
) -> None:
    config = ConfigRecord({"text": "1"})
    asked = Message(
        RecordDict({"arrays": ArrayRecord([np.arange(3.0)]), "config": config}), 5, "train"
    )
    asked.metadata.__dict__["_message_id"] = asked.object_id
    contents = {
        object_id: changed(content) if content.startswith(kind) else content
        for object_id, content in objects_of(asked).items()
    }
    assert contents != objects_of(asked)
    calls = calls_with(
        receive=lambda: (asked, get_object_tree(asked), {}),
        pull_object=lambda run_id, object_id: contents[object_id],
        confirm=lambda *which: None,
    )
    with pytest.raises(UnreadableError, match=said):
        FleetLink(calls, max_bytes=20_000).receive()


def test_objects_that_do_not_come_or_are_not_taken_end_no_silo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coterie.engine.fast.silo.link, "OBJECT_WAIT_S", 0.05)
    asked = Message(RecordDict(), 5, "train")
    asked.metadata.__dict__["_message_id"] = asked.object_id

    def lacking(run_id: int, object_id: str) -> bytes:
        raise ObjectUnavailableError(object_id)

    def taken_by_another(run_id: int, session: str, object_id: str, content: bytes) -> None:
        raise ObjectPushError(object_id, run_id, session)

    def send(reply: Message, pushed: Any, seconds: float, along: Any) -> tuple[set[str], str]:
        return set(get_all_nested_objects(reply)), "session"

    calls = calls_with(
        receive=lambda: (asked, get_object_tree(asked), {}),
        send=send,
        pull_object=lacking,
        push_object=taken_by_another,
    )
    link = FleetLink(calls)
    with pytest.raises(LinkError) as lost:
        link.receive()
    assert lost.value.retry and lost.value.holds
    with pytest.raises(LinkError, match="Failed to push object") as refused:
        link.send(Unsent((Message(RecordDict(), reply_to=asked),), 1.5, 1))
    assert refused.value.retry and refused.value.holds, "the reply is sent again"


# ---------------------------------------------------------------- in words


@pytest.mark.parametrize(
    "details", ["Deadline Exceeded", "Connection refused.", "who?", 2000 * "[" + "who?"]
)
def test_a_text_of_grpc_ends_before_the_next_sentence_begins(details: str) -> None:
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        for said in (meaning_of(CallError(code, details), WAY),
                     refusal_of(CallError(code, details), Way("a:1", tls=False))):  # fmt: skip
            assert re.search(r"(Deadline Exceeded\.|refused\.|who\?)( This silo|$)", str(said))


@pytest.mark.parametrize("why", ["certificate is not yet valid", "certificate has expired"])
def test_a_certificate_that_is_not_valid_now_is_a_matter_of_clocks(why: str) -> None:
    details = f"Ssl handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: {why}: OK"
    error = refusal_of(CallError(grpc.StatusCode.UNAVAILABLE, details), WAY)
    assert "by the clock of this machine, which says 20" in str(error) and why in str(error)
    assert error.retry and "proxy" not in str(error)


@pytest.mark.parametrize(
    ("off_s", "said"), [(60, "this one is 60 s ahead, says"), (-400, "this one is 400 s behind")]
)
def test_a_silo_is_told_by_how_much_its_clock_is_off(off_s: int, said: str) -> None:
    theirs = datetime.now(UTC) - timedelta(seconds=off_s)
    details = with_the_time("Invalid timestamp", theirs)
    error = refusal_of(CallError(grpc.StatusCode.UNAUTHENTICATED, details), WAY)
    assert said in str(error) and "Set both by NTP." in str(error)
    assert with_the_time("Invalid signature", theirs) == "Invalid signature"


def test_a_coordinator_that_does_not_tell_its_time_is_understood() -> None:
    error = refusal_of(CallError(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp"), WAY)
    assert "differ too much: this one says 20" in str(error)


@pytest.mark.parametrize(
    ("status", "given_up"), [(413, True), (403, False), (404, False), (502, False), (504, False)]
)
def test_what_a_proxy_answers_is_no_word_of_the_superlink(status: int, given_up: bool) -> None:
    """403 is not the end of the run, 404 no call that is missing; 413 stays."""
    code = {403: grpc.StatusCode.PERMISSION_DENIED, 404: grpc.StatusCode.UNIMPLEMENTED}
    details = f"Received http2 header with status: {status}"
    error = CallError(code.get(status, grpc.StatusCode.UNKNOWN), details)
    lost, refused = meaning_of(error, WAY), refusal_of(error, WAY)
    assert isinstance(lost, LinkError) and lost.holds
    assert isinstance(lost, NotPassedError) == given_up
    assert "a proxy on the way" in str(lost) and f"({status})." in str(refused)


def test_a_message_that_is_larger_than_the_superlink_takes_is_given_up() -> None:
    details = "SERVER: Received message larger than max (5000000 vs. 4194304)"
    error = meaning_of(CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, details), WAY)
    assert isinstance(error, NotPassedError) and details in str(error)


def test_an_error_of_a_call_through_a_proxy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    cut = CallError(grpc.StatusCode.UNAVAILABLE, "Connection refused")
    for said in (meaning_of(cut, WAY), refusal_of(cut, WAY)):
        assert "Connection refused. Calls to fl.example.org go through the proxy" in str(said)
    here = refusal_of(cut, Way("127.0.0.1:9092", tls=False))
    assert "proxy" not in str(here) and "does the SuperLink want it?" in str(here)
