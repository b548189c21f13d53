"""Flower's own apps with our strategies, in this process. ``tests/e2e`` has them over gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.strategies.errors import FederationError
from tests.apps import examples
from tests.apps.examples import AVERAGING, BY_HAND, CASES, PYTORCH, Example, check, in_process

pytestmark = examples.needs_apps


LONG = {"auto", "fedgroup", "hcct", "ifca"}
"""Of the app with PyTorch, in `make nightly`: scikit-learn's runs with them."""


@pytest.mark.parametrize(
    ("example", "strategy"),
    [
        pytest.param(
            *case, marks=pytest.mark.nightly if case[0] is PYTORCH and case[1] in LONG else ()
        )
        for case in CASES
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_flowers_apps_find_who_should_train_together(
    example: Example, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(in_process(example, strategy, tmp_path, monkeypatch, groups=BY_HAND), example, strategy)


@pytest.mark.parametrize("strategy", [one for one in AVERAGING if one != "pergroup"])
def test_a_strategy_that_averages_refuses_trees_and_names_the_way(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = Example("xgboost", (), AVERAGING)
    with pytest.raises(FederationError, match=r"array '0' is uint8.*PerGroup\("):
        in_process(averaging, strategy, tmp_path, monkeypatch)
