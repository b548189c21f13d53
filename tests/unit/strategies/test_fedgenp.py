"""FedGenP, FedGen and FedEnsemble over whole runs with real silos in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message
from torch import nn

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import build_strategy
from coterie.strategies import (
    HCCT,
    FedAvg,
    FedEnsemble,
    FedGen,
    FedGenP,
    FedGroup,
    Independent,
    PerFedAvg,
)
from coterie.strategies.errors import FederationError
from coterie.strategies.fedgenp import generative
from coterie.strategies.fedgenp.algorithm import FedGenP as FedGenPAlgorithm
from coterie.strategies.fedgenp.fedgen import FedGen as FedGenAlgorithm
from coterie.strategies.fedgenp.generative import GenerativeState, Given, teaching
from coterie.strategies.fedgenp.latent import GeneratorPlan
from coterie.strategies.plain.fedavg import Independent as IndependentAlgorithm
from coterie.strategies.rounds.algorithm import Order, Round, Update
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.members import Plain as PlainState
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.tasks import load_task
from coterie.tasks.base import Option, SiloData, Task
from coterie.tasks.models import SplitModel
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    digits_config,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import Tap, assert_same_models, dashed, digits, first_arrays, run
from tests.unit.strategies.by_hand import ByHand

QUICK: dict[str, Any] = {"generator-steps": 4, "generator-hidden": 8, "local-epochs": 1}
CONSENT = {"label-counts": True}
WITHOUT = ("fedavg", "fedensemble")
"""Strategies that know no generators' keys."""
NORMED, PLAIN = (f"{__name__}:{name}" for name in ("Normed", "Plain"))


def play(folder: Path, silos: Any = None, **keys: Any) -> RunResult:
    """Play a run of FedGenP with small generators, or as these keys say."""
    own = {"strategy": "fedgenp", "rounds": 4, **QUICK} | dashed(keys)
    if own["strategy"] in WITHOUT:
        own = {key: value for key, value in own.items() if not key.startswith("generator-")}
    return run(folder, silos or digits(**CONSENT), **own)


def receivers(result: RunResult) -> list[dict[str, Any]]:
    """Round by round: receiver → what the record says of it."""
    return [r.details["generators"]["receivers"] for r in result.rounds if not r.final]


class Points(Task):
    """A few points of three classes."""

    name, num_classes = "points", 3

    def load(self, options: Mapping[str, Option]) -> SiloData:
        rng = np.random.default_rng(int(options.get("silo", 0)))
        y = rng.integers(0, 3, 40)
        x = (np.eye(3, 4)[y] + 0.3 * rng.normal(size=(40, 4))).astype(np.float32)
        return SiloData(x[:20], y[:20], x[20:], y[20:], 3)


class Normed(Points):
    """With a BatchNorm in the representation, and a head of two layers."""

    name = NORMED

    def model(self) -> nn.Module:
        body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        return SplitModel(body, nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))


class Plain(Points):
    """One network, without a split."""

    name = PLAIN

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("strategy", ["fedgenp", "fedgen"])
def test_a_body_with_batch_norm_and_a_deep_head_learn_from_latents(
    strategy: str, tmp_path: Path
) -> None:
    nodes = [
        {"name": n, "task": NORMED, "device": "cpu", "threads": 1, "data.silo": i, **CONSENT}
        for i, n in enumerate("abc")
    ]
    with_latents, without = (
        play(tmp_path / str(w), nodes, strategy=strategy, task=NORMED, generated_weight=w)
        for w in (1.0, 0.0)
    )
    assert receivers(with_latents)[-1]
    got, plain = arrays_of(with_latents.models["a"]), arrays_of(without.models["a"])
    assert all(np.isfinite(array).all() for array in got.values())
    assert not np.array_equal(got["head.2.weight"], plain["head.2.weight"])
    counter = "representation.1.num_batches_tracked"
    assert got[counter] == plain[counter]  # latents do not pass the representation


def test_every_silo_gets_a_generator_and_both_errors_are_in_the_report(tmp_path: Path) -> None:
    result = play(tmp_path)
    assert [sorted(entry) for entry in receivers(result)] == [[], *[["a", "b", "c"]] * 3]
    sizes = [r.silos["a"].bytes_sent for r in result.rounds if not r.final]
    model = sum(array.nbytes for array in arrays_of(result.models["a"]).values())
    generator = 4 * ((10 + 32) * 8 + 8 + 2 * (8 * 128 + 128))
    assert sizes == [model, *[model + generator] * 3]
    assert all(sorted(r.personalised) == ["a", "b", "c"] for r in result.rounds if not r.final)
    assert sorted(result.rounds[-1].evaluation) == ["a", "b", "c"]
    text = (tmp_path / "run.json").read_text()
    assert '"personalised"' in text and '"others-agree"' in text


def test_without_weight_on_latents_it_is_fedavg(tmp_path: Path) -> None:
    result = play(tmp_path / "1", generated_weight=0.0)
    plain = play(tmp_path / "2", strategy="fedavg")
    assert_same_models(plain, result)


