"""The two lines that enrol a silo: an enrolment request and a join bundle.

Neither holds a secret, so both can go by e-mail. They must arrive unchanged, so both sides show
fingerprints that two people can compare by telephone. A request is signed with the key to be
enrolled, so the key's owner has chosen the name in it. Silos' keys are on the curve P-256,
operators' on P-384.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509 import load_pem_x509_certificate

REQUEST: Final = "coterie-request"
OPERATOR: Final = "coterie-operator"
BUNDLE: Final = "coterie-join"
VERSION: Final = 1
LINES: Final = {
    REQUEST: ("an enrolment request", "coterie silo init"),
    OPERATOR: ("an operator's request", "coterie operator init"),
    BUNDLE: ("a join bundle", "coterie members enrol"),
}
"""The name of each line, and the command that prints it."""


class EnrolmentError(ValueError):
    """A request or a bundle cannot be used. The text says what to do."""


@dataclass(frozen=True)
class Request:
    """The request of a silo or an operator to be enrolled: its name and public key (PEM)."""

    name: str
    key: bytes


@dataclass(frozen=True)
class Bundle:
    """The data that a silo needs to join.

    Attributes:
        name: of the silo it was made for.
        silo: fingerprint of that silo's key.
        address: ``HOST:PORT`` where the coordinator listens for silos.
        ca: certificate of the coordinator's CA, PEM.
    """

    name: str
    silo: str
    address: str
    ca: bytes


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in the form in which Flower sends and stores it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint_of_key(key: bytes) -> str:
    """Return the first 128 bits of SHA-256 of a public key (PEM), for two people to compare."""
    return _fingerprint(
        load_pem_public_key(key).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    )


def fingerprint_of_certificate(certificate: bytes) -> str:
    """Return the first 128 bits of SHA-256 of a certificate (PEM)."""
    return _fingerprint(load_pem_x509_certificate(certificate).public_bytes(Encoding.DER))


def _fingerprint(content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return "-".join(digest[i : i + 4] for i in range(0, 32, 4))


def make_request(name: str, key: ec.EllipticCurvePrivateKey, *, kind: str = REQUEST) -> str:
    """Return the line that a silo, or with ``OPERATOR`` an operator, gives to the coordinator."""
    public = public_pem(key.public_key())
    signature = key.sign(_signed(kind, name, public), ec.ECDSA(hashes.SHA256()))
    return _line(
        kind,
        {"name": name, "key": public.decode(), "signature": base64.b64encode(signature).decode()},
    )


def read_request(text: str, *, kind: str = REQUEST) -> Request:
    """Read the line of ``make_request``.

    Raises:
        EnrolmentError: it is incomplete, changed, or something else.
    """
    fields = _fields(kind, text)
    try:
        name, key = str(fields["name"]), str(fields["key"]).encode()
        signature = base64.b64decode(fields["signature"], validate=True)
        public = load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise EnrolmentError("the request's key is not on an elliptic curve.")
        public.verify(signature, _signed(kind, name, key), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise EnrolmentError(
            "the request was altered: its signature does not match its name and key. Ask the "
            "sender for it again."
        ) from None
    except (KeyError, TypeError, ValueError, UnsupportedAlgorithm) as error:
        if isinstance(error, EnrolmentError):
            raise
        raise EnrolmentError(_garbled(kind)) from None
    return Request(name, public_pem(public))  # one key has one text, however it was sent


def write_bundle(bundle: Bundle) -> str:
    """Return the line that the operator gives to the silo."""
    return _line(BUNDLE, vars(bundle) | {"ca": bundle.ca.decode()})


def read_bundle(text: str) -> Bundle:
    """Read the line of ``write_bundle``.

    Raises:
        EnrolmentError: it is incomplete or something else.
    """
    fields = _fields(BUNDLE, text)
    try:
        ca = str(fields["ca"]).encode()
        load_pem_x509_certificate(ca)
        return Bundle(str(fields["name"]), str(fields["silo"]), str(fields["address"]), ca)
    except (KeyError, ValueError):
        raise EnrolmentError(_garbled(BUNDLE)) from None


def _signed(kind: str, name: str, key: bytes) -> bytes:
    return f"{kind} {VERSION} {name}\n".encode() + key


def _line(kind: str, fields: dict[str, str]) -> str:
    content = json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()
    # The checksum tells a line that was cut from one that was never right.
    body = hashlib.sha256(content).digest()[:4] + content
    return f"{kind}.{base64.urlsafe_b64encode(body).decode().rstrip('=')}"


def _fields(kind: str, text: str) -> dict[str, Any]:
    line = "".join(text.split())  # mail programs wrap lines
    found, _, encoded = line.partition(".")
    if found != kind:
        was = f"This is {LINES[found][0]}." if found in LINES else "Got something else."
        raise EnrolmentError(f"expected {LINES[kind][0]}, a line that starts with {kind}. {was}")
    try:
        body = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        if hashlib.sha256(body[4:]).digest()[:4] != body[:4]:
            raise ValueError
        fields = json.loads(body[4:])
        version = fields["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EnrolmentError(_garbled(kind)) from None
    if version != VERSION:
        raise EnrolmentError(
            f"the line has version {version}, this coterie reads version {VERSION}. Install the "
            "same coterie version on both sides."
        )
    return dict(fields)


def _garbled(kind: str) -> str:
    return (
        f"the line that starts with {kind} is incomplete or altered. Copy the whole line that "
        f"`{LINES[kind][1]}` printed."
    )
