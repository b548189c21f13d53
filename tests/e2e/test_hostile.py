"""A hostile silo over gRPC: it speaks the Fleet API, and sends what Flower itself never does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id

from coterie import wire
from coterie.client.app import app
from coterie.engine.fast.silo import calls as fleet
from coterie.engine.fast.silo.link import FleetLink, connect
from coterie.engine.port import Connection, LinkError, RunEndedError, Unsent
from coterie.system.calls import Retry, open_channel
from coterie.wire.enrolment import public_pem
from tests.e2e.runs import KEYS, NAMES, hashes_of, in_process, record_of, spec
from tests.e2e.trio import Trio

HOSTILE = "0-hostile"
"""The first by name, whom everything is asked first."""


def made(kind: str, body: bytes, *children: ObjectTree) -> tuple[ObjectTree, bytes]:
    """An object as it travels, under its right id."""
    ids = ",".join(child.object_id for child in children)
    content = f"{kind} {ids} {len(body)}".encode() + b"\0" + body
    return ObjectTree(object_id=get_object_id(content), children=children), content


def under(good: Message, *parts: tuple[ObjectTree, bytes]) -> tuple[ObjectTree, dict[str, bytes]]:
    """The objects, the last of which is the content, with the good reply's message above."""
    tree, content = made("Message", good.deflate().split(b"\0", 1)[1], parts[-1][0])
    return tree, {one.object_id: raw for one, raw in (*parts, (tree, content))}


def broken_record(good: Message) -> tuple[ObjectTree, dict[str, bytes]]:
    return under(good, made("RecordDict", b"{"))


def piece_400_times(good: Message) -> tuple[ObjectTree, dict[str, bytes]]:
    """400 MB by one piece of a megabyte."""
    piece = made("ArrayChunk", b"\0" * 2**20)
    about = {"dtype": "f4", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 400}
    array = made("Array", json.dumps(about).encode(), piece[0])
    record = made("ArrayRecord", json.dumps({"w": array[0].object_id}).encode(), array[0])
    content = json.dumps({"arrays": record[0].object_id}).encode()
    return under(good, piece, array, record, made("RecordDict", content, record[0]))


def never_sent(good: Message) -> tuple[ObjectTree, dict[str, bytes]]:
    """It announces its reply, and does not send it."""
    return broken_record(good)[0], {}


def many_objects(good: Message) -> tuple[ObjectTree, dict[str, bytes]]:
    """Fewer than a reply may have, more than a silo may send in a whole run of one round."""
    pieces = [made("ArrayChunk", b"%d" % n) for n in range(6_000)]
    tree, content = made("RecordDict", b"{}", *(piece[0] for piece in pieces))
    return under(good, *pieces, (tree, content))


TRAINING: dict[str, Callable[[Message], tuple[ObjectTree, dict[str, bytes]]]] = {
    "1": never_sent,
    "2": broken_record,
    "3": piece_400_times,
}
FORGED = "no\x1b[2J\nINFO round 4/4"
"""Why it refuses to train in any other round."""


def answer(link: FleetLink, message: Message, training: Mapping[str, Any]) -> None:
    """Be as every silo when asked who it is; then as hostile as can be."""
    kind, number = message.metadata.message_type, message.metadata.group_id
    context = Context(1, link.node_id, spec(HOSTILE, 3).node_config(), RecordDict(), {})
    if kind == wire.TRAIN and number not in training:
        link.send(Unsent((Message(Error(200, FORGED), reply_to=message),), 0.0, link.node_id))
        return
    reply = app(message, context)
    if kind == wire.INITIAL:
        model = wire.decode_arrays(reply.content.array_records[wire.ARRAYS])
        dead = {name: np.full_like(array, -1) for name, array in model.items()}
        reply.content[wire.ARRAYS] = wire.encode_arrays(dead, packed=True)
    if kind != wire.TRAIN:
        link.send(Unsent((reply,), 0.0, link.node_id))
        return
    tree, objects = training[number](reply)
    reply.metadata.__dict__["_message_id"] = tree.object_id
    wanted, session = link._calls.send(reply, tree, 0.0, {})
    for object_id in [one for one in objects if one in wanted]:
        link._calls.push_object(reply.metadata.run_id, session, object_id, objects[object_id])


@contextmanager
def hostile_silo(address: str, training: Mapping[str, Any] = TRAINING) -> Iterator[list[str]]:
    """It serves until the end; gives the messages that it was sent."""
    messages, over, here = [], threading.Event(), threading.Event()

    def serve() -> None:
        with connect(Connection(address)) as link:
            here.set()
            while not over.wait(0.05):
                try:
                    received = link.receive()
                    for message in received.messages if received else ():
                        messages.append(
                            f"{message.metadata.message_type} {message.metadata.group_id}"
                        )
                        answer(link, message, training)
                except (LinkError, RunEndedError):
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert here.wait(90)
    try:
        yield messages
    finally:
        over.set()
        thread.join(90)


def test_a_hostile_silo_over_grpc_is_left_out_and_the_run_completes(
    trio: Trio, tmp_path: Path
) -> None:
    """The others' models are those of a run without it; its drip costs one deadline of a round."""
    keys: dict[str, Any] = {**KEYS, "strategy": "fedavg"}
    with hostile_silo(trio.superlink.fleet_address) as received:
        folder, last = trio.run(**{**keys, "min-silos": 4, "round-timeout": 8.0})
    record = record_of(folder)
    assert last.status == "completed", record.get("error")
    assert [f"train {n}" for n in "1234"] == [t for t in received if t.startswith("train")]
    reasons = [one["left-out"][HOSTILE] for one in record["rounds"]]
    assert reasons[0] == "it did not answer in time."
    assert "its reply cannot be read" in reasons[1] and "in total, more than" in reasons[2]
    assert reasons[3] == r"no\x1b[2J INFO round 4/4"
    assert sum(record["rounds"][0]["seconds"].values()) >= 8, "it was waited for"
    expected = in_process(tmp_path / "alone", *NAMES, **keys)["model-hashes"]
    assert {n: h for n, h in hashes_of(folder).items() if n != HOSTILE} == expected
    assert "\x1b" not in (folder / "run.log").read_text() + (folder / "events.jsonl").read_text()


def test_a_superlink_without_a_federation_has_allowances_and_limits_too(trio: Trio) -> None:
    """Of what the silo announces nothing is stored; it is answered for at once."""
    keys: dict[str, Any] = {**KEYS, "strategy": "fedavg", "rounds": 1, "min-silos": 4}
    with hostile_silo(trio.superlink.fleet_address, {"1": many_objects}):
        folder, last = trio.run(**keys)
    (one, *_) = record_of(folder)["rounds"]
    assert last.status == "completed"
    assert "in this run it has sent or announced 6,0" in one["left-out"][HOSTILE]
    key = ec.generate_private_key(ec.SECP256R1())
    pem = public_pem(key.public_key())
    with closing(open_channel(trio.superlink.fleet_address, None)) as channel:
        once = Retry(lambda error: False, max_s=0.0)
        node = fleet.Calls(channel, key, pem, once, lambda error, late: None)
        number = node.call("RegisterNode", RegisterNodeFleetRequest(public_key=pem)).node_id
        for seconds, refused in ((61, pytest.raises(grpc.RpcError)), (60, nullcontext())):
            request = ActivateNodeRequest(public_key=pem, heartbeat_interval=seconds)
            with refused:
                node.call("ActivateNode", request)
        node.call("UnregisterNode", UnregisterNodeFleetRequest(node_id=number))
