"""The federation's CA, and the SuperLink's certificate that it signs.

A silo receives the CA once. The SuperLink's certificate is short-lived and can be renewed, also for
other names, without any change at the silos.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.strategies.errors import refused
from coterie.system import keys
from coterie.system.files import make_folder, write_atomically

CA_DAYS, SERVER_DAYS = 3650, 397
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Always among the server's names: operators connect from the coordinator's machine."""


def make_ca(folder: Path, name: str) -> None:
    """Write ``ca.key`` and ``ca.pem``: a CA that signs servers, and the keys of enrolled silos."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"coterie CA {name}"[:64])])
    certificate = (
        _builder(subject, subject, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write(folder, "ca", key, certificate)


def make_server_certificate(folder: Path, names: Sequence[str]) -> None:
    """Write ``server.key`` and ``server.pem``, signed by the CA in the folder.

    ``names`` are the DNS names and IP addresses under which silos reach the server.
    """
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key = private_key(folder / "ca.key")
    key = ec.generate_private_key(ec.SECP384R1())
    unique = list(dict.fromkeys([*names, *LOCAL]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, unique[0][:64])])
    certificate = (
        _builder(subject, ca.subject, key, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in unique]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    _write(folder, "server", key, certificate)


def sign(folder: Path, content: bytes) -> bytes:
    """Sign content with the folder's CA, which silos know from their join bundles."""
    ca_key = private_key(folder / "ca.key")
    return ca_key.sign(content, ec.ECDSA(hashes.SHA384()))


def signed(folder: Path, content: bytes, signature: bytes) -> bool:
    """Return whether the folder's CA made a signature; this does not need its key."""
    return signed_by((folder / "ca.pem").read_bytes(), content, signature)


def signed_by(certificate: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether the CA with this certificate (PEM) made a signature."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    return keys.verifies(key, signature, content)


def days_left(certificate: Path) -> float:
    """Return the days until a certificate expires; negative if it has."""
    return (ends(certificate) - datetime.now(UTC)) / timedelta(days=1)


def ends(certificate: Path) -> datetime:
    """Return when a certificate expires, UTC."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def covers(certificate: Path, names: Sequence[str]) -> bool:
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    held = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {_alternative(name) for name in names} <= set(held)


def belongs_to(certificate: Path, key: Path) -> bool:
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    return loaded.public_key() == private_key(key).public_key()


def private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key of the coordinator.

    Raises:
        OSError: it is missing, or this account may not read it.
        FederationError: it is damaged, or others may read it.
    """
    try:
        return keys.read_key(file)
    except keys.KeyFileError as error:
        raise refused(str(error)) from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _write(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    make_folder(folder, private=True)
    write_atomically(folder / f"{name}.key", keys.private_pem(key), private=True)
    write_atomically(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))
