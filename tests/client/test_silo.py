"""The resident silo's loop with a link that is played by the test."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import coterie.client.resident.silo
from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.ledger import outbound
from coterie.client.resident.link import LinkError, LinkLostError, RunEndedError
from coterie.client.resident.silo import Connection, GaveUpError, Silo

Step = Callable[[], Message | None]


def message(kind: str = wire.TRAIN, text: str = "") -> Message:
    content = RecordDict({"config": ConfigRecord({"text": text})})
    made = Message(content, dst_node_id=1, message_type=kind, group_id="1")
    made.metadata.__dict__["_message_id"] = "id"
    made.metadata.__dict__["_run_id"] = 5
    return made


class FakeLink:
    """Plays a script: what ``receive`` gives or raises, one step a call; then the silo is stopped.

    Attributes:
        sent: replies.
        send_error: raised by the next ``send``.
    """

    node_id = 77

    def __init__(self, world: World, script: list[Any]) -> None:
        self.world, self.script = world, list(script)

    def receive(self) -> Message | None:
        if not self.script:
            self.world.silo.stop()
            return None
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def send(self, reply: Message, *, seconds: float) -> None:
        assert seconds >= 0
        if self.world.send_errors:
            raise self.world.send_errors.pop(0)
        self.world.sent.append(reply)


class World:
    """Connections in order: each a script for its link, or an error instead of a connection."""

    def __init__(self) -> None:
        self.connections: list[list[Any] | Exception] = []
        self.sent: list[Message] = []
        self.send_errors: list[Exception] = []
        self.opened = self.closed = 0
        self.arguments: list[Any] = []
        self.nodes: list[int] = []
        self.contexts: list[Context] = []
        self.pauses: list[float] = []
        app = ClientApp(mods=[outbound])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.contexts.append(context)
            text = message.content["config"]["text"]
            if text == "raise":
                raise ValueError("patient 17 has no consent")
            if text == "exit":
                raise SystemExit(3)
            if text == "signal":
                signal.raise_signal(signal.SIGTERM)
            return Message(RecordDict({"config": ConfigRecord({"text": text})}), reply_to=message)

        self.silo = Silo(
            app,
            SiloSettings("north", options={"train": 5}),
            Connection("fl.example:9092", patience_s=30.0),
            on_connected=self.nodes.append,
        )

    @contextmanager
    def connect(self, address: str, **options: Any) -> Iterator[FakeLink]:
        self.arguments.append((address, options))
        plan = self.connections.pop(0) if self.connections else []
        if isinstance(plan, Exception):
            raise plan
        self.opened += 1
        try:
            yield FakeLink(self, plan)
        finally:
            self.closed += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(coterie.client.resident.silo, "connect", made.connect)
    monkeypatch.setattr(coterie.client.resident.silo, "MAX_PAUSE_S", 0.001)
    monkeypatch.setattr(coterie.client.resident.silo, "MIN_PAUSE_S", 0.0)

    class CountingEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            made.pauses.append(timeout or 0.0)
            return self.is_set()

    made.silo._stop = CountingEvent()
    return made


def texts(world: World) -> list[str]:
    return [
        reply.error.reason if reply.has_error() else reply.content["config"]["text"]
        for reply in world.sent
    ]


def test_messages_are_answered_in_order_until_it_is_told_to_stop(world: World) -> None:
    world.connections = [[None, message(text="1"), None, message(text="2")]]
    world.silo.run()
    assert texts(world) == ["1", "2"]
    assert world.nodes == [77]
    assert (world.opened, world.closed) == (1, 1)
    assert world.arguments == [("fl.example:9092", {"root_certificates": None, "keys": None})]


def test_the_app_is_called_with_the_silos_own_settings_and_nothing_of_the_servers(
    world: World,
) -> None:
    world.connections = [[message(text="1")]]
    world.silo.run()
    (context,) = world.contexts
    assert context.node_config == world.silo.settings.to_node_config()
    assert (context.node_id, context.run_id, context.run_config) == (77, 5, {})


def test_an_exception_is_answered_with_an_error_and_the_silo_goes_on(world: World) -> None:
    world.connections = [[message(text="raise"), message(text="next")]]
    world.silo.run()
    assert world.sent[0].error.code == wire.FAILED
    assert texts(world)[1] == "next"
    assert world.opened == 1


def test_an_error_reply_names_the_silo_and_the_kind_but_never_the_data(world: World) -> None:
    world.connections = [[message(text="raise")]]
    world.silo.run()
    reason = world.sent[0].error.reason
    assert "north" in reason and "ValueError" in reason
    assert "patient" not in reason


def test_a_task_that_exits_is_answered_with_an_error_too(world: World) -> None:
    world.connections = [[message(text="exit"), message(text="next")]]
    world.silo.run()
    assert world.sent[0].has_error()
    assert texts(world)[1] == "next"


def test_a_message_type_that_the_app_does_not_know_is_answered_with_an_error(world: World) -> None:
    world.connections = [[message("query.nonsense"), message(text="next")]]
    world.silo.run()
    assert world.sent[0].has_error()
    assert texts(world)[1] == "next"


def test_a_lost_connection_is_opened_again(world: World) -> None:
    world.connections = [[message(text="1"), LinkLostError("gone")], [message(text="2")]]
    world.silo.run()
    assert texts(world) == ["1", "2"]
    assert (world.opened, world.closed) == (2, 2)


def test_a_connection_lost_while_answering_is_opened_again(world: World) -> None:
    world.send_errors = [LinkLostError("gone")]
    world.connections = [[message(text="1")], [message(text="2")]]
    world.silo.run()
    assert texts(world) == ["2"]


def test_refused_attempts_are_repeated_with_growing_pauses(world: World) -> None:
    world.connections = [*[LinkError("not there")] * 8, [message(text="1")]]
    world.silo.run()
    assert texts(world) == ["1"]
    attempts = [p for p in world.pauses if p > 0.1]
    assert len(attempts) == 8
    for pause, expected in zip(attempts, [0.25, 0.5, 1, 2, 4, 5, 5, 5], strict=True):
        assert 0.7 * expected <= pause <= 1.3 * expected


def test_it_gives_up_after_its_patience_and_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(coterie.client.resident.silo.time, "monotonic", lambda: float(next(clock)))
    world.connections = [LinkError("the SuperLink cannot be reached")] * 50
    with pytest.raises(GaveUpError, match="silo 'north' gave up after 40 s: the SuperLink cannot"):
        world.silo.run()
    assert len(world.connections) == 50 - 4  # patience is 30 s


def test_patience_begins_anew_with_every_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(coterie.client.resident.silo.time, "monotonic", lambda: now[0])

    def much_later() -> Message:
        now[0] += 1000.0
        return message(text="late")

    monkeypatch.setattr(
        FakeLink,
        "receive",
        lambda link, old=FakeLink.receive: (
            much_later() if link.script[:1] == ["late"] and link.script.pop(0) else old(link)
        ),
    )
    world.connections = [["late", LinkLostError("gone")], LinkError("x"), [message(text="2")]]
    world.silo.run()
    assert texts(world) == ["late", "2"]


def test_a_refusal_that_trying_again_cannot_mend_ends_the_silo(world: World) -> None:
    world.connections = [LinkError("wrong CA certificate", retry=False)]
    with pytest.raises(LinkError, match="wrong CA certificate"):
        world.silo.run()
    assert world.pauses == []


def test_a_message_of_a_run_that_has_ended_is_dropped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.connections = [[RunEndedError("over"), message(text="next")]]
    with caplog.at_level(logging.INFO, logger="coterie.silo"):
        world.silo.run()
    assert texts(world) == ["next"]
    assert world.opened == 1
    assert "a message was dropped" in caplog.text


def test_a_reply_to_a_run_that_has_ended_is_dropped(world: World) -> None:
    world.send_errors = [RunEndedError("over")]
    world.connections = [[message(text="1"), message(text="2")]]
    world.silo.run()
    assert texts(world) == ["2"]
    assert world.opened == 1


def test_a_silo_stopped_before_it_begins_never_connects(world: World) -> None:
    world.silo.stop()
    world.silo.run()
    assert world.opened == 0


def test_an_error_that_is_no_link_error_is_not_hidden(world: World) -> None:
    world.connections = [[KeyError("a mistake of ours")]]
    with pytest.raises(KeyError):
        world.silo.run()
    assert world.closed == 1


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_sigterm_in_the_middle_of_work_is_answered_and_ends_the_silo(
    world: World, own_signals: None
) -> None:
    world.connections = [[message(text="signal"), message(text="never")]]
    world.silo.stop_on_signals()
    world.silo.run()
    assert texts(world) == ["silo 'north' is shutting down."]
    assert (world.opened, world.closed) == (1, 1)


def test_sigterm_between_messages_ends_the_silo(world: World, own_signals: None) -> None:
    world.silo.stop_on_signals()
    signal.raise_signal(signal.SIGTERM)
    world.silo.run()
    assert world.opened == 0
