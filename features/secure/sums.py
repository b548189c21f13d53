"""Secure runs: the coordinator sees sketches of updates, and sums over groups, but no update.

An algorithm gets a ``Masked`` from a silo, and makes a ``MaskedMean`` of several. When its next
state is known, ``SecureRun.settle`` asks the silos for as few sums as all the means in that state
can be made of, and puts models in their places.

A silo that is lost between its training and the sum costs one more exchange: the sum is asked for
again without its block (``coterie.features.secure.blocks``). If no block is left, the group keeps
its model.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.features.secure.atoms import Atom, Term, atoms_of, mean_of
from coterie.features.secure.blocks import Planned, planned
from coterie.features.secure.protocol import (
    FEWEST,
    MAX_PEER_TEXT,
    SLACK,
    Peer,
    Sum,
    decode_peers,
    encode_peers,
    from_fixed,
    largest_of,
    peer_objection,
)
from coterie.features.secure.together import Names, decode_block
from coterie.strategies.errors import refused
from coterie.strategies.rounds.algorithm import Algorithm, Compared, Order, Round
from coterie.strategies.rounds.handles import Arrays, Masked, MaskedMean, Model
from coterie.strategies.rounds.reports import PhaseReport
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Settled
from coterie.wire import MAX_WORD
from coterie.wire.updates import distance, pieces

log = logging.getLogger("coterie.run")

KEYS_DEADLINE_S = 60.0
"""Seconds for silos to send their keys, and to seal a seed: neither needs data."""
SUM_DEADLINE_S = 300.0
"""Seconds for a silo to mask and send a model that it has."""
MOST_HOLDERS = 3
"""Most silos that are asked for the seed in turn, until one answers."""
PHASE = "sum"
"""The exchange's name in the record."""


@dataclass(frozen=True)
class Voucher:
    """An enrolled silo's public key, PEM, and the CA's signature for it."""

    identity: bytes
    signature: bytes


@dataclass(frozen=True)
class Enrolled:
    """The coordinator's CA certificate (PEM), and its vouchers for silos that are enrolled now."""

    ca: bytes
    vouchers: Callable[[], Mapping[str, Voucher]]


