"""Any Flower strategy inside each group: on the group's nodes, with models of any shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from coterie.server.runs.checkpoint import Checkpoints
from coterie.strategies import HCCT, FederationError, FirstStage, Influence, PerGroup, RunResult
from coterie.strategies.per_group.inner import memory_of, seeded, with_memory
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.nodes import NodeRoster
from coterie.strategies.rounds.reports import RoundReport
from tests.conftest import arrays_of, digits_config, plain_app, plain_initial, plain_nodes
from tests.kit import Tap, start

GROUPS = [["silo-0", "silo-2"], ["silo-1", "silo-3"]]
NO_TREES = ArrayRecord([np.array([], np.uint8)])


class Bagging(flower.FedAvg):
    """Models are bytes, one for each tree; every round adds one of each silo."""

    rounds = 0
    seen: tuple[int, ...] = ()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        came, _ = self._check_and_log_replies(replies, is_train=True)
        self.rounds += 1
        self.seen = tuple(sorted(message.metadata.src_node_id for message in came))
        trees = [message.content["arrays"]["0"].numpy() for message in came]
        if not trees:
            return None, None
        grown = np.concatenate([self.trees, *(own[-1:] for own in trees)])
        return ArrayRecord([grown]), MetricRecord({"trees": len(grown)})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.trees = arrays["0"].numpy()
        return super().configure_train(server_round, arrays, config, grid)


def trees_app(
    spoil: Callable[[int, int], Any] = lambda node, number: None, *, states_loss: bool = True
) -> ClientApp:
    """An app whose trees are its node's kind; its loss is the share of other kinds' trees."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = message.content["arrays"]["0"].numpy()
        config = message.content["config"]
        number = int(config["server-round"])
        assert (number == 1) == (not len(given)), "as in Flower's quickstart-xgboost"
        spoilt = spoil(context.node_id, number)
        if isinstance(spoilt, Exception):
            raise spoilt
        grown = np.append(given, np.uint8(context.node_config["kind"]))
        reply = RecordDict(
            {
                "arrays": ArrayRecord([grown]) if spoilt is None else spoilt,
                "metrics": MetricRecord({"num-examples": int(context.node_config["samples"])}),
                "size": ConfigRecord({"group-size": config["group-size"]}),
            }
        )
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        trees = message.content["arrays"]["0"].numpy()
        metrics: dict[str, Any] = {"num-examples": 10, "trees": len(trees)}
        if states_loss:
            metrics["loss"] = float(np.mean(trees != context.node_config["kind"]))
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def bagging(group: tuple[str, ...]) -> Strategy:
    return Bagging(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)


def grown(result: RunResult) -> dict[str, list[int]]:
    return {n: arrays_of(model)["0"].tolist() for n, model in result.models.items()}


def play(
    grid: Any, rounds: int = 3, groups: Any = GROUPS, inner: Any = bagging, **more: Any
) -> Any:
    engine = {key: more.pop(key) for key in [*more] if key not in ("commit", "resume")}
    strategy = PerGroup(groups, inner, **engine)
    return start(strategy, grid, rounds, initial_arrays=NO_TREES, **more)


# ---------------------------------------------------------------- models of any shape


def test_models_that_grow_stay_within_their_groups() -> None:
    grid = Tap(plain_nodes(1, 2, 1, 2, samples=[100, 200, 100, 200]), trees_app())
    result = play(grid)
    assert grown(result) == {f"silo-{n - 1}": [2 - n % 2] * 6 for n in (1, 2, 3, 4)}
    assert result.groups[1] == GROUPS
    assert [report.metrics["silo-0"]["trees"] for report in result.rounds if report.metrics] == [
        2,
        4,
        6,
    ], "every silo evaluates its group's model after every round"
    assert result.rounds[-1].evaluation["silo-1"][0] == 0.0
    assert result.rounds[0].details["inner"] == {"0": {"trees": 2.0}, "1": {"trees": 2.0}}
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all(m.content["config"]["group-size"] == 2 for m in sent)
    assert all(m.content["config"]["strategy"] == "pergroup" for m in sent)
    assert arrays_of(result.arrays)["0"].tolist() == [2] * 6, "the largest group's, not a mean"


