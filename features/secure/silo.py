"""A silo's part in a secure run: what it trains stays here, and leaves only in sums.

After a training the silo keeps the model, and sends a sketch of the update
(``coterie.features.secure.sketches``), by a seed that enrolled silos keep from the coordinator.

Once the group is known, the model leaves, masked as in ``coterie.features.secure.protocol``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from coterie import wire
from coterie.client.work import personal
from coterie.client.work.diverged import divergence
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.stage import Stage, Work
from coterie.client.work.weights import travelling
from coterie.features.secure import lineage
from coterie.features.secure.blur import Blur
from coterie.features.secure.held import Held, forget, held, hold
from coterie.features.secure.memory import Memory, memory_of, rows_of
from coterie.features.secure.protocol import (
    FEWEST,
    LEAST_SKETCH,
    MAX_PEER_TEXT,
    Peer,
    Sum,
    decode_peers,
    decode_sum,
    encode_peers,
    fixed,
    largest_of,
    peer_objection,
    sketch_name,
    sketch_sizes,
    statement_objection,
    training_digest,
)
from coterie.features.secure.secrets import RunSecrets, secrets_of
from coterie.features.secure.sketches import (
    Sketch,
    Sketched,
    Stream,
    digest_of,
    mark_of,
    measure,
    remember,
    stated_norm,
    too_few,
)
from coterie.features.secure.together import Names
from coterie.wire import Model
from coterie.wire.enrolment import fingerprint_of_key
from coterie.wire.statements import Block, Statement, proportional, rounded_up
from coterie.wire.updates import Limit, pieces, shortened


class Secure(Stage):
    """The stage for secure runs; active if a message belongs to one."""

    name = "secure"

    def receive(self, request: Request, model: Model | None) -> Model | None:
        """Return the kept model that the message refers to, or else the one in it."""
        own = own_model(request)
        return model if own is None else own.model

    def before(self, mine: None, work: Work) -> None:
        """Remember the model received, from which the update is measured."""
        request = work.request
        if request.config.get(wire.SECURE) and request.value(wire.CONSENSUS):
            request.refuse_for(  # what is kept for that from round to round is in no digest
                f"corrects no mean in a secure run ({wire.CONSENSUS})."
            )
        if request.config.get(wire.SECURE) or lineage.leaves_state(work):
            work.keep_received()

    def after(self, mine: None, work: Work) -> None:
        """Remember what the state came from that this training leaves at the silo."""
        if lineage.leaves_state(work):
            lineage.remember(work, _trained_as(work)[1])

    def leave(self, mine: None, work: Work) -> None:
        """Keep the model, and send a sketch of the update instead."""
        request = work.request
        if not request.config.get(wire.SECURE):
            return
        leaving = work.leaving[wire.ARRAYS]
        why = divergence(leaving, 0.0)
        if why:  # others would see it in a sum alone
            request.refuse_for(f"sends nothing from this training: {why}", code=wire.DIVERGED)
        work.leaving, figures = keep_back(work, leaving)
        work.metrics |= figures

    def end(self, request: Request) -> None:
        """Forget what was trained, except the model that this message refers to.

        A coordinator that returns from a crash asks for the end again.
        """
        own = wire.OWN_ROUND in request.config
        purpose = str(request.config.get(wire.OWN_PURPOSE, ""))
        meant = (request.integer(wire.OWN_ROUND, minimum=1), purpose) if own else None
        forget(request.session.settings, request.run, but=meant)


def send_key(request: Request) -> RecordDict:
    """Send this silo's public key of the run."""
    own = own_secrets(request)
    config = ConfigRecord({wire.PEERS: encode_peers([own.as_peer()]), wire.SEED_ID: own.seed_id})
    config[wire.BLOCK] = json.dumps(block_over(request))
    return RecordDict({wire.CONFIG: config})


def seal_seed(request: Request) -> RecordDict:
    """Seal the seed of the run's projection for the silos named; make it if there is none."""
    own = own_secrets(request).made_seed(request.run_seed)
    sealed = {
        name: own.seal(peer).hex()
        for name, peer in _read_peers(request).items()
        if name != own.name and not _objection(request, own, peer)
    }
    return RecordDict({wire.CONFIG: ConfigRecord({wire.SEALED: json.dumps(sealed)})})


