"""The round loop with a ClientApp that knows nothing of coterie, and with replies that are bad."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from coterie import wire
from coterie.engine import pauses, plain
from coterie.engine.inprocess import InProcessGrid
from coterie.features.stragglers.coordinator import MISSES, TIMES
from coterie.server.runs.codec import decode, encode
from coterie.strategies import HCCT, FedAvg, FederationError, FedGroup, Independent, RunResult
from coterie.strategies.errors import EXIT_NO_SILOS
from coterie.strategies.rounds import conversation
from coterie.strategies.rounds import exchange as exchanging
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.messages import training_messages
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.nodes import NodeRoster
from coterie.strategies.rounds.reasons import sentences
from coterie.strategies.rounds.replies import check_replies
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.wire import Model
from tests.conftest import (
    LossyGrid,
    arrays_of,
    assert_equal_models,
    at,
    error_reply,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import Tap, assert_same_models, digits, run, start


class TwoGroups(FedGroup):
    """FedGroup with as many groups as the tests' grids have kinds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_groups=2, **options)


STRATEGIES: list[Callable[..., GroupStrategy]] = [FedAvg, Independent, HCCT, TwoGroups]
NOT_FINITE = (math.nan, math.inf)
EACH = pytest.mark.parametrize("make", STRATEGIES, ids=lambda make: make.__name__)
ONE_MODEL_OR_TWO = pytest.mark.parametrize("make", [FedAvg, TwoGroups])


def plain_grid(*kinds: int, samples: Sequence[int] | None = None) -> InProcessGrid:
    return InProcessGrid(plain_app(), plain_nodes(*kinds, samples=samples))


def fedavg_by_hand(nodes: Sequence[dict[str, Any]], rounds: int) -> Model:
    """The literal algorithm, in a few lines of numpy."""
    model = plain_model()
    total = sum(node["samples"] for node in nodes)
    for _ in range(rounds):
        updates = [plain_trained(model, node) for node in nodes]
        model = {
            k: sum(
                node["samples"] / total * update[k].astype(np.float64)
                for node, update in zip(nodes, updates, strict=True)
            ).astype(np.float32)
            for k in model
        }
    return model


# ---------------------------------------------------------------- drop-in


@EACH
def test_start_as_in_flowers_examples_returns_flowers_result_with_more(make: Any) -> None:
    result = make().start(grid=plain_grid(0, 0, 1), initial_arrays=plain_initial(), num_rounds=3)
    assert isinstance(result, Result) and isinstance(result, RunResult)
    assert list(result.arrays) == ["w", "b"]
    assert set(result.train_metrics_clientapp) == {1, 2, 3}
    assert result.train_metrics_clientapp[1]["train-loss"] == 0.5
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}
    assert set(result.models) == {"silo-0", "silo-1", "silo-2"}
    assert set(result.groups) == {1, 2, 3}
    assert [report.round for report in result.rounds] == [1, 2, 3, 3]
    assert [report.final for report in result.rounds] == [False, False, False, True]


def test_fedavg_equals_the_literal_weighted_mean() -> None:
    nodes = plain_nodes(0, 1, 2, samples=[10, 70, 75])
    result = start(FedAvg(), InProcessGrid(plain_app(), nodes), rounds=4)
    expected = fedavg_by_hand(nodes, 4)
    for name in ("silo-0", "silo-1", "silo-2"):
        assert_equal_models(arrays_of(result.models[name]), expected)
    np.testing.assert_allclose(arrays_of(result.arrays)["w"], expected["w"], rtol=1e-6)
    assert result.groups[4] == [["silo-0", "silo-1", "silo-2"]]


def test_independent_silos_train_alone_and_the_mean_is_of_all() -> None:
    nodes = plain_nodes(0, 1, samples=[10, 30])
    result = start(Independent(), InProcessGrid(plain_app(), nodes), rounds=3)
    own = []
    for i, node in enumerate(nodes, start=1):
        model = plain_model()
        for _ in range(3):
            model = plain_trained(model, node)
        assert_equal_models(arrays_of(result.models[f"silo-{i - 1}"]), model)
        own.append(model)
    assert_equal_models(arrays_of(result.arrays), weighted_mean(own, [10, 30]))
    assert result.groups[3] == [["silo-0"], ["silo-1"]]


def test_arrays_in_another_order_are_put_back_into_the_models() -> None:
    def turned(message: Message, answer: RecordDict) -> RecordDict:
        answer["arrays"] = ArrayRecord(dict(reversed(list(answer["arrays"].items()))))
        return answer

    result = start(FedAvg(), InProcessGrid(plain_app(turned), plain_nodes(0, 1)), rounds=2)
    assert_equal_models(arrays_of(result.models["silo-0"]), fedavg_by_hand(plain_nodes(0, 1), 2))


def test_configurations_reach_the_silos() -> None:
    seen: list[dict[str, Any]] = []

    def note(message: Message, answer: RecordDict) -> RecordDict:
        seen.append(dict(message.content["config"]))
        return answer

    own = {"lr": 0.4, "lr-decay": 0.5, "local-epochs": 2}
    strategy = FedAvg(train_config=own, min_silos=1)
    config = ConfigRecord({"local-epochs": 3, "mine": "x"})
    start(strategy, InProcessGrid(plain_app(note), plain_nodes(0)), rounds=3, train_config=config)
    assert [entry["lr"] for entry in seen] == [0.4, 0.2, 0.1]
    assert [entry["server-round"] for entry in seen] == [1, 2, 3]
    assert {(entry["local-epochs"], entry["mine"]) for entry in seen} == {(3, "x")}
    assert not any("lr-decay" in entry or "evaluate-received" in entry for entry in seen)


