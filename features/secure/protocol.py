"""The protocol in which silos sum updates that must stay private.

Every two silos of a sum share a secret, by X25519 (RFC 7748) of keys made for one run. A silo adds
to its numbers a mask for each of the others, made from that secret, which the other subtracts: the
masks cancel in the sum over all of them, and in no other (Bonawitz et al.: "Practical Secure
Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
https://doi.org/10.1145/3133956.3133982, section 4, "masking with one-time pads"). Numbers are
integers modulo 2^32, so that the sum does not depend on any order.

The masks depend on everything that describes the sum (``Sum.digest``): run and round, its members
in blocks, how each counts, and what each has stated of its training and signed. Silos that receive
different descriptions make masks that do not cancel. A silo believes the coordinator nothing about
the others: totals, bounds and roundings follow from the start model and the statements.

Enrolled silos sign their keys with the key of their enrolment, and the coordinator's CA has signed
which key is whose: the coordinator cannot add a fake silo.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509 import load_pem_x509_certificate
from numpy.typing import NDArray

from coterie.system.keys import verifies
from coterie.wire import names
from coterie.wire.arrays import Model
from coterie.wire.description import is_silo_name
from coterie.wire.errors import WireError
from coterie.wire.half_precision import largest_of as largest_in
from coterie.wire.statements import Block, Statement, decode_statement, read_block
from coterie.wire.updates import JOINT, PIECE, Limit, pieces

BITS: Final = 30
"""Binary places of a summed number, relative to its array's bound: the mean of fifty silos is
accurate to 2^-25 of that."""
FEWEST: Final = 2
"""Fewest silos of a sum: a sum of one would be its update."""
MAX_SKETCH, LEAST_SKETCH, SPARSE = 4096, 256, 10
"""Most and fewest numbers of a sketch, and the fewest parameters per number."""
MAX_PEERS = 1024
MAX_PEER_TEXT = 4096
OF_ITS_OWN: Final = frozenset(
    (names.PEERS, names.SEALED, names.GROUP, names.EVALUATE_RECEIVED, names.APART, names.LEFT_OUT)
)
"""Entries of a training message in which members of a sum may differ: keys and a seed sealed for
one silo, what it is told of its group, and whether it also evaluates the model received. No
training reads them, unlike the group's size, by which linear models of a silo alone differ."""
SLACK: Final = 1e-3
"""Tolerated relative error of a length."""
LEAST_BOUND: Final = 1e-30
MOST_COUNTED: Final = 2.0**22
"""The largest allowed increase of a counter, such as a batch count."""
LEAST_SHARE: Final = 2.0**-14
"""Smallest share of a silo in a sum; a smaller one would be lost in the rounding."""
OUTWEIGHED: Final = 4.0
"""How many times as long as all other weighted updates together one silo's may be."""
ROUNDED: Final = 0.25
"""Largest rounding error of a silo's part, relative to the shortest weighted update."""
_SIGNED, _VOUCHED = b"coterie secure run 1\n", b"coterie enrolled silo 1\n"


@dataclass(frozen=True)
class Peer:
    """A silo as another one knows it in a secure run.

    Attributes:
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
    """Return what a silo signs: that this is its key of a run."""
    return _SIGNED + json.dumps([run, name]).encode() + public


def signed_by_ca(name: str, identity: bytes) -> bytes:
    """Return what the coordinator's CA signs: that a silo was enrolled with this key."""
    return _VOUCHED + json.dumps([name]).encode() + identity


def encode_peers(peers: Sequence[Peer]) -> str:
    """Return peers as text, for an entry of a message."""
    return json.dumps(
        [
            [p.name, p.public.hex(), p.identity.decode("ascii"), p.signature.hex(), p.voucher.hex()]
            for p in peers
        ]
    )


