"""A silo's exact sums over its rows in a secure run: they leave masked.

The masks depend on the whole question, on the silos of the sum and on their keys, so that they
cancel only if all of these silos were asked the same; and a mask never hides two answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.stage import Stage
from coterie.features.secure.protocol import FEWEST, Peer, training_digest
from coterie.features.secure.secrets import RunSecrets
from coterie.features.secure.silo import block_over, checked_peers, own_memory, own_secrets, rows_in
from coterie.features.secure.sketches import Stream
from coterie.features.secure.together import Member, Names, block_of, decode_together
from coterie.wire.fixed import Fixed, Words, add, as_sent, subtract
from coterie.wire.updates import PIECE


class Masking(Stage):
    """The stage for exact sums in secure runs."""

    name = "secure"

    def answer(self, request: Request, work: Callable[[Request], RecordDict]) -> RecordDict:
        """Mask the numbers of an answer that is to be summed."""
        how = wire.kind_of(request.message.metadata.message_type).summed
        if how is None or not request.config.get(wire.SECURE):
            return work(request)
        secrets = own_secrets(request)
        peers = checked_peers(request, secrets)
        block, memory = _block(request, peers), own_memory(request)
        try:  # also if the answer is a refusal: the block's other silos may have answered
            memory.bind_over(rows_in(request), block)
        except OSError as error:
            raise RefusedError(
                f"silo {secrets.name!r} does not take part in the sum: {error.strerror}."
            ) from None
        content = work(request)
        words = _encoded(request, content, how)
        mask = _digest(request, peers)
        mark = secrets.mark_of({wire.MASKED: words})
        if memory.masked_in(request.run).setdefault(mask, mark) != mark:
            request.refuse_for(
                "was asked the same again, and its answer is another one now: under the same mask "
                "the difference would show. Start a new run."
            )
        _mask(words, secrets, peers, mask)
        said = dict(content.config_records.get(wire.CONFIG, {}))
        sent = {name: one for name, one in content.items() if name not in content.array_records}
        sent[wire.CONFIG] = ConfigRecord({**said, wire.MASKED_AS: f"{mask} {mark}"})
        sent[wire.MASKED] = wire.encode_arrays({wire.MASKED: as_sent(words)}, packed=True)
        return RecordDict(sent)


def _block(request: Request, peers: dict[str, Peer]) -> Names:
    """Return this silo's block in the sum; refuse a sum that would show few silos."""
    try:
        asked = decode_together(request.config.get(wire.SUM))
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
    session = request.session
    policy, name = session.settings.policy, session.settings.name
    members, block = asked.members, block_of(asked.blocks, session.settings.name)
    if name not in members:
        request.refuse_for("was asked for a sum that does not include it.")
    if set(members) != set(peers) or request.integer(wire.GROUP_SIZE, minimum=1) != len(members):
        request.refuse_for("did not receive the keys of exactly the silos in the sum.")
    own = Member(max(FEWEST, policy.min_group_size), len(session.data.train))
    if members[name] != own:
        request.refuse_for(
            f"was asked for a sum in which it is {members[name]}; it is {own}, as it has stated."
        )
    if why := asked.objection():
        request.refuse_for(f"takes part in no such sum: it {why}.")
    bound = block_over(request)
    if bound and bound != block:
        request.refuse_for(
            f"takes part in sums over these rows only together with all of {', '.join(bound)}, as "
            "before: the difference of two sums could otherwise be one silo's. In this one its "
            f"block is {', '.join(block)}."
        )
    return block


def _encoded(request: Request, content: RecordDict, how: Fixed) -> Words:
    """Return all numbers of an answer, in the order of their arrays' names."""
    parts = [np.empty((how.words, 0), np.uint64)]
    for _, record in sorted(content.array_records.items()):
        for name, array in sorted(wire.decode_arrays(record).items()):
            try:
                parts += [how.encode(piece) for piece in _pieces(array.reshape(-1), PIECE)]
            except ValueError as error:
                request.refuse_for(f"takes part in no such sum: its array {name!r} {error}.")
    return np.concatenate(parts, axis=1)


def _digest(request: Request, peers: dict[str, Peer]) -> str:
    """Return a digest of all that silos of a sum must be sent alike: 64 hexadecimal digits."""
    kind = request.message.metadata.message_type
    asked = {
        name: wire.model_hash(wire.decode_arrays(record))
        for name, record in wire.array_records(request.message.content).items()
    }
    known = hashlib.sha256(training_digest(kind, "", request.config, asked).encode())
    for _, peer in sorted(peers.items()):
        known.update(peer.public)
    return known.hexdigest()


def _mask(words: Words, secrets: RunSecrets, peers: dict[str, Peer], what: str) -> None:
    """Add a mask for every other silo that comes after this one, and subtract the others'."""
    for name, peer in sorted(peers.items()):
        if name == secrets.name:
            continue
        stream = Stream(secrets.shared_with(peer, b"coterie sum over rows " + what.encode()))
        for piece in _pieces(words, PIECE // (2 * len(words))):
            drawn = stream.take(2 * piece.size).view(np.uint64).reshape(piece.shape)
            (add if secrets.name < name else subtract)(piece, drawn)


def _pieces(numbers: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Return views of numbers (…, n), each of at most this size in the last axis."""
    return [numbers[..., at : at + size] for at in range(0, numbers.shape[-1], size)]
