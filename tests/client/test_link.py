"""Which errors of a call are worth another try; the rest of the link is tested against Flower."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import coterie.client.resident.link
from coterie.client.resident.link import _retry_invoker


class CallError(grpc.RpcError):
    """An answer of the SuperLink."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._answer = code, details

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]


def calls_until(code: grpc.StatusCode, details: str, *, failures: int) -> tuple[int, str]:
    """How often a call is made that fails so many times, and what comes of it."""
    made = 0

    def call() -> str:
        nonlocal made
        made += 1
        if made <= failures:
            raise CallError(code, details)
        return "done"

    try:
        return made, str(_retry_invoker().invoke(call)) + str(made)
    except CallError:
        return made, "failed"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        coterie.client.resident.link,
        "exponential",
        lambda **_: iter([0.0] * 9),  # no pauses between tries
    )


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused"),
        (grpc.StatusCode.INTERNAL, "Internal server error."),  # e.g. a locked database
    ],
)
def test_what_a_moment_may_heal_is_asked_again(code: Any, details: str) -> None:
    assert calls_until(code, details, failures=2)[1] == "done3"


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed"),
        (grpc.StatusCode.FAILED_PRECONDITION, "the key is not registered"),
        (grpc.StatusCode.UNAUTHENTICATED, "invalid signature"),
        (grpc.StatusCode.PERMISSION_DENIED, "the run has ended"),
    ],
)
def test_what_stays_wrong_is_asked_once(code: Any, details: str) -> None:
    assert calls_until(code, details, failures=1) == (1, "failed")
