"""The baselines against literal versions in numpy, their newcomers and leavers, and bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig, keys_of
from coterie.server.runs.run import build_strategy
from coterie.strategies import (
    APFL,
    CFL,
    FLHC,
    FLSC,
    IFCA,
    MAXFL,
    FedAvg,
    FederationError,
    FedFA,
    FedNova,
    FeSEM,
    Independent,
    Influence,
    KMeans,
    PerFedAvg,
    PFedGraph,
    PFedMe,
    RunResult,
)
from coterie.strategies.plain.within import num_steps
from coterie.strategies.registry import ROWS, STRATEGIES
from coterie.strategies.rivals.flsc import first_choices
from coterie.strategies.rivals.one_model import FedFAState, information
from coterie.strategies.rounds.algorithm import Answers, Round, Update
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.wire import Model
from tests import kit
from tests.conftest import (
    LossyGrid,
    arrays_of,
    assert_equal_models,
    at,
    error_reply,
    plain_app,
    plain_nodes,
    plain_target,
    plain_trained,
)
from tests.kit import assert_same_models
from tests.unit.strategies.by_hand import Minimums

NODES = plain_nodes(0, 1, 0, 2, 1, samples=[40, 70, 60, 50, 85])
NAMES = [f"silo-{i - 1}" for i in range(1, 6)]
SIZES = np.array([40, 70, 60, 50, 85])
KINDS = [["silo-0", "silo-2"], ["silo-1", "silo-4"], ["silo-3"]]


def w0() -> Model:
    rng = np.random.default_rng(5)
    return {
        "w": rng.normal(size=(6, 5)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float32),
    }


def record(model: Model) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in model.items()})


def run(
    strategy: GroupStrategy,
    nodes: Sequence[Mapping[str, Any]] = NODES,
    rounds: int = 4,
    grid: InProcessGrid | None = None,
) -> RunResult:
    grid = grid if grid is not None else InProcessGrid(plain_app(), nodes)
    return strategy.start(grid, record(w0()), num_rounds=rounds, timeout=0.05)


HEAD_FIRST = {"personal": "head-first"}
NOTHING_CLIPPED = Influence(clip_updates=0)
"""For algorithms that are compared with their literal text."""


def flat(model: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(model[k], np.float64).ravel() for k in ("w", "b")])


def loss(model: Mapping[str, Any], node: Mapping[str, Any]) -> float:
    """As the plain app evaluates."""
    return float(np.mean((model["w"] - plain_target(node)["w"]) ** 2))


def mean(models: Sequence[Model], weights: Any) -> Model:
    w = np.asarray(weights, np.float64) / np.sum(weights)
    return {
        k: sum(f * m[k].astype(np.float64) for f, m in zip(w, models, strict=True)).astype(  # type: ignore[union-attr]
            np.float32
        )
        for k in models[0]
    }


def assert_models(result: RunResult, expected: Sequence[Model]) -> None:
    for name, model in zip(NAMES, expected, strict=False):
        got = arrays_of(result.models[name])
        for key in model:
            np.testing.assert_allclose(got[key], model[key], atol=2e-6, err_msg=f"{name} {key}")


def partition(result: RunResult, round: int) -> list[list[str]]:
    return result.groups[round]


class Joining(InProcessGrid):
    """Nodes that come and go: round → what happens to the grid before it."""

    def __init__(self, nodes: Any, events: Mapping[int, Callable[[Joining], Any]]) -> None:
        super().__init__(plain_app(), nodes)
        self.events, self.looks = events, 0

    def get_node_ids(self) -> Any:
        self.looks += 1
        if self.looks in self.events:
            self.events[self.looks](self)
        return super().get_node_ids()


LATE = {"kind": 1, "noise": 9, "samples": 50}


# ---------------------------------------------------------------- IFCA and FLSC


@pytest.mark.parametrize(("num_models", "count"), [(1, 1), (3, 1), (3, 2), (4, 3), (9, 1)])
def test_ifca_and_flsc_are_the_literal_algorithm(num_models: int, count: int) -> None:
    models = list(first_choices(w0(), num_models, 3).models)
    for _ in range(4):
        losses = [[loss(m, node) for m in models] for node in NODES]
        chosen = [sorted(sorted(range(num_models), key=row.__getitem__)[:count]) for row in losses]
        starts = [mean([models[j] for j in c], np.ones(count)) for c in chosen]
        trained = [plain_trained(s, n) for s, n in zip(starts, NODES, strict=True)]
        for j in range(num_models):
            own = [i for i, c in enumerate(chosen) if j in c]
            if own:
                models[j] = mean([trained[i] for i in own], SIZES[own])
    strategy: GroupStrategy = IFCA(num_groups=num_models, seed=3, influence=NOTHING_CLIPPED)
    if count > 1:
        strategy = FLSC(num_groups=num_models, soft_groups=count, seed=3, influence=NOTHING_CLIPPED)
    result = run(strategy)
    assert_models(result, [mean([models[j] for j in c], np.ones(count)) for c in chosen])
    details = result.rounds[3].details
    assert [details["chosen"][name] for name in NAMES] == chosen
    unused = set(range(num_models)) - {j for c in chosen for j in c}
    assert details["unused-models"] == sorted(unused)


def test_models_that_nobody_chose_keep_their_weights() -> None:
    result = run(IFCA(num_groups=9, seed=3))
    unused = result.rounds[3].details["unused-models"]
    assert len(unused) >= 4  # five silos choose at most five of nine
    first = first_choices(w0(), 9, 3).models
    never = set(range(9)) - {
        j for r in result.rounds for c in r.details["chosen"].values() for j in c
    }
    assert never
    for j in never:
        assert_equal_models(result.state.models[j], first[j])


def test_permuted_initial_models_hold_the_values_of_w0_and_differ() -> None:
    models = first_choices(w0(), 3, 0).models
    assert_equal_models(models[0], w0())
    for model in models[1:]:
        assert not np.array_equal(model["w"], w0()["w"])
        np.testing.assert_array_equal(np.sort(model["w"].ravel()), np.sort(w0()["w"].ravel()))
    again = first_choices(w0(), 3, 0).models
    assert_equal_models(models[2], again[2])


def test_models_of_a_constant_start_differ_so_that_ifca_finds_the_kinds() -> None:
    """As a linear model's that starts at 0; whole numbers, such as counters, stay."""
    zero = {k: np.zeros_like(a) for k, a in w0().items()}
    counted = first_choices({**zero, "count": np.array(3)}, 2, 0).models
    assert counted[1]["count"] == 3 and 0 < np.ptp(counted[1]["w"]) < 0.1
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1, 0, 1))
    result = IFCA(num_groups=2, seed=3).start(grid, record(zero), num_rounds=2)
    assert result.groups[2] == [["silo-0", "silo-2"], ["silo-1", "silo-3"]]


