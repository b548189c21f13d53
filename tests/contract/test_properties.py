"""What holds for every strategy. A new one is a row of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.codec import decode, encode
from coterie.strategies import (
    APFL,
    CFL,
    FLHC,
    FLSC,
    HCCT,
    IFCA,
    MAXFL,
    FedAvg,
    FedCollab,
    FedEnsemble,
    FedFA,
    FedGenP,
    FedGroup,
    FedNova,
    FeSEM,
    Independent,
    KMeans,
    PerFedAvg,
    PFedGraph,
    PFedMe,
    RunResult,
)
from coterie.strategies.fedgenp.latent import GeneratorPlan
from coterie.strategies.registry import STRATEGIES
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.strategy import GroupStrategy
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    at,
    error_reply,
    plain_app_without_answers,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)

GENERATORS: dict[str, Any] = {"plan": GeneratorPlan(steps=3, batch=4, hidden=4)}
"""The plain app ignores them; its ``w`` serves as a head."""

TABLE: dict[str, Callable[..., GroupStrategy]] = {
    "independent": Independent,
    "fedavg": FedAvg,
    "hcct": HCCT,
    "hcct-paper": lambda **more: HCCT(memory=0, solver="agglomerative", **more),
    "hcct-hungry": lambda **more: HCCT(alpha=1e6, **more),
    "fedgroup": lambda **more: FedGroup(num_groups=1, **more),
    "hcct-fednova": lambda **more: HCCT(within="fednova", **more),
    "fedgroup-pfedme": lambda **more: FedGroup(num_groups=1, within="pfedme", **more),
    "fedcollab-perfedavg": lambda **more: FedCollab(within="perfedavg", **more),
    "fedcollab": FedCollab,  # silos without discriminators: everybody alone
    "fedgenp": lambda **more: FedGenP(head="w", **GENERATORS, **more),
    "fedgenp-groups": lambda **more: FedGenP(
        head="w", base=HCCT(alpha=1.0), receivers="groups", **GENERATORS, **more
    ),
    "fedensemble": FedEnsemble,
    "hcct-alone": lambda **more: HCCT(alpha=0, **more),
    "maxfl": lambda **more: MAXFL(warm_up=1, **more),
    "fedfa": FedFA,
    "ifca": IFCA,
    "flsc": FLSC,
    "fesem": FeSEM,
    "cfl": lambda **more: CFL(eps_mean=1.0, eps_largest=0.0, **more),
    "flhc": lambda **more: FLHC(rounds_before=1, **more),
    "kmeans": lambda **more: KMeans(num_groups=2, **more),
    "fednova": FedNova,
    "perfedavg": PerFedAvg,
    "pfedme": PFedMe,
    "apfl": APFL,
    "pfedgraph": PFedGraph,
    "pfedgraph-choosy": lambda **more: PFedGraph(graph_alpha=0.1, **more),
}

EXTRAPOLATES = {"fednova", "hcct-fednova"}
"""Their step may go beyond all that silos sent: no mean, but a normalised sum."""

COMBINED = {"hcct-fednova", "fedgroup-pfedme", "hcct-alone", "hcct-hungry"}
"""Of parts that are in the table otherwise, too, or HCCT at an end of alpha: nightly."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    own = [pytest.mark.nightly] if name in COMBINED else []
    return [pytest.mark.xdist_group(name), *own]


EVERY = pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in TABLE])
"""All tests of a strategy are in one worker and share its plain run."""


def test_every_strategy_is_in_the_table_that_any_app_can_serve() -> None:
    """FedGen asks for label counts, Auto for errors on data that silos hold out."""
    loaded = {type(make().algorithm) for make in TABLE.values()}
    others = {name for name, row in STRATEGIES.items() if row.load() not in loaded}
    assert others == {"fedgen", "auto"}


def run(name: str, nodes: list[dict[str, Any]], rounds: int = 3, **more: Any) -> RunResult:
    fault = more.pop("fault", None)
    grid = InProcessGrid(plain_app_without_answers(fault), nodes)
    return TABLE[name](**more).start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=rounds, timeout=5
    )