def decode_peers(text: object) -> dict[str, Peer]:
    """Return name → peer from the text of ``encode_peers``.

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
        raise WireError("the keys of a secure run name a silo twice, or have an invalid name.")
    return found


def peer_objection(peer: Peer, run: str, *, ca: bytes) -> str:
    """Return why a silo's key may not be used; empty if it may.

    Args:
        run: that the key must belong to.
        ca: certificate of the coordinator's CA, PEM, from the caller's own enrolment; empty if keys
            are not vouched for.
    """
    try:
        X25519PrivateKey.from_private_bytes(b"\1" * 32).exchange(
            X25519PublicKey.from_public_bytes(peer.public)
        )
    except ValueError:
        return f"the key of silo {peer.name!r} is not a valid X25519 key."
    if not ca and not peer.identity:
        return ""
    if ca and not _is_vouched(ca, peer.name, peer.identity, peer.voucher):
        return (
            f"this silo cannot verify that silo {peer.name!r} is enrolled: its key is not "
            "signed by the coordinator's CA in the join bundle."
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
    return verifies(key, voucher, signed_by_ca(name, identity))


@lru_cache(MAX_PEERS)
def _is_signed(identity: bytes, signature: bytes, content: bytes) -> bool:
    try:
        key = load_pem_public_key(identity)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return verifies(key, signature, content)


# ---------------------------------------------------------------- sums


@dataclass(frozen=True)
class Sum:
    """The description of a sum, which all its silos must receive alike.

    A silo's share is its count / the total of all counts; the sum of all is the mean.

    Attributes:
        round, purpose: of the training whose outcome is summed.
        blocks: of which all silos are in a sum, or none is, with their counts.
        statements: silo → what it stated of the training, by name.
        limit: on every silo's last update; None if none is too long.
    """

    run: str
    round: int
    purpose: str
    blocks: tuple[Block, ...]
    statements: Mapping[str, Statement]
    limit: Limit | None = None

    @cached_property
    def counts(self) -> dict[str, float]:
        """Silo → the samples that it counts for, by name."""
        return dict(sorted(row for block in self.blocks for row in block))

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def block_of(self, name: str) -> Block:
        return next(block for block in self.blocks if name in dict(block))

    def counts_by_samples(self, block: Block) -> bool:
        """Return whether the silos of a block count by their samples, up to one largest count.

        With other counts, a silo could be given four fifths of a sum of equal silos.
        """
        most = max(count for _, count in block)
        samples = {name: self.statements[name].samples for name, _ in block}
        each = max(count / samples[name] for name, count in block)
        return all(
            math.isclose(count, min(each * samples[name], most), rel_tol=1e-9)
            for name, count in block
        )

    def encode(self) -> str:
        limit = () if self.limit is None else (self.limit.norm, self.limit.samples)
        stated = {name: one.encode() for name, one in self.statements.items()}
        return json.dumps([self.run, self.round, self.purpose, self.blocks, stated, *limit])

    def digest(self, peers: Mapping[str, Peer]) -> bytes:
        """Return the SHA-256 of everything that silos must agree on, including their keys."""
        known = hashlib.sha256(self.encode().encode())
        for name in self.members:
            known.update(peers[name].public)
        return known.digest()

    def share(self, name: str) -> float:
        """Return a silo's share in the sum, in (0, 1]."""
        return self.counts[name] / math.fsum(self.counts.values())

    def shortening(self, block: Block) -> float:
        """Return the factor on the updates of a block, in (0, 1].

        It is one factor, that of the longest: with a factor for each, the difference of two sums
        with different limits would be one silo's part.
        """
        if self.limit is None:
            return 1.0
        stated = [self.statements[name] for name, _ in block]
        return min(1.0, *(self.limit.of(s.samples) / s.length for s in stated if s.length))

    def reaches(self) -> dict[str, tuple[float, float]]:
        """Return silo → lengths of its last update and of all since the start, shortened."""
        found = {}
        for block in self.blocks:
            factor = self.shortening(block)
            for name, _ in block:
                stated = self.statements[name]
                last = factor * stated.length
                found[name] = last, stated.reach - stated.length + last
        return found

    def bounds(self, largest: Sequence[float], like: Model) -> tuple[float, ...]:
        """Return for every array the largest absolute value at any silo.

        Args:
            largest: for every array, that of the model from which all members started.
            like: a model with its shapes and types.
        """
        reach = max(reach for _, reach in self.reaches().values())
        return tuple(
            (most + (reach if is_float(array) else MOST_COUNTED)) * (1 + SLACK) + LEAST_BOUND
            for most, array in zip(largest, like.values(), strict=True)
        )

    def objection(self, largest: Sequence[float], like: Model) -> str:
        """Return why the sum would show or hide one silo's update; empty if it would not.

        Arguments as of ``bounds``. It depends only on what the coordinator knows, so a refusal
        tells it nothing.
        """
        weighted = {n: self.share(n) * last for n, (last, _) in self.reaches().items()}
        total = math.fsum(weighted.values())
        for name, own in weighted.items():
            if self.share(name) < LEAST_SHARE:
                return f"gives silo {name!r} a share of less than 2^-14, which rounding would hide."
            if own > OUTWEIGHED * (total - own) * (1 + SLACK):
                return (
                    f"would be nearly the update of silo {name!r}: all others are together less "
                    f"than 1/{OUTWEIGHED:g} as long, weighted by their samples."
                )
        bounds = zip(self.bounds(largest, like), like.values(), strict=True)
        squares = math.fsum(array.size * bound**2 for bound, array in bounds if is_float(array))
        error = math.sqrt(squares) * 2.0**-BITS / 2
        least = min((own for own in weighted.values() if own), default=math.inf)
        if error > ROUNDED * least:
            return (
                f"rounds by {error:.2g}, and the shortest update in it is {least:.2g} long, "
                "weighted by its samples: the sum would show only the longer ones."
            )
        return ""


