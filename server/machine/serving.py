"""A SuperLink that speaks HTTP (Flower 1.40 and later), at the addresses of one with gRPC.

    python -m coterie.server.machine.serving OPTIONS OF flower-superlink AS OF 1.34

Flower offers its whole API at one port, so anyone who reaches the silos' API reaches that of
ServerApps. Here silos, operators and ServerApps have separate addresses without the others' calls,
so firewalls, proxies and silo.toml stay as they are; that of ServerApps has no TLS, within this
machine. Silos that still speak gRPC are served as well (``coterie.server.machine.dividing``).
Flower's command and application run as they are; only ``uvicorn.run`` is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, ExitStack, suppress
from importlib import import_module
from typing import Any, Protocol

import uvicorn
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from coterie.server.machine.allowance import limit_silos
from coterie.server.machine.dividing import divide
from coterie.server.machine.holding import HEARTBEAT, FullError, Room, hold_silos
from coterie.server.machine.link import ACT, CONTROL
from coterie.server.machine.signing import SIGNATURE, Metadata, RefusedError
from coterie.server.machine.superlink import flower_command
from coterie.system.calls import method_of, path_of
from coterie.system.ports import free_ports, split_address
from coterie.wire.limits import MAX_OBJECT_BYTES
from coterie.wire.names import WAIT

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate(Protocol):
    """The check of operators' calls: ``coterie.server.site.gate``."""

    def passing(self, metadata: Metadata, method: str, raw: bytes) -> AbstractContextManager[str]:
        """Check the caller of a request, and turn refusals inside the block into answers."""

    def noted(self, method: str, who: str, request: Any) -> AbstractContextManager[None]:
        """Note an act in the audit log."""

    def note_begun(self, who: str, request: Any, reply: Any) -> None:
        """Note that a run has begun."""

    def act(self, who: str, raw: bytes) -> bytes:
        """Do an operator's act and return the answer."""


KEEP_OPEN_S = 75
"""Limit on idle time of a connection: longer than silos wait between two calls."""
MAX_BODY = 2 * MAX_OBJECT_BYTES
"""Size limit of a request of a silo or operator; Flower reads all of it before authentication."""
HEALTH, FLEET, RUNTIME = "/health", "/v1/fleet/", "/v1/runtime/"
OPERATORS = "/v1/control/"


def run(gate: Gate | None = None) -> None:
    """Run ``flower-superlink`` with the arguments of this process, and an optional gate."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fleet-api-address", required=True)
    parser.add_argument("--control-api-address", required=True)
    parser.add_argument("--serverappio-api-address", required=True)
    where, rest = parser.parse_known_args()
    silos, own = where.fleet_api_address, f"127.0.0.1:{free_ports(1)[0]}"
    limit_silos()
    room = hold_silos()
    apis = {
        silos: Offered(FLEET, room=room),
        where.control_api_address: Offered(OPERATORS, gate),
        where.serverappio_api_address: Offered(RUNTIME),
    }

    def serve(app: App, **how: Any) -> None:
        asyncio.run(_serve(app, apis, silos, own, how))

    uvicorn.run = serve  # type: ignore[assignment]
    host, port = split_address(where.serverappio_api_address)
    # Flower's name for what silos that are not upgraded yet need.
    os.environ["FLWR_INTERNAL_GRPC_FLEET_API"] = "1"
    listen = ["--host", host, "--port", str(port), "--fleet-api-address", own]
    sys.argv = ["flower-superlink", *listen, *rest]
    flower_command("flower-superlink")()


async def _serve(
    app: App, apis: dict[str, Offered], silos: str, grpc: str, how: dict[str, Any]
) -> None:
    """Serve until a signal arrives, which each server passes on to the previous one."""
    servers: dict[str, uvicorn.Server] = {}
    for address, offered in apis.items():
        host, port = split_address(address)
        plain = offered.paths == RUNTIME
        offered.app = app
        config = uvicorn.Config(
            offered,
            host=host,
            port=port,
            # It starts with the first and ends with it.
            lifespan="off" if servers else "on",
            access_log=False,
            log_config=how.get("log_config"),
            ssl_keyfile=None if plain else how.get("ssl_keyfile"),
            ssl_certfile=None if plain else how.get("ssl_certfile"),
            timeout_keep_alive=KEEP_OPEN_S,
            timeout_graceful_shutdown=2,
        )
        servers[address] = _Server(config)
    stop = asyncio.Event()
    dividing = asyncio.create_task(divide(silos, grpc, _taking(servers[silos]), stop))
    dividing.add_done_callback(lambda _: _end(servers.values()))  # its port may be taken
    try:
        await asyncio.gather(
            *(
                server.serve(sockets=[] if address == silos else None)
                for address, server in servers.items()
            )
        )
    finally:
        stop.set()
        await dividing


class _Server(uvicorn.Server):
    """A server that does not wait for held calls when it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        offered = self.config.app
        if isinstance(offered, Offered) and offered.room is not None:
            offered.room.close()
        await super().shutdown(sockets)


