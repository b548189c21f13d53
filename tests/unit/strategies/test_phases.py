"""Exchanges before a round's training, messages of other types, and arrays beside the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pydantic import Field

from coterie.engine.inprocess import InProcessGrid
from coterie.strategies.errors import FederationError
from coterie.strategies.plain.fedavg import FedAvg as FedAvgAlgorithm
from coterie.strategies.rounds.algorithm import Answers, Exchanges, Order, Round, Update
from coterie.strategies.rounds.members import Plain
from coterie.strategies.rounds.reports import PhaseReport
from coterie.strategies.strategy import GroupStrategy
from tests.conftest import (
    error_reply,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
)
from tests.kit import start

HINT = {"hint": np.array([2.0, 3.0], np.float32)}


def probing_app(hint_sent_back: float = 1.0) -> ClientApp:
    """The plain app, which also probes: doubles the model, scales the hint, and counts."""
    app = plain_app()

    @app.train("probe")
    def probe(message: Message, context: Context) -> Message:
        model = {k: a.numpy() * np.float32(2) for k, a in message.content["arrays"].items()}
        hint = message.content["hint"]["hint"].numpy() * np.float32(hint_sent_back)
        reply = RecordDict(
            {
                "arrays": ArrayRecord({k: Array(a) for k, a in model.items()}),
                "hint": ArrayRecord({"hint": Array(hint)}),
                "metrics": MetricRecord({"num-examples": 7, "seconds": 1.5}),
            }
        )
        return Message(reply, reply_to=message)

    @app.evaluate("probe")
    def score(message: Message, context: Context) -> Message:
        total = float(sum(a.numpy().sum() for a in message.content["arrays"].values()))
        reply = RecordDict({"metrics": MetricRecord({"num-examples": 3, "total": total})})
        return Message(reply, reply_to=message)

    return app


class Probing(FedAvgAlgorithm):
    """FedAvg that probes twice before round 2, then trains from the probe's model."""

    heard: list[Answers] = Field(default_factory=list)

    def prepare(self, state: Plain, now: Round) -> Exchanges[Plain]:
        if now.number != 2:
            return state
        updates = yield [
            Order(s, plain_model(), purpose="probe", kind="train.probe", extras={"hint": HINT})
            for s in now.silos
        ]
        self.heard.append(updates)
        scores = yield [
            Order(u.silo, u.model, purpose="score", kind="evaluate.probe") for u in updates
        ]
        self.heard.append(scores)
        return Plain(state.members.holding({u.silo.name: u.model for u in updates}))


def play(app: ClientApp, algorithm: Probing) -> Any:
    return start(GroupStrategy(algorithm), InProcessGrid(app, plain_nodes(0, 1)))


def test_each_set_of_orders_is_one_exchange_and_its_checked_replies_come_back() -> None:
    algorithm = Probing()
    result = play(probing_app(), algorithm)
    trained, scored = algorithm.heard
    assert [u.silo.name for u in trained] == ["silo-0", "silo-1"]
    np.testing.assert_array_equal(trained[0].model["b"], 2 * plain_model()["b"])
    np.testing.assert_array_equal(trained[0].extras["hint"]["hint"], HINT["hint"])
    assert trained[0].num_examples == 7
    assert [u.metrics["total"] for u in scored] == [10.0, 10.0]
    assert scored[0].model is not None and not scored[0].extras
    assert set(result.groups) == {1, 2, 3}


def test_the_report_says_what_each_phase_cost() -> None:
    result = play(probing_app(), Probing())
    assert [list(report.phases) for report in result.rounds] == [
        [],
        ["train.probe", "evaluate.probe"],
        [],
        [],
    ]
    model, hint = sum(a.nbytes for a in plain_model().values()), HINT["hint"].nbytes
    phases = result.rounds[1].phases
    assert replace(phases["train.probe"], seconds=0) == PhaseReport(
        exchanges=1,
        messages=2,
        bytes_sent=2 * (model + hint),
        bytes_received=2 * (model + hint),
        silo_seconds=3.0,
    )
    assert replace(phases["evaluate.probe"], seconds=0) == PhaseReport(
        exchanges=1, messages=2, bytes_sent=2 * model, bytes_received=0
    )
    assert result.rounds[1].silos["silo-0"].bytes_sent == model