@pytest.mark.parametrize("strategy", ["fedgenp", "fedgen"])
def test_one_silo_trains_as_with_fedavg_and_the_log_says_so(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = play(tmp_path / "1", digits("a", **CONSENT), strategy=strategy)
    plain = play(tmp_path / "2", digits("a", **CONSENT), strategy="fedavg")
    assert_equal_models(arrays_of(result.models["a"]), arrays_of(plain.models["a"]))
    assert caplog.text.count("round 1: no silo to learn from") == 1
    assert caplog.text.count("silo to learn from") == 1


def test_a_newcomer_gets_the_model_at_once_and_a_leavers_generator_is_dropped(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(app, digits("abcd"))
    own = {"strategy": "fedgenp", "rounds": 6, "min-silos": 3, **QUICK, "churn": "d+3"}

    def leave(report: Any) -> None:
        if report.round == 4 and 1 in grid.configs:
            grid.disconnect(1)

    roster = DescribedRoster("digits", min_silos=3, churn=Churn.parse("d+3"))
    config = RunConfig.read(own)
    strategy: Any = build_strategy(config, run="r", roster=roster, on_round=leave)
    arrays = first_arrays(grid, roster)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=6)
    assert [sorted(entry) for entry in receivers(result)] == [
        [],
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["a", "b", "c", "d"],
        ["b", "c", "d"],
        ["b", "c", "d"],
    ]
    assert sorted(result.rounds[2].silos) == ["a", "b", "c", "d"]
    assert sorted(result.state.heads) == sorted(result.state.generators) == ["b", "c", "d"]


def test_what_it_keeps_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    strategy = FedGenP(
        head="w", plan=GeneratorPlan(steps=2, hidden=4), base=FedAvg(), evaluate=False
    )
    sizes = []

    def weigh(checkpoint: Checkpoint[GenerativeState]) -> None:
        state = checkpoint.state
        held = [g.weights for g in state.generators.values()] + list(state.heads.values())
        sizes.append(sum(array.nbytes for arrays in held for array in arrays.values()))

    grid = InProcessGrid(plain_app(), plain_nodes(0, 1, 0))
    result = strategy.start(grid=grid, initial_arrays=plain_initial(), num_rounds=30, commit=weigh)
    assert len(sizes) == 30 and len(set(sizes[1:])) == 1
    for record in result.models.values():
        assert all(np.isfinite(array).all() for array in arrays_of(record).values())


# ---------------------------------------------------------------- between groups


class TwoGroups(IndependentAlgorithm):
    """a and b train together, c alone."""

    def orders(self, state: PlainState, now: Round) -> tuple[PlainState, list[Order]]:
        state, orders = super().orders(state, now)
        shared = {name: array + np.float32(now.number) for name, array in orders[0].model.items()}
        return state, [
            Order(o.silo, shared if o.silo.name != "silo-2" else o.model) for o in orders
        ]


def test_silos_that_start_from_one_model_share_a_generator() -> None:
    sent: list[tuple[str, Mapping[str, wire.Model]]] = []

    class Watching(FedGenPAlgorithm):
        def orders(self, state: Any, now: Round) -> Any:
            state, orders = super().orders(state, now)
            sent.extend((order.silo.name, order.extras) for order in orders)
            return state, orders

    algorithm = Watching(
        base=TwoGroups(), receivers="groups", head="w", plan=GeneratorPlan(steps=2, hidden=4)
    )
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1, 0))
    result = GroupStrategy(algorithm).start(grid=grid, initial_arrays=plain_initial(), num_rounds=2)
    assert [sorted(entry) for entry in receivers(result)] == [[], ["silo-0+silo-1", "silo-2"]]
    (_, a), (_, b), (_, c) = sent[-3:]
    assert a[wire.GENERATOR] is b[wire.GENERATOR]
    assert not np.array_equal(a[wire.GENERATOR]["mean.weight"], c[wire.GENERATOR]["mean.weight"])


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("hcct", {"alpha": 0.0}),
        ("fedgroup", {"num-groups": 2}),
        ("fedcollab", {"c": 0.01, "discriminator-rounds": 1}),
    ],
)
def test_groups_of_any_strategy_get_generators(
    strategy: str, own: dict[str, Any], tmp_path: Path
) -> None:
    silos = digits("abcd", **CONSENT)
    result = play(tmp_path, silos, strategy=strategy, generators="groups", **own, rounds=3)
    last = receivers(result)[-1]
    assert len(last) >= 2
    assert sorted(n for entry in last.values() for n in entry["silos"]) == list("abcd")