def test_a_newcomer_of_ifca_chooses_before_it_trains() -> None:
    grid = Joining(NODES, {3: lambda g: g.connect(LATE)})
    result = run(IFCA(num_groups=3, seed=3), grid=grid)
    assert result.rounds[2].joined == ("silo-5",)
    losses = result.rounds[2].details["losses"]["silo-5"]
    assert result.rounds[2].details["chosen"]["silo-5"] == [int(np.argmin(losses))]


def test_a_silo_that_answers_no_loss_keeps_its_choice_and_a_new_one_takes_the_usual() -> None:
    app = plain_app()
    silent = ClientApp()

    @silent.train()
    def train(message: Message, context: Any) -> Message:
        return app(message, context)

    @silent.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        if context.node_config["samples"] == 85:
            raise ValueError("no evaluation here")
        return app(message, context)

    result = run(IFCA(num_groups=3, seed=3), grid=InProcessGrid(silent, NODES), rounds=2)
    details = result.rounds[0].details
    assert "silo-4" not in details["losses"]
    others = [tuple(details["chosen"][n]) for n in NAMES[:4]]
    assert tuple(details["chosen"]["silo-4"]) == max(sorted(others), key=sorted(others).count)
    assert "silo-4" in result.models


class Judging:
    """The plain app, in which one node states other losses of the K models from a round on."""

    def __init__(self, node: int, *, after: int, stated: Mapping[int, float]) -> None:
        self.app, self.node, self.after, self.stated = plain_app(), node, after, stated

    def __call__(self, message: Message, context: Any) -> Message:
        reply = self.app(message, context)
        purpose = str(message.content["config"].get("purpose", ""))
        if purpose and context.node_id == self.node and int(message.metadata.group_id) > self.after:
            number = int(purpose.removeprefix("model-"))
            metrics = reply.content["metrics"]
            metrics["loss"] = self.stated.get(number, metrics["loss"])  # type: ignore[index,union-attr]
        return reply


