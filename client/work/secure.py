"""A silo's part in a secure run: what it trains stays here, and leaves in sums alone.

After a training the silo keeps the model, and sends a sketch of the update: every parameter goes,
with a random sign, into one of k sums (Charikar, Chen, Farach-Colton: "Finding Frequent Items in
Data Streams", ICALP 2002, https://doi.org/10.1007/3-540-45465-9_59). Inner products of two
sketches are those of the updates, with a standard error of at most √(2/k) of the two lengths
(Weinberger et al., ICML 2009, https://arxiv.org/abs/0902.2206, Lemma 2). The signs and places
come from a seed that enrolled silos keep from the coordinator.

When the coordinator says who is in a group, the model leaves once, masked, as in
``coterie.wire.secure``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.home.held import Held, hold
from coterie.client.home.secrets import Part, RunSecrets, secrets_of
from coterie.client.work.request import RefusedError, Request
from coterie.wire import Model
from coterie.wire.enrolment import fingerprint_of_key
from coterie.wire.secure import (
    FEWEST,
    LEAST_SKETCH,
    MAX_PEER_TEXT,
    PIECE,
    Peer,
    Sum,
    decode_peers,
    decode_sum,
    encode_peers,
    fixed,
    peer_objection,
    pieces,
    sketch_name,
    sketch_sizes,
    training_digest,
)

MOST_SKETCHED = 2
"""Kinds of sketches in one run: of every module, and then of the one that HCCT-E has chosen."""


def tell_key(request: Request) -> RecordDict:
    """Tell this silo's public key of the run."""
    own = _secrets(request)
    told = ConfigRecord({wire.PEERS: encode_peers([own.as_peer()]), wire.SEED_ID: own.seed_id})
    return RecordDict({wire.CONFIG: told})


def seal_seed(request: Request) -> RecordDict:
    """Seal the seed of the run's projection for the silos named; make it where there is none."""
    own = _secrets(request).made_seed(request.run_seed)
    sealed = {
        name: own.seal(peer).hex()
        for name, peer in _read_peers(request).items()
        if name != own.name and not _objection(request, own, peer)
    }
    return RecordDict({wire.CONFIG: ConfigRecord({wire.SEALED: json.dumps(sealed)})})


def keep_back(
    request: Request, received: Model, trained: Model
) -> tuple[dict[str, Model], dict[str, float]]:
    """Keep a trained model here; return what leaves of it: arrays by record, and metrics."""
    settings = request.bench.settings
    own, secrets = request.own_model(), _secrets(request)
    came = wire.model_hash(received) if own is None else own.received
    start = came if own is None else own.trained_as
    records = request.message.content.array_records
    extras = {
        name: wire.model_hash(wire.decode_arrays(record))
        for name, record in records.items()
        if name != wire.ARRAYS
    }
    kind = request.message.metadata.message_type
    trained_as = training_digest(kind, start, {**request.config, **extras})
    hold(
        settings,
        Held(trained, came, trained_as, secrets.public.hex()),
        run=request.run,
        number=request.round_number(),
        purpose=request.purpose,
        # Of what is alone in this round, the next may go on from here, whatever happens till then.
        on_disk=request.integer(wire.GROUP_SIZE, minimum=1, default=1) == 1,
    )
    moved = _moved(received, trained)
    sketches = _sketches(request, received, moved)
    digest = np.frombuffer(bytes.fromhex(trained_as), np.uint8)
    leaving: Model = {**sketches, wire.TRAINED_AS: digest}
    return {wire.SKETCH: leaving}, {wire.UPDATE_NORM: _norm(moved)}