def test_groups_keep_learning_while_only_some_of_their_silos_are_drawn() -> None:
    """Every group's generator is trained in every round, and goes to those whose turn it is."""
    steps: list[dict[str, int]] = []
    sent: list[tuple[set[str], set[str]]] = []

    class Watching(FedGenPAlgorithm):
        def orders(self, state: Any, now: Round) -> Any:
            state, orders = super().orders(state, now)
            steps.append({r: g.steps for r, g in state.generators.items()})
            got = {order.silo.name for order in orders if wire.GENERATOR in order.extras}
            sent.append(({order.silo.name for order in orders}, got))
            return state, orders

    algorithm = Watching(
        base=FedGroup(num_groups=2, sample=1, cold_start_silos=4),
        receivers="groups",
        head="w",
        plan=GeneratorPlan(steps=2, hidden=4),
    )
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1, 0, 1))
    result = GroupStrategy(algorithm).start(grid=grid, initial_arrays=plain_initial(), num_rounds=8)
    assert steps[1:] == [{"silo-0+silo-2": 2 * n, "silo-1+silo-3": 2 * n} for n in range(1, 8)]
    assert all(len(ordered) == 1 and got == ordered for ordered, got in sent[1:])
    for entry in receivers(result)[1:]:
        assert [one["silos"] for one in entry.values()] == [
            ["silo-0", "silo-2"],
            ["silo-1", "silo-3"],
        ]


def test_a_round_with_everybody_in_one_group_does_not_cost_the_generators() -> None:
    class TogetherOnce(IndependentAlgorithm):
        def orders(self, state: PlainState, now: Round) -> tuple[PlainState, list[Order]]:
            state, orders = super().orders(state, now)
            one = orders[0].model
            return state, [Order(o.silo, one) for o in orders] if now.number == 4 else orders

    steps: list[list[int]] = []

    def note(checkpoint: Checkpoint[GenerativeState]) -> None:
        steps.append([generator.steps for generator in checkpoint.state.generators.values()])

    strategy = FedGenP(
        base=TogetherOnce(), receivers="groups", head="w", plan=GeneratorPlan(steps=2, hidden=4)
    )
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1, 2))
    result = strategy.start(grid=grid, initial_arrays=plain_initial(), num_rounds=6, commit=note)
    assert steps == [[], [2] * 3, [4] * 3, [4] * 3, [6] * 3, [8] * 3]
    assert not receivers(result)[3]


def test_who_is_alone_learns_and_teaches_only_after_its_first_update() -> None:
    strategy = ByHand(
        FedGenP(
            base=Independent(), receivers="groups", head="w", plan=GeneratorPlan(steps=2, hidden=4)
        )
    )
    a, b, new = (Silo(name, i, num_examples=10) for i, name in enumerate(["a", "b", "new"]))

    def go(state: GenerativeState, silos: list[Silo], round: int) -> tuple[Any, list[str]]:
        state, orders = strategy.orders(state, silos, round=round)
        updates = [
            Update(o.silo, o.model, plain_trained(o.model, {"kind": o.silo.node_id}), 10.0, {})
            for o in orders
        ]
        got = [o.silo.name for o in orders if wire.GENERATOR in o.extras]
        assert got == list(state.teachers)
        return strategy.absorb(state, updates, round=round), got

    state, got = go(strategy.first(plain_model()), [a, b], 1)
    assert got == []
    state, got = go(state, [a, b, new], 2)
    assert got == ["a", "b"]
    state, got = go(state, [a, b, new], 3)
    assert got == ["a", "b", "new"]
    state, got = go(state, [a, b], 4)
    assert "new" not in state.trained and got == ["a", "b"]


@pytest.mark.parametrize("generators", [pytest.param("silos", marks=pytest.mark.nightly), "groups"])
def test_while_alpha_is_sought_no_partition_has_generators(generators: str, tmp_path: Path) -> None:
    seen: dict[int, set[tuple[bool, bool]]] = {}

    def watch(messages: list[Message]) -> None:
        for message in messages:
            if message.metadata.message_type == wire.TRAIN:
                config = message.content["config"]
                weighted = wire.GENERATED_WEIGHT in config or wire.EVALUATE_TRAINED in config
                has = wire.GENERATOR in message.content.array_records
                assert not (wire.HOLDOUT in config and (weighted or has))
                pair = (wire.HOLDOUT in config, has)
                seen.setdefault(int(message.metadata.group_id), set()).add(pair)

    nodes = [digits_config(n, i, **{"data.rotation": 90 * (i % 2)}) for i, n in enumerate("abcd")]
    own = {"strategy": "hcct", "alpha": "auto", "generators": generators, "rounds": 9}
    play(tmp_path, Tap(nodes, before=watch), **own)
    trial = [round for round, kinds in seen.items() if (True, False) in kinds]
    assert trial and all(seen[round] == {(True, False)} for round in trial)
    assert seen[max(trial) + 1] == {(False, True)}


def test_a_group_that_changes_takes_over_the_generator_of_most_of_its_silos() -> None:
    from coterie.strategies.fedgenp.algorithm import _inherited
    from coterie.strategies.fedgenp.latent import fresh_generator

    made = [
        fresh_generator(num_classes=2, latent=2, hidden=2, rng=np.random.default_rng(i))
        for i in range(2)
    ]
    state = GenerativeState(
        None,
        generators={"a+b+c": made[0], "d": made[1]},
        members={"a+b+c": ("a", "b", "c"), "d": ("d",)},
    )
    assert _inherited(state, ("b", "c", "d")) is made[0]
    assert _inherited(state, ("c", "d")) is made[0]  # a tie goes to the first
    assert _inherited(state, ("d", "e")) is made[1]
    assert _inherited(state, ("e",)) is None