def judged(strategy: GroupStrategy, stated: Mapping[int, float]) -> list[Any]:
    """Details of two rounds; in the second silo-0 states these losses."""
    app: Any = Judging(1, after=1, stated=stated)
    result = run(strategy, grid=InProcessGrid(app, NODES), rounds=2)
    return [report.details for report in result.rounds[:2]]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_model_without_a_loss_is_the_worst_one_and_no_reason_to_keep_a_choice(
    loss: float,
) -> None:
    before = judged(IFCA(num_groups=3, seed=3), {})[1]["losses"]["silo-0"]
    ranked = np.argsort(before).tolist()
    one, two = judged(IFCA(num_groups=3, seed=3), {ranked[0]: loss})
    assert one["chosen"]["silo-0"] == [ranked[0]]
    assert two["chosen"]["silo-0"] == [ranked[1]]
    assert two["losses"]["silo-0"][ranked[0]] is None
    json.dumps(two, allow_nan=False)


def test_a_silo_with_a_loss_of_no_model_keeps_its_choice_and_flsc_takes_none_without() -> None:
    everywhere = dict.fromkeys(range(3), math.nan)
    one, two = judged(IFCA(num_groups=3, seed=3), everywhere)
    assert two["chosen"]["silo-0"] == one["chosen"]["silo-0"] and "silo-0" not in two["losses"]
    _, two = judged(FLSC(num_groups=3, soft_groups=2, seed=3), {0: math.nan, 2: math.nan})
    assert two["chosen"]["silo-0"] == [1]


# ---------------------------------------------------------------- FedFA


def test_fedfa_is_the_literal_formula() -> None:
    model = w0()
    for _ in range(4):
        accuracy = np.array([1 / (1 + loss(model, node)) for node in NODES])
        trained = [plain_trained(model, node) for node in NODES]
        model = mean(trained, -np.log2(accuracy))
    assert_models(run(FedFA()), [model] * 5)


def test_fedfa_weighs_no_silo_by_its_accuracy_of_an_earlier_model() -> None:
    """Of the last round's silos, b answers again and a does not."""
    silos, algorithm = (Silo("a", 1), Silo("b", 2)), FedFA().algorithm
    members = Members(w0(), dict.fromkeys("ab", w0()), groups=(("a", "b"),))
    before = FedFAState(members, {"a": (0.1, 10.0), "b": (0.1, 10.0)})
    asking = algorithm.prepare(before, Round(2, silos))
    (_, order) = next(asking)
    told = Update(silos[1], w0(), w0(), 10.0, {"error": 0.5}, order.purpose, order.kind)
    with pytest.raises(StopIteration) as end:
        asking.send(Answers([told]))
    assert end.value.value.accuracy == {"b": (0.5, 10.0)}


def test_fedfa_weights_at_their_ends() -> None:
    assert information([(0.5, 10), (0.25, 10)]) == [1.0, 2.0]
    assert information([(1.0, 10), (1.0, 4)]) == [1.0, 1.0]
    assert information([(0.0, 8), (0.5, 8)]) == [4.0, 1.0]  # half a sample of eight
    assert information([(0.5, 10), None, (0.125, 10)]) == [1.0, 2.0, 3.0]
    assert information([None, None]) == [1.0, 1.0]


# ---------------------------------------------------------------- FedNova


def test_fednova_is_the_literal_formula_with_momentum_and_without() -> None:
    for momentum in (0.0, 0.9):
        config: dict[str, Any] = {"local-epochs": 2, "batch-size": 32, "momentum": momentum}
        steps = 2 * np.ceil(SIZES / 32)
        a = steps
        if momentum:
            rest = 1 - momentum
            a = np.array(
                [sum((1 - momentum ** (t - k)) / rest for k in range(int(t))) for t in steps]
            )
        p, model = SIZES / SIZES.sum(), w0()
        for _ in range(3):
            moves = [
                {k: plain_trained(model, n)[k].astype(np.float64) - model[k] for k in model}
                for n in NODES
            ]
            tau = float((p * a).sum())
            model = {
                k: (
                    model[k] + tau * sum(q * m[k] / f for q, m, f in zip(p, moves, a, strict=True))
                ).astype(np.float32)
                for k in model
            }
        assert_models(run(FedNova(train_config=config), rounds=3), [model] * 5)