def test_the_servers_own_evaluation_is_of_the_mean_of_all_models() -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"w": float(arrays_of(arrays)["w"][0, 0])}) if round != 2 else None

    nodes = plain_nodes(0, 1)
    result = start(FedAvg(), InProcessGrid(plain_app(), nodes), evaluate_fn=evaluate)
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 3}
    for round, metrics in result.evaluate_metrics_serverapp.items():
        assert metrics["w"] == pytest.approx(fedavg_by_hand(nodes, round)["w"][0, 0], rel=1e-5)


@pytest.mark.parametrize("rounds", [0, -1])
def test_without_a_round_there_is_no_run(rounds: int) -> None:
    with pytest.raises(FederationError, match="num_rounds must be at least 1"):
        start(FedAvg(), plain_grid(0), rounds=rounds)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_to_start_from_that_is_not_finite_is_refused_by_name(value: float) -> None:
    arrays = ArrayRecord({"w": Array(np.zeros(2)), "bad": Array(np.array([1, value]))})
    with pytest.raises(FederationError, match="'bad' contains NaN or infinity"):
        FedAvg().start(grid=plain_grid(0), initial_arrays=arrays, num_rounds=1)


# ---------------------------------------------------------------- replies that do not count


def with_arrays(change: Callable[[Model], Model]) -> Callable[..., RecordDict]:
    def fault(message: Message, answer: RecordDict) -> RecordDict:
        changed = change({k: a.numpy().copy() for k, a in answer["arrays"].items()})
        answer["arrays"] = ArrayRecord({k: Array(a) for k, a in changed.items()})
        return answer

    return fault


def with_metrics(**metrics: Any) -> Callable[..., RecordDict]:
    def fault(message: Message, answer: RecordDict) -> RecordDict:
        named = {key.replace("_", "-"): value for key, value in metrics.items()}
        kept = {k: v for k, v in answer["metrics"].items() if k not in named}
        answer["metrics"] = MetricRecord(kept | {k: v for k, v in named.items() if v is not None})
        return answer

    return fault


def without(record: str) -> Callable[..., RecordDict]:
    def fault(message: Message, answer: RecordDict) -> RecordDict:
        del answer[record]
        return answer

    return fault


def with_value(value: float) -> Callable[..., RecordDict]:
    def change(model: Model) -> Model:
        model["w"][3, 1] = value
        return model

    return with_arrays(change)


def raising(message: Message, answer: RecordDict) -> RecordDict:
    raise RuntimeError("out of memory")


