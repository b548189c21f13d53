"""Why a silo does not reach its SuperLink, and whether trying again helps."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc

from coterie.engine.port import LinkError, NotPassedError, RunEndedError
from coterie.system.proxies import SIZE, answer_on_the_way, through
from coterie.wire import OVER_ALLOWANCE, sentence

LOST = (
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL),
    *(grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
"""Errors after which the SuperLink still knows this node; a new connection would cost its round."""

THEIRS = re.compile(r"stamp; here it is (\S+\+00:00)")
"""Part of a refusal because of a clock: the SuperLink's own time."""
TOO_LARGE = "larger than max"
"""Part of gRPC's error, at either end, for a message that is too large."""
OF_TIME = ("expired", "not yet valid", "has_expired", "not_yet_valid")
"""Marks of a certificate outside its dates: a renewal helps, or setting the clock."""


@dataclass(frozen=True)
class Way:
    """The way to a SuperLink: its address, and whether the connection uses TLS."""

    address: str
    tls: bool


UNKNOWN_WAY = Way("", tls=False)


def refusal_of(error: grpc.RpcError, way: Way) -> LinkError:
    """Return what the last error means when a connection could not be opened."""
    where = f"the SuperLink at {way.address}"
    code, details = error.code(), sentence(_details(error))
    if _of_time(details):
        return LinkError(
            f"{where} presents a certificate that is not valid by the clock of this machine, "
            f"which says {_now()}: {details} Set the clock by NTP. If it is right, the operator "
            "must renew the certificate with `coterie federation init FOLDER --renew`."
        )
    if distrusts(details):
        return LinkError(
            f"{where} presents a certificate that this silo does not trust: {details} This "
            "silo's CA certificate must have signed the SuperLink's, and the SuperLink's must "
            "name the address that this silo connects to.",
            retry=False,
        )
    if answered := answer_on_the_way(details)[1]:
        return LinkError(f"{where} cannot be reached: {answered}")
    if code == grpc.StatusCode.UNAVAILABLE:
        return LinkError(f"{where} cannot be reached: {details} {_hint(way, details)}".rstrip())
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return LinkError(
            f"{where} refuses this silo's key: {details} Either it is not enrolled, or was "
            "removed (ask the operator), or another process uses it, or a process that used it "
            "was killed within the last minute."
        )
    if code == grpc.StatusCode.UNAUTHENTICATED and "timestamp" in details.lower():
        return LinkError(
            f"the clock of this machine and that of {where} differ too much: this one "
            f"{_off(details)}says {_now()}, and may be at most 5 s ahead and 5 min behind. Set "
            "both by NTP."
        )
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return LinkError(
            f"{where} does not accept this silo's key: {details} Is it the one that enrolled this "
            "silo?"
        )
    return LinkError(f"{where} refuses this silo: {code.name}: {details}")


def _hint(way: Way, details: str) -> str:
    if proxy := _proxy(way):
        return proxy
    if "handshake" in details.lower():
        return (
            "The connection is accepted and closed before the TLS handshake: by a proxy or "
            "load balancer without the SuperLink behind it, or by a SuperLink without TLS."
        )
    return "" if way.tls else "This silo connects without TLS; does the SuperLink want it?"


def _proxy(way: Way) -> str:
    return through(way.address) if way.address else ""


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _off(details: str) -> str:
    """Return how far this machine's clock is off, if the SuperLink has stated its own time."""
    seconds = 0.0
    with suppress(ValueError):
        if found := THEIRS.search(details):
            seconds = (datetime.now(UTC) - datetime.fromisoformat(found[1])).total_seconds()
    return f"is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}, " if seconds else ""


def _of_time(details: str) -> bool:
    said = details.lower()
    return _is_of_certificate(said) and any(word in said for word in OF_TIME)


def _is_of_certificate(said: str) -> bool:
    return "certificate_verify_failed" in said or "peer certificate" in said


def distrusts(details: str) -> bool:
    """Return whether a call failed for good because of the SuperLink's certificate.

    Other failures of a handshake are transient: the other end closed the connection.
    """
    return _is_of_certificate(details.lower()) and not _of_time(details)


def _details(error: grpc.RpcError) -> str:
    """Return the SuperLink's message; since 1.34 mostly JSON with one entry for people."""
    details = str(error.details())
    try:
        found = json.loads(details)
        return " ".join(filter(None, (found["public_message"], found.get("public_details"))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return details


def meaning_of(error: grpc.RpcError, way: Way) -> Exception:
    """Return what the error of a call on an open connection means."""
    code, details = error.code(), sentence(_details(error))
    status, answered = answer_on_the_way(details)
    if status == SIZE or TOO_LARGE in details:
        return NotPassedError(answered or f"a message is too large: {details}", holds=True)
    if answered:
        return LinkError(f"the SuperLink was lost: {answered}", holds=True)
    if OVER_ALLOWANCE in details:
        return NotPassedError(details, holds=True)
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED):
        return RunEndedError(_details(error))
    of_time = code == grpc.StatusCode.UNAUTHENTICATED and "timestamp" in details.lower()
    proxy = _proxy(way) if code == grpc.StatusCode.UNAVAILABLE else ""
    return LinkError(
        f"the SuperLink was lost: {code.name}: {details} {proxy}".rstrip(),
        holds=(code in LOST and not distrusts(details)) or of_time,
    )