def test_fednova_takes_the_steps_that_a_silo_states() -> None:
    def stated(message: Message, answer: RecordDict) -> RecordDict:
        answer["metrics"]["num-steps"] = 7  # type: ignore[index]
        return answer

    grid = InProcessGrid(plain_app(stated), NODES)
    result, fedavg = run(FedNova(), grid=grid), run(FedAvg())
    for key, array in arrays_of(fedavg.models["silo-0"]).items():
        np.testing.assert_allclose(arrays_of(result.models["silo-0"])[key], array, atol=1e-6)


def test_fednova_counts_the_steps_that_it_asked_for() -> None:
    """Twenty steps at each of two silos of 1000 and 100 samples: they count by their samples."""
    strategy = FedNova(train_config={"local-steps": 20, "local-epochs": 3, "batch-size": 32})
    updates = [
        Update(Silo(name, 1), w0(), w0(), samples, {})
        for name, samples in (("a", 1000.0), ("b", 100.0))
    ]
    assert [num_steps(update, strategy.train_config) for update in updates] == [20, 20]
    nodes = plain_nodes(0, 1, samples=[1000, 100])
    result, fedavg = run(strategy, nodes), run(FedAvg(), nodes)
    for key, array in arrays_of(fedavg.models["silo-0"]).items():
        np.testing.assert_allclose(arrays_of(result.models["silo-0"])[key], array, atol=1e-6)


# ---------------------------------------------------------------- FeSEM


def test_fesem_is_the_literal_stochastic_em() -> None:
    result = run(FeSEM(num_groups=3, seed=1), rounds=1)
    trained = [plain_trained(w0(), node) for node in NODES]
    centre_of = [result.rounds[0].details["centre"][n] for n in NAMES]
    centres = []
    for j in range(3):  # round 1: the seeds are local models; the rest is the algorithm
        own = [i for i in range(5) if centre_of[i] == j]
        centres.append(mean([trained[i] for i in own], SIZES[own]))
    for _ in range(3):
        trained = [plain_trained(centres[c], n) for c, n in zip(centre_of, NODES, strict=True)]
        square = [[np.sum((flat(t) - flat(c)) ** 2) for c in centres] for t in trained]
        centre_of = [int(np.argmin(row)) for row in square]
        for j in range(3):
            own = [i for i in range(5) if centre_of[i] == j]
            if own:
                centres[j] = mean([trained[i] for i in own], SIZES[own])
    assert_models(run(FeSEM(num_groups=3, seed=1)), [centres[c] for c in centre_of])


def test_fesem_finds_the_kinds_and_places_a_newcomer() -> None:
    grid = Joining(NODES, {3: lambda g: g.connect(LATE)})
    result = run(FeSEM(num_groups=3), grid=grid)
    assert partition(result, 2) == KINDS
    assert partition(result, 4) == [KINDS[0], ["silo-1", "silo-4", "silo-5"], ["silo-3"]]


def test_fesem_with_more_centres_than_silos_leaves_everybody_alone() -> None:
    result = run(FeSEM(num_groups=50))
    assert partition(result, 1) == [[name] for name in NAMES]


def test_a_silo_that_does_not_answer_fesem_keeps_its_centre() -> None:
    grid = LossyGrid(plain_app(), NODES, lost=[(1, 3)])
    assert partition(run(FeSEM(num_groups=3), grid=grid), 4) == KINDS


# ---------------------------------------------------------------- MAXFL


def test_maxfl_is_the_literal_rule() -> None:
    threshold, warm_up = 0.1, 1
    own = [plain_trained(w0(), node) for node in NODES]
    shared = mean(own, SIZES)
    for round in range(2, 6):
        inside = [
            round <= 1 + warm_up or loss(shared, n) <= loss(o, n) - threshold
            for n, o in zip(NODES, own, strict=True)
        ]
        trained = [
            plain_trained(shared if i else o, n) for i, o, n in zip(inside, own, NODES, strict=True)
        ]
        own = [o if i else t for i, o, t in zip(inside, own, trained, strict=True)]
        rows = [i for i, yes in enumerate(inside) if yes]
        shared = mean([trained[i] for i in rows], SIZES[rows]) if rows else shared
    held = [shared if i else o for i, o in zip(inside, own, strict=True)]
    result = run(MAXFL(threshold=threshold, warm_up=warm_up, own_rounds=1), rounds=5)
    took_part = [name for name, i in zip(NAMES, inside, strict=True) if i]
    assert result.rounds[4].details["inside"] == took_part
    assert_models(result, held)