def _end(servers: Iterable[uvicorn.Server]) -> None:
    for server in servers:
        server.should_exit = True


def _taking(server: uvicorn.Server) -> Callable[[socket.socket], Awaitable[Any]]:
    """Return a coroutine function that hands accepted connections to a server."""

    async def take(line: socket.socket) -> None:
        config, loop = server.config, asyncio.get_running_loop()
        while not server.started:
            await asyncio.sleep(0.05)

        def protocol() -> asyncio.Protocol:
            state = {"server_state": server.server_state, "app_state": server.lifespan.state}
            return config.http_protocol_class(config=config, **state)  # type: ignore[call-arg]

        await loop.connect_accepted_socket(protocol, line, ssl=config.ssl)

    return take


class Offered:
    """The part of Flower's application at one address: calls whose paths begin with ``paths``.

    ``gate`` checks calls of operators; ``room`` holds calls of silos that wait for messages.
    """

    def __init__(self, paths: str, gate: Gate | None = None, room: Room | None = None) -> None:
        self.paths, self.gate, self.room = paths, gate, room
        self.app: App = _nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as an ASGI application."""
        path = str(scope.get("path", ""))
        if scope["type"] == "lifespan" or path == HEALTH:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and self.paths != RUNTIME and not _fits(scope):
            await _answer(send, 413, {"detail": f"A call has {MAX_BODY:,} bytes at most."})
        elif scope["type"] == "http" and self.gate and (path == ACT or self._has(path)):
            await self._gated(self.gate, path, scope, receive, send)
        elif scope["type"] == "http" and self.room and path == WAIT:
            await self._held(self.room, scope, receive, send)
        elif scope["type"] == "http" and self._has(path):
            await self.app(scope, receive, send)
        else:
            await _nothing(scope, receive, send)

    def _has(self, path: str) -> bool:
        return path.startswith(self.paths)

    async def _held(self, room: Room, scope: Scope, receive: Receive, send: Send) -> None:
        """Send Flower's answer to a heartbeat when a message has arrived for its sender."""
        raw, loop = await _body(receive), asyncio.get_running_loop()
        heard, path = _Heard(raw, receive, send, keep=True), path_of(HEARTBEAT)
        beat = {**scope, "path": path, "raw_path": path.encode()}
        await self.app(beat, heard.receive, heard.send)
        if not heard.kept:  # Flower has refused
            return
        over: asyncio.Future[str] = loop.create_future()

        def end(why_not: str) -> None:
            if not over.done():
                over.set_result(why_not)

        def go(why_not: str) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, why_not)

        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda _: end(""))
        try:
            leave = room.hold(SendNodeHeartbeatRequest.FromString(raw).node.node_id, go)
            try:
                why_not = await over
            finally:
                leave()
        except FullError as error:
            why_not = str(error)
        finally:
            gone.cancel()
        if why_not:
            await _answer(send, 503, {"detail": why_not})
            return
        for message in heard.kept:
            await send(message)

    async def _gated(
        self, gate: Gate, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        method, raw = method_of(path), await _body(receive)
        metadata = tuple(_metadatum(name, value) for name, value in scope["headers"])
        heard = _Heard(raw, receive, send, keep=method == CONTROL + "StartRun")

        def enter(stack: ExitStack) -> tuple[str, bytes | None]:
            """Run in a thread, because it waits for files, and an act calls this server."""
            who = stack.enter_context(gate.passing(metadata, method, raw))
            if method == ACT:
                return who, gate.act(who, raw)
            stack.enter_context(gate.noted(method, who, _read(method, "Request", raw)))
            return who, None

        try:
            with ExitStack() as stack:
                who, done = await asyncio.to_thread(enter, stack)
                if done is not None:
                    await _answer(send, 200, done)
                    return
                await self.app(scope, heard.receive, heard.send)
                if heard.status >= 400:
                    raise _FailedError(f"status {heard.status}")
                if heard.kept:  # noted before the operator hears of it
                    asked, begun = (
                        _read(method, kind, part)
                        for kind, part in (("Request", raw), ("Response", bytes(heard.said)))
                    )
                    await asyncio.to_thread(gate.note_begun, who, asked, begun)
                    for message in heard.kept:
                        await send(message)
        except RefusedError as error:
            status = 401 if error.code.name == "UNAUTHENTICATED" else 403
            await _answer(send, status, {"detail": str(error)})
        except _FailedError:
            pass  # Flower has answered


class _FailedError(Exception):
    """Flower has failed and answered; the log records the act as failed."""


class _Heard:
    """A request already read, and its answer, held back in ``kept`` if ``keep`` and no error."""

    def __init__(self, raw: bytes, receive: Receive, send: Send, *, keep: bool) -> None:
        self._raw: bytes | None = raw
        self._receive, self._send, self._keep = receive, send, keep
        self.status, self.said = 0, bytearray()
        self.kept: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        if self._raw is None:
            return await self._receive()
        raw, self._raw = self._raw, None
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        match message:
            case {"type": "http.response.start", "status": int(status)}:
                self.status = status
            case {"body": bytes(body)} if len(self.said) < 1_000:
                self.said += body  # the answer to StartRun, which is noted, is short
        if self._keep and self.status < 400:
            self.kept.append(message)
        else:
            await self._send(message)


def _fits(scope: Scope) -> bool:
    """Return whether the request has a valid length within the limit."""
    told = dict(scope["headers"]).get(b"content-length", b"")
    return bool(told.isdigit() and int(told) <= MAX_BODY)


async def _body(receive: Receive) -> bytes:
    raw = bytearray()
    while True:
        part = await receive()
        raw += part.get("body", b"")
        if part["type"] == "http.disconnect":
            return b""  # which nobody has signed
        if not part.get("more_body"):
            return bytes(raw)


async def _gone(receive: Receive) -> None:
    """Wait until the other end closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _metadatum(name: bytes, value: bytes) -> tuple[str, str | bytes]:
    """Convert a header to metadata; binary metadata has another name over gRPC."""
    told = name.decode("latin-1")
    if told == SIGNATURE.removesuffix("-bin"):
        with suppress(ValueError):
            return SIGNATURE, base64.b64decode(value, validate=True)
    return told, value.decode("latin-1")


def _read(method: str, kind: str, raw: bytes) -> Any:
    """Parse a request or response of the Control API; return an empty one if it is invalid."""
    messages = import_module("flwr.proto.control_pb2")
    form = getattr(messages, method.removeprefix(CONTROL) + kind)
    try:
        return form.FromString(raw)
    except Exception:  # Flower refuses it
        return form()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await _answer(send, 404, {"detail": "This is not offered at this address."})


async def _answer(send: Send, status: int, said: dict[str, str] | bytes) -> None:
    form = b"application/protobuf" if isinstance(said, bytes) else b"application/json"
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    headers = [(b"content-type", form), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    run()
