"""Memory in which models lie, which goes from one to the next."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.engine.fast import bundles
from coterie.engine.fast.silo.calls import Calls
from coterie.engine.fast.silo.link import FleetLink
from coterie.wire import buffers
from coterie.wire.buffers import Buffers
from tests.unit.engine.made import Made

MB = 2**20


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    """What a silo's process has, of this test alone."""
    made = Buffers()
    monkeypatch.setattr(buffers, "_blocks", made)
    return made


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_block_goes_to_the_next_when_nobody_looks_at_it_and_not_before() -> None:
    made = Buffers()
    one = made.take(3 * MB)
    first, seen = address(one), memoryview(one)[5:10].toreadonly()
    array = np.frombuffer(memoryview(one)[MB:], np.float32)
    del one
    other = made.take(3 * MB)
    assert address(other) != first
    del seen
    third = made.take(3 * MB)
    assert address(third) != first, "an array still lies there"
    del array
    again = made.take(3 * MB - 1000)
    assert address(again) == first and again.size == 3 * MB
    del again
    assert made.take(2 * MB).size == 2 * MB, "one that is much larger is for a larger model"


def test_what_is_kept_unused_is_bounded_where_it_does_not_fit() -> None:
    made = Buffers(kept=4 * MB)
    held = [made.take(2 * MB) for _ in range(5)]
    first = {address(one) for one in held}
    held.clear()
    held = [made.take(2 * MB) for _ in range(5)]
    assert {address(one) for one in held} == first, "the next round uses all of them"
    held.clear()
    last = made.take(8 * MB)
    assert sum(len(one) for one, _ in made._free) <= 4 * MB and last.size == 8 * MB


def test_blocks_that_nobody_wants_any_more_go_back_to_the_kernel() -> None:
    made = Buffers(unused_s=0.4)
    held = made.take(2 * MB)
    held[:] = 7
    made.take(3 * MB)
    deadline = time.monotonic() + 60
    assert made.take(3 * MB).size == 3 * MB and made._watched, "in the next round it is there"
    while made._free or made._returned:
        assert time.monotonic() < deadline, "it is kept"
        time.sleep(0.05)
    assert made._watched and (held == 7).all(), "one is in use"
    del held
    while made._watched:
        assert time.monotonic() < deadline, "its thread goes on without any block"
        time.sleep(0.05)
    assert made.take(2 * MB).size == 2 * MB and made._watched


def named(made: Made) -> dict[str, bundles.Blob]:
    return {blob.name: blob for blob in bundles.blobs_of(made.content)}


def test_models_that_come_and_go_take_the_same_memory(own: Buffers) -> None:
    """Packing, landing and reading: after the second round no new block is needed."""
    model = {"w": np.arange(5 * MB, dtype=np.float32)}
    places = set[int]()
    for number in range(6):
        model = {"w": model["w"] + np.float32(1)}
        record = wire.encode_arrays(model, packed=True)
        places.add(address(np.frombuffer(record["safetensors"].data, np.uint8)))
        made = Made([Message(RecordDict({"arrays": record}), 1, "train")])
        (sent,) = made.blobs.values()
        parts = [bytes(sent[i : i + 8 * MB]) for i in range(0, len(sent), 8 * MB)]
        calls = SimpleNamespace(node=SimpleNamespace(node_id=1), get=lambda *_, p=parts: iter(p))
        link = FleetLink(cast(Calls, calls))
        landed = {name: link._content(1, blob) for name, blob in named(made).items()}
        (message,), _ = bundles.unbundle(made.root, made.content, landed, max_bytes=0)
        read = wire.decode_arrays(message.content["arrays"])
        np.testing.assert_array_equal(read["w"], model["w"])
        assert not read["w"].flags.writeable
        (block,) = landed.values()
        places.add(address(np.frombuffer(block, np.uint8)))
        assert np.shares_memory(read["w"], np.frombuffer(block, np.uint8)), "it was not copied"
        if number == 1:
            known = len(places)
    assert len(places) == known


@pytest.mark.parametrize("reuses", [True, False])
def test_a_packed_model_is_the_same_bytes_either_way(
    reuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_blocks", Buffers() if reuses else None)
    parts = [b"", b"abc", memoryview(bytes(range(256)) * 8192), b"", b"x"]
    made = buffers.joined(parts)
    assert bytes(made) == b"".join(parts)
    assert isinstance(made, bytes) is not reuses, "as bytes it may go to another process"
    with pytest.raises(TypeError):
        made[0] = 1  # type: ignore[index]


def test_who_reads_a_message_with_ours_leaves_nothing_that_python_must_look_for() -> None:
    """A silo's next model would lie elsewhere: with Flower's properties a block is held."""
    kinds = (wire.array_records, wire.config_records, wire.metric_records)
    gc.disable()
    try:
        made = Buffers()
        first = address(made.take(20 * MB))
        content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()})
        content.__dict__["held"] = made.take(20 * MB)
        assert [list(read(content)) for read in kinds] == [["arrays"], ["config"], []]
        del content
        assert address(made.take(20 * MB)) == first
        content = RecordDict()
        content.__dict__["held"] = made.take(20 * MB)
        assert not content.array_records
        del content
        assert address(made.take(20 * MB)) == first, "before it asks for more, it looks for that"
    finally:
        gc.enable()