def test_maxfl_can_train_the_own_models_for_longer_beside_the_global_one() -> None:
    result = run(MAXFL(threshold=1e6, warm_up=2, own_rounds=3), rounds=4)
    own = [w0()] * 5
    for _ in range(4):
        own = [plain_trained(o, node) for o, node in zip(own, NODES, strict=True)]
    assert partition(result, 3) == [NAMES]
    assert partition(result, 4) == [[name] for name in NAMES]  # nobody meets it: on alone
    assert_models(result, own)


def test_a_threshold_that_nobody_meets_leaves_all_alone_and_one_that_all_meet_is_fedavg() -> None:
    alone, nobody = run(Independent()), run(MAXFL(threshold=1e6, warm_up=0))
    assert partition(nobody, 3) == [[name] for name in NAMES]
    everybody, fedavg = run(MAXFL(threshold=-1e6, warm_up=0)), run(FedAvg())
    assert partition(everybody, 3) == [NAMES]
    assert_same_models(alone, nobody, NAMES)
    assert_same_models(fedavg, everybody, NAMES)


def test_the_requirement_of_maxfl_is_a_model_trained_alone_for_as_long_as_the_global_one() -> None:
    """With one round alone any common model would do, and MAXFL would be FedAvg."""
    usual, explicit = run(MAXFL(warm_up=2)), run(MAXFL(warm_up=2, own_rounds=3))
    assert partition(usual, 3) == [NAMES]
    assert partition(usual, 4) == [[name] for name in NAMES], "kinds that contradict each other"
    assert_same_models(explicit, usual, NAMES)


def test_a_newcomer_of_maxfl_trains_its_own_model_first() -> None:
    grid = Joining(NODES, {3: lambda g: g.connect(LATE)})
    result = run(MAXFL(threshold=-1e6, warm_up=0), grid=grid)
    assert ["silo-5"] in partition(result, 3)
    assert partition(result, 4) == [[*NAMES, "silo-5"]]


# ---------------------------------------------------------------- CFL


def test_cfl_splits_until_the_kinds_are_apart() -> None:
    strategy = CFL(eps_mean=0.3, eps_largest=0.35, first_split=1)
    result = run(strategy, rounds=12)
    assert partition(result, 12) == KINDS
    assert len(result.rounds[-1].details["splits"]) == 2


def test_cfl_is_fedavg_until_it_splits_and_fedavg_in_every_part_after() -> None:
    keys: dict[str, Any] = {"eps_mean": 0.3, "eps_largest": 0.35, "first_split": 1}
    result = run(CFL(**keys, influence=NOTHING_CLIPPED), rounds=12)
    held, groups = {n: w0() for n in NAMES}, [NAMES]
    for round in range(1, 13):
        trained = {n: plain_trained(held[n], NODES[i]) for i, n in enumerate(NAMES)}
        groups = partition(result, round)
        for group in groups:
            rows = [NAMES.index(n) for n in group]
            held |= dict.fromkeys(group, mean([trained[n] for n in group], SIZES[rows]))
    assert_models(result, [held[n] for n in NAMES])


def test_a_newcomer_walks_down_the_tree_of_cfl() -> None:
    grid = Joining(NODES, {12: lambda g: g.connect(LATE)})
    result = run(CFL(eps_mean=0.3, eps_largest=0.35, first_split=1), grid=grid, rounds=12)
    assert partition(result, 12) == [KINDS[0], ["silo-1", "silo-4", "silo-5"], ["silo-3"]]
    placing = result.rounds[11].phases["train"]
    assert placing.exchanges == placing.messages <= 2


def test_a_silo_that_missed_a_split_of_cfl_is_placed_later() -> None:
    keys: dict[str, Any] = {"eps_mean": 0.3, "eps_largest": 0.35, "first_split": 1}
    splits = run(CFL(**keys), rounds=12).rounds[-1].details["splits"]
    first = min(split["round"] for split in splits.values())
    grid = LossyGrid(plain_app(), NODES, lost=[(1, first)])
    result = run(CFL(**keys), grid=grid, rounds=14)
    assert partition(result, 14) == KINDS


