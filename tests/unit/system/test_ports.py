"""Ports of this machine."""

from __future__ import annotations

import socket
import sys

import pytest

from coterie.system.ports import (
    address_of,
    check_free,
    free_ports,
    from_here,
    host_of,
    is_own,
    join_address,
    listen_address,
    listens,
    split_address,
)


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        check_free(f"127.0.0.1:{port}")
        assert not listens(f"127.0.0.1:{port}")
    if sys.platform == "linux":
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))


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


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("::1", "[::1]:7"),
        ("::", "[::]:7"),
        ("[::1]", "[::1]:7"),
        ("[::1]:9092", "[::1]:9092"),
        ("::1:37092", "[::1]:37092"),
        ("1:2:3:4:5:6:7:8:9092", "[1:2:3:4:5:6:7:8]:9092"),
        ("fe80::1%eth0", "[fe80::1%eth0]:7"),
        ("[fe80::1%eth0]:9", "[fe80::1%eth0]:9"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:7"),
        ("fl.example.org", "fl.example.org:7"),
        ("fl.example.org:1", "fl.example.org:1"),
        ("10.0.0.1", "10.0.0.1:7"),
    ],
)
def test_an_address_is_read_in_every_form(text: str, whole: str) -> None:
    assert address_of(text, 7) == whole
    assert join_address(*split_address(whole)) == whole == address_of(whole)
    if whole.endswith(":7"):
        assert join_address(host_of(text), 7) == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("::1:9092", r"is ambiguous: write \[::1\]:9092, or \[::1:9092\]"),
        ("a:0", "the port must be 1 to 65535"),
        ("a:99999", "the port must be 1 to 65535"),
        *((text, "must be HOST:PORT, such as") for text in
          ("", ":9092", "http://a", "[a]:1", "[::1", "a b", '::1%"', "a:b", "::1]:9")),
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        address_of(text, 7)


def test_where_a_port_must_be_given_the_last_number_is_it() -> None:
    assert address_of("::1:9092") == "[::1]:9092" == listen_address("::1:9092")
    for text in ("::1", "[::1]", "a"):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            address_of(text)


@pytest.mark.parametrize(
    ("address", "here"),
    [("0.0.0.0:9", "127.0.0.1:9"), ("[::]:9", "[::1]:9"), ("10.0.0.1:9", "10.0.0.1:9")],
)
def test_this_machine_connects_to_itself_where_it_listens_everywhere(
    address: str, here: str
) -> None:
    assert from_here(address) == here


def test_names_and_addresses_of_this_machine_are_known() -> None:
    for host in ("localhost", "127.8.9.1", "[::1]", "::", socket.gethostname().upper()):
        assert is_own(host), host
    for host in ("fl.example.org", "192.0.2.200", "2001:db8::99", "localhost.example.org"):
        assert not is_own(host), host
