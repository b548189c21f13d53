"""Ports of this machine."""

from __future__ import annotations

import socket

import pytest

from coterie.system.ports import check_free, free_ports, listens, split_address


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        check_free(f"127.0.0.1:{port}")
        assert not listens(f"127.0.0.1:{port}")


def test_a_port_that_is_taken_is_told_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert listens(address)
        with pytest.raises(OSError, match="in use"):
            check_free(address)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.example:1", ("a.example", 1)), ("[fe80::1]:90", ("fe80::1", 90)), ("::1:9", ("::1", 9))],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
