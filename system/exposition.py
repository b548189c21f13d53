"""A process's numbers for Prometheus: its text format, at ``/metrics`` of a separate port.

https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from coterie.system.ports import split_address
from coterie.system.tokens import LocalHandler, LocalServer

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


class Exposition(LocalServer):
    """A context manager that serves ``/metrics`` at ``HOST:PORT`` in its own threads.

    Port 0 takes any free port. ``collect`` returns the current numbers, called by one thread at a
    time.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, address: str, collect: Callable[[], Iterable[Sample]]) -> None:
        self._collect, self._lock = collect, threading.Lock()
        self._text, self._until = "", 0.0
        super().__init__(split_address(address), _Handler)

    def __enter__(self) -> Exposition:
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def text(self) -> str:
        """Return the current numbers, collected at most ``FRESH_S`` ago."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = render(self._collect())
                self._until = time.monotonic() + FRESH_S
            return self._text


class _Handler(LocalHandler):
    timeout = ANSWER_DEADLINE_S
    server: Exposition
    paths = ("/metrics",)

    def show(self, path: str) -> None:
        try:
            self.answer(HTTPStatus.OK, self.server.text(), KIND)
        except Exception as error:  # of whatever is counted: the next one may be well
            text = f"the numbers cannot be collected: {type(error).__name__}\n"
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, text)
