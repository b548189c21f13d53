"""The resident process with links and a clock that are played by the test."""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.client.home import approvals
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import outbound
from coterie.client.resident import host, schedule
from coterie.client.resident.host import GaveUpError, Host
from coterie.engine.fast.silo.outbox import Outbox
from coterie.engine.port import (
    Connection,
    LinkError,
    NotPassedError,
    Received,
    RunEndedError,
    TooLargeError,
    UnreadableError,
    Unsent,
)
from tests.kit import until


def message(
    kind: str = wire.TRAIN, text: str = "", round: str = "1", strategy: str = "fedavg"
) -> Message:
    content = RecordDict({"config": ConfigRecord({"text": text, wire.STRATEGY: strategy})})
    made = Message(content, dst_node_id=1, message_type=kind, group_id=round)
    made.metadata.__dict__["_message_id"] = "id"
    made.metadata.__dict__["_run_id"] = 5
    return made


class FakeLink:
    """Plays a script: what ``receive`` gives or raises, one step a call. When the scripts of all
    silos have ended the host is stopped."""

    notifies = False

    def __init__(self, world: World, script: list[Any], node_id: int) -> None:
        self.world, self.script, self.node_id = world, list(script), node_id

    def receive(self) -> Received | None:
        if not self.script:
            self.world.at_end.add(self.node_id)
            if len(self.world.at_end) == len(self.world.host._nodes):
                self.world.host.stop()
            return None
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            self.world.now += step
            return None
        assert step is None or isinstance(step, Message | Received)
        return Received(step, (step,)) if isinstance(step, Message) else step

    def require_running(self, run_id: int) -> None:
        assert run_id == 5
        if self.world.ended:
            raise RunEndedError("over")

    def send(self, unsent: Unsent) -> None:
        assert unsent.seconds >= 0
        if self.world.send_errors:
            raise self.world.send_errors.pop(0)
        self.world.sent += unsent.replies

    def hurry(self) -> None:
        """Its calls end at once anyway."""


WAY = Connection("fl.example:9092", patience_s=30.0)


class World:
    """Connections in order: each a script for its link, or an error instead of a connection.

    Attributes:
        send_errors: raised by the next ``send``.
        pauses: waits of the host's threads, in seconds, by a clock that nothing else moves.
    """

    def __init__(self, silos: Sequence[str] = ("north",)) -> None:
        self.connections: list[list[Any] | Exception] = []
        self.sent: list[Message] = []
        self.send_errors: list[Exception] = []
        self.opened = self.closed = 0
        self.contexts: list[Context] = []
        self.pauses: list[float] = []
        self.at_end: set[int] = set()
        self.now = 0.0
        self.ended = False
        app = ClientApp(mods=[outbound])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.contexts.append(context)
            text = message.content["config"]["text"]
            if text == "raise":
                raise ValueError("patient 17 has no consent")
            if text == "exit":
                raise SystemExit(3)
            while text == "endless":
                threading.Event().wait(0.01)
            if text == "signal":
                signal.raise_signal(signal.SIGTERM)
            return Message(RecordDict({"config": ConfigRecord({"text": text})}), reply_to=message)

        self.silos = [SiloSettings(name, options={"train": 5}) for name in silos]
        self.host = Host(app, self.silos, WAY, self)

    def outbox(self, home: str) -> Outbox:
        return Outbox(home)

    @contextmanager
    def connect(self, *, max_bytes: int, silos: int) -> Iterator[FakeLink]:
        assert max_bytes == 2_000_000_000
        plan = self.connections.pop(0) if self.connections else []
        if isinstance(plan, Exception):
            raise plan
        self.opened += 1
        try:
            yield FakeLink(self, plan, 76 + self.opened)
        finally:
            self.closed += 1


@pytest.fixture
def silos() -> Sequence[str]:
    return ("north",)


