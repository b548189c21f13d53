"""What silos and coordinator agree upon to sum updates that nobody may see alone.

Every two silos of a sum have a secret in common, by X25519 (RFC 7748) of keys made for one run. A
silo adds to its numbers a mask for each of the others, made of that secret, which the other takes
away: the masks vanish in the sum over all of them, and in no other (Bonawitz et al.: "Practical
Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
https://doi.org/10.1145/3133956.3133982, section 4, "masking with one-time pads"). Numbers are
integers modulo 2^32, so that the sum does not depend on any order.

The masks depend on all that describes the sum (``Sum.digest``): who is in it, of which run and
round, how each counts. Silos that are told different things make masks that do not vanish.

Enrolled silos sign their keys with the key that they were enrolled with, and the coordinator's CA
has signed which key is whose: the coordinator cannot put in a silo of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509 import load_pem_x509_certificate
from numpy.typing import NDArray

from coterie.wire import names
from coterie.wire.arrays import Model
from coterie.wire.description import is_silo_name
from coterie.wire.errors import WireError
from coterie.wire.updates import JOINT, PIECE, Limit, pieces

BITS: Final = 30
"""Binary places of a summed number, of what an array's largest can be: the mean of fifty silos is
right to 2^-25 of that."""
FEWEST: Final = 2
"""Silos of a sum: that of one would be its update."""
MAX_SKETCH, LEAST_SKETCH, SPARSE = 4096, 256, 10
"""Most and fewest numbers of a sketch, and how many parameters at least are behind each."""
MAX_PEERS = 1024
MAX_PEER_TEXT = 4096
OF_ITS_OWN: Final = frozenset(
    {
        *(names.ROUND, names.PURPOSE, names.PEERS, names.SEALED, names.GROUP_SIZE, names.GROUP),
        *(names.EVALUATE_RECEIVED, names.EVALUATE_TRAINED, names.METRIC, names.APART),
        names.LEFT_OUT,
        *(names.OWN_ROUND, names.OWN_PURPOSE),
    }
)
"""Entries of a training message that members of a sum may be told differently: none of them changes
what a training makes of a model."""
_SIGNED, _VOUCHED = b"coterie secure run 1\n", b"coterie enrolled silo 1\n"


@dataclass(frozen=True)
class Peer:
    """A silo as another one knows it in a secure run.

    Attributes:
        name: of the silo.
        public: its X25519 key of this run, 32 bytes.
        identity: the public key that it was enrolled with, PEM; empty if it is not enrolled.
        signature: by that key, of run, name and ``public``.
        voucher: the coordinator's CA's signature of name and ``identity``.
    """

    name: str
    public: bytes
    identity: bytes = b""
    signature: bytes = b""
    voucher: bytes = b""


def signed_by_silo(run: str, name: str, public: bytes) -> bytes:
    """What a silo signs: that this is its key of a run."""
    return _SIGNED + json.dumps([run, name]).encode() + public


def signed_by_ca(name: str, identity: bytes) -> bytes:
    """What the coordinator's CA signs: that a silo of this name was enrolled with this key."""
    return _VOUCHED + json.dumps([name]).encode() + identity


def encode_peers(peers: Sequence[Peer]) -> str:
    """As text, for an entry of a message."""
    return json.dumps(
        [
            [p.name, p.public.hex(), p.identity.decode("ascii"), p.signature.hex(), p.voucher.hex()]
            for p in peers
        ]
    )


def decode_peers(text: object) -> dict[str, Peer]:
    """Name → peer, of what ``encode_peers`` made.

    Raises:
        WireError: it is something else.
    """
    try:
        rows = json.loads(_bounded(text, MAX_PEERS * MAX_PEER_TEXT))
        peers = [
            Peer(str(n), bytes.fromhex(p), i.encode("ascii"), bytes.fromhex(s), bytes.fromhex(v))
            for n, p, i, s, v in rows
        ]
    except Exception as error:  # text from elsewhere: of any kind
        raise WireError(f"the keys of a secure run cannot be read: {error}") from None
    found = {peer.name: peer for peer in peers}
    if len(found) != len(peers) or len(peers) > MAX_PEERS or not all(map(is_silo_name, found)):
        raise WireError("the keys of a secure run name a silo twice, or one that can be none.")
    return found


