"""Silos with one class only, or one sample of a class: they take part, and no NaN is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.client.cli.check import check
from coterie.client.home.settings import SiloSettings
from coterie.server.runs.record import read_run
from tests.kit import run
from tests.tables import declaration, table_node, written

TASK = declaration("a", "b", name="ill", network="mlp-64")


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """a is all "no", b has one "yes", which is in its training data; c and d are mixed."""
    task = written(tmp_path / "ill.toml", TASK)
    draw, found = np.random.default_rng(0), []
    for name, yes in (("a", 0), ("b", 1), ("c", 40), ("d", 40)):
        rows = [f"{x},{y},{'yes' if i < yes else 'no'}" for i, (x, y) in enumerate(_pairs(draw))]
        found.append(table_node(task, name, "a,b,ill", rows))
    return found


def _pairs(draw: np.random.Generator) -> list[list[float]]:
    return draw.normal(size=(100, 2)).round(3).tolist()


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fedavg", "balance": "weights"},
        {"strategy": "hcct", "alpha": 20.0, "balance": "sampling"},
        {"strategy": "fedavg", "validation": 0.2, "patience": 2},
    ],
    ids=["weights", "sampling", "validation"],
)
def test_they_take_part_and_the_record_holds_no_nan(
    keys: dict[str, Any], nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"task": "ill", "primary-metric": "auroc"}
    run(tmp_path / "r", nodes, **(settings | keys))
    text = (tmp_path / "r" / "run.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    last = read_run(tmp_path / "r").rounds[-1]
    assert {"c", "d"} <= set(last.errors) and not last.left_out


def test_a_check_warns_of_it(nodes: list[dict[str, Any]]) -> None:
    lines = list(check(SiloSettings.from_node_config(nodes[0], node_id=1)))
    assert any("all training samples have the same class" in line for line in lines)
