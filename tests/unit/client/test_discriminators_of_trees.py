"""What discriminators see of rows whose model is trees, and which silos differ by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from coterie import wire
from coterie.client.work.discriminators import (
    DiscriminatorPlan,
    count_hits,
    open_pairs,
    train_stack,
)
from coterie.client.work.session import Session, session_of
from coterie.features.sums.trees.histograms import Rows, of_labels
from coterie.features.sums.trees.seen import PARTS, Seen
from coterie.features.sums.trees.together import edges_of
from coterie.wire import Model, encode_arrays
from tests import kit
from tests.kit import context
from tests.tables import site, written

COLUMNS, NUM_ROWS = 3, 300
TASK = """
kind = "table"
name = "bench"
numeric = ["x0", "x1", "x2"]
network = "trees-4x2"
"""
TARGETS = {
    "classes": 'target = "y"\nclasses = ["no", "yes"]\n',
    "numbers": 'target = {kind = "number", columns = ["y"]}\n',
}
Node = dict[str, Any]


def seen(*tables: Any) -> Seen:
    """Return the bins that silos with these rows agree on."""
    rows = [Rows(x, np.zeros((len(x), 1)), of_labels) for x in tables]
    edges = edges_of(rows, tables[0].shape[1], bins=64)
    return Seen(edges, np.zeros(1, np.float32))


def test_rows_of_any_scale_with_missing_values_are_finite_and_alike_at_all_silos() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 2)).astype(np.float32)
    x[::7, 0] = np.nan
    bins = seen(x, x + 1)
    found = bins.features(x)
    assert found.shape == (500, 2 * PARTS) and np.isfinite(found).all()
    scaled = found / (PARTS / 2) ** 0.5
    first = scaled[:, :PARTS]
    assert (first[::7] == [*[0] * (PARTS - 1), 1]).all() and (scaled[:, -1] == 0).all()
    parts = (first[np.isfinite(x[:, 0]), :-1] > 0).sum(axis=1)
    assert (np.diff(parts[np.argsort(x[np.isfinite(x[:, 0]), 0])]) >= 0).all()
    assert len(set(parts.tolist())) == PARTS, "all parts of a column differ"
    huge = seen(1e30 * x, 1e30 * (x + 1))
    assert (huge.features(1e30 * x) != found).mean() < 0.01, "but for the last bits of edges"
    assert bins.features(np.full((1, 2), np.nan, np.float32)).tolist()[0][PARTS - 1] > 0


def test_real_targets_are_classes_by_the_distance_from_the_constant_answer() -> None:
    bins = Seen((), np.array([1e6], np.float32))
    y = 1e6 + np.array([[-9], [-1], [1], [9]], np.float32)
    assert bins.classes(y).tolist() == [0, 1, 2, 3]
    assert bins.classes(y[2:]).tolist() == [2, 3], "another level shows"
    assert bins.classes(np.full((2, 1), 1e6, np.float32)).tolist() == [1, 1]


def nodes(folder: Path, kinds: str, target: str = "classes") -> list[Node]:
    """Return silos of these kinds: ``b`` has another relation, ``c`` another level of targets."""
    found = []
    file = written(folder / "bench.toml", TASK + TARGETS[target])
    for number, kind in enumerate(kinds):
        draw = np.random.default_rng(number)
        x = draw.normal(2000, 40, size=(NUM_ROWS, COLUMNS)).astype(np.float32)
        z = np.abs(x[:, 0] - 2000) / 40 - 0.8
        z = (-z if kind == "b" else z) + 0.1 * draw.normal(size=NUM_ROWS) + 2 * (kind == "c")
        y = np.where(z > 0, "yes", "no") if target == "classes" else 1e6 * (z + 5)
        x[draw.random(x.shape) < 0.1] = np.nan
        found.append(site(file, f"s{number}", x, y=y))
    return found


def apart(one: Session, other: Session) -> float:
    """Train a discriminator of two silos in eight rounds, and return their distance."""
    parts = [session.data.train for session in (one, other)]
    rows = [part.x.numpy() for part in parts]  # type: ignore[union-attr]
    y = np.concatenate([part.y.numpy() for part in parts])  # type: ignore[union-attr]
    bins = Seen(seen(*rows).edges, y.reshape(len(y), -1).mean(axis=0).astype(np.float32))
    stack: Model | None = None
    options: dict[str, Any] = {"samples": 500, "seed": 0, "seen": bins}
    for number in range(9):
        trained, rate = [], 0.0
        for session, label in ((one, 1), (other, 0)):
            pairs = open_pairs(session, stack, [label], **options)
            assert torch.isfinite(pairs.pool.x).all()
            hits = count_hits(pairs)
            rate += hits["hits"].sum() / hits["counts"].sum()
            train_stack(pairs, DiscriminatorPlan(20, 32, 0.01), seed=number)
            trained.append(pairs.arrays())
        stack = {name: (trained[0][name] + trained[1][name]) / 2 for name in trained[0]}
    return rate - 1


@pytest.mark.parametrize("target", ["classes", "numbers"])
def test_silos_with_another_relation_or_level_are_far_apart_and_others_are_not(
    target: str, tmp_path: Path
) -> None:
    """Neither a line nor a mean tells these relations apart."""
    silos = [session_of(context(node)) for node in nodes(tmp_path, "aabc", target)]
    first, alike, opposite, level = silos
    assert abs(apart(first, alike)) < 0.15
    assert apart(first, opposite) > 0.4
    assert apart(first, level) > 0.4


BINS: dict[str, Any] = {
    "edges": np.array([1.0, 2.0, 3.0], np.float32),
    "sizes": np.array([1, 2, 0]),
    "base": np.zeros(1, np.float32),
}


def ask(node: Node, bins: Model | None) -> Message:
    records = {} if bins is None else {wire.BINS: encode_arrays(bins, packed=True)}
    entries: dict[str, Any] = {"task": "bench", "seed": 0, "server_round": 1, "purpose": "pairs-1"}
    entries |= {"pair_labels": "1", "steps": 2, "lr": 0.01}
    return kit.ask(wire.TRAIN_DISCRIMINATOR, node, model={}, records=records, **entries)


def test_a_silo_answers_in_the_bins_that_it_is_sent(tmp_path: Path) -> None:
    (node,) = nodes(tmp_path, "a")
    reply = ask(node, BINS)
    assert not reply.has_error(), reply.error.reason
    trained = wire.decode_arrays(reply.content[wire.DISCRIMINATORS])
    assert trained["by_label.weight"].shape == (1, 2, COLUMNS * PARTS)
    assert np.isfinite(trained["by_label.weight"]).all()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("", None, "need 'bins'"),
        ("edges", None, "'bins' must fit the rows: it lacks 'edges'"),
        ("base", None, "it lacks 'base'"),
        ("base", np.zeros(2, np.float32), "one finite answer per output"),
        ("base", np.zeros(1), "one finite answer per output"),
        ("edges", np.array([1, 3, 2], np.float32), "ascending edges"),
        ("edges", np.array([1, 2, np.nan], np.float32), "edges of each column"),
        ("sizes", np.array([1, 2]), "edges of each column"),
        ("sizes", np.array([1, 1, 0]), "edges of each column"),
        ("sizes", np.array([4, -1, 0]), "edges of each column"),
    ],
)
def test_bins_that_do_not_fit_the_rows_are_refused(
    name: str, value: Any, reason: str, tmp_path: Path
) -> None:
    (node,) = nodes(tmp_path, "a")
    bins = {key: array for key, array in {**BINS, name: value}.items() if array is not None}
    reply = ask(node, bins if name else None)
    assert reply.has_error() and reason in reply.error.reason


def test_a_silo_that_shares_no_models_beside_the_task_s_refuses(tmp_path: Path) -> None:
    (node,) = nodes(tmp_path, "a")
    reply = ask({**node, "auxiliary": False}, BINS)
    assert reply.has_error() and "no model except the task" in reply.error.reason