@pytest.mark.parametrize(
    "inner",
    [
        flower.FedAvg,
        lambda: flower.FedAdam(eta=0.1),
        lambda: flower.FedAvgM(server_momentum=0.9),
        flower.FedMedian,
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedYogi(eta=0.1), noise_multiplier=0.0, clipping_norm=1e3, num_sampled_clients=4
        ),
    ],
)
def test_one_group_equals_flowers_own_run(inner: Callable[[], Strategy]) -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    alone = inner().start(
        grid=Tap(nodes, plain_app()), initial_arrays=plain_initial(), num_rounds=4
    )
    everybody = [[f"silo-{n - 1}" for n in (1, 2, 3, 4)]]
    result = start(PerGroup(everybody, lambda group: inner()), Tap(nodes, plain_app()), 4)
    expected = arrays_of(alone.arrays)
    for key, array in arrays_of(result.models["silo-2"]).items():
        np.testing.assert_allclose(array, expected[key], rtol=1e-5, atol=1e-7)


def test_groups_come_from_a_first_stage_on_another_model() -> None:
    both, linear = trees_app(), plain_app()

    @both.train("linear")
    def train(message: Message, context: Context) -> Message:
        message.metadata.__dict__["_message_type"] = "train"
        return linear(message, context)

    @both.evaluate("linear")
    def evaluate(message: Message, context: Context) -> Message:
        message.metadata.__dict__["_message_type"] = "evaluate"
        return linear(message, context)

    first = FirstStage(HCCT(), plain_initial(), num_rounds=3, action="linear")
    grid = Tap(plain_nodes(1, 2, 1, 2), both)
    result = play(grid, groups=first)
    assert result.groups[3] == GROUPS and grown(result)["silo-3"] == [2] * 6


def test_a_first_stage_sees_the_runs_silos_under_their_names() -> None:
    roster = NodeRoster(min_silos=4, names={n: f"site-{n}" for n in (1, 2, 3, 4)})
    stage = FirstStage(HCCT(alpha=20.0, min_silos=3), plain_initial(), num_rounds=2)
    nodes = plain_nodes(0, 1, 0, 1)
    strategy = PerGroup(stage, lambda group: flower.FedAvg(), roster=roster)
    result = start(strategy, Tap(nodes, plain_app()), 2)
    assert result.groups[2] == [["site-1", "site-3"], ["site-2", "site-4"]]
    own = PerGroup(stage, lambda group: flower.FedAvg(), ask_names=True).roster
    assert isinstance(own, NodeRoster) and (own.min_silos, own.ask) == (3, True)


# ---------------------------------------------------------------- who comes and goes


def changing(comes: Mapping[int, Mapping[str, Any]], goes: Mapping[int, int], **app: Any) -> Tap:
    """A grid of four nodes; before a round's training, nodes come or go."""
    done: set[int] = set()

    def before(messages: list[Message]) -> None:
        meta = messages[0].metadata
        number = int(meta.group_id)
        if meta.message_type == "evaluate" and number not in done:
            done.add(number)
            if number + 1 in comes:
                grid.connect(comes[number + 1])
            if number + 1 in goes:
                grid.disconnect(goes[number + 1])

    grid = Tap(plain_nodes(1, 2, 1, 2), trees_app(**app), before=before)
    return grid


def test_a_silo_of_no_group_joins_the_one_whose_model_suits_it() -> None:
    (newcomer,) = plain_nodes(2)
    result = play(changing({3: newcomer}, {}), rounds=4)
    assert result.groups[2] == GROUPS
    assert result.groups[3] == [["silo-0", "silo-2"], ["silo-1", "silo-3", "silo-4"]]
    assert result.rounds[2].details["placed"] == {"silo-4": {"0": 1.0, "1": 0.0}}
    assert grown(result)["silo-4"] == [2] * 10


def test_a_silo_whose_app_states_no_loss_opens_a_new_group() -> None:
    (newcomer,) = plain_nodes(2)
    result = play(changing({3: newcomer}, {}, states_loss=False), rounds=4)
    assert result.groups[3] == [*GROUPS, ["silo-4"]]
    assert grown(result)["silo-4"] == [2, 2], "two rounds, the first of which is its first"