# ---------------------------------------------------------------- FedGen, FedEnsemble


def test_fedgen_goes_with_a_base_that_forms_groups_in_round_1(tmp_path: Path) -> None:
    """Its silos have no models before."""
    grid = InProcessGrid(app, digits("abcd", **CONSENT))
    roster = DescribedRoster("digits", min_silos=4)
    strategy = FedGen(
        base=FedGroup(num_groups=2),
        plan=GeneratorPlan(steps=2, hidden=4),
        roster=roster,
        train_config={wire.LOCAL_EPOCHS: 1, wire.TASK: "digits"},
    )
    arrays = first_arrays(grid, roster)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3)
    assert [sorted(entry) for entry in receivers(result)] == [[], ["everybody"], ["everybody"]]


def test_fedgen_ends_with_who_did_not_consent_and_how_to() -> None:
    """Of silos that did not get the terms before: a roster without terms."""
    nodes = [digits_config("a", 0, **{"label-counts": True}), digits_config("b", 1)]
    grid, roster = InProcessGrid(app, nodes), DescribedRoster("digits", min_silos=2)
    strategy = FedGen(roster=roster, train_config={wire.TASK: "digits"})
    arrays = first_arrays(grid, roster)
    with pytest.raises(FederationError, match=r"Refused by: b. .*label_counts = true"):
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=2)


def test_fedgen_draws_the_labels_of_those_whose_heads_the_generator_knows() -> None:
    """Not of who left, nor of a newcomer whose head is not known yet."""
    own = {name: [1, 1, 0, 0, 0, 0] for name in "abc"}
    others = {"gone": [0, 0, 90, 0, 0, 0], "new": [0, 0, 0, 90, 0, 0]}
    strategy = ByHand(FedGen(head="w", plan=GeneratorPlan(steps=1, hidden=2)))
    silos = [Silo(name, i, num_examples=10) for i, name in enumerate(["a", "b", "c", "new"])]
    state = strategy.admit(strategy.first(plain_model()), silos, round=1)
    state = replace(
        state,
        heads={name: {"w": plain_model()["w"]} for name in ("a", "b", "c", "gone")},
        counts={name: np.array(counts) for name, counts in {**own, **others}.items()},
    )
    _, orders = strategy.orders(state, silos, round=5)
    for order in orders:
        shares = order.extras[wire.GENERATOR][wire.LABELS]
        np.testing.assert_array_equal(shares, [0.5, 0.5, 0, 0, 0, 0])


def run_fedgen(
    folder: Path,
    change: Callable[[str, Message], Message | None],
    refusing: str = "",
    rounds: int = 4,
) -> RunResult:
    """Play a run of three silos, whose answers about label counts pass through ``change``."""

    def changed(silo: str, reply: Message) -> Message | None:
        counts = reply.metadata.message_type == wire.LABEL_COUNTS
        return change(silo, reply) if counts else reply

    nodes = [
        digits_config(n, i, **{"label-counts": n not in refusing}) for i, n in enumerate("abc")
    ]
    keys = {"strategy": "fedgen", "rounds": rounds, "round-timeout": 0.3, "min-silos": 2}
    return play(folder, Tap(nodes, change=changed), **keys)


def asked(result: RunResult) -> list[int]:
    """Round by round: how many silos were asked for their label counts."""
    phases = [r.phases.get(wire.LABEL_COUNTS) for r in result.rounds if not r.final]
    return [phase.messages if phase else 0 for phase in phases]


