"""Whatever one silo answers, no strategy crashes and the other silos do not feel it.

``make test`` tries a hundred answers, ``make nightly`` 5,000.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import HCCT, FedAvg, FedCollab, FedGroup
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.strategies.strategy import GroupStrategy
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    at,
    error_reply,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
)
from tests.unit.strategies.test_fedcollab import Judged

CASES = 40
BAD = 2
NODES = plain_nodes(0, 1, 0, samples=[40, 70, 120])
STRATEGIES: tuple[type[GroupStrategy], ...] = (FedAvg, HCCT)

hostile_floats = st.sampled_from([np.nan, np.inf, -np.inf, 1e15 * 1.01, 3e38, -3e38, 1e300, -1e300])
dtypes = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u2", "?", "c8", "U3", ">f4"])
shapes = st.sampled_from([(), (0,), (5,), (6, 5), (5, 6), (30,), (1, 6, 5), (2, 0, 3), (10_000,)])
names = st.sampled_from(["w", "b", "W", "", "w.b", "safetensors", "../w", "ü", "w" * 300])


@st.composite
def hostile_arrays(draw: st.DrawFn) -> ArrayRecord:
    """Arrays that cannot be an update of the model that was sent."""
    kind = draw(st.sampled_from(["value", "cast", "names", "any", "bytes", "packed"]))
    model = {name: array.copy() for name, array in plain_model().items()}
    if kind == "value":
        name = draw(st.sampled_from(sorted(model)))
        value = draw(hostile_floats)
        with np.errstate(over="ignore"):
            model[name].flat[draw(st.integers(0, model[name].size - 1))] = value
    elif kind == "cast":
        name = draw(st.sampled_from(sorted(model)))
        dtype = np.dtype(draw(dtypes.filter(lambda d: d not in ("f4", ">f4"))))
        model[name] = np.zeros(model[name].shape, dtype)
    elif kind == "names":
        model.pop(draw(st.sampled_from(sorted(model))))
        if draw(st.booleans()):
            model[draw(names.filter(lambda n: n not in ("w", "b")))] = np.zeros(3, np.float32)
    elif kind == "any":
        found = draw(st.dictionaries(names, st.tuples(shapes, dtypes), max_size=4))
        if {n: (np.dtype(d), s) for n, (s, d) in found.items()} == {
            n: (a.dtype, a.shape) for n, a in model.items()
        }:
            found = {}
        model = {n: np.zeros(s, np.dtype(d)) for n, (s, d) in found.items()}
    elif kind == "bytes":
        junk = draw(st.binary(max_size=200))
        stype = draw(st.sampled_from(["numpy.ndarray", "safetensors", "odd", ""]))
        return ArrayRecord({draw(names): Array("float32", draw(shapes), stype, junk)})
    else:
        blob = bytearray(wire.encode_arrays(model, packed=True)[wire.PACKED_NAME].data)
        cut = draw(st.integers(0, len(blob) - 1))
        if draw(st.booleans()):
            blob = blob[:cut]
        else:
            blob[draw(st.integers(0, 40))] ^= draw(st.integers(1, 255))
            blob = blob[: len(blob) - 1]
        packed = Array("uint8", (len(blob),), wire.PACKED_NAME, bytes(blob))
        return ArrayRecord({wire.PACKED_NAME: packed})
    return ArrayRecord({name: Array(array) for name, array in model.items()})


bad_counts = st.one_of(
    st.integers(max_value=0),
    st.sampled_from([float("nan"), float("inf"), -1.0, 1e16, 2**63 - 1]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@st.composite
def hostile_replies(draw: st.DrawFn) -> Message | RecordDict | ArrayRecord | MetricRecord:
    """An answer to a training message that must not count."""
    kind = draw(st.sampled_from(["arrays", "metrics", "records", "error"]))
    if kind == "arrays":
        return draw(hostile_arrays())
    if kind == "metrics":
        record = MetricRecord()
        if draw(st.booleans()):
            count = draw(bad_counts)
            if isinstance(count, int) and not -(2**63) <= count < 2**63:
                count = -1
            record[wire.NUM_EXAMPLES] = count
        return record
    if kind == "records":
        record_names = st.sampled_from(["arrays", "metrics", "config", "other"])
        chosen = draw(st.sets(record_names, max_size=3))
        return RecordDict({name: ConfigRecord({"protocol": 99}) for name in chosen})
    return RecordDict()


def answered(answer: RecordDict, hostile: Any) -> RecordDict:
    """The good answer with one part replaced."""
    if isinstance(hostile, ArrayRecord):
        return RecordDict({"arrays": hostile, "metrics": answer["metrics"]})
    if isinstance(hostile, MetricRecord):
        return RecordDict({"arrays": answer["arrays"], "metrics": hostile})
    assert isinstance(hostile, RecordDict)
    return hostile


def outcome(strategy: GroupStrategy, change: Any) -> tuple[dict[str, Any], dict[str, str]]:
    strategy.evaluate = False
    result = strategy.start(
        grid=InProcessGrid(plain_app(at(BAD, 1, change)), NODES),
        initial_arrays=plain_initial(),
        num_rounds=1,
        timeout=5,
    )
    models = {name: arrays_of(record) for name, record in result.models.items()}
    return models, dict(result.rounds[0].left_out)


@cache
def without(kind: type[GroupStrategy]) -> dict[str, Any]:
    """Everybody's model where the silo said that it had failed."""
    return outcome(kind(), error_reply)[0]