def test_a_silo_that_was_expected_takes_its_place_when_it_comes() -> None:
    (late,) = plain_nodes(1)
    result = play(changing({2: late}, {}), groups=[["silo-0", "silo-2", "silo-4"], GROUPS[1]])
    assert result.groups[1] == GROUPS and len(result.groups[2][0]) == 3
    assert grown(result)["silo-4"] == [1] * (2 + 3 + 3)


def test_who_leaves_is_missed_by_its_group_only() -> None:
    result = play(changing({}, {2: 2}))
    assert result.groups[3] == [["silo-0", "silo-2"], ["silo-3"]]
    assert grown(result)["silo-3"] == [2] * 4 and grown(result)["silo-0"] == [1] * 6


def test_a_group_waits_until_it_has_the_silos_that_its_strategy_needs() -> None:
    def two(group: tuple[str, ...]) -> Strategy:
        return Bagging()  # which, like Flower's, waits for two

    result = play(changing({}, {2: 2}), inner=two)
    assert result.groups[3] == [["silo-0", "silo-2"]]
    assert grown(result)["silo-3"] == [2] * 2, "the model of round 1"
    with pytest.raises(FederationError, match=r"silo-0 \(2 silos\).*min_available_nodes"):
        play(Tap(plain_nodes(1), trees_app()), groups=[["silo-0"]], inner=two, min_silos=1)


# ---------------------------------------------------------------- wrong replies, wrong strategies

OF_NO_USE = {
    "one array more": ArrayRecord([np.zeros(2)] * 2),
    "an error": ValueError("broken"),
    "a number that is none": ArrayRecord([np.array([np.nan])]),
}


@pytest.mark.parametrize("spoilt", OF_NO_USE)
def test_one_silos_wrong_reply_costs_no_other_its_round(spoilt: str) -> None:
    result = play(
        Tap(
            plain_nodes(1, 2, 1, 2),
            trees_app(lambda node, number: OF_NO_USE[spoilt] if node == 1 else None),
        )
    )
    assert grown(result)["silo-2"] == [1] * 3 and grown(result)["silo-1"] == [2] * 6


def test_a_strategy_that_fails_on_every_reply_keeps_its_model_and_says_so() -> None:
    class Failing(Bagging):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            if server_round == 2:
                raise KeyError("no such record")
            return super().aggregate_train(server_round, replies)

    def inner(group: tuple[str, ...]) -> Strategy:
        return Failing() if "silo-0" in group else Bagging()

    result = play(Tap(plain_nodes(1, 2, 1, 2), trees_app()), inner=inner)
    assert grown(result) == {
        f"silo-{n - 1}": [2 - n % 2] * (4 + 2 * (n % 2 == 0)) for n in (1, 2, 3, 4)
    }
    assert "KeyError" in result.rounds[1].details["failed"]["0"]