def sum_masked(request: Request) -> RecordDict:
    """Send a model that was kept back, masked, for one sum."""
    try:
        asked = decode_sum(request.config.get(wire.SUM))
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
    secrets = _secrets(request)
    peers = _peers(request, secrets)
    _check_sum(request, asked, secrets, peers)
    settings = request.bench.settings
    kept = request.held_back(asked.round, asked.purpose)
    model = kept.model
    if kept.key != secrets.public.hex():
        request.refuse_for("has another key than when it trained that.")
    if asked.trained_as != kept.trained_as:
        request.refuse_for(
            "takes part in no sum with silos that were sent another model than it, or told to "
            "train in another way."
        )
    if len(asked.bounds) != len(model):
        request.refuse_for(f"needs {len(model)} bounds for a sum, one for every array.")
    made, members = wire.model_hash(model), frozenset(asked.members)
    part = Part(asked.round, asked.purpose, made, members, asked.least)
    for before in secrets.sums:
        request.refuse_for(_objection_beside(part, before))
    if part not in secrets.sums and not _is_played(request):  # before anything leaves
        secrets.with_sum(part)
    try:
        share = asked.share(len(request.bench.data.train))
        masked = fixed(model, share, asked.bounds)
    except ValueError as error:
        raise RefusedError(f"silo {settings.name!r} takes no part in the sum: {error}.") from None
    what = asked.digest(peers)
    for name in asked.members:
        if name != secrets.name:
            key, adds = secrets.shared_with(peers[name], what), secrets.name < name
            for piece, mask in zip(pieces(masked), _stream(key, masked.size), strict=True):
                (np.add if adds else np.subtract)(piece, mask, out=piece)
    return RecordDict({wire.MASKED: wire.encode_arrays({wire.MASKED: masked}, packed=True)})


def _secrets(request: Request) -> RunSecrets:
    if not request.config.get(wire.RUN):
        raise RefusedError("a secure run has a name.")
    return secrets_of(request.bench.settings, request.run)


def _is_played(request: Request) -> bool:
    """Whether all is in one process and nothing is kept: there any run may have any name again."""
    return not request.bench.settings.home and request.message.metadata.run_id == 0


def _read_peers(request: Request) -> dict[str, Peer]:
    try:
        return decode_peers(request.config.get(wire.PEERS))
    except wire.WireError as error:
        raise RefusedError(str(error)) from None


def _objection(request: Request, own: RunSecrets, peer: Peer) -> str:
    """Why this silo does nothing together with another; empty if it does."""
    if peer.name == own.name:
        return "" if peer.public == own.public else "was shown another key as its own."
    why = peer_objection(peer, own.run, ca=own.ca)
    if why:
        return f"takes part in no sum with it: {why}"
    known = fingerprint_of_key(peer.identity) if peer.identity else ""
    return request.bench.settings.policy.peer_objection(peer.name, known)


def _peers(request: Request, own: RunSecrets) -> dict[str, Peer]:
    """The silos that the message names, each with a key that may be used."""
    peers = _read_peers(request)
    for peer in peers.values():
        request.refuse_for(_objection(request, own, peer))
    return peers


def _check_sum(request: Request, asked: Sum, secrets: RunSecrets, peers: dict[str, Peer]) -> None:
    """Refuse a sum that is none, or of too few."""
    least = max(FEWEST, request.bench.settings.policy.min_group_size)
    if asked.run != secrets.run or secrets.name not in asked.members:
        request.refuse_for("is asked for a sum that it is no part of.")
    if not 0 < asked.share(len(request.bench.data.train)) <= 1:
        request.refuse_for("is asked to count for more than the whole of a sum.")
    if set(asked.members) != set(peers):
        request.refuse_for("was not told the keys of exactly the silos of the sum.")
    if asked.least < least or len(asked.members) < asked.least:
        request.refuse_for(
            f"takes part in sums of at least {least} silos; this one is of {len(asked.members)}, "
            f"and would be of as few as {asked.least}."
        )


def _objection_beside(new: Part, before: Part) -> str:
    """Why a sum is refused after another: too few silos' part would follow from both; or empty.

    The same training has one outcome: with two, the difference of both sums' masked numbers would
    be that of the outcomes. Of the same outcome any two sums have more than half of the larger one
    in common, so that any two others share a silo that sees them both.
    """
    same_training = (new.round, new.purpose) == (before.round, before.purpose)
    if same_training and new.made != before.made:
        return (
            f"took part in a sum of what it trained in round {new.round}, and has trained for that "
            "round anew since. One outcome of a round is summed, not two."
        )
    if new.made != before.made or new == before:
        return ""
    small, large = sorted((new.members, before.members), key=len)
    apart = max(new.least, before.least)
    nested = small < large and 2 * len(small) > len(large) and len(large - small) >= apart
    if nested or small == large:
        return ""
    return (
        f"took part in a sum of {len(before.members)} silos with that already. Together with this "
        f"one, of {len(new.members)}, the part of fewer than {apart} silos could be told from the "
        "two."
    )