@pytest.mark.parametrize("error", [None, Error(wire.FAILED, "the disk is full")])
def test_fedgen_asks_again_whose_answer_was_lost(
    error: Error | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(silo: str, reply: Message) -> Message | None:
        if (silo, reply.metadata.group_id) != ("b", "1"):
            return reply
        if error is not None:
            reply.__dict__["_error"], reply.__dict__["_content"] = error, None
            return reply
        return None

    result = run_fedgen(tmp_path, change)
    assert asked(result) == [3, 1, 0, 0]
    reason = "it did not answer in time" if error is None else "the disk is full"
    assert f"b: its label counts is left out: {reason}" in caplog.text


def test_who_does_not_consent_says_so_at_the_join_of_fedgen_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_fedgen(tmp_path, lambda silo, reply: reply, refusing="c")
    assert asked(result) == [2, 0, 0, 0]
    assert sorted(result.rounds[-2].silos) == ["a", "b"]
    said = "silo c does not take part: silo 'c' does not share its label counts. .*silo.toml"
    assert re.search(said, caplog.text)


def test_one_that_refuses_its_label_counts_after_all_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(silo: str, reply: Message) -> Message:
        if silo == "b":
            reply.__dict__["_error"], reply.__dict__["_content"] = Error(wire.REFUSED, "no"), None
        return reply

    result = run_fedgen(tmp_path, change, rounds=3)
    assert asked(result) == [3, 0, 0]
    assert "b refused to share label counts" in caplog.text
    assert [sorted(entry) for entry in receivers(result)] == [[], *[["everybody"]] * 2]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (np.ones(9, np.int64), r"must be 10 integers. Got int64 of shape \(9,\)"),
        (np.ones((10, 1), np.int64), "must be 10 integers"),
        (np.ones(10, np.float32), "must be 10 integers. Got float32"),
        (np.array([-1, *[9] * 9]), "at least 0"),
        (np.zeros(10, np.int64), "at least 0, and at least one must be above 0."),
        (None, "no array 'labels'"),
    ],
)
def test_label_counts_that_cannot_be_are_their_silos_error_and_the_others_go_on(
    counts: np.ndarray | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(silo: str, reply: Message) -> Message:
        if silo == "b":
            labels = {} if counts is None else {wire.LABELS: counts}
            reply.content[wire.LABELS] = wire.encode_arrays(labels, packed=True)
        return reply

    result = run_fedgen(tmp_path, change, rounds=3)
    assert asked(result) == [3, 1, 1]
    assert re.search(f"b: its label counts are left out: .*{said}", caplog.text)
    assert [sorted(entry) for entry in receivers(result)] == [[], *[["everybody"]] * 2]


@pytest.mark.parametrize("before", [True, False])
def test_who_comes_back_is_asked_anew_and_what_it_said_before_is_gone(before: bool) -> None:
    """Silo c is here in rounds 2 and 3, away in 4, and back with another mind."""
    known: dict[int, bool | None] = {}

    def churn(report: Any) -> None:
        if "c" in states[-1].counts:
            known[report.round] = states[-1].counts["c"] is not None
        if report.round == 1:
            grid.configs[3] = digits_config("c", 2, **{"label-counts": before})
        if report.round == 3:
            grid.disconnect(3)
        if report.round == 4 and not report.final:
            grid.configs[4] = digits_config("c", 9, **{"label-counts": not before})

    states: list[GenerativeState] = []

    class Watching(FedGenAlgorithm):
        def absorb(self, state: Any, updates: Any, now: Round) -> Any:
            states.append(super().absorb(state, updates, now))
            return states[-1]

    grid = Tap(digits("ab", **CONSENT))
    strategy = GroupStrategy(
        Watching(plan=GeneratorPlan(steps=2, hidden=4)),
        roster=DescribedRoster("digits", min_silos=2),
        train_config={wire.STRATEGY: "fedgen", wire.LOCAL_EPOCHS: 1, wire.TASK: "digits"},
        on_round=churn,
    )
    arrays = first_arrays(grid, strategy.roster)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=6)
    requests = [m.metadata for m in grid.sent if m.metadata.message_type == wire.LABEL_COUNTS]
    asked = [(int(meta.group_id), meta.dst_node_id) for meta in requests]
    assert asked == [(1, 1), (1, 2), (2, 3), (5, 4)]
    assert known == {2: before, 3: before, 5: not before, 6: not before}