def test_a_model_that_is_not_finite_does_not_replace_the_last_one() -> None:
    class Diverging(flower.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            model, metrics = super().aggregate_train(server_round, replies)
            grown = {
                k: a * (np.inf if server_round == 2 else 1) for k, a in arrays_of(model).items()
            }
            return ArrayRecord(dict(zip(grown, map(Array, grown.values()), strict=True))), metrics

    result = start(
        PerGroup(GROUPS, lambda group: Diverging()), Tap(plain_nodes(0, 1, 0, 1), plain_app())
    )
    assert "NaN or infinity" in result.rounds[1].details["failed"]["1"]
    assert all(np.isfinite(arrays_of(model)["w"]).all() for model in result.models.values())


class Stray(Bagging):
    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        yield Message(RecordDict(), dst_node_id=99, message_type="train")


class Impatient(Bagging):
    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        while len(list(arguments[-1].get_node_ids())) < 9:
            pass
        return []


@pytest.mark.parametrize(
    ("inner", "said"),
    [(Stray, "sent node 99 a message"), (Impatient, "waits for more nodes than the 2 in it")],
)
def test_a_strategy_that_asks_others_or_waits_for_them_is_stopped(inner: Any, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        play(Tap(plain_nodes(1, 2, 1, 2), trees_app()), inner=lambda group: inner())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: PerGroup([], bagging), "at least one is needed"),
        (lambda: PerGroup([["a"], []], bagging), "none may be empty"),
        (lambda: PerGroup([["a", "b"], ["b"]], bagging), "b is in several"),
        (lambda: PerGroup([["a"]], bagging, secure=True), "needs a strategy that only averages"),
        (lambda: PerGroup([["a"]], bagging, influence=Influence()), "so it cannot be bounded"),
    ],
)
def test_what_cannot_be_is_refused_before_any_message(made: Callable[[], Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        made()


def test_coteries_own_silos_are_refused() -> None:
    from coterie.client.app import app
    from coterie.strategies.rounds.roster import DescribedRoster

    grid = Tap([digits_config("a"), digits_config("b")], app)
    with pytest.raises(FederationError, match="is one of coterie's silos"):
        play(grid, groups=[["a", "b"]], roster=DescribedRoster("digits", min_silos=2))


# ---------------------------------------------------------------- the same again


def test_a_run_resumed_from_its_checkpoint_equals_one_that_never_stopped(tmp_path: Path) -> None:
    """Also with a wrapped strategy that has moments, on nodes whose ids have changed."""

    def wrapped(group: tuple[str, ...]) -> Strategy:
        return flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedAdam(eta=0.1), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=2
        )

    saved = Checkpoints(tmp_path)
    nodes = plain_nodes(0, 1, 0, 1)

    def keep(checkpoint: Checkpoint[Any]) -> None:
        if checkpoint.round == 2:
            saved.save(2, checkpoint)

    def run(rounds: int, **more: Any) -> RunResult:
        result: RunResult = start(
            PerGroup(GROUPS, wrapped, seed=7), Tap(nodes, plain_app()), rounds, **more
        )
        return result

    whole = run(4, commit=keep)
    found = saved.load()
    assert found is not None
    again = run(4, resume=found[1])
    other = start(PerGroup(GROUPS, wrapped, seed=8), Tap(nodes, plain_app()), 4)
    for name, model in whole.models.items():
        for key, array in arrays_of(model).items():
            np.testing.assert_array_equal(array, arrays_of(again.models[name])[key])
    assert not np.array_equal(
        arrays_of(whole.models["silo-0"])["w"], arrays_of(other.models["silo-0"])["w"]
    ), "the noise is drawn by the seed"


def test_bytes_in_a_memory_survive_a_checkpoint(tmp_path: Path) -> None:
    class Remembering(Bagging):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            model, metrics = super().aggregate_train(server_round, replies)
            self.past = (*getattr(self, "past", ()), model["0"].numpy().tobytes())
            return model, metrics

    saved = Checkpoints(tmp_path)
    result = play(
        Tap(plain_nodes(1, 2, 1, 2), trees_app()),
        inner=lambda group: Remembering(),
        commit=lambda checkpoint: saved.save(checkpoint.round, checkpoint),
    )
    found = saved.load()
    assert found is not None
    past = found[1].state.groups[0].memory["past"]
    assert past == (b"\1" * 2, b"\1" * 4, b"\1" * 6)
    assert result.state.groups[0].memory["seen"] == (1, 3)


def test_a_memory_is_a_copy_and_leaves_functions_alone() -> None:
    one = flower.FedAvg(train_metrics_aggr_fn=lambda records, key: MetricRecord({"x": 1}))
    one.history = [1, 2]  # type: ignore[attr-defined]
    memory = memory_of(one)
    one.history.append(3)  # type: ignore[attr-defined]
    assert memory["history"] == [1, 2] and "train_metrics_aggr_fn" not in memory
    other = with_memory(flower.FedAvg(), memory)
    other.history.append(4)  # type: ignore[attr-defined]
    assert memory["history"] == [1, 2]


def test_strategies_draw_from_seeded_generators() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    with seeded(1, 2, 3):
        one = (random.random(), np.random.rand())  # noqa: NPY002
    with seeded(1, 2, 3):
        assert one == (random.random(), np.random.rand())  # noqa: NPY002
    with seeded(1, 2, 4):
        other = (random.random(), np.random.rand())  # noqa: NPY002
    assert one[0] != other[0] and one[1] != other[1]
    assert random.random() == expected


def test_rounds_are_reported_like_any_strategys() -> None:
    reports: list[RoundReport] = []
    play(Tap(plain_nodes(1, 2, 1, 2), trees_app()), on_round=reports.append)
    assert [report.round for report in reports] == [1, 2, 3, 3] and reports[-1].final
    assert reports[0].silos["silo-0"].num_examples == 100