def check_reply_is_harmless(hostile: Any) -> None:
    """The silo is left out with a reason; everybody's model is as if it had sent an error."""
    for kind in STRATEGIES:
        expected = without(kind)
        got, left_out = outcome(kind(), lambda _, answer: answered(answer, hostile))
        assert list(left_out) == [f"silo-{BAD - 1}"] and left_out[f"silo-{BAD - 1}"]
        for name, model in expected.items():
            assert_equal_models(got[name], model)


@settings(max_examples=CASES)
@given(hostile_replies())
def test_a_reply_that_does_not_hold_leaves_out_its_silo_and_no_other(hostile: Any) -> None:
    check_reply_is_harmless(hostile)


@settings(max_examples=30)
@given(hostile_replies())
def test_a_group_cold_start_without_enough_good_replies_ends_with_its_reason(hostile: Any) -> None:
    try:
        outcome(FedGroup(num_groups=3), lambda _, answer: answered(answer, hostile))
    except FederationError as error:
        assert "at least 3 silos" in str(error)
    else:
        raise AssertionError("two good replies do not make three groups")


@st.composite
def hostile_discriminators(draw: st.DrawFn) -> tuple[int, str, ArrayRecord | dict[str, Any] | None]:
    """From which of its messages on a silo answers so, which record, and what is in it."""
    start = draw(st.integers(0, 7))
    record = draw(st.sampled_from(["discriminators", "hits", "metrics", "arrays"]))
    if draw(st.integers(0, 9)) == 0:
        return start, record, None
    if record == "metrics":
        keys = ("num-examples", "held-out", "discriminator-bytes", "seconds")
        numbers = st.one_of(hostile_floats, st.sampled_from([-1, 0, 1, 12, 10**18, 0.5]))
        return start, record, draw(st.dictionaries(st.sampled_from(keys), numbers, max_size=4))
    arrays: dict[str, Array] = {}
    for name in draw(st.sets(st.sampled_from(["d", "e", "hits", "counts", ""]), max_size=3)):
        shape = draw(st.sampled_from([(), (0,), (2,), (2, 2), (2, 3), (1, 3), (2, 3, 1), (2, 0)]))
        array = np.zeros(shape, np.dtype(draw(dtypes)))
        if array.dtype.kind in "fiu" and array.size:
            value = draw(st.one_of(hostile_floats, st.sampled_from([-1, 1, 20, 41, 1e9])))
            with np.errstate(all="ignore"):
                array.flat[0] = np.array(value).astype(array.dtype)
        arrays[name] = Array(array)
    return start, record, ArrayRecord(arrays)


def measured_with(hostile: tuple[int, str, Any]) -> tuple[Any, Any]:
    """The first round's groups, and the distance of the two silos that answer as they should."""
    start, record, content = hostile
    judged = Judged(lambda kind, label: 0.6)
    count = iter(range(1000))

    def change(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != BAD or next(count) < start:
            return reply
        if content is None:
            reply.content.pop(record, None)
        elif isinstance(content, ArrayRecord):
            reply.content[record] = content
        else:
            reply.content[record] = MetricRecord({**reply.content[record], **content})
        return reply

    judged.fault = change
    strategy = FedCollab(evaluate=False)
    result = strategy.start(
        grid=InProcessGrid(judged.app(), plain_nodes(0, 0, 0)),
        initial_arrays=plain_initial(),
        num_rounds=1,
        timeout=5,
    )
    return result.state.members.groups, result.state.distances[("silo-0", "silo-2")]


@pytest.mark.nightly
@settings(max_examples=60)
@given(hostile_discriminators())
def test_whatever_discriminators_a_silo_sends_the_others_are_measured_as_without_it(
    hostile: tuple[int, str, Any],
) -> None:
    groups, distance = measured_with(hostile)
    assert any({"silo-0", "silo-2"} <= set(group) for group in groups)
    assert distance == measured_with((1000, "hits", None))[1]


values = st.one_of(
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.binary(max_size=10),
    st.lists(st.text(max_size=3), max_size=3),
)
keys = st.sampled_from(
    [*("name", "num-examples", "task", "schema", "device", "versions", "buffers"),
     *("protocol", "alpha", "other")]
)  # fmt: skip


@settings(max_examples=CASES)
@given(st.dictionaries(keys, values, max_size=4), st.sets(keys, max_size=2))
def test_a_description_of_any_content_is_read_or_refused_and_troubles_nobody(
    changes: dict[str, Any], missing: set[str]
) -> None:
    """Wrong protocol versions, names, sizes, texts for numbers: the other silo takes part."""
    good = wire.encode_description(wire.Description("good", 10, "digits", "s"))
    odd = wire.encode_description(wire.Description("odd", 10, "digits", "s"))
    config = {k: v for k, v in odd[wire.CONFIG].items() if k not in missing} | changes

    def describe(message: Message, context: Any) -> Message:
        first = context.node_id == 1
        content = good if first else RecordDict({wire.CONFIG: ConfigRecord(dict(config))})
        return Message(content, reply_to=message)

    grid = InProcessGrid(describe, [{}, {}])  # type: ignore[arg-type]
    roster = DescribedRoster(task="digits", deadline_s=1)
    here = {silo.name: silo for silo in roster.present(grid, number=1)}
    assert here["good"].num_examples == 10
    assert len(here) + len(roster.refused) >= 1
    for silo in here.values():
        assert wire.is_silo_name(silo.name) and silo.num_examples > 0


@pytest.mark.parametrize("dtype", ["U3", "c8"])
@pytest.mark.parametrize("record", ["discriminators", "hits", "odd"])
def test_texts_for_numbers_lose_their_silo_and_not_the_run(record: str, dtype: str) -> None:
    hostile = (1, record, ArrayRecord({"d": Array(np.zeros(2, dtype))}))
    groups, _ = measured_with(hostile)
    assert groups == (("silo-0", "silo-2"), ("silo-1",))
