"""Authentication of operators: each call is signed with the operator's key.

The signature covers the federation (its CA), the caller, the method, the time, a number that is
used once, and the request's bytes. TLS protects the call on the way; the signature identifies the
caller, so no secret ever reaches the coordinator.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from coterie.system.keys import verifies

Metadata = tuple[tuple[str, str | bytes], ...]
WHO, WHEN, ONCE = "coterie-operator", "coterie-time", "coterie-once"
SIGNATURE = "coterie-signature-bin"
SLACK_S = 120.0
"""Largest accepted difference of an operator's clock, in seconds."""
MAX_CALLS = 100_000
"""Limit on calls whose numbers are remembered."""


class SigningError(Exception):
    """A call is not authenticated as an operator's. The caller receives the text."""


class RefusedError(Exception):
    """A call is rejected, with the status to answer and a reason for the caller."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Identity:
    """An operator's name, and the key that stays with the operator."""

    name: str
    key: ec.EllipticCurvePrivateKey


def metadata(identity: Identity | None, ca: bytes, method: str, body: bytes) -> Metadata:
    """Return the signed metadata of a call; empty without an identity.

    ``ca`` is the certificate of the federation's CA (PEM), ``body`` the request's bytes as sent.
    """
    if identity is None:
        return ()
    when, once = f"{time.time():.3f}", os.urandom(16).hex()
    text = _text(ca, identity.name, method, when, once, body)
    signature = identity.key.sign(text, ec.ECDSA(hashes.SHA256()))
    return (WHO, identity.name), (WHEN, when), (ONCE, once), (SIGNATURE, signature)


@dataclass
class Verifier:
    """A verifier of callers; ``key_of`` maps names to public keys (PEM), or to None.

    ``ca`` is the certificate of the federation's CA (PEM); ``clock`` gives seconds since 1970.
    """

    ca: bytes
    key_of: Callable[[str], bytes | None]
    clock: Callable[[], float] = time.time
    _used: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def caller(self, given: Sequence[tuple[str, str | bytes]], method: str, body: bytes) -> str:
        """Return the name of the operator who makes a call.

        Raises ``SigningError`` if it is unsigned, repeated, at a wrong time, or its key is unknown.
        """
        entries = dict(given)
        name, when, once, signature = (entries.get(key) for key in (WHO, WHEN, ONCE, SIGNATURE))
        if not (isinstance(name, str) and isinstance(when, str) and isinstance(once, str)):
            raise SigningError(
                "this coordinator requires an operator key. On its machine, name the "
                "federation's folder with --federation; elsewhere, create a key with `coterie "
                "operator init` and have it enrolled there."
            )
        key = self.key_of(name)
        text = _text(self.ca, name, method, when, once, body)
        public = None if key is None else load_pem_public_key(key)
        if not (
            isinstance(signature, bytes) and verifies(public, signature, text, hashes.SHA256())
        ):
            raise SigningError(
                "no operator with that name and key is enrolled. At the coordinator, `coterie "
                "operator enrol` enrols one."
            )
        self._check_once(when, once)
        return name

    def _check_once(self, when: str, once: str) -> None:
        now = self.clock()
        try:
            off = float(when) - now
        except ValueError:
            off = math.inf
        if not abs(off) <= SLACK_S:
            raise SigningError(
                f"the clock of this machine is {off:+.0f} s off the coordinator's; at most "
                f"{SLACK_S:.0f} s are accepted. Set the clock by NTP."
            )
        with self._lock:
            self._used = {key: at for key, at in self._used.items() if now - at <= 2 * SLACK_S}
            if once in self._used:
                raise SigningError("request rejected as a replay: run the command again.")
            if len(self._used) >= MAX_CALLS:
                raise SigningError(
                    f"more than {MAX_CALLS:,} requests in {2 * SLACK_S:.0f} s: wait, and run the "
                    "command again."
                )
            self._used[once] = now


def _text(ca: bytes, name: str, method: str, when: str, once: str, body: bytes) -> bytes:
    digests = (hashlib.sha256(part).hexdigest() for part in (ca, body))
    return "\n".join(["coterie-call 1", name, method, when, once, *digests]).encode()