def models(result: RunResult) -> dict[str, Any]:
    return {name: arrays_of(record) for name, record in result.models.items()}


FIVE = plain_nodes(0, 1, 0, 2, 1, samples=[40, 70, 120, 10, 300])


@functools.cache
def plain_run(name: str) -> RunResult:
    """Three rounds of the five silos."""
    return run(name, FIVE)


@EVERY
def test_the_same_run_gives_bit_identical_models_and_groups(name: str) -> None:
    first, again = plain_run(name), run(name, FIVE)
    assert first.groups == again.groups
    for silo, model in models(first).items():
        assert_equal_models(models(again)[silo], model)


@EVERY
def test_a_run_resumed_after_any_round_ends_bit_identical(name: str) -> None:
    """What is committed is all that the next round depends on, for every strategy."""
    committed: list[tuple[str, Any]] = []

    def start(**more: Any) -> RunResult:
        grid = InProcessGrid(plain_app_without_answers(), FIVE)
        initial = ArrayRecord() if "resume" in more else plain_initial()
        return TABLE[name]().start(grid=grid, initial_arrays=initial, num_rounds=4, **more)

    whole = start(commit=lambda checkpoint: committed.append(encode(checkpoint)))
    assert len(committed) == 4
    for stored in committed:
        resumed = start(resume=decode(*stored))
        assert {r: whole.groups[r] for r in resumed.groups} == resumed.groups
        assert_equal_models(arrays_of(resumed.arrays), arrays_of(whole.arrays))
        for silo, model in models(whole).items():
            assert_equal_models(models(resumed)[silo], model)


@EVERY
def test_the_order_in_which_nodes_are_listed_and_answer_does_not_matter(name: str) -> None:
    class Turned(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return list(self.configs)[::-1]

        def pull_messages(self, message_ids: Any) -> list[Any]:
            return list(super().pull_messages(message_ids))[::-1]

    turned = TABLE[name]().start(
        grid=Turned(plain_app_without_answers(), FIVE), initial_arrays=plain_initial(), num_rounds=3
    )
    plain = plain_run(name)
    assert turned.groups == plain.groups
    for silo, model in models(plain).items():
        assert_equal_models(models(turned)[silo], model)


@EVERY
def test_what_it_is_given_is_not_changed(name: str) -> None:
    initial, nodes, config = plain_initial(), plain_nodes(0, 1), {"lr": 0.1, "lr-decay": 0.9}
    TABLE[name](train_config=config).start(
        grid=InProcessGrid(plain_app_without_answers(), nodes), initial_arrays=initial, num_rounds=2
    )
    assert_equal_models(arrays_of(initial), plain_model())
    assert nodes == plain_nodes(0, 1)
    assert config == {"lr": 0.1, "lr-decay": 0.9}


@EVERY
def test_a_run_leaves_nothing_on_its_strategy_nor_on_its_algorithm(name: str) -> None:
    """All that a run knows is in its state."""
    strategy = TABLE[name]()
    before, options = dict(vars(strategy)), dict(vars(strategy.algorithm))
    strategy.start(
        grid=InProcessGrid(plain_app_without_answers(), FIVE), initial_arrays=plain_initial()
    )
    assert vars(strategy) == before and vars(strategy.algorithm) == options
    assert strategy.algorithm == TABLE[name]().algorithm


@EVERY
def test_one_silo_is_enough_and_trains_as_if_alone(name: str) -> None:
    result = run(name, FIVE[:1], rounds=4, min_silos=1)
    model = plain_model()
    for _ in range(4):
        model = plain_trained(model, FIVE[0])
    if name in ("ifca", "flsc"):  # whose first models get noise where w⁰ is constant
        np.testing.assert_allclose(models(result)["silo-0"]["w"], model["w"], atol=0.01)
    else:
        assert_equal_models(models(result)["silo-0"], model)
    assert result.groups == {i: [["silo-0"]] for i in range(1, 5)}


@EVERY
def test_groups_of_every_round_are_a_partition_of_who_is_here(name: str) -> None:
    result = plain_run(name)
    everybody = [f"silo-{i - 1}" for i in range(1, 6)]
    for groups in result.groups.values():
        assert sorted(n for group in groups for n in group) == everybody
        assert all(list(group) == sorted(group) for group in groups)
        assert groups == sorted(groups)


@EVERY
def test_who_comes_takes_part_who_leaves_keeps_its_model_and_who_comes_back_has_a_group(
    name: str,
) -> None:
    grid = InProcessGrid(plain_app_without_answers(), FIVE[:4])

    def churn(report: RoundReport) -> None:
        if report.round == 1:
            grid.connect(FIVE[4])
        elif report.round == 2:
            grid.disconnect(1)
            grid.disconnect(2)
        elif report.round == 3:
            grid.configs[2] = FIVE[1]

    strategy = TABLE[name](on_round=churn)
    result = strategy.start(grid=grid, initial_arrays=plain_initial(), num_rounds=4, timeout=5)
    everybody = [f"silo-{i - 1}" for i in range(1, 6)]
    assert [(report.joined, report.left) for report in result.rounds[:4]] == [
        (tuple(everybody[:4]), ()),
        (("silo-4",), ()),
        ((), ("silo-0", "silo-1")),
        (("silo-1",), ()),
    ]
    present = [sorted(n for group in report.groups for n in group) for report in result.rounds[:4]]
    assert present == [everybody[:4], everybody, everybody[2:], everybody[1:]]
    assert sorted(result.models) == everybody
    for model in models(result).values():
        assert all(np.isfinite(array).all() for array in model.values())


@EVERY
def test_members_of_a_group_hold_the_same_model(name: str) -> None:
    result = plain_run(name)
    for group in result.groups[3]:
        for silo in group[1:]:
            assert_equal_models(models(result)[silo], models(result)[group[0]])


@EVERY
def test_silos_with_the_same_data_and_size_end_with_models_as_good(name: str) -> None:
    """Nobody is favoured for its name: two copies of one node hold equal models."""
    twin = {"kind": 0, "noise": 0, "samples": 50}
    result = run(name, [twin, {"kind": 1, "noise": 3, "samples": 80}, dict(twin)])
    one, other = models(result)["silo-0"], models(result)["silo-2"]
    for array in one:
        np.testing.assert_allclose(one[array], other[array], atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(TABLE) - EXTRAPOLATES))