# ---------------------------------------------------------------- k-means and FL+HC


@pytest.mark.parametrize(
    ("strategy", "formed"),
    [
        (KMeans(num_groups=3), 1),
        (FLHC(rounds_before=0, max_distance=0.4), 1),
        (FLHC(rounds_before=2), 3),
        (FLHC(rounds_before=0, metric="euclidean", linkage="ward", max_distance=3.0), 1),
        (FLHC(rounds_before=1, linkage="complete"), 2),
    ],
)
def test_groups_that_are_formed_once(strategy: GroupStrategy, formed: int) -> None:
    """FedAvg before, the kinds apart from the clustering on; a newcomer is placed."""
    grid = Joining(NODES, {5: lambda g: g.connect(LATE), 6: lambda g: g.disconnect(4)})
    result = run(strategy, grid=grid, rounds=6)
    held = {n: w0() for n in NAMES}
    for round in range(1, 5):
        trained = {n: plain_trained(held[n], NODES[i]) for i, n in enumerate(NAMES)}
        groups = partition(result, round)
        assert groups == (KINDS if round >= formed else [NAMES])
        for group in groups:
            rows = [NAMES.index(n) for n in group]
            held |= dict.fromkeys(group, mean([trained[n] for n in group], SIZES[rows]))
    four = run(strategy, rounds=4)
    assert_models(four, [held[n] for n in NAMES])
    assert partition(result, 5) == [KINDS[0], ["silo-1", "silo-4", "silo-5"], ["silo-3"]]
    assert partition(result, 6) == [KINDS[0], ["silo-1", "silo-4", "silo-5"]]
    assert [] in result.rounds[5].details["members"]  # silo-3's group stays, with nobody here


def test_a_silo_lost_in_the_clustering_is_placed_in_the_next_round() -> None:
    grid = LossyGrid(plain_app(), NODES, lost=[(1, 1)])
    result = run(KMeans(num_groups=3), grid=grid)
    assert partition(result, 2) == KINDS


def test_more_means_than_silos_leave_everybody_alone() -> None:
    assert partition(run(KMeans(num_groups=50)), 1) == [[name] for name in NAMES]


def test_k_means_pre_trains_in_epochs_where_rounds_count_steps() -> None:
    asked: list[tuple[str, Any, Any]] = []

    def note(message: Message, answer: RecordDict) -> RecordDict:
        config = message.content["config"]
        round = message.metadata.group_id
        asked.append((round, config.get("local-epochs"), config.get("local-steps")))  # type: ignore[union-attr]
        return answer

    grid = InProcessGrid(plain_app(note), NODES)
    common: dict[str, Any] = {"local-epochs": 1, "local-steps": 20}
    run(KMeans(num_groups=3, cold_start_epochs=7, train_config=common), grid=grid, rounds=2)
    assert set(asked) == {("1", 7, 0), ("2", 1, 20)}


# ---------------------------------------------------------------- Per-FedAvg and pFedMe


def test_pfedme_mixes_with_the_server_rate() -> None:
    model = w0()
    for _ in range(3):
        moved = mean([plain_trained(model, node) for node in NODES], SIZES)
        model = mean([model, moved], [0.7, 0.3])
    assert_models(run(PFedMe(server_lr=0.3), rounds=3), [model] * 5)