def keep_back(work: Work, trained: Model) -> tuple[dict[str, Model], dict[str, float]]:
    """Keep a trained model here; return what leaves instead: arrays by record, and metrics."""
    request, received = work.request, personal.without(work.received, work.staying)
    settings, secrets, own = request.session.settings, own_secrets(request), own_model(request)
    came, trained_as = _trained_as(work)
    memory = own_memory(request)
    if own is None:
        place = memory.place_of(received, came)
    else:
        place = own.place
        _go_on(request, memory)
    sketches = _sketches(request, received)
    norm = stated_norm(measure(received, trained, sketches), secrets.lasting("noise of a norm"))
    length = rounded_up(norm)
    before = 0.0 if own is None else own.stated.reach
    reach = rounded_up(length + before)
    try:
        block = memory.block_of(request.run, place, reach)
    except ValueError:  # the silo says so when it is asked for a sum
        block = ()
    made = secrets.mark_of(trained)
    samples = len(request.session.data.train)
    stated = Statement(trained_as, made, samples, length, reach, block)
    stated = secrets.signed(stated, request.round_number(), request.purpose)
    largest = largest_of(received) if own is None else own.largest
    hold(
        settings,
        Held(trained, received, came, place, largest, stated, secrets.public.hex()),
        run=request.run,
        number=request.round_number(),
        purpose=request.purpose,
        # Of what is alone in this round, the next may go on from here, whatever happens till then.
        # A silo with a loop of its own answers a repeated request without training again.
        on_disk=request.value(wire.GROUP_SIZE) == 1 or request.session.loop.train is not None,
    )
    text = np.frombuffer(stated.encode().encode(), np.uint8)
    leaving = _noisy(request, sketches) if sketches else {}
    return {wire.SKETCH: {**leaving, wire.STATEMENT: text}}, {wire.UPDATE_NORM: norm}


def _go_on(request: Request, memory: Memory) -> None:
    number = request.integer(wire.OWN_ROUND, minimum=1)
    purpose = request.config.get(wire.OWN_PURPOSE)
    try:
        memory.go_on(request.run, number, str(purpose or ""), _longest(request))
    except ValueError as error:
        request.refuse_for(f"{error}.")


def _longest(request: Request) -> tuple[float, float]:
    """Return the limit to which the own model is to be shortened, with its samples; 0: none."""
    norm = request.real(wire.OWN_LONGEST, default=0.0, below=math.inf)
    return norm, request.real(wire.OWN_LONGEST_OF, default=0.0, below=math.inf)


def _trained_as(work: Work) -> tuple[str, str]:
    """Return the hash of the last model from the coordinator, and the digest of the training."""
    request, own = work.request, own_model(work.request)
    if own is None:
        came = start = wire.model_hash(personal.without(work.received, work.staying))
    else:
        came, start = own.received, own.trained_as
        if (factor := _shortening(request, own)) < 1:
            start = f"{start} {factor!r}"
    records = wire.array_records(request.message.content)
    extras = {
        name: wire.model_hash(wire.decode_arrays(record))
        for name, record in records.items()
        if name != wire.ARRAYS
    }
    kind, behind = request.message.metadata.message_type, lineage.behind(work)
    return came, training_digest(kind, start, request.config, extras, behind=behind)


def sum_masked(request: Request) -> RecordDict:
    """Send a model that was kept back, masked, for one sum."""
    try:
        asked = decode_sum(request.config.get(wire.SUM))
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
    secrets = own_secrets(request)
    peers = checked_peers(request, secrets)
    if asked.run != secrets.run or secrets.name not in asked.members:
        request.refuse_for("was asked for a sum that does not include it.")
    if set(asked.members) != set(peers):
        request.refuse_for("did not receive the keys of exactly the silos in the sum.")
    settings = request.session.settings
    kept = held_back(request, asked.round, asked.purpose)
    if kept.key != secrets.public.hex():
        request.refuse_for("has a different key than in that training.")
    _check_statements(request, asked, kept, peers)
    if why := asked.objection(kept.largest, kept.model):
        request.refuse_for(f"takes part in no such sum: it {why}")
    block = asked.block_of(secrets.name)
    _check_block(request, asked, kept, block)
    largest = [most + kept.stated.reach for most in kept.largest]
    try:
        own_memory(request).bind(request.run, kept.place, block)  # before anything leaves
        noise = secrets.noise_for(kept.model)
        blur = Blur(kept.model, kept.start, asked.shortening(block), largest, noise)
        bounds = asked.bounds(kept.largest, kept.model)
        masked = fixed(kept.model, asked.share(secrets.name), bounds, blur)
    except (ValueError, OSError) as error:
        # Without the silo's paths, which an OSError shows.
        why = error.strerror or "" if isinstance(error, OSError) else str(error)
        raise RefusedError(
            f"silo {settings.name!r} does not take part in the sum: {why}."
        ) from None
    what = asked.digest(peers)
    masks = [
        (np.add if secrets.name < name else np.subtract, Stream(secrets.shared_with(peer, what)))
        for name, peer in peers.items()
        if name != secrets.name
    ]
    for piece in pieces(masked):
        for put, stream in masks:
            put(piece, stream.take(piece.size), out=piece)
    return RecordDict({wire.MASKED: wire.encode_arrays({wire.MASKED: masked}, packed=True)})


