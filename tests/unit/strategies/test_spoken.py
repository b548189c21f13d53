"""What drop-in strategies say, how they read other apps' metrics, and evaluation by group."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import CFL, HCCT, FedAvg, FederationError, RunResult
from coterie.strategies.rounds.reports import Group, RoundReport
from coterie.strategies.rounds.spoken import groups_text, lines
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    plain_app,
    plain_initial,
    plain_nodes,
    plain_trained,
)
from tests.kit import assert_same_models


def start(strategy: Any, app: Any = None, *kinds: int, rounds: int = 2, **more: Any) -> RunResult:
    grid = InProcessGrid(app or plain_app(), plain_nodes(*(kinds or (0, 0, 1, 1))))
    result: RunResult = strategy.start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=rounds, **more
    )
    return result


def renamed(training: dict[str, str], testing: dict[str, str]) -> ClientApp:
    """The plain app with other names for its metrics; an accuracy is stated in place of none."""
    app, plain = ClientApp(), plain_app()

    def under(names: dict[str, str], message: Message, context: Context) -> Message:
        reply = plain(message, context)
        stated = reply.content["metrics"]
        named = {names.get(str(key), str(key)): value for key, value in stated.items()}
        parts = dict(reply.content.items())
        return Message(RecordDict(parts | {"metrics": MetricRecord(named)}), reply_to=message)  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return under(training, message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return under(testing, message, context)

    return app


# ---------------------------------------------------------------- speaking


def test_without_on_round_every_round_and_its_groups_are_logged_by_flower(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        start(HCCT(alpha=50.0), rounds=2)
    said = [r.getMessage() for r in caplog.records if r.name == "flwr"]
    assert [line.split("]")[0] for line in said if line.startswith("[")] == [
        "[ROUND 1/2", "[ROUND 2/2", "[AFTER ROUND 2"
    ]  # fmt: skip
    assert sum("groups: silo-0, silo-1 | silo-2, silo-3" in line for line in said) == 2
    assert any("training: 4 answered; train-loss 0.5" in line for line in said)
    assert any("evaluation: 4 answered; accuracy 0." in line and "loss" in line for line in said)


def test_with_on_round_nothing_is_said_twice(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[RoundReport] = []
    with caplog.at_level(logging.INFO, logger="flwr"):
        start(FedAvg(on_round=reports.append))
    assert [report.final for report in reports] == [False, False, True]
    assert [r for r in caplog.records if r.name == "flwr"] == []


def test_what_a_strategy_logs_comes_out_where_flowers_does_if_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    own, flower, ear = logging.getLogger("coterie.run"), logging.getLogger("flwr"), Ear()
    monkeypatch.setattr(own, "propagate", False)  # as without handlers above
    monkeypatch.setattr(flower, "handlers", [ear])
    start(CFL(first_split=1), rounds=3)
    assert any("is split into" in line for line in heard)
    assert own.handlers == []


def test_who_is_in_which_group_is_a_line_of_bounded_length() -> None:
    many = tuple(f"node-{i}" for i in range(30))
    text = groups_text([("x",), many, ("a", "b")])
    assert text.startswith("3 groups: node-0, ") and " and 18 more | a, b | alone: x" in text
    assert groups_text([]) == "no groups"


def test_names_of_metrics_cannot_write_lines_of_their_own() -> None:
    stated = {"a": {"x\nERROR all is lost": 1.0, "fine": 2.0}}
    report = RoundReport(1, evaluation={"a": (0.5, 0.5, 3)}, metrics=stated)
    text = "\n".join(lines(report, rounds=1))
    assert "all is lost" not in text and "fine 2" in text


# ---------------------------------------------------------------- metrics of other apps


@pytest.mark.parametrize(
    ("training", "testing"),
    [
        ({"train-loss": "train_loss"}, {"loss": "eval_loss", "accuracy": "eval_acc"}),
        ({"train-loss": "training_loss"}, {"loss": "val_loss", "accuracy": "val_accuracy"}),
        ({"num-examples": "num_examples"}, {"num-examples": "num_examples", "accuracy": "acc"}),
    ],
)
def test_the_usual_spellings_are_understood_by_themselves(
    training: dict[str, str], testing: dict[str, str]
) -> None:
    usual = start(FedAvg())
    other = start(FedAvg(), renamed(training, testing))
    for mine, theirs in zip(usual.rounds, other.rounds, strict=True):
        assert mine.evaluation == theirs.evaluation
        assert {n: s.train_loss for n, s in mine.silos.items()} == {
            n: s.train_loss for n, s in theirs.silos.items()
        }
    assert np.isfinite([error for _, error, _ in other.rounds[-1].evaluation.values()]).all()
    assert_same_models(usual, other)


def test_metrics_keep_the_apps_own_names_beside_ours() -> None:
    names = {"loss": "eval_loss", "accuracy": "eval_acc"}
    result = start(FedAvg(), renamed({"train-loss": "train_loss"}, names))
    record = result.evaluate_metrics_clientapp[2]
    assert {"eval_loss", "eval_acc", "loss", "error"} <= set(record)
    assert record["loss"] == pytest.approx(record["eval_loss"])
    assert record["error"] == pytest.approx(1 - record["eval_acc"])  # type: ignore[operator]
    assert {"train_loss", "train-loss"} <= set(result.train_metrics_clientapp[1])


def test_other_names_are_given_to_the_strategy() -> None:
    app = renamed({"train-loss": "objective"}, {"loss": "badness", "accuracy": "top1"})
    unknown = start(FedAvg(), app)
    assert np.isnan(unknown.rounds[0].silos["silo-0"].train_loss)
    names = {"objective": "train-loss", "badness": "loss", "top1": "accuracy"}
    known = start(FedAvg(metric_names=names), app)
    assert known.rounds[-1].evaluation == start(FedAvg()).rounds[-1].evaluation
    assert known.rounds[0].silos["silo-0"].train_loss == 0.5


def test_a_metric_cannot_be_called_what_nobody_knows() -> None:
    with pytest.raises(FederationError, match=r"metric_names: must map to one of .*Got 'lost'"):
        FedAvg(metric_names={"x": "lost"})


def test_an_accuracy_that_is_none_makes_no_error() -> None:
    assert wire.understood({"accuracy": 87.5}, {}) == {"accuracy": 87.5}
    assert wire.understood({"accuracy": float("nan")}, {}).keys() == {"accuracy"}


# ---------------------------------------------------------------- groups


def test_every_groups_model_is_evaluated_on_the_server() -> None:
    seen: list[tuple[int, Group, ArrayRecord]] = []

    def judge(number: int, group: Group, model: ArrayRecord) -> MetricRecord | None:
        seen.append((number, group, model))
        return MetricRecord({"norm": float(np.abs(model["w"].numpy()).sum())})

    result = start(HCCT(alpha=50.0), rounds=2, evaluate_group_fn=judge)
    pairs = {("silo-0", "silo-1"), ("silo-2", "silo-3")}
    alone = {(f"silo-{i - 1}",) for i in range(1, 5)}
    assert {(number, group) for number, group, _ in seen} == {
        *((1, group) for group in alone),
        *((2, group) for group in pairs),
    }
    for number, group, model in seen:
        if number == 2:
            for name in group:
                assert_equal_models(arrays_of(model), arrays_of(result.models[name]))
    assert set(result.evaluate_metrics_groups[2]) == pairs


def test_a_silo_that_states_its_smallest_group_with_its_update_is_kept_to_it() -> None:
    """It trained for a group of four of which two answered: it does not count in their mean."""

    def fault(message: Message, answer: RecordDict) -> Message | RecordDict:
        assert message.content["config"]["group-size"] in (1, 4)
        node = message.metadata.dst_node_id
        if node == 1:
            answer["metrics"]["min-group-size"] = 3
        if node in (3, 4):
            from flwr.app import Error

            return Message(Error(1, "away"), reply_to=message)
        return answer

    result = start(FedAvg(), plain_app(fault), 0, 1, 2, 3, rounds=1)
    why = result.rounds[0].left_out["silo-0"]
    assert "it accepts groups of at least 3 silos, but only 2 of its group answered" in why
    alone = plain_trained(arrays_of(plain_initial()), plain_nodes(0, 1, 2, 3)[1])
    assert_equal_models(arrays_of(result.models["silo-1"]), alone)


def test_every_clientapp_is_told_what_a_silos_policy_asks_for() -> None:
    configs: list[dict[str, Any]] = []

    def fault(message: Message, answer: RecordDict) -> RecordDict:
        configs.append(dict(message.content["config"].items()))
        return answer

    start(FedAvg(train_config={"lr": 0.1}), plain_app(fault), 0, 0, rounds=1)
    assert all(
        c.items() >= {"strategy": "fedavg", "rounds": 1, "group-size": 2}.items() for c in configs
    )