def peer_objection(peer: Peer, run: str, *, ca: bytes) -> str:
    """Why a silo's key may not be used; empty if it may.

    Args:
        peer: as it was told.
        run: of which the key is to be.
        ca: certificate of the coordinator's CA, PEM, as it was when whoever asks was enrolled;
            empty: nobody vouches for anybody.
    """
    try:
        X25519PrivateKey.from_private_bytes(b"\1" * 32).exchange(
            X25519PublicKey.from_public_bytes(peer.public)
        )
    except ValueError:
        return f"the key of silo {peer.name!r} is no X25519 key that can be used."
    if not ca and not peer.identity:
        return ""
    if ca and not _is_vouched(ca, peer.name, peer.identity, peer.voucher):
        return (
            f"nobody whom this silo trusts says that silo {peer.name!r} is enrolled: its key is "
            "not signed by the coordinator's CA of the join bundle."
        )
    if not _is_signed(peer.identity, peer.signature, signed_by_silo(run, peer.name, peer.public)):
        return f"the key of silo {peer.name!r} is not signed by that silo for this run."
    return ""


@lru_cache(MAX_PEERS)
def _is_vouched(ca: bytes, name: str, identity: bytes, voucher: bytes) -> bool:
    try:
        key = load_pem_x509_certificate(ca).public_key()
    except ValueError:
        return False
    return _verifies(key, voucher, signed_by_ca(name, identity))


@lru_cache(MAX_PEERS)
def _is_signed(identity: bytes, signature: bytes, content: bytes) -> bool:
    try:
        key = load_pem_public_key(identity)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return _verifies(key, signature, content)


def _verifies(key: object, signature: bytes, content: bytes) -> bool:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


# ---------------------------------------------------------------- sums


@dataclass(frozen=True)
class Sum:
    """What all silos of a sum are told alike.

    A silo's share is ``min(samples, cap) / total``; the sum of all is the mean.

    Attributes:
        run: its name.
        round, purpose: of the training whose outcome is summed.
        members: silos, sorted.
        cap: samples that a silo counts for at most.
        total: what all of them count for.
        trained_as: what all members were sent and told, see ``training_digest``.
        least: silos by which any two sums must differ, and of which each is at least made.
        bounds: of every array of the model, what no silo's values exceed in size.
        attempt: 1; 2 without those that were lost.
        limit: of every silo's last update; None: none is too long.
    """

    run: str
    round: int
    purpose: str
    members: tuple[str, ...]
    cap: float
    total: float
    trained_as: str
    least: int
    bounds: tuple[float, ...]
    attempt: int = 1
    limit: Limit | None = None

    def encode(self) -> str:
        """As text."""
        limit = () if self.limit is None else (self.limit.norm, self.limit.samples)
        return json.dumps(
            [
                *(self.run, self.round, self.purpose, list(self.members)),
                *(self.cap, self.total, self.trained_as, self.least),
                *(list(self.bounds), self.attempt, *limit),
            ]
        )

    @property
    def weighing(self) -> str:
        """What decides how much of each silo is in the sum, as 64 hexadecimal digits.

        With two of these, the same silos' sums could be subtracted from each other until one
        silo's part is left: the largest one's, of two caps.
        """
        text = json.dumps([self.cap, self.total, self.bounds, self.limit and vars(self.limit)])
        return hashlib.sha256(text.encode()).hexdigest()

    def digest(self, peers: Mapping[str, Peer]) -> bytes:
        """SHA-256 of everything that silos must agree upon, their keys included."""
        known = hashlib.sha256(self.encode().encode())
        for name in self.members:
            known.update(peers[name].public)
        return known.digest()

    def share(self, samples: float) -> float:
        """What a silo with so many samples counts for, in (0, 1]."""
        return min(float(samples), self.cap) / self.total


def decode_sum(text: object) -> Sum:
    """What ``Sum.encode`` made.

    Raises:
        WireError: it is something else.
    """
    try:
        told = json.loads(_bounded(text, MAX_PEERS * MAX_PEER_TEXT))
        run, number, purpose, members, cap, total, trained_as, least, bounds, attempt, *more = told
        found = Sum(
            *(str(run), int(number), str(purpose), tuple(map(str, members))),
            *(float(cap), float(total), str(trained_as), int(least)),
            *(tuple(map(float, bounds)), int(attempt)),
            Limit(*map(float, more)) if more else None,
        )
    except Exception as error:  # text from elsewhere: of any kind
        raise WireError(f"a sum's description cannot be read: {error}") from None
    limit = () if found.limit is None else (found.limit.norm, found.limit.samples)
    sound = all(math.isfinite(n) and n > 0 for n in (found.cap, found.total, *found.bounds, *limit))
    if not sound or list(found.members) != sorted(set(found.members)):
        raise WireError("a sum needs silos in order, each once, and counts and bounds above 0.")
    if len(found.members) > MAX_PEERS or not all(map(is_silo_name, found.members)):
        raise WireError(f"a sum has at most {MAX_PEERS} silos, with names that silos can have.")
    return found