# ---------------------------------------------------------------- sketches


def _moved(received: Model, trained: Model) -> dict[str, NDArray[np.floating[Any]]]:
    """What training changed, of floating-point arrays."""
    return {
        name: np.subtract(array, received[name])
        for name, array in trained.items()
        if np.issubdtype(array.dtype, np.floating)
    }


def _norm(moved: Mapping[str, NDArray[np.floating[Any]]]) -> float:
    """Euclidean, in float64."""
    wide = (piece.astype(np.float64) for one in moved.values() for piece in pieces(one.reshape(-1)))
    return math.sqrt(math.fsum(float(piece @ piece) for piece in wide))


def _sketches(
    request: Request, received: Model, moved: Mapping[str, NDArray[np.floating[Any]]]
) -> Model:
    wanted = str(request.config.get(wire.SKETCH_OF, ""))
    if not wanted:
        return {}
    if wanted not in ("parameters", "parameters+buffers"):
        raise RefusedError(f"{wire.SKETCH_OF} cannot be {wanted[:40]!r}.")
    if wanted == "parameters":
        parameters = {name for name, _ in request.bench.model.named_parameters()}
        moved = {name: array for name, array in moved.items() if name in parameters}
    layers = str(request.config.get(wire.SKETCH_LAYERS, "all"))
    sizes = sketch_sizes(received, layers)
    if not sizes:
        count = sum(array.size for array in received.values())
        request.refuse_for(
            f"lets no sketch leave of a model with {count:,} parameters: a sketch of fewer than "
            f"{LEAST_SKETCH} numbers says too little, and one of more would be the update itself."
        )
    seed = _seed(request)
    secrets = _secrets(request)
    if (wanted, layers) not in secrets.sketched:  # each tells something else of an update
        if len(secrets.sketched) >= MOST_SKETCHED:
            request.refuse_for(
                f"lets {MOST_SKETCHED} kinds of sketches leave in a run, not a further one."
            )
        if not _is_played(request):
            secrets.with_sketched((wanted, layers))
    made: Model = {}
    for called, size in sizes.items():
        part = {n: a for n, a in moved.items() if sketch_name(n, layers) == called}
        made[called] = sketched(part, seed + called.encode(), size)
    return made


def _seed(request: Request) -> bytes:
    """The run's, as it was sealed for this silo."""
    secrets = _secrets(request)
    peers = _peers(request, secrets)
    holder = next((peer for name, peer in peers.items() if name != secrets.name), None)
    sealed = str(request.config.get(wire.SEALED, ""))[:MAX_PEER_TEXT]
    if holder is None or not sealed:
        return secrets.made_seed(request.run_seed).seed
    try:
        return secrets.unseal(holder, bytes.fromhex(sealed)).seed
    except ValueError as error:
        raise RefusedError(f"silo {secrets.name!r}: {error}.") from None


def sketched(
    moved: Mapping[str, NDArray[np.floating[Any]]], key: bytes, size: int
) -> NDArray[np.float32]:
    """The sums of a sketch.

    Args:
        moved: arrays of one update, in the model's order; none give zeros.
        key: of the projection; any bytes.
        size: k, ≥ 1.

    Returns:
        (k,) numbers.
    """
    arrays = [array.reshape(-1) for array in moved.values()]
    flat = arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, np.float32), *arrays])
    sums = np.zeros(size)
    digest = hashlib.sha256(key).digest()
    for piece, drawn in zip(pieces(flat), _stream(digest, flat.size), strict=True):
        signed = np.where(drawn >> 31, -piece, piece)
        places = drawn % np.uint32(size)
        sums += np.bincount(places, weights=signed, minlength=size)
    return sums.astype(np.float32)


def _stream(key: bytes, count: int) -> Iterator[NDArray[np.uint32]]:
    """So many numbers that nobody can tell from random ones, in ``pieces``: AES-256 in counter
    mode."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    nothing = bytes(4 * min(PIECE, count))
    for start in range(0, count, PIECE):
        size = 4 * min(PIECE, count - start)
        yield np.frombuffer(encryptor.update(nothing[:size]), np.uint32)