@dataclass
class SecureRun:
    """The keys of one run, and the sums that it asks for.

    Attributes:
        exchange: sends messages, and returns their replies by a deadline in seconds.
        config: entries that all messages have.
        enrolled: None in a federation without enrolment.
    """

    exchange: Callable[[Sequence[Message], float], list[Message | None]]
    config: Mapping[str, Any]
    deadline_s: float
    enrolled: Enrolled | None = None
    silent: set[str] = field(default_factory=set)
    """Filled with the silos that do not answer."""
    _peers: dict[str, tuple[int, Peer]] = field(default_factory=dict)
    _sealed: dict[str, tuple[bytes, Peer, str]] = field(default_factory=dict)
    """Silo → its public key, the holder of the seed, and the seed sealed by that one; the holder's
    own entry has no text."""
    _seed_ids: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, Names] = field(default_factory=dict)
    """Silo → its block for exact sums over its rows, as it states it; empty if it is free."""
    _complaints: dict[str, set[str]] = field(default_factory=dict)
    """Silo that sealed the seed → silos that failed with that seed."""

    @property
    def name(self) -> str:
        """The run's name, as silos know it."""
        return str(self.config.get(wire.RUN, "run"))

    # ------------------------------------------------------------ keys

    def require_own(self, silos: Sequence[Silo]) -> None:
        """Check that all silos can take part in a secure run.

        Raises:
            FederationError: names one that cannot.
        """
        if foreign := [silo.name for silo in silos if not silo.described]:
            raise refused(
                "a secure run needs coterie's own silos (`coterie silo`), which keep their "
                f"updates and send masked sums; {foreign[0]} runs a different ClientApp. Leave "
                "secure out."
            )

    def greet(self, silos: Sequence[Silo], *, seed: bool) -> dict[str, str]:
        """Get silos' keys, and give them the seed if asked for; return silo → why that failed."""
        failed = self._learn_keys([s for s in silos if self._node_of(s.name) != s.node_id])
        if seed:
            here = [silo for silo in silos if silo.name not in failed]
            failed |= self._share_seed(here)
        return failed

    def keys_of(self, names: Sequence[str]) -> list[Peer]:
        """Return what silos know of each other, without those whose keys are not known now."""
        return [self._peers[name][1] for name in names if name in self._peers]

    def _node_of(self, name: str) -> int | None:
        return self._peers[name][0] if name in self._peers else None

    def forget(self, name: str) -> None:
        """Forget the key of a silo that failed: it may have changed, or its seed be wrong."""
        self._peers.pop(name, None)
        sealed = self._sealed.pop(name, None)
        if sealed is not None and sealed[2]:
            self._complaints.setdefault(sealed[1].name, set()).add(name)

    def _learn_keys(self, silos: Sequence[Silo]) -> dict[str, str]:
        vouchers = {} if self.enrolled is None else self.enrolled.vouchers()
        ca = b"" if self.enrolled is None else self.enrolled.ca
        failed = {}
        asked = [self._message(silo, wire.SECURE_KEY, {}) for silo in silos]
        for silo, reply in zip(silos, self.exchange(asked, KEYS_DEADLINE_S), strict=True):
            if reply is None:
                self.silent.add(silo.name)
            try:
                (peer,) = decode_peers(_entry(reply, wire.PEERS)).values()
                self._seed_ids[silo.name] = _entry(reply, wire.SEED_ID)[:MAX_WORD]
                self.blocks[silo.name] = decode_block(_entry(reply, wire.BLOCK))
                if silo.name in vouchers:
                    own = vouchers[silo.name]
                    peer = replace(peer, identity=own.identity, voucher=own.signature)
                why = peer_objection(peer, self.name, ca=ca)
                if peer.name != silo.name or why:
                    raise ValueError(why or f"it states the key of {peer.name!r}")
            except ValueError as error:  # a WireError is one
                failed[silo.name] = f"its key of the secure run cannot be used: {error}"
                self._peers.pop(silo.name, None)
            else:
                self._peers[silo.name] = (silo.node_id, peer)
        return failed

    def _share_seed(self, silos: Sequence[Silo]) -> dict[str, str]:
        """Give every silo the projection's seed, sealed by one that has it; return failures."""
        peers = {silo.name: self._peers[silo.name][1] for silo in silos}
        have = {n for n, p in peers.items() if n in self._sealed and self._sealed[n][0] == p.public}
        lacking = sorted(peers.keys() - have)
        if not lacking:
            return {}
        by_name = {silo.name: silo for silo in silos}
        # Who was sealed a seed has it; else who says that it has the one that most have; else
        # somebody makes one.
        usual = Counter(own for name in peers if (own := self._seed_ids.get(name))).most_common(1)
        known = [n for n in sorted(peers) if usual and self._seed_ids.get(n) == usual[0][0]]
        for name in lacking:
            self._sealed.pop(name, None)
        # One whose seed somebody could not use is asked after the others.
        in_turn = dict.fromkeys([*sorted(have), *known, *lacking])
        holders = sorted(in_turn, key=lambda name: len(self._complaints.get(name, ())))
        for holder in holders[:MOST_HOLDERS]:
            others = [name for name in lacking if name != holder]
            text = encode_peers([peers[holder], *(peers[name] for name in others)])
            message = self._message(by_name[holder], wire.SECURE_SEED, {wire.PEERS: text})
            (reply,) = self.exchange([message], KEYS_DEADLINE_S)
            try:
                sealed = dict(json.loads(_entry(reply, wire.SEALED)))
            except Exception as error:  # text from elsewhere: of any kind
                log.warning("silo %s could not seal the run's seed: %s", holder, error)
                continue
            for name in {holder, *(sealed.keys() & set(others))} & set(lacking):
                text = "" if name == holder else str(sealed[name])[:MAX_PEER_TEXT]
                self._sealed[name] = (peers[name].public, peers[holder], text)
            lacking = [name for name in lacking if name not in self._sealed]
            if not lacking:
                break
        return dict.fromkeys(lacking, "no silo could send it the seed of the run's projection.")

    def entries(self, order: Order, compared: Compared | None) -> dict[str, Any]:
        """Return the entries that a training message has only in a secure run."""
        config: dict[str, Any] = {} if order.evaluates else {wire.SECURE: True}
        if order.evaluates or compared is None:
            return config
        config |= {wire.SKETCH_OF: compared.of, wire.SKETCH_LAYERS: compared.layers}
        if order.beside is not None:
            config[wire.SKETCH_AS] = " ".join(map(str, order.beside))
        name = order.silo.name
        _, holder, sealed = self._sealed[name]
        peers = [self._peers[name][1]] + ([holder] if holder.name != name else [])
        return config | {wire.PEERS: encode_peers(peers), wire.SEALED: sealed}

    def _message(self, silo: Silo, kind: str, entries: Mapping[str, Any]) -> Message:
        config = {**self.config, wire.PROTOCOL_KEY: silo.protocol, **entries}
        content = RecordDict({wire.CONFIG: ConfigRecord(config)})
        group = str(config.get(wire.ROUND, 0))
        return Message(content, dst_node_id=silo.node_id, message_type=kind, group_id=group)

    # ------------------------------------------------------------ sums

    def settle(self, algorithm: Algorithm[Any], state: Any, now: Round) -> Settled:
        """Return the state with models in place of means of masked ones."""
        means = _means(algorithm, state)
        if not means:
            return Settled(state)
        atoms = atoms_of(means)
        asked = [atom for atom in atoms if self._may_be_summed(atom, now)]
        for atom in atoms:
            if atom not in asked and len(atom.unseen) > 1:
                log.warning(
                    "round %d: the updates of %s are not summed: too few silos have the same "
                    "model and settings, or are weighted by their samples",
                    now.number,
                    ", ".join(atom.names),
                )
        plans = planned(asked, lambda names: self._least(names, now))
        waiting = {name: why for plan in plans for name, why in plan.waiting.items()}
        sums, lost, cost = self._ask([plan for plan in plans if plan.blocks], now)
        models = {id(mean): mean_of(mean, atoms, sums) for mean in means}
        state = algorithm.with_models(state, lambda model: models.get(id(model), model))
        return Settled(state, {**waiting, **lost}, {PHASE: cost} if cost.messages else {})

    def _least(self, names: Sequence[str], now: Round) -> int:
        return max([FEWEST, *(now.here[n].min_group_size for n in names if n in now.here)])

    def _may_be_summed(self, atom: Atom, now: Round) -> bool:
        names = atom.names
        present = all(name in now.here and name in self._peers for name in names)
        return present and len(names) >= self._least(names, now) and atom.counting is not None

    def _ask(
        self, plans: Sequence[Planned], now: Round
    ) -> tuple[dict[frozenset[Term], Arrays], dict[str, str], PhaseReport]:
        """Return sums, asked for twice at most, the second time without lost silos' blocks."""
        found: dict[frozenset[Term], Arrays] = {}
        lost: dict[str, str] = {}
        cost = PhaseReport()
        waiting = list(plans)
        for attempt in (1, 2):
            asked = {plan.atom.terms: self._described(plan) for plan in waiting}
            waiting = [
                plan for plan in waiting if self._shows_nobody(asked[plan.atom.terms], plan, now)
            ]
            if not waiting:
                break
            answers, price = self._exchange([(p.atom, asked[p.atom.terms]) for p in waiting], now)
            cost += price
            again = []
            for plan in waiting:
                what = asked[plan.atom.terms]
                vectors, missing = answers[plan.atom.terms]
                lost |= missing
                if not missing:
                    if (summed := _summed(plan.atom, what, vectors)) is not None:
                        found[plan.atom.terms] = summed
                    else:
                        lost |= dict.fromkeys(what.members, "its group's sum is not valid.")
                    continue
                left = tuple(b for b in plan.blocks if not missing.keys() & dict(b).keys())
                if attempt == 1 and left:
                    again.append(replace(plan, blocks=left))
                else:
                    log.warning(
                        "round %d: %s keep their model: the sum of their group failed, because "
                        "%s dropped out",
                        now.number,
                        ", ".join(plan.atom.names),
                        ", ".join(sorted(missing)),
                    )
            waiting = again
        for name in lost:  # only now: in another sum of this round it may have done its part
            self._peers.pop(name, None)
        return found, lost, cost

    def _described(self, plan: Planned) -> Sum:
        number, purpose = plan.atom.training
        inside = {name for block in plan.blocks for name, _ in block}
        stated = sorted((one.silo, one.stated) for one in plan.atom.unseen if one.silo in inside)
        return Sum(self.name, number, purpose, plan.blocks, dict(stated), plan.atom.limit)

    def _shows_nobody(self, asked: Sum, plan: Planned, now: Round) -> bool:
        """Return whether silos will take part; a sum that they would refuse is not asked for."""
        origin = plan.atom.unseen[0].origin
        why = asked.objection(largest_of(origin), origin)
        if why:
            log.warning(
                "round %d: the updates of %s are not summed, and they keep their model: the sum %s",
                now.number,
                ", ".join(asked.members),
                why,
            )
        return not why

    def _exchange(
        self, wanted: Sequence[tuple[Atom, Sum]], now: Round
    ) -> tuple[dict[frozenset[Term], _Answer], PhaseReport]:
        asked: list[tuple[Atom, str]] = []
        messages = []
        for atom, what in wanted:
            entries = {
                wire.SUM: what.encode(),
                wire.PEERS: encode_peers([self._peers[name][1] for name in what.members]),
                wire.ROUND: now.number,
                wire.PURPOSE: what.purpose,
            }
            for name in what.members:
                asked.append((atom, name))
                messages.append(self._message(now.here[name], wire.MASKED_SUM, entries))
        started = time.perf_counter()
        replies = self.exchange(messages, min(self.deadline_s, SUM_DEADLINE_S))
        answers: dict[frozenset[Term], _Answer] = {atom.terms: ([], {}) for atom, _ in wanted}
        received = 0
        for (atom, name), reply in zip(asked, replies, strict=True):
            vectors, missing = answers[atom.terms]
            try:
                vector = _masked(reply, atom.size)
                received += vector.nbytes
                vectors.append(vector)
            except ValueError as error:
                missing[name] = f"it trained, but did not send its part of the group's sum: {error}"
                if reply is None:
                    self.silent.add(name)
        seconds = time.perf_counter() - started
        report = PhaseReport(1, len(messages), seconds, bytes_received=received)
        return answers, report