def own_model(request: Request) -> Held | None:
    """Return the kept model that a message refers to, shortened if it says so; None if none."""
    if wire.OWN_ROUND not in request.config:
        return None
    number = request.integer(wire.OWN_ROUND, minimum=1)
    found = held_back(request, number, str(request.config.get(wire.OWN_PURPOSE, "")))
    factor = _shortening(request, found)
    return (
        found if factor == 1 else replace(found, model=shortened(found.model, found.start, factor))
    )


def _shortening(request: Request, own: Held) -> float:
    """Return the factor on the last update of an own model from which a training begins.

    It decides the training, and is part of its digest: in the difference of two sums in which one
    silo alone is shortened differently, only that silo's update would be left. It follows from the
    length that the silo has stated, so the digest tells nothing about the length itself.
    """
    norm, samples = _longest(request)
    if not (norm and samples and own.stated.length):
        return 1.0
    return min(1.0, Limit(norm, samples).of(own.stated.samples) / own.stated.length)


def held_back(request: Request, number: int, purpose: str) -> Held:
    """Return what this silo has trained in a round of this run and kept back."""
    found = held(request.session.settings, run=request.run, number=number, purpose=purpose)
    if found is None:
        raise RefusedError(
            f"silo {request.session.settings.name!r} no longer has its training of round "
            f"{number}: it was restarted without a folder since, or its folder was changed."
        )
    # Files have arrays in another order.
    names = [name for name in travelling(request.session.model) if name in found.model]
    model, start = ({n: of[n] for n in names} for of in (found.model, found.start))
    return replace(found, model=model, start=start)


def own_secrets(request: Request) -> RunSecrets:
    """Return the silo's secrets in the request's run."""
    if not request.config.get(wire.RUN):
        raise RefusedError("a secure run must have a name.")
    return secrets_of(request.session.settings, request.run)


def own_memory(request: Request) -> Memory:
    """Return what the silo remembers of its sums; without it, the silo is in none."""
    try:
        return memory_of(request.session.settings, request.game)
    except ValueError as error:
        raise RefusedError(
            f"silo {request.session.settings.name!r} takes part in no secure run: {error}. Restore "
            "its folder secure/ from a backup."
        ) from None


def rows_in(request: Request) -> list[str]:
    """Return marks of the rows of the request's task."""
    session = request.session
    return rows_of(session.task.name, session.settings.options)


def block_over(request: Request) -> Names:
    """Return the block for exact sums over the rows of the request's task; empty if free."""
    try:
        return own_memory(request).block_over(rows_in(request))
    except ValueError as error:
        request.refuse_for(f"{error}.")
        raise


def _read_peers(request: Request) -> dict[str, Peer]:
    try:
        return decode_peers(request.config.get(wire.PEERS))
    except wire.WireError as error:
        raise RefusedError(str(error)) from None


def _objection(request: Request, own: RunSecrets, peer: Peer) -> str:
    """Return why this silo does nothing together with another; empty if it does."""
    if peer.name == own.name:
        return "" if peer.public == own.public else "received a different key under its own name."
    why = peer_objection(peer, own.run, ca=own.ca)
    if why:
        return f"takes part in no sum with it: {why}"
    known = fingerprint_of_key(peer.identity) if peer.identity else ""
    return request.session.settings.policy.peer_objection(peer.name, known)


def checked_peers(request: Request, own: RunSecrets) -> dict[str, Peer]:
    """Return the silos of a message, by name, once each may be in sums with this one."""
    peers = _read_peers(request)
    for peer in peers.values():
        request.refuse_for(_objection(request, own, peer))
    return peers