def decode_sum(text: object) -> Sum:
    """Return the sum from the text of ``Sum.encode``.

    Raises:
        WireError: it is something else.
    """
    try:
        values = json.loads(_bounded(text, MAX_PEERS * MAX_PEER_TEXT))
        run, number, purpose, blocks, stated, *limit = values
        found = Sum(
            *(str(run), int(number), str(purpose), tuple(map(read_block, blocks))),
            {str(name): decode_statement(one) for name, one in stated.items()},
            Limit(*map(float, limit)) if limit else None,
        )
    except Exception as error:  # text from elsewhere: of any kind
        raise WireError(f"a sum's description cannot be read: {error}") from None
    silos = [name for block in found.blocks for name, _ in block]
    if not silos or len(set(silos)) < len(silos) or list(found.statements) != sorted(silos):
        raise WireError("a sum needs its silos, each in one block and with its own statement.")
    if not all(math.isfinite(n) and n > 0 for n in map(float, limit)):
        raise WireError("a limit of a sum must be above 0.")
    return found


def statement_objection(asked: Sum, peer: Peer) -> str:
    """Return why a member's statement is not believed; empty if it is.

    ``peer``: its keys, which have been checked (``peer_objection``).
    """
    stated = asked.statements[peer.name]
    content = stated.content(asked.run, peer.name, asked.round, asked.purpose, peer.public)
    signature = bytes.fromhex(stated.signature)
    if peer.identity and not _is_signed(peer.identity, signature, content):
        return (
            f"takes part in no sum with silo {peer.name!r}: what it is said to have stated of its "
            "training in this round is not signed by that silo."
        )
    if asked.counts[peer.name] > stated.samples:
        return f"was asked for a sum in which silo {peer.name!r} counts for more than its samples."
    return ""


def training_digest(
    kind: str,
    start: str,
    config: Mapping[str, object],
    arrays: Mapping[str, str],
    *,
    behind: str = "",
) -> str:
    """Return a digest of all that decides a training but the silo's data: 64 hexadecimal digits.

    If silos are sent different things, a sum reveals more: if all others get a model, a learning
    rate or a state at which they learn nothing, it is the one silo's update (Pasquini, Francati,
    Ateniese: "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022,
    https://arxiv.org/abs/2111.07380).

    Args:
        start: digest of what the training started from.
        config: all entries of the message: each counts, also one that this release does not know,
            except ``OF_ITS_OWN``.
        arrays: name → hash of its further arrays, apart from entries, which may have their names.
        behind: digest of the training that left the state which the silo adds; empty if it adds
            none.
    """
    decides = {key: value for key, value in config.items() if key not in OF_ITS_OWN}
    said = [kind, start, decides, dict(arrays), behind]
    text = json.dumps(said, sort_keys=True, default=_exactly)
    return hashlib.sha256(text.encode()).hexdigest()


