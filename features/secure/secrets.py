"""A silo's secrets in a secure run: its key, and the seed of the silos' projection.

The key is made for the run, and signed with the silo's enrolment key if it has one. A silo with a
folder keeps both there, so that it is the same silo after a restart.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coterie.client.home.rounds import folder_of
from coterie.client.home.settings import SiloSettings
from coterie.features.secure.protocol import Peer, signed_by_silo
from coterie.system.files import make_folder, write_atomically
from coterie.wire import Model
from coterie.wire.arrays import bytes_of
from coterie.wire.enrolment import public_pem
from coterie.wire.statements import Statement

FOLDER = "secure"
KEY, CA = "key.pem", "ca.pem"
"""Files of an enrolled silo, in its folder."""
MAX_RUNS = 4
"""Runs whose secrets are kept; what was masked in older ones then becomes unreadable."""
NONCE = 12

_memory: dict[tuple[str, str, str], RunSecrets] = {}
"""(silo, home, run) → its secrets."""


@dataclass(frozen=True)
class RunSecrets:
    """The secrets of one silo in one run.

    ``seed`` is empty until the silo has received, or made, the run's.
    """

    run: str
    name: str
    home: str
    private: X25519PrivateKey
    seed: bytes = b""

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    @property
    def ca(self) -> bytes:
        """The certificate that must vouch for other silos' keys; empty if not enrolled.

        Raises:
            OSError: the silo is enrolled, and its certificate cannot be read.
        """
        return (Path(self.home) / CA).read_bytes() if _read(self.home, KEY) else b""

    def as_peer(self) -> Peer:
        """Return this silo's own statement; the coordinator adds the voucher."""
        own = _identity(self.home)
        if own is None:
            return Peer(self.name, self.public)
        signature = own.sign(
            signed_by_silo(self.run, self.name, self.public), ec.ECDSA(hashes.SHA384())
        )
        return Peer(self.name, self.public, public_pem(own.public_key()), signature)

    def shared_with(self, peer: Peer, what: bytes) -> bytes:
        """Return 32 bytes that only the two silos can make, for one use."""
        secret = self.private.exchange(X25519PublicKey.from_public_bytes(peer.public))
        return _derived(secret, what)

    def made_seed(self, run_seed: int) -> RunSecrets:
        """Return secrets with a seed of the projection.

        An enrolled silo makes one that no other silo can, another one in every run; others make
        one that any silo could, the same in every run of ``run_seed``.
        """
        own = _read(self.home, KEY)
        if own and self.seed:
            return self
        key = own or b"not enrolled"  # where runs of one process may have one name, but other seeds
        of = f"{run_seed} {self.run}" if own else str(run_seed)
        return self.with_seed(_derived(key, f"coterie projection {of}".encode()))

    def lasting(self, what: str) -> bytes:
        """Return 32 bytes for one use that only this silo can make, if it is enrolled.

        They are the same in every run.
        """
        key = _read(self.home, KEY) or b"not enrolled"
        return _derived(key, f"coterie {what} {self.name}".encode())

    def projection(self, name: str) -> bytes:
        """Return the key of one of the run's projections, which all silos with the seed make."""
        return _derived(self.seed, b"coterie projection " + name.encode())

    def with_seed(self, seed: bytes) -> RunSecrets:
        if seed == self.seed:
            return self
        return _keep(replace(self, seed=seed))

    def mark_of(self, model: Model) -> str:
        """Return a mark by which only this silo recognises a model: a MAC with its own key."""
        key = _derived(self.private.private_bytes_raw(), b"coterie mark of a model")
        return _mac(key, model).hex()

    def noise_for(self, model: Model) -> bytes:
        """Return 32 bytes from which noise on a model is drawn: the same for it in every run."""
        return _derived(self.lasting("noise of a sum"), _mac(self.lasting("model"), model))

    @property
    def seed_id(self) -> str:
        """The identifier by which two silos compare their seeds; empty without a seed."""
        return _derived(self.seed, b"coterie seed id")[:8].hex() if self.seed else ""

    def signed(self, stated: Statement, number: int, purpose: str) -> Statement:
        """Return a statement with this silo's signature, if it is enrolled."""
        own = _identity(self.home)
        if own is None:
            return stated
        content = stated.content(self.run, self.name, number, purpose, self.public)
        return replace(stated, signature=own.sign(content, ec.ECDSA(hashes.SHA384())).hex())

    def seal(self, peer: Peer) -> bytes:
        """Return the seed, encrypted for that silo."""
        nonce = os.urandom(NONCE)
        key = self.shared_with(peer, _sealing(self.run, self.name, peer.name))
        return nonce + AESGCM(key).encrypt(nonce, self.seed, None)

    def unseal(self, holder: Peer, sealed: bytes) -> RunSecrets:
        """Keep the seed that another silo has sealed for this one.

        Raises:
            ValueError: it was sealed for another silo or run, or changed on its way.
        """
        key = self.shared_with(holder, _sealing(self.run, holder.name, self.name))
        try:
            seed = AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], None)
        except (InvalidTag, ValueError):
            raise ValueError(
                f"the seed that silo {holder.name!r} sealed cannot be opened here: it was "
                "sealed for another key of this silo or by another release, or was altered on the "
                "way"
            ) from None
        return self.with_seed(seed)


