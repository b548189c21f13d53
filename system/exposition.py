"""A process's numbers for Prometheus: its text format, at ``/metrics`` of a separate port.

https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from coterie.system.ports import is_loopback, join_address, names_loopback, split_address

KIND = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_DEADLINE_S = 5.0
"""Seconds that a connection may take to send its request, and to take the answer."""
FRESH_S = 1.0
"""The shortest interval, in seconds, between two collections of the numbers."""


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric, a gauge or a counter.

    The name ends with the unit; the help is one line.
    """

    name: str
    kind: str
    help: str


@dataclass(frozen=True)
class Sample:
    """One number of a metric."""

    metric: Metric
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def render(samples: Iterable[Sample]) -> str:
    """Return the text format: all samples of a metric below its help, in order of appearance."""
    found: dict[Metric, list[str]] = {}
    for one in samples:
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in one.labels.items())
        name = one.metric.name + (f"{{{labels}}}" if labels else "")
        found.setdefault(one.metric, []).append(f"{name} {float(one.value)!r}")
    lines = []
    for metric, own in found.items():
        lines += [
            f"# HELP {metric.name} {metric.help}",
            f"# TYPE {metric.name} {metric.kind}",
            *own,
        ]
    return "\n".join([*lines, ""]).replace(" inf\n", " +Inf\n").replace(" nan\n", " NaN\n")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exposition:
    """A context manager that serves ``/metrics`` at ``HOST:PORT`` in its own threads.

    Port 0 takes any free port. ``collect`` returns the current numbers, called by one thread at a
    time.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, address: str, collect: Callable[[], Iterable[Sample]]) -> None:
        self._server = _Server(split_address(address), collect)

    @property
    def address(self) -> str:
        """The address on which it listens."""
        host, port = self._server.server_address[:2]
        return join_address(str(host), port)

    def __enter__(self) -> Exposition:
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], collect: Callable[[], Iterable[Sample]]) -> None:
        self.loopback = is_loopback(address[0])
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._collect, self._lock = collect, threading.Lock()
        self._text, self._until = "", 0.0
        super().__init__(address, _Handler)

    def text(self) -> str:
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = render(self._collect())
                self._until = time.monotonic() + FRESH_S
            return self._text


class _Handler(BaseHTTPRequestHandler):
    server_version = "coterie"
    sys_version = ""
    timeout = ANSWER_DEADLINE_S
    server: _Server

    def do_GET(self) -> None:
        if self.server.loopback and not names_loopback(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "another host's name\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "there is /metrics and nothing else\n")
        else:
            try:
                self._answer(HTTPStatus.OK, self.server.text())
            except Exception as error:  # of whatever is counted: the next one may be well
                text = f"the numbers cannot be collected: {type(error).__name__}\n"
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def _answer(self, status: HTTPStatus, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", KIND)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: requests come every few seconds."""
