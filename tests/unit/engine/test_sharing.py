"""What the connections of one process share: a channel, a thread of heartbeats, objects."""

from __future__ import annotations

from threading import Event
from typing import Any

import grpc
import pytest

from coterie.engine.fast.silo import sharing
from coterie.system.ports import free_ports
from tests.kit import until


def test_one_thread_beats_for_all_until_each_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "HEARTBEAT_S", 0.01)
    heart = sharing._Heart()
    monkeypatch.setattr(sharing, "_heart", heart)
    beats = [0, 0, 0]
    enough = Event()

    def beat(i: int) -> bool:
        beats[i] += 1
        if i == 2:
            raise RuntimeError("the SuperLink does not know this node")
        if min(beats[:2]) >= 3:
            enough.set()
        return True

    senders = [sharing.Heartbeat(lambda i=i: beat(i)) for i in range(3)]  # type: ignore[misc]
    for sender in senders:
        sender.start()
    thread = heart._thread
    assert enough.wait(60), "one that fails must not keep the others from beating"
    for sender in senders:
        sender.stop()
    until(lambda: heart._thread is None, "the thread to end")
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_connections_to_one_address_share_a_channel_that_the_last_one_closes() -> None:
    before = set(sharing._bases)
    first, second = (sharing.shared_channel("127.0.0.1:1", None) for _ in range(2))
    (key,) = set(sharing._bases) - before
    first.close()
    assert key in sharing._bases
    second.close()
    assert key not in sharing._bases


def test_the_cache_pulls_an_object_once_and_stays_within_its_size() -> None:
    cache = sharing.ObjectCache(num_bytes=10)
    pulled: list[str] = []

    def pull(name: str) -> bytes:
        pulled.append(name)
        return name.encode() * 4

    for name in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(name, lambda name=name: pull(name)) == name.encode() * 4  # type: ignore[misc]
    assert pulled == ["a", "b", "c", "b"], "b was the longest unused when c came"


def test_a_channel_on_which_nothing_is_answered_is_replaced_and_a_new_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "RENEW_S", -1.0)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    channel = sharing.shared_channel(address, None)
    call = channel.unary_unary("/flwr.proto.Fleet/PullMessages")
    base = sharing._bases[address, None]
    first = base.channel
    sharing.renew("127.0.0.1:1")
    assert base.channel is first, "another address"
    sharing.renew(address)
    second = base.channel
    assert second is not first
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)  # it was asked for before
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    monkeypatch.setattr(sharing, "RENEW_S", 1000.0)
    sharing.renew(address)
    assert base.channel is second, "it was opened a moment ago"
    channel.close()
    assert (address, None) not in sharing._bases


def test_a_call_meets_no_channel_that_another_thread_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC raises ``ValueError`` there, which would end the process."""
    (port,) = free_ports(1)
    channel = sharing.shared_channel(f"127.0.0.1:{port}", None)
    base = sharing._bases[f"127.0.0.1:{port}", None]
    first, times = base.channel, [0]

    def between(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        base.replace()
        return unary_unary(*args, **kwargs)

    unary_unary = first.unary_unary
    monkeypatch.setattr(first, "unary_unary", between)
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/flwr.proto.Fleet/PullMessages")(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and times == [1]
    channel.close()
    with pytest.raises(ValueError, match="closed"):
        channel.unary_unary("/flwr.proto.Fleet/PullMessages")(b"", timeout=10)
