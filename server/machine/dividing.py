"""One address for silos that speak HTTP and for those that still speak gRPC.

A SuperLink of Flower 1.40 or later can serve gRPC silos too, at another port. So that no silo needs
a change on the day of the upgrade, each connection to the usual address is routed by its first
bytes: gRPC is HTTP/2, visible in the clear or in the first TLS message. The traffic after that is
not inspected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coterie.system.ports import split_address

log = logging.getLogger("coterie.serving")

BEGIN_S = 10.0
"""Time for a connection to show its protocol."""
LOOK_S = 0.02
PREFACE, HANDSHAKE = b"PRI * HTTP/2.0", b"\x16"
H2, HTTP_1 = b"\x02h2", b"\x08http/1.1"
"""Protocols as the first message of TLS offers them."""
HEAD, MOST = 5, 16_000
"""Bytes of the head of a TLS record, and the most bytes of a first message that are inspected."""
BLOCK = 1 << 18


async def divide(
    address: str, grpc: str, take_http: Callable[[socket.socket], Any], stop: asyncio.Event
) -> None:
    """Listen at ``address`` (``HOST:PORT``) until ``stop``.

    gRPC connections go to the server at ``grpc``; ``take_http`` makes a coroutine for others.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # as gRPC's server does
    listener = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
    listener.setblocking(False)
    loop, open_now = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def take() -> None:
        with suppress(OSError):
            line, _ = listener.accept()
            line.setblocking(False)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(_lead(line, grpc, take_http))
            open_now.add(task)
            task.add_done_callback(open_now.discard)

    loop.add_reader(listener, take)
    try:
        await stop.wait()
    finally:
        loop.remove_reader(listener)
        listener.close()
        for task in list(open_now):
            task.cancel()


async def _lead(line: socket.socket, grpc: str, take_http: Callable[[socket.socket], Any]) -> None:
    try:
        begins = await asyncio.wait_for(_beginning(line), BEGIN_S)
        if is_grpc(begins):
            await _join(line, grpc)
        elif begins:
            await take_http(line)
            return  # which closes it
    except (OSError, TimeoutError) as error:
        log.debug("a connection was not taken: %s", error)
    line.close()


async def _beginning(line: socket.socket) -> bytes:
    """Peek at the start of a connection; return empty bytes if it ends before."""
    while True:
        with suppress(BlockingIOError):
            seen = line.recv(MOST, socket.MSG_PEEK)
            if not seen or _is_enough(seen):
                return seen
        await asyncio.sleep(LOOK_S)


def _is_enough(seen: bytes) -> bool:
    if seen[:1] == HANDSHAKE:
        whole = HEAD + int.from_bytes(seen[3:HEAD], "big") if len(seen) >= HEAD else MOST
        return len(seen) >= min(whole, MOST)
    return len(seen) >= len(PREFACE) or not PREFACE.startswith(seen)


def is_grpc(begins: bytes) -> bool:
    """Return whether a connection that begins with these bytes is gRPC."""
    if begins[:1] == HANDSHAKE:
        return H2 in begins and HTTP_1 not in begins
    return begins.startswith(PREFACE)


async def _join(line: socket.socket, address: str) -> None:
    """Forward data in both directions until one end closes."""
    ends = [await asyncio.open_connection(*split_address(address))]
    ends.append(await asyncio.open_connection(sock=line))
    (there_in, there_out), (here_in, here_out) = ends
    ways = [_carry(here_in, there_out), _carry(there_in, here_out)]
    carrying = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in carrying:
            one.cancel()
        there_out.close()
        here_out.close()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await source.read(BLOCK):
            target.write(block)
            await target.drain()