@pytest.mark.parametrize("make", [PerFedAvg, PFedMe, APFL])
def test_silos_that_do_not_understand_end_the_run_with_a_reason(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app, plain = ClientApp(), plain_app()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        return plain(message, context)

    with pytest.raises(
        FederationError, match=r"'train\.a?p\w+', which none of the 5 connected nodes"
    ):
        run(make(), grid=InProcessGrid(app, NODES))


# ---------------------------------------------------------------- arguments, and real silos


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: IFCA(num_groups=0), r"num_groups must be at least 1 and at most 100000\. Got 0\."),
        (
            lambda: FLSC(num_groups=2, soft_groups=3),
            r"soft_groups must be at most num_groups = 2\. Got 3\.",
        ),
        (lambda: FLSC(soft_groups=0), "soft_groups must be at least 1"),
        (lambda: IFCA(soft_groups=2), "unknown key 'soft_groups'"),
        (lambda: MAXFL(threshold=float("nan")), "threshold must be at least .* Got nan"),
        (lambda: CFL(eps_mean=0), "eps_mean must be above 0"),
        (lambda: FLHC(max_distance=0), "max_distance must be above 0"),
        (lambda: FLHC(metric="l1"), "metric must be cosine or euclidean"),  # type: ignore[arg-type]
        (lambda: FLHC(linkage="ward"), "ward needs metric = euclidean. Got 'cosine'"),
        (lambda: FLHC(linkage="w"), "linkage must be"),  # type: ignore[arg-type]
        (lambda: PerFedAvg(adapt_steps=-1), "adapt_steps must be at least 0"),
        (lambda: PFedMe(adapt_steps=-1), "adapt_steps must be at least 0"),
        (lambda: PFedMe(moreau_lr=1.0), "at most 1"),
        (lambda: PFedMe(train_config={"lr": 1.0}), "diverge"),
        (lambda: APFL(mixture=1.5), "mixture must be at least 0 and at most 1. Got 1.5"),
        (lambda: APFL(train_config={"personalise": "ditto"}), "personalise must be none"),
        (lambda: APFL(train_config={"keep-optimiser": True}), "keep-optimiser must be false"),
        (lambda: APFL(train_config={"precision": "float16"}), "use precision = float32"),
        (lambda: APFL(train_config=HEAD_FIRST), "apfl sets its own steps: personal = head-first"),
        (lambda: PFedMe(train_config=HEAD_FIRST), "pfedme sets its own steps: personal = head"),
        (lambda: PerFedAvg(train_config=HEAD_FIRST), r"Use personal = head\."),
        (lambda: PFedGraph(graph_alpha=0), "graph_alpha must be above 0"),
        (lambda: FedNova(train_config={"lr": 0.5, "proximal-mu": 2.0}), "must be below 1"),
    ],
)
def test_arguments_out_of_bounds_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(FederationError, match=text):
        make()


@pytest.mark.parametrize(("make", "papers"), [(PerFedAvg, 1), (PFedMe, 20)])
def test_zero_steps_of_adaption_are_the_papers_number(make: Any, papers: int) -> None:
    assert make().train_config["adapt-steps"] == papers
    assert make(adapt_steps=7).train_config["adapt-steps"] == 7


OTHERS = ("independent", "fedavg", "fedensemble")
"""In a module of baselines, and checked elsewhere."""
BASELINE_NAMES = sorted(
    row.name for row in ROWS if row.module.startswith("rivals.") and row.name not in OTHERS
)


def keys_for(name: str, **keys: Any) -> dict[str, Any]:
    """The strategy, and those of the keys that it has."""
    own = kit.dashed(keys)
    return {"strategy": name} | {k: v for k, v in own.items() if k in keys_of(STRATEGIES[name])}


@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_each_runs_on_coteries_silos_by_its_configuration(name: str, tmp_path: Path) -> None:
    """Three digits silos: the choosing ones use training data, errors are measured every round."""
    keys = keys_for(name, warm_up=0, num_groups=2)
    result = kit.run(tmp_path, kit.digits(), local_epochs=1, **keys)
    assert sorted(result.models) == ["a", "b", "c"]
    assert all(not report.left_out for report in result.rounds)
    assert sorted(result.rounds[-1].evaluation) == ["a", "b", "c"]
    assert all(len(report.evaluation) == 3 for report in result.rounds)
    asked = {kind for report in result.rounds for kind in report.phases}
    chooses = name in ("maxfl", "fedfa", "ifca", "flsc")
    assert asked == ({"evaluate.training"} if chooses else set())


def test_auto_groups_are_refused_where_there_is_no_such_choice() -> None:
    for name in ("ifca", "flsc", "fesem", "kmeans"):
        said = r"num-groups must be a whole number, at least 1 and at most 100000\. Got 'auto'\."
        with pytest.raises(FederationError, match=said):
            RunConfig.read({"strategy": name, "num-groups": "auto"})