def training_digest(kind: str, start: str, config: Mapping[str, object]) -> str:
    """What a silo was sent and told, as 64 hexadecimal digits.

    Of silos that were told other things than the others, a sum would show more: where all others
    were given a model or a learning rate at which they learn nothing, it is the one silo's update
    (Pasquini, Francati, Ateniese: "Eluding Secure Aggregation in Federated Learning via Model
    Inconsistency", CCS 2022, https://arxiv.org/abs/2111.07380).

    Args:
        kind: type of the message.
        start: digest of what the training began from.
        config: of the message.
    """
    told = {key: value for key, value in config.items() if key not in OF_ITS_OWN}
    text = json.dumps([kind, start, told], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def fixed(model: Model, share: float, bounds: Sequence[float]) -> NDArray[np.uint32]:
    """A model's numbers times a share, as integers modulo 2^32, in the model's order.

    Args:
        model: names to arrays.
        share: in (0, 1].
        bounds: of every array, what none of its values should exceed in size; one that does counts
            as that.

    Raises:
        ValueError: names an array with a value that is not finite.
    """
    numbers = np.empty(num_numbers(model), np.uint32)
    room, start, largest = np.empty(PIECE), 0, share * 2.0**BITS
    for (name, array), bound in zip(model.items(), bounds, strict=True):
        for piece in pieces(array.reshape(-1)):
            if not np.isfinite(piece).all():
                raise ValueError(f"array {name!r} holds NaN or infinity")
            scaled = np.multiply(piece, largest / bound, out=room[: piece.size], dtype=np.float64)
            # To refuse would tell whoever chose the bound.
            np.clip(scaled, -largest, largest, out=scaled)
            numbers[start : start + piece.size].view(np.int32)[:] = np.rint(scaled, out=scaled)
            start += piece.size
    return numbers


def from_fixed(numbers: NDArray[np.uint32], like: Model, bounds: Sequence[float]) -> Model:
    """The model that a sum of ``fixed`` is: names, shapes and types as ``like``; counters
    rounded."""
    found: Model = {}
    room, start = np.empty(PIECE), 0
    for (name, array), bound in zip(like.items(), bounds, strict=True):
        values = np.empty(array.size, array.dtype)
        part = numbers[start : start + array.size].view(np.int32)
        is_float = np.issubdtype(array.dtype, np.floating)
        for piece, out in zip(pieces(part), pieces(values), strict=True):
            wide = np.multiply(piece, bound / 2.0**BITS, out=room[: piece.size])
            out[:] = wide if is_float else np.rint(wide, out=wide)
        found[name] = values.reshape(array.shape)
        start += array.size
    return found


def num_numbers(model: Model) -> int:
    """How many ``fixed`` gives."""
    return sum(array.size for array in model.values())


def sketch_size(parameters: int) -> int:
    """Numbers of a sketch of so many parameters."""
    return min(MAX_SKETCH, parameters // SPARSE)


def sketch_sizes(model: Model, layers: str) -> dict[str, int]:
    """Name of a sketch → its numbers, of an update of a model.

    Args:
        model: whose floating-point arrays count, statistics included.
        layers: ``all`` in one sketch, ``each`` module by itself, or a prefix of array names.

    Returns:
        Nothing of what has too few parameters for ``LEAST_SKETCH`` numbers.
    """
    counts: dict[str, int] = {}
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating):
            called = sketch_name(name, layers)
            if called:
                counts[called] = counts.get(called, 0) + array.size
    sizes = {name: sketch_size(count) for name, count in counts.items()}
    return {name: size for name, size in sizes.items() if size >= LEAST_SKETCH}


def sketch_name(array: str, layers: str) -> str:
    """The sketch that an array belongs to; empty if to none."""
    if layers == "each":
        module = array.rpartition(".")[0]
        return f"{module}.{JOINT}" if module else JOINT
    prefix = "" if layers == "all" else layers
    return prefix + JOINT if array.startswith(prefix) else ""


def _bounded(text: Any, most: int) -> str:
    if not isinstance(text, str) or len(text) > most:
        raise ValueError(f"expected a text of at most {most:,} letters")
    return text