class Forgetting(FedAvgAlgorithm):
    """FedAvg that probes twice, and needs no answer any more when it probes again."""

    there: list[bool] = Field(default_factory=list)

    def prepare(self, state: Plain, now: Round) -> Exchanges[Plain]:
        orders = [
            Order(s, plain_model(), purpose="probe", kind="train.probe", extras={"hint": HINT})
            for s in now.silos
        ]
        updates = yield orders
        seen = [weakref.ref(update) for update in updates]
        del updates
        yield orders
        gc.collect()
        self.there.extend(one() is not None for one in seen)
        return state


def test_answers_take_no_memory_once_the_algorithm_has_no_use_for_them() -> None:
    """Fifty silos that grow ten trees answer with a gigabyte and a half in one round."""
    algorithm = Forgetting()
    start(GroupStrategy(algorithm), InProcessGrid(probing_app(), plain_nodes(0, 1)))
    assert algorithm.there and not any(algorithm.there)


class Beside(FedAvgAlgorithm):
    """FedAvg in which every silo trains two trial models more from round 2 on."""

    def orders(self, state: Plain, now: Round) -> tuple[Plain, list[Order]]:
        state, orders = super().orders(state, now)
        numbers = range(2) if now.number > 1 else ()
        trials = [Order(s, plain_model(), purpose=f"trial-{i}") for s in now.silos for i in numbers]
        return state, orders + trials

    def absorb(self, state: Plain, updates: Sequence[Update], now: Round) -> Plain:
        return super().absorb(state, [u for u in updates if not u.purpose], now)


def test_the_report_says_what_was_done_beside_the_rounds_training() -> None:
    def fault(message: Message, answer: RecordDict) -> Message | RecordDict:
        purpose = message.content["config"].get("purpose")
        answer["metrics"]["seconds"] = 1.5 if purpose else 100.0  # type: ignore[index]
        lost = message.metadata.dst_node_id == 2 and message.metadata.group_id == "3"
        return error_reply(message, answer) if lost and purpose == "trial-1" else answer

    grid = InProcessGrid(plain_app(fault), plain_nodes(0, 1))
    result = GroupStrategy(Beside()).start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=3, timeout=0.05
    )
    model = sum(a.nbytes for a in plain_model().values())
    trial = PhaseReport(
        messages=4, bytes_sent=4 * model, bytes_received=4 * model, silo_seconds=6.0
    )
    fewer = replace(trial, bytes_received=3 * model, silo_seconds=4.5)
    assert [dict(report.phases) for report in result.rounds] == [
        {}, {"trial": trial}, {"trial": fewer}, {},
    ]  # fmt: skip
    assert not result.rounds[2].left_out
    assert {s.bytes_sent for r in result.rounds for s in r.silos.values()} == {model}
    assert {s.seconds for r in result.rounds for s in r.silos.values()} == {100.0}


def test_a_bad_extra_array_leaves_the_reply_out_and_the_round_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = Probing()
    result = play(probing_app(hint_sent_back=float("nan")), algorithm)
    assert algorithm.heard == [[], []]
    assert "silo-0: its probe is left out: array 'hint' contains NaN" in caplog.text
    assert sorted(result.models) == ["silo-0", "silo-1"]


def test_apps_that_know_nothing_of_a_phase_end_the_run_with_the_reason() -> None:
    """Nobody would learn otherwise that the strategy's own part did not take place."""
    said = (
        r"Probing needs message type 'train\.probe', which none of the 2 connected nodes handles:"
    )
    with pytest.raises(FederationError, match=said):
        play(plain_app(), Probing())


def test_a_silo_without_the_phase_is_left_out_of_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    able, plain = probing_app(), plain_app()

    def mixed(message: Message, context: Context) -> Message:
        return (plain if context.node_id == 2 else able)(message, context)

    algorithm = Probing()
    grid = InProcessGrid(mixed, plain_nodes(0, 1))
    result = GroupStrategy(algorithm).start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=3, timeout=0.05
    )
    assert [[u.silo.name for u in answers] for answers in algorithm.heard] == [["silo-0"]] * 2
    assert "silo-1: its probe is left out" in caplog.text
    assert set(result.models) == {"silo-0", "silo-1"}
