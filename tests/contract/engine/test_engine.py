"""What every engine does alike: in process, plain (Flower as it is) and fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies import FedAvg
from coterie.strategies.rounds.exchange import exchange
from tests.contract.engine.apps import halved, question
from tests.contract.engine.federations import FEDERATIONS, Federation
from tests.e2e.runs import until

DEADLINE_S = 100.0
SMALL = ArrayRecord({"w": Array(np.arange(6, dtype=np.float32).reshape(2, 3))})
MARKS = {"in process": [], "plain": [pytest.mark.nightly], "fast": [pytest.mark.e2e]}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[*m, pytest.mark.xdist_group(n)]) for n, m in MARKS.items()],
)
def federation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("engine")
    with FEDERATIONS[request.param](folder) as made:
        until(lambda: len(made.engine.nodes()) == 2, "both nodes in the run")
        nodes = made.engine.nodes()
        asked = [
            Message(RecordDict({wire.CONFIG: ConfigRecord()}), n, wire.DESCRIBE) for n in nodes
        ]
        assert not any(one.has_error() for one in answers(made.engine, asked))
        yield made


def answers(engine: Engine, messages: Sequence[Message]) -> list[Message]:
    """The replies to messages, in their order."""
    replies = exchange(engine, messages, deadline_s=DEADLINE_S)
    assert None not in replies
    return [one for one in replies if one is not None]


def arrays_of(reply: Message) -> dict[str, np.ndarray]:
    return {name: one.numpy() for name, one in reply.content[wire.ARRAYS].items()}  # type: ignore[union-attr]


def assert_halved(reply: Message, sent: ArrayRecord) -> None:
    assert reply.has_content(), reply.error
    expected, got = halved(sent), arrays_of(reply)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].tobytes() == array.tobytes()


def assert_equal(one: ArrayRecord, other: ArrayRecord) -> None:
    assert {n: a.numpy().tobytes() for n, a in one.items()} == {
        n: a.numpy().tobytes() for n, a in other.items()
    }


def test_each_of_several_messages_has_its_own_reply(federation: Federation) -> None:
    engine = federation.engine
    sent = {
        (node, n): ArrayRecord({"w": Array(np.full(5, 10.0 * n + place))})
        for place, node in enumerate(engine.nodes())
        for n in range(2)
    }
    messages = [question(node, arrays) for (node, _), arrays in sent.items()]
    ids = engine.push(messages)
    assert len({*ids}) == len(messages) and all(ids)
    came: dict[str, Message] = {}

    def pulled() -> bool:
        for reply in engine.pull([one for one in ids if one not in came], 1.0):
            assert reply.metadata.reply_to_message_id not in came, "each comes once"
            came[reply.metadata.reply_to_message_id] = reply
        return len(came) == len(ids)

    until(pulled, "all replies", deadline_s=DEADLINE_S)
    for one, (node, _), arrays in zip(ids, sent, sent.values(), strict=True):
        assert came[one].metadata.src_node_id == node
        assert_halved(came[one], arrays)


def test_large_arrays_arrive_bit_for_bit(federation: Federation) -> None:
    draw = np.random.default_rng(1)
    model = ArrayRecord(
        {
            "large": Array(draw.standard_normal((5_000_000,), dtype=np.float32)),
            "narrow": Array(draw.standard_normal(7).astype(np.float16)),
            "wide": Array(draw.standard_normal((3, 4))),
            "empty": Array(np.zeros((0, 4), np.float32)),
        }
    )
    for reply in answers(
        federation.engine, [question(n, model) for n in federation.engine.nodes()]
    ):
        assert_halved(reply, model)


def test_an_app_that_fails_is_an_error_reply_and_the_others_count(federation: Federation) -> None:
    first, second = federation.engine.nodes()
    bad, good = answers(
        federation.engine, [question(first, SMALL, fails=True), question(second, SMALL)]
    )
    assert bad.has_error() and bad.error.reason
    assert_halved(good, SMALL)


def test_a_pull_waits_no_longer_than_it_may_and_a_late_reply_still_comes(
    federation: Federation,
) -> None:
    engine = federation.engine
    (asked,) = engine.push([question(engine.nodes()[0], SMALL, seconds=2.0)])
    came: list[Message] = []
    for _ in range(3):
        began = time.monotonic()
        came += engine.pull([asked], 0.05)
        assert time.monotonic() - began < 30.0

    def pulled() -> bool:
        came.extend([] if came else engine.pull([asked], 1.0))
        return bool(came)

    until(pulled, "the reply", deadline_s=DEADLINE_S)
    (reply,) = came
    assert_halved(reply, SMALL)


def test_the_reply_to_a_withdrawn_message_never_comes(federation: Federation) -> None:
    engine = federation.engine
    first, second = engine.nodes()
    (withdrawn,) = engine.push([question(first, SMALL, seconds=1.0)])
    messages = [question(node, SMALL) for node in (second, first)]
    replies = answers(engine, messages)  # its node answers what it was asked afterwards as well
    assert withdrawn not in {reply.metadata.reply_to_message_id for reply in replies}
    for reply in replies:
        assert_halved(reply, SMALL)


def test_models_are_the_same_bit_for_bit(federation: Federation) -> None:
    """Three rounds of FedAvg, worked out here: both nodes answer the same."""
    result = FedAvg(evaluate=False).start(federation.engine, SMALL, num_rounds=3)
    expected = SMALL
    for _ in range(3):
        expected = ArrayRecord({name: Array(one) for name, one in halved(expected).items()})
    assert len(result.models) == 2
    for model in result.models.values():
        assert_equal(model, expected)


def test_nodes_come_and_go_and_after_close_the_run_ends(federation: Federation) -> None:
    """The last: its federation has ended afterwards."""
    engine = federation.engine
    before = engine.nodes()
    federation.come()
    until(lambda: len(engine.nodes()) == 3, "the third node", deadline_s=DEADLINE_S)
    (new,) = set(engine.nodes()) - set(before)
    (reply,) = answers(engine, [question(new, SMALL)])
    assert_halved(reply, SMALL)
    federation.go()
    until(lambda: len(engine.nodes()) == 2, "the first to be gone", deadline_s=DEADLINE_S)
    (gone,) = set(before) - set(engine.nodes())
    asked = engine.push([question(new, SMALL), question(gone, SMALL)])
    came: list[Message] = []

    def answered() -> bool:
        came.extend(engine.pull(asked, 1.0))
        return any(one.has_content() for one in came)

    until(answered, "the reply of who is left", deadline_s=DEADLINE_S)
    (left,) = (one for one in came if one.has_content())
    assert left.metadata.src_node_id == new
    assert_halved(left, SMALL)
    engine.close()
    assert federation.ended() in ("", "completed")
