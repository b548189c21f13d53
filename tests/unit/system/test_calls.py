"""Channels to a SuperLink: what limits a call, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc
import pytest

from coterie.system.calls import open_channel
from coterie.system.ports import free_ports

METHOD = "/flwr.proto.Fleet/PullMessages"
Serving = Callable[[Callable[[bytes], bytes]], str]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """The address of a server that answers each call of ``METHOD`` by a function."""
    server = grpc.server(ThreadPoolExecutor(1))

    def start(answer: Callable[[bytes], bytes]) -> str:
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: answer(request))
        found = {METHOD.rpartition("/")[2]: handler}
        generic = grpc.method_handlers_generic_handler("flwr.proto.Fleet", found)
        server.add_generic_rpc_handlers((generic,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    server.stop(None)


def failure(
    address: str, *, max_bytes: int = 10**6, method: str = METHOD, timeout: float = 60.0
) -> str:
    with (
        open_channel(address, None, max_bytes=max_bytes) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(method)(b"", timeout=timeout)
    return str(caught.value.code().name)


def test_an_answer_that_is_too_long_or_late_is_an_error_of_the_call(serving: Serving) -> None:
    asked, waits = [0], Event()

    def answer(request: bytes) -> bytes:
        asked[0] += 1
        if asked[0] > 1:
            waits.wait(60)
        return b"x" * 3_000_000

    address = serving(answer)
    assert failure(address) == "RESOURCE_EXHAUSTED"
    assert failure(address, max_bytes=2**31 - 1, timeout=0.5) == "DEADLINE_EXCEEDED"
    waits.set()


def test_a_call_that_is_not_known_and_nobody_who_answers_are_told_apart(serving: Serving) -> None:
    address = serving(lambda request: request)
    with open_channel(address, None) as channel:
        assert channel.unary_unary(METHOD)(b"body", timeout=10) == b"body"
    assert failure(address, method="/coterie.Silos/Unknown") == "UNIMPLEMENTED"
    (nobody,) = free_ports(1)
    assert failure(f"127.0.0.1:{nobody}") == "UNAVAILABLE"