def secrets_of(settings: SiloSettings, run: str) -> RunSecrets:
    """Return a silo's secrets of a run, made when it first needs them."""
    key = (settings.name, settings.home, run)
    if key in _memory:
        return _memory[key]
    found = _load(settings, run)
    if found is not None:
        return _remember(found)
    return _keep(RunSecrets(run, settings.name, settings.home, X25519PrivateKey.generate()))


def _load(settings: SiloSettings, run: str) -> RunSecrets | None:
    if not settings.home:
        return None
    try:
        kept = json.loads(_file(settings.home, run).read_text(encoding="ascii"))
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(kept["key"]))
        if kept["silo"] != settings.name or kept["run"] != run:
            return None
        return RunSecrets(
            *(run, settings.name, settings.home, private, bytes.fromhex(kept["seed"])),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None  # lost: a new key is made, and the others get it


def _keep(secrets: RunSecrets) -> RunSecrets:
    if secrets.home:
        file = _file(secrets.home, secrets.run)
        make_folder(file.parent, private=True)
        kept = {
            **{"run": secrets.run, "silo": secrets.name},
            **{"key": secrets.private.private_bytes_raw().hex(), "seed": secrets.seed.hex()},
        }
        write_atomically(file, json.dumps(kept).encode("ascii"), private=True)
        files = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in files[:-MAX_RUNS]:
            old.unlink(missing_ok=True)
    return _remember(secrets)


def _remember(secrets: RunSecrets) -> RunSecrets:
    _memory[secrets.name, secrets.home, secrets.run] = secrets
    own = [key for key in _memory if key[:2] == (secrets.name, secrets.home)]
    for old in own[:-MAX_RUNS]:
        del _memory[old]
    return secrets


def _file(home: str, run: str) -> Path:
    folder = folder_of(home, FOLDER, run)
    return folder.with_name(f"{folder.name}.json")


def _identity(home: str) -> ec.EllipticCurvePrivateKey | None:
    content = _read(home, KEY)
    key = load_pem_private_key(content, password=None) if content else None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _read(home: str, name: str) -> bytes:
    try:
        return (Path(home) / name).read_bytes() if home else b""
    except FileNotFoundError:  # not another error: a silo with a key is enrolled
        return b""


def _mac(key: bytes, model: Model) -> bytes:
    """Return a MAC, 16 bytes.

    It is twelve times as fast as a hash. Two models with the same one cannot be made without the
    key.
    """
    maker = Cipher(algorithms.AES(key), modes.GCM(bytes(NONCE))).encryptor()
    for name, array in model.items():
        maker.authenticate_additional_data(
            json.dumps([name, str(array.dtype), array.shape]).encode()
        )
        maker.authenticate_additional_data(bytes_of(array))
    maker.finalize()
    return maker.tag


def _sealing(run: str, holder: str, name: str) -> bytes:
    # The number changes with the sketches: those of two releases cannot be compared.
    return b"coterie seal 2 " + json.dumps([run, holder, name]).encode()


def _derived(secret: bytes, what: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=what).derive(secret)