def with_bytes(data: bytes) -> Callable[..., RecordDict]:
    def fault(message: Message, answer: RecordDict) -> RecordDict:
        answer["arrays"]["w"] = Array("float32", (6, 5), "numpy.ndarray", data)
        return answer

    return fault


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "nan": (with_value(math.nan), "array 'w' contains NaN or infinity"),
    "infinity": (with_value(-math.inf), "array 'w' contains NaN or infinity"),
    "shape": (
        with_arrays(lambda m: m | {"w": m["w"].T.copy()}),
        r"array 'w' must be float32 of shape \(6, 5\). Got float32 of shape \(5, 6\)",
    ),
    "flat": (with_arrays(lambda m: m | {"w": m["w"].ravel()}), r"Got float32 of shape \(30,\)"),
    "type": (
        with_arrays(lambda m: m | {"w": m["w"].astype(np.float64)}),
        "must be float32 of shape .* Got float64",
    ),
    "missing-array": (with_arrays(lambda m: {"w": m["w"]}), "arrays differ from those sent: b"),
    "more-arrays": (
        with_arrays(lambda m: m | {"secret": m["b"]}),
        "arrays differ from those sent: secret",
    ),
    "no-arrays": (without("arrays"), "its reply has no arrays"),
    "no-metrics": (without("metrics"), "num-examples must be a number from 1 .* Got None"),
    "no-count": (with_metrics(num_examples=None), "num-examples must be a number from 1"),
    "zero-count": (with_metrics(num_examples=0), "Got 0"),
    "negative-count": (with_metrics(num_examples=-5), "Got -5"),
    "nan-count": (with_metrics(num_examples=math.nan), "Got nan"),
    "infinite-count": (with_metrics(num_examples=math.inf), "Got inf"),
    "list-count": (with_metrics(num_examples=[1, 2]), "Got None"),
    "error": (error_reply, "the disk is full"),
    "exception": (raising, "out of memory"),
    "damaged": (with_bytes(b"\x93NUMPY damaged"), "arrays cannot be decoded"),
    "broken-zip": (with_bytes(b"PK\x03\x04 damaged"), "arrays cannot be decoded"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_reply_that_is_bad_is_left_out_and_the_others_mean_is_without_it(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 2's reply of round 2 does not count: named in report and log, the run goes on."""
    fault, reason = BAD[kind]
    nodes = plain_nodes(0, 1, 2, samples=[10, 70, 75])
    grid = InProcessGrid(plain_app(at(2, 2, fault)), nodes)
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        result = start(FedAvg(), grid, rounds=2)

    reports = result.rounds
    assert reports[0].left_out == {}
    assert list(reports[1].left_out) == ["silo-1"]
    assert re.search(reason, reports[1].left_out["silo-1"])
    assert "round 2: silo-1 is left out" in caplog.text
    assert set(reports[1].silos) == {"silo-0", "silo-2"}

    after_one = fedavg_by_hand(nodes, 1)
    others = [nodes[0], nodes[2]]
    expected = weighted_mean([plain_trained(after_one, node) for node in others], [10, 75])
    for name in ("silo-0", "silo-1", "silo-2"):
        assert_equal_models(arrays_of(result.models[name]), expected)


@EACH
def test_every_strategy_goes_on_without_a_bad_reply(make: Any) -> None:
    grid = InProcessGrid(plain_app(at(2, 1, BAD["nan"][0])), plain_nodes(0, 0, 1))
    result = start(make(), grid)
    assert [sorted(report.left_out) for report in result.rounds] == [["silo-1"], [], [], []]
    assert all(np.isfinite(a).all() for r in result.models.values() for a in arrays_of(r).values())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round in which nobody answered is played again without a pause."""
    monkeypatch.setattr("coterie.strategies.strategy.TRY_AGAIN_S", 0.0)


@EACH
def test_a_round_in_which_nobody_answers_does_not_count_and_is_played_again(
    make: Any, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    failing = iter([True] * 3)

    def fault(message: Message, answer: RecordDict) -> Message | RecordDict:
        fails = message.metadata.group_id == "2" and next(failing, False)
        return error_reply(message, answer) if fails else answer

    nodes = plain_nodes(0, 0, 1)
    with_fault = start(make(), InProcessGrid(plain_app(fault), nodes), rounds=3)
    whole = start(make(), InProcessGrid(plain_app(), nodes), rounds=3)
    assert [dict(r.left_out) for r in with_fault.rounds] == [{}] * 4
    assert "round 2: no silo's training counted," in caplog.text
    assert_same_models(whole, with_fault)


def test_a_round_is_not_played_for_ever_without_answers(at_once: None) -> None:
    grid = InProcessGrid(plain_app(error_reply), plain_nodes(0, 1))
    with pytest.raises(
        FederationError, match=r"in 3 tries of round 1: silo-0, silo-1: the disk is full"
    ):
        start(FedAvg(), grid)


def test_a_silo_that_keeps_the_others_waiting_is_not_asked_for_some_rounds() -> None:
    grid = LossyGrid(plain_app(), plain_nodes(0, 0, 1), lost=[(3, n) for n in (1, 2, 5)])
    result = start(FedAvg(), grid, rounds=10)
    reasons = [r.left_out.get("silo-2", "") for r in result.rounds[:-1]]
    silent = [number for number, why in enumerate(reasons, 1) if why.endswith("in time.")]
    assert silent == [1, 2, 5], "then not before 10"
    assert reasons[2] == ("it did not answer in 2 rounds in a row; it is asked again in round 5.")
    trained = [r.round for r in result.rounds[:-1] if "silo-2" in r.silos]
    assert trained == [10] and not any(r.joined or r.left for r in result.rounds[1:])
    assert "silo-2" in result.rounds[-1].evaluation, "it is given its model"


def test_who_rests_is_the_same_in_a_run_that_is_resumed() -> None:
    lost = [(3, n) for n in (1, 2, 5)]
    stored: dict[int, Checkpoint[Any]] = {}
    whole = start(
        FedAvg(),
        LossyGrid(plain_app(), plain_nodes(0, 0, 1), lost=lost),
        rounds=6,
        commit=lambda checkpoint: stored.update({checkpoint.round: checkpoint}),
    )
    grid = LossyGrid(plain_app(), plain_nodes(0, 0, 1), lost=lost)
    resumed = start(FedAvg(), grid, rounds=6, resume=decode(*encode(stored[3])))
    left_out = [(report.round, report.left_out) for report in resumed.rounds]
    assert left_out == [(report.round, report.left_out) for report in whole.rounds[3:]]
    assert_same_models(whole, resumed)


def test_a_silo_that_answers_after_its_rest_is_asked_as_before() -> None:
    grid = LossyGrid(plain_app(), plain_nodes(0, 0, 1), lost=[(3, n) for n in (1, 2, 6)])
    result = start(FedAvg(), grid, rounds=7)
    trained = [r.round for r in result.rounds[:-1] if "silo-2" in r.silos]
    assert trained == [5, 7], "one miss is no reason to rest"


class SlowGrid(InProcessGrid):
    """Time is what this grid says. The third node answers late where ``delay`` says so.

    Args:
        seconds: that the others take for everything.
        delay: message → seconds that the third takes.
    """

    def __init__(self, nodes: Any, seconds: float, delay: Callable[[Message], float]) -> None:
        super().__init__(plain_app(), nodes)
        self.now, self.seconds, self.delay = 0.0, seconds, delay
        self.due: dict[str, float] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message, name in zip(sent, ids, strict=True):
            slow = message.metadata.dst_node_id == 3
            self.due[name] = self.now + (self.delay(message) if slow else self.seconds)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages(i for i in message_ids if self.due[i] <= self.now)

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clocks of a round: how long the machine takes counts nowhere."""
        for module in (exchanging, pauses, plain):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def at_the_deadline(message: Message) -> float:
    return 595.0 if message.metadata.message_type == wire.TRAIN else 10.0


def every_second_never(message: Message) -> float:
    return 1e9 if message.metadata.group_id.endswith(("1", "3", "5", "7", "9")) else 10.0


def silent_in_evaluations(message: Message) -> float:
    return 10.0 if message.metadata.message_type == wire.TRAIN else 1e9


@pytest.mark.parametrize("delay", [at_the_deadline, every_second_never, silent_in_evaluations])
def test_a_silo_that_uses_every_deadline_slows_a_run_so_far_and_no_further(
    delay: Callable[[Message], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, patience = 30, 600.0
    spent = {}
    for case in (lambda _: 10.0, delay):
        grid = SlowGrid(plain_nodes(0, 0, 0, 0), 10.0, case)
        grid.rule(monkeypatch)
        result = FedAvg(round_timeout=patience).start(grid, plain_initial(), rounds)
        spent[case] = grid.now
        assert [r.round for r in result.rounds[:-1]] == list(range(1, rounds + 1))
    usual, slowed = spent.values()
    assert slowed <= (1 + TIMES) * usual + (MISSES + 2) * patience
    assert slowed < 0.5 * rounds * patience, "what it costs where nothing bounds it"


def test_who_is_asked_less_often_for_its_slowness_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = SlowGrid(plain_nodes(0, 0, 0, 0), 10.0, at_the_deadline)
    grid.rule(monkeypatch)
    result = FedAvg(round_timeout=600.0).start(grid, plain_initial(), 7)
    reasons = [r.left_out.get("silo-2", "") for r in result.rounds[:-1]]
    assert reasons[:3] == [""] * 3 and len(set(reasons[3:])) == 1
    assert re.fullmatch(
        r"in this run all other silos waited 15\d\d s only for it, more than 2 times "
        r"round-timeout; it is asked again in round 8\.",
        reasons[3],
    )


def test_a_silo_that_has_more_to_train_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SlowGrid(plain_nodes(0, 0, 0, 0), 10.0, lambda _: 75.0)
    grid.rule(monkeypatch)
    result = FedAvg(round_timeout=100.0).start(grid, plain_initial(), 40)
    assert not any(r.left_out for r in result.rounds)


@ONE_MODEL_OR_TWO
def test_a_reply_that_does_not_come_is_left_out_after_the_deadline(make: Any) -> None:
    grid = LossyGrid(plain_app(), plain_nodes(0, 0, 1), lost=[(3, 2)])
    started = time.monotonic()
    result = start(make(), grid)
    assert time.monotonic() - started >= 0.05
    assert [dict(r.left_out) for r in result.rounds] == [
        {}, {"silo-2": "it did not answer in time."}, {}, {},
    ]  # fmt: skip


def test_the_strategys_own_deadline_counts_where_start_is_given_none() -> None:
    grid = LossyGrid(plain_app(), plain_nodes(0, 1), lost=[(2, 1)])
    started = time.monotonic()
    FedAvg(round_timeout=0.2).start(grid=grid, initial_arrays=plain_initial(), num_rounds=1)
    assert time.monotonic() - started >= 0.2


def test_a_late_reply_counts_in_no_round() -> None:
    """Node 2's update of round 1 comes during round 2, whose own it has sent as well."""
    nodes = plain_nodes(0, 1, samples=[10, 70])
    late = LossyGrid(plain_app(), nodes, late=[(2, 1)])
    lost = LossyGrid(plain_app(), nodes, lost=[(2, 1)])
    with_late, with_lost = start(FedAvg(), late), start(FedAvg(), lost)
    assert late.delayed == []  # it did come
    assert [sorted(r.left_out) for r in with_late.rounds] == [["silo-1"], [], [], []]
    assert_equal_models(
        arrays_of(with_late.models["silo-0"]), arrays_of(with_lost.models["silo-0"])
    )


class Repeating(InProcessGrid):
    """Gives every reply twice at once, and with every later pull again."""

    def __init__(self, app: ClientApp, nodes: Sequence[dict[str, Any]]) -> None:
        super().__init__(app, nodes)
        self.given: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = list(super().pull_messages(message_ids))
        self.given += asked
        return [*self.given, *asked]


def test_a_reply_to_nothing_that_was_asked_is_ignored() -> None:
    grid = Repeating(plain_app(), plain_nodes(0, 1))
    result = start(FedAvg(), grid, rounds=3)
    assert len(grid.given) > 6, "replies of every round came again in the later ones"
    assert all(report.left_out == {} for report in result.rounds)
    assert_equal_models(arrays_of(result.models["silo-0"]), fedavg_by_hand(plain_nodes(0, 1), 3))


def test_an_exchange_has_one_reply_to_each_of_its_own_messages_in_their_order() -> None:
    """Node 2's reply to the first exchange comes in the second, everything twice."""
    nodes, silos = plain_nodes(0, 1), [Silo(f"silo-{i - 1}", i) for i in (2, 1)]

    class Late(LossyGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            return [*replies, *replies][::-1]

    grid, model = Late(plain_app(), nodes, late=[(2, 1)]), plain_model()
    left_out = []
    for number in (1, 2):
        orders = [Order(silo, model) for silo in silos]
        messages = training_messages(orders, number=number, config={}, groups=(), evaluate=False)
        replies = exchange(grid, messages, deadline_s=0.05)
        for message, reply in zip(messages, replies, strict=True):
            if reply is not None:
                assert reply.metadata.reply_to_message_id == message.metadata.message_id
        checked = check_replies(orders, replies)
        left_out.append(checked.left_out)
        for update in checked.updates:
            own = nodes[int(update.silo.name[-1])]
            assert_equal_models(update.model, plain_trained(model, own))
        model = {name: array + np.float32(1) for name, array in model.items()}
    assert grid.delayed == [], "it did come"
    assert left_out == [{"silo-1": "it did not answer in time."}, {}]


@pytest.mark.parametrize(
    ("hook", "given"),
    [
        ("configure_train", (1, ArrayRecord(), ConfigRecord(), None)),
        ("aggregate_train", (1, [])),
        ("configure_evaluate", (1, ArrayRecord(), ConfigRecord(), None)),
        ("aggregate_evaluate", (1, [])),
    ],
)
def test_flowers_hooks_for_one_model_say_what_to_call_instead(
    hook: str, given: tuple[Any, ...]
) -> None:
    with pytest.raises(FederationError, match=r"cannot be driven step by step.* start\(\.\.\.\)"):
        getattr(FedAvg(), hook)(*given)


@pytest.mark.parametrize("value", [0, -3, *NOT_FINITE])
def test_an_evaluation_with_a_bad_count_is_left_out_and_the_run_goes_on(value: float) -> None:
    app = plain_app()
    inner = InProcessGrid(app, plain_nodes(0, 1))

    def fault(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == wire.EVALUATE and message.metadata.dst_node_id == 2:
            reply.content["metrics"]["num-examples"] = value
        return reply

    inner.app = fault  # type: ignore[assignment]
    result = start(FedAvg(), inner)
    assert list(result.rounds[-1].evaluation) == ["silo-0"]


# ---------------------------------------------------------------- evaluation


def test_plain_silos_are_asked_after_every_round_for_the_model_of_that_round() -> None:
    nodes = plain_nodes(0, 1)
    result = start(FedAvg(), InProcessGrid(plain_app(), nodes))
    assert [(r.round, r.evaluated_round) for r in result.rounds] == [(1, 1), (2, 2), (3, 2), (3, 3)]
    assert result.rounds[2].evaluation == {}
    for round, metrics in result.evaluate_metrics_clientapp.items():
        model = fedavg_by_hand(nodes, round)
        losses = [
            float(np.mean((model["w"] - (2 * plain_trained(model, n)["w"] - model["w"])) ** 2))
            for n in nodes
        ]
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
        assert metrics["num-examples"] == 20


def test_an_accuracy_is_read_as_an_error() -> None:
    report = start(FedAvg(min_silos=1), plain_grid(0)).rounds[-1]
    loss, error, count = report.evaluation["silo-0"]
    assert error == pytest.approx(loss / (1 + loss))
    assert count == 10


def test_without_evaluation_nobody_is_asked() -> None:
    seen = []
    app = plain_app()

    def watch(message: Message, context: Context) -> Message:
        seen.append(message.metadata.message_type)
        return app(message, context)

    grid = InProcessGrid(watch, plain_nodes(0, 1))  # type: ignore[arg-type]
    result = start(FedAvg(evaluate=False), grid)
    assert set(seen) == {wire.TRAIN}
    assert result.evaluate_metrics_clientapp == {}


def test_a_silo_that_cannot_evaluate_is_named_and_the_others_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = plain_app()

    def fault(message: Message, context: Context) -> Message:
        if message.metadata.message_type == wire.EVALUATE and context.node_id == 2:
            return Message(Error(wire.FAILED, "no test data"), reply_to=message)
        return app(message, context)

    grid = InProcessGrid(fault, plain_nodes(0, 1))  # type: ignore[arg-type]
    result = start(FedAvg(), grid)
    assert list(result.rounds[-1].evaluation) == ["silo-0"]
    assert "silo-1 was not evaluated: no test data" in caplog.text


@ONE_MODEL_OR_TWO
def test_reports_are_published_as_they_become_known(make: Any) -> None:
    seen: list[RoundReport] = []
    result = start(make(on_round=seen.append), plain_grid(0, 1))
    assert seen == result.rounds
    assert set(seen[0].seconds) == {"prepare", "train", "aggregate", "evaluate"}
    assert all(seconds >= 0 for report in seen for seconds in report.seconds.values())
    assert seen[0].silos["silo-0"].bytes_sent == seen[0].silos["silo-0"].bytes_received == 4 * 35


# ---------------------------------------------------------------- who is here


def test_no_silo_at_all_ends_the_run_after_its_deadline_with_its_exit_code() -> None:
    strategy = FedAvg(roster=NodeRoster(min_silos=2, deadline_s=0.1))
    with pytest.raises(FederationError, match="1 of at least 2 nodes") as caught:
        start(strategy, plain_grid(0))
    assert caught.value.exit_code == EXIT_NO_SILOS != 0
    assert FedAvg().roster == NodeRoster(min_silos=2), "as many as Flower waits for"
    with pytest.raises(FederationError, match="min_silos must be at least 1"):
        FedAvg(min_silos=0)


def test_nodes_are_numbered_as_they_come_and_keep_their_names_in_a_run_that_goes_on() -> None:
    grid, roster = plain_grid(0, 0), NodeRoster()
    assert [s.name for s in roster.present(grid, number=1)] == ["silo-0", "silo-1"]
    grid.disconnect(1)
    late = grid.connect(plain_nodes(1)[0])
    assert [(s.name, s.node_id) for s in roster.present(grid, number=2)] == [
        ("silo-1", 2),
        ("silo-2", late),
    ]
    again = NodeRoster()
    again.recall([Silo("silo-1", 2)], ["silo-0", "silo-1", "silo-2"])
    assert [s.name for s in again.present(grid, number=3)] == ["silo-1", "silo-3"]


def test_nodes_that_are_asked_have_the_names_that_they_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, stated = plain_app(), {0: "north", 1: "north", 2: "not a name", 3: 7}

    @app.query("name")
    def name(message: Message, context: Context) -> Message:
        own = stated[int(context.node_config["noise"])]
        content = RecordDict({"config": ConfigRecord({"name": own})})  # type: ignore[dict-item]
        return Message(content, reply_to=message)

    result = start(FedAvg(ask_names=True), InProcessGrid(app, plain_nodes(0, 0, 0, 0)), rounds=1)
    assert result.groups[1] == [["north", "silo-0", "silo-1", "silo-2"]]
    assert "node 2 reports the name north, which another node has" in caplog.text
    assert "node 3 states an invalid name: 'not a name'" in caplog.text
    caplog.clear()
    result = start(FedAvg(ask_names=True), plain_grid(0, 0), rounds=1)
    assert result.groups[1] == [["silo-0", "silo-1"]] and "node 1 states no name" in caplog.text


def described_app(
    calls: list[tuple[str, str, dict[str, Any]]] | None = None, **replaced: Any
) -> ClientApp:
    """The plain app with an answer to ``query.describe``; packed models, fused evaluation.

    Args:
        calls: gets (type, silo, config) of every message.
        replaced: fields of every silo's description; node configs may have ``describe-FIELD``.
    """
    app, plain = ClientApp(), plain_app()

    def note(message: Message, context: Context) -> None:
        if calls is not None:
            config = dict(message.content["config"])
            calls.append((message.metadata.message_type, context.node_config["name"], config))

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        note(message, context)
        config = context.node_config
        fields: dict[str, Any] = {
            "name": str(config["name"]),
            "num_examples": int(config["samples"]),
            "task": str(config.get("task", "toy")),
            "schema": str(config.get("schema", "s")),
            "alpha": config.get("alpha"),
            "min_group_size": int(config.get("min-group-size", 1)),
            "max_local_epochs": int(config.get("max-local-epochs", 0)),
            "protocol": int(config.get("protocol", wire.PROTOCOL)),
        }
        content = wire.encode_description(wire.Description(**(fields | replaced)))
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        note(message, context)
        received = wire.decode_arrays(message.content["arrays"])
        assert wire.is_packed(message.content["arrays"])
        trained = plain_trained(received, context.node_config)
        metrics: dict[str, Any] = {"num-examples": int(context.node_config["samples"])}
        if message.content["config"]["evaluate-received"]:
            metrics |= {"received-error": float(received["w"][0, 0]) % 1, "received-loss": 1.0}
            metrics["received-num-examples"] = context.node_config.get("received", 10)
        content = RecordDict(
            {
                "arrays": wire.encode_arrays(trained, packed=True),
                "metrics": MetricRecord(metrics),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        note(message, context)
        record = message.content["arrays"]
        content = RecordDict(
            {
                "arrays": wire.encode_arrays(wire.decode_arrays(record), packed=False),
                "config": message.content["config"],
            }
        )
        asked = Message(
            content, dst_node_id=context.node_id, message_type=wire.EVALUATE, group_id="0"
        )
        return Message(plain(asked, context).content, reply_to=message)

    return app


def named(name: str, kind: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "noise": ord(name[0]), "samples": 100} | more


def roster(**more: Any) -> DescribedRoster:
    return DescribedRoster(**({"task": "toy", "deadline_s": 0.2} | more))


@EACH
def test_described_silos_answer_for_their_error_with_their_next_training(make: Any) -> None:
    """Only the final models cost an evaluation message; those are for the silos to keep."""
    calls: list[tuple[str, str, dict[str, Any]]] = []
    grid = InProcessGrid(described_app(calls), [named("a"), named("b", 1)])
    result = start(make(roster=roster()), grid)
    kinds = [kind for kind, _, _ in calls]
    assert kinds.count(wire.EVALUATE) == 2
    assert all(config["keep"] for kind, _, config in calls if kind == wire.EVALUATE)
    assert [(r.round, r.evaluated_round) for r in result.rounds] == [(1, 0), (2, 1), (3, 2), (3, 3)]
    assert all(set(report.evaluation) == {"a", "b"} for report in result.rounds)
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}


def test_described_and_plain_silos_get_the_same_models() -> None:
    described = start(
        FedAvg(roster=roster()), InProcessGrid(described_app(), [named("a"), named("b", 1)])
    )
    plain = start(FedAvg(), InProcessGrid(plain_app(), [named("a"), named("b", 1)]))
    assert_equal_models(arrays_of(described.models["a"]), arrays_of(plain.models["silo-0"]))


@pytest.mark.parametrize("count", [0, *NOT_FINITE])
def test_a_bad_count_of_the_received_models_evaluation_does_not_end_the_run(count: float) -> None:
    grid = InProcessGrid(described_app(), [named("a"), named("b", 1, received=count)])
    result = start(FedAvg(roster=roster()), grid)
    assert len(result.rounds) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "t"}, "schema differs"),
        ({"protocol": 9}, "it speaks protocol 9"),
        ({"samples": 0}, "it states 0 training samples"),
        ({"min-group-size": 0}, "its min_group_size must be at least 1. Got 0"),
        ({"max-local-epochs": -1}, "its max_local_epochs must be at least 0. Got -1"),
        ({"name": "a"}, "another silo with that name"),
    ],
)
def test_a_silo_that_cannot_take_part_is_refused_by_name_and_the_run_goes_on(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [named("a"), named("b", 1), named("c") | changes]
    who = roster()
    result = start(FedAvg(roster=who), InProcessGrid(described_app(), nodes))
    refused = changes.get("name", "c")
    assert set(result.models) == {"a", "b"}
    assert list(who.refused) == [refused]
    assert said in who.refused[refused]
    assert f"silo {refused} does not take part" in caplog.text


def test_a_silo_of_another_study_is_no_error_and_is_not_among_the_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    who = roster()
    nodes = [named("a"), named("b", 1), named("c") | {"task": "other"}]
    result = start(FedAvg(roster=who), InProcessGrid(described_app(), nodes))
    assert set(result.models) == {"a", "b"} and who.refused == {}
    assert who.elsewhere == {"c": "it serves task 'other', the run is of task 'toy'."}
    assert "does not take part" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({1: "a", 2: "b", 3: "d"}, "it claims the name 'c', but its key is enrolled as 'd'."),
        ({1: "a", 2: "b"}, "it claims the name 'c', but its key is not enrolled."),
    ],
)
def test_a_name_belongs_to_the_key_that_was_enrolled_with_it(
    keys: dict[int, str], said: str
) -> None:
    who = roster(enrolled=lambda: keys)
    nodes = [named("a"), named("b", 1), named("c")]
    result = start(FedAvg(roster=who), InProcessGrid(described_app(), nodes))
    assert set(result.models) == {"a", "b"}
    assert list(who.refused.values()) == [said]


def test_a_silo_that_refuses_the_run_is_named_with_its_reason() -> None:
    inner = described_app()

    def app(message: Message, context: Context) -> Message:
        if context.node_config["name"] == "b":
            return wire.refusal("not with these people.", message)
        return inner(message, context)

    who = roster()
    start(FedAvg(roster=who), InProcessGrid(app, [named("a"), named("b")]))  # type: ignore[arg-type]
    assert who.refused == {"node 2": "not with these people."}


def test_a_run_that_all_silos_here_refuse_ends_without_waiting_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def app(message: Message, context: Context) -> Message:
        return wire.refusal("not with this task.", message)

    monkeypatch.setattr("coterie.strategies.rounds.roster.REFUSED_S", 0.0)
    said: list[str] = []
    grid = InProcessGrid(app, [named("a"), named("b")])  # type: ignore[arg-type]
    who = DescribedRoster("t", min_silos=2, deadline_s=100.0, on_wait=said.append)
    with pytest.raises(FederationError, match="every silo that is connected refuses") as caught:
        who.present(grid, number=1)
    assert "not with this task" in str(caught.value) and caught.value.exit_code == EXIT_NO_SILOS
    assert "node 1, node 2: not with this task" in said[0], "at once, and not only at the end"
    waits = DescribedRoster("t", min_silos=3, deadline_s=0.2)
    with pytest.raises(FederationError, match=r"they refuse\. Then start another run\."):
        waits.present(grid, number=1)


def test_bytes_are_not_averaged() -> None:
    trees = ArrayRecord({"0": Array(np.zeros(0, np.uint8))})
    with pytest.raises(FederationError, match="Bytes of a serialised model"):
        FedAvg().start(grid=plain_grid(0, 0), initial_arrays=trees, num_rounds=1)


def test_described_silos_that_do_not_come_end_the_run_with_the_reason() -> None:
    grid = InProcessGrid(described_app(), [named("a"), named("b", task="other")])
    with pytest.raises(FederationError, match="1 of at least 2 have joined") as caught:
        start(FedAvg(roster=roster(min_silos=2)), grid)
    assert caught.value.exit_code == EXIT_NO_SILOS
    assert "b serves task 'other', the run is of task 'toy'." in str(caught.value)


def test_silos_that_do_not_take_part_for_one_reason_are_told_in_one_sentence() -> None:
    other = "it serves task 't', the run is of task 'u'."
    found = sentences(
        {"s1": other, "s3": "its name is taken.", "s4": "serves task 'v'.", "s2": other}
        | {f"t{i}": "not now." for i in range(7)}
    )
    assert found == [
        "s1, s2 serve task 't', the run is of task 'u'.",
        "s3: its name is taken.",
        "s4 serves task 'v'.",
        "t0, t1, t2, t3, t4 and 2 more: not now.",
    ]


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_a_silo_with_an_impossible_alpha_does_not_end_everybodys_run(alpha: float) -> None:
    grid = InProcessGrid(described_app(), [named("a"), named("b"), named("c", alpha=alpha)])
    result = start(HCCT(roster=roster()), grid)
    assert {"a", "b"} <= set(result.models)


# ---------------------------------------------------------------- churn


@ONE_MODEL_OR_TWO
def test_a_script_of_churn_lets_in_waits_and_waits_for_leavers(make: Any) -> None:
    nodes = [named("a"), named("b", 1), named("late"), named("c", 1)]
    grid = InProcessGrid(described_app(), nodes)

    def leave(report: RoundReport) -> None:
        if report.round == 3 and not report.final:
            grid.disconnect(2)

    who = roster(churn=Churn.parse("late+2, b-4"))
    result = start(make(roster=who, on_round=leave), grid, rounds=5)
    present = [sorted(n for g in r.groups for n in g) for r in result.rounds]
    assert present[0] == ["a", "b", "c"]
    assert present[1] == present[2] == ["a", "b", "c", "late"]
    assert present[3] == present[4] == ["a", "c", "late"]
    assert result.rounds[1].joined == ("late",)
    assert result.rounds[3].left == ("b",)


@pytest.mark.parametrize(
    ("churn", "said"),
    [("late+2", "round 2 waits for late to join"), ("a-2", "round 2 waits for a to leave")],
)
def test_a_script_that_is_not_kept_ends_the_run_with_what_it_waited_for(
    churn: str, said: str
) -> None:
    who = roster(churn=Churn.parse(churn))
    with pytest.raises(FederationError, match=said) as caught:
        start(FedAvg(roster=who), InProcessGrid(described_app(), [named("a"), named("b")]))
    assert caught.value.exit_code == EXIT_NO_SILOS


def test_churn_is_read_with_dashes_in_names() -> None:
    churn = Churn.parse(" late+7, north-3-14 ,")
    assert (churn.joins, churn.leaves) == ({"late": 7}, {"north-3": 14})
    assert Churn.parse("") == Churn()
    for bad in ("late", "late+", "+3", "late*3", "late+x"):
        with pytest.raises(ValueError, match="churn must be a list"):
            Churn.parse(bad)


@pytest.mark.parametrize("make", [Independent, HCCT], ids=lambda make: make.__name__)
def test_a_silo_that_comes_back_as_another_node_keeps_its_model(make: Any) -> None:
    """Alone in its kind, b trains on from where it stopped, two rounds later."""
    b = named("b", 1)
    grid = InProcessGrid(described_app(), [named("a"), b, named("c")])

    def away(report: RoundReport) -> None:
        if report.final:
            return
        if report.round == 2:
            grid.disconnect(2)
        if report.round == 4:
            grid.connect(b)

    options = {"alpha": 1.0} if make is HCCT else {}
    result = start(make(roster=roster(), on_round=away, **options), grid, rounds=5)
    assert result.rounds[2].left == ("b",) and result.rounds[4].joined == ("b",)
    model = plain_model()
    for _ in range(3):
        model = plain_trained(model, b)
    assert_equal_models(arrays_of(result.models["b"]), model)


def test_with_fedavg_a_silo_that_comes_back_gets_todays_model() -> None:
    grid = InProcessGrid(described_app(), [named("a"), named("b", 1)])

    def away(report: RoundReport) -> None:
        if report.round == 1 and not report.final:
            grid.disconnect(2)
        if report.round == 2 and not report.final:
            grid.connect(named("b", 1))

    result = start(FedAvg(roster=roster(), on_round=away), grid, rounds=3)
    model = fedavg_by_hand([named("a"), named("b", 1)], 1)
    model = plain_trained(model, named("a"))
    both = [plain_trained(model, named("a")), plain_trained(model, named("b", 1))]
    assert_equal_models(arrays_of(result.models["b"]), weighted_mean(both, [100, 100]))


class Flapping(InProcessGrid):
    """Nodes go and come back under the id that they had, as registered keys do.

    Attributes:
        away: node → the looks, from 1, at which it is not listed.
        restarted: look → what is done just before it.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: Sequence[dict[str, Any]],
        away: dict[int, range],
        restarted: dict[int, Callable[[], object]],
    ) -> None:
        super().__init__(app, nodes)
        self.away, self.restarted, self.looks = away, restarted, 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        if self.looks in self.restarted:
            self.restarted[self.looks]()
        return [n for n in self.configs if self.looks not in self.away.get(n, ())]


def test_a_silo_that_was_away_is_asked_anew_once_under_the_same_node_id() -> None:
    """Registered keys keep their node id, so a restarted silo's new terms come no other way."""
    nodes, who = [named("a"), named("b", 1)], roster()
    calls: list[tuple[str, str, dict[str, Any]]] = []
    change = {4: lambda: nodes[1].update(alpha=7.0, samples=30)}
    grid = Flapping(described_app(calls), nodes, {2: range(2, 4)}, change)
    seen = [who.present(grid, number=number) for number in range(1, 7)]
    assert [[silo.name for silo in here] for here in seen] == [
        ["a", "b"], ["a"], ["a"], ["a", "b"], ["a", "b"], ["a", "b"],
    ]  # fmt: skip
    assert [(s.alpha, s.num_examples, s.node_id) for s in seen[3]] == [
        (None, 100, 1), (7.0, 30, 2),
    ]  # fmt: skip
    assert seen[5] == seen[3]
    assert [name for _, name, _ in calls] == ["a", "b", "b"]


def test_a_silo_that_comes_back_with_another_model_is_refused_and_one_mended_is_let_in() -> None:
    nodes, who = [named("a"), named("b", 1), named("c", task="other")], roster()
    change = {4: lambda: (nodes[1].update(schema="t"), nodes[2].update(task="toy"))}
    away = {2: range(3, 4), 3: range(3, 4)}
    grid = Flapping(described_app(), nodes, away, change)
    seen = [who.present(grid, number=number) for number in range(1, 5)]
    assert [[silo.name for silo in here] for here in seen] == [
        ["a", "b"], ["a", "b"], ["a"], ["a", "c"],
    ]  # fmt: skip
    assert list(who.refused) == ["b"] and "schema differs" in who.refused["b"]


def test_a_killed_silo_that_is_restarted_is_let_in_once_its_old_node_is_gone() -> None:
    """Flower lists a killed node for up to a minute: until then its name is taken."""
    b = named("b", 1)
    grid = InProcessGrid(described_app(), [named("a"), b])

    def restart(report: RoundReport) -> None:
        if report.round == 1 and not report.final:
            grid.connect(b)  # the new process; the old node is still listed
        if report.round == 2 and not report.final:
            grid.disconnect(2)

    result = start(FedAvg(roster=roster(), on_round=restart), grid, rounds=4)
    assert set(result.rounds[3].silos) == {"a", "b"}


def test_fedavg_can_sample_silos_by_seed_and_everybody_gets_the_mean() -> None:
    nodes = plain_nodes(0, 1, 2, samples=[10, 70, 75])
    strategy = FedAvg(sample=1, seed=3)
    result = start(strategy, InProcessGrid(plain_app(), nodes), rounds=8)
    model, turns = plain_model(), [list(report.silos) for report in result.rounds[:-1]]
    assert all(len(turn) == 1 for turn in turns) and len({turn[0] for turn in turns}) > 1
    for (name,) in turns:
        model = plain_trained(model, nodes[int(name.removeprefix("silo-"))])
    for record in result.models.values():
        assert_equal_models(arrays_of(record), model)
    again = start(FedAvg(sample=1, seed=3), InProcessGrid(plain_app(), nodes), rounds=8)
    assert [list(report.silos) for report in again.rounds[:-1]] == turns
    with pytest.raises(
        FederationError, match=r"sample must be at least 0 and at most 100000\. Got -1\."
    ):
        FedAvg(sample=-1)


@pytest.mark.parametrize("strategy", ["fedavg", "hcct"])
def test_a_round_that_only_a_silo_set_apart_takes_part_in_ends_no_run(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training of b diverges in round 1, and a is away in round 2."""
    nodes, number = digits("ab"), {"now": 0}
    present = conversation.Line.present

    def coming(self: Any, roster: Any, now: int) -> Any:
        number["now"] = now
        if now == 2:
            grid.configs.pop(next(n for n, own in grid.configs.items() if own["name"] == "a"))
        if now == 3 and len(grid.configs) == 1:
            grid.connect(nodes[0])
        return present(self, roster, now)

    def diverging(silo: str, reply: Message) -> Message:
        meta = reply.metadata
        if silo != "b" or meta.message_type != "train" or number["now"] != 1:
            return reply
        asked = next(m for m in grid.sent if m.metadata.message_id == meta.reply_to_message_id)
        return Message(Error(wire.DIVERGED, "its training diverged"), reply_to=asked)

    monkeypatch.setattr(conversation.Line, "present", coming)
    grid = Tap(nodes, change=diverging)
    found = run(tmp_path / "run", grid, strategy=strategy, rounds=4)
    assert [one.left for one in found.rounds[:3]] == [(), ("a",), ()]
    assert found.rounds[1].groups == (("b",),) and found.rounds[-1].round == 4


def test_one_silo_that_lies_about_validation_does_not_stop_the_run(tmp_path: Path) -> None:
    nodes = [
        node | {"data.train": 100, "data.skip": 150 * i} for i, node in enumerate(digits("abc"))
    ]
    now, last = {"round": ""}, {}

    def lying(silo: str, reply: Message) -> Message:
        metrics = reply.content.get("metrics", {}) if reply.has_content() else {}
        if silo == "c" and lie is not None and now["round"] == "2":
            metrics.update({k: lie for k in metrics if k == wire.RECEIVED_VALIDATION_ERROR})
        return reply

    def before(messages: Sequence[Message]) -> None:
        now["round"] = messages[0].metadata.group_id

    for lie in (None, 0.0, -1e15):
        keys = {"rounds": 9, "validation": 0.3, "patience": 3, "lr": 0.1, "local-epochs": 2}
        grid = Tap(nodes, before=before, change=lying)
        last[lie] = run(tmp_path / f"run{lie}", grid, **keys).rounds[-1].round
    assert last[0.0] == last[-1e15] == last[None] > 4, last