_Answer = tuple[list[NDArray[np.uint32]], dict[str, str]]
"""The numbers that came for a sum, and silo → why its part did not."""


def _summed(atom: Atom, asked: Sum, vectors: Sequence[NDArray[np.uint32]]) -> Arrays | None:
    """Return the mean that masked vectors add up to; None if it cannot be one of such updates."""
    origin = atom.unseen[0].origin
    model = from_fixed(_total(vectors), origin, asked.bounds(largest_of(origin), origin))
    longest = max(reach for _, reach in asked.reaches().values())
    norm = distance(model, origin)
    if norm <= longest * (1 + SLACK) + SLACK:
        return model
    log.warning(
        "the sum over %s is %.3g long, the longest of their updates %.3g: one of them sent "
        "something other than its update, or they received different settings. They keep their "
        "model",
        ", ".join(asked.members),
        norm,
        longest,
    )
    return None


def _total(vectors: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    total = np.zeros_like(vectors[0])
    for into, *parts in zip(pieces(total), *map(pieces, vectors), strict=True):
        for part in parts:
            into += part
    return total


def _masked(reply: Message | None, size: int) -> NDArray[np.uint32]:
    """Return a silo's masked numbers; raise ValueError if it sent something else, or nothing."""
    content = _content(reply)
    record = content.get(wire.MASKED)
    if not isinstance(record, ArrayRecord):
        raise ValueError("its reply has no masked numbers")
    arrays = wire.decode_arrays(record)
    vector = arrays.get(wire.MASKED)
    if len(arrays) != 1 or vector is None or vector.shape != (size,) or vector.dtype != np.uint32:
        raise ValueError(f"it must be {size:,} numbers of type uint32")
    return cast("NDArray[np.uint32]", vector)


def _content(reply: Message | None) -> RecordDict:
    if reply is None:
        raise ValueError("it did not answer in time")
    if reply.has_error():
        raise ValueError(wire.plain_text(reply.error.reason or "it answered with an error"))
    return reply.content


def _entry(reply: Message | None, key: str) -> str:
    config = _content(reply).get(wire.CONFIG)
    value = config.get(key) if isinstance(config, ConfigRecord) else None
    if not isinstance(value, str):
        raise ValueError(f"its reply has no text {key!r}")
    return value


def _means(algorithm: Algorithm[Any], state: Any) -> list[MaskedMean]:
    """Return every mean in a state once, in a fixed order."""
    found: dict[int, MaskedMean] = {}

    def note(model: Model) -> Model:
        if isinstance(model, MaskedMean):
            found.setdefault(id(model), model)
        return model

    algorithm.with_models(state, note)
    return list(found.values())


def without(algorithm: Algorithm[Any], state: Any, gone: Sequence[Masked]) -> Any:
    """Return the state in which silos with lost models have what they were last sent."""
    origins = {id(one): one.origin for one in gone}
    return algorithm.with_models(state, lambda model: origins.get(id(model), model))
