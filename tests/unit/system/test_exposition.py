"""Numbers for Prometheus: the text format, and a port that gives nothing else."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from coterie.system import exposition
from coterie.system.exposition import Exposition, Metric, Sample, render
from coterie.system.ports import is_loopback, listen_address, names_loopback

SEEN = Metric("seen_total", "counter", "What was seen.")
LEFT = Metric("left_bytes", "gauge", "What is left.")
LINE = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="([^"\\\n]|\\["\\n])*"(,\w+="[^"]*")*\})? \S+)')


def test_samples_are_grouped_below_their_help_and_labels_are_escaped() -> None:
    text = render(
        [
            Sample(SEEN, 1, {"by": 'a "b"\\\n'}),
            Sample(LEFT, math.inf),
            Sample(SEEN, 2.5, {"by": "c"}),
        ]
    )
    assert text == (
        "# HELP seen_total What was seen.\n# TYPE seen_total counter\n"
        'seen_total{by="a \\"b\\"\\\\\\n"} 1.0\nseen_total{by="c"} 2.5\n'
        "# HELP left_bytes What is left.\n# TYPE left_bytes gauge\nleft_bytes +Inf\n"
    )
    assert all(LINE.fullmatch(line) for line in text.splitlines())


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_port_gives_the_numbers_to_this_machine_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = False

    def collect() -> Iterator[Sample]:
        if broken:
            raise OSError("patient 7")
        yield Sample(SEEN, 3)

    monkeypatch.setattr(exposition, "FRESH_S", 0.0)
    with Exposition("127.0.0.1:0", collect) as served:
        url = f"http://{served.address}"
        status, text = get(f"{url}/metrics")
        assert status == 200 and text.endswith("seen_total 3.0\n")
        assert get(f"{url}/")[0] == 404
        assert get(f"{url}/metrics", Host="evil.example")[0] == 421
        broken = True
        status, text = get(f"{url}/metrics")
        assert status == 500 and "OSError" in text and "patient" not in text


def test_it_listens_on_addresses_of_the_sixth_version_too() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with Exposition("[::1]:0", lambda: [Sample(SEEN, 1)]) as served:
        assert served.address.startswith("[::1]:")
        assert get(f"http://{served.address}/metrics")[0] == 200


@pytest.mark.parametrize(
    ("text", "address"),
    [("9464", "127.0.0.1:9464"), ("0.0.0.0:1", "0.0.0.0:1"), ("[::]:7", "[::]:7")],
)
def test_a_port_alone_is_one_of_this_machine(text: str, address: str) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "host", "host:", "a b:1", "1:99999", "http://x:1"])
def test_what_is_no_place_to_listen_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be PORT or HOST:PORT"):
        listen_address(text)


def test_names_of_loopback_are_told_from_others() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("fl.example.org")
    assert (
        names_loopback("localhost:1") and names_loopback("[::1]:1") and names_loopback("127.0.0.1")
    )
    assert not names_loopback("localhost.evil:1") and not names_loopback("")
