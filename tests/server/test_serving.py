"""Which Flower is installed decides how a SuperLink is served; an address offers its own calls."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node

from coterie import wire
from coterie.server.machine import serving, superlink
from coterie.server.machine.holding import Room
from coterie.strategies.errors import FederationError


@pytest.mark.parametrize(
    ("installed", "http"),
    [("1.34.0", False), ("1.40.0", True), ("1.41.3", True), ("1.42.0", True)],
)
def test_what_is_spoken_follows_from_the_release(
    monkeypatch: pytest.MonkeyPatch, installed: str, http: bool
) -> None:
    monkeypatch.setattr(superlink, "version", lambda _: installed)
    assert superlink.engine_speaks_http() == http
    line = superlink.command("0.0.0.0:1", "127.0.0.1:2", "127.0.0.1:3", "--insecure")
    assert ("coterie.server.machine.serving" in line) == http
    assert line[-7:] == [
        *("--fleet-api-address", "0.0.0.0:1", "--control-api-address", "127.0.0.1:2"),
        *("--serverappio-api-address", "127.0.0.1:3", "--insecure"),
    ]


@pytest.mark.parametrize("installed", ["1.33.1", "1.35.0", "1.39.0", "1.43.0", "2.0.0"])
def test_a_release_that_is_not_known_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(superlink, "version", lambda _: installed)
    with pytest.raises(FederationError, match=r"needs 1\.34, or 1\.40 to 1\.42"):
        superlink.engine_speaks_http()


def ask(
    offered: serving.Offered, path: str, kind: str = "http", length: bytes | None = b"1"
) -> int:
    """Status of the answer to a call."""
    told: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"x"}

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    headers = [] if length is None else [(b"content-length", length)]
    asyncio.run(offered({"type": kind, "path": path, "headers": headers}, receive, send))
    return int(told[0]["status"]) if told else 0


def test_an_address_offers_the_calls_it_is_for_and_no_others() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await serving._answer(send, 200, b"")

    for own in (serving.FLEET, serving.OPERATORS, serving.RUNTIME):
        offered = serving.Offered(own)
        offered.app = app
        assert ask(offered, own + "some-call") == ask(offered, "/health") == 200
        for path in ("/docs", "/", "/openapi.json", "/v1/responses", "/coterie.Operators/Act"):
            assert ask(offered, path) == 404
        for other in {serving.FLEET, serving.OPERATORS, serving.RUNTIME} - {own}:
            assert ask(offered, other + "some-call") == 404
        assert ask(offered, own + "some-call", kind="websocket") in (0, 404)


@pytest.mark.parametrize("length", [None, b"", b"-1", b"99999999999"])
def test_a_call_of_no_or_too_great_length_is_not_read(length: bytes | None) -> None:
    """Flower reads all of a request before it asks whose it is."""
    for paths in (serving.FLEET, serving.OPERATORS):
        assert ask(serving.Offered(paths), paths + "some-call", length=length) == 413


# ---------------------------------------------------------------- calls that are held


class Caller:
    """A silo's call over HTTP that waits, and Flower behind it."""

    def __init__(self, status: int = 200) -> None:
        self.room = Room()
        self.room.looks(7)
        self.offered = serving.Offered(serving.FLEET, room=self.room)
        self.offered.app = self.flower
        self.gone = asyncio.Event()
        self.status, self.asked = status, list[str]()
        self.told: list[MutableMapping[str, Any]] = []
        self._request: bytes | None = SendNodeHeartbeatRequest(
            node=Node(node_id=7)
        ).SerializeToString()

    async def flower(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        assert (await receive())["body"] == SendNodeHeartbeatRequest(
            node=Node(node_id=7)
        ).SerializeToString()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"as Flower says"})

    async def receive(self) -> MutableMapping[str, Any]:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.told.append(message)

    async def begun(self) -> asyncio.Task[None]:
        """The call; it has been taken as far as it goes."""
        scope = {"type": "http", "path": wire.WAIT, "headers": [(b"content-length", b"1")]}
        task = asyncio.ensure_future(self.offered(scope, self.receive, self.send))
        await asyncio.sleep(0.05)
        return task


def test_a_call_is_a_heartbeat_whose_answer_is_held_until_a_message_comes() -> None:
    async def called() -> None:
        caller = Caller()
        task = await caller.begun()
        assert caller.asked == ["/v1/fleet/send-node-heartbeat"] and caller.told == []
        await asyncio.to_thread(caller.room.came, [7])  # as Flower calls it
        await asyncio.wait_for(task, 5)
        assert [m.get("status", m.get("body")) for m in caller.told] == [200, b"as Flower says"]

    asyncio.run(called())


def test_whom_flower_refuses_does_not_wait() -> None:
    async def called() -> None:
        caller = Caller(status=401)
        await asyncio.wait_for(await caller.begun(), 5)
        assert caller.told[0]["status"] == 401 and not caller.room._held

    asyncio.run(called())


def test_a_connection_that_is_closed_is_let_go() -> None:
    async def called() -> None:
        caller = Caller()
        task = await caller.begun()
        assert caller.room._held
        caller.gone.set()
        await asyncio.wait_for(task, 5)
        assert not caller.room._held

    asyncio.run(called())


def test_the_end_of_the_superlink_is_said_and_none_waits_after_it() -> None:
    async def called() -> None:
        caller = Caller()
        task = await caller.begun()
        caller.room.close()
        await asyncio.wait_for(task, 5)
        assert caller.told[0]["status"] == 503 and b"is ending" in caller.told[1]["body"]
        assert len(caller.told) == 2

    asyncio.run(called())


def test_only_the_address_of_silos_has_the_call() -> None:
    for paths in (serving.OPERATORS, serving.RUNTIME):
        assert ask(serving.Offered(paths), wire.WAIT) == 404
