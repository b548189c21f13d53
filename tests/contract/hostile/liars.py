"""A coordinator that lies, in front of real silos that believe it as little as they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.app import app
from coterie.client.home.settings import SiloSettings
from coterie.engine.flower import set_message_id, set_run
from coterie.features.secure.held import Held, held
from coterie.features.secure.protocol import (
    Peer,
    Sum,
    decode_peers,
    encode_peers,
    from_fixed,
    largest_of,
    signed_by_ca,
)
from coterie.server.site.certificates import make_ca, sign
from coterie.wire import Model
from coterie.wire.enrolment import fingerprint_of_key, public_pem
from coterie.wire.statements import Statement, decode_statement
from coterie.wire.updates import Limit
from tests.conftest import digits_config
from tests.kit import dashed

SIZES = {"a": 120, "b": 87, "c": 70, "d": 95, "e": 80, "f": 110}
STEP = {"batch_size": 1000, "local_steps": 1, "lr": 0.1}
"""One step on all samples, so that nothing is drawn."""


class Liar:
    """A coordinator and its silos: enrolled, strict (``secure``, smallest group, peers), at home.

    Args:
        least: their ``min_group_size``.
    """

    def __init__(
        self, folder: Path, sizes: Mapping[str, int] = SIZES, *, least: int = 3, run_id: int = 7
    ) -> None:
        self.run_id, self.ca = run_id, folder / "ca"
        make_ca(self.ca, "test")
        self.vouched: dict[str, tuple[bytes, bytes]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        skip = 0
        for name, size in sizes.items():
            home = folder / name
            home.mkdir()
            own = ec.generate_private_key(ec.SECP384R1())
            pem = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            (home / "key.pem").write_bytes(pem)
            (home / "ca.pem").write_bytes((self.ca / "ca.pem").read_bytes())
            public = public_pem(own.public_key())
            self.vouched[name] = public, sign(self.ca, signed_by_ca(name, public))
            self.nodes[name] = digits_config(name) | {
                **{"home": str(home), "data.train": size, "data.skip": skip, "secure": "required"},
                **{"min-group-size": least},
            }
            skip += size + 20
        pins = {n: f"{n} {fingerprint_of_key(key)}" for n, (key, _) in self.vouched.items()}
        for name, node in self.nodes.items():
            node["peers"] = ",".join(pin for other, pin in pins.items() if other != name)
        self.stated: dict[tuple[str, str, int, str], Statement] = {}
        self.initial = self.model(1)

    def ask(
        self,
        name: str,
        kind: str,
        number: int = 1,
        model: Model | None = None,
        *,
        beside: Mapping[str, Model] | None = None,
        **entries: Any,
    ) -> Message:
        """Send one silo a message of run ``r``, unless the entries name another.

        ``beside``: further records of arrays, by name.
        """
        config = {wire.RUN: "r", wire.TASK: "digits", wire.STRATEGY: "hcct", wire.SEED: 1}
        config |= {wire.ROUND: number, **dashed(entries)}
        content = RecordDict({wire.CONFIG: ConfigRecord(config)})
        if model is not None:
            content[wire.ARRAYS] = wire.encode_arrays(model, packed=True)
        for record, arrays in (beside or {}).items():
            content[record] = wire.encode_arrays(arrays, packed=True)
        message = Message(content, dst_node_id=1, message_type=kind, group_id=str(number))
        set_message_id(message, "m")
        set_run(message, self.run_id)
        return app(message, Context(self.run_id, 1, dict(self.nodes[name]), RecordDict(), {}))

    def model(self, seed: int) -> Model:
        """Return the model of a seed."""
        reply = self.ask(next(iter(self.nodes)), wire.INITIAL, seed=seed)
        return wire.decode_arrays(reply.content.array_records[wire.ARRAYS])

    def train(
        self, names: Sequence[str], number: int = 1, *, start: Model | None = None, **entries: Any
    ) -> None:
        """Have silos train; an own round takes the place of the start."""
        model = None if "own_round" in entries else (self.initial if start is None else start)
        usual = {"secure": True, "group_size": 6, **STEP}
        for name in names:
            reply = self.ask(name, wire.TRAIN, number, model, **(usual | entries))
            assert not reply.has_error(), reply.error.reason
            sent = wire.decode_arrays(reply.content.array_records[wire.SKETCH])
            where = (str(entries.get("run", "r")), name, number, str(entries.get("purpose", "")))
            self.stated[where] = self.read(sent)

    def read(self, sent: Model) -> Any:
        """Return what a silo stated in a reply."""
        return decode_statement(sent[wire.STATEMENT].tobytes().decode())

    def peers(self, names: Sequence[str], run: str = "r") -> dict[str, Peer]:
        """Return silos' keys of a run, vouched for."""
        found = {}
        for name in names:
            reply = self.ask(name, wire.SECURE_KEY, run=run)
            config = reply.content.config_records[wire.CONFIG]
            (peer,) = decode_peers(config[wire.PEERS]).values()
            found[name] = Peer(
                name, peer.public, peer.identity, peer.signature, self.vouched[name][1]
            )
        return found

    def describe(
        self,
        names: Sequence[str],
        number: int = 1,
        *,
        run: str = "r",
        purpose: str = "",
        blocks: Sequence[Sequence[str]] = (),
        limit: Limit | None = None,
    ) -> Sum:
        """Return a sum as an honest coordinator would describe it: all silos are one block."""
        stated = {n: self.stated[run, n, number, purpose] for n in sorted(names)}
        rows = [
            tuple((name, float(stated[name].samples)) for name in sorted(block))
            for block in (blocks or [names])
        ]
        return Sum(run, number, purpose, tuple(sorted(rows)), stated, limit)

    def sum(self, asked: Sum) -> tuple[NDArray[np.uint32] | None, dict[str, str]]:
        """Ask for a sum; return its numbers if all answer, and silo → why it refused."""
        keys = encode_peers(list(self.peers(asked.members, asked.run).values()))
        vectors, refused = [], {}
        for name in asked.members:
            entries = {"secure_sum": asked.encode(), "secure_peers": keys, "run": asked.run}
            reply = self.ask(name, wire.MASKED_SUM, asked.round, **entries)
            if reply.has_error():
                refused[name] = str(reply.error.reason)
            else:
                record = reply.content.array_records[wire.MASKED]
                vectors.append(wire.decode_arrays(record)[wire.MASKED])
        return (None if refused else sum_of(vectors)), refused

    def mean(self, asked: Sum, start: Model | None = None) -> NDArray[np.float64]:
        """Return the flat mean of a sum that nobody refuses."""
        numbers, refused = self.sum(asked)
        assert numbers is not None, refused
        like = self.initial if start is None else start
        return flat(from_fixed(numbers, like, asked.bounds(largest_of(like), like)))

    def refusal(self, asked: Sum) -> str:
        """Return why a sum is refused, by any of its silos; empty if it is not."""
        _, refused = self.sum(asked)
        return next(iter(refused.values()), "")

    def made(self, name: str, number: int = 1, *, run: str = "r", purpose: str = "") -> Held:
        """Return what a silo has trained, which only a test can see."""
        settings = SiloSettings(name, home=str(self.nodes[name]["home"]))
        found = held(settings, run=run, number=number, purpose=purpose)
        assert found is not None
        return found

    def update(self, name: str, number: int = 1, **which: str) -> NDArray[np.float64]:
        """Return a silo's update since the last model from the coordinator, flat."""
        return flat(self.made(name, number, **which).model) - flat(self.initial)


def sum_of(vectors: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return the sum modulo 2^32, in which masks cancel."""
    total = np.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    return total


def flat(model: Model) -> NDArray[np.float64]:
    """Return a model's numbers in one row."""
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in model.values()])


def error(found: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """Return the error relative to the norm of the truth."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