@pytest.mark.parametrize(
    ("strategy", "head"),
    [
        ("fedgenp", "another"),
        ("fedgen", "no"),
        pytest.param("fedgenp", "no", marks=pytest.mark.nightly),
        pytest.param("fedgen", "another", marks=pytest.mark.nightly),
    ],
)
def test_a_newcomer_with_another_head_trains_without_generators_and_teaches_nobody(
    strategy: str, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(silo: str, reply: Message) -> Message:
        """Silo d serves another version of the task."""
        if silo == "d" and reply.metadata.message_type == wire.DESCRIBE:
            config: Any = reply.content["config"]
            layers = [part for part in json.loads(config["head"]) if part != ["positive"]]
            config["head"] = json.dumps(layers if head == "another" else [])
        return reply

    own = {"strategy": strategy, "rounds": 5, "min-silos": 3, "churn": "d+3"}
    result = play(tmp_path, Tap(digits("abcd", **CONSENT), change=odd), **own)
    assert sorted(result.rounds[-2].silos) == list("abcd")
    last = receivers(result)[-1]
    assert sorted(name for entry in last.values() for name in entry["silos"]) == list("abc")
    sizes = {name: silo.bytes_sent for name, silo in result.rounds[-2].silos.items()}
    assert sizes["d"] < sizes["a"] == sizes["b"] == sizes["c"]
    assert caplog.text.count("silo d has") == 1 and "same version" in caplog.text


def test_fedensemble_trains_as_fedavg_and_evaluates_the_ensemble(tmp_path: Path) -> None:
    result = play(tmp_path / "1", strategy="fedensemble", ensemble_every=2)
    plain = play(tmp_path / "2", strategy="fedavg")
    assert_same_models(plain, result)
    evaluated = [r.details.get("ensemble", {}).get("round") for r in result.rounds]
    assert evaluated == [None, None, 2, 2, 4]
    assert sorted(result.rounds[-1].details["ensemble"]["evaluation"]) == ["a", "b", "c"]
    assert result.rounds[-1].phases[wire.ENSEMBLE].messages == 3


# ---------------------------------------------------------------- smallest groups


@pytest.mark.parametrize(
    ("groups", "minimums", "taught"),
    [
        (["a", "b"], {}, ["a", "b"]),
        (["a", "b"], {"b": 2}, ["a"]),
        (["a", "b", "c"], {"b": 2}, ["a", "b", "c"]),
        (["a", "b", "c"], {"b": 3, "c": 2}, ["a"]),  # without b, c's head is alone as well
        (["ab", "c"], {"a": 2, "b": 2}, ["ab", "c"]),  # that head is a mean of two
        (["ab", "c"], {"c": 2}, ["ab"]),
        (["ab", "c", "d"], {"a": 3}, ["c", "d"]),
    ],
)
def test_a_head_teaches_only_in_as_large_a_company_as_its_silos_accept(
    groups: list[str], minimums: Mapping[str, int], taught: list[str]
) -> None:
    receivers = {group: tuple(group) for group in groups}
    heads = {group: {"w": np.ones((2, 3), np.float32)} for group in groups}
    assert list(teaching(heads, receivers, receivers, minimums)) == taught


def test_a_group_whose_model_is_of_one_silo_is_no_company() -> None:
    """A newcomer makes the group larger, not the mean that its model is."""
    receivers = {"a+c": ("a", "c"), "b": ("b",)}
    heads = {name: {"w": np.ones((2, 3), np.float32)} for name in receivers}
    for behind, taught in ((("a",), ("b",)), (("a", "c"), ("a+c", "b"))):
        assert teaching(heads, receivers, {"a+c": behind, "b": ("b",)}, {"a": 2}) == taught


def test_whose_updates_a_model_is_a_mean_of_is_known_also_of_newcomers_and_who_rested() -> None:
    strategy = ByHand(FedGenP(base=FedAvg(), head="w", plan=GeneratorPlan(steps=2, hidden=2)))
    silos = [Silo(name, i, num_examples=10) for i, name in enumerate("abc")]
    state, orders = strategy.orders(strategy.first(plain_model()), silos[:2], round=1)
    answers = [Update(o.silo, o.model, plain_model(), 10.0, {}) for o in orders]
    state = strategy.absorb(state, answers[:1], round=1)
    assert state.sources == {"a": ("a",), "b": ("a",)}, "b holds a's update, and nobody else's"
    state, orders = strategy.orders(state, silos, round=2)
    assert state.sources == {"a": ("a",), "b": ("a",)}
    answers = [Update(o.silo, o.model, plain_model(), 10.0, {}) for o in orders]
    state = strategy.absorb(state, answers[1:], round=2)
    assert state.sources == dict.fromkeys("abc", ("b", "c"))


def test_a_wild_update_of_one_silo_costs_the_others_no_generator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its predictor is a million times as large for one round, and accepted."""

    def wild(message: Message, context: Context) -> Message:
        reply = app(message, context)
        train = message.metadata.message_type == wire.TRAIN and context.node_id == 3
        if train and message.content.config_records[wire.CONFIG][wire.ROUND] == 1:
            model = wire.decode_arrays(reply.content.array_records[wire.ARRAYS])
            model = {n: a * np.float32(1e6 if "head" in n else 1) for n, a in model.items()}
            reply.content[wire.ARRAYS] = wire.encode_arrays(model, packed=True)
        return reply

    keys = {"strategy": "hcct", "alpha": 0, "generators": "groups", "clip-updates": 0}
    result = play(tmp_path / "wild", InProcessGrid(wild, digits()), **keys)
    assert sorted(receivers(result)[1]) == ["a", "b"]
    assert "no generator learns from c: its predictor's norm is 1" in caplog.text
    assert all(report.left_out == {} for report in result.rounds)
    for name in "ab":
        assert all(np.isfinite(array).all() for array in arrays_of(result.models[name]).values())


@pytest.mark.parametrize(
    ("alpha", "rounds", "round", "compares"),
    [("auto", 9, 2, True), ("auto", 0, 50, True), ("auto", 9, 6, False), (5.0, 9, 1, False)],
)
def test_partitions_are_compared_while_alpha_can_still_be_found(
    alpha: float | str, rounds: int, round: int, compares: bool
) -> None:
    strategy = ByHand(HCCT(alpha=alpha, train_config={wire.ROUNDS: rounds}))
    silos = [Silo(name, i, num_examples=10) for i, name in enumerate("ab")]
    state = strategy.admit(strategy.first(plain_model()), silos, round=1)
    assert strategy.comparing(state, round=round) is compares


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99"])
def test_a_device_that_is_none_is_refused_at_once(device: str) -> None:
    with pytest.raises(FederationError, match=r"device of the generators"):
        FedGenP(device=device)


class Double(Points):
    """In float64."""

    name = f"{__name__}:Double"

    def model(self) -> nn.Module:
        return SplitModel(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3)).double()

    def load(self, options: Mapping[str, Option]) -> SiloData:
        data = super().load(options)
        return replace(data, x_train=data.x_train.astype("f8"), x_test=data.x_test.astype("f8"))


def test_a_model_of_float64_learns_from_latents_too(tmp_path: Path) -> None:
    nodes = [
        {"name": n, "task": Double.name, "device": "cpu", "threads": 1, "data.silo": i}
        for i, n in enumerate("ab")
    ]
    result = play(tmp_path, nodes, task=Double.name, rounds=3)
    assert len(receivers(result)[-1]) == 2
    assert all(report.left_out == {} for report in result.rounds)


def test_fedgens_shares_do_not_tell_whose_turn_it_was(tmp_path: Path) -> None:
    """One silo a round: all get the shares of everybody here, of labels that three have taught."""
    shares: dict[int, np.ndarray] = {}

    def watched(message: Message, context: Context) -> Message:
        if (record := message.content.array_records.get(wire.GENERATOR)) is not None:
            round = message.content.config_records[wire.CONFIG][wire.ROUND]
            shares[round] = wire.decode_arrays(record)[wire.LABELS]
        return app(message, context)

    nodes = digits("abcde", **CONSENT)
    play(tmp_path, InProcessGrid(watched, nodes), strategy="fedgen", rounds=12, sample=1)
    silos = [
        load_task("digits").load({k[5:]: v for k, v in node.items() if k.startswith("data.")})
        for node in nodes
    ]
    whole = np.bincount(np.concatenate([silo.y_train for silo in silos]), minlength=10)
    assert shares and min(shares) >= 4, "three silos have taught before"
    for sent in shares.values():
        np.testing.assert_allclose(sent, whole * (sent > 0) / (whole * (sent > 0)).sum())
    assert not any(
        np.allclose(sent, np.bincount(silo.y_train, minlength=10) / len(silo.y_train))
        for sent in shares.values()
        for silo in silos
    )


def test_fedensembles_members_are_who_is_here_and_shows_its_own_model() -> None:
    strategy = ByHand(FedEnsemble(every=1))
    silos = [Silo(name, i, num_examples=10, described=True) for i, name in enumerate("abc")]
    state, orders = strategy.orders(strategy.first(plain_model()), silos, round=1)
    state = strategy.absorb(
        state, [Update(o.silo, o.model, plain_model(), 10.0, {}) for o in orders], round=1
    )
    left, wants_company = silos[:2], [*silos[:2], replace(silos[2], min_group_size=2)]
    for here, members in ((silos, 3), (left, 2), (wants_company, 2)):
        for steps in (
            strategy.prepare(state, here, round=2),
            strategy.finish(state, here, round=1),
        ):
            assert {len(order.extras) for order in next(steps)} == {members}


@pytest.mark.parametrize("generators", [pytest.param("silos", marks=pytest.mark.nightly), "groups"])
def test_what_a_silo_learns_that_trains_alone_by_its_own_condition_reaches_nobody(
    generators: str, tmp_path: Path
) -> None:
    """Whatever b's data is, the others' models are the same to the bit; they do get generators."""
    keys = {"strategy": "hcct", "alpha": 0, "generators": generators}
    results = []
    for data_of_b in (1, 5):
        nodes = [
            digits_config("a", 0),
            digits_config("b", data_of_b, **{"min-group-size": 3}),
            digits_config("c", 2),
        ]
        results.append(play(tmp_path / str(data_of_b), nodes, **keys))
    assert sorted(receivers(results[0])[-1]) == ["a", "c"]
    for name in "ac":
        assert_equal_models(*(arrays_of(result.models[name]) for result in results))


def test_a_silo_that_wants_company_is_not_one_of_fedgens_teachers() -> None:
    strategy = ByHand(FedGen(head="w", plan=GeneratorPlan(steps=1, hidden=2)))
    silos = [
        Silo(name, i, num_examples=10, min_group_size=4 if name == "b" else 1)
        for i, name in enumerate("abcd")
    ]
    state = strategy.admit(strategy.first(plain_model()), silos, round=1)
    counts = np.zeros((4, 6), dtype=np.int64)
    counts[[0, 1, 2, 3], [0, 1, 0, 3]] = 2
    counts[1, 0] = 4
    state = replace(
        state,
        heads={name: {"w": plain_model()["w"]} for name in "abcd"},
        counts=dict(zip("abcd", counts, strict=True)),
    )
    state, orders = strategy.orders(state, silos, round=5)
    assert state.teachers == ("a", "c", "d")
    shares = orders[1].extras[wire.GENERATOR][wire.LABELS]
    np.testing.assert_allclose(shares, [0.8, 0, 0, 0.2, 0, 0])  # label 1 is b's alone
    few, orders = strategy.orders(state, silos[:2], round=6)
    assert few.teachers == () and not orders[0].extras, "a's counts alone are nobody's business"


# ---------------------------------------------------------------- bad input


def test_silos_that_describe_no_head_are_refused_with_what_to_do() -> None:
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1))
    with pytest.raises(FederationError, match=r"silo-0 reports no latent split.*SplitModel"):
        FedGenP().start(grid=grid, initial_arrays=plain_initial(), num_rounds=1)


@pytest.mark.parametrize("head", ["[]", '[["linear", "head.2.weight", ""]]'])
def test_one_silo_that_describes_another_head_ends_no_run(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        config = reply.content.config_records.get(wire.CONFIG, {})
        if context.node_config["name"] == "a" and "head" in config:
            config["head"] = head
        return reply

    result = play(tmp_path, InProcessGrid(lying, digits()), rounds=3)
    assert sorted(result.models) == ["a", "b", "c"]
    assert "silo a has" in caplog.text
    assert set(receivers(result)[-1]) == {"b", "c"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"strategy": "fedgenp", "personal": "head"}, "personal must be empty"),
        ({"strategy": "fedensemble", "personal": "head"}, "personal must be empty"),
        ({"strategy": "fedgenp", "generators": "groups"}, "one group"),
        ({"strategy": "ifca", "generators": "groups"}, "cannot be combined with strategy ifca"),
        (
            {"strategy": "fedgenp", "generator-steps": 1},
            "at least 2. Got 1. Or take reversal = none",
        ),
        ({"strategy": "hcct", "generators": "groups", "generator-steps": 1}, "at least 2"),
        ({"reversal": "none"}, "reversal belongs to .*, and the strategy is auto"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        RunConfig.read(keys)


def test_the_paper_to_the_letter_can_be_asked_for_and_is_another_training(tmp_path: Path) -> None:
    letter: dict[str, Any] = {"generator-objective": "sum", "generator-optimiser": "sgd"}
    letter |= {"generator-lr": 0.01, "reversal": "unbounded", "reversal-weight": 1.0}
    plan = RunConfig.read({"strategy": "fedgenp", **letter}).algorithm.plan  # type: ignore[attr-defined]
    assert (plan.objective, plan.optimiser, plan.lr) == ("sum", "sgd", 0.01)
    ours = play(tmp_path / "ours", rounds=2)
    changed = [
        play(tmp_path / key, rounds=2, **{key: letter[key]})
        for key in ("generator-objective", "generator-optimiser")
    ]
    models = [arrays_of(result.models["a"]) for result in (ours, *changed)]
    for i, one in enumerate(models):
        for other in models[:i]:
            assert any(not np.array_equal(one[name], other[name]) for name in one)


def test_one_step_is_enough_without_a_reversal_of_its_own_step() -> None:
    for keys in (
        {"reversal": "none"},
        {"reversal-weight": 0},
        {"generator-objective": "both"},
        {"strategy": "fedgen"},
    ):
        RunConfig.read({"strategy": "fedgenp", "generator-steps": 1, **keys})
    with pytest.raises(FederationError, match=r"steps must be at least 2\. Got 1"):
        FedGenP(plan=GeneratorPlan(steps=1))
    FedGenP(plan=GeneratorPlan(steps=1, reversal="none"))


@pytest.mark.parametrize("strategy", ["fedgenp", "fedgen", "fedcollab"])
def test_a_task_without_a_latent_split_is_named_and_how_to_add_one(
    strategy: str, tmp_path: Path
) -> None:
    """Before anybody has worked, on discriminators either."""
    grid = Tap(digits("ab", task=PLAIN, **CONSENT))
    around = {"generators": "groups"} if strategy == "fedcollab" else {}
    said = f"silo a reports no latent split of its model: task {PLAIN!r} has none.*SplitModel"
    with pytest.raises(FederationError, match=said):
        play(tmp_path, grid, strategy=strategy, task=PLAIN, **around)
    assert {message.metadata.message_type for message in grid.sent} == {wire.DESCRIBE, wire.INITIAL}


def test_one_class_is_refused_before_the_first_round() -> None:
    strategy = ByHand(FedGenP(head="w"))
    initial = {"w": np.zeros((1, 5), np.float32), "b": np.zeros(1, np.float32)}
    silos = [Silo(name, i, num_examples=10) for i, name in enumerate("ab")]
    state = strategy.first(initial)
    with pytest.raises(FederationError, match=r"at least 2 classes\. The head has 1: run without"):
        strategy.orders(state, silos, round=1)


def test_a_base_that_trains_otherwise_takes_no_generators() -> None:
    grid = InProcessGrid(plain_app(), plain_nodes(0, 1))
    strategy = FedGenP(base=PerFedAvg(), head="w")
    with pytest.raises(
        FederationError, match=r"PerFedAvg train differently \('train.per_fedavg'\)"
    ):
        strategy.start(grid=grid, initial_arrays=plain_initial(), num_rounds=1)


def test_weights_of_latents_are_bounded_and_decay() -> None:
    config = Given(weight=10, distil=5, decay=0.5).config(3)
    assert config[wire.GENERATED_WEIGHT] == 2.5 and config[wire.DISTIL_WEIGHT] == 1.25
    for wrong in ({"weight": -1}, {"distil": float("nan")}, {"decay": 0}):
        with pytest.raises(FederationError):
            Given(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["fedgenp", "fedgen"])
def test_a_coordinator_without_pytorch_says_what_generators_need(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(generative, "find_spec", lambda name: None)
    with pytest.raises(FederationError, match="which needs PyTorch: install it there"):
        RunConfig.read({"strategy": strategy})
    RunConfig.read({"strategy": "fedavg"})
