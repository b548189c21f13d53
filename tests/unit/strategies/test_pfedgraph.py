"""pFedGraph against a literal version in numpy, smallest groups, and who answers or comes late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import PFedGraph
from coterie.wire import Model
from tests import kit
from tests.conftest import (
    LossyGrid,
    arrays_of,
    assert_equal_models,
    digits_config,
    plain_app,
    plain_nodes,
    plain_trained,
)
from tests.unit.strategies.by_hand import Minimums
from tests.unit.strategies.partition.test_partition_pfedgraph import literal
from tests.unit.strategies.test_baselines import (
    NAMES,
    NODES,
    SIZES,
    assert_models,
    flat,
    mean,
    record,
    run,
    w0,
)


def rows_of(trained: list[Model], sizes: Any, alpha: float) -> list[np.ndarray]:
    """The graph of one round."""
    moved = np.stack([flat(model) - flat(w0()) for model in trained])
    unit = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    return [literal(row, np.asarray(sizes, float), alpha) for row in unit @ unit.T]


@pytest.mark.parametrize("alpha", [0.1, 0.8, 50.0])
def test_every_silo_holds_its_own_mean(alpha: float) -> None:
    models = [w0()] * 5
    for _ in range(4):
        trained = [plain_trained(m, node) for m, node in zip(models, NODES, strict=True)]
        rows = rows_of(trained, SIZES, alpha)
        models = [mean(trained, row) for row in rows]
    result = run(PFedGraph(graph_alpha=alpha))
    assert_models(result, models)
    weights = result.rounds[3].details["weights"]
    for name, row in zip(NAMES, rows, strict=True):
        known = np.array([weights[name].get(other, 0.0) for other in NAMES])
        np.testing.assert_allclose(known, row, atol=1e-5)


def test_silos_are_pulled_to_a_mean_that_they_received_and_not_to_the_first_model() -> None:
    asked: list[tuple[str, Any, Any]] = []

    def note(message: Message, answer: RecordDict) -> RecordDict:
        config = message.content["config"]
        pull, size = config.get(wire.COSINE_LAMBDA), config.get(wire.GROUP_SIZE)  # type: ignore[union-attr]
        asked.append((message.metadata.group_id, pull, size))
        return answer

    run(PFedGraph(graph_lambda=0.3), grid=InProcessGrid(plain_app(note), NODES), rounds=2)
    assert set(asked) == {("1", None, 5), ("2", 0.3, 5)}
    asked.clear()
    run(PFedGraph(graph_lambda=0.0), grid=InProcessGrid(plain_app(note), NODES), rounds=2)
    assert {pull for _, pull, _ in asked} == {None}


def test_an_update_is_in_no_mean_of_fewer_silos_than_it_accepts() -> None:
    """1 and 3, and 2 and 5, are alike. 3 accepts no pair; so 1 and 3 go on alone."""
    strategy = PFedGraph(graph_alpha=0.1, roster=Minimums({3: 3, 5: 2}))
    result = run(strategy)
    for report in result.rounds[:4]:
        weights = report.details["weights"]
        assert {name: set(row) for name, row in weights.items()} == {
            "silo-0": {"silo-0"},
            "silo-1": {"silo-1", "silo-4"},
            "silo-2": {"silo-2"},
            "silo-3": {"silo-3"},
            "silo-4": {"silo-1", "silo-4"},
        }
        assert report.left_out == {}
    alone = w0()
    for _ in range(4):
        alone = plain_trained(alone, NODES[2])
    assert_equal_models(arrays_of(result.models["silo-2"]), alone)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 1e6])
def test_no_mean_is_smaller_than_any_of_its_silos_accepts(alpha: float) -> None:
    minimums = (1, 4, 3, 2, 5)
    result = run(PFedGraph(graph_alpha=alpha, roster=Minimums(dict(enumerate(minimums, 1)))))
    least = dict(zip(NAMES, minimums, strict=True))
    for report in result.rounds[:4]:
        for name, row in report.details["weights"].items():
            assert set(row) == {name} or len(row) >= max(least[other] for other in row)


def test_who_does_not_answer_keeps_its_model_and_is_in_no_mean() -> None:
    grid = LossyGrid(plain_app(), plain_nodes(0, 0, 0))
    lost = sorted(grid.get_node_ids())[2]
    grid.lost = {(lost, 2)}
    result = PFedGraph().start(grid, record(w0()), num_rounds=2, timeout=0.3)
    first = [plain_trained(w0(), node) for node in plain_nodes(0, 0, 0)]
    rows = rows_of(first, [100] * 3, 0.8)
    assert set(result.rounds[1].details["weights"]) == {"silo-0", "silo-1"}
    samples = [node["samples"] for node in plain_nodes(0, 0, 0)]
    assert len(set(samples)) == 1
    for key, array in mean(first, rows[2]).items():
        np.testing.assert_allclose(arrays_of(result.models["silo-2"])[key], array, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["pfedgraph", "apfl"])
def test_silos_with_few_samples_are_better_off_than_alone(strategy: str, tmp_path: Any) -> None:
    """Four silos with 20 digits each for training, of one kind of data."""
    configs = [
        digits_config(name, i, **{"data.test": 150, "data.skip": 170 * i})
        for i, name in enumerate("abcd")
    ]

    def error(strategy: str) -> float:
        keys = {"strategy": strategy, "rounds": 5, "local_epochs": 5, "batch_size": 5}
        return kit.mean_error(kit.run(tmp_path / strategy, configs, **keys))

    assert error(strategy) < 0.8 * error("independent")