def test_models_stay_between_the_start_and_the_targets(name: str) -> None:
    """Every model is made by averaging and by the silos' own steps: none leaves their hull."""
    result = run(name, FIVE, rounds=4)
    targets = [
        {k: 2 * v - plain_model()[k] for k, v in plain_trained(plain_model(), node).items()}
        for node in FIVE
    ]
    for model in models(result).values():
        for array, value in model.items():
            corners = np.stack([plain_model()[array], *(target[array] for target in targets)])
            assert (value <= corners.max(axis=0) + 1e-5).all()
            assert (value >= corners.min(axis=0) - 1e-5).all()


@pytest.mark.parametrize("name", ["independent", "fedavg", "hcct"])
@settings(max_examples=12)
@given(
    kinds=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    samples=st.lists(st.integers(1, 500), min_size=5, max_size=5),
    bad=st.tuples(st.integers(1, 5), st.integers(1, 3)),
)
def test_any_federation_with_any_bad_reply_comes_to_its_end(
    name: str, kinds: list[int], samples: list[int], bad: tuple[int, int]
) -> None:
    nodes = plain_nodes(*kinds, samples=samples[: len(kinds)])
    result = run(name, nodes, fault=at(*bad, error_reply))
    left_out = [sorted(report.left_out) for report in result.rounds[:3]]
    expected = [
        [f"silo-{bad[0] - 1}"] if r == bad[1] and bad[0] <= len(kinds) else [] for r in (1, 2, 3)
    ]
    assert left_out == expected
    assert set(result.models) == {f"silo-{i - 1}" for i in range(1, len(kinds) + 1)}
    for model in models(result).values():
        assert all(np.isfinite(array).all() for array in model.values())