@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_a_bad_reply_in_any_round_leaves_the_others_going(name: str) -> None:
    config = RunConfig.read(keys_for(name, warm_up=0, num_groups=2))
    for round in (1, 2, 3):
        strategy = build_strategy(
            config, run="x", roster=DescribedRoster("digits"), on_round=lambda r: None
        )
        strategy.roster = FedAvg().roster
        grid = InProcessGrid(plain_app(at(2, round, error_reply)), NODES)
        result = strategy.start(
            grid, record(w0()), num_rounds=4, train_config=ConfigRecord({"lr": 0.01})
        )
        assert sorted(result.models) == NAMES
        for model in result.models.values():
            assert all(np.isfinite(array).all() for array in arrays_of(model).values())


# ---------------------------------------------------------------- a sample of the silos


@pytest.mark.parametrize("make", [IFCA, FLSC, FeSEM])
def test_a_sample_of_silos_trains_each_round_and_all_get_their_turn(make: Any) -> None:
    result = run(make(sample=2, seed=1), rounds=8)
    trained = [sorted(report.silos) for report in result.rounds[:8]]
    assert all(len(names) == 2 for names in trained)
    assert {name for names in trained for name in names} == set(NAMES)
    assert result.groups == run(make(sample=2, seed=1), rounds=8).groups
    assert sorted(result.models) == NAMES
    with pytest.raises(FederationError, match="sample must be at least 0"):
        make(sample=-1)


def test_a_silo_that_comes_late_to_its_turn_starts_fesem_from_the_mean_of_the_centres() -> None:
    grid = Joining(NODES[:2], {2: lambda g: g.connect(LATE)})
    state = run(FeSEM(num_groups=2, seed=1), grid=grid, rounds=1).state
    centres = state.centres
    grid = Joining(NODES[:2], {2: lambda g: g.connect(LATE)})
    result = run(FeSEM(num_groups=2, seed=1), grid=grid, rounds=2)
    late = plain_trained(mean(centres, [1, 1]), LATE)
    own = int(np.argmin([np.sum((flat(late) - flat(c)) ** 2) for c in centres]))
    (fellow,) = (i for i in (0, 1) if state.centre_of[NAMES[i]] == own)
    trained = plain_trained(centres[own], NODES[fellow])
    expected = mean([trained, late], [NODES[fellow]["samples"], LATE["samples"]])
    for key, array in expected.items():
        np.testing.assert_allclose(arrays_of(result.models["silo-2"])[key], array, atol=2e-6)


# ---------------------------------------------------------------- the silos' smallest groups


@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_an_update_of_a_silo_that_accepts_no_such_group_reaches_nobody(name: str) -> None:
    """Whatever silo-0 learns, all that the others are sent is the same to the bit.

    That goes for the newcomer too, which is of silo-0's kind and joins its group.
    """

    class Listening(Joining):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            for message in messages:
                if message.metadata.dst_node_id != 1:
                    sent.append(arrays_of(message.content["arrays"]))
            return super().push_messages(messages)

    # Three is fewer than all, with whom these train first, and more than its kind, with whom then.
    roster = Minimums({1: 3 if name in ("kmeans", "flhc", "fesem") else 9})
    config = RunConfig.read(
        keys_for(name, warm_up=0, num_groups=3, max_distance=0.4, rounds_before=0)
    )
    heard = []
    for noise in (0, 1):
        sent: list[Model] = []
        own = {"kind": 2, "noise": 20 + noise, "samples": 100}
        late = {"kind": 2, "noise": 30, "samples": 100}
        grid = Listening([own, *plain_nodes(0, 1, 0, 1)], {4: lambda g, n=late: g.connect(n)})
        strategy = build_strategy(config, run="x", roster=roster, on_round=lambda r: None)
        run(strategy, grid=grid, rounds=6)
        heard.append(sent)
    assert len(heard[0]) == len(heard[1])
    for one, other in zip(*heard, strict=True):
        assert_equal_models(one, other)


def test_a_part_of_cfl_that_is_too_small_for_its_silo_keeps_the_model_that_was_split() -> None:
    strategy = CFL(eps_mean=2.0, eps_largest=0.0, first_split=2, roster=Minimums({1: 2}))
    result = run(strategy, NODES[:2], rounds=4)
    assert partition(result, 1) == [["silo-0", "silo-1"]]
    assert partition(result, 4) == [["silo-0"], ["silo-1"]]
    state = result.state
    assert_equal_models(state.group_models[state.group_of["silo-0"]], state.splits[0].model)
    assert not np.array_equal(
        state.group_models[state.group_of["silo-1"]]["w"], state.splits[0].model["w"]
    )