def _check_statements(request: Request, asked: Sum, kept: Held, peers: dict[str, Peer]) -> None:
    """Refuse a sum unless all members state, signed, that they trained as this silo did."""
    own = asked.statements[request.session.settings.name]
    if replace(own, signature=kept.stated.signature) != kept.stated:  # two signatures never agree
        request.refuse_for(
            "was asked for a sum of another training than the one that it has: it has trained for "
            "that round again since, or its statement was changed."
        )
    for name, stated in asked.statements.items():
        request.refuse_for(statement_objection(asked, peers[name]))
        if stated.trained_as != kept.trained_as:
            request.refuse_for(
                f"takes part in no sum with silo {name!r}, which received a different model or "
                "different training settings, or trained differently before."
            )


def _check_block(request: Request, asked: Sum, kept: Held, block: Block) -> None:
    """Refuse a sum in which this silo is with others than before, or with too few."""
    least = max(FEWEST, request.session.settings.policy.min_group_size)
    if len(block) < least:
        request.refuse_for(
            f"takes part in sums in blocks of at least {least} silos; in this one its block has "
            f"{len(block)}, whose part could be computed from further sums."
        )
    try:
        bound = own_memory(request).block_of(request.run, kept.place, kept.stated.reach)
    except ValueError as error:
        request.refuse_for(f"{error}.")
    if not (bound or asked.counts_by_samples(block)):
        request.refuse_for(
            "takes part in sums in which all silos count by their samples, up to one largest "
            f"count. This sum has {', '.join(f'{name} ({count:g})' for name, count in block)}."
        )
    for before in (bound, *(asked.statements[name].block for name, _ in block)):
        if before and not proportional(before, block):
            request.refuse_for(
                "takes part in sums only together with all of "
                f"{', '.join(f'{name} ({count:g} samples)' for name, count in before)}, as before. "
                "The difference of two sums could otherwise be the part of one silo. This sum has "
                f"{', '.join(f'{name} ({count:g})' for name, count in block)}."
            )


# ---------------------------------------------------------------- sketches


def _sketches(request: Request, received: Model) -> dict[str, Sketch]:
    wanted = str(request.config.get(wire.SKETCH_OF, ""))
    if not wanted:
        return {}
    if wanted not in ("parameters", "parameters+buffers"):
        raise RefusedError(f"{wire.SKETCH_OF} cannot be {wanted[:40]!r}.")
    names = set(received)
    if wanted == "parameters":
        names &= {name for name, _ in request.session.model.named_parameters()}
    layers = str(request.config.get(wire.SKETCH_LAYERS, "all"))
    sizes = sketch_sizes(received, layers)
    if not sizes:
        count = sum(array.size for array in received.values())
        request.refuse_for(
            f"sends no sketch of a model with {count:,} parameters: a sketch of fewer than "
            f"{LEAST_SKETCH} numbers is too inaccurate, and a larger one would reveal the "
            "update."
        )
    secrets, projection = _seeded(request), _projection(request)
    return {
        called: Sketch(
            secrets.projection(f"{projection} {called}"),
            size,
            {n for n in names if sketch_name(n, layers) == called},
        )
        for called, size in sizes.items()
    }


def _projection(request: Request) -> str:
    """Return the name of the projection: round and purpose of the training that it is for."""
    own = f"{request.round_number()} {request.purpose}"
    return str(request.config.get(wire.SKETCH_AS, own))


def _noisy(request: Request, sketches: Mapping[str, Sketch]) -> Model:
    """Return the sketches as they leave, once they are noted."""
    request.refuse_for(too_few(sketches))
    secrets = own_secrets(request)
    of, layers = (str(request.config.get(k, "")) for k in (wire.SKETCH_OF, wire.SKETCH_LAYERS))
    new = Sketched(
        *(digest_of(request.run), secrets.seed_id),
        *(digest_of(_projection(request)), digest_of(f"{of} {layers}")),
        mark_of(secrets.lasting("mark of a sketch"), sketches),
    )
    if request.game is None or request.session.settings.home:
        request.refuse_for(remember(request.session.settings, new))
    noise = secrets.lasting("noise of a sketch")
    return {name: sketch.noisy(noise) for name, sketch in sketches.items()}


def _seeded(request: Request) -> RunSecrets:
    """Return the silo's secrets with the run's seed: the one sealed for this silo, or its own."""
    secrets = own_secrets(request)
    peers = checked_peers(request, secrets)
    holder = next((peer for name, peer in peers.items() if name != secrets.name), None)
    sealed = str(request.config.get(wire.SEALED, ""))[:MAX_PEER_TEXT]
    if holder is None or not sealed:
        return secrets.made_seed(request.run_seed)
    try:
        return secrets.unseal(holder, bytes.fromhex(sealed))
    except ValueError as error:
        raise RefusedError(f"silo {secrets.name!r}: {error}.") from None