@pytest.fixture
def world(silos: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> World:
    class Waits(threading.Condition):
        """Time passes only while all threads wait, however long the machine delays one of them."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                made.pauses.append(timeout)
            self.ends.append(math.inf if timeout is None else made.now + timeout)
            if len(self.ends) < made.host.num_threads:
                return super().wait()
            made.now = min(self.ends)
            self.notify_all()
            return False

        def notify(self, n: int = 1) -> None:
            self.ends.clear()  # who is woken decides anew how long to wait
            super().notify(n)

    monkeypatch.setattr(schedule, "Condition", Waits)
    monkeypatch.setattr(schedule.random, "uniform", lambda low, high: (low + high) / 2)
    made = World(silos)
    made.host._schedule._last_contact = 0.0
    monkeypatch.setattr(schedule.time, "monotonic", lambda: made.now)
    return made


def texts(world: World) -> list[str]:
    return [
        reply.error.reason if reply.has_error() else reply.content["config"]["text"]
        for reply in world.sent
    ]


def test_messages_are_answered_in_order_until_it_is_told_to_stop(world: World) -> None:
    world.connections = [[None, message(text="1"), None, message(text="2")]]
    world.host.run()
    assert texts(world) == ["1", "2"]
    assert (world.opened, world.closed) == (1, 1)


def test_the_app_is_called_with_the_silos_own_settings_and_nothing_of_the_servers(
    world: World,
) -> None:
    world.connections = [[message(text="1")]]
    world.host.run()
    (context,) = world.contexts
    assert context.node_config == world.silos[0].to_node_config()
    assert (context.node_id, context.run_id, context.run_config) == (77, 5, {})


def test_the_log_has_a_line_for_a_run_for_each_round_and_for_the_end(
    world: World, own_signals: None, caplog: pytest.LogCaptureFixture
) -> None:
    world.connections = [[message(text="1"), message(text="raise"), message(text="2", round="2")]]
    world.connections[0] += [message(text="again", round="2")]
    world.connections[0] += [message(round="3", strategy="regression")]
    world.connections[0] += [message(text="signal")]
    world.host.stop_on_signals()
    with caplog.at_level(logging.INFO, logger="coterie.silo"):
        world.host.run()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO][1:]
    assert said == [
        "takes part in run 5: strategy 'fedavg'",
        "run 5 round 1: fedavg, trained in 0.00 s, 0.0 kB sent",
        "run 5 round 2: fedavg, trained in 0.00 s, 0.0 kB sent",
        "run 5 round 3: regression, answered in 0.00 s, 0.0 kB sent",
        "stopping: leaving run 5 in round 1",
        "ended by SIGTERM",
    ]


def test_an_error_reply_names_the_silo_and_the_kind_but_never_the_data(world: World) -> None:
    world.connections = [[message(text="raise")]]
    world.host.run()
    reason = world.sent[0].error.reason
    assert "north" in reason and "ValueError" in reason
    assert "patient" not in reason


@pytest.mark.parametrize(
    "sent",
    [{"text": "exit"}, {"kind": "query.nonsense"}],
    ids=["a task that exits", "a type that the app does not know"],
)
def test_a_message_that_cannot_be_handled_is_answered_with_an_error(
    sent: dict[str, str], world: World
) -> None:
    world.connections = [[message(**sent), message(text="next")]]
    world.host.run()
    assert world.sent[0].has_error()
    assert texts(world)[1] == "next"


def test_a_connection_lost_while_answering_is_opened_again(world: World) -> None:
    """The SuperLink gave the silo another node: nobody takes the reply of the one before."""
    world.send_errors = [LinkError("gone")]
    world.connections = [[message(text="1")], [message(text="2")]]
    world.host.run()
    assert texts(world) == ["2"]


def test_a_reply_is_sent_again_when_the_way_is_back_and_before_anything_else(world: World) -> None:
    world.send_errors = [LinkError("cut", holds=True)] * 3
    world.connections = [[message(text="1"), message(text="2")]]
    world.host.run()
    assert texts(world) == ["1", "2"]
    assert len(world.contexts) == 2, "each is worked on once"
    assert world.opened == 1, "signing off would cost the silo its round"


def test_a_way_that_stays_cut_ends_the_silo_after_its_patience(world: World) -> None:
    world.connections = [[LinkError("cut", holds=True)] * 50]
    with pytest.raises(GaveUpError, match=r"gave up after 3\d s: cut"):
        world.host.run()


def test_a_reply_that_no_proxy_lets_pass_is_given_up_and_an_error_goes_in_its_place(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    why = "a proxy on the way refuses messages of this size (413)."
    world.send_errors = [NotPassedError(why, holds=True)]
    world.connections = [[message(text="1"), message(text="2")]]
    world.host.run()
    assert texts(world) == [f"its reply could not be sent: {why}", "2"]
    assert world.sent[0].error.code == wire.UNREADABLE
    assert world.sent[0].metadata.reply_to_message_id == "id" and world.opened == 1
    assert f"a reply was given up: {why}" in caplog.text


def test_patience_ends_where_not_even_an_error_gets_through(world: World) -> None:
    world.send_errors = [NotPassedError("nothing passes", holds=True)] * 50
    world.connections = [[message(text="1")]]
    with pytest.raises(GaveUpError, match=r"gave up after 3\d s: nothing passes\. --retry-for"):
        world.host.run()


def test_who_gives_up_says_what_would_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.connections = [LinkError("the SuperLink was lost: Connection refused")] * 50
    with pytest.raises(GaveUpError, match=r"Connection refused\. --retry-for .*systemd service"):
        world.host.run()
    left = re.findall(r"refused\. Retrying for another (\d+) s\.", caplog.text)
    assert len(left) > 5 and sorted(map(int, left), reverse=True) == list(map(int, left))


def test_a_reply_that_could_not_be_sent_is_sent_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = Message(RecordDict({"config": ConfigRecord({"text": "1"})}), reply_to=message(text="0"))
    Outbox(str(tmp_path)).keep(Unsent((reply,), 1.5, 77))
    with monkeypatch.context() as busy:  # too many open files, for example
        busy.setattr(zipfile, "ZipFile", Mock(side_effect=OSError))
        assert Outbox(str(tmp_path)).unsent is None
    kept = Outbox(str(tmp_path)).unsent
    assert kept is not None and (kept.seconds, kept.node_id) == (1.5, 77)
    (same,) = kept.replies
    assert same.content["config"]["text"] == "1"
    assert same.metadata.reply_to_message_id == reply.metadata.reply_to_message_id
    assert (tmp_path / "unsent.zip").stat().st_mode & 0o077 == 0
    again = Outbox(str(tmp_path))
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", Mock(side_effect=OSError(30, "Read-only file system")))
        again.clear()
    assert again.unsent is None and Outbox(str(tmp_path)).unsent is not None
    again = Outbox(str(tmp_path))
    again.clear()
    assert Outbox(str(tmp_path)).unsent is None
    (tmp_path / "unsent.zip").write_bytes(b"half")
    assert Outbox(str(tmp_path)).unsent is None


def test_a_message_that_is_too_large_or_unreadable_is_refused_in_words(
    world: World,
) -> None:
    errors = [
        TooLargeError("a bomb", message(text="1")),
        UnreadableError("it is not a message.", message(text="2")),
    ]
    world.connections = [[*errors, message(text="3")]]
    world.host.run()
    assert "accepts no message of more than 2000 MB (max_message_mb)" in texts(world)[0]
    assert texts(world)[1].endswith("cannot read a message: it is not a message.")
    assert texts(world)[2] == "3"


@pytest.mark.parametrize(
    ("ended", "minutes", "said"),
    [(True, 0.0, "its run has ended"), (False, 0.01, r"0\.01 minutes \(max_minutes\)")],
)
def test_work_that_is_of_no_use_or_takes_too_long_is_ended(
    ended: bool,
    minutes: float,
    said: str,
    world: World,
    own_signals: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "ASK_S", 0.1)
    world.ended = ended
    world.host._nodes[0].silos = (replace(world.silos[0], policy=Policy(max_minutes=minutes)),)
    world.connections = [[message(text="endless"), message(text="next")]]
    world.host.stop_on_signals()
    world.host.run()
    assert re.search(said, texts(world)[0])
    assert texts(world)[1] == "next"
    assert world.host._useless is None, "it holds the model of the message"


@pytest.mark.parametrize("over", [True, False])
def test_between_messages_runs_that_are_over_leave_the_list_of_those_to_approve(
    world: World, over: bool, tmp_path: Path
) -> None:
    settings = SiloSettings("north", home=str(tmp_path), policy=Policy(approve="ask"))
    world.host._nodes[0].silos = (settings,)
    approvals.not_now(settings, wire.DESCRIBE, {wire.OF_RUN: "hcct-5"}, "5")
    world.connections, world.ended = [[None]], over
    world.host.run()
    assert [one.run for one in approvals.read_all(tmp_path)] == ([] if over else ["hcct-5"])


class Notifying:
    """A link whose SuperLink says when there is a message, with a real clock."""

    node_id, notifies = 77, True

    def __init__(self, world: World) -> None:
        self.world = world
        self.message: Message | None = None
        self.word, self.left = threading.Event(), threading.Event()
        self.looks = self.waits = 0
        self.fails = self.lost = self.broken = False
        self.waits_at_send: list[int] = []
        self.ends = threading.Event()

    def hurry(self) -> None:
        self.ends.set()

    def receive(self) -> Received | None:
        self.looks += 1
        if self.lost:
            self.ends.wait(600)
            raise LinkError("lost", holds=True)
        came, self.message = self.message, None
        if came is not None and self.broken:
            raise UnreadableError("no message", came)
        return Received(came, (came,)) if came is not None else None

    def wait(self) -> bool:
        self.waits += 1
        if self.fails:
            raise LinkError("no")
        self.word.wait(30)
        self.word.clear()
        self.left.set()
        return self.notifies

    def send(self, unsent: Unsent) -> None:
        self.waits_at_send.append(self.waits)
        self.world.sent += unsent.replies


@pytest.fixture
def notifying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notifying]:
    """Of a host that serves, and has looked once in vain."""
    world = World()
    link = Notifying(world)
    monkeypatch.setattr(world, "connect", lambda **_: nullcontext(link))
    world.host._schedule._last_work -= 3600.0
    thread = threading.Thread(target=world.host.run)
    thread.start()
    until(lambda: link.waits, "it to wait")
    yield link
    world.host.stop()
    thread.join(60)
    assert not thread.is_alive(), "nobody waits for the call"
    link.word.set()


def test_a_silo_looks_when_it_is_told_and_not_before(notifying: Notifying) -> None:
    time.sleep(0.2)
    assert (notifying.looks, notifying.waits) == (1, 1)
    notifying.message = message(text="1")
    notifying.word.set()
    until(lambda: texts(notifying.world) == ["1"], "its work")
    until(lambda: notifying.waits == 2, "it to wait again")
    time.sleep(0.2)
    assert (notifying.looks, notifying.waits) == (2, 2), "after work it waits again"


def test_a_message_that_cannot_be_read_is_answered_before_it_waits(notifying: Notifying) -> None:
    notifying.broken, notifying.message = True, message(text="1")
    notifying.word.set()
    until(lambda: notifying.waits_at_send, "its answer")
    assert notifying.waits_at_send == [1]


def test_a_silo_whose_superlink_cannot_tell_any_more_asks_as_before(notifying: Notifying) -> None:
    notifying.notifies = False
    notifying.word.set()
    until(lambda: notifying.looks > 5, "it to look often")
    assert notifying.waits == 1


def test_a_silo_whose_call_fails_asks_as_before_and_tries_it_again(notifying: Notifying) -> None:
    notifying.fails = True
    notifying.word.set()
    notifying.message = message(text="1")  # after which it asks often
    until(
        lambda: notifying.looks > 5 and notifying.waits > 2, "it to look and to try the call again"
    )
    assert texts(notifying.world) == ["1"]


def test_a_silo_that_has_to_end_gives_up_a_call_that_is_repeated(notifying: Notifying) -> None:
    notifying.lost = True
    notifying.word.set()
    until(lambda: notifying.looks > 1, "it to ask a SuperLink that does not answer")
    notifying.world.host.stop()  # the fixture waits for its end


def test_refused_attempts_are_repeated_with_growing_pauses(world: World) -> None:
    world.connections = [*[LinkError("not there")] * 8, [message(text="1")]]
    world.host.run()
    assert texts(world) == ["1"]
    attempts = [p for p in world.pauses if p > 0.1]
    assert attempts == pytest.approx([0.25, 0.5, 1, 2, 4, 5, 5, 5])


def test_a_lost_connection_is_not_opened_again_in_the_same_instant(world: World) -> None:
    world.connections = [[message(text="1"), LinkError("gone")], [message(text="2")]] * 2
    world.host.run()
    assert [p for p in world.pauses if p > 0.1] == pytest.approx([0.25])


def test_it_gives_up_after_its_patience_and_says_why(world: World) -> None:
    world.connections = [LinkError("the SuperLink cannot be reached")] * 50
    with pytest.raises(GaveUpError, match="silo 'north' gave up after 33 s: the SuperLink cannot"):
        world.host.run()
    assert len(world.connections) == 50 - 11  # patience is 30 s


def test_patience_begins_anew_with_every_connection(world: World) -> None:
    world.connections = [[1000.0, LinkError("gone")], LinkError("x"), [message(text="2")]]
    world.host.run()
    assert texts(world) == ["2"]


def test_a_refusal_that_trying_again_cannot_mend_ends_the_silo(world: World) -> None:
    world.connections = [LinkError("wrong CA certificate", retry=False)]
    with pytest.raises(LinkError, match="wrong CA certificate"):
        world.host.run()
    assert world.pauses == []


def test_a_message_of_a_run_that_has_ended_is_dropped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.connections = [[RunEndedError("over"), message(text="next")]]
    with caplog.at_level(logging.INFO, logger="coterie.silo"):
        world.host.run()
    assert texts(world) == ["next"]
    assert world.opened == 1
    assert "a message was dropped" in caplog.text


def test_a_reply_to_a_run_that_has_ended_is_dropped(world: World) -> None:
    world.send_errors = [RunEndedError("over")]
    world.connections = [[message(text="1"), message(text="2")]]
    world.host.run()
    assert texts(world) == ["2"]
    assert world.opened == 1


def test_a_silo_stopped_before_it_begins_never_connects(world: World) -> None:
    world.host.stop()
    world.host.run()
    assert world.opened == 0


def test_an_error_that_is_no_link_error_is_not_hidden(world: World) -> None:
    world.connections = [[KeyError("a mistake of ours")]]
    with pytest.raises(KeyError):
        world.host.run()
    assert world.closed == 1


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, host.STOP_WORK)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_sigterm_in_the_middle_of_work_is_answered_and_ends_the_silo(
    world: World, own_signals: None
) -> None:
    world.connections = [[message(text="signal"), message(text="never")]]
    world.host.stop_on_signals()
    world.host.run()
    assert texts(world) == ["silo 'north' is shutting down."]
    assert (world.opened, world.closed) == (1, 1)


def test_sigterm_between_messages_ends_the_silo(world: World, own_signals: None) -> None:
    world.host.stop_on_signals()
    signal.raise_signal(signal.SIGTERM)
    world.host.run()
    assert world.opened == 0


# ---------------------------------------------------------------- several silos

several = pytest.mark.parametrize("silos", [("north", "south", "west")])


@several
def test_each_of_several_silos_answers_its_own_messages_under_its_own_name(world: World) -> None:
    world.connections = [[message(text=f"{i}a"), None, message(text=f"{i}b")] for i in range(3)]
    world.host.run()
    assert sorted(texts(world)) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    called = {(context.node_config["name"], context.node_id) for context in world.contexts}
    assert sorted(name for name, _ in called) == ["north", "south", "west"]
    assert sorted(node for _, node in called) == [77, 78, 79]
    assert world.closed == 3


@several
def test_one_of_several_that_is_lost_comes_back_and_the_others_go_on(world: World) -> None:
    world.connections = [
        [message(text="1"), LinkError("gone")], [message(text="2")], [message(text="3")],
        LinkError("not yet"), [message(text="4")],
    ]  # fmt: skip
    world.host.run()
    assert sorted(texts(world)) == ["1", "2", "3", "4"]
    assert (world.opened, world.closed) == (4, 4)


@several
def test_one_that_cannot_connect_is_waited_for_as_long_as_the_others_are_heard(
    world: World,
) -> None:
    refused = [LinkError("not yet")] * 20  # 90 s, three times its patience
    world.connections = [[message(text="1")], [message(text="2")], *refused, [message(text="3")]]
    world.host.run()
    assert sorted(texts(world)) == ["1", "2", "3"]


@several
def test_several_silos_give_up_in_one_sentence(world: World) -> None:
    world.connections = [LinkError("the SuperLink cannot be reached")] * 90
    with pytest.raises(GaveUpError, match=r"^the 3 silos gave up after 3\d s: the SuperLink"):
        world.host.run()


@several
def test_sigterm_in_the_middle_of_work_ends_all_silos_of_the_process(
    world: World, own_signals: None
) -> None:
    world.connections = [[message(text="signal")] for _ in range(3)]
    world.host.stop_on_signals()
    world.host.run()
    assert set(texts(world)) <= {f"silo {s.name!r} is shutting down." for s in world.silos}
    assert world.sent and world.opened == world.closed


@several
def test_silos_that_share_a_node_answer_a_bundle_together_each_as_itself(world: World) -> None:
    world.host = Host(world.host.app, world.silos, WAY, world, one_node=True)
    orders = tuple(message(text=text) for text in ("for west", "raise", "for north"))
    world.connections = [[Received(orders[0], orders, (2, 1, 0), bundled=True)]]
    world.host.run()
    assert texts(world) == [
        "for west",
        "silo 'south' failed: ValueError; see the silo's log.",
        "for north",
    ]
    assert [context.node_config["name"] for context in world.contexts] == ["west", "south", "north"]
    assert (world.opened, world.closed) == (1, 1)


@several
def test_silos_that_share_a_node_say_how_many_they_are_to_who_asks(world: World) -> None:
    world.host = Host(world.host.app, world.silos, WAY, world, one_node=True)
    asked, plain = message(wire.DESCRIBE), message(text="to whom?")
    asked.content["config"] = ConfigRecord({wire.BUNDLES: True, wire.HOSTED: True})
    world.connections = [[asked, plain]]
    world.host.run()
    hosts, refused = (reply.error for reply in world.sent)
    assert (hosts.code, hosts.reason) == (wire.HOSTS, "3")
    assert refused.code == wire.REFUSED and "Start one process per silo" in refused.reason
    assert not world.contexts


def test_several_silos_cannot_have_one_key() -> None:
    keys: Any = ("private", "public")
    silos = [SiloSettings("a"), SiloSettings("b")]
    with pytest.raises(ValueError, match="a key belongs to one silo"):
        Host(ClientApp(), silos, Connection("fl.example:9092", keys=keys), World())