def _exactly(value: object) -> dict[str, str]:
    return {"bytes": value.hex()} if isinstance(value, bytes) else {"other": repr(value)}


def largest_of(model: Model) -> tuple[float, ...]:
    """Return the largest absolute value of each array."""
    return tuple(map(largest_in, model.values()))


def is_float(array: NDArray[Any]) -> bool:
    """Return whether an array holds floating-point numbers."""
    return bool(np.issubdtype(array.dtype, np.floating))


Entering = Callable[[str, int, NDArray[Any]], NDArray[Any]]
"""Array name, place of the first number and numbers of an array → those that enter a sum."""


def _unchanged(name: str, begin: int, piece: NDArray[Any]) -> NDArray[Any]:
    return piece


def fixed(
    model: Model, share: float, bounds: Sequence[float], entering: Entering = _unchanged
) -> NDArray[np.uint32]:
    """Return a model's numbers times a share, as integers modulo 2^32, in the model's order.

    Args:
        share: in (0, 1].
        bounds: for every array, the largest absolute value; larger ones are clipped to it.
        entering: called with the arrays' pieces in order.

    Raises:
        ValueError: names an array with a value that is not finite.
    """
    numbers = np.empty(num_numbers(model), np.uint32)
    room, start, largest = np.empty(PIECE), 0, share * 2.0**BITS
    for (name, array), bound in zip(model.items(), bounds, strict=True):
        first = start
        for piece in pieces(array.reshape(-1)):
            if not np.isfinite(piece).all():
                raise ValueError(f"array {name!r} contains NaN or infinity")
            enters = entering(name, start - first, piece)
            scaled = np.multiply(enters, largest / bound, out=room[: piece.size], dtype=np.float64)
            # To refuse would inform the one who chose the bound.
            np.clip(scaled, -largest, largest, out=scaled)
            numbers[start : start + piece.size].view(np.int32)[:] = np.rint(scaled, out=scaled)
            start += piece.size
    return numbers


def from_fixed(numbers: NDArray[np.uint32], like: Model, bounds: Sequence[float]) -> Model:
    """Return the model that a sum of ``fixed`` encodes, shaped as ``like``; round counters."""
    found: Model = {}
    room, start = np.empty(PIECE), 0
    for (name, array), bound in zip(like.items(), bounds, strict=True):
        values = np.empty(array.size, array.dtype)
        part = numbers[start : start + array.size].view(np.int32)
        for piece, out in zip(pieces(part), pieces(values), strict=True):
            wide = np.multiply(piece, bound / 2.0**BITS, out=room[: piece.size])
            out[:] = wide if is_float(array) else np.rint(wide, out=wide)
        found[name] = values.reshape(array.shape)
        start += array.size
    return found


def num_numbers(model: Model) -> int:
    """Return how many numbers ``fixed`` gives."""
    return sum(array.size for array in model.values())


def sketch_size(parameters: int) -> int:
    """Return how many numbers a sketch of an update has."""
    return min(MAX_SKETCH, parameters // SPARSE)


def sketch_sizes(model: Model, layers: str) -> dict[str, int]:
    """Return name → numbers of the sketches of an update of a model, without too small ones.

    Args:
        model: its floating-point arrays count, including statistics.
        layers: ``all`` in one sketch, ``each`` module separately, or a prefix of array names.

    Returns:
        Nothing for what has too few parameters for ``LEAST_SKETCH`` numbers.
    """
    counts: dict[str, int] = {}
    for name, array in model.items():
        if is_float(array):
            called = sketch_name(name, layers)
            if called:
                counts[called] = counts.get(called, 0) + array.size
    sizes = {name: sketch_size(count) for name, count in counts.items()}
    return {name: size for name, size in sizes.items() if size >= LEAST_SKETCH}


def sketch_name(array: str, layers: str) -> str:
    """Return the sketch that an array belongs to; empty if none."""
    if layers == "each":
        module = array.rpartition(".")[0]
        return f"{module}.{JOINT}" if module else JOINT
    prefix = "" if layers == "all" else layers
    return prefix + JOINT if array.startswith(prefix) else ""


def _bounded(text: Any, most: int) -> str:
    if not isinstance(text, str) or len(text) > most:
        raise ValueError(f"expected a text of at most {most:,} characters")
    return text
