"""Whatever one silo of four answers, the run completes and the others' models are as without it.

`make test` takes every fifth row of the table, `make nightly` all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs import initial
from coterie.server.runs.config import RunConfig
from coterie.strategies import FedAvg, RunResult
from coterie.strategies.rounds import roster as rosters
from coterie.strategies.rounds.roster import DescribedRoster
from tests.conftest import arrays_of, assert_equal_models, plain_model
from tests.contract.hostile.behaviours import TABLE, Behaviour, answered
from tests.unit.strategies.test_loop import described_app, named

HOSTILE = "a-hostile"
HONEST = ("b", "c", "d")


class HostileGrid(InProcessGrid):
    """One process, in which the first silo answers one type of message as it likes."""

    def __init__(self, kind: str, behaviour: Behaviour | None) -> None:
        self.kind, self.behaviour = kind, behaviour
        self.broken: dict[str, Exception] = {}
        nodes = [named(HOSTILE), *(named(name, i % 2) for i, name in enumerate(HONEST))]
        super().__init__(described_app(), nodes)

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type == wire.INITIAL:
            content = RecordDict({wire.ARRAYS: wire.encode_arrays(plain_model(), packed=True)})
            reply = Message(content, reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        else:
            reply = super()._answer(message)
        meta = message.metadata
        if meta.dst_node_id != 1 or meta.message_type != self.kind or self.behaviour is None:
            return reply
        answer = self.behaviour(reply.content)
        if answer is None or isinstance(answer, Exception):
            self.broken[meta.message_id] = answer or TimeoutError()
            return reply
        return answered(answer, message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        for message_id in ids:
            broken = self.broken.get(message_id)
            if broken is not None and not isinstance(broken, TimeoutError):
                raise broken
        return super().pull_messages(i for i in ids if i not in self.broken)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a second and less."""
    monkeypatch.setattr(rosters, "DESCRIBE_DEADLINE_S", 0.05)
    monkeypatch.setattr(rosters, "DESCRIBE_MORE_S", 0.0)
    monkeypatch.setattr(rosters, "SHORT_DEADLINE_S", 0.05)
    monkeypatch.setattr(initial, "PAIR_DEADLINE_S", 0.05)
    monkeypatch.setattr(initial, "DEADLINE_S", 0.05)


def play(kind: str, behaviour: Behaviour | None) -> tuple[RunResult, DescribedRoster]:
    grid = HostileGrid(kind, behaviour)
    roster = DescribedRoster("toy", min_silos=3, deadline_s=2)
    config = RunConfig.read({"strategy": "fedavg", "task": "toy"})
    here = roster.present(grid, number=1)
    arrays = initial.initial_arrays(grid, here, config)
    training = {wire.WIRE_FORMAT: "delta-int8"}  # so that a rounded update would count
    result = FedAvg(roster=roster, train_config=training).start(
        grid, arrays, num_rounds=2, timeout=0.05
    )
    return result, roster


@cache
def expected(kind: str) -> dict[str, wire.Model]:
    """The models of the honest where the hostile silo says that it will not, or is as it should."""
    refuses = (wire.DESCRIBE, wire.TRAIN)
    result, _ = play(kind, (lambda good: Error(wire.REFUSED, "no")) if kind in refuses else None)
    return {name: arrays_of(result.models[name]) for name in HONEST}


def check(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        result, roster = play(kind, TABLE[kind, what])
    for name, model in expected(kind).items():
        assert_equal_models(arrays_of(result.models[name]), model)
    if kind == wire.TRAIN:
        assert [list(report.left_out) for report in result.rounds[:2]] == [[HOSTILE]] * 2
    if kind == wire.DESCRIBE:
        assert HOSTILE not in result.models
        assert roster.refused or "did not identify itself; retrying" in caplog.text
    reasons: dict[str, Any] = dict(roster.refused)
    for report in result.rounds:
        reasons |= report.left_out
        json.dumps([report.evaluation, report.metrics], allow_nan=True)
        for _, error, count in report.evaluation.values():
            assert error != error or (0 <= error <= 1e15 and 0 < count <= 1e15)
    texts = [*reasons, *reasons.values(), *(r.getMessage() for r in caplog.records)]
    ours = [text for text in texts if "├" not in text and "└" not in text]
    assert all(text.isprintable() and len(text) < 1500 for text in ours), ours


@pytest.mark.parametrize(("kind", "what"), TABLE)
def test_what_one_silo_answers_troubles_nobody(
    kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(kind, what, caplog)
